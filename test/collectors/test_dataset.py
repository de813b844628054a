"""Datasets: writing, reading, damage, and reading in rows."""

import contextlib
import json
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict
from torchrl.data import (
    Bounded,
    Categorical,
    LazyMemmapStorage,
    MultiCategorical,
    OneHot,
    ReplayBuffer,
    Unbounded,
)

from torchrl_marl import AgentSpec, TeamSpec
from torchrl_marl.collectors.dataset import Dataset, check_new, write_dataset
from torchrl_marl.collectors.dataset_collector import DatasetCollector
from torchrl_marl.errors import DatasetError, WriteError
from torchrl_marl.specs import Hybrid


def steps_of(*lengths):
    """Steps of episodes of these lengths; ``x`` numbers them."""
    total = sum(lengths)
    done = torch.zeros(total, 1, dtype=torch.bool)
    done[torch.tensor(lengths).cumsum(0) - 1] = True
    after = {"done": done, "truncated": torch.zeros_like(done), "terminated": done.clone()}
    return TensorDict({"x": torch.arange(total), "next": after}, [total])


def written(folder, *lengths):
    return write_dataset(folder / "data", steps_of(*lengths), {"source": "here"})


def test_what_is_written_is_read(tmp_path):
    dataset = written(tmp_path, 3, 1, 2)
    assert dataset.lengths.tolist() == [3, 1, 2] and dataset.starts.tolist() == [0, 3, 4]
    found = Dataset.open(tmp_path / "data")
    assert (found.steps == steps_of(3, 1, 2)).all()
    assert found.about["source"] == "here" and found.about["entries"]["next.done"] == "[1] bool"
    assert [path.name for path in tmp_path.iterdir()] == ["data"]  # nothing is left beside it


def test_torchrl_reads_the_storage(tmp_path):
    written(tmp_path, 3, 1)
    storage = LazyMemmapStorage(4)
    storage.loads(tmp_path / "data" / "storage")
    buffer = ReplayBuffer(storage=storage, batch_size=2)
    assert len(buffer) == 4 and torch.equal(buffer[:]["x"], torch.arange(4))


def test_a_folder_that_exists_is_left_alone(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "mine.txt").write_text("x")
    with pytest.raises(DatasetError, match="exists, expected a new folder.*choose another --out"):
        written(tmp_path, 2)
    assert [path.name for path in (tmp_path / "data").iterdir()] == ["mine.txt"]


def test_a_folder_that_cannot_be_created_is_refused_before_the_episodes(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(WriteError, match="file/data.*cannot be written.*choose another --out"):
        check_new(tmp_path / "file" / "data")
    assert check_new(tmp_path / "new" / "data") == tmp_path / "new" / "data"
    assert not list((tmp_path / "new").iterdir())


def test_a_home_folder_is_found(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert write_dataset("~/data", steps_of(2), {}).folder == tmp_path / "data"


def test_a_full_disk_leaves_nothing(tmp_path, monkeypatch):
    def memmap(self, *args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(TensorDict, "memmap", memmap)
    with pytest.raises(WriteError, match="No space left on device.*make room"):
        written(tmp_path, 2)
    assert not list(tmp_path.iterdir())


class TestDamage:
    """Each is one sentence, and no file of the folder is executed or changed."""

    def refused(self, folder, match):
        before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        with pytest.raises(DatasetError, match=match):
            Dataset.open(folder)
        assert before == {path: path.read_bytes() for path in before}

    def test_no_dataset(self, tmp_path):
        self.refused(tmp_path, "has no dataset .no dataset.json.; record one by")

    def test_half_a_description(self, tmp_path):
        folder = written(tmp_path, 2).folder
        (folder / "dataset.json").write_text('{"version": 1, "ste')
        self.refused(folder, "is damaged")

    @pytest.mark.parametrize(
        ("key", "value", "match"),
        [("version", 9, "version 9, expected 1"), ("steps", 5, r"steps \[2\], expected \[5\]")],
    )
    def test_another_description(self, tmp_path, key, value, match):
        folder = written(tmp_path, 2).folder
        about = json.loads((folder / "dataset.json").read_text())
        (folder / "dataset.json").write_text(json.dumps(about | {key: value}))
        self.refused(folder, match)

    def test_a_file_that_is_too_short(self, tmp_path):
        folder = written(tmp_path, 2).folder
        (folder / "storage" / "x.memmap").write_bytes(b"123")
        self.refused(folder, "is damaged")

    def test_no_steps(self, tmp_path):
        folder = written(tmp_path, 2).folder
        shutil.rmtree(folder / "storage")
        self.refused(folder, "is damaged")

    @pytest.mark.parametrize(
        ("remove", "match"),
        [
            ("next", r"next.done is missing, expected \[1\] bool as dataset.json says"),
            ("x", r"x is missing, expected \[\] int64"),
        ],
    )
    def test_an_entry_is_gone(self, tmp_path, remove, match):
        folder = written(tmp_path, 2).folder
        meta = folder / "storage" / "meta.json"
        entries = json.loads(meta.read_text())
        entries.pop(remove, None)
        meta.write_text(json.dumps(entries))
        shutil.rmtree(folder / "storage" / remove, ignore_errors=True)
        self.refused(folder, match)

    @pytest.mark.parametrize("dtype", ["torch.nope", "torch.nn"])
    def test_an_unknown_dtype(self, tmp_path, dtype):
        folder = written(tmp_path, 2).folder
        meta = folder / "storage" / "meta.json"
        meta.write_text(meta.read_text().replace("torch.int64", dtype))
        self.refused(folder, "is damaged")

    def test_a_description_of_another_kind(self, tmp_path):
        folder = written(tmp_path, 2).folder
        (folder / "dataset.json").write_text("[]")
        self.refused(folder, "is damaged")

    @pytest.mark.parametrize("flag", [False, None])
    def test_an_unfinished_episode(self, tmp_path, flag):
        steps = steps_of(2)
        if flag is None:
            del steps["next", "done"]
        else:
            steps["next", "done"][:] = flag
        match = "no entry next.done" if flag is None else "does not end with the end of an episode"
        with pytest.raises(DatasetError, match=match):
            write_dataset(tmp_path / "data", steps, {})
        assert not list(tmp_path.iterdir())

    def test_a_pickle_is_not_read(self, tmp_path):
        class Bomb:
            def __reduce__(self):
                return (Path.touch, (tmp_path / "boom",))

        folder = written(tmp_path, 2).folder
        (folder / "storage" / "other.pickle").write_bytes(pickle.dumps({"y": Bomb()}))
        meta = json.loads((folder / "storage" / "meta.json").read_text())
        (folder / "storage" / "meta.json").write_text(json.dumps(meta | {"_has_non_tensor": True}))
        with contextlib.suppress(DatasetError):
            Dataset.open(folder)
        assert not (tmp_path / "boom").exists()


class TestBatches:
    def read(self, dataset, n_rows, n_batches, n_steps=3):
        collector = DatasetCollector(dataset, n_rows, n_rows * n_steps)
        return torch.cat([collector.rollout() for _ in range(n_batches)], 1)

    def test_rows_read_one_episode_after_the_other(self, tmp_path):
        """Episodes of 4, 3 and 2 steps in two rows; the shorter second one is followed first."""
        found = self.read(written(tmp_path, 4, 3, 2), n_rows=2, n_batches=3)
        assert found["x"].tolist() == [[0, 1, 2, 3, 0, 1, 2, 3, 7], [4, 5, 6, 7, 8, 4, 5, 6, 0]]
        done = found["next", "done"][..., 0].int().tolist()
        assert done == [[0, 0, 0, 1, 0, 0, 0, 1, 0], [0, 0, 1, 0, 1, 0, 0, 1, 0]]
        assert not found["next", "truncated"].any()  # as recorded: no episode is cut

    def test_all_steps_are_read_equally_often(self, tmp_path):
        """59 of 119 equal episodes were never read in 60 rows."""
        found = self.read(written(tmp_path, *[4] * 119), n_rows=60, n_batches=119, n_steps=4)
        assert found["x"].flatten().bincount().tolist() == [60] * 119 * 4

    def test_more_rows_than_episodes(self, tmp_path):
        found = self.read(written(tmp_path, 2, 1), n_rows=3, n_batches=1)
        assert found["x"].tolist() == [[0, 1, 0], [2, 2, 2], [0, 1, 0]]

    def test_rewards_are_scaled(self, tmp_path):
        steps = steps_of(2, 2)
        steps["next", "car", "reward"] = torch.arange(4.0).reshape(4, 1, 1)
        dataset = write_dataset(tmp_path / "data", steps, {})
        batch = DatasetCollector(dataset, 2, 4, reward_scale=0.5).rollout()
        assert batch["next", "car", "reward"].flatten().tolist() == [0.0, 0.5, 1.0, 1.5]
        assert dataset.steps["next", "car", "reward"].flatten().tolist() == [0.0, 1.0, 2.0, 3.0]

    def test_the_dataset_does_not_change(self, tmp_path):
        dataset = written(tmp_path, 4, 3, 2)
        collector = DatasetCollector(dataset, n_rows=2, frames_per_batch=8)
        batch = collector.rollout()
        batch["x"].zero_()
        assert (Dataset.open(dataset.folder).steps == steps_of(4, 3, 2)).all()

    def test_a_resumed_one_goes_on(self, tmp_path):
        dataset = written(tmp_path, 4, 3, 2)
        first, second = (DatasetCollector(dataset, 2, 10) for _ in range(2))
        first.rollout()
        assert second.load_state_dict(first.state_dict())
        assert torch.equal(first.rollout()["x"], second.rollout()["x"])

    def test_a_resumed_one_refuses_another_dataset(self, tmp_path):
        first = DatasetCollector(written(tmp_path, 4, 3, 2), 2, 6)
        other = write_dataset(tmp_path / "other", steps_of(4, 3, 2), {"source": "there"})
        with pytest.raises(DatasetError, match="is not the one that this run has read so far"):
            DatasetCollector(other, 2, 6).load_state_dict(first.state_dict())


def of_cars(width=4, n=3, action=2):
    return TeamSpec([AgentSpec("car", n, Unbounded((width,)), Bounded(-1, 1, (action,)))])


def steps_of_cars():
    steps = steps_of(2)
    seen = {"observation": torch.zeros(2, 3, 4), "mask": torch.ones(2, 3, dtype=torch.bool)}
    steps["car"] = {**seen, "action": torch.zeros(2, 3, 2)}
    steps["next", "car"] = {**seen, "reward": torch.zeros(2, 3, 1)}
    return steps


@pytest.mark.parametrize(
    ("team", "match"),
    [
        (of_cars(), None),
        (of_cars(width=5), r"observations of 4 numbers, expected 5 for group 'car'"),
        (of_cars(n=2), r"car.observation \[3, 4\], but group 'car' .* has 2 agents"),
        (of_cars(action=3), r"car.action \[3, 2\], expected \[3, 3\]"),
    ],
)
def test_another_environment_is_refused(tmp_path, team, match):
    dataset = write_dataset(tmp_path / "data", steps_of_cars(), {})
    if match is None:
        dataset.check(team)
        return
    with pytest.raises(DatasetError, match=match):
        dataset.check(team)


@pytest.mark.parametrize(
    "missing",
    [
        ("car", "action"),
        ("car", "mask"),
        ("next", "car", "observation"),
        ("next", "car", "reward"),
        ("next", "terminated"),
    ],
)
def test_a_missing_entry_is_named(tmp_path, missing):
    dataset = write_dataset(tmp_path / "data", steps_of_cars().exclude(missing), {})
    with pytest.raises(DatasetError, match=f"has no entry {'.'.join(missing)}, .*group 'car'"):
        dataset.check(of_cars())


BOX = Bounded(-1, 1, (1,))


@pytest.mark.parametrize(
    ("spec", "recorded", "match"),
    [
        (Categorical(3), 2, None),
        (Categorical(3), 3, r"car.action 3 of agent car_1 in step 1, expected 0 to 2"),
        (Categorical(3), -1, "car.action -1 of agent car_1"),
        (OneHot(3), [0, 1, 0], None),
        (MultiCategorical([4, 2]), [3, 1], None),
        (MultiCategorical([4, 2]), [3, 2], "car.action 2 of agent car_1 .* expected 0 to 1"),
        (BOX, [1.00001], None),
        (BOX, [-3.0], "car.action -3 of agent car_1 in step 1, expected -1 to 1"),
        (BOX, [float("nan")], "car.action nan of agent car_1"),
        (Unbounded((1,)), [1e9], None),
        (Hybrid([3], BOX), [2.0, -1.0], None),
        (Hybrid([3], BOX), [3.0, 0.0], "car.action 3 of agent car_1 in step 1, expected 0 to 2"),
        (Hybrid([3], Unbounded((1,))), [0.0, -9.0], None),
    ],
)
def test_actions_that_the_environment_lacks_are_refused(tmp_path, spec, recorded, match):
    team = TeamSpec([AgentSpec("car", 3, Unbounded((4,)), spec)])
    steps = steps_of_cars()
    steps["car", "action"] = team.groups["car"].action_spec.zero((2,))
    steps["car", "action"][1, 1:] = torch.tensor(recorded)
    steps["car", "mask"][1, 2] = False  # what a waiting agent holds does not matter
    dataset = write_dataset(tmp_path / "data", steps, {})
    if match is None:
        dataset.check(team)
        return
    with pytest.raises(DatasetError, match=match):
        dataset.check(team)
