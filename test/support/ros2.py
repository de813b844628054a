"""A fake rclpy with its messages: topics, timers and a clock in one process.

It is as strict as rclpy about names of topics, types of messages and parameters, and one
severity for each logging call.
"""

import array
import re
import sys
import types

NAME = re.compile(r"[A-Za-z_]\w*(/[A-Za-z_]\w*)*", re.ASCII)


class Graph:
    """Nodes, topics and the clock; ``given`` are the parameters of the next node."""

    def __init__(self):
        self.now, self.given, self.nodes, self.heard = 0, {}, [], {}
        self.listeners = {}

    def publish(self, topic, message):
        """Sends a message to the subscribers of a topic, and keeps it."""
        self.heard.setdefault(topic, []).append(message)
        for kind, receive in self.listeners.get(topic, ()):
            assert isinstance(message, kind), f"{topic} is {kind}, got {type(message)}"
            receive(message)

    def send(self, topic, *numbers):
        self.publish(topic, Float32MultiArray(data=[float(number) for number in numbers]))

    def run(self, seconds):
        """Advances the clock, and fires the timers in order of their time and node."""
        end = self.now + round(seconds * 1e9)
        while True:
            timers = [timer for node in self.nodes for timer in node.timers_]
            first = min(timers, key=lambda timer: timer.next, default=None)
            if first is None or first.next > end:
                break
            self.now = max(self.now, first.next)
            first.next += first.period
            first.callback()
        self.now = end


graph = Graph()


class Timer:
    def __init__(self, period, callback):
        self.period, self.callback = round(period * 1e9), callback
        self.next = graph.now + self.period


class Logger:
    """Keeps logged lines; each logging call may use one severity only, as in rclpy."""

    def __init__(self):
        self.lines, self.severities = [], {}

    def _log(self, severity, text):
        caller = sys._getframe(2)
        place = (caller.f_code, caller.f_lasti)
        if self.severities.setdefault(place, severity) != severity:
            raise ValueError("Logger severity cannot be changed between calls.")
        self.lines.append((severity, text))

    def info(self, text):
        self._log("info", text)

    def warning(self, text):
        self._log("warning", text)

    def error(self, text):
        self._log("error", text)


class InvalidParameterTypeException(Exception):
    pass


class Publisher:
    def __init__(self, kind, topic):
        self.kind, self.topic = kind, topic

    def publish(self, message):
        assert isinstance(message, self.kind), f"{self.topic} sends {self.kind}"
        graph.publish(self.topic, message)


class Node:
    def __init__(self, name):
        self.name, self.timers_, self.log = name, [], Logger()
        self.given, self.declared = dict(graph.given), {}
        graph.nodes.append(self)

    def declare_parameter(self, name, value):
        assert name not in self.declared, f"{name} is declared twice"
        assert value != [], "rclpy takes an empty list for bytes"
        parameter = self.given.get(name, value)
        if type(parameter) is not type(value):
            expected = type(value).__name__
            raise InvalidParameterTypeException(f"{name} is {parameter!r}, expecting {expected}")
        self.declared[name] = types.SimpleNamespace(value=parameter)
        return self.declared[name]

    def create_publisher(self, kind, topic, quality):
        return Publisher(kind, checked(topic))

    def create_subscription(self, kind, topic, callback, quality):
        graph.listeners.setdefault(checked(topic), []).append((kind, callback))

    def create_timer(self, period, callback):
        self.timers_.append(Timer(period, callback))

    def get_clock(self):
        now = types.SimpleNamespace(nanoseconds=graph.now)
        return types.SimpleNamespace(now=lambda: now)

    def get_logger(self):
        return self.log


def checked(topic):
    assert NAME.fullmatch(topic), f"{topic!r} is no name of ROS 2"
    return topic


class Empty:
    pass


class Float32MultiArray:
    def __init__(self, data=()):
        assert all(type(value) is float for value in data)
        self.data = array.array("f", data)


class Vector3:
    def __init__(self):
        self.x = self.y = self.z = 0.0

    def __setattr__(self, name, value):
        assert name in ("x", "y", "z") and type(value) is float
        super().__setattr__(name, value)


class Twist:
    def __init__(self):
        self.linear, self.angular = Vector3(), Vector3()


def spin(node):
    """Returns immediately, as after an interrupt."""


def modules():
    """Returns the modules that a node imports, by name."""
    contents = {
        "rclpy": {"init": lambda args: None, "spin": spin, "try_shutdown": lambda: None},
        "rclpy.exceptions": {"InvalidParameterTypeException": InvalidParameterTypeException},
        "rclpy.executors": {"ExternalShutdownException": type("Ended", (Exception,), {})},
        "rclpy.node": {"Node": Node},
        "rclpy.qos": {"qos_profile_sensor_data": "best effort"},
        "std_msgs": {},
        "std_msgs.msg": {"Empty": Empty, "Float32MultiArray": Float32MultiArray},
        "geometry_msgs": {},
        "geometry_msgs.msg": {"Twist": Twist},
    }
    fake_modules = {name: types.ModuleType(name) for name in contents}
    for name, content in contents.items():
        vars(fake_modules[name]).update(content)
    return fake_modules
