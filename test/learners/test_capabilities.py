"""The table of supported combinations: its messages, and that every row names a setting."""

import pytest

from torchrl_marl.errors import ConfigError
from torchrl_marl.learners.algorithms import ALGORITHMS
from torchrl_marl.learners.capabilities import FEATURES, POPULATION, RANKS
from torchrl_marl.recipes import load_config
from torchrl_marl.settings import settings_of
from torchrl_marl.training.config import TrainConfig

KNOWN = {
    f"learner.{key}"
    for name in ALGORITHMS.names()
    for key in settings_of(ALGORITHMS.schema(name)())
}


@pytest.mark.parametrize("feature", [*FEATURES, RANKS], ids=lambda feature: feature.name)
def test_every_row_names_a_setting(feature):
    of_run = {*settings_of(TrainConfig()), "league"}
    assert {limit.key for limit in feature.run} <= of_run
    assert {f"learner.{limit.key}" for limit in feature.learner} <= KNOWN


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (
            ["population.size=2", "learner.unshare_at=0.5"],
            "learner.unshare_at is 0.5, but a population does not support it; use "
            "learner.unshare_at=null, or population.size=1.",
        ),
        (
            ["population.size=2", "groups.agents.actor.sharing=full"],
            "groups.agents.actor.sharing is 'full', but it would link members of a population; use "
            "groups.agents.actor.sharing=group, none or agent_id, or population.size=1.",
        ),
        (
            ["population.size=2", "distributed.collectors=2"],
            "population.size is 2, but distributed.collectors is 2, and shards play a single "
            "policy; use population.size=1, or distributed.collectors=null.",
        ),
        (
            ["population.size=2", "evaluation.gif=true"],
            "evaluation.gif is true, but a population renders no animations; run `torchrl-marl "
            "evaluate FOLDER/seed0 --gif` for one; use evaluation.gif=false, or population.size=1.",
        ),
        (
            ["population.size=2", "stop_at_return=45"],
            "stop_at_return is 45, but members of a population stop together; use "
            "stop_at_return=null, or population.size=1.",
        ),
        (
            ["league.partners=self", "learner.unshare_at=0.5"],
            "learner.unshare_at is 0.5, but the networks of a league's stored players cannot "
            "change; use learner.unshare_at=null.",
        ),
    ],
)
def test_error_names_the_setting_the_reason_and_the_fix(settings, sentence):
    with pytest.raises(ConfigError) as refused:
        load_config("toy_arena_mappo", settings)
    assert str(refused.value) == sentence


def test_custom_environment_with_shards_raises():
    config = load_config("toy_arena_mappo", ["distributed.collectors=2"])
    with pytest.raises(ConfigError, match="cannot be split into shards; use distributed"):
        config.check_features(own_env=True)


def test_single_process_algorithm_with_ranks_raises():
    config = load_config("toy_arena_mappo", ["learner=qmix", "learner.minibatch_size=32"])
    with pytest.raises(ConfigError) as refused:
        RANKS.check(config)
    assert str(refused.value) == (
        "learner.algorithm is 'qmix', which trains in a single process; use "
        "learner.algorithm=mappo or ippo, or start one process."
    )


SEQUENTIAL = {"happo", "haddpg", "hatd3", "hasac"}


@pytest.mark.parametrize("name", sorted(set(ALGORITHMS.names()) - {"random", *SEQUENTIAL}))
def test_populations_support_every_non_sequential_algorithm(name):
    POPULATION.check_learner(ALGORITHMS.schema(name)(name))
