"""Division of a JaxMARL world's agents into groups and kinds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torchrl.data import (
    Bounded,
    Categorical,
    Composite,
    MultiCategorical,
    OneHot,
    TensorSpec,
    Unbounded,
)

from torchrl_marl.errors import SpecError
from torchrl_marl.specs import AgentSpec

__all__ = ["Kind", "kinds_of"]

Shape = tuple[int, ...] | Mapping[str, Any]
"""Of one array, or of several by their names."""


@dataclass(frozen=True)
class Kind:
    """Agents of a group with equal observation and action spaces.

    Args:
        name (str): of the kind.
        ids (tuple): the agents, as the world calls them.
        observation (tuple of int, or dict of such): the shape of what one sees.
        action (TensorSpec): what one does.
        n_legal (int, optional): how many actions an action mask is of.
    """

    name: str
    ids: tuple[Any, ...]
    observation: Shape
    action: TensorSpec
    n_legal: int | None

    def spec(self) -> AgentSpec:
        """Returns the kind's declaration."""
        return AgentSpec(
            self.name,
            len(self.ids),
            _observation_spec(self.observation),
            self.action,
            action_mask=self.n_legal is not None,
            agent_names=tuple(str(agent) for agent in self.ids),
        )


def kinds_of(
    group: str,
    ids: Sequence[Any],
    env: Any,
    shapes: Mapping[Any, Shape],
    legal: Mapping[Any, tuple[int, ...]] | None,
    one_hot: bool,
) -> tuple[Kind, ...]:
    """Returns the kinds of a group, in order of first appearance.

    Args:
        group (str): its name.
        ids (sequence): its agents.
        env (MultiAgentEnv): the world, asked for the action spaces.
        shapes (mapping): agent -> shape of its observations, or shapes in a dict.
        legal (mapping, optional): agent -> shape of its legal actions.
        one_hot (bool): discrete actions are one-hot encoded.
    """
    members: list[tuple[tuple, list[Any]]] = []
    for agent in ids:
        action = _action_spec(agent, env.action_space(agent), one_hot)
        n = getattr(action.space, "n", None) if action.domain == "discrete" else None
        masked = legal is not None and n is not None and legal.get(agent) == (n,)
        key = (shapes[agent], action, n if masked else None)
        same = next((own for found, own in members if found == key), None)
        if same is None:
            members.append((key, [agent]))
        else:
            same.append(agent)
    names = [group] if len(members) == 1 else [str(own[0]) for _, own in members]
    return tuple(Kind(name, tuple(own), *key) for name, (key, own) in zip(names, members))


def _observation_spec(shape: Shape) -> TensorSpec:
    if isinstance(shape, Mapping):
        return Composite({key: _observation_spec(own) for key, own in shape.items()})
    return Unbounded(shape)


def _action_spec(agent: Any, space: Any, one_hot: bool) -> TensorSpec:
    kind = type(space).__name__
    if kind == "Discrete":
        n = int(space.n)
        return OneHot(n) if one_hot else Categorical(n)
    if kind == "MultiDiscrete":
        return MultiCategorical([int(n) for n in space.num_categories])
    if kind == "Box":
        shape = tuple(space.shape)
        low, high = (
            torch.tensor(bound.tolist() if hasattr(bound, "tolist") else bound)
            for bound in (space.low, space.high)
        )
        low, high = (bound.float().expand(shape).clone() for bound in (low, high))
        if bool((low.isfinite() & high.isfinite()).all()):
            return Bounded(low, high, shape=shape)
        return Unbounded(shape)
    raise SpecError(
        f"the action space of {agent!r} is a {kind}, expected Discrete, MultiDiscrete or Box."
    )
