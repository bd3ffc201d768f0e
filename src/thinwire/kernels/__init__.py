"""Hot loops, chosen by device. ``reference`` is the specification, and the path for every device without a kernel."""

from thinwire.kernels.reference import decode_signs, encode_signs

__all__ = ["decode_signs", "encode_signs"]
