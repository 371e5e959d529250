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


def row_keys(key: jax.Array, first_row: jax.Array | int, num_rows: int) -> jax.Array:
    """Returns a PRNG key for each of B = `num_rows` rows of a batch, [B].

    All draws for a row come from its own key, so they do not depend on how a batch is split over
    devices, processes or accumulation steps.

    Args:
        key: of the batch.
        first_row: index of the first of these rows in the whole batch.
        num_rows: B, static.
    """
    return jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, first_row + jnp.arange(num_rows))


def folded(keys: jax.Array, data: int) -> jax.Array:
    """Returns keys [B] of another purpose."""
    return jax.vmap(lambda key: jax.random.fold_in(key, data))(keys)


def draw(keys: jax.Array, shares: tuple[float, ...], shape: tuple[int, ...]) -> jax.Array:
    """Returns int32 indices [B, *shape], each drawn in proportion to its share."""
    logits = jnp.log(jnp.asarray(shares))

    def of_row(key):
        return jax.random.categorical(key, logits, shape=shape)

    return jax.vmap(of_row)(keys).astype(jnp.int32)


def sample_taps(keys: jax.Array, objective: ObjectiveConfig, num_taps: int) -> jax.Array | None:
    """Returns [B, C] boolean, the taps that each row is conditioned on; None = all always.

    A tap that is left out counts as zeros, which is the same as cutting its columns of `fc`.
    Source: METHOD section 1 (elastic drafter).
    """
    if not objective.taps:
        return None
    lists = jnp.asarray([[tap in kept for tap in range(num_taps)] for kept, _ in objective.taps])
    return lists[draw(keys, tuple(share for _, share in objective.taps), ())]


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
    keys: jax.Array, eligible: jax.Array, num_anchors: int
) -> tuple[jax.Array, jax.Array]:
    """Draws anchors without replacement, uniformly among the eligible positions of each row.

    Args:
        keys: [B] PRNG keys.
        eligible: [B, S] boolean.
        num_anchors: A, static; at most S.

    Returns:
        anchors [B, A] int32 and valid [B, A] boolean. Rows with fewer eligible positions than A are
        filled with position 0, valid False.
    """
    drawn = jax.vmap(lambda key: jax.random.uniform(key, eligible.shape[1:]))(keys)
    scores = jnp.where(eligible, drawn, -1.0)
    best, anchors = jax.lax.top_k(scores, num_anchors)
    valid = best >= 0.0
    return jnp.where(valid, anchors, 0).astype(jnp.int32), valid


def reveal_prefix(key: jax.Array, shape: tuple[int, int], decay: float) -> jax.Array:
    """Reveals the first r drafts of each block [A, G] of a row, r in 1..G-2 with weight decay**r.

    Blocks of two slots have nothing to reveal. Source: D2SD; METHOD section 2.1.
    """
    num_blocks, block_size = shape
    if block_size == 2:
        return jnp.zeros(shape, bool)
    logits = jnp.log(decay) * jnp.arange(1, block_size - 1)
    length = 1 + jax.random.categorical(key, logits, shape=(num_blocks, 1))
    slots = jnp.arange(block_size)[None]
    return (slots > 0) & (slots <= length)


def reveal_random(key: jax.Array, shape: tuple[int, int], decay: float) -> jax.Array:
    """Reveals each draft of a block [A, G] with the block's own rate u ~ U(0, 1)."""
    del decay  # of prefixes
    rate_key, slot_key = jax.random.split(key)
    rate = jax.random.uniform(rate_key, (shape[0], 1))
    return (jax.random.uniform(slot_key, shape) < rate) & (jnp.arange(shape[1]) > 0)[None]


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
    keys: jax.Array | None = None,
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
        keys: [B] PRNG keys of both.
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
        exits = draw(folded(keys, 1), shares, valid.shape[1:])
    if objective is not None and objective.reveal_rate > 0.0:

        def reveal(key):
            block_key, slot_key = jax.random.split(key)
            chosen = jax.random.bernoulli(block_key, objective.reveal_rate, valid.shape[1:])
            law = REVEALS[objective.reveal]
            return chosen[:, None] & law(slot_key, supervised.shape[1:], objective.reveal_decay)

        revealed = supervised & jax.vmap(reveal)(keys)
        inputs = inputs.replace(tokens=jnp.where(revealed, tokens[rows, at], inputs.tokens))
    return Blocks(
        inputs=inputs,
        labels=tokens[rows, at],
        included=supervised & ~revealed,
        revealed=revealed,
        exits=exits,
    )
