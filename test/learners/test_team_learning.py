"""Learners of teams whose agents differ, are born late and die early."""

import pytest
import torch
from meadow import make_meadow, make_team
from samples import POISON, assert_same, states
from torchrl.data import LazyTensorStorage, ReplayBuffer
from torchrl.data.replay_buffers import SamplerWithoutReplacement
from torchrl.envs import Transform, TransformedEnv

from torchrl_marl import TeamSpec
from torchrl_marl.collectors import RolloutCollector, TeamPolicy
from torchrl_marl.collectors.finiteness import check_finite
from torchrl_marl.envs import VmasEnv
from torchrl_marl.errors import ConfigError, SpecError
from torchrl_marl.learners import OnPolicyConfig, OnPolicyLearner, build_learners
from torchrl_marl.modules import NetworkConfig, RandomActor, make_actor, make_critic
from torchrl_marl.modules.config import CriticConfig
from torchrl_marl.objectives import MAPPOLoss
from torchrl_marl.training.metrics import EpisodeTracker, count_agent_frames

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
    # Two learn together, and the one between them apart; all critics see all.
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
    group = joined.groups[part]
    kinds = [kind for kind, i in zip(joined.kinds, joined.group_index) if i == part]
    central = index > 3 and whole.shape[0] == len(joined.groups)
    rows = whole[part : part + 1] if central else whole[min(kinds) : max(kinds) + 1]
    is_weight = index % 2 == 0
    outputs = list(range(own.shape[-2 if is_weight else -1]))
    if index in (2, 3) and not group.discrete:  # means, and scales behind the widest's means
        a = group.action_dim
        outputs = [*range(a), *range(joined.action_dim, joined.action_dim + a)]
    rows = rows[:, outputs, : own.shape[-1]] if is_weight else rows[:, outputs]
    return rows.reshape(own.shape)


@pytest.mark.parametrize("layout", ["two", "three", "many"])
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
    (joined,) = together.block.joined.values()
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
                    batches[name][name, leaf][living],
                    batch[name, leaf][living],
                    rtol=1e-3,
                    atol=1e-4,
                )
            for k, own in enumerate(alone.optimizer.param_groups[0]["params"]):
                shared = share_of(joined, i, k, ours[k], own)
                torch.testing.assert_close(own, shared, rtol=1e-3, atol=1e-4)
    moved = [(a - b).abs().max().item() for a, b in zip(before, ours)]
    assert min(moved) > 5e-3


# ---------------------------------------------------------------------------------- life cycle


@pytest.mark.parametrize("layout", ["one", "two", "three"])
@pytest.mark.parametrize("lazy", [True, False])
def test_death_and_birth_cut_no_trajectory(layout, lazy):
    """Trajectories are the root's; who lives is counted."""
    env = make_meadow(E, layout)
    team = TeamSpec.from_env(env)
    if lazy:
        env = env.base_env if isinstance(env, TransformedEnv) else env
    torch.manual_seed(0)
    policy = policy_of(learners_of(team, config_of()))
    collector = RolloutCollector(env, policy, frames_per_batch=E * T)
    ids, done, living = [], [], 0
    counted = 0
    for _ in range(3):
        batch = collector.next()
        ids.append(batch["collector", "traj_ids"])
        done.append(batch["next", "done"].squeeze(-1))
        masks = [batch[name, "mask"] for name in team.groups]
        living += sum(mask.sum() for mask in masks)
        counted += count_agent_frames(team, batch)
        deaths = [
            ((batch["next", name, "done"] & ~batch[name, "done"]).squeeze(-1).any(-1))
            for name in team.groups
        ]
        died_inside = torch.stack(deaths).any(0) & ~done[-1]
        assert bool(died_inside.any())  # somebody dies, and the episode goes on
        assert any(bool((~mask[:, :-1] & mask[:, 1:]).any()) for mask in masks)  # late births
    ids, done = torch.cat(ids, 1), torch.cat(done, 1)
    assert torch.equal(ids[:, 1:] != ids[:, :-1], done[:, :-1])
    firsts = [row[0].item() for env_ids in ids for row in env_ids.unique_consecutive().split(1)]
    assert len(firsts) == len(set(firsts))
    assert counted == living < 3 * E * T * team.n_agents


@pytest.mark.parametrize("case", ["one", "two, one sees all", "three, set"])
def test_twice_the_same(case):
    runs = [iterations_of(CASES[case], None, seed=3) for _ in range(2)]
    for a, b in zip(runs[0][0], runs[1][0], strict=True):
        assert_same(a, b)
    for key, x in runs[0][1].items():
        assert_same(x, runs[1][1][key], key)


@pytest.mark.parametrize("case", ["one", "two, each sees all", "three", "many"])
def test_metrics_of_every_group(case):
    _, metrics, batch, team = iterations_of(CASES[case], None, n=1)
    for name in team.groups:
        found = {key for key in metrics if f"'{name}'" in key}
        names = {key.split("'")[3] for key in found}
        assert {"loss_objective", "loss_critic", "entropy", "grad_norm", "kl_approx"} <= names
        assert all(metrics[key].shape == () for key in found)
        mask = batch[name, "mask"]
        assert batch[name, "advantage"].shape == (*mask.shape, 1)
        assert batch[name, "state_value"].shape == (*mask.shape, 1)


def test_joined_groups_are_scattered_into_the_batch():
    """Each group's advantage stands under its own name; nothing else is added."""
    _, _, batch, team = iterations_of(CASES["two, one sees all"], None, n=1)
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


def test_a_critic_across_groups_sees_who_was_cut_off():
    """A time limit: the last observation is bootstrapped, whoever shares the learner."""

    def values_with(apart):
        env = make_meadow(E, "two")
        team = TeamSpec.from_env(env)
        config = config_of(
            central_input="team", value_norm=False, num_epochs=1, normalize_advantage="none"
        )
        torch.manual_seed(0)
        (together,) = build_learners(team, config)
        learners = [together]
        if apart:
            learners = learners_of(team, config, apart=["mice"])
            (joined,) = together.block.joined.values()
            ours = together.optimizer.param_groups[0]["params"]
            for i, alone in enumerate(learners):
                for k, own in enumerate(alone.optimizer.param_groups[0]["params"]):
                    own.data.copy_(share_of(joined, i, k, ours[k], own).data)
                alone.losses[next(iter(alone.losses))].value_estimator._discount = (0.9, 0.9)
        else:
            together.losses["cats+mice"].value_estimator._discount = (0.9, 0.9)
        torch.manual_seed(1)
        batch = RolloutCollector(env, policy_of([together]), frames_per_batch=E * T).next()
        # As environments do that know no masks at the end: nobody acts after a time limit.
        for name in team.groups:
            cut = batch["next", name, "truncated"].squeeze(-1) & batch[name, "mask"]
            assert bool(cut.any())
            batch["next", name, "mask"] &= ~cut
        for learner in learners:
            learner.learn(batch)
        return batch

    one, other = values_with(False), values_with(True)
    for name in ("cats", "mice"):
        assert_same(one[name, "observation"], other[name, "observation"])
        living = one[name, "mask"]
        for leaf in ("state_value", "value_target"):
            torch.testing.assert_close(
                one[name, leaf][living], other[name, leaf][living], rtol=1e-4, atol=1e-5
            )


# ------------------------------------------------------------------------- in a script of one's own


def test_the_loss_alone_with_a_padded_group():
    """As a TorchRL script would: estimator, loss, optimizer; the objective by hand."""
    env = make_meadow(E, "one")
    (group,) = TeamSpec.from_env(env).groups.values()
    torch.manual_seed(0)
    actor = make_actor(group, NetworkConfig([8]))
    critic = make_critic(group, NetworkConfig([8]))
    batch = RolloutCollector(env, actor, frames_per_batch=E * T).next()
    loss = MAPPOLoss(actor, critic, group=group, normalize_advantage=False, entropy_bonus=False)
    loss.make_value_estimator(gamma=0.9, lmbda=0.8)
    loss.value_estimator(batch)
    optimizer = torch.optim.Adam(loss.parameters(), lr=1e-2)
    for step in range(3):
        terms = loss(batch.reshape(-1))
        flat = batch.reshape(-1)["herd"]
        with torch.no_grad():
            log_prob = actor.get_dist(batch.reshape(-1)).log_prob(flat["action"])
        ratio = (log_prob - flat["action_log_prob"]).exp()
        gain = flat["advantage"].squeeze(-1)
        gain = torch.minimum(ratio * gain, ratio.clamp(0.8, 1.2) * gain)[flat["mask"]].mean()
        torch.testing.assert_close(terms["loss_objective"].detach(), -gain, rtol=1e-4, atol=1e-6)
        assert (ratio - 1).abs().max() > 1e-3 or step == 0
        optimizer.zero_grad()
        sum(terms[key] for key in terms.keys() if key.startswith("loss_")).backward()
        optimizer.step()
    # Without an advantage it estimates one itself.
    again = loss(batch.exclude(("herd", "advantage"), ("herd", "value_target")))
    assert again["loss_objective"].isfinite()


@pytest.mark.parametrize("layout", ["one", "two"])
def test_padded_batches_go_through_a_buffer(layout):
    env = make_meadow(E, layout)
    learners = learners_of(TeamSpec.from_env(env), config_of())
    buffer = ReplayBuffer(
        storage=LazyTensorStorage(E * T), sampler=SamplerWithoutReplacement(), batch_size=E * T
    )
    torch.manual_seed(0)
    collector = RolloutCollector(
        env, policy_of(learners), frames_per_batch=E * T, replay_buffer=buffer
    )
    assert collector.next() is None
    torch.manual_seed(0)
    env = make_meadow(E, layout)
    batch = RolloutCollector(env, policy_of(learners), frames_per_batch=E * T).next()
    flat = batch.reshape(-1)
    stored = buffer[:]
    for key in flat.keys(True, True):
        assert_same(stored[key], flat[key], key)
    sample = buffer.sample()
    assert sample.shape == (E * T,)
    # A batch that went through a buffer is learned from as any other.
    learners[0].learn(stored.reshape(E, T))


# ---------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize("layout", ["two", "three"])
def test_a_policy_that_leaves_out_a_group(layout):
    env = make_meadow(E, layout)
    team = TeamSpec.from_env(env)
    first, group = team.groups.values()
    actor = make_actor(first, NetworkConfig([8]))
    message = rf"group 'mice' has no action: .*\('mice', 'action'\).*\('{first.name}', 'action'\)"
    with pytest.raises(SpecError, match=message):
        TeamPolicy([actor], team)
    with pytest.raises(SpecError, match=message):
        RolloutCollector(env, TeamPolicy([actor]), frames_per_batch=E)
    silent = RolloutCollector(env, lambda td: actor(td), frames_per_batch=E)
    with pytest.raises(SpecError, match=message):
        silent.next()
    with pytest.raises(SpecError, match=r"\('mice', 'action'\)"):
        env.rollout(2, TeamPolicy([actor]))
    whole = TeamPolicy([actor, RandomActor(group)], team)
    assert RolloutCollector(env, whole, frames_per_batch=E).next().shape == (E, 1)


def test_a_policy_that_leaves_out_a_group_of_vmas():
    env = VmasEnv("simple_tag", num_envs=3, seed=0)
    policy = TeamPolicy([RandomActor(TeamSpec.from_env(env).groups["adversary"])])
    with pytest.raises(SpecError, match=r"group 'agent' has no action.*\('agent', 'action'\)"):
        env.rollout(2, policy)


class Wrong(Transform):
    """Another mask than the specs say."""

    def __init__(self, change):
        super().__init__()
        self.change = change

    def _call(self, next_tensordict):
        key = ("mice", "mask")
        return next_tensordict.set(key, self.change(next_tensordict.get(key)))

    def _reset(self, tensordict, tensordict_reset):
        return self._call(tensordict_reset)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda mask: mask.float(), "is torch.float32, expected torch.bool"),
        (lambda mask: mask.unsqueeze(-1), r"is \(8, 3, 1\), expected \(8, 3\)"),
    ],
    ids=["type", "shape"],
)
@pytest.mark.parametrize("joined", [True, False])
def test_a_mask_of_wrong_shape_or_type(change, message, joined):
    env = make_meadow(E, "two")
    learners = learners_of(TeamSpec.from_env(env), config_of(), () if joined else ["mice"])
    collector = RolloutCollector(
        TransformedEnv(env, Wrong(change)), policy_of(learners), frames_per_batch=E
    )
    with pytest.raises(SpecError, match=rf"group 'mice': \('mice', 'mask'\) {message}"):
        collector.next()


MISFITS = {
    "sharing_index": (
        {"actor": NetworkConfig([8], sharing="index", sharing_index=[0, 1])},
        r"group 'cats\+mice': actor: sharing_index has 2 entries, expected 5",
    ),
    "critic's sharing_index": (
        {
            "critic": {"sharing": "index", "sharing_index": [0, 1, 1]},
        },
        r"group 'cats\+mice': critic: sharing_index has 3 entries, expected 5",
    ),
    "sharing": (
        {"actor": NetworkConfig([8], sharing="gruop")},
        r"group 'cats\+mice': actor: sharing is 'gruop'; did you mean 'group'",
    ),
    "clusters": (
        {"actor": NetworkConfig([8], sharing="clusters")},
        r"group 'cats\+mice': actor: sharing is 'clusters', but sharing_index is not set",
    ),
    "ippo with attention": (
        {"algorithm": "ippo", "critic": {"architecture": "attention"}},
        r"group 'cats': critic: .*architecture 'attention'.*algorithm=mappo",
    ),
    "no state": (
        {"central_input": "state"},
        r"group 'cats\+mice': critic: .*no 'state'.*central_input",
    ),
}


@pytest.mark.parametrize("name", MISFITS)
def test_settings_that_do_not_fit_the_team(name):
    settings, message = MISFITS[name]
    team = make_team("two", state=None)
    with pytest.raises(ConfigError, match=message):
        build_learners(team, config_of(**settings))
