"""Weighting: how much a supervised slot counts. Always constants of the gradient.

Every weighting is a function of a `Block`, whose slots run from 1, the first draft. A revealed slot
is certain: it neither counts as a step of a decay nor lowers a product.

Source: METHOD section 2.2 and the table of section 2.
"""

import flax.struct
import jax
import jax.numpy as jnp

from dscout_jax.config.checks import ConfigError
from dscout_jax.config.experiment import ObjectiveConfig
from dscout_jax.objective.acceptance import Scores, acceptance

# DFlash's decay lengths by block size; other sizes need an explicit gamma. 2 for 4 is ours.
DFLASH_GAMMA = {16: 7.0, 10: 5.0, 8: 4.0, 7: 4.0, 4: 2.0}


@flax.struct.dataclass
class Block:
    """What a weighting may look at.

    Attributes:
        included: [..., K] boolean, supervised slots.
        accepted: [..., K] float32 in [0, 1], smoothed acceptance.
        matched: [..., K] float32, 1 where the drafter's greedy token is the label (revealed slots
            included), else 0.
        gamma: decay length in slots.
        survival: [K] float32, share of blocks whose horizon reaches beyond each slot.
    """

    included: jax.Array
    accepted: jax.Array
    matched: jax.Array
    gamma: float
    survival: jax.Array


def _before(x: jax.Array) -> jax.Array:
    """Sum of `x` over the slots before each."""
    return jnp.cumsum(x, axis=-1) - x


def _reached(accepted: jax.Array) -> jax.Array:
    """Product of `accepted` over the slots before each: S_{k-1}."""
    ones = jnp.ones_like(accepted[..., :1])
    return jnp.cumprod(jnp.concatenate([ones, accepted[..., :-1]], axis=-1), axis=-1)


def uniform(block: Block) -> jax.Array:
    """Returns 1 for every slot, [..., K] float32."""
    return jnp.ones_like(block.accepted)


def exp_decay(block: Block) -> jax.Array:
    """Returns exp(-n / gamma), n the supervised slots before; DFlash's exp(-(k - 1) / gamma).

    After a revealed prefix the decay starts anew. Source: DFlash; D2SD for the prefix.
    """
    return jnp.exp(-_before(block.included.astype(jnp.float32)) / block.gamma)


def reach(block: Block) -> jax.Array:
    """Returns S_{k-1}, the probability that verification gets to slot k. Source: PARD-2 (CAT)."""
    return _reached(block.accepted)


def marginal(block: Block) -> jax.Array:
    """Returns sum_{m >= k} S_m over supervised m, S_m the product of acceptances up to m.

    With l = -log a and no smoothing, sum_k W_k l_k has the gradient of minus the expected accepted
    length. Source: D-PACE.
    """
    survived = jnp.cumprod(block.accepted, axis=-1) * block.included
    return jnp.cumsum(survived[..., ::-1], axis=-1)[..., ::-1]


def until_mismatch(block: Block) -> jax.Array:
    """Returns 1 up to and including the first greedy mismatch, then 0. Source: Spec-AUF."""
    return _reached(block.matched)


def anchored_decay(block: Block) -> jax.Array:
    """Returns 1 up to the first greedy mismatch k*, then exp(-(k - k*) / gamma). Source: VAT."""
    failed = 1.0 - jnp.cumprod(block.matched, axis=-1)  # 1 from k* on
    return jnp.exp(-_before(failed * block.included) / block.gamma)


def horizon_decay(block: Block) -> jax.Array:
    """Returns pi(h > k): what mixing horizons does to the weight of a slot, without mixing.

    The control of mixed horizons: one horizon with this decay. Source: METHOD section 2.1.
    """
    return jnp.broadcast_to(block.survival, block.accepted.shape)


WEIGHTINGS = {
    "uniform": uniform,
    "exp_decay": exp_decay,
    "reach": reach,
    "marginal": marginal,
    "until_mismatch": until_mismatch,
    "anchored_decay": anchored_decay,
    "horizon_decay": horizon_decay,
}


def decay_length(objective: ObjectiveConfig, block_size: int) -> float:
    """Returns gamma for a block size: the configured one, or DFlash's.

    Raises:
        ConfigError: none is configured and none known for this size.
    """
    if objective.gamma is not None:
        return objective.gamma
    if block_size not in DFLASH_GAMMA:
        raise ConfigError(
            f"objective.gamma=None has no default for block size {block_size}; known sizes are "
            f"{sorted(DFLASH_GAMMA)}, for others give a number"
        )
    return DFLASH_GAMMA[block_size]


def horizon_survival(objective: ObjectiveConfig, block_size: int) -> jax.Array:
    """Returns pi(h > k) for slots k = 1..G-1, [G - 1] float32, pi the shares of the horizons."""
    shares = objective.horizon_shares or objective.horizons
    total = sum(share for _, share in shares)
    slots = range(1, block_size)
    above = [sum(share for size, share in shares if size > slot) for slot in slots]
    return jnp.asarray(above, jnp.float32) / total


def slot_weights(
    objective: ObjectiveConfig, block_size: int, scores: Scores, warmth: jax.Array
) -> jax.Array:
    """Returns W [..., K] float32, 0 where a slot is not supervised; no gradient flows through it.

    W = (1 - u) exp_decay + u max(W_name, floor), divided by pi(h > k) on request.

    Args:
        objective: names, smoothing and floor.
        block_size: G = K + 1.
        scores: of the slots.
        warmth: u [] float32 in [0, 1]; 1 after the warm-up.
    """
    block = Block(
        included=scores.included,
        accepted=acceptance(objective.acceptance, scores, objective.smoothing),
        matched=acceptance("greedy_match", scores),
        gamma=decay_length(objective, block_size),
        survival=horizon_survival(objective, block_size),
    )
    weight = jnp.maximum(WEIGHTINGS[objective.weighting](block), objective.floor)
    if objective.weight_warmup > 0.0:
        weight = (1.0 - warmth) * exp_decay(block) + warmth * weight
    if objective.horizon_correction:
        weight = weight / jnp.maximum(horizon_decay(block), 1e-9)
    return jax.lax.stop_gradient(jnp.where(scores.included, weight, 0.0))
