"""The compiled steps of training, each one pure function of explicit arguments.

Numerator and denominator of the loss are summed separately and divided once, so that the same body
serves a batch that is split over devices, where each part holds another number of supervised slots.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from dscout_jax.config.models import TargetConfig
from dscout_jax.models.target import apply_target, finish_target
from dscout_jax.training.state import TrainState, update_acceptance

Batch = dict[str, jax.Array]
LossSums = Callable[[TrainState, dict, Any, Batch], tuple[jax.Array, jax.Array, Any]]


def make_train_step(
    loss_sums: LossSums,
    optimizer: optax.GradientTransformation,
    schedule: optax.Schedule,
) -> Callable[[TrainState, Any, Batch], tuple[TrainState, dict[str, Any]]]:
    """Returns `step(state, frozen, batch) -> (state, metrics)`, compiled once a batch shape.

    Donates `state`: the caller must not touch the argument afterwards. `frozen` is read
    only: no gradient, no optimiser state.

    Args:
        loss_sums: `(state, drafter_params, frozen, batch) -> (numerator, denominator, slots)`,
            differentiated with respect to the second argument (the state's params are the same
            values); the denominator does not depend on them as far as gradients go.
        optimizer: of `make_optimizer`.
        schedule: of `make_schedule`, for the record only.

    The metrics are `loss` (numerator / denominator), `grad_norm` (before clipping), `learning_rate`
    and `slots`, what `loss_sums` returned beside the sums. A batch without any supervised slot has
    loss 0 and gradient 0.
    """

    def step(state: TrainState, frozen: Any, batch: Batch):
        def numerator(params):
            value, denominator, slots = loss_sums(state, params, frozen, batch)
            return value, (denominator, slots)

        (value, (denominator, slots)), grads = jax.value_and_grad(numerator, has_aux=True)(
            state.params
        )
        scale = jnp.where(denominator > 0, 1.0 / jnp.where(denominator > 0, denominator, 1.0), 0.0)
        grads = jax.tree.map(lambda g: g * scale, grads)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        metrics = {
            "loss": value * scale,
            "grad_norm": optax.tree.norm(grads),
            "learning_rate": jnp.asarray(schedule(state.step), jnp.float32),
            "slots": slots,
        }
        state = state.replace(
            step=state.step + 1,
            params=optax.apply_updates(state.params, updates),
            opt_state=opt_state,
            acceptance=update_acceptance(state.acceptance, slots),
        )
        return state, metrics

    return jax.jit(step, donate_argnums=0)


def build_state(init: Callable[..., TrainState], *arguments: Any) -> TrainState:
    """Returns `init(*arguments)` computed in one program.

    Its buffers are its own: what a state shared with other arrays would be deleted when the state
    is donated.
    """
    return jax.jit(init)(*arguments)


def make_eval_step(
    evaluate: Callable[[dict, Any, Batch], Any],
) -> Callable[[dict, Any, Batch], Any]:
    """Returns `evaluate(drafter_params, frozen, batch)` compiled; nothing is donated."""
    return jax.jit(evaluate)


def make_features_fn(
    params: dict, config: TargetConfig, tap_ids: tuple[int, ...], dtype: Any
) -> Callable[[Any, Any], jax.Array]:
    """Returns `(tokens [B, T], length [B]) -> features [B, T, C * D]` of the frozen target."""

    @jax.jit
    def features(params, tokens):
        return tapped_features(params, config, tokens, tap_ids, dtype)

    return lambda tokens, length: features(params, tokens)


def tapped_features(
    params: dict, config: TargetConfig, tokens: jax.Array, tap_ids: tuple[int, ...], dtype: Any
) -> jax.Array:
    """Returns [B, T, C * D] residual streams, rounded to `dtype` as a feature cache would be.

    Layers after the deepest tap are left out. No gradient flows back.
    """
    output = apply_target(params, config, tokens, tap_ids=tap_ids, num_layers=tap_ids[-1] + 1)
    return jax.lax.stop_gradient(output.taps).astype(dtype)


def final_hidden(
    params: dict, config: TargetConfig, features: jax.Array, deepest_tap: int
) -> jax.Array:
    """Returns [B, T, D] final hidden states, from which the target's distribution follows.

    The layers after the deepest tap take up where `features` [B, T, C * D] end, so a feature cache
    is enough for losses on distributions. No gradient flows back.
    """
    residual = features[..., -config.hidden_size :].astype(jnp.float32)
    return jax.lax.stop_gradient(finish_target(params, config, residual, deepest_tap + 1))
