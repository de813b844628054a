"""VMAS's simulator: building and stepping it with a random state of one's own.

Stock VMAS keeps one random state for all environments of a process and enters it in every
call; these functions go round it and draw from whatever state is active.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from torchrl_marl.errors import MissingExtraError

if TYPE_CHECKING:
    from vmas.simulator.environment import Environment
    from vmas.simulator.scenario import BaseScenario

__all__ = ["advance", "build_simulator", "import_vmas", "reset_all", "reset_each", "warm_up"]


def import_vmas() -> None:
    """Imports VMAS without the notice that its gym package prints.

    Raises:
        MissingExtraError: VMAS is not installed.
    """
    if importlib.util.find_spec("vmas") is None:
        raise MissingExtraError("VMAS", "vmas")
    with contextlib.redirect_stderr(io.StringIO()):
        import vmas  # noqa: F401


def build_simulator(
    scenario: str | BaseScenario,
    num_envs: int,
    device: torch.device,
    arguments: Mapping[str, Any],
    info: bool,
) -> Environment:
    """A VMAS environment drawn from the active random state, warmed up and reset."""
    import vmas

    with _active_random_state():
        env = vmas.make_env(scenario, num_envs, device, **arguments)
    warm_up(env, info)
    env._reset(return_observations=False)
    return env


def warm_up(env: Environment, info: bool) -> None:
    """Makes one step without actions: some of a scenario's tensors appear only then."""
    widths = [env.get_agent_action_size(agent) for agent in env.agents]
    advance(env, [torch.zeros(env.num_envs, n, device=env.device) for n in widths])
    env._get_from_scenario(True, True, info, True)


def advance(env: Environment, actions: Sequence[Tensor]) -> None:
    """Steps the simulation: what ``Environment.step`` does before it reads the scenario.

    Args:
        env (Environment): of E envs.
        actions (sequence of Tensor): ``[E, A]`` for each agent.
    """
    for agent, action in zip(env.agents, actions):
        env._set_action(action, agent)
    for agent in env.world.agents:
        env.scenario.env_process_action(agent)
    env.scenario.pre_step()
    env.world.step()
    env.scenario.post_step()
    env.steps += 1


def reset_all(env: Environment) -> None:
    """Starts new episodes in all envs at once."""
    env._reset(return_observations=False)


def reset_each(env: Environment) -> None:
    """Starts new episodes env by env: some scenarios (passage) draw one layout for all at once."""
    for i in range(env.num_envs):
        env._reset_at(i, return_observations=False)


@contextlib.contextmanager
def _active_random_state() -> Iterator[None]:
    """VMAS's class-wide random state is the active one, and afterwards what it was."""
    from vmas.simulator.environment import Environment

    shared = Environment.vmas_random_state
    saved = list(shared)
    shared[:] = [torch.get_rng_state(), np.random.get_state(), random.getstate()]
    try:
        yield
        torch.set_rng_state(shared[0])
        np.random.set_state(shared[1])
        random.setstate(shared[2])
    finally:
        shared[:] = saved
