"""States as plain dicts of tensors and numbers, which ``torch.load(weights_only=True)`` accepts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from thinwire.core.method import Context, Method, State

FORMAT = 1


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One worker's state of a synchronizer."""

    method: str
    rank: int
    world: int
    step: int
    shapes: dict[str, list[int]]
    last_lr: dict[str, float]
    states: dict[str, dict[str, Any]]

    def to_dict(self) -> dict[str, Any]:
        return {"format": FORMAT} | {name: getattr(self, name) for name in self.__slots__}

    @classmethod
    def from_dict(cls, d: Any) -> Snapshot:
        names = set(cls.__slots__)
        if not isinstance(d, Mapping) or d.get("format") != FORMAT or not names <= d.keys():
            raise ValueError("this is not the state of a thinwire synchronizer")
        return cls(**{name: d[name] for name in names})

    def check(self, method: Method, shapes: Mapping[str, Sequence[int]]) -> None:
        """Refuse another method's or model's state, naming what differs."""
        if self.method != repr(method):
            raise ValueError(f"the state is of another method: {self.method}, not {method!r}")
        saved = {name: list(shape) for name, shape in self.shapes.items()}
        wanted = {name: list(shape) for name, shape in shapes.items()}
        for name in {**wanted, **saved}:
            if saved.get(name) != wanted.get(name):
                raise ValueError(
                    f"the state is of another model: parameter {name!r} has shape "
                    f"{saved.get(name, 'absent')} in the state and {wanted.get(name, 'absent')} here"
                )


def flatten(state: State, prefix: str = "") -> dict[str, Any]:
    """``{"error": tensor, "inner.Q": tensor, "inner.turn": 3}``"""
    flat: dict[str, Any] = {}
    for name, value in zip(getattr(state, "_fields", ()), state, strict=True):
        if isinstance(value, tuple):
            flat |= flatten(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = value.clone() if isinstance(value, Tensor) else value  # errors change in place
    return flat


def unflatten(like: State, flat: Mapping[str, Any], owner: str, prefix: str = "") -> State:
    """A state with the structure, shapes and devices of ``like`` and the values of ``flat``."""
    values: list[Any] = []
    for name, value in zip(getattr(like, "_fields", ()), like, strict=True):
        key = prefix + name
        if isinstance(value, tuple):
            values.append(unflatten(value, flat, owner, f"{key}."))
            continue
        saved: Any = flat.get(key)
        kind = Tensor if isinstance(value, Tensor) else type(value)
        if not isinstance(saved, kind):
            raise ValueError(f"the state of {owner!r} lacks {key!r}")
        if isinstance(value, Tensor):
            if saved.shape != value.shape:
                raise ValueError(
                    f"{key!r} of {owner!r} has shape {list(saved.shape)} in the state and {list(value.shape)} here"
                )
            saved = saved.to(value, copy=True)
        values.append(saved)
    return type(like)(*values) if hasattr(like, "_fields") else like


def restore(method: Method, like: Tensor, snapshots: Sequence[Snapshot], ctx: Context) -> State:
    """This worker's state of one tensor, from its own snapshot, or from all those of another world size."""
    own = [
        unflatten(method.init(like, ctx._replace(rank=s.rank, world=s.world)), s.states[ctx.name], ctx.name)
        for s in snapshots
    ]
    return own[0] if snapshots[0].world == ctx.world else method.resize(like, own, ctx)


def complete(snapshots: Sequence[Snapshot]) -> list[Snapshot]:
    """One snapshot of each worker of the old world, in order of rank."""
    by_rank = {s.rank: s for s in snapshots}
    world = snapshots[0].world
    if {(s.world, s.step) for s in snapshots} != {(world, snapshots[0].step)}:
        raise ValueError("these states were not saved together: their steps or numbers of workers differ")
    missing = sorted(set(range(world)) - by_rank.keys())
    if missing:
        raise ValueError(
            f"the state of {world} workers needs all of them to be loaded at another number: "
            f"ranks {missing} are missing. Pass load_state_dict the list of all {world} dicts"
        )
    return [by_rank[r] for r in range(world)]
