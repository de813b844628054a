"""Learners of teams whose agents differ, are born late and die early."""

import pytest
import torch
from meadow import make_meadow
from samples import POISON, assert_same
from torchrl.envs import Transform, TransformedEnv

from torchrl_marl import TeamSpec
from torchrl_marl.collectors import RolloutCollector, TeamPolicy
from torchrl_marl.learners import OnPolicyConfig, OnPolicyLearner, build_learners
from torchrl_marl.modules import NetworkConfig
from torchrl_marl.modules.config import CriticConfig
from torchrl_marl.training.metrics import EpisodeTracker, check_finite, count_agent_frames

E, T = 8, 10


def config_of(critic=None, **settings):
    defaults = {
        "actor": NetworkConfig([8]),
        "critic": CriticConfig([8], **(critic or {})),
        "num_epochs": 2,
        "minibatch_size": 40,
        "entropy_coeff": 0.01,
    }
    return OnPolicyConfig(**(defaults | settings))


def learners_of(team, config, apart=(), seed=0):
    """``apart``: groups with settings of their own."""
    torch.manual_seed(seed)
    own = {name: {"gamma": 0.9 - 0.01 * i} for i, name in enumerate(apart)}
    return build_learners(team, config, own)


def policy_of(learners):
    return TeamPolicy(actor for learner in learners for actor in learner.actors.values())


def states(learners):
    """All that resuming needs, as a flat list of tensors."""
    found = []

    def walk(x):
        if isinstance(x, torch.Tensor):
            found.append(x.detach().clone())
        elif isinstance(x, dict):
            for key in sorted(x, key=str):
                walk(x[key])
        elif isinstance(x, (list, tuple)):
            for y in x:
                walk(y)

    walk([dict(learner.state_dict()) for learner in learners])
    return found


# ------------------------------------------------------------------------------------- poison


def poison_leaf(td, group, leaf, where, value):
    """Replaces what stands at ``where``, ``[*B, N]`` or the leaf's shape."""
    x = td.get((group, leaf), None)
    if x is None:
        return
    x = x.clone()
    where = where.reshape(where.shape + (1,) * (x.ndim - where.ndim)).expand_as(x)
    if x.dtype == torch.bool:
        x[where] = ~x[where]
    else:
        x[where] = value if x.is_floating_point() else 10**9
    td.set((group, leaf), x)


def padding_of(group, leaf, shape):
    padding = group.paddings.get(leaf)
    if padding is None or len(padding.largest) == 0:
        return torch.zeros(shape, dtype=torch.bool)
    return ~padding.mask().expand(shape)


class Poison(Transform):
    """Masked and padded slots of what an environment gives hold anything."""

    def __init__(self, team, value):
        super().__init__()
        self.team, self.value = team, value

    def _enter(self, td):
        for name, group in self.team.groups.items():
            masked = ~td[name, "mask"]
            for leaf in ("observation", "action_mask"):
                if (name, leaf) in td.keys(True):
                    shape = td[name, leaf].shape
                    where = masked.unsqueeze(-1) | padding_of(group, leaf, shape)
                    poison_leaf(td, name, leaf, where, self.value)
        return td

    def _reset(self, tensordict, tensordict_reset):
        return self._enter(tensordict_reset)

    def _step(self, tensordict, next_tensordict):
        for name in self.team.groups:
            dead = tensordict[name, "done"].squeeze(-1)
            poison_leaf(next_tensordict, name, "reward", dead, self.value)
        return self._enter(next_tensordict)


def poison_what_was_done(batch, team, value):
    for name, group in team.groups.items():
        masked = ~batch[name, "mask"]
        assert bool(masked.any()) and not bool(masked.all())
        for leaf in ("action", "action_log_prob", "loc", "scale", "logits"):
            if (name, leaf) not in batch.keys(True):
                continue
            rows = batch[name, leaf]
            poison_leaf(batch, name, leaf, masked, value)
            if leaf == "action" and rows.ndim == 4:
                poison_leaf(batch, name, leaf, padding_of(group, leaf, rows.shape), value)


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
    "three": {"layout": "three", "normalize_advantage": "agent", "target_kl": 1e-3},
    "three, set": {
        "layout": "three",
        "central_input": "team",
        "apart": ["herd"],
        "critic": {"architecture": "set"},
        "world": {"actions": "one_hot", "mask_actions": True},
    },
    "three, full": {
        "layout": "three",
        "central_input": "team",
        "actor": NetworkConfig([8], sharing="full"),
        "critic": {"sharing": "full"},
        "world": {"actions": "categorical", "mask_actions": True},
    },
}


def iterations_of(case, poison, seed=0, n=2):
    """Two iterations, the second with the statistics of the first; all that comes out of them."""
    case = dict(case)
    world, layout = case.pop("world", {}), case.pop("layout", "one")
    apart = case.pop("apart", ())
    torch.manual_seed(seed)
    env = make_meadow(E, layout, **world)
    team = TeamSpec.from_env(env)
    if poison is not None:
        env = TransformedEnv(env, Poison(team, poison))
    learners = learners_of(team, config_of(**{"normalize_observations": True} | case), apart)
    collector = RolloutCollector(env, policy_of(learners), frames_per_batch=E * T)
    tracker, metrics, batch = EpisodeTracker(team), {}, None
    for i in range(n):
        torch.manual_seed(i)
        batch = collector.next()
        if poison is not None:
            poison_what_was_done(batch, team, poison)
        check_finite(team, batch)
        metrics |= {f"{i} {name}": x for name, x in tracker.update(batch).items()}
        metrics[f"{i} agent_frames"] = count_agent_frames(team, batch)
        for k, learner in enumerate(learners):
            for key, value in learner.learn(batch).items(True, True):
                metrics[f"{i} {k} {key}"] = value
    return states(learners), metrics, batch, team


@pytest.mark.parametrize("case", CASES)
def test_poison_through_whole_iterations(case):
    """Whatever stands in masked and padded slots: weights, statistics, metrics to the bit."""
    clean, metrics, batch, team = iterations_of(CASES[case], None)
    for value in POISON:
        poisoned, after, other, _ = iterations_of(CASES[case], value)
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


# --------------------------------------------------------------------- as each would learn alone


def share_of(joined, part, index, whole, own):
    """What of a joined learner's parameter is a part's: its kinds' rows, cut to its widths.

    ``index``: 0 to 3 of the actor, 4 to 7 of the critic; weight and bias of two layers.
    """
    group = joined.parts[part]
    kinds = [kind for kind, i in zip(joined.kinds, joined.part_index) if i == part]
    central = index > 3 and whole.shape[0] == len(joined.parts)
    rows = whole[part : part + 1] if central else whole[min(kinds) : max(kinds) + 1]
    is_weight = index % 2 == 0
    outputs = list(range(own.shape[-2 if is_weight else -1]))
    if index in (2, 3) and not group.discrete:  # means, and scales behind the widest's means
        a = group.action_dim
        outputs = [*range(a), *range(joined.action_dim, joined.action_dim + a)]
    rows = rows[:, outputs, : own.shape[-1]] if is_weight else rows[:, outputs]
    return rows.reshape(own.shape)


@pytest.mark.parametrize("layout", ["two", "three"])
@pytest.mark.parametrize("actions", ["bounded", "one_hot"])
@pytest.mark.parametrize(
    ("sees", "bootstrap", "normalize"),
    [("observations", "team", "pooled"), ("own", "agent", "agent"), ("team", "agent", "none")],
)
def test_groups_of_other_shapes_learn_as_alone(layout, actions, sees, bootstrap, normalize):
    """Padded side by side: each group's figures and weights are as if it were by itself."""
    config = config_of(
        algorithm="ippo" if sees == "own" else "mappo",
        central_input="team" if sees == "team" else "observations",
        bootstrap=bootstrap,
        normalize_advantage=normalize,
        normalize_observations=True,
        entropy_coeff=0.01 if actions == "one_hot" else 0.0,  # no draws of its own
        max_grad_norm=0.01,
        num_epochs=1,
        minibatch_size=E * T,
        lr=1e-2,
    )
    env = make_meadow(E, layout, actions=actions, mask_actions=actions == "one_hot")
    team = TeamSpec.from_env(env)
    (together,) = learners_of(team, config)
    apart = {
        name: OnPolicyLearner({name: group}, config, team=team)
        for name, group in team.groups.items()
    }
    (joined,) = together._joined.values()
    ours = together.optimizer.param_groups[0]["params"]
    assert len(ours) == 8
    with torch.no_grad():
        for parameter in ours:
            parameter.add_(0.1 * torch.randn_like(parameter))
        for i, alone in enumerate(apart.values()):
            for k, own in enumerate(alone.optimizer.param_groups[0]["params"]):
                own.copy_(share_of(joined, i, k, ours[k], own))
    before = [p.detach().clone() for p in ours]
    collector = RolloutCollector(env, policy_of([together]), frames_per_batch=E * T)
    for _ in range(2):
        batch = collector.next()
        batches = {name: batch.clone() for name in apart}
        both = together.learn(batch)
        for i, (name, alone) in enumerate(apart.items()):
            one = alone.learn(batches[name])
            assert set(one[name].keys()) == set(both[name].keys())
            for key in one[name].keys():
                torch.testing.assert_close(
                    one[name, key], both[name, key], rtol=1e-3, atol=1e-4, msg=f"{name} {key}"
                )
            for leaf in ("advantage", "value_target", "state_value"):
                living = batch[name, "mask"]
                torch.testing.assert_close(
                    batches[name][name, leaf][living], batch[name, leaf][living], rtol=1e-3, atol=1e-4
                )
            for k, own in enumerate(alone.optimizer.param_groups[0]["params"]):
                shared = share_of(joined, i, k, ours[k], own)
                torch.testing.assert_close(own, shared, rtol=1e-3, atol=1e-4)
    moved = [(a - b).abs().max().item() for a, b in zip(before, ours)]
    assert min(moved) > 5e-3
