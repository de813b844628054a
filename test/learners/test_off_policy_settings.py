"""Settings of off-policy algorithms."""

import pytest
from algorithms import algorithms_with

import torchrl_marl
from torchrl_marl import TeamSpec
from torchrl_marl.apps.cli import main as cli
from torchrl_marl.collectors import RolloutCollector
from torchrl_marl.envs.toy import Arena
from torchrl_marl.errors import ConfigError
from torchrl_marl.learners.off_policy_config import OffPolicyConfig, ReplayConfig, ValueConfig
from torchrl_marl.learners.value_learner import ValueLearner
from torchrl_marl.recipes import load_config, read_config
from torchrl_marl.settings import override, read_by_others, settings_of

TAG = "vmas_simple_tag_mappo"


def refusal(*texts):
    with pytest.raises(ConfigError) as error:
        load_config(TAG, texts)
    return str(error.value)


def test_group_with_other_algorithm_inherits_common_settings():
    config = load_config(TAG, ["groups.agent=maddpg", "learner.actor.num_cells=[32]"])
    learner = override(config, "groups", "agent")
    assert isinstance(learner, OffPolicyConfig)
    assert learner.gamma == 0.95 and learner.actor.num_cells == [32]  # of recipe and override
    assert learner.minibatch_size == 256 and learner.adam_eps == 1e-8  # off-policy defaults
    assert config.learner.algorithm == "mappo" and config.learner.lmbda == 0.9


def test_settings_of_other_algorithms_raise():
    assert refusal("learner=maddpg", "learner.lmbda=0.5") == (
        "learner.lmbda is 0.5, which is read only where learner.algorithm is "
        "mappo, ippo, happo or pqn; "
        "leave learner.lmbda out."
    )
    assert f"learner.algorithm is {algorithms_with('tau')}" in refusal("learner.tau=0.5")
    assert f"groups.agent.algorithm is {algorithms_with('lr')}" in refusal(
        "groups.agent=maddpg", "groups.agent.lr=0.1"
    )
    for own, other in (("sigma", "exploration.sigma"), ("saturation", "saturation_coeff")):
        assert "algorithm is not isac or masac" in refusal(
            "learner=masac", f"learner.{other}=0.1"
        ), own
    assert "learner.algorithm is isac or masac" in refusal("learner=maddpg", "learner.alpha_lr=0.1")
    for text in ("lr_schedule=linear", "mixer.kind=sum", "alpha_init=1", "critic.sharing=group"):
        assert "which is read only where" in refusal("learner=qmix", f"learner.{text}")  # defaults
    known = settings_of(load_config(TAG, ["learner=matd3"]).learner)
    assert "tau" in known and not {"lr", "num_epochs", "entropy_coeff"} & set(known)


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["learner=maddpg", "learner.target_noise=0.3"], "learner.algorithm is itd3 or matd3"),
        (["learner=iddpg", "learner.central_input=team"], "algorithm is maddpg or matd3 or masac"),
        (
            ["learner=maddpg", "learner.learning_starts=288000"],
            "learner.learning_starts is 288000, expected less than total_frames, 288000, or "
            "nothing is learned; use learner.learning_starts=28800.",
        ),
        (
            ["learner=maddpg", "learner.replay.capacity=100"],
            "learner.minibatch_size is 256, expected at most learner.replay.capacity, 100; "
            "use learner.replay.capacity=256.",
        ),
        (
            ["learner=itd3", "learner.critic.architecture=set"],
            "learner.critic.architecture is 'set'",
        ),
        (
            ["learner=maddpg", "learner.mixer.kind=sum", "learner.bootstrap=agent"],
            "learner.bootstrap is 'agent', but learner.mixer.kind is 'sum', which mixes a group's "
            "per-agent critics into one value; use learner.bootstrap=team, or "
            "learner.mixer.kind=none.",
        ),
        (["learner=iddpg", "learner.mixer.kind=sum"], "learner.algorithm is maddpg or matd3"),
        (["learner=maddpg", "learner.mixer.hidden=8"], "learner.mixer.kind is monotonic"),
        (["learner=maddpg", "learner.updates_per_frame=0"], "learner.updates_per_frame is 0"),
        (
            ["learner=maddpg", "learner.updates_per_frame=1e-9"],
            "learner.updates_per_frame is 1e-09, expected at least 3.6e-06, one update in the "
            "278,400 frames after learner.learning_starts, or nothing is learned; use "
            "learner.updates_per_frame=0.1.",
        ),
        (["learner=maddpg", "learner.central_input=state"], "use env.state=observations"),
    ],
)
def test_invalid_settings_raise(texts, message):
    assert message in refusal(*texts)


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (
            ["learner=qmix", "learner.bootstrap=agent"],
            "learner.bootstrap is 'agent', but qmix has one value for all agents, expected 'team'; "
            "use learner.bootstrap=team, or learner.algorithm=iql.",
        ),
        (["learner=vdn", "learner.mixer.hidden=8"], "read only where learner.algorithm is qmix"),
        (["learner=iql", "learner.mixer.over=team"], "where learner.algorithm is qmix or vdn;"),
        (["learner=iql", "learner.central_input=team"], "where learner.algorithm is qmix"),
        (["learner=maddpg", "learner.double_q=false"], "algorithm is qmix, vdn or iql"),
        (["learner=qmix", "learner.exploration.sigma=0.1"], "read only where"),
        (["learner=qmix", "learner.mixer.init_scale=0"], "learner.mixer.init_scale is 0"),
        (["learner=qmix", "learner.central_input=state"], "use env.state=observations"),
    ],
)
def test_invalid_settings_of_value_learners_raise(texts, message):
    assert message in refusal(*texts)


def test_updates_per_frame_allows_a_single_update():
    few = {"total_frames": 60, "frames_per_batch": 20, "env.num_envs": 4, "learner": "maddpg"}
    few |= {"learner.learning_starts": 21, "learner.minibatch_size": 8}  # at frame 40 of 80
    assert load_config(TAG, {**few, "learner.updates_per_frame": 1 / 40}).total_frames == 60
    with pytest.raises(ConfigError, match="updates_per_frame is 0.024, expected at least 0.025"):
        load_config(TAG, {**few, "learner.updates_per_frame": 0.024})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"replay.capacity": 300}, r"capacity is 300, expected at least frames_per_batch, 400;"),
        ({"n_step": 50, "replay.capacity": 400}, r"n_step is 50, expected at most 40, the steps "
         "of each of 10 environments in learner.replay.capacity, 400; use learner.n_step=5"),
    ],
)  # fmt: skip
def test_too_small_capacity_for_custom_environment_raises(settings, message, tmp_path):
    """The error comes before the first batch."""
    own = {f"learner.{name}": value for name, value in settings.items()}
    own |= {"learner.learning_starts": 800, "learner.minibatch_size": 32, "frames_per_batch": 400}
    with pytest.raises(ConfigError, match=message):
        torchrl_marl.train("toy_arena_qmix", env=Arena(10), folder=tmp_path / "run", **own)
    assert not (tmp_path / "run" / "metrics.csv").exists()


def test_too_small_capacity_for_the_first_batch_raises():
    """In a script, without a run."""
    env = Arena(10, continuous_actions=False)
    groups = TeamSpec.from_env(env).groups
    learner = ValueLearner(groups, ValueConfig(replay=ReplayConfig(300)))
    with pytest.raises(ConfigError, match="expected at least frames_per_batch, 400"):
        learner.learn(RolloutCollector(env, learner.actors["agents"], frames_per_batch=400).next())


def test_misspelled_group_name_raises():
    text = refusal("groups.agnt.algorithm=masac", "groups.agent.alpha_init=0.1")
    assert text == (
        "groups.agent.alpha_init is 0.1, which is read only where groups.agent.algorithm is masac, "
        "isac or hasac, as groups.agnt.algorithm is: one of the two names may be misspelt; leave "
        "groups.agent.alpha_init out."
    )


def test_q_network_inherits_size_of_the_actor():
    config = load_config(TAG, ["groups.agent=iql", "learner.actor.num_cells=[32]"])
    learner = override(config, "groups", "agent")
    assert learner.actor.num_cells == [32] and not learner.actor.dueling and learner.gamma == 0.95
    known = settings_of(load_config(TAG, ["learner=qmix"]).learner)
    assert {"lr", "mixer.hidden", "actor.dueling", "tau"} <= set(known)
    assert not {"critic.num_cells", "exploration.sigma", "actor_lr", "lmbda"} & set(known)


def test_capacity_smaller_than_n_step_raises():
    texts = ["learner=maddpg", "learner.n_step=300000"]
    assert "use learner.replay.capacity=300000." in refusal(*texts)


@pytest.mark.parametrize(
    ("recipe", "overrides", "kind"),
    [
        ("vmas_balance_matd3", {"learner.mixer": "sum"}, "sum"),
        ("vmas_simple_spread_pqn", {"learner": {"mixer": "none"}}, "none"),
        ("vmas_simple_spread_pqn", ["learner.mixer=sum", "learner.mixer.over=team"], "sum"),
    ],
)  # fmt: skip
def test_mixer_kind_may_be_given_as_a_word(recipe, overrides, kind):
    assert load_config(recipe, overrides).learner.mixer.kind == kind


def test_mixer_kind_of_a_group_may_be_given_as_a_word():
    groups = {"agent": {"algorithm": "maddpg", "mixer": "sum"}}
    config = load_config("vmas_simple_tag_mappo", {"groups": groups})
    assert config.groups["agent"]["mixer"] == {"kind": "sum"}


@pytest.mark.parametrize(
    ("recipe", "others"),
    [
        ("vmas_balance_masac", "saturation_coeff actor_interval target_noise target_noise_clip "
         "exploration.sigma exploration.sigma_end mixer.kind mixer.hidden mixer.init_scale"),
        ("vmas_balance_matd3", "alpha_lr alpha_init target_entropy"),
        ("vmas_simple_spread_vdn", "bootstrap central_input mixer.hidden mixer.init_scale"),
        ("vmas_balance_ippo", "critic.architecture critic.value_per"),
    ],
)  # fmt: skip
def test_list_settings_shows_only_those_that_are_read(recipe, others, capsys):
    config = read_config(recipe)
    assert read_by_others(config) == {f"learner.{name}" for name in others.split()}
    assert cli.main(["list", "settings", recipe]) == 0
    listed = {line.split()[0] for line in capsys.readouterr().out.splitlines() if line.split()}
    known = {f"learner.{name}" for name in settings_of(config.learner)}
    assert listed & known == known - read_by_others(config)
