import jax
import jax.numpy as jnp
import numpy as np

from dscout_jax.models.cache import init_cache, write


def test_write_puts_each_row_at_its_own_offset_and_drops_what_does_not_fit():
    buffer = jnp.zeros((3, 2, 6, 4))
    new = jnp.arange(3 * 2 * 2 * 4, dtype=jnp.float32).reshape(3, 2, 2, 4) + 1
    out = np.asarray(write(buffer, new, jnp.array([0, 5, 6])))
    expected = np.zeros((3, 2, 6, 4), np.float32)
    expected[0, :, 0:2] = new[0]
    expected[1, :, 5] = new[1, :, 0]
    np.testing.assert_array_equal(out, expected)


def test_a_donated_write_happens_in_place():
    buffer = jnp.zeros((2, 2, 512, 16))
    new = jnp.ones((2, 2, 4, 16))
    start = jnp.array([3, 9])
    compiled = jax.jit(write, donate_argnums=0).lower(buffer, new, start).compile()
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes == buffer.nbytes
    assert memory.temp_size_in_bytes < buffer.nbytes / 8


def test_init_cache_has_one_buffer_per_layer_and_no_valid_positions(tiny):
    cache = init_cache(tiny.target, 3, 20)
    assert len(cache.keys) == tiny.target.num_hidden_layers
    assert cache.keys[0].shape == (3, 2, 20, 16)
    assert cache.capacity == 20
    assert cache.length.tolist() == [0, 0, 0]
