"""The machine instructions numba has no names for, as functions that its kernels call.

Memory is read and written as little-endian words at any byte offset of a (n,) uint8 array: the caller proves that the
word is inside. Words are uint64, narrower ones zero-extended; offsets and counts are int64, and the two are kept apart
because numba makes a float64 of their sum.

``deposit``, ``extract`` and what is called ``translate`` are x86 instructions (:func:`has_bit_scatter`). LLVM ends the
process when told to compile them for another CPU, so a kernel that names them must not be compiled there.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.registry import cpu_target

from splitzip_aio.codec.checksum import KEY_OFFSET, KEY_STEP, STEP

__all__ = [
    "compiled",
    "count_equal",
    "deposit",
    "entry",
    "extract",
    "has_bit_scatter",
    "inlined",
    "load8",
    "load16",
    "load32",
    "load64",
    "lowest_bit",
    "multiply_add_pairs",
    "popcount",
    "store8",
    "store16",
    "store32",
    "store64",
    "sum_all_words",
    "sum_words",
    "translate_nibbles",
    "translate_to_nibbles",
    "translate_window",
]

_log = logging.getLogger(__name__)
_I8, _I32, _I64 = (ir.IntType(bits) for bits in (8, 32, 64))
_BYTES32, _SHORTS32, _PAIRS8 = (
    ir.VectorType(_I8, 32),
    ir.VectorType(ir.IntType(16), 32),
    ir.VectorType(ir.IntType(16), 8),
)
_BYTES16, _WORDS8, _SUMS4 = ir.VectorType(_I8, 16), ir.VectorType(_I32, 8), ir.VectorType(_I64, 4)
_NEEDED = {"+bmi2", "+popcnt", "+ssse3"}
_MICROCODED = ("bdver4", "btver2", "znver1", "znver2")  # have PDEP and PEXT, but at 20 to 250 cycles each


def has_bit_scatter() -> bool:
    """Whether numba compiles for a CPU that has SSSE3, and BMI2 at full speed."""
    _, cpu, features = cpu_target.target_context.codegen().magic_tuple()
    return set(features.split(",")) >= _NEEDED and cpu not in _MICROCODED


def _intrinsic(typer: Callable[..., Any]) -> Callable[..., Any]:
    """``numba.extending.intrinsic``, typed: what kernels call has the typer's arguments but the first."""
    callee: Callable[..., Any] = numba.extending.intrinsic(typer)
    return callee


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """``numba.njit``, typed: no GIL while it runs, no check for division by zero."""
    dispatcher: Callable[..., Any] = numba.njit(nogil=True, error_model="numpy")(function)
    return dispatcher


def entry(function: Callable[..., Any]) -> Callable[..., Any]:
    """:func:`compiled` for what Python calls: the machine code is kept on disk, where there is a place for it.

    numba takes code from there as long as the file of the entry itself is unchanged: after an edit of a file that the
    entry imports from, remove ``__pycache__``.
    """
    try:
        dispatcher: Callable[..., Any] = numba.njit(nogil=True, error_model="numpy", cache=True)(function)
    except RuntimeError as exc:  # numba finds no writable directory: not beside the file, nor in the user's cache
        _log.info("compiled code of %s is not kept: %s", function.__name__, exc)
        return compiled(function)
    return dispatcher


def inlined(function: Callable[..., Any]) -> Callable[..., Any]:
    """:func:`compiled`, and always merged into its callers, where constant arguments become part of the code."""
    dispatcher: Callable[..., Any] = numba.njit(nogil=True, error_model="numpy", forceinline=True)(function)
    return dispatcher


def _instruction(name: str, result: Any, *arguments: Any, llvm: str, flags: tuple[Any, ...] = ()) -> Callable[..., Any]:
    """One LLVM intrinsic on 64-bit values; ``flags`` are constants it takes after its arguments."""

    def emit(_context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        return _call(builder, llvm, _I64, [*values, *flags])

    if len(arguments) == 1:

        def unary(_context: Any, word: Any) -> Any:
            return result(*arguments), emit

        unary.__name__ = name
        return _intrinsic(unary)

    def binary(_context: Any, first: Any, second: Any) -> Any:
        return result(*arguments), emit

    binary.__name__ = name
    return _intrinsic(binary)


def _call(builder: Any, name: str, result: Any, values: list[Any]) -> Any:
    signature = ir.FunctionType(result, [value.type for value in values])
    return builder.call(cgutils.get_or_insert_function(builder.module, signature, name), values)


popcount = _instruction("popcount", types.int64, types.uint64, llvm="llvm.ctpop.i64")
lowest_bit = _instruction(  # of a word that is not zero
    "lowest_bit", types.int64, types.uint64, llvm="llvm.cttz.i64", flags=(ir.Constant(ir.IntType(1), 1),)
)
# deposit(bits, mask): the low bits of `bits`, in order, at the ones of `mask`; extract(word, mask) is the reverse.
deposit = _instruction("deposit", types.uint64, types.uint64, types.uint64, llvm="llvm.x86.bmi.pdep.64")
extract = _instruction("extract", types.uint64, types.uint64, types.uint64, llvm="llvm.x86.bmi.pext.64")


def _pointer(context: Any, builder: Any, array_type: Any, array: Any, offset: Any, to: Any) -> Any:
    data = context.make_array(array_type)(context, builder, array).data
    return builder.bitcast(builder.gep(data, [offset]), to.as_pointer())


def _read(builder: Any, pointer: Any) -> Any:
    value = builder.load(pointer)
    value.align = 1
    return value


def _loader(bits: int) -> Callable[..., Any]:
    def typer(_context: Any, array: Any, offset: Any) -> Any:
        def emit(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            word = _read(builder, _pointer(context, builder, array, values[0], values[1], ir.IntType(bits)))
            return word if bits == 64 else builder.zext(word, _I64)

        return types.uint64(array, types.int64), emit

    typer.__name__ = f"load{bits}"
    return _intrinsic(typer)


def _storer(bits: int) -> Callable[..., Any]:
    def typer(_context: Any, array: Any, offset: Any, word: Any) -> Any:
        def emit(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            pointer = _pointer(context, builder, array, values[0], values[1], ir.IntType(bits))
            narrow = values[2] if bits == 64 else builder.trunc(values[2], ir.IntType(bits))
            builder.store(narrow, pointer).align = 1
            return context.get_dummy_value()

        return types.void(array, types.int64, types.uint64), emit

    typer.__name__ = f"store{bits}"
    return _intrinsic(typer)


load8, load16, load32, load64 = (_loader(bits) for bits in (8, 16, 32, 64))
store8, store16, store32, store64 = (_storer(bits) for bits in (8, 16, 32, 64))


@_intrinsic
def translate_nibbles(_context: Any, table: Any, source: Any, place: Any, target: Any, offset: Any) -> Any:
    """Look 32 nibbles of ``source``, low nibble first, up in the 16-byte ``table``; write 32 bytes of ``target``."""

    def emit(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        table_, source_, place_, target_, offset_ = values
        entries = _read(builder, _pointer(context, builder, table, table_, _I64(0), _BYTES16))
        pairs = _read(builder, _pointer(context, builder, source, source_, place_, _BYTES16))
        low = _shuffle(builder, entries, builder.and_(pairs, ir.Constant(_BYTES16, [15] * 16)))
        high = _shuffle(builder, entries, builder.lshr(pairs, ir.Constant(_BYTES16, [4] * 16)))
        for half in range(2):
            order = [lane // 2 + 8 * half + 16 * (lane % 2) for lane in range(16)]
            both = builder.shuffle_vector(low, high, ir.Constant(ir.VectorType(_I32, 16), order))
            pointer = _pointer(context, builder, target, target_, builder.add(offset_, _I64(16 * half)), _BYTES16)
            builder.store(both, pointer).align = 1
        return context.get_dummy_value()

    return types.void(table, source, types.int64, target, types.int64), emit


@_intrinsic
def translate_window(_context: Any, tables: Any, first: Any, window: Any, source: Any, target: Any, offset: Any) -> Any:
    """XOR into 16 bytes of ``target`` what a window's table says of the same bytes of ``source``.

    Window ``k`` is the values ``first[k]`` to ``first[k] + 15`` with the entries ``tables[16 * k : 16 * k + 16]``;
    other values leave their byte as it is.
    """

    def emit(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        tables_, first_, window_, source_, target_, offset_ = values
        place = builder.mul(window_, _I64(16))
        entries = _read(builder, _pointer(context, builder, tables, tables_, place, _BYTES16))
        start = _splat(builder, _read(builder, _pointer(context, builder, first, first_, window_, _I8)), _BYTES16)
        value = _read(builder, _pointer(context, builder, source, source_, offset_, _BYTES16))
        # PSHUFB gives zero where bit 7 is set: adding 0x70 with saturation sets it for all but 0..15.
        number = _call(
            builder, "llvm.uadd.sat.v16i8", _BYTES16, [builder.sub(value, start), ir.Constant(_BYTES16, [0x70] * 16)]
        )
        pointer = _pointer(context, builder, target, target_, offset_, _BYTES16)
        result = builder.xor(_read(builder, pointer), _shuffle(builder, entries, number))
        builder.store(result, pointer).align = 1
        return context.get_dummy_value()

    return types.void(tables, first, types.int64, source, target, types.int64), emit


@_intrinsic
def translate_to_nibbles(
    _context: Any, tables: Any, row: Any, source: Any, offset: Any, target: Any, place: Any
) -> Any:
    """Look 32 bytes of ``source`` up in row ``row`` of ``tables``, (rows, 16); write 32 nibbles of ``target``."""

    def emit(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        tables_, row_, source_, offset_, target_, place_ = values
        start = builder.mul(row_, _I64(16))
        entries = _read(builder, _pointer(context, builder, tables, tables_, start, _BYTES16))
        weights = ir.Constant(_BYTES16, [1, 16] * 8)
        sums = []
        for half in range(2):
            pointer = _pointer(context, builder, source, source_, builder.add(offset_, _I64(16 * half)), _BYTES16)
            results = _shuffle(builder, entries, _read(builder, pointer))
            sums.append(_call(builder, "llvm.x86.ssse3.pmadd.ub.sw.128", _PAIRS8, [results, weights]))
        packed = _call(builder, "llvm.x86.sse2.packuswb.128", _BYTES16, sums)
        builder.store(packed, _pointer(context, builder, target, target_, place_, _BYTES16)).align = 1
        return context.get_dummy_value()

    return types.void(tables, row, source, types.int64, target, types.int64), emit


@_intrinsic
def count_equal(_context: Any, array: Any, offset: Any, blocks: Any, byte: Any) -> Any:
    """How many of ``32 * blocks`` bytes of ``array``, at most 255 blocks, equal ``byte``; plain vector IR."""

    def emit(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        array_, offset_, blocks_, byte_ = values
        wanted = _splat(builder, builder.trunc(byte_, _I8), _BYTES32)
        counts = cgutils.alloca_once_value(builder, ir.Constant(_BYTES32, None))
        with cgutils.for_range(builder, blocks_) as loop:
            place = builder.add(offset_, builder.mul(loop.index, _I64(32)))
            found = _read(builder, _pointer(context, builder, array, array_, place, _BYTES32))
            equal = builder.sext(builder.icmp_unsigned("==", found, wanted), _BYTES32)
            builder.store(builder.sub(builder.load(counts), equal), counts)
        wide = builder.zext(builder.load(counts), _SHORTS32)
        return builder.zext(_call(builder, "llvm.vector.reduce.add.v32i16", ir.IntType(16), [wide]), _I64)

    return types.int64(array, types.int64, types.int64, types.int64), emit


def _shuffle(builder: Any, entries: Any, numbers: Any) -> Any:
    return _call(builder, "llvm.x86.ssse3.pshuf.b.128", _BYTES16, [entries, numbers])


def _splat(builder: Any, value: Any, vector: Any) -> Any:
    single = builder.insert_element(ir.Constant(vector, ir.Undefined), value, _I32(0))
    lanes = ir.Constant(ir.VectorType(_I32, vector.count), [0] * vector.count)
    return builder.shuffle_vector(single, ir.Constant(vector, ir.Undefined), lanes)


@_intrinsic
def multiply_add_pairs(_context: Any, array: Any, offset: Any, group: Any, pairs: Any) -> Any:
    """Sum of word times key over ``2 * pairs`` checksum groups from ``offset`` on, the first of them ``group``.

    Plain vector IR, so every target has it; x86 multiplies the even words and the odd words with one PMULUDQ each.
    """

    def emit(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        array_, offset_, group_, pairs_ = values
        mixed = cgutils.alloca_once_value(builder, _first_mixed(builder, group_))
        totals = cgutils.alloca_once_value(builder, ir.Constant(_SUMS4, None))
        steps = ir.Constant(_WORDS8, [lane % 4 * STEP & 0xFFFFFFFF for lane in range(8)])
        with cgutils.for_range(builder, pairs_) as loop:
            place = builder.add(offset_, builder.mul(loop.index, _I64(32)))
            words = _read(builder, _pointer(context, builder, array, array_, place, _WORDS8))
            seed = builder.load(mixed)
            builder.store(builder.add(seed, _words(2 * KEY_STEP)), mixed)
            keys = builder.or_(builder.xor(seed, builder.lshr(seed, _words(15))), _words(1))
            products = _products(builder, words, builder.add(keys, steps))
            builder.store(builder.add(builder.load(totals), products), totals)
        sums = builder.load(totals)
        lanes = [builder.extract_element(sums, _I32(lane)) for lane in range(4)]
        return builder.add(builder.add(lanes[0], lanes[1]), builder.add(lanes[2], lanes[3]))

    return types.uint64(array, types.int64, types.int64, types.int64), emit


def _words(value: int) -> Any:
    return ir.Constant(_WORDS8, [value & 0xFFFFFFFF] * 8)


def _first_mixed(builder: Any, group: Any) -> Any:
    """``m(q)`` of :mod:`~splitzip_aio.codec.checksum` for the words of the groups ``group`` and ``group + 1``."""
    first = _splat(builder, builder.trunc(group, _I32), _WORDS8)
    groups = builder.add(first, ir.Constant(_WORDS8, [0] * 4 + [1] * 4))
    return builder.add(builder.mul(groups, _words(KEY_STEP)), _words(KEY_OFFSET))


def _products(builder: Any, words: Any, keys: Any) -> Any:
    """(4,) sums of the 64-bit products of (8,) 32-bit words and keys: lane 0 and 1, 2 and 3, and so on."""
    words, keys = builder.bitcast(words, _SUMS4), builder.bitcast(keys, _SUMS4)
    low, half = ir.Constant(_SUMS4, [0xFFFFFFFF] * 4), ir.Constant(_SUMS4, [32] * 4)
    even = builder.mul(builder.and_(words, low), builder.and_(keys, low))
    odd = builder.mul(builder.lshr(words, half), builder.lshr(keys, half))
    return builder.add(even, odd)


@compiled
def sum_words(array: Any, start: Any, size: Any, group: Any) -> Any:
    """The checksum's sum of word times key over ``size`` bytes from ``start`` on, where group ``group`` begins."""
    pairs, left = size >> 5, size & 31
    total = multiply_add_pairs(array, start, group, pairs)
    if left:
        rest = np.zeros(32, np.uint8)
        for byte in range(left):
            rest[byte] = load8(array, start + size - left + byte)
        total += multiply_add_pairs(rest, 0, group + 2 * pairs, 1)
    return total


@entry
def sum_all_words(array: Any) -> Any:
    """:func:`sum_words` of a whole (n,) array."""
    return sum_words(array, 0, array.size, 0)
