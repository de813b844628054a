"""An agent that plays alone, by its programs: needs numpy and onnxruntime, and nothing of torch.

    player = Player("export/agent_0")
    player.reset()                      # before each episode
    action = player.act(observation)

This file may be copied: it imports nothing of torchrl_marl.

Shapes: those of ``interface.json``, without batch dims.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["Player", "PlayerError"]

FORMAT = 1
Arrays = dict[str, Any]


class PlayerError(RuntimeError):
    """Programs that cannot be played, or an input that does not fit them."""


class Player:
    """One agent of a team, by its exported programs.

    Args:
        folder (str or Path): with ``interface.json`` and the programs.
        seed (int, optional): of the actions that are drawn.

    Attributes:
        interface (dict): what ``interface.json`` says.
        parameters (dict): of the distribution of the last action, such as ``logits``.

    Raises:
        PlayerError: a program that is missing or was changed; no onnxruntime.
    """

    def __init__(self, folder: str | Path, seed: int | None = None) -> None:
        folder = Path(folder)
        interface = _read_interface(folder)
        programs = {name: Program(folder, own) for name, own in interface["programs"].items()}
        self._start(interface, programs, seed)

    def _start(
        self, interface: dict[str, Any], programs: Mapping[str, Any], seed: int | None = None
    ) -> None:
        self.interface, self.programs = interface, programs
        self.random = np.random.default_rng(seed)
        self.parameters: Arrays = {}
        self._hidden = np.zeros(interface["state_size"], np.float32)
        self._begins = True

    @property
    def name(self) -> str:
        """The agent's name."""
        return self.interface["agent"]

    def reset(self) -> None:
        """Forgets: the next step is the first of an episode."""
        self._begins = True

    def act(
        self, observation: Any, *, action_mask: Any = None, deterministic: bool = True
    ) -> np.ndarray:
        """Returns the action of a step.

        Args:
            observation (array, or mapping of name to array): what the agent sees.

        Keyword Args:
            action_mask (array, optional): True for legal actions, where the interface asks for it.
            deterministic (bool): the likeliest action, or one that is drawn.

        Raises:
            PlayerError: an input that is missing, or of another shape.
        """
        given = {**self._observed(observation), **self._remembered()}
        if action_mask is not None:
            given["action_mask"] = action_mask
        return self._finish(self._run("act", given), deterministic)

    # -------------------------------------------------------------------------------- programs

    def _observed(self, observation: Any) -> Arrays:
        leaves = self.interface["observation"]
        if not isinstance(observation, Mapping):
            if len(leaves) > 1:
                names = ", ".join(leaf["name"] for leaf in leaves)
                raise PlayerError(
                    f"agent {self.name!r}: its observation is one array, expected a mapping with "
                    f"{names}."
                )
            return {leaves[0]["name"]: observation}
        return {
            name if name.startswith("observation") else f"observation.{name}": value
            for name, value in observation.items()
        }

    def _remembered(self) -> Arrays:
        return {"hidden": self._hidden, "is_init": np.array([self._begins])}

    def _run(self, program: str, given: Arrays) -> Arrays:
        inputs = []
        for field in self.programs[program].inputs:
            name, shape = field["name"], tuple(field["shape"])
            if given.get(name) is None:
                raise PlayerError(
                    f"agent {self.name!r}: there is no {name!r}, expected {field['dtype']} {shape}."
                )
            value = np.asarray(given[name], field["dtype"])
            if value.shape != shape:
                raise PlayerError(
                    f"agent {self.name!r}: {name!r} has shape {value.shape}, expected {shape}."
                )
            inputs.append(value)
        return self.programs[program](inputs)

    def _finish(self, outputs: Arrays, deterministic: bool) -> np.ndarray:
        self._hidden = outputs.pop("next_hidden", self._hidden)
        self._begins = False
        action = outputs.pop("action")
        self.parameters = outputs
        return action if deterministic else self._drawn(action)

    # --------------------------------------------------------------------------------- drawing

    def _drawn(self, action: np.ndarray) -> np.ndarray:
        """Draws an action of the distribution; without one, the action as it is."""
        rule, of = self.interface["action"], self.parameters
        if rule["distribution"] == "none":
            return action
        if rule["distribution"] == "categorical":
            weights = np.exp(of["logits"].astype(np.float64) - of["logits"].max())
            drawn = self.random.choice(len(weights), p=weights / weights.sum())
            drawn = np.eye(len(weights))[drawn] if rule["one_hot"] else drawn
            return np.asarray(drawn, rule["dtype"])
        drawn = of["loc"] + of["scale"] * self.random.standard_normal(of["loc"].shape)
        if rule["distribution"] == "tanh_normal":
            low, high = np.array(rule["low"]), np.array(rule["high"])
            drawn = (low + high) / 2 + (high - low) / 2 * np.tanh(drawn)
        return np.asarray(drawn, rule["dtype"])


class Program:
    """A function in a file.

    Args:
        folder (Path): where the file is.
        entry (mapping): what the interface says of it.

    Raises:
        PlayerError: a file that is missing or was changed.
    """

    def __init__(self, folder: Path, entry: Mapping[str, Any]) -> None:
        path = folder / entry["file"]
        if not path.is_file():
            raise PlayerError(f"program {str(path)!r} is not there; export the agent again.")
        data = path.read_bytes()
        if hashlib.sha256(data).hexdigest() != entry["sha256"]:
            raise PlayerError(
                f"program {str(path)!r} is not the one that was exported (its hash differs from "
                "that in interface.json); export the agent again."
            )
        self.inputs = entry["inputs"]
        self.outputs = [field["name"] for field in entry["outputs"]]
        load = _load_onnx if path.suffix == ".onnx" else _load_pt2
        self._function = load(path, data, [field["name"] for field in self.inputs])

    def __call__(self, inputs: list[np.ndarray]) -> Arrays:
        return dict(zip(self.outputs, self._function(inputs)))


def _read_interface(folder: Path) -> dict[str, Any]:
    path = folder / "interface.json"
    try:
        interface = json.loads(path.read_text(encoding="utf-8"))
        found = interface["format"]
    except FileNotFoundError:
        raise PlayerError(
            f"{str(path)!r} is not there; give the folder of an agent that was exported."
        ) from None
    except (ValueError, KeyError, TypeError):
        raise PlayerError(f"{str(path)!r} is no interface; export the agent again.") from None
    if found != FORMAT:
        raise PlayerError(f"{str(path)!r} has format {found}, expected {FORMAT}; export it again.")
    return interface


def _load_onnx(path: Path, data: bytes, names: list[str]) -> Callable[[list], list]:
    try:
        import onnxruntime
    except ImportError:
        raise PlayerError("onnxruntime is not installed; run: pip install onnxruntime") from None
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])
    return lambda inputs: session.run(None, dict(zip(names, inputs)))


def _load_pt2(path: Path, data: bytes, names: list[str]) -> Callable[[list], list]:
    try:
        import torch
    except ImportError:
        raise PlayerError(f"torch is not installed, and {path.name} needs it; use onnx.") from None
    module = torch.export.load(str(path)).module()

    def run(inputs: list) -> list:
        with torch.no_grad():
            return [value.numpy() for value in module(*map(torch.from_numpy, inputs))]

    return run
