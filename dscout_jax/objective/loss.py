"""The training loss as the product inclusion x weighting x prediction.

    loss = sum_{b,k} I[b,k] * W[b,k] * l[b,k] / Z

`loss_sums` returns numerator and denominator apart, so that devices can sum each before dividing.
The vocabulary axis exists for `chunk_blocks` blocks at a time, and the gradient with respect to the
hidden states is taken in the same pass as the value, so no logits are kept or computed twice.
`naive_loss_sums` is the same formula written down literally, for tests.

Source: METHOD sections 2, 2.3 and 2.4.
"""

from functools import partial

import flax.struct
import jax
import jax.numpy as jnp

from dscout_jax.config import DrafterConfig, ObjectiveConfig
from dscout_jax.models.drafter import Context, draft_blocks, project_context
from dscout_jax.objective.inclusion import Blocks, anchor_mask, make_blocks, sample_anchors
from dscout_jax.objective.prediction import PREDICTIONS
from dscout_jax.objective.weighting import WEIGHTINGS


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
    """Sums over blocks, by slot, of one horizon.

    Attributes:
        loss: [G] sum of I * l.
        correct: [G] supervised slots whose most likely token is the label.
        count: [G] supervised slots.
        weight: [G] sum of I * W.
    """

    loss: jax.Array
    correct: jax.Array
    count: jax.Array
    weight: jax.Array


def loss_sums(
    drafter_params: dict,
    frozen: Frozen,
    features: jax.Array,
    batch: dict[str, jax.Array],
    key: jax.Array,
    *,
    config: DrafterConfig,
    objective: ObjectiveConfig,
    naive: bool = False,
) -> tuple[jax.Array, jax.Array, dict[int, SlotSums]]:
    """Draws blocks and returns the sums whose ratio is the loss.

    Args:
        drafter_params: the only argument with a gradient.
        frozen: the target's tables.
        features: [B, S, C * D] target features of every token.
        batch: `tokens` [B, S], `length` [B], `response_start` [B], int32.
        key: PRNG key of the anchors.
        config: drafter shapes, static.
        objective: choices of the three factors, static.
        naive: materialise all logits; same value and gradient, for tests.

    Returns:
        numerator [], denominator [] (divide after summing each over all devices; the denominator is
        0 when no row has a valid anchor), and per horizon the `SlotSums`.
    """
    seq_len = batch["tokens"].shape[1]
    shape = batch["tokens"].shape
    positions = jnp.broadcast_to(jnp.arange(seq_len)[None], shape)
    context = project_context(drafter_params, config, features.astype(jnp.float32), positions)
    eligible = anchor_mask(batch["length"], batch["response_start"], seq_len)
    label_mask = None
    if frozen.draft_index is not None:
        label_mask = frozen.draft_index[batch["tokens"]] >= 0
        # An anchor whose next token cannot be drafted would supervise nothing.
        eligible = eligible & jnp.roll(label_mask, -1, axis=1)
    numerator = jnp.float32(0.0)
    denominator = jnp.float32(1.0 if objective.normalizer == "none" else 0.0)
    sums = {}
    for index, (block_size, num_anchors) in enumerate(objective.horizons):
        anchors, valid = sample_anchors(jax.random.fold_in(key, index), eligible, num_anchors)
        blocks = make_blocks(
            batch["tokens"],
            batch["length"],
            anchors,
            valid,
            block_size=block_size,
            mask_token_id=config.mask_token_id,
            label_mask=label_mask,
        )
        total, slots = horizon_sums(
            drafter_params, frozen, context, blocks, config=config, objective=objective, naive=naive
        )
        numerator = numerator + total
        denominator = denominator + normalizer(objective.normalizer, slots, valid)
        sums[block_size] = slots
    return numerator, denominator, sums


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


def horizon_sums(
    drafter_params: dict,
    frozen: Frozen,
    context: Context,
    blocks: Blocks,
    *,
    config: DrafterConfig,
    objective: ObjectiveConfig,
    naive: bool,
) -> tuple[jax.Array, SlotSums]:
    """Returns sum of I * W * l [] over the blocks of one horizon, and its `SlotSums`."""
    block_size = blocks.labels.shape[-1]
    hidden = draft_blocks(
        drafter_params,
        config,
        jnp.take(frozen.embedding, blocks.inputs.tokens, axis=0),
        blocks.inputs.positions,
        context,
    )
    decay = WEIGHTINGS[objective.weighting](block_size, objective.gamma)
    weight = jnp.where(blocks.included, decay[None, None], 0.0)  # [B, A, G]
    labels = blocks.labels
    if frozen.draft_index is not None:
        labels = frozen.draft_index[labels]
    labels = jnp.where(blocks.included, labels, 0)

    def drafted(x):  # [B, A, G, ...] -> [B * A, G - 1, ...]: slot 0 is the anchor, never a draft
        return x[:, :, 1:].reshape(-1, block_size - 1, *x.shape[3:])

    slots_fn = naive_slots if naive else partial(chunked_slots, objective.chunk_blocks)
    total, slot_loss, correct = slots_fn(
        objective.prediction, drafted(hidden), frozen.head, drafted(labels), drafted(weight)
    )
    included = drafted(blocks.included)

    def by_slot(x):
        x = jnp.where(included, x, 0.0).sum(axis=0)
        return jax.lax.stop_gradient(jnp.pad(x, (1, 0)))

    return total, SlotSums(
        loss=by_slot(slot_loss),
        correct=by_slot(correct),
        count=by_slot(1.0),
        weight=by_slot(drafted(weight)),
    )


def naive_slots(prediction: str, hidden, head, labels, weight):
    """Returns what `chunked_slots` returns, with all logits at once."""
    logits = jnp.einsum("mkd,vd->mkv", hidden, head, preferred_element_type=jnp.float32)
    slot_loss = PREDICTIONS[prediction](logits, labels)
    chosen = jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
    # A max is far cheaper than an argmax on CPU; they differ on exact ties only.
    correct = (chosen >= logits.max(axis=-1)).astype(jnp.float32)
    return (weight * slot_loss).sum(), slot_loss, correct


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def chunked_slots(chunk: int, prediction: str, hidden, head, labels, weight):
    """Sums weight * loss over slots, `chunk` blocks of logits at a time.

    Args:
        chunk: static, blocks per chunk.
        prediction: static name of the slot loss.
        hidden: [M, K, D] drafter outputs; the only input with a gradient.
        head: [Vd, D].
        labels: [M, K] int32 rows of `head`.
        weight: [M, K] float32, zero where not included.

    Returns:
        total [] with a gradient, slot losses [M, K] and correctness [M, K] without.
    """
    return _scan_chunks(chunk, prediction, hidden, head, labels, weight, with_gradient=False)[:3]


def _scan_chunks(chunk, prediction, hidden, head, labels, weight, *, with_gradient):
    num_blocks = hidden.shape[0]
    chunk = min(chunk, num_blocks)
    padding = -num_blocks % chunk

    def split(x):
        x = jnp.pad(x, ((0, padding),) + ((0, 0),) * (x.ndim - 1))
        return x.reshape(-1, chunk, *x.shape[1:])

    def one(hidden, labels, weight):
        total, slot_loss, correct = naive_slots(prediction, hidden, head, labels, weight)
        return total, (slot_loss, correct)

    def body(total, chunk_inputs):
        if with_gradient:
            (part, slots), gradient = jax.value_and_grad(one, has_aux=True)(*chunk_inputs)
        else:
            (part, slots), gradient = one(*chunk_inputs), ()
        return total + part, (*slots, gradient)

    inputs = (split(hidden), split(labels), split(weight))
    total, (slot_loss, correct, gradient) = jax.lax.scan(body, jnp.float32(0.0), inputs)

    def join(x):
        return x.reshape(-1, *x.shape[2:])[:num_blocks]

    return total, join(slot_loss), join(correct), join(gradient) if with_gradient else ()


def _chunked_forward(chunk, prediction, hidden, head, labels, weight):
    *outputs, gradient = _scan_chunks(
        chunk, prediction, hidden, head, labels, weight, with_gradient=True
    )
    return tuple(outputs), (gradient, head, labels, weight)


def _chunked_backward(chunk, prediction, residuals, cotangents):
    gradient, *frozen = residuals
    # Slot losses and correctness are reports: their cotangents are dropped by design.
    return cotangents[0] * gradient, *(jax.tree.map(_no_gradient, x) for x in frozen)


def _no_gradient(x):
    if jnp.issubdtype(x.dtype, jnp.integer):
        return jnp.zeros(x.shape, jax.dtypes.float0)
    return jnp.zeros_like(x)


chunked_slots.defvjp(_chunked_forward, _chunked_backward)
