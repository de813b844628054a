"""Learners with memory: windows, resets, critic states, graphs, masks, joined groups."""

import pytest
import torch
from learner_twins import EXACT, assert_same_learning, set_same_weights
from samples import poisoned
from support.tiers import second_tier_cases
from tensordict import TensorDict
from torchrl.modules import set_recurrent_mode

from torchrl_marl import TeamSpec
from torchrl_marl.collectors import RolloutCollector, TeamPolicy
from torchrl_marl.envs import with_memory
from torchrl_marl.envs.remember import hidden_sizes
from torchrl_marl.envs.toy import Arena, Nim
from torchrl_marl.errors import ConfigError, SpecError
from torchrl_marl.learners import OnPolicyConfig, build_learners
from torchrl_marl.learners.off_policy_config import AnyTeamMixerConfig, ParallelQConfig
from torchrl_marl.learners.windows import cut_windows
from torchrl_marl.modules import (
    MemoryConfig,
    QNetworkConfig,
    RecurrentCriticConfig,
    RecurrentNetworkConfig,
)

KINDS = ("gru", "lstm", "mingru", "lru")
OF_TEAM = {"value_per": "team"}


def arena(**settings):
    return Arena(4, **{"n_agents": 3, "years": 3, "lives": 2, "seed": 0} | settings)


def config_of(actor="gru", critic="gru", network=None, value_per="agent", **settings):
    network = {"num_cells": [8], **(network or {})}
    defaults = {
        "actor": RecurrentNetworkConfig(**network, memory=MemoryConfig(actor, size=6)),
        "critic": RecurrentCriticConfig(
            **network, memory=MemoryConfig(critic, size=4), value_per=value_per
        ),
        "num_epochs": 2,
        "minibatch_size": 20,
        "window": 5,
        "entropy_coeff": 0.01,
    }
    return OnPolicyConfig(**(defaults | settings))


def learners_of(env, config, execution="eager", own=None):
    torch.manual_seed(0)
    learners = build_learners(TeamSpec.from_env(env), config, own, execution=execution)
    policy = TeamPolicy(actor for learner in learners for actor in learner.actors.values())
    env = with_memory(env, hidden_sizes(policy))
    return learners, RolloutCollector(env, policy, frames_per_batch=80)


def trained(env, config, n=2, execution="eager", own=None):
    learners, collector = learners_of(env, config, execution, own)
    metrics = []
    for _ in range(n):
        batch = collector.rollout()
        metrics += [learner.learn(batch) for learner in learners]
    return learners, metrics


@pytest.mark.parametrize("critic", ["gru", "none"])
@pytest.mark.parametrize("actor", KINDS)
def test_recomputed_log_probabilities_match_those_of_acting(actor, critic):
    """The first ratio is 1 across ends of episodes, deaths and births, also in mid-episode."""
    env = arena(late_spawn=2)
    [learner], collector = learners_of(env, config_of(actor, critic, minibatch_size=80))
    collector.rollout()
    batch = collector.rollout()
    assert batch["agents", "is_init"].any() and not batch["agents", "mask"].all()
    assert not batch["agents", "is_init"][:, ::5].all()
    metrics = learner.learn(batch)
    assert metrics["agents", "max_ratio"] > 1.0  # after the first update
    env = arena(late_spawn=2)
    [learner], collector = learners_of(env, config_of(actor, critic))
    batch = collector.rollout()
    data = learner.block.gather(batch)
    learner.add_advantage(data)
    [loss] = learner.losses.values()
    windows = cut_windows(data, loss.minibatch_keys, 5)
    terms = loss(windows)
    assert terms["max_ratio"] == pytest.approx(1.0, abs=1e-6)
    assert terms["mean_ratio"] == pytest.approx(1.0, abs=1e-6)


@pytest.mark.parametrize("settings", [
    {"precision": "bf16"},
    {"normalize_observations": True},
], ids=str)  # fmt: skip
def test_first_ratio_is_one_with_bf16_or_normalized_observations(settings):
    tolerance = 0.02 if "precision" in settings else 1e-6
    config = config_of(minibatch_size=80, num_epochs=1, **settings)
    [learner], collector = learners_of(arena(late_spawn=2), config)
    for _ in range(2):  # the second batch is normalized with other statistics
        metrics = learner.learn(collector.rollout())
        assert metrics["agents", "max_ratio"] == pytest.approx(1.0, abs=tolerance)
    batch = collector.rollout()
    assert batch["agents", "hidden"].dtype == torch.float32
    assert learner.critic_states["agents"].dtype == torch.float32


def test_late_reset_changes_the_ratio():
    """Shows that the tests above would fail with a wrong ``is_init``."""
    [learner], collector = learners_of(arena(), config_of(critic="none"))
    data = learner.block.gather(collector.rollout())
    init = data["agents", "is_init"]
    data["agents", "is_init"] = torch.cat([init[:, :1], init[:, :-1]], 1)
    learner.add_advantage(data)
    [loss] = learner.losses.values()
    with torch.no_grad():  # an untrained head hardly depends on its state
        for parameter in loss.actor_network.parameters():
            parameter.mul_(3)
    late = loss.log_ratio(cut_windows(data, loss.minibatch_keys, 20))
    data["agents", "is_init"] = init
    right = loss.log_ratio(cut_windows(data, loss.minibatch_keys, 20))
    assert (late - right).abs().max() > 1e-3


@pytest.mark.parametrize("settings", [
    {"actor": "lstm", "critic": "lru"},
    {"network": {"sharing": "none"}},
    {"burn_in": 2},
    *second_tier_cases(
        "compiled",
        {},
        {"actor": "none"},
        {"algorithm": "ippo", "network": {"sharing": "trunk", "layer_norm": True}},
        {"network": {"sharing": "agent_id"}},
        {"bootstrap": "agent"},
        {"precision": "bf16", "normalize_observations": True},
        {"actor": "lstm", "critic": "lstm", "precision": "bf16"},
        OF_TEAM,
    ),
], ids=str)  # fmt: skip
def test_traced_updates_match_eager_updates(settings):
    make = lambda: arena(late_spawn=1)  # noqa: E731
    runs = [trained(make(), config_of(**settings), execution=how) for how in ("eager", "trace")]
    assert_same_learning(*runs, **EXACT)


def test_traced_updates_of_pqn_match_eager_updates():
    actor = QNetworkConfig([8], memory=MemoryConfig("gru", size=6))
    config = ParallelQConfig(actor=actor, minibatch_size=20, num_epochs=2, window=5, burn_in=1)
    runs = [trained(arena(late_spawn=1), config, execution=how) for how in ("eager", "trace")]
    assert_same_learning(*runs, **EXACT)


def test_targets_of_pqn_use_values_over_the_whole_batch():
    """The next value is that of the next step in the batch, where the episode continues."""
    actor = QNetworkConfig([8], memory=MemoryConfig("gru", size=6))
    settings = {"lmbda": 0.0, "gamma": 0.5, "mixer": AnyTeamMixerConfig("none")}
    config = ParallelQConfig(actor=actor, minibatch_size=20, window=5, **settings)
    [learner], collector = learners_of(arena(late_spawn=1), config)
    [loss] = learner.losses.values()
    set_same_weights(loss.qvalue_network)  # an untrained head hardly depends on its state
    collector.rollout()
    data = learner.block.gather(collector.rollout())
    learner.add_targets(data)
    best = data["agents", "chosen_action_value"]  # of acting
    goes_on = data["agents", "mask"][:, 1:] & ~data["next", "done"][:, :-1]
    goes_on &= data["agents", "mask"][:, :-1]
    expected = (data["next", "agents", "reward"][:, :-1] + 0.5 * best[:, 1:])[goes_on]
    found = data["agents", "value_target"][:, :-1][goes_on]
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("critic", [{}, {"critic": "none"}, OF_TEAM], ids=["gru", "none", "team"])
def test_burn_in_with_unchanged_networks_has_no_effect(critic):
    """Losses equal those of the later steps with the states of acting."""
    [learner], collector = learners_of(arena(late_spawn=2), config_of(burn_in=2, **critic))
    collector.rollout()
    data = learner.block.gather(collector.rollout())
    learner.add_advantage(data)
    [loss] = learner.losses.values()
    windows = cut_windows(data, loss.minibatch_keys, 5)
    spent = learner._warmed_up(windows)
    assert spent["agents", "action"].shape[:2] == (16, 3)
    later = TensorDict({}, [16])
    for key in loss.minibatch_keys:
        value = data.get(key, None)
        if value is not None:
            rows = value.reshape(16, 5, *value.shape[2:])
            state = key[-1] in ("hidden", "critic_hidden")
            later[key] = rows[:, 2:3] if state else rows[:, 2:]
    for key, value in loss(later).items():
        torch.testing.assert_close(loss(spent)[key], value, rtol=1e-4, atol=1e-6)
    assert loss(spent)["max_ratio"] == pytest.approx(1.0, abs=1e-6)
    assert not spent["agents", "hidden"].requires_grad


@pytest.mark.parametrize("value", [float("nan"), 1e9])
@pytest.mark.parametrize(
    ("actor", "settings"), [*((kind, {}) for kind in KINDS), ("gru", OF_TEAM)], ids=str
)
def test_values_in_masked_slots_have_no_effect(actor, settings, value):
    runs = []
    for poison in (False, True):
        [learner], collector = learners_of(arena(late_spawn=1), config_of(actor, **settings))
        for _ in range(2):
            batch = collector.rollout()
            mask, alive = batch["agents", "mask"], ~batch["agents", "done"].squeeze(-1)
            if poison:
                flags = batch["next", "agents"]
                cut = alive & (flags["truncated"] & ~flags["terminated"]).squeeze(-1)
                batch = poisoned(batch, ("agents", "observation"), mask, value)
                batch = poisoned(batch, ("agents", "action"), mask, value)
                batch = poisoned(batch, ("agents", "hidden"), alive, value)
                begun = ~batch["agents", "is_init"].squeeze(-1)
                batch = poisoned(batch, ("agents", "hidden"), begun, value)
                batch = poisoned(
                    batch, ("next", "agents", "observation"), flags["mask"] | cut, value
                )
            torch.manual_seed(1)
            metrics = learner.learn(batch)
            torch.manual_seed(2)
        runs.append(([learner], [metrics]))
        assert torch.isfinite(learner.critic_states["agents"]).all()
    assert_same_learning(*runs, **EXACT)


def test_agents_waiting_for_their_turn_keep_their_state():
    [learner], collector = learners_of(Nim(4, seed=0), config_of(bootstrap="agent"))
    batch = collector.rollout()
    goes_on = ~batch["next", "done"][:, :-1]
    for name in learner.groups:
        hidden, mask = batch[name, "hidden"], batch[name, "mask"][:, :-1]
        waits = ~mask & goes_on
        assert waits.any()
        assert torch.equal(hidden[:, 1:][waits], hidden[:, :-1][waits])
        moved = mask & goes_on
        assert (hidden[:, 1:][moved] != hidden[:, :-1][moved]).any(-1).all()
    learner.learn(batch)


@pytest.mark.parametrize("critic", [{}, OF_TEAM], ids=["agent", "team"])
def test_critic_state_carries_over_between_batches(critic):
    """Two batches have the values of one batch of the same steps."""
    [learner], collector = learners_of(arena(max_steps=7), config_of(value_norm=False, **critic))
    batches = [learner.block.gather(collector.rollout()) for _ in range(2)]
    whole = torch.cat(batches, 1)
    for data in batches:
        learner.add_advantage(data)
    state = learner.critic_states.pop("agents")
    learner.add_advantage(whole)
    apart = torch.cat([data["agents", "state_value"] for data in batches], 1)
    torch.testing.assert_close(apart, whole["agents", "state_value"], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(state, learner.critic_states["agents"], rtol=1e-5, atol=1e-6)
    # The next value is the value of the next step, where the episode continues.
    [loss] = learner.losses.values()
    following = whole["next"].select(*loss.critic_network.in_keys, strict=False)
    following["agents", "critic_hidden"] = whole["next", "agents", "critic_hidden"]
    with set_recurrent_mode(False), torch.no_grad():
        next_value = loss.critic_network(following)["agents", "state_value"]
    goes_on = ~whole["next", "done"][:, :-1, :, None].expand(-1, -1, 3, 1)
    goes_on &= whole["next", "agents", "mask"][:, :-1, :, None]
    goes_on &= ~whole["next", "agents", "done"][:, :-1]
    torch.testing.assert_close(
        next_value[:, :-1][goes_on],
        whole["agents", "state_value"][:, 1:][goes_on],
        rtol=1e-5,
        atol=1e-6,
    )


@pytest.mark.parametrize("kind", ["gru", "lru"])
@pytest.mark.parametrize(("algorithm", "critic"), [("mappo", {}), ("ippo", {}), ("mappo", OF_TEAM)])
def test_joined_groups_match_separate_learners(algorithm, critic, kind):
    settings = {"algorithm": algorithm, "minibatch_size": 80, "max_grad_norm": 0.01}
    config = config_of(**{"actor": kind, "critic": kind, **settings, **critic})
    env = arena(n_agents=4, n_groups=2)
    joined, collector = learners_of(env, config)
    apart, _ = learners_of(env, config, own={"agents_1": {"adam_eps": 1.0001e-5}})
    assert (len(joined), len(apart)) == (1, 2)
    set_same_weights(*joined, *apart)
    batch = collector.rollout()
    assert {"hidden", "is_init"} <= set(batch["agents_0"].keys())
    [found] = [learner.learn(batch.clone()) for learner in joined]
    for learner in apart:
        for key, value in learner.learn(batch.clone()).items(True, True):
            torch.testing.assert_close(found[key], value, rtol=1e-4, atol=1e-5)


def test_actor_of_one_joined_group_acts_alone():
    [learner], collector = learners_of(arena(n_agents=4, n_groups=2), config_of(critic="none"))
    carry = collector.env.reset()
    torch.manual_seed(0)
    whole = collector.policy(carry.copy())
    torch.manual_seed(0)
    own = learner.actors["agents_1"](carry.select("agents_1", "done").copy())
    key = ("next", "agents_1", "hidden")
    torch.testing.assert_close(own[key], whole[key])
    assert key in learner.actors["agents_1"].out_keys


@pytest.mark.parametrize(("settings", "words"), [
    ({"minibatch_size": 24}, r"minibatch_size is 24, .* use learner.minibatch_size=25"),
    ({"burn_in": 5}, "burn_in is 5, expected less than learner.window, 5"),
    ({"network": {"sharing": "masks"}}, "sharing is 'masks', which cannot have it; use one of"),
    ({"network": {"num_cells": []}}, "use learner.actor.num_cells"),
], ids=str)  # fmt: skip
def test_invalid_settings_raise(settings, words):
    from torchrl_marl.settings import check

    with pytest.raises(ConfigError, match=words):
        check(config_of(**settings), "learner.")


def test_batch_that_does_not_divide_into_windows_raises():
    [learner], collector = learners_of(arena(), config_of(window=8, minibatch_size=16))
    with pytest.raises(ConfigError, match="20 steps of 4 envs; use frames_per_batch=96"):
        learner.learn(collector.rollout())


def test_environment_without_memory_raises():
    env = arena()
    [learner], collector = learners_of(env, config_of())
    with pytest.raises(SpecError, match="with_memory"):
        learner.actors["agents"](env.reset())
    batch = collector.rollout()
    del batch["agents", "is_init"]
    with pytest.raises(SpecError, match="no \\('agents', 'is_init'\\)"):
        learner.learn(batch)


if __name__ == "__main__":
    pytest.main([__file__])
