"""Stored players on disk: one file per player in ``players/``, and the table ``players.csv``."""

from __future__ import annotations

import copy
import csv
import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchrl_marl.collectors.team import TeamPolicy
from torchrl_marl.errors import CheckpointError, SpecError, quoted
from torchrl_marl.modules.players import check_shapes, tensors_of
from torchrl_marl.runtime.naming import invalid_name_reason
from torchrl_marl.runtime.trust import refuse_links
from torchrl_marl.training.checkpoint import append_checksum, read_with_checksum
from torchrl_marl.training.config import read_run_config
from torchrl_marl.training.files import explain_write_errors, open_atomically
from torchrl_marl.training.recorder import CsvTable

__all__ = [
    "TABLE",
    "Networks",
    "Pool",
    "StoredPlayer",
    "networks_of",
    "read_player",
    "stored_players",
    "with_networks",
]

TABLE = "players.csv"
_FORMAT = 1
Networks = dict[str, dict[str, Tensor]]
"""Name of an actor -> its parameters and running statistics, by name."""


def networks_of(policy: TeamPolicy) -> Networks:
    """Returns copies of the parameters and running statistics of a policy's actors.

    Raises:
        SpecError: the actors have no action distribution; this holds for IQL, for example.
    """
    if any(getattr(actor, "group", None) is None for actor in _actors(policy)):
        raise SpecError(
            "found a policy without action distributions, expected actors of MAPPO, IPPO or "
            "HAPPO; leave that player out."
        )
    return {
        str(actor.group.name): {k: x.detach().clone() for k, x in tensors_of(actor).items()}
        for actor in _actors(policy)
    }


@torch.no_grad()
def with_networks(policy: TeamPolicy, networks: Networks) -> TeamPolicy:
    """Returns a copy of a policy with the networks of a stored player.

    Raises:
        SpecError: the networks differ in shape from the policy's.
    """
    found = copy.deepcopy(policy)
    for actor in _actors(found):
        own, new = tensors_of(actor), networks.get(actor.group.name, {})
        shapes = [{name: tuple(x.shape) for name, x in one.items()} for one in (own, new)]
        check_shapes(actor.group.name, *shapes)
        for name, value in own.items():
            value.copy_(new[name])
    return found


def _actors(policy: TeamPolicy) -> list[Any]:
    return list(policy.module)


class Pool:
    """Stored players of a run on disk, in files that are written once and never changed.

    ``players.csv`` has a row per player: name, kind, parent, time, and the SHA-256 of its file.

    Args:
        folder (Path): folder of the run.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.names: list[str] = []
        self._table: CsvTable | None = None

    def open(self, iterations: int) -> None:
        """Opens the table, and removes rows after the given iteration.

        Raises:
            CheckpointError: the table lacks a player, or the file of a player was changed.
        """
        self._table = CsvTable(self.folder / TABLE, keep_iterations=iterations)
        if not self.names:
            return
        listed = [one.path.stem for one in stored_players(self.folder)]
        lost = next((name for name in self.names if name not in listed), None)
        if lost is not None:
            raise CheckpointError(
                f"{str(self.folder / TABLE)!r} does not list player {lost} of the "
                "checkpoint; restore the table."
            )

    def add(self, name: str, networks: Networks, row: Mapping[str, Any]) -> str:
        """Writes a player, and returns the SHA-256 of its file.

        Args:
            name (str): name of the player, and of its file without suffix.
            networks (dict): networks of the player.
            row (mapping): row for the table, without name and hash.

        Raises:
            WriteError: the disk is full, or the folder is read-only.
        """
        path = self.path(name)
        with explain_write_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
        content = {
            actor: {key: value.detach().cpu().clone() for key, value in own.items()}
            for actor, own in networks.items()
        }
        with open_atomically(path, "w+b") as file:
            torch.save({"format": _FORMAT, "actors": content}, file)
            append_checksum(file)
        self.names.append(name)
        return self.note(name, path, row)

    def note(self, name: str, path: Path | None, row: Mapping[str, Any]) -> str:
        """Writes a player's row, and returns the hash of its file; empty if there is no file."""
        assert self._table is not None
        found = "" if path is None else _sha256(path)
        self._table.write({**row, "player": name, "sha256": found})
        return found

    def read(self, name: str, sha256: str) -> Networks:
        """Reads a player's file, and compares it with the hash.

        Raises:
            CheckpointError: the file is missing, or was changed.
        """
        path = self.path(name)
        networks = read_player(path)
        _check_hash(path, sha256, "the one in the checkpoint")
        return networks

    def path(self, name: str) -> Path:
        """Returns the file of a player.

        Raises:
            CheckpointError: the name is not a valid file name.
        """
        return _player_file(self.folder, name)


class StoredPlayer(NamedTuple):
    """A stored player on disk."""

    path: Path
    """File of its networks."""
    frames: int
    """Number of environment steps at which it was stored."""
    kind: str
    """Kind of player: ``snapshot``, ``exploiter`` or ``imported``."""


def stored_players(folder: Path) -> list[StoredPlayer]:
    """Returns the stored players of a run, in the order of ``players.csv``.

    Raises:
        CheckpointError: the folder is not a run folder or has no stored players, or a file is
            missing or was changed.
    """
    read_run_config(folder)
    refuse_links(folder)
    path = folder / TABLE
    if not path.is_file():
        raise CheckpointError(
            f"run {str(folder)!r} has no stored players ({TABLE}); train it with "
            "a league, such as league.opponents=pfsp."
        )
    try:
        with path.open(newline="", encoding="utf-8") as file:
            rows = [row for row in csv.DictReader(file) if row["sha256"]]
        found = [
            StoredPlayer(_player_file(folder, row["player"]), int(row["frames"]), row["kind"])
            for row in rows
        ]
    except CheckpointError:
        raise
    except (OSError, KeyError, ValueError, csv.Error):
        raise CheckpointError(
            f"{str(path)!r} is not a table of players; restore the file."
        ) from None
    for one, row in zip(found, rows):
        if not one.path.is_file():
            raise CheckpointError(
                f"player {str(one.path)!r} is listed in {TABLE}, but missing; restore the file."
            )
        _check_hash(one.path, row["sha256"], f"the one in {TABLE}")
    return found


def _player_file(folder: Path, name: str) -> Path:
    fault = invalid_name_reason(name, plain=True)
    if fault is not None:
        raise CheckpointError(
            f"run {str(folder)!r} has a player called {quoted(name)}: {fault}; its table or "
            "checkpoint was not written by torchrl_marl."
        )
    return folder / "players" / f"{name}.pt"


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _check_hash(path: Path, sha256: str, expected: str) -> None:
    if _sha256(path) != sha256:
        raise CheckpointError(
            f"player {str(path)!r} was changed: its SHA-256 differs from "
            f"{expected}; restore the file."
        )


def read_player(path: Path) -> Networks:
    """Reads a player's networks from a file, without running code from the file.

    Raises:
        CheckpointError: the file is not a stored player, or is damaged.
    """
    try:
        state = read_with_checksum(path)
        if state["format"] != _FORMAT:
            raise ValueError(f"its format is {quoted(state['format'])}, expected {_FORMAT}")
        return dict(state["actors"])
    except OSError as error:
        raise CheckpointError(
            f"player {str(path)!r} cannot be read ({error.strerror}); check the path."
        ) from None
    except Exception as error:  # the file may come from another program
        raise CheckpointError(
            f"{str(path)!r} is not a stored player, or is damaged ({error}); give a file in "
            "the players/ folder of a run."
        ) from None
