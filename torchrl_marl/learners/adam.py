"""Adam as one operation that a captured graph may contain.

Its arithmetic equals that of ``torch.optim.Adam(fused=True)`` to the bit. The learning rate and the
flag that skips a step are tensors, so a graph can read them without the host.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torchrl_marl.learners.members import Members

__all__ = ["Adam", "adam_", "freeze", "moments_of", "move", "start_adam"]

_LIBRARY = torch.library.Library("torchrl_marl", "DEF")
_LIBRARY.define(
    "adam_(Tensor(a!)[] parameters, Tensor[] gradients, Tensor(b!)[] means, "
    "Tensor(c!)[] squares, Tensor(d!)[] steps, Tensor lr, Tensor skip, Tensor[] frozen, "
    "float beta1, float beta2, float eps, Tensor[] before) -> ()"
)


def adam_(
    parameters: Sequence[Tensor],
    gradients: Sequence[Tensor],
    means: Sequence[Tensor],
    squares: Sequence[Tensor],
    steps: Sequence[Tensor],
    lr: Tensor,
    skip: Tensor,
    frozen: Sequence[Tensor],
    betas: tuple[float, float],
    eps: float,
) -> None:
    """Updates parameters and Adam's state in place.

    Args:
        parameters, gradients: tensors of the same shapes.
        means, squares: ``exp_avg`` and ``exp_avg_sq`` of the optimizer's state.
        steps: ``step`` of the optimizer's state, float scalars.
        lr (Tensor): learning rate, a scalar.
        skip (Tensor): a float scalar: 1 to change nothing, otherwise 0.
        frozen (sequence of Tensor): for each parameter, a mask of its rows that must not change:
            bool, a scalar or ``[rows, 1, ...]``. The sequence is empty if no row is frozen. On a
            CPU only the other rows are computed.
        betas (tuple): Adam's two decay rates.
        eps (float): Adam's epsilon.

    Reduces to: ``torch.optim.Adam(fused=True).step()`` if ``skip`` is 0.

    Examples:
        >>> x, zero = torch.ones(1), torch.zeros(())
        >>> state = [torch.zeros(1)], [torch.zeros(1)], [torch.zeros(())]
        >>> adam_([x], [torch.ones(1)], *state, torch.tensor(0.5), zero, [], (0.9, 0.999), 0)
        >>> x
        tensor([0.5000])
    """
    torch.ops.torchrl_marl.adam_(
        list(parameters),
        list(gradients),
        list(means),
        list(squares),
        list(steps),
        lr,
        skip,
        list(frozen),
        *betas,
        eps,
        [],
    )


class Adam(torch.optim.Adam):
    """Adam with a method :meth:`take`, a step that a captured graph may contain.

    Args:
        parameters (iterable of Tensor): parameters to train.
        lr (float): learning rate.
        eps (float): Adam's epsilon.

    Attributes:
        lr (Tensor): learning rate of :meth:`take`, a scalar; change it in place.
        members (Members, optional): members of a population, to which the parameters' rows belong.
        rates (Tensor): learning rates of the members, ``[P]``; from :meth:`prepare`.

    Reduces to: ``torch.optim.Adam(fused=True)``, to the bit.

    Examples:
        >>> x = torch.ones(1)
        >>> Adam([x], lr=0.5, eps=0).take([torch.ones(1)])
        >>> x
        tensor([0.5000])
    """

    members: Members | None = None
    rates: Tensor

    def __init__(self, parameters: Iterable[Tensor], lr: float, eps: float) -> None:
        # One kernel for all parameters.
        super().__init__(list(dict.fromkeys(parameters)), lr=lr, eps=eps, fused=True)
        device = self.parameters[0].device
        # On a CPU float64 gives the same bits as the optimizer's Python float; a GPU needs float32.
        wide = torch.float64 if device.type == "cpu" else torch.float32
        self.lr = torch.tensor(lr, dtype=wide, device=device)
        self._no_skip = torch.zeros((), device=device)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), **self.__dict__}

    @property
    def parameters(self) -> list[Tensor]:
        """The parameters to train."""
        return self.param_groups[0]["params"]

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors that a step reads or writes, including the parameters."""
        start_adam(self, self.parameters)
        moments = [x for own in moments_of(self, self.parameters) for x in own]
        found = [*self.parameters, *moments, self.lr, self._no_skip]
        return found if self.members is None else [*found, self.rates, self.members.diverged]

    @torch.no_grad()
    def prepare(self, rates: Tensor) -> None:
        """Sets the learning rates of the members, ``[P]``, for the next steps."""
        self.rates.copy_(rates)
        # Each member takes a share of a step with the largest rate; the bound prevents overflow.
        self.lr.copy_(self.rates.amax().clamp(torch.finfo(rates.dtype).tiny, 1.0))

    @torch.no_grad()
    def take(self, gradients: Sequence[Tensor | None], frozen: Sequence[Tensor] = ()) -> None:
        """Takes a step; a missing gradient counts as 0.

        Args:
            gradients (sequence of Tensor or None): gradients of the parameters.
            frozen (sequence of Tensor): masks of rows that must not change, as in :func:`adam_`.
        """
        parameters = self.parameters
        found = [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, gradients)]
        start_adam(self, parameters)
        skip, members = self._no_skip, self.members
        move(self, parameters, found, lr=self.lr, skip=skip, frozen=frozen, members=members)


def start_adam(optimizer: torch.optim.Adam, parameters: Iterable[Tensor]) -> None:
    """Creates the missing optimizer state of parameters, as the optimizer's first step does."""
    for parameter in parameters:
        if not optimizer.state.get(parameter):
            optimizer.state[parameter] = {
                "step": torch.zeros((), device=parameter.device),
                "exp_avg": torch.zeros_like(parameter).detach(),
                "exp_avg_sq": torch.zeros_like(parameter).detach(),
            }


def moments_of(
    optimizer: torch.optim.Adam, parameters: Iterable[Tensor]
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Returns Adam's means, squares and step counts of parameters with optimizer state."""
    states = [optimizer.state[p] for p in parameters]
    means, squares, steps = ([x[key] for x in states] for key in ("exp_avg", "exp_avg_sq", "step"))
    return means, squares, steps


@torch.no_grad()
def move(
    optimizer: torch.optim.Adam,
    parameters: Sequence[Tensor],
    gradients: Sequence[Tensor],
    *,
    lr: Tensor,
    skip: Tensor,
    frozen: Sequence[Tensor] = (),
    shares: Sequence[Tensor] = (),
    members: Members | None = None,
) -> None:
    """Takes a step of Adam with the given parameters of an optimizer, which must have moments.

    Args:
        optimizer (Adam): torch's Adam, or :class:`Adam` for a population.
        parameters, gradients, lr, skip, frozen: as in :func:`adam_`.
        shares (sequence of Tensor): for each parameter, the share of ``lr`` that its rows take: a
            scalar or ``[rows, 1, ...]``. The sequence is empty if all rows take the whole rate.
        members (Members, optional): members of a population. Their learning rates are the
            optimizer's ``rates``, and ``lr`` is the largest of these. Diverged members do not
            change.
    """
    settings, moments = optimizer.param_groups[0], moments_of(optimizer, parameters)
    betas, eps = settings["betas"], settings["eps"]
    if members is not None:
        assert isinstance(optimizer, Adam)
        rows = [members.rows.of(p) for p in parameters]
        of_member = torch.where(members.diverged, 0.0, optimizer.rates / lr.to(optimizer.rates))
        gradients = [torch.where(members.diverged[own], 0.0, g) for own, g in zip(rows, gradients)]
        shares = [of_member[own].to(x) for own, x in zip(rows, parameters)]
    before = [x.detach().clone() for x in parameters] if shares else []
    adam_(parameters, gradients, *moments, lr, skip, frozen, betas, eps)
    for x, old, share in zip(parameters, before, shares):
        x.copy_(torch.lerp(old, x, share.expand_as(x)))


@contextlib.contextmanager
def freeze(
    frozen: Sequence[Tensor],
    parameters: Sequence[Tensor],
    means: Sequence[Tensor],
    squares: Sequence[Tensor],
    steps: Sequence[Tensor],
) -> Iterator[None]:
    """Restores frozen rows after a step of Adam; arguments as in :func:`adam_`."""
    moved = [*parameters, *means, *squares]
    before = [x.clone() for x in moved]
    counted = [step.clone() for step in steps]
    yield
    for x, old, rows in zip(moved, before, [*frozen] * 3):
        x.copy_(torch.where(rows, old, x))
    for step, old, rows in zip(steps, counted, frozen):
        step.copy_(torch.where(rows.all(), old, step))


def _adam_(
    parameters, gradients, means, squares, steps, lr, skip, frozen, beta1, beta2, eps, before
):
    def take(*tensors):
        _fused_step(*tensors, lr, skip, beta1, beta2, eps)

    tensors = parameters, gradients, means, squares, steps
    if not frozen:
        take(*tensors)
    elif skip.device.type == "cpu":  # the masks are known to the host
        _step_unfrozen_rows(take, *tensors, frozen)
    else:
        with freeze(frozen, parameters, means, squares, steps):
            take(*tensors)


def _step_unfrozen_rows(take, parameters, gradients, means, squares, steps, frozen):
    """Takes a step of Adam with copies of the rows that are not frozen, and writes them back."""
    rows = [(~own).flatten().nonzero().squeeze(1) for own in frozen]
    moved = [i for i, own in enumerate(rows) if len(own)]
    if not moved:
        return

    def of_rows(tensors):
        return [_select_rows(tensors[i], rows[i], frozen[i].numel()) for i in moved]

    parts = [of_rows(tensors) for tensors in (parameters, gradients, means, squares)]
    take(*parts, [steps[i] for i in moved])
    wholes = [tensors[i] for tensors in (parameters, means, squares) for i in moved]
    own = [rows[i] for i in moved] * 3
    for whole, part, open_rows in zip(wholes, [*parts[0], *parts[2], *parts[3]], own):
        if part is not whole:
            whole.index_copy_(0, open_rows, part)


def _select_rows(x: Tensor, rows: Tensor, n_rows: int) -> Tensor:
    return x if len(rows) == n_rows else x.index_select(0, rows)


def _fused_step(parameters, gradients, means, squares, steps, lr, skip, beta1, beta2, eps):
    if skip.device.type == "cpu":  # no device to wait for, and adding a Python number is faster
        torch._foreach_add_(steps, 1.0 - skip.item())
    else:
        torch._foreach_add_(steps, [1 - skip] * len(steps))
    # The fused step ignores strides, but a gradient may be transposed.
    gradients = [_match_strides(g, p) for g, p in zip(gradients, parameters)]
    # ``found_inf`` skips the step, as a gradient scaler does after an overflow.
    torch._fused_adam_(
        parameters,
        gradients,
        means,
        squares,
        [],
        steps,
        lr=lr,
        beta1=beta1,
        beta2=beta2,
        weight_decay=0.0,
        eps=eps,
        amsgrad=False,
        maximize=False,
        found_inf=skip,
    )


def _match_strides(gradient: Tensor, parameter: Tensor) -> Tensor:
    if gradient.stride() == parameter.stride():
        return gradient
    return torch.empty_like(parameter).copy_(gradient)


_LIBRARY.impl("adam_", _adam_, "CompositeExplicitAutograd")
_LIBRARY.impl("adam_", lambda *arguments: None, "Meta")
