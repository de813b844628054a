"""Recipes and overrides: which ones are refused, and the messages."""

import pytest
from algorithms import algorithms_with

from torchrl_marl.errors import ConfigError, MissingExtraError
from torchrl_marl.recipes import load_config
from torchrl_marl.runs import check_device

TOY = "toy_arena_mappo"


def refusal(*overrides, recipe=TOY):
    with pytest.raises(ConfigError) as error:
        load_config(recipe, overrides[0] if isinstance(overrides[0], dict) else overrides)
    text = str(error.value)
    assert "\n" not in text
    return text


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
    def test_unknown_key_suggests_correction(self, key, meant):
        text = refusal(f"{key}=1")
        assert text == (
            f"unknown setting '{key}'; did you mean {meant}? "
            "`torchrl-marl list settings` shows all."
        )

    def test_key_below_a_value_is_unknown(self):
        assert refusal("seed.x=1").startswith("unknown setting 'seed.x'; did you mean 'seed'?")

    @pytest.mark.parametrize("key", ["n_agents", "env.n_agents"])
    def test_scenario_argument_suggests_env_kwargs(self, key):
        pytest.importorskip("vmas")
        text = refusal(f"{key}=4", recipe="vmas_balance_mappo")
        assert "did you mean 'env.kwargs.n_agents'?" in text

    def test_unknown_recipe(self):
        with pytest.raises(ConfigError) as error:
            load_config("vmas_balance_mapo")
        assert str(error.value).startswith(
            "unknown recipe 'vmas_balance_mapo'; did you mean 'vmas_balance_mappo'?"
        )

    def test_missing_recipe_file(self, tmp_path):
        with pytest.raises(ConfigError, match="is missing, expected a YAML file"):
            load_config(tmp_path / "none.yaml")
        with pytest.raises(ConfigError, match="is a folder, expected a YAML file"):
            load_config(str(tmp_path))

    def test_invalid_yaml_file(self, tmp_path):
        path = tmp_path / "broken.yaml"
        path.write_text("seed: 1\nenv: {name: [arena\n")
        with pytest.raises(ConfigError, match=r"cannot be read as YAML in line \d") as error:
            load_config(path)
        assert "\n" not in str(error.value)
        path.write_text("- 1\n- 2\n")
        with pytest.raises(ConfigError, match="holds a list, expected settings"):
            load_config(path)

    def test_unknown_scenario_argument(self):
        pytest.importorskip("vmas")
        text = refusal("env.kwargs.n_agent=9", recipe="vmas_balance_mappo")
        assert "has no argument 'n_agent'; did you mean 'n_agents'?" in text

    def test_unknown_scenario(self):
        pytest.importorskip("vmas")
        text = refusal("env.name=balanc", recipe="vmas_balance_mappo")
        assert text.startswith("unknown VMAS scenario 'balanc'; did you mean 'balance'?")
        assert "unknown toy environment 'areno'; did you mean 'arena'?" in refusal("env.name=areno")


class TestTypes:
    @pytest.mark.parametrize(
        ("override", "message"),
        [
            ("seed=x", "seed is 'x', expected an integer, such as 0."),
            ("seed=1.5", "seed is 1.5, expected an integer, such as 0."),
            ("seed=null", "seed is null, expected an integer, such as 0."),
            ("seed=true", "seed is true, expected an integer, such as 0."),
            ("seed=-1", "seed is -1, expected from 0 to 4294967295; use seed=0."),
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
            ("noequals", "'noequals' is not a setting, expected key=value, such as seed=1."),
            ("a..b=1", "'a..b=1' is not a setting, expected key=value, such as seed=1."),
        ],
    )
    def test_wrong_type_is_refused(self, override, message):
        assert refusal(override) == message

    def test_value_that_yaml_cannot_parse(self):
        text = refusal("learner.actor.num_cells=[64")
        assert text.startswith("learner.actor.num_cells is '[64', expected a YAML value")

    def test_value_that_yaml_cannot_represent(self):
        text = refusal({"env.kwargs": {"callback": print}})
        assert text.startswith("env.kwargs.callback cannot be read")

    def test_interpolation_of_unknown_setting(self):
        assert "Interpolation key 'nothing' not found" in refusal("env.name=${nothing}")


class TestValues:
    @pytest.mark.parametrize(
        ("override", "message"),
        [
            (
                "learner.algorithm=mapo",
                f"learner.algorithm is 'mapo', expected {algorithms_with('algorithm')}; "
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
            ("env.num_envs=0", "env.num_envs is 0, expected 1 or more; use env.num_envs=32."),
            (
                "env.library=gym",
                "env.library is 'gym', expected vmas, pettingzoo, jaxmarl, isaaclab, mujoco, "
                "mjlab, foraging, toy or external; their environments have one agent each; for a "
                "team use env=pettingzoo/mpe2/simple_spread_v3.",
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
                "env.state is 'observations', expected null, since toy environments "
                "decide themselves whether they have a state; use env.state=null.",
            ),
        ],
    )
    def test_invalid_value_is_refused(self, override, message):
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
    def test_invalid_choice_is_refused(self, key):
        text = refusal(f"{key}=none_such")
        assert text.startswith(f"{key} is 'none_such', expected ")

    @pytest.mark.parametrize(
        "override",
        ["seed=-1", "threads=0", "evaluation.episodes=-1", "checkpoint.keep=0",
         "checkpoint.every_iterations=-1", "learner.num_epochs=0", "learner.max_grad_norm=0",
         "learner.value_norm_decay=1", "learner.clip_epsilon=0", "env.max_steps=0"],
    )  # fmt: skip
    def test_value_out_of_range_is_refused(self, override):
        assert refusal(override).startswith(override.partition("=")[0] + " is ")

    def test_state_critic_without_env_state_is_refused(self):
        pytest.importorskip("vmas")
        text = refusal("learner.central_input=state", recipe="vmas_balance_mappo")
        assert text.endswith("use env.state=observations.")
        load_config("vmas_balance_mappo", ["learner.central_input=state", "env.state=observations"])

    def test_missing_logging_backend_names_its_extra(self, monkeypatch):
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
        with pytest.raises(MissingExtraError, match=r"pip install '\.\[log\]'"):
            load_config(TOY, ["logging.backends=[wandb]"])

    def test_missing_cuda_device_is_refused(self, monkeypatch):
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
