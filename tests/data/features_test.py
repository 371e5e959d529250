import itertools

import ml_dtypes
import numpy as np
import pytest

from dscout_jax.data import features as features_module
from dscout_jax.data.features import (
    FeatureCache,
    FeatureWriter,
    feature_settings,
    fill_feature_cache,
    num_bytes,
)
from dscout_jax.data.pipeline import make_examples, training_batches
from dscout_jax.data.responses import Response

WIDTH = 6
SETTINGS = feature_settings("abc", (1, 4), WIDTH)


@pytest.fixture(autouse=True)
def small_shards(monkeypatch):
    monkeypatch.setattr(features_module, "SHARD_ROWS", 4)


def make_rows(count=10, max_length=16):
    answers = [tuple(range(10, 13 + i % 5)) for i in range(count)]
    return make_examples(
        [Response(f"p/{i}", (1, 2), answer, True) for i, answer in enumerate(answers)], max_length
    )


@pytest.fixture
def examples():
    return make_rows()


def toy_features(tokens, length):
    """A running sum, so that a value depends on all tokens before it."""
    del length
    scales = np.arange(1, WIDTH + 1, dtype=np.float32)
    return np.cumsum(tokens, axis=1, dtype=np.float32)[..., None] * scales


def fill(folder, examples, features_fn=toy_features, settings=SETTINGS):
    filling = fill_feature_cache(
        folder, examples, settings, features_fn, batch_size=3, length_multiple=8
    )
    return list(filling)


def require_whole(folder, examples):
    cache = FeatureCache(folder, SETTINGS)
    assert cache.missing(examples) == []
    for example in examples:
        expected = toy_features(example.tokens[None], None)[0].astype(ml_dtypes.bfloat16)
        kept = cache[example.id][: len(example.tokens)]
        assert kept.dtype == ml_dtypes.bfloat16
        np.testing.assert_array_equal(kept, expected[: len(kept)])
        assert len(kept) >= len(example.tokens) - 1


def test_a_cache_holds_the_features_of_every_row_in_bfloat16(tmp_path, examples):
    assert fill(tmp_path, examples) == [6, 2, 0]
    assert len(FeatureCache(tmp_path, SETTINGS)) == 10
    require_whole(tmp_path, examples)


def test_the_announced_size_is_the_size_on_disk(tmp_path):
    rows = make_rows(200)
    fill(tmp_path, rows)
    on_disk = sum(path.stat().st_size for path in tmp_path.glob("*.array_record"))
    overhead = on_disk - num_bytes(rows, SETTINGS)
    num_shards = len(list(tmp_path.glob("*.array_record")))
    assert 0 < overhead < 129 * 1024 * num_shards  # two blocks of 64 KiB each


def test_batches_carry_the_features_of_their_rows(tmp_path, examples):
    fill(tmp_path, examples)
    cache = FeatureCache(tmp_path, SETTINGS)
    for batch in itertools.islice(training_batches(examples, 4, 0, features=cache), 4):
        computed = toy_features(batch["tokens"], None).astype(ml_dtypes.bfloat16)
        valid = np.arange(16)[None, :] < batch["length"][:, None]
        assert batch["features"].dtype == ml_dtypes.bfloat16
        np.testing.assert_array_equal(
            batch["features"], np.where(valid[..., None], computed, 0).astype(ml_dtypes.bfloat16)
        )


def test_only_new_rows_are_computed(tmp_path):
    calls = []

    def counting(tokens, length):
        calls.append(int((length > 0).sum()))
        return toy_features(tokens, length)

    fill(tmp_path, make_rows(5), counting)
    assert sum(calls) == 5
    fill(tmp_path, make_rows(9), counting)
    assert sum(calls) == 9
    # Rows that are cut shorter now are there already.
    assert fill(tmp_path, make_rows(9, max_length=5), counting) == []
    require_whole(tmp_path, make_rows(9, max_length=5))


def test_the_last_token_of_a_row_may_lack_features(tmp_path, examples):
    with FeatureWriter(tmp_path, SETTINGS) as writer:
        for example in examples:
            known = example.tokens[:-1]
            writer.add(example.id, known, toy_features(known[None], None)[0])
    require_whole(tmp_path, examples)
    batch = next(training_batches(examples, 4, 0, features=FeatureCache(tmp_path, SETTINGS)))
    ends = batch["features"][np.arange(4), batch["length"] - 1]
    assert not ends.any()


def test_writing_goes_on_after_an_interruption(tmp_path, examples):
    filling = fill_feature_cache(tmp_path, examples, SETTINGS, toy_features)
    assert next(filling) == 6
    # What a killed writer leaves: an unfinished shard, and one without its side file.
    (tmp_path / "shard-00001.tmp").write_bytes(b"half")
    (tmp_path / "shard-00002.array_record").write_bytes(b"no side file")
    filling.close()
    assert len(FeatureCache(tmp_path, SETTINGS)) == 4
    assert fill(tmp_path, examples) == [2, 0]
    assert fill(tmp_path, examples) == []
    require_whole(tmp_path, examples)
    assert not list(tmp_path.glob("*.tmp"))


def test_a_torn_shard_is_left_out_with_a_warning_and_computed_again(tmp_path, examples, caplog):
    fill(tmp_path, examples)
    shard = tmp_path / "shard-00001.array_record"
    shard.write_bytes(shard.read_bytes()[:-5])
    with caplog.at_level("WARNING"):
        assert len(FeatureCache(tmp_path, SETTINGS).missing(examples)) == 4
    assert "shard-00001.array_record is missing or torn" in caplog.text
    assert fill(tmp_path, examples) == [0]
    require_whole(tmp_path, examples)


def test_a_flipped_bit_is_found_when_the_row_is_read(tmp_path, examples):
    fill(tmp_path, examples)
    shard = tmp_path / "shard-00002.array_record"
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    cache = FeatureCache(tmp_path, SETTINGS)
    with pytest.raises(ValueError, match=r"shard-00002\.array_record is damaged; delete it"):
        for example in examples:
            cache[example.id]


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"target_sha256": "xyz"}, "target_sha256 is 'abc' there and 'xyz' here"),
        ({"tap_ids": [1, 5]}, "tap_ids is"),
    ],
)
def test_a_cache_made_under_other_settings_is_refused(tmp_path, examples, change, names):
    fill(tmp_path, examples)
    other = {**SETTINGS, **change}
    with pytest.raises(ValueError, match=names):
        FeatureCache(tmp_path, other)
    with pytest.raises(ValueError, match=names):
        fill(tmp_path, examples, settings=other)


def test_the_features_of_another_answer_are_refused(tmp_path, examples):
    fill(tmp_path, examples)
    other = make_examples([Response("p/4", (1, 2), (10, 99, 12), True)], 16)
    with pytest.raises(ValueError, match="another answer to 'p/4'"):
        FeatureCache(tmp_path, SETTINGS).missing(other)


def test_a_second_writer_is_refused(tmp_path):
    fill(tmp_path, make_rows(3))
    with FeatureWriter(tmp_path, SETTINGS):
        assert fill(tmp_path, make_rows(3)) == []  # nothing to write
        with pytest.raises(BlockingIOError, match="another process"):
            fill(tmp_path, make_rows(4))


def test_a_missing_cache_and_wrong_feature_shapes_are_refused(tmp_path, examples):
    with pytest.raises(FileNotFoundError, match="no feature cache in"):
        FeatureCache(tmp_path, SETTINGS)
    with pytest.raises(ValueError, match=r"have shape \(5, 5\), not \(5, 6\)"):
        fill(tmp_path, examples, lambda t, n: toy_features(t, n)[..., :5])
    assert not list(tmp_path.glob("*.array_record"))


def test_a_cache_that_does_not_fit_on_the_disk_is_refused_before_writing(tmp_path, examples):
    with pytest.raises(OSError, match=r"needs .* GB more"):
        fill(tmp_path, examples, settings=feature_settings("abc", (1,), 10**15))
    assert not list(tmp_path.glob("shard*"))
