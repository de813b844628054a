"""Inputs and outputs of an agent's programs, and the JSON file that describes them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torchrl.data import TensorSpec

from torchrl_marl.version import __version__

__all__ = ["FORMAT", "VERSIONS", "Field", "Names", "Program", "sha256_of", "write_interface"]

Names = Sequence["Field"]
FORMAT = 1
"""Version of the file format; a player reads only its own version."""
VERSIONS = {"torchrl_marl": __version__, "torch": torch.__version__}


@dataclass(frozen=True)
class Field:
    """An input or output of a program.

    Args:
        name (str): name in the program.
        shape (tuple of int): shape without batch dimensions.
        dtype (str): name of the type in numpy.

    Examples:
        >>> Field("observation", (2,)).example()
        tensor([0., 0.])
    """

    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"

    @classmethod
    def of(cls, name: str, value: Tensor | TensorSpec) -> Field:
        """Describes a tensor or a spec."""
        return cls(name, tuple(value.shape), str(value.dtype).removeprefix("torch."))

    def example(self) -> Tensor:
        """Returns zeros of this shape, or True for bool."""
        dtype = getattr(torch, self.dtype)
        return torch.full(self.shape, 1 if dtype is torch.bool else 0, dtype=dtype)


@dataclass(frozen=True)
class Program:
    """A function of one agent that can be written to a file.

    Args:
        name (str): name of the program, such as ``act``.
        module (nn.Module): module that maps the inputs to the outputs, without batch dimensions.
        inputs, outputs (tuple of Field): inputs and outputs of the module, in order.
    """

    name: str
    module: nn.Module
    inputs: tuple[Field, ...]
    outputs: tuple[Field, ...]

    @classmethod
    def of(
        cls, name: str, module: nn.Module, inputs: tuple[Field, ...], outputs: list[str]
    ) -> Program:
        """Builds a program; runs the module once to find the shapes of its outputs."""
        module = module.cpu().eval().requires_grad_(False)
        with torch.no_grad():
            values = module(*(field.example() for field in inputs))
        return cls(
            name,
            module,
            inputs,
            tuple(Field.of(name, value) for name, value in zip(outputs, values)),
        )


def sha256_of(path: Path) -> str:
    """Returns the hash of a file's bytes."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def write_interface(
    folder: Path, described: Mapping[str, Any], files: Mapping[str, tuple[Path, Names, Names]]
) -> None:
    """Writes ``interface.json`` beside an agent's programs.

    Args:
        folder (Path): folder of the agent.
        described (mapping): interface of the agent, except for the programs.
        files (mapping): name of a program -> its file, inputs and outputs.
    """
    programs = {
        name: {
            "file": path.name,
            "sha256": sha256_of(path),
            "inputs": [asdict(field) for field in inputs],
            "outputs": [asdict(field) for field in outputs],
        }
        for name, (path, inputs, outputs) in files.items()
    }
    text = json.dumps({**described, "programs": programs}, indent=2)
    (folder / "interface.json").write_text(text + "\n", encoding="utf-8")
