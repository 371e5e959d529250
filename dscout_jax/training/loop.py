"""The training loop: from an experiment's configuration to a drafter on disk."""

import dataclasses
import os
import pathlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from dscout_jax.config.checks import ConfigError, to_dict
from dscout_jax.config.experiment import ExperimentConfig
from dscout_jax.data.responses import Response
from dscout_jax.files import require_writable, write_json
from dscout_jax.training.checkpoint import Checkpointer, changed_fields
from dscout_jax.training.hardware import CompileClock, memory_gib, peak_flops
from dscout_jax.training.metrics import MetricWriter, Throughput
from dscout_jax.training.processes import is_first, local_copy
from dscout_jax.training.progress import Progress
from dscout_jax.training.provenance import describe_run
from dscout_jax.training.setup import Setup, prepare
from dscout_jax.training.state import TrainState
from dscout_jax.training.validation import effective_share, per_slot, validate
from dscout_jax.weights.dflash import export_drafter
from dscout_jax.weights.targets import LoadedTarget

# What may differ between a checkpoint and the run that continues it.
FREE_FIELDS = (
    "train.num_steps",
    "train.log_every",
    "train.eval_every",
    "train.eval_rows",
    "train.checkpoint_every",
    "train.keep_checkpoints",
    "drafter.init",
    "data.store",
    "data.features",
    "data.feature_cache",
    "train.mode",
    "train.mesh",
    "train.accumulate",
    "train.remat",
    "train.max_skipped",
    "objective.chunk_anchors",
)


class TrainingError(RuntimeError):
    """Training cannot go on; the message is one line for the user."""


@dataclasses.dataclass(frozen=True)
class TrainResult:
    """How a run ended.

    Attributes:
        step: updates done.
        finished: whether that is all of them; False after a stop request.
        state: the last train state.
    """

    step: int
    finished: bool
    state: TrainState


def train(
    config: ExperimentConfig,
    workdir: str | os.PathLike,
    target: LoadedTarget,
    responses: Sequence[Response],
    *,
    stop: Callable[[], bool] = lambda: False,
) -> TrainResult:
    """Trains a drafter, continuing from the newest checkpoint in `workdir` if there is one.

    A finished run leaves the checkpoint with the best held-out MAT as `workdir/drafter`.

    Args:
        config: the experiment.
        workdir: where everything is written.
        target: the frozen target.
        responses: its greedy answers.
        stop: asked after each update; True saves and ends the run.

    Raises:
        ValueError: workdir, data or configuration cannot be used, or `workdir` holds checkpoints of
            an experiment that differs in a way that matters.
        TrainingError: the loss is not finite.
    """
    directory = require_writable(workdir)
    kept = config.train.keep_checkpoints
    with Checkpointer(directory / "checkpoints", max_to_keep=kept) as checkpoints:
        start = checkpoints.latest or 0
        with Progress(config.train.num_steps, start=start) as progress:
            setup = prepare(
                config, target, responses, say=progress.say, stop=stop, begins=not start
            )
            _refuse_other_experiment(checkpoints, setup, directory)
            if is_first():
                write_json(directory / "config.json", to_dict(config))
                write_json(directory / "run.json", describe_run() | {"identity": setup.identity()})
            with MetricWriter(directory, resume_step=start) as writer, CompileClock() as clock:
                log = _Log(setup, writer, progress, checkpoints, clock)
                result = _run(setup, checkpoints, writer, progress, stop, log)
            if result.finished:
                _export(setup, checkpoints, result, directory / "drafter", progress)
    return result


def _run(
    setup: Setup,
    checkpoints: Checkpointer,
    writer: MetricWriter,
    progress: Progress,
    stop: Callable[[], bool],
    log: "_Log",
) -> TrainResult:
    cadence = setup.config.train
    batches = setup.training_iterator()
    restored = checkpoints.restore(setup.abstract_state())
    if restored is None:
        state, done = setup.first_state(), 0
        _validate(setup, state, done, writer, progress)
    else:
        state, done = restored.state, restored.step
        batches.set_state(restored.data_state)
        progress.say(f"continues after step {done}")
    batch = next(batches)
    while done < cadence.num_steps:
        placed = setup.place(batch)
        flops = log.flops_of(state, placed)
        state, metrics = setup.train_step(state, setup.frozen, placed)
        # The device is busy now; the host reads the step before, and then the next batch.
        done += 1
        log.add(done, metrics, int(batch["length"].sum()), flops)
        data_state = batches.get_state()
        stopping = stop() and done < cadence.num_steps
        last = done == cadence.num_steps
        batch = next(batches)
        validating = last or done % cadence.eval_every == 0
        saving = validating or stopping or done % cadence.checkpoint_every == 0
        # What a checkpoint does not hold must be on record by then, or a resumed run would lose it.
        if saving or done % cadence.log_every == 0:
            log.flush()
        score = None
        if validating:
            with log.speed.excluded():
                score = _validate(setup, state, done, writer, progress)
        if saving:
            with log.speed.excluded():
                checkpoints.save(
                    done, state, data_state=data_state, meta=setup.identity(), score=score
                )
        if stopping:
            checkpoints.wait()
            progress.say(f"stopped on request after step {done}, saved")
            return TrainResult(done, finished=False, state=state)
    return TrainResult(done, finished=True, state=state)


class _Log:
    """Collects the metrics of updates, one update late, and writes their means."""

    def __init__(
        self,
        setup: Setup,
        writer: MetricWriter,
        progress: Progress,
        checkpoints: Checkpointer,
        clock: CompileClock,
    ):
        self._setup = setup
        self._max_skipped = setup.config.train.max_skipped
        self._flops: dict[tuple, float] = {}
        self._clock = clock
        self.speed = Throughput(time.perf_counter)
        self._writer = writer
        self._progress = progress
        self._checkpoints = checkpoints
        self._pending: tuple[int, dict[str, Any], int, float] | None = None
        self._rows: list[dict[str, Any]] = []
        self._step = self._skipped = 0

    def flops_of(self, state: TrainState, batch: dict[str, Any]) -> float:
        """Returns the operations of an update on a batch of this shape, counted once a shape."""
        shape = batch["tokens"].shape
        if shape not in self._flops:
            self._flops[shape] = self._setup.step_flops(state, batch)
        return self._flops[shape]

    def add(self, step: int, metrics: dict[str, Any], num_tokens: int, flops: float) -> None:
        """Reads the update before this one, which is finished or nearly so."""
        self.check()
        self._pending = (step, metrics, num_tokens, flops)

    def check(self) -> None:
        """Waits for the last update; raises TrainingError after too many skipped ones in a row."""
        if self._pending is None:
            return
        step, metrics, num_tokens, flops = self._pending
        self._pending = None
        row = jax.device_get(metrics)
        if row["skipped_in_row"] > 0:
            told = (
                f"loss {row['loss']} at step {step} (gradient norm {row['grad_norm']}, learning "
                f"rate {row['learning_rate']:.3g})"
            )
            if row["skipped_in_row"] >= self._max_skipped:
                raise TrainingError(
                    f"{told}, {row['skipped_in_row']} updates in a row without a finite gradient; "
                    f"the last good checkpoint is step {self._checkpoints.latest}; lower "
                    "optimizer.learning_rate or look at the data"
                )
            self._progress.say(f"{told}: update left out")
        else:
            self._rows.append(row)
        self._skipped = int(row["skipped"])
        self.speed.add(num_tokens, flops)
        self._progress.advance(step)
        self._step = step

    def flush(self) -> None:
        """Writes one record of what was added since the last one."""
        self.check()
        rows, self._rows = self._rows, []
        if not rows:  # all were left out
            return
        slots = [row["slots"] for row in rows]
        total = jax.tree.map(lambda *leaves: np.sum(leaves, axis=0), *slots)
        values = {
            "train/loss": float(np.mean([row["loss"] for row in rows])),
            "train/grad_norm": float(np.mean([row["grad_norm"] for row in rows])),
            "train/learning_rate": float(rows[-1]["learning_rate"]),
            **per_slot(total[max(total)], "train"),
            "train/effective_share": effective_share(total.values()),
            "train/skipped_updates": self._skipped,
            "train/memory_gib": memory_gib(),
            "train/compile_s": self._clock.seconds,
            **{f"train/{name}": rate for name, rate in self.speed.read().items()},
        }
        device = self._setup.mesh.devices.flat[0]
        peak = peak_flops(device.device_kind)
        if peak is not None:
            whole = peak * self._setup.mesh.size
            values["train/mfu"] = values["train/flops_per_s"] / whole
        self._writer.write(self._step, values)
        self._progress.show(
            {"loss": values["train/loss"], "tokens/s": values["train/tokens_per_s"]}
        )


def _validate(
    setup: Setup, state: TrainState, step: int, writer: MetricWriter, progress: Progress
) -> float:
    values = validate(
        local_copy(state.drafter),
        setup.frozen_here,
        setup.validation_batches(),
        eval_sums=setup.eval_sums,
        variants=setup.variants,
    )
    writer.write(step, values)
    score = values["validation/mat_mean"]
    progress.show({"held-out loss": values["validation/loss"], "MAT": score})
    return score


def _refuse_other_experiment(
    checkpoints: Checkpointer, setup: Setup, directory: pathlib.Path
) -> None:
    saved = checkpoints.read_meta()
    if saved is None:
        return
    changes = changed_fields(saved, setup.identity(), ignored=FREE_FIELDS)
    if changes:
        raise ConfigError(
            f"{directory} holds checkpoints of another experiment: {'; '.join(changes)}. Use its "
            "configuration or another workdir (drafter.init can start from an exported drafter)"
        )


def _export(
    setup: Setup,
    checkpoints: Checkpointer,
    result: TrainResult,
    directory: pathlib.Path,
    progress: Progress,
) -> None:
    step, params = result.step, result.state.drafter
    if checkpoints.best is not None and checkpoints.best != step:
        restored = checkpoints.restore(setup.abstract_state(), checkpoints.best)
        step, params = restored.step, restored.state.drafter
    params = local_copy(params)
    if not is_first():
        return
    export_drafter(
        directory,
        setup.drafter,
        params,
        token_ids=setup.inputs.draft_vocab_ids,
        trained_on=trained_on(setup, step, checkpoints.score(step)),
    )
    progress.say(f"drafter of step {step} (best held-out MAT) written to {directory}")


def trained_on(setup: Setup, step: int, score: float | None) -> dict[str, Any]:
    """Returns what a drafter's config.json records of its making; no paths of this machine.

    Args:
        setup: the experiment.
        step: updates done.
        score: held-out MAT, pooled, mean over the trained block sizes; None if not measured.
    """
    identity = setup.identity()
    paths = ("store", "feature_cache", "features")
    return {
        "target": setup.target.name,
        "target_sha256": setup.target.sha256,
        "data_fingerprint": setup.inputs.fingerprint,
        "response_tokens": setup.inputs.training.num_response_tokens,
        "steps": step,
        "heldout_mat_mean": score,
        "data": {name: value for name, value in identity["data"].items() if name not in paths},
        **{name: identity[name] for name in ("objective", "optimizer", "train")},
    }
