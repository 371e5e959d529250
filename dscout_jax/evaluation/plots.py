"""Pictures of results, written as PNG; no display is needed."""

import os
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dscout_jax.evaluation.statistics import Estimate

_PLAIN, _SPECULATIVE = "tab:gray", "tab:blue"


def training_curves(rows: Sequence[dict], path: str | os.PathLike) -> None:
    """Draws loss, per-slot accuracy, MAT and tokens per second against the step.

    Args:
        rows: records of `metrics.jsonl`, in any order; curves without data stay out.
        path: PNG file to write.
    """
    figure = Figure(figsize=(11, 7), layout="constrained")
    loss, accuracy, mat, speed = axes = figure.subplots(2, 2).flatten()
    _curve(loss, rows, "train/loss", label="training", alpha=0.6)
    _curve(loss, rows, "validation/loss", label="held-out rows", marker="o")
    loss.set(ylabel="loss, nats per token", title="Loss")
    _curves_per_slot(accuracy, rows, "validation/accuracy_per_slot")
    accuracy.set(ylabel="top-1 accuracy", ylim=(0, 1), title="Accuracy by slot, held-out rows")
    _curve(mat, rows, "validation/mat_pooled", label="pooled", marker="o")
    _curve(mat, rows, "validation/mat_macro", label="macro", marker="s")
    mat.set(ylabel="tokens per cycle", title="Mean accepted tokens (MAT), held-out rows, replay")
    _curve(speed, rows, "train/tokens_per_s", label="row tokens")
    speed.set(ylabel="tokens per second", title="Training speed")
    for axis in axes:
        axis.set_xlabel("step")
        axis.grid(alpha=0.3)
        if axis.lines:
            # Many slots: a wide legend leaves the curves free.
            axis.legend(fontsize="small", ncols=1 + len(axis.lines) // 4)
    figure.savefig(path, dpi=120)


def _curve(axis: Axes, rows: Sequence[dict], name: str, **style: object) -> None:
    points = sorted((row["step"], row[name]) for row in rows if name in row)
    if points:
        axis.plot(*zip(*points, strict=True), **style)


def _curves_per_slot(axis: Axes, rows: Sequence[dict], name: str) -> None:
    points = sorted((row["step"], row[name]) for row in rows if name in row)
    num_slots = len(points[0][1]) if points else 0
    for slot in range(num_slots):
        color = matplotlib.colormaps["viridis"](slot / max(num_slots - 1, 1))
        steps = [step for step, _ in points]
        axis.plot(
            steps, [values[slot] for _, values in points], color=color, label=f"slot {slot + 1}"
        )


def accepted_lengths(histograms: Mapping[str, np.ndarray], path: str | os.PathLike) -> None:
    """Draws how many tokens a cycle emits, one panel a workload.

    Args:
        histograms: workload to the number of cycles that emitted 1, 2, ..., G tokens, [G].
        path: PNG file to write.
    """
    columns = min(3, len(histograms))
    lines = -(-len(histograms) // columns)
    figure = Figure(figsize=(4 * columns, 3 * lines), layout="constrained")
    panels = figure.subplots(lines, columns, sharey=True, squeeze=False).flatten()
    for panel, (workload, counts) in zip(panels, histograms.items(), strict=False):
        lengths = np.arange(1, len(counts) + 1)
        total = max(counts.sum(), 1)
        panel.bar(lengths, counts / total, color=_SPECULATIVE)
        mean = (counts * lengths).sum() / total
        panel.axvline(mean, color="black", linestyle="--", label=f"mean {mean:.2f}")
        panel.set(
            title=workload,
            xlabel="tokens emitted by a cycle",
            ylabel="share of cycles",
            ylim=(0, 1),
        )
        panel.set_xticks(lengths)
        panel.legend(fontsize="small")
    for panel in panels[len(histograms) :]:
        panel.set_visible(False)
    figure.savefig(path, dpi=120)


def tokens_per_second(
    plain: Mapping[str, float], speculative: Mapping[str, float], path: str | os.PathLike
) -> None:
    """Draws plain beside speculative decoding speed, a pair of bars for each workload.

    Args:
        plain: workload to tokens per second.
        speculative: the same workloads to tokens per second.
        path: PNG file to write.
    """
    places = np.arange(len(plain))
    figure = Figure(figsize=(max(6.0, 1.6 * len(plain)), 4.5), layout="constrained")
    axis = figure.subplots()
    axis.bar(places - 0.2, list(plain.values()), 0.4, label="plain", color=_PLAIN)
    faster = axis.bar(
        places + 0.2,
        [speculative[workload] for workload in plain],
        0.4,
        label="speculative",
        color=_SPECULATIVE,
    )
    axis.bar_label(faster, [f"{speculative[name] / plain[name]:.2f} x" for name in plain])
    axis.set_xticks(places, list(plain), rotation=20, ha="right")
    axis.set(ylabel="tokens per second (decode only)", title="Decoding speed, batch 1")
    axis.margins(y=0.15)
    axis.legend()
    figure.savefig(path, dpi=120)


def ablation_arms(table: Sequence[Mapping[str, Any]], path: str | os.PathLike) -> None:
    """Draws mean MAT by block size and mean speedup of every arm, with 95 % intervals.

    Args:
        table: of `ablation.compare`.
        path: PNG file to write.
    """
    figure = Figure(figsize=(11, 1.5 + 0.42 * len(table)), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    places = np.arange(len(table))[::-1]
    sizes = [name for name in table[0] if name.startswith("MAT block") and "_" not in name]
    for offset, name in zip(np.linspace(0.25, -0.25, len(sizes)), sizes, strict=True):
        _points(left, places + offset, [row[name] for row in table], name.removeprefix("MAT "))
    _points(right, places, [row["speedup"] for row in table], "")
    left.set(xlabel="tokens per cycle", title="MAT, loop-free, mean of the workloads")
    right.set(xlabel="times plain decoding", title="Speedup, each workload at its best block size")
    left.set_yticks(places, [row["arm"] for row in table])
    left.legend(fontsize="small")
    for axis in (left, right):
        axis.grid(axis="x", alpha=0.3)
    figure.savefig(path, dpi=120)


def _points(axis: Axes, places: np.ndarray, estimates: Sequence[Estimate], label: str) -> None:
    values = np.array([e.value for e in estimates])
    spread = [values - [e.low for e in estimates], [e.high for e in estimates] - values]
    axis.errorbar(values, places, xerr=np.abs(spread), fmt="o", capsize=2, label=label)
