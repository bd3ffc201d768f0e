"""Half precision on the wire: the all-reduce of S-SGD in 16 bits, for twice fewer bytes.

    out = mean_i half(g_i), summed in that type after dividing by W

No error is kept: rounding is small and nearly unbiased. fp16 overflows above 65504; bf16 does not.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from thinwire.core.lift import Cast
from thinwire.core.method import Method


@dataclass(frozen=True, slots=True, kw_only=True)
class FP16:
    """All-reduce in fp16.

    Bytes: 4 d (W-1)/W
    Use: as a first step, where gradients stay far below 65504: half the bytes for two casts.
    Avoid: gradients that overflow; ``bf16`` has the range of fp32.
    """

    def method(self) -> Method:
        return Cast(torch.float16)


@dataclass(frozen=True, slots=True, kw_only=True)
class BF16:
    """All-reduce in bf16.

    Bytes: 4 d (W-1)/W
    Use: as a first step with any optimizer: half the bytes, and no setting to choose.
    Avoid: thin links, where half is not enough.
    """

    def method(self) -> Method:
        return Cast(torch.bfloat16)
