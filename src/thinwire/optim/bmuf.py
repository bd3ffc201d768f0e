"""BMUF. Chen, Huo 2016, "Scalable training of deep learning machines by incremental block training with intra-block
parallel optimization and blockwise model-update filtering", ICASSP.

    each worker trains on its block, from W_g to W_i; then      G = mean_i W_i - W_g
    D = eta D + zeta G;    W += D;    W_g = W, or W + eta D in the Nesterov variant

With D = -zeta u this is SlowMo (arXiv 1910.00643) at gamma = 1, hence also at any learning rate that does not change.
In the Nesterov variant W_g moves by zeta G + eta D from one block to the next.

Departure: of the Nesterov variant only W_g is kept, as with torch's SGD; the model that is evaluated is W_g.
"""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer

from thinwire.core.method import Method
from thinwire.optim.slowmo import Buffers, SlowMo
from thinwire.registry import Recipe


class BMUF(SlowMo):
    """Local steps of any optimizer, then an average of the parameters with a momentum of blocks, in their own units.

    base: What each worker steps by, on its own gradients; on the command line its options may be given too.
    period: Steps of a block.
    block_momentum: Of the blocks' updates; the paper has 1 - 1 / workers.
    block_lr: Share of a block's update that is applied.
    nesterov: Start each block from where the momentum leads.
    buffers: What becomes of the base's momenta at an average: keep, reset or average, uncompressed.
    exchange: The method that the blocks' updates are averaged by; on the command line, bmuf+method.

    Bytes: 8 d (W-1)/W / period, by the default exchange
    Use: as ``slowmo``, where the momentum is to be in units of the parameters whatever the rate does.
    Avoid: schedules that change the rate much: the momentum keeps the size of its old steps.
    """

    def __init__(
        self,
        base: Optimizer,
        period: int = 12,
        block_momentum: float = 0.5,
        block_lr: float = 1.0,
        nesterov: bool = False,
        buffers: Buffers = "reset",
        exchange: str | Recipe | Method = "dense",
    ) -> None:
        if not 0 <= block_momentum < 1:
            raise ValueError(f"block_momentum must be in [0, 1), not {block_momentum}")
        if not block_lr >= 0:
            raise ValueError(f"block_lr must be at least 0, not {block_lr}")
        super().__init__(base, period, block_momentum, block_lr, buffers, exchange)
        self.nesterov = nesterov

    def _gamma(self, group: dict[str, Any]) -> float:
        return 1.0
