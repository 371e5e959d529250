import itertools

import numpy as np
import pytest

from dscout_jax.data.pipeline import (
    evaluation_batches,
    make_examples,
    pad_batch,
    split_examples,
    training_batches,
)
from dscout_jax.data.responses import Response


def make_responses(count):
    return [
        Response(f"p/{i:03d}", (1, 2, 3), tuple(range(10, 14 + i % 5)), True) for i in range(count)
    ]


@pytest.fixture
def examples():
    return make_examples(make_responses(25), max_length=16)


def take(iterator, count):
    return list(itertools.islice(iterator, count))


def assert_same(left, right):
    assert len(left) == len(right)
    for a, b in zip(left, right, strict=True):
        assert a.keys() == b.keys()
        for name in a:
            np.testing.assert_array_equal(a[name], b[name])


def test_rows_are_cut_at_loops_and_length_dropped_when_short_and_counted():
    looping = tuple(range(10)) * 3  # with n = 4 it repeats from token 10 on
    responses = [
        Response("a", (1, 2), looping, False),
        Response("b", (1, 2), tuple(range(50)), False),
        Response("c", (1, 2), (5,), True),
        Response("d", tuple(range(40)), (5, 6, 7), True),
        Response("e", (1,), (5, 6), True),
    ]
    made = make_examples(responses, max_length=20, loop_ngram=4)
    assert [example.id for example in made] == ["a", "b", "e"]
    assert [example.row for example in made] == [0, 1, 2]
    np.testing.assert_array_equal(made[0].tokens, (1, 2, *range(10)))
    np.testing.assert_array_equal(made[1].tokens, (1, 2, *range(18)))
    assert (made.num_loop_cut, made.num_length_cut, made.num_dropped) == (1, 2, 2)
    assert made.num_response_tokens == 10 + 18 + 2
    assert make_examples(responses, 50, loop_ngram=None).num_loop_cut == 0


def test_rows_do_not_depend_on_the_order_of_the_responses():
    responses = make_responses(9)
    forward, backward = make_examples(responses, 16), make_examples(responses[::-1], 16)
    assert forward.fingerprint() == backward.fingerprint()
    assert forward.fingerprint() != make_examples(responses[1:], 16).fingerprint()


def test_equal_ids_and_an_empty_set_are_refused():
    response = make_responses(1)[0]
    with pytest.raises(ValueError, match="'p/000' occurs twice"):
        make_examples([response, response], 16)
    with pytest.raises(ValueError, match="no training row is left of 1 responses at max_length=4"):
        make_examples([response], 4)


def test_a_batch_is_padded_with_zeros(examples):
    batch = pad_batch(examples[:2], 16, batch_size=3)
    assert batch["tokens"].shape == (3, 16)
    assert all(array.dtype == np.int32 for array in batch.values())
    np.testing.assert_array_equal(batch["tokens"][0, :8], [1, 2, 3, 10, 11, 12, 13, 0])
    np.testing.assert_array_equal(batch["length"], [7, 8, 0])
    np.testing.assert_array_equal(batch["response_start"], [3, 3, 0])
    np.testing.assert_array_equal(batch["row"], [0, 1, -1])


def test_the_split_is_disjoint_complete_and_stable_when_rows_are_added():
    few, many = (make_examples(make_responses(count), 16) for count in (60, 120))
    sides = [split_examples(rows, 0.2) for rows in (few, many)]
    few_ids, many_ids = ([{e.id for e in side} for side in pair] for pair in sides)
    assert not many_ids[0] & many_ids[1]
    assert many_ids[0] | many_ids[1] == {e.id for e in many}
    assert few_ids[0] < many_ids[0]
    assert few_ids[1] < many_ids[1]
    assert 10 <= len(many_ids[1]) <= 40
    assert all(many[e.row].id == e.id for side in sides[1] for e in side)


def test_an_empty_side_of_the_split_is_refused(examples):
    with pytest.raises(ValueError, match="validation side of 25 rows is empty"):
        split_examples(examples, 1e-9)
    with pytest.raises(ValueError, match="validation_fraction=1.5"):
        split_examples(examples, 1.5)


def test_batches_are_deterministic_and_each_epoch_has_every_row_in_a_new_order(examples):
    batches = take(training_batches(examples, 5, seed=3), 10)
    assert_same(batches, take(training_batches(examples, 5, seed=3), 10))
    rows = np.concatenate([batch["row"] for batch in batches])
    assert sorted(rows[:25]) == sorted(rows[25:]) == list(range(25))
    assert list(rows[:25]) != list(rows[25:])
    other = np.concatenate([b["row"] for b in take(training_batches(examples, 5, seed=4), 5)])
    assert list(rows[:25]) != list(other)


def test_resuming_from_a_state_equals_going_on(examples):
    iterator = training_batches(examples, 4, seed=0)
    take(iterator, 5)
    state = iterator.get_state()
    expected = take(iterator, 12)
    resumed = training_batches(examples, 4, seed=0)
    resumed.set_state(state)
    assert_same(take(resumed, 12), expected)


def test_a_process_reads_the_features_of_its_own_rows_only(examples):
    features = {example.id: np.ones((len(example.tokens), 3), np.float32) for example in examples}
    whole = take(training_batches(examples, 4, 0, features=features), 6)
    share = take(training_batches(examples, 4, 0, features=features, held=(1, 2)), 6)
    for one, other in zip(whole, share, strict=True):
        np.testing.assert_array_equal(one["tokens"], other["tokens"])
        assert (one["features"][1:3] == other["features"][1:3]).all()
        assert not other["features"][[0, 3]].any() and one["features"][[0, 3]].any()


def test_bad_batch_sizes_are_refused(examples):
    with pytest.raises(ValueError, match="batch_size=0"):
        training_batches(examples, 0, 0)


def test_evaluation_visits_every_row_once_and_fills_the_last_batch(examples):
    batches = list(evaluation_batches(examples, 4))
    assert all(batch["tokens"].shape == (4, 16) for batch in batches)
    rows = np.concatenate([batch["row"] for batch in batches])
    assert list(rows) == [*range(25), -1, -1, -1]
