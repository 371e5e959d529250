"""Metrics of a run: one JSON line a record, TensorBoard scalars, a meter of tokens per second.

A record is `{"step": ..., "<group>/<name>": number or list of numbers}`; lists are per slot, slot 1
first. When a run resumes, records after the restored step are cut off, so no step is in twice.
"""

import contextlib
import json
import os
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence

from absl import logging

from dscout_jax.training.processes import is_first

Value = float | int | Sequence[float]


class MetricWriter:
    """Appends records to `metrics.jsonl` and `tensorboard/` below a directory.

    Of several processes only the first one writes.
    """

    def __init__(self, workdir: str | os.PathLike, *, resume_step: int | None = None):
        """Opens the files.

        Args:
            workdir: an existing directory.
            resume_step: number of finished updates of the restored state; records of later steps
                are cut off. None or 0 starts the files anew.
        """
        self._writes = is_first()
        if not self._writes:
            return
        # Imported here: only a run that writes metrics needs it.
        from tensorboardX import SummaryWriter

        directory = pathlib.Path(workdir)
        self._path = directory / "metrics.jsonl"
        kept = []
        if resume_step and self._path.exists():
            kept = [row for row in read_jsonl(self._path) if row["step"] <= resume_step]
        partial = self._path.with_suffix(".partial")
        partial.write_text("".join(json.dumps(row) + "\n" for row in kept))
        partial.rename(self._path)
        self._file = self._path.open("a")
        self._board = SummaryWriter(
            str(directory / "tensorboard"), purge_step=(resume_step or 0) + 1, flush_secs=20
        )

    def __enter__(self) -> "MetricWriter":
        return self

    def __exit__(self, *unused: object) -> None:
        self.close()

    def write(self, step: int, values: Mapping[str, Value]) -> None:
        """Appends one record; lists become `<name>/slot_1`, `<name>/slot_2`, ... in TensorBoard."""
        if not self._writes:
            return
        row = {"step": int(step)} | {name: _plain(value) for name, value in values.items()}
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()
        for name, value in row.items():
            if name == "step":
                continue
            if isinstance(value, list):
                for slot, item in enumerate(value, start=1):
                    self._board.add_scalar(f"{name}/slot_{slot}", item, step)
            else:
                self._board.add_scalar(name, value, step)
        logging.info("step %d: %s", step, describe(values))

    def close(self) -> None:
        """Flushes and closes both files."""
        if self._writes:
            self._file.close()
            self._board.close()


def read_jsonl(path: str | os.PathLike) -> list[dict]:
    """Returns the records of a JSONL file; a last line that was cut off is left out.

    Raises:
        ValueError: another line is not JSON.
    """
    lines = pathlib.Path(path).read_text().split("\n")
    # What follows the last newline is empty, or the start of a record that was never finished.
    complete, rest = lines[:-1], lines[-1]
    if rest:
        logging.warning("%s ends in an unfinished record, which is left out", path)
    rows = []
    for number, line in enumerate(complete, start=1):
        try:
            rows.append(json.loads(line))
        except ValueError as error:
            raise ValueError(f"{path}: line {number} is not JSON: {line[:60]!r}") from error
    return rows


def describe(values: Mapping[str, Value]) -> str:
    """One short line of the scalars of a record, for people."""
    scalars = {name: value for name, value in values.items() if not isinstance(value, Sequence)}
    return ", ".join(f"{name} {float(value):.4g}" for name, value in scalars.items())


class Throughput:
    """Tokens, steps and operations per second since the last reading.

    Time spent elsewhere can be left out.
    """

    def __init__(self, clock: Callable[[], float]):
        """Starts now; `clock` returns seconds, e.g. `time.perf_counter`."""
        self._clock = clock
        self._start = clock()
        self._tokens = self._steps = 0
        self._flops = 0.0

    def add(self, tokens: int, flops: float = 0.0) -> None:
        """Counts one finished step over `tokens` tokens, of `flops` operations."""
        self._tokens += tokens
        self._steps += 1
        self._flops += flops

    @contextlib.contextmanager
    def excluded(self) -> Iterator[None]:
        """Stops the clock inside (validation, saving)."""
        began = self._clock()
        try:
            yield
        finally:
            self._start += self._clock() - began

    def read(self) -> dict[str, float]:
        """Returns `tokens_per_s`, `steps_per_s` and `flops_per_s` and starts again."""
        seconds = max(self._clock() - self._start, 1e-9)
        rates = {
            "tokens_per_s": self._tokens / seconds,
            "steps_per_s": self._steps / seconds,
            "flops_per_s": self._flops / seconds,
        }
        self._start, self._tokens, self._steps, self._flops = self._clock(), 0, 0, 0.0
        return rates


def _plain(value: Value) -> float | int | list[float]:
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, list | tuple):
        return [float(item) for item in value]
    return value if isinstance(value, int) else float(value)
