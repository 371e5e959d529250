import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dscout_jax.config.models import TargetConfig
from dscout_jax.models.cache import init_cache, rollback
from dscout_jax.models.target import (
    apply_target,
    compute_logits,
    embed,
    finish_target,
    head_rows,
    init_target,
    tail_params,
)


@pytest.fixture(scope="module")
def tokens():
    return jax.random.randint(jax.random.key(5), (2, 14), 0, 13)


def test_cached_passes_at_unequal_positions_equal_the_full_forward(tiny, tokens):
    full = apply_target(tiny.params, tiny.target, tokens, tap_ids=(0, 4))
    cache = init_cache(tiny.target, 2, 20)
    first = apply_target(tiny.params, tiny.target, tokens[:, :7], cache=cache)
    # Row 0 keeps 7 positions, row 1 rolls back to 4: each goes on from its own place.
    cache = rollback(first.cache, jnp.array([7, 4]))
    following = jnp.stack([tokens[0, 7:11], tokens[1, 4:8]])
    out = apply_target(tiny.params, tiny.target, following, cache=cache, tap_ids=(0, 4))
    assert out.cache.length.tolist() == [11, 8]
    for row, start in enumerate((7, 4)):
        expected = slice(start, start + 4)
        # Few rows and many may go through different kernels, which sum in different orders.
        np.testing.assert_allclose(out.hidden[row], full.hidden[row, expected], atol=1e-5)
        np.testing.assert_allclose(out.taps[row], full.taps[row, expected], atol=1e-5)


def test_no_token_sees_a_later_one(tiny, tokens):
    # Token 12 is changed alone: give it an id nothing else in the row uses.
    row = tokens[:1].at[0, 9].set(12).at[0, :9].set(3).at[0, 10:].set(4)

    def hidden(shift):
        table = tiny.params["embed_tokens"]["embedding"].at[12].add(shift)
        params = {**tiny.params, "embed_tokens": {"embedding": table}}
        return apply_target(params, tiny.target, row).hidden[0]

    change = jnp.abs(hidden(1.0) - hidden(0.0)).max(axis=-1)
    assert change[:9].max() == 0.0
    assert change[9:].min() > 0.0


def test_a_finished_row_neither_writes_nor_advances(tiny, tokens):
    cache = init_cache(tiny.target, 2, 20)
    cache = apply_target(tiny.params, tiny.target, tokens[:, :5], cache=cache).cache
    active = jnp.array([True, False])
    after = apply_target(tiny.params, tiny.target, tokens[:, 5:7], cache=cache, active=active).cache
    assert after.length.tolist() == [7, 5]
    np.testing.assert_array_equal(after.keys[0][1], cache.keys[0][1])
    assert np.abs(after.keys[0][0] - cache.keys[0][0]).max() > 0


def test_taps_are_the_residual_stream_after_their_layer():
    # Layers that add 1 to an embedding of ones make layer i's output i + 2.
    config = TargetConfig(5, 8, 16, 4, 2, 1, 4, 1e4, 1e-6, True, False, 64)
    params = jax.tree.map(jnp.zeros_like, init_target(jax.random.key(0), config))
    ones = jnp.ones((8,))
    for index in range(4):
        # mlp(x) = down(silu(gate) * up) with a norm that outputs sign(x): make it the constant 1.
        layer = params[f"layers_{index}"]
        layer["post_attention_layernorm"]["scale"] = ones
        layer["mlp"]["gate_proj"]["weight"] = jnp.ones((16, 8)) / 8
        layer["mlp"]["up_proj"]["weight"] = jnp.ones((16, 8)) / 8
        silu_one = float(jax.nn.silu(1.0))
        layer["mlp"]["down_proj"]["weight"] = jnp.ones((8, 16)) / (16 * silu_one)
    params["embed_tokens"]["embedding"] = jnp.ones((5, 8))
    taps = apply_target(params, config, jnp.zeros((1, 3), jnp.int32), tap_ids=(0, 1, 3)).taps
    np.testing.assert_allclose(taps[0, 0].reshape(3, 8).mean(-1), [2.0, 3.0, 5.0], atol=1e-4)


def test_stopping_after_the_deepest_tap_gives_the_same_taps(tiny, tokens):
    whole = apply_target(tiny.params, tiny.target, tokens, tap_ids=(1, 3)).taps
    part = apply_target(tiny.params, tiny.target, tokens, tap_ids=(1, 3), num_layers=4)
    np.testing.assert_array_equal(whole, part.taps)
    assert part.hidden is None


def test_a_tap_can_be_followed_to_the_final_hidden_states(tiny, tokens):
    out = apply_target(tiny.params, tiny.target, tokens, tap_ids=(2,))
    kept = tail_params(tiny.params, tiny.target, 3)
    assert "layers_2" not in kept and "layers_3" in kept
    hidden = finish_target(kept, tiny.target, out.taps, 3)
    np.testing.assert_allclose(hidden, out.hidden, atol=1e-5)


def test_a_tied_head_is_the_embedding_table(tiny):
    config = dataclasses.replace(tiny.target, tie_word_embeddings=True)
    params = init_target(jax.random.key(0), config)
    assert "lm_head" not in params
    hidden = jax.random.normal(jax.random.key(1), (2, 32))
    table = params["embed_tokens"]["embedding"]
    np.testing.assert_allclose(
        compute_logits(params, config, hidden), hidden @ table.T, rtol=1e-5, atol=1e-6
    )
    assert head_rows(params, config) is table


@pytest.mark.parametrize("tied", [True, False])
def test_head_rows_give_the_logits_of_a_pruned_vocabulary(tiny, tied):
    config = dataclasses.replace(tiny.target, tie_word_embeddings=tied)
    params = init_target(jax.random.key(0), config)
    hidden = jax.random.normal(jax.random.key(1), (4, 32))
    ids = jnp.array([2, 5, 11])
    np.testing.assert_allclose(
        hidden @ head_rows(params, config, ids).T,
        compute_logits(params, config, hidden)[:, ids],
        rtol=1e-4,
        atol=1e-5,
    )


def test_embed_looks_up_rows(tiny):
    ids = jnp.array([[3, 0], [12, 3]])
    np.testing.assert_array_equal(
        embed(tiny.params, ids), np.asarray(tiny.params["embed_tokens"]["embedding"])[ids]
    )
