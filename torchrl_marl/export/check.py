"""Exported agents against the policy of their team, over whole episodes of its own world.

Shapes: N agents of a group.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import Tensor, nn
from torchrl.envs import EnvBase
from torchrl.envs.utils import ExplorationType, set_exploration_type

from torchrl_marl.errors import UserError
from torchrl_marl.export.agent import AgentActor
from torchrl_marl.export.interface import Field
from torchrl_marl.export.player import Player

__all__ = ["Comparison", "check_players"]

_LONGEST = 2_000


@dataclass
class Comparison:
    """How much exported agents differ from the policy of their team.

    Args:
        steps (int): env steps that were played.
        actions (int): of all agents that were alive.
        differ (int): actions that are not the team's.
        largest (float): difference of any parameter of a distribution, or value of an action.

    Examples:
        >>> str(Comparison(200, 800, 0, 1e-7))
        'no action differs in 200 steps (800 actions), largest difference 1e-07'
    """

    steps: int = 0
    actions: int = 0
    differ: int = 0
    largest: float = 0.0

    def __str__(self) -> str:
        differ = "no action differs" if not self.differ else f"{self.differ} actions differ"
        return (
            f"{differ} in {self.steps:,} steps ({self.actions:,} actions), "
            f"largest difference {self.largest:.1g}"
        )

    def add(self, action: Any, expected: Any, pairs: list[tuple[Any, Any]], close: float) -> None:
        """Compares an agent's action, and the parameters of its distribution."""
        whole = not np.issubdtype(np.asarray(expected).dtype, np.floating)
        equal = np.array_equal if whole else partial(np.allclose, rtol=close, atol=close)
        self.actions += 1
        self.differ += not equal(action, expected)
        pairs = pairs if whole else [*pairs, (action, expected)]
        for one, other in pairs:
            self.largest = max(self.largest, float(np.abs(one - other).max(initial=0.0)))


@torch.no_grad()
def check_players(
    env: EnvBase,
    policy: Callable[[TensorDictBase], TensorDictBase],
    agents: Mapping[str, AgentActor],
    players: Mapping[str, Player],
    *,
    steps: int = 200,
    close: float = 1e-4,
) -> Comparison:
    """Lets exported agents act beside their team, each by what it sees itself.

    The team plays, deaths and births included; in the first world of the environment every agent
    that lives is asked for its action, too.

    Args:
        env (EnvBase): with dense groups, and with what the policy remembers.
        policy (callable): of the team.
        agents, players (mapping): name -> agent, and name -> what was exported of it.

    Keyword Args:
        steps (int): at least so many, and at least one whole episode.
        close (float): relative and absolute difference below which continuous actions are equal.

    Raises:
        UserError: actions differ.
    """
    found, first = Comparison(), (0,) * len(env.batch_size)
    carry = env.reset()
    for player in players.values():
        player.reset()
    ended = False
    with set_exploration_type(ExplorationType.DETERMINISTIC), _watched(agents) as seen:
        while found.steps < steps or not ended:
            acted = policy(carry.copy())
            for name, player in players.items():
                _compare(found, agents[name], player, acted[first], seen, first, close)
            step, carry = env.step_and_maybe_reset(acted)
            found.steps += 1
            ended |= bool(step["next", "done"][first].any())
            if found.steps >= max(steps, _LONGEST):
                break
    if found.differ:
        raise UserError(f"exported agents are not what their team is: {found}.")
    return found


def _compare(
    found: Comparison,
    agent: AgentActor,
    player: Player,
    acted: TensorDictBase,
    seen: Mapping[int, TensorDictBase],
    first: tuple[int, ...],
    close: float,
) -> None:
    own = acted.get(agent.group.name)[agent.number]
    if agent.group.mask_key is not None and not own["mask"]:
        return
    if own.get("is_init", None) is not None and bool(own["is_init"]):
        player.reset()
    legal = own.get("action_mask", None)
    action = player.act(
        {field.name: _own(own[_path(field)], field.shape) for field in agent.observation()},
        action_mask=None
        if legal is None
        else _own(legal, (agent.group.action_dims[agent.number],)),
    )
    expected = _own(own["action"], tuple(agent.action_spec.shape))
    row = seen[id(agent.actor)].get(agent.actor.group.name)[first][agent.place]
    pairs = [(value, _own(row[name], value.shape)) for name, value in player.parameters.items()]
    found.add(action, expected, pairs, close)


def _path(field: Field) -> tuple[str, ...]:
    return tuple(field.name.split("."))


def _own(value: Tensor, shape: tuple[int, ...]) -> np.ndarray:
    """Returns what of a padded leaf is an agent's own."""
    return value[tuple(slice(0, size) for size in shape)].cpu().numpy()


@contextlib.contextmanager
def _watched(agents: Mapping[str, AgentActor]) -> Iterator[dict[int, TensorDictBase]]:
    """Keeps what each actor writes last, by its ``id``."""
    actors: dict[int, nn.Module] = {id(agent.actor): agent.actor for agent in agents.values()}
    seen: dict[int, TensorDictBase] = {}

    def keep(module: nn.Module, _: Any, output: TensorDictBase) -> None:
        seen[id(module)] = output

    handles = [actor.register_forward_hook(keep) for actor in actors.values()]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()
