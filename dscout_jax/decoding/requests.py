"""What the engine is asked, and what it has answered so far."""

import dataclasses
import math
from collections.abc import Callable

DecodeText = Callable[[list[int]], str]

_UNFINISHED = "\ufffd"  # the last bytes of a text are not a whole character yet


class QueueFull(RuntimeError):
    """As many requests wait as may; nothing was taken in."""


@dataclasses.dataclass(frozen=True)
class Request:
    """One prompt and how it is to be answered.

    Attributes:
        prompt: token ids, at least one.
        max_new_tokens: most tokens of the answer, at least 1.
        temperature: at least 0; 0 is greedy.
        top_k: only the so many most likely tokens; None = all.
        top_p: in (0, 1]; see `sampling.Sampling`.
        seed: of the draws; equal requests with equal seeds get equal answers.
        stop_ids: tokens that end this answer, besides the engine's own.
        stop_strings: texts that end it; they and what follows are not part of the text.
    """

    prompt: tuple[int, ...]
    max_new_tokens: int = 128
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    seed: int = 0
    stop_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.prompt:
            raise ValueError("prompt is empty; give at least one token")
        for name, good, allowed in (
            ("max_new_tokens", self.max_new_tokens >= 1, "at least 1"),
            ("temperature", 0.0 <= self.temperature < math.inf, "a number of at least 0"),
            ("top_k", self.top_k is None or self.top_k >= 1, "at least 1, or None"),
            ("top_p", 0.0 < self.top_p <= 1.0, "in (0, 1]"),
            ("stop_strings", all(self.stop_strings), "texts that are not empty"),
        ):
            if not good:
                raise ValueError(f"{name}={getattr(self, name)!r} must be {allowed}")


class Ticket:
    """A request on its way.

    Attributes:
        request: what was asked.
        tokens: the answer so far, stop token included.
        finish_reason: None while it runs; `stop`, `length` or `cancelled`.
    """

    def __init__(self, request: Request, decode_text: DecodeText | None):
        """Starts with an empty answer; `decode_text` is needed for texts and stop strings."""
        self.request = request
        self.tokens: list[int] = []
        self.finish_reason: str | None = None
        self._decode_text = decode_text
        self._text = ""

    @property
    def done(self) -> bool:
        """Whether nothing more will come."""
        return self.finish_reason is not None

    @property
    def text(self) -> str:
        """The answer's text so far, without what may still become a stop string or a character."""
        if self.done:
            return self._text
        held = max(
            (
                size
                for stop in self.request.stop_strings
                for size in range(1, len(stop))
                if self._text.endswith(stop[:size])
            ),
            default=0,
        )
        text = self._text[: len(self._text) - held]
        return text.rstrip(_UNFINISHED)

    def add(self, tokens: list[int], stop_ids: tuple[int, ...]) -> bool:
        """Takes in what was decoded; returns whether the answer ends with it.

        Args:
            tokens: the next tokens; what follows an end of the answer is left out.
            stop_ids: the engine's own.
        """
        for token in tokens:
            self.tokens.append(token)
            if token in stop_ids or token in self.request.stop_ids:
                self.finish_reason = "stop"
            elif len(self.tokens) == self.request.max_new_tokens:
                self.finish_reason = "length"
            if self.request.stop_strings and self._ends_in_text():
                return True
            if self.done:
                break
        if self._decode_text is not None:
            self._text = self._decode_text(self.tokens)
        return self.done

    def _ends_in_text(self) -> bool:
        """Whether a stop string stands in the text; then that ends there."""
        text = self._decode_text(self.tokens)
        found = [text.find(stop) for stop in self.request.stop_strings]
        first = min((at for at in found if at >= 0), default=None)
        if first is not None:
            self._text, self.finish_reason = text[:first], "stop"
        return first is not None
