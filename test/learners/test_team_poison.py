"""Whole iterations of teams with extreme values in masked and padded slots."""

import pytest
import torch
from meadow import make_meadow
from samples import POISON, assert_same, states
from team_learners import E, T, config_of, learners_of, policy_of
from torchrl.envs import Transform, TransformedEnv

from torchrl_marl import TeamSpec
from torchrl_marl.collectors import RolloutCollector
from torchrl_marl.collectors.rollout import check_finite
from torchrl_marl.modules import NetworkConfig
from torchrl_marl.training.metrics import EpisodeTracker, count_agent_frames


def poison_leaf(td, group, leaf, where):
    """Replaces values at ``where``, ``[*B, N]`` or the leaf's shape, by each poison in turn."""
    x = td.get((group, leaf), None)
    if x is None:
        return
    x = x.clone()
    where = where.reshape(where.shape + (1,) * (x.ndim - where.ndim)).expand_as(x)
    if x.dtype == torch.bool:
        x[where] = ~x[where]
    elif x.is_floating_point():
        in_turn = torch.arange(x.numel()).view(x.shape) % len(POISON)
        x[where] = torch.tensor(POISON, dtype=x.dtype)[in_turn[where]]
    else:
        x[where] = 10**9
    td.set((group, leaf), x)


def padding_of(group, leaf, shape):
    padding = group.paddings.get(leaf)
    if padding is None or len(padding.largest) == 0:
        return torch.zeros(shape, dtype=torch.bool)
    return ~padding.mask().expand(shape)


class Poison(Transform):
    """Fills masked and padded slots of an environment's output with extreme values."""

    def __init__(self, team):
        super().__init__()
        self.team = team

    def _enter(self, td):
        for name, group in self.team.groups.items():
            masked = ~td[name, "mask"]
            for leaf in ("observation", "action_mask", "state"):
                if (name, leaf) in td.keys(True):
                    shape = td[name, leaf].shape
                    where = masked.unsqueeze(-1) | padding_of(group, leaf, shape)
                    poison_leaf(td, name, leaf, where)
        return td

    def _reset(self, tensordict, tensordict_reset):
        return self._enter(tensordict_reset)

    def _step(self, tensordict, next_tensordict):
        for name in self.team.groups:
            dead = tensordict[name, "done"].squeeze(-1)
            poison_leaf(next_tensordict, name, "reward", dead)
        return self._enter(next_tensordict)


def poison_what_was_done(batch, team):
    for name, group in team.groups.items():
        masked = ~batch[name, "mask"]
        assert bool(masked.any()) and not bool(masked.all())
        for leaf in ("action", "action_log_prob", "loc", "scale", "logits"):
            if (name, leaf) not in batch.keys(True):
                continue
            rows = batch[name, leaf]
            poison_leaf(batch, name, leaf, masked)
            if leaf == "action" and rows.ndim == 4:
                poison_leaf(batch, name, leaf, padding_of(group, leaf, rows.shape))


CASES = {
    "one": {},
    "one, ippo": {
        "algorithm": "ippo",
        "bootstrap": "agent",
        "world": {"actions": "categorical", "mask_actions": True},
    },
    "one, own networks": {
        "actor": NetworkConfig([8], sharing="none"),
        "critic": {"sharing": "none"},
        "world": {"actions": "wide"},
    },
    "one, trunk": {
        "actor": NetworkConfig([8], sharing="trunk"),
        "critic": {"sharing": "trunk"},
        "algorithm": "ippo",
        "world": {"actions": "unbounded"},
    },
    "one, set": {"critic": {"architecture": "set"}, "normalize_advantage": "agent"},
    "one, one-hot, identity": {
        "actor": NetworkConfig([8], sharing="agent_id"),
        "world": {"actions": "one_hot", "mask_actions": True},
    },
    "two": {"layout": "two"},
    "two, apart": {"layout": "two", "apart": ["mice"], "bootstrap": "agent"},
    "two, ippo": {
        "layout": "two",
        "algorithm": "ippo",
        "bootstrap": "agent",
        "clip_value": True,
        "world": {"actions": "categorical", "mask_actions": True},
    },
    "two, one sees all": {"layout": "two", "central_input": "team", "clip_value": True},
    "two, each sees all": {"layout": "two", "central_input": "team", "apart": ["mice"]},
    "two, attention": {
        "layout": "two",
        "central_input": "team",
        "bootstrap": "agent",
        "critic": {"architecture": "attention", "value_per": "team"},
    },
    "two, state": {"layout": "two", "central_input": "state", "critic": {"value_per": "team"}},
    "one, own states": {"central_input": "agent_state", "world": {"states": "own"}},
    "two, own states": {
        "layout": "two",
        "algorithm": "ippo",
        "central_input": "agent_state",
        "bootstrap": "agent",
        "apart": ["mice"],
        "world": {"states": "own"},
    },
    "three": {"layout": "three", "normalize_advantage": "agent", "target_kl": 1e-3},
    "three, set": {
        "layout": "three",
        "central_input": "team",
        "apart": ["herd"],
        "critic": {"architecture": "set"},
        "world": {"actions": "one_hot", "mask_actions": True},
    },
    # Two groups are joined, and the group between them is separate; critics see all.
    "many": {"layout": "many", "central_input": "team", "apart": ["herd"]},
    "many, attention": {
        "layout": "many",
        "central_input": "team",
        "apart": ["herd"],
        "value_norm": False,
        "critic": {"architecture": "attention", "value_per": "team"},
    },
    "three, full": {
        "layout": "three",
        "central_input": "team",
        "actor": NetworkConfig([8], sharing="full"),
        "critic": {"sharing": "full"},
        "world": {"actions": "categorical", "mask_actions": True},
    },
}


def iterations_of(case, poison=False, seed=0, n=2):
    """States, metrics and batch of two iterations, the second with statistics of the first."""
    case = dict(case)
    world, layout = case.pop("world", {}), case.pop("layout", "one")
    apart = case.pop("apart", ())
    torch.manual_seed(seed)
    env = make_meadow(E, layout, **world)
    team = TeamSpec.from_env(env)
    if poison:
        env = TransformedEnv(env, Poison(team))
    learners = learners_of(team, config_of(**{"normalize_observations": True} | case), apart)
    collector = RolloutCollector(env, policy_of(learners), frames_per_batch=E * T)
    tracker, metrics, batch = EpisodeTracker(team), {}, None
    for i in range(n):
        torch.manual_seed(i)
        batch = collector.next()
        if poison:
            poison_what_was_done(batch, team)
        check_finite(team, batch)
        metrics |= {f"{i} {name}": x for name, x in tracker.update(batch).items()}
        metrics[f"{i} agent_frames"] = count_agent_frames(team, batch)
        for k, learner in enumerate(learners):
            for key, value in learner.learn(batch).items(True, True):
                metrics[f"{i} {k} {key}"] = value
    return states(learners), metrics, batch, team


@pytest.mark.parametrize("case", CASES)
def test_values_in_masked_and_padded_slots_have_no_effect(case):
    """Weights, statistics and metrics are bitwise equal."""
    clean, metrics, batch, team = iterations_of(CASES[case])
    poisoned, after, other, _ = iterations_of(CASES[case], poison=True)
    assert set(metrics) == set(after)
    for key, x in metrics.items():
        assert_same(x, after[key], key)
    assert len(clean) == len(poisoned) > 20
    for a, b in zip(clean, poisoned):
        assert_same(a, b)
    for name in team.groups:
        mask = batch[name, "mask"]
        for leaf in ("advantage", "value_target", "state_value"):
            a, b = (x[name, leaf][mask] for x in (batch, other))
            assert_same(a, b, (name, leaf))
        broken = ~mask & (other[name, "observation"] != batch[name, "observation"]).any(-1)
        assert bool(broken.any())


@pytest.mark.parametrize("case", ["one", "two, one sees all", "three, set"])
def test_iterations_are_reproducible(case):
    runs = [iterations_of(CASES[case], seed=3) for _ in range(2)]
    for a, b in zip(runs[0][0], runs[1][0], strict=True):
        assert_same(a, b)
    for key, x in runs[0][1].items():
        assert_same(x, runs[1][1][key], key)


@pytest.mark.parametrize("case", ["one", "two, each sees all", "three", "many"])
def test_metrics_of_every_group(case):
    _, metrics, batch, team = iterations_of(CASES[case], n=1)
    for name in team.groups:
        found = {key for key in metrics if f"'{name}'" in key}
        names = {key.split("'")[3] for key in found}
        assert {"loss_objective", "loss_critic", "entropy", "grad_norm", "kl_approx"} <= names
        assert all(metrics[key].shape == () for key in found)
        mask = batch[name, "mask"]
        assert batch[name, "advantage"].shape == (*mask.shape, 1)
        assert batch[name, "state_value"].shape == (*mask.shape, 1)


def test_results_of_joined_groups_are_written_to_each_group():
    """Each group's advantage is stored under its name; no other entry is added."""
    _, _, batch, team = iterations_of(CASES["two, one sees all"], n=1)
    assert set(batch.keys()) == {
        *team.groups,
        "state",
        "done",
        "terminated",
        "truncated",
        "next",
        "collector",
    }
    assert set(batch["next"].keys()) == {
        *team.groups,
        "state",
        "done",
        "terminated",
        "truncated",
    }
