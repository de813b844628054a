"""What every learner that trains networks begins with: its groups side by side.

Shapes: E envs, T steps, N agents of a group.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import nn

from torchrl_marl.capture import check_execution
from torchrl_marl.learners.block import Block
from torchrl_marl.learners.networks import (
    ObservationNorms,
    check_hearing,
    must_stay_apart,
    seen_by_critics,
)
from torchrl_marl.modules.communication_config import gives_links
from torchrl_marl.modules.config import carries
from torchrl_marl.modules.joined_actor import GroupActors
from torchrl_marl.population import of_members
from torchrl_marl.specs import GroupSpec, TeamSpec

__all__ = ["BlockLearner"]


class BlockLearner(nn.Module):
    """The groups of a learner, joined where their actions allow, with nothing trained yet.

    Args:
        groups (mapping of name to GroupSpec): the groups that it trains.
        config (TrainedConfig): how.
        team (TeamSpec, optional): all groups of the environment, for what sees across groups.
        device (torch.device, optional): of the networks.
        execution ("eager", "compile" or "cudagraph"): how its updates run.
        n_members (int): members of a population, each of which learns by itself.

    Attributes:
        block (Block): the joined groups, and batches in their layout.
        observation_norms (ObservationNorms): the running statistics of observations.
        actors (GroupActors): by group; empty until a subclass adds them.
        losses (dict): name of one or several groups, ``"a+b"`` -> the loss; likewise.

    Raises:
        ConfigError: an execution that the device does not have.
    """

    acted: ClassVar[tuple[str, ...]] = ("action",)
    """What the losses read of the agents' acting."""
    unshared = False
    """Whether every agent has gone on with networks of its own."""

    def __init__(
        self,
        groups: Mapping[str, GroupSpec],
        config: Any,
        *,
        team: TeamSpec | None = None,
        device: torch.device | str | None = None,
        execution: str = "eager",
        n_members: int = 1,
    ) -> None:
        super().__init__()
        if execution != "trace":  # for tests: a graph, run operation by operation
            check_execution(execution, device, type(self).__name__)
        self.execution, self.n_members = execution, n_members
        self.groups, self.config = dict(groups), config
        seen = seen_by_critics((self.groups if team is None else team.groups).values(), config)
        if seen is not None and n_members > 1:
            seen = of_members(seen, n_members, same_actions=False)
        apart = must_stay_apart(config)
        self.block = Block(
            self.groups,
            apart=apart,
            seen=seen,
            acted=self.acted,
            remembered=self.remembered,
            n_members=n_members,
        )
        check_hearing(self.block.joined, config, team)
        self.observation_norms = ObservationNorms(config.normalize_observations, device)
        self.actors = GroupActors()
        self.losses: dict[str, Any] = {}

    @property
    def remembered(self) -> tuple[str, ...]:
        """What a batch has for networks with memory, and links that the environment gives."""
        config, found = self.config, []
        if getattr(config, "remembers", False):
            found = ["is_init", "hidden"] if carries(config.actor) else ["is_init"]
        networks = (config.actor, getattr(config, "critic", config.actor))
        return (*found, *["links"] * any(gives_links(own) for own in networks))

    def unshare(self) -> None:
        """Gives every agent a network of its own from now on, with the outputs that it had."""
        raise NotImplementedError

    def cut(self) -> None:
        """Says that the next batch does not follow on the last: episodes begin anew."""
        self.block.births.forget()

    def _births_state(self) -> dict[str, Any]:
        """Returns who is born in the running episodes, for a checkpoint."""
        born = self.block.births.state_dict()
        return {"born": born} if born else {}

    def _load_births(self, state: Mapping[str, Any]) -> None:
        """Takes it back; of an older version's checkpoint nobody is known."""
        self.block.births.load_state_dict(state.get("born", {}))

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Goes on from a saved state, un-shared if that was so."""
        if state_dict.get("_extra_state", {}).get("unshared"):
            self.unshare()
        return super().load_state_dict(state_dict, *args, **kwargs)
