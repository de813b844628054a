"""Typical mistakes of new users: each raises one sentence with a fix that works."""

import re
from operator import attrgetter
from types import SimpleNamespace

import pytest
import torch
from tensordict import TensorDict

import torchrl_marl
from torchrl_marl import TeamSpec
from torchrl_marl.apps.cli import main as cli
from torchrl_marl.envs import make_env
from torchrl_marl.envs.torchrl.env import check_environment
from torchrl_marl.envs.toy import Arena
from torchrl_marl.errors import ConfigError, SpecError, UserError
from torchrl_marl.learners.algorithms import ALGORITHMS
from torchrl_marl.modules import make_actor, make_critic
from torchrl_marl.objectives import MAPPOLoss
from torchrl_marl.objectives.estimator import policy_ratio
from torchrl_marl.recipes import load_config, read_config, recipe_names
from torchrl_marl.settings.layers import UNFIT, converted

TOY = "toy_arena_mappo"
BALANCE = "vmas_balance_mappo"


def sentence(recipe, *settings):
    with pytest.raises(UserError) as error:
        load_config(recipe, settings)
    assert "\n" not in str(error.value)
    return str(error.value)


def said_by(capsys, *arguments):
    """The single line of error output of the command line."""
    capsys.readouterr()
    assert cli.main(list(arguments)) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line.removeprefix("torchrl-marl: error: ")


class TestListsOfWords:
    @pytest.mark.parametrize(
        ("text", "expected"),
        [
            ("tensorboard", ["tensorboard"]),
            ("tensorboard,tensorboard", ["tensorboard", "tensorboard"]),
            ("[tensorboard]", ["tensorboard"]),
            ("[]", []),
        ],
    )
    def test_single_and_comma_separated_values_become_a_list(self, text, expected):
        pytest.importorskip("tensorboard")
        assert load_config(TOY, [f"logging.backends={text}"]).logging.backends == expected
        if "[" not in text:
            given = {"logging": {"backends": text}}
            assert load_config(TOY, given).logging.backends == expected

    def test_comma_separated_values_for_another_list_setting(self):
        read = read_config(TOY, ["league.start_with=runs/a, runs/b"])
        assert read.league.start_with == ["runs/a", "runs/b"]

    def test_misspelled_list_entry_suggests_correction(self):
        assert sentence(TOY, "logging.backends=tensorbord").endswith(
            "did you mean 'tensorboard'? use logging.backends=[tensorboard]."
        )
        assert sentence(TOY, "logging.backends=mlfow").endswith("use logging.backends=[mlflow].")

    @pytest.mark.parametrize("text", ["", "a,,b", ",", "[a", "a]", "{a}"])
    def test_malformed_list_is_refused(self, text):
        assert converted(list[str], text) is UNFIT

    def test_single_number_is_no_list_of_integers(self):
        text = sentence(TOY, "learner.actor.num_cells=128")
        assert text.endswith("is 128, expected a list of integers, such as [64, 64].")


class TestSettings:
    @pytest.mark.parametrize(
        ("recipe", "given", "meant"),
        [
            (TOY, "learner.hidden_size", ["learner.actor.num_cells", "learner.critic.num_cells"]),
            (TOY, "hidden_size", ["learner.actor.num_cells", "learner.critic.num_cells"]),
            (TOY, "learner.critic.hidden_dim", ["learner.critic.num_cells"]),
            ("toy_arena_qmix", "learner.hidden_size", ["learner.actor.num_cells"]),
            ("toy_arena_qmix", "learner.mixer.hiden", ["learner.mixer.hidden"]),
            (
                "vmas_balance_matd3",
                "learner.hidden_sizes",
                ["learner.actor.num_cells", "learner.critic.num_cells"],
            ),
            ("vmas_balance_matd3", "actor_learning", ["learner.actor_lr"]),
            (TOY, "learning_rate", ["learner.lr"]),
            (TOY, "learner.learning_rate", ["learner.lr"]),
            ("toy_arena_qmix", "learner.learning_rate", ["learner.lr"]),
            (
                "toy_echo_rmaddpg",
                "learner.learning_rate",
                ["learner.actor_lr", "learner.critic_lr"],
            ),
            (TOY, "num_env", ["env.num_envs"]),
            (BALANCE, "n_agents", ["env.kwargs.n_agents"]),
            (BALANCE, "n_agent", ["env.kwargs.n_agents"]),
        ],
    )
    def test_unknown_key_suggests_setting_of_the_algorithm(self, recipe, given, meant):
        text = sentence(recipe, f"{given}=4")
        assert re.findall(r"'([^']+)'", text.partition("; ")[2]) == meant
        known = load_config(recipe)
        for name in meant:
            if "kwargs" not in name:
                attrgetter(name)(known)  # it is there, with this recipe's algorithm

    def test_unknown_key_in_python_suggests_setting(self):
        with pytest.raises(ConfigError, match="did you mean 'env.num_envs'"):
            torchrl_marl.train(TOY, num_env=4)


class TestAlgorithms:
    @pytest.mark.parametrize(
        ("word", "settings"),
        [
            ("ppo", "learner.algorithm=mappo"),
            ("PPO", "learner.algorithm=mappo"),
            ("sac", "learner.algorithm=masac"),
            ("td3", "learner.algorithm=matd3"),
            ("ddpg", "learner.algorithm=maddpg"),
            ("facmac", "learner.algorithm=maddpg learner.mixer.kind=monotonic"),
            ("rmappo", "learner.algorithm=mappo learner.actor.memory=gru"),
            ("impala", "learner.algorithm=mappo learner.estimator=vtrace"),
        ],
    )
    def test_algorithm_name_of_other_library_suggests_equivalent(self, word, settings):
        text = sentence(BALANCE, f"learner.algorithm={word}")
        assert text.startswith(f"learner.algorithm is '{word}', expected mappo, ippo, ")
        assert text.endswith(f": use {settings}.")
        window = ["learner.window=20"] if "memory" in settings else []
        load_config(BALANCE, [*settings.split(), *window])

    def test_dqn_suggests_iql(self):
        assert sentence(TOY, "learner=dqn").endswith(": use learner.algorithm=iql.")
        load_config(TOY, ["learner.algorithm=iql"])

    def test_suggestion_for_algorithm_of_a_group(self):
        text = sentence(TOY, "groups.agents.algorithm=facmac")
        use = "groups.agents.algorithm=maddpg groups.agents.mixer.kind=monotonic"
        assert text.endswith(f": use {use}.")

    def test_known_algorithms_have_no_advice(self):
        assert all(ALGORITHMS.advice(name) is None for name in ALGORITHMS.names())

    def test_misspelled_algorithm_suggests_correction(self):
        text = sentence(TOY, "learner.algorithm=mapo")
        assert text.endswith("did you mean 'mappo'? use learner.algorithm=mappo.")
        text = sentence(TOY, "learner.algorithm=qmixx")
        assert text.endswith("did you mean 'qmix'? use learner.algorithm=qmix.")


class TestWorlds:
    @pytest.mark.parametrize("word", ["smac", "smax", "SMACv2"])
    def test_smac_suggests_smax(self, word):
        world = "jaxmarl/HeuristicEnemySMAX"
        assert sentence(TOY, f"env.library={word}").endswith(f"as SMAX: use env={world}.")
        with pytest.raises(ConfigError, match=f"as SMAX: use env={world}"):
            make_env(f"{word}/3m")
        with pytest.raises(ConfigError, match=f"as SMAX: use env={world}"):
            torchrl_marl.train(TOY, env=f"{word}/3m")
        read = read_config("jaxmarl_smax_3m_mappo", [f"env={world}"])
        assert read == read_config("jaxmarl_smax_3m_mappo")

    def test_other_library_names_suggest_environment(self):
        pytest.importorskip("mpe2")
        text = sentence(TOY, "env.library=mpe")
        assert text.endswith("use env=pettingzoo/mpe2/simple_spread_v3.")
        env = load_config(TOY, ["env=pettingzoo/mpe2/simple_spread_v3"]).env
        assert (env.library, env.name) == ("pettingzoo", "mpe2/simple_spread_v3")
        assert "env=mujoco/ant." in sentence(TOY, "env.library=mamujoco")
        assert "foraging/rware-tiny-4ag." in sentence(TOY, "env.library=rware")
        assert "their environments have one agent each" in sentence(TOY, "env.library=gymnasium")

    def test_env_setting_selects_library_and_name(self):
        pytest.importorskip("vmas")
        config = load_config(BALANCE, ["env=vmas/wheel", "env.num_envs=60"])
        assert (config.env.library, config.env.name, config.env.num_envs) == ("vmas", "wheel", 60)
        assert config == load_config(BALANCE, ["env.name=wheel", "env.num_envs=60"])
        assert config == load_config(BALANCE, {"env": {"library": "vmas/wheel", "num_envs": 60}})
        assert load_config(BALANCE, ["env=vmas/balance"]) == load_config(BALANCE)

    def test_changed_library_resets_max_steps_and_kwargs(self):
        pytest.importorskip("mpe2")
        config = load_config(TOY, ["env=pettingzoo/mpe2/simple_spread_v3"])
        assert config.env.max_steps is None and config.env.kwargs == {}
        given = ["env=pettingzoo/mpe2/simple_spread_v3", "env.max_steps=7"]
        assert load_config(TOY, given).env.max_steps == 7

    def test_conflicting_environments_are_refused(self):
        text = sentence(BALANCE, "env=vmas/wheel", "env.name=flocking")
        assert "env.name 'flocking', which are two environments; leave one out" in text

    def test_yaml_file_selects_env_by_library_and_name(self, tmp_path):
        pytest.importorskip("vmas")
        path = tmp_path / "mine.yaml"
        path.write_text("env: vmas/wheel\n", encoding="utf-8")
        env = load_config(path).env
        assert (env.library, env.name, env.max_steps) == ("vmas", "wheel", 100)

    def test_module_name_suggests_custom_environment(self, tmp_path, monkeypatch):
        pytest.importorskip("vmas")
        pytest.importorskip("pettingzoo")
        (tmp_path / "my_world.py").write_text("raise SystemExit('imported')\n", encoding="utf-8")
        monkeypatch.chdir(tmp_path)
        use = "a custom environment is a library: use env.library=my_world:"
        assert f"{use}MyEnv;" in sentence(BALANCE, "env.name=my_world")
        assert f"{use}Reach;" in sentence(BALANCE, "env.name=my_world:Reach")
        assert f"{use}MyEnv;" in sentence(TOY, "env.name=my_world")
        read = load_config(TOY, {"env.library": "pettingzoo", "env.name": "my_world"})
        with pytest.raises(ConfigError, match=f"{use}MyEnv;"):
            make_env(read.env, num_envs=1)
        text = sentence(BALANCE, "env.library=my_world")
        assert text.endswith("after the module, such as env.library=my_world:MyEnv.")
        with pytest.raises(ConfigError, match="'my_world:MyEnv' for a class in that module"):
            torchrl_marl.train(TOY, env="my_world")
        assert "a custom environment" not in sentence(BALANCE, "env.name=no_such_module")

    @pytest.mark.parametrize("recipe", [TOY, BALANCE])
    def test_text_for_integer_argument_names_the_argument(self, recipe):
        pytest.importorskip("vmas")
        world = {TOY: "toy/arena", BALANCE: "vmas/balance"}[recipe]
        with pytest.raises(ConfigError) as error:
            make_env(world, num_envs=2, n_agents="abc")
        found = re.fullmatch(
            r"env\.kwargs\.n_agents is 'abc', expected an integer; use (\S+)=(\d+)\.",
            str(error.value),
        )
        assert found and found[1] == "env.kwargs.n_agents"
        assert make_env(world, num_envs=2, n_agents=int(found[2])).batch_size == (2,)

    def test_misspelled_boolean_argument_is_refused(self):
        pytest.importorskip("vmas")
        text = sentence("vmas_navigation_mappo", "env.kwargs.shared_rew=fasle")
        assert "env.kwargs.shared_rew is 'fasle', expected true or false" in text

    def test_wrong_argument_is_named_with_the_librarys_error(self):
        pytest.importorskip("mpe2")
        with pytest.raises(ConfigError, match=r"cannot be built with env\.kwargs\.N='abc' \("):
            make_env("pettingzoo/mpe2/simple_spread_v3", N="abc", max_cycles=9)


class TestOneAgent:
    """Single-agent environments of Gymnasium and TorchRL."""

    WORDS = "write a team of one as a MarlEnv"

    def test_single_agent_torchrl_env_is_refused(self):
        gymnasium = pytest.importorskip("gymnasium")
        from torchrl.envs import GymEnv, GymWrapper

        for env in (GymEnv("CartPole-v1"), GymWrapper(gymnasium.make("CartPole-v1"))):
            for take in (make_env, TeamSpec.from_env, lambda env: torchrl_marl.train(TOY, env=env)):
                with pytest.raises(SpecError, match=self.WORDS) as error:
                    take(env)
                assert isinstance(error.value, ValueError)  # as it was

    def test_single_agent_gymnasium_env_is_refused(self):
        gymnasium = pytest.importorskip("gymnasium")
        env = gymnasium.make("CartPole-v1")
        with pytest.raises(
            ConfigError, match=f"a Gymnasium environment of one agent.*{self.WORDS}"
        ):
            check_environment(env)
        for given in (env, type(env.unwrapped), lambda: gymnasium.make("CartPole-v1")):
            with pytest.raises(ConfigError, match=self.WORDS):
                make_env(given, num_envs=2)


class TestRecipes:
    @pytest.mark.parametrize("given", ["vmas/balance", "balance"])
    def test_environment_instead_of_recipe_suggests_its_recipe(self, given, capsys):
        pytest.importorskip("vmas")
        line = said_by(capsys, "train", given)
        assert line == (
            f"'{given}' is an environment, expected a recipe; use a recipe for it, such as "
            "vmas_balance_mappo, or add env=vmas/balance to another recipe."
        )
        with pytest.raises(ConfigError, match="such as vmas_balance_mappo"):
            torchrl_marl.train(given)

    def test_environment_without_recipe_suggests_env_override(self, capsys):
        pytest.importorskip("vmas")
        line = said_by(capsys, "train", "vmas/passage")
        assert line.endswith("; add env=vmas/passage to a recipe, such as vmas_balance_mappo.")
        load_config(BALANCE, ["env=vmas/passage"])
        assert "did you mean 'balance'?" in said_by(capsys, "train", "vmas/blance")

    def test_algorithm_instead_of_recipe_suggests_a_recipe(self, capsys):
        line = said_by(capsys, "train", "mappo")
        assert "'mappo' is an algorithm, expected a recipe; use a recipe with it" in line
        assert (
            "such as vmas_balance_mappo, or add learner.algorithm=mappo to another recipe." in line
        )
        for command in (["tune", "mappo", "learner.lr=1e-4..1e-3"], ["list", "settings", "mappo"]):
            assert "'mappo' is an algorithm" in said_by(capsys, *command)
        with pytest.raises(ConfigError, match="'mappo' is an algorithm"):
            torchrl_marl.train("mappo")
        (name,) = re.findall(r"such as (\w+), or", sentence("qmix"))
        assert load_config(name).learner.algorithm == "qmix"
        assert not set(ALGORITHMS.names()) & set(recipe_names())

    def test_foreign_algorithm_instead_of_recipe_suggests_both(self):
        text = sentence("ppo")
        assert "such as vmas_balance_mappo; PPO for a team is mappo" in text
        assert text.endswith(": use learner.algorithm=mappo with it.")

    def test_recipe_after_settings_is_refused(self, capsys):
        line = said_by(capsys, "train", "env.num_envs=4", BALANCE, "seed=1")
        assert line.endswith(f"expected before all settings; use {BALANCE} env.num_envs=4 seed=1.")
        line = said_by(capsys, "tune", "learner.lr=1e-4..1e-3", BALANCE)
        assert line.endswith(f"use {BALANCE} learner.lr=1e-4..1e-3.")
        line = said_by(capsys, "train", BALANCE, TOY)
        assert line == f"'{TOY}' is a second recipe, expected one; drop one."
        assert "'nonsense' is not a setting" in said_by(capsys, "train", "seed=1", "nonsense")


class TestLogProbability:
    """Batches of TorchRL, whose log-probability has another key."""

    def ratio(self, key, named=("agents", "action_log_prob")):
        batch = TensorDict({"agents": TensorDict({"action": torch.zeros(2, 3)}, [2, 3])}, [2])
        if key is not None:
            batch[key] = torch.zeros(2, 3)
        unit = torch.distributions.Normal(torch.zeros(2, 3), 1.0)
        actor = SimpleNamespace(get_dist=lambda batch: unit)
        return policy_ratio(actor, batch, action=("agents", "action"), sample_log_prob=named)

    @pytest.mark.parametrize("key", [("agents", "sample_log_prob"), "sample_log_prob"])
    def test_error_suggests_log_prob_key_that_works(self, key):
        with pytest.raises(KeyError) as error:
            self.ratio(key)
        assert f"use loss.set_keys(sample_log_prob={key!r})." in error.value.args[0]
        assert self.ratio(key, named=key)[2].shape == (2, 3, 1)

    def test_missing_log_prob_raises(self):
        with pytest.raises(KeyError, match="let the actor write it"):
            self.ratio(None)

    def test_loss_with_set_log_prob_key_is_finite(self):
        env = Arena(4, seed=0)
        group = TeamSpec.from_env(env).groups["agents"]
        actor = make_actor(group)
        batch = env.rollout(8, actor, break_when_any_done=False).detach()
        batch["agents", "sample_log_prob"] = batch["agents"].pop("action_log_prob")
        loss = MAPPOLoss(actor, make_critic(group), group=group)
        with pytest.raises(KeyError, match=r"use loss\.set_keys\(sample_log_prob=\('agents', "):
            loss(batch)
        loss.set_keys(sample_log_prob=("agents", "sample_log_prob"))
        assert loss(batch)["loss_objective"].isfinite()
