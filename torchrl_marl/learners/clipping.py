"""Limits on the gradients of groups that are trained as one.

Shapes: N agents of all groups, G groups.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence

import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import Tensor, nn
from torchrl.modules import ProbabilisticActor

from torchrl_marl.specs import GroupSpec

__all__ = ["GradientClip"]


class GradientClip:
    """Limits the norm of the gradient of each group's actor and critic together.

    Where groups are trained as one, parameters are stacked, and their rows belong to groups;
    rows that serve several groups are limited together.

    Args:
        group (GroupSpec): the agents; several groups where it is a joined one.
        seen (GroupSpec, optional): the agents that a critic across groups sees.
        actor, critic (TensorDictModule): their networks.
        limit (float, optional): the largest norm; None for none.

    Reduces to: ``torch.nn.utils.clip_grad_norm_`` for each group, where no row serves two.
    """

    def __init__(
        self,
        group: GroupSpec,
        seen: GroupSpec | None,
        actor: ProbabilisticActor,
        critic: TensorDictModule,
        limit: float | None,
    ) -> None:
        self.parameters = list(dict.fromkeys([*actor.parameters(), *critic.parameters()]))
        self.limit = float("inf") if limit is None else limit
        self.n_parts = len(group.parts)
        self.owner: Tensor | None = None
        if self.n_parts > 1:
            owners = _owners(group, seen, actor, critic, self.parameters)
            self.sizes = [len(rows) for rows in owners]
            self.owner = torch.cat(owners)

    def __call__(self) -> Tensor:
        """Scales the parameters' gradients; returns the norms before, a scalar or ``[G]``."""
        return self.scale([p.grad for p in self.parameters])

    @torch.no_grad()
    def scale(self, gradients: Sequence[Tensor | None]) -> Tensor:
        """Scales gradients in place; returns the norms before.

        Args:
            gradients: of ``parameters``, None where one has none.
        """
        if self.owner is None:
            found = [g for g in gradients if g is not None]
            norm = nn.utils.get_total_norm(found, foreach=True)
            if not math.isinf(self.limit):
                torch._foreach_mul_(found, (self.limit / (norm + 1e-6)).clamp(max=1.0))
            return norm
        of_all = [
            torch.zeros_like(p) if g is None else g for p, g in zip(self.parameters, gradients)
        ]
        flat = [g.reshape(g.shape[0] if g.ndim else 1, -1) for g in of_all]
        squares = torch.cat([torch.linalg.vector_norm(g, dim=1) for g in flat]).square()
        norms = squares.new_zeros(self.n_parts + 1).index_add(0, self.owner, squares).sqrt()
        factors = (self.limit / (norms + 1e-6)).clamp(max=1.0)
        for gradient, factor in zip(flat, factors[self.owner].split(self.sizes)):
            gradient.mul_(factor.unsqueeze(-1))
        own, common = norms[:-1], norms[-1:]
        return (own.square() + common.square()).sqrt()


def _owners(
    group: GroupSpec,
    seen: GroupSpec | None,
    actor: ProbabilisticActor,
    critic: TensorDictModule,
    parameters: list[nn.Parameter],
) -> list[Tensor]:
    """For each row of each parameter the group that it serves; G where it serves several.

    Autograd is asked: a row serves those whose outputs depend on it.
    """
    serves = [torch.zeros(_n_rows(p), len(group.parts), device=p.device) for p in parameters]
    device = parameters[0].device
    with torch.random.fork_rng(), _any_weights(parameters):
        td = _anything(group, seen, device)
        distribution = actor.get_dist(td)
        acts = distribution.log_prob(distribution.sample())
        value = critic(td).get(group.key("state_value")).squeeze(-1)
        _ask(serves, acts + value, group, parameters)
    return [torch.where(rows.sum(1) == 1, rows.argmax(1), len(group.parts)) for rows in serves]


def _ask(
    serves: list[Tensor], outputs: Tensor, group: GroupSpec, parameters: list[nn.Parameter]
) -> None:
    device = outputs.device
    index = torch.tensor(group.part_index, device=device)
    for i in range(len(group.parts)):
        total = outputs[..., index == i].sum()
        for rows, gradient in zip(
            serves, torch.autograd.grad(total, parameters, retain_graph=True, allow_unused=True)
        ):
            if gradient is not None:
                rows[:, i] = (gradient.reshape(len(rows), -1) != 0).any(1).to(rows.dtype)


@contextlib.contextmanager
def _any_weights(parameters: list[nn.Parameter]) -> Iterator[None]:
    """Weights with which no unit sleeps, for a while."""
    torch.manual_seed(0)
    before = [parameter.detach().clone() for parameter in parameters]
    with torch.no_grad():
        for parameter in parameters:
            width = parameter.shape[-1] if parameter.ndim else 1
            parameter.copy_(torch.randn(parameter.shape) / width**0.5)
    try:
        yield
    finally:
        with torch.no_grad():
            for parameter, value in zip(parameters, before):
                parameter.copy_(value)


def _n_rows(parameter: nn.Parameter) -> int:
    return parameter.shape[0] if parameter.ndim else 1


def _anything(group: GroupSpec, seen: GroupSpec | None, device: torch.device) -> TensorDict:
    batch = 64
    td = TensorDict({}, [batch], device=device)
    # Where both are the same agents they have one name, and the actor reads more.
    for known in [group] if seen is None else [seen, group]:
        rows = {"observation": torch.randn(batch, known.n_agents, known.observation_dim)}
        if known.mask_key is not None:
            rows["mask"] = torch.ones(batch, known.n_agents, dtype=torch.bool)
        if known.action_mask_key is not None:
            rows["action_mask"] = torch.ones(batch, known.n_agents, known.n_actions).bool()
        td[known.name] = TensorDict(rows, [batch, known.n_agents]).to(device)
    if group.state_spec is not None:
        td["state"] = torch.randn(batch, *group.state_spec.shape, device=device)
    return td
