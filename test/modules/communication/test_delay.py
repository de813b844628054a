"""Delayed channels: sequences and single steps, receivers of messages, deaths and births."""

import pytest
import torch
from tensordict import TensorDict
from torchrl.modules import set_recurrent_mode

from torchrl_marl import TeamSpec
from torchrl_marl.envs.toy import Arena
from torchrl_marl.errors import ConfigError
from torchrl_marl.modules import (
    CommunicationConfig,
    DrawnCommunicationConfig,
    MemoryConfig,
    RecurrentNetworkConfig,
    make_actor,
)
from torchrl_marl.modules.communication import Channel
from torchrl_marl.modules.communication.channel import make_delay
from torchrl_marl.modules.memory.cells import remember
from torchrl_marl.modules.memory.states import state_size

T, N, SEEN = 9, 3, 6
KINDS = {
    "commnet": CommunicationConfig("commnet", message_size=4, delay=1),
    "tarmac": CommunicationConfig("tarmac", message_size=4, delay=2),
    "graph": CommunicationConfig("graph", message_size=4, links="nearest", delay=1),
    "spoken of memory": DrawnCommunicationConfig("tarmac", message_size=4, delay=1, order="after"),
}


def actor_of(talk, memory="none"):
    """Actor of three agents, some of which may be dead."""
    group = TeamSpec.from_env(Arena(1, n_agents=N, lives=2, late_spawn=1)).groups["agents"]
    config = RecurrentNetworkConfig([8], memory=MemoryConfig(memory, size=6), communication=talk)
    torch.manual_seed(0)
    actor = make_actor(group, config)
    with torch.no_grad():  # an untrained head gives messages little weight
        for parameter in actor.parameters():
            parameter.mul_(3)
    return actor


def some_steps(batch=4):
    """Random steps with deaths, births and ends of episodes."""
    torch.manual_seed(1)
    init = torch.rand(batch, T, N, 1) < 0.2
    init[:, 0] = True
    init[:2, 5] = True
    mask = torch.rand(batch, T, N) < 0.8
    return {"observation": torch.randn(batch, T, N, SEEN), "mask": mask, "is_init": init}


def logits_of(actor, steps, state=None):
    """Logits of single steps, and the last state."""
    batch, n_steps = steps["observation"].shape[:2]
    size = state_size(actor)
    state = torch.zeros(batch, N, size) if state is None else state
    found = []
    for t in range(n_steps):
        rows = {name: value[:, t] for name, value in steps.items()}
        td = TensorDict({"agents": {**rows, "hidden": state}}, [batch])
        acted = actor[0](td)
        state = acted.get(("next", "agents", "hidden"), state)
        found.append(acted["agents", "logits"])
    return torch.stack(found, 1), state


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("steps", [1, 2, 3])
def test_delay_returns_message_of_that_many_own_steps_before(steps, masked):
    """Over a sequence and resumed from its middle, against a list of each agent's messages."""
    data = some_steps()
    x, init, mask = data["observation"], data["is_init"], data["mask"] if masked else None
    delay = make_delay(SEEN, steps)
    start = torch.zeros(4, 1, N, SEEN * steps)
    with set_recurrent_mode(True):
        whole, _ = remember(delay, x, start, init, mask)
        first = None if mask is None else mask[:, :4]
        _, states = remember(
            delay, x[:, :4], torch.zeros(4, 1, N, SEEN * steps), init[:, :4], first
        )
        later = None if mask is None else mask[:, 4:]
        rest, _ = remember(delay, x[:, 4:], states[:, 3:], init[:, 4:], later)
    for e in range(4):
        for i in range(N):
            heard = []
            for t in range(T):
                heard = [] if init[e, t, i] else heard
                if mask is not None and not mask[e, t, i]:
                    continue
                expected = heard[-steps] if len(heard) >= steps else torch.zeros(SEEN)
                assert torch.equal(whole[e, t, i], expected)
                assert t < 4 or torch.equal(rest[e, t - 4, i], expected)
                heard.append(x[e, t, i])


@pytest.mark.parametrize("memory", ["none", "gru"])
@pytest.mark.parametrize("name", KINDS)
def test_sequence_equals_single_steps(name, memory):
    actor, steps = actor_of(KINDS[name], memory), some_steps()
    alone, _ = logits_of(actor, steps)
    hidden = torch.zeros(4, T, N, state_size(actor))
    with set_recurrent_mode(True):
        td = TensorDict({"agents": {**steps, "hidden": hidden}}, [4, T])
        whole = actor[0](td)["agents", "logits"]
    living = steps["mask"].unsqueeze(-1)
    torch.testing.assert_close(
        torch.where(living, whole, 0.0), torch.where(living, alone, 0.0), rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("delay", [0, 1, 2])
@pytest.mark.parametrize("kind", ["commnet", "tarmac", "graph"])
def test_message_arrives_after_the_delay(kind, delay):
    """Agent 0's observation changes in step 3; the others react once, after the delay."""
    actor = actor_of(CommunicationConfig(kind, message_size=4, delay=delay))
    steps = {
        "observation": torch.randn(1, T, N, SEEN),
        "mask": torch.ones(1, T, N, dtype=torch.bool),
        "is_init": torch.zeros(1, T, N, 1, dtype=torch.bool),
    }
    changed = {**steps, "observation": steps["observation"].clone()}
    changed["observation"][:, 3, 0] += 1.0
    before, after = (logits_of(actor, data)[0] for data in (steps, changed))
    moved = (before != after).any(-1)[0]
    assert moved[:, 0].nonzero().flatten().tolist()[0] == 3
    for other in (1, 2):
        assert moved[:, other].nonzero().flatten().tolist() == [3 + delay]


@pytest.mark.parametrize(("event", "reached"), [
    ("nothing", [1, 2]),
    ("the speaker dies", [1, 2]),
    ("a listener dies", [2]),
    ("a listener is born", [2]),
    ("the speaker is born again", [1, 2]),
    ("the episode ends", []),
])  # fmt: skip
def test_receivers_of_last_message_at_deaths_births_and_resets(event, reached):
    """Agent 0 sends a message in step 3. The event happens in step 4."""
    actor = actor_of(KINDS["commnet"], "gru")
    steps = {
        "observation": torch.randn(1, 5, N, SEEN),
        "mask": torch.ones(1, 5, N, dtype=torch.bool),
        "is_init": torch.zeros(1, 5, N, 1, dtype=torch.bool),
    }
    changes = {
        "the speaker dies": ("mask", 0),
        "a listener dies": ("mask", 1),
        "a listener is born": ("is_init", 1),
        "the speaker is born again": ("is_init", 0),
        "the episode ends": ("is_init", slice(None)),
    }
    if event in changes:
        leaf, who = changes[event]
        steps[leaf][:, 4, who] = leaf == "is_init"
    changed = {**steps, "observation": steps["observation"].clone()}
    changed["observation"][:, 3, 0] += 1.0
    before, after = (logits_of(actor, data)[0][0] for data in (steps, changed))
    assert torch.equal(before[3, 1:], after[3, 1:])
    living = [i for i in (1, 2) if steps["mask"][0, 4, i]]
    assert [i for i in living if not torch.equal(before[4, i], after[4, i])] == reached


def test_messages_from_before_an_agents_birth_are_dropped():
    """Agent 0 sends a message in step 0. Agent 1 is born in step 1."""
    actor = actor_of(CommunicationConfig("tarmac", message_size=4, delay=1))
    steps = {
        "observation": torch.randn(1, 2, N, SEEN),
        "mask": torch.tensor([[[True, False, True], [True, True, True]]]),
        "is_init": torch.tensor([[[True, False, True], [False, True, False]]]).unsqueeze(-1),
    }
    changed = {**steps, "observation": steps["observation"].clone()}
    changed["observation"][:, 0, 0] += 1.0
    before, after = (logits_of(actor, data)[0][0, 1] for data in (steps, changed))
    assert torch.equal(before[1], after[1]) and not torch.equal(before[2], after[2])


@pytest.mark.parametrize(("settings", "words"), [
    ({"kind": "bicnet"}, "communication.kind is 'bicnet', whose messages pass along the agents"),
    ({"kind": "tarmac", "rounds": 2}, "communication.rounds is 2: a further round"),
], ids=str)  # fmt: skip
def test_channels_without_delay_support_raise(settings, words):
    with pytest.raises(ConfigError, match=words):
        Channel(8, CommunicationConfig(**settings, delay=1), n_agents=3)


def test_state_size_with_and_without_delay():
    own = CommunicationConfig("tarmac", message_size=4)
    assert state_size(actor_of(own)) == 0
    assert state_size(actor_of(own, "gru")) == 6
    later = CommunicationConfig("tarmac", message_size=4, delay=2)
    assert state_size(actor_of(later)) == 8
    assert state_size(actor_of(later, "gru")) == 14
