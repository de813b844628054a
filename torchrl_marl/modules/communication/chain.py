"""BicNet: a recurrent network along the agents, there and back.

Shapes: B any batch dims, N agents, H features, U units and S numbers of a state of the recurrent
network.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from torchrl_marl.modules.bodies import initialize
from torchrl_marl.modules.memory.cells import GRU, LSTM

__all__ = ["Chain"]

_CELLS: dict[str, type[GRU | LSTM]] = {"gru": GRU, "lstm": LSTM}


class Chain(nn.Module):
    r"""Passes what is said along the agents, once in their order and once against it.

    .. math::
        f_{i+1} = \mathrm{cell}(h_i, f_i), \qquad g_{i-1} = \mathrm{cell}'(h_i, g_i), \qquad
        h_i' = \tanh\big(h_i + W [h_i, f_i, g_i]\big)

    An agent hears what those before and behind it have said, and adds its own word. Who is dead or
    silent is passed over. **Depends on the order of agents**: with it, an agent can know its
    number.

    Args:
        width (int): features H.
        size (int): units U of the recurrent network.
        cell (str): ``gru`` or ``lstm``.
        device (torch.device, optional): of the parameters.

    Attributes:
        message_size (int): numbers that an agent passes on in a step, both ways together.

    Shapes:
        - features: ``[*B, N, H]``, finite, those of the dead 0; speaks: ``[*B, N]``, bool
        - returns: ``[*B, N, H]``

    Reference: Peng et al., 2017, https://arxiv.org/abs/1703.10069 (BicNet). Differs in that an
    agent reads what the others have said beside its own features, not the outputs of the cell.

    Reduces to: a layer of the agent's own where nobody else speaks.

    Examples:
        >>> speaks = torch.tensor([True, True, False])
        >>> Chain(8, 4)(torch.zeros(5, 3, 8), None, speaks.expand(5, 3)).shape
        torch.Size([5, 3, 8])
    """

    def __init__(
        self, width: int, size: int, cell: str = "gru", device: torch.device | str | None = None
    ) -> None:
        super().__init__()
        self.forth = _CELLS[cell](width, size, device=device)
        self.back = _CELLS[cell](width, size, device=device)
        self.size = size
        self.state_size: int = self.forth.state_size
        self.message_size = 2 * self.state_size
        self.update = nn.Linear(width + 2 * size, width, device=device)
        initialize(self.update, 1.0)

    def forward(
        self,
        features: Tensor,
        links: Tensor | None,
        speaks: Tensor,
        position: Tensor | None = None,
        code: Callable[[Tensor], Tensor] | None = None,
    ) -> Tensor:
        """Runs both ways; who speaks says all about who is heard."""
        # Agents take the place of time, and one that is silent waits.
        words, acts = (x.movedim(-2, 0) for x in (features, speaks.unsqueeze(-1)))
        n, batch = len(words), words.shape[1:-1]
        if n == 1:
            return self.read(features, *features.new_zeros(2, *batch, 1, self.size))
        out = self._both_ways(*(x.reshape(n, -1, x.shape[-1]) for x in (words, acts)))
        nothing = torch.zeros_like(out[:1, 0])
        ways = torch.cat([nothing, out[:, 0]]), torch.cat([out[:, 1].flip(0), nothing])
        return self.read(features, *(x.reshape(n, *batch, -1).movedim(0, -2) for x in ways))

    def _both_ways(self, words: Tensor, acts: Tensor) -> Tensor:
        """Returns what all but the last have passed on, there and back: one loop for both ways.

        Args:
            words (Tensor): features, ``[N, R, H]``.
            acts (Tensor): bool, who speaks, ``[N, R, 1]``.

        Returns:
            Tensor: ``[N - 1, 2, R, U]``, each way in its own order.
        """
        forth, back = self.forth, self.back
        gates = torch.stack([forth.ih(words[:-1]), back.ih(words[1:].flip(0))], 1)
        acts = torch.stack([acts[:-1], acts[1:].flip(0)], 1)
        weight = torch.cat([forth.hh.weight, back.hh.weight]).to(gates)
        bias = torch.cat([forth.hh.bias, back.hh.bias]).to(gates)
        start = gates.new_zeros(*gates.shape[1:-1], self.state_size)
        keep = gates.new_ones(*gates.shape[:-1], 1)
        return forth.steps(gates, start, keep, acts, weight, bias)[..., : self.size]

    def pass_on(self, features: Tensor, state: Tensor, *, back: bool) -> Tensor:
        """Returns what an agent hands to the next one, having been handed a state.

        Args:
            features (Tensor): its own, ``[*B, H]``.
            state (Tensor): of the recurrent network, ``[*B, S]``; zeros for the first.
            back (bool): against the order.
        """
        cell = self.back if back else self.forth
        return cell(features[None, ..., None, :], state.unsqueeze(-2), None, None)[1][0, ..., 0, :]

    def read(self, features: Tensor, before: Tensor, behind: Tensor) -> Tensor:
        """Returns what agents make of what they hear, ``[*B, N, H]``.

        Args:
            features (Tensor): of those who listen.
            before, behind (Tensor): outputs, the first U numbers of a state, of the neighbors.
        """
        return torch.tanh(features + self.update(torch.cat([features, before, behind], -1)))
