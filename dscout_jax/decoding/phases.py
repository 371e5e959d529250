"""The two forwards of a cycle as programs of their own, for latency profiles."""

from functools import partial

import jax

from dscout_jax.decoding.sampling import greedy_tokens
from dscout_jax.decoding.speculative import (
    DraftWeights,
    SpeculativeState,
    draft,
    extend_context,
    target_ids,
    verify,
)
from dscout_jax.decoding.variant import Variant
from dscout_jax.models.cache import rollback
from dscout_jax.models.drafter import Context


@partial(jax.jit, static_argnames=("variant",), donate_argnames=("context",))
def draft_phase(
    params: dict,
    weights: DraftWeights,
    context: Context,
    anchors: jax.Array,
    start: jax.Array,
    taps: jax.Array,
    *,
    variant: Variant,
) -> tuple[jax.Array, Context]:
    """Takes in the features of one block, then drafts the next: the drafter's share of a cycle.

    Args:
        params: target weights, for the embedding table.
        weights: what drafting reads.
        context: drafter context; donated.
        anchors: [B] int32.
        start: [B] int32 position of each anchor, at least G.
        taps: [B, G, C * D] features of the G positions before the anchor.
        variant: static choices.

    Returns:
        Drafts [B, G-1] int32 and the extended context.
    """
    running = start >= 0
    before = start - taps.shape[1]
    context = extend_context(weights, variant, context, taps, before, running)
    logits = draft(weights, params, variant, anchors, start, context)
    return target_ids(weights, greedy_tokens(logits)), context


@partial(jax.jit, static_argnames=("variant",), donate_argnames=("state",))
def verify_phase(
    params: dict, state: SpeculativeState, block: jax.Array, *, variant: Variant
) -> tuple[jax.Array, jax.Array, SpeculativeState]:
    """Runs the target over a block and rolls back: the target's share of a cycle.

    Returns:
        Choices [B, G] int32, taps [B, G, C * D] and the state as it was (donated, same lengths).
    """
    length = state.rows.cache.length
    logits, out = verify(params, variant, block, state.rows)
    rows = state.rows.replace(cache=rollback(out.cache, length))
    return greedy_tokens(logits), out.taps, state.replace(rows=rows)
