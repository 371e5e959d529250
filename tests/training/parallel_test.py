import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dscout_jax.config.checks import ConfigError
from dscout_jax.config.experiment import OptimizerConfig
from dscout_jax.training.mesh import make_mesh
from dscout_jax.training.parallel import build_state, count_flops, make_train_step
from dscout_jax.training.state import init_state, make_optimizer, make_schedule


def squared_error(state, params, frozen, batch, keys):
    """Sum of weighted squared errors and sum of weights, with noise from the step's key."""
    error = batch["x"] @ params["fc"]["weight"] * frozen - batch["y"]
    noise = jax.random.uniform(keys[0])
    return (batch["w"] * error**2).sum(), batch["w"].sum(), {"noise": noise}


def make_state(config, num_steps=10):
    params = {"fc": {"weight": jnp.ones((3,))}}
    optimizer = make_optimizer(config, num_steps)
    state = build_state(
        lambda params, key: init_state(params, optimizer, key), params, jax.random.key(0)
    )
    step = make_train_step(squared_error, optimizer, make_schedule(config, num_steps))
    return params, state, step


def make_batch(weight=1.0):
    random = np.random.default_rng(0)
    return {
        "x": random.normal(size=(5, 3)).astype(np.float32),
        "y": random.normal(size=(5,)).astype(np.float32),
        "w": np.asarray([1, 0, 2, 1, 3], np.float32) * weight,
    }


def test_the_update_is_that_of_the_mean_over_supervised_parts():
    config = OptimizerConfig(weight_decay=0.0, warmup_fraction=0.0)
    params, state, step = make_state(config)
    batch = make_batch()

    def mean(params):
        error = batch["x"] @ params["fc"]["weight"] * 2.0 - batch["y"]
        return (batch["w"] * error**2).sum() / batch["w"].sum()

    optimizer = make_optimizer(config, 10)
    gradient = jax.grad(mean)(params)
    updates, _ = optimizer.update(gradient, optimizer.init(params), params)
    state, metrics = step(state, jnp.float32(2.0), batch)
    expected = optax.apply_updates(params, updates)["fc"]["weight"]
    np.testing.assert_allclose(state.params["fc"]["weight"], expected, rtol=1e-6)
    np.testing.assert_allclose(metrics["loss"], mean(params), rtol=1e-6)
    np.testing.assert_allclose(metrics["grad_norm"], optax.tree.norm(gradient), rtol=1e-6)


def test_a_batch_without_supervision_has_no_loss_and_no_nan():
    params, state, step = make_state(OptimizerConfig(weight_decay=0.0))
    state, metrics = step(state, jnp.float32(1.0), make_batch(weight=0.0))
    assert metrics["loss"] == 0 and metrics["grad_norm"] == 0
    np.testing.assert_array_equal(state.params["fc"]["weight"], params["fc"]["weight"])


def test_each_step_draws_from_another_key():
    _, state, step = make_state(OptimizerConfig())
    noise = []
    for _ in range(3):
        state, metrics = step(state, jnp.float32(1.0), make_batch())
        noise.append(float(metrics["slots"]["noise"]))
    assert len(set(noise)) == 3


def test_the_old_state_is_donated_and_what_it_was_built_from_is_not():
    params, state, step = make_state(OptimizerConfig())
    # Of what `apply_if_finite` keeps, the last verdict is only written, so its buffer is not taken.
    old = jax.tree.leaves((state.params, state.opt_state.inner_state, state.step, state.key))
    step(state, jnp.float32(1.0), make_batch())
    assert all(leaf.is_deleted() for leaf in old)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(params))


def test_one_program_serves_all_steps_of_a_shape():
    _, state, step = make_state(OptimizerConfig())
    for _ in range(3):
        state, _ = step(state, jnp.float32(1.0), make_batch())
    assert step._cache_size() == 1
    assert int(state.step) == 3


@pytest.mark.parametrize("num_steps", [1, 2])
def test_the_learning_rate_on_record_is_the_one_used(num_steps):
    config = OptimizerConfig(learning_rate=0.5, warmup_fraction=0.0, beta1=0.0, weight_decay=0.0)
    params, state, step = make_state(config, num_steps)
    state, metrics = step(state, jnp.float32(1.0), make_batch())
    # The first AdamW update is the sign of the gradient times the rate.
    moved = np.abs(state.params["fc"]["weight"] - params["fc"]["weight"])
    np.testing.assert_allclose(moved, metrics["learning_rate"], rtol=1e-4)


def test_a_gradient_that_is_not_finite_changes_nothing_but_the_counts():
    _, state, step = make_state(OptimizerConfig())
    state, metrics = step(state, jnp.float32(1.0), make_batch())
    before = jax.tree.map(np.asarray, (state.params, state.opt_state.inner_state))
    broken = make_batch()
    broken["x"][2, 1] = np.nan
    for count in (1, 2):
        state, metrics = step(state, jnp.float32(1.0), broken)
        assert int(metrics["skipped"]) == int(metrics["skipped_in_row"]) == count
        after = (state.params, state.opt_state.inner_state)
        jax.tree.map(np.testing.assert_array_equal, after, before)
    state, metrics = step(state, jnp.float32(1.0), make_batch())
    assert int(metrics["skipped"]) == 2 and int(metrics["skipped_in_row"]) == 0
    assert int(state.step) == 4
    assert np.abs(state.params["fc"]["weight"] - before[0]["fc"]["weight"]).max() > 0


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_both_optimizers_lower_the_loss(name):
    config = OptimizerConfig(name=name, learning_rate=0.05, weight_decay=0.0)
    params = {"fc": {"weight": jnp.ones((3,))}, "layer": {"weight": jnp.eye(3)}}

    def error(state, params, frozen, batch, keys):
        wrong = batch["x"] @ params["layer"]["weight"] @ params["fc"]["weight"] - batch["y"]
        return (wrong**2).sum(), jnp.float32(len(batch["y"])), {}

    optimizer = make_optimizer(config, 40)
    state = build_state(
        lambda params, key: init_state(params, optimizer, key), params, jax.random.key(0)
    )
    step = make_train_step(error, optimizer, make_schedule(config, 40))
    losses = []
    for _ in range(40):
        state, metrics = step(state, jnp.float32(1.0), make_batch())
        losses.append(float(metrics["loss"]))
    assert losses[-1] < 0.5 * losses[0]
    assert np.abs(state.params["layer"]["weight"] - params["layer"]["weight"]).max() > 0.05


def test_the_running_mean_follows_the_weights():
    config = OptimizerConfig()
    params = {"fc": {"weight": jnp.ones((3,))}}
    optimizer = make_optimizer(config, 10)
    state = build_state(
        lambda params, key: init_state(params, optimizer, key, ema=True), params, jax.random.key(0)
    )
    step = make_train_step(squared_error, optimizer, make_schedule(config, 10), ema_decay=0.75)
    mean = np.ones(3, np.float32)
    for _ in range(3):
        state, _ = step(state, jnp.float32(1.0), make_batch())
        mean = 0.75 * mean + 0.25 * np.asarray(state.params["fc"]["weight"])
        np.testing.assert_allclose(state.drafter["fc"]["weight"], mean, rtol=1e-6)
    assert np.abs(mean - state.params["fc"]["weight"]).max() > 0


def test_operations_are_those_of_the_products():
    shapes = (jax.ShapeDtypeStruct((6, 5), jnp.float32), jax.ShapeDtypeStruct((5, 4), jnp.float32))
    assert count_flops(jnp.matmul, *shapes) == 2 * 6 * 5 * 4


def test_modes_that_the_mesh_does_not_fit_are_refused():
    optimizer = make_optimizer(OptimizerConfig(), 10)
    schedule = make_schedule(OptimizerConfig(), 10)
    with pytest.raises(ConfigError, match="train.mode='xmap' is not allowed"):
        make_train_step(squared_error, optimizer, schedule, mode="xmap")
    mesh = make_mesh((2, 2, 1), 4)
    with pytest.raises(ConfigError, match="train.mesh="):
        make_train_step(squared_error, optimizer, schedule, mode="shard_map", mesh=mesh)


@pytest.mark.parametrize("accumulate", [1, 5])
def test_without_a_normaliser_the_loss_is_the_sum_however_it_is_split(accumulate):
    def summed(state, params, frozen, batch, keys):
        return squared_error(state, params, frozen, batch, keys)[0], jnp.float32(1.0), {}

    optimizer = make_optimizer(OptimizerConfig(), 10)
    schedule = make_schedule(OptimizerConfig(), 10)
    params = {"fc": {"weight": jnp.ones((3,))}}
    state = build_state(
        lambda params, key: init_state(params, optimizer, key), params, jax.random.key(0)
    )
    step = make_train_step(summed, optimizer, schedule, accumulate=accumulate, divide=False)
    batch = make_batch()
    error = batch["x"] @ np.ones(3, np.float32) - batch["y"]
    _, metrics = step(state, jnp.float32(1.0), batch)
    np.testing.assert_allclose(metrics["loss"], (batch["w"] * error**2).sum(), rtol=1e-6)
