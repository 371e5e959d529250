"""A builder of LLVM IR with the few idioms that the kernels are made of."""

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any


@functools.cache
def lanes() -> int:
    """Floats in one vector of this machine: 16 with AVX-512, else 8 (AVX2, or two of NEON)."""
    from llvmlite import binding

    return 16 if binding.get_host_cpu_features().get("avx512f") else 8


class Code:
    """An IR builder with the few idioms that the kernels are made of."""

    def __init__(self, builder: Any):
        """Wraps an `llvmlite.ir.IRBuilder`."""
        from llvmlite import ir

        self.ir, self.b = ir, builder
        self.i32, self.i64, self.f32 = ir.IntType(32), ir.IntType(64), ir.FloatType()
        self.ptr, self.void = ir.PointerType(), ir.VoidType()
        self.zero = ir.Constant(self.i32, 0)
        self.lanes = lanes()
        self.vec = ir.VectorType(self.f32, self.lanes)

    def index(self, value: int) -> Any:
        """A 64-bit constant."""
        return self.ir.Constant(self.i64, value)

    def number(self, value: float) -> Any:
        """A float constant."""
        return self.ir.Constant(self.f32, value)

    def at(self, base: Any, index: Any, kind: Any = None) -> Any:
        """The address of element `index` of an array of `kind` (float by default)."""
        index = index if not isinstance(index, int) else self.index(index)
        return self.b.gep(base, [index], source_etype=kind or self.f32)

    def load(self, address: Any, kind: Any = None) -> Any:
        """Loads a `kind` (a vector of floats by default) from an address of any alignment."""
        kind = kind or self.vec
        floats = kind == self.f32 or isinstance(kind, self.ir.VectorType)
        return self.b.load(address, typ=kind, align=4 if floats else None)

    def store(self, value: Any, address: Any) -> None:
        """Stores floats at an address of any alignment."""
        self.b.store(value, address, align=4)

    def field(self, base: Any, structure: type, name: str, kind: Any) -> Any:
        """Loads a field of a C structure."""
        return self.b.load(self.field_at(base, structure, name), typ=kind)

    def field_at(self, base: Any, structure: type, name: str) -> Any:
        """The address of a field of a C structure."""
        return self.at(base, getattr(structure, name).offset, self.ir.IntType(8))

    def variable(self, kind: Any, value: Any) -> Any:
        """A mutable local, kept in a register by the optimiser."""
        with self.b.goto_entry_block():
            slot = self.b.alloca(kind)
        self.b.store(value, slot)
        return slot

    def array(self, kind: Any, count: int) -> Any:
        """The address of `count` values on the stack, undefined at first."""
        with self.b.goto_entry_block():
            address = self.b.alloca(kind, size=self.index(count))
        address.type = self.ptr  # may hold any kind
        return address

    def get(self, slot: Any, kind: Any = None) -> Any:
        """Reads a mutable local."""
        return self.b.load(slot, typ=kind or self.vec)

    @contextmanager
    def loop(self, start: Any, stop: Any, step: Any) -> Iterator[Any]:
        """`for i in range(start, stop, step)` over 64-bit integers; yields i."""
        slot = self.variable(self.i64, start)
        test, body, after = (self.b.append_basic_block(n) for n in ("test", "body", "after"))
        self.b.branch(test)
        self.b.position_at_end(test)
        index = self.b.load(slot, typ=self.i64)
        self.b.cbranch(self.b.icmp_signed("<", index, stop), body, after)
        self.b.position_at_end(body)
        yield index
        self.b.store(self.b.add(index, step), slot)
        self.b.branch(test)
        self.b.position_at_end(after)

    def splat(self, value: Any) -> Any:
        """A vector with one float in every lane."""
        undefined = self.ir.Constant(self.vec, self.ir.Undefined)
        first = self.b.insert_element(undefined, value, self.zero)
        return self.shuffle(first, first, [0] * self.lanes)

    def shuffle(self, a: Any, b: Any, lanes: Sequence[int]) -> Any:
        """Lanes of `a` (from 0) and of `b` (from its own width on)."""
        mask = self.ir.Constant(self.ir.VectorType(self.i32, len(lanes)), list(lanes))
        return self.b.shuffle_vector(a, b, mask)

    def fma(self, a: Any, b: Any, c: Any) -> Any:
        """Gives a * b + c of vectors, rounded once."""
        return self._call(f"llvm.fma.v{self.lanes}f32", self.vec, [a, b, c])

    def maximum(self, a: Any, b: Any) -> Any:
        """The larger of two vectors, lane by lane."""
        return self.b.select(self.b.fcmp_ordered(">", a, b), a, b)

    def minimum(self, a: Any, b: Any) -> Any:
        """The smaller of two signed integers."""
        return self.b.select(self.b.icmp_signed("<", a, b), a, b)

    def ceil_div(self, a: Any, b: Any) -> Any:
        """The quotient of two positive integers, rounded up."""
        return self.b.sdiv(self.b.sub(self.b.add(a, b), self.ir.Constant(a.type, 1)), b)

    def prefetch(self, address: Any) -> None:
        """Asks for the cache line at an address, for reading, into the second level."""
        flags = [self.ir.Constant(self.i32, flag) for flag in (0, 2, 1)]
        self._call("llvm.prefetch.p0", self.void, [address, *flags])

    def _call(self, name: str, result: Any, arguments: Sequence[Any]) -> Any:
        module = self.b.module
        if name not in module.globals:
            kind = self.ir.FunctionType(result, [value.type for value in arguments])
            self.ir.Function(module, kind, name)
        return self.b.call(module.globals[name], arguments)

    def add_lanes(self, vectors: Sequence[Any]) -> Any:
        """Sums the lanes of each of 2**n vectors; returns one vector of the sums, in order.

        Neighbouring lanes are added first, whatever the number of vectors, so a sum does not depend
        on what is summed beside it.
        """
        count, width = len(vectors), self.lanes
        while len(vectors) > 1:
            even, odd = range(0, 2 * width, 2), range(1, 2 * width, 2)
            vectors = [
                self.b.fadd(self.shuffle(a, b, even), self.shuffle(a, b, odd))
                for a, b in zip(vectors[::2], vectors[1::2], strict=True)
            ]
        (total,) = vectors
        while width > count:
            even, odd = range(0, width, 2), range(1, width, 2)
            total = self.b.fadd(self.shuffle(total, total, even), self.shuffle(total, total, odd))
            width //= 2
        return total
