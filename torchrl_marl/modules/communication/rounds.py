"""Rounds of messages: by their mean, by attention, or along a chain.

Shapes: B any batch dims, N agents, H features, K numbers of a message.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.types import Device

from torchrl_marl.modules.bodies import initialize
from torchrl_marl.modules.memory.cells import GRU, LSTM

__all__ = ["Attention", "Chain", "Mean", "Round"]


class Round(nn.Module):
    """Everybody speaks once and listens to those whom it is linked to.

    ``forward`` is to ``send``, to ``mix`` all messages, which may take effect later, and to
    ``take_in`` what is heard of them: an agent that runs alone does so by the very code of the
    team.

    Attributes:
        message_size (int): numbers K of a message.
        heard_size (int): numbers V of what is heard.

    Shapes:
        - features: ``[*B, N, H]``, finite, those of the dead 0; links: ``[*B, N, M]``, bool
        - position: ``[*B, N, P]``, for what depends on how far away words are said
        - returns: ``[*B, N, H]``
    """

    message_size: int
    heard_size: int

    @abstractmethod
    def send(self, features: Tensor, position: Tensor | None = None) -> Tensor:
        """Returns what agents say, ``[*B, N, K]``."""

    @abstractmethod
    def mix(
        self, features: Tensor, inbox: Tensor, heard: Tensor, position: Tensor | None = None
    ) -> Tensor:
        """Returns what agents hear of all messages, ``[*B, N, V]``; 0 where they hear nobody.

        Args:
            features (Tensor): of those who listen, ``[*B, N, H]``.
            inbox (Tensor): all messages, ``[*B, M, K]``.
            heard (Tensor): bool, which of them are heard, ``[*B, N, M]``.
            position (Tensor, optional): of those who listen.
        """

    @abstractmethod
    def take_in(self, features: Tensor, words: Tensor) -> Tensor:
        """Returns what agents make of what they hear, ``[*B, N, H]``.

        Args:
            features (Tensor): of those who listen, ``[*B, N, H]``.
            words (Tensor): from :meth:`mix`, ``[*B, N, V]``.
        """

    def forward(
        self,
        features: Tensor,
        links: Tensor,
        speaks: Tensor,
        position: Tensor | None = None,
        code: Callable[[Tensor], Tensor] | None = None,
        *,
        later: Callable[[Tensor], Tensor] | None = None,
    ) -> Tensor:
        """Runs the round.

        Args:
            features, links, position: as above.
            speaks (Tensor): bool, who says anything, ``[*B, N]``; links know it already.
            code (callable, optional): what becomes of messages on their way.

        Keyword Args:
            later (callable, optional): of what is heard in this step, to what is known of it now.
        """
        messages = self.send(features, position)
        messages = messages if code is None else code(messages)
        words = self.mix(features, messages, links, position)
        return self.take_in(features, words if later is None else later(words))


class Mean(Round):
    r"""Reads the mean of what the linked agents say.

    .. math::
        m_j = S h_j, \qquad
        h_i' = \tanh\Big(h_i + W h_i + b + R \tfrac{1}{|L_i|} \sum_{j \in L_i} m_j\Big)

    The order of agents does not matter.

    Args:
        width (int): features H.
        message_size (int): numbers K of a message.
        device (torch.device, optional): of the parameters.

    Shapes:
        - as :class:`~torchrl_marl.modules.communication.rounds.Round`

    Reference: Sukhbaatar et al., 2016, https://arxiv.org/abs/1605.07736, equations 2 and 3; with
    K = H, their matrix C is :math:`R S`. The mean is over those who are heard, so that it does not
    shrink where some are silent.

    Reduces to: a layer of the agent's own where nobody is heard.

    Examples:
        >>> from torchrl_marl.modules.communication.channel import between
        >>> alive = torch.tensor([True, True, False])
        >>> Mean(8, 4)(torch.zeros(5, 3, 8), between(alive).expand(5, 3, 3), alive).shape
        torch.Size([5, 3, 8])
    """

    def __init__(self, width: int, message_size: int, device: Device = None) -> None:
        super().__init__()
        self.message_size = self.heard_size = message_size
        self.own = nn.Linear(width, width, device=device)
        self.message = nn.Linear(width, message_size, bias=False, device=device)
        self.heard = nn.Linear(message_size, width, bias=False, device=device)
        for layer in self.children():
            initialize(layer, 1.0)

    def send(self, features: Tensor, position: Tensor | None = None) -> Tensor:
        """Returns what agents say, ``[*B, N, K]``."""
        return self.message(features)

    def mix(
        self, features: Tensor, inbox: Tensor, heard: Tensor, position: Tensor | None = None
    ) -> Tensor:
        """Returns the mean of what is heard, ``[*B, N, K]``."""
        weight = heard.to(inbox.dtype)
        return weight @ inbox / weight.sum(-1, keepdim=True).clamp_min(1)

    def take_in(self, features: Tensor, words: Tensor) -> Tensor:
        """Returns what agents make of what they hear, ``[*B, N, H]``."""
        return torch.tanh(features + self.own(features) + self.heard(words))


class Attention(Round):
    r"""Says a key and a value; each agent weighs the values by how the keys fit its query.

    .. math::
        \alpha_{ij} = \operatorname{softmax}_{j \in L_i} \frac{q_i \cdot k_j + u \cdot e_{ij}}
        {\sqrt{d}}, \qquad h_i' = \tanh\Big(h_i + W \big[h_i, \sum_j \alpha_{ij}
        (v_j + U e_{ij})\big]\Big)

    with :math:`e_{ij}` the difference of the places and their distance; without places it is not
    there. The order of agents does not matter.

    Args:
        width (int): features H.
        message_size (int): numbers of a value.
        key_size (int): numbers d of a key.
        n_position (int): columns P of a position, which is part of a message; 0: of no account.
        device (torch.device, optional): of the parameters.

    Shapes:
        - as :class:`~torchrl_marl.modules.communication.rounds.Round`; K = key, value and place

    Reference: Das et al., 2019, https://arxiv.org/abs/1810.11187, equations 2 to 4; places as in
    Velickovic et al., 2018, https://arxiv.org/abs/1710.10903, with edges that have features.

    Reduces to: the mean of the values where all keys are equal.

    Examples:
        >>> from torchrl_marl.modules.communication.channel import between
        >>> alive = torch.tensor([True, True, False])
        >>> Attention(8, 4)(torch.zeros(5, 3, 8), between(alive).expand(5, 3, 3), alive).shape
        torch.Size([5, 3, 8])
    """

    def __init__(
        self,
        width: int,
        message_size: int,
        key_size: int = 16,
        n_position: int = 0,
        device: Device = None,
    ) -> None:
        super().__init__()
        self.sizes = [key_size, message_size, n_position]
        self.message_size, self.heard_size = sum(self.sizes), message_size
        self.query = nn.Linear(width, key_size, device=device)
        self.message = nn.Linear(width, key_size + message_size, device=device)
        self.update = nn.Linear(width + message_size, width, device=device)
        self.edge_score = self.edge_value = None
        if n_position:
            self.edge_score = nn.Linear(n_position + 1, 1, bias=False, device=device)
            self.edge_value = nn.Linear(n_position + 1, message_size, bias=False, device=device)
        for layer in self.children():
            initialize(layer, 1.0)

    def send(self, features: Tensor, position: Tensor | None = None) -> Tensor:
        """Returns what agents say, ``[*B, N, K]``."""
        message = self.message(features)
        if self.edge_score is None or position is None:
            return message
        return torch.cat([message, position.to(message)], -1)

    def mix(
        self, features: Tensor, inbox: Tensor, heard: Tensor, position: Tensor | None = None
    ) -> Tensor:
        """Returns the values, weighed, ``[*B, N, V]``."""
        _, value, place = inbox.split(self.sizes, -1)
        weight = self.weights(features, inbox, heard, position)
        mixed = weight @ value
        if self.edge_value is not None and position is not None:
            # The weights sum to 1: mixing edges and mapping them is mapping and mixing them.
            mixed = mixed + self.edge_value((weight.unsqueeze(-1) * edges(position, place)).sum(-2))
        return mixed

    def take_in(self, features: Tensor, words: Tensor) -> Tensor:
        """Returns what agents make of what they hear, ``[*B, N, H]``."""
        return torch.tanh(features + self.update(torch.cat([features, words], -1)))

    def weights(
        self, features: Tensor, inbox: Tensor, heard: Tensor, position: Tensor | None = None
    ) -> Tensor:
        """Returns how much each agent listens to whom, ``[*B, N, M]``; 0 where it hears nobody."""
        key, _, place = inbox.split(self.sizes, -1)
        score = self.query(features) @ key.mT
        if self.edge_score is not None and position is not None:
            score = score + self.edge_score(edges(position, place)).squeeze(-1)
        score = score / self.sizes[0] ** 0.5
        somebody = heard.any(-1, keepdim=True)
        # A softmax over nobody is NaN, in the gradient too: there all are read, and dropped.
        score = torch.where(heard | ~somebody, score, -torch.inf)
        return torch.where(somebody, score.softmax(-1), 0.0)


def edges(position: Tensor, place: Tensor) -> Tensor:
    """Returns where others are, seen from each agent, and how far.

    Shapes:
        - position: ``[*B, N, P]``; place: ``[*B, M, P]``; returns ``[*B, N, M, P + 1]``

    Examples:
        >>> edges(torch.tensor([[0.0, 0.0]]), torch.tensor([[3.0, 4.0]]))
        tensor([[[3., 4., 5.]]])
    """
    apart = place.unsqueeze(-3) - position.unsqueeze(-2)
    # At a distance of 0 a root has no slope.
    distance = apart.square().sum(-1, keepdim=True).clamp_min(1e-12).sqrt()
    return torch.cat([apart, distance], -1)


_CELLS: dict[str, type[GRU | LSTM]] = {"gru": GRU, "lstm": LSTM}


class Chain(nn.Module):
    r"""Passes what is said along the agents, once in their order and once against it (BicNet).

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
        - returns: ``[*B, N, H]``; below U units and S numbers of a state of the recurrent network

    Reference: Peng et al., 2017, https://arxiv.org/abs/1703.10069 (BicNet). Differs in that an
    agent reads what the others have said beside its own features, not the outputs of the cell.

    Reduces to: a layer of the agent's own where nobody else speaks.

    Examples:
        >>> speaks = torch.tensor([True, True, False])
        >>> Chain(8, 4)(torch.zeros(5, 3, 8), None, speaks.expand(5, 3)).shape
        torch.Size([5, 3, 8])
    """

    def __init__(self, width: int, size: int, cell: str = "gru", device: Device = None) -> None:
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
