"""Attention of a few new tokens to a key/value cache, over the valid part of the cache only.

XLA works on the whole buffer, masked, in several passes whose launches cost more than the work.
Here the query heads that share a key head read it together, a stretch of keys at a time, with one
running softmax. Every sum has a fixed order: a token's result does not depend on the others.

Source of the running softmax: Milakov and Gimelshein 2018, algorithm 3.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dscout_jax.kernels import native
from dscout_jax.kernels.builder import Code

MAX_TOKENS = 24  # new tokens a row; more are a prefill, which XLA's products do better
TILE = 4  # keys that one step works on
STRETCH = 64  # keys between two corrections of the running softmax
GROUP = 3  # queries at most that read a key together: times TILE, what the registers hold
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
        and native.available()
    )


def cached_attention(
    q: jax.Array,
    rotary: tuple[jax.Array, jax.Array],
    k: jax.Array,
    v: jax.Array,
    visible: jax.Array,
    block: tuple[jax.Array, jax.Array] | None = None,
) -> jax.Array:
    """Returns softmax(r(q) k^T / sqrt(H)) v, [B, T, N * H], on CPU only and without a gradient.

    Queries are rotated here, not before: XLA would compute sines and cosines anew in each layer.

    Args:
        q: [B, T, N, H] float32, H a multiple of 16.
        rotary: cos and sin that rotate the halves of `q`, each [B, T, H/2].
        k: [B, K_h, S, H].
        v: [B, K_h, S, H].
        visible: [B, T] int32 in [0, S], the number of keys that each query sees; not 0 without
            `block`.
        block: keys and values, each [B, K_h, G, H], that every query sees besides.
    """
    batch, num_tokens, num_heads, head_dim = q.shape
    sharing = num_heads // k.shape[1]
    group = max(size for size in range(1, GROUP + 1) if sharing % size == 0)
    arrays = (q, *rotary, visible.astype(jnp.int32), k, v, *(block or ()))
    addresses = [("rets", 0, None), *(("args", i, None) for i in range(len(arrays)))]
    sizes = [("args", i, 2) for i in range(4, len(arrays), 2)]  # S and G
    sizes += [("args", 4, 1), ("args", 0, 3)]  # K_h and H
    sizes += [("args", 0, 0), ("args", 0, 1), ("args", 0, 2)]  # B, T and N
    name = native.register(
        f"dscout_attention_{head_dim}_{group}_{len(arrays)}",
        *_bodies(head_dim, group),
        (*addresses, *sizes),
    )
    result = jax.ShapeDtypeStruct((batch, num_tokens, num_heads * head_dim), jnp.float32)
    return jax.ffi.ffi_call(name, result, vmap_method="sequential")(*arrays)


@functools.cache
def _bodies(head_dim: int, group: int) -> tuple[Callable[..., None], Callable[..., Any]]:
    return functools.partial(_emit, head_dim, group), functools.partial(_count_chunks, group)


def _count_chunks(group: int, code: Code, values: Sequence[Any]) -> Any:
    """One chunk a row, group of query heads, and token."""
    batch, num_tokens, num_heads = values[-3:]
    groups = code.b.sdiv(num_heads, code.index(group))
    return code.b.mul(code.b.mul(batch, groups), num_tokens)


def _emit(
    head_dim: int, group: int, code: Code, values: Sequence[Any], chunk: Any, num_chunks: Any
) -> None:
    """Emits the attention of one token's query heads that belong together."""
    del num_chunks
    out, q, cos, sin, visible, *sources, num_kv, some_dim, _, num_tokens, num_heads = values
    num_sources = len(sources) // 3  # keys, values and size of each
    b, index = code.b, code.index
    # Tokens come last: those that read the same keys are worked on at the same time.
    token, rest = b.srem(chunk, num_tokens), b.sdiv(chunk, num_tokens)
    groups = b.sdiv(num_heads, index(group))
    row, head = b.sdiv(rest, groups), b.mul(b.srem(rest, groups), index(group))
    kv = b.add(b.mul(row, num_kv), b.sdiv(b.mul(head, num_kv), num_heads))
    token = b.add(b.mul(row, num_tokens), token)
    at = b.mul(b.add(b.mul(token, num_heads), head), index(head_dim))

    cos, sin = (code.at(table, b.mul(token, index(head_dim // 2))) for table in (cos, sin))
    queries = _rotate(code, head_dim, group, code.at(q, at), cos, sin)
    softmax = _Softmax(code, head_dim, group, queries, some_dim)
    seen = b.sext(code.load(code.at(visible, token, code.i32), code.i32), code.i64)
    for i, size in enumerate(sources[2 * num_sources :]):
        first = b.mul(b.mul(kv, size), index(head_dim))
        keys, contents = (code.at(array, first) for array in sources[2 * i : 2 * i + 2])
        softmax.add(keys, contents, seen if i == 0 else size)
    softmax.finish(code.at(out, at))


def _rotate(code, head_dim, group, queries, cos, sin) -> Any:
    """Returns the address of the queries [group, H], their halves rotated."""
    b, half = code.b, head_dim // 2
    rotated = code.array(code.f32, group * head_dim)
    vector = code.ir.VectorType(code.f32, native.ALIGN // 2)
    for part in range(0, half, native.ALIGN // 2):
        c, s = (code.load(code.at(table, part), vector) for table in (cos, sin))
        for start in range(part, group * head_dim, head_dim):
            first, second = (
                code.load(code.at(queries, at), vector) for at in (start, start + half)
            )
            turned = b.fsub(b.fmul(first, c), b.fmul(second, s))
            code.store(turned, code.at(rotated, start))
            turned = b.fadd(b.fmul(second, c), b.fmul(first, s))
            code.store(turned, code.at(rotated, start + half))
    return rotated


class _Softmax:
    """A running softmax of some queries over the keys that are added to it."""

    def __init__(self, code: Code, head_dim: int, group: int, queries: Any, some_dim: Any):
        """Starts without a key.

        Args:
            code: where to emit.
            head_dim: H.
            group: number of queries.
            queries: address of the queries, [group, H].
            some_dim: H once more, as a 64-bit value that the compiler does not know.
        """
        self.code, self.head_dim, self.group = code, head_dim, group
        self.queries, self.some_dim = queries, some_dim
        zero = code.splat(code.number(0.0))
        lowest = code.splat(code.number(NEVER))
        self.peaks = [code.variable(code.vec, lowest) for _ in range(group)]
        self.totals = [code.variable(code.vec, zero) for _ in range(group)]
        self.scores = [code.array(code.f32, STRETCH) for _ in range(group)]
        self.parts = range(0, head_dim, code.lanes)
        self.sums = code.array(code.f32, group * head_dim)
        for i in range(0, group * head_dim, code.lanes):
            code.store(zero, code.at(self.sums, i))

    def add(self, keys: Any, contents: Any, count: Any) -> None:
        """Adds `count` keys and values [count, H] at two addresses."""
        code = self.code
        with code.loop(code.index(0), count, code.index(STRETCH)) as start:
            width = code.minimum(code.b.sub(count, start), code.index(STRETCH))
            first = code.b.mul(start, code.index(self.head_dim))
            self._score(code.at(keys, first), width)
            self._weigh(width)
            self._sum(code.at(contents, first), width)

    def finish(self, result: Any) -> None:
        """Stores the weighted means [group, H] at an address."""
        code = self.code
        for i, total in enumerate(self.totals):
            total = code.b.extract_element(code.add_lanes([code.get(total)]), code.zero)
            inverse = code.splat(code.b.fdiv(code.number(1.0), total))
            for part in self.parts:
                at = i * self.head_dim + part
                mean = code.b.fmul(code.load(code.at(self.sums, at)), inverse)
                code.store(mean, code.at(result, at))

    def _score(self, keys, width) -> None:
        """Writes the products of queries and keys."""
        code, b, index = self.code, self.code.b, self.code.index
        last = b.sub(width, index(1))
        with code.loop(index(0), width, index(TILE)) as s:
            # The last step repeats the last key.
            rows = [code.minimum(b.add(s, index(i)), last) for i in range(TILE)]
            rows = [code.at(keys, b.mul(row, index(self.head_dim))) for row in rows]
            zero = code.splat(code.number(0.0))
            sums = [[code.variable(code.vec, zero) for _ in rows] for _ in range(self.group)]
            # A loop, not unrolled: otherwise the compiler keeps more at hand than registers hold.
            with code.loop(index(0), self.some_dim, index(code.lanes)) as part:
                given = [
                    code.load(code.at(code.at(self.queries, i * self.head_dim), part))
                    for i in range(self.group)
                ]
                for i, row in enumerate(rows):
                    key = code.load(code.at(row, part))
                    for query, slots in zip(given, sums, strict=True):
                        b.store(code.fma(query, key, code.get(slots[i])), slots[i])
            for slots, scores in zip(sums, self.scores, strict=True):
                total = code.add_lanes([code.get(slot) for slot in slots])
                code.store(code.shuffle(total, total, range(TILE)), code.at(scores, s))

    def _weigh(self, width) -> None:
        """Replaces scores by exp(score - highest), scaled, and corrects what was summed before."""
        code, b, index = self.code, self.code.b, self.code.index
        lanes = index(code.lanes)
        padded = b.mul(code.ceil_div(width, lanes), lanes)
        scale = code.splat(code.number(float(np.float32(self.head_dim**-0.5))))
        for i, (peak, total, scores) in enumerate(
            zip(self.peaks, self.totals, self.scores, strict=True)
        ):
            with code.loop(width, padded, index(1)) as s:
                code.store(code.number(NEVER), code.at(scores, s))
            before = code.get(peak)
            with code.loop(index(0), padded, lanes) as s:
                b.store(code.maximum(code.get(peak), code.load(code.at(scores, s))), peak)
            highest = code.get(peak)
            for distance in (8, 4, 2, 1)[-(code.lanes.bit_length() - 1) :]:
                turned = [(lane + distance) % code.lanes for lane in range(code.lanes)]
                highest = code.maximum(highest, code.shuffle(highest, highest, turned))
            b.store(highest, peak)
            correction = _emit_exp(code, b.fmul(b.fsub(before, highest), scale))
            b.store(b.fmul(code.get(total), correction), total)
            for part in self.parts:
                place = code.at(self.sums, i * self.head_dim + part)
                code.store(b.fmul(code.load(place), correction), place)
            with code.loop(index(0), padded, lanes) as s:
                below = b.fsub(code.load(code.at(scores, s)), highest)
                power = _emit_exp(code, b.fmul(below, scale))
                code.store(power, code.at(scores, s))
                b.store(b.fadd(code.get(total), power), total)

    def _sum(self, contents, width) -> None:
        """Adds the weighted values, as many parts of a row at once as registers hold."""
        code, b, index = self.code, self.code.b, self.code.index
        for begin in range(0, len(self.parts), TILE):
            parts = self.parts[begin : begin + TILE]
            places = [
                [code.at(self.sums, i * self.head_dim + part) for part in parts]
                for i in range(self.group)
            ]
            sums = [[code.variable(code.vec, code.load(place)) for place in row] for row in places]
            with code.loop(index(0), width, index(1)) as s:
                row = code.at(contents, b.mul(s, index(self.head_dim)))
                weights = [
                    code.splat(code.load(code.at(scores, s), code.f32)) for scores in self.scores
                ]
                for j, part in enumerate(parts):
                    value = code.load(code.at(row, part))
                    for weight, slots in zip(weights, sums, strict=True):
                        b.store(code.fma(weight, value, code.get(slots[j])), slots[j])
            for row, slots in zip(places, sums, strict=True):
                for place, slot in zip(row, slots, strict=True):
                    code.store(code.get(slot), place)


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
