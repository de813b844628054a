"""Docstrings as Markdown: names become links to their place in the reference, formulas are drawn.

In the code they are written as Sphinx would read them, which editors and TorchRL's readers know.
"""

from __future__ import annotations

import re
from typing import Any

import griffe
from reference import GROUPS, full_name, public_names

_ROLE = re.compile(r":(?:attr|class|data|func|meth|mod|obj):`~?([\w.]+)(?:\(\))?`")
_MATH_ROLE = re.compile(r":math:`([^`]+)`")
_MATH = re.compile(r"^( *)\.\. math::(.*(?:\n\1 +\S.*)*(?:\n\n\1 +\S.*)*)", re.M)


def places() -> dict[str, str]:
    """Returns public names, by their whole names and, where there is one of that name, the last."""
    names = [
        f"{full_name(package)}.{name}"
        for _, packages in GROUPS.values()
        for package in packages
        for name in public_names(package)
    ]
    last = [name.rpartition(".")[2] for name in names]
    single = {short: name for short, name in zip(last, names) if last.count(short) == 1}
    return {**single, **{name: name for name in names}}


def as_markdown(text: str, known: dict[str, str]) -> str:
    """Returns a docstring whose references and formulas are Markdown's."""

    def linked(role: re.Match[str]) -> str:
        shown = role[1].rpartition(".")[2]
        place = known.get(role[1])
        return f"[`{shown}`][{place}]" if place else f"`{shown}`"

    def drawn(block: re.Match[str]) -> str:
        formula = " ".join(block[2].split())
        return f"{block[1]}$${formula}$$"

    return _ROLE.sub(linked, _MATH_ROLE.sub(r"$\1$", _MATH.sub(drawn, text)))


class Docstrings(griffe.Extension):
    """Reads the docstrings of whatever is loaded."""

    def __init__(self) -> None:
        super().__init__()
        self._known = places()

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Changes an object's docstring, before it is parsed."""
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value, self._known)
