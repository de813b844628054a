"""The team replay buffer: sampling, memory, state, invalid arguments, and graphs."""

import io

import pytest
import torch
from samples import assert_same
from stored_steps import GAMMA, KEYS, E, S, make_wrapped_replay, random_batch

from torchrl_marl.capture import capture, count_syncs, graph_syncs
from torchrl_marl.errors import ConfigError, SpecError
from torchrl_marl.learners import Priority, TeamReplay
from torchrl_marl.runtime import memory

# -------------------------------------------------------------------------------- draws


def test_uniform_sampling_draws_rows_equally_often():
    replay, _ = make_wrapped_replay()
    counts = torch.bincount(replay.rows(500, 160).flatten(), minlength=S * E)
    assert ((counts - 500).double().square() / 500).mean() < 1.3


def test_rows_are_drawn_in_proportion_to_td_errors():
    replay, _ = make_wrapped_replay(Priority(alpha=0.5, beta=1.0, eps=0.0))
    error = torch.rand(S * E, 3, 1) * 10
    mask = torch.rand(S * E, 3) < 0.6
    replay.update_priority(torch.arange(S * E), -error, mask)
    worst = torch.where(mask.unsqueeze(-1), error, 0.0).amax((1, 2)).double()
    expected = worst.sqrt() / worst.sqrt().sum()
    looks = [replay.look(rows, 1, GAMMA) for rows in replay.rows(1000, 100)]
    counts = torch.bincount(torch.cat([x["index"] for x in looks]), minlength=S * E)
    assert counts[worst == 0].sum() == 0
    n = expected * 100_000
    # Stratified sampling: counts are closer to the mean than those of independent draws.
    assert ((counts - n).square() / n.clamp_min(1e-9))[worst > 0].mean() < 1.2
    weight, own = looks[0]["priority_weight"], expected[looks[0]["index"]]
    torch.testing.assert_close(weight.double(), own.min() / own, rtol=1e-6, atol=0)


def test_new_rows_get_the_highest_priority():
    replay, _ = make_wrapped_replay(Priority(alpha=1.0, eps=0.0), n_batches=2)
    replay.update_priority(torch.tensor([3, 5]), torch.tensor([7.0, 0.5]))
    replay.update_priority(torch.tensor([4]), torch.tensor([0.25]))  # 7 is still the highest
    replay.extend(random_batch(1))
    values = replay.priorities.tree.values
    assert values[[3, 4, 5]].tolist() == [7, 0.25, 0.5]
    assert values[14 * E : 15 * E].tolist() == [7] * E
    assert values[15 * E :].sum() == 0


def test_highest_priority_is_saved_after_its_row_was_updated():
    replay, _ = make_wrapped_replay(Priority(alpha=1.0, eps=0.0), n_batches=2)
    for error in (7.0, 0.5):
        replay.update_priority(torch.tensor([3]), torch.tensor([error]))
    other = TeamReplay(S, E, KEYS, replay.priority)
    other.load_state_dict(replay.state_dict())
    other.extend(random_batch(1))
    assert other.priorities.tree.values[[3, 14 * E]].tolist() == [0.5, 7.0]


def test_replay_buffer_does_not_synchronize_with_device():
    for priority in (None, Priority()):
        replay, _ = make_wrapped_replay(priority)
        batch = random_batch(7)
        with count_syncs() as syncs:
            replay.extend(batch)
            for rows in replay.rows(2, 32):
                data = replay.look(rows, 3, GAMMA)
                replay.windows(rows, 3)
                replay.update_priority(data["index"], data["next", "agents", "reward"])
        assert not syncs, syncs


def test_tensors_are_never_reallocated():
    replay, _ = make_wrapped_replay(Priority())
    places = [x.data_ptr() for x in replay.tensors]
    replay.extend(random_batch(7))
    replay.load_state_dict(make_wrapped_replay(Priority())[0].state_dict())
    assert [x.data_ptr() for x in replay.tensors] == places


# -------------------------------------------------------------------------------- state


@pytest.mark.parametrize("n_batches", [0, 3, 9])
@pytest.mark.parametrize("priority", [None, Priority()], ids=["uniform", "prioritized"])
def test_saved_buffer_resumes_exactly(n_batches, priority):
    replay, _ = (
        make_wrapped_replay(priority, n_batches)
        if n_batches
        else (TeamReplay(S, E, KEYS, priority), 0)
    )
    if n_batches:
        error = torch.rand(20, 3)
        replay.update_priority(torch.randperm(len(replay))[:20], error)
    file = io.BytesIO()
    torch.save(replay.state_dict(), file)
    rows = min(n_batches * 7, S) * E
    assert file.tell() < 10_000 + rows * 230  # bytes of a row; empty slots are not saved
    file.seek(0)
    other = TeamReplay(S, E, KEYS, priority)
    other.load_state_dict(torch.load(file, weights_only=True))

    def go_on(store):
        torch.manual_seed(3)
        for _ in range(4):
            store.extend(random_batch(9))
            for rows in store.rows(2, 16):
                data = store.look(rows, 3, GAMMA)
                store.update_priority(data["index"], data["next", "agents", "reward"])
        return [*data.flatten_keys().values(), *store.tensors]

    for one, result in zip(go_on(replay), go_on(other)):
        assert_same(one, result)


def test_loading_smaller_state_into_fuller_buffer():
    small, full = make_wrapped_replay(Priority(), 2)[0], make_wrapped_replay(Priority())[0]
    full.load_state_dict(small.state_dict())
    assert len(full) == len(small) == 14 * E
    drawn = torch.cat([full.look(rows, 1, GAMMA)["index"] for rows in full.rows(50, 32)])
    assert drawn.max() < 14 * E


# ---------------------------------------------------------------------------- bad input


def test_invalid_arguments_raise():
    replay = TeamReplay(S, E, KEYS)
    with pytest.raises(RuntimeError, match="nothing is stored yet; call extend"):
        replay.rows(1, 8)
    replay.extend(random_batch(7))
    with pytest.raises(ConfigError, match="161 rows, expected at most the capacity, 160"):
        replay.rows(1, 161)
    with pytest.raises(ConfigError, match="a sequence has 41 steps, expected 1 to 40"):
        replay.look(torch.arange(3), 41, GAMMA)
    with pytest.raises(ValueError, match=r"batch size \[5, 7\], expected \[4, T\]"):
        replay.extend(random_batch(7, n_envs=5))
    with pytest.raises(ValueError, match=r"has rows of \[2, 5\], torch.float32, expected \[3, 5\]"):
        replay.extend(random_batch(7, n_agents=2))
    with pytest.raises(
        SpecError, match=r"the batch has no \('agents', 'action'\), which the replay buffer"
    ):
        replay.extend(random_batch(7).exclude(("agents", "action")))
    with pytest.raises(ConfigError, match="n_steps is 0 and num_envs 4, expected 1 or more"):
        TeamReplay(0, 4, KEYS)
    with pytest.raises(ValueError, match="the state is of 40 steps of 4 envs, expected 41 of 4"):
        TeamReplay(41, E, KEYS).load_state_dict(replay.state_dict())
    with pytest.raises(ValueError, match="the state has no priorities, expected some"):
        TeamReplay(S, E, KEYS, Priority()).load_state_dict(replay.state_dict())
    with pytest.raises(ValueError, match="alpha is -1, expected 0 or more"):
        Priority(alpha=-1)
    with pytest.raises(ValueError, match="beta is nan, expected 0 or more, and finite"):
        Priority(beta=float("nan"))
    with pytest.raises(ValueError, match=r"cut is \[4, 7, 1\], torch.bool, expected \[4, 7\]"):
        replay.extend(random_batch(7), torch.zeros(E, 7, 1, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"cut is \[4, 7\], torch.float32, expected"):
        replay.extend(random_batch(7), torch.zeros(E, 7))


@pytest.mark.parametrize("error", [float("nan"), float("inf")])
def test_non_finite_error_gets_highest_priority(error):
    replay, _ = make_wrapped_replay(Priority(alpha=1, eps=0))
    replay.update_priority(torch.arange(3), torch.tensor([5.0, error, 0.5]))
    assert replay.priorities.tree.values[:3].tolist() == [5, 1, 0.5]  # 1: that of new rows
    replay.update_priority(torch.arange(2), torch.tensor([error, 0.25]))
    assert replay.priorities.tree.values[:3].tolist() == [5, 0.25, 0.5]
    assert replay.priorities.highest == 5


def test_buffer_larger_than_memory_raises_before_allocation():
    replay = TeamReplay(10**12, E, KEYS, Priority())
    with pytest.raises(ConfigError) as error:
        replay.extend(random_batch(7))
    size = 2 * (60 + 3) + 24 + 12 + 1 + 1 + 16
    text = str(error.value)
    assert text.startswith(f"a replay buffer of 4,000,000,000,000 rows of {size} B takes 720.0 TB")
    assert text.endswith("; keep fewer rows.") and "'cpu' has " in text


def test_buffer_that_just_fits_in_memory_is_allocated(monkeypatch):
    needed = S * E * (2 * (60 + 3) + 24 + 12 + 1 + 1)
    monkeypatch.setattr(memory, "memory_of", lambda device: needed)
    replay, _ = make_wrapped_replay()
    assert replay.bytes_per_row == needed // (S * E)
    monkeypatch.setattr(memory, "memory_of", lambda device: needed - 1)
    with pytest.raises(ConfigError, match="takes 26.2 kB at least"):
        make_wrapped_replay()


# --------------------------------------------------------------------------- in a graph


@pytest.mark.parametrize(
    ("execution", "priority"),
    [
        pytest.param("trace", None, id="uniform-trace"),
        pytest.param("trace", Priority(), id="prioritized-trace"),
        pytest.param("compile", Priority(), id="prioritized-compile"),  # includes uniform
    ],
)
def test_captured_graph_matches_eager_calls(execution, priority):
    """Rows, n-step returns and priorities match, while the buffer is extended between replays."""
    torch.manual_seed(0)
    eager, _ = make_wrapped_replay(priority)
    torch.manual_seed(0)
    own, _ = make_wrapped_replay(priority)

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
        batch = random_batch(9)
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
