"""An agent that plays alone, by its programs: needs numpy and onnxruntime, and nothing of torch.

    player = Player("export/agent_0")
    player.reset()                      # before each episode
    action = player.act(observation)

An agent that talks speaks first, in each round hears, and then acts:

    message = player.speak(observation)             # None: it is silent
    message = player.hear({"agent_1": message_1})   # one time less than there are rounds
    action = player.act(inbox={"agent_1": message_1})

With ``communication.delay`` it acts without waiting, and hears what comes until that is due:

    message = player.speak(observation)
    action = player.act()
    player.hear({"agent_1": message_1})             # said in this step; ago=1: in the one before

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
        self._talk: dict[str, Any] = interface.get("communication") or {}
        self._hidden = np.zeros(interface["state_size"], np.float32)
        self.reset()

    @property
    def name(self) -> str:
        """The agent's name."""
        return self.interface["agent"]

    def reset(self) -> None:
        """Forgets: the next step is the first of an episode."""
        self._begins, self._silent, self._round = True, False, 0
        self._state: np.ndarray | None = None
        self._handed: Arrays = {}
        self._relayed: set[str] = set()
        self._late: list[tuple[np.ndarray, Arrays]] = []  # states and inboxes of the last steps

    @property
    def rounds(self) -> int:
        """How often in a step agents speak and hear; 0 where they do not talk."""
        return self._talk["rounds"] if self._talk else 0

    @property
    def delay(self) -> int:
        """After how many of its steps an agent knows what it has heard."""
        return self._talk.get("delay", 0)

    def act(
        self,
        observation: Any = None,
        *,
        inbox: Mapping[str, Any] | None = None,
        action_mask: Any = None,
        deterministic: bool = True,
    ) -> np.ndarray:
        """Returns the action of a step.

        Args:
            observation (array, or mapping of name to array): what the agent sees; an agent that
                talks was told when it spoke.

        Keyword Args:
            inbox (mapping): name of an agent -> its message, of those who are heard.
            action_mask (array, optional): True for legal actions, where the interface asks for it.
            deterministic (bool): the likeliest action, or one that is drawn.

        Raises:
            PlayerError: an input that is missing, or of another shape; it has not spoken.
        """
        given: Arrays = {} if action_mask is None else {"action_mask": action_mask}
        if not self._talk:
            given |= {**self._observed(observation), **self._remembered()}
        elif self._talk["relays"]:
            given |= {"state": self._all_heard(observation), **self._handed}
        elif self.delay:
            given |= {"state": self._all_heard(observation), "words": self._known(inbox)}
        else:
            given |= {"state": self._all_heard(observation), **self._heard(inbox)}
        outputs = self._run("act", given)
        self._state = None
        self._hidden = outputs.pop("next_hidden", self._hidden)
        self._begins = False
        action = outputs.pop("action")
        self.parameters = outputs
        return action if deterministic else self._drawn(action)

    # ----------------------------------------------------------------------------------- talking

    def speak(self, observation: Any, *, deterministic: bool = True) -> np.ndarray | None:
        """Returns what an agent says first in a step; None where it is silent, or relays.

        Args:
            observation: of :meth:`act`.

        Keyword Args:
            deterministic (bool): whether it speaks is what is likelier, or drawn.

        Raises:
            PlayerError: an agent that does not talk, or an input that does not fit.
        """
        if not self._talk:
            raise PlayerError(f"agent {self.name!r} does not talk; call act(observation).")
        outputs = self._run("speak", {**self._observed(observation), **self._remembered()})
        self._state, self._round, self._relayed = outputs["state"], 0, set()
        self._late = [*self._late, (self._state, {})][-1 - self.delay :]
        size = self._talk["message_size"]
        self._handed = {way: np.zeros(size, np.float32) for way in ("before", "behind")}
        logit = float(outputs.get("gate_logits", [np.inf])[0])
        threshold = 0.5 if deterministic else self.random.random()
        self._silent = not threshold < 1 / (1 + np.exp(-logit))
        return None if self._silent else outputs.get("message")

    def hear(self, inbox: Mapping[str, Any], *, ago: int = 0) -> np.ndarray | None:
        """Returns what an agent says in the next round; with a delay, keeps what it hears.

        Args:
            inbox (mapping): name of an agent -> its message, of those who are heard. Words of
                whoever it never hears, and None, are left out.

        Keyword Args:
            ago (int): how many of its own steps ago that was said; before its first: not heard.

        Raises:
            PlayerError: no further round, too late, a message of nobody's or of another size.
        """
        if not 0 <= ago <= self.delay:
            expected = f"expected 0 to {self.delay}, its delay"
            raise PlayerError(
                f"agent {self.name!r} was given words of {ago} steps ago, {expected}."
            )
        if self.delay:
            self._heard(inbox)
            if ago < len(self._late):
                self._late[-1 - ago][1].update(inbox)
            return None
        state = self._spoken()
        if self._round + 1 >= self.rounds:
            raise PlayerError(
                f"agent {self.name!r} has heard all of {self.rounds} rounds but the last, which "
                "it acts on; call act(inbox=...)."
            )
        self._round += 1
        outputs = self._run(f"hear_{self._round}", {"state": state, **self._heard(inbox)})
        self._state = outputs["next_state"]
        return None if self._silent else outputs["message"]

    def relay(self, handed: Any = None, *, back: bool = False) -> np.ndarray:
        """Returns what an agent hands on to its neighbor.

        Args:
            handed (array, optional): what its other neighbor has handed on; None for the first.

        Keyword Args:
            back (bool): from the last agent to the first.
        """
        state = self._spoken()
        if not self._talk["relays"]:
            raise PlayerError(f"agent {self.name!r} does not relay; call act(inbox=...).")
        way = "behind" if back else "before"
        self._relayed.add(way)
        handed = self._handed[way] if handed is None else handed
        self._handed[way] = np.asarray(handed, np.float32)
        if self._silent:
            return self._handed[way]
        program = "back" if back else "forth"
        return self._run(program, {"state": state, "handed": handed})["handed_on"]

    def _all_heard(self, observation: Any) -> np.ndarray:
        """Returns the state of a step in which everything before the action has been done."""
        state = self._spoken()
        if observation is not None:
            raise PlayerError(
                f"agent {self.name!r} talks: it acts on what it saw when it spoke; give the "
                "observation to speak(observation), and act(inbox=...) what it hears."
            )
        if self._talk["relays"] and len(self._relayed) < 2:
            raise PlayerError(
                f"agent {self.name!r} has not relayed both ways in this step; call "
                "relay(handed) and relay(handed, back=True) first."
            )
        if not self._talk["relays"] and self._round + 1 < self.rounds:
            raise PlayerError(
                f"agent {self.name!r} has heard {self._round} of {self.rounds} rounds, expected "
                "all but the last; call hear(inbox) first."
            )
        return state

    def _known(self, inbox: Any) -> np.ndarray:
        """Returns what is known now of what was heard; of a first step, what nobody said."""
        if inbox is not None:
            late = f"knows what it hears {self.delay} steps later"
            raise PlayerError(f"agent {self.name!r} {late}; call act(), and hear(inbox) after it.")
        state, heard = self._late[0] if len(self._late) > self.delay else (self._state, {})
        return self._run("listen", {"state": state, **self._heard(heard)})["words"]

    def _spoken(self) -> np.ndarray:
        if self._state is None:
            raise PlayerError(
                f"agent {self.name!r} has not spoken in this step; call speak(observation) first."
            )
        return self._state

    def _heard(self, inbox: Mapping[str, Any] | None) -> Arrays:
        """Returns all messages, and which of them are heard."""
        talk = self._talk
        messages = np.zeros((len(talk["agents"]), talk["message_size"]), np.float32)
        heard = np.zeros(len(talk["agents"]), bool)
        for name, message in (inbox or {}).items():
            if name not in talk["agents"]:
                raise PlayerError(
                    f"agent {self.name!r} was given a message of {name!r}, expected one of "
                    f"{', '.join(talk['agents'])}."
                )
            if message is None or name not in talk["hears"]:
                continue
            if np.shape(message) != messages.shape[1:]:
                raise PlayerError(
                    f"agent {self.name!r}: the message of {name!r} has shape "
                    f"{np.shape(message)}, expected {messages.shape[1:]}."
                )
            place = talk["agents"].index(name)
            messages[place], heard[place] = message, True
        return {"inbox": messages, "heard": heard}

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
            if value.dtype.kind == "f" and np.isnan(value).any():
                raise PlayerError(f"agent {self.name!r}: {name!r} holds NaN, expected numbers.")
            inputs.append(value)
        return self.programs[program](inputs)

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
