"""Exported communicating agents act as their team: every kind of communication, with deaths."""

import numpy as np
import pytest
import torch
from exported import check_players_alone, team_policy
from torchrl.data import Categorical, Unbounded
from torchrl.envs import DTypeCastTransform, TransformedEnv

from torchrl_marl import AgentSpec, TeamSpec
from torchrl_marl.apps.export import Player, export_agents
from torchrl_marl.apps.export.agent import agents_of, find_agents
from torchrl_marl.apps.export.check import InMemory, check_players
from torchrl_marl.apps.export.player import PlayerError
from torchrl_marl.envs import with_memory
from torchrl_marl.envs.toy import Arena
from torchrl_marl.errors import ConfigError
from torchrl_marl.modules import (
    MemoryConfig,
    RecurrentNetworkConfig,
    make_actor,
    make_deterministic_actor,
    make_q_actor,
)
from torchrl_marl.modules.config import DrawnCommunicationConfig

pytestmark = pytest.mark.clients

TALKS = {
    "commnet, two rounds": {"kind": "commnet", "rounds": 2},
    "commnet in a ring": {"kind": "commnet", "links": "ring", "gate": True},
    "tarmac": {"kind": "tarmac", "rounds": 3, "dropout": 0.3},
    "tarmac, nearest": {"kind": "tarmac", "links": "nearest", "nearest": 1, "position": [4, 5]},
    "graph": {"kind": "graph", "links": "radius", "radius": 0.5, "position": [4, 5]},
    "symbols": {"kind": "commnet", "discrete": "gumbel"},
    "bits": {"kind": "tarmac", "discrete": "dial"},
    "commnet, later": {"kind": "commnet", "delay": 1, "gate": True},
    "graph, later": {"kind": "graph", "delay": 2, "links": "nearest", "position": [4, 5]},
    "bits, later": {"kind": "tarmac", "delay": 1, "discrete": "dial"},
    "bicnet": {"kind": "bicnet"},
    "bicnet of LSTMs with gates": {"kind": "bicnet", "cell": "lstm", "gate": True},
}


def arena(**settings):
    sizes = {"n_agents": 4, "late_spawn": 1, "years": 2, "lives": 3, "max_steps": 12, "seed": 0}
    return Arena(2, **sizes, **settings)


def config_of(talk, memory="none", order="before", **settings):
    sizes = {} if talk["kind"] == "bicnet" else {"message_size": 5}
    talk = {**sizes, **talk, "order": order, **settings.pop("of", {})}
    return RecurrentNetworkConfig(
        [8],
        memory=MemoryConfig(memory, size=6),
        communication=DrawnCommunicationConfig(**talk),
        **settings,
    )


PARTS = ["alone", "before a memory", "after a memory"]
CASES = [(talk, PARTS[i % 3]) for i, talk in enumerate(TALKS)]
CASES += [(talk, parts) for talk in ("tarmac", "bicnet") for parts in PARTS]


@pytest.mark.parametrize(("talk", "parts"), dict.fromkeys(CASES))
def test_every_kind_of_communication(talk, parts):
    memory, order = "none" if parts == "alone" else "gru", parts.partition(" ")[0]
    order = "before" if parts == "alone" else order
    found = check_players_alone(
        arena(), make_actor, config=config_of(TALKS[talk], memory, order), normed=True
    )
    assert found.actions > 24
    assert (found.differ, found.largest < 1e-5) == (0, True)


@pytest.mark.parametrize("make", [make_deterministic_actor, make_q_actor])
@pytest.mark.parametrize("kind", ["commnet", "bicnet"])
def test_q_and_deterministic_actors(make, kind):
    found = check_players_alone(arena(), make, config=config_of({"kind": kind}, "lstm", "after"))
    assert (found.differ, found.largest < 1e-5) == (0, True)


def test_positions_in_double_precision():
    """The team acts as on the same numbers in float32, and so do single agents."""
    keys = {"in_keys": [("agents", "observation")]}
    double = DTypeCastTransform(torch.float32, torch.float64, **keys)
    env = TransformedEnv(arena(), double)
    config = config_of(TALKS["graph"], "gru")
    found = check_players_alone(env, make_actor, config=config, normed=True)
    assert (found.differ, found.largest < 1e-5, found.actions > 24) == (0, True, True)

    policy = team_policy(TeamSpec.from_env(env).groups.values(), make_actor, config=config)
    td = with_memory(env, policy).reset()
    single = td.clone().set(("agents", "observation"), td["agents", "observation"].float())
    assert td["agents", "observation"].dtype is torch.float64
    logits = [policy(x)["agents", "logits"] for x in (td, single)]
    torch.testing.assert_close(*logits, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("across", [False, True])
def test_groups_of_kinds(across):
    config = config_of({"kind": "tarmac"}, "lru", sharing="none", of={"across_groups": across})
    found = check_players_alone(arena(kinds=2, n_groups=2), make_actor, config=config, joined=True)
    assert (found.differ, found.largest < 1e-5) == (0, True)


def test_export_requires_the_groups_that_send_messages(tmp_path):
    groups = TeamSpec.from_env(arena(n_groups=2)).groups.values()
    config = config_of({"kind": "tarmac"}, of={"across_groups": True})
    policy = team_policy(groups, make_actor, config=config, joined=True)
    with pytest.raises(ConfigError, match="'agent_0_0' receives messages of group 'agents_1'"):
        export_agents(find_agents(policy, "agent_0_0"), tmp_path, "pt2")
    apart = team_policy(groups, make_actor, config=config_of({"kind": "tarmac"}), joined=True)
    assert agents_of(apart)["agent_0_0"].sender_groups() == ["agents_0"]


@pytest.mark.parametrize(("kind", "format"), [
    ("tarmac", "pt2"), ("later", "onnx"), ("bicnet", "onnx"), ("bicnet", "pt2"),
])  # fmt: skip
def test_exported_files_act_as_the_team(kind, format, tmp_path):
    """One agent acts with its files, the others with their modules.

    ONNX files of tarmac are tested in ``test_decentralized.py``."""
    if format == "onnx":
        pytest.importorskip("onnxruntime")
        pytest.importorskip("onnxscript")
    env = arena(action_mask=True)
    talks = {"bicnet": {}, "tarmac": {"rounds": 2}, "later": {"kind": "tarmac", "delay": 1}}
    config = config_of({"kind": kind, "gate": True, **talks[kind]}, "gru")
    policy = team_policy(TeamSpec.from_env(env).groups.values(), make_actor, config=config)
    folders = export_agents(find_agents(policy, "agent_2"), tmp_path, format)
    players = {name: Player(folder, trust=True) for name, folder in folders.items()}
    found = check_players(with_memory(env, policy), policy, players, steps=12)
    assert (found.differ, found.largest < 1e-5) == (0, True)
    assert found.actions < 13


def players(**talk):
    """Three communicating agents."""
    team = TeamSpec([AgentSpec("car", 3, Unbounded((3,)), Categorical(2))])
    groups = team.groups.values()
    policy = team_policy(groups, make_actor, config=config_of({"kind": "commnet", **talk}))
    return [InMemory(agent, seed=0) for agent in agents_of(policy).values()]


class TestPlayer:
    def test_messages_in_the_inbox_affect_the_action(self):
        one, *_ = players(rounds=2)
        said = np.arange(5, dtype=np.float32)
        seen = np.ones(3)

        def acts(**inbox):
            one.speak(seen)
            one.hear({})
            one.act(inbox=inbox)
            return one.parameters["logits"]

        alone = acts()
        assert (acts(car_1=None) == alone).all()
        assert (acts(car_0=said) == alone).all(), "nobody hears itself"
        assert abs(acts(car_1=said) - alone).max() > 1e-3
        np.testing.assert_allclose(acts(car_1=said), acts(car_1=said, car_2=said), rtol=1e-5)
        assert (acts(car_1=said) == acts(car_2=said)).all()

    def test_interface_describes_the_communication(self):
        one, *_ = players(rounds=2, links="ring")
        talk = one.interface["communication"]
        assert (talk["hears"], talk["message_size"], one.rounds) == (["car_1", "car_2"], 5, 2)

    def test_gates_are_sampled(self):
        one, *_ = players(gate=True)
        said = [one.speak(np.ones(3), deterministic=False) is None for _ in range(100)]
        assert 0 < sum(said) < 100
        assert len({one.speak(np.ones(3)) is None for _ in range(10)}) == 1

    def test_calls_in_wrong_order_raise(self):
        one, *_ = players()
        with pytest.raises(PlayerError, match="'car_0' has not spoken in this step"):
            one.act(inbox={})
        one.speak(np.ones(3))
        with pytest.raises(PlayerError, match="has received all rounds but the last of 1"):
            one.hear({})
        with pytest.raises(PlayerError, match="does not relay"):
            one.relay()
        with pytest.raises(PlayerError, match="message of 'bus', expected one of car_0, car_1"):
            one.act(inbox={"bus": np.ones(5)})
        with pytest.raises(PlayerError, match=r"'car_1' has shape \(4,\), expected float32 \(5,\)"):
            one.act(inbox={"car_1": np.ones(4)})

    def test_missing_round_of_messages_raises(self):
        one, *_ = players(rounds=2)
        one.speak(np.ones(3))
        with pytest.raises(PlayerError, match="has received 0 of 2 rounds, expected all but"):
            one.act(inbox={})
        one.hear({})
        with pytest.raises(PlayerError, match="it acts on the observation given to speak"):
            one.act(np.zeros(3), inbox={})
        assert one.act(inbox={}).shape == ()
        relay, *_ = players(kind="bicnet")
        relay.speak(np.ones(3))
        relay.relay()
        with pytest.raises(PlayerError, match="has not relayed both ways"):
            relay.act()
        relay.relay(back=True)
        assert relay.act().shape == ()

    def test_delayed_messages(self):
        """Messages take effect after the delay; those from before the first step do not."""
        one, *_ = players(delay=2)
        said, seen = np.arange(5, dtype=np.float32), np.ones(3)

        def acts(told):
            one.reset()
            found = []
            for t in range(5):
                one.speak(seen)
                one.hear({"car_1": said if told == t - 2 else None}, ago=2)
                one.act()
                found.append(one.parameters["logits"])
            return np.stack(found)

        assert (acts(-1) == acts(None)).all() and (acts(-2) == acts(None)).all()
        changed = (acts(0) != acts(None)).any(-1)
        assert changed.tolist() == [False, False, True, False, False]
        one.reset()
        one.speak(seen)
        with pytest.raises(PlayerError, match="uses messages 2 steps later; call act()"):
            one.act(inbox={"car_1": said})
        with pytest.raises(PlayerError, match="messages from 3 steps ago, expected 0 to 2"):
            one.hear({"car_1": said}, ago=3)
        with pytest.raises(PlayerError, match="message of 'bus', expected one of car_0"):
            one.hear({"bus": said})

    def test_agent_without_communication_cannot_speak(self):
        team = TeamSpec([AgentSpec("car", 1, Unbounded((3,)), Categorical(2))])
        agent = agents_of(make_actor(team.groups["car"]))["car_0"]
        with pytest.raises(PlayerError, match="does not communicate"):
            InMemory(agent).speak(torch.ones(3))
