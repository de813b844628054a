"""Exported files, and the player, which needs neither torch nor torchrl_marl."""

import json
import subprocess
import sys

import numpy as np
import pytest
import torch
from exported import team_policy
from torchrl.data import Bounded, Categorical, MultiCategorical, OneHot, Unbounded

from torchrl_marl import AgentSpec, TeamSpec
from torchrl_marl.apps.export import Player, export_agents, formats
from torchrl_marl.apps.export.agent import agents_of, find_agents
from torchrl_marl.apps.export.check import InMemory, check_players
from torchrl_marl.apps.export.player import PlayerError
from torchrl_marl.envs import with_memory
from torchrl_marl.envs.toy import Arena
from torchrl_marl.errors import ConfigError, MissingExtraError, UserError
from torchrl_marl.modules import MemoryConfig, NetworkConfig, RecurrentNetworkConfig, make_actor

pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

pytestmark = pytest.mark.clients


@pytest.fixture(scope="module")
def arena():
    return Arena(2, n_agents=3, late_spawn=1, years=2, max_steps=9, action_mask=True, seed=0)


@pytest.fixture(scope="module")
def policy(arena):
    memory = MemoryConfig("gru", size=4)
    config = RecurrentNetworkConfig([8], memory=memory, sharing="trunk")
    groups = TeamSpec.from_env(arena).groups.values()
    return team_policy(groups, make_actor, config=config, normed=True)


@pytest.fixture(scope="module")
def folder(policy, tmp_path_factory):
    folder = tmp_path_factory.mktemp("exported")
    export_agents(agents_of(policy), folder)
    return folder


def of_one(action, folder, format="pt2", **settings):
    """The player of a single agent with a given action spec."""
    team = TeamSpec([AgentSpec("car", 1, Unbounded((3,)), action)])
    actor = team_policy(team.groups.values(), make_actor, config=NetworkConfig([4]))
    folders = export_agents(find_agents(actor), folder, format)
    return Player(folders["car_0"], trust=True, **settings)


class Doubled(InMemory):
    """Twice the logits of the agent."""

    def _run_program(self, program, values):
        outputs = super()._run_program(program, values)
        logits = outputs["logits"]
        return {**outputs, "logits": np.where(logits > -1e30, logits + logits.clip(-99), logits)}


class Unmasked(InMemory):
    """The likeliest legal action, with logits in which illegal ones are only a bit lower."""

    def _run_program(self, program, values):
        outputs = super()._run_program(program, values)
        logits, legal = outputs["logits"], outputs["logits"] > -1e30
        return {**outputs, "logits": np.where(legal, logits, logits[legal].min() - 1)}


class Unforgetting(InMemory):
    """Keeps its memory in a reset after its first episode."""

    def reset(self):
        super().reset()
        self._is_first_step = not self.parameters


class TestFiles:
    @pytest.mark.parametrize("format", ["onnx", "pt2"])
    def test_players_act_as_the_team(self, arena, policy, folder, tmp_path, format):
        agents = agents_of(policy)
        if format == "onnx":
            folders = {name: folder / name for name in agents}
        else:
            folders = export_agents(agents, tmp_path, format)
        players = {name: Player(own, trust=format == "pt2") for name, own in folders.items()}
        found = check_players(with_memory(arena, policy), policy, players, steps=20)
        assert (found.differ, found.largest < 1e-5) == (0, True)
        assert found.actions > 20

    def test_contents_of_the_interface_file(self, folder):
        interface = json.loads((folder / "agent_1" / "interface.json").read_text())
        assert (interface["agent"], interface["group"]) == ("agent_1", "agents")
        assert interface["state_size"] == 4
        assert interface["action"]["distribution"] == "categorical"
        act = interface["programs"]["act"]
        inputs = {field["name"]: field["shape"] for field in act["inputs"]}
        assert inputs == {"observation": [6], "action_mask": [4], "hidden": [4], "is_init": [1]}
        assert [field["name"] for field in act["outputs"]] == ["action", "logits", "next_hidden"]
        assert interface["versions"]["torch"] == torch.__version__

    def test_check_raises_if_players_differ_from_the_team(self, arena, policy, folder):
        crossed = {"agent_0": Player(folder / "agent_1"), "agent_1": Player(folder / "agent_0")}
        with pytest.raises(
            UserError, match=r"act differently from their team: \d+ actions differ in 30 "
        ):
            check_players(with_memory(arena, policy), policy, crossed, steps=30)

    def test_check_compares_the_parameters_of_sampled_actions(self, arena, policy):
        """Doubled logits and a mask that hides nothing keep the likeliest action."""
        for broken in (Doubled, Unmasked):
            players = {name: broken(agent) for name, agent in agents_of(policy).items()}
            with pytest.raises(UserError, match="act differently from their team"):
                check_players(with_memory(arena, policy), policy, players, steps=10)

    def test_check_plays_the_first_step_of_the_next_episode(self, arena, policy):
        """A memory that is not cleared differs only after the first episode."""
        players = {name: Unforgetting(agent) for name, agent in agents_of(policy).items()}
        with pytest.raises(UserError, match="act differently from their team"):
            check_players(with_memory(arena, policy), policy, players, steps=1)

    def test_equal_agents_have_equal_programs(self, folder, tmp_path):
        team = TeamSpec([AgentSpec("car", 2, Unbounded((3,)), Categorical(2))])
        folders = export_agents(agents_of(make_actor(team.groups["car"])), tmp_path, "onnx")
        one, other = ((own / "act.onnx").read_bytes() for own in folders.values())
        assert one == other
        one, other = ((folder / name / "act.onnx").read_bytes() for name in ("agent_0", "agent_1"))
        assert one != other


class TestPlayer:
    def test_player_runs_without_torch_and_torchrl_marl(self, folder):
        """Runs in a process that can import only the copied player."""
        program = (
            "import sys; sys.modules['torch'] = sys.modules['torchrl_marl'] = None\n"
            "import numpy as np; from player import Player\n"
            "player = Player('agent_0')\n"
            "print(player.act(np.ones(6), action_mask=[True, False, False, False]))"
        )
        done = subprocess.run(
            [sys.executable, "-c", program], cwd=folder, capture_output=True, text=True
        )
        assert (done.stdout, done.stderr) == ("0\n", "")

    def test_player_module_does_not_import_torch(self):
        program = "import sys, torchrl_marl.apps.export.player; print('torch' in sys.modules)"
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
        assert done.stdout == "False\n"

    def test_sampled_categorical_actions(self, tmp_path):
        player = of_one(Categorical(3), tmp_path, seed=0)
        drawn = [int(player.act(np.ones(3), deterministic=False)) for _ in range(400)]
        logits = player.parameters["logits"]
        expected = np.exp(logits) / np.exp(logits).sum()
        assert abs(np.bincount(drawn, minlength=3) / 400 - expected).max() < 0.08

    def test_sampled_actions_are_within_bounds(self, tmp_path):
        bounds = Bounded(torch.tensor([-1.0, 2.0]), torch.tensor([0.0, 6.0]))
        player = of_one(bounds, tmp_path, seed=0)
        drawn = np.stack([player.act(np.ones(3), deterministic=False) for _ in range(100)])
        assert drawn.dtype == np.float32
        assert (drawn >= [-1, 2]).all() and (drawn <= [0, 6]).all()
        assert (drawn.std(0) > 0.01).all()
        again = of_one(bounds, tmp_path, seed=0)
        assert (again.act(np.ones(3), deterministic=False) == drawn[0]).all()

    def test_sampled_multi_categorical_actions(self, tmp_path):
        player = of_one(MultiCategorical([3, 2]), tmp_path, seed=0)
        drawn = np.stack([player.act(np.ones(3), deterministic=False) for _ in range(400)])
        assert drawn.shape == (400, 2) and drawn.dtype == np.int64
        for branch, logits in enumerate(np.split(player.parameters["logits"], [3])):
            expected = np.exp(logits) / np.exp(logits).sum()
            share = np.bincount(drawn[:, branch], minlength=len(logits)) / 400
            assert abs(share - expected).max() < 0.08
            assert player.act(np.ones(3))[branch] == logits.argmax()

    def test_sampled_one_hot_actions(self, tmp_path):
        player = of_one(OneHot(3), tmp_path, seed=0)
        drawn = player.act(np.ones(3), deterministic=False)
        assert (drawn.shape, drawn.sum(), drawn.dtype) == ((3,), 1, player.act(np.ones(3)).dtype)


class TestRefusals:
    def test_changed_or_missing_program_raises(self, folder, tmp_path):
        for file in ("interface.json", "act.onnx"):
            (tmp_path / file).write_bytes((folder / "agent_0" / file).read_bytes())
        with (tmp_path / "act.onnx").open("ab") as file:
            file.write(b"more")
        with pytest.raises(PlayerError, match="has changed since the export: its hash differs"):
            Player(tmp_path)
        (tmp_path / "act.onnx").unlink()
        with pytest.raises(PlayerError, match=r"act.onnx' does not exist; export the agent"):
            Player(tmp_path)

    def test_missing_or_invalid_interface_raises(self, tmp_path):
        with pytest.raises(PlayerError, match="does not exist; give the folder of an exported"):
            Player(tmp_path)
        (tmp_path / "interface.json").write_text("{")
        with pytest.raises(PlayerError, match="is not a valid interface; export the agent again"):
            Player(tmp_path)
        (tmp_path / "interface.json").write_text('{"format": 99}')
        with pytest.raises(PlayerError, match="has format 99, expected 1"):
            Player(tmp_path)

    def test_invalid_inputs_raise(self, folder):
        player = Player(folder / "agent_0")
        with pytest.raises(
            PlayerError, match=r"'observation' has shape \(5,\), expected float32 \(6,\)"
        ):
            player.act(np.ones(5), action_mask=np.ones(4, bool))
        with pytest.raises(PlayerError, match=r"there is no 'action_mask', expected bool \(4,\)"):
            player.act(np.ones(6))
        with pytest.raises(PlayerError, match="'observation' holds NaN, expected finite numbers"):
            player.act(np.full(6, np.nan), action_mask=np.ones(4, bool))

    def test_unknown_format_and_missing_extra_raise(self, monkeypatch):
        with pytest.raises(ConfigError, match="format is 'onx'; did you mean 'onnx'"):
            formats.check_format("onx")
        monkeypatch.setattr(formats.importlib.util, "find_spec", lambda name: None)
        with pytest.raises(MissingExtraError, match=r"pip install '\.\[export\]'"):
            formats.check_format("onnx")
