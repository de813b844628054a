"""Checkpoints that would use far more memory than their file size are refused."""

import resource
import shutil
import zipfile

import pytest
import torch
from runs import small_config

from torchrl_marl.errors import CheckpointError
from torchrl_marl.training import Run, iterate
from torchrl_marl.training.checkpoint import (
    _first_non_finite,
    append_checksum,
    describe_damage,
    latest_checkpoint,
    leaves,
    load_checkpoint,
    read_tensors,
    save_checkpoint,
)
from torchrl_marl.training.pool import read_player
from torchrl_marl.training.trainer import resume

pytestmark = pytest.mark.runs

GIGABYTES = 12 << 30


def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def sealed(path, write):
    with path.open("w+b") as file:
        write(file)
    with path.open("r+b") as file:
        append_checksum(file)
    return path


def rewritten(path, change=lambda name, data: data, kind=zipfile.ZIP_STORED):
    """The same zip file with other entries."""
    with zipfile.ZipFile(path) as archive:
        parts = {name: change(name, archive.read(name)) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w", kind) as archive:
        for name, data in parts.items():
            archive.writestr(name, data)
    return path


def holding(path, value):
    torch.save({"format": 1, "actors": {"all": value}, "learners": [value]}, path)
    return path


def expanded(path):
    return holding(path, {"w": torch.zeros(1).expand(GIGABYTES // 4)})


def many_views(path):
    row = torch.zeros(1 << 20)
    return holding(path, {str(i): row.view(1, -1).squeeze(0) for i in range(3000)})


def deflated(path):
    return rewritten(holding(path, {"w": torch.zeros(1 << 24)}), kind=zipfile.ZIP_DEFLATED)


def overlapping(path):
    """A hundred zip entries that share one place in the file."""
    holding(path, {"w": torch.zeros(1 << 16)})
    with zipfile.ZipFile(path, "a") as archive:
        one = next(x for x in archive.infolist() if x.filename.endswith("data/0"))
        for i in range(100):
            twin = zipfile.ZipInfo(one.filename[:-1] + str(i + 1))
            for name in ("header_offset", "file_size", "compress_size", "CRC"):
                setattr(twin, name, getattr(one, name))
            archive.filelist.append(twin)
        archive._didModify = True
    return path


def of_laughs(path):
    """Nested lists, each of which holds the next one twice."""
    value = [1.0]
    for _ in range(60):
        value = [value, value]
    return holding(path, value)


def allocating(path):
    """A pickle that allocates a large buffer."""
    holding(path, {"w": torch.zeros(1)})
    asking = b"\x80\x02c__builtin__\nbytearray\nJ\xff\xff\xff\x7f\x85R."
    return rewritten(path, lambda name, data: asking if name.endswith("data.pkl") else data)


BOMBS = {
    "expanded": (expanded, "its tensors up to .* have [0-9,]+ bytes, expected at most"),
    "many views": (many_views, "its tensors up to .* have [0-9,]+ bytes, expected at most"),
    "deflated": (deflated, "its entries are compressed, expected stored ones"),
    "overlapping": (overlapping, "its entries have [0-9,]+ bytes, expected at most its own"),
    "of laughs": (of_laughs, "it holds more than [0-9,]+ values"),
    "allocating": (allocating, "it holds '__builtin__.bytearray', expected tensors, numbers"),
}


@pytest.mark.parametrize("is_sealed", [False, True])
@pytest.mark.parametrize("bomb", BOMBS)
def test_small_malicious_file_is_refused_with_little_memory(bomb, is_sealed, tmp_path):
    make, said = BOMBS[bomb]
    path = make(tmp_path / "iteration_000001.pt")
    if is_sealed:
        with path.open("r+b") as file:
            append_checksum(file)
        assert describe_damage(path) is None
    before = peak()
    for read in (load_checkpoint, read_player):
        with pytest.raises(CheckpointError, match=said) as caught:
            read(path)
        assert "\n" not in str(caught.value)
    assert peak() - before < 300 << 20


def test_run_with_a_malicious_checkpoint_is_refused(tmp_path):
    """The expanded tensors have the names of the networks."""
    folder = tmp_path / "run"
    for _ in iterate(small_config(folder=str(folder))):
        break
    path = latest_checkpoint(folder)
    state = load_checkpoint(path)
    weights = state["learners"][0]
    for name, value in weights.items():
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            weights[name] = torch.zeros(()).expand(GIGABYTES // 4)
    shutil.rmtree(path.parent)
    save_checkpoint(folder, 1, {k: v for k, v in state.items() if k != "format"}, keep=1)
    assert latest_checkpoint(folder).stat().st_size < 1 << 20
    before = peak()
    for use in (Run.load, resume):
        with pytest.raises(CheckpointError, match="its tensors up to learners.0"):
            use(folder)
    assert peak() - before < 300 << 20


def test_ordinary_state_with_expanded_tensors_is_read(tmp_path):
    """Slightly expanded tensors are accepted: older files may hold them."""
    state = {"x": torch.zeros(3, 1).expand(3, 1000), "y": [torch.arange(4)], "z": (1, "a", None)}
    path = tmp_path / "state.pt"
    torch.save(state, path)
    assert torch.equal(read_tensors(path)["x"], state["x"])
    assert sorted(name for name, _ in leaves(state)) == ["x", "y.0"]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("kind", [torch.float32, torch.float64, torch.bfloat16, torch.complex64])
def test_non_finite_values_are_found_without_a_copy(bad, kind):
    fine = torch.ones(3, 4, dtype=kind)
    wrong = fine.clone()
    wrong[2, 1] = bad
    assert _first_non_finite({"a": [fine, fine[:0]], "n": torch.arange(3)}, "learners") is None
    assert _first_non_finite({"a": [fine, wrong.t()]}, "learners") == "learners.a.1"
    large = torch.tensor(bad, dtype=kind).expand(1 << 20, 1 << 20)
    before = peak()
    assert _first_non_finite([large.t()], "learners") == "learners.0"
    assert _first_non_finite([torch.ones((), dtype=kind).expand(1 << 40)], "learners") is None
    assert peak() - before < 100 << 20


def test_python_values_round_trip(tmp_path):
    state = {"n": 2**70, "t": "a\u2028b", "b": b"\x00\xff", "f": 1e-300, "s": {1, 2}, "c": (True,)}
    path = tmp_path / "state.pt"
    torch.save(state, path)
    assert read_tensors(path) == state
