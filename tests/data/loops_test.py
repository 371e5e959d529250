import pytest
from hypothesis import given
from hypothesis import strategies as st

from dscout_jax.data.loops import loop_start


def naive_loop_start(ids, n):
    for i in range(len(ids) - n + 1):
        for j in range(i):
            if ids[i : i + n] == ids[j : j + n]:
                return i
    return len(ids)


@pytest.mark.parametrize(
    ("ids", "n", "expected"),
    [
        ([], 2, 0),
        ([1], 2, 1),
        ([5, 6, 7, 5, 6, 8], 2, 3),
        ([5, 6, 7, 5, 8, 6], 2, 6),
        ([1, 1, 1, 1], 2, 1),  # the two occurrences may overlap
        ([9, 1, 2, 3, 1, 2, 3, 1, 2, 3], 3, 4),
        (list(range(20)), 16, 20),
        ([7] * 17, 16, 1),
        ([7] * 16, 16, 16),
    ],
)
def test_loop_start_of_worked_examples(ids, n, expected):
    assert loop_start(ids, n) == expected


@given(st.lists(st.integers(0, 2), max_size=40), st.integers(1, 6))
def test_loop_start_equals_the_naive_definition(ids, n):
    assert loop_start(ids, n) == naive_loop_start(ids, n)


@given(st.lists(st.integers(0, 2), max_size=40), st.integers(1, 6))
def test_a_response_cut_right_after_its_loop_is_found_has_the_same_loop_start(ids, n):
    start = loop_start(ids, n)
    assert loop_start(ids[: start + n], n) == start
    assert loop_start(ids[:start], n) == start


def test_an_ngram_below_one_is_refused():
    with pytest.raises(ValueError, match="n=0"):
        loop_start([1, 2], 0)
