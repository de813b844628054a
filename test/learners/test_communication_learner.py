"""Learners with communication: replayed draws, graphs, masks, joined groups, invalid settings."""

import pytest
import torch
from learner_twins import EXACT, assert_same_learning
from samples import poisoned
from torchrl.data import Binary
from torchrl.envs import Transform, TransformedEnv

from torchrl_marl import TeamSpec
from torchrl_marl.collectors import RolloutCollector, TeamPolicy
from torchrl_marl.envs import with_memory
from torchrl_marl.envs.remember import hidden_sizes
from torchrl_marl.envs.toy import Arena
from torchrl_marl.errors import ConfigError, SpecError
from torchrl_marl.learners import OnPolicyConfig, build_learners
from torchrl_marl.learners.windows import cut_windows
from torchrl_marl.modules import (
    CommunicationConfig,
    DrawnCommunicationConfig,
    MemoryConfig,
    RecurrentCriticConfig,
    TeamNetworkConfig,
    make_actor,
)
from torchrl_marl.specs.joining import join

PLAIN = {
    "commnet": CommunicationConfig("commnet", rounds=2, message_size=4),
    "tarmac": CommunicationConfig("tarmac", message_size=4, key_size=3),
    "graph": CommunicationConfig("graph", message_size=4, links="nearest"),
    "bicnet": CommunicationConfig("bicnet"),
}
DRAWN = {
    "gate": DrawnCommunicationConfig("tarmac", gate=True),
    "gated_chain": DrawnCommunicationConfig("bicnet", gate=True, cell="lstm"),
    "dropout": DrawnCommunicationConfig("commnet", dropout=0.4),
    "gumbel": DrawnCommunicationConfig("commnet", discrete="gumbel"),
    "dial": DrawnCommunicationConfig("tarmac", discrete="dial", gate=True, rounds=2),
}


def arena(**settings):
    return Arena(
        4, **{"n_agents": 3, "years": 3, "lives": 2, "late_spawn": 1, "seed": 0} | settings
    )


def config_of(talk, memory="none", critic=None, **settings):
    actor = TeamNetworkConfig(
        num_cells=[8], memory=MemoryConfig(memory, size=6), communication=talk
    )
    critic = RecurrentCriticConfig(num_cells=[8], communication=critic or CommunicationConfig())
    defaults = {"num_epochs": 2, "minibatch_size": 20, "window": 5, "entropy_coeff": 0.01}
    return OnPolicyConfig(**(defaults | {"actor": actor, "critic": critic} | settings))


def learners_of(env, config, execution="eager"):
    torch.manual_seed(0)
    learners = build_learners(TeamSpec.from_env(env), config, execution=execution)
    policy = TeamPolicy(actor for learner in learners for actor in learner.actors.values())
    env = with_memory(env, hidden_sizes(policy))
    return learners, RolloutCollector(env, policy, frames_per_batch=80)


def trained(env, config, execution="eager"):
    [learner], collector = learners_of(env, config, execution)
    return [learner], [learner.learn(collector.rollout()) for _ in range(2)]


@pytest.mark.parametrize("memory", ["none", "gru"])
@pytest.mark.parametrize("name", [*PLAIN, *DRAWN])
def test_first_importance_ratio_is_one(name, memory):
    """With stored draws of the channel (gates, dropped links, noise), deaths and births."""
    [learner], collector = learners_of(arena(), config_of({**PLAIN, **DRAWN}[name], memory))
    collector.rollout()
    batch = collector.rollout()
    assert not batch["agents", "mask"].all()
    data = learner.block.gather(batch)
    learner.add_advantage(data)
    [loss] = learner.losses.values()
    frames = data.select(*loss.minibatch_keys, strict=False).reshape(-1)
    terms = loss(cut_windows(data, loss.minibatch_keys, 5) if memory != "none" else frames)
    assert terms["max_ratio"] == pytest.approx(1.0, abs=1e-6)
    assert terms["mean_ratio"] == pytest.approx(1.0, abs=1e-6)


@pytest.mark.parametrize("name", ["gate", "dropout", "gumbel"])
def test_other_channel_draws_change_the_ratio(name):
    """Shows that the test above would fail with other draws."""
    [learner], collector = learners_of(arena(), config_of(DRAWN[name]))
    data = learner.block.gather(collector.rollout())
    learner.add_advantage(data)
    [loss] = learner.losses.values()
    with torch.no_grad():  # an untrained head hardly depends on messages
        for parameter in loss.actor_network.parameters():
            parameter.mul_(3)
    frames = data.select(*loss.minibatch_keys, strict=False).reshape(-1)
    right = loss.log_ratio(frames.clone())
    rows = torch.randperm(len(frames))
    frames["agents", "channel"] = frames["agents", "channel"][rows]
    assert (loss.log_ratio(frames) - right).abs().max() > 1e-3


@pytest.mark.parametrize("name", ["tarmac", "bicnet", "gate", "gated_chain", "gumbel", "dial"])
def test_traced_updates_match_eager_updates(name):
    config = config_of({**PLAIN, **DRAWN}[name], critic=PLAIN.get(name))
    assert_same_learning(*[trained(arena(), config, how) for how in ("eager", "trace")], **EXACT)


@pytest.mark.parametrize("algorithm", ["mappo", "ippo"])
@pytest.mark.parametrize("name", ["commnet", "tarmac", "graph", "bicnet", "dial"])
def test_values_in_masked_slots_have_no_effect(name, algorithm):
    runs = []
    talk = {**PLAIN, **DRAWN}[name]
    for poison in (False, True):
        config = config_of(talk, "gru", PLAIN.get(name), algorithm=algorithm)
        [learner], collector = learners_of(arena(), config)
        batch = collector.rollout()
        if poison:
            mask, flags = batch["agents", "mask"], batch["next", "agents"]
            alive = ~batch["agents", "done"].squeeze(-1)
            cut = alive & (flags["truncated"] & ~flags["terminated"]).squeeze(-1)
            leaves = ["observation", "action", *["channel"] * (name in DRAWN)]
            for leaf in leaves:
                batch = poisoned(batch, ("agents", leaf), mask, float("nan"))
            seen = ("next", "agents", "observation")
            batch = poisoned(batch, seen, flags["mask"] | cut, float("nan"))
        torch.manual_seed(1)
        runs.append(([learner], [learner.learn(batch)]))
    assert_same_learning(*runs, **EXACT)


def test_gate_is_part_of_the_log_probability():
    """Log-probabilities are sums over action and gate, computed here from logits."""
    [learner], collector = learners_of(arena(), config_of(DRAWN["gate"]))
    agents = collector.rollout()["agents"]
    chosen = agents["logits"].log_softmax(-1).gather(-1, agents["action"].unsqueeze(-1))
    chance = torch.sigmoid(agents["gate_logits"])
    speaks = agents["channel"][..., :1] > 0.5
    gate = torch.where(speaks, chance, 1 - chance).log()
    expected, mask = (chosen + gate).squeeze(-1), agents["mask"]
    assert speaks[mask].any() and not speaks[mask].all()
    torch.testing.assert_close(agents["action_log_prob"][mask], expected[mask])


@pytest.mark.parametrize("name", ["tarmac", "gate", "dropout", "bicnet"])
def test_communication_metrics_match_counts(name):
    """Counted one step and one agent at a time."""
    talk = {**PLAIN, **DRAWN}[name]
    [learner], collector = learners_of(arena(), config_of(talk))
    batch = collector.rollout()
    metrics = learner.learn(batch)["agents"]
    agents, heard, sent, n = batch["agents"], 0, 0, 0
    numbers = {"tarmac": 7, "gate": 48, "dropout": 32, "bicnet": 64}[name]
    for e in range(4):
        for t in range(20):
            living = [i for i in range(3) if agents["mask"][e, t, i]]
            drawn = agents["channel"][e, t].tolist() if name in ("gate", "dropout") else None
            speaking = [j for j in living if name != "gate" or drawn[j][0] == 1]
            for i in living:
                reached = [j for j in speaking if j != i]
                if name == "dropout":
                    reached = [j for j in reached if drawn[i][j] == 1]
                heard, n = heard + len(reached), n + 1
            sent += numbers * len(speaking)
    assert metrics["links_used"].item() == pytest.approx(heard / n)
    assert metrics["numbers_sent"].item() == pytest.approx(sent / n)


def test_listening_weights_are_zero_for_silent_agents():
    from torchrl_marl.modules.communication import listening

    [learner], collector = learners_of(arena(), config_of(DRAWN["gate"]))
    batch = collector.rollout()
    weights = listening(learner.actors["agents"], batch)
    mask, gate = batch["agents", "mask"], batch["agents", "channel"][..., 0] > 0.5
    speaks = mask & gate
    assert weights.shape == (4, 20, 3, 3)
    assert weights.diagonal(dim1=-2, dim2=-1).abs().max() == 0
    assert weights.masked_fill(speaks.unsqueeze(-2), 0).abs().max() == 0
    others = speaks.sum(-1, keepdim=True) - speaks.long()
    torch.testing.assert_close(weights.sum(-1)[mask], (others > 0).float()[mask])


# ------------------------------------------------------------------------------ given links


def linked(**settings):
    return TransformedEnv(arena(**settings), GiveLinks())


class GiveLinks(Transform):
    """All agents hear agent 0; no other agent is heard."""

    def _links(self):
        links = torch.zeros(*self.parent.batch_size, 3, 3, dtype=torch.bool)
        links[..., 0] = True
        return links

    def _reset(self, tensordict, tensordict_reset):
        return tensordict_reset.set(("agents", "links"), self._links())

    def _step(self, tensordict, next_tensordict):
        return next_tensordict.set(("agents", "links"), self._links())

    def transform_observation_spec(self, observation_spec):
        shape = (*observation_spec.shape, 3, 3)
        observation_spec["agents", "links"] = Binary(n=3, shape=shape, dtype=torch.bool)
        return observation_spec


@pytest.mark.parametrize("algorithm", ["mappo", "ippo"])
def test_links_of_the_environment_are_used(algorithm):
    talk = CommunicationConfig("commnet", links="env", message_size=4)
    config = config_of(talk, critic=talk, algorithm=algorithm)
    [learner], collector = learners_of(linked(years=9, lives=9, late_spawn=0), config)
    batch = collector.rollout()
    assert batch["agents", "links"][..., 0].all() and not batch["agents", "links"][..., 1:].any()
    metrics = learner.learn(batch)["agents"]
    mask = batch["agents", "mask"]
    reached = (mask[..., 1:] & mask[..., :1]).sum() / mask.sum()
    assert metrics["links_used"].item() == pytest.approx(reached.item())
    seen = batch.clone()
    seen["agents", "observation"][:, :, 1] += 1.0
    actor = learner.actors["agents"]
    logits = [actor.get_dist(data).logits for data in (batch, seen)]
    assert torch.equal(logits[0][:, :, [0, 2]], logits[1][:, :, [0, 2]])


def test_environment_without_links_raises():
    talk = CommunicationConfig("commnet", links="env")
    [learner], collector = learners_of(linked(), config_of(talk))
    with pytest.raises(SpecError, match="the environment gives no entry as"):
        learner.actors["agents"](arena().reset())
    batch = collector.rollout()
    del batch["agents", "links"]
    with pytest.raises(SpecError, match="gives no entry as \\('agents', 'links'\\)"):
        learner.learn(batch)


# ------------------------------------------------------------------------------ several groups


def test_groups_have_separate_channels_by_default():
    config = config_of(PLAIN["tarmac"])
    learners, _ = learners_of(arena(n_agents=4, n_groups=2), config)
    assert [list(one.block.joined) for one in learners] == [["agents_0", "agents_1"]]


@pytest.mark.parametrize("name", ["commnet", "tarmac", "graph"])
def test_joined_groups_do_not_hear_each_other(name):
    env = arena(n_agents=4, n_groups=2, years=9, lives=9, late_spawn=0)
    group = join(tuple(TeamSpec.from_env(env).groups.values()))
    torch.manual_seed(0)
    actor = make_actor(group, TeamNetworkConfig([8], communication=PLAIN[name]))
    key, data = (group.name, "observation"), group.gather(env.reset())
    logits = []
    for column in (None, 0, 3):  # the agent whose observation changes
        seen = data.clone()
        if column is not None:
            seen[key][:, column] += 1.0
        logits.append(actor.get_dist(seen).logits[:, 1])
    assert torch.equal(logits[0], logits[2]) and not torch.equal(logits[0], logits[1])


@pytest.mark.parametrize("name", ["tarmac", "bicnet", "gate", "dropout"])
def test_groups_hear_each_other_with_across_groups(name):
    from dataclasses import replace

    talk = replace({**PLAIN, **DRAWN}[name], across_groups=True)
    env = arena(n_agents=4, n_groups=2, lives=4, years=9, late_spawn=0)
    [learner], collector = learners_of(env, config_of(talk))
    assert list(learner.block.joined) == ["agents_0+agents_1"]
    batch = collector.rollout()
    learner.learn(batch)
    carry, [actor] = collector.env.reset(), learner.actors.children()
    with torch.no_grad():
        for parameter in actor.parameters():
            parameter.mul_(2)
    other = carry.clone()
    other["agents_1", "observation"] += 1
    logits = []
    for seen in (carry, other):
        torch.manual_seed(0)
        joined = learner.block.joined["agents_0+agents_1"]
        data = actor.actor(joined.gather(seen))
        logits.append(data["agents_0+agents_1", "logits"][:, :2])
    assert not torch.equal(*logits)


@pytest.mark.parametrize(("talk", "words"), [
    ({"kind": "tarmac", "links": "radius"}, "radius is null; give the communication range"),
    ({"kind": "tarmac", "links": "radius", "radius": -1.0}, r"above 0; use .*\.radius=0\.5\."),
    ({"kind": "commnet", "gate": True, "algorithm": "happo"}, "communication"),
    ({"kind": "commnet", "unshare_at": 0.5}, "unshare_at=null"),
    ({"kind": "commnet", "sharing": "masks"}, "sharing is 'masks', which cannot have it"),
    ({"kind": "commnet", "num_cells": []}, "num_cells is empty"),
], ids=str)  # fmt: skip
def test_invalid_settings_raise(talk, words):
    from torchrl_marl.learners.happo_config import HAPPOConfig
    from torchrl_marl.settings import check

    kind = HAPPOConfig if talk.pop("algorithm", "") == "happo" else OnPolicyConfig
    own = {key: talk.pop(key) for key in ("sharing", "num_cells") if key in talk}
    settings = {"unshare_at": talk.pop("unshare_at", None)}
    if kind is HAPPOConfig:
        own["sharing"] = "none"
    actor = TeamNetworkConfig(**own, communication=DrawnCommunicationConfig(**talk))
    with pytest.raises(ConfigError, match=words):
        check(kind(actor=actor, **settings), "learner.")


def test_off_policy_learner_with_gate_raises():
    from torchrl_marl.recipes import read_config

    with pytest.raises(ConfigError, match="gate"):
        settings = {
            "algorithm": "maddpg",
            "actor": {"communication": {"kind": "tarmac", "gate": True}},
        }
        read_config("toy_arena_mappo", {"learner": settings})


def test_across_groups_with_different_settings_raises():
    from dataclasses import replace

    config = config_of(replace(PLAIN["tarmac"], across_groups=True))
    team = TeamSpec.from_env(arena(n_agents=4, n_groups=2))
    with pytest.raises(ConfigError, match="are not trained as one"):
        build_learners(team, config, {"agents_1": {"lr": 1e-3}})


@pytest.mark.parametrize("actor", [True, False])
def test_across_groups_must_be_equal_for_actor_and_critic(actor):
    actor, critic = (
        CommunicationConfig("tarmac", across_groups=across) for across in (actor, not actor)
    )
    team = TeamSpec.from_env(arena(n_agents=4, n_groups=2))
    with pytest.raises(ConfigError, match=r"across_groups is false; use the same for both\."):
        build_learners(team, config_of(actor, critic=critic))


def test_empty_position_raises():
    from torchrl_marl.settings import check

    talk = CommunicationConfig("commnet", links="nearest", position=[])
    with pytest.raises(ConfigError, match="position is \\[\\], expected the observation columns"):
        check(OnPolicyConfig(actor=TeamNetworkConfig(communication=talk)), "learner.")


def test_communication_of_a_single_agent_raises():
    with pytest.raises(ConfigError, match="it has only one agent"):
        learners_of(arena(n_agents=1, late_spawn=0), config_of(PLAIN["commnet"]))


def test_position_beyond_the_observation_raises():
    talk = DrawnCommunicationConfig("tarmac", links="nearest", position=[0, 99])
    with pytest.raises(ConfigError, match="position names column 99"):
        learners_of(arena(), config_of(talk))


if __name__ == "__main__":
    pytest.main([__file__])
