"""The ROS 2 node of an exported agent, with a fake rclpy: topics and a clock."""

import ast
import importlib.util
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import ros2
from exported import team_policy
from torchrl.data import Bounded, Categorical, OneHot, Unbounded

from torchrl_marl import AgentSpec, TeamSpec
from torchrl_marl.apps.export import Player, export_agents
from torchrl_marl.apps.export.agent import agents_of
from torchrl_marl.modules import (
    MemoryConfig,
    RecurrentNetworkConfig,
    make_actor,
    make_deterministic_actor,
)
from torchrl_marl.modules.config import DrawnCommunicationConfig
from torchrl_marl.specs import Hybrid

pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

pytestmark = pytest.mark.clients

FILE = Path(__file__).parents[3] / "clients" / "ros2" / "ros2_agent.py"
SEEN = np.random.default_rng(0).normal(size=(12, 3)).astype(np.float32)


@pytest.fixture
def graph(monkeypatch):
    monkeypatch.setattr(ros2, "graph", ros2.Graph())
    return ros2.graph


@pytest.fixture
def node_file(monkeypatch):
    """The module of the node, with a fake rclpy."""
    for name, module in ros2.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    spec = importlib.util.spec_from_file_location("ros2_agent", FILE)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "ros2_agent", module)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def start(graph, node_file):
    """Starts a node with parameters."""

    def started(folder, **parameters):
        graph.given = {"folder": str(folder), **parameters}
        return node_file.AgentNode()

    return started


def exported(folder, action, make=make_actor, n=1, mask=False, **talk):
    config = RecurrentNetworkConfig(
        [8],
        memory=MemoryConfig("gru", size=4),
        **({"communication": DrawnCommunicationConfig(message_size=5, **talk)} if talk else {}),
    )
    masked = {"action_mask": True} if mask else {}
    team = TeamSpec([AgentSpec("car", n, Unbounded((3,)), action, **masked)])
    actor = team_policy(team.groups.values(), make, config=config)
    return export_agents(agents_of(actor), folder)


@pytest.fixture(scope="module")
def car(tmp_path_factory):
    """A car with two actions from -2 to 1 and a memory."""
    folder = tmp_path_factory.mktemp("car")
    return exported(folder, Bounded(-2.0, 1.0, (2,)), make_deterministic_actor)["car_0"]


@pytest.fixture(scope="module")
def shooter(tmp_path_factory):
    """A car that chooses one of 4 targets and one of 2 weapons, and has a number from -2 to 1."""
    folder = tmp_path_factory.mktemp("shooter")
    return exported(folder, Hybrid([4, 2], Bounded(-2.0, 1.0, (1,))))["car_0"]


@pytest.fixture(scope="module")
def talkers(tmp_path_factory):
    folder = tmp_path_factory.mktemp("talkers")
    return exported(folder, Bounded(-2.0, 1.0, (2,)), n=2, kind="commnet")


def actions(graph, topic="car_0/action"):
    return np.array([message.data for message in graph.heard.get(topic, [])])


def play(graph, rows, agents=("car_0",)):
    for row in rows:
        for agent in agents:
            graph.send(f"{agent}/observation", *row)
        graph.run(0.1)


def fixed(node, *values):
    """Makes an agent return the given actions."""
    left = iter(values)
    node.player.act = lambda *args, **kwargs: np.array(next(left), np.float32)


class TestPlay:
    def test_actions_equal_those_of_the_exported_agent(self, graph, start, car):
        start(car)
        play(graph, SEEN)
        player = Player(car)
        assert np.abs(actions(graph) - [player.act(row) for row in SEEN]).max() < 1e-6
        again = Player(car)
        forgetful = []
        for row in SEEN:
            again.reset()
            forgetful.append(again.act(row))
        assert np.abs(actions(graph) - forgetful)[1:].max() > 1e-3

    def test_reset_clears_the_memory(self, graph, start, car):
        start(car)
        play(graph, SEEN[:5])
        graph.publish("reset", ros2.Empty())
        play(graph, SEEN[:5])
        found = actions(graph)
        assert (found[:5] == found[5:]).all()

    def test_sensors_fill_columns_of_the_observation(self, graph, start, car):
        start(car, sensors=["odom=2,0", "scan=1:2"])
        for row in SEEN[:4]:
            graph.send("odom", row[2], row[0])
            graph.send("scan", row[1])
            graph.run(0.1)
        player = Player(car)
        assert np.abs(actions(graph) - [player.act(row) for row in SEEN[:4]]).max() < 1e-6

    def test_twist_messages(self, graph, start, car):
        start(car, action_type="twist", action_topic="cmd_vel")
        play(graph, SEEN[:2])
        player = Player(car)
        for message, row in zip(graph.heard["cmd_vel"], SEEN):
            found = [message.linear.x, message.angular.z]
            assert np.allclose(found, player.act(row), atol=1e-6)
            assert message.linear.y == message.angular.x == 0

    def test_masked_discrete_actions(self, graph, start, tmp_path):
        folder = exported(tmp_path, Categorical(4), mask=True)["car_0"]
        node, player = start(folder), Player(folder)
        for step, row in enumerate(SEEN[:8]):
            legal = np.arange(4) != step % 4
            graph.send("car_0/observation", *row)
            graph.send("car_0/action_mask", *legal)
            graph.run(0.1)
            assert actions(graph)[-1] == player.act(row, action_mask=legal)
        graph.send("car_0/action_mask", 0, 0, 0, 0)
        graph.run(0.1)
        assert "has no True entry" in node.log.lines[-1][1]


class TestLimits:
    def test_limit_scales_the_bounds(self, graph, start, car):
        node = start(car, limit=0.5)
        fixed(node, [-2, 1], [0.2, -0.3])
        play(graph, SEEN[:2])
        assert np.allclose(actions(graph), [[-1, 0.5], [0.2, -0.3]])

    def test_max_change_limits_changes(self, graph, start, car):
        """At 10 Hz, 2 per second are 0.2 per tick; the first change is from the safe action."""
        node = start(car, max_change=2.0, safe_action=[0.5, 0.0])
        fixed(node, [1, -2], [1, -2], [1, 0.0], [1, 0.0])
        play(graph, SEEN[:4])
        assert np.allclose(actions(graph), [[0.7, -0.2], [0.9, -0.4], [1, -0.2], [1, 0]])

    def test_limits_do_not_change_discrete_parts_of_hybrid_actions(self, graph, start, shooter):
        node = start(shooter, limit=0.5, max_change=2.0, safe_action=[2.0, 0.0, 0.25])
        fixed(node, [3, 1, 1], [0, 1, 1])
        play(graph, SEEN[:2])
        assert np.allclose(actions(graph), [[3, 1, 0.45], [0, 1, 0.5]])

    def test_hybrid_actions_equal_those_of_the_exported_agent(self, graph, start, shooter):
        start(shooter)
        play(graph, SEEN[:4])
        player = Player(shooter)
        assert np.abs(actions(graph) - [player.act(row) for row in SEEN[:4]]).max() < 1e-6

    def test_bounds_hold_after_max_change(self, graph, start, car):
        node = start(car, max_change=1.0)
        node.last = np.array([3.0, -3.0])
        fixed(node, [1, -2])
        play(graph, SEEN[:1])
        assert actions(graph).tolist() == [[1, -2]]

    def test_late_timer_does_not_exceed_max_change(self, graph, start, car):
        node = start(car, max_change=2.0, timeout=10.0)
        fixed(node, [1, 1], [1, 1], [1, 1])
        play(graph, SEEN[:1])
        graph.now += 950_000_000  # the process was stopped; its timer then fires twice in a burst
        node.tick()
        graph.now += 25_000_000
        node.tick()
        assert np.allclose(actions(graph)[:, 0], [0.2, 0.4, 0.45])


class TestSensors:
    def test_node_waits_for_a_missing_sensor(self, graph, start, car):
        node = start(car, sensors=["odom=0:2", "scan=2:3"])
        graph.send("odom", 0, 0)
        graph.run(1.0)
        assert "car_0/action" not in graph.heard
        assert node.log.lines == [("info", "car_0: waits for scan")]

    def test_late_sensor_triggers_safe_action(self, graph, start, car):
        """After 0.25 s it publishes the safe action; later it resumes with its memory."""
        node = start(car, timeout=0.25, safe_action=[0.25, -0.5])
        play(graph, SEEN[:2])
        graph.run(0.4)
        play(graph, SEEN[2:4])
        player = Player(car)
        # Ticks come 0.1, 0.2 (played), 0.3, 0.4 and 0.5 s (late) after the second observation.
        steps = [*SEEN[:2], SEEN[1], None, None, None, *SEEN[2:4]]
        expected = [[0.25, -0.5] if row is None else player.act(row) for row in steps]
        assert np.abs(actions(graph) - expected).max() < 1e-6
        late = "car_0: car_0/observation is late; publishes the safe action"
        plays = ("info", "car_0: plays")
        assert node.log.lines == [plays, ("warning", late), plays]

    def test_backward_clock_jump_makes_sensors_late(self, graph, start, car):
        node = start(car, safe_action=[0.25, -0.5])
        play(graph, SEEN[:3])
        graph.now = 0
        node.tick()
        graph.now += 300_000_000  # the time of the last observation
        node.tick()
        assert (actions(graph)[-2:] == [0.25, -0.5]).all()
        assert "car_0/observation is late" in node.log.lines[-1][1]
        play(graph, SEEN[:1])
        assert node.log.lines[-1] == ("info", "car_0: plays")

    @pytest.mark.parametrize("bad, found", [([1, 2], "2 numbers"), ([1, 2, np.nan], "NaN")])
    def test_wrong_observations_are_ignored_and_logged_once(self, graph, start, car, bad, found):
        node = start(car)
        play(graph, [bad] * 3)
        errors = [text for severity, text in node.log.lines if severity == "error"]
        assert len(errors) == 1
        assert errors[0].startswith(f"car_0/observation sends {found}")
        assert errors[0].endswith("expected 3 finite numbers; ignored.")
        assert "car_0/action" not in graph.heard


class TestWords:
    def test_messages_between_two_nodes(self, graph, start, talkers):
        """The first node gets the message of the last tick, the second that of this tick."""
        for folder in talkers.values():
            start(folder)
        play(graph, SEEN[:6], talkers)
        first, second = (Player(folder) for folder in talkers.values())
        said = None
        for step, row in enumerate(SEEN[:6]):
            word = first.speak(row)
            acted = first.act(inbox={"car_1": said})
            assert np.abs(actions(graph)[step] - acted).max() < 1e-6
            said = second.speak(row)
            acted = second.act(inbox={"car_0": word})
            assert np.abs(actions(graph, "car_1/action")[step] - acted).max() < 1e-6
            assert np.allclose(graph.heard["car_0/message"][step].data, word, atol=1e-6)

    def test_messages_expire_and_are_cleared_by_reset(self, graph, start, talkers):
        node, alone, spoken = start(talkers["car_0"]), Player(talkers["car_0"]), []
        graph.send("car_1/message", *np.arange(5))
        for row in SEEN[:8]:
            alone.reset()
            node.player.reset()
            play(graph, [row])
            alone.speak(row)
            spoken.append(np.abs(actions(graph)[-1] - alone.act(inbox={})).max() > 1e-4)
        assert spoken == [True] * 5 + [False] * 3
        graph.send("car_1/message", *np.arange(5))
        node.reset()
        assert node.words == {}

    def test_backward_clock_jump_clears_messages(self, graph, start, talkers):
        node = start(talkers["car_0"])
        play(graph, SEEN[:2])
        graph.send("car_1/message", *np.arange(5))
        graph.now = 0
        node.tick()
        assert node.words == {}

    def test_empty_and_invalid_messages(self, graph, start, talkers):
        node = start(talkers["car_0"])
        graph.send("car_1/message")
        assert node.words["car_1"][0].size == 0
        play(graph, SEEN[:1])
        alone = Player(talkers["car_0"])
        alone.speak(SEEN[0])
        assert np.abs(actions(graph)[0] - alone.act(inbox={})).max() < 1e-6
        graph.send("car_1/message", 1, 2)
        assert node.words["car_1"][0].size == 0
        assert "car_1/message sends 2 numbers, expected 5" in node.log.lines[-1][1]

    def test_delayed_messages(self, graph, start, tmp_path):
        """Messages of a tick are used in the next one."""
        folder = exported(tmp_path, Bounded(-2.0, 1.0, (2,)), n=2, kind="commnet", delay=1)["car_0"]
        start(folder)
        player, words = Player(folder), np.random.default_rng(1).normal(size=(5, 5))
        for row, word in zip(SEEN, words.astype(np.float32)):
            graph.send("car_1/message", *word)
            play(graph, [row])
            player.speak(row)
            assert np.abs(actions(graph)[-1] - player.act()).max() < 1e-6
            player.hear({"car_1": word})


class TestRefusals:
    def refused(self, start, folder, **parameters):
        with pytest.raises(ValueError) as error:
            start(folder, **parameters)
        assert "\n" not in str(error.value)
        return str(error.value)

    def test_invalid_folder_raises(self, start, car, tmp_path):
        assert "give a folder that torchrl-marl export has written" in self.refused(start, "")
        assert "give a folder that" in self.refused(start, tmp_path / "agent")
        shutil.copytree(car.parent, tmp_path / "export")
        found = self.refused(start, tmp_path / "export" / "agent")
        assert "interface.json' does not exist; give the folder of an exported agent" in found
        (tmp_path / "export" / "car_0" / "act.onnx").write_bytes(b"")
        assert "has changed" in self.refused(start, tmp_path / "export" / "car_0")

    @pytest.mark.parametrize(
        "parameters, text",
        [
            ({"limit": 1.5}, "limit is 1.5, expected a number above 0, at most 1."),
            ({"rate": 0.0}, "rate is 0, expected a number above 0, at most 10000."),
            ({"timeout": -1.0}, "timeout is -1, expected a number above 0."),
            ({"safe_action": [0.0]}, "safe_action is [0.0], expected 2 finite numbers."),
            (
                {"safe_action": [0.0, 1.5]},
                "has 1.5 at index 1, expected a number within the limits",
            ),
            ({"safe_action": [-1.5, 0.0], "limit": 0.5}, "has -1.5 at index 0, expected a number"),
            ({"action_type": "twists"}, "action_type is 'twists', expected array or twist."),
            ({"sensors": ["odom"]}, "sensors has 'odom', expected topic=first:end"),
            ({"sensors": ["odom=0:4"]}, "columns below 3"),
            ({"sensors": ["odom=0:2"]}, "column 2 0 times, expected each of the 3 columns once"),
            ({"sensors": ["a=0:3", "b=1"]}, "column 1 2 times"),
        ],
    )
    def test_invalid_parameter_raises(self, start, car, parameters, text):
        assert text in self.refused(start, car, **parameters)

    def test_parameters_that_do_not_fit_the_agent_raise(self, start, tmp_path, talkers):
        folder = exported(tmp_path / "a", Categorical(4))["car_0"]
        assert "has no bounds; expected 1" in self.refused(start, folder, limit=0.5)
        assert "are discrete" in self.refused(start, folder, max_change=1.0)
        assert "from 0 to 3." in self.refused(start, folder, safe_action=[4.0])
        assert "a whole number" in self.refused(start, folder, safe_action=[1.5])
        assert "has 1 numbers, not 2" in self.refused(start, folder, action_type="twist")
        assert "{agent}" in self.refused(start, talkers["car_0"], message_topic="words")

    def test_safe_action_of_one_hot_agent(self, graph, start, tmp_path):
        folder = exported(tmp_path / "a", OneHot(3))["car_0"]
        for zeros in ([0.0] * 3, [1.0, 0.0, 1.0]):
            found = self.refused(start, folder, safe_action=zeros)
            assert found.startswith(f"safe_action is {zeros}, expected one 1 and otherwise zeros")
        assert start(folder).safe.tolist() == [1.0, 0.0, 0.0]
        assert start(folder, safe_action=[0.0, 0.0, 1.0]).safe.tolist() == [0.0, 0.0, 1.0]

    def test_safe_action_of_hybrid_agent(self, start, shooter):
        found = self.refused(start, shooter, safe_action=[4.0, 0.0, 0.0])
        assert found == "safe_action has 4 at index 0, expected a whole number from 0 to 3."
        found = self.refused(start, shooter, safe_action=[3.0, 1.0, 2.0])
        assert found.endswith("2 at index 2, expected a number within the limits, from -2 to 1.")

    @pytest.mark.parametrize(
        "change, text",
        [
            ({"rounds": 2}, "has 2 rounds of messages"),
            ({"relays": True}, "relays messages along a chain"),
            ({"links": "radius"}, "has links=radius"),
        ],
    )
    def test_unsupported_communication_raises(self, node_file, change, text):
        talk = {"rounds": 1, "relays": False, "links": "all", **change}
        with pytest.raises(node_file.AgentError, match=text):
            node_file.check_communication("car_0", talk)

    def test_invalid_folder_exits_with_one_sentence(self, graph, node_file):
        graph.given = {"folder": "nowhere"}
        with pytest.raises(SystemExit, match="error: folder is 'nowhere'"):
            node_file.main()
        graph.given = {"folder": 3}
        with pytest.raises(SystemExit, match="error: folder is 3"):
            node_file.main()


def test_node_imports_only_packages_of_a_robot():
    """The node imports only packages that exist on a robot."""
    nodes = list(ast.walk(ast.parse(FILE.read_text(encoding="utf-8"))))
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module for node in nodes if isinstance(node, ast.ImportFrom)]
    found = {name.partition(".")[0] for name in names} - sys.stdlib_module_names
    assert found == {"numpy", "rclpy", "std_msgs", "geometry_msgs"}


def test_topic_names_of_agents(node_file):
    assert [node_file.topic_of(name) for name in ("red/0", "0", "a.b")] == ["red_0", "_0", "a_b"]
