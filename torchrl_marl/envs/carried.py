"""Transforms that carry their state in the data, such as values drawn in each episode.

Shapes: E envs, N agents of a group.
"""

from __future__ import annotations

import contextlib
from functools import cached_property

import torch
from tensordict import NestedKey, TensorDictBase
from torchrl.data import Composite, Unbounded
from torchrl.envs import EnvBase, Transform, TransformedEnv

from torchrl_marl.errors import ConfigError
from torchrl_marl.specs import GroupSpec, TeamSpec
from torchrl_marl.specs.groups import is_lazy

__all__ = ["CarriedTransform", "inner_keys", "use_random_state"]


class CarriedTransform(Transform):
    """Transform of the observations or actions of all groups, with a state of every agent.

    Its state is carried in the data, as leaves of each group. So it is reset with the envs, is part
    of a run's checkpoints, and can be part of a graph. Collectors leave it out of batches.
    """

    @cached_property
    def groups(self) -> dict[str, GroupSpec]:
        """Groups of the environment."""
        groups = TeamSpec.from_env(self.parent).groups
        for group in groups.values():
            self._check_group(group)
        return groups

    def _check_group(self, group: GroupSpec) -> None:
        """Raises an error if the transform cannot be applied to a group."""

    @cached_property
    def leaves(self) -> dict[str, dict[str, Unbounded]]:
        """Specs ``[N, ...]`` of the leaves that the transform carries, by group and leaf."""
        return {name: self._carried_specs(group) for name, group in self.groups.items()}

    def _carried_specs(self, group: GroupSpec) -> dict[str, Unbounded]:
        """Returns the specs ``[N, ...]`` of a group's carried leaves."""
        raise NotImplementedError

    @property
    def carried_keys(self) -> list[NestedKey]:
        """Keys of the carried leaves."""
        return [(name, leaf) for name, leaves in self.leaves.items() for leaf in leaves]

    def transform_observation_spec(self, observation_spec: Composite) -> Composite:
        """Adds the carried leaves to the spec."""
        for name, leaves in self.leaves.items():
            for leaf, spec in leaves.items():
                own = spec.expand(*observation_spec.shape, *spec.shape)
                observation_spec[name, leaf] = own.to(observation_spec.device)
        return observation_spec

    def _reset(
        self, tensordict: TensorDictBase, tensordict_reset: TensorDictBase
    ) -> TensorDictBase:
        size, device = self.parent.batch_size, self.parent.device
        for name, spec in self.groups.items():
            group = self._dense_group(tensordict_reset, name)
            for leaf, own in self.leaves[name].items():
                shape = (*size, *own.shape)
                group.set(leaf, torch.zeros(shape, dtype=own.dtype, device=device))
            self._start_episodes(group, spec)
            self._transform_output(group, spec)
        return tensordict_reset

    def _start_episodes(self, group: TensorDictBase, spec: GroupSpec) -> None:
        """Sets the carried leaves at the start of episodes; they are zeros before the call."""

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        for name, spec in self.groups.items():
            self._copy_carried(tensordict, next_tensordict, spec)
            self._transform_output(next_tensordict.get(name), spec)
        return next_tensordict

    def _copy_carried(
        self, tensordict: TensorDictBase, next_tensordict: TensorDictBase, spec: GroupSpec
    ) -> None:
        """Copies a group's carried leaves to the next step."""
        before, group = tensordict.get(spec.name), self._dense_group(next_tensordict, spec.name)
        for leaf in self.leaves[spec.name]:
            group.set(leaf, before.get(leaf))

    def _transform_output(self, group: TensorDictBase, spec: GroupSpec) -> None:
        """Transforms a group's output; its carried leaves still have the last step's values."""

    def _dense_group(self, tensordict: TensorDictBase, name: str) -> TensorDictBase:
        group = tensordict.get(name)
        if is_lazy(group):
            raise ConfigError(
                f"{type(self).__name__}: group {name!r} is stacked lazily, expected dense data; "
                "put torchrl_marl.envs.PadAgents before it, or use randomized(env, ...)."
            )
        return group


def inner_keys(group: GroupSpec) -> list[NestedKey]:
    """Returns the keys of a group's observations inside the group."""
    keys = [tuple(key[1:]) for key in group.observation_keys]
    return [key if len(key) > 1 else key[0] for key in keys]


def use_random_state(env: EnvBase) -> contextlib.AbstractContextManager[None]:
    """Returns a context in which the random state of an environment is used, if it has one."""
    while isinstance(env, TransformedEnv):
        env = env.base_env
    random, captured = (getattr(env, name, None) for name in ("random_state", "_captured"))
    # A graph draws from torch's generator.
    if random is None or (captured is not None and captured.in_graph):
        return contextlib.nullcontext()
    return random.active()
