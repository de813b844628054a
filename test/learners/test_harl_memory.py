"""HADDPG, HATD3 and HASAC with memory: against a loop, single agents, graphs, masks, resuming."""

import copy
import math

import pytest
import torch
from learner_twins import EXACT, assert_same_learning
from samples import poisoned
from support.tiers import second_tier_cases

from torchrl_marl import TeamSpec
from torchrl_marl.collectors import RolloutCollector, TeamPolicy
from torchrl_marl.envs import with_memory
from torchrl_marl.envs.toy import Arena
from torchrl_marl.learners import build_learners
from torchrl_marl.learners.algorithms import ALGORITHMS
from torchrl_marl.modules import CriticConfig, MemoryConfig, RecurrentNetworkConfig

SIMULTANEOUS = {"haddpg": "maddpg", "hatd3": "matd3", "hasac": "masac"}
LR, LIMIT, L = 0.02, 0.05, 5


def made(algorithm, execution="eager", n_agents=3, **settings):
    """A learner, and the collector of its batches."""
    env = Arena(4, n_agents=n_agents, years=3, lives=2, late_spawn=1, seed=0,
                continuous_actions=True)  # fmt: skip
    actor = RecurrentNetworkConfig([8], sharing="none", memory=MemoryConfig("gru", size=6))
    small = {"actor": actor, "critic": CriticConfig([8]), "actor_lr": LR, "critic_lr": LR}
    small |= {"window": L, "minibatch_size": 20, "learning_starts": 0, "updates_per_frame": 0.03}
    config = ALGORITHMS.schema(algorithm)(algorithm, **small | settings)
    torch.manual_seed(0)
    [learner] = build_learners(TeamSpec.from_env(env), config, execution=execution)
    policy = TeamPolicy(learner.actors.values())
    return learner, RolloutCollector(with_memory(env, policy), policy, frames_per_batch=80)


def trained(*args, n=2, **settings):
    learner, collector = made(*args, **settings)
    return [learner], [learner.learn(collector.rollout()) for _ in range(n)]


@pytest.mark.parametrize("algorithm", ["hasac", *second_tier_cases("compiled", "haddpg", "hatd3")])
def test_single_agent_matches_simultaneous_updates(algorithm):
    names = (algorithm, SIMULTANEOUS[algorithm])
    runs = [trained(name, n_agents=1, burn_in=1, max_grad_norm=0.1) for name in names]
    assert_same_learning(*runs, rtol=1e-4, atol=1e-6)


@pytest.mark.compiled
@pytest.mark.parametrize("algorithm", SIMULTANEOUS)
@pytest.mark.parametrize("burn_in", [0, 2])
def test_traced_updates_match_eager_updates(algorithm, burn_in):
    runs = [trained(algorithm, how, burn_in=burn_in) for how in ("eager", "trace")]
    assert_same_learning(*runs, equal_nan=True, **EXACT)


def updated_in_sequence(loss, windows, order):
    """The actor after one update; each agent's states are computed with its current weights."""
    actor, data = copy.deepcopy(loss.actor_network), loss.inputs(windows)
    parameters, mask, key = list(actor.parameters()), windows["agents", "mask"], loss.group.key
    alive = mask.sum(-1).clamp_min(1)
    for i in order:
        with loss.in_time():
            acted = actor(data.select(*actor.in_keys))
        action = acted[key("action")].detach()
        action[..., i, :] = acted[key("action")][..., i, :]
        joint = data.copy().set(key("action"), torch.where(mask.unsqueeze(-1), action, 0.0))
        value = torch.where(mask, loss.values(joint)[..., 0], 0.0).sum(-1) / alive
        own = loss.saturation_coeff * acted[key("loc")][..., i, :].square().mean(-1)
        objective = (own - value)[mask[..., i]].mean()
        gradients = [g[i] for g in torch.autograd.grad(objective, parameters)]
        norm = math.sqrt(sum(float(g.square().sum()) for g in gradients))
        with torch.no_grad():
            for parameter, gradient in zip(parameters, gradients):
                g = gradient * min(1.0, LIMIT / (norm + 1e-6))
                parameter[i] -= LR * g / (g.abs() + 1e-8)  # Adam's first step
    return actor


@pytest.mark.parametrize("algorithm", ["hatd3", *second_tier_cases("compiled", "haddpg")])
def test_update_matches_loop_over_agents(algorithm):
    learner, collector = made(algorithm, max_grad_norm=LIMIT)
    learner._store(collector.rollout())
    [loss] = learner.losses.values()
    for seed in range(2):
        twin = copy.deepcopy(learner)
        [loss] = twin.losses.values()
        rows = twin.replay.rows(1, 24, L)[0]
        windows = twin.replay.windows(rows, L)
        init, mask = windows["agents", "is_init"], windows["agents", "mask"]
        assert init[:, 1:].any() and not mask.all() and windows["valid"].all()
        torch.manual_seed(seed)
        loss.value_loss(windows.clone())  # samples its actions, too
        order = torch.rand(3).argsort().tolist()
        wanted = updated_in_sequence(loss, windows, order)
        torch.manual_seed(seed)
        twin.updates._run_update(twin.replay, rows, 2)
        found = loss.actor_network.parameters()
        for mine, theirs in zip(found, wanted.parameters(), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=LR / 100)


@pytest.mark.parametrize(
    ("algorithm", "value"), [("hatd3", math.nan), *second_tier_cases("compiled", ("hasac", 1e9))]
)
def test_values_in_masked_slots_have_no_effect(algorithm, value):
    learner, collector = made(algorithm, burn_in=1)
    twin, found = copy.deepcopy(learner), []
    batch = collector.rollout()
    mask, alive = batch["agents", "mask"], ~batch["agents", "done"].squeeze(-1)
    flags = batch["next", "agents"]
    cut = alive & (flags["truncated"] & ~flags["terminated"]).squeeze(-1)
    bad = poisoned(batch, ("agents", "observation"), mask, value)
    bad = poisoned(bad, ("agents", "action"), mask, value)
    bad = poisoned(bad, ("agents", "hidden"), alive, value)
    bad = poisoned(bad, ("next", "agents", "reward"), alive, value)
    bad = poisoned(bad, ("next", "agents", "observation"), flags["mask"] | cut, value)
    assert not mask.all()
    for own, data in ((learner, batch), (twin, bad)):
        torch.manual_seed(1)
        found.append([own.learn(data)])
    assert_same_learning(([], found[0]), ([], found[1]), **EXACT)
    for mine, theirs in zip(learner.parameters(), twin.parameters(), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("algorithm", ["hatd3", *second_tier_cases("compiled", "hasac")])
def test_learner_resumes_exactly(algorithm):
    learner, collector = made(algorithm)
    learner.learn(collector.rollout())
    batch = collector.rollout()
    other, _ = made(algorithm)
    other.load_state_dict(copy.deepcopy(learner.state_dict()))
    runs = []
    for own in (learner, other):
        torch.manual_seed(3)
        runs.append(([own], [own.learn(batch.clone())]))
    assert runs[0][1][0]["agents", "updates"] > 0
    assert_same_learning(*runs, equal_nan=True, **EXACT)
