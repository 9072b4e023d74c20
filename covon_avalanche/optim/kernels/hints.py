"""What numba has no words for: arrays at an address, and hints to LLVM and to the processor.

The hints change no formula. In code whose rounding is left to LLVM, as the noise's, wider registers
may change the last bits.
"""

from __future__ import annotations

from llvmlite import ir
from numba import carray, njit, types
from numba.extending import intrinsic


@intrinsic
def use_wide_registers(typing_context):
    """Let the function that calls this have registers of 512 bits where there are any.

    LLVM keeps to 256 on many Intel processors, for the sake of those that slowed down with
    more; loops of nothing but arithmetic take up to twice as long that way.
    """

    def codegen(context, builder, signature, arguments):
        attributes = builder.function.attributes
        if isinstance(attributes, set):  # llvmlite's own ``add`` knows no attributes of a target
            set.add(attributes, '"prefer-vector-width"="512"')
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic
def fetch(typing_context, address):
    """Begin to bring the 64 bytes at an integer address into the second-level cache.

    The address need not be valid.
    """

    def codegen(context, builder, signature, arguments):
        pointer, number = ir.IntType(8).as_pointer(), ir.IntType(32)
        prefetch = builder.module.declare_intrinsic(
            "llvm.prefetch",
            (pointer,),
            ir.FunctionType(ir.VoidType(), [pointer, number, number, number]),
        )
        where = builder.inttoptr(arguments[0], pointer)
        to_read, second_level, data = (ir.Constant(number, value) for value in (0, 2, 1))
        builder.call(prefetch, [where, to_read, second_level, data])
        return context.get_dummy_value()

    return types.void(types.int64), codegen


@intrinsic
def _pointer(typing_context, address, like):
    def codegen(context, builder, signature, arguments):
        kind = context.get_value_type(signature.return_type.dtype)
        return builder.inttoptr(arguments[0], ir.PointerType(kind))

    return types.CPointer(like)(address, like), codegen


@njit(inline="always")
def entries(address, size, like):
    """The array at an integer address, of ``like``'s type."""
    return carray(_pointer(address, like), (size,))
