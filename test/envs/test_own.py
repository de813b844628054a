"""Custom environments: by module:Class, by a file, and as an object."""

import shutil
from pathlib import Path

import pytest
import torch

import torchrl_marl
from torchrl_marl.apps.cli.main import main
from torchrl_marl.envs import EnvConfig, VmasEnv, make_env
from torchrl_marl.envs.toy import Arena
from torchrl_marl.errors import ConfigError
from torchrl_marl.recipes import load_config
from torchrl_marl.training.config import read_run_config

pytestmark = pytest.mark.runs

REACH = """
import torch
from tensordict import TensorDict
from torchrl.data import Bounded, Unbounded

from torchrl_marl import AgentSpec
from torchrl_marl.envs import MarlEnv


class Reach(MarlEnv):
    def __init__(self, num_envs, *, n_rovers=2, **kwargs):
        super().__init__(num_envs, **kwargs)
        spec = AgentSpec("rover", n_rovers, Unbounded((1,)), Bounded(-1, 1, (1,)))
        self.n_rovers = n_rovers
        self.register_agent(spec)

    def _reset(self, tensordict):
        self.position = torch.rand(self.num_envs, self.n_rovers, 1)
        return TensorDict({"rover": {"observation": self.position}})

    def _step(self, tensordict):
        self.position = self.position + 0.1 * tensordict["rover", "action"]
        rover = {"observation": self.position, "reward": -self.position.abs()}
        return TensorDict({"rover": rover})


def few(num_envs):
    return Reach(2, max_steps=3)


broken = 3
"""
SMALL = [
    "env.num_envs=4", "env.max_steps=5", "frames_per_batch=20", "total_frames=40",
    "learner.minibatch_size=20", "learner.num_epochs=1", "evaluation.episodes=2",
    "logging.progress=false", "checkpoint.every_iterations=1",
]  # fmt: skip
QUICK = {
    "frames_per_batch": 20, "total_frames": 20, "evaluation": {"episodes": 2},
    "learner": {"minibatch_size": 20, "num_epochs": 1}, "logging": {"progress": False},
}  # fmt: skip


@pytest.fixture
def worlds(tmp_path, monkeypatch):
    """The current directory, with a custom environment."""
    folder = tmp_path / "here"
    folder.mkdir()
    (folder / "my_reach.py").write_text(REACH)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(folder)
    return folder


class TestByName:
    def test_env_settings_of_the_recipe_do_not_apply_to_a_custom_env(self, worlds):
        """Connect Four's recipe has two workers."""
        config = load_config(
            "pettingzoo_connect_four_ippo", ["env.library=my_reach:Reach", "env.max_steps=5"]
        )
        assert (config.env.workers, config.env.state, config.env.max_steps) == (0, None, 5)
        env = make_env(config.env, seed=0, num_envs=2)
        assert env.rollout(2)["rover", "observation"].shape == (2, 2, 2, 1)

    @pytest.mark.parametrize("library", ["my_reach:Reach", "my_reach.py:Reach"])
    def test_custom_env_trains_evaluates_and_resumes(self, library, worlds, capsys, monkeypatch):
        run = worlds / "run"
        texts = [f"env.library={library}", "env.kwargs.n_rovers=3", f"folder={run}", *SMALL]
        assert main(["train", "toy_arena_mappo", *texts]) == 0
        env = read_run_config(run).env
        assert (env.name, env.kwargs) == ("Reach", {"n_rovers": 3})
        for checkpoint in (run / "checkpoints").glob("*2.pt"):
            checkpoint.unlink()
        if library.startswith("my_reach.py"):  # a file is found from anywhere
            monkeypatch.chdir(worlds.parent / "elsewhere")
        assert main(["evaluate", str(run), "--episodes", "3"]) == 0
        assert main(["train", "--resume", str(run)]) == 0
        assert "frames" in capsys.readouterr().out
        assert len((run / "metrics.csv").read_text().splitlines()) == 3

    def test_settings_reach_the_constructor(self, worlds):
        config = EnvConfig(library="my_reach:Reach", max_steps=7, kwargs={"n_rovers": 3})
        env = make_env(config, num_envs=2, seed=4)
        assert (env.num_envs, env.max_steps, env.n_rovers) == (2, 7, 3)
        again = make_env("my_reach.py:Reach", num_envs=2, seed=4, max_steps=7, n_rovers=3)
        assert torch.equal(
            env.reset()["rover", "observation"], again.reset()["rover", "observation"]
        )

    def test_pettingzoo_factory_by_name(self):
        pytest.importorskip("mpe2")
        env = make_env("mpe2.simple_spread_v3:parallel_env", num_envs=2, seed=0, N=2)
        assert env.rollout(3)["agent", "observation"].shape[:3] == (2, 3, 2)

    @pytest.mark.parametrize(
        ("library", "message"),
        [
            ("no_such_module:Reach", "no module 'no_such_module' is installed or in the current"),
            ("none.py:Reach", "there is no file '.*none.py'"),
            ("my_reach:Reech", "has no class or function 'Reech'; did you mean 'Reach'"),
            ("my_reach:broken", "has no class or function 'broken'"),
            ("my_reach:", "expected module:Class"),
            ("my_reach:few", r"returns batch size \[2\], expected .* \[3\]"),
        ],
    )
    def test_invalid_names_raise(self, library, message, worlds):
        with pytest.raises(ConfigError, match=message):
            make_env(EnvConfig(library=library, max_steps=None), num_envs=3)

    def test_file_without_a_class_name_raises(self, worlds):
        with pytest.raises(ConfigError, match=r"such as env\.library=my_reach\.py:MyEnv"):
            load_config("toy_arena_mappo", ["env.library=my_reach.py"])

    def test_setting_that_the_class_does_not_take_raises(self, worlds):
        with pytest.raises(ConfigError, match="env.info is True, but Reach takes no 'info'"):
            make_env("my_reach:Reach", num_envs=2, info=True)

    def test_module_that_fails_to_import_raises(self, worlds):
        (worlds / "my_broken.py").write_text("1 / 0\n")
        with pytest.raises(ConfigError, match="cannot be imported .ZeroDivisionError"):
            make_env("my_broken:Reach", num_envs=2)

    def test_config_is_read_without_importing_the_module(self, worlds):
        (worlds / "my_trap.py").write_text("raise SystemExit('imported')\n")
        assert load_config("toy_arena_mappo", ["env.library=my_trap:Reach"]).env.name == "Reach"
        with pytest.raises(ConfigError, match="no module 'my_trab'"):
            load_config("toy_arena_mappo", ["env.library=my_trab:Reach"])


class TestScenarioFiles:
    @pytest.fixture
    def scenario(self, worlds):
        """A copy of a VMAS scenario in a user's file; it must behave the same."""
        vmas = pytest.importorskip("vmas")
        shutil.copy(Path(vmas.__file__).parent / "scenarios" / "dropout.py", worlds / "mine.py")
        return "mine.py"

    def test_scenario_file_equals_the_named_scenario_bit_for_bit(self, scenario):
        settings = {"num_envs": 3, "seed": 5, "max_steps": 4, "n_agents": 2}
        mine, named = VmasEnv(scenario, **settings), VmasEnv("dropout", **settings)
        torch.manual_seed(0)
        left = mine.rollout(9, break_when_any_done=False)
        torch.manual_seed(0)
        right = named.rollout(9, break_when_any_done=False)
        for key in ("observation", "action"):
            assert torch.equal(left["agents", key], right["agents", key])
        saved = mine.snapshot()
        before = mine.rollout(2, auto_reset=False, tensordict=left[:, -1]["next"].exclude("next"))
        mine.restore(saved)
        assert before.shape == (3, 2)

    def test_scenario_file_resumes_from_another_folder(self, scenario, worlds, monkeypatch):
        run = worlds / "run"
        texts = [f"env.name={scenario}", "env.kwargs.n_agents=2", f"folder={run}", *SMALL]
        assert main(["train", "vmas_balance_mappo", *texts]) == 0
        assert read_run_config(run).env.name == str(worlds / "mine.py")
        monkeypatch.chdir(worlds.parent / "elsewhere")
        assert main(["evaluate", str(run), "--episodes", "2"]) == 0
        for checkpoint in (run / "checkpoints").glob("*2.pt"):
            checkpoint.unlink()
        assert main(["train", "--resume", str(run)]) == 0

    def test_arguments_of_scenario_files_are_checked(self, scenario, worlds):
        with pytest.raises(ConfigError, match="no argument 'n_agent'; did you mean 'n_agents'"):
            load_config("vmas_balance_mappo", [f"env.name={scenario}", "env.kwargs.n_agent=2"])
        (worlds / "empty.py").write_text("")
        with pytest.raises(ConfigError, match="empty.py' has no class Scenario"):
            VmasEnv("empty.py", num_envs=2)
        (worlds / "odd.py").write_text("def (:\n")
        with pytest.raises(ConfigError, match="odd.py' cannot be read"):
            load_config("vmas_balance_mappo", ["env.name=odd.py"])


class TestObjects:
    def test_train_with_the_name_of_an_environment(self, worlds):
        run = torchrl_marl.train(
            "toy_arena_mappo", env="toy/two_step_game", folder="run", **QUICK,
            **{"env.num_envs": 4, "env.max_steps": 5},
        )  # fmt: skip
        assert (run.config.env.library, run.config.env.name) == ("toy", "two_step_game")
        assert run.config.env.kwargs == {}

    def test_pettingzoo_environment_is_copied(self, worlds):
        mpe2 = pytest.importorskip("mpe2.simple_speaker_listener_v4")
        world = mpe2.parallel_env(max_cycles=5)
        run = torchrl_marl.train(
            "toy_arena_mappo", env=world, folder="run", **QUICK, **{"env.num_envs": 4}
        )
        assert run.config.env.num_envs == 4
        assert run.config.env.max_steps is None  # the environment's own limit, not the recipe's
        assert run.summary["frames"] == 20
        assert run.evaluate(episodes=2)["length_mean"] == 5
        loaded = torchrl_marl.training.Run.load(run.folder, env=world)
        assert loaded.evaluate(episodes=2)["return_mean"] == run.evaluate(episodes=2)["return_mean"]

    def test_pettingzoo_modules_and_factories(self):
        mpe2 = pytest.importorskip("mpe2.simple_spread_v3")
        for maker in (mpe2, mpe2.parallel_env, mpe2.env):
            assert make_env(maker, num_envs=2, seed=0).batch_size == (2,)

    def test_environment_that_cannot_be_copied_raises(self):
        mpe2 = pytest.importorskip("mpe2.simple_spread_v3")
        world = mpe2.parallel_env()

        def refuse(memo):
            raise TypeError("cannot pickle a socket")

        world.__deepcopy__ = refuse
        with pytest.raises(ConfigError, match="cannot be copied 32 times .*: cannot pickle a sock"):
            torchrl_marl.train("toy_arena_mappo", env=world, total_frames=640)

    @pytest.mark.parametrize(
        ("env", "message"),
        [
            (3, "the environment is a int, expected a name"),
            (Arena, r"the environment is the class Arena, expected .* YourEnv\(num_envs=64\)"),
            ("balance", "the environment's name is 'balance', expected 'library/environment'"),
            ("vmas/blance", "unknown VMAS scenario 'blance'; did you mean 'balance'"),
            ("gym/x", "env.library is 'gym', expected vmas"),
        ],
    )
    def test_invalid_environment_objects_raise(self, env, message):
        pytest.importorskip("vmas")
        with pytest.raises(ConfigError, match=message):
            torchrl_marl.train("toy_arena_mappo", env=env)


@pytest.mark.parametrize("value", ["yes", "no", 1, None])
def test_non_boolean_continuous_actions_raise(value):
    with pytest.raises(ConfigError, match="continuous_actions is .*, expected True or False"):
        make_env("toy/arena", num_envs=2, continuous_actions=value)
