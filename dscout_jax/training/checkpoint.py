"""Checkpoints of a training run: a small face over Orbax's `CheckpointManager`.

A checkpoint is one directory `<step>/` holding the train state (arrays), the position of the data
iterator and a free-form `meta` (both JSON). Orbax commits it by renaming, so a killed run leaves
only a temporary name behind; what a rename cannot see (a file cut off or flipped afterwards) is
caught by a seal: a list of sizes and CRC-32 sums of all files, written last. Directories that are
unsealed or broken are set aside with a warning, and the one before them is used; unfinished ones
are deleted.

Only this module knows Orbax; when its v1 interface takes over, only this file changes.
"""

import contextlib
import dataclasses
import json
import os
import pathlib
import shutil
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import orbax.checkpoint as ocp
from absl import logging

from dscout_jax.files import require_writable, write_json
from dscout_jax.training.processes import is_first, wait_for_all

_SEAL = "seal.json"
_UNFINISHED = ".orbax-checkpoint-tmp"


class CheckpointError(OSError):
    """A checkpoint could not be written; the message is one line for the user."""


@dataclasses.dataclass(frozen=True)
class Restored:
    """What a run needs to continue.

    Attributes:
        step: number of finished updates.
        state: the train state, leaf for leaf as it was saved.
        data_state: the data iterator's own JSON-able state.
        meta: whatever the run saved beside it.
    """

    step: int
    state: Any
    data_state: dict
    meta: dict


class Checkpointer:
    """Saves and restores train states in one directory; use it as a context manager.

    Kept are the newest `max_to_keep` checkpoints and the one with the best score, if it is older.
    """

    def __init__(self, directory: str | os.PathLike, *, max_to_keep: int = 2):
        """Opens `directory`, creating it if need be, and sets broken checkpoints aside.

        Raises:
            ValueError: `max_to_keep` is below 1, or nothing can be written at `directory`.
        """
        if max_to_keep < 1:
            raise ValueError(f"max_to_keep={max_to_keep} is not allowed: keep at least 1")
        self._directory = pathlib.Path(directory).absolute()
        require_writable(self._directory)
        if is_first():
            _set_broken_aside(self._directory)
        wait_for_all("broken checkpoints set aside")
        self._scores: dict[int, float] = {}
        self._manager = ocp.CheckpointManager(
            self._directory,
            options=ocp.CheckpointManagerOptions(
                preservation_policy=_LatestAndBest(max_to_keep, self._scores),
                async_options=ocp.AsyncOptions(post_finalization_callback=self._seal),
            ),
        )
        for step in self._manager.all_steps():
            score = self._read_json(step)["score"]
            if score is not None:
                self._scores[step] = score

    def __enter__(self) -> "Checkpointer":
        return self

    def __exit__(self, kind: type | None, *unused: object) -> None:
        with contextlib.suppress(CheckpointError) if kind else contextlib.nullcontext():
            self.close()

    @property
    def latest(self) -> int | None:
        """The newest step that can be restored, None if there is none."""
        return self._manager.latest_step()

    @property
    def best(self) -> int | None:
        """The step with the highest score, None if no checkpoint has one."""
        saved = self._manager.all_steps()
        scores = {step: score for step, score in self._scores.items() if step in saved}
        return max(scores, key=scores.get) if scores else None

    def score(self, step: int) -> float | None:
        """The score that was saved with a step, None if it has none."""
        return self._scores.get(step)

    def save(
        self,
        step: int,
        state: Any,
        *,
        data_state: Mapping[str, Any],
        meta: Mapping[str, Any],
        score: float | None = None,
    ) -> None:
        """Starts saving in the background; a step that is already saved is left as it is.

        Args:
            step: number of finished updates; names the directory.
            state: pytree of arrays (typed PRNG keys are fine). It may be donated to the next
                update as soon as this returns.
            data_state: JSON-able position of the data iterator after `step` batches.
            meta: JSON-able, anything the run wants back.
            score: larger is better (held-out MAT); None if it was not measured at this step.

        Raises:
            CheckpointError: this save, or an earlier one, failed (a full disk, say).
        """
        if step in self._manager.all_steps():
            return
        if score is not None:
            self._scores[step] = float(score)
        with self._explained():
            self._manager.save(
                step,
                args=ocp.args.Composite(
                    state=ocp.args.StandardSave(state),
                    data=ocp.args.JsonSave(dict(data_state)),
                    meta=ocp.args.JsonSave({"score": self._scores.get(step), "meta": dict(meta)}),
                ),
                force=True,
            )

    def restore(self, abstract_state: Any, step: int | None = None) -> Restored | None:
        """Reads a checkpoint back.

        Args:
            abstract_state: a state of the same structure (arrays or `jax.ShapeDtypeStruct`s, with
                shardings if the devices differ from those that saved it).
            step: which checkpoint; None for the newest.

        Returns:
            The checkpoint, or None if the directory holds none.

        Raises:
            ValueError: there is no checkpoint of that step, or the saved tree differs.
        """
        self.wait()
        step = self.latest if step is None else step
        if step is None:
            return None
        if step not in self._manager.all_steps():
            saved = sorted(self._manager.all_steps())
            raise ValueError(f"step={step} is not saved in {self._directory}; saved are {saved}")
        read = self._manager.restore(
            step,
            args=ocp.args.Composite(
                state=ocp.args.StandardRestore(
                    jax.tree.map(ocp.utils.to_shape_dtype_struct, abstract_state)
                ),
                data=ocp.args.JsonRestore(),
                meta=ocp.args.JsonRestore(),
            ),
        )
        return Restored(step=step, state=read.state, data_state=read.data, meta=read.meta["meta"])

    def read_meta(self, step: int | None = None) -> dict | None:
        """The `meta` of a checkpoint (None: the newest), None if there is none."""
        step = self.latest if step is None else step
        return None if step is None else self._read_json(step)["meta"]

    def wait(self) -> None:
        """Blocks until every started save is on disk, sealed.

        Raises:
            CheckpointError: one of them failed.
        """
        with self._explained():
            self._manager.wait_until_finished()

    def close(self) -> None:
        """Finishes pending saves and stops Orbax's threads.

        Raises:
            CheckpointError: a save failed.
        """
        with self._explained():
            self._manager.close()

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """Turns what Orbax and tensorstore raise when they cannot write into one line."""
        try:
            yield
        except (OSError, ValueError, RuntimeError) as error:
            steps = [int(path.name) for path in _step_directories(self._directory)]
            sealed = [s for s in steps if (self._directory / str(s) / _SEAL).exists()]
            reason = str(error).splitlines()[0].rpartition(": ")[2]
            raise CheckpointError(
                f"a checkpoint could not be written in {self._directory}: {reason}; the last good "
                f"one is step {max(sealed, default=None)}. Make room, then the same command "
                "continues from there"
            ) from error

    def _read_json(self, step: int) -> dict:
        args = ocp.args.Composite(meta=ocp.args.JsonRestore())
        return self._manager.restore(step, args=args).meta

    def _seal(self) -> None:
        # Orbax calls this when all files are there, just before it renames the directory.
        if not is_first():
            return
        for path in self._directory.iterdir():
            if _UNFINISHED in path.name and path.is_dir():
                write_json(path / _SEAL, _fingerprint(path))


@dataclasses.dataclass
class _LatestAndBest:
    """Orbax preservation policy: the newest `count` checkpoints and the best-scored one."""

    count: int
    scores: dict[int, float]

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        del context
        steps = [info.step for info in checkpoints]
        kept = set(sorted(steps)[-self.count :])
        kept |= set(sorted((s for s in steps if s in self.scores), key=self.scores.get)[-1:])
        return [step in kept for step in steps]


def changed_fields(
    saved: Mapping[str, Any], current: Mapping[str, Any], *, ignored: tuple[str, ...] = ()
) -> list[str]:
    """Lists how two nested configurations differ, one line a dotted field.

    Args:
        saved: what a checkpoint was trained with; nested mappings, compared as JSON would see them.
        current: what is asked for now.
        ignored: dotted names (of fields or of whole sections) that may differ.

    Returns:
        Lines such as `optimizer.learning_rate: 0.001 -> 0.002`, sorted.
    """
    before, after = _flatten(saved), _flatten(current)
    lines = []
    for name in sorted(before.keys() | after.keys()):
        if any(name == field or name.startswith(field + ".") for field in ignored):
            continue
        old, new = before.get(name, "absent"), after.get(name, "absent")
        if old != new:
            lines.append(f"{name}: {old} -> {new}")
    return lines


def _flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    flat: dict[str, str] = {}
    for name, value in tree.items():
        if isinstance(value, Mapping):
            flat |= _flatten(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = json.dumps(value)
    return flat


def _step_directories(directory: pathlib.Path) -> list[pathlib.Path]:
    return [path for path in directory.iterdir() if path.name.isdigit() and path.is_dir()]


def _fingerprint(directory: pathlib.Path) -> dict[str, list[int]]:
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    return {
        path.relative_to(directory).as_posix(): [path.stat().st_size, _crc32(path)]
        for path in files
        if path.parent != directory  # Orbax still touches its notes beside the items
    }


def _crc32(path: pathlib.Path) -> int:
    total = 0
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            total = zlib.crc32(block, total)
    return total


def _set_broken_aside(directory: pathlib.Path) -> None:
    for path in sorted(directory.iterdir()):
        if _UNFINISHED in path.name:
            shutil.rmtree(path)
            logging.warning("checkpoint %s was not finished: ignored, deleted", path.name)
            continue
        reason = _damage(path) if path.name.isdigit() and path.is_dir() else None
        if reason is None:
            continue
        aside = directory / f"broken-{path.name}-{len(list(directory.glob('broken-*')))}"
        path.rename(aside)
        logging.warning("checkpoint %s %s: ignored, moved to %s", path.name, reason, aside.name)


def _damage(path: pathlib.Path) -> str | None:
    if not (path / _SEAL).exists():
        return "has no seal (the run was killed while writing it)"
    try:
        expected = json.loads((path / _SEAL).read_text())
    except ValueError:
        return "has an unreadable seal"
    found = _fingerprint(path)
    differing = sorted(name for name in expected if found.get(name) != expected[name])
    return f"has missing or altered files ({', '.join(differing[:3])})" if differing else None
