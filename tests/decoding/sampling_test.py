import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dscout_jax.decoding.sampling import (
    TOKEN,
    choose_tokens,
    fold_positions,
    greedy_tokens,
    log_law,
    make_sampling,
)

LAW = np.array([0.5, 0.3, 0.15, 0.05])


def law_of(temperature=1.0, top_k=None, top_p=1.0, logits=None):
    keys = jax.random.split(jax.random.key(0), 1)
    logits = jnp.log(jnp.asarray(LAW)) if logits is None else logits
    sampling = make_sampling(keys, temperature, top_k, top_p)
    return np.exp(np.asarray(log_law(logits[None, None], sampling))[0, 0])


@pytest.mark.parametrize("shape", [(5, 17), (2, 3, 64)])
def test_greedy_tokens_equal_argmax_also_on_ties(shape):
    logits = jnp.round(jax.random.normal(jax.random.key(0), shape))
    np.testing.assert_array_equal(greedy_tokens(logits), jnp.argmax(logits, axis=-1))


def test_a_row_of_nan_stays_inside_the_vocabulary():
    assert greedy_tokens(jnp.full((1, 4), jnp.nan)).tolist() == [3]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, LAW),
        ({"temperature": 0.5}, LAW**2 / (LAW**2).sum()),
        ({"temperature": 0.0}, [1, 0, 0, 0]),
        ({"top_k": 2}, [0.625, 0.375, 0, 0]),
        ({"top_k": 9}, LAW),
        ({"top_p": 0.5}, [1, 0, 0, 0]),
        ({"top_p": 0.51}, [0.625, 0.375, 0, 0]),
        ({"top_p": 0.8}, [0.625, 0.375, 0, 0]),
        # top-p looks at what top-k left: 0.625 of it is the first token.
        ({"top_k": 2, "top_p": 0.6}, [1, 0, 0, 0]),
        # ... and at tempered probabilities: 0.25 / 0.365 of them is the first token.
        ({"temperature": 0.5, "top_p": 0.6}, [1, 0, 0, 0]),
        ({"temperature": 0.0, "top_k": 3, "top_p": 0.9}, [1, 0, 0, 0]),
    ],
)
def test_laws_computed_by_hand(settings, expected):
    np.testing.assert_allclose(law_of(**settings), expected, atol=1e-6)


def test_the_order_of_the_vocabulary_does_not_matter_and_equals_at_the_border_stay():
    logits = jnp.log(jnp.asarray(LAW))[jnp.array([2, 0, 3, 1])]
    np.testing.assert_allclose(law_of(top_k=2, logits=logits), [0, 0.625, 0, 0.375], atol=1e-6)
    ties = law_of(top_k=2, logits=jnp.array([1.0, 1.0, 1.0, 0.0]))
    np.testing.assert_allclose(ties, [1 / 3, 1 / 3, 1 / 3, 0], atol=1e-6)


def test_rows_of_one_batch_have_their_own_settings():
    keys = jax.random.split(jax.random.key(0), 3)
    sampling = make_sampling(keys, jnp.array([1.0, 0.0, 0.5]), jnp.array([2, 4, 4]))
    logits = jnp.broadcast_to(jnp.log(jnp.asarray(LAW)), (3, 2, 4))
    laws = np.exp(np.asarray(log_law(logits, sampling)))
    for row, expected in enumerate([law_of(top_k=2), law_of(0.0), law_of(0.5)]):
        np.testing.assert_allclose(laws[row], [expected, expected], atol=1e-6)


def test_drawn_tokens_follow_the_law():
    sampling = make_sampling(jax.random.split(jax.random.key(0), 60), 0.5)
    logits = jnp.broadcast_to(jnp.log(jnp.asarray(LAW)), (60, 100, 4))
    positions = jnp.broadcast_to(jnp.arange(100)[None], (60, 100))
    tokens = choose_tokens(logits, sampling, positions, greedy=False)
    observed = np.bincount(np.asarray(tokens).ravel(), minlength=4) / 6000
    np.testing.assert_allclose(observed, law_of(0.5), atol=5 * np.sqrt(0.25 / 6000))


def test_a_draw_depends_on_the_rows_key_and_the_position_alone():
    keys = jax.random.split(jax.random.key(2), 8)
    logits = jnp.broadcast_to(jax.random.normal(jax.random.key(1), (1, 1, 50)), (8, 6, 50))
    positions = jnp.broadcast_to(jnp.arange(6)[None], (8, 6))
    together = choose_tokens(logits, make_sampling(keys, 1.0), positions, greedy=False)
    alone = choose_tokens(
        logits[5:6, 2:3], make_sampling(keys[5:6], 1.0), positions[5:6, 2:3], greedy=False
    )
    assert alone[0, 0] == together[5, 2]
    assert len(set(np.asarray(together).ravel().tolist())) > 10
    folded = fold_positions(keys, positions, TOKEN)
    words = np.asarray(jax.random.key_data(folded)).reshape(48, -1)
    assert len({tuple(word) for word in words}) == 48
