"""The team replay buffer: n-step returns against a loop in Python, done flags, and masks."""

import pytest
import torch
from samples import POISON, assert_same, make_group, make_trajectory
from stored_steps import GAMMA, KEYS, E, S, make_wrapped_replay, random_batch
from tensordict import TensorDict

from torchrl_marl.errors import ConfigError
from torchrl_marl.learners import Priority, TeamReplay


def time_of(replay, row):
    """Env and time, counted from the oldest step, of a row of a full buffer."""
    slot, env = divmod(row, E)
    return env, (slot - replay.ring.head) % S


# -------------------------------------------------------------------------- look-aheads


@pytest.mark.parametrize("n_step", [1, 3, 5, S])
def test_n_step_returns_match_loop_in_python(n_step):
    replay, whole = make_wrapped_replay()
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


def test_write_head_ends_n_step_returns_without_termination():
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


def test_cut_ends_n_step_returns():
    replay = TeamReplay(10, 1, [("next", "reward")])
    flag = torch.zeros(1, 4, 1, dtype=torch.bool)
    then = {"reward": torch.ones(1, 4, 1), "done": flag, "terminated": flag}
    cut = torch.tensor([[False, True, False, False]])
    replay.extend(TensorDict({"next": then}, [1, 4]), cut)
    assert replay.look(torch.arange(4), 4, 1.0)["next", "reward"].flatten().tolist() == [2, 1, 2, 1]


def test_cut_separates_consecutive_batches():
    flag = torch.zeros(1, 2, 1, dtype=torch.bool)
    then = {"reward": torch.ones(1, 2, 1), "done": flag, "terminated": flag}
    for cut, first in ((False, [4, 3, 2, 1]), (True, [2, 1, 2, 1])):
        replay = TeamReplay(10, 1, [("next", "reward")])
        replay.cut()  # nothing is stored yet
        replay.extend(TensorDict({"next": then}, [1, 2]))
        if cut:
            replay.cut()
        replay.extend(TensorDict({"next": then}, [1, 2]))
        returns = replay.look(torch.arange(4), 4, 1.0)["next", "reward"]
        assert returns.flatten().tolist() == first


def test_truncation_of_one_agent_ends_n_step_returns():
    """Only that step has the last observation of the truncated agent."""
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
    assert look["next", "car", "mask"].all()  # the truncated agent is in the next mask
    assert torch.equal(
        look["next", "car", "observation"][0], batch["next", "car", "observation"][0, 3]
    )


def test_windows_hold_the_steps_of_the_look_ahead():
    replay, whole = make_wrapped_replay()
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


def test_windows_start_only_where_enough_steps_follow():
    """Of 40 steps in order of time, a window of 6 starts at 0 to 34, wherever the head is."""
    replay, _ = make_wrapped_replay()
    assert replay.ring.head
    rows = replay.rows(50, 32, length=6).flatten().tolist()
    assert {time_of(replay, row)[1] for row in rows} == set(range(S - 5))


def test_batch_longer_than_the_buffer_keeps_newest_steps():
    replay, batch = TeamReplay(5, E, KEYS), random_batch(13)
    replay.extend(random_batch(3))
    replay.extend(batch)
    look = replay.look(torch.arange(5 * E), 1, GAMMA)
    got = look["next", "terminated"].view(5, E).roll(-replay.ring.head, 0)
    assert torch.equal(got, batch["next", "terminated"][:, -5:, 0].T)


def test_length_and_rows_of_partly_filled_buffer():
    replay = TeamReplay(S, E, KEYS)
    assert len(replay) == 0 and replay.capacity == S * E
    replay.extend(random_batch(7))
    assert len(replay) == 7 * E
    rows = replay.rows(100, 32)
    assert rows.shape == (100, 32)
    assert sorted(rows.unique().tolist()) == list(range(7 * E))


# -------------------------------------------------------------------------------- masks


def test_next_mask_includes_truncated_but_not_dead_agents():
    """The next mask has agents truncated by a time limit, but not agents that died."""
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


def test_rewards_under_custom_key():
    """The last reward of a dying agent is kept, and n-step returns add it, whatever the key."""
    group = make_group()
    batch = make_trajectory(group, 1, 6, alive=1.0)
    batch["next", "car", "scaled_reward"] = batch["next", "car", "reward"].clone()
    batch["next", "car", "mask"][0, 2, 0] = False  # dies in the third step
    named, other = ("next", "car", "reward"), ("next", "car", "scaled_reward")
    masks = [("car", "mask"), ("next", "car", "mask")]
    with pytest.raises(ConfigError, match=r"scaled_reward.*reward_keys="):
        TeamReplay(6, 1, [*masks, other])
    with pytest.raises(ConfigError, match="expected some of keys"):
        TeamReplay(6, 1, masks, reward_keys=[other])
    summed = ("next", "car", "episode_reward")  # of TorchRL's RewardSum
    assert TeamReplay(6, 1, [*masks, named, summed]).reward_keys == {named}
    for n_step in (1, 3):
        found = []
        for key, given in ((named, None), (other, [other])):
            replay = TeamReplay(6, 1, [*masks, key], reward_keys=given)
            replay.extend(batch)
            found.append(replay.look(torch.arange(6), n_step, GAMMA).get(key))
        assert_same(*found)
        assert bool((found[0][2, 0] != 0).all())


@pytest.mark.parametrize("value", POISON)
@pytest.mark.parametrize("priority", [None, Priority()], ids=["uniform", "prioritized"])
def test_values_in_masked_slots_have_no_effect(value, priority):
    def minibatches(poison):
        torch.manual_seed(0)
        replay = TeamReplay(S, E, KEYS, priority)
        for _ in range(9):
            batch = random_batch(7)
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
