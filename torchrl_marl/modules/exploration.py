"""Random actions, and exploration by random actions and noise."""

from __future__ import annotations

import torch
from tensordict import NestedKey, TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor, nn
from torch.types import Device
from torchrl.envs.utils import ExplorationType, exploration_type

from torchrl_marl.modules.inputs import choosable, register_constants
from torchrl_marl.specs import GroupSpec
from torchrl_marl.specs.groups import check_action_mask

__all__ = ["Explore", "RandomActor"]


class RandomActor(TensorDictModuleBase):
    """Uniform random actions for a group; with action masks, only legal ones.

    Unbounded continuous actions are sampled from a standard normal.

    Args:
        group (GroupSpec): group that acts.
        device (torch.device, optional): device of the actions.

    Shapes:
        - action: ``[*B, N, A]``, ``[*B, N]`` or one-hot ``[*B, N, n_actions]``

    Keys:
        - reads: ``group.action_mask_key``
        - writes: ``group.action_key``

    Examples:
        >>> from tensordict import TensorDict
        >>> from torchrl.data import Bounded, Unbounded
        >>> from torchrl_marl import AgentSpec, TeamSpec
        >>> team = TeamSpec([AgentSpec("prey", 3, Unbounded((4,)), Bounded(-1, 1, (2,)))])
        >>> td = TensorDict({"prey": {"observation": torch.zeros(5, 3, 4)}}, [5])
        >>> RandomActor(team.groups["prey"])(td)["prey", "action"].shape
        torch.Size([5, 3, 2])
    """

    own: Tensor | None
    low: Tensor | None
    high: Tensor | None
    branches: Tensor | None

    def __init__(self, group: GroupSpec, device: Device = None) -> None:
        super().__init__()
        self.group = group
        self.in_keys: list[NestedKey] = [group.action_mask_key] if group.action_mask_key else []
        self.out_keys: list[NestedKey] = [group.action_key]
        spec = group.padded_spec["action"]
        if not (group.discrete or group.branches or spec.dtype.is_floating_point):
            raise ValueError(
                f"group {group.name!r}: {type(spec).__name__} actions cannot be sampled, "
                "expected Bounded, Unbounded, Categorical, OneHot, MultiCategorical or Hybrid."
            )
        low, high = group.action_bounds or (None, None)
        branches = torch.tensor(group.branches) if group.branches else None
        own = group.action_padding
        register_constants(self, device, own=own, low=low, high=high, branches=branches)

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Samples actions."""
        self.group.write(tensordict, "action", self.draw(tensordict))
        return tensordict

    def draw(self, tensordict: TensorDictBase) -> Tensor:
        """Returns dense actions without writing them."""
        group_data = self.group.data(tensordict)
        if group_data.ndim > tensordict.ndim:
            self.group.check_number(group_data.batch_size[tensordict.ndim])
        shape = torch.Size((*tensordict.batch_size, self.group.n_agents))
        return (
            self._draw_discrete(group_data, shape)
            if self.group.discrete
            else self._draw_continuous(group_data, shape)
        )

    def _draw_continuous(self, group_data: TensorDictBase, shape: torch.Size) -> Tensor:
        if self.branches is None:
            return self._draw_numbers(group_data, shape)
        choices = self._draw_choices(group_data, shape, self.branches)
        if self.group.hybrid:
            return torch.cat([choices.floor(), self._draw_numbers(group_data, shape)], -1)
        return choices.to(self.group.padded_spec["action"].dtype)

    def _draw_choices(
        self, group_data: TensorDictBase, shape: torch.Size, branches: Tensor
    ) -> Tensor:
        if self.group.action_mask_key is None:
            return torch.rand((*shape, len(branches)), device=branches.device) * branches
        from torchrl_marl.specs.choices import draw_choices

        legal = group_data.get("action_mask")
        check_action_mask(self.group, legal, shape[:-1])
        return draw_choices(legal, self.group.branches).float()

    def _draw_numbers(self, group_data: TensorDictBase, shape: torch.Size) -> Tensor:
        shape = torch.Size((*shape, self.group.continuous_spec.shape[-1]))
        if self.low is None or self.high is None:
            action = torch.randn(shape, device=group_data.device)
            return action if self.own is None else torch.where(self.own, action, 0.0)
        return self.low + (self.high - self.low) * torch.rand(shape, device=self.low.device)

    def _draw_discrete(self, group_data: TensorDictBase, shape: torch.Size) -> Tensor:
        group, n = self.group, self.group.n_actions
        legal = None if group.action_mask_key is None else group_data.get("action_mask")
        if legal is None:
            legal = torch.ones((*shape, n), dtype=torch.bool, device=group_data.device)
        else:
            check_action_mask(group, legal, shape[:-1])
        legal = choosable(legal, self.own)
        action = torch.multinomial(legal.float().flatten(0, -2), 1).view(shape)
        dtype = group.padded_spec["action"].dtype
        return nn.functional.one_hot(action, n).to(dtype) if group.one_hot else action.to(dtype)


class Explore(TensorDictModuleBase):
    """Adds exploration to actions: random actions, and Gaussian noise on continuous ones.

    With probability ``epsilon``, an agent's action is replaced by an action of
    :class:`RandomActor`. Otherwise a continuous action gets Gaussian noise and is clipped to its
    bounds; of a hybrid action the numbers do. Without sampling
    (``ExplorationType.DETERMINISTIC``, ``MODE`` or ``MEAN``) actions stay unchanged.

    Args:
        group (GroupSpec): group that acts, or several groups joined into one.
        epsilon (float): probability of a random action.
        sigma (float): standard deviation of the noise, relative to half the range of a bounded
            action; absolute for unbounded ones.
        device (torch.device, optional): device of the noise.

    Attributes:
        epsilon, sigma (Tensor): scalars. Change them in place, since a captured rollout reads them.

    Shapes:
        - action: ``[*B, N, A]``, ``[*B, N]`` or one-hot ``[*B, N, n_actions]``

    Keys:
        - reads: ``group.action_key``, ``group.action_mask_key``
        - writes: ``group.action_key``

    Examples:
        >>> from tensordict import TensorDict
        >>> from torchrl.data import Bounded, Unbounded
        >>> from torchrl.envs.utils import set_exploration_type
        >>> from torchrl_marl import AgentSpec, TeamSpec
        >>> team = TeamSpec([AgentSpec("car", 3, Unbounded((4,)), Bounded(-1, 1, (2,)))])
        >>> explore = Explore(team.groups["car"], sigma=0.5)
        >>> td = TensorDict({"car": TensorDict({"action": torch.ones(5, 3, 2)}, [5, 3])}, [5])
        >>> with set_exploration_type(ExplorationType.RANDOM):
        ...     action = explore(td)["car", "action"]
        >>> bool((action < 1).any()), bool((action <= 1).all())
        (True, True)
    """

    epsilon: Tensor
    sigma: Tensor
    half_range: Tensor | None

    def __init__(
        self, group: GroupSpec, *, epsilon: float = 0.0, sigma: float = 0.0, device: Device = None
    ) -> None:
        super().__init__()
        self.group = group
        self.random = RandomActor(group, device)
        self.in_keys: list[NestedKey] = [group.action_key, *self.random.in_keys]
        self.out_keys: list[NestedKey] = [group.action_key]
        self.register_buffer("epsilon", torch.tensor(float(epsilon), device=device))
        self.register_buffer("sigma", torch.tensor(float(sigma), device=device))
        _, half = group.action_range or (None, None)
        register_constants(self, device, half_range=half)

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Adds exploration to the actions, if actions are sampled."""
        if exploration_type() not in (ExplorationType.RANDOM, None):
            return tensordict
        action = self.group.data(tensordict).get("action")
        noisy = action if self.group.discrete else self._noisy_action(action)
        drawn = self.random.draw(tensordict)
        shape = (*tensordict.batch_size, self.group.n_agents)
        explores = torch.rand(shape, device=self.epsilon.device) < self.epsilon
        explores = explores.reshape(explores.shape + (1,) * (action.ndim - explores.ndim))
        self.group.write(tensordict, "action", torch.where(explores, drawn, noisy))
        return tensordict

    def _noisy_action(self, action: Tensor) -> Tensor:
        if not action.is_floating_point():
            return action  # multi-discrete
        if not self.group.hybrid:
            return self._add_noise(action)
        n = len(self.group.branches)
        return torch.cat([action[..., :n], self._add_noise(action[..., n:])], -1)

    def _add_noise(self, action: Tensor) -> Tensor:
        noise = self.sigma * torch.randn_like(action)
        low, high = self.random.low, self.random.high
        if self.half_range is not None and low is not None and high is not None:
            return torch.minimum(torch.maximum(action + self.half_range * noise, low), high)
        padding = self.random.own
        return action + (noise if padding is None else torch.where(padding, noise, 0.0))
