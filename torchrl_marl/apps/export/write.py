"""Writes exported agents to files, as ONNX or in the format of ``torch.export``."""

from __future__ import annotations

import contextlib
import hashlib
import io
import logging
import shutil
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from torchrl_marl.apps.export import player
from torchrl_marl.apps.export.agent import AgentActor
from torchrl_marl.apps.export.check import Comparison
from torchrl_marl.apps.export.formats import FORMATS, check_format
from torchrl_marl.apps.export.interface import Names, Program, write_interface
from torchrl_marl.errors import ConfigError, WriteError
from torchrl_marl.runtime.naming import file_name, path_within
from torchrl_marl.runtime.trust import refuse_link, refuse_links
from torchrl_marl.training.files import new_file

__all__ = ["Export", "export_agents", "refuse_agents_but"]


@dataclass(frozen=True)
class Export:
    """Result of an export.

    Args:
        folder (Path): folder that holds all agents.
        agents (dict): name -> folder of the agent's programs.
        comparison (Comparison, optional): comparison of the programs with the team's policy.
    """

    folder: Path
    agents: dict[str, Path]
    comparison: Comparison | None = None


def export_agents(
    agents: Mapping[str, AgentActor], folder: Path, format: str = "onnx"
) -> dict[str, Path]:
    """Writes the programs and interface of each agent into its folder, and ``player.py``.

    Args:
        agents (mapping): name -> agent, from :func:`~torchrl_marl.apps.export.agent.find_agents`.
        folder (Path): folder for all agents, created if it is missing.
        format (str): ``onnx`` or ``pt2``.

    Returns:
        dict: name -> the agent's folder.

    Raises:
        ConfigError: the format is unknown, an actor cannot be split by agent, or an agent receives
            messages from a group that is not exported.
        MissingExtraError: a package is not installed.
        WriteError: a folder cannot be written to.
        TrustError: a link leads out of the folder.
    """
    check_format(format)
    _check_senders(agents)
    write = _ProgramWriter(format)
    folders = _agent_folders(agents, folder)
    try:
        for name, agent in agents.items():
            folders[name].mkdir(parents=True, exist_ok=True)
            refuse_link(folders[name])
            refuse_links(folders[name], "export folder")
            programs = agent.programs()
            files = {one.name: write(one, folders[name]) for one in programs}
            _remove_programs_but({path for path, *_ in files.values()}, folders[name])
            new_file(folders[name] / "interface.json")
            write_interface(folders[name], agent.describe(), files)
        refuse_link(folder / "player.py")
        shutil.copyfile(player.__file__, new_file(folder / "player.py"))
    except OSError as error:
        raise WriteError(
            f"{str(error.filename or folder)!r} cannot be written ({error.strerror or error}); "
            "check the disk, or choose another folder."
        ) from None
    return folders


def refuse_agents_but(names: Iterable[str], folder: Path) -> None:
    """Refuses a folder with agents that an export of a whole team would leave in place.

    Args:
        names (iterable of str): names of all agents of the team.
        folder (Path): folder for all agents.

    Raises:
        ConfigError: the folder holds another agent; the message names it.
    """
    team = {file_name(name) for name in names}
    found = sorted(path.parent.name for path in folder.glob("*/interface.json"))
    if others := [name for name in found if name not in team]:
        more = f" and {len(others) - 1} more" * (len(others) > 1)
        raise ConfigError(
            f"{str(folder)!r} holds {others[0]!r}{more} of another export, which is not an agent "
            "of this team; remove that folder, or choose another one."
        )


def _remove_programs_but(written: Collection[Path], folder: Path) -> None:
    """Removes programs of an earlier export from an agent's folder."""
    for path in folder.iterdir():
        if path.suffix[1:] in FORMATS and path not in written:
            path.unlink()


def _agent_folders(names: Iterable[str], folder: Path) -> dict[str, Path]:
    """Returns the folder of each agent; raises an error if it would not lie inside ``folder``."""
    try:
        folders = {name: path_within(folder, name) for name in names}
    except ValueError as error:
        raise ConfigError(str(error)) from None
    taken: dict[Path, str] = {}
    for name, path in folders.items():
        if path in taken:
            raise ConfigError(
                f"agents {taken[path]!r} and {name!r} would both be written to {str(path)!r}; "
                "export one of them: give its name."
            )
        taken[path] = name
    return folders


def _check_senders(agents: Mapping[str, AgentActor]) -> None:
    exported = {agent.group.name for agent in agents.values()}
    for name, agent in agents.items():
        missing = [group for group in agent.sender_groups() if group not in exported]
        if missing:
            raise ConfigError(
                f"agent {name!r} receives messages of group {missing[0]!r}, which is not exported; "
                "export all agents instead."
            )


class _ProgramWriter:
    """Writes programs; a program that several agents have in common is converted only once."""

    def __init__(self, format: str) -> None:
        self.format = format
        self.known: dict[str, Path] = {}

    def __call__(self, program: Program, folder: Path) -> tuple[Path, Names, Names]:
        path = new_file(folder / f"{program.name}.{self.format}")
        example = tuple(field.example() for field in program.inputs)
        with torch.no_grad(), _silence_exporters():
            exported = torch.export.export(program.module, example)
            identity = _program_hash(exported, program)
            if identity in self.known:
                shutil.copyfile(self.known[identity], path)
            elif self.format == "pt2":
                _save_pt2(exported, path)
            else:
                _save_onnx(exported, program, path)
        self.known[identity] = path
        return path, program.inputs, program.outputs


def _save_pt2(exported: Any, path: Path) -> None:
    packed = io.BytesIO()  # torch's own writer ends the process if the disk is full
    torch.export.save(exported, packed)
    path.write_bytes(packed.getvalue())


def _save_onnx(exported: Any, program: Program, path: Path) -> None:
    converted = torch.onnx.export(
        exported,
        (),
        dynamo=True,
        verbose=False,
        external_data=False,
        input_names=[field.name for field in program.inputs],
        output_names=[field.name for field in program.outputs],
    )
    assert converted is not None
    converted.save(str(path), external_data=False)


def _program_hash(exported: Any, program: Program) -> str:
    """Returns a hash of a program: its graph, tensors, inputs and outputs."""
    found = hashlib.sha256(repr((program.inputs, program.outputs)).encode())
    found.update(exported.graph_module.code.encode())
    for name, value in {**exported.state_dict, **exported.constants}.items():
        found.update(repr((name, value.shape, value.dtype)).encode())
        found.update(value.detach().contiguous().numpy().tobytes())
    return found.hexdigest()


@contextlib.contextmanager
def _silence_exporters() -> Iterator[None]:
    """Silences log lines and warnings from the exporters."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
