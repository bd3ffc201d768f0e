"""The grammar of ``name:key=value,key=value``, which names a method, an optimizer or a workload."""

from __future__ import annotations

import difflib
import inspect
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

T = TypeVar("T")


def split(spec: str) -> tuple[str, dict[str, str]]:
    """``"acp:rank=4"`` -> ``("acp", {"rank": "4"})``."""
    name, _, tail = spec.partition(":")
    options: dict[str, str] = {}
    for item in filter(None, tail.split(",")):
        key, equals, value = (part.strip() for part in item.partition("="))
        if not (key and equals and value):
            raise ValueError(f"{spec!r}: expected key=value, got {item!r}")
        if key in options:
            raise ValueError(f"{spec!r}: option {key!r} is given twice")
        options[key] = value
    return name.strip(), options


def join(name: str, options: Mapping[str, Any]) -> str:
    """The inverse of :func:`split`."""
    tail = ",".join(f"{key}={value}" for key, value in options.items())
    return f"{name}:{tail}" if tail else name


def choose(kind: str, name: str, known: Iterable[str]) -> str:
    """``name`` if it is known, else an error that suggests the nearest one and lists all."""
    names = sorted(known)
    if name in names:
        return name
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    raise ValueError(f"unknown {kind} {name!r}.{hint} Known: {', '.join(names) or 'none'}")


def options_of(cls: type) -> dict[str, Any]:
    """The keyword options of a class, with their defaults: a dataclass's fields, or a constructor's parameters."""
    parameters = inspect.signature(cls).parameters.values()
    return {p.name: p.default for p in parameters if p.default is not p.empty}


def build(cls: type[T], name: str, options: Mapping[str, str], *args: Any, **fixed: Any) -> T:
    """An instance of ``cls`` from ``args``, the options' texts, and what else is ``fixed``."""
    hints = typing.get_type_hints(cls.__init__)
    for key in options:
        choose(f"option of {name!r}:", key, options_of(cls))
    values = {key: _parse(name, key, text, hints[key]) for key, text in options.items()}
    try:
        return cls(*args, **(fixed | values))
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def _parse(name: str, key: str, text: str, hint: Any) -> Any:
    union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    kinds = typing.get_args(hint) if union else (hint,)
    for kind in kinds:
        if kind is bool and text.lower() in ("true", "false"):
            return text.lower() == "true"
        if typing.get_origin(kind) is typing.Literal and text in typing.get_args(kind):
            return text
        if kind is str:
            return text
        if typing.get_origin(kind) is tuple:
            parts = text.split("/")
            if len(parts) == len(typing.get_args(kind)):
                return tuple(_parse(name, key, p, k) for p, k in zip(parts, typing.get_args(kind), strict=True))
        if kind in (int, float):
            try:
                return kind(text)
            except ValueError:
                continue
    wanted = " or ".join(_named(kind) for kind in kinds)
    raise ValueError(f"{name}: option {key}={text!r} is not a valid {wanted}")


def _named(kind: Any) -> str:
    if typing.get_origin(kind) is typing.Literal:
        return f"choice of {', '.join(typing.get_args(kind))}"
    return getattr(kind, "__name__", str(kind))


def number(name: str, key: str, text: str) -> int:
    """The whole number that an option's text stands for."""
    value = _parse(name, key, text, int)
    assert isinstance(value, int)
    return value
