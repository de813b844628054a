"""Rewards multiplied by a factor, but not in evaluations."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tensordict.utils import NestedKey
from torch import Tensor
from torchrl.data import TensorSpec, Unbounded
from torchrl.envs import EnvBase, RewardScaling, TransformedEnv

__all__ = ["ScaledRewards", "scaled"]


class ScaledRewards(RewardScaling):
    """Multiplies rewards by a factor; evaluations see the environment's own rewards.

    Args:
        scale (float): factor, above 0.
        in_keys (sequence of NestedKey): keys of the rewards.

    Shapes:
        rewards ``[*B, N, 1]``, in the environment's units.

    Reduces to: the environment's own rewards at ``scale=1``, and within :meth:`measured`.

    Examples:
        >>> import torch
        >>> transform = ScaledRewards(0.5, [("agents", "reward")])
        >>> transform._apply_transform(torch.tensor([4.0]))
        tensor([2.])
        >>> with transform.measured():
        ...     transform._apply_transform(torch.tensor([4.0]))
        tensor([4.])
    """

    def __init__(self, scale: float, in_keys: list[NestedKey]) -> None:
        super().__init__(0.0, scale, in_keys=in_keys)
        self._is_measured = False

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Context in which rewards are not scaled."""
        before, self._is_measured = self._is_measured, True
        try:
            yield
        finally:
            self._is_measured = before

    def transform_reward_spec(self, reward_spec: TensorSpec) -> TensorSpec:
        """Returns a spec without bounds, because evaluations have other rewards than training."""
        for key in self.in_keys:
            own = reward_spec[key]
            reward_spec[key] = Unbounded(own.shape, device=own.device, dtype=own.dtype)
        return reward_spec

    def _apply_transform(self, reward: Tensor) -> Tensor:
        return reward if self._is_measured else super()._apply_transform(reward)


def scaled(env: EnvBase, scale: float) -> EnvBase:
    """Multiplies the rewards of all groups by a factor.

    Args:
        env (EnvBase): environment.
        scale (float): factor, above 0.
    """
    transform = ScaledRewards(scale, list(env.reward_keys))
    return TransformedEnv(env, transform, auto_unwrap=True)
