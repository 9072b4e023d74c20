"""LLVM instructions that numba has no spelling for: 32-bit arithmetic, arrays at an address."""

from __future__ import annotations

from llvmlite import ir
from numba import carray, njit, types
from numba.extending import intrinsic

_INT32 = ir.IntType(32)


@intrinsic
def use_512_bit_registers(typing_context):
    """Let LLVM use AVX-512 registers in the calling function, where the processor has them.

    By default LLVM keeps to 256 bits on many Intel processors; loops of pure arithmetic then
    take up to twice as long.
    """

    def codegen(context, builder, signature, arguments):
        attributes = builder.function.attributes
        if isinstance(attributes, set):  # llvmlite's own ``add`` rejects target attributes
            set.add(attributes, '"prefer-vector-width"="512"')
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic
def hash32(typing_context, x):
    """``lowbias32``, Chris Wellons' 32-bit integer hash.

    Numba promotes ``uint32 * uint32`` to 64 bits, which halves the number of vector lanes.
    """

    def codegen(context, builder, signature, arguments):
        (x,) = arguments
        for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
            x = builder.xor(x, builder.lshr(x, _INT32(shift)))
            x = builder.mul(x, _INT32(factor))
        return builder.xor(x, builder.lshr(x, _INT32(16)))

    return types.uint32(types.uint32), codegen


@intrinsic
def multiply32(typing_context, x, y):
    """The product of two 32-bit integers, modulo 2**32."""

    def codegen(context, builder, signature, arguments):
        return builder.mul(*arguments)

    return types.uint32(types.uint32, types.uint32), codegen


@intrinsic
def prefetch(typing_context, address):
    """Begin to load the 64 bytes at an integer address, which need not be valid, into the
    second-level cache."""

    def codegen(context, builder, signature, arguments):
        pointer = ir.IntType(8).as_pointer()
        function_type = ir.FunctionType(ir.VoidType(), [pointer, _INT32, _INT32, _INT32])
        function = builder.module.declare_intrinsic("llvm.prefetch", (pointer,), function_type)
        read, second_level, data = _INT32(0), _INT32(2), _INT32(1)
        where = builder.inttoptr(arguments[0], pointer)
        builder.call(function, [where, read, second_level, data])
        return context.get_dummy_value()

    return types.void(types.int64), codegen


@intrinsic
def _pointer(typing_context, address):
    def codegen(context, builder, signature, arguments):
        kind = context.get_value_type(signature.return_type.dtype)
        return builder.inttoptr(arguments[0], ir.PointerType(kind))

    return types.CPointer(types.float32)(address), codegen


@njit(inline="always")
def array_at(address, size):
    """The float32 array of ``size`` entries at an integer address."""
    return carray(_pointer(address), (size,))
