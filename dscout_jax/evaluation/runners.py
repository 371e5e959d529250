"""Decoders for one prompt at a time (batch 1, temperature 0), compiled up front and timed."""

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from dscout_jax.config.models import DrafterConfig, TargetConfig
from dscout_jax.decoding.autoregressive import decode_steps, init_generation, prefill
from dscout_jax.decoding.speculative import (
    DraftWeights,
    SpeculativeState,
    decode_cycles,
    init_speculative,
    prefill_speculative,
)
from dscout_jax.decoding.streaming import stream_cycles
from dscout_jax.decoding.variant import Variant
from dscout_jax.evaluation.benchmarks import Decode, Generated
from dscout_jax.models.target import apply_target, compute_logits

SIZE_STEP = 64  # prompts are padded to a few widths, so that few programs compile


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Static sizes that programs are compiled for.

    Attributes:
        widths: padded prompt lengths, increasing.
        capacity: S, positions of the caches.
        max_new_tokens: most tokens of an answer.
    """

    widths: tuple[int, ...]
    capacity: int
    max_new_tokens: int

    def width_of(self, prompt_len: int) -> int:
        """Returns the width that a prompt is padded to.

        Raises:
            ValueError: the prompt is empty or longer than the largest width.
        """
        if not 1 <= prompt_len <= self.widths[-1]:
            raise ValueError(
                f"the prompt has {prompt_len} tokens; allowed are 1 to {self.widths[-1]}"
            )
        return next(width for width in self.widths if prompt_len <= width)


def fit_sizes(
    prompt_lens: Sequence[int], max_new_tokens: int, block_size: int, max_context: int
) -> Sizes:
    """Returns the smallest sizes that hold these prompts.

    Args:
        prompt_lens: lengths of the prompts in tokens, or upper bounds of them.
        max_new_tokens: most tokens of an answer, at least 1.
        block_size: largest G.
        max_context: most positions that the caches may have.

    Raises:
        ValueError: a prompt and its answer do not fit `max_context`.
    """
    longest = max(prompt_lens)
    if longest + max_new_tokens + block_size > max_context:
        raise ValueError(
            f"a prompt of {longest} tokens with {max_new_tokens} new tokens and a block of "
            f"{block_size} needs {longest + max_new_tokens + block_size} positions, the cache "
            f"holds {max_context}; shorten the prompt or lower the number of new tokens"
        )
    # Powers of two, so that widths are few; the largest only as wide as needed, because the caches
    # are at least as long and every step reads them whole.
    widths = {min(_power_of_two(length), _round_up(longest)) for length in prompt_lens}
    capacity = _round_up(longest + max_new_tokens + block_size)
    return Sizes(tuple(sorted(widths)), capacity, max_new_tokens)


class Runners:
    """Plain and speculative decoders over one set of weights and sizes.

    Nothing here depends on earlier calls; the object only binds what all calls share.
    """

    def __init__(
        self,
        params: dict,
        target: TargetConfig,
        weights: DraftWeights,
        drafter: DrafterConfig,
        *,
        block_sizes: Sequence[int],
        stop_ids: tuple[int, ...],
        sizes: Sizes,
    ):
        """Binds the weights.

        Args:
            params: target weights.
            target: target shapes.
            weights: what drafting reads.
            drafter: drafter shapes.
            block_sizes: G of each speculative decoder.
            stop_ids: ids that end an answer.
            sizes: static sizes.

        Raises:
            ValueError: no block size, or one that the drafter was not trained for.
        """
        if not block_sizes:
            raise ValueError(
                f"no block size was given; allowed are 2 to {drafter.block_size}, the drafter's own"
            )
        self.params = params
        self._target = target
        self.weights = weights
        self.variants = {
            size: Variant(target, drafter, block_size=size, stop_ids=stop_ids)
            for size in block_sizes
        }
        self._sizes = sizes
        self._static = {"config": target, "greedy": True, "stop_ids": stop_ids}

    @property
    def speculative(self) -> dict[int, Decode]:
        """Block size to decoder."""

        def bind(block_size: int) -> Decode:
            return lambda ids, new: self.decode_speculative(ids, new, block_size)

        return {size: bind(size) for size in self.variants}

    def plain(self, prompt_ids: Sequence[int], max_new_tokens: int) -> Generated:
        """Decodes one prompt plainly.

        Raises:
            ValueError: an empty prompt, or one that is too long for the sizes.
        """
        arrays = self._arrays(prompt_ids, max_new_tokens)
        state = init_generation(self._target, 1, self._sizes.capacity)
        jax.block_until_ready(state)
        start = time.perf_counter()
        state = prefill(self.params, state, *arrays, **self._static)
        jax.block_until_ready(state)
        prefilled = time.perf_counter()
        state = decode_steps(self.params, state, self._sizes.max_new_tokens, **self._static)
        jax.block_until_ready(state)
        done = time.perf_counter()
        tokens = _answer(state.tokens, state.length, prompt_ids)
        return Generated(tokens, (1,) * (len(tokens) - 1), prefilled - start, done - prefilled)

    def decode_speculative(
        self, prompt_ids: Sequence[int], max_new_tokens: int, block_size: int
    ) -> Generated:
        """Decodes one prompt by drafting blocks of `block_size`; errors as in `plain`."""
        state, prefill_s = self._prefill(prompt_ids, max_new_tokens)
        start = time.perf_counter()
        state = self._cycles(state, self._sizes.max_new_tokens, block_size)
        jax.block_until_ready(state)
        decode_s = time.perf_counter() - start
        tokens = _answer(state.rows.tokens, state.rows.length, prompt_ids)
        return Generated(tokens, _emitted(state), prefill_s, decode_s)

    def stream(
        self,
        prompt_ids: Sequence[int],
        max_new_tokens: int,
        block_size: int,
        on_tokens: Callable[[tuple[int, ...]], None],
        cycles_at_once: int = 4,
    ) -> None:
        """Hands over the tokens of each cycle as they come; the first call is the prefill's token.

        Args:
            prompt_ids: the prompt.
            max_new_tokens: most tokens of the answer.
            block_size: G.
            on_tokens: called with the tokens of one cycle.
            cycles_at_once: cycles that the device runs between two looks at the result.
        """
        state, _ = self._prefill(prompt_ids, max_new_tokens)
        stream_cycles(
            self.params,
            self.weights,
            state,
            [len(prompt_ids)],
            lambda row, tokens: on_tokens(tokens),
            variant=self._variant(block_size),
            cycles_at_once=cycles_at_once,
        )

    def margin(self, token_ids: Sequence[int], candidates: Sequence[int]) -> float:
        """Returns how far the worst of `candidates` lies below the best next token, in logits."""
        tokens = jnp.asarray([list(token_ids)], jnp.int32)
        hidden = apply_target(self.params, self._target, tokens).hidden[:, -1]
        logits = np.asarray(compute_logits(self.params, self._target, hidden)[0])
        return float(logits.max() - logits[list(candidates)].min())

    def compile(self) -> Iterator[str]:
        """Runs every program once; yields the name of each before it is compiled."""
        yield "plain decoding"
        self.plain([1], 2)
        for size in self.variants:
            yield f"speculative decoding, block size {size}"
            self.decode_speculative([1], 2, size)
        narrower = 0
        for width in self._sizes.widths:
            yield f"prompts of up to {width} tokens"
            prompt = [1] * (narrower + 1)
            self.plain(prompt, 1)
            self._prefill(prompt, 1)
            narrower = width

    def _prefill(
        self, prompt_ids: Sequence[int], max_new_tokens: int
    ) -> tuple[SpeculativeState, float]:
        """Returns the state after the prefill, the same for all block sizes, and its seconds."""
        arrays = self._arrays(prompt_ids, max_new_tokens)
        variant = next(iter(self.variants.values()))
        state = init_speculative(
            self._target, variant.drafter, 1, self._sizes.capacity, self._sizes.max_new_tokens
        )
        jax.block_until_ready(state)
        start = time.perf_counter()
        state = prefill_speculative(self.params, self.weights, state, *arrays, variant=variant)
        jax.block_until_ready(state)
        return state, time.perf_counter() - start

    def _cycles(
        self, state: SpeculativeState, num_cycles: int, block_size: int
    ) -> SpeculativeState:
        variant = self._variant(block_size)
        return decode_cycles(self.params, self.weights, state, num_cycles, variant=variant)

    def _variant(self, block_size: int) -> Variant:
        if block_size not in self.variants:
            raise ValueError(
                f"block_size={block_size} is not compiled; allowed: {sorted(self.variants)}"
            )
        return self.variants[block_size]

    def _arrays(self, prompt_ids: Sequence[int], max_new_tokens: int) -> tuple[jax.Array, ...]:
        """Returns prompts, prompt_len, slots and max_new_tokens of a batch of one."""
        allowed = self._sizes.max_new_tokens
        if not 1 <= max_new_tokens <= allowed:
            raise ValueError(f"max_new_tokens={max_new_tokens} must lie in [1, {allowed}]")
        padded = np.zeros((1, self._sizes.width_of(len(prompt_ids))), np.int32)
        padded[0, : len(prompt_ids)] = prompt_ids
        return (
            jnp.asarray(padded),
            jnp.asarray([len(prompt_ids)], jnp.int32),
            jnp.zeros((1,), jnp.int32),
            jnp.asarray([max_new_tokens], jnp.int32),
        )


def _power_of_two(length: int) -> int:
    return max(SIZE_STEP, 1 << (length - 1).bit_length())


def _round_up(length: int) -> int:
    return -(-length // SIZE_STEP) * SIZE_STEP


def _answer(tokens: jax.Array, length: jax.Array, prompt_ids: Sequence[int]) -> tuple[int, ...]:
    return tuple(np.asarray(tokens[0])[len(prompt_ids) : int(length[0])].tolist())


def _emitted(state: SpeculativeState) -> tuple[int, ...]:
    return tuple(np.asarray(state.emitted[0])[: int(state.cycles[0])].tolist())
