"""The on-policy learner: parity with a bare script, masks, schedules, state, learning."""

import copy

import pytest
import torch
from samples import POISON, assert_same, poisoned, states
from torch import nn
from torchrl.envs.utils import ExplorationType, set_exploration_type

from torchrl_marl import TeamSpec
from torchrl_marl.collectors import RolloutCollector, TeamPolicy
from torchrl_marl.envs.toy import Arena, MatrixGame, TwoStepGame
from torchrl_marl.errors import ConfigError, NonFiniteError
from torchrl_marl.functional import gae
from torchrl_marl.learners import OnPolicyConfig, OnPolicyLearner, build_learners
from torchrl_marl.learners.updates import Updates
from torchrl_marl.modules import NetworkConfig
from torchrl_marl.modules.config import CriticConfig

SMALL = {"actor": NetworkConfig([8]), "critic": NetworkConfig([8])}


def make_arena(num_envs=8, **kwargs):
    settings = {"n_agents": 3, "years": 3, "lives": 2, "seed": 0} | kwargs
    return Arena(num_envs, **settings)


def make_learner(env, seed=0, **kwargs):
    torch.manual_seed(seed)
    settings = {**SMALL, "num_epochs": 2, "minibatch_size": 24, "entropy_coeff": 0.01} | kwargs
    return OnPolicyLearner(TeamSpec.from_env(env).groups, OnPolicyConfig(**settings))


def make_batch(env, learner, steps=10, seed=0):
    torch.manual_seed(seed)
    policy = TeamPolicy(learner.actors.values())
    frames = steps * env.batch_size.numel()
    return RolloutCollector(env, policy, frames_per_batch=frames).next()


def weights(learner):
    return [p.detach().clone() for p in learner.parameters()]


def learn(learner, batch, seed=1):
    torch.manual_seed(seed)
    return learner.learn(batch)


# ------------------------------------------------------------------------------------- parity


@pytest.mark.parametrize("value_norm", [False, True])
@pytest.mark.parametrize("normalize", ["pooled", "agent", "none"])
@pytest.mark.parametrize("critic_loss", ["l2", "huber"])
def test_learning_is_what_a_bare_script_does(value_norm, normalize, critic_loss):
    """PPO in plain torch, no losses, estimators or norms of anyone: same weights afterwards."""
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
        """Who is masked here is dead, and worth what the living are on average."""
        living = living.unsqueeze(-1)
        mean = (value * living).sum(-2, keepdim=True) / living.sum(-2, keepdim=True).clamp_min(1)
        return torch.where(living, value, mean)

    with torch.no_grad():
        value = network(critic_net, group["observation"], mask)
        value = shared_with_the_dead(value, mask)
        following = batch["next", "agents"]
        # Who was cut off by the time limit has a last observation; here nobody is.
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
    assert min(moved) > 5e-3  # the tolerance is far below what was learned


@pytest.mark.parametrize("algorithm", ["mappo", "ippo"])
@pytest.mark.parametrize("bootstrap", ["team", "agent"])
@pytest.mark.parametrize("value_norm", [True, False])
def test_groups_in_one_learner_learn_as_alone(algorithm, bootstrap, value_norm):
    """One loss and one optimizer, but means, statistics and limits of each group's own."""
    env = make_arena(n_groups=3, n_agents=6)
    settings = {
        "algorithm": algorithm,
        "bootstrap": bootstrap,
        "value_norm": value_norm,
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
@pytest.mark.parametrize("value", POISON)
def test_poison_through_a_whole_batch(algorithm, bootstrap, value):
    def run(poison):
        env = make_arena(action_mask=True, n_agents=2, n_groups=1)
        learner = make_learner(
            env, algorithm=algorithm, bootstrap=bootstrap, normalize_observations=True
        )
        for i in range(2):  # the second is seen through the statistics of the first
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


# ------------------------------------------------------------------------- updates, schedules


def test_number_of_updates(monkeypatch):
    env = make_arena()
    learner = make_learner(env, num_epochs=3, minibatch_size=32)
    sizes = []
    plain = Updates.step

    def step(self, minibatch):
        sizes.append(minibatch.shape[0])
        return plain(self, minibatch)

    monkeypatch.setattr(Updates, "step", step)
    metrics = learn(learner, make_batch(env, learner))
    assert sizes == [32, 32, 16] * 3
    assert metrics["agents", "epochs"].item() == 3
    assert learner.state_dict()["_extra_state"]["optimizer"]["state"][0]["step"].item() == 9


@pytest.mark.parametrize(("limit", "epochs"), [(0.0, 1), (1e9, 3), (None, 3)])
def test_epochs_stop_at_the_target_kl(limit, epochs):
    env = make_arena()
    learner = make_learner(env, num_epochs=3, lr=0.05, target_kl=limit)
    metrics = learn(learner, make_batch(env, learner))
    assert metrics["agents", "kl_approx"] > 0
    assert metrics["agents", "epochs"].item() == epochs


def test_schedules():
    env = make_arena()
    linear = {"lr_schedule": "linear", "entropy_schedule": "linear", "lr": 0.1}
    learner = make_learner(env, **linear, entropy_coeff=0.2)
    batch = make_batch(env, learner)
    for fraction, lr in ((0.0, 0.1), (0.25, 0.075), (1.0, 0.0)):
        learner.set_progress(fraction)
        metrics = learn(copy.deepcopy(learner), batch.clone())
        assert metrics["agents", "lr"].item() == pytest.approx(lr)
        entropy = metrics["agents", "entropy"] * -0.2 * (1 - fraction)
        assert metrics["agents", "loss_entropy"].item() == pytest.approx(entropy.item(), abs=1e-6)
    before = weights(learner)
    learn(learner, batch)
    assert all(torch.equal(a, b) for a, b in zip(before, weights(learner)))  # lr 0
    constant = make_learner(env, lr=0.1, entropy_coeff=0.2)
    constant.set_progress(0.5)
    metrics = learn(constant, batch)
    assert metrics["agents", "lr"].item() == pytest.approx(0.1)
    assert metrics["agents", "loss_entropy"].item() == pytest.approx(
        -0.2 * metrics["agents", "entropy"].item()
    )


def test_gradients_are_clipped_or_not():
    env = make_arena()
    for limit in (None, 1e-3):
        learner = make_learner(env, num_epochs=1, minibatch_size=80, max_grad_norm=limit)
        metrics = learn(learner, make_batch(env, learner))
        own = [*learner.actors["agents"].parameters(), *learner.critics["agents"].parameters()]
        norm = torch.cat([p.grad.flatten() for p in own]).norm().item()
        measured = metrics["agents", "grad_norm"].item()  # before it is clipped
        assert measured > 0.01
        assert norm == pytest.approx(measured if limit is None else 1e-3, rel=1e-3)


def test_the_observation_norm_changes_after_the_batch():
    env = make_arena()
    learner = make_learner(env, normalize_observations=True)
    norm = learner.observation_norms["agents"]
    batch = make_batch(env, learner)
    seen = []
    plain = learner.updates.step
    learner.updates.step = lambda minibatch: (seen.append(norm.count.item()), plain(minibatch))[1]
    learn(learner, batch)
    assert len(seen) == 8
    assert set(seen) == {0.0}
    living = batch["agents", "observation"][batch["agents", "mask"]].double()
    assert norm.count.item() == len(living) < 240
    torch.testing.assert_close(norm.mean, living.mean(0))
    torch.testing.assert_close(norm.variance, living.var(0, correction=0))
    # Actor and critic see through the same one, and it is saved once for both.
    assert learner.actors["agents"].module[0].module.features.norm is norm
    assert learner.critics["agents"].module.features.agents.norm is norm


def test_the_first_ratio_is_one():
    """The policy that collected is the policy that learns, statistics included."""
    env = make_arena()
    learner = make_learner(env, normalize_observations=True, num_epochs=1, minibatch_size=80)
    for i in range(2):
        metrics = learn(learner, make_batch(env, learner, seed=i))
        assert metrics["agents", "max_ratio"].item() == pytest.approx(1.0, abs=1e-5)
        assert metrics["agents", "kl_approx"].item() == pytest.approx(0.0, abs=1e-6)


def test_metrics():
    env = make_arena()
    learner = make_learner(env)
    batch = make_batch(env, learner)
    keys = set(batch.keys(True, True))
    metrics = learn(learner, batch)
    assert {
        "loss_objective",
        "loss_critic",
        "loss_entropy",
        "entropy",
        "kl_approx",
        "clip_fraction",
        "explained_variance",
        "grad_norm",
        "lr",
        "epochs",
    } <= set(metrics["agents"].keys())
    assert all(x.shape == () and not x.requires_grad for x in metrics.values(True, True))
    new = set(batch.keys(True, True)) - keys
    assert new == {("agents", leaf) for leaf in ("advantage", "value_target", "state_value")}
    living = batch["agents", "advantage"][batch["agents", "mask"]]
    assert living.mean().item() == pytest.approx(0.0, abs=1e-5)
    assert living.std(correction=0).item() == pytest.approx(1.0, abs=1e-3)


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


def test_the_only_actor():
    learner = make_learner(make_arena())
    assert learner.actor is learner.actors["agents"]
    with pytest.raises(ValueError, match="agents_0.*agents_1.*actors"):
        _ = make_learner(make_arena(n_groups=3), critic=CriticConfig([8], architecture="set")).actor


# -------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize("leaf", ["reward", "observation"])
def test_a_value_that_is_not_finite_stops(leaf):
    env = make_arena(n_groups=3)
    learner = make_learner(env)
    batch = make_batch(env, learner)
    key = ("next", "agents_1", "reward") if leaf == "reward" else ("agents_1", "observation")
    batch[key][0, 0] = float("nan")
    with pytest.raises(NonFiniteError, match="group 'agents_1': loss_.*NaN or infinite"):
        learn(learner, batch)


# ------------------------------------------------------------------------------------ learning


def trained(env, frames_per_batch, iterations, **kwargs):
    settings = {
        "actor": NetworkConfig([32]),
        "critic": NetworkConfig([32]),
        "lr": 1e-2,
        "minibatch_size": 10_000,
        "num_epochs": 5,
        "entropy_coeff": 0.01,
    } | kwargs
    learner = make_learner(env, **settings)
    policy = TeamPolicy(learner.actors.values())
    collector = RolloutCollector(env, policy, frames_per_batch=frames_per_batch)
    torch.manual_seed(0)
    for _ in range(iterations):
        learner.learn(collector.next())
    return policy


def return_of(env, policy, steps):
    """Mean return of the first episodes; the game ends within so many steps."""
    with torch.no_grad(), set_exploration_type(ExplorationType.DETERMINISTIC):
        rollout = env.rollout(steps, policy, break_when_any_done=False, auto_reset=True)
    done = rollout["next", "done"].squeeze(-1)
    first = torch.cat([torch.ones_like(done[:, :1]), ~done[:, :-1].cummax(1).values], 1)
    assert bool(done.any(1).all())
    # The living share one reward; the dead earn nothing.
    living = torch.stack([~rollout[g, "done"] for g in env.group_map])
    rewards = torch.stack([rollout["next", g, "reward"] for g in env.group_map])
    rewards = (rewards * living).sum((0, -1, -2)) / living.sum((0, -1, -2)).clamp_min(1)
    return (rewards * first).sum(1).mean().item()


@pytest.mark.parametrize("algorithm", ["mappo", "ippo"])
def test_it_learns_a_matrix_game(algorithm):
    env = MatrixGame(64, payoff="coordination", seed=0)
    policy = trained(env, 64, 40, algorithm=algorithm)
    assert return_of(env, policy, 1) == env.optimal_return == 10.0


@pytest.mark.parametrize("central_input", ["observations", "state"])
def test_it_learns_the_two_step_game(central_input):
    env = TwoStepGame(128, seed=0)
    policy = trained(
        env, 256, 80, central_input=central_input, entropy_coeff=0.1, entropy_schedule="constant"
    )
    assert return_of(env, policy, 2) >= 7.0  # the safe choice; 8 needs luck in exploration


@pytest.mark.parametrize(
    ("world", "settings"),
    [
        ({}, {}),
        ({"action_mask": True}, {"algorithm": "ippo", "bootstrap": "agent"}),
        ({"n_groups": 2}, {"normalize_advantage": "agent", "normalize_observations": True}),
    ],
    ids=["mappo", "ippo with action masks", "two groups"],
)
def test_it_learns_the_arena_in_which_agents_die(world, settings):
    settings = {"n_actions": 3, "years": 2, "lives": 2, "n_agents": 2, "seed": 0} | world, settings
    env = Arena(64, **settings[0])
    policy = trained(env, 64 * 8, 30, **settings[1])
    assert env.optimal_return == 3.0
    assert env.random_return < 1.6
    assert return_of(env, policy, 5) == pytest.approx(3.0, abs=0.05)
