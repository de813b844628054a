"""VMAS scenarios as TorchRL environments, reset in one batched operation.

Shapes: E envs, N agents of a group, S state features.
"""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
import torchrl.envs
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase
from torch import Tensor
from torchrl.data import Categorical, Composite, TensorSpec, Unbounded
from torchrl.envs.utils import MarlGroupMapType

from torchrl_marl.envs.random_state import RandomState
from torchrl_marl.envs.simulator import (
    SimulatorState,
    SimulatorStateError,
    read_tensors,
    write_tensors,
)
from torchrl_marl.envs.starts import StartBank, random_draws
from torchrl_marl.envs.vmas_scenarios import check_arguments, check_scenario, read_arguments
from torchrl_marl.envs.vmas_simulator import advance, build_simulator, import_vmas, warm_up
from torchrl_marl.errors import ConfigError, SpecError
from torchrl_marl.stacking import is_lazy

if TYPE_CHECKING:
    from vmas.simulator.environment import Environment
    from vmas.simulator.scenario import BaseScenario

__all__ = ["VmasEnv"]

_VIEWER = ("viewer", "visible_display", "text_lines")
_ENV_ARGUMENTS = ("device", "batch_size", "frame_skip", "spec_locked")


class VmasEnv(torchrl.envs.VmasEnv):
    """A VMAS scenario: drops in for :class:`torchrl.envs.VmasEnv`, which it extends.

    What differs: the time limit is ``truncated`` and never ``terminated``; envs that end are
    reset in one batched operation; an env has a random state of its own, so a seed gives the
    same rollout twice whatever else runs in the process; :meth:`snapshot` and :meth:`restore`;
    a ``"state"`` for the critic; a scenario argument that nobody reads is refused.

    Args:
        scenario (str or BaseScenario): a name from ``available_envs``, or one's own scenario.

    Keyword Args:
        num_envs (int): number E of vectorized envs.
        continuous_actions (bool): otherwise discrete ones.
        max_steps (int, optional): time limit of an episode.
        categorical_actions (bool): discrete actions as an index, otherwise one-hot.
        seed (int, optional): drawn from torch's global generator if None.
        group_map (MarlGroupMapType or dict, optional): how agents are grouped.
        scenario_kwargs (dict, optional): arguments of the scenario, also as ``**kwargs``.
        state ("observations" or callable, optional): what a central critic sees: all agents'
            observations side by side, or what ``state(vmas_environment)`` gives, ``[E, S]``.
        info (bool): whether ``(group, "info")`` is computed and written.
        execution ("eager"): how a step runs.
        device (torch.device, optional): where the simulation runs.

    Shapes:
        - ``(group, "observation")``: ``[E, N, O]``; ``("next", group, "reward")``: ``[E, N, 1]``
        - ``done``, ``terminated``, ``truncated``: ``[E, 1]``; ``"state"``: ``[E, S]``

    Raises:
        ConfigError: an unknown scenario, a leftover argument, an unknown ``state``.
        MissingExtraError: VMAS is not installed.

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
        state: Literal["observations"] | Callable[[Environment], Tensor] | None = None,
        info: bool = True,
        execution: Literal["eager"] = "eager",
        **kwargs: Any,
    ) -> None:
        env_kwargs = {name: kwargs.pop(name) for name in _ENV_ARGUMENTS if name in kwargs}
        scenario_kwargs = {**(scenario_kwargs or {}), **kwargs}
        _check_arguments(scenario, scenario_kwargs, num_envs, state, execution)
        import_vmas()
        seed = int(torch.randint(2**31, ())) if seed is None else seed
        self._seed_of_world = seed
        self._pristine = scenario if isinstance(scenario, str) else copy.deepcopy(scenario)
        self._state_of = state
        self._info = info
        self._bank: StartBank | None = None
        self._simulator_state: SimulatorState | None = None
        self._refusal: str | None = None
        super().__init__(
            scenario,
            num_envs=num_envs,
            continuous_actions=continuous_actions,
            max_steps=max_steps,
            categorical_actions=categorical_actions,
            seed=None,
            group_map=group_map,
            scenario_kwargs={**scenario_kwargs, **env_kwargs},
        )
        self._initial_tensors = read_tensors(self._env, _VIEWER)
        self._set_seed(seed)

    # ------------------------------------------------------------------------------ building

    def _build_env(
        self, scenario, num_envs, continuous_actions, max_steps, seed, **scenario_kwargs
    ):
        self.scenario_name = scenario
        self.from_pixels = self.pixels_only = False
        self._make_arguments = dict(
            continuous_actions=continuous_actions,
            max_steps=max_steps,
            terminated_truncated=True,
            **scenario_kwargs,
        )
        device = self.device if self.device is not None else torch.get_default_device()
        self._random = RandomState(self._seed_of_world, device)
        with self._random.active():
            env = self._build_simulator(num_envs, device, scenario)
        if len(self.batch_size) == 0:
            self.batch_size = torch.Size((num_envs,))
        elif self.batch_size != (num_envs,):
            raise ConfigError(
                f"VmasEnv: batch_size is {tuple(self.batch_size)}, expected ({num_envs},)."
            )
        return env

    def _build_simulator(self, num_envs: int, device: torch.device, scenario=None) -> Environment:
        scenario = copy.deepcopy(self._pristine) if scenario is None else scenario
        return build_simulator(scenario, num_envs, device, self._make_arguments, self._info)

    def _make_specs(self, env: Environment) -> None:
        super()._make_specs(env)
        flag = Categorical(2, shape=(1,), dtype=torch.bool, device=self.device)
        flags = {key: flag.clone() for key in ("done", "terminated", "truncated")}
        self.full_done_spec_unbatched = Composite(flags, device=self.device)
        agents = [env.agents[i] for i in range(env.n_agents)]
        self._indices = {
            group: [self.agent_names_to_indices_map[name] for name in names]
            for group, names in self.group_map.items()
        }
        if self._state_of is not None:
            state = self._read_state([env.scenario.observation(agent) for agent in agents])
            # The unbatched spec of a lazily stacked group has wrong shapes in TorchRL.
            spec = self.full_observation_spec.clone()  # type: ignore[has-type]
            spec["state"] = Unbounded(state.shape, device=self.device, dtype=state.dtype)
            self.full_observation_spec = spec

    def _make_unbatched_group_specs(self, group: str) -> tuple[TensorSpec | None, ...]:
        *specs, info = super()._make_unbatched_group_specs(group)
        return (*specs, info if self._info else None)

    # ------------------------------------------------------------------------ reset and step

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        envs = None if tensordict is None else tensordict.get("_reset", None)
        with self._random.active():
            if envs is None or bool(envs.all()):
                self._env._reset(return_observations=False)
            else:
                self._start_episodes(envs.reshape(self.batch_size))
            read = self._env._get_from_scenario(
                get_observations=True,
                get_rewards=False,
                get_infos=self._info,
                get_dones=True,
            )
            observations, terminated, truncated, *infos = read
            return self._pack(observations, None, terminated, truncated, infos)

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        actions: list[Tensor] = [None] * self._env.n_agents  # type: ignore[list-item]
        for group, indices in self._indices.items():
            for i, row in zip(indices, self._action_rows(tensordict, group)):
                actions[i] = row.unsqueeze(-1) if row.ndim == 1 else row
        with self._random.active():
            advance(self._env, actions)
            read = self._env._get_from_scenario(
                get_observations=True,
                get_rewards=True,
                get_infos=self._info,
                get_dones=True,
            )
            observations, rewards, terminated, truncated, *infos = read
            return self._pack(observations, rewards, terminated, truncated, infos)

    def _action_rows(self, tensordict: TensorDictBase, group: str) -> Sequence[Tensor]:
        """Each agent's action, ``[E, A]`` or ``[E]``."""
        own = tensordict.get(group)
        if is_lazy(own):
            one_hot = not (self.continuous_actions or self.categorical_actions)
            rows = [member.get("action", None) for member in own.unbind(1)]
            self._refuse_nothing(group, rows[0])
            return [row.int().argmax(-1) for row in rows] if one_hot else rows
        action = own.get("action", None)
        self._refuse_nothing(group, action)
        return self.read_action(action, group=group)

    @staticmethod
    def _refuse_nothing(group: str, action: Tensor | None) -> None:
        if action is None:
            raise SpecError(
                f"VmasEnv.step: group {group!r} has no action, expected {(group, 'action')!r}; "
                "the policy must act for every group."
            )

    def _start_episodes(self, envs: Tensor) -> None:
        bank = self._starts()
        if bank is not None:
            bank.draw(envs)
            return
        for i in envs.nonzero().squeeze(-1).tolist():
            self._env._reset_at(i, return_observations=False)

    def _pack(self, observations, rewards, terminated, truncated, infos) -> TensorDict:
        done = terminated | truncated
        source: dict[str, Any] = {
            "done": done.unsqueeze(-1),
            "terminated": terminated.unsqueeze(-1),
            "truncated": (truncated & ~terminated).unsqueeze(-1),
        }
        infos = infos[0] if infos else [{}] * len(observations)
        for group, indices in self._indices.items():
            source[group] = self._pack_group(group, indices, observations, rewards, infos)
        if self._state_of is not None:
            source["state"] = self._read_state(observations)
        return TensorDict._new_unsafe(source, batch_size=self.batch_size, device=self.device)

    def _pack_group(self, group, indices, observations, rewards, infos) -> TensorDictBase:
        if self.het_specs_map[group]:
            return self._stack_lazily(indices, observations, rewards, infos)
        batch_size = torch.Size((*self.batch_size, len(indices)))
        source = {"observation": _stack([observations[i] for i in indices], batch_size)}
        if rewards is not None:
            earned = [rewards[i].reshape(*self.batch_size, 1) for i in indices]
            source["reward"] = torch.stack(earned, 1)
        if infos[indices[0]]:
            rows = [{k: v.to(torch.float32) for k, v in infos[i].items()} for i in indices]
            source["info"] = _stack(rows, batch_size)
        return TensorDict._new_unsafe(source, batch_size=batch_size, device=self.device)

    def _stack_lazily(self, indices, observations, rewards, infos) -> TensorDictBase:
        members = []
        for i in indices:
            member = TensorDict(
                {"observation": self.read_obs(observations[i])}, self.batch_size, self.device
            )
            if rewards is not None:
                member["reward"] = self.read_reward(rewards[i])
            if infos[i]:
                member["info"] = self.read_info(infos[i])
            members.append(member)
        # Lazily even where what they see agrees: their actions do not.
        return LazyStackedTensorDict(*members, stack_dim=1)

    def _read_state(self, observations: Sequence[Any]) -> Tensor:
        if callable(self._state_of):
            state = self._state_of(self._env)
            if state.ndim != 2 or state.shape[0] != self._env.num_envs:
                raise ConfigError(
                    f"VmasEnv: state(...) gave shape {tuple(state.shape)}, "
                    f"expected [{self._env.num_envs}, S]."
                )
            return state
        return torch.cat([row for x in observations for row in _rows(x)], -1)

    # --------------------------------------------------------- random state, snapshot, starts

    def _set_seed(self, seed: int | None) -> None:
        self._random.seed(0 if seed is None else seed)
        # A reset does not write everything that info and the like read: what is left over from
        # earlier comes from this seed, too.
        write_tensors(self._env, self._initial_tensors, _VIEWER)
        with self._random.active():
            self._env._reset(return_observations=False)
            warm_up(self._env, self._info)
            self._env._reset(return_observations=False)
        self._random.seed(0 if seed is None else seed)
        if self._bank is not None:
            self._bank.empty()

    def snapshot(self) -> TensorDict:
        """The environment's whole state: simulator, random state and drawn starts.

        Returns:
            TensorDict: to be given to :meth:`restore`; saves with ``torch.save(x.to_dict())``.

        Raises:
            SimulatorStateError: a scenario whose state cannot be read (``road_traffic``).
        """
        source: dict[str, Any] = {
            "of": self._built_as(),
            "simulator": self._state().read(self._env),
            "random": TensorDict(self._random.state_dict()),
        }
        if self._bank is not None:
            source["starts"] = self._bank.state_dict(self._state())
        return TensorDict(source)

    def restore(self, snapshot: TensorDict) -> None:
        """Continues from a snapshot of an environment that was built with the same arguments.

        Raises:
            SimulatorStateError: a snapshot of another scenario or another number of envs.
        """
        if snapshot["of"] != self._built_as():
            raise SimulatorStateError(
                f"a snapshot of {snapshot['of']} does not fit {self._built_as()}; "
                "restore it into an environment that was built with the same arguments."
            )
        self._state().write(self._env, snapshot["simulator"])
        if "starts" in snapshot.keys():
            bank = self._starts()
            assert bank is not None
            bank.load_state_dict(self._state(), snapshot["starts"])
        else:
            self._bank = None
        self._random.load_state_dict(dict(snapshot["random"].items()))

    def _built_as(self) -> str:
        name = self.scenario_name
        name = name if isinstance(name, str) else type(name).__name__
        arguments = {"num_envs": self._env.num_envs, **self._make_arguments}
        return f"{name}({', '.join(f'{k}={v!r}' for k, v in sorted(arguments.items()))})"

    def _state(self) -> SimulatorState:
        if self._simulator_state is None:

            def probe(num_envs: int) -> Environment:
                env = self._build_simulator(num_envs, torch.device("cpu"))
                warm_up(env, self._info)
                return env

            with RandomState(self._seed_of_world).active():
                self._simulator_state = SimulatorState(probe, exclude=_VIEWER)
        return self._simulator_state

    def _starts(self) -> StartBank | None:
        """The bank of start states, or None where the scenario's state cannot be read."""
        if self._bank is None and self._refusal is None:
            try:
                state = self._state()
            except SimulatorStateError as refusal:
                self._refusal = str(refusal)
                warnings.warn(
                    f"{self.scenario_name}: envs are reset one by one, since the simulator's "
                    f"state cannot be written as tensors ({refusal})",
                    stacklevel=2,
                )
                return None
            # The twin draws its world from the same seed, and its starts from this env's state.
            with RandomState(self._seed_of_world, self._env.device).active():
                twin = self._build_simulator(self._env.num_envs, self._env.device)
            self._bank = StartBank(
                state,
                self._env,
                twin,
                self._reset_all if self._draws_together() else self._reset_each,
                self._env.num_envs,
                self._env.device,
            )
        return self._bank

    def _draws_together(self) -> bool:
        """Whether a full reset draws a start of its own for each env, as single resets do."""
        n = SimulatorState.PROBES[1]
        with RandomState(self._seed_of_world).active():
            probe = self._build_simulator(n, torch.device("cpu"))
            together = random_draws(lambda: self._reset_all(probe))
            alone = random_draws(lambda: probe._reset_at(0, return_observations=False))
        shared = [shape for shape in together if n not in shape]
        # What is drawn in a full reset only, such as which goal is the true one, may be shared.
        return not shared or len(alone) <= len(together) - len(shared)

    @staticmethod
    def _reset_all(env: Environment) -> None:
        env._reset(return_observations=False)

    @staticmethod
    def _reset_each(env: Environment) -> None:
        # Some scenarios (passage) draw one layout for all envs of a full reset.
        for i in range(env.num_envs):
            env._reset_at(i, return_observations=False)

    def to(self, device: torch.device | str) -> VmasEnv:
        """Moves the simulation to a device."""
        self._random = RandomState(self._seed_of_world, device)
        self._bank = None
        return super().to(device)


def _check_arguments(scenario, scenario_kwargs, num_envs, state, execution) -> None:
    if isinstance(scenario, str):
        check_scenario(scenario, scenario_kwargs)
    else:
        known = _arguments_of(type(scenario))
        if known is not None:
            check_arguments(type(scenario).__name__, scenario_kwargs, known)
    if num_envs < 1:
        raise ConfigError(f"VmasEnv: num_envs is {num_envs}, expected 1 or more.")
    if state is not None and state != "observations" and not callable(state):
        raise ConfigError(
            f"VmasEnv: state is {state!r}, expected 'observations', a callable or None."
        )
    if execution != "eager":
        raise ConfigError(f"VmasEnv: execution is {execution!r}; this version runs 'eager' only.")


def _arguments_of(scenario: type) -> frozenset[str] | None:
    """Names of the arguments that a scenario's classes read, or None where they cannot be told."""
    known: frozenset[str] = frozenset()
    for cls in scenario.__mro__:
        if cls is object or cls.__module__.startswith("vmas.simulator"):
            continue
        module = inspect.getmodule(cls)
        try:
            names = None if module is None else read_arguments(inspect.getsource(module))
        except (OSError, TypeError):
            return None
        if names is None:
            return None
        known |= names
    return known


def _stack(rows: Sequence[Any], batch_size: torch.Size) -> Any:
    """Stacks the agents' entries, tensors ``[E, ...]`` or dicts of such, in dim 1."""
    if isinstance(rows[0], Tensor):
        return torch.stack([row.unsqueeze(-1) if row.ndim == 1 else row for row in rows], 1)
    source = {key: _stack([row[key] for row in rows], batch_size) for key in rows[0]}
    return TensorDict(source, batch_size)


def _rows(observation: Any) -> list[Tensor]:
    if isinstance(observation, Tensor):
        return [observation.reshape(observation.shape[0], -1)]
    return [row for value in observation.values() for row in _rows(value)]
