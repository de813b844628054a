"""VMAS scenarios as TorchRL environments, reset in one batched operation.

Shapes: E envs, N agents of a group, S state features.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torchrl.envs
from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from torchrl.data import Categorical, Composite, TensorSpec, Unbounded
from torchrl.envs.utils import MarlGroupMapType

from torchrl_marl.capture.execution import Execution, check_execution
from torchrl_marl.envs.agents.declaration import check_parts, check_snapshot
from torchrl_marl.envs.scene import Shape, Stage
from torchrl_marl.envs.vmas.build import (
    VIEWER,
    ScenarioReader,
    StateOf,
    VmasSimulators,
    action_rows,
    advance,
    check_vmas,
    draw_domain,
    import_vmas,
    make_simulator,
    reset_all,
    reset_at,
    warm_up,
    where_reset,
)
from torchrl_marl.envs.vmas.graphs import VmasGraphs
from torchrl_marl.envs.vmas.library import out_of_file
from torchrl_marl.envs.vmas_scene import VmasScene
from torchrl_marl.errors import BatchSizeError, SimulatorStateError
from torchrl_marl.runtime.random_state import RandomState, offset_seed
from torchrl_marl.simulator.resets import ResetBank, UndoWrites
from torchrl_marl.simulator.state import read_tensors, write_tensors

if TYPE_CHECKING:
    from vmas.simulator.environment import Environment
    from vmas.simulator.scenario import BaseScenario

__all__ = ["VmasEnv"]

_ENV_ARGUMENTS = ("device", "batch_size", "frame_skip", "spec_locked")


class VmasEnv(VmasGraphs, torchrl.envs.VmasEnv):
    """VMAS scenario; extends :class:`torchrl.envs.VmasEnv` and replaces it.

    Differences from TorchRL's class:

    - At the time limit episodes are ``truncated``, never ``terminated``.
    - Envs that end are reset in one batched operation.
    - The environment has its own random state. A seed gives the same rollout, even if other code
      in the process draws random numbers.
    - :meth:`snapshot` and :meth:`restore` save and restore the whole state.
    - It can return a ``"state"`` for a central critic.
    - Unknown scenario arguments raise an error.

    Args:
        scenario (str or BaseScenario): one of ``available_envs``, a scenario object, or the path
            of a Python file.

    Keyword Args:
        num_envs (int): number E of vectorized envs.
        continuous_actions (bool): True for continuous actions, False for discrete ones.
        max_steps (int, optional): time limit of an episode, in steps.
        categorical_actions (bool): True if a discrete action is an index, False for one-hot.
        seed (int, optional): random seed; if None, it is drawn from torch's global generator.
        group_map (MarlGroupMapType or dict, optional): grouping of the agents.
        scenario_kwargs (dict, optional): arguments of the scenario, which may also be given as
            ``**kwargs``.
        state ("observations" or callable, optional): the central critic's input ``[E, S]``. It is
            the concatenated observations of all agents, or the result of
            ``state(vmas_environment)``.
        info (bool): True to compute and return ``(group, "info")``.
        execution ("eager", "compile" or "cudagraph"): whether a step runs in the simulator, as a
            compiled graph on CPU or GPU, or as a CUDA graph. The results are the same. If a
            scenario cannot be captured, a warning is given, and the scenario runs eagerly. A graph
            holds the state in its own memory. Reading ``env._env`` writes the state back to VMAS's
            environment. So read ``env._env`` each time, and do not keep a reference to the result.
        device (torch.device, optional): device of the simulation.

    Shapes:
        - ``(group, "observation")``: ``[E, N, O]``; ``("next", group, "reward")``: ``[E, N, 1]``
        - ``done``, ``terminated``, ``truncated``: ``[E, 1]``; ``"state"``: ``[E, S]``

    Raises:
        ConfigError: if the scenario, an argument or ``state`` is unknown, or if ``execution`` is
            not possible on the device.
        BatchSizeError: if ``batch_size`` is not ``(num_envs,)``.
        MissingExtraError: if VMAS is not installed.

    Reference: Bettini et al., 2022, https://arxiv.org/abs/2207.03530.

    Examples:
        >>> env = VmasEnv("balance", num_envs=4, max_steps=100, seed=0, n_agents=3)
        >>> env.rollout(5)["next", "agents", "reward"].shape
        torch.Size([4, 5, 3, 1])
    """

    def __init__(
        self,
        scenario: str | BaseScenario,
        *,
        num_envs: int,
        continuous_actions: bool = True,
        max_steps: int | None = None,
        categorical_actions: bool = True,
        seed: int | None = None,
        group_map: MarlGroupMapType | dict[str, list[str]] | None = None,
        scenario_kwargs: dict[str, Any] | None = None,
        state: StateOf = None,
        info: bool = True,
        execution: Execution = "eager",
        **kwargs: Any,
    ) -> None:
        env_kwargs = {name: kwargs.pop(name) for name in _ENV_ARGUMENTS if name in kwargs}
        scenario_kwargs = {**(scenario_kwargs or {}), **kwargs}
        device = env_kwargs.get("device")
        check_vmas(scenario, scenario_kwargs, num_envs, max_steps, state, execution, device)
        import_vmas()
        scenario = out_of_file(scenario)
        seed = int(torch.randint(2**31, ())) if seed is None else seed
        self._simulator_seed = seed
        self._state_source = state
        self._info = info
        self._leader = self._leader_packing = None
        self._reset_envs = reset_all
        self._bank: ResetBank | None = None
        self._undo_writes: UndoWrites | None = None
        # The last output of a step or reset, and the step count when the output was read.
        self._output_record: tuple[TensorDictBase, Tensor, int] | None = None
        self._bank_refusal: str | None = None
        self._captured, self._graphs, self._saved_pool = None, None, {}
        self._execution = "eager"
        self._arguments = {
            "continuous_actions": continuous_actions,
            "categorical_actions": categorical_actions,
            "max_steps": max_steps,
            "scenario_kwargs": dict(scenario_kwargs),
        }
        super().__init__(
            scenario,
            num_envs=num_envs,
            seed=None,
            group_map=group_map,
            **{**self._arguments, "scenario_kwargs": {**scenario_kwargs, **env_kwargs}},
        )
        self._set_seed(seed)
        self._execution = execution

    # ------------------------------------------------------------------------------ building

    def _build_env(
        self, scenario, num_envs, continuous_actions, max_steps, seed, **scenario_kwargs
    ):
        self.scenario_name = scenario
        self.from_pixels = self.pixels_only = False
        arguments = dict(
            continuous_actions=continuous_actions,
            max_steps=max_steps,
            terminated_truncated=True,
            **scenario_kwargs,
        )
        self._simulators = VmasSimulators(scenario, self._simulator_seed, arguments, self._info)
        device = self.device if self.device is not None else torch.get_default_device()
        self.random_state = RandomState(offset_seed(self._simulator_seed), device)
        with self.random_state.active():
            env = make_simulator(scenario, num_envs, device, arguments)
            # Read before the first step, because the results of a step depend on the seed.
            self._initial_tensors = read_tensors(env, VIEWER)
            warm_up(env, self._info)
            env._reset(return_observations=False)
        if len(self.batch_size) == 0:
            self.batch_size = torch.Size((num_envs,))
        elif self.batch_size != (num_envs,):
            one = len(self.batch_size) == 1
            raise BatchSizeError(
                "Batch size used in constructor "
                f"{'does not match vmas batch size' if one else 'is not compatible with vmas'}. "
                f"VmasEnv: batch_size is {tuple(self.batch_size)}, expected ({num_envs},) from "
                "num_envs; leave it out."
            )
        return env

    def _make_specs(self, env: Environment) -> None:
        super()._make_specs(env)
        flag = Categorical(2, shape=(1,), dtype=torch.bool, device=self.device)
        flags = {key: flag.clone() for key in ("done", "terminated", "truncated")}
        self.full_done_spec_unbatched = Composite(flags, device=self.device)
        agents = [env.agents[i] for i in range(env.n_agents)]
        indices = {
            group: [self.agent_names_to_indices_map[name] for name in names]
            for group, names in self.group_map.items()
        }
        self._reader = ScenarioReader(
            indices, self.het_specs_map, self._state_source, self._info, self.device
        )
        if self._state_source is not None:
            observations = [env.scenario.observation(agent) for agent in agents]
            state = self._reader.central_state(env, observations)
            # TorchRL computes wrong shapes for the unbatched spec of a lazily stacked group.
            spec = self.full_observation_spec.clone()  # type: ignore[has-type]
            spec["state"] = Unbounded(state.shape, device=self.device, dtype=state.dtype)
            self.full_observation_spec = spec

    def _make_unbatched_group_specs(self, group: str) -> tuple[TensorSpec | None, ...]:
        *specs, info = super()._make_unbatched_group_specs(group)
        return (*specs, info if self._info else None)

    @property
    def _env(self) -> Environment:
        """VMAS's environment; reading this property first writes the state of the graphs to it."""
        captured = self.__dict__.get("_captured")
        return self.__dict__["_vmas"] if captured is None else captured.release()

    @_env.setter
    def _env(self, env: Environment) -> None:
        self.__dict__["_vmas"] = env

    # ------------------------------------------------------------------------ reset and step

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        envs = None if tensordict is None else tensordict.get("_reset", None)
        if envs is None or bool(envs.all()):
            return self._reset_all_envs()
        ended = envs.reshape(self.batch_size)
        if self._execution != "eager":
            start = self._run_graphs(lambda graphs: graphs.begin(ended))
            if start is not None:
                return start
        with self.random_state.active():
            output = self._last_output()
            self._start_episodes(ended)
            return self._keep_output(self._read_after_reset(ended, output))

    def _read_after_reset(self, ended: Tensor, output: TensorDictBase | None) -> TensorDictBase:
        """Reads outputs after a reset; envs that were not reset keep their last output."""
        with (
            contextlib.nullcontext()
            if self._undo_writes is None
            else self._undo_writes.where(~ended)
        ):
            read = self._read()
        return read if output is None else where_reset(ended, read, output)

    def _keep_output(self, output: TensorDictBase) -> TensorDictBase:
        steps = self._env.steps
        self._output_record = output, steps, steps._version
        return output.copy()

    def _last_output(self) -> TensorDictBase | None:
        """Returns the last output; None if other code has stepped the simulator in the meantime."""
        if self._output_record is None:
            return None
        output, steps, version = self._output_record
        return output if self._env.steps is steps and steps._version == version else None

    def _reset_all_envs(self) -> TensorDictBase:
        if self._graphs is not None:
            self._graphs.raise_failed()
        with self.random_state.active():
            self._follow_leader()
            self._reset_envs(self._env)
            self._copy_leader_settings()
            return self._keep_output(self._read())

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        if self._captured is not None and self._captured.in_graph:
            return self.advance(tensordict)
        if self._execution != "eager":
            stepped = self._run_graphs(lambda graphs: graphs.step(tensordict))
            if stepped is not None:
                return stepped
        with self.random_state.active():
            return self._keep_output(self.advance(tensordict))

    def advance(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Steps the simulator eagerly, with random numbers from the active random state."""
        actions: list[Tensor] = [None] * self._env.n_agents  # type: ignore[list-item]
        for group, indices in self._reader.groups.items():
            for i, row in zip(indices, action_rows(self, tensordict, group)):
                actions[i] = row.unsqueeze(-1) if row.ndim == 1 else row
        advance(self._env, actions)
        return self._reader.read(self._env, rewards=True)

    def _start_episodes(self, envs: Tensor) -> None:
        bank = self._get_reset_bank()
        if bank is not None:
            try:
                bank.draw(envs)
            except SimulatorStateError as refusal:
                self._refuse_bank(str(refusal))
            else:
                return
        for i in envs.nonzero().squeeze(-1).tolist():
            reset_at(self._env, i)

    # ------------------------------------------------------------------------- randomization

    @property
    def domain_parameters(self) -> TensorDict:
        """Factors of the randomized parameters in each env's current episode, as ``[E]``.

        Shapes:
            - each parameter: ``[E, n]``, for the n entities that have it
        """
        domain = getattr(self._env, "domain", None)
        values = {} if domain is None else dict(domain.values)
        return TensorDict(values, self.batch_size, self.device)

    def randomize(self, ranges: Mapping[str, Any]) -> None:
        """Sets the ranges from which each new episode draws its parameters.

        A value is a factor of the parameter's nominal value, and is drawn for each entity.
        Parameters that are not named have their nominal values. Fixed values apply immediately,
        ranges from the next reset of each env.

        Args:
            ranges (mapping): name of a parameter -> number, ``[low, high]`` or
                ``[low, high, log]``.

        Raises:
            ConfigError: unknown parameter, malformed range, or one that cannot differ between envs.

        Examples:
            >>> env = VmasEnv("balance", num_envs=2, seed=0)
            >>> env.randomize({"landmark_mass": [0.5, 2.0], "gravity": [0.8, 1.2]})
            >>> env.reset()["agents", "observation"].shape
            torch.Size([2, 3, 16])
            >>> bool((env.domain_parameters["gravity"] >= 0.8).all())
            True
        """
        from torchrl_marl.envs.vmas.domain import VmasDomain

        vmas = self._env
        self._simulators.randomize(ranges)
        self._discard_simulator_data()
        if hasattr(vmas, "domain"):
            vmas.domain.restore()
            del vmas.domain
        if self._simulators.ranges:
            vmas.domain = VmasDomain(vmas, self._simulators.ranges)
            with self.random_state.unchanged():
                draw_domain(vmas)

    def _discard_simulator_data(self) -> None:
        """Discards all that was built for the simulator: initial states, outputs and graphs."""
        self._env = self._env  # reading moves the state from the graphs to the simulator
        self._bank = self._undo_writes = self._output_record = self._captured = self._graphs = None
        self._saved_pool = {}

    # --------------------------------------------------------- random state, snapshot, starts

    def _set_seed(self, seed: int | None) -> None:
        stream = offset_seed(0 if seed is None else seed)
        self.random_state.seed(stream)
        # A reset does not overwrite all values that infos read. So the values that earlier episodes
        # leave behind must depend on this seed, too.
        write_tensors(self._env, self._initial_tensors, VIEWER)
        with self.random_state.active():
            self._env._reset(return_observations=False)
            warm_up(self._env, self._info)
            self._env._reset(return_observations=False)
        self.random_state.seed(stream)
        if self._bank is not None:
            self._bank.empty()
        self._saved_pool = {}
        if self._graphs is not None:
            # A new pool is built, since the size of the old one depends on its seed.
            self._graphs.pool = self.reset_pool()

    def snapshot(self) -> TensorDict:
        """Returns the whole state: simulator, random state and initial states drawn in advance.

        Returns:
            TensorDict: argument of :meth:`restore`; save it with ``torch.save(x.to_dict())``.

        Raises:
            SimulatorStateError: if the scenario's state cannot be read (``road_traffic``).
        """
        source: dict[str, Any] = {
            "of": self._simulators.describe(self._env.num_envs),
            "simulator": self._simulators.state().read(self._env),
            "random": TensorDict(self.random_state.state_dict()),
        }
        if self._bank is not None:
            source["starts"] = self._bank.state_dict(self._simulators.state())
        if self._execution != "eager":
            source["pool"] = self._pool_state()
        return TensorDict(source)

    def restore(self, snapshot: TensorDict) -> None:
        """Restores a snapshot of an environment that was built with the same arguments.

        Raises:
            SimulatorStateError: if the snapshot has another scenario or number of envs.
        """
        check_parts(snapshot, ["of", "simulator"], type(self).__name__)
        check_snapshot(snapshot["of"], self._simulators.describe(self._env.num_envs))
        self._simulators.state().write(self._env, snapshot["simulator"])
        bank = self._get_reset_bank() if "starts" in snapshot.keys() else None
        if bank is not None:
            bank.load_state_dict(self._simulators.state(), snapshot["starts"])
        else:
            self._bank = None
        self._saved_pool = snapshot["pool"].to_dict() if "pool" in snapshot.keys() else {}
        if self._graphs is not None:
            self._graphs.pool.load_state_dict(self._saved_pool)
        self.random_state.load_state_dict(dict(snapshot["random"].items()))

    def _get_reset_bank(self) -> ResetBank | None:
        """Returns the bank of initial states; None if the scenario's state cannot be read."""
        if self._bank is None and self._bank_refusal is None:
            try:
                self._bank = self._simulators.reset_bank(self._env)
                self._undo_writes = UndoWrites(self._env, self._simulators.state())
            except SimulatorStateError as refusal:
                why = f"the simulator's state cannot be written as tensors ({refusal})"
                self._refuse_bank(why)
        return self._bank

    def _refuse_bank(self, why: str) -> None:
        self._bank, self._bank_refusal = None, why
        name = self._simulators.name
        warnings.warn(f"{name}: envs are reset one by one, since {why}", stacklevel=2)

    # ------------------------------------------------------------------------ other methods

    def heuristic(self) -> Callable[[TensorDictBase], TensorDictBase] | None:
        """Returns the scenario's heuristic as a policy, or None.

        Examples:
            >>> env = VmasEnv("balance", num_envs=2, seed=0)
            >>> env.rollout(3, env.heuristic())["agents", "action"].shape
            torch.Size([2, 3, 3, 2])
        """
        return _heuristic_policy(self)

    def scene(self, index: int = 0) -> list[Shape]:
        """Returns the entities of one env as shapes."""
        return VmasScene(self).scene(index)

    def stage(self) -> Stage:
        """Returns the view of the scenario."""
        return VmasScene(self).stage()

    def close(self, *, raise_if_closed: bool = True) -> None:
        """Closes the environment; its attributes can still be read.

        VMAS has nothing to close. Unlike TorchRL's ``close``, this method does not access the
        simulator. At interpreter exit, an access would write tensors into objects that are being
        destroyed.
        """
        self.is_closed = True

    def to(self, device: torch.device | str) -> VmasEnv:
        """Moves the simulation to a device."""
        if torch.device(device) == self.device:
            return self
        check_execution(self._execution, device, "VmasEnv.to")
        self._discard_simulator_data()
        self.random_state = RandomState(offset_seed(self._simulator_seed), device)
        self._initial_tensors = {path: x.to(device) for path, x in self._initial_tensors.items()}
        super().to(device)
        if hasattr(self._env, "domain"):
            self._env.domain.to(self.device)
        self._reader = replace(self._reader, device=self.device)
        return self


def _heuristic_policy(env: VmasEnv) -> Callable[[TensorDictBase], TensorDictBase] | None:
    """Returns the scenario's heuristic policy; None if it does not exist or fails.

    Args:
        env (VmasEnv): environment with continuous actions; heuristics do not support discrete ones.

    Keys:
        - reads: ``(group, "observation")``
        - writes: ``(group, "action")``
    """
    simulator = env._env
    module = inspect.getmodule(type(simulator.scenario))
    if module is None:  # VMAS does not register the modules of its scenarios
        scenarios = importlib.import_module("vmas.scenarios")
        module = scenarios.load(f"{env.scenario_name}.py")
    kind = getattr(module, "HeuristicPolicy", None)
    if kind is None or not simulator.continuous_actions:
        return None
    try:
        heuristic = kind(continuous_action=True)
        _act_by_heuristic(env, heuristic, env.fake_tensordict())
    except (ImportError, TypeError, NotImplementedError, AttributeError):
        return None
    return lambda tensordict: _act_by_heuristic(env, heuristic, tensordict)


def _act_by_heuristic(env: VmasEnv, heuristic, tensordict: TensorDictBase) -> TensorDictBase:
    agents = {agent.name: agent for agent in env._env.agents}
    for group, names in env.group_map.items():
        observation = tensordict.get((group, "observation"))
        actions = []
        for i, name in enumerate(names):
            limit = agents[name].u_range
            action = heuristic.compute_action(observation[:, i], u_range=limit)
            actions.append(action.clamp(-limit, limit))
        tensordict.set((group, "action"), torch.stack(actions, 1))
    return tensordict
