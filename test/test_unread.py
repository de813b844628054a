"""Unused settings: refused if they are given, dropped if they come from the recipe."""

import dataclasses

import pytest
from algorithms import algorithms_with

from torchrl_marl.errors import ConfigError
from torchrl_marl.recipes import load_config, read_config, recipe_names, save_config
from torchrl_marl.settings import settings_of, shown, unread
from torchrl_marl.training.config import TrainConfig

TOY = "toy_arena_mappo"
SMAX = "jaxmarl_smax_3m_mappo"


def refusal(recipe, *texts):
    with pytest.raises(ConfigError) as error:
        load_config(recipe, texts)
    return str(error.value)


@pytest.mark.parametrize(
    ("recipe", "texts", "where"),
    [
        (TOY, ["env.workers=2"], "env.library is pettingzoo or module:Class"),
        (SMAX, ["env.restart_workers=true"], "env.library is pettingzoo or module:Class"),
        (SMAX, ["env.worker_timeout=5"], "env.library is pettingzoo or module:Class and"),
        ("pettingzoo_ant_ippo", ["env.worker_timeout=5", "env.workers=0"], "workers is not 0"),
        (TOY, ["env.info=true"], "env.library is vmas or pettingzoo or jaxmarl"),
        (TOY, ["env.group_map={a: [agent_0]}"], "env.library is vmas or pettingzoo or jaxmarl"),
        (TOY, ["learner.central_input=team", "learner.algorithm=ippo"], "algorithm is mappo"),
        ("pettingzoo_ant_ippo", ["learner.central_input=state"], "learner.algorithm is mappo"),
        (TOY, ["learner.huber_delta=3", "learner.loss_critic_type=l2"], "is huber"),
        (TOY, ["learner.value_norm=false", "learner.value_norm_decay=0.5"], "value_norm is true"),
        (TOY, ["learner.entropy_coeff=0", "learner.entropy_schedule=linear"], "is not 0"),
        (TOY, ["evaluation.count=4", "evaluation.every_frames=1600"], "evaluation.count is null"),
        (TOY, ["learner.actor.mask_ratio=0.3"], "learner.actor.sharing is masks"),
        (TOY, ["learner.critic.mask_seed=3"], "learner.critic.sharing is masks"),
        (TOY, ["learner.critic.n_clusters=3"], "learner.critic.sharing is clusters"),
        (TOY, ["learner.actor.clustering_frames=30"], "learner.actor.sharing is clusters"),
        (TOY, ["learner.actor.agent_id=embedding"], "learner.actor.sharing is agent_id"),
        (
            TOY,
            ["learner.actor.agent_id_size=4", "learner.actor.sharing=agent_id"],
            "learner.actor.agent_id is embedding",
        ),
        (
            TOY,
            ["learner.algorithm=random", "learner.lr=1"],
            f"learner.algorithm is {algorithms_with('lr')}",
        ),
        (
            TOY,
            ["groups.agents.algorithm=random", "groups.agents.lr=1"],
            f"groups.agents.algorithm is {algorithms_with('lr')}",
        ),
        (
            TOY,
            ["groups.agents.algorithm=ippo", "groups.agents.central_input=team"],
            "groups.agents.algorithm is mappo",
        ),
    ],
)
def test_unused_setting_is_refused(recipe, texts, where):
    text = refusal(recipe, *texts)
    assert "which is read only where " in text
    assert where in text
    key = text.partition(" is ")[0]
    assert text.endswith(f"; leave {key} out.")
    assert any(given.startswith(f"{key}=") for given in texts)


def test_message_for_sharing_index_names_sharing_index():
    assert "sharing=index" in refusal(TOY, "learner.actor.sharing_index=[0,0,1,1]")


@pytest.mark.parametrize(
    ("recipe", "texts"),
    [
        ("pettingzoo_ant_ippo", ["env.worker_timeout=5", "env.restart_workers=true"]),
        ("pettingzoo_ant_ippo", ["env.workers=0", "env.restart_workers=true"]),
        (SMAX, ["env.info=true", "env.group_map={a: [ally_0]}"]),
        (TOY, ["learner.actor.sharing=masks", "learner.actor.mask_ratio=0.3"]),
        (
            TOY,
            [
                "learner.actor.sharing=agent_id",
                "learner.actor.agent_id=embedding",
                "learner.actor.agent_id_size=4",
            ],
        ),
        # The config.yaml of a run has these once its clusters are found.
        (
            TOY,
            [
                "learner.actor.sharing=clusters",
                "learner.actor.n_clusters=3",
                "learner.actor.sharing_index=[0,0,1,2]",
            ],
        ),
        # The group reads the settings under learner.
        (TOY, ["learner.algorithm=random", "learner.lr=1", "groups.agents.algorithm=mappo"]),
        (
            TOY,
            [
                "learner.algorithm=ippo",
                "learner.central_input=team",
                "groups.agents.algorithm=mappo",
            ],
        ),
        # A group of random policies inherits settings that it does not read.
        (TOY, ["groups.agents.algorithm=random", "learner.lr=1"]),
    ],
)
def test_used_settings_are_accepted_and_round_trip(recipe, texts, tmp_path):
    config = load_config(recipe, texts)
    assert unread(config) == {}
    save_config(config, tmp_path / "config.yaml")
    assert load_config(tmp_path / "config.yaml") == config


def test_unused_settings_with_default_values_are_accepted():
    keys = ["env.workers", "env.worker_timeout", "env.info", "env.restart_workers"]
    keys += ["learner.central_input", "learner.actor.mask_ratio", "learner.critic.n_clusters"]
    defaults = {key: settings_of(TrainConfig)[key].default for key in keys}
    texts = [f"{key}={shown(value)}" for key, value in defaults.items()]
    assert load_config(TOY, ["learner.algorithm=ippo", *texts]).learner.algorithm == "ippo"


@pytest.mark.parametrize("name", recipe_names())
def test_recipe_has_no_unused_settings(name):
    assert unread(read_config(name)) == {}


class TestSwitching:
    """Settings of a recipe are dropped if an override makes them unused."""

    def test_changed_algorithm_drops_unused_settings(self):
        config = load_config(SMAX, ["learner.algorithm=ippo"])
        assert config.learner.central_input == "observations"
        assert config.learner.entropy_schedule == "linear"
        assert config.learner == dataclasses.replace(
            load_config(SMAX).learner, algorithm="ippo", central_input="observations"
        )

    def test_changed_library_drops_unused_settings(self):
        config = load_config(
            "pettingzoo_connect_four_ippo", ["env.library=toy", "env.name=nim", "env.max_steps=9"]
        )
        assert (config.env.workers, config.env.group_map, config.env.kwargs) == (0, {}, {})
        config = load_config(
            SMAX, ["env.library=toy", "env.name=arena", "learner.central_input=observations"]
        )
        assert config.env.state is None

    def test_changed_environment_drops_group_map(self):
        pytest.importorskip("vmas")
        assert load_config("vmas_football_mappo").env.group_map
        assert load_config("vmas_football_mappo", ["env.name=wheel"]).env.group_map == {}

    def test_random_algorithm_drops_unused_settings(self):
        config = load_config(TOY, ["learner.algorithm=random"])
        assert unread(config) == {}

    def test_changed_algorithm_drops_unused_settings_of_groups(self, tmp_path):
        path = tmp_path / "mine.yaml"
        path.write_text(
            "env: {library: toy, name: arena}\ngroups: {agents: {central_input: team, lr: 0.5}}\n"
        )
        assert load_config(path).groups == {"agents": {"central_input": "team", "lr": 0.5}}
        assert load_config(path, ["learner.algorithm=ippo"]).groups == {"agents": {"lr": 0.5}}

    def test_setting_unused_by_the_recipe_itself_is_refused(self, tmp_path):
        path = tmp_path / "mine.yaml"
        path.write_text("env: {library: toy, name: arena, workers: 2}\n")
        assert refusal(path).startswith("env.workers is 2")
        assert refusal(path, "seed=1").startswith("env.workers is 2")


def test_env_settings_with_an_environment_object_are_refused():
    import torchrl_marl
    from torchrl_marl.envs.toy import Arena

    with pytest.raises(ConfigError, match="env.max_steps is given with an environment"):
        torchrl_marl.train(TOY, env=Arena(2), **{"env.max_steps": 5})


@pytest.mark.parametrize(
    ("name", "kwargs"),
    [("vmas/dropout", None), ("pettingzoo/gymnasium_robotics/Ant", {"agent_conf": "2x4"})],
)
def test_discrete_actions_of_continuous_environment_are_refused(name, kwargs):
    """VMAS supports both; Ant has continuous actions only."""
    from torchrl_marl.envs import make_env

    if kwargs is None:
        pytest.importorskip("vmas")
        assert make_env(name, num_envs=2, continuous_actions=False).batch_size == (2,)
        return
    pytest.importorskip("gymnasium_robotics")
    with pytest.raises(ConfigError, match="continuous_actions is false, but .* only"):
        make_env(name, num_envs=1, continuous_actions=False, kwargs=kwargs)
