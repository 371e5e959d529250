"""The product of a few rows with a large matrix, at the speed of memory.

Decoding multiplies 1 to about 16 rows by every weight of the model. XLA's CPU backend reads the
weights at a third of the memory's speed as soon as there is more than one row. This kernel reads
each weight once, ahead of its use, and sums every product in the same order whatever the number of
rows: the logits of a token do not depend on how many tokens are verified beside it.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from dscout_jax.kernels import native
from dscout_jax.kernels.builder import Code

MAX_ROWS = 24  # above, XLA's own product is as fast
TILE = 4  # rows of weights that one step works on
GROUP = {16: 4, 8: 3}  # lanes: rows of inputs in a step, as many as the registers hold
PANEL = 1024  # columns at most in one pass
CHUNK_BYTES = 1 << 18  # weights in one chunk
AHEAD_BYTES = 1 << 13  # how far ahead weights are fetched, to the next whole tile


def product(x: jax.Array, weight: jax.Array, dtype: Any = None) -> jax.Array:
    """Returns x @ weight.T, [M, N], of x [M, K] and weight [N, K].

    On CPU float32 inputs of at most `MAX_ROWS` rows take the kernel. Where one of the two is
    narrower, they are multiplied in its dtype and summed in float32, as accelerators do, and so are
    the gradients: XLA's CPU backend is five times as fast on bfloat16 factors that way, where the
    CPU can, and no faster any other way. All else is XLA's.

    Args:
        x: rows.
        weight: matrix; its gradient comes in its own dtype.
        dtype: of the result; None = that of `x`.
    """
    dtype = jnp.dtype(dtype or x.dtype)
    narrower = min(x.dtype, weight.dtype, key=lambda factor: factor.itemsize)
    if narrower.itemsize < 4:
        return _summed_in_float32(x, weight, narrower, dtype)
    if (
        x.dtype == weight.dtype == dtype == jnp.float32
        and 1 <= x.shape[0] <= MAX_ROWS
        and x.shape[1] % native.ALIGN == 0
        and weight.shape[0] % TILE == 0
        and native.available()
    ):
        return _few_rows(x, weight)
    return _any_rows(x, weight.astype(x.dtype)).astype(dtype)


def _any_rows(x: jax.Array, weight: jax.Array) -> jax.Array:
    return jax.lax.dot_general(x, weight, (((1,), (1,)), ((), ())))


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _summed_in_float32(x: jax.Array, weight: jax.Array, factors: Any, dtype: Any) -> jax.Array:
    return _sum(x, weight, factors, 1, 1).astype(dtype)


def _forward(x, weight, factors, dtype):
    return _summed_in_float32(x, weight, factors, dtype), (x, weight)


def _backward(factors, dtype, residuals, gradient):
    del dtype
    x, weight = residuals
    for_x = _sum(gradient, weight, factors, 1, 0)
    return for_x.astype(x.dtype), _sum(gradient, x, factors, 0, 0).astype(weight.dtype)


_summed_in_float32.defvjp(_forward, _backward)


def _sum(a: jax.Array, b: jax.Array, factors: Any, axis_a: int, axis_b: int) -> jax.Array:
    axes = (((axis_a,), (axis_b,)), ((), ()))
    return jax.lax.dot_general(
        a.astype(factors), b.astype(factors), axes, preferred_element_type=jnp.float32
    )


@jax.custom_jvp
def _few_rows(x: jax.Array, weight: jax.Array) -> jax.Array:
    return jax.lax.platform_dependent(x, weight, cpu=_on_cpu, default=_any_rows)


@_few_rows.defjvp
def _few_rows_jvp(primals, tangents):
    (x, weight), (dx, dweight) = primals, tangents
    return _few_rows(x, weight), _any_rows(dx, weight) + _any_rows(x, dweight)


def _on_cpu(x: jax.Array, weight: jax.Array) -> jax.Array:
    values = (
        ("rets", 0, None),
        ("args", 0, None),
        ("args", 1, None),
        ("args", 0, 0),
        ("args", 1, 1),
        ("args", 1, 0),
    )
    name = native.register("dscout_product", _emit, _count_chunks, values)
    result = jax.ShapeDtypeStruct((x.shape[0], weight.shape[0]), jnp.float32)
    return jax.ffi.ffi_call(name, result, vmap_method="sequential")(x, weight)


def _count_chunks(code: Code, values: Sequence[Any]) -> Any:
    """About `CHUNK_BYTES` of weights each, and not more chunks than tiles."""
    *_, num_columns, num_outputs = values
    tiles = code.b.sdiv(num_outputs, code.index(TILE))
    size = code.b.mul(code.b.mul(num_columns, num_outputs), code.index(4))
    chunks = code.b.add(code.b.sdiv(size, code.index(CHUNK_BYTES)), code.index(1))
    return code.minimum(chunks, tiles)


def _emit(code: Code, values: Sequence[Any], chunk: Any, num_chunks: Any) -> None:
    """Emits the rows of the result that belong to one chunk of the weights."""
    out, x, weight, num_rows, num_columns, num_outputs = values
    b, index = code.b, code.index
    tiles = b.sdiv(num_outputs, index(TILE))

    def bound(i):
        return b.mul(b.sdiv(b.mul(tiles, i), num_chunks), index(TILE))

    # Full groups of inputs, then pairs, then one; 4 is 2 + 2 where a group holds 3.
    group = GROUP[code.lanes]
    full = b.sdiv(num_rows, index(group))
    if group == 3:
        lone = b.icmp_signed("==", b.srem(num_rows, index(group)), index(1))
        some = b.icmp_signed(">", full, index(0))
        full = b.sub(full, b.zext(b.and_(lone, some), code.i64))
    rest = b.sub(num_rows, b.mul(full, index(group)))
    odd = b.srem(rest, index(2))
    passes = b.add(b.add(full, b.sdiv(rest, index(2))), odd)
    full = b.mul(full, index(group))
    # The tile ahead is fetched in even portions by all passes over this one: fetched by the first
    # alone, memory would rest during the others.
    lines = code.ceil_div(index(TILE), passes)

    # Rows are worked on in panels, so that inputs and tile stay in the first-level cache.
    panel = code.ceil_div(num_columns, code.ceil_div(num_columns, index(PANEL)))
    panel = b.mul(code.ceil_div(panel, index(native.ALIGN)), index(native.ALIGN))
    sums = code.array(code.vec, MAX_ROWS * TILE)
    zero = code.ir.Constant(code.vec, [0.0] * code.lanes)

    row_bytes = b.mul(num_columns, index(4 * TILE))
    ahead = b.add(b.sdiv(index(AHEAD_BYTES), row_bytes), index(1))
    ahead = b.mul(ahead, b.mul(index(TILE), num_columns))
    with code.loop(bound(chunk), bound(b.add(chunk, index(1))), index(TILE)) as n:
        with code.loop(index(0), b.mul(num_rows, index(TILE)), index(1)) as i:
            b.store(zero, code.at(sums, i, code.vec))
        soon = code.variable(code.i64, b.add(b.mul(n, num_columns), ahead))
        with code.loop(index(0), num_columns, panel) as start:
            width = b.sub(code.minimum(b.add(start, panel), num_columns), start)
            first = code.at(weight, b.add(b.mul(n, num_columns), start))

            def multiply(m, count, soon=soon, start=start, width=width, first=first):
                rows = [b.add(m, index(j)) for j in range(count)]
                inputs = [code.at(x, b.add(b.mul(row, num_columns), start)) for row in rows]
                totals = code.at(sums, b.mul(m, index(TILE)), code.vec)
                at = code.get(soon, code.i64)
                fetch = (code.at(weight, at), lines)
                _emit_tile(code, num_columns, width, first, inputs, totals, fetch)
                b.store(b.add(at, b.mul(width, lines)), soon)

            with code.loop(index(0), full, index(group)) as m:
                multiply(m, group)
            with code.loop(full, b.sub(num_rows, odd), index(2)) as m:
                multiply(m, 2)
            with code.loop(b.sub(num_rows, odd), num_rows, index(1)) as m:
                multiply(m, 1)
        with code.loop(index(0), num_rows, index(1)) as m:
            row = code.at(sums, b.mul(m, index(TILE)), code.vec)
            totals = code.add_lanes([code.get(code.at(row, i, code.vec)) for i in range(TILE)])
            totals = code.shuffle(totals, totals, range(TILE))
            code.store(totals, code.at(out, b.add(b.mul(m, num_outputs), n)))


def _emit_tile(code, num_columns, width, first, inputs, totals, fetch) -> None:
    """Adds the products of `TILE` rows of weights with some inputs, and fetches lines ahead.

    Over the first `width` columns from `first` and `inputs`, into `TILE` vectors an input.
    """
    places = [
        [code.at(totals, TILE * j + i, code.vec) for i in range(TILE)] for j in range(len(inputs))
    ]
    sums = [[code.variable(code.vec, code.get(place)) for place in row] for row in places]
    soon, lines = fetch
    last = code.b.sub(lines, code.index(1))
    steps = [code.minimum(code.index(i), last) for i in range(TILE)]
    with code.loop(code.index(0), width, code.index(native.ALIGN)) as k:
        offsets = [code.b.add(k, code.b.mul(code.index(i), num_columns)) for i in range(TILE)]
        line = code.at(soon, code.b.mul(k, lines))
        for step in steps:
            code.prefetch(code.at(line, code.b.mul(step, code.index(native.ALIGN))))
        for part in range(0, native.ALIGN, code.lanes):
            values = [code.load(code.at(code.at(given, k), part)) for given in inputs]
            for i, offset in enumerate(offsets):
                weight = code.load(code.at(code.at(first, offset), part))
                for value, slots in zip(values, sums, strict=True):
                    code.b.store(code.fma(value, weight, code.get(slots[i])), slots[i])
    for row, slots in zip(places, sums, strict=True):
        for place, slot in zip(row, slots, strict=True):
            code.b.store(code.get(slot), place)
