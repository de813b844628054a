"""Checks that observations and actions lie inside their specs.

Shapes: E envs, M agents of a kind (or of a dense group).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torchrl.data import (
    Bounded,
    Categorical,
    Composite,
    MultiCategorical,
    MultiOneHot,
    OneHot,
    TensorSpec,
)

from torchrl_marl.envs.agents.declaration import Declaration
from torchrl_marl.errors import SpecError

__all__ = ["check_bounds", "check_values"]

_ROUNDING = 1e-5


def check_bounds(
    where: str,
    leaf: str,
    output: Mapping[str, Mapping[str, Any]],
    masks: Mapping[str, Tensor],
    declaration: Declaration,
) -> None:
    """Applies :func:`check_values` to one leaf of every group.

    Args:
        where (str): the method, in the message.
        leaf (str): ``"observation"`` or ``"action"``.
        output (mapping): group -> the leaf, of the whole group or under each kind.
        masks (mapping): group -> who is looked at, ``[E, N]``.
        declaration (Declaration): of the world.
    """
    reader = declaration.reader
    for name, kinds in declaration.groups.items():
        agents = declaration.team.groups[name].agent_names
        for kind, value in kinds.parts(output[name], leaf).items():
            place = kinds.slices[kind] if kind else slice(None)
            specs = reader.kind_specs[name][kind] if kind else reader.specs[name]
            mask = masks[name][:, place]
            check_values(where, (name, leaf), specs[leaf], value, mask, agents[place])


def check_values(
    where: str, key: tuple, spec: TensorSpec, value: Any, mask: Tensor, agents: Sequence[str]
) -> None:
    """Refuses values of acting agents outside their spec; NaN is outside of every spec.

    It reads values, so it waits for the device.

    Args:
        where (str): the method, in the message.
        key (tuple of str): of the value, in the message.
        spec (TensorSpec): of the agents, ``[M, ...]``.
        value (Tensor): dicts of such for a Composite.
        mask (Tensor): who is looked at.
        agents (sequence of str): the M agents' names.

    Shapes:
        - value: ``[E, M, ...]``; mask: ``[E, M]``

    Raises:
        SpecError: naming the agent, the env, what was found and what was expected.
    """
    if isinstance(spec, Composite):
        for leaf in spec.keys():
            check_values(where, (*key, leaf), spec[leaf], value[leaf], mask, agents)
        return
    fits = _fits(spec, value)
    wrong = ~fits & mask.view(*mask.shape, *[1] * (fits.ndim - mask.ndim))
    if bool(wrong.any()):
        index = tuple(wrong.nonzero()[0].tolist())
        found, expected = value[index].tolist(), _expected(spec, index[1:])
        raise SpecError(
            f"{where}: {key!r} of agent {agents[index[1]]!r} in env {index[0]} is {found}, "
            f"expected {expected}."
        )


def _fits(spec: TensorSpec, value: Tensor) -> Tensor:
    """Returns which entries lie inside a spec; ``[E, M]`` for one-hot vectors."""
    if isinstance(spec, Bounded) and value.dtype != torch.bool:
        low, high = (getattr(spec.space, side).to(value.device) for side in ("low", "high"))
        slack = _ROUNDING if value.is_floating_point() else 0
        return (value >= low - slack * (1 + low.abs())) & (value <= high + slack * (1 + high.abs()))
    if isinstance(spec, OneHot) and not isinstance(spec, MultiOneHot):
        return ((value == 0) | (value == 1)).all(-1) & (value.sum(-1) == 1) & _chosen(spec, value)
    if isinstance(spec, Categorical) and not isinstance(spec, MultiCategorical):
        index = value.long()
        inside = (index >= 0) & (index < spec.space.n)
        if spec.mask is None:
            return inside
        legal = spec.mask.to(value.device).expand(*value.shape, spec.space.n)
        return inside & legal.gather(-1, index.clamp(0, spec.space.n - 1).unsqueeze(-1)).squeeze(-1)
    return ~value.isnan()


def _chosen(spec: OneHot, value: Tensor) -> Tensor | bool:
    return True if spec.mask is None else (value.bool() & spec.mask.to(value.device)).any(-1)


def _expected(spec: TensorSpec, index: tuple[int, ...]) -> str:
    if isinstance(spec, Bounded):
        low, high = spec.space.low[index].item(), spec.space.high[index].item()
        return f"a number from {low:g} to {high:g}"
    if isinstance(spec, (OneHot, Categorical)):
        kind = "a one-hot vector" if isinstance(spec, OneHot) else "an index"
        legal = "" if spec.mask is None else ", of those that the spec's mask allows"
        return f"{kind} of {spec.space.n} choices{legal}"
    return "a number"
