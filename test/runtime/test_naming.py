"""Names of agents, groups, players and recipes: faulty ones raise, none leaves its folder."""

import csv
import dataclasses

import pytest
from exported import team_policy
from runs import small_config
from torchrl.data import Categorical, Unbounded

from torchrl_marl import AgentSpec, TeamSpec
from torchrl_marl.apps.export import export_agents
from torchrl_marl.apps.export.agent import agents_of
from torchrl_marl.apps.external.declaration import Declared
from torchrl_marl.envs.toy import Arena
from torchrl_marl.errors import CheckpointError, ConfigError
from torchrl_marl.modules import NetworkConfig, make_actor
from torchrl_marl.runtime.naming import file_name, invalid_name_reason, path_within
from torchrl_marl.training.folder import RunFolder
from torchrl_marl.training.pool import Pool, stored_players

LEADING_OUT = ["/etc/x", "..", "../x", "a/../../x", "\\x", "..\\x", "a\\..\\x", ".", "/"]
UNSEEN = ["a\0b", "a\nb", "a\x1b[2Jb", "a\u2028b", "a\x7fb", "a\ud800b"]
HARMLESS = [
    "robot_0",
    "robot 1",
    "red:0",
    "red/0",
    "Räuber",
    "机器人",
    "a.b",
    "..x",
    "x..",
    ".x",
    "#1",
]


class TestFaults:
    @pytest.mark.parametrize("name", LEADING_OUT)
    def test_names_that_lead_out_of_a_folder_are_faulty(self, name):
        assert invalid_name_reason(name) == "it leads out of its folder"

    @pytest.mark.parametrize("name", UNSEEN)
    def test_names_with_control_characters_are_faulty(self, name):
        assert invalid_name_reason(name) == "it has control characters or ends of lines"

    @pytest.mark.parametrize("name", HARMLESS)
    def test_usual_agent_names_are_accepted(self, name):
        assert invalid_name_reason(name) is None

    def test_empty_long_and_non_text_names_are_faulty(self):
        assert invalid_name_reason("") == invalid_name_reason(" ") == "it is empty"
        assert invalid_name_reason(3) == "it is int, expected a text"
        assert invalid_name_reason("a" * 201) == "it has 201 characters, expected 200 at most"
        assert invalid_name_reason("red/0", plain=True) == "it has a slash"
        assert invalid_name_reason("red\\0", plain=True) == "it has a slash"
        assert invalid_name_reason(".x", plain=True) == "it begins with a dot"

    @pytest.mark.parametrize("name", [*LEADING_OUT, *UNSEEN, *HARMLESS, "", "%2E"])
    def test_file_of_any_name_stays_within_its_folder(self, name, tmp_path):
        path = path_within(tmp_path, name)
        assert path.parent == tmp_path and path != tmp_path
        path.write_text("")
        assert [one.name for one in tmp_path.iterdir()] == [file_name(name)]

    def test_plain_names_are_file_names_unchanged(self):
        plain = [name for name in HARMLESS if "/" not in name and not name.startswith(".")]
        assert [file_name(name) for name in plain] == plain

    def test_link_that_leads_out_of_a_folder_raises(self, tmp_path):
        (tmp_path / "folder").mkdir()
        (tmp_path / "folder" / "red").symlink_to(tmp_path)
        with pytest.raises(ValueError, match="red' is a link that leads out of '.*folder'; remove"):
            path_within(tmp_path / "folder", "red")


def spec(name="car", **settings):
    return AgentSpec(name, 2, Unbounded((3,)), Categorical(2), **settings)


class TestWhereTheyEnter:
    @pytest.mark.parametrize("name", [*LEADING_OUT, *UNSEEN, "a" * 300])
    def test_faulty_names_of_agents_and_groups_raise(self, name):
        with pytest.raises(ConfigError, match="^an agent is named .*; choose a plain word"):
            spec(name)
        with pytest.raises(ConfigError, match="^an agent is named .*; choose a plain word"):
            spec(agent_names=("car_0", name))
        with pytest.raises(ValueError, match="^a group is named .*; choose a plain word"):
            TeamSpec({name: [spec()]})

    @pytest.mark.parametrize("name", LEADING_OUT)
    def test_faulty_agent_names_of_an_environment_raise(self, name):
        env = Arena(2, n_agents=3)
        env.group_map = {"agents": ["agent_0", name, "agent_2"]}
        with pytest.raises(ConfigError, match="^an agent of group 'agents' is named .*: it leads"):
            TeamSpec.from_env(env)

    def test_usual_agent_names_of_libraries_are_kept(self):
        env = Arena(2, n_agents=3)
        env.group_map = {"agents": ["robot 1", "red/0", "red:1"]}
        assert TeamSpec.from_env(env).groups["agents"].agent_names == ("robot 1", "red/0", "red:1")

    @pytest.mark.parametrize("name", [*LEADING_OUT, *UNSEEN, "red/0", ".x", "", 3])
    def test_faulty_names_of_an_external_simulator_raise(self, name):
        with pytest.raises(ConfigError, match=r"^a kind of agents is named .*, expected a word: "):
            Declared.read({name: {"n": 2, "observation": 3, "action": 1}})

    def test_faulty_player_names_of_a_run_raise(self, tmp_path):
        """Names from a stranger's ``players.csv`` and checkpoint."""
        pool = Pool(tmp_path)
        for name in ("../../x", "/etc/x", "a\nb"):
            with pytest.raises(CheckpointError, match="has a player called .*: it "):
                pool.read(name, "")
        (tmp_path / "config.yaml").write_text("env: {library: toy, name: arena}\n")
        with (tmp_path / "players.csv").open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerows([["player", "frames", "kind", "sha256"], ["../x", 0, "snapshot", "0"]])
        with pytest.raises(CheckpointError, match=r"has a player called '\.\./x': it leads out of"):
            stored_players(tmp_path)

    def test_recipe_path_names_a_folder_under_runs(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        config = small_config(folder=None)
        config = dataclasses.replace(config, recipe=f"{tmp_path}/elsewhere/x")
        made = RunFolder.new(config)
        made.release()
        [path] = (tmp_path / "runs").iterdir()
        assert path.resolve() == made.path.resolve()
        assert [one.name for one in tmp_path.iterdir()] == ["runs"]


class TestExports:
    def exported(self, agents, folder):
        return export_agents(agents, folder, "pt2")

    def test_every_agent_is_exported_within_the_folder(self, tmp_path):
        names = ("red/0", ".x", "robot 1:a")
        team = TeamSpec([AgentSpec("car", 3, Unbounded((3,)), Categorical(2), agent_names=names)])
        policy = team_policy(team.groups.values(), make_actor, config=NetworkConfig([4]))
        agents = agents_of(policy)
        for name in ("/somewhere/x", "../../x", "a\0b"):  # of no team that can be built today
            agents[name] = dataclasses.replace(agents["red/0"], name=name)
        folder = tmp_path / "run" / "export"
        made = self.exported(agents, folder)
        assert list(made) == [*names, "/somewhere/x", "../../x", "a\0b"]
        assert {path.parent for path in made.values()} == {folder}
        written = {path for path in tmp_path.rglob("*") if path.is_file()}
        assert len(written) == 2 * len(made) + 1
        assert all(path.is_relative_to(folder) for path in written)
        assert made["red/0"].name == "red%2F0" and made["robot 1:a"].name == "robot 1:a"

    def test_two_agents_in_one_folder_and_links_are_refused(self, tmp_path):
        names = ("red/0", "red%2F0")
        team = TeamSpec([AgentSpec("car", 2, Unbounded((3,)), Categorical(2), agent_names=names)])
        agents = agents_of(make_actor(team.groups["car"]))
        with pytest.raises(ConfigError, match="'red/0' and 'red%2F0' would both be written to"):
            self.exported(agents, tmp_path / "export")
        (tmp_path / "export").mkdir()
        (tmp_path / "export" / "red%2F0").symlink_to(tmp_path)
        with pytest.raises(ConfigError, match="is a link that leads out of .*; remove it"):
            self.exported({"red/0": agents["red/0"]}, tmp_path / "export")
        assert not list(tmp_path.glob("act*"))
