"""Speculative decoding: draft a block, verify it, keep what stands.

One cycle: the drafter fills G-1 slots in one pass, the target checks anchor and drafts in one pass,
the drafts that stand and one token of the target are emitted, both caches roll back by length only.

What stands is said by `Variant.rule` (METHOD section 3).
"""

from functools import partial

import flax.struct
import jax
import jax.numpy as jnp

from dscout_jax.config.models import DrafterConfig, TargetConfig
from dscout_jax.decoding.autoregressive import (
    GenerationState,
    admit_rows,
    init_generation,
    place,
    prefill_rows,
    to_words,
)
from dscout_jax.decoding.sampling import (
    ACCEPTANCE,
    DRAFT,
    TOKEN,
    Sampling,
    choose_tokens,
    draw_tokens,
    fold_positions,
    greedy_tokens,
    log_law,
)
from dscout_jax.decoding.variant import Variant
from dscout_jax.decoding.verification import accepted_length, emitted_length, reject_drafts
from dscout_jax.models.cache import init_cache, rollback, write
from dscout_jax.models.drafter import (
    Context,
    block_inputs,
    draft_blocks,
    project_context,
    select_features,
    select_taps,
)
from dscout_jax.models.target import (
    TargetOutput,
    apply_head,
    apply_target,
    compute_logits,
    embed,
    head_rows,
)


@flax.struct.dataclass
class DraftWeights:
    """What drafting reads.

    Attributes:
        drafter: drafter params, whole; depth and taps are cut by the variant.
        head: [Vd, D] rows of the target's head for the draft vocabulary (the table itself, not a
            copy, when the head is tied and the vocabulary whole).
        token_ids: [Vd] int32 target id of each row; None when Vd = V.
    """

    drafter: dict
    head: jax.Array
    token_ids: jax.Array | None


@flax.struct.dataclass
class SpeculativeState:
    """Rows in flight between two cycles.

    Attributes:
        rows: tokens, lengths and target cache; the last known token of a row is its anchor.
        context: drafter context K/V, [B, K_h, S, H] a layer, valid below `rows.length - 1`.
        cycles: [B] int32 cycles done by each row.
        emitted: [B, M] int32, tokens emitted by each cycle (the first, prefilled token is not one
            of them); zero past `cycles`.
    """

    rows: GenerationState
    context: Context
    cycles: jax.Array
    emitted: jax.Array


def make_draft_weights(
    target_params: dict,
    config: TargetConfig,
    drafter_params: dict,
    token_ids: jax.Array | None = None,
) -> DraftWeights:
    """Returns the weights that drafting reads; `token_ids` [Vd] prunes the draft vocabulary."""
    return DraftWeights(drafter_params, head_rows(target_params, config, token_ids), token_ids)


def init_speculative(
    target: TargetConfig,
    drafter: DrafterConfig,
    batch: int,
    capacity: int,
    max_cycles: int,
    num_taps: int = 0,
) -> SpeculativeState:
    """Returns `batch` empty slots.

    Args:
        target: target shapes.
        drafter: drafter shapes.
        batch: B.
        capacity: S; at least prompt + new tokens + block size.
        max_cycles: M; at least the largest number of new tokens.
        num_taps: C of the taps that the rows keep; 0 = none.
    """
    context = init_cache(drafter, batch, capacity)
    return SpeculativeState(
        rows=init_generation(target, batch, capacity, num_taps),
        context=Context(context.keys, context.values),
        cycles=jnp.zeros((batch,), jnp.int32),
        emitted=jnp.zeros((batch, max_cycles), jnp.int32),
    )


def draft(
    weights: DraftWeights,
    target_params: dict,
    variant: Variant,
    anchors: jax.Array,
    start: jax.Array,
    context: Context,
) -> jax.Array:
    """Runs the drafter over the block after each anchor.

    Args:
        weights: drafter, head rows and draft vocabulary.
        target_params: for the embedding table.
        variant: static choices.
        anchors: [B] int32 last known tokens.
        start: [B] int32 their positions.
        context: context K/V, valid below `start`.

    Returns:
        [B, G-1, Vd] logits over the draft vocabulary.
    """
    inputs = block_inputs(
        anchors[:, None],
        start[:, None],
        block_size=variant.block_size,
        mask_token_id=variant.drafter.mask_token_id,
    )
    hidden = draft_blocks(
        weights.drafter,
        variant.drafter,
        embed(target_params, inputs.tokens),
        inputs.positions,
        context,
        num_layers=variant.num_layers,
    )[:, 0, 1:]  # [B, G-1, D]
    return apply_head(weights.head, hidden)


def target_ids(weights: DraftWeights, drafts: jax.Array) -> jax.Array:
    """Returns the target's ids [...] int32 of indices into the draft vocabulary."""
    return drafts if weights.token_ids is None else jnp.take(weights.token_ids, drafts)


def verify(params: dict, variant: Variant, block: jax.Array, rows: GenerationState):
    """Runs the target over anchor and drafts [B, G].

    Returns:
        The target's logits after each slot, [B, G, V], and the `TargetOutput` with the variant's
        taps, or with all where the rows keep them.
    """
    out = apply_target(
        params,
        variant.target,
        block,
        cache=rows.cache,
        tap_ids=variant.tap_ids if rows.taps is None else variant.drafter.target_layer_ids,
        active=~rows.done,
    )
    return compute_logits(params, variant.target, out.hidden), out


def draft_and_verify(
    params: dict,
    weights: DraftWeights,
    variant: Variant,
    rows: GenerationState,
    context: Context,
) -> tuple[jax.Array, jax.Array, TargetOutput]:
    """Returns the drafts that stand [B], the tokens [B, G] that they and the target give, and taps.

    Of the tokens, the first `accepted + 1` count.
    """
    start = rows.length - 1  # position of the anchor
    anchors = rows.tokens[jnp.arange(start.shape[0]), start]
    at = rows.length[:, None] + jnp.arange(variant.block_size)[None]  # [B, G] of the tokens
    draft_logits = draft(weights, params, variant, anchors, start, context)
    if variant.rule == "rejection":
        draft_law = log_law(draft_logits, rows.sampling)
        keys = fold_positions(rows.sampling.keys, at[:, :-1], DRAFT)
        chosen = draw_tokens(draft_law, keys)
    else:
        chosen = greedy_tokens(draft_logits)
    drafts = target_ids(weights, chosen)
    block = jnp.concatenate([anchors[:, None], drafts], axis=1)  # [B, G]
    logits, out = verify(params, variant, block, rows)
    if variant.rule == "rejection":
        keys = (
            fold_positions(rows.sampling.keys, at[:, :-1], ACCEPTANCE),
            fold_positions(rows.sampling.keys, at, TOKEN),
        )
        law = log_law(logits, rows.sampling)
        accepted, tokens = reject_drafts(law, draft_law, chosen, keys, weights.token_ids)
    else:
        tokens = choose_tokens(logits, rows.sampling, at, greedy=variant.rule == "greedy")
        accepted = accepted_length(drafts, tokens[:, :-1])
    return accepted, tokens, out


def extend_context(
    weights: DraftWeights,
    variant: Variant,
    context: Context,
    taps: jax.Array,
    start: jax.Array,
    active: jax.Array,
) -> Context:
    """Writes context K/V of T target positions starting at `start` [B]; taps are [B, T, C * D].

    Positions past the accepted ones hold rejected drafts: they lie at or past the next anchor,
    where no block looks, and the next cycle overwrites them.
    """
    capacity = context.keys[0].shape[2]
    positions = start[:, None] + jnp.arange(taps.shape[1])[None, :]
    params = select_taps(weights.drafter, variant.drafter, variant.taps)
    new = project_context(params, variant.drafter, taps, positions, num_layers=variant.num_layers)
    at = jnp.where(active, start, capacity)
    depth = len(new.keys)
    return Context(
        keys=tuple(map(write, context.keys, new.keys, [at] * depth)) + context.keys[depth:],
        values=tuple(map(write, context.values, new.values, [at] * depth)) + context.values[depth:],
    )


def cycle(
    params: dict, weights: DraftWeights, variant: Variant, state: SpeculativeState
) -> SpeculativeState:
    """Advances every running row by one draft + verify cycle.

    Source: METHOD section 3; z-lab DFlash `dflash_generate`.
    """
    rows = state.rows
    batch, capacity = rows.tokens.shape
    row_ids = jnp.arange(batch)
    running = ~rows.done
    accepted, tokens, out = draft_and_verify(params, weights, variant, rows, state.context)
    budget = jnp.maximum(rows.limit - rows.length, 1)
    emitted, ends = emitted_length(tokens, accepted, budget, variant.stop_ids)
    emitted = jnp.where(running, emitted, 0)

    at = jnp.where(running, rows.length, capacity + 1)[:, None]
    at = at + jnp.arange(variant.block_size)[None]  # [B, G], past the end in finished rows
    length = rows.length + emitted
    start, taps, kept = rows.length - 1, out.taps, rows.taps
    if kept is not None:
        fed = at - 1  # positions of the block
        kept = kept.at[row_ids[:, None], fed].set(to_words(taps), mode="drop")
        taps = select_features(taps, variant.drafter, variant.taps)
    context = extend_context(weights, variant, state.context, taps, start, running)
    cycle_at = jnp.where(running, state.cycles, state.emitted.shape[1])
    return SpeculativeState(
        rows=rows.replace(
            tokens=rows.tokens.at[row_ids[:, None], at].set(tokens, mode="drop"),
            length=length,
            done=rows.done | ends,
            cache=rollback(out.cache, jnp.where(running, length - 1, rows.cache.length)),
            taps=kept,
        ),
        context=context,
        cycles=state.cycles + running,
        emitted=state.emitted.at[row_ids, cycle_at].set(emitted, mode="drop"),
    )


@partial(jax.jit, static_argnames=("variant",), donate_argnames=("state",))
def prefill_speculative(
    params: dict,
    weights: DraftWeights,
    state: SpeculativeState,
    prompts: jax.Array,
    prompt_len: jax.Array,
    slots: jax.Array,
    max_new_tokens: jax.Array,
    sampling: Sampling | None = None,
    *,
    variant: Variant,
) -> SpeculativeState:
    """Prefills R prompts [R, P] into slots [R], target cache and drafter context alike.

    Compiled once per (R, P, B, S). Donates `state`. See `autoregressive.admit_rows`.
    """
    logits, out = prefill_rows(params, variant.target, prompts, prompt_len, variant.tap_ids)
    rows = admit_rows(
        state.rows,
        logits,
        out.cache,
        prompts,
        prompt_len,
        slots,
        max_new_tokens,
        sampling,
        greedy=variant.rule == "greedy",
        stop_ids=variant.stop_ids,
    )
    new = project_context(
        select_taps(weights.drafter, variant.drafter, variant.taps),
        variant.drafter,
        out.taps,
        jnp.broadcast_to(jnp.arange(prompts.shape[1])[None], prompts.shape),
        num_layers=variant.num_layers,
    )
    depth = len(new.keys)
    at = [slots] * depth
    old = state.context
    return SpeculativeState(
        rows=rows,
        context=Context(
            keys=tuple(map(place, old.keys, new.keys, at)) + old.keys[depth:],
            values=tuple(map(place, old.values, new.values, at)) + old.values[depth:],
        ),
        cycles=state.cycles.at[slots].set(0, mode="drop"),
        emitted=state.emitted.at[slots].set(0, mode="drop"),
    )


@partial(jax.jit, static_argnames=("variant",), donate_argnames=("state",))
def decode_cycles(
    params: dict,
    weights: DraftWeights,
    state: SpeculativeState,
    num_cycles: jax.Array | int,
    *,
    variant: Variant,
) -> SpeculativeState:
    """Runs at most `num_cycles` (traced) cycles, or until every row is done.

    Compiled once per (B, S, variant). Donates `state`: caches are updated in place.
    """

    def unfinished(carry):
        step, state = carry
        return (step < num_cycles) & ~jnp.all(state.rows.done)

    def body(carry):
        step, state = carry
        return step + 1, cycle(params, weights, variant, state)

    return jax.lax.while_loop(unfinished, body, (jnp.int32(0), state))[1]
