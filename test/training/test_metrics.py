"""Metrics worked out by hand."""

import csv
import dataclasses
import importlib.util
import math
import warnings

import pytest
import torch
from tensordict import TensorDict
from torchrl.data import Bounded, Categorical, Unbounded

from torchrl_marl import AgentSpec, TeamSpec
from torchrl_marl.collectors.rollout import RolloutCollector, check_finite
from torchrl_marl.envs.toy import Arena
from torchrl_marl.errors import CheckpointError, MissingExtraError, NonFiniteError, SpecError
from torchrl_marl.training.config import LoggingConfig
from torchrl_marl.training.member import row_of_all
from torchrl_marl.training.metrics import (
    EpisodeTracker,
    count_agent_frames,
    group_reward,
)
from torchrl_marl.training.recorder import CsvTable, Loggers
from torchrl_marl.training.shards import EpisodeSums

NAN = float("nan")


def make_team(state=False):
    bounded = Bounded(-1, 1, (1,))
    agents = [
        AgentSpec("cat", 2, Unbounded((1,)), bounded),
        AgentSpec("dog", 1, Unbounded((1,)), bounded),
    ]
    return TeamSpec(agents, Unbounded((2,)) if state else None)


def make_batch(cat, dog, done, mask=None):
    """A batch of rewards ``cat [E, T, 2]``, ``dog [E, T]``, done ``[E, T]`` and the cats' mask."""
    cat, dog, done = torch.tensor(cat), torch.tensor(dog), torch.tensor(done)
    shape = done.shape
    mask = torch.ones(*shape, 2, dtype=torch.bool) if mask is None else torch.tensor(mask)
    td = {
        "cat": {"observation": torch.zeros(*shape, 2, 1), "mask": mask},
        "dog": {
            "observation": torch.zeros(*shape, 1, 1),
            "mask": torch.ones(*shape, 1, dtype=torch.bool),
        },
    }
    following = {
        name: {"observation": x["observation"].clone(), "mask": x["mask"].clone()}
        for name, x in td.items()
    }
    following["cat"]["reward"] = cat.unsqueeze(-1)
    following["dog"]["reward"] = dog.view(*shape, 1, 1)
    return TensorDict({**td, "next": {**following, "done": done.unsqueeze(-1)}}, shape)


# -------------------------------------------------------------------------------- the tracker


def test_episode_metrics_worked_out_by_hand():
    tracker = EpisodeTracker(make_team())
    first = make_batch(
        cat=[[[1.0, 3.0], [2.0, 2.0], [5.0, 5.0]], [[1.0, 1.0], [1.0, 1.0], [1.0, 1.0]]],
        dog=[[1.0, 1.0, 1.0], [10.0, 20.0, 30.0]],
        done=[[False, True, False], [False, False, False]],
    )
    means = tracker.update(first)
    assert means["cat/episode_reward"].item() == 4.0  # 2 + 2
    assert means["dog/episode_reward"].item() == 2.0
    assert means["cat/episode_length"].item() == 2.0
    second = make_batch(
        cat=[[[7.0, 7.0], [1.0, 1.0], [2.0, 2.0]], [[4.0, 4.0], [6.0, 6.0], [1.0, 3.0]]],
        dog=[[1.0, 5.0, 1.0], [40.0, 2.0, 3.0]],
        done=[[True, True, False], [True, False, True]],
    )
    means = tracker.update(second)
    # Env 0: 5 + 7, then 1; env 1: 3 + 4, then 6 + 2.
    assert means["cat/episode_reward"].item() == (12.0 + 1.0 + 7.0 + 8.0) / 4
    assert means["dog/episode_reward"].item() == (2.0 + 5.0 + 100.0 + 5.0) / 4
    assert means["cat/episode_length"].item() == (2 + 1 + 4 + 2) / 4
    state = tracker.state_dict()
    assert state["cat/episode_reward"].tolist() == [2.0, 0.0]
    assert state["cat/episode_length"].tolist() == [1.0, 0.0]
    other = EpisodeTracker(make_team())
    other.load_state_dict(state)
    third = make_batch([[[1.0, 1.0]], [[9.0, 9.0]]], [[0.0], [0.0]], [[True], [True]])
    assert other.update(third)["cat/episode_reward"].item() == (3.0 + 9.0) / 2
    assert tracker.update(third)["cat/episode_reward"].item() == (3.0 + 9.0) / 2


def test_returns_are_exact_after_a_huge_reward_of_an_earlier_episode():
    """Of episodes with returns of 1e9, 0.75 and 0.5, and a last one that has earned 0.25 so far."""
    tracker = EpisodeTracker(make_team())
    dog = [[1e9, 0.5, 0.25, 0.5, 0.25]]
    cat = [[[x, x] for x in dog[0]]]
    tracker.update(make_batch(cat, dog, [[True, False, True, True, False]]))
    totals, _ = tracker.episodes
    assert totals["dog"].tolist() == totals["cat"].tolist() == [[1e9, 0.5, 0.75, 0.5, 0.25]]
    assert tracker.state_dict()["dog/episode_reward"].tolist() == [0.25]


def test_means_without_ended_episodes_are_nan():
    tracker = EpisodeTracker(make_team())
    means = tracker.update(make_batch([[[1.0, 1.0]]], [[1.0]], [[False]]))
    assert all(math.isnan(value) for value in means.values())


@pytest.mark.parametrize("poison", [NAN, 1e9])
def test_dead_agents_are_left_out_of_the_metrics(poison):
    tracker = EpisodeTracker(make_team())
    batch = make_batch(
        cat=[[[1.0, 3.0], [2.0, poison], [poison, poison]]],
        dog=[[1.0, 1.0, 1.0]],
        done=[[False, False, True]],
        mask=[[[True, True], [True, False], [False, False]]],
    )
    means = tracker.update(batch)
    assert means["cat/episode_reward"].item() == 2.0 + 2.0 + 0.0
    assert means["cat/episode_length"].item() == 3.0
    assert count_agent_frames(make_team(), batch).item() == 3 + 3


def test_rewards_count_while_waiting_but_not_after_death():
    """Cat 1 waits in step 1 and is dead in step 2."""
    batch = make_batch(
        cat=[[[1.0, 3.0], [2.0, -10.0], [4.0, NAN]]],
        dog=[[1.0, 1.0, 1.0]],
        done=[[False, False, True]],
        mask=[[[True, True], [True, False], [True, False]]],
    )
    batch["cat", "done"] = torch.tensor([[[0, 0], [0, 0], [0, 1]]]).bool().unsqueeze(-1)
    assert EpisodeTracker(make_team()).update(batch)["cat/episode_reward"].item() == 2 - 4 + 4
    check_finite(make_team(), batch)
    batch["next", "cat", "reward"][0, 1, 1] = NAN
    with pytest.raises(NonFiniteError, match="'cat'.*reward.*env 0, step 1"):
        check_finite(make_team(), batch)


def test_group_reward_of_a_team_reward():
    team = make_team()
    batch = make_batch([[[1.0, 1.0]]], [[1.0]], [[True]])
    batch["next", "reward"] = torch.tensor([[[7.0]]])
    group = dataclasses.replace(team.groups["cat"], reward_key="reward")
    assert group_reward(group, batch).tolist() == [[7.0]]


def test_agent_frames_of_groups_without_masks():
    team = make_team()
    team.groups = {n: dataclasses.replace(g, mask_key=None) for n, g in team.groups.items()}
    assert count_agent_frames(team, make_batch([[[1.0, 1.0]] * 4], [[1.0] * 4], [[True] * 4])) == 12


# ---------------------------------------------------------------------------------- non-finite


def finite_batch(mask=None):
    batch = make_batch([[[1.0, 1.0]] * 3] * 2, [[1.0] * 3] * 2, [[False] * 3] * 2, mask)
    batch["state"] = torch.zeros(2, 3, 2)
    batch["next", "state"] = torch.zeros(2, 3, 2)
    return batch


@pytest.mark.parametrize("value", [NAN, float("inf"), -float("inf")])
@pytest.mark.parametrize(
    ("key", "named"),
    [
        (("cat", "observation"), "'cat'.*observation"),
        (("dog", "observation"), "'dog'.*observation"),
        (("next", "cat", "observation"), "'cat'.*next.*observation"),
        (("next", "dog", "reward"), "'dog'.*reward"),
        ("state", "state"),
    ],
)
def test_non_finite_values_raise_with_their_place(key, named, value):
    team, batch = make_team(state=True), finite_batch()
    check_finite(team, batch)
    batch[key][1, 2] = value
    with pytest.raises(NonFiniteError, match=named + ".*env 1, step 2"):
        check_finite(team, batch)


def test_values_of_dead_agents_are_not_checked():
    mask = [[[True, False]] * 3] * 2
    team, batch = make_team(state=True), finite_batch(mask)
    for key in (("cat", "observation"), ("next", "cat", "observation"), ("next", "cat", "reward")):
        batch[key][:, :, 1] = NAN
    check_finite(team, batch)
    batch["cat", "observation"][0, 0, 0] = NAN
    with pytest.raises(NonFiniteError, match="env 0, step 0"):
        check_finite(team, batch)


def choosing_batch():
    team = TeamSpec(
        [
            AgentSpec("cat", 2, Unbounded((1,)), Categorical(3), action_mask=True),
            AgentSpec("dog", 1, Unbounded((1,)), Bounded(-1, 1, (1,))),
        ]
    )
    batch = make_batch([[[1.0, 1.0]] * 3] * 2, [[1.0] * 3] * 2, [[False] * 3] * 2)
    batch["cat", "action_mask"] = torch.ones(2, 3, 2, 3, dtype=torch.bool)
    return team, batch


def test_agent_without_a_legal_action_raises():
    team, batch = choosing_batch()
    batch["cat", "action_mask"][..., 1:] = False
    batch["cat", "action_mask"][0, 1, 0] = False
    batch["cat", "mask"][0, 1, 0] = False  # a waiting agent needs none
    check_finite(team, batch)
    batch["cat", "action_mask"][1, 2, 1] = False
    with pytest.raises(SpecError, match="'cat': agent 'cat_1' acts .* no legal .*env 1, step 2"):
        check_finite(team, batch)
    with pytest.raises(SpecError, match=r"'cat_1' .*\(env 1 of the batch:"):
        check_finite(team, batch[:, 2])


def games(n, draw=0.0):
    """Games of one step: one cat wins what the other loses, and both also get ``draw``."""
    won = torch.arange(1.0, n + 1)
    cat = torch.stack([won + draw, draw - won], -1).unsqueeze(0).tolist()
    return make_batch(cat, [[1.0] * n], [[True] * n])


def played(tracker, *batches):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for batch in batches:
            tracker.update(batch)
            tracker.warn_of_games()


def test_zero_sum_game_within_one_group_warns_once():
    tracker = EpisodeTracker(make_team())
    nothing = make_batch([[[0.0, 0.0]] * 20], [[1.0] * 20], [[True] * 20])
    played(tracker, games(9), nothing)
    assert tracker.update(games(1))["cat/episode_reward"] == 0
    with pytest.warns(UserWarning, match="'cat'.*each of 10 .*zero-sum.*group_map") as caught:
        tracker.warn_of_games()
    assert len(caught) == 1
    played(tracker, games(30))


def test_other_rewards_do_not_warn_of_a_game():
    tracker = EpisodeTracker(make_team())
    played(tracker, games(5, draw=0.01), games(30))
    both = make_batch([[[1.0, 1.0]] * 20], [[1.0] * 20], [[True] * 20])
    both["next", "cat", "reward"][..., 1, :] = NAN  # of dead agents
    both["cat", "mask"][..., 1] = False
    tracker = EpisodeTracker(make_team())
    played(tracker, both, games(30))


# --------------------------------------------------------------------------------- the table


def read(path):
    with path.open(newline="") as file:
        return list(csv.reader(file))


def test_table_is_readable_after_every_row(tmp_path):
    table = CsvTable(tmp_path / "metrics.csv")
    table.write({"iteration": 1, "loss": 0.123456789, "reward": NAN})
    assert read(table.path) == [["iteration", "loss", "reward"], ["1", "0.123457", ""]]
    table.write({"iteration": 2, "loss": 1e-9, "reward": 3.0, "new": 1})
    assert read(table.path)[1:] == [["1", "0.123457", ""], ["2", "1e-09", "3"]]


@pytest.mark.parametrize("keep", [0, 1, 2])
@pytest.mark.parametrize("torn", ["", "3,0.", "3", "1", "1,", "3,0.5,", '"3', "3,0.5,1,7"])
def test_table_is_truncated_on_resume(tmp_path, keep, torn):
    """The last row may be incomplete, also the 1 of 12."""
    path = tmp_path / "metrics.csv"
    table = CsvTable(path)
    for i in (1, 2):
        table.write({"iteration": i, "loss": 0.5 * i, "reward": NAN})
    with path.open("a") as file:
        file.write(torn)
    other = CsvTable(path, keep_iterations=keep)
    head, rows = ["iteration", "loss", "reward"], [["1", "0.5", ""], ["2", "1", ""]][:keep]
    assert read(path) == [head, *rows]
    other.write({"reward": 1.5, "iteration": keep + 1, "loss": 9.0})
    assert read(path) == [head, *rows, [str(keep + 1), "9", "1.5"]]


def test_foreign_table_raises_and_is_kept(tmp_path):
    path = tmp_path / "metrics.csv"
    path.write_text("name,age\nme,7\n")
    with pytest.raises(CheckpointError, match="no column 'iteration'.*move it away"):
        CsvTable(path, keep_iterations=3)
    assert path.read_text() == "name,age\nme,7\n"


def test_missing_or_empty_table_is_created(tmp_path):
    for content in (None, ""):
        path = tmp_path / "metrics.csv"
        if content is not None:
            path.write_text(content)
        table = CsvTable(path, keep_iterations=3)
        table.write({"iteration": 1})
        assert read(path) == [["iteration"], ["1"]]
        path.unlink()


def test_missing_logger_package_raises(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"pip install '\.\[log\]'"):
        Loggers(LoggingConfig(backends=["wandb"]), tmp_path)


def test_loggers_receive_only_finite_numbers(tmp_path):
    loggers = Loggers(LoggingConfig(), tmp_path)
    seen = []

    class Backend:
        def log_metrics(self, metrics, step):
            seen.append((metrics, step))

    loggers.backends = {"one": Backend(), "other": Backend()}
    loggers.log({"a": 1.0, "b": NAN, "c": float("inf"), "d": "text", "e": 2}, 64)
    assert seen == [({"a": 1.0, "e": 2}, 64)] * 2


def test_failing_logger_is_disabled_with_a_warning(tmp_path):
    """Training and the other loggers continue."""
    loggers = Loggers(LoggingConfig(), tmp_path)
    seen, ended = [], []

    class Backend:
        def log_metrics(self, metrics, step):
            seen.append(step)

        def shutdown(self):
            ended.append(True)

    class Broken(Backend):
        def log_metrics(self, metrics, step):
            raise ConnectionError("no answer")

    loggers.backends = {"mlflow": Broken(), "wandb": Backend()}
    with pytest.warns(UserWarning, match=r"'mlflow' failed \(ConnectionError: no answer\)"):
        loggers.log({"a": 1.0}, 64)
    loggers.log({"a": 1.0}, 128)
    loggers.close()
    loggers.close()
    assert seen == [64, 128] and ended == [True]


def test_fragments_count_groups_that_have_died_in_an_earlier_one():
    """The first group dies in step 3 of 6, and a fragment has two steps, from any episode."""
    env = Arena(3, n_agents=2, n_groups=2, years=3, lives=9, seed=0)
    team = TeamSpec.from_env(env)
    collector = RolloutCollector(env, frames_per_batch=6)
    whole, note, fragments = EpisodeTracker(team), EpisodeSums(team), EpisodeTracker(team)
    for _ in range(3):
        batch = collector.rollout()
        expected = whole.update(batch.copy())
        note(batch)
        fragments.forget(torch.ones(3, dtype=torch.bool))
        found = fragments.update(batch)
    assert found["agents_0/episode_length"] == found["agents_1/episode_length"] == 6
    assert {key: float(x) for key, x in found.items()} == {k: float(x) for k, x in expected.items()}


def test_best_member_is_logged_without_diverged_members():
    spec = AgentSpec("car", 2, Unbounded((1,)), Categorical(2))
    rows = [{"car/episode_reward": x} for x in (1.0, 5.0, 3.0, 9.0)]
    diverged = torch.tensor([False, False, False, True])
    found = row_of_all(rows, TeamSpec([spec]), [7, 8, 9, 10], diverged)
    assert found == {"car/episode_reward": 3.0, "car/best": 5.0, "car/best_seed": 8}


def test_best_member_is_unknown_before_an_episode_has_ended():
    spec = AgentSpec("car", 2, Unbounded((1,)), Categorical(2))
    rows = [{"car/episode_reward": x} for x in (math.nan, math.nan, 9.0)]
    found = row_of_all(rows, TeamSpec([spec]), [7, 8, 9], torch.tensor([False, False, True]))
    assert list(found) == ["car/episode_reward", "car/best", "car/best_seed"]
    assert all(math.isnan(value) for value in found.values())
