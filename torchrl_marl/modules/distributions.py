"""Distributions over padded, multi-discrete and hybrid actions, and with a communication gate.

Shapes: B any batch dims, N agents, A action features of the widest agent, D samples of the
channel for each agent or numbers of a hybrid action, K branches of an action, L logits of all
branches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributions import Categorical, Distribution, Independent
from torchrl.modules import IndependentNormal, TanhNormal

__all__ = [
    "Gated",
    "Hybrid",
    "MultiCategorical",
    "PaddedNormal",
    "PaddedTanhNormal",
    "sampled_entropy",
]

Scale = Tensor | float | Callable[[Tensor], Tensor]


class _Padded(Distribution):
    """Base of padded distributions. Samples are 0 at padding."""

    mask: Tensor

    def sample(self, sample_shape: Sequence[int] = ()) -> Tensor:
        """Samples actions, ``[*sample_shape, *B, N, A]``."""
        return torch.where(self.mask, super().sample(torch.Size(sample_shape)), 0.0)

    def rsample(self, sample_shape: Sequence[int] = ()) -> Tensor:
        """Samples actions through which gradients flow."""
        return torch.where(self.mask, super().rsample(torch.Size(sample_shape)), 0.0)

    def expand(self, batch_shape: Sequence[int], _instance: Distribution | None = None):
        """Returns the same distribution with larger batch dims."""
        if _instance is None:
            _instance = self.__new__(type(self))
            _instance.__dict__.update(self.__dict__)
        return super().expand(torch.Size(batch_shape), _instance)

    def update(self, loc: Tensor, scale: Scale) -> None:
        """Replaces the parameters."""
        super().update(*self._replace_padding(loc, scale))  # type: ignore[misc]

    def _sum_without_padding(self, value: Tensor) -> Tensor:
        return torch.where(self.mask, value, 0.0).sum(-1)

    def _replace_padding(self, loc: Tensor, scale: Scale) -> tuple[Tensor, Tensor]:
        # A standard normal: finite, and the same everywhere, so that divergences are 0 there.
        if callable(scale):
            scale = scale(loc)
        elif not isinstance(scale, Tensor):
            scale = torch.as_tensor(scale, device=loc.device, dtype=loc.dtype)
        scale = torch.where(self.mask, scale.to(loc.device), 1.0)
        return torch.where(self.mask, loc, 0.0), scale


class PaddedNormal(_Padded, IndependentNormal):
    """Normal distribution over padded actions, in which padding does not count.

    Log-probability and entropy are those of each agent's real action features. Padding may hold
    anything, NaN included, in parameters and actions; samples and gradients are 0 there.

    Args:
        loc (Tensor): mean.
        scale (Tensor, float or callable): standard deviation, or a function of ``loc``.
        mask (Tensor): bool, True at an agent's real features. Keep it on the device of
            ``loc``; otherwise it is copied at every call.
        keywords: other arguments of :class:`~torchrl.modules.IndependentNormal`.

    Shapes:
        - loc, scale: ``[*B, N, A]``; mask: ``[N, A]``, or with batch dims
        - samples: ``[*B, N, A]``; log_prob, entropy: ``[*B, N]``

    Raises:
        ValueError: a mask that is not bool or does not fit ``loc``.

    Reduces to: an all-true mask gives TorchRL's ``IndependentNormal``.

    Examples:
        >>> mask = torch.tensor([[True, True], [True, False]])  # the second agent has one feature
        >>> normal = PaddedNormal(torch.zeros(2, 2), 1.0, mask=mask)
        >>> normal.log_prob(torch.zeros(2, 2))
        tensor([-1.8379, -0.9189])
    """

    def __init__(self, loc: Tensor, scale: Scale, *, mask: Tensor, **keywords) -> None:
        self.mask = _check_mask(mask, loc)
        loc, scale = self._replace_padding(loc, scale)
        IndependentNormal.__init__(self, loc, scale, event_dim=1, **keywords)

    @property
    def variance(self) -> Tensor:
        """Returns the variance of each feature."""
        return torch.where(self.mask, self.base_dist.variance, 0.0)

    def log_prob(self, value: Tensor) -> Tensor:
        """Returns the log-probability of each agent's action."""
        return self._sum_without_padding(
            self.base_dist.log_prob(torch.where(self.mask, value, 0.0))
        )

    def entropy(self) -> Tensor:
        """Returns the entropy of each agent's action."""
        return self._sum_without_padding(self.base_dist.entropy())


class PaddedTanhNormal(_Padded, TanhNormal):
    """Squashed normal distribution over padded actions, in which padding does not count.

    The log-probability is that of each agent's real action features. Padding may hold anything,
    NaN included, in parameters, bounds and actions; samples and gradients are 0 there.
    As in TorchRL, mean, mode and entropy have no closed form.

    Args:
        loc (Tensor): mean before the squashing.
        scale (Tensor, float or callable): standard deviation, or a function of ``loc``.
        mask (Tensor): bool, True at an agent's real features. Keep it on the device of
            ``loc``; otherwise it is copied at every call.
        low, high (Tensor or float): bounds of the actions.
        keywords: other arguments of :class:`~torchrl.modules.TanhNormal`.

    Shapes:
        - loc, scale: ``[*B, N, A]``; mask: ``[N, A]``, or with batch dims
        - low, high: ``[N, A]``, or expandable to it
        - samples: ``[*B, N, A]``; log_prob: ``[*B, N]``

    Raises:
        ValueError: a mask that is not bool or does not fit ``loc``.

    Reduces to: an all-true mask gives TorchRL's ``TanhNormal``.

    Examples:
        >>> mask = torch.tensor([[True, True], [True, False]])  # the second agent has one feature
        >>> high = torch.tensor([[1.0, 2.0], [3.0, 0.0]])
        >>> squashed = PaddedTanhNormal(torch.zeros(2, 2), 1.0, mask=mask, low=-high, high=high)
        >>> squashed.log_prob(torch.zeros(2, 2))
        tensor([-2.5310, -2.0176])
        >>> squashed.rsample()[1, 1]
        tensor(0.)
    """

    def __init__(
        self,
        loc: Tensor,
        scale: Scale,
        *,
        mask: Tensor,
        low: Tensor | float = -1.0,
        high: Tensor | float = 1.0,
        **keywords,
    ) -> None:
        self.mask = _check_mask(mask, loc)
        if isinstance(low, Tensor) or isinstance(high, Tensor):
            low = torch.where(self.mask, torch.as_tensor(low, device=loc.device), -1.0)
            high = torch.where(self.mask, torch.as_tensor(high, device=loc.device), 1.0)
        TanhNormal.__init__(self, loc, scale, low=low, high=high, event_dims=1, **keywords)

    def expand(self, batch_shape: Sequence[int], _instance: Distribution | None = None):
        """Returns the same distribution with larger batch dims."""
        new = super().expand(batch_shape, _instance)
        new.loc, new.scale = new.root_dist.loc, new.root_dist.scale
        return new

    @property
    def deterministic_sample(self) -> Tensor:
        """Returns the squashed mean."""
        return torch.where(self.mask, self.transforms[0](self.root_dist.mean), 0.0)

    def get_mode(self) -> Tensor:
        """Searches for the mode with an optimizer."""
        parameters = self.loc.detach(), self.scale.detach()
        plain = TanhNormal(*parameters, low=self.low, high=self.high, event_dims=1)
        return torch.where(self.mask, plain.get_mode(), 0.0)

    def log_prob(self, value: Tensor) -> Tensor:
        """Returns the log-probability of each agent's action."""
        # The middle of the bounds, where the inverse is finite.
        value = torch.where(self.mask, value, (self.low + self.high) / 2)
        normal = self.transforms[0].inv(value)
        log_det = self._squashing_log_det(
            normal, value
        )  # first: gradients then equal TorchRL's to the bit
        return self._normal_log_prob(normal) - log_det

    def rsample_and_log_prob(self, sample_shape: Sequence[int] = ()) -> tuple[Tensor, Tensor]:
        """Returns samples with gradients, and log-probabilities without inverting the squashing."""
        normal = self.base_dist.rsample(torch.Size(sample_shape))
        return self._with_log_prob(normal, self.transforms[0](normal))

    def sample_and_log_prob(self, sample_shape: Sequence[int] = ()) -> tuple[Tensor, Tensor]:
        """Returns detached samples, and log-probabilities without inverting the squashing."""
        normal = self.base_dist.sample(torch.Size(sample_shape))
        with torch.no_grad():
            action = self.transforms[0](normal)
        return self._with_log_prob(normal, action)

    def _with_log_prob(self, normal: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        score = self._normal_log_prob(normal) - self._squashing_log_det(normal, action)
        return torch.where(self.mask, action, 0.0), score

    def _normal_log_prob(self, normal: Tensor) -> Tensor:
        return self._sum_without_padding(self.root_dist.log_prob(normal))

    def _squashing_log_det(self, normal: Tensor, action: Tensor) -> Tensor:
        return self._sum_without_padding(self.transforms[0].log_abs_det_jacobian(normal, action))


class MultiCategorical(Independent):
    """Distribution over multi-discrete actions: one independent choice in each branch.

    Log-probability and entropy are sums over the branches.

    Args:
        logits (Tensor): logits of all branches, one branch after the other.
        branches (sequence of int): number of choices of each branch.

    Shapes:
        - logits: ``[*B, N, L]``; samples: ``[*B, N, K]``; log_prob, entropy: ``[*B, N]``

    Reference: Tavakoli et al., 2018, https://arxiv.org/abs/1711.08946 (action branching).

    Reduces to: one branch gives torch's ``Categorical``.

    Examples:
        >>> choices = MultiCategorical(torch.zeros(5), (2, 3))
        >>> choices.log_prob(torch.tensor([1, 2])).exp()
        tensor(0.1667)
        >>> choices.mode
        tensor([0, 0])
    """

    arg_constraints: dict = {}

    def __init__(self, logits: Tensor, branches: Sequence[int]) -> None:
        widest = max(branches)
        lowest = torch.finfo(logits.dtype).min  # finite, so that entropies are, too
        rows = [
            F.pad(row, (0, widest - n), value=lowest)
            for row, n in zip(logits.split(list(branches), -1), branches)
        ]
        choices = Categorical(logits=torch.stack(rows, -2), validate_args=False)
        super().__init__(choices, 1, validate_args=False)

    @property
    def deterministic_sample(self) -> Tensor:
        """Returns the most likely choice of each branch."""
        return self.mode


class Hybrid(Distribution):
    """Distribution over hybrid actions: independent choices, and numbers beside them.

    Log-probability and entropy are sums over the parts.

    Args:
        logits (Tensor): logits of all branches, one branch after the other.
        branches (sequence of int): number of choices of each branch.
        of (type): distribution of the numbers.
        keywords: arguments of that distribution.

    Shapes:
        - logits: ``[*B, N, L]``; samples: ``[*B, N, K + D]``, the indices of the choices first;
          log_prob, entropy: ``[*B, N]``

    Reference: Fan et al., 2019, https://arxiv.org/abs/1903.01344 (hybrid action spaces).

    Examples:
        >>> zeros = {"loc": torch.zeros(2), "scale": torch.ones(2)}
        >>> action = Hybrid(torch.zeros(3), (3,), of=IndependentNormal, **zeros)
        >>> action.log_prob(torch.tensor([1.0, 0.0, 0.0]))  # -log(3) - log(2 pi)
        tensor(-2.9365)
        >>> action.deterministic_sample
        tensor([0., 0., 0.])
    """

    arg_constraints: dict = {}

    def __init__(
        self,
        logits: Tensor,
        branches: Sequence[int],
        *,
        of: Callable[..., Distribution],
        **keywords,
    ) -> None:
        self.choices, self.numbers = MultiCategorical(logits, branches), of(**keywords)
        features = len(branches) + self.numbers.event_shape[-1]
        shape = torch.Size([features])
        super().__init__(self.choices.batch_shape, shape, validate_args=False)

    @property
    def deterministic_sample(self) -> Tensor:
        """Returns the most likely choices and the deterministic numbers."""
        numbers = self.numbers.deterministic_sample  # type: ignore[attr-defined]
        return self._concatenate(self.choices.mode, numbers)

    @property
    def mode(self) -> Tensor:
        """Returns the most likely choices and numbers."""
        return self._concatenate(self.choices.mode, self.numbers.mode)

    def sample(self, sample_shape: Sequence[int] = ()) -> Tensor:
        """Samples actions."""
        shape = torch.Size(sample_shape)
        return self._concatenate(self.choices.sample(shape), self.numbers.sample(shape))

    def log_prob(self, value: Tensor) -> Tensor:
        """Returns the log-probability of each agent's action."""
        n = self.choices.event_shape[0]
        choice, numbers = value[..., :n].long(), value[..., n:]
        return self.choices.log_prob(choice) + self.numbers.log_prob(numbers)

    def entropy(self) -> Tensor:
        """Returns the entropy of each agent's action."""
        return self.choices.entropy() + self.numbers.entropy()

    def _concatenate(self, choice: Tensor, numbers: Tensor) -> Tensor:
        return torch.cat([choice.to(numbers.dtype), numbers], -1)


class Gated(Distribution):
    """Distribution over actions and a communication gate that was sampled before.

    Samples are actions alone. Log-probabilities and entropies are those of action and gate
    together.

    Args:
        gate (Tensor): samples of the channel; the first is the gate, 1 for an agent that sent.
        gate_logits (Tensor): logits of the gate.
        of (type): distribution of the actions.
        keywords: arguments of that distribution.

    Shapes:
        - gate: ``[*B, N, D]``; gate_logits: ``[*B, N, 1]``; log_prob, entropy: ``[*B, N]``

    Reference: Singh et al., 2019, https://arxiv.org/abs/1812.09755, section 3.2.

    Examples:
        >>> from torch.distributions import Categorical
        >>> speaks, even = torch.ones(3, 1), torch.zeros(3, 1)
        >>> Gated(speaks, even, of=Categorical, logits=torch.zeros(3, 2)).log_prob(
        ...     torch.zeros(3)).exp()
        tensor([0.2500, 0.2500, 0.2500])
    """

    arg_constraints: dict = {}

    def __init__(
        self, gate: Tensor, gate_logits: Tensor, *, of: Callable[..., Distribution], **keywords
    ) -> None:
        self.actions = of(**keywords)
        self.logits, gate_value = gate_logits.squeeze(-1), gate[..., 0]
        self.gate_log_prob = -self._gate_cross_entropy(gate_value)
        shapes = self.actions.batch_shape, self.actions.event_shape
        super().__init__(*shapes, validate_args=False)

    @property
    def has_rsample(self) -> bool:  # type: ignore[override]
        """True if gradients flow through the samples."""
        return self.actions.has_rsample

    @property
    def deterministic_sample(self) -> Tensor:
        """Returns the deterministic actions."""
        found = getattr(self.actions, "deterministic_sample", None)
        return self.mode if found is None else found

    @property
    def mode(self) -> Tensor:
        """Returns the most likely actions."""
        return self.actions.mode

    @property
    def mean(self) -> Tensor:
        """Returns the mean of the actions."""
        return self.actions.mean

    def sample(self, sample_shape: Sequence[int] = ()) -> Tensor:
        """Samples actions."""
        return self.actions.sample(torch.Size(sample_shape))

    def rsample(self, sample_shape: Sequence[int] = ()) -> Tensor:
        """Samples actions through which gradients flow."""
        return self.actions.rsample(torch.Size(sample_shape))

    def log_prob(self, value: Tensor) -> Tensor:
        """Returns the log-probability of each agent's action and gate."""
        return self.actions.log_prob(value) + self.gate_log_prob

    def entropy(self) -> Tensor:
        """Returns the entropy of each agent's action and gate."""
        return self.actions.entropy() + self.gate_entropy()

    def gate_entropy(self) -> Tensor:
        """Returns the entropy of each agent's gate."""
        return self._gate_cross_entropy(torch.sigmoid(self.logits))

    def _gate_cross_entropy(self, gate_value: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(self.logits, gate_value, reduction="none")


def sampled_entropy(distribution: Distribution, n_samples: int) -> Tensor:
    """Estimates the entropy of each action by sampling; that of choices and of a gate is exact.

    Args:
        distribution (Distribution): distribution of actions, with batch shape ``[*B, N]``.
        n_samples (int): number of samples.
    """
    if isinstance(distribution, Hybrid):
        return distribution.choices.entropy() + sampled_entropy(distribution.numbers, n_samples)
    if isinstance(distribution, Gated):
        return sampled_entropy(distribution.actions, n_samples) + distribution.gate_entropy()
    n = torch.Size([n_samples])
    if hasattr(distribution, "rsample_and_log_prob"):
        # Log-probabilities come with the samples, since the inverse of tanh is inexact near
        # the bounds.
        return -distribution.rsample_and_log_prob(n)[1].mean(0)
    return -distribution.log_prob(distribution.rsample(n)).mean(0)


def _check_mask(mask: Tensor, loc: Tensor) -> Tensor:
    sizes = zip(mask.shape[:-2], loc.shape[loc.ndim - mask.ndim : -2])
    fits = (
        2 <= mask.ndim <= loc.ndim
        and mask.shape[-2:] == loc.shape[-2:]
        and all(size in (1, of_loc) for size, of_loc in sizes)
    )
    if mask.dtype is not torch.bool or not fits:
        raise ValueError(
            f"the mask of padded actions is {mask.dtype} {tuple(mask.shape)}, expected "
            f"torch.bool {tuple(loc.shape[-2:])} [agents, features], as loc {tuple(loc.shape)}."
        )
    return mask.to(loc.device)
