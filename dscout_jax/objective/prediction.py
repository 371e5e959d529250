"""Prediction: the loss of one supervised slot, a function of `Scores` with a gradient.

Weighted sums are written as they are read: `0.1*ce + 0.9*tv`.

Source: METHOD section 2.3. Distributions of the target are over the draft vocabulary.
"""

import jax
import jax.numpy as jnp

from dscout_jax.config.experiment import parse_sum
from dscout_jax.objective.acceptance import Scores, label_log_prob, overlap

LK_ETA = 3.0  # how fast `lk_hybrid` turns from KL to TV as the overlap grows


def cross_entropy(scores: Scores) -> jax.Array:
    """Returns -log q(y) [..., K]."""
    return -label_log_prob(scores)


def soft_cross_entropy(scores: Scores) -> jax.Array:
    """Returns -sum_v p(v) log q(v) [..., K], the forward KL up to the target's entropy."""
    p = jax.nn.softmax(scores.target_logits)
    return -(p * jax.nn.log_softmax(scores.logits)).sum(axis=-1)


def reverse_kl(scores: Scores) -> jax.Array:
    """Returns sum_v q(v) log(q(v) / p(v)) [..., K]."""
    log_p, log_q = (jax.nn.log_softmax(x) for x in (scores.target_logits, scores.logits))
    return (jnp.exp(log_q) * (log_q - log_p)).sum(axis=-1)


def total_variation(scores: Scores) -> jax.Array:
    """Returns sum_v |p(v) - q(v)| / 2 [..., K], one minus the overlap."""
    p, q = jax.nn.softmax(scores.target_logits), jax.nn.softmax(scores.logits)
    return 0.5 * jnp.abs(p - q).sum(axis=-1)


def lk_hybrid(scores: Scores) -> jax.Array:
    """Returns lam KL(p || q) + (1 - lam) TV [..., K], lam = exp(-eta sg[overlap])."""
    log_p = jax.nn.log_softmax(scores.target_logits)
    entropy = -(jnp.exp(log_p) * log_p).sum(axis=-1)
    share = jnp.exp(-LK_ETA * jax.lax.stop_gradient(overlap(scores)))
    kl = soft_cross_entropy(scores) - entropy
    return share * kl + (1.0 - share) * total_variation(scores)


def negative_log_acceptance(scores: Scores) -> jax.Array:
    """Returns -log sum_v min(p(v), q(v)) [..., K]."""
    return -jnp.log(jnp.maximum(overlap(scores), 1e-9))


def expected_length(scores: Scores) -> jax.Array:
    """Returns -S_k [..., K], S_k the product of q(y) up to slot k.

    Summed with weight 1 over a block it is minus the expected accepted length, with a gradient
    through every factor. The products are taken as sums of logarithms.
    """
    # A revealed slot is certain; what lies past the end is no part of the loss anyway.
    log_prob = jnp.where(scores.included, label_log_prob(scores), 0.0)
    return -jnp.exp(jnp.cumsum(log_prob, axis=-1))


PREDICTIONS = {
    "ce": cross_entropy,
    "soft_ce": soft_cross_entropy,
    "reverse_kl": reverse_kl,
    "tv": total_variation,
    "lk_hybrid": lk_hybrid,
    "nla": negative_log_acceptance,
    "expected_length": expected_length,
}
NEEDS_TARGET = frozenset({"soft_ce", "reverse_kl", "tv", "lk_hybrid", "nla"})


def slot_losses(formula: str, scores: Scores) -> jax.Array:
    """Returns l [..., K] of a prediction such as `ce` or `0.1*ce + 0.9*tv`."""
    return sum(factor * PREDICTIONS[name](scores) for factor, name in parse_sum(formula))
