"""Spec of a team.

Shapes: E envs, N agents of a group, O observation features, A action features, S state features.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torchrl.data import (
    Composite,
    TensorSpec,
)
from torchrl.envs import EnvBase

from torchrl_marl.specs.agents import AgentSpec
from torchrl_marl.specs.reading import (
    group_from_agents,
    group_from_env,
    padded_members,
    read_group_map,
)

__all__ = ["TeamSpec"]


class TeamSpec:
    """All groups of one environment, with their keys, sizes and masks.

    Args:
        agents (sequence of AgentSpec, or mapping of group name to a sequence of AgentSpec):
            without names, each kind is a group of its own.
        state_spec (TensorSpec, optional): what only the critic sees, ``[S]``.
        in_turns (bool): agents move one after another; who waits for its first turn is born.

    Raises:
        ValueError: a reserved or repeated group name, or a group without agents.

    Examples:
        >>> from torchrl.data import Bounded, Unbounded
        >>> team = TeamSpec([AgentSpec("rover", 3, Unbounded((9,)), Bounded(-1, 1, (2,)))])
        >>> team.groups["rover"].observation_key, team.groups["rover"].action_dim
        (('rover', 'observation'), 2)
    """

    def __init__(
        self,
        agents: Sequence[AgentSpec] | Mapping[str, Sequence[AgentSpec]],
        state_spec: TensorSpec | None = None,
        in_turns: bool = False,
    ) -> None:
        grouped = agents if isinstance(agents, Mapping) else {spec.name: [spec] for spec in agents}
        if not isinstance(agents, Mapping) and len(grouped) < len(agents):
            names = [spec.name for spec in agents]
            raise ValueError(f"two kinds of agents have one name in {names}; names must differ.")
        self.agents = {name: tuple(specs) for name, specs in grouped.items()}
        self.state_spec = state_spec
        self.groups = {
            name: group_from_agents(name, specs, state_spec, in_turns)
            for name, specs in self.agents.items()
        }

    @classmethod
    def from_env(cls, env: EnvBase) -> TeamSpec:
        """Reads the team of any TorchRL environment that follows the group convention.

        Args:
            env (EnvBase): its groups come from ``env.group_map`` or, without one, from its
                action keys ``(group, "action")``.

        Returns:
            TeamSpec: with one :class:`GroupSpec` a group. ``team.agents`` is empty.

        Raises:
            ValueError: no group convention, or a reserved group name.
        """
        team = cls.__new__(cls)
        team.agents = {}
        team.state_spec = env.full_observation_spec_unbatched.get("state", None)
        group_map = read_group_map(env)
        known = padded_members(env)
        team.groups = {
            n: group_from_env(env, n, names, team.state_spec, known.get(n))
            for n, names in group_map.items()
        }
        return team

    @property
    def n_agents(self) -> int:
        """Number of agents of all groups."""
        return sum(group.n_agents for group in self.groups.values())

    def stacked_spec(self) -> Composite:
        """All agents of all groups as one stacked spec ``[n_agents]``."""
        members = []
        for group in self.groups.values():
            for i in range(group.n_agents):
                own = None if group.members is None else group.members[i]
                leaves = {
                    "observation": group.observation_spec[i] if own is None else own["observation"],
                    "action": group.action_spec[i] if own is None else own["action"],
                }
                members.append(Composite(leaves))
        return torch.stack(members, 0)

    def __repr__(self) -> str:
        groups = ", ".join(f"{name}: {group.n_agents}" for name, group in self.groups.items())
        return f"TeamSpec({groups}{'' if self.state_spec is None else ', state'})"
