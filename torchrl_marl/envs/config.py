"""Settings of an environment."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

__all__ = ["EnvConfig"]


@dataclass(frozen=True)
class EnvConfig:
    """Which world is played, and how many copies of it side by side."""

    library: str = "vmas"
    """Where the world comes from: ``vmas`` or ``toy``."""
    name: str = "balance"
    """Scenario of the library, such as ``balance``."""
    n_envs: int = 64
    """Number E of vectorized envs."""
    max_steps: int | None = 100
    """Time limit of an episode (``truncated``); null for none."""
    continuous_actions: bool = True
    """Continuous or discrete actions, where the scenario has both."""
    state: str | None = None
    """What a central critic may see as ``"state"``: ``observations`` or null."""
    info: bool = False
    """Whether the scenario's info is computed and collected."""
    group_map: dict[str, Any] = field(default_factory=dict)
    """Group -> names of its agents, such as ``{team: [speaker_0, listener_0]}``; empty: by the
    library's own rule (VMAS: the names' prefixes)."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Arguments of the scenario, such as ``n_agents``."""
