"""Datasets: writing, reading, damaged files, and batches of rows."""

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


def test_write_and_open_round_trip(tmp_path):
    dataset = written(tmp_path, 3, 1, 2)
    assert dataset.lengths.tolist() == [3, 1, 2] and dataset.starts.tolist() == [0, 3, 4]
    found = Dataset.open(tmp_path / "data")
    assert (found.steps == steps_of(3, 1, 2)).all()
    assert found.about["source"] == "here" and found.about["entries"]["next.done"] == "[1] bool"
    assert [path.name for path in tmp_path.iterdir()] == ["data"]  # no temporary files are left


def test_torchrl_storage_loads_the_dataset(tmp_path):
    written(tmp_path, 3, 1)
    storage = LazyMemmapStorage(4)
    storage.loads(tmp_path / "data" / "storage")
    buffer = ReplayBuffer(storage=storage, batch_size=2)
    assert len(buffer) == 4 and torch.equal(buffer[:]["x"], torch.arange(4))


def test_existing_folder_raises_and_is_not_changed(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "mine.txt").write_text("x")
    with pytest.raises(DatasetError, match="exists, expected a new folder.*choose another --out"):
        written(tmp_path, 2)
    assert [path.name for path in (tmp_path / "data").iterdir()] == ["mine.txt"]


def test_unwritable_folder_raises_before_recording(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(WriteError, match="file/data.*cannot be written.*choose another --out"):
        check_new(tmp_path / "file" / "data")
    assert check_new(tmp_path / "new" / "data") == tmp_path / "new" / "data"
    assert not list((tmp_path / "new").iterdir())


def test_home_folder_is_expanded(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert write_dataset("~/data", steps_of(2), {}).folder == tmp_path / "data"


def test_full_disk_leaves_no_files(tmp_path, monkeypatch):
    def memmap(self, *args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(TensorDict, "memmap", memmap)
    with pytest.raises(WriteError, match="No space left on device.*make room"):
        written(tmp_path, 2)
    assert not list(tmp_path.iterdir())


class TestDamage:
    """Damaged datasets raise; no file of the folder is executed or changed."""

    def refused(self, folder, match):
        before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        with pytest.raises(DatasetError, match=match):
            Dataset.open(folder)
        assert before == {path: path.read_bytes() for path in before}

    def test_folder_without_dataset_raises(self, tmp_path):
        self.refused(tmp_path, "has no dataset .no dataset.json.; record one by")

    def test_truncated_description_raises(self, tmp_path):
        folder = written(tmp_path, 2).folder
        (folder / "dataset.json").write_text('{"version": 1, "ste')
        self.refused(folder, "is damaged")

    @pytest.mark.parametrize(
        ("key", "value", "match"),
        [("version", 9, "version 9, expected 1"), ("steps", 5, r"steps \[2\], expected \[5\]")],
    )
    def test_description_that_does_not_match_raises(self, tmp_path, key, value, match):
        folder = written(tmp_path, 2).folder
        about = json.loads((folder / "dataset.json").read_text())
        (folder / "dataset.json").write_text(json.dumps(about | {key: value}))
        self.refused(folder, match)

    def test_truncated_file_raises(self, tmp_path):
        folder = written(tmp_path, 2).folder
        (folder / "storage" / "x.memmap").write_bytes(b"123")
        self.refused(folder, "is damaged")

    def test_missing_storage_raises(self, tmp_path):
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
    def test_missing_entry_of_the_storage_raises(self, tmp_path, remove, match):
        folder = written(tmp_path, 2).folder
        meta = folder / "storage" / "meta.json"
        entries = json.loads(meta.read_text())
        entries.pop(remove, None)
        meta.write_text(json.dumps(entries))
        shutil.rmtree(folder / "storage" / remove, ignore_errors=True)
        self.refused(folder, match)

    @pytest.mark.parametrize("dtype", ["torch.nope", "torch.nn"])
    def test_unknown_dtype_raises(self, tmp_path, dtype):
        folder = written(tmp_path, 2).folder
        meta = folder / "storage" / "meta.json"
        meta.write_text(meta.read_text().replace("torch.int64", dtype))
        self.refused(folder, "is damaged")

    def test_description_of_wrong_type_raises(self, tmp_path):
        folder = written(tmp_path, 2).folder
        (folder / "dataset.json").write_text("[]")
        self.refused(folder, "is damaged")

    @pytest.mark.parametrize("flag", [False, None])
    def test_writing_an_unfinished_episode_raises(self, tmp_path, flag):
        steps = steps_of(2)
        if flag is None:
            del steps["next", "done"]
        else:
            steps["next", "done"][:] = flag
        match = "no entry next.done" if flag is None else "does not end with the end of an episode"
        with pytest.raises(DatasetError, match=match):
            write_dataset(tmp_path / "data", steps, {})
        assert not list(tmp_path.iterdir())

    def test_pickles_are_not_loaded(self, tmp_path):
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

    def test_rows_read_episodes_in_sequence(self, tmp_path):
        """Episodes of 4, 3 and 2 steps in two rows; the shorter second row gets the third."""
        found = self.read(written(tmp_path, 4, 3, 2), n_rows=2, n_batches=3)
        assert found["x"].tolist() == [[0, 1, 2, 3, 0, 1, 2, 3, 7], [4, 5, 6, 7, 8, 4, 5, 6, 0]]
        done = found["next", "done"][..., 0].int().tolist()
        assert done == [[0, 0, 0, 1, 0, 0, 0, 1, 0], [0, 0, 1, 0, 1, 0, 0, 1, 0]]
        assert not found["next", "truncated"].any()  # as recorded: no episode is truncated

    def test_all_steps_are_read_equally_often(self, tmp_path):
        """A past bug: 59 of 119 equal episodes were never read in 60 rows."""
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

    def test_writing_to_a_batch_does_not_change_the_dataset(self, tmp_path):
        dataset = written(tmp_path, 4, 3, 2)
        collector = DatasetCollector(dataset, n_rows=2, frames_per_batch=8)
        batch = collector.rollout()
        batch["x"].zero_()
        assert (Dataset.open(dataset.folder).steps == steps_of(4, 3, 2)).all()

    def test_collector_resumes_exactly(self, tmp_path):
        dataset = written(tmp_path, 4, 3, 2)
        first, second = (DatasetCollector(dataset, 2, 10) for _ in range(2))
        first.rollout()
        assert second.load_state_dict(first.state_dict())
        assert torch.equal(first.rollout()["x"], second.rollout()["x"])

    def test_resuming_with_another_dataset_raises(self, tmp_path):
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
def test_dataset_of_another_environment_raises(tmp_path, team, match):
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
def test_error_names_missing_entry(tmp_path, missing):
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
def test_actions_outside_the_spec_raise(tmp_path, spec, recorded, match):
    team = TeamSpec([AgentSpec("car", 3, Unbounded((4,)), spec)])
    steps = steps_of_cars()
    steps["car", "action"] = team.groups["car"].action_spec.zero((2,))
    steps["car", "action"][1, 1:] = torch.tensor(recorded)
    steps["car", "mask"][1, 2] = False  # actions of masked agents are not checked
    dataset = write_dataset(tmp_path / "data", steps, {})
    if match is None:
        dataset.check(team)
        return
    with pytest.raises(DatasetError, match=match):
        dataset.check(team)
