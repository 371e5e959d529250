"""Device programs of the engine: prompts in chunks, rows into slots, rows between batches.

A prompt is prefilled in a state of one row, a chunk at a time, so that rows in flight wait for no
more than a chunk. The rows keep their taps: whatever variant decodes next, the drafter's context
can be made of them.
"""

from functools import partial

import jax
import jax.numpy as jnp

from dscout_jax.config.models import DrafterConfig, TargetConfig
from dscout_jax.decoding.autoregressive import (
    GenerationState,
    admit_rows,
    from_words,
    init_generation,
    to_words,
)
from dscout_jax.decoding.sampling import Sampling
from dscout_jax.decoding.speculative import DraftWeights, SpeculativeState
from dscout_jax.models.drafter import Context, project_context, select_features, select_taps
from dscout_jax.models.target import apply_target, compute_logits


def init_staging(target: TargetConfig, drafter: DrafterConfig, capacity: int) -> GenerationState:
    """Returns an empty row in which a prompt is prefilled."""
    return init_generation(target, 1, capacity, num_taps=len(drafter.target_layer_ids))


@partial(jax.jit, static_argnames=("config", "tap_ids"), donate_argnames=("staging",))
def prefill_chunk(
    params: dict,
    staging: GenerationState,
    chunk: jax.Array,
    num_tokens: jax.Array,
    *,
    config: TargetConfig,
    tap_ids: tuple[int, ...],
) -> tuple[GenerationState, jax.Array]:
    """Runs the target over the next tokens of the prompt in staging.

    Compiled once per (P, S). Donates `staging`.

    Args:
        params: target weights.
        staging: one row; `cache.length` of its tokens are done.
        chunk: [1, P] int32 next tokens, padded; padding past the row's end is dropped.
        num_tokens: [] int32 in [1, P], how many are not padding.
        config: target shapes.
        tap_ids: the taps that rows keep.

    Returns:
        The row with `num_tokens` more done, and the logits [1, 1, V] after the last of them.
    """
    start = staging.cache.length  # [1]
    out = apply_target(params, config, chunk, cache=staging.cache, tap_ids=tap_ids)
    last = jax.lax.dynamic_slice_in_dim(out.hidden, num_tokens - 1, 1, axis=1)
    at = start[0] + jnp.arange(chunk.shape[1])
    done = start + num_tokens
    # Entries of padding lie past `done`, where the next chunk overwrites them.
    staging = staging.replace(
        tokens=staging.tokens.at[0, at].set(chunk[0], mode="drop"),
        length=done,
        cache=out.cache.replace(length=done),
        taps=staging.taps.at[0, at].set(to_words(out.taps[0]), mode="drop"),
    )
    return staging, compute_logits(params, config, last)


@partial(
    jax.jit,
    static_argnames=("drafter", "taps", "greedy", "stop_ids"),
    donate_argnames=("state",),
)
def admit_staged(
    weights: DraftWeights,
    state: SpeculativeState,
    staging: GenerationState,
    logits: jax.Array,
    slot: jax.Array,
    max_new_tokens: jax.Array,
    sampling: Sampling,
    *,
    drafter: DrafterConfig,
    taps: tuple[int, ...] | None,
    greedy: bool,
    stop_ids: tuple[int, ...],
) -> SpeculativeState:
    """Copies a prefilled row into a slot and emits its first token.

    Compiled once per (B, S, taps, greedy). Donates `state`, not `staging`.

    Args:
        weights: what drafting reads.
        state: rows in flight.
        staging: the row.
        logits: [1, 1, V] after its last token.
        slot: [] int32.
        max_new_tokens: [] int32, at least 1.
        sampling: of the one row.
        drafter: drafter shapes.
        taps: static, that the context is made of; indices into the drafter's, None = all.
        greedy: static; whether the row is.
        stop_ids: static ids that end a row.
    """
    slots = slot[None]
    rows = admit_rows(
        state.rows,
        logits[:, 0],
        staging.cache,
        staging.tokens,
        staging.length,
        slots,
        max_new_tokens[None],
        sampling,
        greedy=greedy,
        stop_ids=stop_ids,
        taps=staging.taps,
    )
    new = context_of(weights, drafter, taps, staging.taps)
    context = jax.tree.map(lambda old, row: old.at[slots].set(row), state.context, new)
    return SpeculativeState(
        rows=rows,
        context=context,
        cycles=state.cycles.at[slots].set(0),
        emitted=state.emitted.at[slots].set(0),
    )


def context_of(
    weights: DraftWeights,
    drafter: DrafterConfig,
    taps: tuple[int, ...] | None,
    words: jax.Array,
) -> Context:
    """Returns the context, made of some taps, of rows that keep all of them as `words` [B, S, ...].

    All layers of the drafter have one.
    """
    features = select_features(from_words(words), drafter, taps)
    positions = jnp.broadcast_to(jnp.arange(words.shape[1])[None], words.shape[:2])
    params = select_taps(weights.drafter, drafter, taps)
    return project_context(params, drafter, features, positions)


@partial(jax.jit, static_argnames=("drafter", "taps"), donate_argnames=("state",))
def renew_context(
    weights: DraftWeights,
    state: SpeculativeState,
    *,
    drafter: DrafterConfig,
    taps: tuple[int, ...] | None,
) -> SpeculativeState:
    """Makes the context anew, of other taps or after plain decoding.

    Compiled once per (B, S, taps). Donates `state`.
    """
    return state.replace(context=context_of(weights, drafter, taps, state.rows.taps))


@jax.jit
def take_rows(state: SpeculativeState, index: jax.Array) -> SpeculativeState:
    """Returns a state with the named rows [B'] int32 of another one; -1 is an empty slot.

    Compiled once per (B, B', S).
    """
    taken = jax.tree.map(lambda leaf: leaf[jnp.maximum(index, 0)], state)
    rows = taken.rows
    return taken.replace(rows=rows.replace(done=rows.done | (index < 0)))


@jax.jit
def fork_row(state: SpeculativeState, slot: jax.Array, num_tokens: jax.Array) -> GenerationState:
    """Returns a staging row that starts with the first `num_tokens` [] tokens of a slot."""
    row = jax.tree.map(lambda leaf: jax.lax.dynamic_slice_in_dim(leaf, slot, 1), state.rows)
    length = num_tokens[None]
    return row.replace(length=length, cache=row.cache.replace(length=length))
