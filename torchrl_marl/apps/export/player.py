"""Player of one exported agent; it needs numpy and onnxruntime, but no torch.

    player = Player("export/agent_0")
    player.reset()                      # before each episode
    action = player.act(observation)

An agent that communicates first speaks, then receives the messages of each round, then acts:

    message = player.speak(observation)             # None: it is silent
    message = player.hear({"agent_1": message_1})   # in every round but the last
    action = player.act(inbox={"agent_1": message_1})

With ``communication.delay`` an agent acts without waiting. It may receive a message at any time
until that message is due:

    message = player.speak(observation)
    action = player.act()
    player.hear({"agent_1": message_1})             # sent in this step; ago=1: one step earlier

You may copy this file: it imports nothing from torchrl_marl. A call that raises an error changes
nothing.

Shapes: as in ``interface.json``, without batch dimensions.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["Player", "PlayerError"]

FORMAT = 1
Arrays = dict[str, Any]


class PlayerError(RuntimeError):
    """A program cannot be loaded, or an input does not fit it."""


class Player:
    """One agent of a team, played by its exported programs.

    Args:
        folder (str or Path): folder with ``interface.json`` and the programs.
        seed (int, optional): random seed of sampled actions.

    Keyword Args:
        trust (bool): also load ``.pt2`` programs, which can run code, and programs outside the
            folder.

    Attributes:
        interface (dict): content of ``interface.json``.
        parameters (dict): parameters of the distribution of the last action, such as ``logits``.

    Raises:
        PlayerError: a program is missing, changed or not trusted, or onnxruntime is not installed.
    """

    def __init__(self, folder: str | Path, seed: int | None = None, *, trust: bool = False) -> None:
        path = Path(folder) / "interface.json"
        try:
            interface = json.loads(path.read_text(encoding="utf-8"))
            if (found := interface["format"]) != FORMAT:
                again = f"expected {FORMAT}; export it again"
                raise PlayerError(f"{str(path)!r} has format {found}, {again}.")
            own = interface["programs"].items()
            programs = {name: Program(path.parent, entry, trust) for name, entry in own}
            self._start(interface, programs, seed)
        except (FileNotFoundError, NotADirectoryError):
            exported = "give the folder of an exported agent"
            raise PlayerError(f"{str(path)!r} does not exist; {exported}.") from None
        except (AttributeError, KeyError, TypeError, ValueError):
            again = "export the agent again"
            raise PlayerError(f"{str(path)!r} is not a valid interface; {again}.") from None

    def _start(self, interface: Arrays, programs: Mapping[str, Any], seed: int | None) -> None:
        self.interface, self.programs = interface, programs
        self.random = np.random.default_rng(seed)
        self.parameters: Arrays = {}
        self._communication: dict[str, Any] = interface.get("communication") or {}
        self._hidden = np.zeros(interface["state_size"], np.float32)
        self.reset()

    @property
    def name(self) -> str:
        """The agent's name."""
        return self.interface["agent"]

    def reset(self) -> None:
        """Clears hidden state and messages; the next step is the first of an episode."""
        self._is_first_step, self._silent, self._round = True, False, 0
        self._state: np.ndarray | None = None
        self._neighbor_messages: Arrays = {}
        self._relayed_directions: set[str] = set()
        self._delayed_inboxes: list[
            tuple[np.ndarray, Arrays]
        ] = []  # states, messages of the last steps

    @property
    def rounds(self) -> int:
        """Number of communication rounds in a step; 0 without communication."""
        return self._communication["rounds"] if self._communication else 0

    @property
    def delay(self) -> int:
        """Number of steps after which a received message is used."""
        return self._communication.get("delay", 0)

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
            observation (array, or mapping of name to array): the agent's observation; an agent
                that communicates takes it in :meth:`speak` instead.

        Keyword Args:
            inbox (mapping): name of a sender -> its message.
            action_mask (array, optional): True for legal actions, if the interface has a mask.
            deterministic (bool): True for the likeliest action, False for a sampled one.

        Raises:
            PlayerError: an input is missing, not finite or of another shape; no action is legal; or
                the agent must first speak in this step.
        """
        given: Arrays = {"action_mask": action_mask}
        if not self._communication:
            given |= {**self._observation_inputs(observation), **self._memory_inputs()}
        elif self._communication["relays"]:
            given |= {"state": self._state_for_action(observation), **self._neighbor_messages}
        elif self.delay:
            given |= {
                "state": self._state_for_action(observation),
                "words": self._decode_delayed_messages(inbox),
            }
        else:
            given |= {"state": self._state_for_action(observation), **self._stack_messages(inbox)}
        outputs = self._run_program("act", given)
        self._state, self._is_first_step = None, False
        self._hidden = outputs.pop("next_hidden", self._hidden)
        action = outputs.pop("action")
        self.parameters = outputs
        return action if deterministic else self._sample_action(action)

    def speak(self, observation: Any, *, deterministic: bool = True) -> np.ndarray | None:
        """Returns the agent's first message in a step; None if it is silent or relays messages.

        Args:
            observation: the agent's observation, as in :meth:`act`.

        Keyword Args:
            deterministic (bool): True if the gate takes the likelier choice, False if it samples.

        Raises:
            PlayerError: the agent does not communicate, or an input does not fit.
        """
        if not self._communication:
            raise self._error(" does not communicate; call act(observation).")
        outputs = self._run_program(
            "speak", {**self._observation_inputs(observation), **self._memory_inputs()}
        )
        self._state, self._round, self._relayed_directions = outputs["state"], 0, set()
        self._delayed_inboxes = [*self._delayed_inboxes, (self._state, {})][-1 - self.delay :]
        size = self._communication["message_size"]
        self._neighbor_messages = {way: np.zeros(size, np.float32) for way in ("before", "behind")}
        logit = float(outputs.get("gate_logits", [np.inf])[0])
        threshold = 0.5 if deterministic else self.random.random()
        self._silent = not threshold < 1 / (1 + np.exp(-logit))
        return None if self._silent else outputs.get("message")

    def hear(self, inbox: Mapping[str, Any], *, ago: int = 0) -> np.ndarray | None:
        """Receives messages; returns the next round's message, or None with a delay.

        Args:
            inbox (mapping): name of a sender -> its message. A message is ignored if it is None, or
                if this agent never listens to its sender.

        Keyword Args:
            ago (int): age of the messages, in steps of this agent; messages that are older than the
                agent's first step are ignored.

        Raises:
            PlayerError: the step has no further round, or a message is too old, has an unknown
                sender, or has another size.
        """
        if not 0 <= ago <= self.delay:
            expected = f"expected 0 to {self.delay}, its delay"
            raise self._error(f" was given messages from {ago} steps ago, {expected}.")
        if self.delay:
            words = self._check_inbox(inbox)
            if ago < len(self._delayed_inboxes):
                self._delayed_inboxes[-1 - ago][1].update(words)
            return None
        state = self._state_after_speaking()
        if self._round + 1 >= self.rounds:
            rounds = f" has received all rounds but the last of {self.rounds}"
            raise self._error(f"{rounds}, whose messages act takes; call act(inbox=...).")
        given = {"state": state, **self._stack_messages(inbox)}
        outputs = self._run_program(f"hear_{self._round + 1}", given)
        self._state, self._round = outputs["next_state"], self._round + 1
        return None if self._silent else outputs["message"]

    def relay(self, handed: Any = None, *, back: bool = False) -> np.ndarray:
        """Returns the message that the agent passes on to its next neighbor.

        Args:
            handed (array, optional): message from the previous neighbor; None for the first agent.

        Keyword Args:
            back (bool): True if messages go from the last agent to the first.
        """
        state = self._state_after_speaking()
        if not self._communication["relays"]:
            raise self._error(" does not relay; call act(inbox=...).")
        way = "behind" if back else "before"
        handed = self._neighbor_messages[way] if handed is None else handed
        handed = self._check_array("'handed'", handed, self._neighbor_messages[way].shape)
        program, passed = "back" if back else "forth", handed.copy()
        if not self._silent:
            passed = self._run_program(program, {"state": state, "handed": handed})["handed_on"]
        self._neighbor_messages[way] = handed
        self._relayed_directions.add(way)
        return passed

    def _state_for_action(self, observation: Any) -> np.ndarray:
        """Returns the state for the action; raises an error if a call must come before ``act``."""
        state = self._state_after_speaking()
        if observation is not None:
            raise self._error(
                " communicates: it acts on the observation given to speak; call "
                "speak(observation) first, then act(inbox=...) with the messages."
            )
        if self._communication["relays"] and len(self._relayed_directions) < 2:
            both = "call relay(handed) and relay(handed, back=True) first"
            raise self._error(f" has not relayed both ways in this step; {both}.")
        if not self._communication["relays"] and self._round + 1 < self.rounds:
            found = f" has received {self._round} of {self.rounds} rounds"
            raise self._error(f"{found}, expected all but the last; call hear(inbox) first.")
        return state

    def _decode_delayed_messages(self, inbox: Any) -> np.ndarray:
        """Returns the aggregate of the messages that are due in this step.

        In the first steps of an episode no message is due.
        """
        if inbox is not None:
            late = f" uses messages {self.delay} steps later"
            raise self._error(f"{late}; call act(), and hear(inbox) after it.")
        state, heard = (
            self._delayed_inboxes[0]
            if len(self._delayed_inboxes) > self.delay
            else (self._state, {})
        )
        return self._run_program("listen", {"state": state, **self._stack_messages(heard)})["words"]

    def _state_after_speaking(self) -> np.ndarray:
        if self._state is None:
            raise self._error(" has not spoken in this step; call speak(observation) first.")
        return self._state

    def _stack_messages(self, inbox: Mapping[str, Any] | None) -> Arrays:
        """Returns an array of all agents' messages, and flags that are True for those received."""
        names = self._communication["agents"]
        messages = np.zeros((len(names), self._communication["message_size"]), np.float32)
        heard = np.zeros(len(names), bool)
        for name, message in self._check_inbox(inbox).items():
            if message is not None:
                messages[names.index(name)], heard[names.index(name)] = message, True
        return {"inbox": messages, "heard": heard}

    def _check_inbox(self, inbox: Mapping[str, Any] | None) -> Arrays:
        """Returns copies of the messages to which the agent listens; None for silent senders."""
        names, shape, words = (
            self._communication["agents"],
            (self._communication["message_size"],),
            {},
        )
        if not isinstance(inbox, (Mapping, type(None))):
            raise self._error(
                f": inbox is a {type(inbox).__name__}, expected a mapping of agents to messages."
            )
        for name, message in (inbox or {}).items():
            if name not in names:
                known = ", ".join(names)
                raise self._error(f" was given a message of {name!r}, expected one of {known}.")
            if message is not None:
                message = self._check_array(f"the message of {name!r}", message, shape)
            if name in self._communication["hears"]:
                words[name] = message
        return words

    def _observation_inputs(self, observation: Any) -> Arrays:
        names = [leaf["name"] for leaf in self.interface["observation"]]
        if isinstance(observation, Mapping):
            full = {str(name): value for name, value in observation.items()}
            return {n if n in names else f"observation.{n}": value for n, value in full.items()}
        if len(names) > 1:
            keys = ", ".join(names)
            raise self._error(f": its observation is one array, expected a mapping with {keys}.")
        return {names[0]: observation}

    def _memory_inputs(self) -> Arrays:
        return {"hidden": self._hidden, "is_init": np.array([self._is_first_step])}

    def _run_program(self, program: str, values: Arrays) -> Arrays:
        inputs = []
        for field in self.programs[program].inputs:
            name, shape, dtype = field["name"], tuple(field["shape"]), field["dtype"]
            if values.get(name) is None:
                raise self._error(f": there is no {name!r}, expected {dtype} {shape}.")
            inputs.append(self._check_array(repr(name), values[name], shape, dtype))
            if name == "action_mask" and not inputs[-1].any():
                skip = "do not call act for a waiting or dead agent"
                raise self._error(f": 'action_mask' has no True entry, expected one; {skip}.")
        outputs = self.programs[program](inputs)
        for name, value in outputs.items():
            if not np.isfinite(value).all():
                raise self._error(
                    f": output {name!r} of program {program!r} holds NaN or infinity and was "
                    "dropped; check that the inputs are in the range of training."
                )
        return outputs

    def _check_array(
        self, what: str, value: Any, shape: tuple, dtype: str = "float32"
    ) -> np.ndarray:
        """Returns an input as a new array, after a check of shape, dtype and finite values."""
        what, expected = f": {what}", f"expected {dtype} {shape}"
        try:
            given = np.asarray(value)
            if given.dtype.kind in "cmMSU":
                raise TypeError
            with np.errstate(all="ignore"):
                array = given.astype(dtype)
        except (TypeError, ValueError, RuntimeError, OverflowError):
            raise self._error(f"{what} is a {type(value).__name__}, {expected}.") from None
        if array.shape != shape:
            raise self._error(f"{what} has shape {array.shape}, {expected}.")
        if array.dtype.kind != "f" and not (array == given).all():
            raise self._error(f"{what} holds numbers that {dtype} cannot represent, {expected}.")
        if not np.isfinite(array).all():
            found = "NaN" if np.isnan(array).any() else "infinity"
            raise self._error(f"{what} holds {found}, expected finite numbers.")
        return array

    def _error(self, text: str) -> PlayerError:
        return PlayerError(f"agent {self.name!r}{text}")

    def _sample_action(self, action: np.ndarray) -> np.ndarray:
        """Samples an action from the distribution; without one, returns the action as is."""
        rule, parameters = self.interface["action"], self.parameters
        if rule["distribution"] == "none":
            return action
        if rule["distribution"] == "categorical":
            choice = self._sample_choice(parameters["logits"])
            found = np.eye(len(parameters["logits"]))[choice] if rule["one_hot"] else choice
            return np.asarray(found, rule["dtype"])
        drawn: list[Any] = []
        if "branches" in rule:
            branches = np.split(parameters["logits"], np.cumsum(rule["branches"])[:-1])
            drawn += [self._sample_choice(branch) for branch in branches]
        if "loc" in parameters:
            drawn += list(self._sample_numbers(rule))
        return np.asarray(drawn, rule["dtype"])

    def _sample_numbers(self, rule: Mapping[str, Any]) -> np.ndarray:
        parameters = self.parameters
        drawn = parameters["loc"] + parameters["scale"] * self.random.standard_normal(
            parameters["loc"].shape
        )
        if "low" not in rule:
            return drawn
        low, high = np.array(rule["low"]), np.array(rule["high"])
        return (low + high) / 2 + (high - low) / 2 * np.tanh(drawn)

    def _sample_choice(self, logits: np.ndarray) -> int:
        weights = np.exp(logits.astype(np.float64) - logits.max())
        return self.random.choice(len(weights), p=weights / weights.sum())


class Program:
    """A program loaded from a file, with its description from the interface."""

    def __init__(self, folder: Path, entry: Mapping[str, Any], trust: bool) -> None:
        path = folder / entry["file"]
        trusted = "if you trust its author, give Player(..., trust=True)"
        if not (trust or path.resolve().is_relative_to(folder.resolve())):
            raise PlayerError(f"program {str(path)!r} is outside its agent's folder; {trusted}.")
        if not (trust or path.suffix == ".onnx"):
            again = f"export the agent with format='onnx', or, {trusted}"
            raise PlayerError(f"program {str(path)!r} is not ONNX and could run code; {again}.")
        if not path.is_file():
            raise PlayerError(f"program {str(path)!r} does not exist; export the agent again.")
        data = path.read_bytes()
        if hashlib.sha256(data).hexdigest() != entry["sha256"]:
            raise PlayerError(
                f"program {str(path)!r} has changed since the export: its hash differs from "
                "interface.json; export the agent again."
            )
        self.inputs = entry["inputs"]
        self.outputs = [field["name"] for field in entry["outputs"]]
        load = _load_onnx if path.suffix == ".onnx" else _load_pt2
        try:
            self._function = load(data, [field["name"] for field in self.inputs])
        except ImportError as error:
            raise PlayerError(f"{path.name} needs {error.name}; pip install {error.name}") from None

    def __call__(self, inputs: list[np.ndarray]) -> Arrays:
        return dict(zip(self.outputs, self._function(inputs)))


def _load_onnx(data: bytes, names: list[str]) -> Callable[[list], list]:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])
    return lambda inputs: session.run(None, dict(zip(names, inputs)))


def _load_pt2(data: bytes, names: list[str]) -> Callable[[list], list]:
    import torch

    module = torch.export.load(io.BytesIO(data)).module()
    return torch.no_grad()(
        lambda inputs: [value.numpy() for value in module(*map(torch.from_numpy, inputs))]
    )
