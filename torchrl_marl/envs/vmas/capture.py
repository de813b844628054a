"""Removes branches that depend on data from VMAS steps, so that the steps can be traced."""

from __future__ import annotations

import ast
import contextlib
import functools
import linecache
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from types import FrameType

    from vmas.simulator.core import Entity, World
    from vmas.simulator.environment import Environment


__all__ = ["contact_lines", "without_branches"]


def contact_lines(frame: FrameType) -> range | None:
    """Returns the lines below the ``if ....collides(...):`` that a frame currently evaluates.

    Args:
        frame (FrameType): frame that calls ``collides``.

    Returns:
        range: line numbers; None if these lines do more than write values for pairs in contact.
    """
    return _contact_branches(frame.f_code.co_filename).get(frame.f_lineno)


@functools.cache
def _contact_branches(file: str) -> dict[int, range]:
    """Returns a dict: line of an ``if`` that tests ``collides`` -> lines of the if's body."""
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except SyntaxError:
        return {}
    lines = {}
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef):
            continue
        for node in ast.walk(function):
            if (
                isinstance(node, ast.If)
                and _guards_contact(node)
                and _names_stay_inside(node, function)
            ):
                last = node.body[-1].end_lineno or node.lineno
                lines[node.lineno] = range(node.body[0].lineno, last + 1)
    return lines


def _guards_contact(node: ast.If) -> bool:
    is_test = _is_call_of(node.test, "collides") and not node.orelse
    return is_test and _writes_at_contact(node.body, set())


def _is_call_of(x: ast.expr, method: str) -> bool:
    return (
        isinstance(x, ast.Call)
        and isinstance(x.func, ast.Attribute)
        and x.func.attr == method
        and not x.keywords
        and len(x.args) == 2
        and all(isinstance(argument, ast.Name) for argument in x.args)
    )


def _writes_at_contact(body: list[ast.stmt], distances: set[str]) -> bool:
    """Returns True if statements only set local names, or write where a distance is small."""
    for x in body:
        target: ast.expr | None = getattr(x, "target", None)
        if isinstance(x, ast.Assign):
            target = x.targets[0]
        if isinstance(x, ast.If):
            branches = (x.body, x.orelse)
            if not _has_no_calls(x.test) or not all(
                _writes_at_contact(branch, set(distances)) for branch in branches
            ):
                return False
        elif isinstance(x, ast.Assign) and len(x.targets) == 1 and isinstance(target, ast.Name):
            if _is_call_of(x.value, "get_distance"):
                distances.add(target.id)
            elif not _has_no_calls(x.value) or target.id in distances:
                return False
        elif isinstance(x, (ast.Assign, ast.AugAssign)) and isinstance(target, ast.Subscript):
            if not (_has_no_calls(target.value) and _has_no_calls(x.value)):
                return False
            if not _is_distance_test(target.slice, distances):
                return False
        else:
            return False
    return True


def _is_distance_test(mask: ast.expr, distances: set[str]) -> bool:
    """Returns True if an expression is ``distance < c`` or ``distance <= c``."""
    if not isinstance(mask, ast.Compare) or not isinstance(mask.ops[0], (ast.Lt, ast.LtE)):
        return False
    left = mask.left
    is_distance = _is_call_of(left, "get_distance") or (
        isinstance(left, ast.Name) and left.id in distances
    )
    return is_distance and len(mask.ops) == 1 and _has_no_calls(mask.comparators[0])


def _has_no_calls(x: ast.expr) -> bool:
    """Returns True if an expression has no calls and no assignments."""
    return not any(
        isinstance(part, (ast.Call, ast.NamedExpr, ast.Await, ast.Yield, ast.YieldFrom))
        for part in ast.walk(x)
    )


def _names_stay_inside(node: ast.If, function: ast.FunctionDef) -> bool:
    """Returns True if names that are set in the body of an ``if`` are read only there."""
    inside = {id(part) for statement in node.body for part in ast.walk(statement)}
    names = [part for part in ast.walk(function) if isinstance(part, ast.Name)]
    stored = {x.id for x in names if id(x) in inside and isinstance(x.ctx, ast.Store)}
    return not any(
        x.id in stored and isinstance(x.ctx, ast.Load) and id(x) not in inside for x in names
    )


_COLLISION_METHODS = (
    "_sphere_sphere_vectorized_collision",
    "_sphere_line_vectorized_collision",
    "_line_line_vectorized_collision",
    "_box_sphere_vectorized_collision",
    "_box_line_vectorized_collision",
    "_box_box_vectorized_collision",
)


@contextlib.contextmanager
def without_branches(env: Environment) -> Iterator[None]:
    """Context in which a step runs the same code in all states, with the same results as VMAS.

    Only this environment's ``World`` is patched; the patch is removed on exit.

    Args:
        env (Environment): VMAS environment to trace.

    Examples:
        >>> from torchrl_marl.envs import VmasEnv
        >>> from torchrl_marl.envs.vmas.build import advance
        >>> env = VmasEnv("balance", num_envs=2)._env
        >>> with without_branches(env):
        ...     advance(env, env.get_random_actions())
    """
    contacts = _ContactTests(env.world)
    replaced: dict[str, Callable[..., Any]] = {
        "collides": contacts.collides,
        "get_distance": contacts.distance,
        "_get_constraint_forces": contacts.forces,
        **{name: contacts.wrap_collision(getattr(env.world, name)) for name in _COLLISION_METHODS},
    }
    own = {name: vars(env.world)[name] for name in replaced if name in vars(env.world)}
    vars(env.world).update(replaced)
    try:
        yield
    finally:
        for name in replaced:
            del vars(env.world)[name]
        vars(env.world).update(own)


class _ContactTests:
    """Replacements for the contact tests in VMAS's ``World``, without branches."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._original_forces = world._get_constraint_forces
        self._original_distance = world.get_distance
        self._pairs_to_test: list[tuple[Entity, Entity]] = []
        # The scenario's last call of collides: mask of the envs where the pair is near, pair of
        # entities, frame, and the lines that run only if the test is True.
        self._last_test: tuple[Tensor, set[Entity], FrameType, range] | None = None

    def collides(self, a: Entity, b: Entity) -> bool | Tensor:
        """Replaces ``World.collides``; tests no distances if VMAS calls it to compute forces."""
        if not self._may_collide(a, b):
            return False
        frame = sys._getframe(1)
        if frame.f_code is type(self._world)._apply_vectorized_enviornment_force.__code__:
            return True
        near = _is_near([(a, b)]).squeeze(0)
        lines = contact_lines(frame)
        if lines is None:
            return near
        self._last_test = near, {a, b}, frame, lines
        return True

    def distance(self, a: Entity, b: Entity, env_index: int | None = None) -> Tensor:
        """Replaces ``World.get_distance``; infinite where VMAS's ``collides`` would be False."""
        distance = self._original_distance(a, b, env_index)
        if self._last_test is None:
            return distance
        near, pair, frame, lines = self._last_test
        caller = sys._getframe(1)
        if caller is not frame or caller.f_lineno not in lines or {a, b} != pair:
            return distance
        return torch.where(near, distance, torch.inf)

    def _may_collide(self, a: Entity, b: Entity) -> bool:
        if a is b or not (a.collides(b) and b.collides(a)):
            return False
        if not (a.movable or a.rotatable or b.movable or b.rotatable):
            return False
        return {type(a.shape), type(b.shape)} in self._world._collidable_pairs

    def wrap_collision(self, collision: Callable[..., None]) -> Callable[..., None]:
        """Wraps a collision function, so that :meth:`forces` knows its pairs of entities."""

        def collide(pairs: list[tuple[Entity, Entity]]) -> None:
            self._pairs_to_test = [] if all(map(_is_always_near_in_contact, pairs)) else pairs
            collision(pairs)
            self._pairs_to_test = []

        return collide

    def forces(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Replaces ``World._get_constraint_forces``; forces are 0 for pairs that VMAS skips."""
        on_a, on_b = self._original_forces(*args, **kwargs)
        # Without pairs, the call is for joints, or for pairs that need no test of nearness.
        if not self._pairs_to_test:
            return on_a, on_b
        near = _is_near(self._pairs_to_test).unsqueeze(-1)
        return torch.where(near, on_a, 0.0), torch.where(near, on_b, 0.0)


def _is_near(pairs: list[tuple[Entity, Entity]]) -> Tensor:
    """Returns a mask ``[P]`` of the pairs that VMAS's test finds near in at least one env."""
    a, b = (torch.stack([pair[i].state.pos for pair in pairs], -2) for i in (0, 1))
    reach = [_contact_distance(*pair) for pair in pairs]
    distance = torch.linalg.vector_norm(a - b, dim=-1)
    return (distance <= torch.tensor(reach, device=distance.device)).any(0)


def _contact_distance(a: Entity, b: Entity) -> float:
    return a.shape.circumscribed_radius() + b.shape.circumscribed_radius()


def _is_always_near_in_contact(pair: tuple[Entity, Entity]) -> bool:
    """Returns True if a pair in contact always passes the test in ``World.collides``."""
    from vmas.simulator.core import Sphere

    if not all(isinstance(entity.shape, Sphere) for entity in pair):
        return False
    # Summed in single precision, as VMAS does for forces.
    touching = sum(torch.tensor(entity.shape.radius) for entity in pair)
    return bool(touching <= torch.tensor(_contact_distance(*pair)))
