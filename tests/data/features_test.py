import itertools

import ml_dtypes
import numpy as np
import pytest

from dscout_jax.data import features as features_module
from dscout_jax.data.features import (
    FeatureCache,
    cache_num_bytes,
    feature_settings,
    write_feature_cache,
)
from dscout_jax.data.pipeline import make_examples, training_batches
from dscout_jax.data.responses import Response

WIDTH = 6


@pytest.fixture(autouse=True)
def small_shards(monkeypatch):
    monkeypatch.setattr(features_module, "SHARD_ROWS", 4)


@pytest.fixture
def examples():
    answers = [tuple(range(10, 13 + i % 5)) for i in range(10)]
    return make_examples(
        [Response(f"p/{i}", (1, 2), answer, True) for i, answer in enumerate(answers)], 16
    )


@pytest.fixture
def settings(examples):
    return feature_settings(examples, "abc", (1, 4), WIDTH)


def toy_features(tokens, length):
    """A running sum, so that a value depends on all tokens before it."""
    del length
    scales = np.arange(1, WIDTH + 1, dtype=np.float32)
    return np.cumsum(tokens, axis=1, dtype=np.float32)[..., None] * scales


def write(folder, examples, settings, features_fn=toy_features, **kwargs):
    return list(
        write_feature_cache(
            folder, examples, settings, features_fn, batch_size=3, length_multiple=8, **kwargs
        )
    )


def test_a_cache_holds_the_features_of_every_row_in_bfloat16(tmp_path, examples, settings):
    assert write(tmp_path, examples, settings) == [4, 8, 10]
    cache = FeatureCache(tmp_path, examples, settings, verify=True)
    assert len(cache) == 10
    for example in examples:
        expected = toy_features(example.tokens[None], None)[0].astype(ml_dtypes.bfloat16)
        assert cache[example.row].dtype == ml_dtypes.bfloat16
        np.testing.assert_array_equal(cache[example.row], expected)
    with pytest.raises(IndexError, match=r"row 10 is not in \[0, 10\)"):
        cache[10]


def test_the_announced_size_is_the_size_on_disk(tmp_path, examples, settings):
    write(tmp_path, examples, settings)
    on_disk = sum(path.stat().st_size for path in tmp_path.glob("*.npy"))
    header = 128 * 3  # numpy's, one a shard
    assert on_disk == cache_num_bytes(settings) + header


def test_batches_carry_the_features_of_their_rows(tmp_path, examples, settings):
    write(tmp_path, examples, settings)
    cache = FeatureCache(tmp_path, examples, settings)
    for batch in itertools.islice(training_batches(examples, 4, 0, features=cache), 4):
        computed = toy_features(batch["tokens"], None).astype(ml_dtypes.bfloat16)
        valid = np.arange(16)[None, :] < batch["length"][:, None]
        assert batch["features"].dtype == ml_dtypes.bfloat16
        np.testing.assert_array_equal(
            batch["features"], np.where(valid[..., None], computed, 0).astype(ml_dtypes.bfloat16)
        )


def test_writing_goes_on_after_an_interruption(tmp_path, examples, settings):
    calls = []

    def counting(tokens, length):
        calls.append(len(tokens))
        return toy_features(tokens, length)

    assert next(write_feature_cache(tmp_path, examples, settings, counting, batch_size=4)) == 4
    with pytest.raises(ValueError, match=r"shard-00001\.npy is missing or torn"):
        FeatureCache(tmp_path, examples, settings)
    assert write(tmp_path, examples, settings, counting) == [8, 10]
    assert calls[0] == 4
    assert write(tmp_path, examples, settings, counting) == []
    FeatureCache(tmp_path, examples, settings, verify=True)


def test_a_torn_shard_is_detected_and_written_again(tmp_path, examples, settings):
    write(tmp_path, examples, settings)
    shard = tmp_path / "shard-00001.npy"
    shard.write_bytes(shard.read_bytes()[:-5])
    with pytest.raises(ValueError, match=r"shard-00001\.npy is missing or torn"):
        FeatureCache(tmp_path, examples, settings)
    assert write(tmp_path, examples, settings) == [8]
    FeatureCache(tmp_path, examples, settings, verify=True)


def test_a_flipped_bit_is_found_by_the_checksum(tmp_path, examples, settings):
    write(tmp_path, examples, settings)
    shard = tmp_path / "shard-00002.npy"
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    with pytest.raises(ValueError, match=r"shard-00002\.npy is damaged"):
        FeatureCache(tmp_path, examples, settings, verify=True)


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"target_sha256": "xyz"}, "target_sha256 is 'abc' there and 'xyz' here"),
        ({"tap_ids": [1, 5]}, "tap_ids is"),
        ({"examples_fingerprint": "0"}, "examples_fingerprint is"),
    ],
)
def test_a_cache_made_under_other_settings_is_refused(tmp_path, examples, settings, change, names):
    write(tmp_path, examples, settings)
    other = {**settings, **change}
    with pytest.raises(ValueError, match=names):
        FeatureCache(tmp_path, examples, other)
    with pytest.raises(ValueError, match=names):
        write(tmp_path, examples, other)


def test_a_missing_cache_and_wrong_feature_shapes_are_refused(tmp_path, examples, settings):
    with pytest.raises(FileNotFoundError, match="no feature cache in"):
        FeatureCache(tmp_path, examples, settings)
    with pytest.raises(ValueError, match=r"returned shape \(3, 8, 5\)"):
        write(tmp_path, examples, settings, lambda t, n: toy_features(t, n)[..., :5])
    assert not list(tmp_path.glob("*.npy"))


def test_a_cache_that_does_not_fit_on_the_disk_is_refused_before_writing(tmp_path, examples):
    huge = feature_settings(examples, "abc", (1,), 10**15)
    with pytest.raises(OSError, match=r"needs .* GB more"):
        write(tmp_path, examples, huge)
    assert not list(tmp_path.iterdir())
