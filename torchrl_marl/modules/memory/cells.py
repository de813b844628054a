"""Memories: recurrent cells of agents, run over whole sequences in one call.

Shapes: B any batch dims, T steps, R any dims of rows, the last of which is N agents, F input
features, H units, S size of a state, K distinct networks.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.types import Device
from torchrl.modules import recurrent_mode

from torchrl_marl.modules.config import MemoryConfig, NetworkConfig, sharing_of
from torchrl_marl.modules.memory.gru import gru, gru_loop
from torchrl_marl.modules.memory.linear_scan import linear_scan, linear_scan_loop
from torchrl_marl.modules.memory.lstm import lstm, lstm_loop
from torchrl_marl.modules.memory.products import project

__all__ = [
    "CELLS",
    "GRU",
    "LRU",
    "LSTM",
    "AgentLinear",
    "Layers",
    "Memory",
    "MinGRU",
    "cell_index",
    "make_memory",
    "remember",
]


class AgentLinear(nn.Module):
    """A linear map for every agent; agents may share maps.

    Args:
        in_features, out_features (int): F and O.
        index (sequence of int): index of each agent's map; ``[0]``: one map for all agents.
        gain (float): gain of the orthogonal initialization; biases are 0.
        device (torch.device, optional): device of the parameters.

    Shapes:
        - input: ``[*B, N, F]``; returns ``[*B, N, O]``; weight: ``[K, O, F]``; bias: ``[K, O]``

    Examples:
        >>> AgentLinear(4, 2, index=[0, 1, 0])(torch.zeros(5, 3, 4)).shape
        torch.Size([5, 3, 2])
    """

    index: Tensor | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        index: Sequence[int] = (0,),
        *,
        gain: float = 1.0,
        device: Device = None,
    ) -> None:
        super().__init__()
        k = max(index) + 1
        self.weight = nn.Parameter(torch.empty(k, out_features, in_features, device=device))
        self.bias = nn.Parameter(torch.zeros(k, out_features, device=device))
        for member in self.weight:
            nn.init.orthogonal_(member, gain)
        plain = list(index) == list(range(k))
        self.register_buffer(
            "index", None if plain else torch.tensor(index, device=device), persistent=False
        )
        self.shared = k == 1

    def of_agents(self, parameter: Tensor) -> Tensor:
        """Returns each agent's parameter, ``[K, ...]`` to ``[N, ...]``; a single one broadcasts."""
        if self.shared or self.index is None:
            return parameter
        return parameter.index_select(0, self.index)

    def rows(self, n_agents: int) -> list[int]:
        """Returns the map of each of ``n_agents`` agents."""
        if self.shared:
            return [0] * n_agents
        return list(range(n_agents)) if self.index is None else self.index.tolist()

    def forward(self, x: Tensor) -> Tensor:
        """Applies each agent's map to its features."""
        if self.shared:
            return F.linear(x, self.weight.squeeze(0), self.bias.squeeze(0))
        weight, bias = self.of_agents(self.weight), self.of_agents(self.bias)
        rows = x.movedim(-2, 0)
        flat = rows.flatten(1, -2) if rows.ndim > 2 else rows.unsqueeze(1)
        y = torch.baddbmm(bias.unsqueeze(1), flat, weight.mT)
        return y.reshape(*rows.shape[:-1], y.shape[-1]).movedim(0, -2)


class Memory(nn.Module):
    """Recurrent cell of agents: reads a state, returns outputs and the states after each step.

    A state is reset before the first step of an episode, and kept in a step in which the agent does
    not act. Agents are independent rows. Agents with different networks also run in one batched
    call.

    Args:
        in_features (int): number of input features F.
        size (int): number of units H.
        index (sequence of int): index of each agent's network; ``[0]``: one for all agents.
        device (torch.device, optional): device of the parameters.

    Attributes:
        state_size (int): size S of a state.
        out_features (int): number of output features.

    Shapes:
        - x: ``[T, *R, F]``; state: ``[*R, S]``; init, mask: bool ``[T, *R, 1]``, or None
        - returns: output ``[T, *R, H]``, states ``[T, *R, S]``
    """

    state_size: int
    out_features: int

    @abstractmethod
    def forward(
        self, x: Tensor, state: Tensor, init: Tensor | None, mask: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Runs over the steps.

        Args:
            x (Tensor): features of each step.
            state (Tensor): state before the first step; finite.
            init (Tensor, optional): True at an agent's first step of an episode; None: nowhere.
            mask (Tensor, optional): True where an agent acts; None: everywhere.
        """


class _GatedMemory(Memory):
    """A memory with gates that read the state; its steps run in sequence, in one operation."""

    n_gates: int
    n_states = 1

    def __init__(
        self, in_features: int, size: int, index: Sequence[int] = (0,), device: Device = None
    ) -> None:
        super().__init__()
        self.size = self.out_features = size
        self.state_size = self.n_states * size
        width = self.n_gates * size
        self.ih = AgentLinear(in_features, width, index, device=device)
        self.hh = AgentLinear(size, width, index, device=device)

    @abstractmethod
    def steps(
        self, x: Tensor, state: Tensor, keep: Tensor, acts: Tensor | None, *weights: Tensor
    ) -> Tensor:
        """Returns the states ``[T, K, R, S]`` of K networks after each step, for R rows of each.

        Args:
            x (Tensor): inputs, ``[T, K, R, F]``.
            state (Tensor): state before the first step, ``[K, R, S]``.
            keep (Tensor): 0 where the state is reset before a step, else 1, ``[T, K, R, 1]``.
            acts (Tensor, optional): bool, False where a step keeps the state unchanged.
            *weights (Tensor): weights ``[K, n_gates * H, F]`` and biases ``[K, n_gates * H]`` of
                the inputs, then those of the state, ``[K, n_gates * H, H]`` and
                ``[K, n_gates * H]``; see :meth:`weights`.
        """

    def forward(
        self, x: Tensor, state: Tensor, init: Tensor | None, mask: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Runs over the steps; the first H numbers of a state are the output."""
        x = x.to(state.dtype)
        keep, acts = self._keep_factor(init, x), None if mask is None else self._fold_agents(mask)
        rows = self.steps(
            self._fold_agents(x), self._fold_agents(state, 0), keep, acts, *self.weights(state)
        )
        states = self._unfold_agents(rows, x)
        return states[..., : self.size], states

    def weights(self, like: Tensor) -> list[Tensor]:
        """Returns the parameters that :meth:`steps` reads, of each agent or of all."""
        maps = (self.ih, self.hh)
        own = [x for m in maps for x in (m.of_agents(m.weight), m.of_agents(m.bias))]
        return [x.to(like) for x in own]

    def _fold_agents(self, x: Tensor, steps: int = 1) -> Tensor:
        """Folds ``[T, *R, F]`` to ``[T, K, R, F]``; without steps, ``[*R, F]`` to ``[K, R, F]``."""
        if self.hh.shared:
            return x.flatten(steps, -2).unsqueeze(steps)
        rows = x.movedim(-2, steps)
        return rows.flatten(steps + 1, -2) if rows.ndim > steps + 2 else rows.unsqueeze(-2)

    def _unfold_agents(self, rows: Tensor, like: Tensor) -> Tensor:
        """Unfolds ``[T, K, R, F]`` to ``[T, *R, F]``."""
        batch = like.shape[1:-1]
        if self.hh.shared:
            return rows.squeeze(1).unflatten(1, batch)
        rows = rows.unflatten(2, batch[:-1]) if len(batch) > 1 else rows.squeeze(2)
        return rows.movedim(1, -2)

    def _keep_factor(self, init: Tensor | None, x: Tensor) -> Tensor:
        kept = x.new_ones(*x.shape[:-1], 1) if init is None else (~init).to(x.dtype)
        return self._fold_agents(kept)


class GRU(_GatedMemory):
    """Gated recurrent units; see :func:`~torchrl_marl.modules.memory.gru.gru`.

    Args:
        in_features, size, index, device: as in :class:`Memory`; ``S = H``.

    Reduces to: ``torch.nn.GRU`` without resets and with all agents acting.

    Examples:
        >>> memory = GRU(4, 8)
        >>> output, states = memory(torch.zeros(5, 2, 3, 4), torch.zeros(2, 3, 8), None, None)
        >>> output.shape
        torch.Size([5, 2, 3, 8])
    """

    n_gates = 3

    def steps(
        self, x: Tensor, state: Tensor, keep: Tensor, acts: Tensor | None, *weights: Tensor
    ) -> Tensor:
        """Runs over the steps."""
        return (gru_loop if len(x) == 1 else gru)(x, state, keep, acts, *weights)


class LSTM(_GatedMemory):
    """Long short-term memory; see :func:`~torchrl_marl.modules.memory.lstm.lstm`.

    Args:
        in_features, size, index, device: as in :class:`Memory`; ``S = 2 H``.

    Reduces to: ``torch.nn.LSTM`` without resets and with all agents acting.

    Examples:
        >>> memory = LSTM(4, 8)
        >>> output, states = memory(torch.zeros(5, 2, 3, 4), torch.zeros(2, 3, 16), None, None)
        >>> output.shape, states.shape
        (torch.Size([5, 2, 3, 8]), torch.Size([5, 2, 3, 16]))
    """

    n_gates = 4
    n_states = 2

    def steps(
        self, x: Tensor, state: Tensor, keep: Tensor, acts: Tensor | None, *weights: Tensor
    ) -> Tensor:
        """Runs over the steps."""
        acts = torch.ones_like(keep, dtype=torch.bool) if acts is None else acts
        gates = project(x, *weights[:2]).to(x.dtype)
        return (lstm_loop if len(x) == 1 else lstm)(gates, state, keep, acts, *weights[2:])


class _LinearMemory(Memory):
    """A memory that is linear in its state, followed by a residual layer."""

    def __init__(
        self, in_features: int, size: int, width: int, index: Sequence[int], device: Device
    ) -> None:
        super().__init__()
        self.size = self.out_features = self.state_size = size
        self.input = AgentLinear(in_features, width, index, device=device)
        self.output = AgentLinear(size, size, index, gain=math.sqrt(2.0), device=device)
        wide = in_features != size
        self.skip = AgentLinear(in_features, size, index, device=device) if wide else nn.Identity()

    @abstractmethod
    def factors(self, x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor | None, Tensor]:
        """Returns ``a``, its imaginary part and ``b`` of each step, for ``h' = a h + b``."""

    def forward(
        self, x: Tensor, state: Tensor, init: Tensor | None, mask: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Runs over the steps."""
        decay, turn, entered = self.factors(x, state.dtype)
        if mask is not None:
            decay = torch.where(mask, decay, 1.0)
            turn = None if turn is None else torch.where(mask, turn, 0.0)
            entered = torch.where(mask, entered, 0.0)
        if init is not None:
            decay = torch.where(init, 0.0, decay)
            turn = None if turn is None else torch.where(init, 0.0, turn)
        run = linear_scan_loop if len(x) == 1 else linear_scan
        states = run(decay, turn, entered, state)
        return self.skip(x) + F.silu(self.output(states)), states


class MinGRU(_LinearMemory):
    r"""A GRU in which gate and candidate do not read the state, followed by a residual layer.

    .. math:: h' = (1 - z) h + z c, \quad z = \sigma(W_z x), \quad c = W_c x, \quad
        y = x + \mathrm{SiLU}(W_y h')

    Args:
        in_features, size, index, device: as in :class:`Memory`; ``S = H``.

    Reference: Feng et al., 2024, https://arxiv.org/abs/2410.01201.

    Examples:
        >>> memory = MinGRU(8, 8)
        >>> output, states = memory(torch.zeros(5, 2, 3, 8), torch.zeros(2, 3, 8), None, None)
        >>> output.shape
        torch.Size([5, 2, 3, 8])
    """

    def __init__(
        self, in_features: int, size: int, index: Sequence[int] = (0,), device: Device = None
    ) -> None:
        super().__init__(in_features, size, 2 * size, index, device)

    def factors(self, x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor | None, Tensor]:
        """Returns the decay factor and the gated input of each step."""
        update, candidate = self.input(x).to(dtype).chunk(2, -1)
        update = torch.sigmoid(update)
        return 1 - update, None, update * candidate


class LRU(_LinearMemory):
    r"""Linear recurrent units: complex states that rotate and decay, and a residual layer.

    .. math:: h' = \lambda h + \sqrt{1 - |\lambda|^2} \, W x, \quad
        \lambda = e^{-e^\nu + i e^\theta}, \quad y = x + \mathrm{SiLU}(W_y h')

    Args:
        in_features, size, index, device: as in :class:`Memory`; ``S = H`` must be even; the first
            half of a state holds the real parts.
        ring (tuple of float): smallest and largest :math:`|\lambda|` at initialization.

    Reference: Orvieto et al., 2023, https://arxiv.org/abs/2303.06349.

    Raises:
        ValueError: an odd size.

    Examples:
        >>> memory = LRU(8, 8)
        >>> output, states = memory(torch.zeros(5, 2, 3, 8), torch.zeros(2, 3, 8), None, None)
        >>> output.shape
        torch.Size([5, 2, 3, 8])
    """

    def __init__(
        self,
        in_features: int,
        size: int,
        index: Sequence[int] = (0,),
        device: Device = None,
        ring: tuple[float, float] = (0.5, 0.99),
    ) -> None:
        if size % 2:
            raise ValueError(f"an LRU has {size} units, expected an even number; use {size + 1}.")
        super().__init__(in_features, size, size, index, device)
        shape, (low, high) = (max(index) + 1, size // 2), ring
        radius = torch.rand(shape, device=device) * (high**2 - low**2) + low**2
        self.nu = nn.Parameter((-0.5 * radius.log()).log())
        self.theta = nn.Parameter((math.pi * torch.rand(shape, device=device)).log())

    def factors(self, x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor | None, Tensor]:
        """Returns the complex decay factor and the scaled input of each step."""
        nu, theta = self.input.of_agents(self.nu), self.input.of_agents(self.theta)
        radius, angle = (-nu.exp()).exp(), theta.exp()
        decay, turn = radius * angle.cos(), radius * angle.sin()
        scale = (1 - radius.square()).sqrt()
        entered = self.input(x).to(dtype) * torch.cat([scale, scale], -1)
        half = (*x.shape[:-1], self.size // 2)
        return decay.expand(half), turn.expand(half), entered


class Layers(Memory):
    """Several memories in sequence, with concatenated states.

    Args:
        layers (sequence of Memory): each reads the output of the one before.
    """

    def __init__(self, layers: Sequence[Memory]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.sizes = [layer.state_size for layer in layers]
        self.state_size, self.out_features = sum(self.sizes), layers[-1].out_features

    def forward(
        self, x: Tensor, state: Tensor, init: Tensor | None, mask: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Runs over the steps, layer by layer."""
        states = []
        for layer, own in zip(self.layers, state.split(self.sizes, -1)):
            x, after = layer(x, own, init, mask)
            states.append(after)
        return x, torch.cat(states, -1)


CELLS: dict[str, type[Memory]] = {"gru": GRU, "lstm": LSTM, "mingru": MinGRU, "lru": LRU}
"""Memories by their name in the settings."""


def make_memory(
    in_features: int, config: MemoryConfig, index: Sequence[int] = (0,), device: Device = None
) -> Memory:
    """Builds a memory.

    Args:
        in_features (int): number of input features F.
        config (MemoryConfig): kind, size and layers.
        index (sequence of int): index of each agent's network; ``[0]``: one for all agents.
        device (torch.device, optional): device of the parameters.

    Examples:
        >>> make_memory(8, MemoryConfig("lstm", size=4, layers=2)).state_size
        16
    """
    widths = [in_features, *[config.size] * config.layers]
    cells = [
        CELLS[config.kind](width, config.size, index, device=device)  # type: ignore[call-arg]
        for width in widths[:-1]
    ]
    return cells[0] if len(cells) == 1 else Layers(cells)


def cell_index(
    config: NetworkConfig, kinds: Sequence[int], teams: Sequence[int] | None = None
) -> list[int]:
    """Returns the index of each agent's memory; ``[0]`` if all share one.

    Args:
        config (NetworkConfig): settings of sharing.
        kinds (sequence of int): number that stands for each agent's group and kind.
        teams (sequence of int, optional): team of each agent, from 0; by default one team.

    Examples:
        >>> cell_index(NetworkConfig(sharing="group"), [0, 0, 1])
        [0, 0, 1]
        >>> cell_index(NetworkConfig(sharing="trunk"), [0, 0, 1])
        [0]
    """
    sharing = sharing_of(config)
    index: Sequence[int] = [0] if teams is None else teams
    if sharing == "none":
        index = range(len(kinds))
    elif sharing == "group":
        numbers = {kind: number for number, kind in enumerate(dict.fromkeys(kinds))}
        index = [numbers[kind] for kind in kinds]
    elif sharing in ("index", "clusters"):
        index = config.sharing_index or [0]
    return [0] if max(index) == 0 else list(index)


def remember(
    memory: Memory, x: Tensor, state: Tensor, init: Tensor, mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Runs a memory over one step, or over a sequence in TorchRL's recurrent mode.

    If an agent does not act before its next episode begins, for example because it is dead, its
    state affects no output and no gradient. An agent that waits keeps its state.

    Args:
        memory (Memory): memory to run.
        x (Tensor): features.
        state (Tensor): state before the step; for a sequence, only that of the first step is read.
        init (Tensor): bool, True at an agent's first step of an episode.
        mask (Tensor, optional): bool, True where the agent acts.

    Shapes:
        - x: ``[*B, N, F]``; state: ``[*B, N, S]``; init: ``[*B, N, 1]``; mask: ``[*B, N]``
        - returns: ``[*B, N, H]`` and the state after the step, ``[*B, N, S]``; in recurrent mode
          ``[*B, T, N, ...]``, and the state's T may be 1

    Examples:
        >>> memory = make_memory(4, MemoryConfig("gru", size=3))
        >>> init = torch.ones(5, 2, 1, dtype=torch.bool)
        >>> remember(memory, torch.zeros(5, 2, 4), torch.zeros(5, 2, 3), init, None)[1].shape
        torch.Size([5, 2, 3])
    """
    mask = None if mask is None else mask.unsqueeze(-1)
    if not recurrent_mode():
        mask = None if mask is None else mask.unsqueeze(0)
        output, states = _run_over_steps(memory, x.unsqueeze(0), state, init.unsqueeze(0), mask)
        return output.squeeze(0), states.squeeze(0)
    mask = None if mask is None else mask.movedim(-3, 0)
    # A stored state may have the graph of the rollout; gradients do not go beyond the sequence.
    state, init = state[..., 0, :, :].detach(), init.movedim(-3, 0)
    output, states = _run_over_steps(memory, x.movedim(-3, 0), state, init, mask)
    return output.movedim(0, -3), states.movedim(0, -3)


def _run_over_steps(
    memory: Memory, x: Tensor, state: Tensor, init: Tensor, mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Runs a memory over ``[T, *B, N, F]``."""
    later = None if len(x) == 1 else init
    if mask is None:
        return memory(x, torch.where(init[0], 0.0, state), later, None)
    ended = init.cumsum(0) > 0
    needed = (mask & ~ended).any(0)
    output, states = memory(x, torch.where(needed, state, 0.0), later, mask)
    idle = (mask | ended).cumsum(0) == 0
    return output, torch.where(idle, state, states)
