import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from dscout_jax.objective.inclusion import anchor_mask, make_blocks, sample_anchors


def test_anchors_are_response_positions_with_a_successor():
    mask = anchor_mask(jnp.array([6, 4, 3]), jnp.array([2, 3, 3]), 8)
    assert np.flatnonzero(mask[0]).tolist() == [2, 3, 4]
    assert not mask[1].any()  # one response token: nothing to predict
    assert not mask[2].any()  # no response at all


def test_sampled_anchors_are_distinct_eligible_and_dummies_fill_up():
    eligible = anchor_mask(jnp.array([12, 5, 2]), jnp.array([3, 2, 2]), 12)
    anchors, valid = sample_anchors(jax.random.key(0), eligible, 5)
    assert valid.sum(axis=1).tolist() == [5, 2, 0]
    for row in range(3):
        chosen = np.asarray(anchors[row])[np.asarray(valid[row])]
        assert len(set(chosen.tolist())) == len(chosen)
        assert np.asarray(eligible[row])[chosen].all()
    assert anchors[2].tolist() == [0] * 5


def test_anchors_are_uniform_over_the_eligible_positions():
    eligible = anchor_mask(jnp.array([10]), jnp.array([4]), 10)

    def first(key):
        return sample_anchors(key, eligible, 2)[0][0, 0]

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
    anchors, valid = sample_anchors(jax.random.key(seed), eligible, num_anchors)
    out = blocks(tokens, [length], anchors, valid)
    expected_valid = min(num_anchors, max(0, length - 1 - start))
    assert int(valid.sum()) == expected_valid
    for index in range(num_anchors):
        anchor = int(anchors[0, index])
        expected = [
            bool(valid[0, index]) and slot > 0 and anchor + slot < length for slot in range(4)
        ]
        assert out.included[0, index].tolist() == expected
