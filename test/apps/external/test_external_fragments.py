"""Fragments of external clients: exact arrays, and who may begin one when."""

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
    """One message, and the actions that it is answered with; None where it waits."""
    getattr(pen, kind)(*message, **more)
    server.flush()
    answer = pen.connection.read()
    return answer and answer["actions"]


def rows(fragment, *key):
    return fragment[key].tolist()


T, F = True, False


def test_a_fragment_by_hand():
    """A whole episode in which walker_1 dies, then the begin of another one."""
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
    assert say(server, pen, "step", 2, 3, encode_values(23, 33)) is None  # it has given its part
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
    assert rows(first, "collector", "traj_ids") == [0, 0, 0]

    # Before its birth, with its first own step, an agent earns nothing; who waits earns.
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


def test_a_time_limit_cuts_off_who_lives_waiting_agents_included():
    server, fragments = recording(n_steps=2, per_batch=1)
    pen = ManualClient(server)
    say(server, pen, "step", 1, 0, encode_values(0, 10))
    say(server, pen, "step", 1, 1, encode_values(1, None))
    say(server, pen, "end", 1, 2, encode_values(2, None), truncated=True)
    [found] = fragments.take()
    assert rows(found, "next", "done") == rows(found, "next", "truncated") == [[F], [T]]
    assert rows(found, "next", "walker", "truncated") == [[[F], [F]], [[T], [T]]]
    assert rows(found, "next", "walker", "mask") == [[T, F], [T, T]]
    # Who is not seen at the end was seen last before.
    assert rows(found, "next", "walker", "observation")[1] == [[2] * 3, [10] * 3]
    assert not found["next", "terminated"].any()


def test_all_terminated_is_the_end_whatever_the_client_calls_it():
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


def test_who_gave_its_part_of_a_batch_waits_for_the_slower_ones():
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


def test_without_hold_clients_play_on_until_a_batch_lies_ready():
    server, fragments = recording(n_steps=2, per_batch=2, hold=False)
    pen = ManualClient(server)
    assert all(say(server, pen, "step", 1, t) is not None for t in range(4))
    assert say(server, pen, "step", 1, 4) is None
    assert len(fragments.take()) == 2
    server.flush()
    assert pen.connection.read()["t"] == 4  # without a release


def test_who_leaves_gives_its_fragment_to_the_next():
    server, fragments = recording(n_steps=4, per_batch=1)
    first = ManualClient(server, "first")
    for t, seen in enumerate((0, 1, 2)):
        say(server, first, "step", 1, t, encode_values(seen))
    second = ManualClient(server, "second")
    assert say(server, second, "step", 1, 0, encode_values(20)) is None  # the batch's one has begun
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


def test_who_comes_to_the_same_seat_goes_on_with_its_fragment():
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


def test_an_episode_that_nobody_ended_is_truncated_when_the_next_begins():
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


def test_an_episode_whose_begin_nobody_knows_is_learned_from_and_not_counted():
    server, fragments = recording(n_steps=3, per_batch=1)
    pen = ManualClient(server)
    say(server, pen, "step", 9, 30, encode_values(0))  # of a server that was started anew
    say(server, pen, "end", 9, 31)
    say(server, pen, "step", 10, 0)
    say(server, pen, "step", 10, 1)
    say(server, pen, "step", 10, 2)
    [found] = fragments.take()
    assert rows(found, "collector", "episode_known") == [F, T, T]
    assert rows(found, "next", "terminated") == [[T], [F], [F]]


def test_a_refused_message_leaves_no_trace_in_what_is_learned():
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
def test_what_waits_for_the_learner_is_bounded(hold):
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
