"""Routing of lazily stacked groups: against loops over the agents, and through TorchRL's doors."""

import copy
import pickle
import random

import pytest
import torch
from samples import assert_same
from tensordict import LazyStackedTensorDict, TensorDict, lazy_stack
from tensordict.nn import (
    ProbabilisticTensorDictModule,
    TensorDictModule,
    TensorDictSequential,
    set_skip_existing,
)
from torch import nn
from torch.distributions import Categorical, Normal
from torchrl.collectors import Collector
from torchrl.data import Bounded, Composite, LazyTensorStorage, ReplayBuffer, Unbounded
from torchrl.data import Categorical as CategoricalSpec
from torchrl.envs import check_env_specs
from torchrl.envs.utils import ExplorationType, MarlGroupMapType, set_exploration_type
from torchrl.modules import NormalParamExtractor, ProbabilisticActor, TanhNormal
from torchrl.objectives.multiagent import MAPPOLoss
from torchrl.testing.mocking_classes import HeterogeneousCountingEnv

from torchrl_marl import AgentSpec, TeamSpec
from torchrl_marl.collectors import RolloutCollector
from torchrl_marl.envs import MarlEnv, VmasEnv
from torchrl_marl.modules import RoutedSequential

OBSERVATION, ACTION = ("agents", "observation"), ("agents", "action")
BATCHES = [(), (5,), (2, 3)]
ALL_IN_ONE = MarlGroupMapType.ALL_IN_ONE_GROUP


def observed(widths, *batch, leaves=None, path=("agents",)):
    """A lazily stacked group of agents that see so many numbers."""
    leaves = leaves or ["observation"] * len(widths)
    rows = [TensorDict({leaf: torch.randn(*batch, w)}, batch) for leaf, w in zip(leaves, widths)]
    td = lazy_stack(rows, len(batch))
    for name in reversed(path):
        td = TensorDict({name: td}, batch)
    return td


def dense(n, width, *batch):
    own = TensorDict({"observation": torch.randn(*batch, n, width)}, [*batch, n])
    return TensorDict({"agents": own}, batch)


def policy_of(o, a, leaf="observation", out="action", path=("agents",)):
    net = nn.Sequential(nn.Linear(o, 8), nn.Tanh(), nn.Linear(8, a))
    return TensorDictModule(net, in_keys=[(*path, leaf)], out_keys=[(*path, out)])


def actor_of(o, a, spec=None, leaf="observation", group="agents"):
    """Continuous actions of ``a`` features."""
    net = nn.Sequential(nn.Linear(o, 2 * a), NormalParamExtractor())
    keys = {"loc": (group, "loc"), "scale": (group, "scale")}
    bounds = {} if spec is None else {"low": spec.space.low, "high": spec.space.high}
    return ProbabilisticActor(
        TensorDictModule(net, in_keys=[(group, leaf)], out_keys=list(keys.values())),
        in_keys=keys,
        out_keys=[(group, "action")],
        distribution_class=TanhNormal,
        distribution_kwargs=bounds,
        return_log_prob=True,
        log_prob_key=(group, "action_log_prob"),
    )


def chooser_of(o, n, group="agents"):
    """One of ``n`` discrete actions."""
    logits = (group, "logits")
    return ProbabilisticActor(
        TensorDictModule(nn.Linear(o, n), in_keys=[(group, "observation")], out_keys=[logits]),
        in_keys={"logits": logits},
        out_keys=[(group, "action")],
        distribution_class=Categorical,
        return_log_prob=True,
        log_prob_key=(group, "action_log_prob"),
    )


def actions(td, key=ACTION):
    return td.get(key, as_list=True)


def by_hand(td, players, leaf="observation", group="agents"):
    """Each agent alone: what the module of a player makes of its observation."""
    members = td[group].unbind(-1)
    return [player.module(member[leaf]) for player, member in zip(players, members)]


def assert_actions(td, expected):
    for found, wanted in zip(actions(td), expected, strict=True):
        torch.testing.assert_close(found, wanted)


class Counted(nn.Module):
    def __init__(self, o, a):
        super().__init__()
        self.layer, self.shapes = nn.Linear(o, a), []

    def forward(self, x):
        self.shapes.append(tuple(x.shape))
        return self.layer(x)


# ------------------------------------------------------------------------- who plays whom


@pytest.mark.parametrize("batch", BATCHES)
def test_explicit_routes_equal_the_loop(batch):
    drone, rover = policy_of(5, 4), policy_of(3, 2)
    td = observed([5, 3, 5, 5, 3], *batch)
    policy = RoutedSequential((drone, [0, 2, 3]), (rover, [1, 4]))
    assert policy(td) is td
    assert_actions(td, by_hand(td, [drone, rover, drone, drone, rover]))


@pytest.mark.parametrize("batch", BATCHES)
def test_a_width_says_who_is_meant(batch):
    drone, rover = policy_of(5, 2), policy_of(3, 2)
    td = observed([5, 3, 5], *batch)
    RoutedSequential(rover, drone)(td)
    assert_actions(td, by_hand(td, [drone, rover, drone]))
    assert td[ACTION].shape == (*batch, 3, 2), "readable at once where the agents agree"


@pytest.mark.parametrize("batch", BATCHES)
def test_exclusive_keys_say_who_is_meant(batch):
    drone, rover = policy_of(5, 4, "camera"), policy_of(5, 2, "lidar")
    td = observed([5, 5, 5], *batch, leaves=["lidar", "camera", "lidar"])
    RoutedSequential(drone, rover)(td)
    rows = td["agents"].unbind(-1)
    wanted = [rover.module(rows[0]["lidar"]), drone.module(rows[1]["camera"])]
    assert_actions(td, [*wanted, rover.module(rows[2]["lidar"])])
    assert set(rows[1].keys()) == {"camera", "action"}


def test_each_module_is_called_once_with_a_dense_stack():
    nets = Counted(5, 2), Counted(3, 2)
    modules = [TensorDictModule(net, in_keys=[OBSERVATION], out_keys=[ACTION]) for net in nets]
    RoutedSequential(*modules)(observed([5, 3, 5, 5], 7))
    assert [net.shapes for net in nets] == [[(7, 3, 5)], [(7, 1, 3)]]


def test_two_inputs_and_a_key_of_the_root():
    class Both(nn.Module):
        def __init__(self, o):
            super().__init__()
            self.layer = nn.Linear(o + 4, 2)

        def forward(self, x, speed, state):
            x = torch.cat([x, speed], -1)
            return self.layer(torch.cat([x, state.unsqueeze(-2).expand(*x.shape[:-1], 2)], -1))

    def make(o):
        keys = [OBSERVATION, ("agents", "speed"), "state"]
        return TensorDictModule(Both(o), in_keys=keys, out_keys=[ACTION])

    drone, rover = make(5), make(3)
    td = observed([5, 3, 5], 7)
    for row in td["agents"].tensordicts:
        row["speed"] = torch.randn(7, 2)
    td["state"] = torch.randn(7, 2)
    RoutedSequential((drone, [0, 2]), (rover, [1]))(td)
    for row, module in zip(td["agents"].tensordicts, [drone, rover, drone]):
        x = torch.cat([row["observation"], row["speed"], td["state"]], -1)
        torch.testing.assert_close(row["action"], module.module.layer(x))


def test_deeply_nested_groups_and_nested_leaves():
    path = ("world", "team")
    drone, rover = policy_of(5, 4, path=path), policy_of(3, 2, path=path)
    for group in (None, path):
        td = observed([5, 3], 7, path=path)
        RoutedSequential(drone, rover, group=group)(td)
        assert [tuple(x.shape) for x in actions(td, (*path, "action"))] == [(7, 4), (7, 2)]
    leaf = ("observation", "camera")
    td = observed([5, 3], 7, leaves=[leaf, leaf])
    camera = [
        TensorDictModule(nn.Linear(o, 2), in_keys=[("agents", *leaf)], out_keys=[ACTION])
        for o in (5, 3)
    ]
    RoutedSequential(*camera)(td)
    assert td[ACTION].shape == (7, 2, 2)


def test_the_lazy_stack_itself_may_be_the_input():
    one = TensorDictModule(nn.Linear(3, 2), in_keys=["key1"], out_keys=["embed"])
    other = TensorDictModule(nn.Linear(5, 2), in_keys=["key2"], out_keys=["embed"])
    for dim, batch in ((0, ()), (0, (4,)), (1, (4,))):
        td = observed([3, 5, 3], *batch, leaves=["key1", "key2", "key1"], path=())
        td = lazy_stack(td.tensordicts, dim)
        RoutedSequential(one, other)(td)
        wanted = [
            one.module(td.tensordicts[0]["key1"]),
            other.module(td.tensordicts[1]["key2"]),
            one.module(td.tensordicts[2]["key1"]),
        ]
        torch.testing.assert_close(td["embed"], torch.stack(wanted, dim))


def test_empty_placeholders_do_not_count():
    """``torchrl.data.consolidate_spec`` gives every agent every key, some of size 0."""
    drone, rover = policy_of(5, 2, "camera"), policy_of(3, 2, "lidar")
    td = observed([5, 3], 7, leaves=["camera", "lidar"])
    td["agents"].tensordicts[0]["lidar"] = torch.zeros(7, 0)
    td["agents"].tensordicts[1]["camera"] = torch.zeros(7, 0)
    assert RoutedSequential(drone, rover)(td)[ACTION].shape == (7, 2, 2)


@pytest.mark.parametrize("seed", range(20))
def test_any_team_equals_the_loop(seed):
    draw = random.Random(seed)
    widths = [draw.choice([3, 4, 5]) for _ in range(draw.randint(1, 7))]
    kinds = sorted(set(widths))
    players = {width: policy_of(width, draw.randint(1, 3)) for width in kinds}
    batch = tuple(draw.randint(1, 3) for _ in range(draw.randint(0, 2)))
    td = observed(widths, *batch)
    entries = []
    for width in draw.sample(kinds, len(kinds)):
        agents = [i for i, other in enumerate(widths) if other == width]
        draw.shuffle(agents)
        entries.append((players[width], agents) if draw.random() < 0.5 else players[width])
    if draw.random() < 0.3 and batch:
        td = td.reshape(-1)  # TorchRL makes a lazy stack of lazy stacks of it
    RoutedSequential(*entries)(td)
    members = td["agents"].unbind(-1)
    for member, width in zip(members, widths):
        torch.testing.assert_close(member["action"], players[width].module(member["observation"]))


# --------------------------------------------------------------- order, gradients, what is written


def test_modules_run_in_order_and_build_on_each_other():
    camera, lidar = policy_of(5, 6, "camera", "hidden"), policy_of(3, 6, "lidar", "hidden")
    shared = policy_of(6, 2, "hidden")
    double = TensorDictModule(lambda x: 2 * x, in_keys=[ACTION], out_keys=[ACTION])
    td = observed([5, 3, 5], 7, leaves=["camera", "lidar", "camera"])
    RoutedSequential(camera, lidar, shared, (double, [1, 2]))(td)
    rows = td["agents"].tensordicts
    wanted = [
        shared.module(camera.module(rows[0]["camera"])),
        2 * shared.module(lidar.module(rows[1]["lidar"])),
        2 * shared.module(camera.module(rows[2]["camera"])),
    ]
    assert_actions(td, wanted)
    torch.testing.assert_close(rows[1]["hidden"], lidar.module(rows[1]["lidar"]))


def test_a_head_for_one_agent_alone_sees_what_the_others_wrote():
    encoder = policy_of(5, 6, "camera", "hidden")
    heads = [(policy_of(6, a, "hidden"), [i]) for i, a in enumerate((2, 3, 2))]
    td = observed([5, 5, 5], 7, leaves=["camera"] * 3)
    RoutedSequential(encoder, *heads)(td)
    for row, (head, _) in zip(td["agents"].tensordicts, heads):
        wanted = head.module(encoder.module(row["camera"]))
        torch.testing.assert_close(row["action"], wanted)


def test_gradients_reach_the_routed_module_only():
    drone, rover = policy_of(5, 4), policy_of(3, 2)
    td = observed([5, 3, 5, 3], 7)
    RoutedSequential((drone, [0, 2]), (rover, [1, 3]))(td)
    actions(td)[1].pow(2).sum().backward()
    assert all(p.grad is None for p in drone.parameters())
    found = [p.grad.clone() for p in rover.parameters()]
    rover.zero_grad()
    rover.module(td["agents"].tensordicts[1]["observation"]).pow(2).sum().backward()
    for one, p in zip(found, rover.parameters()):
        torch.testing.assert_close(one, p.grad)


def test_a_module_on_all_agents_may_write_to_the_root():
    mixer = TensorDictModule(lambda x: x.sum((-1, -2)), in_keys=[ACTION], out_keys=["total"])
    td = observed([5, 3], 7)
    RoutedSequential(policy_of(5, 2), policy_of(3, 2), mixer)(td)
    torch.testing.assert_close(td["total"], td[ACTION].sum((-1, -2)))


def test_a_critic_of_the_state_beside_the_policies():
    state = TensorDictModule(nn.Linear(4, 1), in_keys=["state"], out_keys=["state_value"])
    everyone = TensorDictModule(
        lambda s: s.unsqueeze(-2).expand(7, 2, 4), in_keys=["state"], out_keys=[("agents", "all")]
    )
    td = observed([5, 3], 7).set("state", torch.randn(7, 4))
    RoutedSequential(policy_of(5, 2), state, policy_of(3, 2), everyone)(td)
    assert td["state_value"].shape == (7, 1) and td["agents", "all"].shape == (7, 2, 4)


# ------------------------------------------------------------------------------ dense groups


def test_without_routes_a_dense_group_is_as_in_torchrl():
    encoder, head = policy_of(5, 6, "observation", "hidden"), policy_of(6, 2, "hidden")
    td = dense(3, 5, 7)
    found = RoutedSequential(encoder, head)(td.clone())
    wanted = TensorDictSequential(encoder, head)(td.clone())
    assert (found == wanted).all() and found.keys() == wanted.keys()


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("routes", [([0, 1], [2, 3]), ([0, 2], [3, 1])])
def test_a_route_runs_on_a_slice_of_a_dense_group(batch, routes):
    one, other = policy_of(5, 2), policy_of(5, 2)
    td = dense(4, 5, *batch)
    RoutedSequential((one, routes[0]), (other, routes[1]))(td)
    assert not isinstance(td["agents"], LazyStackedTensorDict)
    x = td[OBSERVATION]
    wanted = [(one if i in routes[0] else other).module(x[..., i, :]) for i in range(4)]
    torch.testing.assert_close(td[ACTION], torch.stack(wanted, -2))


def test_a_dense_group_whose_batch_dims_were_not_said():
    one, other = policy_of(5, 2), policy_of(5, 3)
    td = TensorDict({"agents": {"observation": torch.randn(7, 2, 5)}}, [7])
    same = RoutedSequential((one, 0), (policy_of(5, 2), 1))(td.clone())
    assert same[ACTION].shape == (7, 2, 2)
    differ = RoutedSequential((one, 0), (other, 1))(td.clone())
    assert [tuple(x.shape) for x in actions(differ)] == [(7, 2), (7, 3)]
    assert_same(differ[OBSERVATION], td[OBSERVATION])


def test_a_dense_group_becomes_lazy_where_actions_differ():
    one, other = policy_of(5, 2), policy_of(5, 3)
    td = dense(3, 5, 7)
    x = td[OBSERVATION]
    RoutedSequential((one, [0, 2]), (other, [1]))(td)
    wanted = [one.module(x[:, 0]), other.module(x[:, 1]), one.module(x[:, 2])]
    assert_actions(td, wanted)
    assert_same(td[OBSERVATION], x)


def test_what_the_others_have_stays():
    td = dense(3, 5, 7)
    td[ACTION] = torch.randn(7, 3, 2)
    before = td[ACTION].clone()
    one = policy_of(5, 2)
    RoutedSequential((one, [1]), partial_tolerant=True)(td)
    torch.testing.assert_close(td[ACTION][:, 1], one.module(td[OBSERVATION][:, 1]))
    assert_same(td[ACTION][:, ::2], before[:, ::2])


# ------------------------------------------------------------------------------ distributions


def mixed():
    """Two that steer with 2 and 3 features, and one that chooses of 4."""
    actors = [actor_of(5, 2), actor_of(5, 3), chooser_of(3, 4)]
    policy = RoutedSequential((actors[0], [0, 3]), (actors[1], [1]), (actors[2], [2]))
    return actors, policy, lambda *batch: observed([5, 5, 3, 5], *batch)


def test_continuous_and_discrete_agents_in_one_group():
    actors, policy, make = mixed()
    td = policy(make(7))
    assert [tuple(x.shape) for x in actions(td)] == [(7, 2), (7, 3), (7,), (7, 2)]
    assert [x.dtype for x in actions(td)][2] is torch.int64
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
def test_the_distribution_of_all_agents(batch):
    _, policy, make = mixed()
    td = policy(make(*batch))
    keys = set(td["agents"].tensordicts[0].keys())
    dist = policy.get_dist(td)
    assert dist.batch_shape == (*batch, 4)
    assert set(td["agents"].tensordicts[0].keys()) == keys, "nothing is written"
    one_by_one = actions(td)
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


def test_a_distribution_of_agents_that_agree_is_dense():
    policy = RoutedSequential((actor_of(5, 2), [1]), (actor_of(3, 2), [0, 2]))
    td = policy(observed([3, 5, 3], 7))
    dist = policy.get_dist(td)
    drawn = dist.rsample()
    assert drawn.shape == (7, 3, 2) and drawn.requires_grad
    torch.testing.assert_close(dist.log_prob(td[ACTION]), policy.log_prob(td))


def test_exploration_types_are_respected():
    _, policy, make = mixed()
    td = make(7)
    with set_exploration_type(ExplorationType.DETERMINISTIC):
        first, second = (actions(policy(td.clone())) for _ in range(2))
    for one, other in zip(first, second):
        assert_same(one, other)
    with set_exploration_type(ExplorationType.RANDOM):
        first, second = (actions(policy(td.clone())) for _ in range(2))
    assert not torch.equal(first[0], second[0])


def test_nets_for_each_and_one_distribution_for_all():
    """Where parameters agree, the probabilistic part needs no route."""
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
    td = policy(observed([5, 3, 5], 7))
    assert td[ACTION].shape == (7, 3, 2)
    found = policy.log_prob(td)
    torch.testing.assert_close(found, td["agents", "action_log_prob"], rtol=1e-4, atol=1e-4)
    assert policy.log_prob_keys == [("agents", "action_log_prob")]
    assert policy.dist_sample_keys == [ACTION]


def test_an_action_given_a_latent_is_given_the_latent_that_was_drawn():
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
        td = policy(observed([5, 3], 7))
        assert_same(policy.log_prob(td), policy.log_prob(td))
    loc = policy[2].module[0].module(td["agents", "latent"])
    wanted = IndependentUnit(loc).log_prob(td[ACTION])
    torch.testing.assert_close(policy.log_prob(td), wanted)


class IndependentUnit(torch.distributions.Independent):
    def __init__(self, loc):
        super().__init__(Normal(loc, 1.0), 1)


def test_torchrls_loss_takes_a_routed_actor_on_dense_data():
    policy = RoutedSequential((actor_of(5, 2), [0, 2]), (actor_of(5, 2), [1]))
    critic = policy_of(5, 1, out="state_value")
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
        td = policy(dense(3, 5, 7))
    for leaf in ("advantage", "value_target"):
        td["agents", leaf] = torch.randn(7, 3, 1)
    losses = loss(td)
    sum(value for key, value in losses.items() if key.startswith("loss_")).backward()
    assert all(p.grad is not None for p in loss.actor_network_params.parameters())
    torch.testing.assert_close(losses["kl_approx"], torch.zeros(()), atol=1e-5, rtol=0)


def test_a_number_for_every_feature_is_no_log_probability_of_an_agent():
    loc, scale = ("agents", "loc"), ("agents", "scale")
    net = nn.Sequential(nn.Linear(5, 4), NormalParamExtractor())
    actor = ProbabilisticActor(
        TensorDictModule(net, in_keys=[OBSERVATION], out_keys=[loc, scale]),
        in_keys={"loc": loc, "scale": scale},
        out_keys=[ACTION],
        distribution_class=Normal,
    )
    policy = RoutedSequential(actor)
    td = policy(observed([5, 5], 7))
    with pytest.raises(ValueError, match="Normal of batch shape .7, 2, 2., expected one number"):
        policy.log_prob(td)


def test_without_one_group_of_distributions():
    with pytest.raises(ValueError, match="probabilistic modules in no group"):
        RoutedSequential(policy_of(5, 2)).get_dist(observed([5], 7))
    two = RoutedSequential(actor_of(5, 2), actor_of(5, 2, group="others"))
    with pytest.raises(ValueError, match="select_subsequence"):
        two.get_dist(observed([5], 7))
    one = two.select_subsequence(out_keys=[ACTION])
    assert one.log_prob(one(observed([5], 7))).shape == (7, 1)
    half = RoutedSequential((actor_of(5, 2), [0]), partial_tolerant=True)
    with pytest.raises(ValueError, match="agent 1 of group 'agents' have no distribution"):
        half.get_dist(observed([5, 5], 7))


# ---------------------------------------------------------------------------- what is refused

DRONE, ROVER = policy_of(5, 4), policy_of(3, 2)
REFUSED = {
    "left out": (lambda: [DRONE], [5, 3, 3], "no module .* agents 1, 2 of group 'agents'.*observ"),
    "left out by routes": (lambda: [(DRONE, [0])], [5, 5], "no module .* agent 1 of group"),
    "no action": (
        lambda: [DRONE, policy_of(3, 2, out="hidden")],
        [5, 3],
        "agent 1 of group 'agents' got hidden but no .'agents', 'action'.",
    ),
    "on nobody": (
        lambda: [DRONE, policy_of(4, 2, "camera")],
        [5, 5],
        "module 1 reads .*camera.*, which no agent .* has: .*observation",
    ),
    "both": (lambda: [DRONE, policy_of(5, 4)], [5, 5], "modules 0 and 1 both write .* agents 0, 1"),
    "overlap": (
        lambda: [(DRONE, [0, 1]), (policy_of(5, 4), [1, 2])],
        [5, 5, 5],
        "modules 0 and 1 both write .* for agent 1 of",
    ),
    "no width": (
        lambda: [TensorDictModule(lambda x: x, in_keys=[OBSERVATION], out_keys=[ACTION])],
        [5, 3],
        r"module 0 .* different shapes, found .*\[5\] for agents \[0\] and \[3\] for agents \[1\]",
    ),
    "another width": (
        lambda: [policy_of(4, 2)],
        [5, 3],
        "its first layer takes 4 features.*give it a route",
    ),
    "shapes on a route": (lambda: [(DRONE, [0, 1])], [5, 3], "different shapes"),
    "lacking key": (
        lambda: [(policy_of(5, 4, "camera"), [0]), (ROVER, [1])],
        [5, 3],
        "module 0 reads .*camera.*, but agent 0 .* on its route: .* has observation",
    ),
    "beyond": (lambda: [(DRONE, [0, 2])], [5, 5], r"route to agents \[2\] .* expected 0 to 1"),
    "no group": (
        lambda: [(policy_of(5, 4, path=("team",)), [0])],
        [5],
        r"module 0 has a route, but no group: found \['agents'\]",
    ),
    "outside": (
        lambda: [
            (TensorDictModule(nn.Linear(5, 2), in_keys=[OBSERVATION], out_keys=["action"]), [0])
        ],
        [5, 5],
        "runs on agent 0 of group 'agents' alone and writes 'action'",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_in_the_first_call(case):
    make, widths, message = REFUSED[case]
    policy = RoutedSequential(*make())
    td = observed(widths, 7)
    with pytest.raises(ValueError, match=message) as caught:
        policy(td)
    assert len(str(caught.value)) < 400 and "\n" not in str(caught.value)
    written = {key for row in td["agents"].tensordicts for key in row.keys()}
    assert written == {"observation"} and set(td.keys()) == {"agents"}, "nothing is half done"


def test_an_error_inside_says_where():
    policy = RoutedSequential((policy_of(4, 2), [0, 1]), (ROVER, [2]))
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as caught:
        policy(observed([5, 5, 3], 7))
    assert "In module 0, for agents 0, 1 of group 'agents'." in caught.value.__notes__


def test_what_is_written_has_a_row_an_agent():
    total = TensorDictModule(lambda x: x.sum(1), in_keys=[OBSERVATION], out_keys=[ACTION])
    td = TensorDict({"agents": {"observation": torch.randn(7, 2, 5)}}, [7])
    with pytest.raises(
        ValueError, match=r"shape \[7, 5\] for agents 0, 1 .*expected 2 rows in dim 1"
    ):
        RoutedSequential((total, [0, 1]))(td)


def test_a_missing_key_of_the_root_or_group_is_torchrls_error():
    with pytest.raises(KeyError):
        RoutedSequential(policy_of(5, 2))(TensorDict({"other": torch.zeros(7)}, [7]))


@pytest.mark.parametrize("agents", [[], [0, 0], [-1]])
def test_routes_that_cannot_be(agents):
    with pytest.raises(ValueError, match="expected different agents from 0 to N - 1"):
        RoutedSequential((DRONE, agents))


def test_tolerance_allows_what_torchrl_allows():
    camera = policy_of(4, 2, "camera")
    td = observed([5, 3], 7)
    RoutedSequential(DRONE, camera, partial_tolerant=True)(td)
    assert ["action" in row.keys() for row in td["agents"].tensordicts] == [True, False]


# ------------------------------------------------------------------------------------- specs


def team_of(exclusive=False):
    def seen(leaf, width):
        return Composite({leaf: Unbounded((width,))}) if exclusive else Unbounded((width,))

    drone = AgentSpec("drone", 2, seen("camera", 5), Bounded(-1, 1, (3,)))
    rover = AgentSpec("rover", 3, seen("lidar", 4), Bounded(-1, 1, (2,)))
    return TeamSpec({"agents": [drone, rover]})


def test_agents_by_name():
    drone, rover = policy_of(5, 3), policy_of(4, 2)
    td = observed([5, 5, 4, 4, 4], 7)
    for group in (team_of(), team_of().groups["agents"]):
        for routes in (
            ("drone_*", "rover_*"),
            (["drone_0", 1], ["rover_2", "rover_0", "rover_1"]),
            (None, "rover_*"),
            (None, None),
        ):
            policy = RoutedSequential((drone, routes[0]), (rover, routes[1]), group=group)
            found = policy(td.clone())
            assert_actions(found, by_hand(found, [drone] * 2 + [rover] * 3))
    assert RoutedSequential((drone, "*"), group=team_of(), partial_tolerant=True)


SPEC_REFUSED = {
    "unknown name": (
        lambda: [(policy_of(5, 3), "tank_0")],
        "expected agents of .*drone_0, drone_1",
    ),
    "beyond": (lambda: [(policy_of(5, 3), [7])], "expected different agents from 0 to 4"),
    "left out": (lambda: [policy_of(5, 3)], "agents rover_0, rover_1, rover_2 of group 'agents'"),
    "left out by a route": (
        lambda: [(policy_of(5, 3), "drone_*"), (policy_of(4, 2), ["rover_0"])],
        "no module .* agents rover_1, rover_2 of group 'agents'",
    ),
    "no action": (
        lambda: [policy_of(5, 3), policy_of(4, 2, out="hidden")],
        "agents rover_0, .* got hidden but no",
    ),
    "on nobody": (
        lambda: [policy_of(5, 3), policy_of(4, 2, "lidarr")],
        "module 1 reads .*lidarr.*which no agent of group 'agents' has: agent drone_0 .*observ",
    ),
    "both": (
        lambda: [policy_of(5, 3), policy_of(5, 3), policy_of(4, 2)],
        "modules 0 and 1 both write .* agents drone_0, drone_1",
    ),
    "other widths": (lambda: [policy_of(6, 3), policy_of(4, 2)], "takes 6 features"),
}


@pytest.mark.parametrize("case", SPEC_REFUSED)
def test_refused_at_once_where_specs_are_given(case):
    make, message = SPEC_REFUSED[case]
    for group in (team_of(), team_of().groups["agents"]):
        with pytest.raises(ValueError, match=message):
            RoutedSequential(*make(), group=group)


def test_names_need_specs_and_specs_need_as_many_agents():
    with pytest.raises(ValueError, match="'drone_0', but only specs know names"):
        RoutedSequential((DRONE, "drone_0"))
    policy = RoutedSequential(policy_of(5, 3), policy_of(4, 2), group=team_of())
    with pytest.raises(ValueError, match="group 'agents' has 2 agents, but its specs 5"):
        policy(observed([5, 4], 7))


def test_specs_are_followed_as_far_as_shapes_are_known():
    """Widths between modules are not known before the first call."""
    encoders = policy_of(5, 6, out="hidden"), policy_of(4, 7, out="hidden")
    heads = policy_of(6, 3, "hidden"), policy_of(7, 2, "hidden")
    policy = RoutedSequential(*encoders, *heads, group=team_of())
    td = policy(observed([5, 5, 4, 4, 4], 7))
    assert [x.shape[-1] for x in actions(td)] == [3, 3, 2, 2, 2]
    same = AgentSpec("car", 2, Unbounded((5,)), CategoricalSpec(3))
    group = TeamSpec([same]).groups["car"]
    one = policy_of(5, 3, path=("car",))
    assert RoutedSequential(one, group=group)
    with pytest.raises(ValueError, match="agent car_1 of group 'car'"):
        RoutedSequential((one, [0]), group=group)


# ------------------------------------------------------------- as a module: keys, parts, parameters


def test_keys_parameters_and_copies():
    drone, rover = policy_of(5, 4), policy_of(3, 2)
    policy = RoutedSequential((drone, [0]), (rover, [1]))
    assert policy.in_keys == [OBSERVATION] and policy.out_keys == [ACTION]
    assert isinstance(policy, TensorDictSequential) and len(policy) == 2
    plain = TensorDictSequential(drone, rover)
    assert policy.state_dict().keys() == plain.state_dict().keys()
    n = sum(p.numel() for p in drone.parameters()) + sum(p.numel() for p in rover.parameters())
    assert sum(p.numel() for p in policy.parameters()) == n
    td = observed([5, 3], 7)
    wanted = actions(policy(td.clone()))
    for twin in (copy.deepcopy(policy), pickle.loads(pickle.dumps(policy))):
        for one, other in zip(actions(twin(td.clone())), wanted):
            assert_same(one, other)
    twin.module[0].module[0].weight.data.zero_()
    twin.load_state_dict(policy.state_dict())
    assert_same(actions(twin(td.clone()))[0], wanted[0])
    shared = RoutedSequential((drone, [0]), (drone, [1]))
    assert len(list(shared.parameters())) == len(list(drone.parameters()))


def test_parts_keep_their_routes():
    encoders = policy_of(5, 6, out="hidden"), policy_of(3, 6, out="hidden")
    heads = policy_of(6, 4, "hidden"), policy_of(6, 2, "hidden")
    policy = RoutedSequential(
        {"see": (encoders[0], [0]), "look": (encoders[1], [1]),
         "fly": (heads[0], [0]), "drive": (heads[1], [1])}, group="agents"
    )  # fmt: skip
    td = policy(observed([5, 3], 7))
    part = policy.select_subsequence(out_keys=[("agents", "hidden")])
    assert list(part.module) == ["see", "look"]
    found = part(td.select(OBSERVATION))
    assert_same(found["agents", "hidden"], td["agents", "hidden"])
    later = policy.select_subsequence(in_keys=[("agents", "hidden")])
    assert list(later.module) == ["fly", "drive"]
    assert policy["fly"] is heads[0]
    with pytest.raises(ValueError, match="no module leads"):
        policy.select_subsequence(out_keys=["nothing"])
    flat = RoutedSequential([(m, [i % 2]) for i, m in enumerate((*encoders, *heads))])
    half = flat[2:](td.select(("agents", "hidden")))
    assert_actions(half, actions(td))
    flat[0] = policy_of(5, 6, out="hidden")
    assert flat(observed([5, 3], 7))["agents"].tensordicts[0]["action"].shape == (7, 4)
    del flat[3]
    with pytest.raises(ValueError, match="agent 1 of group 'agents' got hidden but no"):
        flat(observed([5, 3], 7))


def test_names_of_modules_are_said():
    policy = RoutedSequential({"fly": policy_of(5, 4, "camera")})
    with pytest.raises(ValueError, match="module 'fly' reads"):
        policy(observed([5], 7))


def test_select_out_keys_and_inplace():
    drone, rover = actor_of(5, 4), actor_of(3, 2)
    td = observed([5, 3], 7)
    chosen = RoutedSequential(drone, rover, selected_out_keys=[ACTION])
    found = chosen(td.clone())
    assert set(found["agents"].tensordicts[0].keys()) == {"observation", "action"}
    apart = RoutedSequential(drone, rover, inplace=False)
    source = td.clone()
    found = apart(source)
    assert set(source["agents"].tensordicts[0].keys()) == {"observation"}
    assert set(found["agents"].tensordicts[0].keys()) == {
        "loc", "scale", "action", "action_log_prob"
    }  # fmt: skip
    target = TensorDict({}, [7])
    assert RoutedSequential(drone, rover)(source, tensordict_out=target) is target
    assert target["agents", "action_log_prob"].shape == (7, 2)


def test_existing_entries_may_be_kept():
    drone, rover = policy_of(5, 2), policy_of(3, 2)
    td = RoutedSequential(drone, rover)(observed([5, 3], 7))
    before = td[ACTION].clone()
    other = RoutedSequential(policy_of(5, 2), policy_of(3, 2))
    with set_skip_existing(True):
        assert_same(other(td)[ACTION], before)
    assert not torch.equal(other(td)[ACTION], before)


def test_inside_another_sequence_and_another_inside():
    drone, rover = policy_of(5, 2), policy_of(3, 2)
    double = TensorDictModule(lambda x: 2 * x, in_keys=[ACTION], out_keys=[("agents", "twice")])
    inner = RoutedSequential(drone, rover)
    td = TensorDictSequential(inner, double)(observed([5, 3], 7))
    torch.testing.assert_close(td["agents", "twice"], 2 * td[ACTION])
    td = RoutedSequential(inner, double)(observed([5, 3], 7))
    torch.testing.assert_close(td["agents", "twice"], 2 * td[ACTION])


def test_several_groups_in_one_policy():
    td = observed([5, 3], 7)
    td["others"] = observed([4, 3], 7, path=("others",))["others"]
    modules = policy_of(5, 2), policy_of(3, 2)
    others = policy_of(4, 1, path=("others",)), policy_of(3, 2, path=("others",))
    flat = policy_of(5, 6, path=("flat",)), policy_of(5, 2, path=("flat",))
    td["flat"] = dense(4, 5, 7)["agents"]
    policy = RoutedSequential(*modules, *others, *flat)
    policy(td)
    assert td["flat", "action"].shape == (7, 4, 2), "as in TorchRL, the last one counts"
    assert td[ACTION].shape == (7, 2, 2)
    assert [x.shape[-1] for x in actions(td, ("others", "action"))] == [1, 2]


def test_lazy_layers_take_the_first_width_they_see_on_a_route():
    lazy = TensorDictModule(nn.LazyLinear(2), in_keys=[OBSERVATION], out_keys=[ACTION])
    policy = RoutedSequential((lazy, [0]), (policy_of(3, 2), [1]))
    assert policy(observed([5, 3], 7))[ACTION].shape == (7, 2, 2)
    assert lazy.module.in_features == 5


def test_swapped_parameters():
    drone, rover = policy_of(5, 4), policy_of(3, 2)
    policy = RoutedSequential(drone, rover)
    td = observed([5, 3], 7)
    params = TensorDict.from_module(policy)
    with params.data.apply(torch.zeros_like).to_module(policy):
        assert all(not x.any() for x in actions(policy(td.clone())))
    assert actions(policy(td.clone()))[0].any()

    def loss(params):
        with params.to_module(policy):
            return sum(x.pow(2).sum() for x in actions(policy(td.clone())))

    grads = torch.func.grad(loss)(params.data)
    actions(policy(td.clone()))[0].pow(2).sum().backward()
    torch.testing.assert_close(
        grads["module", "0", "module", "0", "weight"], drone.module[0].weight.grad
    )


def test_several_sets_of_parameters_at_once():
    policy = RoutedSequential((policy_of(5, 2), [0]), (policy_of(5, 2), [1]))
    td = dense(2, 5, 7)
    params = TensorDict.from_module(policy).data.expand(3).clone()

    def run(params):
        with params.to_module(policy):
            return policy(td.clone())[ACTION]

    found = torch.vmap(run)(params)
    assert found.shape == (3, 7, 2, 2)
    assert_same(found[0], found[2])


@pytest.mark.parametrize("kind", ["lazy", "dense", "exclusive", "probabilistic", "dense ragged"])
def test_compiles_to_one_graph(kind):
    torch._dynamo.reset()
    if kind == "exclusive":
        policy = RoutedSequential(policy_of(5, 4, "camera"), policy_of(3, 2, "lidar"))
        td = observed([5, 3, 3], 7, leaves=["camera", "lidar", "lidar"])
    elif kind == "probabilistic":
        _, policy, make = mixed()
        td = make(7)
    elif kind == "lazy":
        policy, td = RoutedSequential(policy_of(5, 4), policy_of(3, 2)), observed([5, 3, 5], 7)
    else:
        a = 3 if kind == "dense ragged" else 2
        policy = RoutedSequential((policy_of(5, 2), [0, 2]), (policy_of(5, a), [1]))
        td = dense(3, 5, 7)
    compiled = torch.compile(lambda td: policy(td), fullgraph=True, backend="aot_eager")
    with set_exploration_type(ExplorationType.DETERMINISTIC):
        wanted, found = policy(td.clone()), compiled(td.clone())
    for one, other in zip(actions(found), actions(wanted)):
        torch.testing.assert_close(one, other)


def test_log_probabilities_compile_to_one_graph():
    torch._dynamo.reset()
    _, policy, make = mixed()
    td = policy(make(7)).detach()
    compiled = torch.compile(lambda td: policy.log_prob(td), fullgraph=True, backend="aot_eager")
    wanted = policy.log_prob(td)
    found = compiled(td)
    torch.testing.assert_close(found, wanted)
    parameters = list(policy.parameters())
    grads = [torch.autograd.grad(value.sum(), parameters) for value in (found, wanted)]
    torch.testing.assert_close(*grads)


# ------------------------------------------------------------------- environments and collectors


def make_world(seed=0):
    return VmasEnv("simple_world_comm", num_envs=3, group_map=ALL_IN_ONE, max_steps=5, seed=seed)


def make_tag(seed=0):
    return VmasEnv("simple_tag", num_envs=3, group_map=ALL_IN_ONE, max_steps=5, seed=seed)


class Pair(MarlEnv):
    """Drones see a camera, rovers a lidar."""

    def __init__(self, num_envs, **kwargs):
        super().__init__(num_envs, **kwargs)
        camera, lidar = Composite(camera=Unbounded((5,))), Composite(lidar=Unbounded((4,)))
        self.register_agent(AgentSpec("drone", 2, camera, Bounded(-1, 1, (3,))), group="agents")
        self.register_agent(AgentSpec("rover", 3, lidar, Bounded(-1, 1, (2,))), group="agents")

    def _seen(self):
        camera, lidar = self.x.repeat(1, 2, 5), self.x.repeat(1, 3, 4)
        return {"drone": {"observation": {"camera": camera}},
                "rover": {"observation": {"lidar": lidar}}}  # fmt: skip

    def _reset(self, tensordict):
        self.x = torch.randn(self.num_envs, 1, 1)
        return {"agents": self._seen()}

    def _step(self, tensordict):
        kinds = self.by_kind(tensordict, "agents")
        push = [kinds[kind]["action"].mean((1, 2)).view(-1, 1, 1) for kind in ("drone", "rover")]
        self.x = self.x + push[0] - push[1]
        return {"agents": {**self._seen(), "reward": -self.x.abs().repeat(1, 5, 1)}}


def make_pair(seed=0):
    return Pair(3, max_steps=5, seed=seed)


def policy_for(env, seed=0):
    torch.manual_seed(seed)
    group = TeamSpec.from_env(env).groups["agents"]
    if isinstance(env, Pair):
        kinds = {"camera": (5, 3), "lidar": (4, 2)}
        actors = [actor_of(*kinds[leaf], leaf=("observation", leaf)) for leaf in kinds]
        return RoutedSequential(*actors, group=group)
    kinds = {}
    for i, member in enumerate(group.members):
        sizes = member["observation"].shape[-1], member["action"].shape[-1]
        kinds.setdefault(sizes, (member["action"], []))[1].append(i)
    entries = [(actor_of(o, a, spec), agents) for (o, a), (spec, agents) in kinds.items()]
    return RoutedSequential(*entries, group=group)


ENVS = {"world_comm": make_world, "tag": make_tag, "pair": make_pair}


@pytest.mark.parametrize("name", ENVS)
def test_rollouts(name):
    env = ENVS[name]()
    if name != "pair":  # TorchRL checks no specs with exclusive keys
        check_env_specs(env)
    policy = policy_for(env)
    batch = env.rollout(4, policy)
    members = TeamSpec.from_env(env).groups["agents"].members
    for action, member in zip(actions(batch), members, strict=True):
        assert action.shape == (3, 4, *member["action"].shape)
        assert (action.abs() <= 1).all()
    found = policy.log_prob(batch)
    assert found.shape == (3, 4, len(members))
    torch.testing.assert_close(found, batch["agents", "action_log_prob"], rtol=1e-3, atol=1e-3)
    assert_same(policy.log_prob(batch.reshape(-1)), found.reshape(12, -1))


@pytest.mark.parametrize("name", ENVS)
def test_our_collector_and_a_buffer(name):
    env = ENVS[name]()
    buffer = ReplayBuffer(storage=LazyTensorStorage(100), batch_size=6)
    policy = policy_for(env)
    for batch in RolloutCollector(env, policy, frames_per_batch=12, total_frames=24):
        assert batch.shape == (3, 4)
        buffer.extend(batch.reshape(-1))
    sample = buffer.sample()
    again = policy(sample.clone())
    assert [x.shape for x in actions(again)] == [x.shape for x in actions(sample)]


@pytest.mark.parametrize("name", ["world_comm", "tag"])
def test_torchrls_collector(name):
    env = ENVS[name]()
    policy = policy_for(env)
    batches = list(Collector(env, policy, frames_per_batch=12, total_frames=24))
    assert [batch.shape for batch in batches] == [(3, 4)] * 2
    torch.testing.assert_close(
        policy.log_prob(batches[1]), batches[1]["agents", "action_log_prob"], rtol=1e-3, atol=1e-3
    )


def test_torchrls_environment_of_exclusive_keys():
    class Flat(nn.Module):
        def __init__(self, o, a, ndim):
            super().__init__()
            self.layer, self.ndim = nn.Linear(o, a), ndim

        def forward(self, x):
            return self.layer(x.flatten(-self.ndim)).tanh()

    def module(leaf, *sizes):
        keys = {"in_keys": [("lazy", leaf)], "out_keys": [("lazy", "action")]}
        return TensorDictModule(Flat(*sizes), **keys)

    policy = RoutedSequential(
        module("tensor_0", 1, 3, 1), module("tensor_1", 2, 2, 2), module("tensor_2", 6, 2, 3)
    )
    env = HeterogeneousCountingEnv()
    check_env_specs(env)
    assert [x.shape for x in actions(env.rollout(3, policy), ("lazy", "action"))] == [
        (3, 3), (3, 2), (3, 2)
    ]  # fmt: skip
    for collector in (Collector, RolloutCollector):
        batches = list(collector(env, policy, frames_per_batch=4, total_frames=8))
        assert [batch.shape for batch in batches] == [(4,), (4,)]


def test_a_loss_of_ones_own_on_log_probabilities():
    """A script as a user would write it: log-probabilities ``[E, T, N]`` times returns."""
    env = make_tag()
    policy = policy_for(env)
    optimizer = torch.optim.Adam(policy.parameters(), 1e-2)
    batch = env.rollout(4, policy, break_when_any_done=False).detach()
    reward = torch.stack([r["action"].pow(2).mean(-1) for r in batch["agents"].unbind(-1)], -1)
    before = policy.log_prob(batch).detach()
    for _ in range(5):
        loss = (policy.log_prob(batch) * reward).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert ((policy.log_prob(batch) - before) * reward).mean() < 0
