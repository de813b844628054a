"""Actors updated in sequence: against a plain loop, single agents, graphs, masks, resuming."""

import contextlib
import copy
import math

import learner_twins
import pytest
import torch
from learner_twins import assert_masked_slots_change_no_bit
from meadow import make_meadow
from samples import POISON, states
from support.tiers import second_tier_cases

from torchrl_marl.collectors import RolloutCollector, TeamPolicy
from torchrl_marl.envs.toy import Arena
from torchrl_marl.errors import ConfigError
from torchrl_marl.learners import OffPolicyConfig, OffPolicyLearner
from torchrl_marl.learners.harl import HARLLearner
from torchrl_marl.learners.harl_config import HARLConfig
from torchrl_marl.learners.off_policy_config import ReplayConfig
from torchrl_marl.modules import CriticConfig, NetworkConfig
from torchrl_marl.modules.stacks.matmul import Perceptron
from torchrl_marl.modules.stacks.storage import Bucket
from torchrl_marl.objectives import off_policy
from torchrl_marl.objectives.off_policy import OffPolicyLoss
from torchrl_marl.recipes import load_config

LR = 0.02
SIMULTANEOUS = {"haddpg": "maddpg", "hatd3": "matd3", "hasac": "masac"}
SMALL = {"actor": NetworkConfig([8], sharing="none"), "critic": CriticConfig([8])}
SMALL |= {"minibatch_size": 16, "learning_starts": 0, "actor_lr": LR, "critic_lr": LR}


def arena(**settings):
    return Arena(4, **{"n_agents": 3, "seed": 0, "continuous_actions": True} | settings)


def trained(env, n_batches=2, execution="eager", schema=HARLConfig, seed=0, **settings):
    config = schema(**SMALL | settings)
    kind = HARLLearner if schema is HARLConfig else OffPolicyLearner

    def make(team):
        return kind(team.groups, config, team=team, execution=execution)

    return learner_twins.train_on_batches(make, env, n_batches, seed)


def assert_equal(one, other, **tolerance):
    (mine, metrics), (theirs, found) = one, other
    for x, y in zip(states([mine]), states([theirs]), strict=True):
        torch.testing.assert_close(x, y, equal_nan=True, **tolerance)
    for x, y in zip(metrics, found, strict=True):
        assert set(x.keys(True, True)) == set(y.keys(True, True))
        for key, value in x.items(True, True):
            torch.testing.assert_close(value, y[key], equal_nan=True, **tolerance)


EXACT = {"rtol": 0, "atol": 0}


@pytest.mark.parametrize("continuous", [True, False])
@pytest.mark.parametrize("algorithm", SIMULTANEOUS)
def test_single_agent_matches_simultaneous_updates(algorithm, continuous):
    settings = {"n_agents": 1, "continuous_actions": continuous, "years": 2}
    one = trained(arena(**settings), algorithm=algorithm, max_grad_norm=0.1)
    other = trained(
        arena(**settings),
        schema=OffPolicyConfig,
        algorithm=SIMULTANEOUS[algorithm],
        max_grad_norm=0.1,
    )
    assert_equal(one, other, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("algorithm", "groups"),
    [("hatd3", 2), ("hasac", 1), *second_tier_cases("compiled", ("haddpg", 1))],
)
def test_traced_updates_match_eager_updates(algorithm, groups):
    """The same graphs serve all orders of the agents."""
    settings = {"algorithm": algorithm, "replay": ReplayConfig(capacity=400, alpha=0.6)}
    settings["updates_per_frame"] = 0.05
    env = {
        "n_agents": 2 * groups,
        "n_groups": groups,
        "years": 2,
        "continuous_actions": algorithm != "hasac",
    }
    one, other = (trained(arena(**env), execution=x, **settings) for x in ("eager", "trace"))
    assert_equal(one, other, **EXACT)
    assert one[0].replay.priorities is not None


@pytest.mark.parametrize(
    ("algorithm", "value"),
    [*zip(["hatd3", "hasac"], POISON), *second_tier_cases("compiled", ("haddpg", POISON[0]))],
)
def test_values_in_masked_slots_have_no_effect(algorithm, value):
    env = arena(max_steps=12, years=2, continuous_actions=algorithm != "hasac")
    one, other = (trained(env, 0, algorithm=algorithm)[0] for _ in range(2))
    assert_masked_slots_change_no_bit(one, other, env, value)


@pytest.mark.parametrize("algorithm", ["hatd3", "hasac", *second_tier_cases("compiled", "haddpg")])
def test_learner_resumes_exactly(algorithm):
    env = arena()
    learner, _ = trained(env, algorithm=algorithm)
    other, _ = trained(env, 0, seed=1, algorithm=algorithm)
    other.load_state_dict(copy.deepcopy(learner.state_dict()))
    batch = make_batch(env, learner)
    metrics = []
    for own in (learner, other):
        torch.manual_seed(3)
        metrics.append([own.learn(batch.clone())])
    assert_equal((learner, metrics[0]), (other, metrics[1]), **EXACT)


def make_batch(env, learner):
    policy = TeamPolicy(learner.actors.values())
    return RolloutCollector(env, policy, frames_per_batch=40).rollout()


# ----------------------------------------------------------------- one update, by a plain loop


def act(algorithm, loss, actor, data):
    """The actions of all agents, and the terms of their losses besides the value, ``[B, N]``."""
    inputs = data.select(*actor.in_keys)
    if algorithm == "hasac":
        action, log_prob = actor.get_dist(inputs).rsample_and_log_prob()
        low, high = loss.group.action_bounds
        log_prob = log_prob + ((high - low) / 2).log().sum(-1)
        return action, loss.log_alpha.exp().detach() * log_prob
    out = actor(inputs)
    squares = out[loss.group.key("loc")].square().mean(-1)
    return out[loss.group.action_key], loss.saturation_coeff * squares


def updated_in_sequence(algorithm, loss, data, seed, own_values, limit):
    """The actors after one update of the agents in random order."""
    actor = copy.deepcopy(loss.actor_network)
    torch.manual_seed(seed)
    loss.value_loss(data.clone())  # samples its actions, too
    n_agents = loss.group.n_agents
    order = torch.rand(n_agents).argsort().tolist()
    mask = data[loss.group.mask_key]
    parameters, losses = list(actor.parameters()), {}
    clean, kept = loss.inputs(data), None
    for i in order:
        action, own = act(algorithm, loss, actor, clean)
        others = (action if kept is None else kept).detach()
        joint = torch.stack([(action if j == i else others)[:, j] for j in range(n_agents)], 1)
        joint = torch.where(mask.unsqueeze(-1), joint, 0.0)
        values = loss.values(clean.copy().set(loss.group.action_key, joint))
        values = values.amin(-1) if algorithm == "hasac" else values[..., 0]
        steps = []
        for b in range(len(data)):
            if mask[b, i]:
                alive = [j for j in range(n_agents) if mask[b, j]]
                value = (
                    values[b, i] if own_values else sum(values[b, j] for j in alive) / len(alive)
                )
                steps.append(own[b, i] - value)
        losses[i] = sum(steps) / len(steps)
        gradients = [g[i] for g in torch.autograd.grad(losses[i], parameters)]
        norm = math.sqrt(sum(float(g.square().sum()) for g in gradients))
        with torch.no_grad():
            for parameter, gradient in zip(parameters, gradients):
                g = gradient * min(1.0, limit / (norm + 1e-6))
                parameter[i] -= LR * g / (g.abs() + 1e-8)  # Adam's first step
            if i != order[-1]:
                new = act(algorithm, loss, actor, clean)[0]
                moved = torch.tensor([j == i or kept is None for j in range(n_agents)])
                kept = torch.where(moved.unsqueeze(-1), new, others)
    return actor, losses, order


@pytest.mark.parametrize("gradient", ["team", "agent"])
@pytest.mark.parametrize("algorithm", SIMULTANEOUS)
def test_update_matches_loop_over_agents(algorithm, gradient):
    env, limit, orders = arena(years=2), 0.05, set()
    for seed in range(3):
        settings = {"actor_gradient": gradient, "max_grad_norm": limit}
        learner, _ = trained(env, 0, algorithm=algorithm, **settings)
        learner._store(make_batch(env, learner))
        updates, (loss,) = learner.updates, learner.losses.values()
        rows = learner.replay.rows(1, 32)[0]
        data = learner.replay.look(rows, 1, 0.99)
        assert not bool(data[loss.group.mask_key].all())
        wanted, losses, order = updated_in_sequence(
            algorithm, loss, data, seed, gradient == "agent", limit
        )
        torch.manual_seed(seed)
        row = updates._run_update(learner.replay, rows, 2)
        found = loss.actor_network.parameters()
        for mine, theirs in zip(found, wanted.parameters(), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=LR / 100)
        mean = sum(losses.values()) / len(losses)
        column = updates._columns[2][next(iter(learner.losses)), "loss_actor"]
        torch.testing.assert_close(row[column].squeeze(), mean.detach(), rtol=1e-4, atol=1e-5)
        for x in updates.optimizers.values():
            assert {float(x.state[p]["step"]) for p in x.parameters} == {1.0}
        orders.add(tuple(order))
    assert len(orders) > 1


# -------------------------------------------------------------- agents that an update computes

TURNS = {
    "deaths": (lambda: arena(years=2), {"algorithm": "hatd3", "max_grad_norm": 0.1}),
    "groups": (lambda: arena(n_agents=4, n_groups=2), {"algorithm": "hatd3"}),
    "sizes and widths": (lambda: make_meadow(4, "three"), {"algorithm": "haddpg"}),
    "own values": (lambda: arena(years=2), {"algorithm": "haddpg", "actor_gradient": "agent"}),
    "sampled": (lambda: arena(years=2), {"algorithm": "hasac"}),
    "discrete": (lambda: arena(continuous_actions=False), {"algorithm": "hatd3"}),
    "discrete, sampled": (lambda: arena(continuous_actions=False), {"algorithm": "hasac"}),
}
ALIKE = {"rtol": 1e-4, "atol": 1e-5}


@pytest.mark.parametrize("case", TURNS)
def test_computing_only_updated_agents_matches_computing_all(case, monkeypatch):
    make_env, settings = TURNS[case]
    one = trained(make_env(), **settings)
    n_agents, *others = agents_computed(one[0], make_env())
    assert set(others) == {len(one[0].groups)} and n_agents > len(one[0].groups)
    monkeypatch.setattr(off_policy, "run_only_agents", lambda *arguments: contextlib.nullcontext())
    other = trained(make_env(), **settings)
    assert set(agents_computed(other[0], make_env())) == {n_agents}
    assert_equal(one, other, **ALIKE)


@pytest.mark.parametrize("case", ["deaths", "groups", "sizes and widths", "own values"])
def test_cached_actions_are_those_of_the_newest_policies(case, monkeypatch):
    make_env, settings = TURNS[case]
    one, kept = trained(make_env(), **settings), OffPolicyLoss.current_actions
    monkeypatch.setattr(OffPolicyLoss, "current_actions", lambda loss, data, *_: kept(loss, data))
    assert_equal(one, trained(make_env(), **settings), **ALIKE)


def agents_computed(learner, env):
    """Number of agents in each call of the actor with a gradient, in one update."""
    learner._store(make_batch(env, learner))
    [loss], calls, run = learner.losses.values(), [], Perceptron.run
    own = {id(part.plan) for part in loss.actor_network.modules() if isinstance(part, Bucket)}

    def counted(self, call, *args):
        if id(self) in own and torch.is_grad_enabled():
            calls.append(call.shape[0])
        return run(self, call, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Perceptron, "run", counted)
        learner.updates._run_update(learner.replay, learner.replay.rows(1, 16)[0], 2)
    return calls


def test_groups_have_separate_orders():
    learner, _ = trained(arena(n_agents=4, n_groups=2), 0)
    drawn = set()
    for seed in range(16):
        torch.manual_seed(seed)
        turns = torch.cat(list(learner.updates._draw_turns().values()))
        assert sorted(turns[:2].tolist()) == sorted(turns[2:].tolist()) == [0, 1]
        drawn.add(tuple(turns.tolist()))
    assert len(drawn) == 4


# -------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (
            ["learner=hatd3", "learner.actor.share_params=true"],
            "learner.actor.sharing is 'group', but hatd3 updates one agent after the other, each "
            "with a network of its own; use learner.actor.sharing=none, or "
            "learner.algorithm=matd3.",
        ),
        (["learner=hasac", "learner.mixer.kind=sum"], "learner.algorithm is maddpg or matd3"),
        (
            ["learner=haddpg", "population.size=2"],
            "updates agents in a different order for each member",
        ),
        (
            ["learner=haddpg", "population.size=2"],
            "vdn, iql, maddpg, iddpg, matd3, itd3, masac, isac for a population",
        ),
        (["learner=hatd3", "learner.unshare_at=0.5"], "learner.unshare_at is 0.5"),
    ],
)
def test_invalid_settings_raise(texts, message):
    with pytest.raises(ConfigError) as refused:
        load_config("toy_arena_mappo", texts)
    assert message in str(refused.value)
