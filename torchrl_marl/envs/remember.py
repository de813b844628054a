"""Transforms that carry a policy's hidden states and player indices from step to step.

Shapes: E envs, N agents of a group, S hidden units of an agent.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from tensordict import NestedKey, TensorDictBase
from torch import nn
from torchrl.data import Composite, Unbounded
from torchrl.envs import Compose, EnvBase, Transform, TransformedEnv

from torchrl_marl.envs.transforms import AgentInitTracker
from torchrl_marl.errors import SpecError, nearest
from torchrl_marl.specs import GroupSpec, TeamSpec

__all__ = [
    "PlayerIndices",
    "Remember",
    "hidden_sizes",
    "remembered_keys",
    "unrecorded_keys",
    "with_memory",
    "with_players",
]


class Remember(Transform):
    """Carries hidden states ``(group, "hidden")`` from step to step; sets them to 0 at a reset.

    The policy writes ``("next", group, "hidden")``. If nothing writes it, as with random actions,
    the hidden state does not change. Unlike TorchRL's ``TensorDictPrimer``, the transform has no
    tensors and no fixed batch size, so it fits any number of envs and can be part of a CUDA graph.

    Args:
        sizes (mapping): for each group, the number S of hidden units of an agent.

    Shapes:
        - ``(group, "hidden")``, also under ``"next"``: ``[E, N, S]``, dense

    Reduces to: the identity, if ``sizes`` is empty.

    Examples:
        >>> from torchrl.envs import TransformedEnv
        >>> from torchrl_marl.envs.toy import Arena
        >>> env = TransformedEnv(Arena(3, n_agents=2), Remember({"agents": 8}))
        >>> env.rollout(4, break_when_any_done=False)["next", "agents", "hidden"].shape
        torch.Size([3, 4, 2, 8])
    """

    leaf = "hidden"
    dtype: torch.dtype | None = None

    def __init__(self, sizes: Mapping[str, int]) -> None:
        super().__init__()
        self.sizes = dict(sizes)
        self._shapes: dict[str, tuple[int, ...]] | None = None

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape ``(N, S)`` of the hidden states, by group."""
        if self._shapes is None:
            groups = TeamSpec.from_env(self.parent).groups if self.sizes else {}
            self._shapes = {name: self._shape(groups[name], s) for name, s in self.sizes.items()}
        return self._shapes

    def _shape(self, group: GroupSpec, size: int) -> tuple[int, ...]:
        return group.n_agents, size

    def _reset(
        self, tensordict: TensorDictBase, tensordict_reset: TensorDictBase
    ) -> TensorDictBase:
        for name, shape in self.shapes.items():
            shape, device = (*self.parent.batch_size, *shape), self.parent.device
            zeros = torch.zeros(shape, dtype=self.dtype, device=device)
            tensordict_reset.get(name).set(self.leaf, zeros)
        return tensordict_reset

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        for name in self.sizes:
            group = next_tensordict.get(name)
            if group.get(self.leaf, None) is None:
                group.set(self.leaf, tensordict.get((name, self.leaf)))
        return next_tensordict

    def transform_observation_spec(self, observation_spec: Composite) -> Composite:
        """Adds to the spec the entries that the transform carries."""
        for name, shape in self.shapes.items():
            observation_spec[name, self.leaf] = Unbounded(
                (*observation_spec.shape, *shape), device=observation_spec.device, dtype=self.dtype
            )
        return observation_spec


class PlayerIndices(Remember):
    """Carries the player index of each agent, ``(group, "player")``; sets it to 0 at a reset.

    At the start of an episode, :class:`~torchrl_marl.collectors.matches.MatchPolicy` draws a past
    player. This player acts until the episode ends.

    Args:
        groups (iterable of str): groups with player indices.

    Shapes:
        - ``(group, "player")``, also under ``"next"``: int64 ``[E, N]``

    Examples:
        >>> from torchrl_marl.envs.toy import Arena
        >>> env = with_players(Arena(3, n_agents=2), ["agents"])
        >>> env.rollout(4, break_when_any_done=False)["agents", "player"].shape
        torch.Size([3, 4, 2])
    """

    leaf, dtype = "player", torch.int64

    def __init__(self, groups: Iterable[str]) -> None:
        super().__init__(dict.fromkeys(groups, 1))

    def _shape(self, group: GroupSpec, size: int) -> tuple[int, ...]:
        return (group.n_agents,)


def with_players(env: EnvBase, groups: Iterable[str]) -> EnvBase:
    """Adds the player indices of the given groups to an environment; see :class:`PlayerIndices`.

    Raises:
        SpecError: unknown group.
    """
    known, groups = TeamSpec.from_env(env).groups, list(groups)
    for name in groups:
        if name not in known:
            raise SpecError(
                f"the environment has no group {name!r}; {nearest(name, known)}it has "
                f"{', '.join(known)}."
            )
    return TransformedEnv(env, PlayerIndices(groups), auto_unwrap=True)


def with_memory(env: EnvBase, policy: nn.Module | Mapping[str, int]) -> EnvBase:
    """Adds the hidden states of a policy or critic to an environment.

    Args:
        env (EnvBase): environment with dense or padded groups.
        policy (nn.Module or mapping): a policy made by :func:`~torchrl_marl.modules.make_actor` or
            trained by a run, or the number of hidden units by group. For a policy without memory,
            the environment is returned unchanged.

    Keys:
        - adds ``(group, "is_init")`` in every group, and ``(group, "hidden")`` in every group with
          memory

    Examples:
        >>> from torchrl_marl import TeamSpec
        >>> from torchrl_marl.envs.toy import Arena
        >>> from torchrl_marl.modules import MemoryConfig, RecurrentNetworkConfig, make_actor
        >>> env = Arena(3, n_agents=2)
        >>> config = RecurrentNetworkConfig([8], memory=MemoryConfig("gru", size=4))
        >>> policy = make_actor(TeamSpec.from_env(env).groups["agents"], config)
        >>> with_memory(env, policy).rollout(5, policy)["agents", "hidden"].shape[2:]
        torch.Size([2, 4])
    """
    sizes = hidden_sizes(policy) if isinstance(policy, nn.Module) else dict(policy)
    if isinstance(policy, nn.Module) and not sizes:
        return env
    if any(type(part) is Remember for part in _transforms_of(env)):
        return env
    trackers = [] if _has_init_tracker(env) else [AgentInitTracker()]
    return TransformedEnv(env, Compose(*trackers, Remember(sizes)), auto_unwrap=True)


def hidden_sizes(policy: nn.Module) -> dict[str, int]:
    """Returns the number of hidden units by group; an empty dict for a policy without memory."""
    found: dict[str, int] = {}
    for module in policy.modules():
        found |= getattr(module, "remembered", {})
    return found


def remembered_keys(env: EnvBase) -> list[NestedKey]:
    """Returns the keys of the hidden states and player indices that an environment carries."""
    parts = [part for part in _transforms_of(env) if isinstance(part, Remember)]
    return [(name, part.leaf) for part in parts for name in part.sizes]


def unrecorded_keys(env: EnvBase) -> list[NestedKey]:
    """Returns the keys that collectors leave out of batches, since no network or loss reads them.

    These are the hidden states after a step, which the next step has, and the state of the
    transforms of :mod:`~torchrl_marl.envs.randomization`.
    """
    carried = [key for part in _transforms_of(env) for key in getattr(part, "carried_keys", ())]
    return [*carried, *(("next", *key) for key in (*remembered_keys(env), *carried))]


def _has_init_tracker(env: EnvBase) -> bool:
    return any(isinstance(part, AgentInitTracker) for part in _transforms_of(env))


def _transforms_of(env: EnvBase) -> list[Transform]:
    """Returns the transforms of an environment, including those of inner environments."""
    found: list[Transform] = []
    while isinstance(env, TransformedEnv):
        transform = env.transform
        found += list(transform) if isinstance(transform, Compose) else [transform]
        env = env.base_env
    return found
