"""Conversion of spaces to specs, checks of values against specs, and grouping of agents."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
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
    Unbounded,
)
from torchrl.envs.utils import MarlGroupMapType

from torchrl_marl.envs.agents.declaration import Declaration
from torchrl_marl.errors import ConfigError, SpecError, nearest

__all__ = ["action_spec_of", "check_bounds", "check_values", "group_agents", "spec_of_space"]


def spec_of_space(
    where: str, space: Any, *, action: bool = False, one_hot: bool = False
) -> TensorSpec:
    """Converts the observation or action space of one agent to a spec.

    Floats become float32; discrete values become int64.

    Args:
        where (str): name of the space in error messages.
        space (gymnasium.Space): Box, Discrete, MultiDiscrete, MultiBinary, or a Dict of these.

    Keyword Args:
        action (bool): True for an action space. The spec of a single discrete action then has
            shape ``[]`` instead of ``[1]``.
        one_hot (bool): True to one-hot encode the values of a Discrete space.

    Raises:
        SpecError: values of the space are not tensors of a fixed shape.

    Examples:
        >>> import gymnasium
        >>> spec_of_space("rover_0", gymnasium.spaces.Discrete(3), action=True).shape
        torch.Size([])
    """
    kind = type(space).__name__
    if kind == "Dict":
        leaves = {
            key: spec_of_space(f"{where}[{key!r}]", leaf, action=action, one_hot=one_hot)
            for key, leaf in space.spaces.items()
        }
        return Composite(leaves)
    if kind == "Discrete":
        n = int(space.n)
        if one_hot:
            return OneHot(n)
        return Categorical(n, shape=() if action else (1,))
    if kind == "MultiDiscrete":
        # JaxMARL's spaces call the attribute num_categories.
        sizes = space.nvec if hasattr(space, "nvec") else space.num_categories
        return MultiCategorical(np.asarray(sizes).ravel().tolist())
    if kind == "MultiBinary":
        return MultiCategorical([2] * math.prod(space.shape))
    if kind == "Box":
        return _box_spec(space)
    raise SpecError(
        f"{where} is a {kind}, which has no fixed shape as a tensor; expected Box, Discrete, "
        "MultiDiscrete, MultiBinary or a Dict of these; wrap the environment to use one of them."
    )


def action_spec_of(where: str, space: Any, *, one_hot: bool = False) -> TensorSpec:
    """Converts the action space of one agent to a spec; see :func:`spec_of_space`.

    Raises:
        SpecError: the space is a Dict, or its values are not tensors of a fixed shape.
    """
    spec = spec_of_space(where, space, action=True, one_hot=one_hot)
    if isinstance(spec, Composite):
        raise SpecError(
            f"{where} is a Dict, expected Box, Discrete or MultiDiscrete; wrap the environment to "
            "use one of them."
        )
    return spec


def _box_spec(space: Any) -> TensorSpec:
    shape = tuple(space.shape) or (1,)
    # A JaxMARL space may have a single bound for all entries, and the bound may have another type.
    bounds = (np.asarray(bound, space.dtype) for bound in (space.low, space.high))
    low, high = (torch.tensor(bound).expand(shape).clone() for bound in bounds)
    dtype = torch.float32 if low.is_floating_point() else low.dtype
    if dtype.is_floating_point:
        low, high = low.to(dtype), high.to(dtype)
        if not bool((torch.isfinite(low) & torch.isfinite(high)).all()):
            return Unbounded(shape, dtype=dtype)
    return Bounded(low, high, shape=shape, dtype=dtype)


_TOLERANCE = 1e-5


def check_bounds(
    where: str,
    leaf: str,
    output: Mapping[str, Mapping[str, Any]],
    masks: Mapping[str, Tensor],
    declaration: Declaration,
) -> None:
    """Applies :func:`check_values` to one leaf of every group.

    Args:
        where (str): name of the method in error messages.
        leaf (str): ``"observation"`` or ``"action"``.
        output (mapping): leaves by group, for the whole group or by kind.
        masks (mapping): mask ``[E, N]`` of the agents to check, by group.
        declaration (Declaration): agents of the environment.
    """
    reader = declaration.reader
    for name, kinds in declaration.groups.items():
        agents = declaration.team.groups[name].agent_names
        for kind, value in kinds.parts(output[name], leaf).items():
            rows = kinds.slices[kind] if kind else slice(None)
            specs = reader.kind_specs[name][kind] if kind else reader.specs[name]
            mask = masks[name][:, rows]
            check_values(where, (name, leaf), specs[leaf], value, mask, agents[rows])


def check_values(
    where: str, key: tuple, spec: TensorSpec, value: Any, mask: Tensor, agents: Sequence[str]
) -> None:
    """Raises an error if a value of an acting agent is NaN or outside its spec.

    This check reads the values of tensors, so it waits for the device.

    Args:
        where (str): name of the method in error messages.
        key (tuple of str): key of the value in error messages.
        spec (TensorSpec): spec of the agents, ``[M, ...]``.
        value (Tensor): values to check; nested dicts of tensors if the spec is a Composite.
        mask (Tensor): mask of the agents to check.
        agents (sequence of str): names of the M agents.

    Shapes:
        - value: ``[E, M, ...]``; mask: ``[E, M]``

    Raises:
        SpecError: a value is outside its spec; the message names the agent and the env.
    """
    if isinstance(spec, Composite):
        for leaf in spec.keys():
            check_values(where, (*key, leaf), spec[leaf], value[leaf], mask, agents)
        return
    inside = _is_inside_spec(spec, value)
    wrong = ~inside & mask.view(*mask.shape, *[1] * (inside.ndim - mask.ndim))
    if bool(wrong.any()):
        index = tuple(wrong.nonzero()[0].tolist())
        found, expected = value[index].tolist(), _describe_expected(spec, index[1:])
        raise SpecError(
            f"{where}: {key!r} of agent {agents[index[1]]!r} in env {index[0]} is {found}, "
            f"expected {expected}."
        )


def _is_inside_spec(spec: Any, value: Tensor) -> Tensor:
    """Returns a mask of the entries inside a spec; a one-hot vector counts as one entry."""
    if isinstance(spec, Bounded) and value.dtype != torch.bool:
        low, high = (getattr(spec.space, side).to(value.device) for side in ("low", "high"))
        tolerance = _TOLERANCE if value.is_floating_point() else 0
        return (value >= low - tolerance * (1 + low.abs())) & (
            value <= high + tolerance * (1 + high.abs())
        )
    if isinstance(spec, OneHot) and not isinstance(spec, MultiOneHot):
        return (
            ((value == 0) | (value == 1)).all(-1)
            & (value.sum(-1) == 1)
            & _is_allowed_choice(spec, value)
        )
    if isinstance(spec, Categorical) and not isinstance(spec, MultiCategorical):
        index = value.long()
        inside = (index >= 0) & (index < spec.space.n)
        if spec.mask is None:
            return inside
        legal = spec.mask.to(value.device).expand(*value.shape, spec.space.n)
        return inside & legal.gather(-1, index.clamp(0, spec.space.n - 1).unsqueeze(-1)).squeeze(-1)
    if n := _n_choices(spec):
        return torch.cat([spec.fits(value), _is_inside_spec(spec.continuous, value[..., n:])], -1)
    return ~value.isnan()


def _n_choices(spec: Any) -> int:
    """Returns the number of choices of a hybrid action; 0 for other specs."""
    return len(getattr(spec, "branches", ()))


def _is_allowed_choice(spec: OneHot, value: Tensor) -> Tensor | bool:
    return True if spec.mask is None else (value.bool() & spec.mask.to(value.device)).any(-1)


def _describe_expected(spec: Any, index: tuple[int, ...]) -> str:
    if isinstance(spec, Bounded):
        low, high = spec.space.low[index].item(), spec.space.high[index].item()
        return f"a number from {low:g} to {high:g}"
    if isinstance(spec, (OneHot, Categorical)):
        kind = "a one-hot vector" if isinstance(spec, OneHot) else "an index"
        allowed = "" if spec.mask is None else ", of those that the spec's mask allows"
        return f"{kind} of {spec.space.n} choices{allowed}"
    if n := _n_choices(spec):
        *agent, feature = index
        if feature < n:
            return f"an index of {spec.branches[feature]} choices"
        return _describe_expected(spec.continuous, (*agent, feature - n))
    return "a number"


def group_agents(
    agents: Sequence[Any], group_map: MarlGroupMapType | Mapping[str, Sequence[Any]] | None
) -> dict[str, list[Any]]:
    """Returns the agent ids of each group.

    Args:
        agents (sequence): ids of all agents of an environment.
        group_map (MarlGroupMapType or mapping, optional): grouping. By default ``bob_0`` and
            ``bob_1`` form the group ``bob``, and an agent without a number in its id forms a group
            by itself.

    Raises:
        ConfigError: an agent is in no group or in two groups, or an id is unknown.

    Examples:
        >>> group_agents(["speaker_0", "rover_0", "rover_1"], None)
        {'speaker': ['speaker_0'], 'rover': ['rover_0', 'rover_1']}
    """
    groups: dict[str, list[Any]] = {}
    if isinstance(group_map, MarlGroupMapType):
        group_map = group_map.get_group_map([str(agent) for agent in agents])
    if not group_map:
        for agent in agents:
            prefix = re.sub(r"[_-]?\d+$", "", str(agent)) or "agents"
            groups.setdefault(prefix, []).append(agent)
        return groups
    ids = {str(agent): agent for agent in agents}
    group_by_id: dict[str, str] = {}
    for group, names in group_map.items():
        for name in map(str, names):
            if name not in ids:
                raise ConfigError(
                    f"group_map: {name!r} of group {group!r} is not an agent of the environment; "
                    f"{nearest(name, ids)}it has {list(ids)}."
                )
            if name in group_by_id:
                problem = f"is in {group_by_id[name]!r} and {group!r}, expected one group"
                if group_by_id[name] == group:
                    problem = f"twice in {group!r}, expected once"
                raise ConfigError(f"group_map: {name!r} {problem}.")
            group_by_id[name] = group
            groups.setdefault(group, []).append(ids[name])
    for name in ids.keys() - group_by_id.keys():
        raise ConfigError(
            f"group_map: agent {name!r} has no group, expected one for each of {list(ids)}; "
            "add it to a group."
        )
    return groups
