"""Routed actors: distributions and log-probabilities of agents that act differently."""

import pytest
import torch
from routed import (
    ACTION,
    BATCHES,
    OBSERVATION,
    list_actions,
    make_continuous_actor,
    make_mixed_policy,
    make_policy,
    random_dense_group,
    random_lazy_group,
)
from samples import assert_same
from tensordict import TensorDict
from tensordict.nn import ProbabilisticTensorDictModule, TensorDictModule
from torch import nn
from torch.distributions import Normal
from torchrl.envs.utils import ExplorationType, set_exploration_type
from torchrl.modules import NormalParamExtractor, ProbabilisticActor, TanhNormal
from torchrl.objectives.multiagent import MAPPOLoss

from torchrl_marl.contrib import RoutedSequential


def test_continuous_and_discrete_agents_in_one_group():
    actors, policy, make = make_mixed_policy()
    td = policy(make(7))
    assert [tuple(x.shape) for x in list_actions(td)] == [(7, 2), (7, 3), (7,), (7, 2)]
    assert [x.dtype for x in list_actions(td)][2] is torch.int64
    assert td["agents", "action_log_prob"].shape == (7, 4)
    found = policy.log_prob(td)
    torch.testing.assert_close(found, td["agents", "action_log_prob"], rtol=1e-4, atol=1e-4)
    for i, k in enumerate([0, 1, 2, 0]):
        row = td["agents"].tensordicts[i]
        alone = actors[k].log_prob(TensorDict({"agents": row}, [7]))
        torch.testing.assert_close(found[:, i], alone)
    found[:, 1].sum().backward()
    have = [any(p.grad.any() for p in actor.parameters()) for actor in actors]
    assert have == [False, True, False]


@pytest.mark.parametrize("batch", BATCHES)
def test_joint_distribution_of_all_agents(batch):
    _, policy, make = make_mixed_policy()
    td = policy(make(*batch))
    keys = set(td["agents"].tensordicts[0].keys())
    dist = policy.get_dist(td)
    assert dist.batch_shape == (*batch, 4)
    assert set(td["agents"].tensordicts[0].keys()) == keys, "nothing is written"
    one_by_one = list_actions(td)
    assert_same(dist.log_prob(one_by_one), dist.log_prob(td))
    assert_same(policy.log_prob(td, dist=dist), policy.log_prob(td))
    assert dist.entropy().shape == (*batch, 4) and not dist.has_rsample
    torch.testing.assert_close(dist.entropy()[..., 2], dist.routes[2][1].entropy()[..., 0])
    drawn = dist.sample((6,))
    assert [tuple(x.shape) for x in drawn] == [
        (6, *batch, 2), (6, *batch, 3), (6, *batch), (6, *batch, 2)
    ]  # fmt: skip
    assert dist.log_prob(drawn).shape == (6, *batch, 4)
    assert [tuple(x.shape) for x in dist.deterministic_sample] == [
        tuple(x.shape) for x in one_by_one
    ]


def test_distribution_of_equal_action_shapes_is_dense():
    policy = RoutedSequential(
        (make_continuous_actor(5, 2), [1]), (make_continuous_actor(3, 2), [0, 2])
    )
    td = policy(random_lazy_group([3, 5, 3], 7))
    dist = policy.get_dist(td)
    drawn = dist.rsample()
    assert drawn.shape == (7, 3, 2) and drawn.requires_grad
    torch.testing.assert_close(dist.log_prob(td[ACTION]), policy.log_prob(td))


def test_exploration_types_are_respected():
    _, policy, make = make_mixed_policy()
    td = make(7)
    with set_exploration_type(ExplorationType.DETERMINISTIC):
        first, second = (list_actions(policy(td.clone())) for _ in range(2))
    for one, other in zip(first, second):
        assert_same(one, other)
    with set_exploration_type(ExplorationType.RANDOM):
        first, second = (list_actions(policy(td.clone())) for _ in range(2))
    assert not torch.equal(first[0], second[0])


def test_routed_networks_with_one_shared_distribution():
    """Where parameter shapes agree, the probabilistic part needs no route."""
    keys = {"loc": ("agents", "loc"), "scale": ("agents", "scale")}
    nets = [
        TensorDictModule(
            nn.Sequential(nn.Linear(o, 4), NormalParamExtractor()),
            in_keys=[OBSERVATION],
            out_keys=list(keys.values()),
        )
        for o in (5, 3)
    ]
    draw = ProbabilisticTensorDictModule(
        in_keys=keys, out_keys=[ACTION], distribution_class=TanhNormal, return_log_prob=True,
        log_prob_key=("agents", "action_log_prob"),
    )  # fmt: skip
    policy = RoutedSequential(*nets, draw)
    td = policy(random_lazy_group([5, 3, 5], 7))
    assert td[ACTION].shape == (7, 3, 2)
    found = policy.log_prob(td)
    torch.testing.assert_close(found, td["agents", "action_log_prob"], rtol=1e-4, atol=1e-4)
    assert policy.log_prob_keys == [("agents", "action_log_prob")]
    assert policy.dist_sample_keys == [ACTION]


def test_log_prob_uses_the_sampled_latent():
    def normal(o, leaf, out):
        loc = ("agents", f"{out}_loc")
        module = TensorDictModule(nn.Linear(o, 2), in_keys=[("agents", leaf)], out_keys=[loc])
        kwargs = {"distribution_class": IndependentUnit, "return_log_prob": False}
        return ProbabilisticActor(
            module, in_keys={"loc": loc}, out_keys=[("agents", out)], **kwargs
        )

    policy = RoutedSequential(
        (normal(5, "observation", "latent"), [0]),
        (normal(3, "observation", "latent"), [1]),
        normal(2, "latent", "action"),
    )
    with set_exploration_type(ExplorationType.RANDOM):
        td = policy(random_lazy_group([5, 3], 7))
        assert_same(policy.log_prob(td), policy.log_prob(td))
    loc = policy[2].module[0].module(td["agents", "latent"])
    wanted = IndependentUnit(loc).log_prob(td[ACTION])
    torch.testing.assert_close(policy.log_prob(td), wanted)


class IndependentUnit(torch.distributions.Independent):
    def __init__(self, loc):
        super().__init__(Normal(loc, 1.0), 1)


def test_torchrl_loss_with_routed_actor_on_dense_data():
    policy = RoutedSequential(
        (make_continuous_actor(5, 2), [0, 2]), (make_continuous_actor(5, 2), [1])
    )
    critic = make_policy(5, 1, out_key="state_value")
    loss = MAPPOLoss(policy, critic, entropy_bonus=True)
    loss.set_keys(
        action=ACTION,
        sample_log_prob=("agents", "action_log_prob"),
        reward=("agents", "reward"),
        value=("agents", "state_value"),
        advantage=("agents", "advantage"),
        value_target=("agents", "value_target"),
    )
    with torch.no_grad():
        td = policy(random_dense_group(3, 5, 7))
    for leaf in ("advantage", "value_target"):
        td["agents", leaf] = torch.randn(7, 3, 1)
    losses = loss(td)
    sum(value for key, value in losses.items() if key.startswith("loss_")).backward()
    assert all(p.grad is not None for p in loss.actor_network_params.parameters())
    torch.testing.assert_close(losses["kl_approx"], torch.zeros(()), atol=1e-5, rtol=0)


def test_log_prob_per_feature_raises():
    loc, scale = ("agents", "loc"), ("agents", "scale")
    net = nn.Sequential(nn.Linear(5, 4), NormalParamExtractor())
    actor = ProbabilisticActor(
        TensorDictModule(net, in_keys=[OBSERVATION], out_keys=[loc, scale]),
        in_keys={"loc": loc, "scale": scale},
        out_keys=[ACTION],
        distribution_class=Normal,
    )
    policy = RoutedSequential(actor)
    td = policy(random_lazy_group([5, 5], 7))
    with pytest.raises(ValueError, match="Normal of batch shape .7, 2, 2., expected one number"):
        policy.log_prob(td)


def test_distribution_without_exactly_one_group_raises():
    with pytest.raises(ValueError, match="probabilistic modules in no group"):
        RoutedSequential(make_policy(5, 2)).get_dist(random_lazy_group([5], 7))
    two = RoutedSequential(make_continuous_actor(5, 2), make_continuous_actor(5, 2, group="others"))
    with pytest.raises(ValueError, match="select_subsequence"):
        two.get_dist(random_lazy_group([5], 7))
    one = two.select_subsequence(out_keys=[ACTION])
    assert one.log_prob(one(random_lazy_group([5], 7))).shape == (7, 1)
    half = RoutedSequential((make_continuous_actor(5, 2), [0]), partial_tolerant=True)
    with pytest.raises(ValueError, match="agent 1 of group 'agents' have no distribution"):
        half.get_dist(random_lazy_group([5, 5], 7))
