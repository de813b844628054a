"""Learners with delayed messages: windows, graphs, masks, resuming, invalid settings."""

import pytest
import torch
from graph_batches import assert_equal, dropout
from learner_twins import EXACT, assert_same_learning, check_resume_and_read_metrics
from runs import small_config
from samples import poisoned

from torchrl_marl import TeamSpec
from torchrl_marl.collectors import RolloutCollector, TeamPolicy
from torchrl_marl.envs import with_memory
from torchrl_marl.envs.toy import Arena
from torchrl_marl.errors import ConfigError
from torchrl_marl.learners import OffPolicyConfig, OnPolicyConfig, ValueConfig, build_learners
from torchrl_marl.learners.windows import cut_windows
from torchrl_marl.modules import (
    CommunicationConfig,
    DrawnCommunicationConfig,
    MemoryConfig,
    QNetworkConfig,
    RecurrentCriticConfig,
    RecurrentNetworkConfig,
    TeamNetworkConfig,
)
from torchrl_marl.modules.communication import listening
from torchrl_marl.recipes import read_config
from torchrl_marl.settings import check

TALKS = {
    "tarmac": DrawnCommunicationConfig("tarmac", message_size=4, delay=2, gate=True, dropout=0.3),
    "commnet": DrawnCommunicationConfig("commnet", message_size=4, delay=1, discrete="dial"),
}


def config_of(talk, memory="none", **settings):
    memory, talk = MemoryConfig(memory, size=6), TALKS[talk] if isinstance(talk, str) else talk
    actor = TeamNetworkConfig([8], memory=memory, communication=talk)
    return OnPolicyConfig(actor=actor, num_epochs=2, minibatch_size=20, window=5, **settings)


def learners_of(config, execution="eager", env=None, how="eager", frames=80):
    env = Arena(4, n_agents=3, years=3, lives=2, late_spawn=1, seed=0) if env is None else env
    torch.manual_seed(0)
    learners = build_learners(TeamSpec.from_env(env), config, execution=execution)
    policy = TeamPolicy(actor for learner in learners for actor in learner.actors.values())
    env = with_memory(env, policy)
    return learners, RolloutCollector(env, policy, frames_per_batch=frames, execution=how)


@pytest.mark.parametrize("memory", ["none", "gru"])
@pytest.mark.parametrize("talk", TALKS)
def test_first_importance_ratio_is_one(talk, memory):
    """Across deaths, births and ends of episodes, and with messages that are still in transit."""
    [learner], collector = learners_of(config_of(talk, memory))
    [loss] = learner.losses.values()
    with torch.no_grad():  # an untrained head hardly depends on messages
        for parameter in loss.actor_network.parameters():
            parameter.mul_(2)
    collector.rollout()
    batch = learner.block.gather(collector.rollout())
    assert batch["agents", "is_init"].any() and not batch["agents", "mask"].all()
    learner.add_advantage(batch)
    terms = loss(cut_windows(batch, loss.minibatch_keys, 5))
    assert terms["max_ratio"] == pytest.approx(1.0, abs=1e-6)
    state = batch["agents", "hidden"]
    batch["agents", "hidden"] = state.roll(1, 1)
    late = loss(cut_windows(batch, loss.minibatch_keys, 5))
    assert late["max_ratio"] > 1.001


@pytest.mark.parametrize("talk", TALKS)
def test_traced_updates_and_masked_slots_match_eager_updates(talk):
    runs = []
    for execution, poison in (("eager", False), ("trace", False), ("eager", True)):
        [learner], collector = learners_of(config_of(talk, "gru"), execution)
        metrics = []
        for _ in range(2):
            batch = collector.rollout()
            if poison:
                mask = batch["agents", "mask"]
                for leaf in ("observation", "action", "channel"):
                    batch = poisoned(batch, ("agents", leaf), mask, float("nan"))
                alive = ~batch["agents", "done"].squeeze(-1)
                begun = ~batch["agents", "is_init"].squeeze(-1)
                batch = poisoned(batch, ("agents", "hidden"), alive & begun, float("nan"))
            torch.manual_seed(1)
            metrics.append(learner.learn(batch))
            torch.manual_seed(2)
        runs.append(([learner], metrics))
    for other in runs[1:]:
        assert_same_learning(runs[0], other, **EXACT)


def test_traced_rollout_matches_eager_rollout():
    batches = []
    for how in ("trace", "eager"):
        _, collector = learners_of(config_of("tarmac"), env=dropout(), how=how, frames=30)
        torch.manual_seed(0)
        batches.append(collector.rollout())
        assert collector.execution == how
    assert_equal(*batches)
    assert batches[0]["agents", "hidden"].shape[-1] == 8


def test_messages_are_counted_when_they_are_sent():
    """Metrics and weights belong to the step in which messages are sent."""
    talk = DrawnCommunicationConfig("tarmac", message_size=4, key_size=3, delay=1)
    [learner], collector = learners_of(config_of(talk))
    batch = collector.rollout()
    metrics, mask = learner.learn(batch.clone())["agents"], batch["agents", "mask"].float()
    alive = mask.sum(-1)
    assert metrics["links_used"].item() == pytest.approx(
        ((alive * (alive - 1)).sum() / mask.sum()).item()
    )
    assert metrics["numbers_sent"].item() == pytest.approx(7.0)
    weights = listening(learner.actors["agents"], batch)
    torch.testing.assert_close(weights.sum(-1), mask * (alive > 1).float().unsqueeze(-1))


@pytest.mark.parametrize("algorithm", ["maddpg", "iql"])
def test_off_policy_learners_train_the_delayed_channel(algorithm):
    talk = CommunicationConfig("tarmac", message_size=4, delay=1)
    start = {"learning_starts": 0, "minibatch_size": 10, "window": 5, "burn_in": 1}
    if algorithm == "iql":
        config = ValueConfig("iql", actor=QNetworkConfig([8], communication=talk), **start)
    else:
        actor = RecurrentNetworkConfig([8], communication=talk)
        config = OffPolicyConfig("maddpg", actor=actor, **start)
    env = None if algorithm == "iql" else dropout()
    [learner], collector = learners_of(config, env=env, frames=30)
    before = {name: p.clone() for name, p in learner.named_parameters()}
    for _ in range(2):
        learner.learn(collector.rollout())
    moved = [n for n, p in learner.named_parameters() if not torch.equal(p, before[n])]
    assert any("channel.rounds" in name for name in moved)


def test_run_resumes_exactly_in_mid_episode(tmp_path):
    talk = {"actor.communication": {"kind": "tarmac", "delay": 2, "message_size": 4}}

    def recipe(folder):
        learner = {**talk, "window": 5, "minibatch_size": 20}
        config = small_config(total_frames=240, folder=str(folder))
        return read_config(config, {"learner": learner})

    assert len(check_resume_and_read_metrics(recipe, tmp_path, (1,))) == 3


@pytest.mark.parametrize(("config", "words"), [
    (config_of(DrawnCommunicationConfig("tarmac", delay=1, rounds=2)),
     "delay is 1, but learner.actor.communication.rounds is 2"),
    (config_of(DrawnCommunicationConfig("tarmac", delay=-1)), "delay is -1, expected"),
    (config_of(DrawnCommunicationConfig("tarmac", delay=1), critic=RecurrentCriticConfig(
        communication=CommunicationConfig("tarmac", delay=1))), "critics are used in"),
    (ValueConfig("iql", n_step=3, actor=QNetworkConfig(
        communication=CommunicationConfig("tarmac", delay=1))),
     "or learner.actor.communication.delay=0"),
], ids=["rounds", "negative", "critic", "returns"])  # fmt: skip
def test_invalid_settings_raise(config, words):
    with pytest.raises(ConfigError, match=words):
        check(config, "learner.")


if __name__ == "__main__":
    pytest.main([__file__])
