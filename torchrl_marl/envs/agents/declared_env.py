"""An environment of declared agents."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from torchrl.data import Categorical, Composite, MultiCategorical, MultiOneHot, OneHot, TensorSpec
from torchrl.envs import EnvBase

from torchrl_marl.envs.agents.declaration import Declaration
from torchrl_marl.envs.agents.kinds import GroupKinds, batched
from torchrl_marl.specs import TeamSpec
from torchrl_marl.specs.groups import is_lazy
from torchrl_marl.specs.stacking import pad_group

__all__ = ["DeclaredEnv", "draw_actions"]


def draw_actions(
    declaration: Declaration,
    tensordict: TensorDictBase | None,
    batch_size: torch.Size,
    device: torch.device | None,
) -> TensorDictBase:
    """Draws random actions of a team, legal ones where there are action masks.

    Args:
        declaration (Declaration): of the world.
        tensordict (TensorDictBase, optional): with the action masks; the actions are written to
            it. Actions of a heterogeneous group that is dense there are padded with zeros.
        batch_size (torch.Size): ``[E]``.
        device (torch.device, optional): of the actions.
    """
    if tensordict is None:
        tensordict = TensorDict({}, batch_size, device)
    for name, kinds in declaration.groups.items():
        specs = declaration.reader.kind_specs[name]
        group = tensordict.get(name, None)
        actions = _draw_group(kinds, specs, group, batch_size, device)
        if group is None:
            tensordict.set(name, actions)
        else:
            group.update(actions)
    return tensordict


def _draw_group(
    kinds: GroupKinds,
    specs: Mapping[str, Composite],
    group: TensorDictBase | None,
    batch_size: torch.Size,
    device: torch.device | None,
) -> TensorDictBase:
    """Draws the actions of a group: ``[E, N]`` with the leaf ``"action"``."""
    masks = dict.fromkeys(kinds.names)
    if group is not None and "action_mask" in group.keys():
        own = kinds.split(group.select("action_mask"))
        masks = {name: own[name].get("action_mask") for name in kinds.names}
    actions = {
        name: {"action": _draw(specs[name]["action"], masks[name], batch_size, device)}
        for name in kinds.names
    }
    if not kinds.lazy:
        joint = torch.cat([own["action"] for own in actions.values()], len(batch_size))
        return TensorDict({"action": joint}, (*batch_size, sum(kinds.sizes)), device)
    drawn = kinds.stacked(actions, batch_size, device)
    dense = group is not None and not is_lazy(group)
    return pad_group(drawn, kinds.paddings) if dense else drawn


def _draw(
    spec: TensorSpec, legal: Tensor | None, batch_size: torch.Size, device: torch.device | None
) -> Tensor:
    several = isinstance(spec, (MultiCategorical, MultiOneHot))
    if legal is None or several or not isinstance(spec, (Categorical, OneHot)):
        return batched(spec, batch_size).rand().to(device)
    legal = legal if spec.mask is None else legal & spec.mask.to(legal.device)
    # Agents without a legal action do not act, so any action is fine.
    weights = (legal | ~legal.any(-1, keepdim=True)).float()
    action = torch.multinomial(weights.flatten(0, -2), 1).view(legal.shape[:-1])
    if isinstance(spec, OneHot):
        action = torch.nn.functional.one_hot(action, spec.space.n)
    return action.to(spec.dtype)


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
