"""The distributions of a group whose agents are played by several modules.

Shapes: B any batch dims, N agents of a group.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias, cast

import torch
from tensordict import NestedKey, TensorDictBase
from tensordict.nn import CompositeDistribution
from torch import Tensor
from torch.distributions import Distribution

from torchrl_marl.modules.routed.data import DataGroup
from torchrl_marl.modules.routed.group import locate

__all__ = ["DistributionRoute", "RoutedDistribution"]

DistributionRoute: TypeAlias = tuple[tuple[int, ...], Distribution, NestedKey]
Parts: TypeAlias = Sequence[tuple[tuple[int, ...], Tensor]]


class RoutedDistribution(Distribution):
    """The agents' distributions, which may be of different kinds and widths.

    Args:
        group (DataGroup): whose agents they are.
        routes (sequence of (agents, Distribution, leaf)): agents that have one distribution,
            and which leaf it is of.

    Shapes:
        - :meth:`log_prob`, :meth:`entropy`: ``[*B, N]``
        - :meth:`sample`, :meth:`rsample`, :attr:`deterministic_sample`: ``[*B, N, *own]``, or a
          list of N tensors ``[*B, *own]`` where the agents differ

    Raises:
        ValueError: an agent without a distribution.
    """

    arg_constraints: dict = {}

    def __init__(self, group: DataGroup, routes: Sequence[DistributionRoute]) -> None:
        found = {agent for agents, _, _ in routes for agent in agents}
        lacking = [agent for agent in group.everyone if agent not in found]
        if lacking:
            raise ValueError(
                f"{group.describe(lacking)} have no distribution, expected a probabilistic module "
                "for every agent."
            )
        self.routes = tuple(routes)
        self.n, self.path, self.label = group.n, group.path, str(group)
        self.ndim = max(group.data.ndim, group.dim + 1)
        self.dim = group.dim - self.ndim  # of a log-probability, from the right
        batch = list(group.data.batch_size)
        batch[group.dim :] = [group.n, *batch[group.dim + 1 :]]
        super().__init__(torch.Size(batch), validate_args=False)

    @property
    def has_rsample(self) -> bool:  # type: ignore[override]
        """Whether all agents' samples carry gradients."""
        return all(dist.has_rsample for _, dist, _ in self.routes)

    def log_prob(self, value: TensorDictBase | Tensor | Sequence[Tensor]) -> Tensor:
        """Returns the agents' log-probabilities.

        Args:
            value (TensorDictBase, Tensor or sequence of Tensor): the root, with the actions in
                its group; or the actions, of all agents or one by one.

        Raises:
            ValueError: a distribution that gives more than one number for an agent.
            KeyError: the group is not there.
        """
        if isinstance(value, TensorDictBase):
            found = locate(value, self.path, exact=True)
            if found is None:
                raise KeyError(f"{self.label} is not there, found {list(value.keys())}.")
            group = DataGroup(value, *found, None)
        parts = []
        for agents, dist, leaf in self.routes:
            if isinstance(value, TensorDictBase):
                own = group.take(agents, leaf)
            else:
                dim = self.dim - len(dist.event_shape)
                rows = value.unbind(dim) if isinstance(value, Tensor) else value
                own = torch.stack([rows[agent] for agent in agents], dim)
            parts.append((agents, dist.log_prob(own)))
        return self._per_agent(parts)

    def entropy(self) -> Tensor:
        """Returns the agents' entropies, or estimates of one sample without a closed form."""
        parts = []
        for agents, dist, _ in self.routes:
            try:
                entropy = dist.entropy()
            except NotImplementedError:
                sample = dist.rsample() if dist.has_rsample else dist.sample()
                entropy = -dist.log_prob(sample)
            parts.append((agents, entropy))
        return self._per_agent(parts)

    def sample(self, sample_shape: Sequence[int] = ()) -> Any:
        """Draws each agent's action."""
        return self._actions([(a, d.sample(torch.Size(sample_shape))) for a, d, _ in self.routes])

    def rsample(self, sample_shape: Sequence[int] = ()) -> Any:
        """Draws each agent's action, with gradients."""
        return self._actions([(a, d.rsample(torch.Size(sample_shape))) for a, d, _ in self.routes])

    @property
    def deterministic_sample(self) -> Any:
        """Returns each agent's action without chance."""
        return self._actions([(agents, _deterministic(dist)) for agents, dist, _ in self.routes])

    def _per_agent(self, parts: Parts) -> Tensor:
        for agents, dist, _ in self.routes:
            if isinstance(dist, CompositeDistribution) or len(dist.batch_shape) != self.ndim:
                raise ValueError(
                    f"{self.label}: agents {list(agents)} have a {type(dist).__name__} of batch "
                    f"shape {tuple(dist.batch_shape)}, expected one number an agent; wrap it in "
                    "Independent."
                )
        return cast(Tensor, self._join(parts, [self.dim] * len(parts)))

    def _actions(self, parts: Parts) -> Tensor | list[Tensor]:
        dims = [self.dim - len(dist.event_shape) for _, dist, _ in self.routes]
        return self._join(parts, dims)

    def _join(self, parts: Parts, dims: Sequence[int]) -> Tensor | list[Tensor]:
        order = [agent for agents, _ in parts for agent in agents]
        shapes = {value.shape[dim:][1:] for (_, value), dim in zip(parts, dims)}
        agree = len(shapes) == 1 and len({value.ndim for _, value in parts}) == 1
        if agree and order == sorted(order):
            return torch.cat([value for _, value in parts], dims[0])
        column: list[Any] = [None] * self.n
        for (agents, value), dim in zip(parts, dims):
            for agent, own in zip(agents, value.unbind(dim)):
                column[agent] = own
        return torch.stack(column, dims[0]) if agree else column


def _deterministic(dist: Any) -> Tensor:
    return dist.deterministic_sample if hasattr(dist, "deterministic_sample") else dist.mode
