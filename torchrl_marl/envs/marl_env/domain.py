"""Parameters of custom environments that each new episode draws from ranges.

Shapes: E envs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from torchrl_marl.envs.ranges import ValueRange, read_known_ranges
from torchrl_marl.errors import ConfigError

__all__ = ["DomainParameters"]


class DomainParameters:
    """Part of :class:`~torchrl_marl.envs.MarlEnv` that draws an episode's parameters."""

    device: Any
    batch_size: Any
    num_envs: int
    is_spec_locked: bool
    _episode: dict[str, Any]
    _not_simulator: frozenset[Any]
    _nominal: dict[str, Tensor]
    _ranges: dict[str, ValueRange]
    _domain: dict[str, Tensor]
    _refuse_late: Callable[[str], None]

    def register_domain_parameter(
        self, name: str, nominal: float | Tensor, shape: Sequence[int] = ()
    ) -> None:
        """Adds a parameter of the simulation that can be randomized; call it in ``__init__``.

        ``self.domain_parameters[name]`` has its current values. They are the nominal value, unless
        :meth:`randomize` sets a range.

        Args:
            name (str): name of the parameter.
            nominal (float or Tensor): value without randomization.
            shape (sequence of int): shape of one env's value, such as ``(N,)`` for one value per
                agent. Each element is drawn separately.

        Raises:
            ConfigError: the parameter exists already, or ``__init__`` is over.

        Shapes:
            - ``self.domain_parameters[name]``: ``[E, *shape]``

        Examples:
            >>> from torchrl.data import Bounded, Unbounded
            >>> from torchrl_marl import AgentSpec
            >>> from torchrl_marl.envs import MarlEnv
            >>> class Carts(MarlEnv):
            ...     def __init__(self, num_envs, **kwargs):
            ...         super().__init__(num_envs, **kwargs)
            ...         cart = AgentSpec("cart", 2, Unbounded((1,)), Bounded(-1, 1, (1,)))
            ...         self.register_agent(cart)
            ...         self.register_domain_parameter("mass", 1.0, (2,))
            ...     def _reset(self, tensordict):
            ...         self.speed = torch.zeros(self.num_envs, 2, 1)
            ...         return {"cart": {"observation": self.speed}}
            ...     def _step(self, tensordict):
            ...         mass = self.domain_parameters["mass"].unsqueeze(-1)
            ...         self.speed = self.speed + 0.1 * tensordict["cart", "action"] / mass
            ...         return {"cart": {"observation": self.speed, "reward": -self.speed.abs()}}
            >>> env = Carts(num_envs=3, seed=0)
            >>> env.domain_parameters["mass"][0]
            tensor([1., 1.])
            >>> env.randomize({"mass": [0.7, 1.3]})
            >>> env.rollout(5).batch_size
            torch.Size([3, 5])
        """
        self._refuse_late(f"parameter {name!r}")
        if name in self._nominal:
            raise ConfigError(
                f"{type(self).__name__}: parameter {name!r} is registered twice; use another name."
            )
        value = torch.as_tensor(nominal, dtype=torch.float32, device=self.device)
        self._nominal[name] = value
        self._domain[name] = value.expand(self.num_envs, *shape).clone()
        # From now on, the values are part of the simulation's state.
        self._not_simulator = self._not_simulator - {("_domain",)}

    @property
    def domain_parameters(self) -> TensorDict:
        """Values of the parameters in each env's current episode, as a TensorDict ``[E]``."""
        return TensorDict(dict(self._domain), self.batch_size, self.device)

    def randomize(self, ranges: Mapping[str, Any]) -> None:
        """Sets the ranges from which each new episode draws its parameters.

        Parameters that are not named have their nominal values. Fixed values apply immediately,
        ranges from the next reset of each env.

        Args:
            ranges (mapping): name of a parameter -> number, ``[low, high]`` or
                ``[low, high, log]``.

        Raises:
            ConfigError: unknown parameter or malformed range; the message names the known
                parameters.
        """
        self._ranges = read_known_ranges(type(self).__name__, ranges, list(self._nominal))
        for name, value in self._nominal.items():
            range, shape = self._ranges.get(name), self._domain[name].shape
            if range is None:
                self._domain[name] = value.to(self.device).expand(shape).clone()
            elif range.is_fixed:
                self._domain[name] = range.draw(shape, self.device)

    def _draw_domain(self) -> None:
        """Draws the parameters of new episodes in all envs."""
        for name, range in self._ranges.items():
            if not range.is_fixed:
                self._domain[name] = range.draw(self._domain[name].shape, self.device)
