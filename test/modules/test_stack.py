"""Module stacks: equal to the loop over agents, one copy of each member, every executor."""

import copy
import pickle

import pytest
import torch
from cover import pairwise
from operations import CountOperations
from torch import nn
from torchrl.modules import MLP

from torchrl_marl.modules import ModuleStack, cat, expand, stack
from torchrl_marl.modules.stacks import matmul as batched

IN, OUT, BATCH = 6, 3, 5
SHARING = [[0], [0, 1, 2], [0, 0, 0], [0, 1, 0, 2, 1], [0, 0, 1, 1, 2, 2], [2, 0, 0, 1, 0]]


class Gated(nn.Module):
    """Two inputs and two outputs, which the matmul executor does not support."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(IN, OUT), nn.Linear(2, OUT)

    def forward(self, x, y):
        h = self.a(x) * self.b(y).sigmoid()
        return h, h.square().sum(-1)


def perceptron(width=IN, out=OUT, hidden=8, activation=nn.Tanh):
    return nn.Sequential(nn.Linear(width, hidden), activation(), nn.Linear(hidden, out))


MEMBERS = {
    "linear": lambda: nn.Linear(IN, OUT),
    "perceptron": perceptron,
    "no bias": lambda: nn.Sequential(nn.Linear(IN, 4, bias=False), nn.ReLU(), nn.Linear(4, OUT)),
    "nested": lambda: nn.Sequential(
        nn.Tanh(), nn.Sequential(nn.Linear(IN, 4), nn.Tanh(), nn.ELU()), nn.Linear(4, OUT)
    ),
    "torchrl": lambda: MLP(IN, OUT, num_cells=[4, 4]),
    "norm": lambda: nn.Sequential(nn.Linear(IN, 4), nn.LayerNorm(4), nn.Linear(4, OUT)),
    "batch norm": lambda: nn.Sequential(nn.Linear(IN, 4), nn.BatchNorm1d(4), nn.Linear(4, OUT)),
}


def rows(x, dim=1):
    return x if isinstance(x, list) else x.unbind(dim)


def gradients(stacked):
    """Modules whose parameters are the gradients of the agents' members."""
    twin = copy.deepcopy(stacked)
    with torch.no_grad():
        for new, old in zip(twin.parameters(), stacked.parameters()):
            new.copy_(torch.zeros_like(old) if old.grad is None else old.grad)
    return [twin[agent].detach() for agent in range(len(twin))]


def assert_equals_loop(stacked, modules, *inputs, dim=1, pick=lambda y: y):
    """Output and gradient of the stack and of the modules, one for each agent, agree."""
    for module in (stacked, *modules):
        module.zero_grad()
    found = rows(pick(stacked(*inputs)), dim)
    wanted = [
        pick(module(*own)) for module, own in zip(modules, zip(*(rows(x, dim) for x in inputs)))
    ]
    torch.testing.assert_close(list(found), wanted, rtol=1e-5, atol=1e-6)
    weights = [torch.randn_like(y) for y in wanted]
    sum((w * y).sum() for w, y in zip(weights, found)).backward()
    sum((w * y).sum() for w, y in zip(weights, wanted)).backward()
    for module, gradient in zip(modules, gradients(stacked)):
        for (name, p), (other, g) in zip(module.named_parameters(), gradient.named_parameters()):
            grad = torch.zeros_like(p) if p.grad is None else p.grad
            assert name == other
            torch.testing.assert_close(g.detach(), grad, rtol=1e-5, atol=2e-6)


def numel(module):
    return sum(p.numel() for p in module.parameters())


@pytest.mark.parametrize("index", SHARING, ids=str)
@pytest.mark.parametrize("kind", MEMBERS)
def test_equals_the_loop(kind, index):
    modules = [MEMBERS[kind]() for _ in range(3)]
    stacked = stack([modules[i] for i in index])
    assert stacked.shape == torch.Size([len(index)]) and len(stacked) == len(index)
    assert numel(stacked) == numel(modules[0]) * len(set(index))
    agents = [modules[i] for i in index]
    assert_equals_loop(stacked, agents, torch.randn(BATCH, len(index), IN))


@pytest.mark.parametrize(
    "activation",
    [
        nn.Tanh,
        nn.ReLU,
        nn.Sigmoid,
        nn.ELU,
        nn.LeakyReLU,
        nn.SiLU,
        nn.GELU,
        nn.Mish,
        nn.Softplus,
        nn.Hardtanh,
        nn.Softsign,
    ],
)
@pytest.mark.parametrize("pad", [False, True])
def test_every_activation(activation, pad):
    widths = [(IN, OUT, 8), (4, 2, 5), (IN, 1, 8)] if pad else [(IN, OUT, 8)] * 3
    modules = [perceptron(*w, activation).append(activation()) for w in widths]
    inputs = [torch.randn(BATCH, w, requires_grad=True) for w, _, _ in widths]
    stacked = stack(modules, pad=pad)
    assert len(stacked.buckets) == 1
    assert_equals_loop(stacked, modules, inputs)
    weights = torch.randn(BATCH, OUT)

    def of_inputs(outputs):
        total = sum((y * weights[:, : y.shape[-1]]).sum() for y in outputs)
        return torch.autograd.grad(total, inputs)

    found = of_inputs(rows(stacked(inputs)))
    torch.testing.assert_close(found, of_inputs([m(x) for m, x in zip(modules, inputs)]))


@pairwise(batch=[(), (0,), (2, 3), (2, 1, 3)], index=SHARING, kind=["perceptron", "norm"])
def test_any_batch_dims(kind, index, batch):
    modules = [MEMBERS[kind]() for _ in range(3)]
    x = torch.randn(*batch, len(index), IN)
    agents = [modules[i] for i in index]
    assert_equals_loop(stack(agents), agents, x, dim=-2)
    assert_equals_loop(stack(agents), agents, list(x.unbind(-2)), dim=-2)


@pytest.mark.parametrize("pad", [False, True])
def test_members_larger_than_the_cache_run_in_chunks(pad, monkeypatch):
    widths = [(IN, OUT, 8), (4, 2, 5), (IN, 1, 8), (3, 3, 3), (IN, OUT, 8)]
    modules = [perceptron(*w) if pad else perceptron() for w in widths]
    modules = [
        nn.Sequential(module, nn.Linear(module[2].out_features, 2, False)) for module in modules
    ]
    inputs = [torch.randn(BATCH, module[0][0].in_features) for module in modules]
    calls = []
    monkeypatch.setattr(batched, "CACHE", 2 * BATCH * 8 * 4)
    apply = batched._StackedLayers.apply
    monkeypatch.setattr(
        batched._StackedLayers, "apply", lambda *a: calls.append(a[2].shape[0]) or apply(*a)
    )
    assert_equals_loop(stack(modules, pad=pad), modules, inputs)
    assert calls == [2, 2, 1]


def test_gradient_of_the_input():
    modules = [perceptron() for _ in range(3)]
    for index in SHARING:
        agents = [modules[i] for i in index]
        x = torch.randn(BATCH, len(index), IN, requires_grad=True)
        (stack(agents)(x) ** 2).sum().backward()
        found, x.grad = x.grad, None
        torch.stack([m(row) ** 2 for m, row in zip(agents, x.unbind(1))]).sum().backward()
        torch.testing.assert_close(found, x.grad)


@pytest.mark.parametrize("kind", ["perceptron", "norm"])
def test_gradient_of_the_gradient(kind):
    modules = [MEMBERS[kind]() for _ in range(2)]
    x = torch.randn(BATCH, 2, IN, requires_grad=True)
    stacked = stack(modules)

    def penalty(y):
        return torch.autograd.grad(y.square().sum(), x, create_graph=True)[0].square().sum()

    penalty(stacked(x)).backward()
    penalty(torch.stack([m(row) for m, row in zip(modules, x.unbind(1))], 1)).backward()
    for module, gradient in zip(modules, gradients(stacked)):
        for p, g in zip(module.parameters(), gradient.parameters()):
            zero = torch.zeros_like(g) if p.grad is None else p.grad
            torch.testing.assert_close(g.detach(), zero, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("index", SHARING, ids=str)
def test_several_inputs_and_outputs(index):
    modules = [Gated() for _ in range(3)]
    agents = [modules[i] for i in index]
    stacked = stack(agents)
    x, y = torch.randn(BATCH, len(index), IN), torch.randn(BATCH, len(index), 2)
    assert_equals_loop(stacked, agents, x, y, pick=lambda out: out[0])
    for found, wanted in zip(
        stacked(x, y)[1].unbind(1),
        (m(a, b)[1] for m, a, b in zip(agents, x.unbind(1), y.unbind(1))),
    ):
        torch.testing.assert_close(found, wanted)


def test_torchrl_perceptron_of_two_inputs():
    modules = [MLP(IN + 2, OUT, num_cells=[4]) for _ in range(3)]
    x, y = torch.randn(BATCH, 3, IN), torch.randn(BATCH, 3, 2)
    assert stack(modules).buckets[0].executor == "matmul"
    assert_equals_loop(stack(modules), modules, x, y)


def test_members_of_different_structures():
    modules = [perceptron(), MEMBERS["norm"](), perceptron(activation=nn.ReLU), perceptron()]
    agents = [modules[i] for i in (0, 1, 2, 1, 3, 0)]
    stacked = stack(agents)
    assert [bucket.n_members for bucket in stacked.buckets] == [2, 1, 1]
    assert_equals_loop(stacked, agents, torch.randn(BATCH, 6, IN))


def test_ragged_inputs_and_outputs():
    modules = [perceptron(4, 2), perceptron(6, 3), perceptron(5, 3)]
    agents = [modules[i] for i in (1, 0, 2, 0)]
    inputs = [torch.randn(BATCH, m[0].in_features) for m in agents]
    assert isinstance(stack(agents)(inputs), list)
    assert_equals_loop(stack(agents), agents, inputs)
    even = stack([modules[1], modules[2]])([inputs[0], inputs[2]])
    assert even.shape == (BATCH, 2, 3)
    dense = stack([perceptron(6, 2), perceptron(6, 3)])(torch.randn(BATCH, 2, 6))
    assert [y.shape for y in dense] == [(BATCH, 2), (BATCH, 3)]


def test_different_module_settings_make_separate_buckets():
    pairs = [
        (nn.LeakyReLU(0.1), nn.LeakyReLU(0.2)),
        (nn.GELU(), nn.GELU("tanh")),
        (nn.LayerNorm(IN), nn.LayerNorm(IN, eps=1.0)),
        (nn.Dropout(0.1), nn.Dropout(0.2)),
    ]
    for a, b in pairs:
        modules = [nn.Sequential(nn.Linear(IN, IN), part).eval() for part in (a, b)]
        assert len(stack(modules).buckets) == 2
        assert_equals_loop(stack(modules), modules, torch.randn(BATCH, 2, IN))
    assert len(stack([nn.Linear(2, 2), nn.Linear(2, 2).double()]).buckets) == 2


def test_reused_submodules():
    def make(width):
        tanh, linear = nn.Tanh(), nn.Linear(width, width)
        return nn.Sequential(
            nn.Linear(IN, width), tanh, linear, tanh, linear, nn.Linear(width, OUT)
        )

    for pad, widths in ((False, (4, 4)), (True, (4, 4)), (True, (4, 6))):
        modules = [make(width) for width in widths]
        assert len(stack(modules, pad=pad).buckets) == 1
        assert_equals_loop(stack(modules, pad=pad), modules, torch.randn(BATCH, 2, IN))


def test_members_in_eval_mode():
    modules = [nn.Sequential(nn.Linear(IN, OUT), nn.Dropout(0.5)) for _ in range(3)]
    x = torch.randn(BATCH, 2, IN)
    assert not stack([m.eval() for m in modules[:2]]).training
    assert_equals_loop(stack(modules[:2]), modules[:2], x)
    mixed = stack(modules[1:])
    assert mixed.training and torch.equal(mixed(x)[:, 0], mixed(x)[:, 0])
    assert not torch.equal(mixed(x)[:, 1], mixed(x)[:, 1])


@pytest.mark.parametrize("make", [perceptron, MEMBERS["norm"]])
@pytest.mark.parametrize("copies", [1, 3])
@pytest.mark.parametrize("interleaved", [False, True])
def test_number_of_operations_is_independent_of_agents(make, copies, interleaved):
    def count(n):
        modules = [make() for _ in range(n)]
        agents = modules * copies if interleaved else [m for m in modules for _ in range(copies)]
        stacked, x = stack(agents), torch.randn(BATCH, n * copies, IN)
        with CountOperations() as operations:
            stacked(x).sum().backward()
        return operations.count

    assert count(2) == count(4) == count(9) < 130


def test_stack_copies_its_members():
    module = perceptron()
    stacked, x = stack([module]), torch.randn(BATCH, 1, IN)
    before = stacked(x)
    with torch.no_grad():
        module[0].weight.zero_()
    assert torch.equal(stacked(x), before)


def test_reset_parameters():
    stacked = cat([expand(perceptron(), 2), MEMBERS["norm"](), expand(perceptron(), 2)])
    before = {name: p.clone() for name, p in stacked.named_parameters()}
    stacked.reset_parameters()
    for name, p in stacked.named_parameters():
        norm = name.endswith(("module.1.weight", "module.1.bias")) and p.shape[-1] == 4
        assert torch.equal(p, before[name]) == norm
        assert not p.flatten(1).unique(dim=0).shape[0] < p.shape[0]


@pytest.mark.parametrize("kind", ["perceptron", "norm"])
def test_copy_pickle_and_state_dict(kind, tmp_path):
    modules = [MEMBERS[kind]() for _ in range(3)]
    stacked, x = stack([modules[i] for i in (0, 1, 0, 2)]), torch.randn(BATCH, 4, IN)
    wanted = stacked(x)
    other = stack([MEMBERS[kind]() for _ in range(2)] * 2)
    torch.save(stacked, tmp_path / "stack.pt")
    for twin in (
        copy.deepcopy(stacked),
        pickle.loads(pickle.dumps(stacked)),
        torch.load(tmp_path / "stack.pt", weights_only=False),
    ):
        assert torch.equal(twin(x), wanted) and twin.index == stacked.index
        with torch.no_grad():
            for p in twin.parameters():
                p.zero_()
        assert not torch.equal(twin(x), wanted) and torch.equal(stacked(x), wanted)
        twin.load_state_dict(stacked.state_dict())
        assert torch.equal(twin(x), wanted)
    with pytest.raises(RuntimeError, match="size mismatch"):
        other.load_state_dict(stacked.state_dict())
    double = copy.deepcopy(stacked).double()
    assert double(x.double()).dtype == torch.float64
    torch.testing.assert_close(double(x.double()).float(), wanted)


def test_invalid_input_raises():
    stacked = stack([perceptron(), perceptron()])
    with pytest.raises(ValueError, match=r"2 agents, found an input of shape \[5, 3, 6\]"):
        stacked(torch.randn(BATCH, 3, IN))
    with pytest.raises(ValueError, match="2 agents, found an input of a list of 1"):
        stacked([torch.randn(BATCH, IN)])
    with pytest.raises(ValueError, match="2 agents"):
        stacked(torch.randn(IN))
    with pytest.raises(ValueError, match="agent 0 takes 6 features, found an input with 5"):
        stacked(torch.randn(BATCH, 2, 5))
    with pytest.raises(ValueError, match="agent 1 takes 6 features, found an input with 5"):
        stacked([torch.randn(BATCH, 6), torch.randn(BATCH, 5)])
    with pytest.raises(ValueError, match="agent 1 takes 4 features, found an input with 6"):
        stack([perceptron(), perceptron(4)])(torch.randn(BATCH, 2, 6))
    for empty in (lambda: stack([]), lambda: cat([])):
        with pytest.raises(ValueError, match="at least one module, found none"):
            empty()
    with pytest.raises(ValueError, match="expand to 0 agents"):
        expand(perceptron(), 0)
    with pytest.raises(TypeError, match=r"cat\(\[stack\] \* 2\)"):
        expand(stacked, 2)
    with pytest.raises(TypeError, match="found Tensor"):
        cat([torch.zeros(1)])
    with pytest.raises(TypeError, match="lazy"):
        stack([nn.LazyLinear(3)])
    with pytest.raises(ValueError, match="executor 'fast'"):
        stack([perceptron()], executor="fast")
    with pytest.raises(IndexError, match="agent 2 of a stack of 2"):
        stacked[2]
    with pytest.raises(ValueError, match="needs an input"):
        stacked()


def test_unregistered_tensors_raise():
    module = perceptron()
    module.scale = torch.ones(3)
    with pytest.raises(TypeError, match="keeps a tensor in 'scale'"):
        stack([module])


def test_members_without_parameters():
    stacked = stack([nn.Tanh(), nn.Tanh(), nn.ReLU()])
    x = torch.randn(BATCH, 3, IN)
    assert torch.equal(stacked(x)[:, 2], x[:, 2].relu())
    assert torch.equal(stacked(x)[:, 1], x[:, 1].tanh())
    assert isinstance(stacked, ModuleStack) and not list(stacked.parameters())
