"""ROS 2 node that plays one exported agent; it needs rclpy, numpy and onnxruntime.

    python ros2_agent.py --ros-args -p folder:=RUN/export/agent_0

It subscribes to the agent's observation, and publishes its action ``rate`` times a second. Topics
and parameters: "A ROS 2 node" in docs/export.md. You may copy this file: it imports nothing from
torchrl_marl, but ``player.py`` must stand next to the agent's folder, as ``export`` writes it.
"""

from __future__ import annotations

import importlib.util
import math
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import rclpy
from geometry_msgs.msg import Twist
from rclpy.exceptions import InvalidParameterTypeException
from rclpy.executors import ExternalShutdownException
from rclpy.node import Node
from rclpy.qos import qos_profile_sensor_data
from std_msgs.msg import Empty, Float32MultiArray

DYNAMIC = ("radius", "nearest", "env")  # links that only the environment knows
SECOND = 1_000_000_000  # nanoseconds


class AgentError(ValueError):
    """A folder or a parameter does not fit."""


class Sensor:
    """A topic whose numbers fill some columns of the observation."""

    def __init__(self, topic: str, columns: np.ndarray) -> None:
        self.topic, self.columns = topic, columns
        self.values: np.ndarray | None = None
        self.time: float = 0


class AgentNode(Node):
    """Plays the agent of the parameter ``folder``.

    Raises:
        AgentError: the folder or a parameter does not fit.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__("marl_agent", **options)
        self.player, self.refusal = load_player(Path(self._text("folder", "")))
        self.talk = self.player.interface.get("communication")
        check_communication(self.player.name, self.talk)
        self.topic = topic_of(self.player.name)
        self._declare_inputs()
        self._declare_limits()
        self.status, self.words, self.refused = "", {}, set()
        self._connect()

    # ------------------------------------------------------------------------------- parameters

    def _text(self, name: str, default: str) -> str:
        return self.declare_parameter(name, default).value

    def _number(self, name: str, default: float, low: float = 0.0, high: float = math.inf) -> float:
        value = self.declare_parameter(name, default).value
        if not low < value <= high:
            above = f"above {low:g}" + ("" if high == math.inf else f", at most {high:g}")
            raise AgentError(f"{name} is {value:g}, expected a number {above}.")
        return value

    def _declare_inputs(self) -> None:
        """Reads which topic fills which columns of the observation, and of the action mask."""
        fields, acts = self.player.interface["observation"], self.player.programs["act"].inputs
        masks = [field for field in acts if field["name"] == "action_mask"]
        self.fields = fields + masks
        seen, size = (sum(size_of(f) for f in some) for some in (fields, self.fields))
        usual = [f"{self.topic}/observation=0:{seen}"]
        usual += [f"{self.topic}/action_mask={seen}:{size}"] if masks else []
        given = self.declare_parameter("sensors", usual).value
        self.sensors = [read_sensor(text, size) for text in given]
        columns = [column for sensor in self.sensors for column in sensor.columns]
        filled = np.bincount(np.array(columns, int), minlength=size)
        if (filled != 1).any():
            column = int((filled != 1).argmax())
            raise AgentError(
                f"sensors fill column {column} {filled[column]} times, expected each of the "
                f"{size} columns once."
            )
        self.observation = np.zeros(size, np.float32)

    def _declare_limits(self) -> None:
        action, name = self.player.interface["action"], self.player.name
        self.size, options = math.prod(action["shape"]), options_of(action)
        self.choices = len(options)
        limit = self._number("limit", 1.0, high=1.0)
        unbounded = [math.inf] * (self.size - self.choices)
        low = limit * np.array(action.get("low", np.negative(unbounded)))
        high = limit * np.array(action.get("high", unbounded))
        self.low = np.concatenate([np.zeros(self.choices), low])
        self.high = np.concatenate([np.array(options) - 1.0, high])
        self.max_change = self._number("max_change", math.inf)
        if limit < 1 and "low" not in action:
            raise AgentError(f"limit is {limit:g}, but agent {name!r} has no bounds; expected 1.")
        if self.choices == self.size and self.max_change < math.inf:
            raise AgentError(f"max_change is given, but the actions of {name!r} are discrete.")
        self.period = round(SECOND / self._number("rate", 10.0, high=10_000.0))
        self.timeout = SECOND * self._number("timeout", 0.5)
        self._declare_safe_action()
        self.last, self.acted = self.safe, None

    def _declare_safe_action(self) -> None:
        one_hot = self.player.interface["action"].get("one_hot", False)
        zeros = [0.0] * self.size
        first = [1.0, *zeros[1:]] if one_hot else zeros
        safe = self.declare_parameter("safe_action", first).value
        given = np.array(safe, np.float64)
        if len(safe) != self.size or not np.isfinite(given).all():
            raise AgentError(f"safe_action is {list(safe)}, expected {self.size} finite numbers.")
        self.safe = np.clip(given, self.low, self.high)
        wrong = np.abs(self.safe - given) > 1e-6  # a bound times limit is rounded
        wrong[: self.choices] |= given[: self.choices] % 1 != 0
        if wrong.any():
            i = int(wrong.argmax())
            kind = "a whole number" if i < self.choices else "a number within the limits,"
            raise AgentError(
                f"safe_action has {given[i]:g} at index {i}, expected {kind} from {self.low[i]:g} "
                f"to {self.high[i]:g}."
            )
        if one_hot and given.sum() != 1:
            raise AgentError(
                f"safe_action is {list(safe)}, expected one 1 and otherwise zeros, since the "
                f"actions of {self.player.name!r} are one-hot."
            )

    def _connect(self) -> None:
        """Creates publishers, subscriptions and the timer."""
        kind = self._text("action_type", "array")
        if kind not in ("array", "twist"):
            raise AgentError(f"action_type is {kind!r}, expected array or twist.")
        if kind == "twist" and self.size != 2:
            raise AgentError(f"action_type is twist, but an action has {self.size} numbers, not 2.")
        self.message_of = twist if kind == "twist" else array
        action = self._text("action_topic", f"{self.topic}/action")
        sent = Twist if kind == "twist" else Float32MultiArray
        self.actions = self.create_publisher(sent, action, 1)
        reset = self._text("reset_topic", "reset")
        self.create_subscription(Empty, reset, lambda _: self.reset(), 10)
        for sensor in self.sensors:
            self._listen(sensor)
        if self.talk:
            self._connect_words()
        self.create_timer(self.period / SECOND, self.tick)

    def _listen(self, sensor: Sensor) -> None:
        def receive(message: Any) -> None:
            values = np.array(message.data, np.float32)
            if self._accepts(sensor.topic, values, sensor.columns.size):
                sensor.values, sensor.time = values, self._now()

        quality = qos_profile_sensor_data  # a reliable subscription would miss such publishers
        self.create_subscription(Float32MultiArray, sensor.topic, receive, quality)

    def _connect_words(self) -> None:
        """Creates a topic for the agent's messages, and subscribes to those of the others."""
        pattern = self._text("message_topic", "{agent}/message")
        own = pattern.replace("{agent}", self.topic)
        self.speech = self.create_publisher(Float32MultiArray, own, 10)
        for name in self.talk["hears"]:
            other = pattern.replace("{agent}", topic_of(name))
            if other == own:
                raise AgentError(f"message_topic is {pattern!r}, expected {{agent}} in it.")
            self._hear(name, other)

    def _hear(self, name: str, topic: str) -> None:
        size = self.talk["message_size"]

        def receive(message: Any) -> None:
            word = np.array(message.data, np.float32)
            if self._accepts(topic, word, size if word.size else 0):  # an empty one: it is silent
                self.words[name] = (word, self._now())

        self.create_subscription(Float32MultiArray, topic, receive, 10)

    # -------------------------------------------------------------------------------------- play

    def _now(self) -> int:
        return self.get_clock().now().nanoseconds

    def _accepts(self, topic: str, values: np.ndarray, size: int) -> bool:
        """Returns whether a message has the right length and finite numbers; logs once if not."""
        good = values.size == size and bool(np.isfinite(values).all())
        if not good and topic not in self.refused:
            found = f"{values.size} numbers" if values.size != size else "NaN or infinity"
            text = f"{topic} sends {found}, expected {size} finite numbers; ignored."
            self.get_logger().error(text)
        (self.refused.discard if good else self.refused.add)(topic)
        return good

    def reset(self) -> None:
        """Begins an episode: clears the agent's memory and the messages that it has received."""
        self.player.reset()
        self.words = {}

    def tick(self) -> None:
        """Publishes an action; the safe one while a sensor is late, none before all have begun."""
        now = self._now()
        self._forget_later_than(now)
        missing = [s.topic for s in self.sensors if s.values is None]
        if missing:
            return self._report(f"waits for {', '.join(missing)}")
        late = [s.topic for s in self.sensors if now - s.time > self.timeout]
        if late:
            return self._stop(now, f"{', '.join(late)} is late")
        try:
            action = np.ravel(self._act(now)).astype(np.float64)
        except self.refusal as error:
            return self._stop(now, str(error))
        self._report("plays")
        self._publish(self._limited(action, now), now)

    def _forget_later_than(self, now: int) -> None:
        """Forgets what came before simulated time jumped back: it would count as new for ever."""
        for sensor in self.sensors:
            if sensor.time > now:
                sensor.time = -math.inf
        self.words = {name: word for name, word in self.words.items() if word[1] <= now}

    def _act(self, now: int) -> np.ndarray:
        for sensor in self.sensors:
            self.observation[sensor.columns] = sensor.values
        given, start = {}, 0
        for field in self.fields:
            part = self.observation[start : start + size_of(field)].reshape(field["shape"])
            given[field["name"]] = part != 0 if field["dtype"] == "bool" else part
            start += size_of(field)
        mask = given.pop("action_mask", None)
        if not self.talk:
            return self.player.act(given, action_mask=mask)
        said = self.player.speak(given)
        self.speech.publish(array([] if said is None else said))
        heard = {n: word for n, (word, time) in self.words.items() if now - time <= self.timeout}
        inbox = {name: word if word.size else None for name, word in heard.items()}
        if not self.player.delay:
            return self.player.act(inbox=inbox, action_mask=mask)
        action = self.player.act(action_mask=mask)
        self.player.hear(inbox)
        return action

    def _limited(self, action: np.ndarray, now: int) -> np.ndarray:
        """Clips the numbers of an action, and their change since the last one; keeps choices."""
        clipped = np.clip(action, self.low, self.high)
        if self.max_change == math.inf:
            return clipped
        # A late timer may not jump, and two ticks in a burst are not a period apart.
        elapsed = self.period if self.acted is None else now - self.acted
        change = self.max_change * min(max(elapsed, 0), self.period) / SECOND
        limited = self.last + np.clip(clipped - self.last, -change, change)
        limited[: self.choices] = clipped[: self.choices]
        return np.clip(limited, self.low, self.high)

    def _publish(self, action: np.ndarray, now: int) -> None:
        self.last, self.acted = action, now
        self.actions.publish(self.message_of(action))

    def _stop(self, now: int, why: str) -> None:
        self._report(f"{why}; publishes the safe action")
        self._publish(self.safe, now)

    def _report(self, status: str) -> None:
        """Logs a status once, when it begins."""
        if status == self.status:
            return
        text, self.status = f"{self.player.name}: {status}", status
        if "safe action" in status:  # rclpy allows only one severity for each line
            self.get_logger().warning(text)
        else:
            self.get_logger().info(text)


def load_player(folder: Path) -> tuple[Any, type[Exception]]:
    """Loads an agent with the ``player.py`` next to its folder; returns it and its error class."""
    path = folder.resolve().parent / "player.py"
    if not folder.name or not path.is_file():
        raise AgentError(
            f"folder is {str(folder)!r}, but {str(path)!r} does not exist; give a folder that "
            "torchrl-marl export has written, with -p folder:=RUN/export/agent_0."
        )
    spec = importlib.util.spec_from_file_location("player", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    try:
        return module.Player(folder), module.PlayerError
    except module.PlayerError as error:
        raise AgentError(str(error)) from None


def check_communication(name: str, talk: dict[str, Any] | None) -> None:
    """Raises an error if an agent's messages need more than one exchange in a tick."""
    if not talk:
        return
    found = "relays messages along a chain" if talk["relays"] else ""
    found = found or (f"has {talk['rounds']} rounds of messages" if talk["rounds"] > 1 else "")
    found = found or (f"has links={talk['links']}" if talk["links"] in DYNAMIC else "")
    if found:
        raise AgentError(
            f"agent {name!r} {found}; this node supports one round, with fixed links; "
            "call player.py from your own program."
        )


def read_sensor(text: str, size: int) -> Sensor:
    """Reads ``topic=columns``, such as ``odom=0:2`` or ``goal=4,5``."""
    topic, _, columns = text.partition("=")
    chosen: list[int] = []
    if found := re.fullmatch(r"(\d+):(\d+)", columns):
        chosen = list(range(int(found[1]), min(int(found[2]), size + 1)))
    elif re.fullmatch(r"\d+(,\d+)*", columns):
        chosen = [int(column) for column in columns.split(",")]
    if not topic or not chosen or max(chosen) >= size:
        expected = f"topic=first:end or topic=column,column with columns below {size}"
        raise AgentError(f"sensors has {text!r}, expected {expected}.")
    return Sensor(topic, np.array(chosen))


def size_of(field: dict[str, Any]) -> int:
    """Returns the number of values of an input."""
    return math.prod(field["shape"])


def options_of(action: dict[str, Any]) -> list[int]:
    """Returns the number of options of each choice; the choices stand before the numbers."""
    if "branches" in action:
        return action["branches"]
    n = action.get("n_actions")
    if n is None:
        return []
    return [2] * n if action.get("one_hot") else [n]


def topic_of(agent: str) -> str:
    """Returns an agent's name with only the characters of a ROS 2 name."""
    name = re.sub("[^A-Za-z0-9_]", "_", agent)
    return f"_{name}" if name[:1].isdigit() else name


def array(values: Any) -> Float32MultiArray:
    """Returns numbers as a message."""
    return Float32MultiArray(data=[float(value) for value in values])


def twist(values: Any) -> Twist:
    """Returns a speed and a turn rate as a message."""
    message = Twist()
    message.linear.x, message.angular.z = (float(value) for value in values)
    return message


def main() -> None:
    """Plays until the process is interrupted."""
    rclpy.init(args=sys.argv)
    try:
        rclpy.spin(AgentNode())
    except (AgentError, InvalidParameterTypeException) as error:
        raise SystemExit(f"error: {error}") from None
    except (KeyboardInterrupt, ExternalShutdownException):
        pass
    finally:
        rclpy.try_shutdown()


if __name__ == "__main__":
    main()
