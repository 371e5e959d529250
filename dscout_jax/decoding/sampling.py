"""From logits to the next token: greedy or by temperature."""

import jax
import jax.numpy as jnp


def greedy_tokens(logits: jax.Array) -> jax.Array:
    """Returns the most likely token [...] int32 of logits [..., V]; the lowest id wins a tie.

    A maximum and a minimum over ids, each of which CPUs vectorise; `argmax` is 1.5 to 3.5 times
    slower there.
    """
    best = logits.max(axis=-1, keepdims=True)
    size = logits.shape[-1]
    ids = jnp.arange(size, dtype=jnp.int32).reshape((1,) * (logits.ndim - 1) + (size,))
    # The upper bound keeps a row of NaN inside the vocabulary.
    return jnp.minimum(jnp.where(logits == best, ids, size).min(axis=-1), size - 1)


def choose_tokens(
    logits: jax.Array,
    *,
    greedy: bool,
    temperature: jax.Array | float = 1.0,
    keys: jax.Array | None = None,
) -> jax.Array:
    """Returns the chosen token of each row.

    Args:
        logits: [B, V] float32.
        greedy: static; see `greedy_tokens`.
        temperature: traced scalar above 0, read only when not greedy.
        keys: [B] typed PRNG keys, one for each row so that a row's tokens do not depend on its
            companions; read only when not greedy.

    Returns:
        [B] int32.
    """
    if greedy:
        return greedy_tokens(logits)
    draw = jax.vmap(jax.random.categorical)
    return draw(keys, logits / temperature).astype(jnp.int32)
