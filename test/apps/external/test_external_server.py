"""The server of external simulators: answers and refused messages, without sockets."""

import math

import pytest
from external import (
    AGENTS,
    Clock,
    ManualClient,
    RecordingConnection,
    encode_values,
    f32,
    make_server,
)

from torchrl_marl.apps.external.server import ActionServer
from torchrl_marl.apps.external.wire import InvalidMessageError


def answer_to(server, pen):
    server.flush()
    return pen.connection.read()


def test_waiting_clients_are_answered_in_one_batch():
    calls = []

    def policy(td):
        calls.append(td["walker", "observation"][..., 0].tolist())
        td["walker", "action"] = td["walker", "observation"][..., 1:2] * 2
        return td

    server = make_server(policy)
    pens = [ManualClient(server, name) for name in "abc"]
    server.version = 7
    for i, pen in enumerate(pens):
        pen.step(1, 0, encode_values(i, 10 + i))
    server.flush()
    assert calls == [[[0, 10], [1, 11], [2, 12]]]
    for i, pen in enumerate(pens):
        assert pen.connection.read() == {
            "type": "actions", "episode": 1, "t": 0, "version": 7,
            "actions": {"walker_0": [2.0 * i], "walker_1": [20.0 + 2 * i]},
        }  # fmt: skip
    assert server.counts["steps"] == 3 and server.counts["batches"] == 1


def test_agents_in_the_observations_get_actions():
    server = make_server()
    pen = ManualClient(server)
    pen.step(1, 0, encode_values(None, 4))
    assert answer_to(server, pen)["actions"] == {"walker_1": [4.0]}
    pen.step(1, 1, {"walker_1": [1, 2, 3], "walker_0": [0.5, 0, 0]})  # any order, as lists
    assert answer_to(server, pen)["actions"] == {"walker_0": [0.5], "walker_1": [1.0]}
    pen.step(1, 2, {"walker_0": f32([3, 3, 3]), "walker_1": [2.0, 2.0, 2.0]})  # both forms
    assert answer_to(server, pen)["actions"] == {"walker_0": [3.0], "walker_1": [2.0]}
    pen.send(episode=1, t=3)
    assert answer_to(server, pen)["actions"] == {}


def test_several_kinds_of_agents():
    def policy(td):
        td["cat", "action"] = td["cat", "observation"].sum(-1, keepdim=True)
        td["mouse", "action"] = td["mouse", "observation"][..., 0].long()
        return td

    agents = {
        "cat": {"n": 1, "observation": 2, "action": 1},
        "mouse": {"n": 2, "observation": 1, "action": {"n_actions": 5}},
    }
    server = make_server(policy, agents)
    pen = ManualClient(server, agents=agents)
    pen.step(1, 0, {"cat_0": f32([1, 2]), "mouse_0": f32([3]), "mouse_1": f32([4])})
    expected = {"cat_0": [3.0], "mouse_0": 3, "mouse_1": 4}
    assert answer_to(server, pen)["actions"] == expected
    pen.step(1, 1, {"mouse_1": f32([2])})
    assert answer_to(server, pen)["actions"] == {"mouse_1": 2}


def test_repeated_message_gets_same_answer_and_late_one_none():
    draws = iter(range(10))

    def policy(td):
        td["walker", "action"] = td["walker", "observation"][..., :1] * 0 + next(draws)
        return td

    server = make_server(policy)
    pen = ManualClient(server)
    pen.step(1, 0)
    first = answer_to(server, pen)
    pen.connect()  # the answer was lost with the connection
    pen.step(1, 0)
    assert pen.connection.read() == first
    pen.step(1, 1)
    pen.connect()  # before the answer was there
    pen.step(1, 1)
    assert answer_to(server, pen)["actions"] == {"walker_0": [1.0], "walker_1": [1.0]}
    assert pen.connection.read() is None
    pen.step(1, 0)
    assert answer_to(server, pen) is None
    found = {name: server.counts[name] for name in ("steps", "duplicates", "late", "reconnects")}
    assert found == {"steps": 2, "duplicates": 2, "late": 1, "reconnects": 2}


def test_reconnecting_client_replaces_its_old_connection():
    server = make_server()
    pen = ManualClient(server)
    before = pen.connection
    pen.connect()
    assert "another connection" in before.refusals[0]
    server.lost(pen.client, before)  # the old one closes later
    assert pen.client.connection is pen.connection


NAN, MASKED = (
    math.nan,
    {"walker": {"n": 2, "observation": 3, "action": {"n_actions": 2, "mask": True}}},
)


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ({"type": "dance"}, "type is 'dance', expected 'step' or 'end'"),
        ({"episode": "1"}, "episode is '1' and t 1"),
        ({"t": 2}, "t is 2, expected 1, the next step of episode 1"),
        ({"t": True}, "expected whole numbers"),
        ({"observations": [1]}, "observations are [1], expected a map"),
        ({"observations": {"walker_2": f32([0, 0, 0])}}, "agent 'walker_2' is not declared"),
        ({"observations": {"walker_0": f32([0, 0])}}, "'walker_0' has 8 bytes, expected 3 float32"),
        ({"observations": {"walker_0": [0, 0]}}, "'walker_0' has 2 numbers, expected 3"),
        ({"observations": {"walker_0": [0, 0, "x"]}}, "'walker_0' has 'x', expected finite"),
        ({"observations": {"walker_0": [0, 0, NAN]}}, "has nan, expected finite"),
        ({"observations": {"walker_0": [0, 0, 1e300]}}, "has 1e+300, expected finite"),
        ({"observations": {"walker_0": "xyz"}}, "'walker_0' has 'xyz', expected 3"),
        ({"observations": encode_values(1, NAN)}, "agent 'walker_1' has NaN or a number above"),
        ({"rewards": {"walker_0": NAN}}, "agent 'walker_0': its reward is nan"),
        ({"rewards": {"walker_0": -1.1e6}}, "has NaN or a number above 1e+06 (max_number)"),
        ({"observations": encode_values(1, 3e38)}, "'walker_1' has NaN or a number above 1e+06"),
        ({"episode": 2, "t": 5}, "step 5 is the first message of episode 2, expected a step with"),
        ({"type": "end", "episode": 2, "t": 0}, "end 0 is the first message of episode 2"),
        ({"rewards": {"walker_0": True}}, "its reward is True, expected a number"),
        ({"rewards": {"walker_9": 1.0}}, "agent 'walker_9' is not declared"),
        ({"terminated": "walker_0"}, "terminated is 'walker_0', expected a list"),
        ({"terminated": ["wolf_0"]}, "agent 'wolf_0' is not declared"),
        ({"type": "end", "truncated": "no"}, "truncated is 'no', expected true or false"),
        ({"state": f32([1, 2])}, "a state is sent, expected none; declare its state_size"),
        ({"action_masks": {"walker_1": [1, 0]}}, "'walker_1': an action_mask is sent, expected"),
        ({"action_masks": {"walker_7": [1, 0]}}, "agent 'walker_7' is not declared"),
        ({"action_masks": [1, 0]}, "action_masks are [1, 0], expected a map"),
    ],
)  # fmt: skip
def test_invalid_message_drops_only_its_client(message, said):
    server = make_server()
    pen, other = ManualClient(server, "a"), ManualClient(server, "b")
    for one in (pen, other):
        one.step(1, 0)
        answer_to(server, one)
    kind = message.pop("type", "step")
    pen.send(kind, **{"episode": 1, "t": 1, "observations": encode_values(0), **message})
    other.step(1, 1, encode_values(5))
    server.flush()
    [why] = pen.connection.refusals
    assert said in why and why.endswith(".")
    assert pen.connection.read() is None
    assert other.connection.read()["actions"] == {"walker_0": [5.0], "walker_1": [5.0]}
    assert list(server.clients) == ["b"] and server.counts["refused"] == 1
    assert server.counts["truncated"] == 1  # its episode


def test_observation_of_terminated_agent_is_refused():
    server = make_server()
    pen = ManualClient(server)
    pen.step(1, 0)
    pen.step(1, 1) if answer_to(server, pen) is None else None
    pen.step(1, 1, encode_values(0, None), terminated=["walker_1"])
    assert answer_to(server, pen)["actions"] == {"walker_0": [0.0]}
    pen.step(1, 2)
    server.flush()
    assert "'walker_1' has terminated in this episode" in pen.connection.refusals[0]


def test_final_observation_gets_no_action():
    server = make_server()
    pen = ManualClient(server)
    pen.step(1, 0)
    answer_to(server, pen)
    pen.step(1, 1, encode_values(3, 4), terminated=["walker_1"])
    assert answer_to(server, pen)["actions"] == {"walker_0": [3.0]}
    pen.end(1, 2, encode_values(5, 6))  # and at the end all may be seen
    assert answer_to(server, pen)["actions"] == {} and not pen.connection.refusals


def test_errors_of_several_clients_are_all_reported():
    server = make_server()
    pens = [ManualClient(server, name) for name in "abc"]
    for pen in pens:
        pen.step(1, 0)
    server.flush()
    pens[1].step(1, 1, encode_values(0, None), terminated=["walker_1"])
    server.flush()
    pens[0].step(1, 1, encode_values(NAN))
    pens[1].step(1, 2)
    pens[2].step(1, 1)
    server.flush()
    assert "NaN" in pens[0].connection.refusals[0]
    assert "has terminated" in pens[1].connection.refusals[0]
    assert list(server.clients) == ["c"]


def test_episode_ends_when_all_agents_have_terminated():
    server = make_server()
    pen = ManualClient(server)
    pen.step(1, 0)
    answer_to(server, pen)
    pen.step(1, 1, {"walker_0": f32([1, 1, 1])}, terminated=["walker_0", "walker_1"])
    assert answer_to(server, pen)["actions"] == {}
    pen.end(1, 2)
    assert answer_to(server, pen)["actions"] == {}
    pen.step(2, 0, encode_values(3))
    assert answer_to(server, pen)["actions"] == {"walker_0": [3.0], "walker_1": [3.0]}
    assert server.counts["truncated"] == 0


def test_step_after_the_end_is_refused():
    server = make_server()
    pen = ManualClient(server)
    pen.step(1, 0)
    pen.client.busy = False
    pen.end(1, 1)
    server.flush()
    pen.step(1, 2)
    assert pen.connection.refusals == ["episode 1 has ended, expected the next one's first step."]


def test_second_end_of_an_episode_is_refused():
    server = make_server()
    pen = ManualClient(server)
    pen.step(1, 0)
    answer_to(server, pen)
    pen.end(1, 1)
    answer_to(server, pen)
    pen.end(1, 2)
    assert pen.connection.refusals == ["episode 1 has ended, expected the next one's first step."]


def test_message_before_the_answer_is_refused():
    server = make_server()
    pen = ManualClient(server)
    pen.step(1, 0)
    pen.step(1, 1)
    assert "expected one message at a time" in pen.connection.refusals[0]
    server.flush()  # its pending message is dropped, too
    assert pen.connection.read() is None and not server.clients


@pytest.mark.parametrize(
    ("masks", "said"),
    [
        ({"walker_0": [1, 0]}, "agent 'walker_1': its action_mask is None"),
        ({"walker_0": [1, 0], "walker_1": [1]}, "its action_mask is [1], expected 2 flags"),
        ({"walker_0": [1, 0], "walker_1": b"\0\0"}, "'walker_1' acts without a legal action"),
        (None, "agent 'walker_0': its action_mask is None"),
    ],
)
def test_invalid_action_masks_are_refused(masks, said):
    def policy(td):
        td["walker", "action"] = td["walker", "action_mask"].long().argmax(-1)
        return td

    server = make_server(policy, MASKED)
    pen = ManualClient(server, agents=MASKED)
    pen.step(1, 0, action_masks={"walker_0": [False, True], "walker_1": b"\1\0"})
    assert answer_to(server, pen)["actions"] == {"walker_0": 1, "walker_1": 0}
    pen.step(1, 1, action_masks=masks)
    server.flush()
    assert said in pen.connection.refusals[0]


@pytest.mark.parametrize(
    ("hello", "said"),
    [
        ({"protocol": 2}, "the protocol is 2, expected 1"),
        ({"client": ""}, "client is '', expected a unique name"),
        ({"agents": {}}, "agents are {}, expected kinds of agents"),
        ({"agents": {"wolf": AGENTS["walker"]}}, "agents 'wolf' are declared,"),
        ({"agents": {**AGENTS, "wolf": AGENTS["walker"]}}, "agents 'wolf' are declared, expected"),
        ({"agents": {"walker": {**AGENTS["walker"], "n": 3}}}, "declared as {'n': 3, "),
        ({"agents": {"walker": {"n": 2, "observation": 3}}}, "has no 'action', expected"),
        ({"agents": {"walker": {"n": 9999, "observation": 99, "action": 1}}}, "'walker' are decl"),
        ({"state_size": 4}, "state_size is declared as 4, expected None"),
        ({"type": "step"}, "the first message is 'step', expected 'hello'"),
    ],
)
def test_invalid_hello_is_refused(hello, said):
    server = make_server()
    whole = {"type": "hello", "protocol": 1, "client": "a", "agents": AGENTS, **hello}
    with pytest.raises(InvalidMessageError) as refused:
        server.hello(whole, b"", RecordingConnection())
    assert said in str(refused.value)
    assert not server.clients


def test_token_requires_a_valid_proof():
    import hmac

    server = make_server(token="secret")
    hello = {"type": "hello", "protocol": 1, "client": "a", "agents": AGENTS}
    right = hmac.new(b"secret", b"nonce", "sha256").digest()
    for proof in (None, b"", "secret", right[:-1], hmac.new(b"other", b"nonce", "sha256").digest()):
        with pytest.raises(InvalidMessageError, match="of the token is wrong or missing"):
            server.hello({**hello, "proof": proof}, b"nonce", RecordingConnection())
    with pytest.raises(InvalidMessageError, match="of the token is wrong"):
        server.hello({**hello, "proof": right}, b"another nonce", RecordingConnection())
    server.hello({**hello, "proof": right}, b"nonce", RecordingConnection())


def test_first_client_declares_the_agents():
    server = make_server(max_clients=2)
    fresh = type(server)(policy=server.policy)
    fresh.schedule = server.schedule
    pen = ManualClient(fresh, agents=MASKED)
    assert fresh.declared.settings()["agents"] == MASKED
    with pytest.raises(InvalidMessageError, match="expected {'n': 2"):
        ManualClient(fresh, "other")
    assert fresh.clients == {"pen": pen.client}


def test_number_of_clients_is_limited():
    server = make_server(max_clients=2)
    first, _ = ManualClient(server, "a"), ManualClient(server, "b")
    with pytest.raises(InvalidMessageError, match="2 clients are connected, expected no more"):
        ManualClient(server, "c")
    first.send("nonsense")
    ManualClient(server, "c")
    assert sorted(client.slot for client in server.clients.values()) == [0, 1]


def test_disconnected_and_idle_clients_are_dropped():
    clock = Clock()
    server = make_server(clock=clock, grace=2.0, idle_timeout=10.0)
    away, silent, held = (ManualClient(server, name) for name in ("away", "silent", "held"))
    away.step(1, 0)
    silent.step(1, 0)
    server.flush()
    server.lost(away.client, away.connection)
    server.policy = None  # the server does not answer
    held.step(1, 0)
    server.flush()
    clock.now = 1.9
    server.reap()
    assert len(server.clients) == 3
    clock.now = 2.1
    server.reap()
    assert list(server.clients) == ["silent", "held"] and server.counts["truncated"] == 1
    clock.now = 10.1
    server.reap()
    assert list(server.clients) == ["held"]  # it waits for the server
    assert "no message for 10 s" in silent.connection.refusals[0]
    assert server.counts["truncated"] == 2


def test_oversized_declaration_is_refused():
    server = ActionServer(max_message_bytes=1000)
    large = {"walker": {"n": 10_000, "observation": 1_000_000, "action": 2}}
    with pytest.raises(
        InvalidMessageError, match="have 40,000,080,000 bytes, expected 1,000 at most; raise max"
    ):
        ManualClient(server, agents=large)
    assert server.declared is None
    many = {"walker": {"n": 10, "observation": 1, "action": {"n_actions": 100}}}
    with pytest.raises(InvalidMessageError, match="have 1,040 bytes"):
        ManualClient(server, agents=many)
    ManualClient(server)
    assert server.declared is not None
