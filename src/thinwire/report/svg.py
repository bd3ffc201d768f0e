"""Pieces of SVG. Colours are names of the page's style sheet, so that they follow its theme."""

from __future__ import annotations

from html import escape
from typing import Any


def tag(name: str, content: str = "", **attributes: Any) -> str:
    """``class_`` is class, ``data_tip`` is data-tip; None is left out."""
    words = [
        f'{key.rstrip("_").replace("_", "-")}="{_text(value)}"'
        for key, value in attributes.items()
        if value is not None
    ]
    opening = " ".join([name, *words])
    return f"<{opening}>{content}</{name}>" if content or name in ("g", "text", "svg") else f"<{opening}/>"


def text(x: float, y: float, content: str, class_: str = "", anchor: str = "start", **more: Any) -> str:
    return tag("text", escape(content), x=x, y=y, class_=class_ or None, text_anchor=anchor, **more)


def line(x1: float, y1: float, x2: float, y2: float, class_: str, **more: Any) -> str:
    return tag("line", x1=x1, y1=y1, x2=x2, y2=y2, class_=class_, **more)


def bar(x: float, y: float, width: float, height: float, class_: str, **more: Any) -> str:
    return tag("rect", x=x, y=y, width=max(0.0, width), height=height, class_=class_, **more)


def drawing(width: float, height: float, label: str, *content: str) -> str:
    return tag("svg", "".join(content), viewBox=f"0 0 {width:g} {height:g}", role="img", aria_label=label)


def _text(value: object) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else escape(str(value))
