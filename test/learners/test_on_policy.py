"""The on-policy learner: parity with a plain torch script, masks, state, groups and errors."""

import copy

import pytest
import torch
from on_policy_learners import SMALL, learn, make_arena, make_batch, make_learner, weights
from samples import POISON, assert_same, poisoned, states
from torch import nn

from torchrl_marl import TeamSpec
from torchrl_marl.errors import ConfigError, NonFiniteError
from torchrl_marl.functional import gae
from torchrl_marl.learners import OnPolicyConfig, OnPolicyLearner, build_learners
from torchrl_marl.modules.config import CriticConfig

# ------------------------------------------------------------------------------------- parity


@pytest.mark.parametrize("value_norm", [False, True])
@pytest.mark.parametrize("normalize", ["pooled", "agent", "none"])
@pytest.mark.parametrize("critic_loss", ["l2", "huber"])
def test_updates_match_plain_torch_script(value_norm, normalize, critic_loss):
    """PPO in plain torch, without library losses or estimators, gives the same weights."""
    env = make_arena()
    learner = make_learner(
        env,
        value_norm=value_norm,
        value_norm_decay=0.9,
        normalize_advantage=normalize,
        loss_critic_type=critic_loss,
        huber_delta=0.3,
        gamma=0.9,
        lmbda=0.8,
        lr=1e-2,
        max_grad_norm=0.5,
        critic_coeff=0.7,
    )
    batch = make_batch(env, learner)
    group, mask = batch["agents"], batch["agents", "mask"]
    assert bool((~mask).any())

    actor_net = copy.deepcopy(learner.actors["agents"].module[0].module)
    critic_net = copy.deepcopy(learner.critics["agents"].module)
    parameters = [*actor_net.parameters(), *critic_net.parameters()]

    def network(net, observation, mask):
        features = torch.where(mask.unsqueeze(-1), observation, 0.0)
        return net.network(features if net is actor_net else features.flatten(-2))[0]

    def shared_with_the_dead(value, living):
        """Masked agents are dead here; they get the mean of living agents."""
        living = living.unsqueeze(-1)
        mean = (value * living).sum(-2, keepdim=True) / living.sum(-2, keepdim=True).clamp_min(1)
        return torch.where(living, value, mean)

    with torch.no_grad():
        value = network(critic_net, group["observation"], mask)
        value = shared_with_the_dead(value, mask)
        following = batch["next", "agents"]
        # Agents truncated by a time limit would have a last observation; there are none.
        assert not following["truncated"].any()
        next_value = network(critic_net, following["observation"], following["mask"])
        next_value = shared_with_the_dead(next_value, following["mask"])
        done, terminated = (
            batch["next", k].unsqueeze(-2).expand_as(value) for k in ("done", "terminated")
        )
        reward = shared_with_the_dead(following["reward"], mask)
        advantage, target = gae(reward, value, next_value, done, terminated, gamma=0.9, lmbda=0.8)
        mean, deviation = 0.0, 1.0
        if value_norm:  # before the first update: the identity
            living = target[mask]
            mean, deviation = living.mean(), living.std(correction=0)
        if normalize == "pooled":
            living = advantage[mask]
            advantage = (advantage - living.mean()) / (living.std(correction=0) + 1e-5)
        elif normalize == "agent":
            for i in range(3):
                living = advantage[:, :, i][mask[:, :, i]]
                advantage[:, :, i] = (advantage[:, :, i] - living.mean()) / (
                    living.std(correction=0) + 1e-5
                )
    optimizer = torch.optim.Adam(parameters, lr=1e-2, eps=1e-5)
    rows = {
        "observation": group["observation"],
        "mask": mask,
        "action": group["action"],
        "old": group["action_log_prob"],
        "advantage": advantage.squeeze(-1),
        "target": target.squeeze(-1),
    }
    rows = {key: x.flatten(0, 1) for key, x in rows.items()}
    torch.manual_seed(1)
    for _ in range(2):
        for indices in torch.randperm(80).split(24):
            b = {key: x[indices] for key, x in rows.items()}
            alive = b["mask"]
            log_p = network(actor_net, b["observation"], alive).log_softmax(-1)
            new = log_p.gather(-1, b["action"].unsqueeze(-1)).squeeze(-1)
            ratio = (new - b["old"]).exp()
            gain = torch.minimum(ratio * b["advantage"], ratio.clamp(0.8, 1.2) * b["advantage"])
            entropy = -(log_p.exp() * log_p).sum(-1)
            value = network(critic_net, b["observation"], alive).squeeze(-1)
            wanted = (b["target"] - mean) / deviation
            if critic_loss == "l2":
                error = (value - wanted) ** 2
            else:
                error = nn.functional.huber_loss(value, wanted, delta=0.3, reduction="none")
            loss = -gain[alive].mean() - 0.01 * entropy[alive].mean() + 0.7 * error[alive].mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(parameters, 0.5)
            optimizer.step()
    before = weights(learner)
    learn(learner, batch)
    ours = [*learner.actors["agents"].parameters(), *learner.critics["agents"].parameters()]
    assert len(ours) == len(parameters)
    for a, b in zip(ours, parameters):
        torch.testing.assert_close(a.detach(), b.detach(), rtol=2e-3, atol=2e-4)
    moved = [(a - b).abs().max() for a, b in zip(before, weights(learner))]
    assert min(moved) > 5e-3  # the tolerance is far below the change of the weights


@pytest.mark.parametrize("algorithm", ["mappo", "ippo"])
@pytest.mark.parametrize("bootstrap", ["team", "agent"])
@pytest.mark.parametrize(
    "values",
    [{}, {"value_norm": False}, {"value_centering": True}],
    ids=["norm", "raw", "centered"],
)
def test_joined_groups_match_separate_learners(algorithm, bootstrap, values):
    """One loss and one optimizer, but separate means, statistics and limits for each group."""
    env = make_arena(n_groups=3, n_agents=6)
    settings = {
        "algorithm": algorithm,
        "bootstrap": bootstrap,
        **values,
        "normalize_observations": True,
        "num_epochs": 1,
        "minibatch_size": 80,
        "max_grad_norm": 0.01,
    }
    together = make_learner(env, **settings)
    batch = make_batch(env, together)
    groups = TeamSpec.from_env(env).groups
    apart = {name: OnPolicyLearner({name: g}, together.config) for name, g in groups.items()}
    for i, alone in enumerate(apart.values()):
        for mine, ours in zip(alone.optimizer.param_groups, together.optimizer.param_groups):
            for a, b in zip(mine["params"], ours["params"], strict=True):
                a.data.copy_(b.data[i])
    both, batches = learn(together, batch), []
    for i, (name, alone) in enumerate(apart.items()):
        batches.append(batch.clone())
        one = learn(alone, batches[-1])
        for key in one[name].keys():
            torch.testing.assert_close(
                one[name, key], both[name, key], rtol=1e-4, atol=1e-5, msg=f"{name} {key}"
            )
        for leaf in ("advantage", "value_target", "state_value"):
            torch.testing.assert_close(batches[-1][name, leaf], batch[name, leaf])
        for mine, ours in zip(alone.optimizer.param_groups, together.optimizer.param_groups):
            for a, b in zip(mine["params"], ours["params"], strict=True):
                torch.testing.assert_close(a, b[i], rtol=1e-5, atol=1e-6)


# --------------------------------------------------------------------------------------- masks


@pytest.mark.parametrize("algorithm", ["mappo", "ippo"])
@pytest.mark.parametrize("bootstrap", ["team", "agent"])
@pytest.mark.parametrize("centering", [False, True])
@pytest.mark.parametrize("value", POISON)
def test_values_in_masked_slots_have_no_effect(algorithm, bootstrap, value, centering):
    def run(poison):
        env = make_arena(action_mask=True, n_agents=2, n_groups=1)
        learner = make_learner(
            env,
            algorithm=algorithm,
            bootstrap=bootstrap,
            normalize_observations=True,
            value_centering=centering,
        )
        for i in range(2):  # the second is normalized with statistics of the first
            batch = make_batch(env, learner, seed=i)
            if poison is not None:
                mask, following = batch["agents", "mask"], batch["next", "agents", "mask"]
                assert bool((~mask).any())
                assert mask.any(-1).all()
                for leaf in ("observation", "action", "action_log_prob"):
                    batch = poisoned(batch, ("agents", leaf), mask, poison)
                batch = poisoned(batch, ("next", "agents", "observation"), following, poison)
                batch = poisoned(batch, ("next", "agents", "reward"), mask, poison)
            metrics = learn(learner, batch, seed=i)
        return states([learner]), metrics

    (one, metrics), (other, after) = run(None), run(value)
    assert len(one) == len(other) > 20
    for a, b in zip(one, other):
        assert_same(a, b)
    for key in metrics.keys(True, True):
        assert_same(metrics[key], after[key], key)


# --------------------------------------------------------------------------------------- state


def test_state_round_trip(tmp_path):
    env = make_arena()
    settings = {"normalize_observations": True, "lr_schedule": "linear"}
    learner = make_learner(env, **settings)
    batches = [make_batch(env, learner, seed=i) for i in range(3)]
    learner.set_progress(0.3)
    learn(learner, batches[0].clone())
    torch.save(learner.state_dict(), tmp_path / "state.pt")
    other = make_learner(env, seed=5, **settings)
    learn(other, batches[2].clone())
    other.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    for a, b in zip(states([learner]), states([other])):
        assert_same(a, b)
    for one in (learner, other):
        learn(one, batches[1].clone())
    for a, b in zip(states([learner]), states([other])):
        assert_same(a, b)
    assert other.optimizer.param_groups[0]["lr"] == learner.optimizer.param_groups[0]["lr"]


def test_every_parameter_is_optimized_once():
    env = make_arena(n_groups=3)
    learner = make_learner(env)
    optimized = [p for group in learner.optimizer.param_groups for p in group["params"]]
    assert {id(p) for p in optimized} == {id(p) for p in learner.parameters()}
    assert len(optimized) == len({id(p) for p in optimized})


# -------------------------------------------------------------------------------------- groups


def test_equal_settings_share_a_learner():
    team = TeamSpec.from_env(make_arena(n_agents=4, n_groups=4))
    config = OnPolicyConfig(**SMALL)
    (one,) = build_learners(team, config)
    assert list(one.groups) == ["agents_0", "agents_1", "agents_2", "agents_3"]
    own = {"agents_1": {"lr": 1e-3}, "agents_3": {"lr": 1e-3}, "agents_2": {}}
    one, two = build_learners(team, config, own)
    assert list(one.groups) == ["agents_0", "agents_2"]
    assert list(two.groups) == ["agents_1", "agents_3"]
    assert one.config.lr == config.lr
    assert two.config.lr == two.optimizer.param_groups[0]["lr"] == 1e-3
    deep = build_learners(team, config, {"agents_0": {"actor": {"num_cells": [4]}}})
    assert [list(x.groups) for x in deep] == [["agents_0"], ["agents_1", "agents_2", "agents_3"]]
    assert next(deep[0].actors["agents_0"].parameters()).shape[0] == 4
    with pytest.raises(ConfigError, match=r"groups.agents_9.*did you mean"):
        build_learners(team, config, {"agents_9": {}})
    with pytest.raises(ConfigError, match="groups.agents_1.lrr"):
        build_learners(team, config, {"agents_1": {"lrr": 1e-3}})


def test_actor_of_a_learner_with_one_group():
    learner = make_learner(make_arena())
    assert learner.actor is learner.actors["agents"]
    with pytest.raises(ValueError, match="agents_0.*agents_1.*actors"):
        _ = make_learner(make_arena(n_groups=3), critic=CriticConfig([8], architecture="set")).actor


# -------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize("leaf", ["reward", "observation"])
def test_non_finite_value_raises(leaf):
    env = make_arena(n_groups=3)
    learner = make_learner(env)
    batch = make_batch(env, learner)
    key = ("next", "agents_1", "reward") if leaf == "reward" else ("agents_1", "observation")
    batch[key][0, 0] = float("nan")
    with pytest.raises(NonFiniteError, match="group 'agents_1': loss_.*NaN or infinite"):
        learn(learner, batch)
