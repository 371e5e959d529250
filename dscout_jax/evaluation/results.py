"""From measurements to what is reported: the main table, the summary and the pictures."""

import dataclasses
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from dscout_jax.evaluation import plots
from dscout_jax.evaluation.benchmarks import Measurement, as_row
from dscout_jax.evaluation.statistics import (
    Answer,
    Estimate,
    Summary,
    accepted_length_histogram,
    arithmetic_mean,
    geometric_mean,
    summarize,
)
from dscout_jax.evaluation.tables import csv_table, markdown_table
from dscout_jax.files import write_json, write_text

Summaries = Mapping[str, Mapping[int, Summary]]
"""Workload to block size to summary."""


def group_answers(measurements: Sequence[Measurement]) -> dict[str, dict[int, list[Answer]]]:
    """Returns workload to block size to answers, in the order of the measurements."""
    grouped: dict[str, dict[int, list[Answer]]] = {}
    for found in measurements:
        sizes = grouped.setdefault(found.workload, {})
        sizes.setdefault(found.block_size, []).append(found.answer)
    return grouped


def summarize_all(
    measurements: Sequence[Measurement], *, seed: int = 0
) -> dict[str, dict[int, Summary]]:
    """Returns the summary of every workload at every block size.

    A pair without a single decoding cycle (all answers are one token long) is left out.

    Raises:
        ValueError: nothing is left.
    """
    summaries = {}
    for workload, sizes in group_answers(measurements).items():
        found = {
            size: summarize(answers, seed=seed)
            for size, answers in sizes.items()
            if any(answer.speculative.cycles for answer in answers)
        }
        if found:
            summaries[workload] = found
    if not summaries:
        raise ValueError(f"{len(measurements)} measurements hold no decoding cycle")
    return summaries


def best_block_size(sizes: Mapping[int, Summary]) -> int:
    """Returns the block size with the highest loop-free speedup."""
    return max(sizes, key=lambda size: sizes[size].speedup_loop_free.value)


def best_rows(summaries: Summaries) -> list[dict[str, Any]]:
    """Returns one table row a workload, at its best block size."""
    return [
        _table_row(workload, best_block_size(sizes), sizes[best_block_size(sizes)])
        for workload, sizes in summaries.items()
    ]


def all_rows(summaries: Summaries) -> list[dict[str, Any]]:
    """Returns one table row for every workload and block size."""
    return [
        _table_row(workload, size, summary)
        for workload, sizes in summaries.items()
        for size, summary in sizes.items()
    ]


def mean_rows(summaries: Summaries) -> list[dict[str, Any]]:
    """Returns the means of the speedups: each workload at its best size, then each size alone."""
    chosen = [sizes[best_block_size(sizes)] for sizes in summaries.values()]
    rows = [_mean_row("best of each", chosen)]
    for size in sorted({size for sizes in summaries.values() for size in sizes}):
        at_size = [sizes[size] for sizes in summaries.values() if size in sizes]
        if len(at_size) == len(summaries):
            rows.append(_mean_row(str(size), at_size))
    return rows


def summary_values(summaries: Summaries) -> dict[str, Any]:
    """Returns the summary as JSON values; each workload stands at its best block size.

    Figures with an interval come as `<name>` and `<name>_interval` (bootstrap 95 %, over prompts).
    """
    chosen = {workload: sizes[best_block_size(sizes)] for workload, sizes in summaries.items()}
    best = _mean_row("best of each", list(chosen.values()))
    return {
        "workloads": {
            workload: {
                "block_size": best_block_size(sizes),
                **_summary_values(chosen[workload]),
                "by_block_size": {str(size): _summary_values(s) for size, s in sizes.items()},
            }
            for workload, sizes in summaries.items()
        },
        "speedup_mean": best["speedup, arithmetic mean"],
        "speedup_mean_loop_free": best["loop-free, arithmetic mean"],
        "speedup_geometric_mean": best["speedup, geometric mean"],
        "speedup_geometric_mean_loop_free": best["loop-free, geometric mean"],
        "speedup_mean_by_block_size": {
            row["block size"]: {
                "speedup_mean": row["speedup, arithmetic mean"],
                "speedup_mean_loop_free": row["loop-free, arithmetic mean"],
            }
            for row in mean_rows(summaries)[1:]
        },
        "block_size_choice": "highest loop-free speedup on the measured prompts themselves",
        "identical": all(s.identical for sizes in summaries.values() for s in sizes.values()),
        "near_ties": sum(s.near_ties for sizes in summaries.values() for s in sizes.values()),
    }


def write_results(
    directory: pathlib.Path, measurements: Sequence[Measurement], extra: Mapping[str, Any]
) -> dict[str, Any]:
    """Writes summary.json, rows.csv, table.md and two pictures; returns the summary.

    Args:
        directory: an existing folder.
        measurements: at least one with a decoding cycle.
        extra: JSON values that join the summary: settings, seeds, machine and the like.
    """
    summaries = summarize_all(measurements)
    values = {**summary_values(summaries), **extra}
    rows = [as_row(found) for found in measurements]
    flat = [{k: v for k, v in row.items() if k not in ("cycles", "text")} for row in rows]
    tables = [markdown_table(table(summaries)) for table in (best_rows, mean_rows, all_rows)]
    answers = group_answers(measurements)
    histograms, plain, speculative = {}, {}, {}
    for workload, sizes in summaries.items():
        size = best_block_size(sizes)
        name = f"{workload} (block {size})"
        histograms[name] = accepted_length_histogram(answers[workload][size], size)
        plain[name] = sizes[size].plain_tokens_per_s
        speculative[name] = sizes[size].speculative_tokens_per_s
    write_text(directory / "rows.csv", csv_table(flat))
    write_text(directory / "table.md", "\n".join(tables))
    plots.accepted_lengths(histograms, directory / "accepted_lengths.png")
    plots.tokens_per_second(plain, speculative, directory / "tokens_per_second.png")
    write_json(directory / "summary.json", values)
    return values


def _table_row(workload: str, block_size: int, summary: Summary) -> dict[str, Any]:
    ties = f" ({summary.near_ties} near ties)" if summary.near_ties else ""
    return {
        "workload": workload,
        "block size": block_size,
        "MAT pooled": summary.mat_pooled.value,
        "MAT macro": summary.mat_macro.value,
        "MAT loop-free": summary.mat_loop_free,
        "plain tokens/s": summary.plain_tokens_per_s,
        "speculative tokens/s": summary.speculative_tokens_per_s,
        "speedup": summary.speedup.value,
        "speedup loop-free": summary.speedup_loop_free,
        "end to end": summary.speedup_end_to_end.value,
        "identical": ("yes" if summary.identical else "NO") + ties,
    }


def _mean_row(name: str, summaries: Sequence[Summary]) -> dict[str, Any]:
    whole = [summary.speedup.value for summary in summaries]
    free = [summary.speedup_loop_free.value for summary in summaries]
    return {
        "block size": name,
        "speedup, arithmetic mean": arithmetic_mean(whole),
        "speedup, geometric mean": geometric_mean(whole),
        "loop-free, arithmetic mean": arithmetic_mean(free),
        "loop-free, geometric mean": geometric_mean(free),
    }


def _summary_values(summary: Summary) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for field in dataclasses.fields(summary):
        value = getattr(summary, field.name)
        if isinstance(value, Estimate):
            values[field.name] = value.value
            values[f"{field.name}_interval"] = [value.low, value.high]
        else:
            values[field.name] = value
    return values
