"""Module stacks in compilers, function transforms, TensorDicts and losses."""

import copy

import pytest
import torch
from tensordict import TensorDict, lazy_stack
from tensordict.nn import (
    NormalParamExtractor,
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    TensorDictSequential,
)
from test_stack import BATCH, IN, MEMBERS, OUT, perceptron, rows
from torch import nn
from torch.func import functional_call, grad, vmap
from torchrl.modules import MLP, ProbabilisticActor, TanhNormal, ValueOperator
from torchrl.objectives import DDPGLoss, SACLoss, SoftUpdate
from torchrl.objectives.multiagent import MAPPOLoss

from torchrl_marl.modules import StackModule, cat, expand, stack

pytestmark = pytest.mark.compiled

OBSERVATION, ACTION = ("agents", "observation"), ("agents", "action")


def make(kind, **keywords):
    a, b, c = (MEMBERS[kind]() for _ in range(3))
    return cat([expand(a, 2), b, c, c], **keywords)


STACKS = {
    "matmul": lambda: make("perceptron"),
    "vmap": lambda: make("norm"),
    "loop": lambda: make("norm", executor="loop"),
    "both": lambda: cat([make("perceptron")[:2], make("norm")[1:4]]),
    "padded": lambda: cat([expand(perceptron(4, 2), 2), perceptron(IN, OUT, 4), perceptron(),
                           perceptron(4)], pad=True),
}  # fmt: skip


@pytest.mark.parametrize("kind", STACKS)
def test_compiles_to_one_graph(kind):
    stacked, x = STACKS[kind](), torch.randn(BATCH, 5, IN)
    wanted = stacked(x)
    wanted.square().sum().backward()
    expected = [p.grad.clone() for p in stacked.parameters()]
    stacked.zero_grad()
    found = torch.compile(stacked, fullgraph=True, backend="aot_eager")(x)
    found.square().sum().backward()
    torch.testing.assert_close(found, wanted)
    for p, e in zip(stacked.parameters(), expected):
        torch.testing.assert_close(p.grad, e)


@pytest.mark.parametrize("kind", STACKS)
def test_function_transforms(kind):
    stacked, x = STACKS[kind](), torch.randn(BATCH, 5, IN)
    parameters = {n: p.detach() for n, p in stacked.named_parameters()}
    doubled = {n: 2 * p for n, p in parameters.items()}

    def run(p):
        return functional_call(stacked, p, (x,))

    wanted = [stacked(x)]
    twin = copy.deepcopy(stacked)
    twin.load_state_dict({**stacked.state_dict(), **doubled})
    wanted.append(twin(x))
    torch.testing.assert_close(run(doubled), wanted[1])
    both = {n: torch.stack([p, doubled[n]]) for n, p in parameters.items()}
    torch.testing.assert_close(vmap(run, randomness="different")(both), torch.stack(wanted))
    found = grad(lambda p: run(p).square().sum())(parameters)
    stacked(x).square().sum().backward()
    for name, p in stacked.named_parameters():
        torch.testing.assert_close(found[name], p.grad)


@pytest.mark.parametrize("kind", STACKS)
def test_forward_mode_and_autocast(kind):
    stacked, x = STACKS[kind](), torch.randn(BATCH, 5, IN)
    t = torch.randn_like(x)
    _, found = torch.func.jvp(stacked, (x,), (t,))
    epsilon = 1e-3
    numeric = (stacked(x + epsilon * t) - stacked(x - epsilon * t)) / (2 * epsilon)
    torch.testing.assert_close(found, numeric, rtol=1e-2, atol=1e-2)
    with torch.autograd.forward_ad.dual_level():
        dual = stacked(torch.autograd.forward_ad.make_dual(x, t))
        torch.testing.assert_close(torch.autograd.forward_ad.unpack_dual(dual).tangent, found)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = stacked(x)
    y.float().sum().backward()
    torch.testing.assert_close(y.float(), stacked(x), rtol=0.1, atol=0.1)


@pytest.mark.parametrize("kind", STACKS)
def test_swapped_parameters(kind):
    stacked, x = STACKS[kind](), torch.randn(BATCH, 5, IN)
    before = stacked(x)
    twin = copy.deepcopy(stacked)
    for p in twin.parameters():
        nn.init.normal_(p)
    with TensorDict.from_module(twin).data.to_module(stacked):
        torch.testing.assert_close(stacked(x), twin(x))
        torch.testing.assert_close(stacked[2:](x[:, 2:]), twin[2:](x[:, 2:]))
        width = stacked[1].row()["0.weight"].shape[1]
        torch.testing.assert_close(stacked[1](x[:, 1, :width]), twin[1](x[:, 1, :width]))
    assert torch.equal(stacked(x), before)
    parameters = TensorDict.from_module(stacked)
    assert parameters.flatten_keys(".").keys() == stacked.state_dict().keys()


def make_data(*, dense=True):
    torch.manual_seed(1)
    root = TensorDict({"done": torch.zeros(BATCH, 1, dtype=torch.bool)}, [BATCH])
    if dense:
        root["agents"] = TensorDict({"observation": torch.randn(BATCH, 5, IN)}, [BATCH, 5])
    else:
        widths = (4, 4, 6, 5, 6)
        root["agents"] = lazy_stack(
            [TensorDict({"observation": torch.randn(BATCH, w)}, [BATCH]) for w in widths], -1
        )
    return root


def ragged(out=(OUT,) * 4, **keywords):
    a, b, c, d = (perceptron(w, o) for w, o in zip((4, 6, 5, 6), out))
    return cat([expand(a, 2), b, c, d], **keywords)


@pytest.mark.parametrize("pad", [False, True])
def test_module_reads_and_writes_dense_and_lazy_groups(pad):
    dense = make_data()
    StackModule(make("perceptron", pad=pad), [OBSERVATION], [ACTION])(dense)
    assert dense[ACTION].shape == (BATCH, 5, OUT)
    lazy, policy = make_data(dense=False), ragged(pad=pad)
    inputs = lazy.get(OBSERVATION, as_list=True)
    StackModule(policy, [OBSERVATION], [ACTION])(lazy)
    torch.testing.assert_close(lazy.get(ACTION), policy(inputs))
    lazy, policy = make_data(dense=False), ragged((1, 2, 3, 2), pad=pad)
    StackModule(policy, [OBSERVATION], [ACTION])(lazy)
    for found, wanted in zip(lazy.get(ACTION, as_list=True), policy(inputs)):
        torch.testing.assert_close(found, wanted)
    assert [y.shape[-1] for y in lazy.get(ACTION, as_list=True)] == [1, 1, 2, 3, 2]
    with pytest.raises(ValueError, match="not lazily stacked: pad=True"):
        StackModule(stack([perceptron(out=o) for o in (1, 2, 3, 1, 1)]), [OBSERVATION], [ACTION])(
            make_data()
        )


def test_module_at_the_root_and_in_other_lazy_stacks():
    policy, lazy = ragged((1, 2, 3, 2)), make_data(dense=False)
    module = StackModule(policy, [OBSERVATION], [ACTION])
    wanted = module(lazy.clone())
    group = lazy["agents"].clone()
    StackModule(policy, ["observation"], ["action"])(group)
    steps = lazy_stack([lazy[:2].clone(), lazy[2:4].clone()], 0)
    module(steps)
    flat = lazy.unsqueeze(0).reshape(-1)
    module(flat)
    for agent in range(5):
        row = wanted["agents"][:, agent]["action"]
        torch.testing.assert_close(group[:, agent]["action"], row)
        for t in range(2):
            torch.testing.assert_close(
                steps[t]["agents"][:, agent]["action"], row[2 * t : 2 * t + 2]
            )
        torch.testing.assert_close(flat[3]["agents"][agent]["action"], row[3])


def test_module_with_invalid_data_raises():
    module = StackModule(make("perceptron"), [OBSERVATION], [ACTION])
    with pytest.raises(KeyError, match="agents.*observation.*found"):
        module(TensorDict({"agents": TensorDict({"other": torch.zeros(2, 5)}, [2, 5])}, [2]))
    with pytest.raises(KeyError, match="no .*agents"):
        module(TensorDict({}, [2]))
    with pytest.raises(ValueError, match="1 outputs, expected 2"):
        StackModule(make("perceptron"), [OBSERVATION], ["a", "b"])(make_data())


class Head(nn.Module):
    """Location and scale."""

    def __init__(self, width):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(width, 8), nn.Tanh(), nn.Linear(8, 4))
        self.split = NormalParamExtractor()

    def forward(self, x):
        return self.split(self.net(x))


@pytest.mark.parametrize("dense", [True, False])
def test_module_in_sequences_and_probabilistic_actors(dense):
    widths = [IN] * 5 if dense else [4, 4, 6, 5, 6]
    loc, scale = ("agents", "loc"), ("agents", "scale")
    module = StackModule(stack([Head(w) for w in widths]), [OBSERVATION], [loc, scale])
    draw = {"in_keys": {"loc": loc, "scale": scale}, "distribution_class": TanhNormal}
    for actor in (
        ProbabilisticTensorDictSequential(
            module, ProbabilisticTensorDictModule(out_keys=[ACTION], return_log_prob=True, **draw)
        ),
        ProbabilisticActor(module, out_keys=[ACTION], return_log_prob=True, **draw),
    ):
        td = actor(make_data(dense=dense))
        assert td.get(ACTION).shape == (BATCH, 5, 2)
        assert td.get(("agents", "action_log_prob"), td.get("action_log_prob", None)).shape[:2] == (
            BATCH,
            5,
        )
    after = TensorDictModule(nn.Linear(2, 1), [loc], [("agents", "value")])
    sequence = TensorDictSequential(module, TensorDictSequential(after))
    assert sequence(make_data(dense=dense)).get(("agents", "value")).shape == (BATCH, 5, 1)
    found = torch.compile(sequence, fullgraph=True, backend="aot_eager")(make_data(dense=dense))
    torch.testing.assert_close(
        found.get(("agents", "value")), sequence(make_data(dense=dense)).get(("agents", "value"))
    )


def test_dispatch():
    stacked, x = make("perceptron"), torch.randn(BATCH, 5, IN)
    module = StackModule(stacked, [OBSERVATION], [ACTION])
    torch.testing.assert_close(module(agents_observation=x), stacked(x))


def value_net(kind, width):
    layers = [nn.LayerNorm(8)] if kind == "vmap" else []
    return nn.Sequential(nn.Linear(width, 8), *layers, nn.Tanh(), nn.Linear(8, 1))


class Joined(nn.Module):
    """Value of an observation and an action."""

    def __init__(self, kind):
        super().__init__()
        self.stack = stack([value_net(kind, IN + 2) for _ in range(3)] * 2)

    def forward(self, observation, action):
        return self.stack(torch.cat([observation, action], -1))


def transitions():
    n = 6

    def group(**leaves):
        return TensorDict(leaves, [BATCH, n])

    end = torch.zeros(BATCH, n, 1, dtype=torch.bool)
    return TensorDict({
        "agents": group(observation=torch.randn(BATCH, n, IN), action=torch.rand(BATCH, n, 2) - 0.5,
                        action_log_prob=torch.randn(BATCH, n)),
        "next": {"agents": group(observation=torch.randn(BATCH, n, IN),
                                 reward=torch.randn(BATCH, n, 1), done=end, terminated=end)},
    }, [BATCH])  # fmt: skip


def keys_of(loss, **more):
    names = {"reward": "reward", "done": "done", "terminated": "terminated", **more}
    loss.set_keys(**{name: ("agents", leaf) for name, leaf in names.items()})
    return loss


def make_actor(kind):
    def net():
        layers = [nn.LayerNorm(8)] if kind == "vmap" else []
        return nn.Sequential(nn.Linear(IN, 8), *layers, nn.Tanh(), nn.Linear(8, 4))

    return ProbabilisticActor(
        TensorDictSequential(
            StackModule(stack([net() for _ in range(2)] * 3), [OBSERVATION], [("agents", "both")]),
            TensorDictModule(
                NormalParamExtractor(),
                [("agents", "both")],
                [("agents", "loc"), ("agents", "scale")],
            ),
        ),
        in_keys={"loc": ("agents", "loc"), "scale": ("agents", "scale")},
        out_keys=[ACTION],
        distribution_class=TanhNormal,
        return_log_prob=True,
        log_prob_key=("agents", "action_log_prob"),
    )


def make_loss(name, kind):
    value = ("agents", "state_action_value")
    if name == "ddpg":
        policy = StackModule(
            stack([value_net(kind, IN).append(nn.Linear(1, 2)) for _ in range(6)]),
            [OBSERVATION], [ACTION],
        )  # fmt: skip
        critic = ValueOperator(Joined(kind), [OBSERVATION, ACTION], [value])
        loss = DDPGLoss(policy, critic, delay_actor=True, delay_value=True)
        return keys_of(loss, state_action_value="state_action_value")
    if name == "sac":
        critic = ValueOperator(Joined(kind), [OBSERVATION, ACTION], [value])
        loss = SACLoss(make_actor(kind), critic, num_qvalue_nets=2, target_entropy=-2.0)
        return keys_of(
            loss, action="action", state_action_value="state_action_value",
            log_prob="action_log_prob",
        )  # fmt: skip
    critic = StackModule(
        stack([value_net(kind, IN) for _ in range(3)] * 2),
        [OBSERVATION],
        [("agents", "state_value")],
    )
    loss = MAPPOLoss(make_actor(kind), critic)
    return keys_of(loss, action="action", value="state_value", sample_log_prob="action_log_prob")


@pytest.mark.parametrize("kind", ["matmul", "vmap"])
@pytest.mark.parametrize("name", ["ddpg", "sac", "mappo"])
def test_losses_decrease_in_training(name, kind):
    loss, data = make_loss(name, kind), transitions()
    if name == "mappo":
        data[("agents", "advantage")] = torch.randn(BATCH, 6, 1)
        data[("agents", "value_target")] = torch.randn(BATCH, 6, 1)
        loss.set_keys(advantage=("agents", "advantage"), value_target=("agents", "value_target"))
    else:
        loss.make_value_estimator(gamma=0.9)
    updater = None if name == "mappo" else SoftUpdate(loss, tau=0.1)
    optimizer = torch.optim.Adam(loss.parameters(), lr=1e-2)
    critic = (
        "loss_critic" if name == "mappo" else {"ddpg": "loss_value", "sac": "loss_qvalue"}[name]
    )
    losses = []
    for _ in range(15):
        terms = loss(data.clone())
        sum(v for k, v in terms.items() if k.startswith("loss")).backward()
        assert all(p.grad is not None for p in loss.parameters() if p.requires_grad)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(terms[critic].item())
        if updater is not None:
            before = (
                [p.clone() for p in loss.target_parameters()]
                if hasattr(loss, "target_parameters")
                else None
            )
            updater.step()
            del before
    assert losses[-1] < 0.9 * losses[0]


@pytest.mark.parametrize("kind", ["matmul", "vmap"])
def test_target_networks_follow(kind):
    loss = make_loss("ddpg", kind)
    loss.make_value_estimator(gamma=0.9)
    updater = SoftUpdate(loss, tau=0.5)
    with torch.no_grad():
        for p in loss.value_network_params.values(True, True):
            p.add_(1.0)
    target = loss.target_value_network_params
    before = target.data.clone()
    updater.step()
    for key, value in target.data.items(True, True):
        torch.testing.assert_close(value, before[key] + 0.5)
    # A second call shows that swapping parameters left the networks intact.
    loss(transitions())
    assert rows(loss.value_network(transitions()).get(("agents", "state_action_value")))


@pytest.mark.parametrize("pad", [True, False])
def test_first_call_may_be_compiled(pad):
    """Lazy setup in a stack's first call neither breaks a graph nor is kept from one."""
    torch._dynamo.reset()
    widths = [(4, 2), (6, 3), (5, 2)] if pad else [(6, 3)] * 3
    members = [MLP(in_features=i, out_features=o, num_cells=[8]) for i, o in widths]
    whole = stack(members, pad=pad)
    assert len(whole.buckets) == 1  # torchrl's perceptrons of one structure are one call
    x = torch.randn(5, 3, 6)
    compiled = torch.compile(whole, fullgraph=True, backend="aot_eager")(x)
    torch.testing.assert_close(compiled, whole(x))


@pytest.mark.parametrize("name", STACKS)
def test_shapes_of_outputs_on_the_meta_device(name):
    whole = STACKS[name]()
    x = torch.randn(5, len(whole), IN)
    assert whole.to("meta")(x.to("meta")).shape == (5, len(whole), OUT)
