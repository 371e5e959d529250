"""Builds CPU kernels out of LLVM IR and hands them to XLA as custom calls.

A kernel is a function over numbered chunks of one operation; this module adds what lets XLA call
it: the handler of XLA's foreign function interface, and the sharing out of the chunks among XLA's
own threads. `llvmlite` (an optional dependency) compiles for the machine at hand; without it, or
on another platform, callers fall back to plain XLA.

Source of the layouts: `xla/ffi/api/c_api.h`, version 0.3, which only ever appends fields.
"""

import ctypes
import functools
import importlib.util
import os
from collections.abc import Callable, Sequence
from typing import Any

import jax

from dscout_jax.kernels.builder import Code

ALIGN = 16  # floats that every size of a vectorised axis is a multiple of: the widest vector
MAX_VALUES = 16  # pointers and sizes that a kernel can read

_PTR, _U64, _I32 = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int32
_HEAD = [("struct_size", _U64), ("extension", _PTR)]


class _Args(ctypes.Structure):
    _fields_ = [*_HEAD, ("size", _U64), ("types", _PTR), ("buffers", _PTR)]


class _CallFrame(ctypes.Structure):
    _fields_ = [
        *_HEAD, ("api", _PTR), ("ctx", _PTR), ("stage", _I32), ("args", _Args), ("rets", _Args)
    ]  # fmt: skip


class _Buffer(ctypes.Structure):
    _fields_ = [*_HEAD, ("dtype", _I32), ("data", _PTR), ("rank", _U64), ("dims", _PTR)]


class _Extension(ctypes.Structure):
    _fields_ = [("struct_size", _U64), ("type", _I32), ("next", _PTR), ("metadata", _PTR)]


class _Version(ctypes.Structure):
    _fields_ = [*_HEAD, ("major", _I32), ("minor", _I32)]


class _Metadata(ctypes.Structure):
    _fields_ = [("struct_size", _U64), ("version", _Version)]


class _Schedule(ctypes.Structure):
    _fields_ = [*_HEAD, ("ctx", _PTR), ("task", _PTR), ("data", _PTR)]


class _Job(ctypes.Structure):
    """One call in flight; freed by whoever leaves it last."""

    _fields_ = [
        ("next", _I32), ("done", _I32), ("owners", _I32), ("chunks", _I32),
        ("values", ctypes.c_int64 * MAX_VALUES), ("schedule", _Schedule),
    ]  # fmt: skip


_API_SCHEDULE = 136  # offset of XLA_FFI_ThreadPool_Schedule in XLA_FFI_Api
_EXTENSION_METADATA = 1
_API_VERSION = (0, 3)


def available() -> bool:
    """Whether kernels can be built here: llvmlite is installed and not switched off.

    `DSCOUT_NATIVE_KERNELS=0` in the environment switches them off.
    """
    return os.environ.get("DSCOUT_NATIVE_KERNELS") != "0" and _compiler_found()


@functools.cache
def _compiler_found() -> bool:
    return importlib.util.find_spec("llvmlite") is not None


# Reads (values, chunk, number of chunks), all 64-bit, and emits the work of one chunk.
Body = Callable[[Code, Sequence[Any], Any, Any], None]


@functools.cache
def register(
    name: str,
    body: Body,
    count_chunks: Callable[[Code, Sequence[Any]], Any],
    values: tuple[tuple[str, int, int | None], ...],
) -> str:
    """Compiles a kernel, registers it with XLA once, and returns the name to call it by.

    Args:
        name: unique name.
        body: emits the code of one chunk; chunks run in any order on several threads.
        count_chunks: emits the number of chunks (64-bit, at least 1) from the values.
        values: what the kernel reads, at most `MAX_VALUES`: `("args" | "rets", buffer, axis)` is
            the size of an axis, with axis None the address of the data. Addresses come first.
    """
    from llvmlite import ir

    module = ir.Module(name)
    _emit(module, name, body, count_chunks, values)
    handler = _compile(str(module)).get_function_address(name)
    jax.ffi.register_ffi_target(name, _capsule(handler), platform="cpu")
    return name


def _capsule(address: int) -> Any:
    new = ctypes.pythonapi.PyCapsule_New
    new.restype, new.argtypes = ctypes.py_object, [_PTR, ctypes.c_char_p, _PTR]
    return new(address, None, None)


_ENGINES = []  # compiled code must outlive every program that calls it


def _compile(text: str) -> Any:
    from llvmlite import binding

    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    machine = binding.Target.from_default_triple().create_target_machine(
        cpu=binding.get_host_cpu_name(), features=binding.get_host_cpu_features().flatten(), opt=3
    )
    module = binding.parse_assembly(text)
    module.verify()
    tuning = binding.create_pipeline_tuning_options(speed_level=3)
    passes = binding.create_pass_builder(machine, tuning)
    passes.getModulePassManager().run(module, passes)
    engine = binding.create_mcjit_compiler(module, machine)
    engine.finalize_object()
    _ENGINES.append(engine)
    return engine


def _function(module: Any, name: str, result: Any, arguments: Sequence[Any]) -> tuple[Any, Code]:
    from llvmlite import ir

    function = ir.Function(module, ir.FunctionType(result, arguments), name)
    code = Code(ir.IRBuilder(function.append_basic_block("entry")))
    return function, code


def _emit(module: Any, name: str, body: Body, count_chunks: Any, values: Any) -> None:
    """Emits run(job), leave(job), task(job) and the handler, which is called `name`."""
    from llvmlite import ir

    ptr, i32, i64, void = ir.PointerType(), ir.IntType(32), ir.IntType(64), ir.VoidType()
    malloc = ir.Function(module, ir.FunctionType(ptr, [i64]), "malloc")
    free = ir.Function(module, ir.FunctionType(void, [ptr]), "free")
    schedule_type = ir.FunctionType(ptr, [ptr])
    one, null = ir.Constant(i32, 1), ir.Constant(ptr, None)

    def read(code, job):
        base = code.field_at(job, _Job, "values")
        kinds = [ptr if axis is None else i64 for _, _, axis in values]
        return [code.load(code.at(base, i, i64), kind) for i, kind in enumerate(kinds)]

    # Takes chunks until none is left.
    run, code = _function(module, "run", void, [ptr])
    (job,) = run.args
    given = read(code, job)
    chunks = code.field(job, _Job, "chunks", i32)
    take, work, end = (run.append_basic_block(n) for n in ("take", "work", "end"))
    code.b.branch(take)
    code.b.position_at_end(take)
    chunk = code.b.atomic_rmw("add", code.field_at(job, _Job, "next"), one, "monotonic")
    code.b.cbranch(code.b.icmp_signed("<", chunk, chunks), work, end)
    code.b.position_at_end(work)
    body(code, given, code.b.sext(chunk, i64), code.b.sext(chunks, i64))
    code.b.atomic_rmw("add", code.field_at(job, _Job, "done"), one, "release")
    code.b.branch(take)
    code.b.position_at_end(end)
    code.b.ret_void()

    leave, code = _function(module, "leave", void, [ptr])
    (job,) = leave.args
    owners = code.b.atomic_rmw("sub", code.field_at(job, _Job, "owners"), one, "acq_rel")
    with code.b.if_then(code.b.icmp_signed("==", owners, one)):
        code.b.call(free, [job])
    code.b.ret_void()

    task, code = _function(module, "task", void, [ptr])
    code.b.call(run, task.args)
    code.b.call(leave, task.args)
    code.b.ret_void()

    handler, code = _function(module, name, ptr, [ptr])
    (frame,) = handler.args
    _answer_metadata(code, frame)
    job = code.b.call(malloc, [code.index(ctypes.sizeof(_Job))])
    base = code.field_at(job, _Job, "values")
    for i, (side, buffer, axis) in enumerate(values):
        group = code.field_at(frame, _CallFrame, side)
        buffer = code.load(code.at(code.field(group, _Args, "buffers", ptr), buffer, ptr), ptr)
        if axis is None:
            value = code.field(buffer, _Buffer, "data", ptr)
        else:
            value = code.load(code.at(code.field(buffer, _Buffer, "dims", ptr), axis, i64), i64)
        code.b.store(value, code.at(base, i, i64))
    chunks = code.b.trunc(count_chunks(code, read(code, job)), i32)
    cores = ir.Constant(i32, len(os.sched_getaffinity(0)))
    helpers = code.b.sub(code.minimum(chunks, cores), one)
    for field, value in (
        ("next", ir.Constant(i32, 0)),
        ("done", ir.Constant(i32, 0)),
        ("owners", code.b.add(helpers, one)),
        ("chunks", chunks),
    ):
        code.b.store(value, code.field_at(job, _Job, field))

    arguments = code.field_at(job, _Job, "schedule")
    for field, value in (
        ("struct_size", code.index(ctypes.sizeof(_Schedule))),
        ("extension", null),
        ("ctx", code.field(frame, _CallFrame, "ctx", ptr)),
        ("task", task),
        ("data", job),
    ):
        code.b.store(value, code.field_at(arguments, _Schedule, field))
    api = code.field(frame, _CallFrame, "api", ptr)
    schedule = code.load(code.at(api, _API_SCHEDULE, ir.IntType(8)), schedule_type.as_pointer())
    with code.loop(code.index(0), code.b.sext(helpers, i64), code.index(1)):
        error = code.b.call(schedule, [arguments])
        # Without a pool the calling thread does all of it.
        with code.b.if_then(code.b.icmp_unsigned("!=", error, null)):
            code.b.call(leave, [job])
    code.b.call(run, [job])
    wait, finished = (handler.append_basic_block(n) for n in ("wait", "finished"))
    code.b.branch(wait)
    code.b.position_at_end(wait)
    done = code.b.load_atomic(code.field_at(job, _Job, "done"), "acquire", 4, typ=i32)
    code.b.cbranch(code.b.icmp_signed("<", done, chunks), wait, finished)
    code.b.position_at_end(finished)
    code.b.call(leave, [job])
    code.b.ret(null)


def _answer_metadata(code: Code, frame: Any) -> None:
    """On registration XLA calls the handler to ask for the version it was built against."""
    extension = code.field(frame, _CallFrame, "extension", code.ptr)
    null = code.ir.Constant(code.ptr, None)
    with code.b.if_then(code.b.icmp_unsigned("!=", extension, null)):
        kind = code.field(extension, _Extension, "type", code.i32)
        asks = code.b.icmp_signed("==", kind, code.ir.Constant(code.i32, _EXTENSION_METADATA))
        with code.b.if_then(asks):
            metadata = code.field(extension, _Extension, "metadata", code.ptr)
            version = code.field_at(metadata, _Metadata, "version")
            for name, number in zip(("major", "minor"), _API_VERSION, strict=True):
                value = code.ir.Constant(code.i32, number)
                code.b.store(value, code.field_at(version, _Version, name))
            code.b.ret(null)
