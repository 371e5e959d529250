"""Weighting: how much a supervised slot counts. Always constants of the gradient."""

import jax
import jax.numpy as jnp

# DFlash's decay lengths by block size; other sizes need an explicit gamma.
DFLASH_GAMMA = {16: 7.0, 10: 5.0, 8: 4.0, 7: 4.0, 4: 2.0}


def exp_decay(block_size: int, gamma: float | None = None) -> jax.Array:
    """Returns exp(-(k - 1) / gamma) for slots k = 0..G-1, with 0 for the anchor slot; [G] float32.

    Args:
        block_size: G.
        gamma: decay length in slots, above 0; None takes DFlash's value for this block size (7, 5,
            4 for 16, 10, 8; ours, 2, for 4).

    Raises:
        ValueError: no gamma given and none known for this block size.

    Source: DFlash; METHOD section 2, table.
    """
    if gamma is None:
        if block_size not in DFLASH_GAMMA:
            raise ValueError(
                f"objective.gamma=None has no default for block size {block_size}; known sizes are "
                f"{sorted(DFLASH_GAMMA)}, for others give a number"
            )
        gamma = DFLASH_GAMMA[block_size]
    slots = jnp.arange(block_size, dtype=jnp.float32)
    return jnp.where(slots > 0, jnp.exp(-(slots - 1) / gamma), 0.0)


def uniform(block_size: int, gamma: float | None = None) -> jax.Array:
    """Returns 1 for every slot but the anchor's; [G] float32. `gamma` is not read."""
    del gamma
    return (jnp.arange(block_size) > 0).astype(jnp.float32)


WEIGHTINGS = {"exp_decay": exp_decay, "uniform": uniform}
