import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dscout_jax.config.experiment import OptimizerConfig
from dscout_jax.training.state import decayed, make_optimizer, make_schedule

PARAMS = {"fc": {"weight": jnp.ones((3, 2))}, "norm": {"scale": jnp.ones((2,))}}


def test_cosine_rises_over_the_warmup_and_ends_at_the_final_fraction():
    config = OptimizerConfig(learning_rate=2.0, warmup_fraction=0.1, final_fraction=0.25)
    rates = np.asarray([make_schedule(config, 100)(step) for step in range(101)])
    np.testing.assert_allclose(rates[:10], 2.0 * np.arange(1, 11) / 10, rtol=1e-6)
    assert rates.argmax() in (9, 10)
    assert np.all(np.diff(rates[10:]) < 0)
    np.testing.assert_allclose(rates[-1], 0.5, rtol=1e-6)


def test_wsd_is_flat_between_warmup_and_decay():
    config = OptimizerConfig(
        learning_rate=1.0, schedule="wsd", warmup_fraction=0.1, decay_fraction=0.2,
        final_fraction=0.0,
    )  # fmt: skip
    rates = np.asarray([make_schedule(config, 100)(step) for step in range(101)])
    np.testing.assert_allclose(rates[9:81], 1.0)
    np.testing.assert_allclose(rates[90], 0.5, rtol=1e-6)
    np.testing.assert_allclose(rates[100], 0.0, atol=1e-7)


@pytest.mark.parametrize("schedule", ["cosine", "wsd"])
def test_a_run_of_one_step_moves(schedule):
    assert make_schedule(OptimizerConfig(schedule=schedule), 1)(0) > 0


def test_only_matrices_decay():
    assert decayed(PARAMS) == {"fc": {"weight": True}, "norm": {"scale": False}}
    optimizer = make_optimizer(OptimizerConfig(weight_decay=0.5, warmup_fraction=0.0), 10)
    zeros = jax.tree.map(jnp.zeros_like, PARAMS)
    updates, _ = optimizer.update(zeros, optimizer.init(PARAMS), PARAMS)
    assert np.all(updates["fc"]["weight"] < 0)
    assert np.all(updates["norm"]["scale"] == 0)


def test_gradients_are_clipped_by_their_global_norm():
    config = OptimizerConfig(clip_norm=1.0, beta1=0.0, weight_decay=0.0)
    optimizer = make_optimizer(config, 10)
    large = jax.tree.map(lambda x: 1e4 * x, PARAMS)
    _, state = optimizer.update(large, optimizer.init(PARAMS), PARAMS)
    moment = optax.tree.get(state, "mu")
    np.testing.assert_allclose(optax.tree.norm(moment), 1.0, rtol=1e-5)
