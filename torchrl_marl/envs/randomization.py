"""Domain randomization: each episode draws parameters of the environment, noise and delays.

Shapes: E envs, N agents of a group, D steps of the longest delay.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor
from torchrl.data import Composite, Unbounded
from torchrl.envs import Compose, EnvBase, TransformedEnv

from torchrl_marl.envs.carried import CarriedTransform, inner_keys, use_random_state
from torchrl_marl.envs.ranges import ValueRange
from torchrl_marl.envs.transforms import with_dense_groups
from torchrl_marl.errors import ConfigError, nearest, quoted
from torchrl_marl.functional import expand_mask
from torchrl_marl.specs import GroupSpec

__all__ = ["ActionDelay", "ActionNoise", "ObservationDelay", "ObservationNoise", "randomized"]


_MAX_DELAY = 10_000  # steps of a delay: each agent carries as many values


class _DrawnTransform(CarriedTransform):
    """Transform with a value that every agent draws from a range at the start of an episode.

    Args:
        range (number, list or ValueRange): a number, ``[low, high]`` or ``[low, high, log]``.

    Raises:
        ConfigError: the range is malformed, or has values below 0.
    """

    leaf: str  # name of the setting, and of the drawn value in each group
    dtype = torch.float32

    def __init__(self, range: Any) -> None:
        super().__init__()
        own = ValueRange.read(self.leaf, range)
        if own.low < 0:
            raise ConfigError(f"{self.leaf} is {quoted(range)}, expected 0 or more.")
        # Plain attributes, so that a captured rollout notices when they change.
        self.low, self.high, self.log = own.low, own.high, own.log

    @property
    def range(self) -> ValueRange:
        """Range of the drawn value."""
        return ValueRange(self.low, self.high, self.log)

    def _carried_specs(self, group: GroupSpec) -> dict[str, Unbounded]:
        shape = (group.n_agents,)
        return {} if self.range.is_fixed else {self.leaf: Unbounded(shape, dtype=self.dtype)}

    def _start_episodes(self, group: TensorDictBase, spec: GroupSpec) -> None:
        if not self.range.is_fixed:
            with use_random_state(self.parent):
                group.set(self.leaf, self._draw((*self.parent.batch_size, spec.n_agents)))

    def _draw(self, shape: tuple[int, ...]) -> Tensor:
        return self.range.draw(shape, self.parent.device)


class ObservationNoise(_DrawnTransform):
    """Adds Gaussian noise to observations; each agent draws its standard deviation per episode.

    The critic's ``"state"`` stays exact. Observations of integers, such as images, are not changed.

    Args:
        range (number, list or ValueRange): standard deviation: a number, ``[low, high]`` or
            ``[low, high, log]``.

    Reduces to: the identity, for 0.

    Examples:
        >>> from torchrl_marl.envs.toy import Arena
        >>> env = TransformedEnv(Arena(3, n_agents=2), ObservationNoise([0.0, 0.1]))
        >>> env.rollout(4, break_when_any_done=False)["agents", "observation_noise"].shape
        torch.Size([3, 4, 2])
    """

    leaf = "observation_noise"

    def transform_observation_spec(self, observation_spec: Composite) -> Composite:
        """Adds the drawn deviations to the spec; noisy observations have no bounds."""
        observation_spec = super().transform_observation_spec(observation_spec)
        keys = [key for group in self.groups.values() for key in group.observation_keys]
        for key in keys if self.high else ():
            own = observation_spec[key]
            if own.dtype.is_floating_point:
                observation_spec[key] = Unbounded(own.shape, device=own.device, dtype=own.dtype)
        return observation_spec

    def _transform_output(self, group: TensorDictBase, spec: GroupSpec) -> None:
        if not self.high:
            return
        with use_random_state(self.parent):
            for key in inner_keys(spec):
                x = group.get(key)
                if x.is_floating_point():
                    group.set(key, _add_noise(x, group.get(self.leaf, self.low)))


class ActionNoise(_DrawnTransform):
    """Adds Gaussian noise to continuous actions; each agent draws its standard deviation.

    The noisy action is clipped to the action's bounds. The data keep the policy's own action.

    Args:
        range (number, list or ValueRange): standard deviation, as for :class:`ObservationNoise`.

    Raises:
        ConfigError: a group has discrete actions.

    Reduces to: the identity, for 0.

    Examples:
        >>> from torchrl_marl.envs.toy import Arena
        >>> env = TransformedEnv(Arena(3, continuous_actions=True), ActionNoise(0.1))
        >>> env.rollout(4, break_when_any_done=False).batch_size
        torch.Size([3, 4])
    """

    leaf = "action_noise"

    def _check_group(self, group: GroupSpec) -> None:
        if group.discrete or group.branches:
            raise ConfigError(
                f"action_noise: group {group.name!r} has discrete actions, expected continuous "
                "ones; leave action_noise out."
            )

    @cached_property
    def bounds(self) -> dict[str, tuple[Tensor, ...] | None]:
        """Lower and upper bounds of the actions, ``[N, A]`` each, by group."""
        device = self.parent.device
        bounds = {name: group.action_bounds for name, group in self.groups.items()}
        return {name: x and tuple(bound.to(device) for bound in x) for name, x in bounds.items()}

    def _inv_call(self, tensordict: TensorDictBase) -> TensorDictBase:
        for name in self.groups if self.high else ():
            group = self._dense_group(tensordict, name)
            with use_random_state(self.parent):
                action = _add_noise(group.get("action"), group.get(self.leaf, self.low))
            if (bounds := self.bounds[name]) is not None:
                action = action.clamp(*bounds)
            group.set("action", action)
        return tensordict


class _Delay(_DrawnTransform):
    """Delay by a number of steps in which the agent acts; carries a history of D values.

    While an agent's history is shorter than its delay, the oldest value is used. Agents that are
    dead or waiting keep their history, and their own values are not changed. An agent that comes
    back begins a new history.
    """

    dtype = torch.int64
    history: str  # name of the histories, [E, N, D, ...]
    count: str  # name of the number of values in an agent's history, [E, N]

    def __init__(self, range: Any) -> None:
        super().__init__(range)
        if self.log:
            raise ConfigError(
                f"{self.leaf} is {quoted(range)}, but delays are drawn without log; use for "
                f"example {self.leaf}=[{self.low:g},{self.high:g}]."
            )
        if self.high > _MAX_DELAY:
            raise ConfigError(
                f"{self.leaf} is {quoted(range)}, expected at most {_MAX_DELAY:,} steps."
            )
        if self.low != int(self.low) or self.high != int(self.high):
            raise ConfigError(
                f"{self.leaf} is {quoted(range)}, expected whole numbers of steps; use for example "
                f"{self.leaf}=[0,2]."
            )

    def _draw(self, shape: tuple[int, ...]) -> Tensor:
        return torch.randint(int(self.low), int(self.high) + 1, shape, device=self.parent.device)

    def _carried_specs(self, group: GroupSpec) -> dict[str, Unbounded]:
        n, depth = group.n_agents, int(self.high)
        leaves = {**super()._carried_specs(group), self.count: Unbounded((n,), dtype=torch.int64)}
        for i, spec in enumerate(self._delayed_specs(group)):
            shape = (n, depth, *spec.shape[1:])
            leaves[f"{self.history}_{i}"] = Unbounded(shape, dtype=spec.dtype)
        return leaves

    def _copy_carried(
        self, tensordict: TensorDictBase, next_tensordict: TensorDictBase, spec: GroupSpec
    ) -> None:
        super()._copy_carried(tensordict, next_tensordict, spec)
        if spec.respawns and spec.agent_done:
            group = next_tensordict.get(spec.name)
            was_done, is_done = (td.get(spec.done_key) for td in (tensordict, next_tensordict))
            new_life = (was_done & ~is_done).squeeze(-1)
            group.set(self.count, torch.where(new_life, 0, group.get(self.count)))

    def _delayed_specs(self, group: GroupSpec) -> list[Any]:
        """Returns the specs ``[N, ...]`` of a group's delayed leaves."""
        raise NotImplementedError

    def _delay_leaves(self, group: TensorDictBase, spec: GroupSpec, keys: list[NestedKey]) -> None:
        """Replaces leaves of a group by their delayed values, and advances the histories."""
        count, acts = group.get(self.count), group.get("mask", None)
        acts = torch.ones_like(count, dtype=torch.bool) if acts is None else acts
        drawn = group.get(self.leaf, None)
        delay = count.clamp(max=int(self.low)) if drawn is None else torch.minimum(count, drawn)
        for i, key in enumerate(keys):
            x, past = group.get(key), group.get(f"{self.history}_{i}")
            values = torch.cat([x.unsqueeze(2), past], 2)
            index, acting = (expand_mask(y, x) for y in (delay, acts))
            delayed = torch.take_along_dim(values, index.unsqueeze(2), 2).squeeze(2)
            group.set(key, torch.where(acting, delayed, x))
            past = torch.where(acting.unsqueeze(2), values[:, :, :-1], past)
            group.set(f"{self.history}_{i}", past)
        group.set(self.count, (count + acts).clamp(max=int(self.high)))


class ObservationDelay(_Delay):
    """Delays observations; each agent draws its delay per episode.

    With a delay of d, the agent sees the observation from d steps ago, counted in steps in which
    it acts. The first observation replaces the missing earlier ones. Masks, rewards and the
    critic's ``"state"`` are not delayed.

    Args:
        range (number, list or ValueRange): delay in steps: a whole number, or ``[low, high]``.

    Shapes:
        - ``(group, "past_observation_0")``: ``[E, N, D, ...]``; one for each observation of a group

    Raises:
        ConfigError: the range is malformed, has log, values that are not whole numbers, or above
            10,000.

    Reduces to: the identity, for 0.

    Examples:
        >>> from torchrl_marl.envs.toy import Arena
        >>> env = TransformedEnv(Arena(3, n_agents=2), ObservationDelay([0, 2]))
        >>> env.rollout(4, break_when_any_done=False)["agents", "past_observation_0"].shape
        torch.Size([3, 4, 2, 2, 6])
    """

    leaf, history, count = "observation_delay", "past_observation", "past_observation_count"

    def _delayed_specs(self, group: GroupSpec) -> list[Any]:
        spec = self.parent.full_observation_spec_unbatched
        return [spec[key] for key in group.observation_keys]

    def _transform_output(self, group: TensorDictBase, spec: GroupSpec) -> None:
        self._delay_leaves(group, spec, inner_keys(spec))


class ActionDelay(_Delay):
    """Delays actions; each agent draws its delay per episode.

    With a delay of d, the environment executes the action from d steps ago, counted in steps in
    which the agent acts. The first action replaces the missing earlier ones. The data keep the
    policy's own action.

    Args:
        range (number, list or ValueRange): delay in steps: a whole number, or ``[low, high]``.

    Shapes:
        - ``(group, "past_action_0")``: ``[E, N, D, ...]``

    Raises:
        ConfigError: as for :class:`ObservationDelay`, or a group has action masks.

    Reduces to: the identity, for 0.

    Examples:
        >>> from torchrl_marl.envs.toy import Arena
        >>> env = TransformedEnv(Arena(3, n_agents=2), ActionDelay(1))
        >>> env.rollout(4, break_when_any_done=False)["agents", "past_action_0"].shape
        torch.Size([3, 4, 2, 1])
    """

    leaf, history, count = "action_delay", "past_action", "past_action_count"

    def _check_group(self, group: GroupSpec) -> None:
        if group.action_mask_key is not None:
            raise ConfigError(
                f"action_delay: group {group.name!r} has action masks, so that a delayed action "
                "may be illegal; leave action_delay out."
            )

    def _delayed_specs(self, group: GroupSpec) -> list[Any]:
        return [self.parent.full_action_spec_unbatched[group.action_key]]

    def _inv_call(self, tensordict: TensorDictBase) -> TensorDictBase:
        for name, spec in self.groups.items():
            self._delay_leaves(self._dense_group(tensordict, name), spec, ["action"])
        return tensordict


def _add_noise(x: Tensor, std: Tensor | float) -> Tensor:
    scale = expand_mask(std, x) if isinstance(std, Tensor) else std
    return x + torch.randn_like(x) * scale


# In the order in which they transform an observation; actions pass them in reverse.
_ORDER = (ActionDelay, ActionNoise, ObservationDelay, ObservationNoise)
_TRANSFORMS = {kind.leaf: kind for kind in _ORDER}  # those of EVERYWHERE


def randomized(env: EnvBase, ranges: Mapping[str, Any]) -> EnvBase:
    """Randomizes an environment: each new episode draws every named value from its range.

    The names are the environment's own parameters, and ``observation_noise``,
    ``observation_delay``, ``action_noise`` and ``action_delay``, which work in all environments.

    Args:
        env (EnvBase): environment; one with parameters has the method ``randomize(ranges)``.
        ranges (mapping): name -> number, ``[low, high]`` or ``[low, high, log]``.

    Returns:
        EnvBase: the same environment, with transforms for noise and delays, if there are any.

    Raises:
        ConfigError: ``ranges`` is not a mapping, a name is unknown, or a range is malformed; the
            message lists the known names.

    Examples:
        >>> from torchrl_marl.envs import VmasEnv
        >>> env = VmasEnv("balance", num_envs=2, seed=0)
        >>> env = randomized(env, {"agent_mass": [0.7, 1.3], "observation_delay": [0, 2]})
        >>> env.rollout(3)["agents", "observation"].shape
        torch.Size([2, 3, 3, 16])
        >>> env.domain_parameters["agent_mass"].shape
        torch.Size([2, 3])
    """
    if not isinstance(ranges, Mapping):
        raise ConfigError(
            f"randomized: ranges is {quoted(ranges)}, expected a dict of ranges by name, such as "
            '{"observation_noise": [0, 0.1]}.'
        )
    parameters = {name: value for name, value in ranges.items() if name not in _TRANSFORMS}
    if parameters:
        _randomize_parameters(env, parameters)
    transforms = [kind(ranges[name]) for name, kind in _TRANSFORMS.items() if name in ranges]
    transforms = [transform for transform in transforms if transform.high > 0]
    if not transforms:
        return env
    return TransformedEnv(with_dense_groups(env), Compose(*transforms), auto_unwrap=True)


def _randomize_parameters(env: EnvBase, ranges: Mapping[str, Any]) -> None:
    base: Any = env.base_env if isinstance(env, TransformedEnv) else env
    if hasattr(base, "randomize"):
        return base.randomize(ranges)
    name = next(iter(ranges))
    raise ConfigError(
        f"{type(base).__name__} has no parameter {quoted(name)} to randomize; "
        f"{nearest(name, _TRANSFORMS)}it has {', '.join(_TRANSFORMS)}."
    )
