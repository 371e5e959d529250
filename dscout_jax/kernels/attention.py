"""Attention of a few new tokens to a key/value cache, over the valid part of the cache only.

XLA works on the whole buffer, masked, in several passes whose launches cost more than the work.
Each query here is computed alone and in a fixed order, so its result does not depend on the other
tokens of the pass.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dscout_jax.kernels import native

MAX_TOKENS = 24  # new tokens a row; more are a prefill, which XLA's products do better
TILE = 4  # keys that one step works on
NEVER = -1e30

# exp(r) of |r| <= ln(2)/2, highest power first. Source: the Cephes library's expf.
EXP_POLYNOMIAL = (
    1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1,
    5.0000001201e-1,
)  # fmt: skip
LN2 = (0.693359375, -2.12194440e-4)  # in two parts, the first exact in few bits
ROUND_SHIFT = 1.5 * 2**23  # adding it leaves the nearest integer in the low bits
EXP_LOWEST = -87.0


def usable(q: jax.Array, k: jax.Array) -> bool:
    """Whether `cached_attention` can take these shapes here (see there)."""
    return (
        q.dtype == k.dtype == jnp.float32
        and q.shape[1] <= MAX_TOKENS
        and q.shape[3] % native.ALIGN == 0
        and k.shape[2] % TILE == 0
        and native.available()
    )


def cached_attention(q: jax.Array, k: jax.Array, v: jax.Array, visible: jax.Array) -> jax.Array:
    """Returns softmax(q k^T / sqrt(H)) v, [B, T, N * H], on CPU only and without a gradient.

    Args:
        q: [B, T, N, H] float32, H a multiple of 16.
        k: [B, K_h, S, H], S a multiple of 4.
        v: [B, K_h, S, H].
        visible: [B, T] int32 in [1, S]; a query sees the first so many keys.
    """
    batch, num_tokens, num_heads, head_dim = q.shape
    capacity = -(-k.shape[2] // native.ALIGN) * native.ALIGN
    addresses = [("rets", 0, None), ("rets", 1, None), *(("args", i, None) for i in range(4))]
    sizes = [("args", 0, 1), ("args", 0, 2), ("args", 1, 1), ("args", 1, 2), ("rets", 1, 2)]
    name = native.register(
        f"dscout_attention_{head_dim}",
        _emitter(head_dim),
        _count_chunks,
        (*addresses, *sizes, ("args", 0, 0)),
    )
    results = (
        jax.ShapeDtypeStruct((batch, num_tokens, num_heads * head_dim), jnp.float32),
        jax.ShapeDtypeStruct((batch, num_heads, capacity), jnp.float32),  # scores of one query
    )
    call = jax.ffi.ffi_call(name, results, vmap_method="sequential")
    return call(q, k, v, visible.astype(jnp.int32))[0]


def _count_chunks(code: native.Code, values: Sequence[Any]) -> Any:
    """One chunk a row and query head."""
    return code.b.mul(values[-1], values[7])


@functools.cache
def _emitter(head_dim: int) -> Callable[..., None]:
    return functools.partial(_emit, head_dim)


def _emit(
    head_dim: int, code: native.Code, values: Sequence[Any], chunk: Any, num_chunks: Any
) -> None:
    """Emits the attention of all queries of one row and head."""
    del num_chunks
    out, scratch, q, k, v, visible, num_tokens, num_heads, num_kv, capacity, width, _ = values
    b, index = code.b, code.index
    row, head = b.sdiv(chunk, num_heads), b.srem(chunk, num_heads)
    kv = b.sdiv(b.mul(head, num_kv), num_heads)
    kv = b.mul(b.mul(b.add(b.mul(row, num_kv), kv), capacity), index(head_dim))
    keys, contents = code.at(k, kv), code.at(v, kv)
    scores = code.at(scratch, b.mul(chunk, width))
    with code.loop(index(0), num_tokens, index(1)) as t:
        token = b.add(b.mul(row, num_tokens), t)
        at = b.mul(b.add(b.mul(token, num_heads), head), index(head_dim))
        count = b.sext(code.load(code.at(visible, token, code.i32), code.i32), code.i64)
        lanes = index(code.lanes)
        padded = b.mul(code.ceil_div(count, lanes), lanes)
        _emit_scores(code, head_dim, code.at(q, at), keys, scores, count, padded)
        total = _emit_softmax(code, head_dim, scores, padded)
        _emit_mean(code, head_dim, scores, contents, count, total, code.at(out, at))


def _emit_scores(code, head_dim, query, keys, scores, count, padded) -> None:
    b, index = code.b, code.index
    parts = range(0, head_dim, code.lanes)
    values = [code.load(code.at(query, part)) for part in parts]
    with code.loop(index(0), count, index(TILE)) as s:
        sums = []
        for i in range(TILE):
            key = code.at(keys, b.mul(b.add(s, index(i)), index(head_dim)))
            total = code.splat(code.number(0.0))
            for part, value in zip(parts, values, strict=True):
                total = code.fma(value, code.load(code.at(key, part)), total)
            sums.append(total)
        total = code.add_lanes(sums)
        code.store(code.shuffle(total, total, range(TILE)), code.at(scores, s))
    with code.loop(count, padded, index(1)) as s:
        code.store(code.number(NEVER), code.at(scores, s))


def _emit_softmax(code, head_dim, scores, padded) -> Any:
    """Replaces scores by exp(score - highest), scaled; returns their sum as a float."""
    b, index = code.b, code.index
    lanes = index(code.lanes)
    peak = code.variable(code.vec, code.splat(code.number(NEVER)))
    with code.loop(index(0), padded, lanes) as s:
        b.store(code.maximum(code.get(peak), code.load(code.at(scores, s))), peak)
    highest = code.get(peak)
    for distance in (8, 4, 2, 1)[-(code.lanes.bit_length() - 1) :]:
        turned = [(lane + distance) % code.lanes for lane in range(code.lanes)]
        highest = code.maximum(highest, code.shuffle(highest, highest, turned))
    scale = float(np.float32(head_dim**-0.5))
    total = code.variable(code.vec, code.splat(code.number(0.0)))
    with code.loop(index(0), padded, lanes) as s:
        below = b.fsub(code.load(code.at(scores, s)), highest)
        power = _emit_exp(code, b.fmul(below, code.splat(code.number(scale))))
        code.store(power, code.at(scores, s))
        b.store(b.fadd(code.get(total), power), total)
    return b.extract_element(code.add_lanes([code.get(total)]), code.ir.Constant(code.i32, 0))


def _emit_exp(code, x) -> Any:
    """Exponential of a vector of non-positive floats, within 2 units in the last place."""
    b = code.b

    def constant(value):
        return code.splat(code.number(float(np.float32(value))))

    x = code.maximum(x, constant(EXP_LOWEST))
    shifted = code.fma(x, constant(np.log2(np.e)), constant(ROUND_SHIFT))
    whole = b.fsub(shifted, constant(ROUND_SHIFT))
    for part in LN2:
        x = code.fma(whole, constant(-part), x)
    value = constant(EXP_POLYNOMIAL[0])
    for coefficient in EXP_POLYNOMIAL[1:]:
        value = code.fma(value, x, constant(coefficient))
    value = b.fadd(code.fma(value, b.fmul(x, x), x), constant(1.0))
    # Adds the integer to the exponent bits.
    integers = code.ir.VectorType(code.i32, code.lanes)
    shift = code.ir.Constant(integers, [23] * code.lanes)
    exponent = b.shl(b.bitcast(shifted, integers), shift)
    return b.bitcast(b.add(b.bitcast(value, integers), exponent), code.vec)


def _emit_mean(code, head_dim, scores, contents, count, total, result) -> None:
    b, index = code.b, code.index
    parts = range(0, head_dim, code.lanes)
    sums = [code.variable(code.vec, code.splat(code.number(0.0))) for _ in parts]
    with code.loop(index(0), count, index(1)) as s:
        weight = code.splat(code.load(code.at(scores, s), code.f32))
        row = code.at(contents, b.mul(s, index(head_dim)))
        for part, slot in zip(parts, sums, strict=True):
            b.store(code.fma(weight, code.load(code.at(row, part)), code.get(slot)), slot)
    inverse = code.splat(b.fdiv(code.number(1.0), total))
    for part, slot in zip(parts, sums, strict=True):
        code.store(b.fmul(code.get(slot), inverse), code.at(result, part))
