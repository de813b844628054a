"""Networks over the set of living agents: their order and their number do not matter.

Shapes: B any batch dims, N agents, F features of the widest kind, H width of an encoding,
K kinds of agents.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchrl_marl.modules.bodies import ACTIVATIONS, Context, initialize

__all__ = ["SetNetwork"]


class SetNetwork(nn.Module):
    r"""Encodes each agent by its kind, pools the living ones, and reads the pool.

    .. math::
        h_i = \phi_{k(i)}(x_i), \qquad c = \tfrac{1}{|\text{living}|} \sum_{j \text{ living}} h_j,
        \qquad y_i = \rho(h_i, c) \ \text{ or } \ y = \rho(c)

    With ``pooling="attention"`` each agent attends to the living agents: its context
    :math:`c_i` is what it has read, and a team's :math:`c` their mean over the living.

    Masked agents' features may hold anything, NaN included; what comes out for them is finite
    and means nothing, unless the output is the team's. Where nobody lives the context is 0.

    Args:
        in_features (int): features of one agent; narrower kinds are padded, with zeros.
        out_features (int): outputs for one agent.
        kinds (sequence of int): kind of each agent, from 0; agents of a kind share an encoder.
            Parameters grow with the number of kinds, not of agents.
        num_cells (sequence of int): width of each layer of the encoders, at least one; the
            last is H, which is also the width of the head's hidden layer.
        activation (str): ``tanh``, ``relu``, ``elu``, ``gelu`` or ``silu``.
        pooling ("mean" or "attention"): attention costs the square of the number of agents.
        num_heads (int): heads of the attention; divides H.
        per_agent (bool): an output for each agent, or one for the team, repeated.
        device (torch.device, optional): of the parameters.

    Shapes:
        - features: ``[*B, N, F]``; mask: ``[*B, N]``, bool; returns ``[*B, N, out]`` and no state

    Raises:
        ValueError: settings that make no network, features or a mask that do not fit ``kinds``.

    Reference: Zaheer et al., 2017, https://arxiv.org/abs/1703.06114 (mean); Lee et al., 2019,
    https://arxiv.org/abs/1810.00825 (attention). Differs from the latter: no normalization, and
    a team's context is a mean, not a learned query.

    Reduces to: attention without queries (of weight 0) is the mean.

    Examples:
        >>> network = SetNetwork(5, 1, [0, 0, 1], num_cells=[16], activation="tanh",
        ...                      pooling="mean")
        >>> mask = torch.tensor([True, False, True])
        >>> features = torch.randn(3, 5)
        >>> value, _ = network(features, mask)
        >>> value.shape
        torch.Size([3, 1])
        >>> features[1] = float("nan")
        >>> torch.equal(network(features, mask)[0][mask], value[mask])
        True
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        kinds: Sequence[int],
        *,
        num_cells: Sequence[int],
        activation: str,
        pooling: Literal["mean", "attention"],
        num_heads: int = 4,
        per_agent: bool = True,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        _check_settings(kinds, num_cells, activation, pooling, num_heads)
        self.in_features = in_features
        self.n_agents = len(kinds)
        self.per_agent = per_agent
        width = num_cells[-1]
        self.encoder = _KindEncoder(in_features, num_cells, kinds, activation, device)
        self.attention = None
        if pooling == "attention":
            self.attention = _LivingAttention(width, num_heads, device)
        self.head = nn.Sequential(
            nn.Linear(2 * width if per_agent else width, width, device=device),
            ACTIVATIONS[activation](),
            nn.Linear(width, out_features, device=device),
        )
        initialize(self, 1.0)

    def forward(
        self, features: Tensor, mask: Tensor | None = None, context: Context | None = None
    ) -> tuple[Tensor, None]:
        """Reads the living agents of every team; all, without a mask."""
        if mask is None:
            mask = torch.ones(features.shape[:-1], dtype=torch.bool, device=features.device)
        self._check_inputs(features, mask)
        features = torch.where(mask.unsqueeze(-1), features, 0.0)
        encoding = self.encoder(features)
        attended = encoding if self.attention is None else self.attention(encoding, mask)
        if not self.per_agent:
            output = self.head(_mean_of_living(attended, mask))
            return output.expand(*mask.shape, output.shape[-1]), None
        if self.attention is None:
            attended = _mean_of_living(encoding, mask).expand_as(encoding)
        return self.head(torch.cat([encoding, attended], -1)), None

    def _check_inputs(self, features: Tensor, mask: Tensor) -> None:
        if features.shape[-2:] != (self.n_agents, self.in_features):
            raise ValueError(
                f"features are {tuple(features.shape)}, expected [*batch, {self.n_agents} agents, "
                f"{self.in_features} features]."
            )
        if mask.dtype is not torch.bool or mask.shape != features.shape[:-1]:
            raise ValueError(
                f"a mask is {mask.dtype} {tuple(mask.shape)}, expected torch.bool "
                f"{tuple(features.shape[:-1])}."
            )


class _KindEncoder(nn.Module):
    """A perceptron for each kind of agent, all run as one batched matmul a layer.

    Kinds with fewer agents than the largest have empty rows, which are computed in vain.

    Shapes:
        - features: ``[*B, N, F]``; returns ``[*B, N, H]``
    """

    def __init__(self, in_features, num_cells, kinds, activation, device) -> None:
        super().__init__()
        # Plain integers: an index buffer would travel with the parameters in TorchRL's losses.
        self.n_kinds = max(kinds) + 1
        self.n_rows = max(list(kinds).count(kind) for kind in kinds)
        self.agents, self.rows = _routes(kinds)
        widths = [in_features, *num_cells]
        self.layers = nn.ModuleList(
            _KindLinear(self.n_kinds, *sizes, device) for sizes in zip(widths, num_cells)
        )
        self.activation = ACTIVATIONS[activation]()

    def forward(self, features: Tensor) -> Tensor:
        """Sorts agents by kind, runs the layers, and puts agents back."""
        batch = features.shape[:-2]
        n_rows = batch.numel() * self.n_rows
        encoding = self._sort(features).reshape(self.n_kinds, n_rows, features.shape[-1])
        for layer in self.layers:
            encoding = self.activation(layer(encoding))
        encoding = encoding.reshape(self.n_kinds, *batch, self.n_rows, encoding.shape[-1])
        parts = [encoding[kind, ..., rows, :] for kind, rows in self.rows]
        return parts[0] if len(parts) == 1 else torch.cat(parts, -2)

    def _sort(self, features: Tensor) -> Tensor:
        if self.n_kinds == 1:
            return features.unsqueeze(0)
        sorted_kinds = []
        for runs in self.agents:
            parts = [features[..., run, :] for run in runs]
            rows = parts[0] if len(parts) == 1 else torch.cat(parts, -2)
            sorted_kinds.append(F.pad(rows, (0, 0, 0, self.n_rows - rows.shape[-2])))
        return torch.stack(sorted_kinds)


class _KindLinear(nn.Module):
    """A linear layer for each kind, ``[K, rows, in] -> [K, rows, out]``."""

    def __init__(self, n_kinds, in_features, out_features, device) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(n_kinds, in_features, out_features, device=device))
        self.bias = nn.Parameter(torch.empty(n_kinds, 1, out_features, device=device))

    def forward(self, features: Tensor) -> Tensor:
        return torch.baddbmm(self.bias, features, self.weight)


class _LivingAttention(nn.Module):
    """Attention of every agent to the living ones; 0 where nobody lives.

    Shapes:
        - encoding: ``[*B, N, H]``; mask: ``[*B, N]``; returns ``[*B, N, H]``
    """

    def __init__(self, width, num_heads, device) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.projection = nn.Linear(width, 3 * width, device=device)
        self.output = nn.Linear(width, width, device=device)

    def forward(self, encoding: Tensor, mask: Tensor) -> Tensor:
        """Mixes the encodings of the living."""
        somebody = mask.any(-1, keepdim=True)
        # A softmax over nobody is NaN, in the gradient too: there all are read, and dropped.
        n_teams, n_agents = mask.shape[:-1].numel(), mask.shape[-1]
        readable = (mask | ~somebody).reshape(n_teams, 1, 1, n_agents)
        features = encoding.shape[-1] // self.num_heads
        heads = self.projection(encoding).reshape(n_teams, n_agents, 3, self.num_heads, features)
        query, key, value = heads.movedim(2, 0).transpose(2, 3)
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=readable)
        mixed = self.output(mixed.transpose(1, 2).reshape(encoding.shape))
        return torch.where(somebody.unsqueeze(-1), mixed, 0.0)


def _mean_of_living(value: Tensor, mask: Tensor) -> Tensor:
    """Returns the mean over the living agents, ``[*B, 1, H]``; 0 where there are none."""
    living = mask.unsqueeze(-1)
    total = torch.where(living, value, 0.0).sum(-2, keepdim=True)
    return total / living.sum(-2, keepdim=True).clamp_min(1)


def _routes(kinds: Sequence[int]) -> tuple[list[list[slice]], list[tuple[int, slice]]]:
    """Returns the agents of each kind as slices, and each slice's rows within its kind."""
    agents: list[list[slice]] = [[] for _ in range(max(kinds) + 1)]
    rows, filled, start = [], [0] * len(agents), 0
    for kind, run in groupby(kinds):
        count = len(list(run))
        agents[kind].append(slice(start, start + count))
        rows.append((kind, slice(filled[kind], filled[kind] + count)))
        filled[kind] += count
        start += count
    return agents, rows


def _check_settings(kinds, num_cells, activation, pooling, num_heads) -> None:
    if not kinds or set(kinds) != set(range(max(kinds) + 1)):
        raise ValueError(
            f"kinds are {list(kinds)}, expected each agent's kind, numbered from 0 without gaps."
        )
    if not num_cells:
        raise ValueError("num_cells is empty, expected the width of at least one layer.")
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation is {activation!r}, expected one of {', '.join(ACTIVATIONS)}.")
    if pooling not in ("mean", "attention"):
        raise ValueError(f"pooling is {pooling!r}, expected 'mean' or 'attention'.")
    if pooling == "attention" and (num_heads < 1 or num_cells[-1] % num_heads):
        raise ValueError(
            f"num_heads is {num_heads}, expected a divisor of the last width, {num_cells[-1]}."
        )
