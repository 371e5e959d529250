"""The pass over the slots of many blocks: logits, weights and losses, a few blocks at a time.

The vocabulary axis exists for `chunk_blocks` blocks only, and the gradient with respect to the
hidden states is taken in the same pass as the value, so no logits are kept or computed twice.
`naive_slots` is the same formula with all logits at once, for tests.

Source: METHOD sections 2 and 2.3.
"""

from functools import partial

import flax.struct
import jax
import jax.numpy as jnp

from dscout_jax.config.experiment import ObjectiveConfig
from dscout_jax.objective.acceptance import Scores, acceptance, greedy_match
from dscout_jax.objective.prediction import slot_losses
from dscout_jax.objective.weighting import slot_weights


@flax.struct.dataclass
class Slots:
    """K slots of M blocks, the anchors' slots left out.

    Attributes:
        labels: [M, K] int32 rows of the head.
        included: [M, K] boolean, supervised.
        revealed: [M, K] boolean, shown to the drafter.
        target_hidden: [M, K, D] the target's final hidden state before each slot's token; None
            where the objective reads no distribution of the target.
    """

    labels: jax.Array
    included: jax.Array
    revealed: jax.Array
    target_hidden: jax.Array | None = None


@flax.struct.dataclass
class Schedule:
    """What changes over a run without being learned.

    Attributes:
        warmth: [] float32 in [0, 1], share of the chosen weighting in W (see `slot_weights`).
        ema: [K] float32 running mean acceptance of each slot.
    """

    warmth: jax.Array
    ema: jax.Array


@flax.struct.dataclass
class Terms:
    """Figures of every slot, [M, K] float32, without a gradient; 0 where not supervised.

    Attributes:
        loss: l.
        weight: W.
        correct: 1 where the most likely token is the label.
        accepted: acceptance by the objective's estimate, not smoothed; for the running mean what
            it is the mean of, `target_prob`.
    """

    loss: jax.Array
    weight: jax.Array
    correct: jax.Array
    accepted: jax.Array


def naive_slots(
    objective: ObjectiveConfig,
    block_size: int,
    hidden: jax.Array,
    head: jax.Array,
    slots: Slots,
    schedule: Schedule,
) -> tuple[jax.Array, Terms]:
    """Returns what `chunked_slots` returns, with all logits at once."""

    def logits(x):
        return jnp.einsum("mkd,vd->mkv", x, head, preferred_element_type=jnp.float32)

    target = None
    if slots.target_hidden is not None:
        target = jax.lax.stop_gradient(logits(slots.target_hidden))
    scores = Scores(
        logits=logits(hidden),
        labels=slots.labels,
        included=slots.included,
        revealed=slots.revealed,
        target_logits=target,
        ema=schedule.ema,
    )
    loss = jnp.where(slots.included, slot_losses(objective.prediction, scores), 0.0)
    weight = slot_weights(objective, block_size, scores, schedule.warmth)
    estimate = "target_prob" if objective.acceptance == "ema" else objective.acceptance
    terms = Terms(
        loss=loss,
        weight=weight,
        correct=jnp.where(slots.included, greedy_match(scores), 0.0),
        accepted=jnp.where(slots.included, acceptance(estimate, scores), 0.0),
    )
    return (weight * loss).sum(), jax.lax.stop_gradient(terms)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def chunked_slots(objective, block_size, hidden, head, slots, schedule):
    """Sums weight * loss over slots, `objective.chunk_blocks` blocks of logits at a time.

    Args:
        objective: static choices of the factors.
        block_size: G = K + 1, static.
        hidden: [M, K, D] drafter outputs; the only input with a gradient.
        head: [Vd, D].
        slots: of the M blocks.
        schedule: state of the run.

    Returns:
        total [] with a gradient, and `Terms` without.
    """
    return _scan_chunks(objective, block_size, hidden, head, slots, schedule, False)[:2]


def _scan_chunks(objective, block_size, hidden, head, slots, schedule, with_gradient):
    num_blocks = hidden.shape[0]
    chunk = min(objective.chunk_blocks, num_blocks)
    padding = -num_blocks % chunk

    def split(x):
        x = jnp.pad(x, ((0, padding),) + ((0, 0),) * (x.ndim - 1))
        return x.reshape(-1, chunk, *x.shape[1:])

    def one(hidden, slots):
        return naive_slots(objective, block_size, hidden, head, slots, schedule)

    def body(total, chunk_inputs):
        if with_gradient:
            (part, terms), gradient = jax.value_and_grad(one, has_aux=True)(*chunk_inputs)
        else:
            (part, terms), gradient = one(*chunk_inputs), ()
        return total + part, (terms, gradient)

    inputs = jax.tree.map(split, (hidden, slots))
    total, (terms, gradient) = jax.lax.scan(body, jnp.float32(0.0), inputs)
    terms, gradient = jax.tree.map(
        lambda x: x.reshape(-1, *x.shape[2:])[:num_blocks], (terms, gradient)
    )
    return total, terms, gradient


def _chunked_forward(objective, block_size, hidden, head, slots, schedule):
    total, terms, gradient = _scan_chunks(
        objective, block_size, hidden, head, slots, schedule, True
    )
    return (total, terms), (gradient, head, slots, schedule)


def _chunked_backward(objective, block_size, residuals, cotangents):
    gradient, *frozen = residuals
    # The terms are reports: their cotangents are dropped by design.
    return cotangents[0] * gradient, *jax.tree.map(_no_gradient, frozen)


def _no_gradient(x):
    if jnp.issubdtype(x.dtype, jnp.floating):
        return jnp.zeros_like(x)
    return jnp.zeros(x.shape, jax.dtypes.float0)


chunked_slots.defvjp(_chunked_forward, _chunked_backward)
