"""Rounds of messages: mean, attention, or a recurrent chain.

Shapes: B any batch dims, N receivers (all agents, or one that is deployed alone), M senders, H
features, K numbers per message, P coordinates of a position.
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
    """A round of messages: each agent sends once and reads the messages of its links.

    ``forward`` calls ``send``, then ``mix`` on all messages, which may be delayed, then
    ``update_features`` on the result. An agent that is deployed alone runs the same three methods.

    Attributes:
        message_size (int): number K of values per message.
        heard_size (int): number of values V of the mixed messages.

    Shapes:
        - features: ``[*B, N, H]``, finite, 0 for dead agents; links: ``[*B, N, M]``, bool
        - position: ``[*B, N, P]``, for messages that depend on distance
        - returns: ``[*B, N, H]``
    """

    message_size: int
    heard_size: int

    @abstractmethod
    def send(self, features: Tensor, position: Tensor | None = None) -> Tensor:
        """Returns the agents' messages, ``[*B, N, K]``."""

    @abstractmethod
    def mix(
        self, features: Tensor, inbox: Tensor, heard: Tensor, position: Tensor | None = None
    ) -> Tensor:
        """Returns the mixed messages of each agent, ``[*B, N, V]``; 0 if it hears none.

        Args:
            features (Tensor): receivers' features, ``[*B, N, H]``.
            inbox (Tensor): all messages, ``[*B, M, K]``.
            heard (Tensor): bool, messages that each receiver hears, ``[*B, N, M]``.
            position (Tensor, optional): receivers' positions.
        """

    @abstractmethod
    def update_features(self, features: Tensor, mixed: Tensor) -> Tensor:
        """Returns the features updated by the mixed messages, ``[*B, N, H]``.

        Args:
            features (Tensor): receivers' features, ``[*B, N, H]``.
            mixed (Tensor): mixed messages from :meth:`mix`, ``[*B, N, V]``.
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
            features, links, position: as in the class.
            speaks (Tensor): bool, agents that send, ``[*B, N]``; ``links`` already takes this into
                account.
            code (callable, optional): discretizes the messages.

        Keyword Args:
            later (callable, optional): maps this step's mixed messages to those that arrive now.
        """
        messages = self.send(features, position)
        messages = messages if code is None else code(messages)
        mixed = self.mix(features, messages, links, position)
        return self.update_features(features, mixed if later is None else later(mixed))


class Mean(Round):
    r"""Reads the mean of the linked agents' messages.

    .. math::
        m_j = S h_j, \qquad
        h_i' = \tanh\Big(h_i + W h_i + b + R \tfrac{1}{|L_i|} \sum_{j \in L_i} m_j\Big)

    The order of agents does not matter.

    Args:
        width (int): number of features H.
        message_size (int): number K of values per message.
        device (torch.device, optional): device of the parameters.

    Shapes:
        - as :class:`~torchrl_marl.modules.communication.rounds.Round`

    Reference: Sukhbaatar et al., 2016, https://arxiv.org/abs/1605.07736, equations 2 and 3; with
    K = H, their matrix C is :math:`R S`. The mean is over the messages heard, so silent agents do
    not shrink it.

    Reduces to: a layer per agent if no message is heard.

    Examples:
        >>> from torchrl_marl.modules.communication.channel import living_links
        >>> alive = torch.tensor([True, True, False])
        >>> Mean(8, 4)(torch.zeros(5, 3, 8), living_links(alive).expand(5, 3, 3), alive).shape
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
        """Returns the agents' messages, ``[*B, N, K]``."""
        return self.message(features)

    def mix(
        self, features: Tensor, inbox: Tensor, heard: Tensor, position: Tensor | None = None
    ) -> Tensor:
        """Returns the mean of the messages heard, ``[*B, N, K]``."""
        weight = heard.to(inbox.dtype)
        return weight @ inbox / weight.sum(-1, keepdim=True).clamp_min(1)

    def update_features(self, features: Tensor, mixed: Tensor) -> Tensor:
        """Returns the features updated by the mixed messages, ``[*B, N, H]``."""
        return torch.tanh(features + self.own(features) + self.heard(mixed))


class Attention(Round):
    r"""Reads messages by attention: agents send keys and values; receivers' queries weigh them.

    .. math::
        \alpha_{ij} = \operatorname{softmax}_{j \in L_i} \frac{q_i \cdot k_j + u \cdot e_{ij}}
        {\sqrt{d}}, \qquad h_i' = \tanh\Big(h_i + W \big[h_i, \sum_j \alpha_{ij}
        (v_j + U e_{ij})\big]\Big)

    with :math:`e_{ij}` the difference of the positions and their distance. Without positions, the
    terms with :math:`e_{ij}` are absent. The order of agents does not matter.

    Args:
        width (int): number of features H.
        message_size (int): dimension of a value.
        key_size (int): dimension d of a key.
        n_position (int): number P of coordinates of a position, which is part of a message; 0 for
            messages without position.
        device (torch.device, optional): device of the parameters.

    Shapes:
        - as :class:`~torchrl_marl.modules.communication.rounds.Round`; K = key, value and position

    Reference: Das et al., 2019, https://arxiv.org/abs/1810.11187, equations 2 to 4; positions as in
    Velickovic et al., 2018, https://arxiv.org/abs/1710.10903, with edges that have features.

    Reduces to: the mean of the values if all keys are equal.

    Examples:
        >>> from torchrl_marl.modules.communication.channel import living_links
        >>> alive = torch.tensor([True, True, False])
        >>> Attention(8, 4)(torch.zeros(5, 3, 8), living_links(alive).expand(5, 3, 3), alive).shape
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
        """Returns the agents' messages, ``[*B, N, K]``."""
        message = self.message(features)
        if self.edge_score is None or position is None:
            return message
        return torch.cat([message, position.to(message)], -1)

    def mix(
        self, features: Tensor, inbox: Tensor, heard: Tensor, position: Tensor | None = None
    ) -> Tensor:
        """Returns the weighted values, ``[*B, N, V]``."""
        _, value, place = inbox.split(self.sizes, -1)
        weight = self.weights(features, inbox, heard, position)
        mixed = weight @ value
        if self.edge_value is not None and position is not None:
            # The weights sum to 1, so edges can be mixed before they are mapped.
            mixed = mixed + self.edge_value((weight.unsqueeze(-1) * edges(position, place)).sum(-2))
        return mixed

    def update_features(self, features: Tensor, mixed: Tensor) -> Tensor:
        """Returns the features updated by the mixed messages, ``[*B, N, H]``."""
        return torch.tanh(features + self.update(torch.cat([features, mixed], -1)))

    def weights(
        self, features: Tensor, inbox: Tensor, heard: Tensor, position: Tensor | None = None
    ) -> Tensor:
        """Returns the attention weights, ``[*B, N, M]``; 0 for an agent that hears no other."""
        key, _, place = inbox.split(self.sizes, -1)
        score = self.query(features) @ key.mT
        if self.edge_score is not None and position is not None:
            score = score + self.edge_score(edges(position, place)).squeeze(-1)
        score = score / self.sizes[0] ** 0.5
        any_heard = heard.any(-1, keepdim=True)
        # A softmax over no agents is NaN, and so is its gradient. Such rows therefore attend to all
        # agents, and their result is dropped.
        score = torch.where(heard | ~any_heard, score, -torch.inf)
        return torch.where(any_heard, score.softmax(-1), 0.0)


def edges(position: Tensor, place: Tensor) -> Tensor:
    """Returns the relative position and the distance of each sender, seen from each receiver.

    Shapes:
        - position: ``[*B, N, P]``; place: ``[*B, M, P]``; returns ``[*B, N, M, P + 1]``

    Examples:
        >>> edges(torch.tensor([[0.0, 0.0]]), torch.tensor([[3.0, 4.0]]))
        tensor([[[3., 4., 5.]]])
    """
    apart = place.unsqueeze(-3) - position.unsqueeze(-2)
    # The square root has no slope at a distance of 0.
    distance = apart.square().sum(-1, keepdim=True).clamp_min(1e-12).sqrt()
    return torch.cat([apart, distance], -1)


_CHAIN_CELLS: dict[str, type[GRU | LSTM]] = {"gru": GRU, "lstm": LSTM}


class Chain(nn.Module):
    r"""Passes messages along the agents in both directions (BicNet).

    .. math::
        f_{i+1} = \mathrm{cell}(h_i, f_i), \qquad g_{i-1} = \mathrm{cell}'(h_i, g_i), \qquad
        h_i' = \tanh\big(h_i + W [h_i, f_i, g_i]\big)

    An agent reads the messages that arrive from the agents before and after it, updates them, and
    passes them on. Dead and silent agents are skipped. **The result depends on the order of
    agents**, so an agent can infer its index.

    Args:
        width (int): number of features H.
        size (int): number U of units of the recurrent network.
        cell (str): ``gru`` or ``lstm``.
        device (torch.device, optional): device of the parameters.

    Attributes:
        message_size (int): numbers that an agent passes on in a step, both directions together.

    Shapes:
        - features: ``[*B, N, H]``, finite, 0 for dead agents; speaks: ``[*B, N]``, bool
        - returns: ``[*B, N, H]``; in the methods, U is the number of units of the recurrent
          network, and S the size of its state

    Reference: Peng et al., 2017, https://arxiv.org/abs/1703.10069 (BicNet). Differs from the paper:
    an agent reads its features and the cell outputs of its neighbors, not its own cell output.

    Reduces to: a layer per agent if no other agent sends.

    Examples:
        >>> speaks = torch.tensor([True, True, False])
        >>> Chain(8, 4)(torch.zeros(5, 3, 8), None, speaks.expand(5, 3)).shape
        torch.Size([5, 3, 8])
    """

    def __init__(self, width: int, size: int, cell: str = "gru", device: Device = None) -> None:
        super().__init__()
        self.forth = _CHAIN_CELLS[cell](width, size, device=device)
        self.back = _CHAIN_CELLS[cell](width, size, device=device)
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
        """Runs both directions. ``speaks`` alone determines the messages heard."""
        # Agents take the place of time steps; a silent agent keeps the state.
        sent, acts = (x.movedim(-2, 0) for x in (features, speaks.unsqueeze(-1)))
        n, batch = len(sent), sent.shape[1:-1]
        if n == 1:
            return self.read(features, *features.new_zeros(2, *batch, 1, self.size))
        out = self._run_both_directions(*(x.reshape(n, -1, x.shape[-1]) for x in (sent, acts)))
        nothing = torch.zeros_like(out[:1, 0])
        outputs = torch.cat([nothing, out[:, 0]]), torch.cat([out[:, 1].flip(0), nothing])
        return self.read(features, *(x.reshape(n, *batch, -1).movedim(0, -2) for x in outputs))

    def _run_both_directions(self, sent: Tensor, acts: Tensor) -> Tensor:
        """Returns the outputs of both directions; in each, the last agent has none.

        Args:
            sent (Tensor): agents' features, ``[N, R, H]``.
            acts (Tensor): bool, agents that send, ``[N, R, 1]``.

        Returns:
            Tensor: ``[N - 1, 2, R, U]``, in the order in which each direction visits the agents.
        """
        forth, back = self.forth, self.back
        sent, acts = (torch.stack([x[:-1], x[1:].flip(0)], 1) for x in (sent, acts))
        weights = [torch.cat(pair) for pair in zip(forth.weights(sent), back.weights(sent))]
        start = sent.new_zeros(*sent.shape[1:-1], self.state_size)
        keep = sent.new_ones(*sent.shape[:-1], 1)
        return forth.steps(sent, start, keep, acts, *weights)[..., : self.size]

    def pass_on(self, features: Tensor, state: Tensor, *, back: bool) -> Tensor:
        """Returns the state that an agent passes to the next one.

        Args:
            features (Tensor): the agent's features, ``[*B, H]``.
            state (Tensor): state received, ``[*B, S]``; zeros for the first agent.
            back (bool): whether the state is passed to the agent before, not to the one after.
        """
        cell = self.back if back else self.forth
        return cell(features[None, ..., None, :], state.unsqueeze(-2), None, None)[1][0, ..., 0, :]

    def read(self, features: Tensor, before: Tensor, behind: Tensor) -> Tensor:
        """Returns the features updated by both neighbors' outputs, ``[*B, N, H]``.

        Args:
            features (Tensor): receivers' features.
            before (Tensor): output received from the previous agent, which is the first U numbers
                of the state that it passes on; zeros for the first agent.
            behind (Tensor): output received from the next agent; zeros for the last agent.
        """
        return torch.tanh(features + self.update(torch.cat([features, before, behind], -1)))
