"""gs-SGD. Dai, Diao, Li 2021: the global top-k of gTop-k (arXiv 1901.04359), found in the sketch of Sketched-SGD.

    v_i = gradient + error
    S = mean_i sketch(v_i)                               one global sketch, aggregated along a tree
    P = the places of the k largest estimates from S
    out = mean_i v_i[P], zero elsewhere;   v_i = 0 there

Where Sketched-SGD chooses k of p2 k exact values, this takes the sketch at its word: the second round is as small as it
can be, and a coordinate that the noise hides waits in the error.

Departure: the tree is the runtime's all-reduce, 2(W-1)/W 4 (rows cols + k) bytes a worker, where a tree's root would
send log W times the sketch. Momentum is as in ``sketch``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from thinwire.methods.sketch import Sketch


@dataclass(frozen=True, slots=True, kw_only=True)
class GS(Sketch):
    """The largest estimates in one global sketch, with error feedback: two all-reduces, the second of k numbers.

    Bytes: 8 (W-1)/W ratio d (16 rows + 1), by default; 8 (W-1)/W (rows cols + ratio d)
    Use: as ``sketch``, where its second round weighs.
    Avoid: as ``sketch``; and where estimates are poor, since nothing exact checks them.
    """

    p2: ClassVar[int] = 1
