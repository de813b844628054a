"""The part of an environment that follows from its declared agents."""

from __future__ import annotations

from collections.abc import Mapping

from tensordict import TensorDictBase
from torchrl.data import Composite
from torchrl.envs import EnvBase

from torchrl_marl.envs.agents.declaration import Declaration
from torchrl_marl.envs.agents.kinds import GroupKinds, batched
from torchrl_marl.envs.agents.random_actions import draw_actions
from torchrl_marl.specs import TeamSpec

__all__ = ["DeclaredEnv"]


class DeclaredEnv(EnvBase):
    """Environment of E envs whose specs, groups and random actions follow from a declaration."""

    _declaration: Declaration
    group_map: dict[str, list[str]]

    def _set_declaration(
        self, declaration: Declaration, info: Mapping[str, Composite] | None = None
    ) -> None:
        """Sets the specs and groups of a declaration.

        Args:
            declaration (Declaration): the agents and the state.
            info (dict of str to Composite, optional): group -> specs of its ``"info"``, ``[N]``.
        """
        self._declaration = declaration
        self.group_map = {n: list(g.agent_names) for n, g in declaration.team.groups.items()}
        for part, spec in declaration.specs.items():
            for group, leaves in (info or {}).items() if part == "observation" else ():
                spec[group]["info"] = leaves
            setattr(self, f"full_{part}_spec", batched(spec.to(self.device), self.batch_size))

    @property
    def team(self) -> TeamSpec:
        """The agents by group."""
        return self._declaration.team

    @property
    def group_kinds(self) -> dict[str, GroupKinds]:
        """Group -> how its agents divide into kinds."""
        return self._declaration.groups

    @property
    def num_envs(self) -> int:
        """Number E of vectorized envs."""
        return self.batch_size[0]

    def rand_action(self, tensordict: TensorDictBase | None = None) -> TensorDictBase:
        """Draws random actions, legal ones where there are action masks."""
        return draw_actions(self._declaration, tensordict, self.batch_size, self.device)
