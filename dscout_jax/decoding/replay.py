"""Replay: the accepted lengths of real decoding, without decoding.

At temperature 0 the output is known in advance, so speculative decoding is a walk over the target's
own response: draft at every anchor in parallel, count the correct prefix, step over it.

Source: METHOD section 4, "Replay".
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from dscout_jax.decoding.sampling import greedy_tokens
from dscout_jax.decoding.speculative import DraftWeights, target_ids
from dscout_jax.decoding.variant import Variant
from dscout_jax.decoding.verification import accepted_length
from dscout_jax.models.drafter import (
    block_inputs,
    draft_blocks,
    project_context,
    select_taps,
)
from dscout_jax.models.target import apply_head


@partial(jax.jit, static_argnames=("variant", "num_anchors", "chunk"))
def anchor_lengths(
    embedding: jax.Array,
    weights: DraftWeights,
    features: jax.Array,
    tokens: jax.Array,
    length: jax.Array,
    response_start: jax.Array,
    *,
    variant: Variant,
    num_anchors: int,
    chunk: int = 64,
) -> jax.Array:
    """Counts the drafts that would be accepted at each response position.

    Args:
        embedding: [V, D] of the target.
        weights: drafter, head and draft vocabulary.
        features: [B, S, C * D] target features, the variant's taps.
        tokens: [B, S] int32 prompt and greedy response, right padded.
        length: [B] int32.
        response_start: [B] int32 position of the first response token.
        variant: static choices.
        num_anchors: static, response positions looked at, from `response_start`; a multiple of
            `chunk`.
        chunk: static, anchors drafted at the same time.

    Returns:
        [B, num_anchors] int32: L at anchor `response_start + i`, at most the tokens left after it;
        undefined past the response's end.
    """
    batch, seq_len = tokens.shape
    if num_anchors % chunk:
        raise ValueError(f"num_anchors={num_anchors} is not a multiple of chunk={chunk}")
    positions = jnp.broadcast_to(jnp.arange(seq_len)[None], tokens.shape)
    params = select_taps(weights.drafter, variant.drafter, variant.taps)
    context = project_context(
        params,
        variant.drafter,
        features.astype(jnp.float32),
        positions,
        num_layers=variant.num_layers,
    )
    rows = jnp.arange(batch)[:, None]

    def lengths_of(first: jax.Array) -> jax.Array:
        anchors = response_start[:, None] + first + jnp.arange(chunk)[None]  # [B, A]
        inputs = block_inputs(
            tokens[rows, jnp.minimum(anchors, seq_len - 1)],
            anchors,
            block_size=variant.block_size,
            mask_token_id=variant.drafter.mask_token_id,
        )
        hidden = draft_blocks(
            weights.drafter,
            variant.drafter,
            jnp.take(embedding, inputs.tokens, axis=0),
            inputs.positions,
            context,
            num_layers=variant.num_layers,
        )
        drafts = target_ids(weights, greedy_tokens(apply_head(weights.head, hidden[:, :, 1:])))
        at = inputs.positions[:, :, 1:]
        truth = tokens[rows[:, :, None], jnp.minimum(at, seq_len - 1)]
        truth = jnp.where(at < length[:, None, None], truth, -1)
        return accepted_length(drafts, truth)

    chunks = jax.lax.map(lengths_of, jnp.arange(0, num_anchors, chunk))  # [chunks, B, A]
    return jnp.moveaxis(chunks, 0, 1).reshape(batch, num_anchors)


def walk(lengths: np.ndarray, num_tokens: int) -> list[int]:
    """Returns the tokens emitted by each cycle of decoding one response.

    Args:
        lengths: [>= num_tokens] accepted length at each response position.
        num_tokens: response tokens, stop token included. The first comes from prefill.

    Returns:
        tau of each cycle, each >= 1; they sum to `num_tokens - 1`.

    Example: lengths [2, 0, 0, 1, 0] over 5 tokens walk from anchor 0 to 3 to the end: [3, 1].
    """
    taus = []
    anchor = 0
    while anchor < num_tokens - 1:
        tau = min(int(lengths[anchor]) + 1, num_tokens - 1 - anchor)
        taus.append(tau)
        anchor += tau
    return taus
