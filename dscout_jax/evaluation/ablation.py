"""Arms of an ablation side by side: MAT by replay, speed by latency, intervals over prompts.

Speedup of a variant on a workload = MAT * seconds of a plain step / seconds of a cycle. Figures are
loop-free where nothing else is said; those of the whole output are called so.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dscout_jax.evaluation.recorded import Rows
from dscout_jax.evaluation.statistics import BOOTSTRAP_SAMPLES, Estimate

HELD_OUT = "held_out"  # workload of rows that arms may be chosen by; in no mean of the benchmarks

Arms = Mapping[str, Sequence[Rows]]


@dataclasses.dataclass(frozen=True)
class Latency:
    """Times that speed follows from.

    Attributes:
        seconds: medians: `plain` of a plain step, each variant's name of a cycle.
        samples: the rounds that they are medians of.
    """

    seconds: Mapping[str, float]
    samples: Sequence[Mapping[str, float]]

    def speedup_per_token(self, variant: str) -> float:
        """Speedup that one accepted token brings: plain step over cycle."""
        return self.seconds["plain"] / self.seconds[variant]


@dataclasses.dataclass(frozen=True)
class Sampled:
    """MAT of one arm: as measured (index 0) and in bootstrap resamples of the prompts.

    Prompts are resampled within each workload, the same for all arms, so arms may be compared
    sample by sample.

    Attributes:
        mat: workload to variant to [1 + samples].
    """

    mat: Mapping[str, Mapping[str, np.ndarray]]

    @property
    def variants(self) -> list[str]:
        """Names of the variants that were measured."""
        return list(next(iter(self.mat.values())))

    def mean(self, variant: str) -> np.ndarray:
        """MAT averaged over the workloads, [1 + samples]."""
        return np.mean([by_variant[variant] for by_variant in self.mat.values()], axis=0)

    def means(self) -> dict[str, float]:
        """MAT of each variant averaged over the workloads, as measured."""
        return {name: float(self.mean(name)[0]) for name in self.variants}

    def speedup(self, latency: Latency, variants: Sequence[str]) -> np.ndarray:
        """Mean speedup with each workload at the best of some variants, [1 + samples]."""
        speeds = []
        for workload, by_variant in self.mat.items():
            best = self.best(workload, latency, variants)
            speeds.append(by_variant[best] * latency.speedup_per_token(best))
        return np.mean(speeds, axis=0)

    def best(self, workload: str, latency: Latency, variants: Sequence[str]) -> str:
        """The variant that is fastest on a workload as measured."""
        return max(
            variants,
            key=lambda name: self.mat[workload][name][0] * latency.speedup_per_token(name),
        )


def sample_arm(runs: Sequence[Rows], *, seed: int = 0, loop_free: bool = True) -> Sampled:
    """Returns the MAT of an arm with its bootstrap resamples.

    Args:
        runs: rows by variant, one entry a training seed; a prompt's rows are drawn together.
        seed: of the resampling; equal seeds draw the same prompts for every arm.
        loop_free: count each answer only up to its first repeated 16-gram.
    """
    tokens, cycles = ("free_tokens", "free_cycles") if loop_free else ("tokens", "cycles")
    mat: dict[str, dict[str, np.ndarray]] = {}
    for variant in runs[0]:
        sums: dict[str, dict[str, np.ndarray]] = {}
        for row in (row for rows in runs for row in rows[variant]):
            prompts = sums.setdefault(row.workload, {})
            prompts.setdefault(row.prompt_id, np.zeros(2))
            prompts[row.prompt_id] += (getattr(row, tokens), getattr(row, cycles))
        for index, (workload, prompts) in enumerate(sorted(sums.items())):
            totals = np.array([prompts[prompt_id] for prompt_id in sorted(prompts)])  # [P, 2]
            generator = np.random.default_rng((seed, index))
            chosen = generator.integers(len(totals), size=(BOOTSTRAP_SAMPLES, len(totals)))
            whole = np.concatenate([totals.sum(0)[None], totals[chosen].sum(1)])
            mat.setdefault(workload, {})[variant] = whole[:, 0] / np.maximum(whole[:, 1], 1)
    return Sampled(mat)


def split_held_out(runs: Sequence[Rows]) -> tuple[list[Rows], list[Rows]]:
    """Returns the runs with the rows of the benchmarks only, and with the held-out rows only."""
    parts: tuple[list[Rows], list[Rows]] = ([], [])
    for part, wanted in zip(parts, (False, True), strict=True):
        for rows in runs:
            part.append(
                {
                    variant: [row for row in found if (row.workload == HELD_OUT) == wanted]
                    for variant, found in rows.items()
                }
            )
    return parts


def estimate(samples: np.ndarray) -> Estimate:
    """Returns the measured value (index 0) with the 95 % interval of the others."""
    low, high = np.percentile(samples[1:], [2.5, 97.5])
    return Estimate(float(samples[0]), float(low), float(high))


def compare(arms: Arms, latency: Latency) -> dict[str, Any]:
    """Returns rows for people, rows for spreadsheets, and figures of all arms.

    Args:
        arms: arm to its runs, one a training seed, each variant to rows. Variants named `block<G>`
            are whole drafters, every arm has them; others are cuts, which some arms have.
        latency: times of all variants.

    Returns:
        `table`, one row an arm; `cuts`, one row an arm that has some; `rows`, one for each arm,
        workload and variant; `summary`, with `mat` and `speedup` of every arm by workload and block
        size, means, their values for each training seed alone, and comparisons.
        `..._whole_output` counts loops too.
    """
    split = {arm: split_held_out(runs) for arm, runs in arms.items()}
    arms = {arm: benchmarks for arm, (benchmarks, _) in split.items()}
    held_out = {arm: sample_arm(rows) for arm, (_, rows) in split.items()}
    loops = {arm: sample_arm(runs, loop_free=False) for arm, runs in arms.items()}
    sampled = {arm: sample_arm(runs) for arm, runs in arms.items()}
    by_seed = {arm: [sample_arm([rows]) for rows in runs] for arm, runs in arms.items()}
    first = next(iter(sampled.values()))
    whole = [name for name in first.variants if "_" not in name]
    base = sampled.get("dflash", first)
    base_speed = base.speedup(latency, whole)
    table, cuts, rows, summary = [], [], [], {}
    for arm, found in sampled.items():
        speed, speed_with_loops = (f.speedup(latency, whole) for f in (found, loops[arm]))
        held_out_speed = None
        if held_out[arm].mat:
            held_out_speed = estimate(held_out[arm].speedup(latency, whole))
        table.append(
            {
                "arm": arm,
                **{f"MAT {name}": estimate(found.mean(name)) for name in whole},
                "speedup": estimate(speed),
                "over dflash": estimate(speed / base_speed),
                "speedup, whole output": estimate(speed_with_loops),
                "held-out speedup": held_out_speed,
            }
        )
        if len(found.variants) > len(whole):
            cut = [name for name in found.variants if name not in whole]
            cuts.append({"arm": arm} | {f"MAT {name}": estimate(found.mean(name)) for name in cut})
        mine = _rows_of(arm, found, loops[arm], latency)
        rows += mine
        summary[arm] = {
            "mat": _nested(mine, "mat"),
            "speedup": _nested(mine, "speedup"),
            "mat_mean": found.means(),
            "mat_mean_whole_output": loops[arm].means(),
            "speedup_mean": float(speed[0]),
            "speedup_mean_by_seed": [float(one.speedup(latency, whole)[0]) for one in by_seed[arm]],
            "speedup_mean_whole_output": float(speed_with_loops[0]),
            "best_variant": {
                workload: found.best(workload, latency, whole) for workload in found.mat
            },
        }
        if held_out_speed is not None:
            summary[arm] |= {
                "held_out_mat": held_out[arm].means(),
                "held_out_speedup": held_out_speed.value,
            }
    found = {"results": summary} | comparisons(sampled, latency, whole)
    if "dscout_over_dflash_speedup" in found:
        found["dscout_over_dflash_speedup_by_seed"] = [
            ours / theirs
            for ours, theirs in zip(
                *(summary[arm]["speedup_mean_by_seed"] for arm in ("dscout", "dflash")), strict=True
            )
        ]
    return {"table": table, "cuts": cuts, "rows": rows, "summary": found}


def _rows_of(
    arm: str, found: Sampled, loops: Sampled, latency: Latency
) -> list[dict[str, float | str]]:
    """Returns a row for each workload and variant of an arm."""
    rows = []
    for workload, by_variant in found.mat.items():
        for name, samples in by_variant.items():
            mat, factor = estimate(samples), latency.speedup_per_token(name)
            rows.append(
                {
                    "arm": arm, "workload": workload, "variant": name, "mat": mat.value,
                    "mat_low": mat.low, "mat_high": mat.high, "speedup": mat.value * factor,
                    "mat_whole_output": float(loops.mat[workload][name][0]),
                }
            )  # fmt: skip
    return rows


def _nested(rows: Sequence[Mapping[str, Any]], value: str) -> dict[str, dict[str, float]]:
    """Returns workload to variant to a value of the rows."""
    nested: dict[str, dict[str, float]] = {}
    for row in rows:
        nested.setdefault(row["workload"], {})[row["variant"]] = row[value]
    return nested


def comparisons(
    sampled: Mapping[str, Sampled], latency: Latency, whole: Sequence[str]
) -> dict[str, Any]:
    """Returns the ratios that the project's claims are about, where their arms were trained."""
    found: dict[str, Any] = {}

    def record(name: str, samples: np.ndarray) -> None:
        value = estimate(samples)
        found[name] = value.value
        found[f"{name}_interval"] = [value.low, value.high]

    if {"dscout", "dflash"} <= sampled.keys():
        speeds = [sampled[arm].speedup(latency, whole) for arm in ("dscout", "dflash")]
        record("dscout_over_dflash_speedup", speeds[0] / speeds[1])
        found["dscout_over_dflash_mat"] = {
            name: float(sampled["dscout"].mean(name)[0] / sampled["dflash"].mean(name)[0])
            for name in whole
        }
    if {"elastic", "dscout"} <= sampled.keys():
        ratios = [sampled["elastic"].mean(name) / sampled["dscout"].mean(name) for name in whole]
        record("elastic_over_dedicated_mat", np.mean(ratios, axis=0))
        found["elastic_over_dscout_cut_mat"] = {
            name: float(sampled["elastic"].mean(name)[0] / sampled["dscout"].mean(name)[0])
            for name in sampled["elastic"].variants
            if name not in whole
        }
    return found
