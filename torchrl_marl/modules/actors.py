"""Actors: from what an agent sees to what it does.

Shapes: B any batch dims, N agents, O observation features, A action features.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from tensordict import NestedKey, TensorDictBase
from tensordict.nn import (
    InteractionType,
    TensorDictModuleBase,
    dispatch,
)
from tensordict.nn.probabilistic import interaction_type
from torchrl.data import Unbounded
from torchrl.envs.transforms import TensorDictPrimer
from torchrl.modules import (
    ProbabilisticActor,
)

from torchrl_marl.errors import SpecError
from torchrl_marl.modules.memory.states import state_size
from torchrl_marl.modules.networks import channels_of
from torchrl_marl.specs import GroupSpec
from torchrl_marl.specs.groups import is_lazy

__all__ = [
    "ActsForGroup",
    "GroupActor",
    "check_memory",
    "make_primer",
]


class ActsForGroup(TensorDictModuleBase):
    """The part that actors share: they act on dense (padded) data, or on lazily stacked ones.

    Where the group is stacked lazily, it is padded on the way in, and every agent gets its own
    actions on the way out.
    """

    group: GroupSpec
    remembered: dict[str, int]
    """Numbers that an agent remembers, by group."""
    hears: bool
    """Whether the environment says who hears whom."""

    def serve(self, group: GroupSpec) -> None:
        """Sets for whom it acts, once its networks are there."""
        size = state_size(self)
        self.group = group
        self.remembered = {own.name: size for own in group.sources if size}
        if self.remembered:  # TorchRL asks for one wherever there is a maker
            self.make_tensordict_primer = partial(make_primer, group, self.remembered)
        self.hears = any(channel.config.links == "env" for channel in channels_of(self))

    @dispatch(auto_batch_size=False)
    def forward(self, tensordict: TensorDictBase, *args: Any, **kwargs: Any) -> TensorDictBase:
        """Acts."""
        if self.remembered:
            check_memory(self.group, tensordict)
        if self.hears:
            check_links(self.group, tensordict)
        if not is_lazy(tensordict.get(self.group.name, None)):
            return self.act(tensordict, *args, **kwargs)
        acted = self.act(self.group.dense(tensordict), *args, **kwargs)
        for leaf in ("action", "action_log_prob", "channel"):
            rows = acted.get((self.group.name, leaf), None)
            if rows is not None:
                self.group.write(tensordict, leaf, rows)
        return tensordict

    def act(self, tensordict: TensorDictBase, *args: Any, **kwargs: Any) -> TensorDictBase:
        """Acts on dense data."""
        return super().forward(tensordict, *args, **kwargs)


class GroupActor(ActsForGroup, ProbabilisticActor):
    """An actor of a group; it takes dense (padded) data, and lazily stacked ones.

    Args:
        group (GroupSpec): whose.
        *args, **kwargs: of :class:`torchrl.modules.ProbabilisticActor`.
    """

    def __init__(self, group: GroupSpec, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.serve(group)
        self.draws = sum(channel.draws for channel in channels_of(self))
        """Numbers that are drawn for an agent in the channel of a step."""

    def act(self, tensordict: TensorDictBase, *args: Any, **kwargs: Any) -> TensorDictBase:
        """Acts on dense data; what the channel needs is drawn anew."""
        if not self.draws:
            return super().act(tensordict, *args, **kwargs)
        from torchrl_marl.modules.communication.channel import drawing

        rows = tensordict.get(self.group.observation_keys[0])
        agents = (*tensordict.batch_size, self.group.n_agents)
        blank = torch.zeros(*agents, self.draws, device=rows.device)
        tensordict.set(self.group.key("channel"), blank)
        how = interaction_type() or self.default_interaction_type
        with drawing("draw" if how is InteractionType.RANDOM else "mode"):
            return super().act(tensordict, *args, **kwargs)

    def get_dist(self, tensordict: TensorDictBase, *args: Any, **kwargs: Any) -> Any:
        """Returns the distribution over padded actions."""
        return super().get_dist(self.group.dense(tensordict), *args, **kwargs)


def check_links(group: GroupSpec, tensordict: TensorDictBase) -> None:
    """Refuses steps or batches that do not say who hears whom.

    Raises:
        SpecError: naming the entry.
    """
    links, n = tensordict.get(group.key("links"), None), group.n_agents
    if links is None or links.shape[-2:] != (n, n) or links.dtype is not torch.bool:
        found = "nothing" if links is None else f"{links.dtype} {tuple(links.shape)}"
        raise SpecError(
            f"group {group.name!r}: communication.links is 'env', but the environment gives "
            f"{found} as {group.key('links')!r}, expected torch.bool [*B, {n}, {n}]; use "
            "communication.links=all."
        )


def make_primer(group: GroupSpec, sizes: Mapping[str, int]) -> TensorDictPrimer:
    """Builds TorchRL's transform that carries what agents remember.

    TorchRL's ``get_primers_from_module`` finds it in an actor; each agent's first step is told by
    :class:`~torchrl_marl.envs.AgentInitTracker`. Captured rollouts take
    :func:`~torchrl_marl.envs.with_memory` instead, which does both.

    Args:
        group (GroupSpec): whose; also several groups as one.
        sizes (mapping): group -> the numbers S that each of its agents remembers.
    """
    primers: dict[NestedKey, Any] = {
        (own.name, "hidden"): Unbounded((own.n_agents, sizes[own.name])) for own in group.sources
    }
    return TensorDictPrimer(primers, default_value=0.0, reset_key="_reset", expand_specs=True)


def check_memory(group: GroupSpec, tensordict: TensorDictBase) -> None:
    """Refuses a step without what agents remember.

    Raises:
        SpecError: naming the entry that is missing.
    """
    for leaf in ("hidden", "is_init"):
        if tensordict.get(group.key(leaf), None) is None:
            raise SpecError(
                f"group {group.name!r}: its actor remembers, but there is no {group.key(leaf)!r}; "
                "let the environment carry it: torchrl_marl.envs.with_memory(env, policy)."
            )
