"""What a method keeps for the tensors of a model, by parameter name."""

from __future__ import annotations

from collections.abc import Sequence, Set

import torch
from torch import Tensor, nn

from thinwire.core.method import Context, Method, State
from thinwire.runtime.state import Snapshot, flatten, restore

WHOLE = ""
"""The name of the whole gradient, for methods that take it as one vector."""


class Ledger:
    """States, the step they stand at, and the learning rates that their errors are in units of."""

    def __init__(self, method: Method, seed: int) -> None:
        self.step = 0
        self.states: dict[str, State] = {}
        self.names: dict[Tensor, str] = {}
        self._method = method
        self._seed = seed
        self._last_lr: dict[str, float] = {}

    def adopt(self, module: nn.Module, only: Set[Tensor] | None = None) -> None:
        """Learn the names of the parameters that are trained, or of ``only`` those."""
        trained = {p: name for name, p in module.named_parameters() if p.requires_grad}
        if only is not None and not only <= trained.keys():
            raise ValueError("the optimizer has parameters that are not among those that the model trains")
        self.names = {p: name for p, name in trained.items() if only is None or p in only}

    def context(
        self, name: str, rank: int, world: int, lr: float | None = None, dtype: torch.dtype | None = None
    ) -> Context:
        """Where a reduction of this tensor stands now."""
        return Context(self.step, name, rank, world, self._seed, lr, self._last_lr.get(name), dtype)

    def state(self, ctx: Context) -> State:
        if ctx.name not in self.states:
            self.states[ctx.name] = self._method.init(self.template(ctx.name), ctx)
        return self.states[ctx.name]

    def keep(self, ctx: Context, state: State) -> None:
        if state is not self.states[ctx.name]:
            self.states[ctx.name] = state
            if ctx.lr:  # the errors are now in units of this rate
                self._last_lr[ctx.name] = ctx.lr

    def template(self, name: str) -> Tensor:
        """Uninitialised memory in the shape, place and precision in which the method computes."""
        parameters = [p for p, own in self.names.items() if name in (own, WHOLE)]
        dtype = torch.promote_types(parameters[0].dtype, torch.float32)
        shape = (sum(p.numel() for p in parameters),) if name == WHOLE else parameters[0].shape
        return torch.empty(shape, dtype=dtype, device=parameters[0].device)

    def snapshot(self, rank: int, world: int) -> Snapshot:
        flat = {name: flatten(state) for name, state in self.states.items()}
        return Snapshot(repr(self._method), rank, world, self.step, self._shapes(), dict(self._last_lr), flat)

    def check(self, snapshot: Snapshot) -> None:
        """Refuse another method's or model's snapshot, naming what differs."""
        snapshot.check(self._method, self._shapes())

    def load(self, snapshots: Sequence[Snapshot], rank: int, world: int) -> None:
        """Continue from this worker's snapshot, or from those of all workers of another world."""
        self.states = {
            name: restore(self._method, self.template(name), snapshots, self.context(name, rank, world))
            for name in snapshots[0].states
        }
        self.step = snapshots[0].step
        self._last_lr = dict(snapshots[0].last_lr)

    def _shapes(self) -> dict[str, list[int]]:
        return {name: list(parameter.shape) for parameter, name in self.names.items()}
