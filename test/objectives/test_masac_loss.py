"""MASAC's loss: TorchRL's where it reduces to it, by hand, under poison, permuted and joined."""

import copy
import itertools
import math

import pytest
import torch
from support.samples import DISCRETE, POISON, assert_same, make_group, make_trajectory, poisoned
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.data import Bounded, OneHot, Unbounded
from torchrl.modules import OneHotCategorical, ProbabilisticActor
from torchrl.objectives import DiscreteSACLoss, SACLoss, SoftUpdate, ValueEstimators

from torchrl_marl import AgentSpec, TeamSpec
from torchrl_marl.functional import soft_update_
from torchrl_marl.joining import join
from torchrl_marl.modules import NetworkConfig, RandomActor, make_action_critic, make_actor
from torchrl_marl.objectives import MASACLoss, own_actions

SMALL = NetworkConfig([8])


def networks(group, *, centralized=True, config=SMALL, **kwargs):
    actor = make_actor(group, config)
    critic = make_action_critic(group, config, centralized=centralized, n_critics=2, **kwargs)
    for parameter in [*actor.parameters(), *critic.parameters()]:
        nn.init.normal_(parameter, std=0.3)
    return actor, critic


def steps(group, *batch, seed=0, alive=0.7):
    td = make_trajectory(group, *batch, seed=seed, alive=alive)
    torch.manual_seed(seed)
    return RandomActor(group)(td)


def gradients(loss, td):
    """Those of each loss by its own parameters."""
    terms = loss(td)
    found = []
    for name, own in (
        ("loss_actor", list(loss.actor_network.parameters())),
        ("loss_value", list(loss.qvalue_network.parameters())),
        ("loss_alpha", [loss.log_alpha]),
    ):
        found += torch.autograd.grad(terms[name].sum(), own, retain_graph=True)
    return terms, found


def parameters_of(params):
    return [p for p in params.values(True, True) if p.requires_grad]


def assert_equal_gradients(found, expected, pairs):
    for (ours, theirs), of_ours, of_theirs in pairs:
        torch.testing.assert_close(found[ours], expected[theirs], rtol=0, atol=1e-6)
        one = torch.autograd.grad(found[ours], of_ours, retain_graph=True)
        other = torch.autograd.grad(expected[theirs], of_theirs, retain_graph=True)
        for a, b in zip(one, other, strict=True):
            torch.testing.assert_close(a, b.reshape(a.shape), rtol=0, atol=1e-6)


class EveryAction(nn.Module):
    """A critic of all discrete actions of each agent, as TorchRL's loss reads it."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(5, 4)

    def forward(self, observation):
        return self.linear(observation)


class OfAction(nn.Module):
    """Two such critics, each as a critic of the action that is given."""

    def __init__(self):
        super().__init__()
        self.networks = nn.ModuleList([EveryAction(), EveryAction()])

    def forward(self, observation, action):
        every = torch.stack([network(observation) for network in self.networks], -1)
        return (every * action.to(every.dtype).unsqueeze(-1)).sum(-2)


class TestReduction:
    """One agent, nobody masked: TorchRL's losses."""

    def keys(self, group, *names):
        return {key: group.key(key) for key in (*names, "reward", "done", "terminated")}

    @pytest.mark.parametrize("kind", ["bounded", "unbounded"])
    def test_sac(self, kind):
        torch.manual_seed(0)
        group = make_group(kind, n=1, mask=False)
        td = steps(group, 16)
        actor, _ = networks(group)
        critic = make_action_critic(group, SMALL)
        theirs = SACLoss(actor, critic, loss_function="l2", alpha_init=0.3, target_entropy=-2.0)
        theirs.set_keys(
            **self.keys(group, "state_action_value"),
            action=group.action_key,
            log_prob=group.key("action_log_prob"),
            priority=group.key("td_error"),
        )
        theirs.make_value_estimator(ValueEstimators.TD0, gamma=0.9)
        both = make_action_critic(group, SMALL, n_critics=2)
        for i in range(2):
            own = both.module[1].module.networks[i].parameters()
            values = parameters_of(theirs.qvalue_network_params[i])
            for mine, his in zip(own, values, strict=True):
                mine.data.copy_(his)
        ours = MASACLoss(actor, both, group=group, bootstrap="agent", gamma=0.9, alpha_init=0.3)
        SoftUpdate(theirs, tau=0.5), SoftUpdate(ours, tau=0.5)
        torch.manual_seed(3)
        expected = theirs(td.clone())
        torch.manual_seed(3)
        found = ours(td.clone())
        torch.testing.assert_close(found["loss_value"], expected["loss_qvalue"], rtol=0, atol=1e-6)
        pairs = (
            (
                ("loss_actor",) * 2,
                parameters_of(ours.actor_network_params),
                parameters_of(theirs.actor_network_params),
            ),
            (("loss_alpha",) * 2, [ours.log_alpha], [theirs.log_alpha]),
        )
        assert_equal_gradients(found, expected, pairs)
        for name in ("alpha", "entropy"):
            torch.testing.assert_close(found[name], expected[name], rtol=0, atol=1e-6)

    def test_discrete_sac(self):
        torch.manual_seed(0)
        group = make_group("one_hot", n=1, mask=False)
        td = steps(group, 16)
        actor, _ = networks(group)
        seen = [group.observation_key]
        theirs = DiscreteSACLoss(
            actor,
            TensorDictModule(EveryAction(), seen, [group.key("action_value")]),
            action_space="one-hot",
            num_actions=4,
            loss_function="l2",
            alpha_init=0.3,
            target_entropy_weight=0.5,
        )
        theirs.set_keys(
            **self.keys(group, "action_value"),
            action=group.action_key,
            value=group.key("state_value"),
            priority=group.key("td_error"),
        )
        theirs.make_value_estimator(ValueEstimators.TD0, gamma=0.9)
        both = OfAction()
        values = theirs.qvalue_network_params
        for i, network in enumerate(both.networks):
            for mine, his in zip(network.parameters(), parameters_of(values), strict=True):
                mine.data.copy_(his[i])
        critic = TensorDictModule(
            both, [*seen, group.action_key], [group.key("state_action_value")]
        )
        ours = MASACLoss(actor, critic, group=group, bootstrap="agent", gamma=0.9, alpha_init=0.3)
        SoftUpdate(theirs, tau=0.5), SoftUpdate(ours, tau=0.5)
        expected, found = theirs(td.clone()), ours(td.clone())
        names = [(f"networks.{i}.linear.{x}") for x in ("weight", "bias") for i in range(2)]
        held = dict(ours.qvalue_network_params.flatten_keys(".").items())
        mine = [held[f"module.{name}"] for name in names]
        torch.testing.assert_close(found["loss_value"], expected["loss_qvalue"], rtol=0, atol=1e-6)
        got = torch.autograd.grad(found["loss_value"], mine, retain_graph=True)
        flat = dict(theirs.qvalue_network_params.flatten_keys(".").items())
        want = torch.autograd.grad(
            expected["loss_qvalue"],
            [flat[f"module.linear.{x}"] for x in ("weight", "bias")],
            retain_graph=True,
        )
        for i, (a, b) in enumerate(zip(got, [x for y in want for x in y], strict=True)):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-6, msg=str(i))
        pairs = (
            (
                ("loss_actor",) * 2,
                parameters_of(ours.actor_network_params),
                parameters_of(theirs.actor_network_params),
            ),
            (("loss_alpha",) * 2, [ours.log_alpha], [theirs.log_alpha]),
        )
        assert_equal_gradients(found, expected, pairs)
        for name in ("alpha", "entropy"):
            torch.testing.assert_close(found[name], expected[name], rtol=0, atol=1e-6)

    @pytest.mark.parametrize("kind", ["bounded", "categorical"])
    def test_functional_and_plain_networks_are_equal(self, kind):
        torch.manual_seed(0)
        group = make_group(kind)
        td = steps(group, 16)
        actor, critic = networks(group)
        plain = MASACLoss(
            copy.deepcopy(actor), copy.deepcopy(critic), group=group, functional=False
        )
        assert not hasattr(plain, "target_actor_network")
        ours = MASACLoss(actor, critic, group=group)
        updater = SoftUpdate(ours, tau=0.25)
        for _ in range(3):
            for one in (
                *parameters_of(ours.qvalue_network_params),
                *plain.qvalue_network.parameters(),
            ):
                one.data.mul_(1.1)
            updater.step()
            target, source = plain.target_qvalue_network, plain.qvalue_network
            soft_update_(list(target.parameters()), list(source.parameters()), 0.25)
        found = []
        for loss in (plain, ours):
            torch.manual_seed(1)
            found.append(loss(td.clone()))
        for key, value in found[0].items():
            torch.testing.assert_close(value, found[1][key])


class Sum(nn.Module):
    """Two critics: all observations and weighted actions added up, and one less than that."""

    def __init__(self, weight):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(weight))

    def forward(self, observation, action):
        done = (self.weight * action).sum((-2, -1)).unsqueeze(-1).unsqueeze(-1)
        total = observation.sum(-2, keepdim=True) + done
        own = torch.tensor([1.0, 3.0]).unsqueeze(-1)  # of what all do, the second earns three times
        value = own * total.expand_as(observation)
        return torch.cat([value + 1.0, value], -1)


class TestByHand:
    """Two agents with two actions each, chosen with chances of 1/4 and 3/4 by both."""

    chances = (0.25, 0.75)

    def setup_method(self):
        self.group = TeamSpec([AgentSpec("car", 2, Unbounded((1,)), OneHot(2))]).groups["car"]
        logits = torch.tensor(self.chances).log()
        self.actor = constant_actor(self.group, logits)
        self.critic = TensorDictModule(
            Sum([[1.0, 5.0], [0.0, 10.0]]),
            [("car", "observation"), ("car", "action")],
            [("car", "state_action_value")],
        )

    def loss(self, **kwargs):
        return MASACLoss(
            self.actor, self.critic, group=self.group, gamma=0.5, functional=False, **kwargs
        )

    def batch(self, mask=(True, True), next_mask=(True, True), **flags):
        off = {"terminated": [[False], [False]], "truncated": [[False], [False]]} | flags
        done = (torch.tensor(off["terminated"]) | torch.tensor(off["truncated"])).unsqueeze(0)
        own = {key: torch.tensor([x]) for key, x in off.items()} | {"done": done}
        then = {
            "observation": torch.tensor([[[2.0], [4.0]]]),
            "mask": torch.tensor([next_mask]),
            "reward": torch.tensor([[[1.0], [5.0]]]),
        }
        now = {
            "observation": torch.tensor([[[1.0], [2.0]]]),
            "action": torch.tensor([[[1, 0], [0, 1]]]),
            "mask": torch.tensor([mask]),
        }
        root = {key: torch.zeros(1, 1, dtype=torch.bool) for key in ("done", "terminated")}
        return TensorDict({"car": now, "next": {"car": then | own, **root}}, [1])

    @property
    def entropy(self):
        return -sum(p * math.log(p) for p in self.chances)

    @pytest.fixture(autouse=True)
    def draws(self, monkeypatch):
        """Everybody draws the likelier action, the second."""
        from torchrl_marl.objectives import masac

        monkeypatch.setattr(masac, "draw_one_hot", likeliest)

    def test_values_and_targets(self):
        # Stored: 1 + 2 + 1 + 10 = 14 and 42, and one more each in the first critic.
        # Next, of 2 + 4 and what the other draws: the first, 6 + 10 + (1/4 1 + 3/4 5) = 20;
        # the second, 3 (6 + 5 + 3/4 10) = 55.5; and half their entropy.
        td = self.batch()
        terms = self.loss(alpha_init=0.5)(td)
        soft = 0.5 * self.entropy
        targets = torch.tensor([1 + 0.5 * (20 + soft), 5 + 0.5 * (55.5 + soft)])
        values = torch.tensor([[15.0, 14.0], [43.0, 42.0]])
        errors = values - targets.unsqueeze(-1)
        torch.testing.assert_close(terms["loss_value"], errors.square().sum(-1).mean())
        torch.testing.assert_close(terms["target_value"], targets.mean())
        torch.testing.assert_close(td["car", "td_error"].squeeze(), errors.abs().amax(-1))
        torch.testing.assert_close(terms["entropy"], torch.tensor(self.entropy))
        torch.testing.assert_close(terms["alpha"], torch.tensor(0.5))

    @pytest.mark.parametrize(
        ("whose", "gain"),
        [
            # Now 1 + 2. One's own: the first 3 + 10 + 4 = 17, the second 3 (3 + 5 + 7.5) = 46.5.
            ("agent", (17 + 46.5) / 2),
            # The group's: half of one's own and of the other's; the first's choice is worth 17 to
            # itself and 51 to the other, the second's 15.5 and 46.5.
            ("group", (34 + 31) / 2),
        ],
    )
    def test_what_choices_are_worth(self, whose, gain):
        terms = self.loss(actor_gradient=whose, alpha_init=0.5)(self.batch())
        torch.testing.assert_close(terms["loss_actor"], torch.tensor(-gain - 0.5 * self.entropy))

    def test_the_dead_are_worth_what_the_living_are_or_nothing(self):
        """Next 2 alone acts: it sees 4, 3 (4 + 7.5) = 34.5, and its entropy at alpha 1."""
        td = self.batch(next_mask=(False, True), terminated=[[True], [False]])
        value = 0.5 * (34.5 + self.entropy)
        for bootstrap, found in (("team", (6 + 2 * value) / 2), ("agent", (6 + value) / 2)):
            terms = self.loss(bootstrap=bootstrap)(td.clone())
            torch.testing.assert_close(terms["target_value"], torch.tensor(found))

    def test_temperature_moves_towards_the_target_entropy(self):
        """0.56 of entropy: log alpha rises where more is wanted, and falls where less is."""
        for share, sign in ((0.99, 1), (0.5, -1)):
            loss = self.loss(target_entropy=share)
            terms = loss(self.batch())
            torch.testing.assert_close(terms["loss_alpha"], torch.tensor(0.0))  # log 1
            (slope,) = torch.autograd.grad(terms["loss_alpha"], [loss.log_alpha])
            torch.testing.assert_close(slope, torch.tensor(self.entropy - share * math.log(2)))
            assert -sign * slope > 0

    def test_losses_do_not_move_what_is_not_theirs(self):
        loss = self.loss()
        terms = loss(self.batch())
        alpha, actor = [loss.log_alpha], list(self.actor.parameters())
        for name, others in (
            ("loss_actor", alpha),
            ("loss_value", [*alpha, *actor]),
            ("loss_alpha", [*actor, *self.critic.parameters()]),
        ):
            found = torch.autograd.grad(
                terms[name].sum(), others, retain_graph=True, allow_unused=True
            )
            assert found == (None,) * len(others)


class Constant(nn.Module):
    """The same logits, whatever is seen."""

    def __init__(self, logits):
        super().__init__()
        self.logits = nn.Parameter(logits)

    def forward(self, observation):
        return self.logits.expand(*observation.shape[:-1], -1)


def constant_actor(group, logits):
    module = TensorDictModule(Constant(logits), [group.observation_key], [group.key("logits")])
    return ProbabilisticActor(
        module,
        in_keys={"logits": group.key("logits")},
        out_keys=[group.action_key],
        distribution_class=OneHotCategorical,
    )


def likeliest(logits):
    return nn.functional.one_hot(logits.argmax(-1), logits.shape[-1]).to(logits.dtype)


def test_target_entropy_counts_own_actions_only():
    """Of agents with 1 and 3 action features; and of 2 and 4 legal actions of 4."""
    agents = [
        AgentSpec(name, 1, Unbounded((2,)), Bounded(-2, 2, (n,)))
        for name, n in (("a", 1), ("b", 3))
    ]
    group = join(tuple(TeamSpec(agents).groups.values()))
    loss = MASACLoss(*networks(group), group=group)
    assert loss.own_target.squeeze(-1).tolist() == [-1.0, -3.0]
    torch.testing.assert_close(loss.log_range.squeeze(-1), torch.tensor([1.0, 3.0]) * math.log(2))

    group = make_group("categorical", n=3, action_mask=True)
    td = steps(group, 1, alive=1.1)
    td["car", "action_mask"] = torch.tensor([[[1, 0, 1, 0], [1, 1, 1, 1], [0, 0, 0, 0]]]).bool()
    loss = MASACLoss(*networks(group), group=group)
    found = loss._act(td).target_entropy
    torch.testing.assert_close(found.flatten(), 0.5 * torch.tensor([2.0, 4.0, 4.0]).log())


def test_bounds_do_not_change_the_entropy():
    """The same network's actions, ten times as wide."""
    found = []
    for high in (1.0, 10.0):
        spec = AgentSpec("car", 3, Unbounded((5,)), Bounded(-high, high, (2,)))
        group = TeamSpec([spec]).groups["car"]
        torch.manual_seed(0)
        loss = MASACLoss(*networks(group), group=group, functional=False)
        td = steps(group, 16)
        td["car", "action"] = high * torch.linspace(-0.9, 0.9, 96).reshape(16, 3, 2)
        torch.manual_seed(1)
        found.append(loss(td))
    for key, value in found[0].items():
        torch.testing.assert_close(found[1][key], value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["wide", "unbounded", "categorical", "one_hot"])
@pytest.mark.parametrize("bootstrap", ["team", "agent"])
@pytest.mark.parametrize("centralized", [True, False, "state"])
def test_poison(kind, bootstrap, centralized):
    """What stands in masked slots changes no bit of losses, errors and gradients."""
    torch.manual_seed(0)
    group = make_group(kind, state=4, action_mask=kind in DISCRETE)
    actor, critic = networks(group, centralized=centralized)
    loss = MASACLoss(actor, critic, group=group, bootstrap=bootstrap, functional=False)
    td = steps(group, 32)
    flags = td["next", group.name]
    mask, following = td[group.mask_key], td["next", group.mask_key]
    seen = following | (mask & (flags["truncated"] & ~flags["terminated"]).squeeze(-1))
    torch.manual_seed(1)
    terms, found = gradients(loss, expected := td.clone())
    assert all(bool(g.isfinite().all()) for g in found)
    assert sum(bool((g != 0).any()) for g in found) > 8
    for value in POISON:
        bad = td.clone()
        for key, alive in (
            (group.observation_key, mask),
            (group.action_key, mask),
            (("next", group.name, "reward"), mask),
            (("next", group.name, "observation"), seen),
        ):
            bad = poisoned(bad, key, alive, value)
        torch.manual_seed(1)
        others, again = gradients(loss, bad)
        for key, term in terms.items():
            assert_same(term, others[key], key)
        for one, other in zip(found, again, strict=True):
            assert_same(one, other)
        assert_same(expected[group.name, "td_error"], bad[group.name, "td_error"])


@pytest.fixture
def without_chance(monkeypatch):
    """The same noise for everybody; of discrete actions the likeliest is drawn."""
    from torch.distributions import normal

    from torchrl_marl.objectives import masac

    monkeypatch.setattr(masac, "draw_one_hot", likeliest)
    half = lambda shape, dtype, device: torch.full(shape, 0.5, dtype=dtype, device=device)  # noqa: E731
    monkeypatch.setattr(normal, "_standard_normal", half)


@pytest.mark.parametrize("order", list(itertools.permutations(range(3)))[1:3])
@pytest.mark.parametrize("architecture", ["local", "set"])
@pytest.mark.parametrize("kind", ["bounded", "categorical"])
def test_permuted_agents(order, architecture, kind, without_chance):
    from torchrl_marl.modules import CriticConfig

    torch.manual_seed(0)
    group = make_group(kind)
    config = CriticConfig([8], architecture="set") if architecture == "set" else SMALL
    actor = make_actor(group, SMALL)
    critic = make_action_critic(group, config, centralized=architecture == "set", n_critics=2)
    loss = MASACLoss(actor, critic, group=group, functional=False)
    td = steps(group, 16)
    other = td.clone()
    for key in td.keys(True, True):
        if isinstance(key, tuple) and "car" in key:
            other[key] = td[key][:, list(order)]
    one, permuted = loss(td), loss(other)
    for key, value in one.items():
        torch.testing.assert_close(value, permuted[key])


def side_by_side(groups, td):
    """The groups of a batch as one, and the batch with it."""
    joined = join(groups)
    now = joined.gather(td, leaves=("action",), flags=False)
    then = joined.gather(td["next"], leaves=("reward",), flags=True)
    root = td["next"].select("done", "terminated")
    now["next"] = then.update(root)
    return joined, now


@pytest.mark.parametrize("bootstrap", ["team", "agent"])
@pytest.mark.parametrize("kind", ["bounded", "categorical"])
def test_joined_groups_have_the_losses_and_gradients_of_each_alone(bootstrap, kind, without_chance):
    """Two groups of other sizes side by side; critics see their own group's agents."""
    torch.manual_seed(0)
    one, other = make_group(kind, 2, name="cat", o=4), make_group(kind, 3, name="mouse", o=3)
    td = steps(one, 16, seed=1)
    td_other = steps(other, 16, seed=1)
    td["mouse"], td["next", "mouse"] = td_other["mouse"], td_other["next", "mouse"]
    joined, together = side_by_side((one, other), td)
    settings = {"bootstrap": bootstrap, "functional": False}
    actor, critic = networks(joined)
    both = MASACLoss(actor, critic, group=joined, **settings)
    both.log_alpha.data.copy_(torch.tensor([-1.0, 0.5]))
    terms = both(together)
    assert terms["loss_value"].shape == (2,)
    for i, group in enumerate((one, other)):
        alone = MASACLoss(*networks(group), group=group, **settings)
        alone.log_alpha.data.copy_(both.log_alpha.data[i])
        load_rows(alone.actor_network, actor, i)
        load_rows(alone.qvalue_network, critic, i)
        load_rows(alone.target_qvalue_network, critic, i)
        load_rows(both.target_qvalue_network, critic, slice(None))
        found = alone(td.clone())
        for key, value in found.items():
            torch.testing.assert_close(terms[key][i], value, rtol=1e-5, atol=1e-6)
        mine = torch.autograd.grad(found["loss_actor"], list(alone.actor_network.parameters()))
        own = list(actor.parameters())
        theirs = torch.autograd.grad(terms["loss_actor"].sum(), own, retain_graph=True)
        for a, b in zip(mine, theirs, strict=True):
            row = b[i][tuple(slice(0, n) for n in a.shape)]
            torch.testing.assert_close(a, row, rtol=1e-4, atol=1e-6)


def load_rows(network, joined, i):
    """The parameters of the i-th group's network, of those that are stacked and padded."""
    for mine, theirs in zip(network.parameters(), joined.parameters(), strict=True):
        rows = theirs.data[i]
        mine.data.copy_(rows[tuple(slice(0, n) for n in mine.shape)])


@pytest.mark.parametrize("kind", ["bounded", "categorical"])
@pytest.mark.parametrize("whose", ["group", "agent"])
def test_gradients_do_not_cross_groups(kind, whose):
    """Critics that see both groups: what one does raises its own values only."""
    torch.manual_seed(0)
    groups = make_group(kind, n=2, name="cat", o=4), make_group(kind, n=1, name="mouse", o=3)
    td = steps(groups[0], 8, alive=1.1)
    other = steps(groups[1], 8, alive=1.1)
    td["mouse"], td["next", "mouse"] = other["mouse"], other["next", "mouse"]
    joined, together = side_by_side(groups, td)
    actor, critic = networks(joined, team=join(groups, same_actions=False))
    loss = MASACLoss(actor, critic, group=joined, actor_gradient=whose, functional=False)
    terms = loss(together)
    first, *_ = actor.parameters()  # [G, ...]: rows of each group
    assert sorted(rows_moved(term, first) for term in terms["loss_actor"]) == [[0], [1]]
    assert [rows_moved(term, loss.log_alpha) for term in terms["loss_alpha"]] == [[0], [1]]
    if kind == "bounded":
        crossing = MASACLoss(actor, critic, group=joined, actor_gradient="all", functional=False)
        assert rows_moved(crossing(together)["loss_actor"][0], first) == [0, 1]


def rows_moved(term, parameter):
    (found,) = torch.autograd.grad(term, [parameter], retain_graph=True)
    return [i for i, row in enumerate(found) if bool((row != 0).any())]


def test_choices_of_local_critics_take_a_copy_for_each_action():
    torch.manual_seed(0)
    group = make_group("categorical", action_mask=True)
    actor, critic = networks(group, centralized=False)
    td = steps(group, 16)
    found = []
    for whose in ("all", "agent"):
        loss = MASACLoss(actor, critic, group=group, actor_gradient=whose, functional=False)
        found.append(gradients(loss, td.clone()))
    for one, other in zip(found[0][1], found[1][1], strict=True):
        torch.testing.assert_close(one, other)
    for key, value in found[0][0].items():
        torch.testing.assert_close(value, found[1][0][key])


def test_a_large_temperature_and_illegal_actions_leave_gradients_finite():
    torch.manual_seed(0)
    group = make_group("categorical", action_mask=True)
    loss = MASACLoss(*networks(group), group=group, alpha_init=1e6, functional=False)
    terms, found = gradients(loss, steps(group, 16))
    assert all(bool(x.isfinite().all()) for x in (*found, *terms.values()))


def test_wrong_words():
    group = make_group()
    for wrong in ({"bootstrap": "all"}, {"actor_gradient": "own"}, {"alpha_init": 0.0}):
        with pytest.raises(ValueError, match="expected"):
            MASACLoss(*networks(group), group=group, **wrong)
    with pytest.raises(ValueError, match="expected"):
        own_actions.MovedActions(group, "own")
