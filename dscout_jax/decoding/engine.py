"""Continuous batching: requests into slots, tokens out, the variant that a plan names.

A finished row is replaced without disturbing the others, a long prompt is prefilled in chunks
between their cycles, and a prompt that starts like a row still held in a slot takes over what that
row computed. The batch grows and shrinks over the sizes that the plan names; each has one variant
of speculative decoding, or none. Answers do not depend on any of it: greedy rows give the target's
own choices, sampled rows its draws with the request's seed (rule `match`), in float32 but for near
ties.
"""

from collections import deque
from collections.abc import Iterator, Mapping

import jax
import jax.numpy as jnp
import numpy as np

from dscout_jax.config.models import DrafterConfig, TargetConfig
from dscout_jax.decoding.autoregressive import GenerationState, decode_steps
from dscout_jax.decoding.requests import DecodeText, QueueFull, Request, Ticket
from dscout_jax.decoding.sampling import make_sampling
from dscout_jax.decoding.slots import (
    admit_staged,
    fork_row,
    init_staging,
    prefill_chunk,
    renew_context,
    take_rows,
)
from dscout_jax.decoding.speculative import DraftWeights, decode_cycles, init_speculative
from dscout_jax.decoding.variant import Variant

Plan = Mapping[int, Variant | None]
"""Batch size to what decodes it; None is plain decoding."""

_CHUNKS = (16, 64, 256)  # prompt tokens prefilled at once
_STALL = 256  # prompt tokens, at most a chunk more, that rows in flight wait for between cycles
_SHORTEST_REUSE = 16  # tokens that a copied prefix must save
_PATIENCE = 4  # looks that the batch stays larger than it need be


class Engine:
    """Serves many requests with one target and one drafter; not thread-safe."""

    def __init__(
        self,
        params: dict,
        target: TargetConfig,
        weights: DraftWeights,
        drafter: DrafterConfig,
        plan: Plan,
        *,
        capacity: int,
        stop_ids: tuple[int, ...] = (),
        rule: str = "match",
        decode_text: DecodeText | None = None,
        max_waiting: int = 64,
        cycles_at_once: int = 16,
    ):
        """Allocates slots; programs are compiled at first use.

        Args:
            params: target weights.
            target: target shapes.
            weights: what drafting reads.
            drafter: drafter shapes.
            plan: batch sizes that may run, each with its variant or None; the largest is the
                number of slots. `rule` and `stop_ids` of the variants are not read.
            capacity: S, positions of a slot.
            stop_ids: tokens that end any answer.
            rule: of sampled rows, `match` or `rejection`; answers of the latter depend on the plan.
            decode_text: token ids to text, for texts and stop strings.
            max_waiting: requests that may wait for a slot.
            cycles_at_once: most cycles between two looks at the results.

        Raises:
            ValueError: the plan is empty, or a size is below 1.
        """
        if not plan or min(plan) < 1:
            raise ValueError(f"plan sizes {sorted(plan)} must be one or more numbers from 1 on")
        if rule not in ("match", "rejection"):
            raise ValueError(f"rule={rule!r} must be 'match' or 'rejection'")
        self._params, self._target = params, target
        self._weights, self._drafter = weights, drafter
        self._sizes = sorted(plan)
        self._plan = {
            size: None if plan[size] is None else plan[size].replace(stop_ids=stop_ids)
            for size in self._sizes
        }
        variants = [variant for variant in self._plan.values() if variant is not None]
        self._largest_block = max((variant.block_size for variant in variants), default=1)
        self._capacity, self._stop_ids, self._rule = capacity, stop_ids, rule
        self._decode_text, self._max_waiting = decode_text, max_waiting
        self._cycles_at_once, self._cycles = cycles_at_once, 1
        self._waiting: deque[Ticket] = deque()
        self._staged: tuple[Ticket, GenerationState, int] | None = None  # and its tokens done
        self._running: dict[int, Ticket] = {}  # by slot
        self._held: dict[int, Ticket] = {}  # whose keys and values a slot holds, done ones too
        self._size, self._idle_looks = self._sizes[0], 0
        num_taps = len(drafter.target_layer_ids)
        self._state = init_speculative(target, drafter, self._size, capacity, 1, num_taps)
        # The context is made of these taps, and valid in so many layers.
        self._taps = variants[0].taps if variants else None
        self._depth = drafter.num_hidden_layers

    @property
    def num_active(self) -> int:
        """Requests that are neither waiting nor done."""
        return len(self._running) + (self._staged is not None)

    @property
    def num_waiting(self) -> int:
        """Requests that wait for a slot."""
        return len(self._waiting)

    def submit(self, request: Request) -> Ticket:
        """Takes a request in.

        Raises:
            ValueError: prompt and answer do not fit a slot, or a stop string without `decode_text`.
            QueueFull: as many requests wait as may.
        """
        needed = len(request.prompt) + request.max_new_tokens + self._largest_block
        if needed > self._capacity:
            raise ValueError(
                f"a prompt of {len(request.prompt)} tokens, {request.max_new_tokens} new ones and "
                f"a block of {self._largest_block} need {needed} positions, a slot has "
                f"{self._capacity}; shorten the prompt or lower max_new_tokens"
            )
        largest = max(request.prompt)
        if largest >= self._target.vocab_size or min(request.prompt) < 0:
            raise ValueError(f"prompt token {largest} is not in [0, {self._target.vocab_size - 1}]")
        if request.stop_strings and self._decode_text is None:
            raise ValueError("stop_strings need an engine with decode_text")
        if len(self._waiting) >= self._max_waiting:
            raise QueueFull(f"{self._max_waiting} requests wait already; try again later")
        ticket = Ticket(request, self._decode_text)
        self._waiting.append(ticket)
        return ticket

    def cancel(self, ticket: Ticket) -> None:
        """Ends a request; its slot is free at the next step. A done one stays as it is."""
        if not ticket.done:
            ticket.finish_reason = "cancelled"

    def stream(self, ticket: Ticket) -> Iterator[list[int]]:
        """Yields the next tokens of a request until it is done, working for all on the way."""
        shown = 0
        while True:
            if len(ticket.tokens) > shown:
                yield ticket.tokens[shown:]
                shown = len(ticket.tokens)
            elif ticket.done:
                return
            else:
                self.step()

    def run(self) -> None:
        """Works until every request is done."""
        while self.step():
            pass

    def step(self) -> bool:
        """Does a piece of work: some prompt tokens, some cycles. False when there is none."""
        self._drop_cancelled()
        self._prefill()
        self._shrink()
        if self._running:
            self._decode()
            self._collect()
        return bool(self._running or self._waiting or self._staged)

    def _drop_cancelled(self) -> None:
        self._waiting = deque(ticket for ticket in self._waiting if not ticket.done)
        if self._staged is not None and self._staged[0].done:
            self._staged = None
        ended = [slot for slot, ticket in self._running.items() if ticket.done]
        for slot in ended:
            del self._running[slot]
        if ended:
            self._stop_rows(ended)

    def _stop_rows(self, slots: list[int]) -> None:
        rows = self._state.rows
        done = rows.done.at[jnp.asarray(slots)].set(True)
        self._state = self._state.replace(rows=rows.replace(done=done))

    def _prefill(self) -> None:
        """Works on the next prompts, for a while if others decode."""
        spent = 0
        while self._staged is not None or (self._waiting and self._room()):
            if self._staged is None:
                self._staged = self._begin(self._waiting.popleft())
            ticket, staging, done = self._staged
            prompt = ticket.request.prompt
            left = len(prompt) - done
            size = next((size for size in _CHUNKS if size >= left), _CHUNKS[-1])
            chunk = np.zeros((1, size), np.int32)
            count = min(left, size)
            chunk[0, :count] = prompt[done : done + count]
            staging, logits = prefill_chunk(
                self._params,
                staging,
                jnp.asarray(chunk),
                jnp.int32(count),
                config=self._target,
                tap_ids=self._drafter.target_layer_ids,
            )
            self._staged = (ticket, staging, done + count)
            if count == left:
                self._admit(ticket, staging, logits)
                self._staged = None
            spent += size
            if self._running and spent >= _STALL:
                return

    def _room(self) -> bool:
        return len(self._running) < self._sizes[-1]

    def _begin(self, ticket: Ticket) -> tuple[Ticket, GenerationState, int]:
        """Returns a staging row, with the longest prefix that some slot holds already."""
        # The last prompt token must be run: its logits choose the first token.
        prompt = ticket.request.prompt[:-1]
        best, slot = 0, None
        for held_by, held in self._held.items():
            same = _common_prefix(prompt, _processed(held))
            if same > best:
                best, slot = same, held_by
        if best >= _SHORTEST_REUSE:
            return ticket, fork_row(self._state, jnp.int32(slot), jnp.int32(best)), best
        return ticket, init_staging(self._target, self._drafter, self._capacity), 0

    def _admit(self, ticket: Ticket, staging: GenerationState, logits: jax.Array) -> None:
        if len(self._running) == self._size:
            self._resize(next(size for size in self._sizes if size > self._size))
        free = [slot for slot in range(self._size) if slot not in self._running]
        slot = min(free, key=self._num_held)
        request = ticket.request
        sampling = make_sampling(
            jax.random.key(request.seed)[None], request.temperature, request.top_k, request.top_p
        )
        self._state = admit_staged(
            self._weights,
            self._state,
            staging,
            logits,
            jnp.int32(slot),
            jnp.int32(request.max_new_tokens),
            sampling,
            drafter=self._drafter,
            taps=self._taps,
            greedy=request.temperature == 0,
            stop_ids=self._stop_ids,
        )
        self._running[slot] = ticket
        self._held[slot] = ticket
        self._collect()

    def _num_held(self, slot: int) -> int:
        return len(_processed(self._held[slot])) if slot in self._held else 0

    def _shrink(self) -> None:
        """Takes a smaller batch once it has been large enough for some looks."""
        fitting = next(size for size in self._sizes if size >= max(self.num_active, 1))
        if fitting >= self._size or self._waiting:
            self._idle_looks = 0
            return
        self._idle_looks += 1
        if self._idle_looks >= _PATIENCE or not self._running:
            self._resize(fitting)

    def _resize(self, size: int) -> None:
        """Moves the rows to a batch of another size; running ones first, then the longest held."""
        others = sorted(self._held.keys() - self._running.keys(), key=self._num_held, reverse=True)
        kept = [*self._running, *others][:size]
        index = np.full((size,), -1, np.int32)
        index[: len(kept)] = kept
        self._state = take_rows(self._state, jnp.asarray(index))
        self._running = {
            new: self._running[old] for new, old in enumerate(kept) if old in self._running
        }
        self._held = {new: self._held[old] for new, old in enumerate(kept)}
        self._size, self._idle_looks = size, 0

    def _decode(self) -> None:
        """Runs some cycles, or plain steps where the plan names no variant."""
        greedy = all(ticket.request.temperature == 0 for ticket in self._running.values())
        variant = self._plan[self._size]
        if variant is None:
            rows = decode_steps(
                self._params,
                self._state.rows,
                self._cycles,
                config=self._target,
                greedy=greedy,
                stop_ids=self._stop_ids,
                tap_ids=self._drafter.target_layer_ids,
            )
            self._state, self._depth = self._state.replace(rows=rows), 0
            return
        depth = variant.num_layers or self._drafter.num_hidden_layers
        if self._taps != variant.taps or self._depth < depth:
            self._taps = variant.taps
            self._state = renew_context(
                self._weights, self._state, drafter=self._drafter, taps=self._taps
            )
        self._state = decode_cycles(
            self._params,
            self._weights,
            self._state,
            self._cycles,
            variant=variant.replace(rule="greedy" if greedy else self._rule),
        )
        self._depth = depth

    def _collect(self) -> None:
        """Hands out new tokens, frees the slots of answers that ended."""
        rows = self._state.rows
        tokens, length, done = jax.device_get((rows.tokens, rows.length, rows.done))
        ended, stopped_here = [], []
        for slot, ticket in self._running.items():
            known = len(ticket.request.prompt) + len(ticket.tokens)
            ends = ticket.add(tokens[slot, known : length[slot]].tolist(), self._stop_ids)
            if ends:
                ended.append(slot)
                if not done[slot]:
                    stopped_here.append(slot)
        for slot in ended:
            del self._running[slot]
        if stopped_here:
            self._stop_rows(stopped_here)
        busy = ended or self._waiting or self._staged
        self._cycles = 2 if busy else min(2 * self._cycles, self._cycles_at_once)


def _processed(ticket: Ticket) -> list[int]:
    """Returns the tokens that passes have seen: all but the newest."""
    return [*ticket.request.prompt, *ticket.tokens][:-1]


def _common_prefix(a: tuple[int, ...], b: list[int]) -> int:
    """Returns how many leading tokens two sequences share."""
    same = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        same += 1
    return same
