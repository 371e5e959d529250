"""The training loss as the product inclusion x weighting x prediction.

    loss = sum_{b,k} I[b,k] * W[b,k] * l[b,k] / Z

`loss_sums` returns numerator and denominator apart, so that devices can sum each before dividing.

Source: METHOD sections 2 and 2.4.
"""

from functools import partial
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from dscout_jax.config.experiment import ObjectiveConfig, parse_sum
from dscout_jax.config.models import DrafterConfig
from dscout_jax.models.drafter import Context, draft_blocks, project_context
from dscout_jax.objective import acceptance as estimates
from dscout_jax.objective import prediction
from dscout_jax.objective.chunks import split_chunks, sum_chunks
from dscout_jax.objective.inclusion import (
    Blocks,
    anchor_mask,
    folded,
    make_blocks,
    sample_anchors,
    sample_taps,
)
from dscout_jax.objective.slots import Schedule, Slots, Terms, slot_terms

_TAPS = 1_000_000  # folded into a row's key for its taps; horizons use 0, 1, 2, ...


@flax.struct.dataclass
class Frozen:
    """What the loss reads of the target. No gradient reaches it.

    Attributes:
        embedding: [V, D] embedding table.
        head: [Vd, D] head rows of the draft vocabulary.
        draft_index: [V] int32 row of each token in `head`, -1 outside; None when Vd = V.
    """

    embedding: jax.Array
    head: jax.Array
    draft_index: jax.Array | None = None


@flax.struct.dataclass
class SlotSums:
    """Sums over blocks, by slot, of one horizon; the anchor's slot 0 holds zeros.

    Attributes:
        count: [G] supervised slots.
        loss: [G] sum of I * l.
        correct: [G] supervised slots whose most likely token is the label.
        accepted: [G] sum of I * a, a the objective's estimate of acceptance.
        weight: [G] sum of I * W.
        weight_square: [G] sum of I * W^2.
    """

    count: jax.Array
    loss: jax.Array
    correct: jax.Array
    accepted: jax.Array
    weight: jax.Array
    weight_square: jax.Array


def reads_target(objective: ObjectiveConfig) -> bool:
    """Whether a factor reads the target's distribution: batches must then hold `target_hidden`."""
    names = {name for _, name in parse_sum(objective.prediction)}
    return objective.acceptance in estimates.NEEDS_TARGET or bool(names & prediction.NEEDS_TARGET)


def loss_sums(
    drafter_params: dict,
    frozen: Frozen,
    features: jax.Array,
    batch: dict[str, jax.Array],
    keys: jax.Array,
    *,
    config: DrafterConfig,
    objective: ObjectiveConfig,
    warmth: jax.Array | float = 1.0,
    acceptance: tuple[jax.Array, ...] | None = None,
    dtype: Any = jnp.float32,
    remat: bool = False,
    naive: bool = False,
) -> tuple[jax.Array, jax.Array, dict[int, SlotSums]]:
    """Draws blocks and returns the sums whose ratio is the loss.

    Args:
        drafter_params: the only argument with a gradient.
        frozen: the target's tables.
        features: [B, S, C * D] target features of every token.
        batch: `tokens` [B, S], `length` [B], `response_start` [B], int32; `target_hidden`
            [B, S, D], the target's final hidden states, where `reads_target`.
        keys: [B] PRNG keys of anchors, revealed slots and cuts, of `inclusion.row_keys`.
        config: drafter shapes, static.
        objective: choices of the three factors, static.
        warmth: u [] in [0, 1], how far the weights are warmed up.
        acceptance: per horizon the running mean acceptance [G - 1] of each slot, for acceptance
            `ema`; None = 1.
        dtype: static, of weights and activations in the drafter's pass; statistics, logits and
            losses are float32.
        remat: static; the drafter keeps its layers' inputs only, less memory for more time.
        naive: all blocks at once, differentiated as it stands; the same numbers, for tests.

    Returns:
        numerator [], denominator [] (divide after summing each over all devices; the denominator is
        0 when no row has a valid anchor), and per horizon the `SlotSums`.
    """
    seq_len = batch["tokens"].shape[1]
    shape = batch["tokens"].shape
    positions = jnp.broadcast_to(jnp.arange(seq_len)[None], shape)
    features = features.astype(dtype)
    num_taps = len(config.target_layer_ids)
    taps = sample_taps(folded(keys, _TAPS), objective, num_taps)
    if taps is not None:
        apart = features.reshape(*shape, num_taps, config.hidden_size)
        features = (apart * taps[:, None, :, None]).reshape(features.shape)
    context = project_context(drafter_params, config, features, positions)
    # Gradients are added up over chunks, which wants float32.
    context = cast(context, jnp.float32)
    eligible = anchor_mask(batch["length"], batch["response_start"], seq_len)
    label_mask = None
    if frozen.draft_index is not None:
        label_mask = frozen.draft_index[batch["tokens"]] >= 0
        # An anchor whose next token cannot be drafted would supervise nothing.
        eligible = eligible & jnp.roll(label_mask, -1, axis=1)
    target_hidden = batch["target_hidden"] if reads_target(objective) else None
    numerator = jnp.float32(0.0)
    denominator = jnp.float32(1.0 if objective.normalizer == "none" else 0.0)
    sums = {}
    for index, (block_size, num_anchors) in enumerate(objective.horizons):
        horizon_keys = folded(keys, index)
        anchors, valid = sample_anchors(folded(horizon_keys, 0), eligible, num_anchors)
        blocks = make_blocks(
            batch["tokens"],
            batch["length"],
            anchors,
            valid,
            block_size=block_size,
            mask_token_id=config.mask_token_id,
            label_mask=label_mask,
            objective=objective,
            keys=folded(horizon_keys, 1),
        )
        schedule = Schedule(
            jnp.float32(warmth),
            jnp.ones(block_size - 1) if acceptance is None else acceptance[index],
        )
        block_fn = partial(block_sums, config, objective, dtype, remat)
        learned, constants = (drafter_params, context), (frozen, target_hidden, schedule)
        if naive:
            total, slots = block_fn(learned, constants, blocks)
        else:
            num_chunks = -(-num_anchors // objective.chunk_anchors)
            chunks = split_chunks(blocks, num_chunks)
            total, slots = sum_chunks(block_fn, learned, constants, chunks)
        numerator = numerator + total
        denominator = denominator + normalizer(objective.normalizer, slots, valid)
        sums[block_size] = slots
    return numerator, denominator, sums


def cast(tree: Any, dtype: Any) -> Any:
    """Returns the tree with every leaf in another dtype."""
    return jax.tree.map(lambda x: x.astype(dtype), tree)


def normalizer(name: str, slots: SlotSums, valid: jax.Array) -> jax.Array:
    """Returns this batch's share of Z [] (METHOD section 2.4).

    Args:
        name: `weights` (sum of I * W), `count` (sum of I) or `blocks` (valid blocks); `none` has
            no share, its Z is 1.
        slots: sums of one horizon.
        valid: [B, A] boolean valid blocks.
    """
    shares = {
        "weights": lambda: slots.weight.sum(),
        "count": lambda: slots.count.sum(),
        "blocks": lambda: valid.sum().astype(jnp.float32),
        "none": lambda: jnp.float32(0.0),
    }
    return jax.lax.stop_gradient(shares[name]())


def block_sums(
    config: DrafterConfig,
    objective: ObjectiveConfig,
    dtype: Any,
    remat: bool,
    learned: tuple[dict, Context],
    constants: tuple[Frozen, jax.Array | None, Schedule],
    blocks: Blocks,
) -> tuple[jax.Array, SlotSums]:
    """Returns the sum of I * W * l [] over some blocks of one horizon, and its `SlotSums`."""
    drafter_params, context = learned[0], cast(learned[1], dtype)
    frozen, target_hidden, schedule = constants
    block_size = blocks.labels.shape[-1]
    depths = tuple(depth for depth, _ in objective.depths)
    outputs = draft_blocks(
        drafter_params,
        config,
        jnp.take(frozen.embedding, blocks.inputs.tokens, axis=0).astype(dtype),
        blocks.inputs.positions,
        context,
        num_layers=depths[-1] if depths else None,
        exits=depths or None,
        remat=remat,
    )
    labels = blocks.labels if frozen.draft_index is None else frozen.draft_index[blocks.labels]

    def drafted(x):  # [B, A, G, ...] -> [B * A, G - 1, ...]: slot 0 is the anchor, never a draft
        return x[:, :, 1:].reshape(-1, block_size - 1, *x.shape[3:])

    slots = Slots(
        labels=drafted(jnp.where(blocks.included, labels, 0)),
        included=drafted(blocks.included),
        revealed=drafted(blocks.revealed),
    )
    if target_hidden is not None:
        # The target's state one token before a slot gives its distribution at the slot.
        rows = jnp.arange(target_hidden.shape[0])[:, None, None]
        at = jnp.clip(blocks.inputs.positions - 1, 0, target_hidden.shape[1] - 1)
        slots = slots.replace(target_hidden=drafted(target_hidden[rows, at]))
    total, sums = 0.0, None
    for share, output in exit_outputs(objective, blocks, outputs):
        part, terms = slot_terms(objective, drafted(output), frozen.head, slots, schedule)
        part_sums = jax.tree.map(lambda x, share=share: share * x, sum_slots(slots, terms))
        total = total + share * part
        sums = part_sums if sums is None else jax.tree.map(jnp.add, sums, part_sums)
    return total, sums


def exit_outputs(
    objective: ObjectiveConfig, blocks: Blocks, outputs: jax.Array
) -> list[tuple[float, jax.Array]]:
    """Returns the outputs [B, A, G, D] that a loss is taken of, each with its share of it.

    Args:
        objective: its depths, and how they are trained.
        blocks: which depth was drawn for each block.
        outputs: of `draft_blocks`; [E, B, A, G, D] where the objective lists E depths.
    """
    if not objective.depths:
        return [(1.0, outputs)]
    if objective.exits == "sampled":
        chosen = blocks.exits[None, :, :, None, None]
        return [(1.0, jnp.take_along_axis(outputs, chosen, axis=0)[0])]
    whole = sum(share for _, share in objective.depths)
    shares = [share / whole for _, share in objective.depths]
    return list(zip(shares, outputs, strict=True))


def sum_slots(slots: Slots, terms: Terms) -> SlotSums:
    """Returns the sums over M blocks of their slots' terms."""

    def by_slot(x):
        return jax.lax.stop_gradient(jnp.pad(x.sum(axis=0), (1, 0)))

    return SlotSums(
        count=by_slot(slots.included.astype(jnp.float32)),
        loss=by_slot(terms.loss),
        correct=by_slot(terms.correct),
        accepted=by_slot(terms.accepted),
        weight=by_slot(terms.weight),
        weight_square=by_slot(jnp.square(terms.weight)),
    )
