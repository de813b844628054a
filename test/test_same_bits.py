"""``benchmarks/same_bits.py``: leaves of states, their digests, and differences."""

import importlib
import sys
from pathlib import Path

import numpy
import pytest
import torch
from tensordict import TensorDict

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))

same_bits = importlib.import_module("same_bits")
same_bits_cases = importlib.import_module("same_bits_cases")
same_bits_leaves = importlib.import_module("same_bits_leaves")


def digests_of(state):
    return {path: same_bits_leaves.digest(leaf) for path, leaf in same_bits_leaves.leaves(state)}


def state(**more):
    return {"learners": [{"weight": torch.arange(3.0), "lr": 1e-3}], "iteration": 3, **more}


def test_leaves_flatten_a_state():
    nested = TensorDict({"a": {"b": torch.zeros(2, 1)}}, batch_size=[2])
    found = dict(
        same_bits_leaves.leaves(state(batch=nested, keys=numpy.array([1, 2]), pair=(None, "x")))
    )
    assert list(found) == [
        *("learners/0/weight", "learners/0/lr", "iteration", "batch/a/b"),
        *("keys", "pair/0", "pair/1"),
    ]
    assert torch.equal(found["keys"], torch.tensor([1, 2])) and found["pair/1"] == "x"


def test_leaves_skip_times_and_versions():
    timed = state(seconds=1.0, summary={"frames_per_second": 2, "frames": 8}, made_by={"v": "1"})
    assert set(digests_of(timed)) - set(digests_of(state())) == {"summary/frames"}


@pytest.mark.parametrize(
    "other",
    [
        torch.tensor([0.0, 1.0, 2.0000002]),
        torch.tensor([-0.0, 1.0, 2.0]),
        torch.tensor([0, 1, 2]),
        torch.tensor([[0.0, 1.0, 2.0]]),
        [0.0, 1.0, 2.0],
    ],
    ids=["last bit", "sign of 0", "type", "shape", "list"],
)
def test_digest_depends_on_bits_dtype_and_shape(other):
    assert same_bits_leaves.digest(other) != same_bits_leaves.digest(torch.arange(3.0))


def test_equal_values_have_equal_digests():
    columns = torch.arange(6.0).reshape(3, 2).t()
    assert same_bits_leaves.digest(columns) == same_bits_leaves.digest(columns.contiguous())
    nan = torch.tensor([torch.nan], dtype=torch.bfloat16)
    assert same_bits_leaves.digest(nan) == same_bits_leaves.digest(
        nan.clone()
    ) and same_bits_leaves.digest(1) != same_bits_leaves.digest(1.0) != same_bits_leaves.digest(
        True
    )


def test_differences_name_each_leaf():
    other = state(more=1)
    other["learners"][0]["weight"] = torch.tensor([0.0, 1.0, 2.5])
    del other["iteration"]
    assert same_bits_leaves.differences(digests_of(state()), digests_of(other)) == [
        ("learners/0/weight", "differs"),
        ("iteration", "only on base"),
        ("more", "only on head"),
    ]
    assert same_bits_leaves.differences(digests_of(state()), digests_of(state())) == []


def test_renamed_leaf_with_same_bits_counts_as_moved():
    one, other = state(), state()
    other["round"] = other.pop("iteration")
    assert same_bits_leaves.only_moved(digests_of(one), digests_of(other))
    other["round"] = 4
    assert not same_bits_leaves.only_moved(digests_of(one), digests_of(other))
    assert not same_bits_leaves.only_moved(digests_of(one), digests_of(one))


def test_how_far_reports_differences():
    one = torch.arange(3.0)
    other = one + torch.tensor([0.0, 0.0, 0.5])
    assert (
        same_bits_leaves.describe_difference(one, other) == "largest difference 0.5, 1 of 3 numbers"
    )
    assert (
        same_bits_leaves.describe_difference(one, other.double())
        == "float32 [3] on base, float64 [3] on head"
    )
    assert same_bits_leaves.describe_difference(one, None) == "float32 [3] on base, None on head"
    assert same_bits_leaves.describe_difference(one > 1, other < 1).startswith(
        "largest difference 1"
    )
    empty = torch.tensor([torch.nan, 0.0, 0.0])
    assert (
        same_bits_leaves.describe_difference(one, empty) == "largest difference inf, 3 of 3 numbers"
    )


def test_leaves_of_a_run_folder(tmp_path):
    (tmp_path / "seed0" / "checkpoints").mkdir(parents=True)
    for number in (1, 2):
        file = tmp_path / "seed0" / "checkpoints" / f"iteration_00000{number}.pt"
        torch.save({"iteration": number, "weight": torch.ones(1)}, file)
    (tmp_path / "metrics.csv").write_text("iteration,seconds,loss\n1,0.5,0.25\n")
    (tmp_path / "summary.json").write_text('{"return": 1.5, "seconds": 2}')
    found = same_bits_leaves.leaves_of_run(tmp_path)
    last = "seed0/checkpoints/iteration_000002.pt"
    assert list(found) == [
        *("metrics.csv/0/iteration", "metrics.csv/0/loss", f"{last}/iteration", f"{last}/weight"),
        "summary.json/return",
    ]
    assert found["metrics.csv/0/loss"] == "0.25" and found[f"{last}/iteration"] == 2


def test_cases_have_unique_names_and_include_quick_ones():
    cases = same_bits_cases.all_cases()
    names = [case.name for case in cases]
    assert len(set(names)) == len({case.stem for case in cases}) == len(cases)
    asked = {name.rpartition("/")[2] if "eager" in name else name for name in names}
    assert asked >= same_bits_cases.QUICK
    kinds = {name.partition("/")[0] for name in names if "/" in name}
    assert kinds >= {"eager", "trace", "compile", "resume", "ranks", "shards", "population"}


def test_verdict_names_the_failed_side(tmp_path):
    case = same_bits_cases.Case("a/b", "train", "toy_arena_mappo", {})
    sides = [same_bits.Side(name, tmp_path, tmp_path / name) for name in ("base", "head")]
    for side in sides:
        side.results.mkdir()
    same_bits.file_of(sides[0], case).write_text('{"error": null, "digests": {}, "seconds": 1}')
    same_bits.note_death(sides[1], case, -11, "the last line")
    found = same_bits.verdict(case, *sides)
    assert found.word == "FAILED"
    assert found.lines == ["head: the process ended with status -11: the last line"]
