"""Exploration: what is added to the actions of a policy while it collects.

Shapes: B any batch dims, N agents, A action features.
"""

from __future__ import annotations

import torch
from tensordict import NestedKey, TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor
from torchrl.envs.utils import ExplorationType, exploration_type

from torchrl_marl.modules.random_actor import RandomActor
from torchrl_marl.specs import GroupSpec

__all__ = ["Explore"]


class Explore(TensorDictModuleBase):
    """Follows an actor: some actions become random, continuous ones noisy.

    With chance ``epsilon``, drawn for each agent, an action is :class:`RandomActor`'s, which is
    legal. Otherwise a continuous one gets Gaussian noise and stays within its bounds. Where actions
    are not drawn (``ExplorationType.DETERMINISTIC``, ``MODE`` or ``MEAN``) they pass as they are.

    Args:
        group (GroupSpec): who acts; also several groups as one.
        epsilon (float): chance of a random action.
        sigma (float): standard deviation of the noise, as a share of half the range of an action;
            of unbounded ones, in their own unit.
        device (torch.device, optional): of the noise.

    Attributes:
        epsilon, sigma (Tensor): scalars, to be filled in place; a captured rollout reads them.

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
        self,
        group: GroupSpec,
        *,
        epsilon: float = 0.0,
        sigma: float = 0.0,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.group = group
        self.random = RandomActor(group, device)
        self.in_keys: list[NestedKey] = [group.action_key, *self.random.in_keys]
        self.out_keys: list[NestedKey] = [group.action_key]
        self.register_buffer("epsilon", torch.tensor(float(epsilon), device=device))
        self.register_buffer("sigma", torch.tensor(float(sigma), device=device))
        low, high = self.random.low, self.random.high
        half = None if low is None or high is None else (high - low) / 2
        self.register_buffer("half_range", half, persistent=False)

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Changes the actions, where actions are drawn."""
        if exploration_type() not in (ExplorationType.RANDOM, None):
            return tensordict
        action = self.group.data(tensordict).get("action")
        noisy = action if self.group.discrete else self._add_noise(action)
        drawn = self.random.draw(tensordict)
        shape = (*tensordict.batch_size, self.group.n_agents)
        chosen = torch.rand(shape, device=self.epsilon.device) < self.epsilon
        chosen = chosen.reshape(chosen.shape + (1,) * (action.ndim - chosen.ndim))
        self.group.write(tensordict, "action", torch.where(chosen, drawn, noisy))
        return tensordict

    def _add_noise(self, action: Tensor) -> Tensor:
        noise = self.sigma * torch.randn_like(action)
        low, high = self.random.low, self.random.high
        if self.half_range is not None and low is not None and high is not None:
            return torch.minimum(torch.maximum(action + self.half_range * noise, low), high)
        padding = self.random.own
        return action + (noise if padding is None else torch.where(padding, noise, 0.0))
