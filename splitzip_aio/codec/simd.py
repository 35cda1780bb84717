"""The machine instructions numba has no names for, as functions that its kernels call.

Memory is read and written as little-endian words at a byte offset from an address (``address``), aligned or not.
The caller proves that the word is inside, and keeps the array alive, as the arguments of an ``entry`` are.
Addresses instead of arrays cost no reference counting between kernels, and one compilation serves all callers.
Words are uint64, narrower ones zero-extended; addresses, offsets and counts are int64, and the two are kept apart
because numba makes a float64 of their sum.

``deposit``, ``extract`` and what is called ``translate`` are x86 instructions (``has_bit_scatter``). LLVM ends the
process when told to compile them for another CPU, so a kernel that names them must not be compiled there.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.registry import cpu_target

from splitzip_aio.codec.checksum import KEY_OFFSET, KEY_STEP, STEP

__all__ = [
    "address",
    "compiled",
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
    "popcount",
    "prefetch",
    "prefetch_written",
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

_KEY_STEP, _KEY_OFFSET, _STEP, _LOW = (np.uint64(value) for value in (KEY_STEP, KEY_OFFSET, STEP, 0xFFFFFFFF))
_log = logging.getLogger(__name__)
_I8, _I32, _I64 = (ir.IntType(bits) for bits in (8, 32, 64))
_PAIRS16, _BYTES32 = ir.VectorType(ir.IntType(16), 16), ir.VectorType(_I8, 32)
_BYTES16, _WORDS8, _SUMS4 = ir.VectorType(_I8, 16), ir.VectorType(_I32, 8), ir.VectorType(_I64, 4)
_NEEDED = {"+avx2", "+bmi2", "+popcnt", "+ssse3"}
_MICROCODED = ("bdver4", "btver2", "znver1", "znver2")  # have PDEP and PEXT, but at 20 to 250 cycles each


def has_bit_scatter() -> bool:
    """Whether numba compiles for a CPU that has AVX2, and BMI2 at full speed."""
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
    """``compiled`` for what Python calls: the machine code is kept on disk, where there is a place for it.

    numba would take code from there as long as the file of the entry itself is unchanged, also if what it is compiled
    together with has changed. So the stamp that it compares is replaced by one of all sources of the package's codec.
    """
    try:
        dispatcher: Any = numba.njit(nogil=True, error_model="numpy", cache=True)(function)
        _ = dispatcher._cache._cache_file._source_stamp  # numba has no public name for it
        dispatcher._cache._cache_file._source_stamp = _sources_digest()
    except (RuntimeError, AttributeError) as exc:  # no writable directory, or a numba that keeps its stamp elsewhere
        _log.info("compiled code of %s is not kept: %s", function.__name__, exc)
        return compiled(function)
    kept: Callable[..., Any] = dispatcher
    return kept


@cache
def _sources_digest() -> str:
    """What the compiled code depends on: every module of the codec."""
    sources = sorted(Path(__file__).parent.glob("*.py"))
    return hashlib.sha256(b"\0".join(path.read_bytes() for path in sources)).hexdigest()


def inlined(function: Callable[..., Any]) -> Callable[..., Any]:
    """``compiled``, and always merged into its callers, where constant arguments become part of the code."""
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


@_intrinsic
def address(_context: Any, array: Any) -> Any:
    """Address of a contiguous array's first byte."""

    def emit(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        data = context.make_array(array)(context, builder, values[0]).data
        return builder.ptrtoint(data, _I64)

    return types.int64(array), emit


def _pointer(builder: Any, base: Any, offset: Any, to: Any) -> Any:
    """Pointer to ``to`` at ``base + offset``; in two steps, since LLVM cannot vectorise sums of integers."""
    return builder.bitcast(builder.gep(builder.inttoptr(base, _I8.as_pointer()), [offset]), to.as_pointer())


def _read(builder: Any, pointer: Any) -> Any:
    value = builder.load(pointer)
    value.align = 1
    return value


def _loader(bits: int) -> Callable[..., Any]:
    def typer(_context: Any, base: Any, offset: Any) -> Any:
        def emit(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            word = _read(builder, _pointer(builder, values[0], values[1], ir.IntType(bits)))
            return word if bits == 64 else builder.zext(word, _I64)

        return types.uint64(types.int64, types.int64), emit

    typer.__name__ = f"load{bits}"
    return _intrinsic(typer)


def _storer(bits: int) -> Callable[..., Any]:
    def typer(_context: Any, base: Any, offset: Any, word: Any) -> Any:
        def emit(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            pointer = _pointer(builder, values[0], values[1], ir.IntType(bits))
            narrow = values[2] if bits == 64 else builder.trunc(values[2], ir.IntType(bits))
            builder.store(narrow, pointer).align = 1
            return context.get_dummy_value()

        return types.void(types.int64, types.int64, types.uint64), emit

    typer.__name__ = f"store{bits}"
    return _intrinsic(typer)


load8, load16, load32, load64 = (_loader(bits) for bits in (8, 16, 32, 64))
store8, store16, store32, store64 = (_storer(bits) for bits in (8, 16, 32, 64))


@_intrinsic
def translate_nibbles(_context: Any, table: Any, source: Any, place: Any, target: Any, offset: Any) -> Any:
    """Look 32 nibbles of ``source``, low nibble first, up in the 16-byte ``table``; write 32 bytes of ``target``."""

    def emit(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        table_, source_, place_, target_, offset_ = values
        entries = _read(builder, _pointer(builder, table_, _I64(0), _BYTES16))
        pairs = _read(builder, _pointer(builder, source_, place_, _BYTES16))
        low = _shuffle(builder, entries, builder.and_(pairs, ir.Constant(_BYTES16, [15] * 16)))
        high = _shuffle(builder, entries, builder.lshr(pairs, ir.Constant(_BYTES16, [4] * 16)))
        for half in range(2):
            order = [lane // 2 + 8 * half + 16 * (lane % 2) for lane in range(16)]
            both = builder.shuffle_vector(low, high, ir.Constant(ir.VectorType(_I32, 16), order))
            pointer = _pointer(builder, target_, builder.add(offset_, _I64(16 * half)), _BYTES16)
            builder.store(both, pointer).align = 1
        return context.get_dummy_value()

    return types.void(*[types.int64] * 5), emit


@_intrinsic
def translate_window(_context: Any, tables: Any, first: Any, window: Any, source: Any, target: Any, offset: Any) -> Any:
    """XOR into 16 bytes of ``target`` what a window's table says of the same bytes of ``source``.

    Window ``k`` is the values ``first[k]`` to ``first[k] + 15`` with the entries ``tables[16 * k : 16 * k + 16]``;
    other values leave their byte as it is.
    """

    def emit(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        tables_, first_, window_, source_, target_, offset_ = values
        place = builder.mul(window_, _I64(16))
        entries = _read(builder, _pointer(builder, tables_, place, _BYTES16))
        start = _splat(builder, _read(builder, _pointer(builder, first_, window_, _I8)), _BYTES16)
        value = _read(builder, _pointer(builder, source_, offset_, _BYTES16))
        # PSHUFB gives zero where bit 7 is set: adding 0x70 with saturation sets it for all but 0..15.
        number = _call(
            builder, "llvm.uadd.sat.v16i8", _BYTES16, [builder.sub(value, start), ir.Constant(_BYTES16, [0x70] * 16)]
        )
        pointer = _pointer(builder, target_, offset_, _BYTES16)
        result = builder.xor(_read(builder, pointer), _shuffle(builder, entries, number))
        builder.store(result, pointer).align = 1
        return context.get_dummy_value()

    return types.void(*[types.int64] * 6), emit


@_intrinsic
def translate_to_nibbles(
    _context: Any, tables: Any, row: Any, source: Any, offset: Any, target: Any, place: Any
) -> Any:
    """Look 64 bytes of ``source`` up in row ``row`` of ``tables``, (rows, 16); write 64 nibbles of ``target``."""

    def emit(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        tables_, row_, source_, offset_, target_, place_ = values
        row16 = _read(builder, _pointer(builder, tables_, builder.mul(row_, _I64(16)), _BYTES16))
        lanes = ir.Constant(ir.VectorType(_I32, 32), [*range(16), *range(16)])
        entries = builder.shuffle_vector(row16, ir.Constant(_BYTES16, ir.Undefined), lanes)
        weights = ir.Constant(_BYTES32, [1, 16] * 16)
        sums = []
        for half in range(2):
            numbers = _read(builder, _pointer(builder, source_, builder.add(offset_, _I64(32 * half)), _BYTES32))
            results = _call(builder, "llvm.x86.avx2.pshuf.b", _BYTES32, [entries, numbers])
            sums.append(_call(builder, "llvm.x86.avx2.pmadd.ub.sw", _PAIRS16, [results, weights]))
        packed = builder.bitcast(_call(builder, "llvm.x86.avx2.packuswb", _BYTES32, sums), _SUMS4)
        order = ir.Constant(ir.VectorType(_I32, 4), [0, 2, 1, 3])  # it packs within each half of the register
        packed = builder.shuffle_vector(packed, ir.Constant(_SUMS4, ir.Undefined), order)
        builder.store(packed, _pointer(builder, target_, place_, _SUMS4)).align = 1
        return context.get_dummy_value()

    return types.void(*[types.int64] * 6), emit


def _shuffle(builder: Any, entries: Any, numbers: Any) -> Any:
    return _call(builder, "llvm.x86.ssse3.pshuf.b.128", _BYTES16, [entries, numbers])


def _splat(builder: Any, value: Any, vector: Any) -> Any:
    single = builder.insert_element(ir.Constant(vector, ir.Undefined), value, _I32(0))
    lanes = ir.Constant(ir.VectorType(_I32, vector.count), [0] * vector.count)
    return builder.shuffle_vector(single, ir.Constant(vector, ir.Undefined), lanes)


def _adder(write: bool) -> Callable[..., Any]:
    """Sum of word times key over ``2 * pairs`` checksum groups from ``offset`` on, the first of them ``group``.

    Plain vector IR, so every target has it; x86 multiplies the even words and the odd words with one PMULUDQ each.
    Fetches what is ``ahead`` bytes further into the cache meanwhile, to be read or (``write``) written: passes over
    scratch memory leave the memory bus idle, and fetching past the end of an array is harmless.
    """

    def typer(_context: Any, base: Any, offset: Any, group: Any, pairs: Any, ahead: Any) -> Any:
        def emit(_context: Any, builder: Any, _signature: Any, values: Any) -> Any:
            base_, offset_, group_, pairs_, ahead_ = values
            mixed = cgutils.alloca_once_value(builder, _first_mixed(builder, group_))
            totals = cgutils.alloca_once_value(builder, ir.Constant(_SUMS4, None))
            steps = ir.Constant(_WORDS8, [lane % 4 * STEP & 0xFFFFFFFF for lane in range(8)])
            with cgutils.for_range(builder, pairs_) as loop:
                place = builder.add(offset_, builder.mul(loop.index, _I64(32)))
                words = _read(builder, _pointer(builder, base_, place, _WORDS8))
                _fetch(builder, _pointer(builder, base_, builder.add(place, ahead_), _I8), write)
                seed = builder.load(mixed)
                builder.store(builder.add(seed, _words(2 * KEY_STEP)), mixed)
                keys = builder.or_(builder.xor(seed, builder.lshr(seed, _words(15))), _words(1))
                products = _products(builder, words, builder.add(keys, steps))
                builder.store(builder.add(builder.load(totals), products), totals)
            sums = builder.load(totals)
            lanes = [builder.extract_element(sums, _I32(lane)) for lane in range(4)]
            return builder.add(builder.add(lanes[0], lanes[1]), builder.add(lanes[2], lanes[3]))

        return types.uint64(*[types.int64] * 5), emit

    typer.__name__ = "add_written_pairs" if write else "add_pairs"
    return _intrinsic(typer)


def _fetch(builder: Any, pointer: Any, write: bool) -> None:
    nearest, data = _I32(3), _I32(1)
    signature = ir.FunctionType(ir.VoidType(), [pointer.type, _I32, _I32, _I32])
    fetch = cgutils.get_or_insert_function(builder.module, signature, "llvm.prefetch.p0")
    builder.call(fetch, [pointer, _I32(int(write)), nearest, data])


def _prefetcher(write: bool) -> Callable[..., Any]:
    """Fetch the cache line at ``base + offset``, to be read or written; past the end of an array that is harmless."""

    def typer(_context: Any, base: Any, offset: Any) -> Any:
        def emit(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
            _fetch(builder, _pointer(builder, values[0], values[1], _I8), write)
            return context.get_dummy_value()

        return types.void(types.int64, types.int64), emit

    typer.__name__ = "prefetch_written" if write else "prefetch"
    return _intrinsic(typer)


prefetch, prefetch_written = _prefetcher(write=False), _prefetcher(write=True)
_add_pairs, _add_written_pairs = _adder(write=False), _adder(write=True)


def _words(value: int) -> Any:
    return ir.Constant(_WORDS8, [value & 0xFFFFFFFF] * 8)


def _first_mixed(builder: Any, group: Any) -> Any:
    """``m(q)`` of ``splitzip_aio.codec.checksum`` for the words of the groups ``group`` and ``group + 1``."""
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


@inlined
def sum_words(base: Any, start: Any, size: Any, group: Any, ahead: Any, written: Any) -> Any:
    """The checksum's sum of word times key over ``size`` bytes from ``start`` on, where group ``group`` begins.

    What is ``ahead`` bytes further is fetched meanwhile; ``written`` says that it will be written.
    """
    pairs = size >> 5
    if written:
        total = _add_written_pairs(base, start, group, pairs, ahead)
    else:
        total = _add_pairs(base, start, group, pairs, ahead)
    for place in range(pairs << 5, size):
        mixed = np.uint64(group + (place >> 4)) * _KEY_STEP + _KEY_OFFSET & _LOW
        key = (mixed ^ (mixed >> np.uint64(15)) | np.uint64(1)) + np.uint64((place & 15) >> 2) * _STEP & _LOW
        total += (load8(base, start + place) << np.uint64(8 * (place & 3))) * key
    return total


@entry
def sum_all_words(array: Any) -> Any:
    """``sum_words`` of a whole (n,) array."""
    return sum_words(address(array), 0, array.size, 0, 1024, False)
