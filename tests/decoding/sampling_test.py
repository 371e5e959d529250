import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dscout_jax.decoding.sampling import choose_tokens, greedy_tokens


@pytest.mark.parametrize("shape", [(5, 17), (2, 3, 64)])
def test_greedy_tokens_equal_argmax_also_on_ties(shape):
    logits = jnp.round(jax.random.normal(jax.random.key(0), shape))
    np.testing.assert_array_equal(greedy_tokens(logits), jnp.argmax(logits, axis=-1))


def test_a_row_of_nan_stays_inside_the_vocabulary():
    assert greedy_tokens(jnp.full((1, 4), jnp.nan)).tolist() == [3]


def test_sampled_tokens_follow_the_tempered_distribution():
    logits = jnp.broadcast_to(jnp.log(jnp.array([[0.5, 0.3, 0.2]])), (6000, 3))
    keys = jax.random.split(jax.random.key(0), 6000)
    tokens = choose_tokens(logits, greedy=False, temperature=0.5, keys=keys)
    expected = np.array([0.25, 0.09, 0.04]) / 0.38
    observed = np.bincount(np.asarray(tokens), minlength=3) / 6000
    np.testing.assert_allclose(observed, expected, atol=5 * np.sqrt(0.25 / 6000))


def test_a_row_draws_the_same_token_whatever_its_companions():
    logits = jax.random.normal(jax.random.key(1), (8, 50))
    keys = jax.random.split(jax.random.key(2), 8)
    alone = choose_tokens(logits[5:6], greedy=False, temperature=1.0, keys=keys[5:6])
    together = choose_tokens(logits, greedy=False, temperature=1.0, keys=keys)
    assert alone[0] == together[5]
