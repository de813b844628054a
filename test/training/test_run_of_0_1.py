"""A run of version 0.1 is loaded, evaluated and resumed.

Its folder was made at a20674f: ``vmas_balance_mappo`` with two environments, 80 frames and four
hidden units.
"""

import csv
import shutil
from pathlib import Path

import pytest
import torch

from torchrl_marl import resume, train
from torchrl_marl.training.run import Run

pytest.importorskip("vmas")

MADE = Path(__file__).parent / "run_of_0_1"


@pytest.fixture
def folder(tmp_path):
    return Path(shutil.copytree(MADE, tmp_path / "run"))


def test_weights_of_version_0_1_are_loaded(folder):
    path = folder / "checkpoints" / "iteration_000002.pt"
    stored = torch.load(path, weights_only=True)["learners"]
    (stored,) = stored.values() if isinstance(stored, dict) else stored
    run = Run.load(folder)
    actors = {k: v for k, v in stored.items() if k.startswith("actors.") and torch.is_tensor(v)}
    found = run.policy.state_dict()
    assert len(actors) == 4
    for name, value in actors.items():
        (same,) = [v for k, v in found.items() if k.endswith(name.removeprefix("actors.agents."))]
        assert torch.equal(value, same), name


def test_run_of_version_0_1_is_resumed(folder):
    before = (folder / "metrics.csv").read_text().splitlines()
    run = resume(folder, total_frames=160)
    assert run.summary["frames"] == 160
    after = (folder / "metrics.csv").read_text().splitlines()
    assert len(after) == 5
    old, new = (list(csv.DictReader(lines)) for lines in (before, after))
    for row, same in zip(old, new):  # rows of version 0.1 are kept
        assert {key: same[key] for key in row} == row


def test_run_starts_from_the_critic_and_statistics_of_version_0_1(folder, tmp_path):
    """Its statistics of returns have single precision."""
    run = train(
        "vmas_balance_mappo",
        folder=str(tmp_path / "new"),
        init_from=str(folder),
        env={"num_envs": 2, "max_steps": 10},
        learner={"actor": {"num_cells": [4]}, "critic": {"num_cells": [4]}, "minibatch_size": 20},
        total_frames=40,
        frames_per_batch=40,
        execution="eager",
        evaluation={"episodes": 0},
        logging={"progress": False},
    )
    assert run.summary["init_from"]["parts"] == ["actor", "critic", "normalization"]


if __name__ == "__main__":
    pytest.main([__file__])
