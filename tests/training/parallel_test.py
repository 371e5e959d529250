import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dscout_jax.config.experiment import OptimizerConfig
from dscout_jax.training.parallel import build_state, make_train_step
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
