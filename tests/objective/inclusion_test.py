import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dscout_jax.config.experiment import ObjectiveConfig
from dscout_jax.objective.inclusion import (
    anchor_mask,
    make_blocks,
    reveal_prefix,
    row_keys,
    sample_anchors,
    sample_taps,
)


def keys(seed, num_rows=1):
    return row_keys(jax.random.key(seed), 0, num_rows)


def test_a_row_draws_the_same_whatever_part_of_the_batch_it_is_in():
    eligible = anchor_mask(jnp.full(6, 40), jnp.arange(6), 40)
    whole, _ = sample_anchors(keys(3, 6), eligible, 4)
    part, _ = sample_anchors(row_keys(jax.random.key(3), 4, 2), eligible[4:], 4)
    np.testing.assert_array_equal(whole[4:], part)
    assert len(np.unique(whole, axis=0)) == 6


def test_anchors_are_response_positions_with_a_successor():
    mask = anchor_mask(jnp.array([6, 4, 3]), jnp.array([2, 3, 3]), 8)
    assert np.flatnonzero(mask[0]).tolist() == [2, 3, 4]
    assert not mask[1].any()  # one response token: nothing to predict
    assert not mask[2].any()  # no response at all


def test_sampled_anchors_are_distinct_eligible_and_dummies_fill_up():
    eligible = anchor_mask(jnp.array([12, 5, 2]), jnp.array([3, 2, 2]), 12)
    anchors, valid = sample_anchors(keys(0, 3), eligible, 5)
    assert valid.sum(axis=1).tolist() == [5, 2, 0]
    for row in range(3):
        chosen = np.asarray(anchors[row])[np.asarray(valid[row])]
        assert len(set(chosen.tolist())) == len(chosen)
        assert np.asarray(eligible[row])[chosen].all()
    assert anchors[2].tolist() == [0] * 5


def test_anchors_are_uniform_over_the_eligible_positions():
    eligible = anchor_mask(jnp.array([10]), jnp.array([4]), 10)

    def first(key):
        return sample_anchors(key[None], eligible, 2)[0][0, 0]

    drawn = jax.vmap(first)(jax.random.split(jax.random.key(1), 4000))
    counts = np.bincount(np.asarray(drawn), minlength=10)[4:9]
    # 5 positions, 800 expected each, standard deviation 25: five deviations.
    assert np.abs(counts - 800).max() < 127


def blocks(tokens, length, anchors, valid, **kwargs):
    return make_blocks(
        jnp.asarray(tokens),
        jnp.asarray(length),
        jnp.asarray(anchors),
        jnp.asarray(valid),
        block_size=4,
        mask_token_id=99,
        **kwargs,
    )


def test_a_block_holds_anchor_and_masks_and_its_labels_sit_at_their_own_positions():
    out = blocks([[10, 11, 12, 13, 14, 15]], [6], [[1, 4]], [[True, True]])
    assert out.inputs.tokens[0].tolist() == [[11, 99, 99, 99], [14, 99, 99, 99]]
    assert out.inputs.positions[0].tolist() == [[1, 2, 3, 4], [4, 5, 6, 7]]
    assert out.labels[0, 0].tolist() == [11, 12, 13, 14]
    # Only one label is left behind position 4.
    assert out.included[0].tolist() == [[False, True, True, True], [False, True, False, False]]


def test_a_label_outside_the_draft_vocabulary_ends_the_block_but_may_be_an_anchor():
    allowed = jnp.array([[True, False, True, False, True, True]])
    out = blocks([[10, 11, 12, 13, 14, 15]], [6], [[1, 3]], [[True, True]], label_mask=allowed)
    assert out.included[0].tolist() == [[False, True, False, False], [False, True, True, False]]


def test_dummy_blocks_supervise_nothing():
    out = blocks([[10, 11, 12, 13, 14, 15]], [6], [[0, 1]], [[False, True]])
    assert not out.included[0, 0].any()


@settings(deadline=None, max_examples=25)
@given(st.integers(0, 12), st.integers(0, 12), st.integers(1, 6), st.integers(0, 1000))
def test_inclusion_agrees_with_a_literal_reading(length, start, num_anchors, seed):
    seq_len = 12
    tokens = np.arange(seq_len)[None] + 1
    eligible = anchor_mask(jnp.array([length]), jnp.array([start]), seq_len)
    anchors, valid = sample_anchors(keys(seed), eligible, num_anchors)
    out = blocks(tokens, [length], anchors, valid)
    expected_valid = min(num_anchors, max(0, length - 1 - start))
    assert int(valid.sum()) == expected_valid
    for index in range(num_anchors):
        anchor = int(anchors[0, index])
        expected = [
            bool(valid[0, index]) and slot > 0 and anchor + slot < length for slot in range(4)
        ]
        assert out.included[0, index].tolist() == expected


def reveal(law, rate, *, decay=1.0, num_blocks=4000, length=9, seed=0):
    """Blocks of 6 slots in a row of 9 tokens, anchored at 1: slots 1 to 5 lie inside."""
    objective = ObjectiveConfig(
        horizons=((6, 1),), reveal=law, reveal_rate=rate, reveal_decay=decay
    )
    tokens = jnp.arange(10, 19)[None]
    return make_blocks(
        tokens,
        jnp.array([length]),
        jnp.ones((1, num_blocks), jnp.int32),
        jnp.ones((1, num_blocks), bool),
        block_size=6,
        mask_token_id=99,
        objective=objective,
        keys=keys(seed),
    )


@pytest.mark.parametrize("law", ["prefix", "random"])
def test_what_is_revealed_is_an_input_and_never_supervised(law):
    out = reveal(law, 0.5, length=6)  # slot 5 lies past the end
    tokens, revealed, included = (
        np.asarray(x[0]) for x in (out.inputs.tokens, out.revealed, out.included)
    )
    truth = np.arange(11, 17)[None].repeat(len(tokens), axis=0)
    np.testing.assert_array_equal(tokens[revealed], truth[revealed])
    assert (tokens[:, 1:][~revealed[:, 1:]] == 99).all()
    assert not (revealed & included).any()
    np.testing.assert_array_equal((revealed | included)[0], [False, True, True, True, True, False])
    assert not revealed[:, 0].any() and not revealed[:, 5].any()


def test_the_laws_of_revealing():
    # Of 4000 blocks half reveal, one to four tokens; standard deviation of a count is at most 32.
    lengths = np.asarray(reveal("prefix", 0.5).revealed[0]).sum(axis=1)
    counts = np.bincount(lengths, minlength=5)
    np.testing.assert_allclose(counts, [2000, 500, 500, 500, 500], atol=160)
    truncated = np.asarray(reveal("prefix", 1.0, decay=0.5).revealed[0]).sum(axis=1)
    expected = 4000 / 15 * np.array([0, 8, 4, 2, 1])
    np.testing.assert_allclose(np.bincount(truncated, minlength=5), expected, atol=160)
    # A rate of its own for each block makes all counts from none to five alike.
    spread = np.asarray(reveal("random", 1.0).revealed[0]).sum(axis=1)
    np.testing.assert_allclose(np.bincount(spread, minlength=6), 4000 / 6, atol=130)
    assert not reveal("prefix", 0.0).revealed.any()
    # Prefixes are prefixes.
    shown = np.asarray(reveal("prefix", 1.0).revealed[0])[:, 1:]
    assert (np.diff(shown.astype(int), axis=1) <= 0).all()


def test_blocks_of_two_slots_reveal_no_prefix():
    assert not reveal_prefix(jax.random.key(0), (3, 2), 1.0).any()


def test_depths_and_taps_are_drawn_by_their_shares():
    objective = ObjectiveConfig(
        horizons=((4, 1),),
        depths=((1, 1.0), (3, 3.0)),
        taps=(((2,), 2.0), ((0, 2), 1.0), ((0, 1, 2), 1.0)),
    )
    out = blocks(
        [[10, 11, 12, 13, 14, 15]], [6], np.ones((1, 4000), int), np.ones((1, 4000), bool),
        objective=objective, keys=keys(0),
    )  # fmt: skip
    np.testing.assert_allclose(np.bincount(out.exits[0]), [1000, 3000], atol=140)
    taps = np.asarray(sample_taps(keys(1, 4000), objective, 3))
    lists, counts = np.unique(taps, axis=0, return_counts=True)
    expected = [[False, False, True], [True, False, True], [True, True, True]]
    np.testing.assert_array_equal(lists, expected)
    np.testing.assert_allclose(counts, [2000, 1000, 1000], atol=160)
    assert sample_taps(keys(1, 4), ObjectiveConfig(horizons=((4, 1),)), 3) is None
