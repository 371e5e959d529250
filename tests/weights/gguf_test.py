import dataclasses

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dscout_jax.config.models import TargetConfig
from dscout_jax.weights.download import WeightsError
from dscout_jax.weights.gguf import (
    open_gguf,
    read_target_config,
    read_tensors,
    read_vocabulary,
    target_layout,
    undo_rope_permutation,
)

CFG = TargetConfig(
    vocab_size=5,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    rope_theta=50000.0,
    rms_norm_eps=1e-5,
    tie_word_embeddings=True,
    qk_norm=False,
    max_position_embeddings=128,
)


def apply_rope_permutation(weight, num_heads):
    """What the converter to GGUF does, by its definition: row 2i <- i, row 2i + 1 <- i + H/2."""
    head_dim = len(weight) // num_heads
    order = [i // 2 + (i % 2) * (head_dim // 2) for i in range(head_dim)]
    return np.concatenate([weight[h * head_dim :][:head_dim][order] for h in range(num_heads)])


def make_tensors(cfg, seed=0):
    """Random tensors in the file's layout, by GGUF name, and the tree that they should become."""
    rng = np.random.default_rng(seed)
    stored, wanted = {}, {}
    for name, (path, shape) in target_layout(cfg).items():
        values = rng.normal(size=shape).astype(np.float32)
        wanted[path] = values
        if "attn_q" in name:
            values = apply_rope_permutation(values, cfg.num_attention_heads)
        if "attn_k" in name:
            values = apply_rope_permutation(values, cfg.num_key_value_heads)
        stored[name] = np.ascontiguousarray(values)
    return stored, wanted


def write_gguf(path, cfg, tensors, *, architecture="llama", quantized=(), rope_scaling=None):
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(cfg.num_hidden_layers)
    writer.add_context_length(cfg.max_position_embeddings)
    writer.add_embedding_length(cfg.hidden_size)
    writer.add_feed_forward_length(cfg.intermediate_size)
    writer.add_head_count(cfg.num_attention_heads)
    writer.add_head_count_kv(cfg.num_key_value_heads)
    writer.add_rope_freq_base(cfg.rope_theta)
    writer.add_layer_norm_rms_eps(cfg.rms_norm_eps)
    if rope_scaling:
        writer.add_rope_scaling_type(rope_scaling)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(["<|end|>", "a", "b", "ab", "Ġ"][: cfg.vocab_size])
    writer.add_token_types([3, 1, 1, 1, 1][: cfg.vocab_size])
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(0)
    for name, values in tensors.items():
        if name in quantized:
            kind = gguf.GGMLQuantizationType.Q4_1
            writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def leaf(params, path):
    for key in path:
        params = params[key]
    return params


def count_leaves(params):
    return sum(count_leaves(v) for v in params.values()) if isinstance(params, dict) else 1


def rope_neighbours(x, angles):
    """[H] rotated in pairs (0, 1), (2, 3), ...; angles [H/2]."""
    even, odd = x[0::2], x[1::2]
    out = np.empty_like(x)
    out[0::2] = even * np.cos(angles) - odd * np.sin(angles)
    out[1::2] = odd * np.cos(angles) + even * np.sin(angles)
    return out


def rope_halves(x, angles):
    """[H] rotated in pairs (0, H/2), (1, H/2 + 1), ...; angles [H/2]."""
    first, second = np.split(x, 2)
    cos, sin = np.cos(angles), np.sin(angles)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin])


@settings(max_examples=30, deadline=None, derandomize=True)
@given(num_heads=st.integers(1, 4), half=st.integers(1, 6), seed=st.integers(0, 2**16))
def test_half_rotation_of_our_rows_scores_as_neighbour_rotation_of_the_files(num_heads, half, seed):
    rng = np.random.default_rng(seed)
    head_dim, width = 2 * half, 5
    file_q, file_k = rng.normal(size=(2, num_heads * head_dim, width))
    x, y = rng.normal(size=(2, width))
    at_q, at_k = rng.uniform(0, 6, size=(2, half))
    our_q = undo_rope_permutation(file_q, num_heads)
    our_k = undo_rope_permutation(file_k, num_heads)
    for h in range(num_heads):
        rows = slice(h * head_dim, (h + 1) * head_dim)
        theirs = rope_neighbours(file_q[rows] @ x, at_q) @ rope_neighbours(file_k[rows] @ y, at_k)
        ours = rope_halves(our_q[rows] @ x, at_q) @ rope_halves(our_k[rows] @ y, at_k)
        np.testing.assert_allclose(ours, theirs, rtol=1e-10, atol=1e-10)


def test_undoing_inverts_the_converters_permutation():
    weight = np.arange(24 * 3.0).reshape(24, 3)
    for heads in (1, 2, 3):
        np.testing.assert_array_equal(
            undo_rope_permutation(apply_rope_permutation(weight, heads), heads), weight
        )


@pytest.mark.parametrize("tied", [True, False])
def test_every_tensor_lands_in_its_place_transposed_and_unpermuted(tmp_path, tied):
    cfg = dataclasses.replace(CFG, tie_word_embeddings=tied)
    stored, wanted = make_tensors(cfg)
    reader = open_gguf(write_gguf(tmp_path / "m.gguf", cfg, stored))
    assert read_target_config(reader) == cfg
    params = read_tensors(reader, cfg)
    assert count_leaves(params) == len(wanted) == len(stored)
    for path, values in wanted.items():
        assert leaf(params, path).dtype == np.float32
        assert leaf(params, path).flags.c_contiguous
        np.testing.assert_array_equal(leaf(params, path), values)


def test_quantised_tensors_come_back_within_one_step(tmp_path):
    stored, wanted = make_tensors(CFG)
    name = "blk.1.attn_q.weight"
    reader = open_gguf(write_gguf(tmp_path / "m.gguf", CFG, stored, quantized=[name]))
    path, _ = target_layout(CFG)[name]
    values = leaf(read_tensors(reader, CFG), path)
    assert values.dtype == np.float32
    # Q4_1 has 15 steps over a block's range, here below 8.
    np.testing.assert_allclose(values, wanted[path], atol=8 / 15)
    assert not np.array_equal(values, wanted[path])


def test_vocabulary_is_what_the_file_says(tmp_path):
    stored, _ = make_tensors(CFG)
    vocabulary = read_vocabulary(open_gguf(write_gguf(tmp_path / "m.gguf", CFG, stored)))
    assert vocabulary.tokens == ("<|end|>", "a", "b", "ab", "Ġ")
    assert vocabulary.token_types == (3, 1, 1, 1, 1)
    assert vocabulary.merges == ("a b",)
    assert (vocabulary.model, vocabulary.pre) == ("gpt2", "smollm")
    assert (vocabulary.eos_id, vocabulary.bos_id, vocabulary.chat_template) == (0, None, None)


def test_missing_and_unused_tensors_are_named(tmp_path):
    stored, _ = make_tensors(CFG)
    stored["blk.0.surprise.weight"] = stored.pop("blk.1.ffn_up.weight")
    reader = open_gguf(write_gguf(tmp_path / "m.gguf", CFG, stored))
    with pytest.raises(WeightsError, match="missing .*blk.1.ffn_up.*unused .*blk.0.surprise"):
        read_tensors(reader, CFG)


def test_a_tensor_that_nothing_uses_is_an_error(tmp_path):
    stored, _ = make_tensors(CFG)
    stored["rope_freqs.weight"] = np.ones(4, np.float32)
    reader = open_gguf(write_gguf(tmp_path / "m.gguf", CFG, stored))
    with pytest.raises(WeightsError, match=r"missing \[\], unused \['rope_freqs.weight'\]"):
        read_tensors(reader, CFG)


def test_a_tensor_of_another_shape_is_named(tmp_path):
    stored, _ = make_tensors(CFG)
    stored["blk.0.attn_k.weight"] = np.zeros((18, 32), np.float32)
    reader = open_gguf(write_gguf(tmp_path / "m.gguf", CFG, stored))
    with pytest.raises(WeightsError, match=r"blk.0.attn_k.weight has shape \(18, 32\)"):
        read_tensors(reader, CFG)


def test_another_architecture_is_refused(tmp_path):
    stored, _ = make_tensors(CFG)
    reader = open_gguf(write_gguf(tmp_path / "m.gguf", CFG, stored, architecture="gemma3"))
    with pytest.raises(WeightsError, match="'gemma3' is not supported; allowed: .*llama"):
        read_target_config(reader)


def test_rope_scaling_is_refused_not_ignored(tmp_path):
    stored, _ = make_tensors(CFG)
    scaling = gguf.RopeScalingType.LINEAR
    reader = open_gguf(write_gguf(tmp_path / "m.gguf", CFG, stored, rope_scaling=scaling))
    with pytest.raises(WeightsError, match="rope scaling 'linear' is not supported"):
        read_target_config(reader)


@pytest.mark.parametrize("keep", [0, 3, 40, 400, 0.5, -1])
def test_a_file_that_ends_early_is_an_error(tmp_path, keep):
    stored, _ = make_tensors(CFG)
    whole = write_gguf(tmp_path / "m.gguf", CFG, stored).read_bytes()
    end = int(len(whole) * keep) if isinstance(keep, float) else keep
    (tmp_path / "cut.gguf").write_bytes(whole[:end])
    with pytest.raises(WeightsError, match="no complete GGUF file") as error:
        open_gguf(tmp_path / "cut.gguf")
    assert "\n" not in str(error.value)


def test_a_missing_file_is_an_error(tmp_path):
    with pytest.raises(WeightsError, match="cannot read .*absent.gguf"):
        open_gguf(tmp_path / "absent.gguf")
