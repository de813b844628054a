"""Networks over sets of agents: order, number, masks, kinds, gradients, by hand."""

import math

import pytest
import torch
from cover import pairwise
from samples import POISON, assert_same

from torchrl_marl.modules.bodies import ACTIVATIONS
from torchrl_marl.modules.central import SetNetwork

KINDS = (0, 1, 0, 2, 0, 1)
SPLITS = [(0,), (0, 0, 0), (0, 0, 1, 1), (0, 1, 1, 1), KINDS, (2, 1, 0)]
ALL = [(pooling, per_agent) for pooling in ("mean", "attention") for per_agent in (True, False)]
every = pytest.mark.parametrize(("pooling", "per_agent"), ALL)


class Values(SetNetwork):
    """Returns the outputs without a body's state."""

    def forward(self, features, mask):
        return super().forward(features, mask)[0]


def make(pooling="mean", per_agent=True, kinds=KINDS, cells=(8, 8)):
    torch.manual_seed(3)
    network = Values(
        5, 2, kinds, num_cells=cells, activation="tanh", pooling=pooling, per_agent=per_agent
    )
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))  # biases start at 0
    return network


def team(*batch, n=6, seed=0, alive=0.6):
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(*batch, n, 5, generator=generator)
    return features, torch.rand(*batch, n, generator=generator) < alive


def run(network, features, mask, call=None):
    """Outputs, and the gradients of a weighted sum over living agents."""
    network.zero_grad()
    features = features.clone().requires_grad_()
    output = (network if call is None else call)(features, mask)
    living = torch.where(mask.unsqueeze(-1), output, 0.0)
    weight = torch.linspace(-1.0, 2.0, living.numel()).view_as(living)
    (living * weight).sum().backward()
    return output, [features.grad, *(p.grad.clone() for p in network.parameters())]


@pairwise(
    pooling=["mean", "attention"],
    per_agent=[True, False],
    kinds=SPLITS,
    batch=[(), (4,), (2, 3), (0,)],
)
def test_shapes(pooling, per_agent, kinds, batch):
    features, mask = team(*batch, n=len(kinds))
    output = make(pooling, per_agent, kinds)(features, mask)
    assert output.shape == (*batch, len(kinds), 2)
    assert bool(output.isfinite().all())


@every
def test_batch_dims_are_independent(pooling, per_agent):
    network = make(pooling, per_agent)
    features, mask = team(2, 3)
    output = network(features, mask)
    torch.testing.assert_close(
        network(features.flatten(0, 1), mask.flatten(0, 1)).view_as(output), output
    )
    torch.testing.assert_close(network(features[1, 2], mask[1, 2]), output[1, 2])


@pytest.mark.parametrize("kinds", SPLITS)
def test_agents_are_encoded_by_their_kind(kinds):
    encoder = make(kinds=kinds).encoder
    features, _ = team(4, n=len(kinds))
    encoding = encoder(features)
    for agent, kind in enumerate(kinds):
        own = features[:, agent]
        for layer in encoder.layers:
            own = torch.tanh(own @ layer.weight[kind] + layer.bias[kind])
        torch.testing.assert_close(encoding[:, agent], own)


@every
def test_equivariant_to_order_within_a_kind(pooling, per_agent):
    network = make(pooling, per_agent)
    features, mask = team(7)
    order = [4, 5, 0, 3, 2, 1]  # 0 -> 2 -> 4 -> 0 and 1 <-> 5
    output, moved = network(features, mask), network(features[:, order], mask[:, order])
    torch.testing.assert_close(moved, output[:, order], rtol=1e-6, atol=1e-6)


@every
def test_swapping_kinds_changes_outputs(pooling, per_agent):
    network = make(pooling, per_agent)
    features, mask = team(7, alive=2.0)
    swapped = network(features[:, [1, 0, 2, 3, 4, 5]], mask)
    assert not torch.allclose(swapped[:, [1, 0, 2, 3, 4, 5]], network(features, mask), atol=1e-3)


@every
def test_outputs_depend_on_all_living_agents(pooling, per_agent):
    network = make(pooling, per_agent)
    features, mask = team(alive=2.0)
    features.requires_grad_()
    network(features, mask)[0].sum().backward()
    assert bool((features.grad.abs().sum(-1) > 1e-6).all())


@every
@pytest.mark.parametrize("value", POISON)
def test_values_of_masked_agents_have_no_effect(pooling, per_agent, value):
    network = make(pooling, per_agent)
    features, mask = team(9)
    mask[0] = False
    clean, gradients = run(network, features, mask)
    output, poisoned = run(network, features.masked_fill(~mask.unsqueeze(-1), value), mask)
    assert_same(clean, output)
    assert bool(output.isfinite().all())
    for first, second in zip(gradients, poisoned):
        assert bool(second.isfinite().all())
        assert_same(first, second)
    assert bool((poisoned[0][~mask] == 0).all())


@every
def test_dead_agent_equals_absent_agent(pooling, per_agent):
    features, mask = team(9)
    mask[:, 2] = False
    left = [0, 1, 3, 4, 5]
    network = make(pooling, per_agent)
    smaller = make(pooling, per_agent, [KINDS[i] for i in left])
    smaller.load_state_dict(network.state_dict())
    output, gradients = run(network, features, mask)
    less = smaller(features[:, left], mask[:, left])
    torch.testing.assert_close(less, output[:, left], rtol=1e-6, atol=1e-6)
    weight = torch.linspace(-1.0, 2.0, output.numel()).view_as(output)[:, left]
    torch.where(mask[:, left].unsqueeze(-1), less * weight, 0.0).sum().backward()
    for first, parameter in zip(gradients[1:], smaller.parameters()):
        torch.testing.assert_close(first, parameter.grad, rtol=1e-4, atol=1e-5)


@every
def test_context_is_zero_without_living_agents(pooling, per_agent):
    network = make(pooling, per_agent)
    features, mask = team(3)
    mask[:] = torch.tensor([[True], [False], [True]])
    output, gradients = run(network, features, mask)
    assert bool(output.isfinite().all())
    assert all(bool(g.isfinite().all()) for g in gradients)
    for env in (0, 2):  # what happens in one env does not reach another
        torch.testing.assert_close(network(features[env], mask[env]), output[env])
    if not per_agent:
        torch.testing.assert_close(output[1], network.head(torch.zeros(6, 8)))
    network(features, torch.zeros_like(mask)).sum().backward()
    assert all(bool(p.grad.isfinite().all()) for p in network.parameters() if p.grad is not None)


def test_team_value_is_equal_for_all_agents():
    for pooling in ("mean", "attention"):
        output = make(pooling, per_agent=False)(*team(4))
        assert_same(output, output[:, :1].expand_as(output))


def test_encoder_of_a_dead_kind_gets_no_gradient():
    network = make("attention")
    features, mask = team(8, alive=2.0)
    mask[:, [1, 5]] = False
    run(network, features, mask)
    for layer in network.encoder.layers:
        assert bool((layer.weight.grad[1] == 0).all())
        assert bool((layer.bias.grad[1] == 0).all())
        assert bool((layer.weight.grad[[0, 2]] != 0).any())


@every
def test_gradients_pass_gradcheck(pooling, per_agent):
    network = make(pooling, per_agent, (0, 1, 0), cells=(4,)).double()
    features, mask = team(3, n=3)
    mask[1] = False
    names, values = zip(*network.named_parameters())

    def call(features, *parameters):
        return torch.func.functional_call(network, dict(zip(names, parameters)), (features, mask))

    inputs = [features.double().requires_grad_(), *values]
    assert torch.autograd.gradcheck(call, inputs)


def test_number_of_parameters_depends_on_kinds_only():
    def count(kinds):
        return sum(p.numel() for p in make("attention", kinds=kinds).parameters())

    assert count((0, 0)) == count((0,) * 30)
    one_encoder = 5 * 8 + 8 + 8 * 8 + 8
    assert count((0, 1, 1)) == count((0, 1) * 9) == count((0,)) + one_encoder


def by_hand(per_agent, pooling="mean", kinds=(0, 0, 0)):
    """Encoders keep positive features; the head adds features and context, weighted 1 and 10."""
    network = Values(
        2,
        1,
        kinds,
        num_cells=[2],
        activation="relu",
        pooling=pooling,
        num_heads=2,
        per_agent=per_agent,
    )
    unit = torch.eye(2)
    with torch.no_grad():
        for kind in set(kinds):
            network.encoder.layers[0].weight[kind] = unit * (kind + 1)
        network.head[0].weight.copy_(torch.cat([unit, unit], -1) if per_agent else unit)
        network.head[2].weight.copy_(torch.tensor([[1.0, 10.0]]))
        if pooling == "attention":
            network.attention.projection.weight.copy_(torch.cat([0 * unit, 0 * unit, unit]))
            network.attention.output.weight.copy_(unit)
    return network


@pytest.mark.parametrize("pooling", ["mean", "attention"])
def test_by_hand(pooling):
    features = torch.tensor([[1.0, 2.0], [math.nan, 9.0], [3.0, 4.0]])
    mask = torch.tensor([True, False, True])  # mean (2, 3)
    value = by_hand(True, pooling)(features, mask)
    torch.testing.assert_close(value[mask], torch.tensor([[53.0], [75.0]]))
    value = by_hand(False, pooling)(features, mask)
    torch.testing.assert_close(value, torch.full((3, 1), 32.0))
    # The last agent's kind doubles: (6, 8), so the mean is (3.5, 5).
    value = by_hand(True, pooling, (0, 0, 1))(features, mask)
    torch.testing.assert_close(value[mask], torch.tensor([[4.5 + 70.0], [9.5 + 130.0]]))


def test_attention_by_hand():
    network = by_hand(True, "attention")
    with torch.no_grad():  # one head a feature; queries and keys are the features
        network.attention.projection.weight.copy_(torch.eye(2).repeat(3, 1))
    features = torch.tensor([[1.0, 0.0], [2.0, 0.0], [5.0, 5.0]])
    mask = torch.tensor([True, True, False])
    first = (math.e + 2 * math.e**2) / (math.e + math.e**2)
    second = (math.e**2 + 2 * math.e**4) / (math.e**2 + math.e**4)
    expected = torch.tensor([[1 + first], [2 + second]])
    torch.testing.assert_close(network(features, mask)[mask], expected)


def test_initial_weights_are_orthogonal():
    network = Values(
        8, 4, KINDS, num_cells=[8, 8], activation="relu", pooling="attention", device="cpu"
    )
    for layer in network.encoder.layers:
        for weight in layer.weight:
            torch.testing.assert_close(weight @ weight.T, 2 * torch.eye(8))
    last = network.head[2].weight
    torch.testing.assert_close(last @ last.T, torch.eye(4))
    biases = [p for name, p in network.named_parameters() if name.endswith("bias")]
    assert len(biases) == 6
    assert all(bool((p == 0).all()) for p in biases)


@pytest.mark.compiled
@pairwise(pooling=["mean", "attention"], per_agent=[True, False], batch=[(4,), (2, 3)])
def test_compiles(pooling, per_agent, batch):
    network = make(pooling, per_agent)
    compiled = torch.compile(network, fullgraph=True, backend="aot_eager")
    features, mask = team(*batch)
    mask[0] = False
    expected, gradients = run(network, features, mask)
    output, others = run(network, features, mask, compiled)
    torch.testing.assert_close(output, expected)
    for first, second in zip(gradients, others):
        torch.testing.assert_close(first, second)


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        ({"kinds": []}, "kinds"),
        ({"kinds": [0, 2]}, "without gaps"),
        ({"kinds": [0, -1]}, "without gaps"),
        ({"num_cells": []}, "num_cells"),
        ({"activation": "sine"}, "'sine'.*tanh"),
        ({"pooling": "max"}, "'max'.*'attention'"),
        ({"pooling": "attention", "num_heads": 3}, "num_heads is 3.*8"),
        ({"pooling": "attention", "num_heads": 0}, "num_heads is 0.*8"),
    ],
)
def test_invalid_settings_raise(wrong, match):
    settings = {"kinds": [0, 0], "num_cells": [8], "activation": "tanh", "pooling": "mean"}
    with pytest.raises(ValueError, match=match):
        Values(5, 1, **(settings | wrong))


@pytest.mark.parametrize(
    ("features", "mask"),
    [
        ((4, 5, 5), (4, 5)),
        ((4, 6, 3), (4, 6)),
        ((4, 6, 5), (4, 6, 1)),
        ((4, 6, 5), (6,)),
        ((5,), ()),
    ],
)
def test_inputs_of_wrong_shape_raise(features, mask):
    with pytest.raises(ValueError, match=r"expected .*(6 agents|\(4, 6\))"):
        make()(torch.zeros(features), torch.ones(mask, dtype=torch.bool))


def test_mask_of_wrong_dtype_raises():
    features, mask = team(4)
    with pytest.raises(ValueError, match=r"torch.float32 .*torch.bool \(4, 6\)"):
        make()(features, mask.float())


def test_every_activation():
    for activation in ACTIVATIONS:
        network = Values(5, 1, KINDS, num_cells=[8], activation=activation, pooling="mean")
        assert bool(network(*team(2)).isfinite().all())
