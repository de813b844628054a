"""Actors: policies that map observations to actions.

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
    """Base of actors that act on dense (padded) or lazily stacked data.

    A lazily stacked group is padded before the network, and each agent gets its unpadded action
    back.
    """

    group: GroupSpec
    remembered: dict[str, int]
    """Size of the hidden state of an agent, by group."""
    hears: bool
    """True if the environment gives the communication graph."""

    def serve(self, group: GroupSpec) -> None:
        """Sets the group that the actor serves; called once its networks exist."""
        size = state_size(self)
        self.group = group
        self.remembered = {own.name: size for own in group.sources if size}
        if self.remembered:  # TorchRL asks for a primer wherever this method exists
            self.make_tensordict_primer = partial(make_primer, group, self.remembered)
        self.hears = any(channel.config.links == "env" for channel in channels_of(self))

    @dispatch(auto_batch_size=False)
    def forward(self, tensordict: TensorDictBase, *args: Any, **kwargs: Any) -> TensorDictBase:
        """Acts for the group."""
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
        if self.remembered:
            after = ("next", self.group.name, "hidden")
            tensordict.set(after, acted.get(after))
        return tensordict

    def act(self, tensordict: TensorDictBase, *args: Any, **kwargs: Any) -> TensorDictBase:
        """Acts on dense data."""
        return super().forward(tensordict, *args, **kwargs)


class GroupActor(ActsForGroup, ProbabilisticActor):
    """Actor of a group, for dense (padded) and lazily stacked data.

    Args:
        group (GroupSpec): group of the agents.
        *args, **kwargs: arguments of :class:`torchrl.modules.ProbabilisticActor`.
    """

    def __init__(self, group: GroupSpec, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.serve(group)
        self.draws = sum(channel.draws for channel in channels_of(self))
        """Number of samples of the channel per agent and step."""

    def act(self, tensordict: TensorDictBase, *args: Any, **kwargs: Any) -> TensorDictBase:
        """Acts on dense data, with fresh samples for the channel."""
        if not self.draws:
            return super().act(tensordict, *args, **kwargs)
        from torchrl_marl.modules.communication.channel import drawing

        rows = tensordict.get(self.group.observation_keys[0])
        agents = (*tensordict.batch_size, self.group.n_agents)
        empty_samples = torch.zeros(*agents, self.draws, device=rows.device)
        tensordict.set(self.group.key("channel"), empty_samples)
        sampling = interaction_type() or self.default_interaction_type
        with drawing("draw" if sampling is InteractionType.RANDOM else "mode"):
            return super().act(tensordict, *args, **kwargs)

    def get_dist(self, tensordict: TensorDictBase, *args: Any, **kwargs: Any) -> Any:
        """Returns the distribution over padded actions."""
        return super().get_dist(self.group.dense(tensordict), *args, **kwargs)


def check_links(group: GroupSpec, tensordict: TensorDictBase) -> None:
    """Refuses batches without the communication graph.

    Raises:
        SpecError: an entry is missing; the message names it.
    """
    links, n = tensordict.get(group.key("links"), None), group.n_agents
    if links is None or links.shape[-2:] != (n, n) or links.dtype is not torch.bool:
        found = "no entry" if links is None else f"{links.dtype} {tuple(links.shape)}"
        raise SpecError(
            f"group {group.name!r}: communication.links is 'env', but the environment gives "
            f"{found} as {group.key('links')!r}, expected torch.bool [*B, {n}, {n}]; use "
            "communication.links=all."
        )


def make_primer(group: GroupSpec, sizes: Mapping[str, int]) -> TensorDictPrimer:
    """Builds TorchRL's primer for the hidden states of a group.

    TorchRL's ``get_primers_from_module`` finds it in an actor, and
    :class:`~torchrl_marl.envs.AgentInitTracker` marks each agent's first step. Captured rollouts
    use :func:`~torchrl_marl.envs.with_memory`, which replaces the primer and the tracker.

    Args:
        group (GroupSpec): group of the agents, or several groups joined into one.
        sizes (mapping): group -> size S of the hidden state of each of its agents.
    """
    primers: dict[NestedKey, Any] = {
        (own.name, "hidden"): Unbounded((own.n_agents, sizes[own.name])) for own in group.sources
    }
    return TensorDictPrimer(primers, default_value=0.0, reset_key="_reset", expand_specs=True)


def check_memory(group: GroupSpec, tensordict: TensorDictBase) -> None:
    """Refuses data without the hidden state of an actor with memory.

    Raises:
        SpecError: an entry is missing; the message names it.
    """
    for leaf in ("hidden", "is_init"):
        if tensordict.get(group.key(leaf), None) is None:
            raise SpecError(
                f"group {group.name!r}: its actor has a memory, but {group.key(leaf)!r} is "
                "missing; add it to the environment: torchrl_marl.envs.with_memory(env, policy)."
            )
