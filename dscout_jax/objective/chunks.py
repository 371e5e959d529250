"""A sum over many blocks, a few at a time, with the gradient taken in the same pass.

Activations and logits exist for one chunk only, and nothing is computed twice: as soon as a chunk's
value is known its gradient is taken and added up, so the backward pass has nothing left to do.

Source: METHOD section 2.3 ("the vocabulary axis never materialises for all blocks at once").
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp


def split_chunks(tree: Any, num_chunks: int) -> Any:
    """Returns leaves [B, A, ...] as [num_chunks, B, A / num_chunks, ...], A padded with zeros."""

    def split(x):
        size = -(-x.shape[1] // num_chunks)
        padding = ((0, 0), (0, size * num_chunks - x.shape[1]), *((0, 0),) * (x.ndim - 2))
        x = jnp.pad(x, padding).reshape(x.shape[0], num_chunks, size, *x.shape[2:])
        return jnp.moveaxis(x, 1, 0)

    return jax.tree.map(split, tree)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def sum_chunks(fn: Callable, learned: Any, constants: Any, chunks: Any) -> tuple[jax.Array, Any]:
    """Returns the sums of `fn(learned, constants, chunk) -> (value [], reports)` over chunks.

    Args:
        fn: pure, must not close over traced values.
        learned: pytree of floats, the only argument with a gradient.
        constants: pytree that every chunk reads.
        chunks: pytree whose leaves have the chunks as their first axis.

    Returns:
        value [] with a gradient and the summed reports without.
    """
    return scan_sum(lambda chunk: fn(learned, constants, chunk), chunks)


def scan_sum(fn: Callable, parts: Any) -> Any:
    """Returns the sum of `fn(part)`, a pytree, over parts that are taken one after the other.

    Args:
        fn: pure; no gradient is taken through the sum.
        parts: pytree whose leaves have the parts as their first axis.
    """

    def body(total, part):
        return jax.tree.map(jnp.add, total, fn(part)), None

    shapes = jax.eval_shape(fn, jax.tree.map(lambda x: x[0], parts))
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    return jax.lax.scan(body, zeros, parts)[0]


def _forward(fn, learned, constants, chunks):
    def with_gradient(chunk):
        return jax.value_and_grad(fn, has_aux=True)(learned, constants, chunk)

    sums, gradient = scan_sum(with_gradient, chunks)
    return sums, (gradient, constants, chunks)


def _backward(fn, residuals, cotangents):
    del fn
    gradient, *others = residuals
    # Reports are constants: their cotangents are dropped by design.
    scaled = jax.tree.map(lambda g: (cotangents[0] * g).astype(g.dtype), gradient)
    return scaled, *jax.tree.map(_no_gradient, others)


def _no_gradient(x):
    if jnp.issubdtype(x.dtype, jnp.floating):
        return jnp.zeros_like(x)
    return jnp.zeros(x.shape, jax.dtypes.float0)


sum_chunks.defvjp(_forward, _backward)
