"""Draws JaxMARL environments: as shapes, as the pixels that JaxMARL renders, or as text.

The functions draw one copy, whose state must consist of numpy arrays.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from torchrl_marl.envs.scene import Picture, Shape, text

__all__ = ["draw_environment"]

_BLUE, _RED, _GRAY = (0.35, 0.45, 0.80), (0.85, 0.35, 0.30), (0.45, 0.45, 0.45)
_GREEN, _YELLOW = (0.30, 0.65, 0.35), (0.95, 0.80, 0.25)
_MAX_NUMBERS = 8  # largest number of values that are shown of each leaf in a text


def draw_environment(env: Any, state: Any) -> Picture:
    """Returns a picture of an environment.

    Args:
        env (MultiAgentEnv): JaxMARL environment.
        state: state of one copy.
    """
    names = [cls.__name__ for cls in type(env).__mro__]
    draw = next(
        (_DRAW_FUNCTIONS[name] for name in names if name in _DRAW_FUNCTIONS), _write_numbers
    )
    return draw(env, state)


def _draw_mpe(env: Any, state: Any) -> list[Shape]:
    """Draws agents and landmarks, and the messages of agents that can communicate."""
    shapes = []
    names = [*env.agents, *env.landmarks]
    radius, speech = np.asarray(env.rad), np.asarray(state.c)
    for i, (name, (x, y)) in enumerate(zip(names, np.asarray(state.p_pos).tolist())):
        agent = i < env.num_agents
        color = _to_rgb(env.colour[i])
        role: Any = "agent" if agent else "object"
        shapes.append(Shape(str(name), role, "circle", x, y, 0.0, color, radius=float(radius[i])))
    for i, name in enumerate(env.agents if speech.size else ()):
        message_vector = speech[i]
        message = f"says {int(message_vector.argmax())}" if np.any(message_vector) else ""
        body = shapes[i]
        top = body.y + body.radius + 0.06
        shapes.append(text(f"{name} says", message, body.x, top, height=0.09))
    return shapes


def _to_rgb(given: Any) -> tuple[float, float, float]:
    red, green, blue = (float(part) / 255 for part in np.asarray(given)[:3])
    return red, green, blue


def _draw_smax(env: Any, state: Any) -> list[Shape]:
    """Draws SMAX's units, enlarged; each has a letter for its type and a health bar."""
    state = getattr(state, "state", state)
    units = getattr(env, "_env", env)
    types, alive = np.asarray(state.unit_types), np.asarray(state.unit_alive)
    health = np.asarray(state.unit_health) / np.asarray(units.unit_type_health)[types]
    radius = 1.8 * np.asarray(units.unit_type_radiuses)[types]
    names = [f"ally_{i}" for i in range(units.num_allies)]
    names += [f"enemy_{i}" for i in range(units.num_enemies)]
    shapes = []
    units_to_draw = zip(
        names, np.asarray(state.unit_positions).tolist(), types.tolist(), radius.tolist()
    )
    for i, (name, (x, y), kind, unit_radius) in enumerate(units_to_draw):
        color = _BLUE if name.startswith("ally") else _RED
        fill: Any = color if alive[i] else (0.75, 0.75, 0.75)
        letter = units.unit_type_shorthands[kind] if alive[i] else "×"
        shapes.append(
            Shape(name, "agent", "circle", x, y, 0.0, fill, radius=unit_radius, text=letter)
        )
    for i, shape in enumerate(shapes[: len(names)]):
        left, top = shape.x - shape.radius, shape.y + shape.radius + 0.4
        length = float(np.clip(health[i], 0, 1)) * 2 * shape.radius
        size: Any = {"length": length, "width": 0.35, "visible": bool(alive[i])}
        place = left + length / 2, top
        bar = Shape(f"{shape.name} health", "object", "box", *place, 0.0, _GREEN, **size)
        shapes.append(bar)
    return shapes


def _draw_overcooked(env: Any, state: Any) -> np.ndarray:
    from jaxmarl.viz.overcooked_visualizer import OvercookedVisualizer

    border = env.agent_view_size - 2
    grid = np.asarray(state.maze_map)[border:-border, border:-border, :]
    pixels = OvercookedVisualizer._render_grid(
        grid,
        tile_size=32,
        highlight_mask=None,
        agent_dir_idx=np.asarray(state.agent_dir_idx),
        agent_inv=np.asarray(state.agent_inv),
    )
    return np.asarray(pixels, dtype=np.uint8)


def _render_pixels(env: Any, state: Any) -> Picture:
    try:
        return np.asarray(env.render(state), dtype=np.uint8)
    except (OverflowError, TypeError, ValueError):  # JaxMARL's renderer was written for numpy 1
        return _write_numbers(env, state)


def _draw_switch_riddle(env: Any, state: Any) -> list[Shape]:
    """Draws the room, its visitor and the bulb; agents that visited the room before are green."""
    visitor, has_visited = int(state.agent_in_room), np.asarray(state.has_been)
    room = Shape("room", "goal", "box", 0.0, 2.0, 0.0, _GRAY, length=3.0, width=2.0)
    light = _YELLOW if bool(state.bulb_state) else _GRAY
    shapes = []
    for i, name in enumerate(env.agents):
        x, y = (-0.7, 2.0) if i == visitor else (1.4 * (i - (len(env.agents) - 1) / 2), 0.0)
        color = _GREEN if has_visited[i] else _BLUE
        shapes.append(Shape(str(name), "agent", "circle", x, y, 0.0, color, 0.4, text=str(i)))
    bulb = Shape("bulb", "object", "circle", 0.7, 2.3, 0.0, light, radius=0.3)
    legend = text("legend", "green: has been in the room", 0.0, -0.9, height=0.3)
    return [*shapes, room, bulb, legend]


def _draw_coin_game(env: Any, state: Any) -> list[Shape]:
    """Draws two players and their coins on a grid of three by three."""
    entities = {
        "red": (state.red_pos, _RED, "agent", 0.35),
        "blue": (state.blue_pos, _BLUE, "agent", 0.35),
        "red coin": (state.red_coin_pos, _RED, "goal", 0.2),
        "blue coin": (state.blue_coin_pos, _BLUE, "goal", 0.2),
    }
    shapes = []
    for i, (name, (position, color, role, radius)) in enumerate(entities.items()):
        row, column = (float(x) for x in np.asarray(position).reshape(-1)[:2])
        offset = 0.12 * (1 if i % 2 else -1)
        shape_role: Any = role
        name = str(env.agents[i]) if i < 2 else name
        shapes.append(
            Shape(name, shape_role, "circle", column + offset, -row, 0.0, color, radius=radius)
        )
    board = Shape("board", "goal", "box", 1.0, -1.0, 0.0, _GRAY, length=3.0, width=3.0, hollow=True)
    return [*shapes, board]


def _write_hanabi(env: Any, state: Any) -> str:
    """Writes all hands (also those that agents cannot see), the fireworks and the tokens."""
    colors = "RYGWB"
    fireworks = np.asarray(state.fireworks).sum(-1).astype(int)
    fireworks_text = "  ".join(f"{colors[i]}{n}" for i, n in enumerate(fireworks[:5]))
    tokens_text = (
        f"hints {int(np.sum(state.info_tokens))}   lives {int(np.sum(state.life_tokens))}   "
        f"cards dealt {int(state.num_cards_dealt)}"
    )
    lines = [f"fireworks   {fireworks_text}", tokens_text, ""]
    for name, hand in zip(env.agents, np.asarray(state.player_hands)):
        held_cards = [np.argwhere(card > 0) for card in hand]
        cards = [
            f"{colors[card_index[0][0]]}{card_index[0][1] + 1}" if len(card_index) else "--"
            for card_index in held_cards
        ]
        lines.append(f"{name!s:<11} {' '.join(cards)}")
    return "\n".join(lines)


def _write_numbers(env: Any, state: Any) -> str:
    """Writes the numbers of the state, for environments that cannot be drawn otherwise."""
    lines = []
    for name in getattr(state, "__dataclass_fields__", {"state": None}):
        value = getattr(state, name, state)
        if hasattr(value, "__dataclass_fields__") or not hasattr(value, "shape"):
            continue
        values = np.asarray(value).reshape(-1)
        numbers_text = " ".join(_format_number(x) for x in values[:_MAX_NUMBERS])
        lines.append(f"{name:<18.18} {numbers_text}{' ...' if values.size > _MAX_NUMBERS else ''}")
    return "\n".join(lines) or type(state).__name__


def _format_number(x: Any) -> str:
    return f"{float(x):.2f}" if np.issubdtype(type(x), np.floating) else str(int(x))


_DRAW_FUNCTIONS: dict[str, Callable[[Any, Any], Picture]] = {
    "SimpleMPE": _draw_mpe,
    "SMAX": _draw_smax,
    "EnemySMAX": _draw_smax,
    "Overcooked": _draw_overcooked,
    "SwitchRiddle": _draw_switch_riddle,
    "HanabiEnv": _write_hanabi,
    "CoinGame": _draw_coin_game,
    "InTheGrid": _render_pixels,
    "InTheGrid_2p": _render_pixels,
    "InTheMatrix": _render_pixels,
}
