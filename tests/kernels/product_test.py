import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dscout_jax.kernels import native
from dscout_jax.kernels.product import MAX_ROWS, product

needs_compiler = pytest.mark.skipif(
    not native.available() or jax.default_backend() != "cpu", reason="no kernels here"
)


def draw(num_rows, num_columns, num_outputs):
    rng = np.random.default_rng(num_rows + num_columns)
    x = rng.standard_normal((num_rows, num_columns), np.float32)
    weight = rng.standard_normal((num_outputs, num_columns), np.float32)
    return jnp.asarray(x), jnp.asarray(weight)


def compiled_with_kernel(x, weight):
    return "dscout_product" in jax.jit(product).lower(x, weight).compile().as_text()


@needs_compiler
@pytest.mark.parametrize("shape", [(16, 4), (64, 12), (576, 1536), (1536, 576), (2064, 12)])
def test_every_number_of_rows_equals_numpy_and_a_row_never_depends_on_the_others(shape):
    x, weight = draw(MAX_ROWS, *shape)
    exact = np.asarray(x, np.float64) @ np.asarray(weight, np.float64).T
    every = np.asarray(product(x, weight))
    for num_rows in range(1, MAX_ROWS + 1):
        some = np.asarray(product(x[:num_rows], weight))
        np.testing.assert_allclose(some, exact[:num_rows], rtol=1e-4, atol=1e-4)
        np.testing.assert_array_equal(some, every[:num_rows])


@needs_compiler
def test_suitable_shapes_take_the_kernel():
    assert compiled_with_kernel(*draw(8, 64, 12))


@pytest.mark.parametrize("shape", [(MAX_ROWS + 1, 64, 12), (3, 24, 12), (3, 64, 6), (0, 16, 4)])
def test_other_shapes_are_left_to_xla(shape):
    x, weight = draw(*shape)
    assert not compiled_with_kernel(x, weight)
    np.testing.assert_allclose(product(x, weight), x @ weight.T, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("types", [("bfloat16", "float32"), ("float32", "bfloat16")])
def test_a_narrower_factor_rounds_the_other_but_neither_sums_nor_gradients(types):
    x, weight = (a.astype(dtype) for a, dtype in zip(draw(3, 1536, 12), types, strict=True))
    assert not compiled_with_kernel(x, weight)
    exact = [np.asarray(a.astype(jnp.bfloat16), np.float64) for a in (x, weight)]
    result = product(x, weight, jnp.float32)
    np.testing.assert_allclose(result, exact[0] @ exact[1].T, rtol=1e-5, atol=1e-4)
    assert product(x, weight).dtype == x.dtype

    up = jnp.asarray(np.random.default_rng(0).integers(-4, 5, result.shape), jnp.float32)
    gradients = jax.vjp(lambda x, weight: product(x, weight, jnp.float32), x, weight)[1](up)
    expected = up @ exact[1], np.asarray(up).T @ exact[0]
    for gradient, value, dtype in zip(gradients, expected, types, strict=True):
        assert gradient.dtype == dtype
        rtol = 1e-5 if dtype == "float32" else 1e-2
        np.testing.assert_allclose(gradient.astype(jnp.float32), value, rtol=rtol, atol=1e-4)


def test_the_environment_switches_kernels_off(monkeypatch):
    monkeypatch.setenv("DSCOUT_NATIVE_KERNELS", "0")
    assert not compiled_with_kernel(*draw(3, 64, 12))


@needs_compiler
def test_gradients_equal_those_of_the_plain_product():
    x, weight = draw(5, 64, 12)

    def loss(f):
        return lambda x, weight: jnp.sum(jnp.sin(f(x, weight)))

    ours = jax.jit(jax.grad(loss(product), argnums=(0, 1)))(x, weight)
    plain = jax.grad(loss(lambda x, weight: x @ weight.T), argnums=(0, 1))(x, weight)
    for a, b in zip(ours, plain, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


@needs_compiler
def test_calls_from_several_threads_do_not_disturb_each_other():
    from concurrent.futures import ThreadPoolExecutor

    cases = [draw(rows, 576, 576) for rows in (1, 3, 8, 16)]
    function = jax.jit(product)
    expected = [np.asarray(function(*case)) for case in cases]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(20):
            results = pool.map(lambda case: np.asarray(function(*case)), cases)
            for result, value in zip(results, expected, strict=True):
                np.testing.assert_array_equal(result, value)
