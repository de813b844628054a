"""Conversion of docstrings to Markdown, with links to the reference and formulas.

In the code, docstrings use Sphinx syntax, as in TorchRL.
"""

from __future__ import annotations

import re
from typing import Any

import griffe
from reference import GROUPS, exported, full_name, origin, places

_ROLE = re.compile(r":(?:attr|class|data|func|meth|mod|obj):`~?([\w.]+)(?:\(\))?`")
_MATH_ROLE = re.compile(r":math:`([^`]+)`")
_MATH = re.compile(r"^( *)\.\. math::(.*(?:\n\1 +\S.*)*(?:\n\n\1 +\S.*)*)", re.M)


def known_names() -> dict[str, str]:
    """Returns name -> place in the reference, by full names and by unique last parts."""
    shown, known = places(), {}
    for (module, name), package in shown.items():
        place = f"{full_name(package)}.{name}"
        known |= {place: place, f"{full_name(module)}.{name}": place}
    for package in {package for _, packages in GROUPS.values() for package in packages}:
        for name in exported(package):
            place = f"{full_name(shown[origin(package, name)])}.{name}"
            known[f"{full_name(package)}.{name}"] = place
    last = [name for _, name in shown]
    single = {
        name: f"{full_name(at)}.{name}" for (_, name), at in shown.items() if last.count(name) == 1
    }
    return {**single, **known}


def as_markdown(text: str, known: dict[str, str]) -> str:
    """Returns a docstring with references and formulas as Markdown."""

    def linked(role: re.Match[str]) -> str:
        shown = role[1].rpartition(".")[2]
        place = known.get(role[1])
        return f"[`{shown}`][{place}]" if place else f"`{shown}`"

    def drawn(block: re.Match[str]) -> str:
        formula = " ".join(block[2].split())
        return f"{block[1]}$${formula}$$"

    return _ROLE.sub(linked, _MATH_ROLE.sub(r"$\1$", _MATH.sub(drawn, text)))


class Docstrings(griffe.Extension):
    """Extension that converts all docstrings."""

    def __init__(self) -> None:
        super().__init__()
        self._known = known_names()

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Converts the docstring of an object, before it is parsed."""
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value, self._known)
