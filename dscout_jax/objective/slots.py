"""From the drafter's outputs to I * W * l of every slot of some blocks.

Source: METHOD section 2.
"""

import flax.struct
import jax
import jax.numpy as jnp

from dscout_jax.config.experiment import ObjectiveConfig
from dscout_jax.kernels.product import product
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


def slot_terms(
    objective: ObjectiveConfig,
    hidden: jax.Array,
    head: jax.Array,
    slots: Slots,
    schedule: Schedule,
) -> tuple[jax.Array, Terms]:
    """Returns the sum of I * W * l [] over the slots of M blocks, and its `Terms`.

    Args:
        objective: static choices of the factors.
        hidden: [M, K, D] drafter outputs; the gradient flows through l to them.
        head: [Vd, D].
        slots: of the M blocks.
        schedule: state of the run.
    """

    def logits(x):
        flat = product(x.reshape(-1, x.shape[-1]), head, jnp.float32)
        return flat.reshape(*x.shape[:-1], -1)

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
    weight = slot_weights(objective, hidden.shape[1] + 1, scores, schedule.warmth)
    estimate = "target_prob" if objective.acceptance == "ema" else objective.acceptance
    terms = Terms(
        loss=loss,
        weight=weight,
        correct=jnp.where(slots.included, greedy_match(scores), 0.0),
        accepted=jnp.where(slots.included, acceptance(estimate, scores), 0.0),
    )
    return (weight * loss).sum(), jax.lax.stop_gradient(terms)
