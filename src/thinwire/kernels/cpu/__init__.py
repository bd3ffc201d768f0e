"""The kernels on the CPU: numba loops over rows, in place on the tensors' own memory."""

from thinwire.kernels.cpu.bits import pack_bits, unpack_bits
from thinwire.kernels.cpu.levels import add_levels, encode_levels
from thinwire.kernels.cpu.select import top_k
from thinwire.kernels.cpu.settling import (
    serve_signs,
    serve_signs_each,
    settle_served_signs,
    settle_served_signs_each,
    settle_signs,
    settle_signs_each,
)
from thinwire.kernels.cpu.signs import (
    add_signs,
    add_signs_each,
    decode_signs,
    decode_signs_each,
    encode_signs,
    encode_signs_each,
)
from thinwire.kernels.cpu.sketch import count_sketch, estimate

__all__ = [
    "add_levels",
    "add_signs",
    "add_signs_each",
    "count_sketch",
    "decode_signs",
    "decode_signs_each",
    "encode_levels",
    "encode_signs",
    "encode_signs_each",
    "estimate",
    "pack_bits",
    "serve_signs",
    "serve_signs_each",
    "settle_served_signs",
    "settle_served_signs_each",
    "settle_signs",
    "settle_signs_each",
    "top_k",
    "unpack_bits",
]
