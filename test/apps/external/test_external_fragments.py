"""Fragments of external clients: exact arrays, and the scheduling of fragments."""

import numpy as np
import pytest
from external import ManualClient, encode_values, make_server

from torchrl_marl.apps.external.client_slots import Fragments


def recording(n_steps=3, per_batch=2, hold=True, **options):
    server = make_server(**options)
    server.recording = Fragments(n_steps, per_batch, ("walker",), server.max_clients, hold)
    server.recording.release()
    return server, server.recording


def say(server, pen, kind, *message, **more):
    """Sends one message; returns the actions of the answer, or None if there is none yet."""
    getattr(pen, kind)(*message, **more)
    server.flush()
    answer = pen.connection.read()
    return answer and answer["actions"]


def rows(fragment, *key):
    return fragment[key].tolist()


T, F = True, False


def test_arrays_of_two_fragments():
    """A whole episode in which walker_1 dies, then the first steps of another one."""
    server, fragments = recording()
    pen = ManualClient(server)
    say(server, pen, "step", 1, 0, encode_values(0, 10))
    say(server, pen, "step", 1, 1, encode_values(1, 11), rewards={"walker_0": 1, "walker_1": 2})
    more = {"rewards": {"walker_0": 3.0, "walker_1": 4.0}, "terminated": ["walker_1"]}
    server.version = 5
    say(server, pen, "step", 1, 2, encode_values(2, None), **more)
    say(server, pen, "end", 1, 3, rewards={"walker_0": 5.0, "walker_1": 100.0})
    say(server, pen, "step", 2, 0, encode_values(None, 30))
    say(
        server,
        pen,
        "step",
        2,
        1,
        encode_values(21, 31),
        rewards={"walker_0": 50.0, "walker_1": 7.0},
    )
    say(
        server,
        pen,
        "step",
        2,
        2,
        encode_values(22, None),
        rewards={"walker_0": 8.0, "walker_1": 9.0},
    )
    assert (
        say(server, pen, "step", 2, 3, encode_values(23, 33)) is None
    )  # its fragments are complete
    first, second = fragments.take()

    assert rows(first, "walker", "observation") == [
        [[x] * 3, [y] * 3] for x, y in ((0, 10), (1, 11), (2, 11))
    ]
    assert rows(first, "walker", "mask") == [[T, T], [T, T], [T, F]]
    assert rows(first, "walker", "action")[:2] == [[[0], [10]], [[1], [11]]]
    assert rows(first, "walker", "action")[2][0] == [2]
    assert rows(first, "walker", "done") == [[[F], [F]], [[F], [F]], [[F], [T]]]
    assert rows(first, "next", "walker", "reward") == [[[1], [2]], [[3], [4]], [[5], [0]]]
    assert (
        rows(first, "next", "walker", "observation")[:2] == rows(first, "walker", "observation")[1:]
    )
    assert rows(first, "next", "walker", "mask") == [[T, T], [T, F], [F, F]]
    assert rows(first, "next", "walker", "terminated") == [[[F], [F]], [[F], [T]], [[T], [T]]]
    assert not first["next", "walker", "truncated"].any()
    assert rows(first, "next", "done") == rows(first, "next", "terminated") == [[F], [F], [T]]
    assert rows(first, "collector", "policy_version") == [0, 0, 5]
    assert rows(first, "collector", "walker/episode_reward") == [1.5, 5.0, 10.0]
    assert rows(first, "collector", "walker/episode_length") == [1, 2, 3]
    assert rows(first, "collector", "walker/lived") == [T, T, T]
    assert rows(first, "collector", "traj_ids") == [0, 0, 0]

    # An agent earns nothing before its birth; a waiting agent does.
    assert rows(second, "walker", "mask") == [[F, T], [T, T], [T, F]]
    assert rows(second, "walker", "observation")[0] == [[0] * 3, [30] * 3]
    assert rows(second, "next", "walker", "reward") == [[[0], [7]], [[8], [9]], [[0], [0]]]
    assert rows(second, "next", "walker", "observation")[2] == [[23] * 3, [33] * 3]
    assert rows(second, "next", "walker", "mask") == [[T, T], [T, F], [T, T]]
    assert not second["next", "done"].any()
    assert rows(second, "collector", "walker/episode_reward") == [7.0, 15.5, 15.5]
    assert rows(second, "collector", "traj_ids") == [1, 1, 1]

    fragments.release()
    server.flush()
    assert pen.connection.read()["actions"] == {"walker_0": [23.0], "walker_1": [33.0]}


def test_truncation_includes_waiting_agents():
    server, fragments = recording(n_steps=2, per_batch=1)
    pen = ManualClient(server)
    say(server, pen, "step", 1, 0, encode_values(0, 10))
    say(server, pen, "step", 1, 1, encode_values(1, None))
    say(server, pen, "end", 1, 2, encode_values(2, None), truncated=True)
    [found] = fragments.take()
    assert rows(found, "next", "done") == rows(found, "next", "truncated") == [[F], [T]]
    assert rows(found, "next", "walker", "truncated") == [[[F], [F]], [[T], [T]]]
    assert rows(found, "next", "walker", "mask") == [[T, F], [T, T]]
    # Without a final observation, the last one is repeated.
    assert rows(found, "next", "walker", "observation")[1] == [[2] * 3, [10] * 3]
    assert not found["next", "terminated"].any()


def test_episode_with_all_agents_terminated_is_not_truncated():
    server, fragments = recording(n_steps=1, per_batch=2)
    pen = ManualClient(server)
    both = ["walker_0", "walker_1"]
    for episode, kind in ((1, "step"), (2, "end")):
        say(server, pen, "step", episode, 0)
        pen.send(kind, episode=episode, t=1, terminated=both, truncated=kind == "end")
        server.flush()
    for found in fragments.take():
        assert rows(found, "next", "terminated") == rows(found, "next", "done") == [[T]]
        assert not found["next", "truncated"].any() and not found["next", "walker", "mask"].any()


def test_client_with_complete_fragments_waits_for_slower_ones():
    server, fragments = recording(n_steps=2, per_batch=3)
    quick, slow = ManualClient(server, "quick"), ManualClient(server, "slow")
    say(server, slow, "step", 1, 0)
    for t in range(4):
        assert say(server, quick, "step", 1, t) is not None
    assert say(server, quick, "step", 1, 4) is None  # three fragments have begun
    assert fragments.take() is None and len(fragments.ready) == 2
    say(server, slow, "step", 1, 1)
    say(server, slow, "step", 1, 2)
    batch = fragments.take()
    versions = {x for one in batch for x in rows(one, "collector", "policy_version")}
    assert len(batch) == 3 and versions == {0}
    server.version = 1
    fragments.release()
    server.flush()
    assert quick.connection.read()["version"] == slow.connection.read()["version"] == 1


def test_without_hold_clients_continue_until_a_batch_is_ready():
    server, fragments = recording(n_steps=2, per_batch=2, hold=False)
    pen = ManualClient(server)
    assert all(say(server, pen, "step", 1, t) is not None for t in range(4))
    assert say(server, pen, "step", 1, 4) is None
    assert len(fragments.take()) == 2
    server.flush()
    assert pen.connection.read()["t"] == 4  # without a release


def test_fragment_of_a_dismissed_client_goes_to_the_next():
    server, fragments = recording(n_steps=4, per_batch=1)
    first = ManualClient(server, "first")
    for t, seen in enumerate((0, 1, 2)):
        say(server, first, "step", 1, t, encode_values(seen))
    second = ManualClient(server, "second")
    assert (
        say(server, second, "step", 1, 0, encode_values(20)) is None
    )  # the only fragment has begun
    server.dismiss(first.client)
    server.flush()
    assert second.connection.read()["actions"] == {"walker_0": [20.0], "walker_1": [20.0]}
    say(server, second, "step", 1, 1, encode_values(21), rewards={"walker_0": 1, "walker_1": 3})
    say(server, second, "step", 1, 2, encode_values(22))
    [found] = fragments.take()
    assert found["walker", "observation"][:, 0, 0].tolist() == [0, 1, 20, 21]
    assert found["next", "walker", "observation"][:, 0, 0].tolist() == [1, 2, 21, 22]
    assert rows(found, "next", "done") == rows(found, "next", "truncated") == [[F], [T], [F], [F]]
    assert rows(found, "next", "walker", "mask")[1] == [T, T]
    assert rows(found, "collector", "episode_known") == [T, F, T, T]
    assert rows(found, "collector", "walker/episode_length") == [1, 2, 1, 2]
    assert server.counts["truncated"] == 1


def test_new_client_in_the_same_slot_continues_the_fragment():
    server, fragments = recording(n_steps=2, per_batch=1, max_clients=1)
    first = ManualClient(server, "first")
    say(server, first, "step", 1, 0, encode_values(0))
    say(server, first, "step", 1, 1, encode_values(1))
    server.dismiss(first.client)
    second = ManualClient(server, "second")
    assert say(server, second, "step", 5, 0, encode_values(50)) is not None
    say(server, second, "end", 5, 1)
    [found] = fragments.take()
    assert found["walker", "observation"][:, 0, 0].tolist() == [0, 50]
    assert rows(found, "next", "truncated") == [[T], [F]]
    assert rows(found, "next", "terminated") == [[F], [T]]


def test_unfinished_episode_is_truncated_by_the_next():
    server, fragments = recording(n_steps=2, per_batch=1)
    pen = ManualClient(server)
    say(server, pen, "step", 1, 0, encode_values(0))
    say(server, pen, "step", 1, 1, encode_values(1))
    say(server, pen, "step", 2, 0, encode_values(7))
    say(server, pen, "step", 2, 1, encode_values(8))
    [found] = fragments.take()
    assert found["walker", "observation"][:, 0, 0].tolist() == [0, 7]
    assert rows(found, "next", "truncated") == [[T], [F]]
    assert server.counts["truncated"] == 1


def test_episode_with_unknown_start_is_recorded_but_not_counted():
    server, fragments = recording(n_steps=3, per_batch=1)
    pen = ManualClient(server)
    say(server, pen, "step", 9, 30, encode_values(0))  # the server was restarted
    say(server, pen, "end", 9, 31)
    say(server, pen, "step", 10, 0)
    say(server, pen, "step", 10, 1)
    say(server, pen, "step", 10, 2)
    [found] = fragments.take()
    assert rows(found, "collector", "episode_known") == [F, T, T]
    assert rows(found, "next", "terminated") == [[T], [F], [F]]


def test_refused_message_is_not_recorded():
    server, fragments = recording(n_steps=2, per_batch=1)
    pen = ManualClient(server)
    say(server, pen, "step", 1, 0, encode_values(0))
    say(server, pen, "step", 1, 1, encode_values(1))
    say(server, pen, "step", 1, 2, encode_values(float("nan")))
    assert not server.clients
    other = ManualClient(server, "other")
    say(server, other, "step", 1, 0, encode_values(5))
    say(server, other, "end", 1, 1)
    [found] = fragments.take()
    numbers = [x for x in found.values() if x.dtype.kind == "f"]
    assert all(np.isfinite(x).all() for x in numbers)
    assert found["walker", "observation"][:, 0, 0].tolist() == [0, 5]


@pytest.mark.parametrize("hold", [True, False])
def test_number_of_ready_fragments_is_bounded(hold):
    server, fragments = recording(n_steps=1, per_batch=2, hold=hold)
    pens = [ManualClient(server, f"c{i}") for i in range(6)]
    for _ in range(50):
        for pen in pens:
            if not pen.client.busy:
                pen.step(1, pen.client.t + 1)
        server.flush()
        for pen in pens:
            pen.connection.read()
    assert len(fragments.ready) <= (2 if hold else 2 + len(pens))


def test_groups_have_lived_from_their_first_agent_to_the_end_of_the_episode():
    """A fragment of an episode in which both walkers have died, and the start of another one."""
    fragments, slots = Fragments(2, 1, ("walker",), 1, False), np.array([0])
    found = []
    for episode in (True, False):
        fragments.begin(0, True)
        for earns in ([T, F], [F, F], [F, F], [F, F]) if episode else ([F, F], [F, T]):
            assert fragments.may_begin_step(0)
            fragments.open(slots, {("walker", "mask"): np.array([earns])}, 0)
            reward = np.ones((1, 2, 1), np.float32)
            outcome = {("walker", "earns"): np.array([earns]), ("walker", "reward"): reward}
            fragments.close(slots, outcome)
            found += fragments.take() or []
    assert [rows(one, "collector", "walker/lived") for one in found] == [[T, T], [T, T], [F, T]]
