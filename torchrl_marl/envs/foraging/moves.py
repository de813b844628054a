"""Decides which robots of a warehouse move, if several want the same cell or follow each other.

Shapes: E envs, N agents, G cells.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["moving", "set_order"]


def moving(here: Tensor, target: Tensor, heading: Tensor, swapped: Tensor) -> Tensor:
    """Returns which agents reach the cell that they want, ``[E, N]``.

    Robots that follow each other move together if the first one does. So do three or more in a
    circle; two cannot swap their cells. If several want the same cell, the one that leads the
    longest chain gets it. If chains are equally long, the agent with the lowest rank gets it. The
    rank is the agent's own number, or that of the first agent that wants its cell, if lower.

    Two agents may want the same free cell. If moves involve more than six cells, the original then
    follows the order of a Python set (:func:`set_order`). With up to four agents the result is
    equal to the original's.

    Args:
        here (Tensor): the agents' cells, which differ.
        target (Tensor): the cells that they want; their own if they stay.
        heading (Tensor): their directions: 0 up, 1 down, 2 left, 3 right.
        swapped (Tensor): table of :func:`set_order`.

    Shapes:
        - here, target, heading: ``[E, N]``; swapped: ``[G, 4, 4]``

    Reference: the method ``step`` of https://github.com/semitable/robotic-warehouse.

    Examples:
        >>> here, target = torch.tensor([[0, 1, 3]]), torch.tensor([[1, 2, 2]])
        >>> moving(here, target, torch.tensor([[3, 3, 2]]), set_order(1, 4))
        tensor([[ True,  True, False]])
    """
    wants_cell_of = target.unsqueeze(2) == here.unsqueeze(1)  # whose cell an agent wants, [E, N, N]
    free = ~wants_cell_of.any(-1)
    ahead = torch.where(free, here.shape[1], wants_cell_of.int().argmax(-1))  # N: nobody
    number = torch.arange(here.shape[1], device=here.device)
    is_later = number.unsqueeze(-1) > number
    pair = swapped[target.unsqueeze(2), heading.unsqueeze(2), heading.unsqueeze(1)]
    pair = torch.where(is_later, pair.transpose(1, 2), pair)
    wins = _wins_cell(target, wants_cell_of, free, pair)
    moves = wins & free
    for _ in range(here.shape[1] - 1):
        moves = moves | (wins & _value_ahead(moves, ahead))
    return moves | _is_in_circle(ahead) | (target == here)


def _value_ahead(value: Tensor, ahead: Tensor) -> Tensor:
    """Returns the value of the agent ahead; False without one."""
    padding = torch.zeros_like(value[:, :1])
    return torch.cat([value, padding], 1).gather(1, ahead)


def _is_in_circle(ahead: Tensor) -> Tensor:
    """Returns which agents are in a circle of three or more, ``[E, N]``."""
    n_agents = ahead.shape[1]
    index = torch.arange(n_agents, device=ahead.device)
    next_agent = torch.cat([ahead, torch.full_like(ahead[:, :1], n_agents)], 1)
    reached, in_circle = next_agent.gather(1, ahead), torch.zeros_like(ahead, dtype=torch.bool)
    in_pair = reached == index
    for _ in range(n_agents - 2):
        reached = next_agent.gather(1, reached)
        in_circle = in_circle | (reached == index)
    return in_circle & ~in_pair


def _wins_cell(target: Tensor, wants_cell_of: Tensor, free: Tensor, swapped: Tensor) -> Tensor:
    """Returns which agents are the first that get the cell that they want, ``[E, N]``."""
    n_agents = target.shape[1]
    number = torch.arange(n_agents, device=target.device)
    length = torch.zeros_like(target)  # of the chain behind an agent
    for _ in range(n_agents - 1):
        length = (wants_cell_of * (length + 1).unsqueeze(-1)).amax(1)
    first_claim = torch.where(wants_cell_of, 2 * number.unsqueeze(-1) + 1, 2 * n_agents).amin(1)
    order = torch.minimum(2 * number, first_claim)
    rivals = target.unsqueeze(2) == target.unsqueeze(1)  # [E, N, N]
    earlier = order.unsqueeze(1) < order.unsqueeze(2)
    first = free & ~(rivals & (number < number.unsqueeze(-1))).any(-1)
    n_cells = n_agents + first.sum(1, keepdim=True)  # from or to which agents want to move
    tied_pair = free & (rivals.sum(-1) == 2) & (length == 0) & (n_cells > 6)
    earlier = earlier ^ (tied_pair.unsqueeze(2) & swapped)
    longer = length.unsqueeze(1) > length.unsqueeze(2)
    equal = length.unsqueeze(1) == length.unsqueeze(2)
    return ~(rivals & (longer | (equal & earlier))).any(-1)


def set_order(height: int, width: int) -> Tensor:
    """Returns True where Python's sets put the second of two agents first, ``[G, 4, 4]``.

    The original finds the cells of two agents and of their target in a set, and lists them in that
    set's order, which depends on the cells' coordinates.

    Args:
        height (int): height of the grid.
        width (int): width of the grid.

    Shapes:
        - returns: by the target, and by the headings of the agents with the lower and the higher
          number
    """
    steps = ((0, -1), (0, 1), (-1, 0), (1, 0))  # columns and rows, by heading
    table = torch.zeros(height * width, 4, 4, dtype=torch.bool)
    for cell in range(height * width):
        target = cell % width, cell // width
        for i, (x, y) in enumerate(steps):
            low = target[0] - x, target[1] - y
            for j, (x, y) in enumerate(steps):
                high = target[0] - x, target[1] - y
                found = {low}
                found.add(target)  # in the order of a search from the first agent
                found.add(high)
                order = list(set(iter(found)))  # a copy, cell by cell
                table[cell, i, j] = order.index(high) < order.index(low)
    return table
