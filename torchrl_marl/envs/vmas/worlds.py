"""How the simulators of one VMAS environment are built: the running one, probes and twins."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from torchrl_marl.envs.vmas.build import build_simulator, reset_all, reset_each, warm_up
from torchrl_marl.random_state import RandomState, own_stream
from torchrl_marl.simulator.reset_bank import StartBank, random_draws
from torchrl_marl.simulator.state import SimulatorState

if TYPE_CHECKING:
    from vmas.simulator.environment import Environment
    from vmas.simulator.scenario import BaseScenario

__all__ = ["VIEWER", "VmasWorlds"]

VIEWER = ("viewer", "visible_display", "text_lines")


class VmasWorlds:
    """Builds simulators of one scenario and its arguments, as many and as large as needed.

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
        """The scenario as it was given, for one more simulator."""
        return copy.deepcopy(self._scenario)

    def build(
        self, num_envs: int, device: torch.device, scenario: str | BaseScenario | None = None
    ) -> Environment:
        """A simulator, drawn from the active random state."""
        scenario = self.scenario() if scenario is None else scenario
        return build_simulator(scenario, num_envs, device, self._arguments, self._info)

    def describe(self, num_envs: int) -> str:
        """A simulator in words, with all that its state must agree in with another one's."""
        arguments = {"num_envs": num_envs, **self._arguments}
        return f"{self.name}({', '.join(f'{k}={v!r}' for k, v in sorted(arguments.items()))})"

    def state(self) -> SimulatorState:
        """Where the tensors of such a simulator are.

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

    def start_bank(self, simulator: Environment) -> StartBank:
        """Fresh starts for a running simulator.

        Raises:
            SimulatorStateError: a scenario whose state cannot be read.
        """
        state, n, device = self.state(), simulator.num_envs, simulator.device
        # The twin draws its world from the same seed, and its starts from the env's own state.
        with RandomState(self._stream, device).active():
            twin = self.build(n, device)
        step = functools.partial(warm_up, info=self._info)
        return StartBank(state, simulator, twin, self.fresh_starts(), n, device, step=step)

    def fresh_starts(self) -> Callable[[Environment], None]:
        """A reset of all envs that draws a start of its own for each, as single resets do."""
        n = SimulatorState.PROBES[1]
        with RandomState(self._stream).active():
            probe = self.build(n, torch.device("cpu"))
            together = random_draws(lambda: reset_all(probe))
            alone = random_draws(lambda: probe._reset_at(0, return_observations=False))
        shared = [shape for shape in together if n not in shape]
        # What is drawn in a full reset only, such as which goal is the true one, may be shared.
        draws_together = not shared or len(alone) <= len(together) - len(shared)
        return reset_all if draws_together else reset_each
