"""Finds scenarios whose Python branches on whether two entities are near in any env.

``if self.world.collides(a, b):`` is a branch on the state. Where all that it guards is written
where ``self.world.get_distance(a, b)`` is small, the branch may be taken always: with a distance
that is infinite where stock VMAS would not have taken it, nothing is written.
"""

from __future__ import annotations

import ast
import functools
import linecache
from types import FrameType

__all__ = ["contact_lines"]


def contact_lines(frame: FrameType) -> range | None:
    """Returns the lines guarded by ``if ....collides(...):`` at a frame, if contact alone matters.

    Args:
        frame (FrameType): which asks.

    Returns:
        range: of line numbers, or None if something else happens there.
    """
    return _contacts(frame.f_code.co_filename).get(frame.f_lineno)


@functools.cache
def _contacts(file: str) -> dict[int, range]:
    """Maps each line with a test to the lines that it guards."""
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except SyntaxError:
        return {}
    found = {}
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef):
            continue
        for node in ast.walk(function):
            if isinstance(node, ast.If) and _guards_contact(node) and _is_private(node, function):
                last = node.body[-1].end_lineno or node.lineno
                found[node.lineno] = range(node.body[0].lineno, last + 1)
    return found


def _guards_contact(node: ast.If) -> bool:
    asks = _calls(node.test, "collides") and not node.orelse
    return asks and _writes_at_contact(node.body, set())


def _calls(x: ast.expr, method: str) -> bool:
    return (
        isinstance(x, ast.Call)
        and isinstance(x.func, ast.Attribute)
        and x.func.attr == method
        and not x.keywords
        and len(x.args) == 2
        and all(isinstance(argument, ast.Name) for argument in x.args)
    )


def _writes_at_contact(body: list[ast.stmt], distances: set[str]) -> bool:
    """Returns whether statements only set local names and write at a small distance."""
    for x in body:
        target: ast.expr | None = getattr(x, "target", None)
        if isinstance(x, ast.Assign):
            target = x.targets[0]
        if isinstance(x, ast.If):
            branches = (x.body, x.orelse)
            if not _is_plain(x.test) or not all(
                _writes_at_contact(branch, set(distances)) for branch in branches
            ):
                return False
        elif isinstance(x, ast.Assign) and len(x.targets) == 1 and isinstance(target, ast.Name):
            if _calls(x.value, "get_distance"):
                distances.add(target.id)
            elif not _is_plain(x.value) or target.id in distances:
                return False
        elif isinstance(x, (ast.Assign, ast.AugAssign)) and isinstance(target, ast.Subscript):
            if not (_is_plain(target.value) and _is_plain(x.value)):
                return False
            if not _is_contact(target.slice, distances):
                return False
        else:
            return False
    return True


def _is_contact(mask: ast.expr, distances: set[str]) -> bool:
    """Returns whether a test is ``distance < c`` or ``distance <= c``."""
    if not isinstance(mask, ast.Compare) or not isinstance(mask.ops[0], (ast.Lt, ast.LtE)):
        return False
    left = mask.left
    known = _calls(left, "get_distance") or (isinstance(left, ast.Name) and left.id in distances)
    return known and len(mask.ops) == 1 and _is_plain(mask.comparators[0])


def _is_plain(x: ast.expr) -> bool:
    """Returns whether an expression calls nothing and sets nothing."""
    return not any(
        isinstance(part, (ast.Call, ast.NamedExpr, ast.Await, ast.Yield, ast.YieldFrom))
        for part in ast.walk(x)
    )


def _is_private(node: ast.If, function: ast.FunctionDef) -> bool:
    """Returns whether names that are set under the condition are read only there."""
    inside = {id(part) for statement in node.body for part in ast.walk(statement)}
    names = [part for part in ast.walk(function) if isinstance(part, ast.Name)]
    stored = {x.id for x in names if id(x) in inside and isinstance(x.ctx, ast.Store)}
    return not any(
        x.id in stored and isinstance(x.ctx, ast.Load) and id(x) not in inside for x in names
    )
