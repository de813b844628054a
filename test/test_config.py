"""Recipes and overrides: what is read, what is refused, and in which words."""

import dataclasses
import sys
from pathlib import Path

import pytest

from torchrl_marl import recipes, runs
from torchrl_marl.envs.toy.library import TOY_WORLDS
from torchrl_marl.errors import CheckpointError, ConfigError, MissingExtraError
from torchrl_marl.recipes import explain, load_config, read_config, recipe_names, save_config
from torchrl_marl.runs import check_device
from torchrl_marl.settings import override
from torchrl_marl.training.config import TrainConfig, read_run_config

TOY = "toy_arena_mappo"


def refusal(*overrides, recipe=TOY):
    with pytest.raises(ConfigError) as error:
        load_config(recipe, overrides[0] if isinstance(overrides[0], dict) else overrides)
    text = str(error.value)
    assert "\n" not in text
    return text


class TestReading:
    def test_a_recipe_by_name_by_path_and_by_value_agree(self, tmp_path):
        by_name = load_config(TOY)
        save_config(by_name, tmp_path / "own.yaml")
        assert load_config(tmp_path / "own.yaml") == by_name
        assert load_config(str(tmp_path / "own.yaml")) == by_name
        assert load_config(by_name) == by_name
        assert load_config(dataclasses.asdict(by_name)) == by_name

    def test_overrides_as_texts_dotted_and_nested_agree(self):
        texts = load_config(TOY, ["seed=3", "learner.lr=1e-3", "learner.actor.num_cells=[8,16]"])
        dotted = load_config(
            TOY, {"seed": 3, "learner.lr": 1e-3, "learner.actor.num_cells": (8, 16)}
        )
        nested = load_config(
            TOY, {"seed": 3, "learner": {"lr": 1e-3, "actor": {"num_cells": [8, 16]}}}
        )
        assert texts == dotted == nested
        assert texts.seed == 3
        assert texts.learner.lr == 1e-3
        assert texts.learner.actor.num_cells == [8, 16]
        assert texts.learner.critic == load_config(TOY).learner.critic

    def test_types_follow_the_schema(self):
        config = load_config(
            TOY, ["total_frames=1e5", "learner.lr=1", "env.max_steps=null", "threads=2"]
        )
        assert config.total_frames == 100_000
        assert isinstance(config.total_frames, int)
        assert config.learner.lr == 1.0
        assert isinstance(config.learner.lr, float)
        assert config.env.max_steps is None
        assert config.threads == 2

    def test_the_result_is_frozen(self):
        with pytest.raises(dataclasses.FrozenInstanceError):
            load_config(TOY).seed = 1

    def test_numbers_of_numpy_are_taken(self):
        np = pytest.importorskip("numpy")
        overrides = {"learner.lr": np.float64(1e-3), "seed": np.int64(2)}
        config = load_config(TOY, overrides)
        assert (config.learner.lr, config.seed) == (1e-3, 2)

    def test_a_setting_may_name_another(self):
        assert load_config(TOY, ["logging.project=run_${seed}"]).logging.project == "run_0"

    def test_arguments_of_the_scenario_are_merged(self):
        pytest.importorskip("vmas")
        config = load_config("vmas_balance_mappo", ["env.kwargs.package_mass=4"])
        assert config.env.kwargs == {"n_agents": 3, "package_mass": 4}

    @pytest.mark.parametrize(
        ("overrides", "kwargs"),
        [
            (["env.name=simple_tag"], {}),
            (["env.name=balance"], {"n_agents": 3}),
            (["env.name=wheel", "env.kwargs.n_agents=2"], {"n_agents": 2}),
            (["env.library=toy", "env.name=arena"], {}),
        ],
    )
    def test_another_scenario_does_not_take_the_arguments_of_the_recipes(self, overrides, kwargs):
        pytest.importorskip("vmas")
        assert load_config("vmas_balance_mappo", overrides).env.kwargs == kwargs

    def test_a_yaml_without_a_name_is_called_by_its_file(self, tmp_path):
        (tmp_path / "mine.yaml").write_text("env: {library: toy, name: arena}\nseed: 4\n")
        config = load_config(tmp_path / "mine.yaml")
        assert (config.recipe, config.seed, config.env.name) == ("mine", 4, "arena")

    def test_an_own_environment_needs_no_installed_world(self, monkeypatch):
        def not_installed(*_):
            raise MissingExtraError("VMAS", "vmas")

        monkeypatch.setattr("torchrl_marl.envs.vmas.library.check_scenario", not_installed)
        with pytest.raises(MissingExtraError, match=r"pip install 'torchrl_marl\[vmas\]'"):
            load_config("vmas_balance_mappo")
        assert load_config("vmas_balance_mappo", own_env=True).env.name == "balance"


class TestSaving:
    def test_a_saved_config_is_complete_explained_and_the_same(self, tmp_path):
        config = load_config(
            TOY,
            {
                "logging.project": "1e-3 # no number",
                "folder": tmp_path / ("with space " * 12),
                "learner.target_kl": 0.02,
                "groups": {"agents": {"lr": 1e-4, "actor": {"num_cells": []}}},
            },
        )
        path = tmp_path / "config.yaml"
        save_config(config, path)
        assert load_config(path) == config
        text = path.read_text()
        assert "gamma: 0.99  # Discount." in text
        for setting in explain():
            assert f"{setting.key.rpartition('.')[2]}:" in text

    def test_a_folder_without_settings_is_no_run(self, tmp_path):
        with pytest.raises(CheckpointError, match="is no run folder: it has no config.yaml"):
            read_run_config(tmp_path)
        with pytest.raises(CheckpointError, match="is not there"):
            read_run_config(tmp_path / "none")
        (tmp_path / "config.yaml").write_text("sed: 1\n")
        with pytest.raises(CheckpointError, match="unknown setting 'sed'; did you mean 'seed'"):
            read_run_config(tmp_path)


class TestUnknown:
    @pytest.mark.parametrize(
        ("key", "meant"),
        [
            ("lr", "'learner.lr'"),
            ("gama", "'learner.gamma'"),
            ("learner.gama", "'learner.gamma'"),
            ("learnr.lr", "'learner.lr'"),
            ("sed", "'seed'"),
            ("num_cells", "'learner.actor.num_cells' or 'learner.critic.num_cells'"),
            ("learner.actr.num_cells", "'learner.actor.num_cells'"),
            ("evaluation.episode", "'evaluation.episodes'"),
            ("groups.agents.lrr", "'groups.agents.lr'"),
            ("groups.agents.actor.activations", "'groups.agents.actor.activation'"),
        ],
    )
    def test_key(self, key, meant):
        text = refusal(f"{key}=1")
        assert text == (
            f"unknown setting '{key}'; did you mean {meant}? "
            "`torchrl-marl list settings` shows all."
        )

    def test_key_inside_a_value(self):
        assert refusal("seed.x=1").startswith("unknown setting 'seed.x'; did you mean 'seed'?")

    @pytest.mark.parametrize("key", ["n_agents", "env.n_agents"])
    def test_key_that_is_an_argument_of_the_scenario(self, key):
        pytest.importorskip("vmas")
        text = refusal(f"{key}=4", recipe="vmas_balance_mappo")
        assert "did you mean 'env.kwargs.n_agents'?" in text

    def test_recipe(self):
        with pytest.raises(ConfigError) as error:
            load_config("vmas_balance_mapo")
        assert str(error.value).startswith(
            "unknown recipe 'vmas_balance_mapo'; did you mean 'vmas_balance_mappo'?"
        )

    def test_file(self, tmp_path):
        with pytest.raises(ConfigError, match="is not there, expected a YAML file"):
            load_config(tmp_path / "none.yaml")
        with pytest.raises(ConfigError, match="is a folder, expected a YAML file"):
            load_config(str(tmp_path))

    def test_broken_file(self, tmp_path):
        path = tmp_path / "broken.yaml"
        path.write_text("seed: 1\nenv: {name: [arena\n")
        with pytest.raises(ConfigError, match=r"cannot be read as YAML in line \d") as error:
            load_config(path)
        assert "\n" not in str(error.value)
        path.write_text("- 1\n- 2\n")
        with pytest.raises(ConfigError, match="holds a list, expected settings"):
            load_config(path)

    def test_leftover_argument_of_the_scenario(self):
        pytest.importorskip("vmas")
        text = refusal("env.kwargs.n_agent=9", recipe="vmas_balance_mappo")
        assert "has no argument 'n_agent'; did you mean 'n_agents'?" in text

    def test_scenario(self):
        pytest.importorskip("vmas")
        text = refusal("env.name=balanc", recipe="vmas_balance_mappo")
        assert text.startswith("unknown VMAS scenario 'balanc'; did you mean 'balance'?")
        assert "unknown toy world 'areno'; did you mean 'arena'?" in refusal("env.name=areno")


class TestTypes:
    @pytest.mark.parametrize(
        ("override", "message"),
        [
            ("seed=x", "seed is 'x', expected an integer, such as 0."),
            ("seed=1.5", "seed is 1.5, expected an integer, such as 0."),
            ("seed=null", "seed is null, expected an integer, such as 0."),
            ("seed=true", "seed is true, expected an integer, such as 0."),
            ("learner.lr=fast", "learner.lr is 'fast', expected a number, such as 0.0005."),
            ("learner.target_kl=x", "learner.target_kl is 'x', expected a number or null."),
            (
                "learner.value_norm=3.5",
                "learner.value_norm is 3.5, expected true or false, such as true.",
            ),
            (
                "learner.actor.num_cells=3",
                "learner.actor.num_cells is 3, expected a list of integers, such as [64, 64].",
            ),
            (
                "learner.actor.num_cells=[a]",
                "learner.actor.num_cells is ['a'], expected a list of integers, such as [64, 64].",
            ),
            (
                "learner=3",
                "learner is 3, expected settings under it; "
                "set one of them, such as learner.algorithm.",
            ),
            ("env.kwargs=3", "env.kwargs is 3, expected key: value pairs."),
            ("groups.agents.lr=x", "groups.agents.lr is 'x', expected a number, such as 0.0005."),
            (
                "groups.agents=3",
                "groups.agents is 3, expected settings under it; "
                "set one of them, such as groups.agents.lr.",
            ),
            ("noequals", "'noequals' is no setting, expected key=value, such as seed=1."),
            ("a..b=1", "'a..b=1' is no setting, expected key=value, such as seed=1."),
        ],
    )
    def test_message(self, override, message):
        assert refusal(override) == message

    def test_a_value_that_yaml_cannot_read(self):
        text = refusal("learner.actor.num_cells=[64")
        assert text.startswith("learner.actor.num_cells is '[64', expected a value as YAML")

    def test_a_value_that_yaml_cannot_hold(self):
        text = refusal({"env.kwargs": {"callback": print}})
        assert text.startswith("env.kwargs.callback cannot be read")

    def test_a_setting_that_names_none(self):
        assert "Interpolation key 'nothing' not found" in refusal("env.name=${nothing}")


class TestValues:
    @pytest.mark.parametrize(
        ("override", "message"),
        [
            (
                "learner.algorithm=mapo",
                "learner.algorithm is 'mapo', expected mappo, ippo, maddpg, "
                "iddpg, matd3, itd3, masac, isac or random; "
                "did you mean 'mappo'? use learner.algorithm=mappo.",
            ),
            (
                "learner.gamma=1.5",
                "learner.gamma is 1.5, expected from 0 to 1; use learner.gamma=0.99.",
            ),
            (
                "learner.lmbda=-1",
                "learner.lmbda is -1.0, expected from 0 to 1; use learner.lmbda=0.95.",
            ),
            ("learner.lr=0", "learner.lr is 0.0, expected above 0; use learner.lr=0.0005."),
            ("learner.lr=.nan", "learner.lr is nan, expected above 0; use learner.lr=0.0005."),
            (
                "groups.agents.gamma=2",
                "groups.agents.gamma is 2.0, expected from 0 to 1; use groups.agents.gamma=0.99.",
            ),
            (
                "device=gpu",
                "device is 'gpu', expected 'cpu', 'cuda' or 'cuda:1'; use device=cpu.",
            ),
            (
                "frames_per_batch=650",
                "frames_per_batch is 650, expected a multiple of env.num_envs, 32; "
                "use frames_per_batch=640.",
            ),
            (
                "total_frames=32",
                "total_frames is 32, expected at least frames_per_batch, 640; "
                "raise the first or lower the second.",
            ),
            (
                "learner.minibatch_size=1000",
                "learner.minibatch_size is 1000, expected at most frames_per_batch, 640; "
                "use learner.minibatch_size=640.",
            ),
            ("env.num_envs=0", "env.num_envs is 0, expected 1 or more; use env.num_envs=64."),
            (
                "env.library=gym",
                "env.library is 'gym', expected vmas, pettingzoo, jaxmarl, isaaclab or toy; "
                "use env.library=vmas.",
            ),
            (
                "learner.actor.num_cells=[0]",
                "learner.actor.num_cells is [0], expected widths of 1 or more; "
                "use learner.actor.num_cells=[64,64].",
            ),
            (
                "logging.backends=[tensorbord]",
                "logging.backends holds 'tensorbord', expected any of tensorboard, wandb, mlflow; "
                "did you mean 'tensorboard'? use logging.backends=[tensorboard].",
            ),
            (
                "env.state=observations",
                "env.state is 'observations', expected null, since toy worlds have a state of "
                "their own; use env.state=null.",
            ),
        ],
    )
    def test_message(self, override, message):
        assert refusal(override) == message

    @pytest.mark.parametrize(
        "key",
        [
            "learner.central_input",
            "learner.actor.activation",
            "learner.critic.activation",
            "learner.bootstrap",
            "learner.lr_schedule",
            "learner.entropy_schedule",
            "learner.loss_critic_type",
            "learner.normalize_advantage",
            "groups.agents.bootstrap",
        ],
    )
    def test_every_choice_is_checked(self, key):
        text = refusal(f"{key}=none_such")
        assert text.startswith(f"{key} is 'none_such', expected ")

    @pytest.mark.parametrize(
        "override",
        ["seed=-1", "threads=0", "evaluation.episodes=0", "checkpoint.keep=0",
         "checkpoint.every_iterations=-1", "learner.num_epochs=0", "learner.max_grad_norm=0",
         "learner.value_norm_decay=1", "learner.clip_epsilon=0", "env.max_steps=0"],
    )  # fmt: skip
    def test_every_range_is_checked(self, override):
        assert refusal(override).startswith(override.partition("=")[0] + " is ")

    def test_a_central_critic_needs_the_state_that_it_is_to_see(self):
        pytest.importorskip("vmas")
        text = refusal("learner.central_input=state", recipe="vmas_balance_mappo")
        assert text.endswith("use env.state=observations.")
        load_config("vmas_balance_mappo", ["learner.central_input=state", "env.state=observations"])

    def test_a_missing_backend_names_its_extra(self, monkeypatch):
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
        with pytest.raises(MissingExtraError, match=r"pip install 'torchrl_marl\[log\]'"):
            load_config(TOY, ["logging.backends=[wandb]"])

    def test_a_cuda_device_that_is_not_there(self, monkeypatch):
        torch = pytest.importorskip("torch")
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        config = load_config(TOY, ["device=cuda"])
        with pytest.raises(ConfigError, match=r"'cuda', but torch finds no CUDA .* device=cpu"):
            check_device(config)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
        check_device(config)
        with pytest.raises(ConfigError, match="but torch finds cuda:0, cuda:1 here"):
            check_device(load_config(TOY, ["device=cuda:2"]))
        check_device(load_config(TOY))


class TestGroups:
    def test_a_group_differs_in_what_it_says_and_in_nothing_else(self):
        config = load_config(TOY, ["groups.agents.lr=2", "groups.agents.actor.num_cells=[8]"])
        assert config.groups == {"agents": {"lr": 2.0, "actor": {"num_cells": [8]}}}
        learner = override(config, "groups", "agents")
        assert learner.lr == 2.0
        assert learner.actor.num_cells == [8]
        assert learner.actor.activation == config.learner.actor.activation
        assert (
            dataclasses.replace(learner, lr=config.learner.lr, actor=config.learner.actor)
            == config.learner
        )
        assert override(config, "groups", "another") == config.learner


class TestHelp:
    def test_every_setting_is_explained(self):
        for setting in explain():
            assert len(setting.help) > 5, setting.key

    def test_values_of_a_recipe(self):
        values = {s.key: s.default for s in explain(read_config(TOY, ["seed=7"]))}
        assert values["seed"] == 7
        assert values["env.name"] == "arena"
        assert "env.kwargs" in values

    def test_the_worlds_that_are_named_are_there(self):
        toy = pytest.importorskip("torchrl_marl.envs.toy")
        assert sorted(toy.TOY_ENVS) == sorted(TOY_WORLDS)

    def test_the_activations_that_are_named_are_there(self):
        bodies = pytest.importorskip("torchrl_marl.modules.bodies")
        for name in bodies.ACTIVATIONS:
            load_config(TOY, [f"learner.actor.activation={name}"])


class TestDoors:
    @pytest.fixture
    def trainer(self, monkeypatch, tmp_path):
        import types

        calls = []
        run = types.SimpleNamespace(folder=tmp_path, summary={})

        def train(config, env=None):
            calls.append((config, env))
            return run

        fake = types.SimpleNamespace(train=train, iterate=train)
        monkeypatch.setitem(sys.modules, "torchrl_marl.training.trainer", fake)
        monkeypatch.setattr("torchrl_marl.training.trainer", fake, raising=False)
        monkeypatch.setattr(runs, "draw", lambda folder: None)
        return calls

    def test_train_hands_on_config_and_env(self, trainer, tmp_path):
        import torchrl_marl
        from torchrl_marl.envs.toy import games as toy

        env = toy.Arena(2)
        run = torchrl_marl.train(TOY, env=env, seed=5, learner={"lr": 1e-3})
        assert run.folder == tmp_path
        config, handed = trainer[0]
        assert handed is env
        assert (config.seed, config.learner.lr) == (5, 1e-3)

    def test_env_settings_may_be_given_as_env(self, trainer):
        runs.train(TOY, env={"num_envs": 4})
        config, handed = trainer[0]
        assert handed is None
        assert config.env.num_envs == 4

    def test_iterate_refuses_at_the_call(self, trainer):
        with pytest.raises(ConfigError, match="unknown setting 'sed'"):
            runs.iterate(TOY, sed=1)
        assert trainer == []

    def test_the_default_recipe_is_there(self):
        assert recipes.DEFAULT_RECIPE in recipe_names()
        assert isinstance(read_config(recipes.DEFAULT_RECIPE), TrainConfig)
        assert Path(recipes.__file__).with_name("configs").is_dir()
