"""Parameters in exported programs, and their places in the networks of a team."""

from __future__ import annotations

import copy
import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from torchrl_marl.apps.export.agent import agents_of
from torchrl_marl.apps.export.formats import check_format
from torchrl_marl.apps.export.interface import sha256_of
from torchrl_marl.errors import CheckpointError, ConfigError
from torchrl_marl.modules.precision import set_precision

__all__ = ["TeamParameters", "read_parameters"]

_LIMIT = 1 << 24  # numbers that float32 counts exactly


def read_parameters(folder: Path) -> dict[str, Tensor]:
    """Reads the parameters in the ONNX programs of an exported folder; runs no code from it.

    Args:
        folder (Path): folder that holds a folder for each agent.

    Returns:
        dict: ``actors.AGENT.PROGRAM.NAME`` -> tensor.

    Raises:
        CheckpointError: a program is missing, changed or no ONNX program.
        MissingExtraError: onnx is not installed.
    """
    check_format("onnx")
    found: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*/interface.json")):
        try:
            interface = json.loads(path.read_text(encoding="utf-8"))
            for name, entry in interface["programs"].items():
                own = _read_program(path.parent / Path(entry["file"]).name, entry["sha256"])
                found |= {f"actors.{interface['agent']}.{name}.{x}": y for x, y in own.items()}
        except CheckpointError:
            raise
        except Exception as error:  # the folder may come from another program
            what = " ".join(f"{type(error).__name__}: {error}".split())[:200]
            raise CheckpointError(
                f"{str(path.parent)!r} is not an exported agent, or is damaged ({what}); export it "
                "again."
            ) from None
    return found


def _read_program(path: Path, sha256: str) -> dict[str, Tensor]:
    """Reads the parameters of a program, which have dotted names as in the exported module."""
    if path.suffix != ".onnx":
        raise CheckpointError(
            f"{str(path)!r} is no ONNX program, and only these can be read without running code; "
            "export the run with --format onnx."
        )
    if sha256_of(path) != sha256:
        raise CheckpointError(
            f"{str(path)!r} was changed: its SHA-256 differs from the one in interface.json; "
            "export it again."
        )
    import onnx
    from onnx import numpy_helper

    graph = onnx.load(str(path), load_external_data=False).graph
    arrays = {one.name: numpy_helper.to_array(one) for one in graph.initializer if "." in one.name}
    return {name: torch.from_numpy(array.copy()) for name, array in arrays.items()}


class TeamParameters:
    """The parameters of a team's policy, split by agent as in exported programs.

    Args:
        policy (nn.Module): policy of the team.
        known (collection of str): names of the leaves that exported programs hold. Other leaves
            are left out if all their elements are shared with these.

    Attributes:
        leaves (dict): ``actors.AGENT.PROGRAM.NAME`` -> copy of an agent's parameter; change it in
            place, and call :meth:`put_back`.
    """

    def __init__(self, policy: nn.Module, known: Collection[str]) -> None:
        self.parameters = list(policy.parameters())
        flat = self._flat_parameters()
        if len(flat) > _LIMIT:
            raise ConfigError(
                f"the policy has more than {_LIMIT:,} parameters, which cannot be split by agent; "
                "start from its run instead."
            )
        places, held = _parameter_positions(policy), torch.zeros(len(flat), dtype=torch.bool)
        for name in places.keys() & set(known):
            held[places[name]] = True
        self.places = {
            name: own for name, own in places.items() if name in known or not bool(held[own].all())
        }
        self.leaves = {name: flat[own] for name, own in self.places.items()}

    def _flat_parameters(self) -> Tensor:
        return torch.cat([x.detach().reshape(-1).cpu() for x in self.parameters])

    @torch.no_grad()
    def put_back(self) -> None:
        """Writes the leaves into the policy.

        Raises:
            ConfigError: agents that share a parameter here have different ones; all are named.
        """
        flat = self._flat_parameters()
        for name, own in self.places.items():
            flat[own] = self.leaves[name]
        differ = [n for n, own in self.places.items() if not torch.equal(flat[own], self.leaves[n])]
        if differ:
            raise ConfigError(
                f"{', '.join(differ)} differ from those of agents with which they are shared here; "
                "use learner.actor.sharing=none."
            )
        for x, values in zip(self.parameters, flat.split([x.numel() for x in self.parameters])):
            x.copy_(values.view_as(x))


def _parameter_positions(policy: nn.Module) -> dict[str, Tensor]:
    """Returns where each element of each agent's parameters lies among the policy's parameters.

    A copy of the policy has the numbers 0, 1, 2 and so on as parameters, and is split by agent.
    """
    numbered: Any = copy.deepcopy(policy).cpu()
    set_precision(numbered, "float32")
    first = 0
    for x in numbered.parameters():
        x.data = torch.arange(first, first + x.numel(), dtype=torch.float32).view_as(x)
        first += x.numel()
    return {
        f"actors.{name}.{program.name}.{key}": x.detach().long()
        for name, agent in agents_of(numbered).items()
        for program in agent.programs()
        for key, x in program.module.named_parameters()
    }
