"""Builds VMAS environments, and reads observations, rewards and flags from them."""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib.util
import io
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
import torchrl.envs
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase
from torch import Tensor

from torchrl_marl.capture.execution import check_execution
from torchrl_marl.envs.agents.declaration import check_whole_numbers
from torchrl_marl.envs.vmas.library import check_scenario
from torchrl_marl.errors import ConfigError, MissingExtraError, SpecError
from torchrl_marl.runtime.random_state import RandomState, offset_seed
from torchrl_marl.simulator.resets import ResetBank, random_draws
from torchrl_marl.simulator.state import SimulatorState
from torchrl_marl.specs.groups import is_lazy

if TYPE_CHECKING:
    from vmas.simulator.environment import Environment
    from vmas.simulator.scenario import BaseScenario

    from torchrl_marl.envs.ranges import ValueRange


__all__ = [
    "VIEWER",
    "ScenarioReader",
    "StateOf",
    "VmasSimulators",
    "action_rows",
    "advance",
    "build_simulator",
    "check_vmas",
    "draw_domain",
    "import_vmas",
    "make_simulator",
    "reset_all",
    "reset_at",
    "reset_each",
    "warm_up",
    "where_reset",
]

StateOf = Literal["observations"] | Callable[["Environment"], Tensor] | None


@dataclass(frozen=True)
class ScenarioReader:
    """Reads a scenario's per-agent outputs, and stacks them by group.

    Args:
        groups (dict): group -> indices of the group's agents in VMAS's lists.
        lazy (dict): group -> True if the group is stacked lazily, because its agents' data differ
            in shape.
        state ("observations" or callable, optional): source of the central critic's input.
        info (bool): True to read infos.
        device (torch.device, optional): device of the TensorDicts.

    Shapes:
        - ``(group, "observation")``: ``[E, N, O]``; ``(group, "reward")``: ``[E, N, 1]``
        - ``done``, ``terminated``, ``truncated``: ``[E, 1]``; ``"state"``: ``[E, S]``
    """

    groups: dict[str, list[int]]
    lazy: dict[str, bool]
    state: StateOf
    info: bool
    device: torch.device | None

    def read(self, env: Environment, *, rewards: bool) -> TensorDict:
        """Returns the output of a step if ``rewards`` is True, otherwise that of a reset."""
        outputs = env._get_from_scenario(
            get_observations=True, get_rewards=rewards, get_infos=self.info, get_dones=True
        )
        observations, *outputs = outputs
        agent_rewards = outputs.pop(0) if rewards else None
        terminated, truncated, *infos = outputs
        source: dict[str, Any] = {
            "done": (terminated | truncated).unsqueeze(-1),
            "terminated": terminated.unsqueeze(-1),
            "truncated": (truncated & ~terminated).unsqueeze(-1),
        }
        info_of_agents = infos[0] if infos else [{}] * len(observations)
        for group, indices in self.groups.items():
            stack = self._stack_lazily if self.lazy[group] else self._stack_densely
            source[group] = stack(
                [observations[i] for i in indices],
                None if agent_rewards is None else [agent_rewards[i] for i in indices],
                [info_of_agents[i] for i in indices],
                torch.Size([env.num_envs]),
            )
        if self.state is not None:
            source["state"] = self.central_state(env, observations)
        size = torch.Size([env.num_envs])
        return TensorDict._new_unsafe(source, batch_size=size, device=self.device)

    def central_state(self, env: Environment, observations: Sequence[Any]) -> Tensor:
        """Returns the input of a central critic, ``[E, S]``."""
        if not callable(self.state):
            return torch.cat([row for x in observations for row in _flatten_observation(x)], -1)
        state = self.state(env)
        if state.ndim != 2 or state.shape[0] != env.num_envs:
            raise ConfigError(
                f"VmasEnv: state(...) returned shape {tuple(state.shape)}, "
                f"expected [{env.num_envs}, S]."
            )
        return state

    def _stack_densely(self, observations, rewards, infos, size: torch.Size) -> TensorDictBase:
        size = torch.Size((*size, len(observations)))
        source = {"observation": _stack_agents(observations, size)}
        if rewards is not None:
            source["reward"] = torch.stack([reward.reshape(-1, 1) for reward in rewards], 1)
        if infos[0]:
            source["info"] = _stack_agents([_to_floats(info) for info in infos], size)
        return TensorDict._new_unsafe(source, batch_size=size, device=self.device)

    def _stack_lazily(self, observations, rewards, infos, size: torch.Size) -> TensorDictBase:
        members = []
        for i, observation in enumerate(observations):
            source = {"observation": _to_entry(observation, size)}
            if rewards is not None:
                source["reward"] = _to_entry(rewards[i], size)
            if infos[i]:
                source["info"] = _to_entry(_to_floats(infos[i]), size)
            members.append(TensorDict(source, size, self.device))
        # The actions differ in shape, so the group is stacked lazily even if observations do not.
        return LazyStackedTensorDict(*members, stack_dim=1)


def where_reset(reset: Tensor, new: TensorDictBase, old: TensorDictBase) -> TensorDictBase:
    """Takes new data in the envs where ``reset`` ``[E]`` is True, and old data in the others."""
    if isinstance(new, LazyStackedTensorDict) and isinstance(old, LazyStackedTensorDict):
        pairs = zip(new.tensordicts, old.tensordicts)
        return LazyStackedTensorDict(*[where_reset(reset, *pair) for pair in pairs], stack_dim=1)
    source: dict[str, Any] = {}
    for key, x in new.items():
        old_value = old.get(key, None)
        if isinstance(x, TensorDictBase):
            source[key] = x if old_value is None else where_reset(reset, x, old_value)
        else:
            mask = reset.view(-1, *[1] * (x.ndim - 1))
            source[key] = x if old_value is None else torch.where(mask, x, old_value)
    return TensorDict._new_unsafe(source, batch_size=new.batch_size, device=new.device)


def action_rows(
    env: torchrl.envs.VmasEnv, tensordict: TensorDictBase, group: str
) -> Sequence[Tensor]:
    """Returns each agent's action in VMAS's format, ``[E, A]`` or ``[E]``.

    Raises:
        SpecError: if the actions of a group are missing.
    """
    entry = tensordict.get(group)
    lazy = is_lazy(entry)
    rows = [member.get("action", None) for member in entry.unbind(1)] if lazy else []
    action = rows[0] if lazy else entry.get("action", None)
    if action is None:
        raise SpecError(
            f"VmasEnv.step: group {group!r} has no action, expected {(group, 'action')!r}; "
            "the policy must act for every group."
        )
    if not lazy:
        return env.read_action(action, group=group)
    one_hot = not (env.continuous_actions or env.categorical_actions)
    return [row.int().argmax(-1) for row in rows] if one_hot else rows


def _to_floats(info: dict[str, Tensor]) -> dict[str, Tensor]:
    return {key: x.to(torch.float32) for key, x in info.items()}


def _to_entry(x: Any, size: torch.Size) -> Any:
    """Returns one agent's entry: a tensor with a feature dim, or a TensorDict of such tensors."""
    if isinstance(x, Tensor):
        return x.unsqueeze(-1) if x.ndim == 1 else x
    return TensorDict({key: _to_entry(value, size) for key, value in x.items()}, size)


def _stack_agents(entries: Sequence[Any], size: torch.Size) -> Any:
    """Stacks the agents' entries, tensors ``[E, ...]`` or dicts of such tensors, along dim 1."""
    if isinstance(entries[0], Tensor):
        return torch.stack([_to_entry(x, size) for x in entries], 1)
    source = {key: _stack_agents([entry[key] for entry in entries], size) for key in entries[0]}
    return TensorDict(source, size)


def _flatten_observation(observation: Any) -> list[Tensor]:
    if isinstance(observation, Tensor):
        return [observation.reshape(observation.shape[0], -1)]
    return [row for value in observation.values() for row in _flatten_observation(value)]


VIEWER = ("viewer", "visible_display", "text_lines")


def import_vmas() -> None:
    """Imports VMAS, and suppresses the notice that the package gym prints on import.

    Raises:
        MissingExtraError: if VMAS is not installed.
    """
    if importlib.util.find_spec("vmas") is None:
        raise MissingExtraError("VMAS", "vmas")
    with contextlib.redirect_stderr(io.StringIO()):
        import vmas  # noqa: F401


def check_vmas(
    scenario: str | BaseScenario,
    scenario_kwargs: dict[str, Any],
    num_envs: int,
    max_steps: int | None,
    state: Any,
    execution: Any,
    device: Any,
) -> None:
    """Checks the arguments of a VMAS environment before it is built.

    Raises:
        ConfigError: if an argument is invalid; the message names it.
        MissingExtraError: if VMAS is not installed.
    """
    check_scenario(scenario, scenario_kwargs)
    check_whole_numbers("VmasEnv", {"num_envs": num_envs, "max_steps": max_steps})
    if state is not None and state != "observations" and not callable(state):
        raise ConfigError(
            f"VmasEnv: state is {state!r}, expected 'observations', a callable or None."
        )
    check_execution(execution, device, "VmasEnv")
    if execution != "eager" and scenario_kwargs.get("grad_enabled"):
        raise ConfigError(
            f"VmasEnv: grad_enabled=True needs gradients through steps, which execution="
            f"{execution!r} does not support; use execution='eager'."
        )


def make_simulator(
    scenario: str | BaseScenario, num_envs: int, device: torch.device, arguments: Mapping[str, Any]
) -> Environment:
    """Creates a VMAS environment with the active random state; makes no step."""
    import vmas

    with _active_random_state():
        return vmas.make_env(scenario, num_envs, device, **arguments)


def build_simulator(
    scenario: str | BaseScenario,
    num_envs: int,
    device: torch.device,
    arguments: Mapping[str, Any],
    info: bool,
    ranges: Mapping[str, ValueRange] | None = None,
) -> Environment:
    """Builds a VMAS environment with the active random state; makes one step and resets it."""
    env = make_simulator(scenario, num_envs, device, arguments)
    if ranges:
        from torchrl_marl.envs.vmas.domain import VmasDomain

        env.domain = VmasDomain(env, ranges)
    warm_up(env, info)
    reset_all(env)
    return env


def warm_up(env: Environment, info: bool) -> None:
    """Makes one step with zero actions, because some scenarios create tensors only in a step."""
    widths = [env.get_agent_action_size(agent) for agent in env.agents]
    advance(env, [torch.zeros(env.num_envs, n, device=env.device) for n in widths])
    env._get_from_scenario(True, True, info, True)


def advance(env: Environment, actions: Sequence[Tensor]) -> None:
    """Steps the simulation like ``Environment.step``, but reads no observations or rewards.

    Args:
        env (Environment): VMAS environment of E envs.
        actions (sequence of Tensor): actions ``[E, A]`` of each agent.
    """
    for agent, action in zip(env.agents, actions):
        env._set_action(action, agent)
    for agent in env.world.agents:
        env.scenario.env_process_action(agent)
    env.scenario.pre_step()
    env.world.step()
    env.scenario.post_step()
    env.steps += 1


def draw_domain(env: Environment, index: int | None = None) -> None:
    """Draws the parameters of new episodes in all envs, or in one, if they are randomized."""
    domain = getattr(env, "domain", None)
    if domain is not None:
        domain.draw(env, index)


def reset_all(env: Environment) -> None:
    """Starts new episodes in all envs at once."""
    draw_domain(env)
    env._reset(return_observations=False)


def reset_each(env: Environment) -> None:
    """Starts new episodes in one env after the other, so that each env draws a separate layout.

    The scenario ``passage`` needs this.
    """
    for i in range(env.num_envs):
        reset_at(env, i)


def reset_at(env: Environment, index: int) -> None:
    """Starts a new episode in one env."""
    draw_domain(env, index)
    env._reset_at(index, return_observations=False)


class VmasSimulators:
    """Factory of simulators of one scenario with fixed arguments.

    Args:
        scenario (str or BaseScenario): the scenario. It is copied for each simulator.
        seed (int): random seed with which simulators are built.
        arguments (mapping): arguments of ``vmas.make_env`` and the scenario.
        info (bool): True to read infos.
    """

    def __init__(
        self, scenario: str | BaseScenario, seed: int, arguments: Mapping[str, Any], info: bool
    ) -> None:
        self.name = scenario if isinstance(scenario, str) else type(scenario).__name__
        self.seed = seed
        self._stream_seed = offset_seed(seed)
        self._scenario = copy.deepcopy(scenario)
        self._arguments = dict(arguments)
        self._info = info
        self.ranges: dict[str, ValueRange] = {}
        self._state_layout: SimulatorState | None = None

    def randomize(self, ranges: Mapping[str, Any]) -> None:
        """Sets the ranges of the parameters, and checks that the scenario supports them.

        Raises:
            ConfigError: unknown parameter, malformed range, or one that cannot differ between envs.
        """
        from torchrl_marl.envs.vmas.domain import VmasDomain, check_domain, read_vmas_ranges

        with RandomState(self._stream_seed).active():
            self.ranges = {}
            probe = self.build(3, torch.device("cpu"))
            read = read_vmas_ranges(self.name, probe, ranges)
            if read:
                probe.domain = VmasDomain(probe, read)
                check_domain(self.name, probe, lambda: warm_up(probe, self._info))
        self.ranges, self._state_layout = read, None

    def scenario(self) -> str | BaseScenario:
        """Returns a copy of the scenario, for use in another simulator."""
        return copy.deepcopy(self._scenario)

    def build(self, num_envs: int, device: torch.device) -> Environment:
        """Builds a simulator with the active random state; makes one step and resets it."""
        scenario = self.scenario()
        return build_simulator(scenario, num_envs, device, self._arguments, self._info, self.ranges)

    def describe(self, num_envs: int) -> str:
        """Returns a description; simulators with equal descriptions can exchange states."""
        arguments = {"num_envs": num_envs, **self._arguments, **self.ranges}
        return f"{self.name}({', '.join(f'{k}={v!r}' for k, v in sorted(arguments.items()))})"

    def state(self) -> SimulatorState:
        """Returns the layout of the simulator's state tensors.

        Raises:
            SimulatorStateError: if the scenario's state cannot be read (``road_traffic``).
        """
        if self._state_layout is None:

            def probe(num_envs: int) -> Environment:
                env = self.build(num_envs, torch.device("cpu"))
                warm_up(env, self._info)
                return env

            with RandomState(self._stream_seed).active():
                self._state_layout = SimulatorState(probe, exclude=VIEWER)
        return self._state_layout

    def reset_bank(self, simulator: Environment) -> ResetBank:
        """Builds a bank of initial states, drawn in advance, for a running simulator.

        Raises:
            SimulatorStateError: if the scenario's state cannot be read.
        """
        state, n, device = self.state(), simulator.num_envs, simulator.device
        # The second simulator is built from the same seed. Its initial states are drawn from the
        # env's random state.
        with RandomState(self._stream_seed, device).active():
            twin = self.build(n, device)
        step = functools.partial(warm_up, info=self._info)
        return ResetBank(state, simulator, twin, self.fresh_starts(), n, device, step=step)

    def fresh_starts(self) -> Callable[[Environment], None]:
        """Returns a function that resets all envs and draws a separate initial state for each."""
        n = SimulatorState.PROBES[1]
        with RandomState(self._stream_seed).active():
            probe = self.build(n, torch.device("cpu"))
            draws_of_all = random_draws(lambda: reset_all(probe))
            draws_of_one = random_draws(lambda: reset_at(probe, 0))
        shared = [shape for shape in draws_of_all if n not in shape]
        # Some random numbers of a full reset are shared by all envs, such as the true goal. This is
        # allowed only if a reset of a single env does not draw them again.
        can_reset_together = not shared or len(draws_of_one) <= len(draws_of_all) - len(shared)
        return reset_all if can_reset_together else reset_each


@contextlib.contextmanager
def _active_random_state() -> Iterator[None]:
    """Context in which VMAS draws from the active random state; restores VMAS's state on exit."""
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
