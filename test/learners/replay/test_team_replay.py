"""The store of team steps: look-aheads against a loop in Python, masks, state, refusals."""

import io

import pytest
import torch
from samples import POISON, assert_same, make_group, make_trajectory
from tensordict import TensorDict

from torchrl_marl import memory
from torchrl_marl.capture import capture, count_syncs, graph_syncs
from torchrl_marl.errors import ConfigError, SpecError
from torchrl_marl.learners import Priority, TeamReplay

E, S, GAMMA = 4, 40, 0.9
KEYS = [
    ("agents", "observation"),
    ("agents", "action"),
    ("agents", "mask"),
    ("next", "agents", "observation"),
    ("next", "agents", "reward"),
    ("next", "agents", "mask"),
    ("next", "terminated"),
]


def some_batch(n_steps, n_envs=E, n_agents=3):
    """Steps of which one in ten ends an episode; masks and ends need not make sense together."""

    def agents():
        return {
            "observation": torch.randn(n_envs, n_steps, n_agents, 5),
            "mask": torch.rand(n_envs, n_steps, n_agents) < 0.8,
        }

    terminated = torch.rand(n_envs, n_steps, 1) < 0.07
    done = terminated | (torch.rand(n_envs, n_steps, 1) < 0.05)
    action = torch.randint(9, (n_envs, n_steps, n_agents))
    then = {**agents(), "reward": torch.randn(n_envs, n_steps, n_agents, 1)}
    flags = {"done": done, "terminated": terminated}
    source = {"agents": {**agents(), "action": action}, "next": {"agents": then, **flags}}
    return TensorDict(source, [n_envs, n_steps])


def wrapped(priority=None, n_batches=9, length=7):
    """A store that begins anew in the middle of a batch, and what it has, in order of time."""
    replay = TeamReplay(S, E, KEYS, priority)
    history = [some_batch(length) for _ in range(n_batches)]
    for batch in history:
        replay.extend(batch)
    return replay, torch.cat(history, 1)[:, -S:]


def time_of(replay, row):
    """Env and time, counted from the oldest step, of a row of a full store."""
    slot, env = divmod(row, E)
    return env, (slot - replay.ring.head) % S


# -------------------------------------------------------------------------- look-aheads


@pytest.mark.parametrize("n_step", [1, 3, 5, S])
def test_returns_are_those_of_a_loop_in_python(n_step):
    replay, whole = wrapped()
    rows = replay.rows(4, 128).flatten()
    got = replay.look(rows, n_step, GAMMA)
    mask, reward = whole["agents", "mask"].unsqueeze(-1), whole["next", "agents", "reward"]
    for i, row in enumerate(rows.tolist()):
        env, t = time_of(replay, row)
        total, k = 0.0, 0
        while True:
            total = total + GAMMA**k * torch.where(mask, reward, 0.0)[env, t + k]
            if whole["next", "done"][env, t + k] or k == n_step - 1 or t + k == S - 1:
                break
            k += 1
        torch.testing.assert_close(got["next", "agents", "reward"][i], total)
        torch.testing.assert_close(got["discount"][i], torch.tensor([GAMMA ** (k + 1)]))
        assert torch.equal(got["next", "terminated"][i], whole["next", "terminated"][env, t + k])
        seen = got["next", "agents", "mask"][i]
        last = whole["next", "agents", "observation"][env, t + k]
        assert torch.equal(got["next", "agents", "observation"][i], last * seen.unsqueeze(-1))
        acts = whole["agents", "mask"][env, t]
        assert torch.equal(got["agents", "action"][i], whole["agents", "action"][env, t] * acts)


def test_the_write_head_cuts_as_a_truncation():
    replay = TeamReplay(5, 1, [("next", "reward"), ("next", "terminated")])

    def steps(*rewards):
        flag = torch.zeros(1, len(rewards), 1, dtype=torch.bool)
        reward = torch.tensor(rewards).view(1, -1, 1)
        then = {"reward": reward, "done": flag, "terminated": flag}
        return TensorDict({"next": then}, [1, len(rewards)])

    replay.extend(steps(1.0, 2.0, 4.0))
    look = replay.look(torch.arange(3), 3, 0.5)
    assert look["next", "reward"].flatten().tolist() == [1 + 1 + 1, 2 + 2, 4]
    assert look["discount"].flatten().tolist() == [0.125, 0.25, 0.5]
    assert not look["next", "terminated"].any()
    replay.extend(steps(8.0, 16.0, 32.0))  # the slots now hold 32, 2, 4, 8, 16
    look = replay.look(torch.arange(5), 3, 0.5)
    assert look["next", "reward"].flatten().tolist() == [32, 2 + 2 + 2, 4 + 4 + 4, 8 + 8 + 8, 32]
    assert look["discount"].flatten().tolist() == [0.5, 0.125, 0.125, 0.125, 0.25]


def test_a_cut_stops_the_look_ahead():
    replay = TeamReplay(10, 1, [("next", "reward")])
    flag = torch.zeros(1, 4, 1, dtype=torch.bool)
    then = {"reward": torch.ones(1, 4, 1), "done": flag, "terminated": flag}
    cut = torch.tensor([[False, True, False, False]])
    replay.extend(TensorDict({"next": then}, [1, 4]), cut)
    assert replay.look(torch.arange(4), 4, 1.0)["next", "reward"].flatten().tolist() == [2, 1, 2, 1]


def test_who_is_cut_off_alone_ends_the_look_ahead():
    """Its last observation is in that step, and in none later."""
    group = make_group()
    batch = make_trajectory(group, 1, 6)
    for key in ("done", "terminated", "truncated"):
        batch["next", key] = torch.zeros(1, 6, 1, dtype=torch.bool)
        batch["next", "car", key] = torch.zeros(1, 6, 3, 1, dtype=torch.bool)
    batch["car", "done"] = torch.zeros(1, 6, 3, 1, dtype=torch.bool)
    batch["next", "car", "mask"] = torch.ones(1, 6, 3, dtype=torch.bool)
    batch["next", "car", "mask"][0, 3, 1] = False
    batch["next", "car", "truncated"][0, 3, 1] = batch["next", "car", "done"][0, 3, 1] = True
    keys = [("car", "mask"), ("next", "car", "mask"), ("next", "car", "observation")]
    replay = TeamReplay(10, 1, keys)
    replay.extend(batch)
    look = replay.look(torch.arange(6), 6, 0.5)
    lengths = (look["discount"].log() / torch.tensor(0.5).log()).flatten()
    assert lengths.round().tolist() == [4, 3, 2, 1, 2, 1]
    assert look["next", "car", "mask"].all()  # it is seen once more
    assert torch.equal(
        look["next", "car", "observation"][0], batch["next", "car", "observation"][0, 3]
    )


def test_windows_are_the_look_ahead_as_it_is():
    replay, whole = wrapped()
    rows = torch.arange(S * E)
    got = replay.windows(rows, 6)
    assert got.batch_size == (S * E, 6)
    for i, row in enumerate(rows.tolist()):
        env, t = time_of(replay, row)
        done = whole["next", "done"][env, t : t + 6].flatten().tolist()
        length = next((k + 1 for k, x in enumerate(done) if x), len(done))
        assert got["valid"][i].tolist() == [k < length for k in range(6)]
        times = [t + min(k, length - 1) for k in range(6)]
        acts = whole["agents", "mask"][env, times]
        assert torch.equal(got["agents", "action"][i], whole["agents", "action"][env, times] * acts)


def test_a_batch_longer_than_the_store():
    replay, batch = TeamReplay(5, E, KEYS), some_batch(13)
    replay.extend(some_batch(3))
    replay.extend(batch)
    look = replay.look(torch.arange(5 * E), 1, GAMMA)
    got = look["next", "terminated"].view(5, E).roll(-replay.ring.head, 0)
    assert torch.equal(got, batch["next", "terminated"][:, -5:, 0].T)


def test_a_store_that_is_being_filled():
    replay = TeamReplay(S, E, KEYS)
    assert len(replay) == 0 and replay.capacity == S * E
    replay.extend(some_batch(7))
    assert len(replay) == 7 * E
    rows = replay.rows(100, 32)
    assert rows.shape == (100, 32)
    assert sorted(rows.unique().tolist()) == list(range(7 * E))


# -------------------------------------------------------------------------------- masks


def test_masks_are_settled():
    """Who is cut off by a time limit is seen once more; who dies is not."""
    group = make_group()
    batch = make_trajectory(group, 1, 3)
    alive = torch.tensor([[[True, True, False]] * 3])
    batch["car", "mask"] = alive
    batch["car", "done"] = ~alive.unsqueeze(-1)
    no = torch.zeros(1, 3, 3, 1, dtype=torch.bool)
    ends = {"terminated": no.clone(), "truncated": no.clone(), "done": no.clone()}
    ends["terminated"][0, 0, 0] = ends["done"][0, 0, 0] = True
    ends["truncated"][0, 2] = ends["done"][0, 2] = True
    for key, flag in ends.items():
        batch["next", "car", key] = flag
    batch["next", "car", "mask"] = alive & ~ends["done"].squeeze(-1)
    replay = TeamReplay(3, 1, [("car", "mask"), ("next", "car", "mask"), ("next", "car", "reward")])
    replay.extend(batch)
    look = replay.look(torch.arange(3), 1, GAMMA)
    assert look["next", "car", "mask"].tolist() == [
        [False, True, False],
        [True, True, False],
        [True, True, False],
    ]
    assert (look["next", "car", "reward"][:, 2] == 0).all()


@pytest.mark.parametrize("value", POISON)
@pytest.mark.parametrize("priority", [None, Priority()], ids=["uniform", "prioritized"])
def test_poison_in_masked_slots_changes_no_bit(value, priority):
    def minibatches(poison):
        torch.manual_seed(0)
        replay = TeamReplay(S, E, KEYS, priority)
        for _ in range(9):
            batch = some_batch(7)
            if poison:
                hide(batch)
            replay.extend(batch)
        found = []
        for rows in replay.rows(3, 64):
            found.append(replay.look(rows, 3, GAMMA))
            error = found[-1]["next", "agents", "reward"]
            replay.update_priority(found[-1]["index"], error, found[-1]["agents", "mask"])
        return found, replay.tensors

    def hide(batch):
        masks = {
            ("agents",): batch["agents", "mask"],
            ("next", "agents"): batch["next", "agents", "mask"]
            | (
                batch["agents", "mask"]
                & (batch["next", "done"] & ~batch["next", "terminated"]).expand(-1, -1, 3)
            ),
        }
        batch["agents", "observation"][~masks["agents",]] = value
        batch["agents", "action"][~masks["agents",]] = 10**9
        batch["next", "agents", "observation"][~masks["next", "agents"]] = value
        batch["next", "agents", "reward"][~masks["agents",]] = value

    clean, poisoned = minibatches(False), minibatches(True)
    for one, other in zip(clean[0], poisoned[0]):
        for key in one.keys(True, True):
            assert_same(one[key], other[key], key)
    for one, other in zip(clean[1], poisoned[1]):
        assert_same(one, other)


# -------------------------------------------------------------------------------- draws


def test_uniform_rows_come_equally_often():
    replay, _ = wrapped()
    counts = torch.bincount(replay.rows(500, 160).flatten(), minlength=S * E)
    assert ((counts - 500).double().square() / 500).mean() < 1.3


def test_rows_are_drawn_by_their_errors():
    replay, _ = wrapped(Priority(alpha=0.5, beta=1.0, eps=0.0))
    error = torch.rand(S * E, 3, 1) * 10
    mask = torch.rand(S * E, 3) < 0.6
    replay.update_priority(torch.arange(S * E), -error, mask)
    worst = torch.where(mask.unsqueeze(-1), error, 0.0).amax((1, 2)).double()
    expected = worst.sqrt() / worst.sqrt().sum()
    looks = [replay.look(rows, 1, GAMMA) for rows in replay.rows(1000, 100)]
    counts = torch.bincount(torch.cat([x["index"] for x in looks]), minlength=S * E)
    assert counts[worst == 0].sum() == 0
    n = expected * 100_000
    # One number of each of 100 equal parts: no further from the mean than drawn at will.
    assert ((counts - n).square() / n.clamp_min(1e-9))[worst > 0].mean() < 1.2
    weight, own = looks[0]["priority_weight"], expected[looks[0]["index"]]
    torch.testing.assert_close(weight.double(), own.min() / own, rtol=1e-6, atol=0)


def test_new_rows_have_the_highest_priority():
    replay, _ = wrapped(Priority(alpha=1.0, eps=0.0), n_batches=2)
    replay.update_priority(torch.tensor([3, 5]), torch.tensor([7.0, 0.5]))
    replay.extend(some_batch(1))
    values = replay.priorities.tree.values
    assert values[[3, 5]].tolist() == [7, 0.5]
    assert values[14 * E : 15 * E].tolist() == [7] * E
    assert values[15 * E :].sum() == 0


def test_the_host_does_not_wait():
    for priority in (None, Priority()):
        replay, _ = wrapped(priority)
        batch = some_batch(7)
        with count_syncs() as syncs:
            replay.extend(batch)
            for rows in replay.rows(2, 32):
                data = replay.look(rows, 3, GAMMA)
                replay.windows(rows, 3)
                replay.update_priority(data["index"], data["next", "agents", "reward"])
        assert not syncs, syncs


def test_memory_is_never_replaced():
    replay, _ = wrapped(Priority())
    places = [x.data_ptr() for x in replay.tensors]
    replay.extend(some_batch(7))
    replay.load_state_dict(wrapped(Priority())[0].state_dict())
    assert [x.data_ptr() for x in replay.tensors] == places


# -------------------------------------------------------------------------------- state


@pytest.mark.parametrize("n_batches", [0, 3, 9])
@pytest.mark.parametrize("priority", [None, Priority()], ids=["uniform", "prioritized"])
def test_a_saved_store_goes_on_to_the_bit(n_batches, priority):
    replay, _ = wrapped(priority, n_batches) if n_batches else (TeamReplay(S, E, KEYS, priority), 0)
    if n_batches:
        error = torch.rand(20, 3)
        replay.update_priority(torch.randperm(len(replay))[:20], error)
    file = io.BytesIO()
    torch.save(replay.state_dict(), file)
    rows = min(n_batches * 7, S) * E
    assert file.tell() < 10_000 + rows * 230  # bytes of a row, and nothing of empty slots
    file.seek(0)
    other = TeamReplay(S, E, KEYS, priority)
    other.load_state_dict(torch.load(file, weights_only=True))

    def go_on(store):
        torch.manual_seed(3)
        for _ in range(4):
            store.extend(some_batch(9))
            for rows in store.rows(2, 16):
                data = store.look(rows, 3, GAMMA)
                store.update_priority(data["index"], data["next", "agents", "reward"])
        return [*data.flatten_keys().values(), *store.tensors]

    for one, result in zip(go_on(replay), go_on(other)):
        assert_same(one, result)


def test_a_smaller_state_in_a_fuller_store():
    small, full = wrapped(Priority(), 2)[0], wrapped(Priority())[0]
    full.load_state_dict(small.state_dict())
    assert len(full) == len(small) == 14 * E
    drawn = torch.cat([full.look(rows, 1, GAMMA)["index"] for rows in full.rows(50, 32)])
    assert drawn.max() < 14 * E


# ---------------------------------------------------------------------------- bad input


def test_refusals():
    replay = TeamReplay(S, E, KEYS)
    with pytest.raises(RuntimeError, match="nothing is stored yet; call extend"):
        replay.rows(1, 8)
    replay.extend(some_batch(7))
    with pytest.raises(ConfigError, match="a minibatch has 161 rows, expected 160 at most"):
        replay.rows(1, 161)
    with pytest.raises(ConfigError, match="41 steps are to be looked at, expected 1 to 40"):
        replay.look(torch.arange(3), 41, GAMMA)
    with pytest.raises(ValueError, match=r"batch size \[5, 7\], expected \[4, T\]"):
        replay.extend(some_batch(7, n_envs=5))
    with pytest.raises(ValueError, match=r"has rows of \[2, 5\], torch.float32, expected \[3, 5\]"):
        replay.extend(some_batch(7, n_agents=2))
    with pytest.raises(SpecError, match=r"the batch has no \('agents', 'action'\), which is to be"):
        replay.extend(some_batch(7).exclude(("agents", "action")))
    with pytest.raises(ConfigError, match="n_steps is 0 and num_envs 4, expected 1 or more"):
        TeamReplay(0, 4, KEYS)
    with pytest.raises(ValueError, match="the state is of 40 steps of 4 envs, expected 41 of 4"):
        TeamReplay(41, E, KEYS).load_state_dict(replay.state_dict())
    with pytest.raises(ValueError, match="the state has no priorities, expected some"):
        TeamReplay(S, E, KEYS, Priority()).load_state_dict(replay.state_dict())
    with pytest.raises(ValueError, match="alpha is -1, expected 0 or more"):
        Priority(alpha=-1)


def test_a_store_that_does_not_fit_is_refused_before_it_is_made():
    replay = TeamReplay(10**12, E, KEYS, Priority())
    with pytest.raises(ConfigError) as error:
        replay.extend(some_batch(7))
    size = 2 * (60 + 3) + 24 + 12 + 1 + 1 + 16
    text = str(error.value)
    assert text.startswith(f"a replay of 4,000,000,000,000 rows of {size} B takes 720.0 TB")
    assert text.endswith("; keep fewer rows.") and "'cpu' has " in text


def test_a_store_that_just_fits(monkeypatch):
    needed = S * E * (2 * (60 + 3) + 24 + 12 + 1 + 1)
    monkeypatch.setattr(memory, "memory_of", lambda device: needed)
    replay, _ = wrapped()
    assert replay.bytes_per_row == needed // (S * E)
    monkeypatch.setattr(memory, "memory_of", lambda device: needed - 1)
    with pytest.raises(ConfigError, match="takes 26.2 kB at least"):
        wrapped()


# --------------------------------------------------------------------------- in a graph


@pytest.mark.parametrize("execution", ["trace", "compile"])
@pytest.mark.parametrize("priority", [None, Priority()], ids=["uniform", "prioritized"])
def test_a_graph_equals_eager_calls(execution, priority):
    """Rows, n-step returns and priorities of a graph, while the store goes on between replays."""
    torch.manual_seed(0)
    eager, _ = wrapped(priority)
    torch.manual_seed(0)
    own, _ = wrapped(priority)

    def update(replay, rows):
        data = replay.look(rows, 3, GAMMA)
        error = data["next", "agents", "reward"] - data["priority_weight"].view(-1, 1, 1)
        replay.update_priority(data["index"], error, data["agents", "mask"])
        return dict(data.flatten_keys().items())

    before = [x.clone() for x in own.tensors]
    program = capture(
        lambda rows, held: update(own, rows),
        own.rows(1, 32)[0],
        own.tensors,
        name="an update",
        execution=execution,
    )
    for x, value in zip(own.tensors, before):  # recording made an update
        x.copy_(value)
    for _ in range(3):
        batch = some_batch(9)
        eager.extend(batch)
        own.extend(batch)
        for rows in eager.rows(4, 32):
            expected, found = update(eager, rows), program(rows, own.tensors)
            for key, value in expected.items():
                torch.testing.assert_close(found[key], value, rtol=1e-6, atol=1e-6)
                if execution == "trace" or not value.is_floating_point():
                    assert_same(found[key], value, key)
    for one, other in zip(own.tensors, eager.tensors):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=0)
    assert not graph_syncs(program.traced.module, [own.rows(1, 32)[0], *own.tensors])
