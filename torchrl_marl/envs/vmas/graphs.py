"""Runs the steps of a VMAS environment as captured graphs.

Shapes: E envs.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tensordict import NestedKey, TensorDict, TensorDictBase
from torchrl.data import Composite

from torchrl_marl.capture.execution import Execution
from torchrl_marl.envs.vmas.build import VIEWER, ScenarioReader, VmasSimulators, warm_up
from torchrl_marl.errors import CaptureError, GraphCheckError, SimulatorStateError
from torchrl_marl.runtime.random_state import RandomState
from torchrl_marl.simulator.captured import CapturedSimulator
from torchrl_marl.simulator.packing import Packing, ResetPool
from torchrl_marl.simulator.settings import copy_settings
from torchrl_marl.simulator.step_graphs import StepGraphs

if TYPE_CHECKING:
    from vmas.simulator.environment import Environment

    from torchrl_marl.envs.vmas import VmasEnv

__all__ = ["VmasGraphs"]


class VmasGraphs:
    """Part of :class:`~torchrl_marl.envs.VmasEnv` that runs steps as captured graphs.

    The current state is either in the simulator or in the memory of the graphs.
    """

    _env: Any  # the simulator; reading it writes the state back

    random_state: RandomState
    group_map: Any
    full_action_spec: Composite
    action_keys: list[NestedKey]
    advance: Callable[[TensorDictBase], TensorDict]
    _simulators: VmasSimulators
    _reader: ScenarioReader
    _arguments: dict[str, Any]
    _info: bool
    _execution: Execution
    _captured: CapturedSimulator | None
    _graphs: StepGraphs | None
    _saved_pool: dict[str, Any]  # saved initial states, with which the pool of the graphs begins
    _leader: Environment | None  # in a twin: the simulator for which the twin draws initial states
    _leader_packing: Packing | None  # in a twin: the packing of the leader's state
    _reset_envs: Callable[[Environment], None]

    @property
    def simulator(self) -> Environment:
        """VMAS's environment, after the state was written back to it."""
        return self._env

    def captured(self) -> CapturedSimulator:
        """Returns the simulator in a form that can be captured as a graph.

        Raises:
            CaptureError, SimulatorStateError: if the scenario's state cannot be packed.
        """
        if self._captured is None:
            from torchrl_marl.envs.vmas.capture import without_branches

            vmas = self._env
            self._captured = CapturedSimulator(
                vmas,
                self._simulators.state(),
                lambda: warm_up(vmas, self._info),
                self.random_state,
                lambda: without_branches(vmas),
            )
        return self._captured

    def twin(self, num_envs: int) -> VmasEnv:
        """Builds a twin, a second environment that draws initial states for this environment.

        The twin has the same arguments and settings, and shares this environment's random state.
        """
        make: Any = type(self)
        twin: VmasEnv = make(
            self._simulators.scenario(),
            num_envs=num_envs,
            seed=self._simulators.seed,
            group_map=self.group_map,
            state=self._reader.state,
            info=self._info,
            device=self._env.device,
            **self._arguments,
        )
        if self._simulators.ranges:
            twin.randomize(self._simulators.ranges)
        twin.random_state, twin._leader = self.random_state, self._env
        twin._leader_packing = self.captured().packing
        twin._reset_envs = self._simulators.fresh_starts()
        return twin

    @contextlib.contextmanager
    def _isolated(self, random: RandomState) -> Iterator[None]:
        """Context in which a twin has the settings of its leader, but a separate random state.

        The leader is the environment for which the twin draws initial states. Infos are not read,
        since they may depend on the previous step.
        """
        self._follow_leader()
        kept = self._leader, self._reader, self.random_state
        self._leader, self._reader = None, replace(self._reader, info=False)
        self.random_state = random
        try:
            yield
        finally:
            self._leader, self._reader, self.random_state = kept

    def reset_pool(self) -> ResetPool:
        """Builds the pool from which graphs take initial states."""

        def make(num_envs: int) -> tuple[VmasEnv, Environment]:
            twin = self.twin(num_envs)
            return twin, twin._env

        return ResetPool(self.captured().packing, self._env, make, self._env.num_envs)

    def _run_graphs(self, call: Callable[[StepGraphs], TensorDict]) -> TensorDict | None:
        """Calls a function with the graphs as argument; returns None if capture is impossible."""
        try:
            return call(self._step_graphs())
        except GraphCheckError:
            raise
        except (CaptureError, SimulatorStateError) as refusal:
            self._execution, self._graphs, self._saved_pool = "eager", None, {}
            warnings.warn(
                f"{self._simulators.name}: steps run eagerly, since they cannot be captured: "
                f"{refusal}",
                stacklevel=3,
            )
            return None

    def _step_graphs(self) -> StepGraphs:
        assert self._execution != "eager"
        if self._graphs is None:
            for group, lazy in self._reader.lazy.items():
                if lazy:
                    raise CaptureError(
                        f"the agents of group {group!r} differ and are stacked lazily; put only "
                        "equal agents into a group (group_map), or collect from "
                        "TransformedEnv(env, PadAgents()) by RolloutCollector(..., execution=...)"
                    )
            specs = {key: self.full_action_spec[key] for key in self.action_keys}
            graphs = StepGraphs(
                self.captured(),
                self.advance,
                self._read,
                specs,
                self.reset_pool(),
                self.random_state,
                name=f"VmasEnv({self._simulators.name!r})",
                execution=self._execution,
            )
            graphs.pool.load_state_dict(self._saved_pool)
            self._graphs, self._saved_pool = graphs, {}
        return self._graphs

    def _follow_leader(self) -> None:
        """Copies the leader's settings to this twin, also settings with one value per env."""
        self._copy_leader_settings(per_env=True)

    def _copy_leader_settings(self, per_env: bool = False) -> None:
        """Copies the leader's settings to this twin; with ``per_env``, also settings per env."""
        if self._leader is not None and self._leader_packing is not None:
            sizes, packing = (self._env.num_envs, self._leader.num_envs), self._leader_packing
            moving = packing.written if per_env else None
            copy_settings(self._env, self._leader, sizes, VIEWER, packing.batched, moving)

    def _read(self) -> TensorDict:
        """Returns the simulator's current outputs as a reset would, without rewards."""
        return self._reader.read(self._env, rewards=False)

    def _pool_state(self) -> dict[str, Any]:
        return self._saved_pool if self._graphs is None else self._graphs.pool.state_dict()

    def __getstate__(self) -> dict[str, Any]:
        # A copy captures its graphs again, and continues with the same pool of initial states.
        state = {**self.__dict__, "_vmas": self._env, "_saved_pool": self._pool_state()}
        return {**state, "_captured": None, "_graphs": None, "_output_record": None}
