"""Settings of an environment."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

__all__ = ["EnvConfig"]


@dataclass(frozen=True)
class EnvConfig:
    """Which world is played, and how many copies of it side by side."""

    library: str = "vmas"
    """Where it comes from: ``vmas``, ``pettingzoo``, ``jaxmarl``, ``isaaclab`` or ``toy``; or a
    world of your own, ``module:Class`` or ``path/to/file.py:Class``."""
    name: str = "balance"
    """World of the library, such as ``balance`` or ``mpe2/simple_spread_v3``; for VMAS also the
    path of a scenario's Python file."""
    num_envs: int = 64
    """Number E of vectorized envs."""
    max_steps: int | None = 100
    """Time limit of an episode (``truncated``); null for none."""
    continuous_actions: bool = True
    """Continuous or discrete actions, where the scenario has both."""
    state: str | None = None
    """What a central critic may see as ``"state"``: ``observations`` (of all agents), ``world``
    (the world's own state, where it has one) or null."""
    info: bool = False
    """Whether the scenario's info is computed and collected."""
    group_map: dict[str, Any] = field(default_factory=dict)
    """Group -> names of its agents, such as ``{team: [speaker_0, listener_0]}``; empty: by the
    library's own rule (VMAS: the names' prefixes)."""
    workers: int = 0
    """Processes in which the copies of a world written in Python run; 0: in this one."""
    worker_timeout: float = 60.0
    """Seconds after which a worker that does not answer is an error."""
    restart_workers: bool = False
    """Start a worker that died or hangs anew, and count it, instead of stopping."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Arguments of the world, such as ``n_agents``."""
