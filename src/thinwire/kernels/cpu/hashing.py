"""The hash of ``reference``."""

from __future__ import annotations

from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]
from numba import types

from thinwire.kernels.cpu.vector import intrinsic


@intrinsic
def mixed(typing: Any, x: Any) -> Any:
    """In 32 bits throughout; numba would count in 64."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        word = ir.IntType(32)
        h = args[0]
        for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
            h = builder.mul(builder.xor(h, builder.lshr(h, word(shift))), word(factor))
        return builder.xor(h, builder.lshr(h, word(16)))

    return types.uint32(types.uint32), generate
