"""Tests whether exported agents act as their team's policy does, over whole episodes.

Shapes: N agents of a group.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import Tensor, nn
from torchrl.envs import EnvBase
from torchrl.envs.utils import ExplorationType, set_exploration_type

from torchrl_marl.apps.export.agent import AgentActor, agents_of
from torchrl_marl.apps.export.interface import Program
from torchrl_marl.apps.export.player import Player
from torchrl_marl.errors import UserError
from torchrl_marl.modules.communication.rounds import Chain

__all__ = ["Comparison", "InMemory", "check_players"]

_MAX_STEPS = 2_000
_ILLEGAL = 1e30  # logits of illegal actions are below its negative


@dataclass
class Comparison:
    """Differences between exported agents and the policy of their team.

    Args:
        steps (int): number of environment steps compared.
        actions (int): number of actions compared, over all living agents.
        differ (int): number of actions that differ from the team's, in the action itself or in a
            parameter of its distribution.
        largest (float): largest difference in a distribution parameter or an action value.

    Examples:
        >>> str(Comparison(200, 800, 0, 1e-7))
        'no action differs in 200 steps (800 actions), largest difference 1e-07'
    """

    steps: int = 0
    actions: int = 0
    differ: int = 0
    largest: float = 0.0

    def __str__(self) -> str:
        words = {0: "no action differs", 1: "1 action differs"}
        differ = words.get(self.differ, f"{self.differ:,} actions differ")
        return (
            f"{differ} in {self.steps:,} steps ({self.actions:,} actions), "
            f"largest difference {self.largest:.1g}"
        )

    def add(self, action: Any, expected: Any, pairs: list[tuple[Any, Any]], close: float) -> None:
        """Adds one comparison: an agent's action and the parameters of its distribution."""
        whole = not np.issubdtype(np.asarray(expected).dtype, np.floating)
        equal = np.array_equal if whole else partial(np.allclose, rtol=close, atol=close)
        same = equal(action, expected) and all(_is_close(*pair, close) for pair in pairs)
        self.actions += 1
        self.differ += not same
        pairs = pairs if whole else [*pairs, (action, expected)]
        for one, other in pairs:
            self.largest = max(self.largest, float(np.abs(one - other).max(initial=0.0)))


def _is_close(values: np.ndarray, expected: np.ndarray, close: float) -> bool:
    """Returns whether parameters agree, relative to the largest that is not an illegal logit."""
    legal = np.abs(expected)[np.abs(expected) < _ILLEGAL]
    return np.allclose(values, expected, rtol=close, atol=close * legal.max(initial=1.0))


class InMemory(Player):
    """A player that runs programs in memory instead of files.

    Args:
        agent (AgentActor): the agent.
        seed (int, optional): random seed of sampled actions.
    """

    def __init__(self, agent: AgentActor, seed: int | None = None) -> None:
        programs = {program.name: _ProgramInMemory(program) for program in agent.programs()}
        self._start(agent.describe(), programs, seed)


class _ProgramInMemory:
    """A program in memory, called as a player calls its programs."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.inputs = [asdict(field) for field in program.inputs]

    def __call__(self, inputs: list[np.ndarray]) -> dict[str, np.ndarray]:
        with torch.no_grad():
            found = self.program.module(*(torch.as_tensor(value) for value in inputs))
        return {field.name: x.numpy() for field, x in zip(self.program.outputs, found)}


@torch.no_grad()
def check_players(
    env: EnvBase,
    policy: nn.Module,
    players: Mapping[str, Player],
    *,
    steps: int = 200,
    close: float = 1e-4,
) -> Comparison:
    """Compares the actions of exported agents with those of their team, step by step.

    The team's policy plays. In the first of the parallel environments, each living exported agent
    also computes an action from its observation and messages. Agents that are not exported, but
    exchange messages with exported agents, are run from memory. The comparison includes agents that
    die or are born during an episode.

    Args:
        env (EnvBase): environment with dense groups that keeps the policy's hidden states.
        policy (nn.Module): policy of the team.
        players (mapping): name -> exported agent.

    Keyword Args:
        steps (int): minimum number of steps; at least one whole episode and the first step of the
            next are played.
        close (float): relative and absolute tolerance for continuous actions and parameters.

    Raises:
        UserError: actions, or parameters of their distributions, differ.
    """
    found, first = Comparison(), (0,) * len(env.batch_size)
    teams = _group_by_actor(policy, players)
    carry = env.reset()
    ended = restarted = False
    with set_exploration_type(ExplorationType.DETERMINISTIC), contextlib.ExitStack() as stack:
        for team in teams:
            stack.enter_context(team.recording())
        while found.steps < steps or not restarted:
            acted = policy(carry.copy())
            for team in teams:
                team.compare(found, players, acted[first], first, close)
            step, carry = env.step_and_maybe_reset(acted)
            found.steps += 1
            restarted = ended
            ended |= bool(step["next", "done"][first].any())
            if found.steps >= max(steps, _MAX_STEPS):
                break
    if found.differ:
        raise UserError(f"exported agents act differently from their team: {found}.")
    return found


def _group_by_actor(policy: nn.Module, players: Mapping[str, Player]) -> list[_CheckedTeam]:
    """Returns the agents to compare, by actor.

    These are the exported agents. If the agents of an actor communicate, its other agents are
    included.
    """
    by_actor: dict[int, dict[str, AgentActor]] = {}
    for name, agent in agents_of(policy).items():
        by_actor.setdefault(id(agent.actor), {})[name] = agent
    teams = []
    for agents in by_actor.values():
        if not players.keys() & agents.keys():
            continue
        communicates = next(iter(agents.values())).channel is not None
        team_agents = {
            name: agent for name, agent in agents.items() if communicates or name in players
        }
        team_players = {
            n: players[n] if n in players else InMemory(agent) for n, agent in team_agents.items()
        }
        teams.append(_CheckedTeam(team_agents, team_players))
    return teams


class _CheckedTeam:
    """Agents of one actor, each with a player."""

    def __init__(self, agents: Mapping[str, AgentActor], players: Mapping[str, Player]) -> None:
        self.agents, self.players = agents, players
        one = next(iter(agents.values()))
        self.actor, self.channel = one.actor, one.channel
        self.output: TensorDictBase | None = None
        self.links: Tensor | None = None
        for player in players.values():
            player.reset()

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Context in which the actor's last output and its communication links are recorded."""
        handles = [self.actor.register_forward_hook(self._record_output)]
        if self.channel is not None:
            handles.append(self.channel.links.register_forward_hook(self._record_links))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _record_output(self, module: nn.Module, _: Any, output: TensorDictBase) -> None:
        self.output = output

    def _record_links(self, module: nn.Module, _: Any, output: Tensor) -> None:
        self.links = output

    def compare(
        self,
        found: Comparison,
        players: Mapping[str, Player],
        acted: TensorDictBase,
        first: tuple[int, ...],
        close: float,
    ) -> None:
        """Compares the players' actions with the team's, in one step of one environment."""
        rows = {
            name: acted.get(agent.group.name)[agent.number] for name, agent in self.agents.items()
        }
        rows = {name: row for name, row in rows.items() if _is_alive(self.agents[name], row)}
        for name, row in rows.items():
            if row.get("is_init", None) is not None and bool(row["is_init"]):
                self.players[name].reset()
        actions = self._act_as_team(rows, None if self.links is None else self.links[first])
        assert self.output is not None
        for name in rows.keys() & players.keys():
            agent, player = self.agents[name], self.players[name]
            expected = _without_padding(rows[name]["action"], tuple(agent.action_spec.shape))
            outputs = self.output.get(agent.actor.group.name)[first][agent.place]
            pairs = [
                (x, _without_padding(outputs[word], x.shape))
                for word, x in player.parameters.items()
            ]
            found.add(actions[name], expected, pairs, close)

    def _act_as_team(
        self, rows: Mapping[str, TensorDictBase], links: Tensor | None
    ) -> dict[str, Any]:
        seen = {name: _read_observation(self.agents[name], row) for name, row in rows.items()}
        legal = {name: _legal_actions(self.agents[name], row) for name, row in rows.items()}
        if self.channel is None:
            return {n: self.players[n].act(seen[n], action_mask=legal[n]) for n in rows}
        players = {name: self.players[name] for name in rows}
        messages = {name: player.speak(seen[name]) for name, player in players.items()}
        if isinstance(self.channel.rounds[0], Chain):
            _relay_messages(players)
            return {name: player.act(action_mask=legal[name]) for name, player in players.items()}
        assert links is not None
        linked = {n: [m for m in rows if links[self._index_of(n), self._index_of(m)]] for n in rows}

        def inbox(name: str) -> dict[str, Any]:
            return {other: messages[other] for other in linked[name]}

        if self.channel.delay is not None:
            actions = {n: player.act(action_mask=legal[n]) for n, player in players.items()}
            for name, player in players.items():
                player.hear(inbox(name))
            return actions
        for _ in self.channel.rounds[1:]:
            messages = {name: player.hear(inbox(name)) for name, player in players.items()}
        return {n: p.act(inbox=inbox(n), action_mask=legal[n]) for n, p in players.items()}

    def _index_of(self, name: str) -> int:
        return self.agents[name].place


def _relay_messages(players: Mapping[str, Player]) -> None:
    """Passes messages along the line of agents: from first to last, then from last to first."""
    for back in (False, True):
        handed = None
        for player in list(players.values())[:: -1 if back else 1]:
            handed = player.relay(handed, back=back)


def _is_alive(agent: AgentActor, row: TensorDictBase) -> bool:
    return agent.group.mask_key is None or bool(row["mask"])


def _read_observation(agent: AgentActor, row: TensorDictBase) -> dict[str, np.ndarray]:
    fields = agent.observation()
    return {
        field.name: _without_padding(row[tuple(field.name.split("."))], field.shape)
        for field in fields
    }


def _legal_actions(agent: AgentActor, row: TensorDictBase) -> np.ndarray | None:
    """Returns the agent's action mask.

    If no action is legal, the mask is all True, as in the team's policy.
    """
    if (legal := row.get("action_mask", None)) is None:
        return None
    legal = _without_padding(legal, (agent.n_options,))
    return legal | ~legal.any()


def _without_padding(value: Tensor, shape: tuple[int, ...]) -> np.ndarray:
    """Returns a padded leaf without its padding."""
    return value[tuple(slice(0, size) for size in shape)].cpu().numpy()
