"""What an environment carries from step to step for policies: memory, and who plays.

Shapes: E envs, N agents of a group, S numbers that an agent remembers.
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
    "Remember",
    "WhoPlays",
    "remembered_by",
    "remembered_keys",
    "with_memory",
    "with_players",
]


class Remember(Transform):
    """Carries what agents remember: ``(group, "hidden")``, zeros after a reset.

    The policy writes ``("next", group, "hidden")``; where it does not, as a random one, the state
    stays as it is. It holds widths only, no tensor and no batch size, so that it serves any
    number of envs and graphs (TorchRL's ``TensorDictPrimer`` remembers a batch size).

    Args:
        sizes (mapping): group -> the numbers S that each of its agents remembers.

    Shapes:
        - ``(group, "hidden")``: ``[E, N, S]``, dense; here and under ``"next"``

    Reduces to: nothing, without groups.

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
        """``(N, S)`` of each group that remembers."""
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
        """Adds what is carried to the spec."""
        for name, shape in self.shapes.items():
            observation_spec[name, self.leaf] = Unbounded(
                (*observation_spec.shape, *shape), device=observation_spec.device, dtype=self.dtype
            )
        return observation_spec


class WhoPlays(Remember):
    """Carries who plays: ``(group, "player")``, 0 where an episode is new.

    :class:`~torchrl_marl.collectors.matches.MatchPolicy` draws a stored player there, who then
    plays to the episode's end.

    Args:
        groups (iterable of str): whose agents' players are carried.

    Shapes:
        - ``(group, "player")``: int64 ``[E, N]``; here and under ``"next"``

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
    """Returns the environment with :class:`WhoPlays` for some groups.

    Raises:
        SpecError: a group that the environment has not.
    """
    known, groups = TeamSpec.from_env(env).groups, list(groups)
    for name in groups:
        if name not in known:
            raise SpecError(
                f"the environment has no group {name!r}; {nearest(name, known)}it has "
                f"{', '.join(known)}."
            )
    return TransformedEnv(env, WhoPlays(groups), auto_unwrap=True)


def with_memory(env: EnvBase, policy: nn.Module | Mapping[str, int]) -> EnvBase:
    """Returns the environment with what a policy, or a critic, needs to remember.

    Args:
        env (EnvBase): with dense or padded groups.
        policy (nn.Module or mapping): a policy of :func:`~torchrl_marl.modules.make_actor` or of a
            run; or group -> the numbers that an agent remembers. One without memory leaves the
            environment as it is.

    Keys:
        - adds: ``(group, "is_init")`` of every group; ``(group, "hidden")`` of those that remember

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
    sizes = remembered_by(policy) if isinstance(policy, nn.Module) else dict(policy)
    if isinstance(policy, nn.Module) and not sizes:
        return env
    if any(type(part) is Remember for part in _parts_of(env)):
        return env
    trackers = [] if _is_tracked(env) else [AgentInitTracker()]
    return TransformedEnv(env, Compose(*trackers, Remember(sizes)), auto_unwrap=True)


def remembered_by(policy: nn.Module) -> dict[str, int]:
    """Returns the numbers that an agent of a policy remembers, by group; empty without memory."""
    found: dict[str, int] = {}
    for module in policy.modules():
        found |= getattr(module, "remembered", {})
    return found


def remembered_keys(env: EnvBase) -> list[NestedKey]:
    """Returns the keys of what is carried on for the policy, beside what the environment gives."""
    parts = [part for part in _parts_of(env) if isinstance(part, Remember)]
    return [(name, part.leaf) for part in parts for name in part.sizes]


def _is_tracked(env: EnvBase) -> bool:
    return any(isinstance(part, AgentInitTracker) for part in _parts_of(env))


def _parts_of(env: EnvBase) -> list[Transform]:
    """Returns the transforms of an environment, those of the ones within included."""
    found: list[Transform] = []
    while isinstance(env, TransformedEnv):
        transform = env.transform
        found += list(transform) if isinstance(transform, Compose) else [transform]
        env = env.base_env
    return found
