"""Prediction: the loss of one supervised slot."""

import jax
import jax.numpy as jnp


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Returns -log q(label) [...] of float32 logits [..., Vd]; `ce` in METHOD section 2.3.

    Args:
        logits: [..., Vd] float32.
        labels: [...] int32 in [0, Vd).
    """
    chosen = jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
    return jax.nn.logsumexp(logits, axis=-1) - chosen


PREDICTIONS = {"ce": cross_entropy}
