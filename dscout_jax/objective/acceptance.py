"""Acceptance: how likely a slot's draft is kept, estimated from what the loss has at hand anyway.

Each estimate is a function of the `Scores` of some slots, with values in [0, 1]. Products over the
slots of a block are taken in `weighting.py`, per block and never of batch means.

Source: METHOD section 2.2.
"""

import flax.struct
import jax
import jax.numpy as jnp


@flax.struct.dataclass
class Scores:
    """What the drafter and the target say about K slots of some blocks.

    Attributes:
        logits: [..., K, Vd] float32 of the drafter.
        labels: [..., K] int32 in [0, Vd), the true tokens.
        included: [..., K] boolean, the supervised slots.
        revealed: [..., K] boolean, slots whose true token the drafter was shown.
        ema: [K] float32 running mean acceptance of each slot.
        target_logits: [..., K, Vd] float32 of the target, over the draft vocabulary; None where
            nothing reads them.
    """

    logits: jax.Array
    labels: jax.Array
    included: jax.Array
    revealed: jax.Array
    ema: jax.Array
    target_logits: jax.Array | None = None


def label_log_prob(scores: Scores) -> jax.Array:
    """Returns log q(y) [..., K], the drafter's log probability of the label."""
    chosen = jnp.take_along_axis(scores.logits, scores.labels[..., None], axis=-1)[..., 0]
    return chosen - jax.nn.logsumexp(scores.logits, axis=-1)


def target_prob(scores: Scores) -> jax.Array:
    """Returns q(y) [..., K]; needs no target logits. Source: D-PACE."""
    return jnp.exp(label_log_prob(scores))


def greedy_match(scores: Scores) -> jax.Array:
    """Returns 1 where the label is the drafter's most likely token (exact ties count), else 0."""
    chosen = jnp.take_along_axis(scores.logits, scores.labels[..., None], axis=-1)[..., 0]
    # A max is far cheaper than an argmax on CPU.
    return (chosen >= scores.logits.max(axis=-1)).astype(jnp.float32)


def overlap(scores: Scores) -> jax.Array:
    """Returns sum_v min(p(v), q(v)) [..., K], the acceptance of rejection sampling."""
    p, q = jax.nn.softmax(scores.target_logits), jax.nn.softmax(scores.logits)
    return jnp.minimum(p, q).sum(axis=-1)


def argmax_target(scores: Scores) -> jax.Array:
    """Returns p(argmax q) [..., K]: a greedy draft checked against a sample of the target."""
    draft = scores.logits.argmax(axis=-1)
    p = jax.nn.softmax(scores.target_logits)
    return jnp.take_along_axis(p, draft[..., None], axis=-1)[..., 0]


def running_mean(scores: Scores) -> jax.Array:
    """Returns each slot's running mean [..., K], the same for every block."""
    return jnp.broadcast_to(scores.ema, scores.labels.shape)


ACCEPTANCES = {
    "target_prob": target_prob,
    "greedy_match": greedy_match,
    "overlap": overlap,
    "argmax_target": argmax_target,
    "ema": running_mean,
}
NEEDS_TARGET = frozenset({"overlap", "argmax_target"})


def acceptance(name: str, scores: Scores, smoothing: float = 0.0) -> jax.Array:
    """Returns the acceptance of every slot [..., K] float32, without a gradient.

    A revealed slot counts as 1; a slot that is neither supervised nor revealed lies past the end of
    the response and counts as 0.

    Args:
        name: key of `ACCEPTANCES`.
        scores: of the slots.
        smoothing: s in [0, 1); a becomes (1 - s) a + s, so that supervision after a failure lasts.
    """
    value = jax.lax.stop_gradient(ACCEPTANCES[name](scores))
    value = (1.0 - smoothing) * value + smoothing
    return jnp.where(scores.included, value, jnp.where(scores.revealed, 1.0, 0.0))
