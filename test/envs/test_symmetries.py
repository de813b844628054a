"""Symmetries and Other-Play: permutations by hand, exact returns, and runs."""

import itertools

import pytest
import torch
from contract import asking_reset, assert_same
from runs import assert_same_run, small_config
from torchrl.data import OneHot, Unbounded
from torchrl.envs import TransformedEnv, check_env_specs
from torchrl.envs.utils import step_mdp

from torchrl_marl import AgentSpec, TeamSpec
from torchrl_marl.collectors import RolloutCollector, TeamPolicy
from torchrl_marl.envs import Labels, MarlEnv, make_env, with_memory, with_other_play
from torchrl_marl.envs.symmetries import OtherPlay
from torchrl_marl.envs.toy import Arena, Kuhn, MatchingLevers
from torchrl_marl.errors import ConfigError
from torchrl_marl.modules import make_actor
from torchrl_marl.modules.config import MemoryConfig, RecurrentNetworkConfig
from torchrl_marl.training.crossplay import cross_play, partner_score
from torchrl_marl.training.environments import Environments
from torchrl_marl.training.trainer import iterate, resume, train

ORDERS = torch.tensor(list(itertools.permutations(range(3))))
# Two features of each label, in turns; one that belongs to none; the actions are in other places.
LABELS = Labels([0, -1, 1, 2, 0, 1, 2], [-1, 2, 0, 1])
LEVER_GAME = {"n_levers": 4, "rounds": 1, "last_lever": 0.9}


# --------------------------------------------------------------------------- permutations, by hand


def test_permutation_of_features_and_actions():
    order = torch.tensor([2, 0, 1])  # label 0 looks as label 2 is, and so on
    assert LABELS.features_of(order).tolist() == [3, 1, 0, 2, 6, 4, 5]
    assert LABELS.actions_of(order).tolist() == [0, 3, 1, 2]
    assert LABELS.n == 3
    both = LABELS.features_of(ORDERS[:2].view(2, 1, 3))
    assert both.shape == (2, 1, 7) and both[0, 0].tolist() == list(range(7))


@pytest.mark.parametrize("indices", [LABELS.features_of, LABELS.actions_of])
def test_symmetries_form_a_group(indices):
    """Closed under composition, with inverses; all differ; 0, 1, 2 is the identity."""
    n = indices(ORDERS[0]).numel()
    assert indices(ORDERS[0]).tolist() == list(range(n))
    assert len({tuple(indices(order).tolist()) for order in ORDERS}) == 6
    for first, second in itertools.product(ORDERS, ORDERS):
        assert torch.equal(indices(first)[indices(second)], indices(first[second]))
    for order in ORDERS:
        assert indices(order)[indices(order.argsort())].tolist() == list(range(n))


def test_orders_are_drawn_uniformly():
    torch.manual_seed(0)
    drawn = LABELS.draw((6000, 2))
    assert drawn.shape == (6000, 2, 3) and (drawn.sort(-1).values == torch.arange(3)).all()
    counts = (drawn.unsqueeze(2) == ORDERS).all(-1).sum((0, 1))
    assert (counts - 2000).abs().max() < 160  # 4 standard deviations
    assert (drawn[:, 0] != drawn[:, 1]).any(-1).float().mean() == pytest.approx(5 / 6, abs=0.02)


def test_labels_without_features():
    labels = Labels([-1, -1], [0, 1, -1])
    assert labels.features_of(torch.tensor([1, 0])).tolist() == [0, 1]
    assert labels.actions_of(torch.tensor([1, 0])).tolist() == [1, 0, 2]


@pytest.mark.parametrize("labels", [([0, 0, 1], [0, 1]), ([-1], [-1]), ([0], [0]), ([0, 2], [])])
def test_invalid_labels_are_refused(labels):
    with pytest.raises(ConfigError, match="expected two labels or more with equal numbers"):
        Labels(*labels)


# ------------------------------------------------------------------------------- the lever game


def pulls(lever):
    def act(td):
        return td.set(("agents", "action"), torch.full(td["agents"].batch_size, lever))

    return act


def mean_over_all_symmetries(lever):
    """The exact expectation: one env for each pair of orders of the three like levers."""
    env = with_other_play(MatchingLevers(36, **LEVER_GAME))
    td = env.reset()
    pairs = [torch.stack(pair) for pair in itertools.product(ORDERS, ORDERS)]
    td["agents", "symmetry"] = torch.stack(pairs)
    rewards = env.step(pulls(lever)(td))["next", "agents", "reward"]
    assert (rewards[:, 0] == rewards[:, 1]).all()
    return rewards[:, 0].sum().item()


def test_last_lever_is_optimal_under_other_play():
    """36 pairs of orders: a like lever is matched in 12; the last one is always, for 0.9."""
    for lever in range(3):
        assert mean_over_all_symmetries(lever) == 12
    assert mean_over_all_symmetries(3) == pytest.approx(36 * 0.9)


def test_reference_returns_of_the_lever_game():
    game = MatchingLevers(2, n_levers=10, rounds=1, last_lever=0.9)
    assert (game.optimal_return, game.stranger_return) == (1.0, 0.9)
    assert game.random_return == pytest.approx((9 + 0.9) / 100)
    worse = MatchingLevers(2, n_levers=10, rounds=1, last_lever=0.1)
    assert worse.stranger_return == pytest.approx(1 / 9)  # better than 0.1
    assert MatchingLevers(2, rounds=1).stranger_return == 1 / 4


def test_cross_play_of_arbitrary_conventions_matches_by_chance():
    """The nine equal levers: 1 in self-play, 0 in cross-play; the last lever: 0.9 in both."""
    env = MatchingLevers(100, n_levers=10, rounds=1, last_lever=0.9, seed=0)
    agents = [pulls(lever) for lever in range(9)]
    table = cross_play(agents, agents, env, episodes=2)["returns"]
    assert torch.equal(table, torch.eye(9, dtype=torch.float64))
    others = [pulls(9), pulls(9)]
    score = partner_score(cross_play(others, others, env, episodes=2)["returns"])
    assert score.self_play.value == pytest.approx(0.9) == score.cross_play.value
    # Ten seeds that each found one of nine levers by chance: 1/9 on average over the draws.
    torch.manual_seed(0)
    levers = torch.randint(9, (4000, 2))
    assert (levers[:, 0] == levers[:, 1]).float().mean() == pytest.approx(1 / 9, abs=0.02)


def test_label_independent_policy_keeps_its_value():
    """Both copy: they pull the same lever in all rounds, or in none, in any order of labels."""

    def copies(td):
        seen = td["agents", "observation"]
        return td.set(("agents", "action"), seen.argmax(-1))

    env = with_other_play(MatchingLevers(4000, seed=0))
    td = env.rollout(8, copies)
    returns = td["next", "agents", "reward"].sum(1)[:, 0, 0]
    assert sorted(returns.unique().tolist()) == [0, 8]
    assert returns.mean() == pytest.approx(2, abs=0.3)  # the first lever is each one's own 0


# ------------------------------------------------------------------------------- the transform


def test_agent_observes_its_partner_in_its_own_order():
    env = with_other_play(MatchingLevers(1))
    td = env.reset()
    td["agents", "symmetry"] = torch.tensor([[[1, 2, 3, 0], [0, 1, 3, 2]]])
    td["agents", "action"] = torch.tensor([[0, 3]])  # these are the levers 1 and 2
    after = env.step(td)
    assert env.base_env.last[0].argmax(-1).tolist() == [1, 2]
    # The first sees lever 2 as its 1; the second sees lever 1 as its 1.
    assert after["next", "agents", "observation"][0].argmax(-1).tolist() == [1, 1]
    assert after["agents", "action"].tolist() == [[0, 3]]  # what the policy did
    assert after["next", "state"][0].view(2, 4).argmax(-1).tolist() == [2, 1]  # as it is


def test_each_episode_and_agent_draws_a_symmetry():
    env = with_other_play(MatchingLevers(40, rounds=3, seed=0))
    check_env_specs(env)
    drawn = env.rollout(6, break_when_any_done=False)["agents", "symmetry"]
    assert (drawn[:, :3] == drawn[:, :1]).all() and (drawn[:, 3:] == drawn[:, 3:4]).all()
    assert (drawn[:, 0] != drawn[:, 3]).any() and (drawn[:, 0, 0] != drawn[:, 0, 1]).any()
    again = with_other_play(MatchingLevers(40, rounds=3, seed=0))
    check_env_specs(again)
    found = again.rollout(6, break_when_any_done=False)["agents", "symmetry"]
    assert torch.equal(drawn, found)


def test_partial_reset_draws_only_for_its_envs():
    env = with_other_play(MatchingLevers(30, seed=0))
    before = step_mdp(env.rollout(2)[:, -1])
    after = env.reset(asking_reset(env, before, list(range(10))))
    for key in (("agents", "symmetry"), ("agents", "observation")):
        assert torch.equal(after[key][10:], before[key][10:])
        assert not torch.equal(after[key][:10], before[key][:10])


def test_batches_hold_unpermuted_actions_and_no_symmetries():
    env = with_other_play(MatchingLevers(8, seed=0))
    batch = RolloutCollector(env, pulls(0), frames_per_batch=64).next()
    assert "symmetry" not in batch["agents"].keys()
    assert "symmetry" not in batch["next", "agents"].keys()
    assert (batch["agents", "action"] == 0).all()
    # Each pulls one lever for an episode: its partner sees it every time in the same place.
    seen = batch["agents", "observation"][:, 1:8].argmax(-1)
    assert (seen == seen[:, :1]).all() and len(seen.unique()) == 4


class OneHotChoice(MarlEnv):
    """Two agents choose among three doors, by a one-hot action; they see the last choice."""

    def __init__(self, num_envs, **kwargs):
        super().__init__(num_envs, **kwargs)
        spec = AgentSpec("one", 2, Unbounded((3,)), OneHot(3), action_mask=True)
        self.register_agent(spec, group="agents")

    def symmetries(self):
        return {"agents": Labels([0, 1, 2], [0, 1, 2])}

    def _reset(self, tensordict):
        return self._seen(torch.zeros(self.num_envs, 2, 3))

    def _step(self, tensordict):
        chosen = tensordict["agents", "action"].float()
        own = self._seen(chosen)
        return {"agents": {**own["agents"], "reward": chosen[..., :1]}}

    def _seen(self, x):
        legal = torch.tensor([True, True, False]).expand(self.num_envs, 2, 3)
        return {"agents": {"observation": x, "action_mask": legal.clone()}}


def test_one_hot_actions_and_masks_are_permuted():
    env = with_other_play(OneHotChoice(2, seed=0))
    td = env.reset()
    order = torch.tensor([[2, 0, 1], [0, 1, 2]]).expand(2, 2, 3).clone()
    td["agents", "symmetry"] = order
    td["agents", "action"] = torch.tensor([0, 1, 0]).expand(2, 2, 3).clone()
    after = env.step(td)["next", "agents"]
    assert after["reward"][0, :, 0].tolist() == [1, 0]  # its 1 is door 0; the other's is door 1
    assert after["observation"][0].tolist() == [[0, 1, 0], [0, 1, 0]]
    assert after["action_mask"][0].tolist() == [[False, True, True], [True, True, False]]
    check_env_specs(env)


def test_environments_without_symmetries_are_refused():
    with pytest.raises(ConfigError, match="Arena has no symmetries for Other-Play; use env.other"):
        make_env("toy/arena", num_envs=2, other_play=True)
    with pytest.raises(ConfigError, match="group 'agents' has 4 features and 4 actions, and its"):
        TransformedEnv(MatchingLevers(2), OtherPlay({"agents": LABELS})).reset()
    with pytest.raises(ConfigError, match="group 'agents' has no labels, found list; expected"):
        TransformedEnv(MatchingLevers(2), OtherPlay({"agents": [0, 1]})).reset()
    with pytest.raises(ConfigError, match=r"group 'agents' has no labels, found \['agent'\]"):
        TransformedEnv(MatchingLevers(2), OtherPlay({"agent": LABELS})).reset()
    with pytest.raises(ConfigError, match="found the label -2, expected -1 or more"):
        Labels([0, 1, -2], [0, 1])
    with pytest.raises(ConfigError, match="group 'first' has no labels"):
        TransformedEnv(Kuhn(2), OtherPlay({})).reset()
    with pytest.raises(ConfigError, match="other_play is 'yes', expected"):
        make_env("toy/matching_levers", num_envs=2, other_play="yes")
    with pytest.raises(ConfigError, match="last_lever is 0.9 with 4 levers and 8 rounds"):
        MatchingLevers(2, last_lever=0.9)
    assert not hasattr(Arena, "symmetries")


# ----------------------------------------------------------------------------------------- runs


def config_of(folder, **overrides):
    options = {"env": {"other_play": True}, "execution": "eager", **overrides}
    return small_config("toy_matching_levers_mappo", folder=str(folder), **options)


def test_training_draws_symmetries_and_evaluation_does_not(tmp_path):
    envs = Environments(config_of(tmp_path / "run"), None, "cpu")
    assert isinstance(envs.training.transform, OtherPlay)
    assert not isinstance(envs.evaluation, TransformedEnv)


@pytest.mark.parametrize("execution", ["eager", "trace"])
def test_stopped_run_resumes_exactly(execution, tmp_path):
    options = {"total_frames": 320, "execution": execution}
    whole = train(config_of(tmp_path / "whole", **options))
    for iteration in iterate(config_of(tmp_path / "parts", **options)):
        if iteration.number == 2:
            break
    resumed = resume(tmp_path / "parts")
    assert_same_run(whole.folder, resumed.folder)


@pytest.mark.parametrize("recurrent", [False, True])
def test_captured_rollout_equals_eager(recurrent):
    """Up to the first reset, after which initial states are drawn in another order."""

    def collector(execution):
        env = with_other_play(MatchingLevers(6, seed=0))
        memory = RecurrentNetworkConfig(memory=MemoryConfig("gru", 8)) if recurrent else None
        torch.manual_seed(0)
        groups = TeamSpec.from_env(env).groups.values()
        policy = TeamPolicy(make_actor(group, memory) for group in groups)
        env = with_memory(env, policy) if recurrent else env
        return RolloutCollector(env, policy, frames_per_batch=96, execution=execution)

    batches = []
    for execution in ("eager", "trace"):
        own = collector(execution)
        torch.manual_seed(1)
        batches.append(own.next())
        assert own.execution == execution
    first, second = (batch[:, :8] for batch in batches)
    assert_same(first, second.select(*first.keys(True, True)))
    assert len(first["agents", "observation"].argmax(-1).unique()) == 4
    # Each pulls its own lever 0 in a graph, too: in an episode its partner sees it in one place.
    own = RolloutCollector(
        with_other_play(MatchingLevers(40, seed=0)),
        pulls(0),
        frames_per_batch=640,
        execution="trace",
    )
    own.next()
    seen = own.next()["agents", "observation"].argmax(-1).unflatten(1, (2, 8))
    assert own.execution == "trace" and (seen[:, :, 1:] == seen[:, :, 1:2]).all()
    assert (seen[:, 0, 1] != seen[:, 1, 1]).any() and len(seen.unique()) == 4


if __name__ == "__main__":
    pytest.main([__file__])
