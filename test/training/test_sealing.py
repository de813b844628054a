"""Four hundred random damages to a checkpoint: it loads exactly or is refused."""

import random
import zipfile

import pytest
import torch
from runs import assert_equal, small_config

from torchrl_marl.errors import CheckpointError
from torchrl_marl.training import train
from torchrl_marl.training.checkpoint import (
    describe_damage,
    latest_checkpoint,
    load_checkpoint,
    save_checkpoint,
)

N_DAMAGES = 400


@pytest.fixture(scope="module")
def state(tmp_path_factory):
    """The checkpoint of a run: networks, an optimizer, episodes, random state."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    config = small_config(total_frames=160, folder=str(folder))
    return load_checkpoint(latest_checkpoint(train(config).folder))


def sealed(state, folder):
    return save_checkpoint(folder, 1, state, keep=1)


def of_version_0_1(state, folder):
    """As version 0.1 wrote it: without a seal."""
    path = folder / "checkpoints" / "iteration_000001.pt"
    path.parent.mkdir()
    torch.save(state, path)
    return path


def cut(data, draw):
    return data[: draw.randrange(len(data))]


def flipped(data, draw):
    for _ in range(draw.choice((1, 1, 2, 8))):
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    return data


def zeroed(data, draw):
    start, length = draw.randrange(len(data)), draw.choice((1, 16, 512, 4096))
    data[start : start + length] = bytes(len(data[start : start + length]))
    return data


def flipped_in_the_directory(data, draw):
    """Flip a bit in the zip directory at the end of the file, which has no CRC."""
    data[-draw.randrange(1, 3000)] ^= 1 << draw.randrange(8)
    return data


def prolonged(data, draw):
    return data + draw.randbytes(draw.choice((1, 71, 500)))


def moved(data, draw):
    """Copy a block to another place, as a repair of the file system may do."""
    size = 512
    here, there = (draw.randrange(max(1, len(data) // size - 1)) * size for _ in range(2))
    data[here : here + size] = data[there : there + size]
    return data


@pytest.mark.runs
@pytest.mark.parametrize("write", [sealed, of_version_0_1])
def test_damaged_checkpoint_is_refused_or_loads_exactly(tmp_path, state, write):
    path = write(state, tmp_path)
    whole, draw = path.read_bytes(), random.Random(0)
    refused = 0
    for i in range(N_DAMAGES):
        kind = (cut, flipped, zeroed, flipped_in_the_directory, prolonged, moved)[i % 6]
        data = bytes(kind(bytearray(whole), draw))
        path.write_bytes(data)
        try:
            found = load_checkpoint(path)
        except CheckpointError as error:
            refused += data != whole
            assert "broken or half-written (" in str(error) and "\n" not in str(error)
        else:
            assert_equal(found, state)
    path.write_bytes(whole)
    assert_equal(load_checkpoint(path), state)
    # The others changed nothing or only padding.
    assert refused > 0.75 * N_DAMAGES if write is sealed else refused > N_DAMAGES / 2


def test_sealed_checkpoint_is_read_by_torch_and_zipfile(tmp_path, state):
    path = sealed(state, tmp_path)
    assert_equal(torch.load(path, weights_only=True), state)
    assert_equal(torch.load(path, weights_only=True, mmap=True), state)
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
        assert archive.comment.startswith(b"sha256:")


def test_change_of_any_single_byte_is_detected(tmp_path):
    """Each byte of a small file is changed in turn."""
    state = {"weights": torch.arange(3.0)}
    path = sealed(state, tmp_path)
    whole = path.read_bytes()
    assert describe_damage(path) is None
    unnoticed = []
    for i in range(len(whole)):
        data = bytearray(whole)
        data[i] ^= 1
        path.write_bytes(data)
        if describe_damage(path) is None:
            unnoticed.append(i)
    assert unnoticed == []
