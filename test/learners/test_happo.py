"""HAPPO: agents are updated in sequence, with advantages scaled by the ratios of earlier agents."""

import copy

import pytest
import torch
from meadow import make_meadow
from samples import POISON, assert_same, poisoned, states
from torch import nn

from torchrl_marl import TeamSpec
from torchrl_marl.collectors import RolloutCollector, TeamPolicy
from torchrl_marl.envs.toy import Arena, MatrixGame
from torchrl_marl.errors import ConfigError
from torchrl_marl.functional import masked_standardize
from torchrl_marl.learners import OnPolicyConfig, build_learners
from torchrl_marl.learners.happo_config import HAPPOConfig
from torchrl_marl.learners.sequential import SequentialLearner
from torchrl_marl.modules import CriticConfig, NetworkConfig, TeamNetworkConfig, make_critic
from torchrl_marl.modules.stacks.matmul import Perceptron
from torchrl_marl.modules.stacks.storage import Bucket
from torchrl_marl.objectives import MAPPOLoss
from torchrl_marl.recipes import load_config

FRAMES = 80
SMALL = {"minibatch_size": 40, "num_epochs": 2, "lr": 0.01, "critic": CriticConfig([8])}


def arena(**settings):
    return Arena(8, **{"n_agents": 3, "years": 3, "lives": 2, "seed": 0} | settings)


def make(env, schema=HAPPOConfig, execution="eager", **settings):
    torch.manual_seed(0)
    own = {"actor": NetworkConfig([8], sharing="none")}
    config = schema(**own | SMALL | settings)
    [learner] = build_learners(TeamSpec.from_env(env), config, execution=execution)
    return learner


def make_collector(env, learner):
    return RolloutCollector(env, TeamPolicy(learner.actors.values()), frames_per_batch=FRAMES)


def train(make_env, n=2, **settings):
    """The learner after some batches, and all metrics."""
    env = make_env()
    learner = make(env, **settings)
    collector = make_collector(env, learner)
    metrics = []
    for i in range(n):
        learner.set_progress(i / 4)
        metrics.append(learner.learn(collector.rollout()))
    return learner, metrics


def assert_equal_training(one, other):
    (a, metrics), (b, found) = one, other
    for x, y in zip(states([a]), states([b]), strict=True):
        assert_same(x, y)
    for x, y in zip(metrics, found, strict=True):
        assert set(x.keys(True, True)) == set(y.keys(True, True))
        for key in x.keys(True, True):
            assert_same(x[key], y[key], key)


def watch(learner, look):
    """Calls ``look(frames)`` before the update of each agent."""
    run = learner.updates.run

    def watched(frames, epochs):
        look(frames)
        return run(frames, epochs)

    learner.updates.run = watched


# -------------------------------------------------------------------------------- reductions

SINGLE_PROCESS = {
    "once": (lambda: MatrixGame(8, payoff=[1.0, 5.0, 2.0], seed=0), {}),
    "deaths, entropy": (lambda: arena(n_agents=1), {"entropy_coeff": 0.01}),
    "stops, schedules": (
        lambda: arena(n_agents=1),
        {"target_kl": 0.003, "num_epochs": 6, "lr_schedule": "linear", "max_grad_norm": 0.1},
    ),
    "rates": (lambda: arena(n_agents=1), {"lr_schedule": "kl", "lr_kl": 2e-3}),
}


@pytest.mark.parametrize("execution", ["eager", "trace"])
@pytest.mark.parametrize("case", SINGLE_PROCESS)
def test_single_agent_matches_mappo_exactly(case, execution):
    make_env, settings = SINGLE_PROCESS[case]
    settings["execution"] = execution
    one = train(make_env, **settings)
    number = torch.rand(1)
    assert_equal_training(one, train(make_env, schema=OnPolicyConfig, **settings))
    assert torch.equal(torch.rand(1), number)


def game_and_learner():
    """A random game of three agents, and a learner of whole batches without normalization."""
    env = MatrixGame(FRAMES, payoff=torch.randn(3, 3, 3).tolist(), seed=0)
    settings = {"minibatch_size": FRAMES, "value_norm": False, "max_grad_norm": None, "lr": 0.05}
    learner = make(env, loss_critic_type="l2", **settings)
    return env, learner


def test_updates_match_plain_torch_script():
    """Plain torch with a network and an Adam for each agent gives the same weights."""
    env, learner = game_and_learner()
    stacked = list(learner.actors["agents"].module.parameters())
    actors = [bare_actor([p[i] for p in stacked]) for i in range(3)]
    optimizers = [torch.optim.Adam(actor.parameters(), lr=0.05, eps=1e-5) for actor in actors]
    collector = make_collector(env, learner)
    for seed in range(2):
        batch = collector.rollout()
        torch.manual_seed(seed)
        learner.learn(batch)
        torch.manual_seed(seed)
        order = torch.randperm(3).argsort().tolist()
        bare_turns(batch.reshape(-1)["agents"], actors, optimizers, order)
    for i, actor in enumerate(actors):
        for p, q in zip(actor.parameters(), stacked, strict=True):
            torch.testing.assert_close(p, q[i], rtol=1e-4, atol=1e-6)


def test_updates_match_documented_loop_with_mappo_loss():
    """The loss of MAPPO and an Adam for each agent, as in the documentation of HAPPO."""
    env, learner = game_and_learner()
    group = TeamSpec.from_env(env).groups["agents"]
    parts = copy.deepcopy(learner.actors["agents"]), make_critic(group)
    own = {"entropy_coeff": 0.0, "clip_epsilon": 0.2}
    loss = MAPPOLoss(*parts, group=group, per_agent=True, normalize_advantage=False, **own)
    stacked = list(loss.actor_network_params.parameters())
    rows = [[nn.Parameter(p.data[i]) for p in stacked] for i in range(3)]
    optimizers = [torch.optim.Adam(x, lr=0.05, eps=1e-5) for x in rows]
    collector = make_collector(env, learner)
    for seed in range(2):
        batch = collector.rollout()
        torch.manual_seed(seed)
        learner.learn(batch)
        torch.manual_seed(seed)
        batch["agents", "advantage"] = masked_standardize(batch["agents", "advantage"])
        for i in torch.randperm(3).argsort().tolist():
            for _ in range(2):
                gradients = torch.autograd.grad(loss(batch)["loss_objective"][i], stacked)
                for x, gradient in zip(rows[i], gradients, strict=True):
                    x.grad = gradient[i]
                optimizers[i].step()
            batch["agents", "advantage"] *= loss.log_ratio(batch)[..., [i], :].exp()
    for p, q in zip(stacked, learner.actors["agents"].parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-6)


def bare_actor(weights):
    actor = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 3))
    for p, value in zip(actor.parameters(), weights, strict=True):
        p.data.copy_(value)
    return actor


def bare_turns(rows, actors, optimizers, order):
    advantage = masked_standardize(rows["advantage"]).squeeze(-1)
    for i in order:

        def log_ratio(i=i):
            logits = actors[i](rows["observation"][:, i])
            log_prob = torch.distributions.Categorical(logits=logits).log_prob(rows["action"][:, i])
            return log_prob - rows["action_log_prob"][:, i]

        for _ in range(2):
            ratio = log_ratio().exp()
            near = ratio.clamp(0.8, 1.2)
            loss = -torch.minimum(ratio * advantage[:, i], near * advantage[:, i]).mean()
            optimizers[i].zero_grad()
            loss.backward()
            optimizers[i].step()
        advantage = advantage * log_ratio().exp().detach().unsqueeze(-1)


# ---------------------------------------------------------------------------------- the factor


def shifted(batch, learner, ratios):
    """A batch whose actions are ``ratios`` times as likely under the current policy."""
    batch = batch.clone()
    batch["agents", "action_log_prob"] -= torch.tensor(ratios).log()
    seen = []
    watch(learner, lambda frames: seen.append(frames["agents", "advantage"].clone()))
    return batch, seen


def test_factor_is_product_of_ratios_of_earlier_agents():
    """The learning rate is almost 0, and the ratios are 2, 3 and 0.5."""
    env = MatrixGame(FRAMES, payoff=torch.randn(2, 2, 2).tolist(), seed=0)
    learner = make(env, lr=1e-30)
    batch, seen = shifted(make_collector(env, learner).rollout(), learner, [2.0, 3.0, 0.5])
    torch.manual_seed(5)
    learner.learn(batch)
    torch.manual_seed(5)
    first, second, _ = torch.randperm(3).argsort().tolist()
    ratios = {0: 2.0, 1: 3.0, 2: 0.5}
    factors = [1.0, ratios[first], ratios[first] * ratios[second]]
    assert len(seen) == 3
    for advantage, factor in zip(seen, factors):
        torch.testing.assert_close(advantage, factor * seen[0])
    # The batch keeps the estimated advantage.
    torch.testing.assert_close(
        seen[0].reshape(batch["agents", "advantage"].shape), batch["agents", "advantage"]
    )


def test_factor_of_dead_agents_is_one():
    env = arena()
    learner = make(env, lr=1e-30)
    batch, seen = shifted(make_collector(env, learner).rollout(), learner, [2.0, 3.0, 0.5])
    mask = batch["agents", "mask"].reshape(-1, 3)
    assert bool((~mask).any(0).all())
    torch.manual_seed(5)
    learner.learn(batch)
    torch.manual_seed(5)
    first, second, third = torch.randperm(3).argsort().tolist()
    ratios = torch.where(mask, torch.tensor([2.0, 3.0, 0.5]), 1.0)
    expected = seen[0][:, third, 0] * ratios[:, first] * ratios[:, second]
    torch.testing.assert_close(seen[2][:, third, 0], expected)


def test_groups_do_not_change_each_others_advantages():
    env = make_meadow(8, "two")  # two cats and three mice, trained as one
    learner = make(env, lr=1e-30)
    batch = make_collector(env, learner).rollout()
    batch["cats", "action_log_prob"] -= torch.tensor([2.0, 2.0]).log()
    batch["mice", "action_log_prob"] -= torch.tensor([3.0, 3.0, 3.0]).log()
    seen, key = [], ("cats+mice", "advantage")
    watch(learner, lambda frames: seen.append((frames[key].clone(), frames["cats+mice", "mask"])))
    learner.learn(batch)
    (before, mask), (after, _), _ = seen
    factor = (after / before).nan_to_num(1.0).squeeze(-1)
    everyone = mask.all(-1)
    assert bool(everyone.any())
    torch.testing.assert_close(
        factor[everyone], torch.tensor([2.0, 2.0, 3.0, 3.0, 3.0]).expand(int(everyone.sum()), 5)
    )


@pytest.mark.parametrize("value", POISON)
def test_values_in_masked_slots_have_no_effect(value):
    env = arena()
    batch = make_collector(env, make(env)).rollout()
    mask = batch["agents", "mask"]
    bad = batch
    for leaf in ("observation", "action", "action_log_prob"):
        bad = poisoned(bad, ("agents", leaf), mask, value)
    results = []
    for own in (batch, bad):
        learner = make(env)
        torch.manual_seed(1)
        results.append((learner, [learner.learn(own)]))
    assert_equal_training(*results)


# -------------------------------------------------------------------------- updates in sequence


def rows_of_agents(learner):
    """The parameters of each agent, and those of several agents."""
    [clip] = learner.updates.clips.values()
    owners = clip.row_groups.split(clip.sizes)
    return [
        torch.cat(
            [
                p.detach().reshape(len(o), -1)[o == i].flatten()
                for p, o in zip(clip.parameters, owners)
            ]
        )
        for i in range(clip.n_groups + 1)
    ]


@pytest.mark.parametrize("execution", ["eager", "trace"])
def test_each_update_changes_one_actor_and_the_first_the_critic(execution):
    env = arena()
    learner = make(env, execution=execution)
    collector = make_collector(env, learner)
    orders = []
    for _ in range(8):
        moments = []
        learner.updates.__dict__.pop("run", None)
        watch(learner, lambda frames, now=moments: now.append(rows_of_agents(learner)))
        learner.learn(collector.rollout())
        moments.append(rows_of_agents(learner))
        moved = [
            [i for i, (x, y) in enumerate(zip(*pair)) if not torch.equal(x, y)]
            for pair in zip(moments, moments[1:])
        ]
        assert moved[0][1:] == [3]  # the critic
        assert [len(own) for own in moved] == [2, 1, 1]
        orders.append(tuple(own[0] for own in moved))
        assert sorted(orders[-1]) == [0, 1, 2]
    assert len(set(orders)) > 2


def test_order_of_agents_depends_on_the_random_seed():
    one, other = (train(arena, n=4) for _ in range(2))
    assert_equal_training(one, other)


def test_adam_counts_steps_per_agent():
    learner, _ = train(arena, n=2)
    counted = {state["step"].item() for state in learner.optimizer.state.values()}
    assert counted == {8.0}  # 2 batches, 2 epochs of 2 minibatches


def test_target_kl_stops_agents_separately():
    free, metrics = train(arena, num_epochs=6, lr=0.05, n=1)
    limit = metrics[0]["agents", "kl_approx"].item()
    stopped, metrics = train(arena, num_epochs=6, lr=0.05, n=1, target_kl=limit)
    assert 1 < metrics[0]["agents", "epochs"].item() < 6
    pairs = zip(free.parameters(), stopped.parameters(), strict=True)
    assert any(not torch.equal(*pair) for pair in pairs)


CASES = {
    "deaths": (arena, {"entropy_coeff": 0.01, "normalize_observations": True}),
    "one group of two kinds": (lambda: make_meadow(8, "one"), {}),
    "as one": (lambda: make_meadow(8, "two"), {"central_input": "team", "max_grad_norm": 0.1}),
    "own critics": (arena, {"critic": CriticConfig([8], sharing="none"), "clip_value": True}),
    "stops": (arena, {"num_epochs": 4, "target_kl": 0.01, "lr": 0.03}),
    "scales as parameters": (
        lambda: make_meadow(8, "one"),
        {"actor": TeamNetworkConfig([8], sharing="none", state_independent_scale=True)},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_traced_updates_match_eager_updates(case):
    make_env, settings = CASES[case]
    one = train(make_env, **settings)
    number = torch.rand(1)
    assert_equal_training(one, train(make_env, execution="trace", **settings))
    assert torch.equal(torch.rand(1), number)


def test_three_graphs_serve_all_agents():
    """One for the first update, one for the others, and one for the ratios between them."""
    learner, _ = train(lambda: arena(n_agents=4), execution="trace")
    assert len(learner.updates.programs) == 3


@pytest.mark.parametrize("case", CASES)
def test_computing_only_updated_agents_matches_computing_all(case, monkeypatch):
    make_env, settings = CASES[case]
    learner, metrics = train(make_env, **settings)
    rows = _rows_that_ran(learner, make_env)
    assert rows == {len(learner.groups)}
    monkeypatch.setattr(SequentialLearner, "_chosen_agents", lambda *arguments: None)
    monkeypatch.setattr(MAPPOLoss, "trains_critic", property(lambda loss: True, lambda *_: None))
    other, found = train(make_env, **settings)
    assert _rows_that_ran(other, make_env) == {sum(g.n_agents for g in learner.groups.values())}
    for x, y in zip(states([learner]), states([other]), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-6)
    for x, y in zip(metrics, found, strict=True):
        for key in x.keys(True, True):
            if key[1] != "grad_norm":  # includes the critic only in the first update
                torch.testing.assert_close(x[key], y[key], rtol=1e-4, atol=1e-5, msg=str(key))


def _rows_that_ran(learner, make_env):
    """Numbers of agents that the actors' updates compute."""
    batch, rows, run = make_collector(make_env(), learner).rollout(), set(), Perceptron.run
    own = {id(part.plan) for part in learner.actors.modules() if isinstance(part, Bucket)}

    def counted(self, call, *args):
        if id(self) in own and torch.is_grad_enabled():
            rows.add(call.shape[0])
        return run(self, call, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Perceptron, "run", counted)
        learner.learn(batch)
    return rows


def test_learner_resumes_exactly():
    env = arena()
    learner = make(env)
    collector = make_collector(env, learner)
    learner.learn(collector.rollout())
    batch = collector.rollout()
    other = make(arena())
    other.load_state_dict(copy.deepcopy(learner.state_dict()))
    results = []
    for own in (learner, other):
        torch.manual_seed(3)
        results.append((own, [own.learn(batch.clone())]))
    assert_equal_training(*results)


# ------------------------------------------------------------------------------------ settings


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("actor.sharing=group", "actor.sharing is 'group', but happo updates one agent after the"),
        ("actor.share_params=true", "actor.sharing is 'group', but happo updates one agent after"),
        ("unshare_at=0.5", "learner.unshare_at is 0.5, which is read only where"),
    ],
)
def test_shared_policies_raise(text, error):
    with pytest.raises(ConfigError) as refusal:
        load_config("toy_arena_mappo", ["learner=happo", f"learner.{text}"])
    assert error in str(refusal.value)


def test_networks_are_not_shared_by_default():
    assert load_config("toy_arena_mappo", ["learner=happo"]).learner.actor.sharing == "none"


def test_networks_stay_unshared_when_only_num_cells_is_set():
    config = load_config("vmas_balance_mappo", {"learner": "happo", "learner.actor.num_cells": [8]})
    assert (config.learner.actor.sharing, config.learner.actor.num_cells) == ("none", [8])
