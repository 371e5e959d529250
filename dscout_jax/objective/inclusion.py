"""Inclusion: which blocks are drawn from a row and which of their slots are supervised.

Everything here is integers and booleans, of static shape, computed inside jit from one key.
"""

import flax.struct
import jax
import jax.numpy as jnp

from dscout_jax.config.experiment import ObjectiveConfig
from dscout_jax.models.drafter import BlockInputs, block_inputs


@flax.struct.dataclass
class Blocks:
    """A blocks of G slots drawn from every row.

    Attributes:
        inputs: tokens, positions and visible context of the blocks.
        labels: [B, A, G] int32 true token at each position (undefined where not included).
        included: [B, A, G] boolean, True = supervised; slot 0 never is, nor a revealed slot, nor a
            dummy block.
        revealed: [B, A, G] boolean, slots behind the anchor whose true token is an input.
        exits: [B, A] int32 index into the objective's depths; 0 where there are none.
    """

    inputs: BlockInputs
    labels: jax.Array
    included: jax.Array
    revealed: jax.Array
    exits: jax.Array


def draw(key: jax.Array, shares: tuple[float, ...], shape: tuple[int, ...]) -> jax.Array:
    """Returns int32 indices of `shape`, each drawn with probability in proportion to its share."""
    return jax.random.categorical(key, jnp.log(jnp.asarray(shares)), shape=shape).astype(jnp.int32)


def sample_taps(
    key: jax.Array, objective: ObjectiveConfig, batch: int, num_taps: int
) -> jax.Array | None:
    """Returns [B, C] boolean, the taps that each row is conditioned on; None = all always.

    A tap that is left out counts as zeros, which is the same as cutting its columns of `fc`.
    Source: METHOD section 1 (elastic drafter).
    """
    if not objective.taps:
        return None
    lists = jnp.asarray([[tap in kept for tap in range(num_taps)] for kept, _ in objective.taps])
    return lists[draw(key, tuple(share for _, share in objective.taps), (batch,))]


def anchor_mask(length: jax.Array, response_start: jax.Array, seq_len: int) -> jax.Array:
    """Returns [B, S] boolean, True where a block may start.

    Response positions with at least one successor inside the response: the prefilled first token is
    the first anchor of decoding, the last token predicts nothing.

    Args:
        length: [B] int32 valid tokens of each row.
        response_start: [B] int32 position of the first response token.
        seq_len: S.
    """
    at = jnp.arange(seq_len)[None, :]
    return (at >= response_start[:, None]) & (at + 1 < length[:, None])


def sample_anchors(
    key: jax.Array, eligible: jax.Array, num_anchors: int
) -> tuple[jax.Array, jax.Array]:
    """Draws anchors without replacement, uniformly among the eligible positions of each row.

    Args:
        key: PRNG key.
        eligible: [B, S] boolean.
        num_anchors: A, static; at most S.

    Returns:
        anchors [B, A] int32 and valid [B, A] boolean. Rows with fewer eligible positions than A are
        filled with position 0, valid False.
    """
    scores = jnp.where(eligible, jax.random.uniform(key, eligible.shape), -1.0)
    best, anchors = jax.lax.top_k(scores, num_anchors)
    valid = best >= 0.0
    return jnp.where(valid, anchors, 0).astype(jnp.int32), valid


def reveal_prefix(key: jax.Array, shape: tuple[int, int, int], decay: float) -> jax.Array:
    """Reveals the first r drafts of each block [B, A, G], r in 1..G-2 with weight decay**r.

    Blocks of two slots have nothing to reveal. Source: D2SD; METHOD section 2.1.
    """
    block_size = shape[-1]
    slots = jnp.arange(block_size)[None, None]
    if block_size == 2:
        return jnp.zeros(shape, bool)
    logits = jnp.log(decay) * jnp.arange(1, block_size - 1)
    length = 1 + jax.random.categorical(key, logits, shape=(*shape[:-1], 1))
    return (slots > 0) & (slots <= length)


def reveal_random(key: jax.Array, shape: tuple[int, int, int], decay: float) -> jax.Array:
    """Reveals each draft of a block [B, A, G] with the block's own rate u ~ U(0, 1)."""
    del decay  # of prefixes
    rate_key, slot_key = jax.random.split(key)
    rate = jax.random.uniform(rate_key, (*shape[:-1], 1))
    revealed = jax.random.uniform(slot_key, shape) < rate
    return revealed & (jnp.arange(shape[-1]) > 0)[None, None]


REVEALS = {"prefix": reveal_prefix, "random": reveal_random}


def make_blocks(
    tokens: jax.Array,
    length: jax.Array,
    anchors: jax.Array,
    valid: jax.Array,
    *,
    block_size: int,
    mask_token_id: int,
    label_mask: jax.Array | None = None,
    objective: ObjectiveConfig | None = None,
    key: jax.Array | None = None,
) -> Blocks:
    """Builds the blocks of G = `block_size` slots that start at `anchors`.

    The first label that is missing or not allowed ends the supervised part of a block: no slot
    behind it could be accepted.

    Args:
        tokens: [B, S] int32.
        length: [B] int32 valid tokens.
        anchors: [B, A] int32.
        valid: [B, A] boolean; False marks a dummy block.
        block_size: G, static.
        mask_token_id: id of the masked slots.
        label_mask: [B, S] boolean, False where the token is outside the draft vocabulary; None =
            every token can be drafted.
        objective: says which slots are revealed and which depths are drawn; None = none.
        key: PRNG key of both.
    """
    batch, seq_len = tokens.shape
    rows = jnp.arange(batch)[:, None, None]
    inputs = block_inputs(
        tokens[rows[:, :, 0], anchors],
        anchors,
        block_size=block_size,
        mask_token_id=mask_token_id,
    )
    at = jnp.minimum(inputs.positions, seq_len - 1)
    usable = inputs.positions < length[:, None, None]
    if label_mask is not None:
        # The anchor is known, whatever it is; only drafted slots need a draftable token.
        usable = usable & (label_mask[rows, at] | (jnp.arange(block_size) == 0)[None, None])
    unbroken = jnp.cumprod(usable.astype(jnp.int32), axis=-1).astype(bool)
    drafted = (jnp.arange(block_size) > 0)[None, None]
    supervised = unbroken & drafted & valid[:, :, None]
    revealed = jnp.zeros_like(supervised)
    exits = jnp.zeros(valid.shape, jnp.int32)
    if objective is not None and objective.depths:
        shares = tuple(share for _, share in objective.depths)
        exits = draw(jax.random.fold_in(key, 1), shares, valid.shape)
    if objective is not None and objective.reveal_rate > 0.0:
        block_key, slot_key = jax.random.split(key)
        chosen = jax.random.bernoulli(block_key, objective.reveal_rate, valid.shape)[:, :, None]
        law = REVEALS[objective.reveal]
        revealed = supervised & chosen & law(slot_key, supervised.shape, objective.reveal_decay)
        inputs = inputs.replace(tokens=jnp.where(revealed, tokens[rows, at], inputs.tokens))
    return Blocks(
        inputs=inputs,
        labels=tokens[rows, at],
        included=supervised & ~revealed,
        revealed=revealed,
        exits=exits,
    )
