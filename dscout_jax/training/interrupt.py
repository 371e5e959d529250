"""Stopping a run from outside: SIGTERM and Ctrl-C become a question that the loop asks."""

import signal
from types import FrameType


class StopRequest:
    """Context manager; inside it `stop()` tells whether SIGTERM or SIGINT has arrived.

    The first signal only asks, so that the step in flight is finished and saved. A second SIGINT
    raises KeyboardInterrupt at once. The handlers found at entry come back at exit.
    """

    _SIGNALS = (signal.SIGTERM, signal.SIGINT)

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._previous: dict[int, object] = {}

    def __call__(self) -> bool:
        """Whether a stop was asked for."""
        return self.received is not None

    def __enter__(self) -> "StopRequest":
        self._previous = {number: signal.signal(number, self._handle) for number in self._SIGNALS}
        return self

    def __exit__(self, *unused: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        del frame
        if number == signal.SIGINT and self.received is not None:
            raise KeyboardInterrupt
        self.received = signal.Signals(number)
