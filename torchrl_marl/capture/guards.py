"""Conditions in Python source that a graph need not repeat."""

from __future__ import annotations

import ast
import functools
import linecache
from types import FrameType

import torch
from torch import Tensor

__all__ = ["guards_masked_writes", "only_raises"]

# Operations allowed in a guarded write: no call may have a side effect.
_SIMPLE = (
    ast.Name,
    ast.Attribute,
    ast.Subscript,
    ast.Slice,
    ast.Tuple,
    ast.Constant,
    ast.BinOp,
    ast.UnaryOp,
    ast.operator,
    ast.unaryop,
    ast.expr_context,
)


def only_raises(frame: FrameType) -> bool:
    """Returns whether a line is an ``assert``, or an ``if`` that only raises."""
    for node in _conditions(frame.f_code.co_filename):
        asked = node if isinstance(node, ast.Assert) else node.test
        if asked.lineno <= frame.f_lineno <= (asked.end_lineno or asked.lineno):
            if isinstance(node, ast.Assert):
                return True
            if all(isinstance(statement, ast.Raise) for statement in node.body):
                return True
    return False


def guards_masked_writes(frame: FrameType) -> bool:
    """Returns whether a line tests ``if mask.any():`` and then only writes ``x[mask] = ...``.

    Without the condition the same is written: nothing where the mask is False everywhere.
    """
    for node in _conditions(frame.f_code.co_filename):
        if isinstance(node, ast.If) and node.test.lineno == frame.f_lineno and not node.orelse:
            mask = _asked_for_any(node.test)
            if mask is not None and _is_mask(_local(frame, mask)):
                return all(_is_masked_write(x, mask, frame) for x in node.body)
    return False


def _asked_for_any(test: ast.expr) -> str | None:
    """Returns the name in ``name.any()`` or ``torch.any(name)``."""
    if not isinstance(test, ast.Call) or test.keywords:
        return None
    asked = test.func.value if isinstance(test.func, ast.Attribute) else None
    if asked is None or test.func.attr != "any":  # type: ignore[attr-defined]
        return None
    if isinstance(asked, ast.Name) and asked.id == "torch" and len(test.args) == 1:
        asked = test.args[0]
    elif test.args:
        return None
    return asked.id if isinstance(asked, ast.Name) else None


def _is_masked_write(statement: ast.stmt, mask: str, frame: FrameType) -> bool:
    if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
        target = statement.targets[0]
    elif isinstance(statement, ast.AugAssign):
        target = statement.target
    else:
        return False
    if not isinstance(target, ast.Subscript) or not isinstance(target.value, ast.Name):
        return False
    index = target.slice.elts if isinstance(target.slice, ast.Tuple) else [target.slice]
    return (
        isinstance(_local(frame, target.value.id), Tensor)
        and any(isinstance(part, ast.Name) and part.id == mask for part in index)
        and all(isinstance(part, _SIMPLE) for part in ast.walk(target))
        and all(isinstance(part, _SIMPLE) for part in ast.walk(statement.value))
    )


def _local(frame: FrameType, name: str) -> object:
    return frame.f_locals.get(name)


def _is_mask(x: object) -> bool:
    return isinstance(x, Tensor) and x.dtype == torch.bool


@functools.cache
def _conditions(file: str) -> list[ast.Assert | ast.If]:
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except SyntaxError:
        return []
    nodes = list(ast.walk(tree))
    # An error that is caught there is a path of its own.
    caught = [part for node in nodes if isinstance(node, ast.Try) for part in node.body]
    inside = {id(node) for part in caught for node in ast.walk(part)}
    conditions = [node for node in nodes if isinstance(node, (ast.Assert, ast.If))]
    return [node for node in conditions if id(node) not in inside]
