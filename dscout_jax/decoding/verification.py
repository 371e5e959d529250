"""Which drafts stand, and what the cycle emits."""

import jax
import jax.numpy as jnp


def accepted_length(drafts: jax.Array, verified: jax.Array) -> jax.Array:
    """Counts the leading drafts that the target agrees with.

    Args:
        drafts: [..., G-1] int32 proposed tokens.
        verified: [..., G-1] int32 target choices at the same positions.

    Returns:
        [...] int32 in [0, G-1].

    Source: greedy verification, Leviathan et al. 2023, algorithm 1 at temperature 0.
    """
    return jnp.cumprod((drafts == verified).astype(jnp.int32), axis=-1).sum(axis=-1)


def is_stop(tokens: jax.Array, stop_ids: tuple[int, ...]) -> jax.Array:
    """Returns a boolean array like `tokens`, True at any of the static `stop_ids`."""
    stops = jnp.zeros(tokens.shape, bool)
    for stop_id in stop_ids:
        stops = stops | (tokens == stop_id)
    return stops


def emitted_length(
    verified: jax.Array, accepted: jax.Array, budget: jax.Array, stop_ids: tuple[int, ...]
) -> tuple[jax.Array, jax.Array]:
    """Counts the tokens a cycle emits, and says whether the row ends with them.

    The target's own choices are the emitted tokens: the accepted drafts equal them, and the one
    after is the correction or bonus.

    Args:
        verified: [B, G] int32 target choices after the anchor and after each draft.
        accepted: [B] int32 of `accepted_length`.
        budget: [B] int32 tokens the row may still emit, at least 1.
        stop_ids: static ids that end a row; the stop token itself is emitted.

    Returns:
        emitted [B] int32 in [1, G], the tau of METHOD section 0 cut at stop token and budget, and
        ends [B] boolean.
    """
    emitted = jnp.minimum(accepted + 1, budget)
    slots = jnp.arange(verified.shape[1])[None, :]
    stops = is_stop(verified, stop_ids) & (slots < emitted[:, None])
    first = jnp.min(jnp.where(stops, slots, verified.shape[1]), axis=1)
    has_stop = jnp.any(stops, axis=1)
    emitted = jnp.where(has_stop, first + 1, emitted)
    return emitted.astype(jnp.int32), has_stop | (emitted >= budget)
