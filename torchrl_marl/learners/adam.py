"""One step of Adam as one operation that a graph may hold.

Its arithmetic is that of ``torch.optim.Adam(fused=True)``, to the bit; the learning rate is a
tensor, and so is whether the step is skipped, so that neither needs the host.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["Adam", "adam_", "adam_by_row_", "freeze", "start_adam"]

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
    """Moves parameters and Adam's state in place.

    Args:
        parameters, gradients: of the same shapes.
        means, squares: ``exp_avg`` and ``exp_avg_sq`` of the optimizer's state.
        steps: its ``step``, float scalars.
        lr (Tensor): learning rate, a scalar.
        skip (Tensor): 1 to change nothing, else 0; a float scalar.
        frozen (sequence of Tensor): for each parameter, whether it or which of its rows stay as
            they are; bool, a scalar or ``[rows, 1, ...]``. Empty where ``skip`` tells all.
        betas (tuple): Adam's two decays.
        eps (float): Adam's epsilon.

    Reduces to: ``torch.optim.Adam(fused=True).step()`` where ``skip`` is 0.

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


def adam_by_row_(
    parameters: Sequence[Tensor], *arguments: Any, shares: Sequence[Tensor], **keywords: Any
) -> None:
    """Moves parameters as :func:`adam_`, each row by a share of its step.

    Rows differ in their learning rates where ``lr`` is the largest of them; a row of share 0
    stays where it is, to the bit.

    Args:
        parameters, *arguments, **keywords: of :func:`adam_`.
        shares (sequence of Tensor): for each parameter 0 to 1, broadcast against it.

    Examples:
        >>> x, zero = torch.ones(2, 1), torch.zeros(())
        >>> state = [torch.zeros(2, 1)], [torch.zeros(2, 1)], [torch.zeros(())]
        >>> adam_by_row_([x], [torch.ones(2, 1)], *state, torch.tensor(0.5), zero, [], (0.9, 0.999),
        ...              0, shares=[torch.tensor([[1.0], [0.0]])])
        >>> x.flatten()
        tensor([0.5000, 1.0000])
    """
    before = [x.detach().clone() for x in parameters]
    adam_(parameters, *arguments, **keywords)
    for x, old, share in zip(parameters, before, shares):
        x.copy_(torch.lerp(old, x, share.to(x).expand_as(x)))


class Adam:
    """Adam of some parameters, whose whole state is tensors that a graph may write to.

    Args:
        parameters (iterable of Tensor): that are trained.
        lr (float): learning rate.
        eps (float): Adam's epsilon.

    Attributes:
        lr (Tensor): the learning rate, a scalar to be filled in place.

    Reduces to: ``torch.optim.Adam(fused=True)``, to the bit.

    Examples:
        >>> x = torch.ones(1)
        >>> Adam([x], lr=0.5, eps=0).step([torch.ones(1)])
        >>> x
        tensor([0.5000])
    """

    def __init__(self, parameters: Iterable[Tensor], lr: float, eps: float) -> None:
        self.parameters, self.eps = list(dict.fromkeys(parameters)), eps
        self.means = [torch.zeros_like(p).detach() for p in self.parameters]
        self.squares = [torch.zeros_like(p).detach() for p in self.parameters]
        device = self.parameters[0].device
        self.steps = [torch.zeros((), device=device) for _ in self.parameters]
        # A CPU reads it as the number that an optimizer has, to the bit; a GPU wants floats.
        wide = torch.float64 if device.type == "cpu" else torch.float32
        self.lr = torch.tensor(lr, dtype=wide, device=device)
        self._goes_on = torch.zeros((), device=device)

    @property
    def tensors(self) -> list[Tensor]:
        """All that a step reads and writes, the parameters included."""
        state = [*self.means, *self.squares, *self.steps, self.lr, self._goes_on]
        return [*self.parameters, *state]

    @torch.no_grad()
    def step(self, gradients: Sequence[Tensor | None]) -> None:
        """Takes a step; what has no gradient has 0."""
        found = [
            torch.zeros_like(p) if g is None else g for p, g in zip(self.parameters, gradients)
        ]
        moments = self.means, self.squares, self.steps
        adam_(self.parameters, found, *moments, self.lr, self._goes_on, [], (0.9, 0.999), self.eps)

    def state_dict(self) -> dict[str, Any]:
        """Returns the moments and the number of steps."""
        return {"means": self.means, "squares": self.squares, "steps": self.steps}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes them back, in place.

        Raises:
            ValueError: moments of other parameters.
        """
        for name, own in self.state_dict().items():
            if [x.shape for x in state[name]] != [x.shape for x in own]:
                raise ValueError(
                    "Adam: the state is of other parameters, expected the same shapes."
                )
            for x, value in zip(own, state[name]):
                x.copy_(value)


def start_adam(optimizer: torch.optim.Adam, parameters: Iterable[Tensor]) -> None:
    """Makes the optimizer's state of parameters that have none, as its first step does."""
    for parameter in parameters:
        if not optimizer.state.get(parameter):
            optimizer.state[parameter] = {
                "step": torch.zeros((), device=parameter.device),
                "exp_avg": torch.zeros_like(parameter).detach(),
                "exp_avg_sq": torch.zeros_like(parameter).detach(),
            }


@contextlib.contextmanager
def freeze(
    frozen: Sequence[Tensor],
    parameters: Sequence[Tensor],
    means: Sequence[Tensor],
    squares: Sequence[Tensor],
    steps: Sequence[Tensor],
) -> Iterator[None]:
    """Puts back what a step of Adam should not have changed; arguments as in :func:`adam_`."""
    if not frozen:
        yield
        return
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
    with freeze(frozen, parameters, means, squares, steps):
        _fused_step(parameters, gradients, means, squares, steps, lr, skip, beta1, beta2, eps)


def _fused_step(parameters, gradients, means, squares, steps, lr, skip, beta1, beta2, eps):
    if skip.device.type == "cpu":  # which need not wait, and adds a number faster
        torch._foreach_add_(steps, 1.0 - skip.item())
    else:
        torch._foreach_add_(steps, [1 - skip] * len(steps))
    # The fused step reads memory as it lies; a gradient may come transposed.
    gradients = [_as_laid(g, p) for g, p in zip(gradients, parameters)]
    # A step is skipped as a gradient scaler skips one that overflowed.
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


def _as_laid(gradient: Tensor, parameter: Tensor) -> Tensor:
    if gradient.stride() == parameter.stride():
        return gradient
    return torch.empty_like(parameter).copy_(gradient)


_LIBRARY.impl("adam_", _adam_, "CompositeExplicitAutograd")
_LIBRARY.impl("adam_", lambda *arguments: None, "Meta")
