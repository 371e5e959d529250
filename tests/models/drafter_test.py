import dataclasses
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dscout_jax.models.drafter import (
    Context,
    block_inputs,
    draft_blocks,
    project_context,
    select_taps,
)
from dscout_jax.models.target import embed

SEQ_LEN = 20


@pytest.fixture(scope="module")
def row(tiny):
    """Features and tokens of two rows."""
    features = jax.random.normal(jax.random.key(3), (2, SEQ_LEN, 3 * 32))
    tokens = jax.random.randint(jax.random.key(4), (2, SEQ_LEN), 0, 12)
    return features, tokens


def run(tiny, features, tokens, anchors, block_size=4, slot_mask=None, num_layers=None, taps=None):
    params = select_taps(tiny.drafter_params, tiny.drafter, taps)
    positions = jnp.broadcast_to(jnp.arange(SEQ_LEN)[None], tokens.shape)
    context = project_context(params, tiny.drafter, features, positions, num_layers=num_layers)
    rows = jnp.arange(tokens.shape[0])[:, None]
    inputs = block_inputs(
        tokens[rows, anchors],
        anchors,
        block_size=block_size,
        mask_token_id=tiny.drafter.mask_token_id,
    )
    return draft_blocks(
        params,
        tiny.drafter,
        embed(tiny.params, inputs.tokens),
        inputs.positions,
        context,
        slot_mask=slot_mask,
        num_layers=num_layers,
    )


def test_features_at_or_after_an_anchor_change_nothing_and_those_before_do(tiny, row):
    features, tokens = row
    anchors = jnp.array([[6, 9], [6, 9]])
    base = run(tiny, features, tokens, anchors)
    later = run(tiny, features.at[:, 6:].add(10.0), tokens, anchors)
    np.testing.assert_array_equal(later[:, 0], base[:, 0])
    assert np.abs(later[:, 1] - base[:, 1]).max() > 1e-3  # 6..8 lie before anchor 9
    before = run(tiny, features.at[:, 5].add(10.0), tokens, anchors)
    assert np.abs(before[:, 0] - base[:, 0]).max() > 1e-3


def test_a_lone_block_sees_features_strictly_before_its_anchor_only(tiny, row):
    features, tokens = row
    anchors = jnp.array([[6], [9]])
    base = run(tiny, features, tokens, anchors)
    later = run(tiny, features.at[0, 6:].add(10.0).at[1, 9:].add(10.0), tokens, anchors)
    np.testing.assert_array_equal(later, base)
    before = run(tiny, features.at[0, 5].add(10.0).at[1, 8].add(10.0), tokens, anchors)
    assert (np.abs(before - base).max(axis=(1, 2, 3)) > 1e-3).all()


def test_overlapping_blocks_do_not_see_each_other(tiny, row):
    features, tokens = row
    together = run(tiny, features, tokens, jnp.array([[6, 7, 6], [8, 9, 10]]))
    alone = run(tiny, features, tokens, jnp.array([[7], [9]]))
    np.testing.assert_allclose(together[:, 1], alone[:, 0], atol=2e-6)
    np.testing.assert_allclose(together[0, 0], together[0, 2], atol=2e-6)


def test_one_block_a_row_has_the_gradient_of_several(tiny, row):
    features, tokens = row
    anchors = jnp.array([[6], [9]])

    def loss(params, features, slot_mask):
        drafter = SimpleNamespace(params=tiny.params, drafter=tiny.drafter, drafter_params=params)
        return jnp.square(run(drafter, features, tokens, anchors, slot_mask=slot_mask)).sum()

    # A mask without effect keeps to the way that serves several blocks.
    gradients = [
        jax.grad(loss, argnums=(0, 1))(tiny.drafter_params, features, mask)
        for mask in (None, jnp.ones((2, 1, 4), bool))
    ]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), *gradients)


def test_a_masked_slot_equals_a_shorter_block(tiny, row):
    features, tokens = row
    anchors = jnp.array([[6], [9]])
    short = run(tiny, features, tokens, anchors, block_size=4)
    mask = jnp.broadcast_to((jnp.arange(8) < 4)[None, None], (2, 1, 8))
    masked = run(tiny, features, tokens, anchors, block_size=8, slot_mask=mask)
    np.testing.assert_allclose(masked[:, :, :4], short, atol=2e-6)
    unmasked = run(tiny, features, tokens, anchors, block_size=8)
    assert np.abs(unmasked[:, :, :4] - short).max() > 1e-3


def test_every_slot_sees_every_other_slot_of_its_block(tiny, row):
    features, tokens = row
    anchors = jnp.array([[6], [9]])
    base = run(tiny, features, tokens, anchors)
    mask = jnp.ones((2, 1, 4), bool).at[:, :, 3].set(False)
    without_last = run(tiny, features, tokens, anchors, slot_mask=mask)
    assert np.abs(base - without_last)[:, :, 0].max() > 1e-4


def test_positions_are_absolute_and_the_cache_may_be_longer_than_the_context(tiny, row):
    features, tokens = row
    anchors = jnp.array([[6], [9]])
    base = run(tiny, features, tokens, anchors)
    positions = jnp.broadcast_to(jnp.arange(SEQ_LEN)[None], tokens.shape)
    context = project_context(tiny.drafter_params, tiny.drafter, features, positions)
    garbage = jnp.full((2, 2, 7, 16), 50.0)
    longer = Context(
        tuple(jnp.concatenate([k, garbage], axis=2) for k in context.keys),
        tuple(jnp.concatenate([v, garbage], axis=2) for v in context.values),
    )
    inputs = block_inputs(
        tokens[jnp.arange(2)[:, None], anchors],
        anchors,
        block_size=4,
        mask_token_id=12,
    )
    out = draft_blocks(
        tiny.drafter_params,
        tiny.drafter,
        embed(tiny.params, inputs.tokens),
        inputs.positions,
        longer,
    )
    np.testing.assert_allclose(out, base, atol=2e-6)


def test_fewer_layers_are_the_first_layers_and_the_shared_norm(tiny, row):
    features, tokens = row
    anchors = jnp.array([[6], [9]])
    cut = run(tiny, features, tokens, anchors, num_layers=1)
    params = dict(tiny.drafter_params)
    del params["layers_1"]
    config = dataclasses.replace(tiny.drafter, num_hidden_layers=1)
    one = SimpleNamespace(params=tiny.params, drafter=config, drafter_params=params)
    np.testing.assert_array_equal(cut, run(one, features, tokens, anchors))


def test_fewer_taps_are_column_blocks_of_fc(tiny, row):
    features, tokens = row
    anchors = jnp.array([[6], [9]])
    kept = jnp.concatenate([features[..., :32], features[..., 64:]], axis=-1)
    cut = run(tiny, kept, tokens, anchors, taps=(0, 2))
    zeroed = run(tiny, features.at[..., 32:64].set(0.0), tokens, anchors)
    np.testing.assert_allclose(cut, zeroed, atol=2e-6)
