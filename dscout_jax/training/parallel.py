"""The compiled steps of training, each one pure function of explicit arguments.

One body serves every way of running it: numerator, denominator and gradient are summed over rows,
the sums over accumulation steps and devices, and divided once. So a batch may be split anywhere,
and a part without any supervised slot adds zeros.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, PartitionSpec

from dscout_jax.config.checks import require
from dscout_jax.config.models import TargetConfig
from dscout_jax.models.target import apply_target, finish_target
from dscout_jax.objective.chunks import scan_sum
from dscout_jax.objective.inclusion import row_keys
from dscout_jax.training.state import TrainState, update_acceptance

Batch = dict[str, jax.Array]
LossSums = Callable[[TrainState, dict, Any, Batch, jax.Array], tuple[jax.Array, jax.Array, Any]]


def make_train_step(
    loss_sums: LossSums,
    optimizer: optax.GradientTransformation,
    schedule: optax.Schedule,
    *,
    mode: str = "jit",
    mesh: Mesh | None = None,
    accumulate: int = 1,
    ema_decay: float | None = None,
    divide: bool = True,
) -> Callable[[TrainState, Any, Batch], tuple[TrainState, dict[str, Any]]]:
    """Returns `step(state, frozen, batch) -> (state, metrics)`, compiled once a batch shape.

    Donates `state` (but in mode `pmap`): the caller must not touch the argument afterwards.
    `frozen` is read only: no gradient, no optimiser state.

    Args:
        loss_sums: `(state, drafter_params, frozen, batch, keys [B]) -> (numerator, denominator,
            slots)`, differentiated with respect to the second argument (the state's params are the
            same values); the denominator does not depend on them as far as gradients go.
        optimizer: of `make_optimizer`.
        schedule: of `make_schedule`, for the record only.
        mode: `jit` leaves the split to the compiler, which follows the layouts of the arguments;
            `shard_map` and `pmap` give each device of the axis `data` its rows and the whole state.
        mesh: devices of the last two modes; axes other than `data` must have size 1.
        accumulate: parts that the rows of a device are taken in, one after the other.
        ema_decay: of the running mean of the weights, where the state keeps one.
        divide: False takes the numerator as the loss (normaliser `none`), however it is split.

    The metrics are `loss` (numerator / denominator), `grad_norm` (before clipping),
    `learning_rate`, `slots`, what `loss_sums` returned beside the sums, and `skipped` and
    `skipped_in_row`, updates left out because the gradient was not finite. A batch without any
    supervised slot has loss 0 and gradient 0.

    Raises:
        ConfigError: an unknown mode, or one that the mesh does not fit.
    """
    body = partial(
        _step,
        loss_sums,
        optimizer,
        schedule,
        accumulate=accumulate,
        ema_decay=ema_decay,
        divide=divide,
    )
    if mode == "jit":
        return jax.jit(body, donate_argnums=0)
    require(mode in ("shard_map", "pmap"), "train.mode", mode, "jit, shard_map or pmap")
    require(
        mesh is not None and mesh.size == mesh.shape["data"],
        "train.mesh",
        None if mesh is None else tuple(mesh.shape.values()),
        f"1 for fsdp and tensor with train.mode={mode!r}",
    )
    body = partial(body, axis="data")
    if mode == "shard_map":
        whole, rows = PartitionSpec(), PartitionSpec("data")
        # Without the check of varying values, gradients stay each device's own until `psum`.
        split = jax.shard_map(
            body, mesh=mesh, in_specs=(whole, whole, rows), out_specs=whole, check_vma=False
        )
        return jax.jit(split, donate_argnums=0)
    mapped = jax.pmap(
        body, "data", in_axes=(None, None, 0), out_axes=None, devices=list(mesh.devices.flat)
    )

    def step(state: TrainState, frozen: Any, batch: Batch):
        apart = jax.tree.map(lambda x: x.reshape(mesh.size, -1, *x.shape[1:]), batch)
        return mapped(state, frozen, apart)

    return step


def _step(
    loss_sums: LossSums,
    optimizer: optax.GradientTransformation,
    schedule: optax.Schedule,
    state: TrainState,
    frozen: Any,
    batch: Batch,
    *,
    accumulate: int,
    ema_decay: float | None,
    divide: bool,
    axis: str | None = None,
) -> tuple[TrainState, dict[str, Any]]:
    """One update; with `axis`, of a device's own rows."""
    num_rows = jax.tree.leaves(batch)[0].shape[0]
    first_row = 0 if axis is None else jax.lax.axis_index(axis) * num_rows
    keys = row_keys(jax.random.fold_in(state.key, state.step), first_row, num_rows)

    def sums_of(part):
        batch, keys = part

        def numerator(params):
            value, denominator, slots = loss_sums(state, params, frozen, batch, keys)
            return value, (denominator, slots)

        return jax.value_and_grad(numerator, has_aux=True)(state.params)

    sums = _sum_parts(sums_of, (batch, keys), accumulate)
    if axis is not None:
        sums = jax.lax.psum(sums, axis)
    (value, (denominator, slots)), grads = sums
    denominator = denominator if divide else jnp.ones_like(denominator)
    scale = jnp.where(denominator > 0, 1.0 / jnp.where(denominator > 0, denominator, 1.0), 0.0)
    grads = jax.tree.map(lambda g: g * scale, grads)
    updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    metrics = {
        "loss": value * scale,
        "grad_norm": optax.tree.norm(grads),
        # Updates that were left out did not move the schedule on.
        "learning_rate": jnp.asarray(
            schedule(state.step - state.opt_state.total_notfinite), jnp.float32
        ),
        "slots": slots,
        "skipped": opt_state.total_notfinite,
        "skipped_in_row": opt_state.notfinite_count,
    }
    ema = state.ema
    if ema is not None:
        ema = jax.tree.map(lambda m, p: ema_decay * m + (1.0 - ema_decay) * p, ema, params)
    running = update_acceptance(state.acceptance, slots)
    state = state.replace(
        step=state.step + 1,
        params=params,
        opt_state=opt_state,
        acceptance=jax.tree.map(
            lambda new, old: jnp.where(opt_state.last_finite, new, old), running, state.acceptance
        ),
        ema=ema,
    )
    return state, metrics


def _sum_parts(fn: Callable, rows: Any, num_parts: int) -> Any:
    """Returns the sum of `fn` over parts of the rows, every `num_parts`-th row in one part."""
    if num_parts == 1:
        return fn(rows)
    # Neighbouring rows go to different parts, so that each device works on every part.
    parts = jax.tree.map(lambda x: jnp.moveaxis(x.reshape(-1, num_parts, *x.shape[1:]), 1, 0), rows)
    return scan_sum(fn, parts)


def build_state(init: Callable[..., TrainState], *arguments: Any, layout: Any = None) -> TrainState:
    """Returns `init(*arguments)` computed in one program, laid out by the shardings `layout`.

    Its buffers are its own: what a state shared with other arrays would be deleted when the state
    is donated.
    """
    return jax.jit(init, out_shardings=layout)(*arguments)


def make_eval_step(
    evaluate: Callable[[dict, Any, Batch], Any],
) -> Callable[[dict, Any, Batch], Any]:
    """Returns `evaluate(drafter_params, frozen, batch)` compiled; nothing is donated."""
    return jax.jit(evaluate)


def count_flops(fn: Callable, *arguments: Any) -> float:
    """Returns the floating-point operations of one call, as XLA counts them.

    Loops are counted as if they ran once: hand over a function without any.

    Args:
        fn: not compiled, only traced.
        arguments: arrays or their shapes.
    """
    return float(jax.jit(fn).lower(*arguments).cost_analysis()["flops"])


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
