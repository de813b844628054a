"""What the toy worlds look like: agents in a row, matrices, cards and stones.

Shapes: N agents of the team.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tensordict import TensorDictBase
from torch import Tensor

from torchrl_marl.envs.scene import Shape, text

__all__ = [
    "BLUE",
    "GRAY",
    "GREEN",
    "ORANGE",
    "actions_in",
    "cards",
    "earned_in",
    "matrix",
    "names_of",
    "players",
    "row",
]

BLUE, ORANGE, GREEN = (0.35, 0.50, 0.80), (0.90, 0.55, 0.25), (0.35, 0.65, 0.40)
GRAY, PALE, GOLD = (0.55, 0.55, 0.55), (0.88, 0.90, 0.94), (0.98, 0.85, 0.45)
_COLORS = (BLUE, ORANGE, GREEN, (0.60, 0.45, 0.75))
_GAP = 1.6
Words = Sequence[str]


def names_of(env: Any) -> list[str]:
    """Returns the names of all agents, group by group."""
    return [name for group in env.team.groups.values() for name in group.agent_names]


def actions_in(env: Any, step: TensorDictBase | None) -> list[str]:
    """Returns what each agent did in a step, as a word; nothing where it did not act.

    Args:
        env: a toy world.
        step (TensorDictBase, optional): of one env; None at the start.
    """
    words: list[str] = []
    for name, group in env.team.groups.items():
        if step is None:
            words += [""] * group.n_agents
            continue
        actions = step.get((name, "action"))
        rows = [_word(actions[i]) for i in range(group.n_agents)]
        acts = step.get((name, "mask")).reshape(-1).tolist()
        words += [word if does else "" for word, does in zip(rows, acts)]
    return words


def _word(action: Tensor) -> str:
    if action.is_floating_point():
        return " ".join(f"{x:.1f}" for x in action.reshape(-1).tolist())
    values = action.reshape(-1)
    return str(int(values) if values.numel() == 1 else int(values.int().argmax()))


def earned_in(env: Any, step: TensorDictBase | None) -> list[float]:
    """Returns what each agent earned in a step."""
    if step is None:
        return [0.0] * len(names_of(env))
    rewards = [step.get(("next", name, "reward")).reshape(-1) for name in env.team.groups]
    return [value for own in rewards for value in own.tolist()]


def row(
    env: Any, inside: Words, above: Words = (), below: Words = (), good: Sequence[bool] = ()
) -> list[Shape]:
    """Returns all agents side by side, in the colors of their groups.

    Args:
        env: a toy world.
        inside, above, below (sequence of str): what is written in and near each agent.
        good (sequence of bool): whose word above is green.
    """
    names = names_of(env)
    groups = [i for i, own in enumerate(env.team.groups.values()) for _ in range(own.n_agents)]
    shapes = []
    for i, (name, group) in enumerate(zip(names, groups)):
        color, x = _COLORS[group % len(_COLORS)], _GAP * i
        shapes.append(Shape(name, "agent", "circle", x, 0.0, 0.0, color, 0.5, text=inside[i]))
    for i, name in enumerate(names):
        if above:
            color = GREEN if good and good[i] else GRAY
            shapes.append(text(f"{name} above", above[i], _GAP * i, 0.95, color=color))
        if below:
            shapes.append(text(f"{name} below", below[i], _GAP * i, -0.85, height=0.26))
    corners = [(-1.0, 1.5), (_GAP * (len(names) - 1) + 1.0, -1.4)]
    return shapes + [text(f"corner {i}", " ", *at) for i, at in enumerate(corners)]


def players(env: Any, words: Words, places: Sequence[tuple[float, float]]) -> list[Shape]:
    """Returns two players where they sit, each with what it did or says."""
    shapes = []
    for i, (name, (x, y)) in enumerate(zip(names_of(env), places)):
        shapes.append(Shape(name, "agent", "circle", x, y, 0.0, _COLORS[i], 0.45, text=str(i + 1)))
    for name, word, (x, y) in zip(names_of(env), words, places):
        shapes.append(text(f"{name} says", word, x, y - 0.8, height=0.3))
    return shapes


def matrix(
    payoff: Tensor, chosen: tuple[int, ...] | None, *, left: float = 0.0, name: str = "cell"
) -> list[Shape]:
    """Returns a payoff matrix of two choices, with the chosen entry marked.

    Args:
        payoff (Tensor): ``[M, K]``.
        chosen (tuple of int, optional): row and column.

    Keyword Args:
        left (float): where it begins.
        name (str): of its cells.
    """
    shapes = []
    for i, values in enumerate(payoff.tolist()):
        for j, value in enumerate(values):
            color = GOLD if chosen == (i, j) else PALE
            look: dict[str, Any] = {"length": 0.92, "width": 0.92, "text": f"{value:g}"}
            place = left + j, -float(i)
            cell = Shape(f"{name} {i} {j}", "object", "box", *place, 0.0, color, **look)
            shapes.append(cell)
    return shapes


def cards(names: Words, words: Words, places: Sequence[tuple[float, float]]) -> list[Shape]:
    """Returns cards with what is written on them."""
    return [
        Shape(name, "object", "box", x, y, 0.0, (1.0, 1.0, 0.97), length=0.9, width=1.2, text=word)
        for name, word, (x, y) in zip(names, words, places)
    ]
