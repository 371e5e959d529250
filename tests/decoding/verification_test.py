import jax.numpy as jnp

from dscout_jax.decoding.verification import accepted_length, emitted_length, is_stop


def test_the_first_disagreement_ends_the_accepted_prefix():
    drafts = jnp.array([[1, 2, 3], [1, 2, 3], [9, 2, 3], [1, 9, 3]])
    verified = jnp.array([[1, 2, 3]] * 4)
    assert accepted_length(drafts, verified).tolist() == [3, 3, 0, 1]


def test_a_cycle_emits_accepted_drafts_and_one_more():
    verified = jnp.array([[4, 5, 6, 7]] * 2)
    emitted, ends = emitted_length(verified, jnp.array([0, 3]), jnp.array([9, 9]), (2,))
    assert emitted.tolist() == [1, 4]
    assert ends.tolist() == [False, False]


def test_a_stop_token_ends_the_row_and_counts_but_nothing_behind_it_does():
    verified = jnp.array([[4, 2, 6, 7], [4, 5, 6, 2]])
    emitted, ends = emitted_length(verified, jnp.array([3, 1]), jnp.array([9, 9]), (2,))
    assert emitted.tolist() == [2, 2]
    assert ends.tolist() == [True, False]  # row 1's stop lies behind what was accepted


def test_the_budget_cuts_a_cycle():
    verified = jnp.array([[4, 5, 6, 7]] * 2)
    emitted, ends = emitted_length(verified, jnp.array([3, 1]), jnp.array([2, 2]), (2,))
    assert emitted.tolist() == [2, 2]
    assert ends.tolist() == [True, True]


def test_several_stop_tokens_are_recognised():
    assert is_stop(jnp.array([1, 2, 3]), (3, 1)).tolist() == [True, False, True]
