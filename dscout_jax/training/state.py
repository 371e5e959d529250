"""Train state and optimiser of a drafter."""

from collections.abc import Sequence

import flax.struct
import flax.traverse_util
import jax
import jax.numpy as jnp
import optax
import optax.contrib

from dscout_jax.config.experiment import OptimizerConfig
from dscout_jax.objective.loss import SlotSums

_NEVER = 2**30  # a gradient that is not finite is never applied; the loop gives up before
ACCEPTANCE_DECAY = 0.98  # of the running mean, an update


@flax.struct.dataclass
class TrainState:
    """What one update hands to the next; everything an exact resume needs besides the data.

    Attributes:
        step: [] int32, number of finished updates.
        params: drafter weights, float32.
        opt_state: optax state.
        key: [] typed PRNG key of the run. It never changes: update n uses `fold_in(key, n)`.
        acceptance: per horizon, as the objective lists them, [G - 1] float32 running mean
            acceptance of each slot; 1 at first.
        ema: running mean of the params; None where none is kept.
    """

    step: jax.Array
    params: dict
    opt_state: optax.OptState
    key: jax.Array
    acceptance: tuple[jax.Array, ...]
    ema: dict | None = None

    @property
    def drafter(self) -> dict:
        """The weights to evaluate and export: the running mean where there is one."""
        return self.params if self.ema is None else self.ema


def init_state(
    params: dict,
    optimizer: optax.GradientTransformation,
    key: jax.Array,
    horizons: Sequence[int] = (),
    *,
    ema: bool = False,
) -> TrainState:
    """Returns the state before the first update (`parallel.build_state` gives it own buffers)."""
    return TrainState(
        step=jnp.zeros((), jnp.int32),
        params=params,
        opt_state=optimizer.init(params),
        key=key,
        acceptance=tuple(jnp.ones((size - 1,), jnp.float32) for size in horizons),
        ema=params if ema else None,
    )


def update_acceptance(
    running: tuple[jax.Array, ...], slots: dict[int, SlotSums]
) -> tuple[jax.Array, ...]:
    """Returns the running means after one more batch; slots without supervision keep theirs.

    Args:
        running: of the state; empty = none are kept.
        slots: sums by horizon, in the same order.
    """

    def after(old, sums):
        count, accepted = sums.count[1:], sums.accepted[1:]
        new = accepted / jnp.maximum(count, 1.0)
        return jnp.where(count > 0, old + (1.0 - ACCEPTANCE_DECAY) * (new - old), old)

    if not running:
        return running
    return tuple(after(old, sums) for old, sums in zip(running, slots.values(), strict=True))


def make_schedule(config: OptimizerConfig, num_steps: int) -> optax.Schedule:
    """Returns step -> learning rate.

    Warm-up is linear over `warmup_fraction` of the steps. Then `cosine` falls to `final_fraction`
    of the peak at `num_steps`; `wsd` stays at the peak and falls linearly to it over the last
    `decay_fraction` of the steps.

    Args:
        config: peak, shape and fractions.
        num_steps: length of the run, updates.
    """
    peak, final = config.learning_rate, config.learning_rate * config.final_fraction
    warmup = round(config.warmup_fraction * num_steps)
    if config.schedule == "cosine":
        after = optax.cosine_decay_schedule(
            peak, max(num_steps - warmup, 1), alpha=config.final_fraction
        )
    else:
        decay = max(min(round(config.decay_fraction * num_steps), num_steps - warmup), 1)
        after = optax.linear_schedule(
            peak, final, decay, transition_begin=max(num_steps - warmup - decay, 0)
        )
    if warmup == 0:
        return after
    # Update 0 already moves: a rate of 0 would waste the first batch.
    first = optax.linear_schedule(peak / warmup, peak, max(warmup - 1, 1))
    return optax.join_schedules([first, after], [warmup])


def make_optimizer(config: OptimizerConfig, num_steps: int) -> optax.GradientTransformation:
    """Returns AdamW or Muon after clipping by the global norm; only matrices decay.

    A gradient with a NaN or infinity in it changes nothing but the counts of such updates, which
    the state holds (`optax.ApplyIfFiniteState`).

    Args:
        config: name, moments, decay, clipping and schedule.
        num_steps: length of the run, updates.
    """
    schedule = make_schedule(config, num_steps)
    if config.name == "muon":
        # Updates are scaled to the size of AdamW's, so that both take the same learning rates.
        optimizer = optax.contrib.muon(
            schedule,
            beta=config.beta2,
            adam_b1=config.beta1,
            adam_b2=config.beta2,
            weight_decay=config.weight_decay,
            consistent_rms=0.2,
        )
    else:
        optimizer = optax.adamw(
            schedule,
            b1=config.beta1,
            b2=config.beta2,
            weight_decay=config.weight_decay,
            mask=decayed,
        )
    clipped = optax.chain(optax.clip_by_global_norm(config.clip_norm), optimizer)
    return optax.apply_if_finite(clipped, max_consecutive_errors=_NEVER)


def decayed(params: dict) -> dict:
    """Returns a tree of booleans, True for weights (matrices), False for the scales of norms."""
    return flax.traverse_util.path_aware_map(lambda path, _: path[-1] == "weight", params)
