"""Recurrences over sequences: their operations, gradients, resets and masks."""

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torchrl.modules import set_recurrent_mode

from torchrl_marl.modules.memory.cells import (
    CELLS,
    GRU,
    LRU,
    LSTM,
    AgentLinear,
    Layers,
    MinGRU,
    remember,
)
from torchrl_marl.modules.memory.gru import gru, gru_loop
from torchrl_marl.modules.memory.linear_scan import linear_scan, linear_scan_loop
from torchrl_marl.modules.memory.lstm import lstm, lstm_loop

T, K, R, F, H = 5, 2, 3, 6, 4


def drawn(kind, dtype=torch.float64, k=K, seed=0, T=T):
    """Arguments of an operation; some agents are reset and some are masked."""
    torch.manual_seed(seed)
    keep = (torch.rand(T, k, R, 1) > 0.3).to(dtype)
    acts = torch.rand(T, k, R, 1) > 0.3

    def leaf(*shape):
        return torch.randn(*shape, dtype=dtype, requires_grad=True)

    if kind == "gru":
        own = leaf(k, 3 * H, F), leaf(k, 3 * H), leaf(k, 3 * H, H), leaf(k, 3 * H)
        return leaf(T, k, R, F), leaf(k, R, H), keep, acts, *own
    if kind == "lstm":
        return (
            *(leaf(T, k, R, 4 * H), leaf(k, R, 2 * H), keep, acts),
            *(leaf(k, 4 * H, H), leaf(k, 4 * H)),
        )
    if kind == "complex":
        return leaf(T, R, H), leaf(T, R, H), leaf(T, R, 2 * H), leaf(R, 2 * H)
    return leaf(T, R, H), None, leaf(T, R, H), leaf(R, H)


PAIRS = {
    "gru": (gru, gru_loop),
    "lstm": (lstm, lstm_loop),
    "real": (linear_scan, linear_scan_loop),
    "complex": (linear_scan, linear_scan_loop),
}


def run(function, arguments, weight):
    """The output, and the gradients of a weighted sum of it."""
    wanted = [x for x in arguments if x is not None and x.requires_grad]
    output = function(*arguments)
    return output, torch.autograd.grad((output * weight(output)).sum(), wanted)


@pytest.mark.parametrize("kind", PAIRS)
def test_autocast_does_not_change_an_operation(kind):
    """Graphs record no autocast inside it and must equal eager results bitwise."""
    operation, arguments = PAIRS[kind][0], drawn(kind, torch.float32)
    expected = operation(*arguments)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(operation(*arguments), expected)


def weights_of(output):
    return torch.linspace(-1, 1, output.numel(), dtype=output.dtype).view_as(output)


@pytest.mark.parametrize("k", [1, 2])
@pytest.mark.parametrize("kind", PAIRS)
def test_operation_equals_its_loop(kind, k):
    fast, slow = PAIRS[kind]
    arguments = drawn(kind, torch.float32, k)
    (output, gradients), (expected, of_loop) = (run(f, arguments, weights_of) for f in (fast, slow))
    torch.testing.assert_close(output, expected, rtol=1e-6, atol=1e-6)
    for one, other in zip(gradients, of_loop):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("n_steps", [1, 7, 8, 9, 19])
@pytest.mark.parametrize("k", [1, 2])
def test_gru_equals_its_loop_for_any_number_of_steps(k, n_steps):
    """The operation prepares eight steps at once."""
    arguments = drawn("gru", k=k, T=n_steps)
    for everywhere in (arguments, (*arguments[:3], None, *arguments[4:])):
        fast, slow = (run(f, everywhere, weights_of) for f in (gru, gru_loop))
        torch.testing.assert_close(fast, slow, rtol=1e-12, atol=1e-12)
        inputs = everywhere[0].detach(), *everywhere[1:]
        _, of_weights = run(gru, inputs, weights_of)
        torch.testing.assert_close(of_weights, slow[1][1:], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", PAIRS)
def test_gradients_pass_gradcheck(kind):
    assert torch.autograd.gradcheck(PAIRS[kind][0], drawn(kind), fast_mode=True)


def test_gru_step_by_hand():
    # r = z = sigma(0) = 1/2, n = tanh(2 * 3 - 5 + 1/2 * 2) = tanh(2), h = n / 2 + 3 / 2.
    x, state, keep = (
        torch.full((1, 1, 1, 1), 2.0),
        torch.full((1, 1, 1), 3.0),
        torch.ones(1, 1, 1, 1),
    )
    of_input = torch.tensor([[[0.0], [0], [3]]]), torch.tensor([[0.0, 0, -5]])
    of_state = torch.zeros(1, 3, 1), torch.tensor([[0.0, 0, 2]])
    found = gru(x, state, keep, None, *of_input, *of_state)
    assert found.item() == pytest.approx((0.9640276 + 3) / 2)
    # A state that is reset starts from 0.
    found = gru(x, state, 0 * keep, None, *of_input, *of_state)
    assert found.item() == pytest.approx(0.9640276 / 2)


@pytest.mark.parametrize(("cell", "of_torch"), [(GRU, nn.GRU), (LSTM, nn.LSTM)])
def test_cells_equal_those_of_torch(cell, of_torch):
    torch.manual_seed(0)
    memory, expected = cell(6, H), of_torch(6, H)
    with torch.no_grad():
        for parameter in memory.parameters():
            parameter.normal_()
        for ours, theirs in (("ih", "ih_l0"), ("hh", "hh_l0")):
            for what in ("weight", "bias"):
                own = getattr(getattr(memory, ours), what)
                getattr(expected, f"{what}_{theirs}").copy_(own.squeeze(0))
    x = torch.randn(T, R, 6)
    output, _ = memory(x, torch.zeros(R, memory.state_size), None, None)
    torch.testing.assert_close(output, expected(x)[0], rtol=1e-5, atol=1e-6)


def rows_of(cell, index=(0,), n=2):
    torch.manual_seed(1)
    memory = cell(H, H, index)
    with torch.no_grad():
        for parameter in memory.parameters():
            if parameter.ndim > 1 and not isinstance(memory, LRU):
                parameter.normal_()
    x, state = torch.randn(T, 3, n, H), torch.randn(3, n, memory.state_size)
    init, mask = torch.rand(T, 3, n, 1) > 0.7, torch.rand(T, 3, n, 1) > 0.4
    init[0, 0] = True
    return memory, x, state, init, mask


@pytest.mark.parametrize("cell", CELLS.values())
@pytest.mark.parametrize("index", [(0,), (0, 1), (1, 0), (0, 0, 1)])
def test_sequence_equals_single_steps(cell, index):
    memory, x, state, init, mask = rows_of(cell, index, n=max(2, len(index)))
    output, states = memory(x, state, init, mask)
    for t in range(T):
        one, state = memory(x[t : t + 1], state, init[t : t + 1], mask[t : t + 1])
        state = state[0]
        torch.testing.assert_close(one[0], output[t], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(state, states[t], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("cell", CELLS.values())
def test_masked_agents_keep_state_and_new_episodes_reset_it(cell):
    memory, x, state, init, mask = rows_of(cell)
    _, states = memory(x, state, init, mask)
    before = torch.where(init, 0.0, torch.cat([state.unsqueeze(0), states[:-1]]))
    waits = (~mask).expand_as(states)
    assert torch.equal(states[waits], before[waits])
    # The state from before an episode has no effect.
    begun = init[0].squeeze(-1)
    assert bool(begun.any())
    state[begun] += 1
    other = memory(x, state, init, mask)[1]
    assert torch.equal(other[:, begun], states[:, begun])


@pytest.mark.parametrize("cell", CELLS.values())
def test_new_episodes_reset_state_without_a_mask(cell):
    memory, x, state, init, _ = rows_of(cell)
    assert bool(init[0].any())
    found = remember(memory, x[0], state, init[0], None)
    blank = torch.where(init[0], 0.0, state)
    expected = remember(memory, x[0], blank, torch.zeros_like(init[0]), None)
    for one, other in zip(found, expected):
        assert torch.equal(one, other)


@pytest.mark.parametrize("cell", CELLS.values())
def test_agents_are_independent_rows(cell):
    memory, x, state, init, mask = rows_of(cell)
    output, states = memory(x, state, init, mask)
    order = [1, 0]
    inputs = x[..., order, :], state[..., order, :], init[..., order, :], mask[..., order, :]
    for found, expected in zip(memory(*inputs), (output, states)):
        torch.testing.assert_close(found[..., order, :], expected, rtol=1e-6, atol=1e-6)
    alone = memory(x[..., :1, :], state[..., :1, :], init[..., :1, :], mask[..., :1, :])[0]
    torch.testing.assert_close(alone, output[..., :1, :], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("cell", CELLS.values())
def test_memory_layout_of_inputs_has_no_effect(cell):
    def gradients(x):
        x = x.requires_grad_()
        return torch.autograd.grad(memory(x, state, init, mask)[0].sum(), [x, *memory.parameters()])

    memory, x, state, init, mask = rows_of(cell, n=1)
    across = x.movedim(0, 1).contiguous().movedim(1, 0)
    assert not across.is_contiguous()
    for one, other in zip(gradients(x), gradients(across)):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("cell", CELLS.values())
def test_separate_networks_equal_one_memory_per_agent(cell):
    memory, x, state, init, mask = rows_of(cell, index=(0, 1))
    output, _ = memory(x, state, init, mask)
    for agent in range(2):
        own = cell(H, H)
        own.load_state_dict({k: v[agent : agent + 1] for k, v in memory.state_dict().items()})
        rows = [y[..., agent : agent + 1, :] for y in (x, state, init, mask)]
        torch.testing.assert_close(
            own(*rows)[0], output[..., agent : agent + 1, :], rtol=1e-5, atol=1e-5
        )


def test_layers_are_chained():
    torch.manual_seed(0)
    first, second = GRU(6, 4), LSTM(4, 3)
    memory = Layers([first, second])
    assert (memory.state_size, memory.out_features) == (10, 3)
    x, state = torch.randn(T, R, 6), torch.randn(R, 10)
    y, s = first(x, state[..., :4], None, None)
    z, s2 = second(y, state[..., 4:], None, None)
    output, states = memory(x, state, None, None)
    assert torch.equal(output, z) and torch.equal(states, torch.cat([s, s2], -1))


@pytest.mark.parametrize("cell", CELLS.values())
def test_graph_size_is_independent_of_sequence_length(cell):
    memory = cell(H, H)

    def gradient(x, state):
        output, _ = memory(x, state, None, None)
        return torch.autograd.grad(output.square().sum(), list(memory.parameters()))

    sizes = []
    for n_steps in (2, 20):
        x, state = torch.randn(n_steps, R, H), torch.zeros(R, memory.state_size)
        graph = make_fx(gradient, _allow_non_fake_inputs=True, tracing_mode="real")(x, state)
        sizes.append(len(graph.graph.nodes))
        for found, expected in zip(graph(x, state), gradient(x, state)):
            assert torch.equal(found, expected)
    assert sizes[0] == sizes[1]


def test_gradients_under_function_transforms():
    arguments = drawn("gru")
    expected = run(gru, arguments, torch.ones_like)[1]
    found = torch.func.grad(lambda x: gru(x, *arguments[1:]).sum())(arguments[0])
    torch.testing.assert_close(found, expected[0])
    of_weight = torch.func.grad(lambda weight: gru(*arguments[:4], weight, *arguments[5:]).sum())
    torch.testing.assert_close(of_weight(arguments[4]), expected[2])


def test_second_derivative_of_gru():
    assert torch.autograd.gradgradcheck(gru, drawn("gru"), fast_mode=True)


@pytest.mark.parametrize("cell", CELLS.values())
def test_stored_states_get_no_gradient(cell):
    memory, x, state, init, _ = rows_of(cell)
    state = state.expand(T, *state.shape).clone().requires_grad_()
    rows = [y.movedim(0, -3) for y in (x, state, init)]
    with set_recurrent_mode(True):
        output, _ = remember(memory, *rows, None)
    assert output.requires_grad
    assert torch.autograd.grad(output.sum(), state, allow_unused=True) == (None,)


def test_lru_of_odd_size_raises():
    with pytest.raises(ValueError, match="use 6"):
        LRU(4, 5)


def test_min_gru_by_hand():
    memory = MinGRU(1, 1)
    with torch.no_grad():
        memory.input.weight.zero_()
        memory.input.bias.copy_(torch.tensor([[0.0, 4.0]]))  # z = 1/2, c = 4
        memory.output.weight.zero_()
    output, states = memory(torch.ones(2, 1, 1), torch.zeros(1, 1), None, None)
    assert states.flatten().tolist() == [2.0, 3.0] and output.flatten().tolist() == [1.0, 1.0]


def test_agent_linear_uses_weights_of_each_agent():
    torch.manual_seed(0)
    linear = AgentLinear(3, 2, index=[1, 0, 1])
    x = torch.randn(4, 5, 3, 3)
    for agent, k in enumerate([1, 0, 1]):
        expected = nn.functional.linear(x[..., agent, :], linear.weight[k], linear.bias[k])
        torch.testing.assert_close(linear(x)[..., agent, :], expected)


if __name__ == "__main__":
    pytest.main([__file__])


@pytest.mark.parametrize("kind", CELLS)
def test_one_env_without_batch_dims(kind):
    """Separate networks of the agents of a single env, whose tensors have no batch dims."""
    torch.manual_seed(0)
    memory = CELLS[kind](F, H, index=[0, 1, 0])
    x, state = torch.randn(T, 3, F), torch.randn(3, memory.state_size)
    init, mask = torch.rand(T, 3, 1) < 0.3, torch.rand(T, 3, 1) < 0.7
    outputs, states = memory(x, state, init, mask)
    batch = [y.unsqueeze(1) for y in (x, init, mask)]
    expected = memory(batch[0], state.unsqueeze(0), *batch[1:])
    torch.testing.assert_close([outputs, states], [y.squeeze(1) for y in expected])
    linear = AgentLinear(F, H, index=[0, 1, 0])
    torch.testing.assert_close(linear(x[0]), linear(x)[0])
