"""32 numbers at a time beside their 32 bits.

Between numbers and bits the loops say what they want in vectors of LLVM, which has instructions for it on any machine;
all else it vectorises by itself. None of this looks where it reads and writes: its callers do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba.extending
from llvmlite import ir  # type: ignore[import-untyped]
from numba import types

LANES = 32
LINE = 64
"""Bytes of the cache's lines."""
STRIDE = 256
"""Numbers that ``note_signs`` takes at once."""
WORD = ir.IntType(LANES)
PREFETCH = "llvm.prefetch.p0"
"""The name of LLVM's function for it."""


def intrinsic(declared: Callable[..., Any]) -> Any:
    """Untyped, since a call does not have the parameter that the declaration begins with."""
    return numba.extending.intrinsic(declared)


def _address(context: Any, builder: Any, kind: Any, value: Any, start: Any, to: ir.Type) -> Any:
    data = context.make_array(kind)(context, builder, value).data
    return builder.bitcast(builder.gep(data, [start]), to.as_pointer())


def _load(context: Any, builder: Any, kind: Any, value: Any, start: Any, to: ir.Type) -> Any:
    found = builder.load(_address(context, builder, kind, value, start, to))
    found.align = kind.dtype.bitwidth // 8
    return found


def _store(context: Any, builder: Any, what: Any, kind: Any, value: Any, start: Any) -> Any:
    builder.store(what, _address(context, builder, kind, value, start, what.type)).align = kind.dtype.bitwidth // 8
    return context.get_dummy_value()


def _lanes(builder: Any, value: Any) -> Any:
    """The same number in all lanes."""
    vector = ir.VectorType(value.type, LANES)
    one = builder.insert_element(ir.Constant(vector, ir.Undefined), value, ir.IntType(32)(0))
    return builder.shuffle_vector(one, one, ir.Constant(ir.VectorType(ir.IntType(32), LANES), None))


def _numbers(context: Any, builder: Any, kinds: Any, args: Any, start: Any, keep: bool) -> Any:
    """``read``, of 32 numbers in a vector: ``kinds`` and ``args`` are its first four. It stores sums to ``keep``."""
    x, error, _, out = kinds
    element = context.get_value_type(out.dtype)
    numbers = _load(context, builder, x, args[0], start, ir.VectorType(context.get_data_type(x.dtype), LANES))
    if not isinstance(x.dtype, types.Float):
        numbers = _widened(builder, numbers, x.dtype == types.int16)
    if not isinstance(error, types.NoneType):
        owed = _load(context, builder, error, args[1], start, ir.VectorType(element, LANES))
        owed = builder.fmul(_lanes(builder, args[2]), owed, flags=("contract",))
        numbers = builder.fadd(numbers, owed, flags=("contract",))
        if keep:
            _store(context, builder, numbers, out, args[3], start)
    return numbers


def _widened(builder: Any, bits: Any, bfloat16: bool) -> Any:
    """As ``widen``."""
    word, single = ir.VectorType(ir.IntType(32), LANES), ir.VectorType(ir.FloatType(), LANES)

    def all_of(value: int) -> Any:
        return ir.Constant(word, [value] * LANES)

    bits = builder.zext(bits, word)
    if bfloat16:
        return builder.bitcast(builder.shl(bits, all_of(16)), single)
    size = builder.shl(builder.and_(bits, all_of(0x7FFF)), all_of(13))
    scaled = builder.fmul(builder.bitcast(size, single), ir.Constant(single, [2.0**112] * LANES))
    special = builder.icmp_unsigned(">=", size, all_of(0x7C00 << 13))
    size = builder.select(special, builder.or_(size, all_of(0x7F800000)), builder.bitcast(scaled, word))
    sign = builder.shl(builder.and_(bits, all_of(0x8000)), all_of(16))
    return builder.bitcast(builder.or_(size, sign), single)


@intrinsic
def note_signs(typing: Any, x: Any, error: Any, ratio: Any, out: Any, start: Any, bits: Any, first: Any) -> Any:
    """``peek`` at ``STRIDE`` numbers; put a bit for each, 1 if at least 0, into ``bits``; add up sizes and squares."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        total = squares = ir.Constant(ir.VectorType(ir.DoubleType(), LANES), None)
        for i in range(0, STRIDE, LANES):
            place = builder.add(args[4], args[4].type(i))
            numbers = _numbers(context, builder, signature.args[:4], args[:4], place, keep=False)
            positive = builder.fcmp_ordered(">=", numbers, ir.Constant(numbers.type, None))
            to = builder.add(args[6], args[6].type(i // 8))
            _store(context, builder, builder.bitcast(positive, WORD), bits, args[5], to)
            size = builder.select(positive, numbers, builder.fneg(numbers))
            size = size if size.type == total.type else builder.fpext(size, total.type)
            total, squares = builder.fadd(total, size), builder.fadd(squares, builder.fmul(size, size))
        return context.make_tuple(builder, signature.return_type, [_added_up(builder, x) for x in (total, squares)])

    pair = types.Tuple((types.float64, types.float64))  # type: ignore[no-untyped-call]
    return pair(x, error, ratio, out, types.intp, bits, types.intp), generate


def _added_up(builder: Any, lanes: Any) -> Any:
    for half in (16, 8, 4, 2, 1):
        low, high = (
            builder.shuffle_vector(lanes, lanes, ir.Constant(ir.VectorType(ir.IntType(32), half), list(places)))
            for places in (range(half), range(half, 2 * half))
        )
        lanes = builder.fadd(low, high)
    return builder.extract_element(lanes, ir.IntType(32)(0))


@intrinsic
def at_least(typing: Any, x: Any, error: Any, ratio: Any, out: Any, start: Any, least: Any) -> Any:
    """``read`` 32 numbers; a bit for each: whether its magnitude's bits are at least ``least``."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        numbers = _numbers(context, builder, signature.args[:4], args[:4], args[4], keep=True)
        size = builder.bitcast(numbers, ir.VectorType(args[5].type, LANES))
        unsigned = ir.Constant(size.type, [(1 << args[5].type.width - 1) - 1] * LANES)
        found = builder.icmp_signed(">=", builder.and_(size, unsigned), _lanes(builder, args[5]))
        return builder.bitcast(found, WORD)

    return types.uint32(x, error, ratio, out, types.intp, types.Integer.from_bitwidth(out.dtype.bitwidth)), generate


@intrinsic
def lowest(typing: Any, word: Any) -> Any:
    """The place of the lowest bit of a word that has one."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.zext(builder.cttz(args[0], ir.IntType(1)(1)), ir.IntType(64))

    return types.int64(types.uint32), generate


@intrinsic
def word_at(typing: Any, bits: Any, start: Any) -> Any:
    """Four bytes of ``bits``."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _load(context, builder, bits, args[0], args[1], WORD)

    return types.uint32(bits, types.intp), generate


def _signed(builder: Any, word: Any, scale: Any) -> Any:
    positive = builder.bitcast(word, ir.VectorType(ir.IntType(1), LANES))
    scales = _lanes(builder, scale)
    return builder.select(positive, scales, builder.fneg(scales))


@intrinsic
def put_signed(typing: Any, out: Any, start: Any, word: Any, scale: Any) -> Any:
    """32 numbers from ``start`` on: plus or minus ``scale``, by the bits of ``word``."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _store(context, builder, _signed(builder, args[2], args[3]), out, args[0], args[1])

    return types.none(out, types.intp, types.uint32, out.dtype), generate


def _add_signed(stream: bool) -> Any:
    @intrinsic
    def add(typing: Any, base: Any, out: Any, start: Any, word: Any, scale: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            signed = _signed(builder, args[3], args[4])
            sum = builder.fadd(_load(context, builder, base, args[0], args[2], signed.type), signed)
            if not stream:
                return _store(context, builder, sum, out, args[1], args[2])
            stored = builder.store(sum, _address(context, builder, out, args[1], args[2], signed.type))
            stored.align = LINE
            stored.set_metadata("nontemporal", builder.module.add_metadata([ir.IntType(32)(1)]))
            return context.get_dummy_value()

        return types.none(base, out, types.intp, types.uint32, out.dtype), generate

    return add


add_signed = _add_signed(stream=False)
"""(base, out, start, word, scale): 32 numbers of ``out`` are those of ``base``, plus or minus ``scale``."""
stream_signed = _add_signed(stream=True)
"""The same past the caches, to memory that nobody reads soon. It starts at a line, and ``fence`` ends it."""


@intrinsic
def prefetch(typing: Any, x: Any, place: Any) -> Any:
    """Ask for the line of number ``place``, which need not be there."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        number = ir.IntType(32)
        pointer = _address(context, builder, signature.args[0], args[0], args[1], ir.IntType(8))
        kind = ir.FunctionType(ir.VoidType(), [pointer.type, number, number, number])
        function = builder.module.globals.get(PREFETCH) or ir.Function(builder.module, kind, PREFETCH)
        builder.call(function, [pointer, number(0), number(3), number(1)])  # to read, into the nearest cache, data
        return context.get_dummy_value()

    return types.none(x, types.uintp), generate


@intrinsic
def fence(typing: Any) -> Any:
    """What was written is there for other threads too."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.none(), generate


def _flipped(context: Any, builder: Any, x: Any, value: Any, start: Any, word: Any) -> Any:
    vector = ir.VectorType(context.get_value_type(x.dtype), LANES)
    numbers = _load(context, builder, x, value, start, vector)
    negative = builder.bitcast(word, ir.VectorType(ir.IntType(1), LANES))
    return builder.select(negative, builder.fneg(numbers), numbers)


@intrinsic
def put_flipped(typing: Any, out: Any, start: Any, x: Any, source: Any, word: Any) -> Any:
    """32 numbers of ``out`` from ``start`` on: those of x from ``source`` on, negated where ``word`` has a bit."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        flipped = _flipped(context, builder, x, args[2], args[3], args[4])
        return _store(context, builder, flipped, out, args[0], args[1])

    return types.none(out, types.intp, x, types.intp, types.uint32), generate


@intrinsic
def add_flipped(typing: Any, out: Any, start: Any, x: Any, source: Any, word: Any) -> Any:
    """The same, added to ``out``."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        flipped = _flipped(context, builder, x, args[2], args[3], args[4])
        onto = _load(context, builder, out, args[0], args[1], flipped.type)
        return _store(context, builder, builder.fadd(onto, flipped), out, args[0], args[1])

    return types.none(out, types.intp, x, types.intp, types.uint32), generate
