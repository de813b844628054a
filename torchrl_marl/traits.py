"""What a world is like, as a few steps at random show: its actions, rewards, turns and deaths.

Shapes: E envs, T steps, N agents of a group, G groups.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from tensordict import TensorDictBase
from torch import Tensor

from torchrl_marl.functional import masked_mean
from torchrl_marl.learners.rivals import rivals_among
from torchrl_marl.learners.turns import acts_in_turns
from torchrl_marl.specs import GroupSpec, TeamSpec

__all__ = ["Traits", "traits_of"]


@dataclass(frozen=True)
class Traits:
    """What decides which algorithms fit a world, as seen in a batch at random.

    Args:
        agents (dict): group -> number of its agents.
        actions (dict): group -> its actions in words.
        shared (bool or None): all agents of a group earn the same; None where no agent was seen
            to earn anything.
        rivals (tuple of str): two agents or groups of which one loses what the other earns; empty
            where there are none.
        in_turns (bool): agents wait while others act.
        deaths (bool): agents end while their group goes on.
        state (str): the state that a critic may see, in words; empty where there is none.
    """

    agents: dict[str, int]
    actions: dict[str, str]
    shared: bool | None
    rivals: tuple[str, ...]
    in_turns: bool
    deaths: bool
    state: str

    def rows(self) -> list[tuple[str, str]]:
        """Returns names and texts for a table."""
        several = any(n > 1 for n in self.agents.values())
        rewards = "each agent's own"
        if self.shared:
            rewards = "one for all agents of a group" if several else "each group's own"
        if self.shared is None:
            rewards = "none seen in steps at random"
        if self.rivals:
            rewards += f"; {self.rivals[0]} and {self.rivals[1]} compete"
        differ = len(set(self.actions.values())) > 1
        actions = self.actions.items() if differ else list(self.actions.items())[:1]
        return [
            ("agents", ", ".join(f"{name}: {n}" for name, n in self.agents.items())),
            ("actions", "; ".join(f"{name}: {x}" if differ else x for name, x in actions)),
            ("rewards", rewards),
            ("turns", "in turns, or at their own pace" if self.in_turns else "all act at once"),
            ("deaths", "while the team lives on" if self.deaths else "none seen"),
            ("state", self.state or "none; critics see what all agents see"),
        ]


def traits_of(team: TeamSpec, batch: TensorDictBase) -> Traits:
    """Reads them from the specs and from a batch of steps at random.

    Args:
        team (TeamSpec): the groups.
        batch (TensorDictBase): ``[E, T]``, groups dense.

    Examples:
        >>> from torchrl_marl.collectors import RolloutCollector
        >>> from torchrl_marl.envs.toy import MatrixGame
        >>> env = MatrixGame(4, seed=0)
        >>> batch = RolloutCollector(env, frames_per_batch=40).next()
        >>> traits_of(TeamSpec.from_env(env), batch).shared
        True
    """
    groups = list(team.groups.values())
    return Traits(
        agents={group.name: group.n_agents for group in groups},
        actions={group.name: _actions(group) for group in groups},
        shared=_shared(groups, batch),
        rivals=rivals_among(groups, batch),
        in_turns=any(group.in_turns or bool(acts_in_turns(group, batch)) for group in groups),
        deaths=any(_dies(group, batch) for group in groups),
        state=_state(groups),
    )


def _actions(group: GroupSpec) -> str:
    sizes = "/".join(str(n) for n in sorted(set(group.action_dims)))
    if not group.discrete:
        return f"continuous, {sizes} number{'s' * (sizes != '1')}"
    masked = "" if group.action_mask_key is None else ", of which a mask says the legal ones"
    return f"discrete, {sizes} to choose from{masked}"


def _shared(groups: Iterable[GroupSpec], batch: TensorDictBase) -> bool | None:
    """Whether the living of each group earn the same; None where nobody earns anything."""
    shared, earned = True, False
    for group in groups:
        reward, alive = _rewards(group, batch)
        if reward is None:  # the team has one
            root = batch.get(("next", "reward"), None)
            earned |= root is not None and bool((root != 0).any())
            continue
        mean = masked_mean(reward, alive, dim=-1).unsqueeze(-1)
        apart = torch.where(alive, reward - mean, 0.0).abs().amax()
        earned |= bool((torch.where(alive, reward, 0.0) != 0).any())
        shared &= bool(apart <= 1e-4 * reward.abs().amax().clamp_min(1e-6))
    return shared if earned else None


def _rewards(group: GroupSpec, batch: TensorDictBase) -> tuple[Tensor | None, Tensor]:
    """Returns what agents earn, ``[E, T, N]``, and who lives."""
    reward = group.data(batch.get("next")).get("reward", None)
    alive = group.living(batch)
    if reward is not None and alive is None:
        alive = torch.ones_like(reward[..., 0], dtype=torch.bool)
    return (None if reward is None else reward.squeeze(-1)), alive  # type: ignore[return-value]


def _dies(group: GroupSpec, batch: TensorDictBase) -> bool:
    """Whether an agent ends in a step in which the episode does not."""
    if not group.agent_done:
        return False
    following = batch.get("next")
    terminated = group.data(following).get("terminated", None)
    if terminated is None:
        return False
    goes_on = ~following.get("done")
    return bool((terminated.squeeze(-1) & goes_on).any())


def _state(groups: Iterable[GroupSpec]) -> str:
    for group in groups:
        if group.state_spec is not None:
            shape = tuple(group.state_spec.shape)
            return f"{' x '.join(map(str, shape))} numbers (learner.central_input=state)"
    return ""
