"""HAPPO with memory: a recurrent policy for each agent, updated in sequence."""

import copy

import pytest
import torch
from samples import POISON, poisoned
from support.tiers import second_tier_cases
from torch import nn

from torchrl_marl import TeamSpec
from torchrl_marl.collectors import RolloutCollector, TeamPolicy
from torchrl_marl.envs import with_memory
from torchrl_marl.envs.toy import Arena
from torchrl_marl.learners import OnPolicyConfig, build_learners
from torchrl_marl.learners.happo_config import HAPPOConfig
from torchrl_marl.modules import MemoryConfig, RecurrentCriticConfig, TeamNetworkConfig


def made(n_agents=3, schema=HAPPOConfig, execution="eager", n_groups=1, **settings):
    """A learner, and the collector of its batches."""
    env = Arena(4, n_agents=n_agents, n_groups=n_groups, years=3, lives=2, late_spawn=1, seed=0)
    actor = TeamNetworkConfig([8], sharing="none", memory=MemoryConfig("gru", size=6))
    critic = RecurrentCriticConfig([8], memory=MemoryConfig("lstm", size=4))
    small = {"window": 5, "minibatch_size": 20, "num_epochs": 2, "lr": 0.01}
    torch.manual_seed(0)
    config = schema(actor=actor, critic=critic, **(small | settings))
    [learner] = build_learners(TeamSpec.from_env(env), config, execution=execution)
    policy = TeamPolicy(learner.actors.values())
    return learner, RolloutCollector(with_memory(env, policy), policy, frames_per_batch=80)


def trained(*args, n=2, look=None, **settings):
    """The learner after some batches, and all metrics."""
    learner, collector = made(*args, **settings)
    if look is not None:
        look(learner)
    return learner, [learner.learn(collector.rollout()) for _ in range(n)]


def assert_same(one, other):
    (learner, metrics), (twin, found) = one, other
    for name, x in learner.state_dict().items():
        if isinstance(x, torch.Tensor):
            assert torch.equal(x, twin.state_dict()[name]), name
    for mine, theirs in zip(metrics, found, strict=True):
        for key, x in mine.items(True, True):
            assert torch.equal(x, theirs[key]), key


@pytest.mark.parametrize("burn_in", [0, 2])
def test_single_agent_matches_mappo_exactly(burn_in):
    assert_same(*(trained(1, schema, burn_in=burn_in) for schema in (HAPPOConfig, OnPolicyConfig)))


@pytest.mark.parametrize(
    "settings",
    [{"burn_in": 2}, *second_tier_cases("compiled", {}, {"n_agents": 4, "n_groups": 2})],
    ids=str,
)
def test_traced_updates_match_eager_updates(settings):
    assert_same(*(trained(execution=how, **settings) for how in ("eager", "trace")))


def test_each_update_changes_one_actor_and_later_advantages():
    """The ratio of an updated agent scales the advantage of the next one."""
    seen = []

    def look(learner):
        run, before = learner.updates.run, []

        def watched(frames, epochs):
            cells = [p for p in learner.actor.parameters() if p.ndim == 3]
            now = [p.detach().clone() for p in cells]
            if before:
                moved = [
                    {i for i in range(3) if not torch.equal(a[i], b[i])}
                    for a, b in zip(before[-1], now)
                ]
                seen.append((moved, frames["agents", "advantage"].clone()))
            before.append(now)
            return run(frames, epochs)

        learner.updates.run = watched

    trained(n=1, look=look)
    [(first, one), (second, two)] = seen
    who = set().union(*first)
    assert len(who) == 1 and len(set().union(*second)) == 1 and who != set().union(*second)
    assert not torch.equal(one, two) and torch.isfinite(two).all()


# ------------------------------------------------------------------------ by a plain loop


class BareActor(nn.Module):
    """An agent's policy in modules of torch alone."""

    def __init__(self, weights):
        super().__init__()
        self.encoder, self.cell, self.head = nn.Linear(6, 8), nn.GRUCell(8, 6), nn.Linear(6, 4)
        order = (self.encoder.weight, self.encoder.bias, self.cell.weight_ih, self.cell.bias_ih)
        order += (self.cell.weight_hh, self.cell.bias_hh, self.head.weight, self.head.bias)
        self.order = order
        for p, value in zip(order, weights, strict=True):
            p.data.copy_(value)

    def log_ratio(self, windows, i):
        """Log of the importance ratio of the actions of windows, ``[W, L]``."""
        state, found = windows["hidden"][:, 0, i], []
        for t in range(5):
            state = torch.where(windows["is_init"][:, t, i], 0.0, state)
            seen = torch.where(windows["mask"][:, t, i, None], windows["observation"][:, t, i], 0.0)
            after = self.cell(torch.tanh(self.encoder(seen)), state)
            state = torch.where(windows["mask"][:, t, i, None], after, state)
            policy = torch.distributions.Categorical(logits=self.head(state))
            log_prob = policy.log_prob(windows["action"][:, t, i])
            found.append(log_prob - windows["action_log_prob"][:, t, i])
        return torch.stack(found, 1)


def bare_turns(windows, actors, optimizers, order):
    """Each agent's epochs, then its ratios as a factor of the others' advantages."""
    factor = 1.0
    for i in order:
        acts, advantage = windows["mask"][..., i], windows["advantage"][..., i, 0] * factor
        for _ in range(2):
            ratio = actors[i].log_ratio(windows, i).exp()
            gain = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
            optimizers[i].zero_grad()
            (-gain[acts].mean()).backward()
            optimizers[i].step()
        moved = actors[i].log_ratio(windows, i).detach().exp()
        factor = factor * torch.where(acts, moved, 1.0)


def test_updates_match_plain_torch_script():
    """Each agent has a cell and an Adam; its states are computed with its newest weights."""
    first = []

    def look(learner):
        run = learner.updates.run
        learner.updates.run = lambda frames, n: first.append(frames.clone()) or run(frames, n)

    settings = {"minibatch_size": 80, "max_grad_norm": None, "lr": 0.05}
    learner, collector = made(**settings)
    look(learner)
    stacked = list(learner.actors["agents"].module.parameters())
    actors = [BareActor([p[i] for p in stacked]) for i in range(3)]
    optimizers = [torch.optim.Adam(actor.order, lr=0.05, eps=1e-5) for actor in actors]
    for seed in range(3):
        batch = collector.rollout()
        torch.manual_seed(seed)
        learner.learn(batch)
        windows = first[0]["agents"]
        assert windows["is_init"][:, 1:].any() and not windows["mask"].all()
        torch.manual_seed(seed)
        order = torch.randperm(3).argsort().tolist()
        bare_turns(windows, actors, optimizers, order)
        first.clear()
        for i, actor in enumerate(actors):
            for p, q in zip(actor.order, stacked, strict=True):
                torch.testing.assert_close(p, q[i], rtol=1e-3, atol=1e-4)


# ------------------------------------------------------------------- masked slots, and resuming


@pytest.mark.parametrize("value", POISON)
def test_values_in_masked_slots_have_no_effect(value):
    learner, collector = made()
    twin = copy.deepcopy(learner)
    batches, metrics = [collector.rollout() for _ in range(2)], ([], [])
    for number, batch in enumerate(batches):
        mask, alive = batch["agents", "mask"], ~batch["agents", "done"].squeeze(-1)
        flags = batch["next", "agents"]
        cut = alive & (flags["truncated"] & ~flags["terminated"]).squeeze(-1)
        bad = poisoned(batch, ("agents", "observation"), mask, value)
        bad = poisoned(bad, ("agents", "action"), mask, value)
        bad = poisoned(bad, ("agents", "action_log_prob"), mask, value)
        bad = poisoned(bad, ("agents", "hidden"), alive, value)
        bad = poisoned(bad, ("next", "agents", "observation"), flags["mask"] | cut, value)
        assert not mask.all()
        for own, data, found in zip((learner, twin), (batch, bad), metrics):
            torch.manual_seed(number)
            found.append(own.learn(data))
    assert_same((learner, metrics[0]), (twin, metrics[1]))


def test_learner_resumes_exactly():
    learner, collector = made()
    learner.learn(collector.rollout())
    batch = collector.rollout()
    other, _ = made(lr=0.01)
    other.load_state_dict(copy.deepcopy(learner.state_dict()))
    results = []
    for own in (learner, other):
        torch.manual_seed(3)
        results.append((own, [own.learn(batch.clone())]))
    assert_same(*results)
