"""Records episodes while they are played: pictures, returns, agents and messages.

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
"""States of an agent: it acts, it waits for its turn, it has died, or it is not born yet."""
_MIN_ATTENTION = 0.01

Policy = Callable[[TensorDictBase], TensorDictBase]


@dataclass(frozen=True)
class Agent:
    """State of an agent in a frame."""

    name: str
    life: str = ACTS
    """:data:`ACTS`, :data:`WAITS`, :data:`DEAD` or :data:`UNBORN`."""
    heard: float | None = None
    """Mean attention of other agents to its messages, 0 to 1; None without communication."""


@dataclass(frozen=True)
class Frame:
    """One frame of an episode."""

    step: int
    """Number of steps since the start of the episode."""
    picture: Picture
    """Either shapes, in the same order in every frame, or pixels, or a text."""
    returns: Mapping[str, float]
    """Group -> return so far, computed as in an evaluation."""
    agents: tuple[Agent, ...] = ()
    """States of all agents of the team."""
    words: tuple[tuple[str, str, float], ...] = ()
    """Messages as (listener, speaker, attention weight from 0 to 1)."""
    over: bool = False
    """True if the episode has ended."""


class Film:
    """Recorder of the first episodes of an evaluation.

    The recorder uses no random numbers, so episodes are the same with and without it.

    Args:
        env (EnvBase): environment that can be drawn.
        team (TeamSpec): groups of agents.
        shown (int): number of episodes to record.

    Attributes:
        name (str): name of the environment.
        stage (Stage, optional): visible part of the plane.
        episodes (list): frames of each episode.

    Raises:
        ConfigError: an environment that cannot be drawn, or no episode.
    """

    def __init__(self, env: EnvBase, team: TeamSpec, shown: int = 1) -> None:
        if shown < 1:
            raise ConfigError(f"the number of shown episodes is {shown}, expected 1 or more.")
        check_scene(env)
        self.shown = min(shown, env.batch_size.numel())
        self.stage: Stage | None = stage(env)
        self.name = _env_name(env) if self.stage is None else self.stage.name
        self.episodes: list[list[Frame]] = []
        self._env, self._team = env, team

    def begin(self, carry: TensorDictBase) -> None:
        """Records the start of each episode.

        Args:
            carry (TensorDictBase): result of the environment's reset, ``[E]``.
        """
        returns = dict.fromkeys(self._team.groups, 0.0)
        self.episodes = []
        for i in range(self.shown):
            agents = self._agent_states(carry, i, None, ())
            self.episodes.append([Frame(0, scene(self._env, i), returns, agents)])

    def update(self, act: Policy, step: TensorDictBase, sums: Mapping[str, Tensor]) -> None:
        """Records a step of the running episodes; call it before ended episodes are reset.

        Args:
            act (callable): policy that made the step.
            step (TensorDictBase): the step, including ``"next"``, ``[E]``.
            sums (mapping): group -> return including this step, ``[E]``.
        """
        running = [i for i, frames in enumerate(self.episodes) if not frames[-1].over]
        if not running:
            return
        heard = self._attention(act, step)
        following = step.get("next")
        done = following.get("done").reshape(-1)[: self.shown].tolist()
        for i in running:
            before = self.episodes[i][-1]
            words = _heard_messages(self._team, heard, i)
            attention = _mean_attention_received(self._team, heard, i)
            agents = before.agents
            if not done[i]:
                agents = self._agent_states(following, i, attention, before.agents)
            picture = scene(self._env, i, step[i])
            returns = {name: float(own[i]) for name, own in sums.items()}
            self.episodes[i].append(
                Frame(before.step + 1, picture, returns, agents, words, done[i])
            )

    def _attention(self, act: Policy, step: TensorDictBase) -> dict[str, Tensor]:
        """Returns the attention weights in each communicating group, ``[shown, N, N]``."""
        if not isinstance(act, nn.Module):
            return {}
        with torch.no_grad():
            return listening_by_group(act, step[: self.shown])

    def _agent_states(
        self,
        given: TensorDictBase,
        i: int,
        attention: Mapping[str, float] | None,
        before: tuple[Agent, ...],
    ) -> tuple[Agent, ...]:
        """Returns the states of all agents before the next step."""
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
                found.append(
                    Agent(agent, life, None if attention is None else attention.get(agent))
                )
        return tuple(found)


def _heard_messages(
    team: TeamSpec, heard: Mapping[str, Tensor], i: int
) -> tuple[tuple[str, str, float], ...]:
    found = []
    for name, weights in heard.items():
        names = team.groups[name].agent_names
        for listener, row in zip(names, weights[i].tolist()):
            found += [(listener, own, w) for own, w in zip(names, row) if w > _MIN_ATTENTION]
    return tuple(found)


def _mean_attention_received(
    team: TeamSpec, heard: Mapping[str, Tensor], i: int
) -> dict[str, float]:
    found: dict[str, float] = {}
    for name, weights in heard.items():
        others = max(weights.shape[-1] - 1, 1)
        found |= zip(team.groups[name].agent_names, (weights[i].sum(0) / others).tolist())
    return found


def _env_name(env: EnvBase) -> str:
    while hasattr(env, "base_env"):
        env = env.base_env
    for key in ("scenario_name", "environment_name"):
        if isinstance(found := getattr(env, key, None), str):
            return found.rpartition("/")[2]
    return type(env).__name__
