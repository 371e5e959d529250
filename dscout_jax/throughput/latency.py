"""Latency of a cycle and of its parts, which does not depend on trained values.

cycle = draft + verify + overhead, each measured on its own; plain decoding beside them in the same
interleaved run, so that ratios survive a noisy machine.

Source: METHOD section 4, "Latency".
"""

import dataclasses
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dscout_jax.config.models import TargetConfig
from dscout_jax.decoding.autoregressive import GenerationState, decode_steps, init_generation
from dscout_jax.decoding.phases import draft_phase, verify_phase
from dscout_jax.decoding.speculative import (
    DraftWeights,
    SpeculativeState,
    decode_cycles,
    init_speculative,
)
from dscout_jax.decoding.variant import Variant


@dataclasses.dataclass(frozen=True)
class Setting:
    """What the times depend on besides the machine.

    Attributes:
        batch: B rows.
        context: tokens that each row holds already.
        steps: steps or cycles of one timed call of a loop.
    """

    batch: int = 1
    context: int = 300
    steps: int = 16

    def capacity(self, block_size: int) -> int:
        """Returns S that holds the context and all that the loop can emit."""
        needed = self.context + (self.steps + 2) * block_size
        return -(-needed // 64) * 64


def plain_state(config: TargetConfig, setting: Setting, capacity: int) -> GenerationState:
    """Returns rows that hold `setting.context` tokens and never end within the timed steps."""
    state = init_generation(config, setting.batch, capacity)
    length = jnp.full((setting.batch,), setting.context, jnp.int32)
    return state.replace(
        length=length,
        limit=jnp.full((setting.batch,), capacity, jnp.int32),
        done=jnp.zeros((setting.batch,), bool),
        cache=state.cache.replace(length=length - 1),
    )


def speculative_state(variant: Variant, setting: Setting, capacity: int) -> SpeculativeState:
    """Returns the same rows for speculative decoding."""
    state = init_speculative(
        variant.target, variant.drafter, setting.batch, capacity, setting.steps + 1
    )
    return state.replace(rows=plain_state(variant.target, setting, capacity))


def plain_timer(
    params: dict, config: TargetConfig, setting: Setting, block_size: int
) -> Callable[[], float]:
    """Returns a function that times plain decoding: seconds per step of the device loop.

    Args:
        params: target weights.
        config: their shapes.
        setting: sizes.
        block_size: G of the variants that it is compared with; sets the same cache capacity.
    """
    capacity = setting.capacity(block_size)

    def once() -> float:
        state = plain_state(config, setting, capacity)
        jax.block_until_ready(state)
        start = time.perf_counter()
        state = decode_steps(params, state, setting.steps, config=config, greedy=True, stop_ids=())
        jax.block_until_ready(state)
        return (time.perf_counter() - start) / setting.steps

    return once


def cycle_timer(
    params: dict, weights: DraftWeights, variant: Variant, setting: Setting
) -> Callable[[], float]:
    """Returns a function that times the device loop: seconds per draft + verify cycle."""
    capacity = setting.capacity(variant.block_size)

    def once() -> float:
        state = speculative_state(variant, setting, capacity)
        jax.block_until_ready(state)
        start = time.perf_counter()
        state = decode_cycles(params, weights, state, setting.steps, variant=variant)
        jax.block_until_ready(state)
        return (time.perf_counter() - start) / setting.steps

    return once


def phase_timers(
    params: dict, weights: DraftWeights, variant: Variant, setting: Setting
) -> dict[str, Callable[[], float]]:
    """Returns functions that time the bare forwards, `draft` and `verify`: seconds a call."""
    state = speculative_state(variant, setting, setting.capacity(variant.block_size))
    held = {"context": state.context, "state": state.replace(context=None)}
    block = jnp.ones((setting.batch, variant.block_size), jnp.int32)
    start = jnp.full((setting.batch,), setting.context - 1, jnp.int32)
    width = len(variant.tap_ids) * variant.target.hidden_size
    taps = jnp.zeros((setting.batch, variant.block_size, width))

    def draft() -> float:
        begin = time.perf_counter()
        drafts, held["context"] = draft_phase(
            params, weights, held["context"], block[:, 0], start, taps, variant=variant
        )
        jax.block_until_ready(drafts)
        return time.perf_counter() - begin

    def verify() -> float:
        begin = time.perf_counter()
        choices, _, held["state"] = verify_phase(params, held["state"], block, variant=variant)
        jax.block_until_ready(choices)
        return time.perf_counter() - begin

    return {"draft": draft, "verify": verify}


def timed(function: Callable[[], Any]) -> float:
    """Returns the seconds that `function` takes to finish on the device."""
    start = time.perf_counter()
    jax.block_until_ready(function())
    return time.perf_counter() - start


def interleave(
    timers: dict[str, Callable[[], float]], repeats: int, warmup: int = 2
) -> Iterator[dict[str, float]]:
    """Times every program once a round, in turn; yields the seconds of each round.

    A disturbance then falls on all programs alike. Warm-up rounds, compilation among them, are not
    yielded.
    """
    for round_index in range(warmup + repeats):
        sample = {name: timer() for name, timer in timers.items()}
        if round_index >= warmup:
            yield sample


def medians(samples: list[dict[str, float]]) -> dict[str, float]:
    """Returns the median seconds of each program."""
    return {name: float(np.median([sample[name] for sample in samples])) for name in samples[0]}
