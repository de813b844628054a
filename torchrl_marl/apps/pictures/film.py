"""What is seen of episodes while they are played: pictures, returns, who lives, acts and talks.

Shapes: E envs, N agents of a group.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn
from torchrl.envs import EnvBase

from torchrl_marl.envs.scene import Picture, Stage, check_scene, scene, stage
from torchrl_marl.errors import ConfigError
from torchrl_marl.modules.communication.channel import listening_by_group
from torchrl_marl.specs import TeamSpec

__all__ = ["ACTS", "DEAD", "UNBORN", "WAITS", "Agent", "Film", "Frame"]

ACTS, WAITS, DEAD, UNBORN = "acts", "waits", "is gone", "is not yet there"
"""What an agent does in a moment: it is its turn, it is not; its life has ended, or not begun."""
_LEAST_HEARD = 0.01

Policy = Callable[[TensorDictBase], TensorDictBase]


@dataclass(frozen=True)
class Agent:
    """An agent in a moment of an episode."""

    name: str
    life: str = ACTS
    """:data:`ACTS`, :data:`WAITS`, :data:`DEAD` or :data:`UNBORN`."""
    heard: float | None = None
    """How much others listened to it, mean of their weights, 0 to 1; None where nobody talks."""


@dataclass(frozen=True)
class Frame:
    """A moment of an episode."""

    step: int
    """0 is the start."""
    picture: Picture
    """Shapes (in the same order in every frame), pixels or a text."""
    returns: Mapping[str, float]
    """Group -> its return up to then, as the evaluation adds it up."""
    agents: tuple[Agent, ...] = ()
    """All agents of the team."""
    words: tuple[tuple[str, str, float], ...] = ()
    """Who hears whom, and how much, 0 to 1."""
    over: bool = False
    """Whether the episode has ended."""


class Film:
    """Frames of the first episodes that an evaluation plays.

    It looks on and draws no random number: what is played is the same without it.

    Args:
        env (EnvBase): an environment that can be drawn.
        team (TeamSpec): its groups.
        shown (int): how many episodes, from the first on.

    Attributes:
        name (str): of the environment.
        stage (Stage, optional): the part of the plane in which it plays.
        episodes (list): the frames of each episode.

    Raises:
        ConfigError: an environment that cannot be drawn, or no episode.
    """

    def __init__(self, env: EnvBase, team: TeamSpec, shown: int = 1) -> None:
        if shown < 1:
            raise ConfigError(f"episodes shown are {shown}, expected 1 or more.")
        check_scene(env)
        self.shown = min(shown, env.batch_size.numel())
        self.stage: Stage | None = stage(env)
        self.name = _name_of(env) if self.stage is None else self.stage.name
        self.episodes: list[list[Frame]] = []
        self._env, self._team = env, team

    def begin(self, carry: TensorDictBase) -> None:
        """Takes the start of each episode.

        Args:
            carry (TensorDictBase): what a reset gave, ``[E]``.
        """
        returns = dict.fromkeys(self._team.groups, 0.0)
        self.episodes = []
        for i in range(self.shown):
            agents = self._agents(carry, i, None, ())
            self.episodes.append([Frame(0, scene(self._env, i), returns, agents)])

    def update(self, act: Policy, step: TensorDictBase, sums: Mapping[str, Tensor]) -> None:
        """Takes a step of the episodes that have not ended; called before ended ones begin anew.

        Args:
            act (callable): the policy that acted.
            step (TensorDictBase): the step, with its ``"next"``, ``[E]``.
            sums (mapping): group -> return up to and with this step, ``[E]``.
        """
        running = [i for i, frames in enumerate(self.episodes) if not frames[-1].over]
        if not running:
            return
        heard = self._heard(act, step)
        following = step.get("next")
        done = following.get("done").reshape(-1)[: self.shown].tolist()
        for i in running:
            before = self.episodes[i][-1]
            words = _words(self._team, heard, i)
            loud = _loudness(self._team, heard, i)
            agents = before.agents
            if not done[i]:
                agents = self._agents(following, i, loud, before.agents)
            picture = scene(self._env, i, step[i])
            returns = {name: float(own[i]) for name, own in sums.items()}
            self.episodes[i].append(
                Frame(before.step + 1, picture, returns, agents, words, done[i])
            )

    def _heard(self, act: Policy, step: TensorDictBase) -> dict[str, Tensor]:
        """Returns who listened to whom in each group that talks, ``[shown, N, N]``."""
        if not isinstance(act, nn.Module):
            return {}
        with torch.no_grad():
            return listening_by_group(act, step[: self.shown])

    def _agents(
        self,
        given: TensorDictBase,
        i: int,
        loud: Mapping[str, float] | None,
        before: tuple[Agent, ...],
    ) -> tuple[Agent, ...]:
        """Returns all agents as they are before their next step."""
        found = []
        born = {agent.name for agent in before if agent.life != UNBORN}
        for group in self._team.groups.values():
            gone = [False] * group.n_agents
            if group.agent_done:
                gone = given.get(group.done_key)[i].reshape(-1).tolist()
            acts = [not own for own in gone]
            if group.mask_key is not None:
                acts = given.get(group.mask_key)[i].reshape(-1).tolist()
            for agent, dead, does in zip(group.agent_names, gone, acts):
                waits = WAITS if group.in_turns or agent in born else UNBORN
                life = DEAD if dead else ACTS if does else waits
                found.append(Agent(agent, life, None if loud is None else loud.get(agent)))
        return tuple(found)


def _words(
    team: TeamSpec, heard: Mapping[str, Tensor], i: int
) -> tuple[tuple[str, str, float], ...]:
    found = []
    for name, weights in heard.items():
        names = team.groups[name].agent_names
        for listener, row in zip(names, weights[i].tolist()):
            found += [(listener, own, w) for own, w in zip(names, row) if w > _LEAST_HEARD]
    return tuple(found)


def _loudness(team: TeamSpec, heard: Mapping[str, Tensor], i: int) -> dict[str, float]:
    found: dict[str, float] = {}
    for name, weights in heard.items():
        others = max(weights.shape[-1] - 1, 1)
        found |= zip(team.groups[name].agent_names, (weights[i].sum(0) / others).tolist())
    return found


def _name_of(env: EnvBase) -> str:
    while hasattr(env, "base_env"):
        env = env.base_env
    for key in ("scenario_name", "environment_name"):
        if isinstance(found := getattr(env, key, None), str):
            return found.rpartition("/")[2]
    return type(env).__name__
