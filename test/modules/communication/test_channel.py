"""Channels between agents: hand-computed values, masked agents, permutations, random draws."""

import math

import pytest
import torch

from torchrl_marl.modules import CommunicationConfig, DrawnCommunicationConfig
from torchrl_marl.modules.bodies import Context
from torchrl_marl.modules.communication import Attention, Channel, Mean
from torchrl_marl.modules.communication.channel import bits, drawing, living_links, symbol

H, N = 6, 5
KINDS = {
    "commnet": CommunicationConfig("commnet", rounds=2, message_size=4),
    "tarmac": CommunicationConfig("tarmac", rounds=2, message_size=4, key_size=3),
    "graph": CommunicationConfig("graph", message_size=4, key_size=3, links="radius", radius=1.5),
    "bicnet": CommunicationConfig("bicnet", message_size=4),
    "bicnet_lstm": CommunicationConfig("bicnet", cell="lstm"),
    "nearest": CommunicationConfig("tarmac", links="nearest", nearest=2),
}
DRAWN = {
    "gate": DrawnCommunicationConfig("tarmac", gate=True),
    "gated_chain": DrawnCommunicationConfig("bicnet", gate=True),
    "dropout": DrawnCommunicationConfig("commnet", dropout=0.4),
    "gumbel": DrawnCommunicationConfig("commnet", discrete="gumbel", rounds=2),
    "dial": DrawnCommunicationConfig("tarmac", discrete="dial"),
    "all": DrawnCommunicationConfig("tarmac", gate=True, dropout=0.4, discrete="dial", rounds=2),
}


def a_channel(config, n=N):
    torch.manual_seed(0)
    return Channel(H, config, n)


def some_agents(batch=7):
    torch.manual_seed(1)
    mask = torch.rand(batch, N) < 0.7
    mask[0] = False  # no agent is alive
    mask[1] = torch.arange(N) == 2  # only one agent is alive
    return torch.randn(batch, N, H), mask, torch.rand(batch, N, 2) * 3


def run(channel, features, mask, position, drawn=None, how="replay"):
    with drawing(how):
        return channel(features, mask, Context(position=position, drawn=drawn))


@pytest.mark.parametrize("name", [*KINDS, *DRAWN])
def test_values_of_dead_agents_have_no_effect_bitwise(name):
    channel = a_channel({**KINDS, **DRAWN}[name])
    features, mask, position = some_agents()
    alive, results = mask.unsqueeze(-1), []
    for poison in (0.0, math.nan, 1e9):
        x = torch.where(alive, features, poison).requires_grad_()
        places = torch.where(alive, position, poison)
        torch.manual_seed(3)
        out, drawn, *_ = run(channel, x, mask, places, how="draw")
        loss = torch.where(alive, out, 0.0).square().sum()
        grads = torch.autograd.grad(loss, [*channel.parameters(), x], allow_unused=True)
        assert torch.where(alive, 0.0, grads[-1]).abs().max() == 0
        drawn = torch.zeros(1) if drawn is None else torch.where(alive, drawn, 0.0)
        results.append([torch.where(alive, out, 0.0), drawn, *(g for g in grads if g is not None)])
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other))
    assert results[0][0].abs().max() > 0


@pytest.mark.parametrize("name", ["commnet", "tarmac", "graph", "nearest"])
def test_outputs_are_permutation_equivariant(name):
    channel = a_channel(KINDS[name])
    features, mask, position = some_agents()
    order = torch.randperm(N)
    moved = run(channel, features[:, order], mask[:, order], position[:, order])[0]
    expected = run(channel, features, mask, position)[0][:, order]
    living = mask[:, order].unsqueeze(-1)
    torch.testing.assert_close(
        torch.where(living, moved, 0.0), torch.where(living, expected, 0.0), rtol=1e-6, atol=1e-6
    )


def test_bicnet_chain_depends_on_agent_order():
    channel = a_channel(KINDS["bicnet"])
    features, mask, position = some_agents()
    mask = torch.ones_like(mask)
    flipped = run(channel, features.flip(1), mask, position)[0].flip(1)
    assert (flipped - run(channel, features, mask, position)[0]).abs().max() > 1e-2


@pytest.mark.parametrize("name", KINDS)
def test_single_living_agent_equals_team_of_one(name):
    channel, alone = a_channel(KINDS[name]), a_channel(KINDS[name], n=1)
    alone.load_state_dict(channel.state_dict())
    features, mask, position = some_agents()
    among = run(channel, features, mask, position)[0][1, 2]
    one = run(alone, features[1:2, 2:3], torch.ones(1, 1).bool(), position[1:2, 2:3])[0][0, 0]
    torch.testing.assert_close(among, one, rtol=1e-6, atol=1e-6)


def test_mean_of_messages_by_hand():
    mean = Mean(2, 1)
    with torch.no_grad():
        mean.own.weight.zero_(), mean.own.bias.fill_(0.1)
        mean.message.weight.copy_(torch.tensor([[1.0, 2.0]]))
        mean.heard.weight.copy_(torch.tensor([[1.0], [-1.0]]))
    features = torch.tensor([[0.0, 0.0], [1.0, 1.0], [0.5, 0.0]])
    links = torch.tensor([[False, True, True], [False] * 3, [True, False, False]])
    out = mean(features, links, torch.ones(3).bool())
    heard = (3.0 + 0.5) / 2  # messages of agents 1 and 2 to agent 0
    by_hand = [
        [math.tanh(0.1 + heard), math.tanh(0.1 - heard)],
        [math.tanh(1.1), math.tanh(1.1)],
        [math.tanh(0.6), math.tanh(0.1)],
    ]
    torch.testing.assert_close(out, torch.tensor(by_hand))


def test_attention_by_hand():
    attention = Attention(1, 1, key_size=1)
    with torch.no_grad():
        attention.query.weight.fill_(1.0), attention.query.bias.zero_()
        (
            attention.message.weight.copy_(torch.tensor([[1.0], [10.0]])),
            attention.message.bias.zero_(),
        )
    features = torch.tensor([[1.0], [0.3], [-0.2]])
    links = living_links(torch.ones(3).bool())
    inbox = attention.send(features)
    weights = attention.weights(features, inbox, links)
    first = math.exp(0.3) / (math.exp(0.3) + math.exp(-0.2))
    torch.testing.assert_close(weights[0], torch.tensor([0.0, first, 1 - first]))


def test_attention_with_equal_keys_is_the_mean():
    attention = Attention(H, 4)
    with torch.no_grad():
        attention.query.weight.zero_()
    features = torch.randn(3, N, H)
    weights = attention.weights(
        features, attention.send(features), living_links(torch.ones(N).bool())
    )
    torch.testing.assert_close(weights[0], living_links(torch.ones(N).bool()) / (N - 1))


def test_attention_weights_without_links_are_zero():
    attention = Attention(H, 4)
    features = torch.randn(N, H)
    weights = attention.weights(features, attention.send(features), torch.zeros(N, N).bool())
    assert weights.abs().max() == 0


@pytest.mark.parametrize("cell", ["gru", "lstm"])
def test_chain_equals_loop_over_agents(cell):
    chain = a_channel(CommunicationConfig("bicnet", cell=cell)).rounds[0]
    torch.manual_seed(2)
    x, speaks = torch.randn(N, H), torch.tensor([True, True, False, True, True])
    out = chain(x, None, speaks)

    def handed(order, back):
        state, heard = torch.zeros(chain.state_size), {}
        for i in order:
            heard[i] = state[: chain.size]
            state = chain.pass_on(x[i], state, back=back) if speaks[i] else state
        return torch.stack([heard[i] for i in range(N)])

    before, behind = handed(range(N), False), handed(reversed(range(N)), True)
    torch.testing.assert_close(out, chain.read(x, before, behind), rtol=1e-6, atol=1e-6)


# ------------------------------------------------------------------------------ random draws


@pytest.mark.parametrize("name", DRAWN)
def test_stored_draws_are_replayed(name):
    channel = a_channel(DRAWN[name])
    features, mask, position = some_agents()
    first, drawn, *_ = run(channel, features, mask, position, how="draw")
    again, same, *_ = run(channel, features, mask, position, drawn)
    other = run(channel, features, mask, position, how="draw")[0]
    living = mask.unsqueeze(-1)
    assert torch.equal(torch.where(living, first, 0.0), torch.where(living, again, 0.0))
    assert same is drawn and drawn.shape == (7, N, channel.draws)
    assert not torch.equal(torch.where(living, first, 0.0), torch.where(living, other, 0.0))


@pytest.mark.parametrize("name", DRAWN)
def test_mode_is_deterministic(name):
    channel = a_channel(DRAWN[name])
    features, mask, position = some_agents()
    torch.manual_seed(4)
    first = run(channel, features, mask, position, how="mode")[0]
    torch.manual_seed(5)
    assert torch.equal(first, run(channel, features, mask, position, how="mode")[0])


def test_closed_gate_sends_nothing_and_open_gate_equals_no_gate():
    channel, plain = a_channel(DRAWN["gate"]), a_channel(CommunicationConfig("tarmac"))
    plain.load_state_dict(channel.state_dict(), strict=False)
    features, mask, position = some_agents()
    mask = torch.ones_like(mask)
    opened = run(channel, features, mask, position, torch.ones(7, N, 1))[0]
    assert torch.equal(opened, run(plain, features, mask, position)[0])
    gate = torch.ones(7, N, 1)
    gate[:, 1] = 0
    out = run(channel, features, mask, position, gate)[0]
    changed = torch.where(torch.arange(N).view(N, 1) == 1, 5.0, features)
    # Agent 1's observation does not reach the others. It still receives their messages.
    others = torch.arange(N) != 1
    assert torch.equal(out[:, others], run(channel, changed, mask, position, gate)[0][:, others])
    heard = channel.used_links(mask, Context(drawn=gate))
    assert not heard[:, :, 1].any() and heard[:, 1].sum() == 7 * (N - 1)


def test_probabilities_of_gates_and_dropped_links():
    channel = a_channel(DRAWN["all"])
    with torch.no_grad():
        channel.gate.weight.zero_(), channel.gate.bias.fill_(math.log(3.0))
    torch.manual_seed(0)
    drawn = run(channel, torch.randn(4000, N, H), None, None, how="draw")[1]
    assert drawn[..., 0].mean().item() == pytest.approx(0.75, abs=0.01)
    assert drawn[..., 1 : 1 + N].mean().item() == pytest.approx(0.6, abs=0.01)


def test_symbols_are_drawn_with_their_probabilities():
    chance = torch.tensor([0.7, 0.2, 0.1])
    torch.manual_seed(0)
    noise = -torch.empty(50_000, 3).exponential_().log()
    message = chance.log().expand(50_000, 3).clone().requires_grad_()
    drawn = symbol(message, noise, 1.0)
    torch.testing.assert_close(drawn.mean(0).detach(), chance, atol=0.01, rtol=0)
    (drawn[:, 0].sum()).backward()
    soft = (message + noise).softmax(-1)
    torch.testing.assert_close(message.grad[0], (soft[0, 0] * (torch.eye(3)[0] - soft[0])).detach())


def test_hard_and_soft_bits_by_hand():
    message = torch.tensor([0.5, -2.0])
    assert bits(message, torch.zeros(2), hard=True).tolist() == [1.0, 0.0]
    torch.testing.assert_close(
        bits(message, torch.tensor([1.0, 1.0]), hard=False), torch.tensor([1.5, -1.0]).sigmoid()
    )
