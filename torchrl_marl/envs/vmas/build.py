"""Builds and steps VMAS's simulators with a random state of one's own.

Stock VMAS keeps one random state for all environments of a process and enters it in every
call; these functions go round it and draw from whatever state is active.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib.util
import io
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from torchrl_marl.capture.execution import check_execution
from torchrl_marl.envs.vmas.library import check_scenario
from torchrl_marl.errors import ConfigError, MissingExtraError
from torchrl_marl.random_state import RandomState, own_stream
from torchrl_marl.simulator.reset_bank import ResetBank, random_draws
from torchrl_marl.simulator.state import SimulatorState

if TYPE_CHECKING:
    from vmas.simulator.environment import Environment
    from vmas.simulator.scenario import BaseScenario

__all__ = [
    "VIEWER",
    "VmasWorlds",
    "advance",
    "build_simulator",
    "check_vmas",
    "import_vmas",
    "make_simulator",
    "reset_all",
    "reset_each",
    "warm_up",
]

VIEWER = ("viewer", "visible_display", "text_lines")


def import_vmas() -> None:
    """Imports VMAS without the notice that its gym package prints.

    Raises:
        MissingExtraError: VMAS is not installed.
    """
    if importlib.util.find_spec("vmas") is None:
        raise MissingExtraError("VMAS", "vmas")
    with contextlib.redirect_stderr(io.StringIO()):
        import vmas  # noqa: F401


def check_vmas(
    scenario: str | BaseScenario,
    scenario_kwargs: dict[str, Any],
    num_envs: int,
    state: Any,
    execution: Any,
    device: Any,
) -> None:
    """Refuses arguments of a VMAS environment that do not fit, before anything is built.

    Raises:
        ConfigError: naming the argument.
        MissingExtraError: VMAS is not installed.
    """
    check_scenario(scenario, scenario_kwargs)
    if num_envs < 1:
        raise ConfigError(f"VmasEnv: num_envs is {num_envs}, expected 1 or more.")
    if state is not None and state != "observations" and not callable(state):
        raise ConfigError(
            f"VmasEnv: state is {state!r}, expected 'observations', a callable or None."
        )
    check_execution(execution, device, "VmasEnv")
    if execution != "eager" and scenario_kwargs.get("grad_enabled"):
        raise ConfigError(
            f"VmasEnv: grad_enabled=True asks for gradients through steps, which execution="
            f"{execution!r} does not give; use execution='eager'."
        )


def make_simulator(
    scenario: str | BaseScenario, num_envs: int, device: torch.device, arguments: Mapping[str, Any]
) -> Environment:
    """Makes a VMAS environment from the active random state; no step was made in it yet."""
    import vmas

    with _active_random_state():
        return vmas.make_env(scenario, num_envs, device, **arguments)


def build_simulator(
    scenario: str | BaseScenario,
    num_envs: int,
    device: torch.device,
    arguments: Mapping[str, Any],
    info: bool,
) -> Environment:
    """Builds a VMAS environment from the active random state, warmed up and reset."""
    env = make_simulator(scenario, num_envs, device, arguments)
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


class VmasWorlds:
    """Builder of simulators of one scenario and its arguments.

    Args:
        scenario (str or BaseScenario): copied, since a scenario belongs to one simulator.
        seed (int): of what is drawn when a world is built.
        arguments (mapping): of ``vmas.make_env`` and the scenario.
        info (bool): whether infos are read.
    """

    def __init__(
        self, scenario: str | BaseScenario, seed: int, arguments: Mapping[str, Any], info: bool
    ) -> None:
        self.name = scenario if isinstance(scenario, str) else type(scenario).__name__
        self.seed = seed
        self._stream = own_stream(seed)
        self._scenario = copy.deepcopy(scenario)
        self._arguments = dict(arguments)
        self._info = info
        self._state: SimulatorState | None = None

    def scenario(self) -> str | BaseScenario:
        """Returns a new object of the scenario, for one more simulator."""
        return copy.deepcopy(self._scenario)

    def build(self, num_envs: int, device: torch.device) -> Environment:
        """Builds a simulator from the active random state, warmed up and reset."""
        return build_simulator(self.scenario(), num_envs, device, self._arguments, self._info)

    def describe(self, num_envs: int) -> str:
        """Describes a simulator: all that two simulators' states must agree in."""
        arguments = {"num_envs": num_envs, **self._arguments}
        return f"{self.name}({', '.join(f'{k}={v!r}' for k, v in sorted(arguments.items()))})"

    def state(self) -> SimulatorState:
        """Returns the places of such a simulator's tensors.

        Raises:
            SimulatorStateError: a scenario whose state cannot be read (``road_traffic``).
        """
        if self._state is None:

            def probe(num_envs: int) -> Environment:
                env = self.build(num_envs, torch.device("cpu"))
                warm_up(env, self._info)
                return env

            with RandomState(self._stream).active():
                self._state = SimulatorState(probe, exclude=VIEWER)
        return self._state

    def reset_bank(self, simulator: Environment) -> ResetBank:
        """Builds a bank of fresh starts for a running simulator.

        Raises:
            SimulatorStateError: a scenario whose state cannot be read.
        """
        state, n, device = self.state(), simulator.num_envs, simulator.device
        # The twin builds its world from the same seed, and draws starts from the env's own state.
        with RandomState(self._stream, device).active():
            twin = self.build(n, device)
        step = functools.partial(warm_up, info=self._info)
        return ResetBank(state, simulator, twin, self.fresh_starts(), n, device, step=step)

    def fresh_starts(self) -> Callable[[Environment], None]:
        """Returns a reset of all envs that draws one start for each, as single resets do."""
        n = SimulatorState.PROBES[1]
        with RandomState(self._stream).active():
            probe = self.build(n, torch.device("cpu"))
            together = random_draws(lambda: reset_all(probe))
            alone = random_draws(lambda: probe._reset_at(0, return_observations=False))
        shared = [shape for shape in together if n not in shape]
        # Random numbers drawn in a full reset only, such as the true goal, may be shared.
        draws_together = not shared or len(alone) <= len(together) - len(shared)
        return reset_all if draws_together else reset_each


@contextlib.contextmanager
def _active_random_state() -> Iterator[None]:
    """Sets VMAS's class-wide random state to the active one, and restores it afterwards."""
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
