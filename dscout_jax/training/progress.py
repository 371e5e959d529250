"""What a person sees while a run goes on: a bar on a terminal, a line now and then elsewhere."""

import datetime
import io
import sys
import time
from collections.abc import Mapping
from typing import TextIO

from tqdm import tqdm

from dscout_jax.training.processes import is_first


class Progress:
    """Shows step, loss, MAT, tokens per second and the time left; use it as a context manager."""

    def __init__(self, num_steps: int, *, start: int = 0, stream: TextIO | None = None):
        """Begins at step `start`; a bar is drawn only if `stream` (stderr) is a terminal.

        Of several processes only the first one shows anything.
        """
        self._num_steps = num_steps
        self._stream = sys.stderr if stream is None else stream
        if not is_first():
            self._stream = io.StringIO()
        self._bar = None
        if self._stream.isatty():
            self._bar = tqdm(
                total=num_steps,
                initial=start,
                unit="step",
                file=self._stream,
                dynamic_ncols=True,
                mininterval=0.5,
            )
        self._step = self._first = start
        self._began: float | None = None  # the first update compiles; the clock starts after it
        self._shown: dict[str, str] = {}

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *unused: object) -> None:
        self.close()

    def advance(self, step: int) -> None:
        """Tells that `step` updates are done."""
        if self._bar is not None:
            self._bar.update(step - self._step)
        self._step = step
        if self._began is None:
            self._began, self._first = time.monotonic(), step

    def show(self, values: Mapping[str, float]) -> None:
        """Shows these numbers from now on; values shown earlier under other names stay.

        Without a bar it writes one line.
        """
        self._shown |= {name: f"{value:.4g}" for name, value in values.items()}
        if self._bar is not None:
            self._bar.set_postfix(self._shown, refresh=True)
            return
        shown = "  ".join(f"{name} {value}" for name, value in self._shown.items())
        self.say(f"step {self._step}/{self._num_steps}  {shown}  left {self._time_left()}")

    def say(self, line: str) -> None:
        """Writes a line that stays, above the bar if there is one."""
        if self._bar is not None:
            self._bar.write(line, file=self._stream)
        else:
            self._stream.write(line + "\n")
            self._stream.flush()

    def close(self) -> None:
        """Leaves the terminal on a fresh line."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def _time_left(self) -> str:
        done = self._step - self._first
        if done == 0:
            return "unknown"
        per_step = (time.monotonic() - self._began) / done
        return str(datetime.timedelta(seconds=round(per_step * (self._num_steps - self._step))))
