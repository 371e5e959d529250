import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dscout_jax.kernels import attention, native
from dscout_jax.models import layers

needs_compiler = pytest.mark.skipif(
    not native.available() or jax.default_backend() != "cpu", reason="no kernels here"
)


def draw(batch, num_tokens, heads, kv_heads, capacity, head_dim):
    rng = np.random.default_rng(num_tokens)
    q = rng.standard_normal((batch, num_tokens, heads, head_dim), np.float32)
    k, v = rng.standard_normal((2, batch, kv_heads, capacity, head_dim), np.float32)
    visible = rng.integers(1, capacity + 1, (batch, num_tokens)).astype(np.int32)
    visible[0, 0], visible[-1, -1] = 1, capacity
    rotary = layers.rotary_table(jnp.asarray(visible), head_dim, 100.0)
    return jnp.asarray(q), rotary, *(jnp.asarray(a) for a in (k, v, visible))


@needs_compiler
@pytest.mark.parametrize(
    "shape",
    [
        (1, 1, 9, 3, 64, 64),
        (2, 5, 4, 2, 36, 16),
        (3, 16, 2, 2, 20, 32),
        (1, 24, 6, 1, 9, 48),
        (1, 3, 8, 2, 300, 128),
    ],
)
def test_equals_masked_attention(shape):
    q, rotary, k, v, visible = draw(*shape)
    assert attention.usable(q, k)
    ours = attention.cached_attention(q, rotary, k, v, visible)
    np.testing.assert_allclose(
        ours, layers._attend_masked(q, rotary, k, v, visible), rtol=2e-5, atol=2e-5
    )


@needs_compiler
@pytest.mark.parametrize("block_size", [1, 6, 16])
@pytest.mark.parametrize("heads", [(4, 1), (9, 3), (5, 1)])
def test_a_block_of_more_keys_equals_masked_attention_over_both(heads, block_size):
    q, rotary, k, v, _ = draw(2, block_size, *heads, 150, 32)
    block = draw(2, block_size, *heads, block_size, 32)[2:4]
    before = jnp.array([0, 131])
    visible = jnp.broadcast_to(before[:, None], (2, block_size))
    ours = attention.cached_attention(q, rotary, k, v, visible, block)
    # The same keys in one row of a cache: first the block, then what is visible besides.
    joined = [jnp.concatenate([b, c], axis=2) for b, c in zip(block, (k, v), strict=True)]
    theirs = layers._attend_masked(q, rotary, *joined, visible + block_size)
    np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=2e-5)


@needs_compiler
def test_a_query_never_depends_on_the_others_nor_on_what_it_cannot_see():
    q, rotary, k, v, visible = draw(2, 8, 4, 2, 32, 64)
    every = np.asarray(attention.cached_attention(q, rotary, k, v, visible))
    for t in range(8):
        one = slice(t, t + 1)
        alone = attention.cached_attention(
            q[:, one], [t[:, one] for t in rotary], k, v, visible[:, one]
        )
        np.testing.assert_array_equal(alone, every[:, one])
    few = jnp.minimum(visible, 9)
    hidden = jnp.arange(32)[None, None, :, None] >= 9
    spoilt = [jnp.where(hidden, 1e6, x) for x in (k, v)]
    np.testing.assert_array_equal(
        attention.cached_attention(q, rotary, k, v, few),
        attention.cached_attention(q, rotary, *spoilt, few),
    )


@needs_compiler
def test_large_scores_do_not_overflow():
    q, rotary, k, v, visible = draw(1, 2, 2, 1, 16, 16)
    out = attention.cached_attention(q * 1e3, rotary, k * 1e3, v, visible)
    assert np.isfinite(np.asarray(out)).all()


@pytest.mark.parametrize("shape", [(1, 25, 2, 1, 32, 16), (1, 2, 2, 1, 32, 24)])
def test_unsuitable_shapes_are_left_to_xla(shape):
    q, _, k, _, _ = draw(*shape)
    assert not attention.usable(q, k)
