"""What stored players of a league earn from each other, for their equilibrium."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor
from torchrl.envs import EnvBase

from torchrl_marl.specs import TeamSpec
from torchrl_marl.training.crossplay import cross_play, seats_of

__all__ = ["Payoffs"]

Policy = Callable[[TensorDictBase], TensorDictBase]


class Payoffs:
    """A table of what the player of the first seat earns; new players are played when they come.

    Sides of one shape change seats, and what one earns the other loses.

    Args:
        team (TeamSpec): of two sides.
        env (callable): returns the environment of evaluations.
        episodes (int): of an entry.
        seed (int): of them.
    """

    def __init__(
        self, team: TeamSpec, env: Callable[[], EnvBase], *, episodes: int, seed: int
    ) -> None:
        self._team, self._env, self.episodes, self.seed = team, env, episodes, seed
        self._policies: dict[str, Policy] = {}
        self._entries: dict[tuple[str, str], float] = {}

    def knows(self, name: str, policy: Policy) -> None:
        """Takes a player of which entries are known already, or who plays when others come."""
        self._policies[name] = policy

    def add(self, name: str, policy: Policy, others: Sequence[str]) -> None:
        """Plays a new player against others, and against itself.

        Args:
            name (str): of the player.
            policy (callable): of the player.
            others (sequence of str): players that are known.
        """
        self.knows(name, policy)
        alike = seats_of(self._team).alike
        others = [other for other in others if other != name]
        if not alike:
            others = [*others, name]
        rows = self._play([name], others)[0]
        columns = -rows if alike else self._play(others, [name])[:, 0]
        for other, row, column in zip(others, rows.tolist(), columns.tolist()):
            self._entries[name, other] = row
            self._entries[other, name] = column
        if alike:
            self._entries[name, name] = 0.0

    def _play(self, first: Sequence[str], second: Sequence[str]) -> Tensor:
        if not second or not first:
            return torch.zeros(len(first), len(second), dtype=torch.float64)
        own, other = ([self._policies[name] for name in names] for names in (first, second))
        return cross_play(own, other, self._env(), self.episodes, seed=self.seed)["returns"]

    def table(self, names: Sequence[str]) -> Tensor:
        """Returns what each player earns in the first seat from each in the second, ``[A, A]``."""
        missing = [
            (own, other) for own in names for other in names if (own, other) not in self._entries
        ]
        for own, other in missing:  # of guests
            self._entries[own, other] = float(self._play([own], [other])) if own != other else 0.0
        return torch.tensor(
            [[self._entries[own, other] for other in names] for own in names], dtype=torch.float64
        )

    def state_dict(self) -> dict[str, Any]:
        """Returns the state for a checkpoint."""
        return {"entries": [[*pair, value] for pair, value in self._entries.items()]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores a saved state."""
        self._entries = {(own, other): value for own, other, value in state["entries"]}
