import dataclasses

import numpy as np
import pytest
import tiny

from dscout_jax.config.checks import ConfigError
from dscout_jax.data.pipeline import make_examples
from dscout_jax.data.responses import Response
from dscout_jax.data.store import ResponseStore
from dscout_jax.training.inputs import (
    coverage,
    load_responses,
    most_frequent_tokens,
    prepare_inputs,
    sample_rows,
    trim_batch,
)


def make_rows(*answers):
    responses = [Response(f"r{i}", (9, 9), answer, True) for i, answer in enumerate(answers)]
    return make_examples(responses, 16)


def prepare(responses, target=tiny.CONFIG, sha256="0" * 64, **changes):
    return prepare_inputs(
        tiny.make_experiment(**changes),
        target,
        sha256,
        responses,
        compute_features=None,
        say=lambda line: None,
    )


def test_the_draft_vocabulary_holds_the_most_frequent_response_tokens_in_order():
    rows = make_rows((5, 5, 7), (7, 5, 3), (2, 4))
    # 9 stands in prompts only; 2, 3 and 4 occur once each, so the smaller id goes first.
    assert most_frequent_tokens(rows, 3, 12).tolist() == [2, 5, 7]
    assert coverage(rows, np.asarray([5, 7])) == pytest.approx(5 / 8)
    assert len(most_frequent_tokens(rows, 12, 12)) == 12
    with pytest.raises(ConfigError, match="drafter.draft_vocab_size=13 .* at most 12"):
        most_frequent_tokens(rows, 13, 12)


def test_held_out_rows_are_drawn_by_id_so_that_more_data_changes_few():
    rows = make_rows(*[(1, 2, 3)] * 40)
    chosen = {example.id for example in sample_rows(rows, 10, seed=0)}
    assert len(chosen) == 10
    assert chosen != {example.id for example in sample_rows(rows, 10, seed=1)}
    fewer = dataclasses.replace(rows, examples=rows.examples[:30])
    again = {example.id for example in sample_rows(fewer, 10, seed=0)}
    assert chosen & {example.id for example in fewer} <= again


def test_trimming_keeps_whole_rows_and_few_distinct_lengths():
    batch = {
        "tokens": np.arange(40).reshape(2, 20),
        "length": np.asarray([5, 9]),
        "features": np.zeros((2, 20, 3)),
    }
    trimmed = trim_batch(batch, 8)
    assert trimmed["tokens"].shape == (2, 16) and trimmed["features"].shape == (2, 16, 3)
    np.testing.assert_array_equal(trimmed["tokens"], batch["tokens"][:, :16])
    assert trim_batch(batch, 8, at_least=17)["tokens"].shape == (2, 20)


def test_a_token_outside_the_vocabulary_is_refused():
    rows = [*tiny.make_responses(), Response("bad", (1,), (2, 61, 3), True)]
    with pytest.raises(ConfigError, match="data.store='unused' .* token 61, the vocabulary has 61"):
        prepare(rows)


def test_a_store_made_by_another_target_is_refused():
    made = {"file": "a.jsonl", "settings": {"target_sha256": "f" * 64}}
    settings = {"sources": [{"file": "a.jsonl", "settings": None}, made]}
    store = ResponseStore([], settings)
    with pytest.raises(ConfigError, match="those of a.jsonl were made by ffffffffffff"):
        prepare(store)


def test_a_float32_feature_cache_is_refused(tmp_path):
    data = {
        "features": "cached", "feature_cache": str(tmp_path), "feature_dtype": "float32",
    }  # fmt: skip
    with pytest.raises(ConfigError, match="data.feature_dtype='float32' .* use 'bfloat16'"):
        prepare(tiny.make_responses(), data=data)


def test_responses_are_read_from_a_jsonl_file_or_a_store(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"id": "x", "prompt": [1], "response": [2, 3], "stopped": true}\n')
    assert [response.id for response in load_responses(str(path))] == ["x"]
    with pytest.raises(FileNotFoundError, match="no response store in"):
        load_responses(str(tmp_path / "nothing"))
