"""Learners of heterogeneous teams with late spawns and early deaths match separate learners."""

import pytest
import torch
from meadow import make_meadow
from samples import assert_same
from team_learners import E, T, config_of, learners_of, policy_of
from torchrl.data import LazyTensorStorage, ReplayBuffer
from torchrl.data.replay_buffers import SamplerWithoutReplacement
from torchrl.envs import TransformedEnv

from torchrl_marl import TeamSpec
from torchrl_marl.collectors import RolloutCollector
from torchrl_marl.learners import OnPolicyLearner, build_learners
from torchrl_marl.modules import NetworkConfig, make_actor, make_critic
from torchrl_marl.objectives import MAPPOLoss
from torchrl_marl.training.metrics import count_agent_frames

# ------------------------------------------------------------------ parity with separate learners


def share_of(joined, part, index, whole, own):
    """The rows and columns of a joined learner's parameter that belong to one part.

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
def test_joined_groups_of_other_shapes_match_separate_learners(
    layout, actions, sees, bootstrap, normalize
):
    """Metrics and weights of each padded group equal those of a separate learner."""
    config = config_of(
        algorithm="ippo" if sees == "own" else "mappo",
        central_input="team" if sees == "team" else "observations",
        bootstrap=bootstrap,
        normalize_advantage=normalize,
        normalize_observations=True,
        entropy_coeff=0.01 if actions == "one_hot" else 0.0,  # no random draws
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
def test_deaths_and_spawns_do_not_split_trajectories(layout, lazy):
    """Trajectories follow the root's done flag; living agents are counted."""
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
        assert bool(died_inside.any())  # an agent dies, and the episode continues
        assert any(bool((~mask[:, :-1] & mask[:, 1:]).any()) for mask in masks)  # late spawns
    ids, done = torch.cat(ids, 1), torch.cat(done, 1)
    assert torch.equal(ids[:, 1:] != ids[:, :-1], done[:, :-1])
    firsts = [row[0].item() for env_ids in ids for row in env_ids.unique_consecutive().split(1)]
    assert len(firsts) == len(set(firsts))
    assert counted == living < 3 * E * T * team.n_agents


def test_team_critic_sees_truncated_agents():
    """At a time limit, the value is bootstrapped from the last observation, joined or not."""

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
        # As in environments where no agent acts after a time limit.
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


# ----------------------------------------------------------------------------- in a custom script


def test_loss_of_padded_group_matches_objective_by_hand():
    """As in a TorchRL script, with an estimator, a loss and an optimizer."""
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
def test_padded_batches_are_stored_in_torchrl_buffers(layout):
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
    # A learner accepts a batch from a buffer.
    learners[0].learn(stored.reshape(E, T))
