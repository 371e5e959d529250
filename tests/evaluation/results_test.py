import json

import pytest

from dscout_jax.evaluation.benchmarks import Measurement
from dscout_jax.evaluation.results import (
    all_rows,
    best_block_size,
    best_rows,
    mean_rows,
    summarize_all,
    summary_values,
)
from dscout_jax.evaluation.statistics import Answer, Decoded


def measurement(workload, block_size, cycles, seconds, *, loop_start=None):
    """One answer whose plain decoding takes one second a token."""
    num_tokens = sum(cycles) + 1
    loop = num_tokens if loop_start is None else loop_start
    plain = Decoded(num_tokens, loop, (1,) * (num_tokens - 1), 0.0, float(num_tokens - 1))
    speculative = Decoded(num_tokens, loop, tuple(cycles), 0.0, seconds)
    return Measurement(workload, block_size, 5, Answer(f"{workload}/0", 0, plain, speculative), "")


FOUND = [
    measurement("maths", 4, [4, 4], 4.0),  # speedup 2
    measurement("maths", 8, [8], 2.0),  # speedup 4
    measurement("chat", 4, [1, 1, 2], 4.0),  # speedup 1
    # Whole: 8 tokens in 4 s; before the loop 1 token a cycle of 2 s.
    measurement("chat", 8, [1, 7], 4.0, loop_start=2),
]


def test_the_best_block_size_is_judged_by_the_loop_free_speedup():
    summaries = summarize_all(FOUND)
    assert best_block_size(summaries["maths"]) == 8
    assert summaries["chat"][8].speedup.value > summaries["chat"][4].speedup.value
    assert best_block_size(summaries["chat"]) == 4


def test_tables_show_the_best_and_all_block_sizes():
    summaries = summarize_all(FOUND)
    assert [(r["workload"], r["block size"]) for r in best_rows(summaries)] == [
        ("maths", 8),
        ("chat", 4),
    ]
    assert len(all_rows(summaries)) == 4


def test_means_are_taken_over_workloads():
    best, four, eight = mean_rows(summarize_all(FOUND))
    assert best["speedup, arithmetic mean"] == pytest.approx((4 + 1) / 2)
    assert best["speedup, geometric mean"] == pytest.approx(2.0)
    assert (four["block size"], four["speedup, arithmetic mean"]) == ("4", pytest.approx(1.5))
    assert eight["loop-free, arithmetic mean"] == pytest.approx((4 + 0.5) / 2)


def test_a_block_size_that_a_workload_lacks_has_no_mean():
    assert [row["block size"] for row in mean_rows(summarize_all(FOUND[:3]))] == [
        "best of each",
        "4",
    ]


def test_the_summary_holds_the_promised_keys():
    values = json.loads(json.dumps(summary_values(summarize_all(FOUND))))
    assert values["workloads"]["maths"]["block_size"] == 8
    assert values["workloads"]["maths"]["speedup"] == pytest.approx(4.0)
    assert values["workloads"]["maths"]["by_block_size"]["4"]["speedup"] == pytest.approx(2.0)
    assert values["speedup_mean"] == pytest.approx(2.5)
    assert values["speedup_mean_loop_free"] == pytest.approx(2.5)
    assert values["identical"] is True and values["near_ties"] == 0


def test_answers_without_a_cycle_are_left_out():
    empty = measurement("silent", 4, [], 0.0)
    assert list(summarize_all([empty, *FOUND])) == ["maths", "chat"]
    with pytest.raises(ValueError, match="no decoding cycle"):
        summarize_all([empty])
