import dataclasses
import math

import numpy as np
import pytest

from dscout_jax.evaluation.statistics import (
    Answer,
    Decoded,
    accepted_length_histogram,
    arithmetic_mean,
    bootstrap,
    geometric_mean,
    summarize,
    walk_prefix,
)


def decoded(cycles, *, loop_start=None, seconds=1.0, prefill=0.5):
    num_tokens = sum(cycles) + 1
    start = num_tokens if loop_start is None else loop_start
    return Decoded(num_tokens, start, tuple(cycles), prefill, seconds)


def answer(prompt_id, cycles, *, loop_start=None, plain_s=1.0, speculative_s=1.0, **rest):
    plain = decoded([1] * sum(cycles), loop_start=loop_start, seconds=plain_s)
    speculative = decoded(cycles, loop_start=loop_start, seconds=speculative_s)
    return Answer(prompt_id, rest.pop("turn", 0), plain, speculative, **rest)


@pytest.mark.parametrize(
    ("prefix", "expected"),
    [
        (10, (3, 9)),  # whole answer: tokens 1-9 in three cycles
        (99, (3, 9)),
        (5, (2, 4)),  # the second cycle emits tokens 4-5; only token 4 lies in the prefix
        (4, (1, 3)),  # ends exactly where a cycle ends
        (2, (1, 1)),
        (1, (0, 0)),  # only the prefill's token
        (0, (0, 0)),
    ],
)
def test_a_prefix_counts_the_cycles_that_begin_in_it(prefix, expected):
    assert walk_prefix([3, 2, 4], prefix) == expected


def test_pooled_counts_tokens_and_macro_counts_prompts():
    summary = summarize([answer("a", [4, 4]), answer("b", [1, 1, 1, 1])])
    assert summary.mat_pooled.value == pytest.approx(12 / 6)
    assert summary.mat_macro.value == pytest.approx((4 + 1) / 2)


def test_turns_of_a_prompt_count_as_one_prompt():
    turns = [answer("a", [4], turn=0), answer("a", [1, 1], turn=1), answer("b", [3])]
    summary = summarize(turns)
    assert (summary.num_prompts, summary.num_answers) == (2, 3)
    assert summary.mat_macro.value == pytest.approx((6 / 3 + 3) / 2)


def test_loop_free_figures_stop_where_the_loop_starts():
    # Tokens 1-4 in the cycles 2, 2; the loop from token 5 on is predicted whole.
    looping = answer("a", [2, 2, 8, 8], loop_start=5, plain_s=20.0, speculative_s=8.0)
    summary = summarize([looping])
    assert summary.mat_pooled.value == pytest.approx(20 / 4)
    assert summary.mat_loop_free.value == pytest.approx(4 / 2)
    assert summary.speedup.value == pytest.approx(20 / 8)
    # Loop-free: 2 cycles of 2 s against 4 tokens of 1 s.
    assert summary.speedup_loop_free.value == pytest.approx(4 / 4)
    assert summary.loop_free_share == pytest.approx(4 / 20)


def test_without_a_loop_both_figures_agree():
    summary = summarize([answer("a", [3, 1, 2], plain_s=3.0, speculative_s=2.0)])
    assert summary.mat_pooled == summary.mat_loop_free
    assert summary.speedup == summary.speedup_loop_free


def test_rates_leave_the_prefill_out_and_end_to_end_counts_it():
    one = answer("a", [4, 4], plain_s=8.0, speculative_s=4.0)  # prefill 0.5 s both ways
    summary = summarize([one])
    assert summary.plain_tokens_per_s == pytest.approx(1.0)
    assert summary.speculative_tokens_per_s == pytest.approx(2.0)
    assert summary.speedup_end_to_end.value == pytest.approx(8.5 / 4.5)


def test_near_ties_are_counted_and_other_differences_are_not_identical():
    equal = answer("a", [2])
    tie = answer("b", [2], divergence=1, margin=1e-5, is_near_tie=True)
    wrong = answer("c", [2], divergence=1, margin=0.3)
    fine = summarize([equal, tie])
    assert (fine.identical, fine.near_ties, fine.num_identical) == (True, 1, 1)
    broken = summarize([equal, tie, wrong])
    assert (broken.identical, broken.near_ties, broken.num_identical) == (False, 1, 1)


def test_an_answer_without_a_cycle_counts_in_the_comparison_only():
    summary = summarize([answer("a", [2, 2]), answer("b", [])])
    assert summary.num_answers == 2
    assert summary.mat_macro.value == pytest.approx(2.0)


def test_nothing_to_summarize_is_an_error():
    with pytest.raises(ValueError, match="without any decoding cycle"):
        summarize([answer("a", [])])


def test_the_interval_holds_the_value_and_vanishes_for_equal_prompts():
    rng = np.random.default_rng(0)
    varied = [answer(str(i), rng.integers(1, 8, 20).tolist()) for i in range(12)]
    estimate = summarize(varied).mat_pooled
    assert estimate.low < estimate.value < estimate.high
    equal = summarize([answer(str(i), [2, 3]) for i in range(5)]).mat_pooled
    assert equal.low == equal.value == equal.high


def test_the_bootstrap_interval_of_a_mean_is_near_its_normal_interval():
    values = np.random.default_rng(1).normal(size=400)
    estimate = bootstrap({"x": values}, lambda s: s["x"].mean(-1))
    half = 1.96 * values.std() / math.sqrt(len(values))
    assert (estimate.high - estimate.low) / 2 == pytest.approx(half, rel=0.1)


def test_the_summary_depends_on_the_seed_only():
    seconds = np.random.default_rng(2).uniform(size=12)
    answers = [answer(str(i), [2, 2], speculative_s=s) for i, s in enumerate(seconds)]
    assert summarize(answers, seed=3) == summarize(answers, seed=3)
    assert summarize(answers, seed=3) != summarize(answers, seed=4)


def test_the_histogram_counts_emitted_tokens():
    counts = accepted_length_histogram([answer("a", [1, 4, 4]), answer("b", [2])], 4)
    assert counts.tolist() == [1, 1, 0, 2]


def test_a_cycle_longer_than_the_block_is_an_error():
    with pytest.raises(ValueError, match=r"5 tokens, outside \[1, 4\]"):
        accepted_length_histogram([answer("a", [5])], 4)


def test_means_are_the_named_ones():
    assert arithmetic_mean([1.0, 4.0]) == pytest.approx(2.5)
    assert geometric_mean([1.0, 4.0]) == pytest.approx(2.0)
    with pytest.raises(ValueError, match="above 0"):
        geometric_mean([1.0, 0.0])
    with pytest.raises(ValueError, match="no values"):
        arithmetic_mean([])


def test_cycles_that_do_not_add_up_are_refused():
    with pytest.raises(ValueError, match="emit 3 tokens"):
        Decoded(5, 5, (1, 2), 0.1, 0.1)
    with pytest.raises(ValueError, match="loop_start=9"):
        dataclasses.replace(decoded([1, 2]), loop_start=9)
