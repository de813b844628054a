"""Module stacks: members, sharing, views, and TensorDicts."""

import copy

import pytest
import torch
from tensordict import TensorDict, lazy_stack
from tensordict.nn import TensorDictModule, TensorDictSequential
from test_stack import BATCH, IN, OUT, assert_equals_loop, gradients, numel, perceptron, rows
from torch import nn

from torchrl_marl.modules import ModuleStack, cat, expand, stack

HIDDEN = [(4, 3, 8), (6, 2, 5), (5, 3, 16), (6, 1, 8)]


class Tied(nn.Module):
    """Encodes and decodes with one weight."""

    def __init__(self):
        super().__init__()
        self.encode, self.decode = nn.Linear(IN, 4, bias=False), nn.Linear(4, IN, bias=False)
        self.decode.weight = self.encode.weight
        self.again = self.encode

    def forward(self, x):
        return self.again(nn.functional.linear(self.encode(x), self.decode.weight.T))


def test_members_by_identity():
    a, b = perceptron(), perceptron()
    for stacked, index in (
        (stack([a, a]), (0, 0)),
        (stack([b, a, b]), (0, 1, 0)),
        (cat([expand(a, 2), expand(a, 1)]), (0, 0, 0)),
        (cat([expand(a, 2), expand(b, 2), a]), (0, 0, 1, 1, 0)),
        (cat([stack([a, b]), stack([b, a])]), (0, 1, 1, 0)),
        (cat([stack([copy.deepcopy(a), b])] * 2), (0, 1, 0, 1)),
        (cat([stack([a, b]), copy.deepcopy(stack([a, b]))]), (0, 1, 2, 3)),
        (torch.cat([expand(a, 2), expand(b, 1)]), (0, 0, 1)),
        (torch.stack([stack([a, b])[1], stack([a, b])[0]]), (0, 1)),
        (torch.cat((stack([a, b])[1:], stack([a, b]))), (0, 1, 0)),
    ):
        assert stacked.index == index and isinstance(stacked, ModuleStack)
        assert numel(stacked) == numel(a) * len(set(index))
    agents = [a, a, b, b, a]
    stacked = cat([expand(a, 2), expand(b, 2), a])
    assert_equals_loop(stacked, agents, torch.randn(BATCH, 5, IN))


def test_unsupported_torch_functions_raise():
    stacked = expand(perceptron(), 2)
    with pytest.raises(TypeError, match=r"torch\.cat takes stacks"):
        torch.stack([stacked, stacked])
    with pytest.raises(TypeError):
        torch.add(stacked, stacked)
    with pytest.raises(TypeError):
        torch.cat([stacked, stacked], 1)


def test_cat_of_separately_trained_copies_raises():
    a = perceptron()
    one, other = expand(a, 2), expand(a, 1)
    with torch.no_grad():
        next(other.parameters()).add_(1.0)
    with pytest.raises(ValueError, match="Sequential have been trained apart"):
        cat([one, other])
    assert cat([one, copy.deepcopy(other)]).index == (0, 0, 1)


def test_cat_of_different_kinds():
    policy = cat([expand(perceptron(4), 2), stack([perceptron(6), perceptron(4)]), perceptron(6)])
    assert policy.index == (0, 0, 1, 2, 3)
    inputs = [torch.randn(BATCH, w) for w in (4, 4, 6, 4, 6)]
    members = policy.copies()
    assert_equals_loop(policy, [members[i] for i in policy.index], inputs)
    images = stack([nn.Conv2d(1, 1, 3)], event_dims=3)
    assert cat([images]).event_dims == 3
    with pytest.raises(ValueError, match=r"event_dims \[1, 3\]"):
        cat([images, stack([perceptron()])])


def test_tied_weights_stay_tied():
    modules = [Tied() for _ in range(2)]
    stacked = stack(modules)
    assert numel(stacked) == 2 * IN * 4
    assert_equals_loop(stacked, modules, torch.randn(BATCH, 2, IN))
    for module in (stacked[1].detach(), stacked.unshare()[1].detach()):
        assert module.encode.weight is module.decode.weight is module.again.weight
    untied = Tied()
    untied.decode.weight = nn.Parameter(untied.decode.weight.detach().clone())
    assert len(stack([modules[0], untied]).buckets) == 2


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("heads", [[OUT, OUT, OUT], [OUT, 2, OUT]])
def test_shared_trunk_is_stored_once(norm, heads):
    trunk = nn.Sequential(nn.Linear(IN, 8), *([nn.LayerNorm(8)] if norm else []), nn.Tanh())
    modules = [nn.Sequential(trunk, nn.Linear(8, out)) for out in heads]
    agents = [modules[i] for i in (0, 1, 1, 2)]
    stacked = stack(agents)
    own = sum(numel(module[1]) for module in modules)
    assert numel(stacked) == numel(trunk) + own
    x = torch.randn(BATCH, 4, IN)
    assert_equals_loop(stacked, agents, x)
    for twin in (copy.deepcopy(stacked), stacked[:].detach(), cat([stacked]).double().float()):
        assert numel(twin) == numel(stacked)
        torch.testing.assert_close(list(rows(twin(x))), list(rows(stacked(x))))
    alone = stacked.unshare()
    assert numel(alone) == 4 * numel(trunk) + own + numel(modules[1][1])
    torch.testing.assert_close(list(rows(alone(x))), list(rows(stacked(x))))


def test_trunks_of_clusters_stay_separate():
    trunks = [nn.Linear(IN, 8) for _ in range(2)]
    modules = [nn.Sequential(trunks[i], nn.Tanh(), nn.Linear(8, OUT)) for i in (0, 1, 0, 1)]
    stacked = stack(modules)
    assert numel(stacked) == 2 * numel(trunks[0]) + 4 * numel(modules[0][2])
    assert_equals_loop(stacked, modules, torch.randn(BATCH, 4, IN))


def test_frozen_members_stay_frozen():
    modules = [perceptron() for _ in range(3)]
    modules[1].requires_grad_(False)
    stacked = stack(modules)
    assert sorted(p.requires_grad for p in stacked.parameters()) == [False] * 4 + [True] * 4
    stacked(torch.randn(BATCH, 3, IN)).sum().backward()
    assert all((p.grad is not None) == p.requires_grad for p in stacked.parameters())
    assert [p.requires_grad for m in stacked for p in m.detach().parameters()] == [
        wanted for wanted in (True, False, True) for _ in range(4)
    ]


def test_partly_frozen_members():
    modules = [perceptron() for _ in range(3)]
    for module in modules:
        module[2].weight.requires_grad_(False)
        module[0].bias.requires_grad_(False)
    assert_equals_loop(stack(modules), modules, torch.randn(BATCH, 3, IN))


def test_gradients_reach_parameters_of_used_agents_only():
    a, b, c = (perceptron() for _ in range(3))
    policy = cat([expand(a, 2), b, c])
    policy(torch.randn(BATCH, 4, IN))[:, 1:3].sum().backward()
    reached = [all((p != 0).any() for p in m.parameters()) for m in gradients(policy)]
    assert reached == [True, True, True, False]


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), 1e9])
@pytest.mark.parametrize(
    "make", [perceptron, lambda: nn.Sequential(nn.LayerNorm(IN), perceptron())]
)
def test_agents_are_independent(poison, make):
    stacked, x = stack([make() for _ in range(3)]), torch.randn(BATCH, 3, IN)
    clean = stacked(x)
    clean[:, [0, 2]].square().sum().backward()
    before = gradients(stacked)
    stacked.zero_grad()
    x[:, 1] = poison
    y = stacked(x)
    assert torch.equal(y[:, [0, 2]], clean[:, [0, 2]])
    y[:, [0, 2]].square().sum().backward()
    for agent in (0, 2):
        for old, new in zip(before[agent].parameters(), gradients(stacked)[agent].parameters()):
            assert torch.equal(old, new)


@pytest.mark.parametrize("pad", [False, True])
def test_indexed_member_is_a_view(pad):
    modules = [perceptron(*w) for w in HIDDEN] if pad else [perceptron() for _ in range(4)]
    stacked = stack([modules[i] for i in (0, 1, 2, 3, 1)], pad=pad)
    for agent, i in enumerate((0, 1, 2, 3, 1)):
        stacked.zero_grad()
        modules[i].zero_grad()
        x = torch.randn(BATCH, modules[i][0].in_features)
        torch.testing.assert_close(stacked[agent](x), modules[i](x))
        stacked[agent - 5](x).sum().backward()
        modules[i](x).sum().backward()
        for p, g in zip(modules[i].parameters(), gradients(stacked)[agent].parameters()):
            torch.testing.assert_close(g.detach(), p.grad)
    assert list(stacked[0].parameters()) == [] and len(list(stacked)) == 5
    with torch.no_grad():
        for p in stacked.parameters():
            p.mul_(0.5)
    alone = stacked[1].detach()
    assert type(alone) is nn.Sequential and alone[0].in_features == modules[1][0].in_features
    x = torch.randn(BATCH, modules[1][0].in_features)
    torch.testing.assert_close(alone(x), stacked[1](x))
    with torch.no_grad():
        alone[0].weight.zero_()
    assert not torch.equal(alone(x), stacked[4](x))
    assert stacked[1].row()["0.weight"].data_ptr() != alone[0].weight.data_ptr()


@pytest.mark.parametrize(
    "agents", [slice(1, 3), slice(None, None, 2), [0, 2], [3, 1, 1], [-1], [4, 0, 1]]
)
@pytest.mark.parametrize("pad", [False, True])
def test_selection_of_agents_is_a_view(pad, agents):
    widths = HIDDEN if pad else [(IN, OUT, 8)] * 4
    modules = [perceptron(*w) for w in widths]
    stacked = stack([modules[i] for i in (0, 1, 2, 3, 1)], pad=pad)
    some = range(5)[agents] if isinstance(agents, slice) else agents
    chosen = [(0, 1, 2, 3, 1)[agent] for agent in some]
    window = stacked[agents]
    inputs = [torch.randn(BATCH, modules[i][0].in_features) for i in chosen]
    wanted = [modules[i](x) for i, x in zip(chosen, inputs)]
    for some in (window, window.detach(), window[:], cat([window])):
        torch.testing.assert_close(list(rows(some(inputs))), wanted)
        assert some.shape == (len(chosen),)
    assert cat([window]).pad == pad
    assert list(window.parameters()) == []
    sum(y.sum() for y in rows(window(inputs))).backward()
    sum(y.sum() for y in wanted).backward()
    for agent, i in enumerate((0, 1, 2, 3, 1)):
        for p, g in zip(modules[i].parameters(), gradients(stacked)[agent].parameters()):
            torch.testing.assert_close(
                g.detach(), torch.zeros_like(p) if p.grad is None else p.grad
            )
    with pytest.raises(IndexError, match="no agent"):
        stacked[5:]


@pytest.mark.parametrize("pad", [False, True])
def test_load_overwrites_member_parameters(pad):
    modules = [perceptron(*w) for w in HIDDEN] if pad else [perceptron() for _ in range(4)]
    stacked = stack([modules[i] for i in (0, 1, 2, 3, 1)], pad=pad)
    new = copy.deepcopy(modules[1])
    for p in new.parameters():
        nn.init.normal_(p)
    stacked.load(1, new)
    assert_equals_loop(
        stacked,
        [modules[0], new, modules[2], modules[3], new],
        [torch.randn(BATCH, m[0].in_features) for m in (modules[i] for i in (0, 1, 2, 3, 1))],
    )
    with pytest.raises(ValueError, match=r"'0\.weight' .* shape \(8, 9\), expected"):
        stacked.load(0, perceptron(9))
    with pytest.raises(ValueError, match="nowhere"):
        stacked.load(0, nn.Linear(IN, OUT))


@pytest.mark.parametrize("pad", [False, True])
def test_unsharing_keeps_the_outputs(pad):
    a, b = (perceptron(4), perceptron(6)) if pad else (perceptron(), perceptron())
    stacked = cat([expand(a, 3), expand(b, 2)], pad=pad)
    inputs = [torch.randn(BATCH, m[0].in_features) for m in (a, a, a, b, b)]
    alone = stacked.unshare()
    assert alone.index == (0, 1, 2, 3, 4) and alone.pad == pad and stacked.index == (0, 0, 0, 1, 1)
    torch.testing.assert_close(alone(inputs), stacked(inputs))
    for p in alone.parameters():
        nn.init.normal_(p)
    assert not torch.equal(alone(inputs)[:, 0], alone(inputs)[:, 1])


def group_of(widths, batch=5):
    members = [TensorDict({"observation": torch.randn(batch, w)}, [batch]) for w in widths]
    return lazy_stack(members, 1)


def test_stack_reads_group_tensordicts():
    """Dense or lazily stacked groups; keys of the members, or observation and action."""
    drone, rover = nn.Linear(4, 3), nn.Linear(2, 1)
    policy = cat([expand(drone, 2), expand(rover, 1)])
    group = policy(group_of([4, 4, 2]))
    for i, (member, module) in enumerate(zip(group.unbind(1), (drone, drone, rover))):
        torch.testing.assert_close(member["action"], module(member["observation"]), msg=str(i))
    dense = group_of([4, 4]).contiguous()
    for part in (policy[:2], policy[:2].detach()):
        assert part(dense.clone())["action"].shape == (5, 2, 3)
    keyed = expand(TensorDictModule(drone, ["observation"], ["seen"]), 2)
    assert keyed(dense)["seen"].shape == (5, 2, 3)
    assert torch.cat([keyed, keyed])(group_of([4] * 4))["seen"].shape == (5, 4, 3)


def test_stacking_modules_of_different_keys_raises():
    modules = [TensorDictModule(nn.Linear(4, 3), [key], ["action"]) for key in ("a", "b")]
    with pytest.raises(ValueError, match="RoutedSequential"):
        stack(modules)
    with pytest.raises(TypeError, match="cannot be stacked"):
        stack([TensorDictSequential(modules[0])])


def test_invalid_lists_of_agents_raise():
    policy = stack([nn.Linear(4, 2) for _ in range(3)])
    for wrong in ([True, False, True], torch.tensor([True, False, True]), "a"):
        with pytest.raises(TypeError, match="expected the numbers of agents"):
            policy[wrong]
    assert policy[torch.tensor([0, 2])].agents == (0, 2)
    for build in (stack, cat):
        with pytest.raises(TypeError, match="expected a list of modules"):
            build(nn.Sequential(nn.Linear(4, 2), nn.Linear(2, 2)))
