"""Programs in ``examples/`` compute the same bits as their recipes."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import torchrl_marl

FOLDER = Path(__file__).parent.parent / "examples"
LONGEST = 300  # lines
MAX_STEPS = 20
SMALL = {"frames_per_batch": 960, "total_frames": 2880, "seed": 3}
REPLAY = {"learning_starts": 1000, "updates_per_frame": 0.01}
CASES = {
    "mappo": ("vmas_balance_mappo", {"minibatch_size": 320}),
    "qmix": ("vmas_balance_qmix", REPLAY),
    "masac": ("vmas_balance_masac", REPLAY),
}


def load(name):
    spec = importlib.util.spec_from_file_location(f"example_{name}", FOLDER / f"{name}.py")
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", CASES)
def test_an_example_equals_its_recipe(name, tmp_path, capsys):
    pytest.importorskip("vmas")
    recipe, own = CASES[name]
    example = load(name)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in the recipe
    try:
        learner = example.train(example.Settings(**SMALL, **own, max_steps=MAX_STEPS))
    finally:
        torch.set_num_threads(threads)
    run = torchrl_marl.train(
        recipe,
        folder=tmp_path / "run",
        execution="eager",
        env={"max_steps": MAX_STEPS},
        learner=own,
        evaluation={"episodes": 0, "every_frames": None},
        logging={"progress": False},
        **SMALL,
    )
    found = [p for p in learner.actor.parameters() if p.requires_grad]
    expected = [p for p in run.policy.parameters() if p.requires_grad]
    assert len(found) == len(expected) > 0
    assert all(map(torch.equal, found, expected))
    trained = getattr(learner, "optimizers", None) or {"all": learner.optimizer}
    assert all(one.state for one in trained.values())
    assert capsys.readouterr().out.count("frames/s") >= 3


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.py")), ids=lambda path: path.stem)
def test_an_example_is_short_and_has_a_test(path):
    assert len(path.read_text().splitlines()) <= LONGEST
    assert path.stem in CASES


@pytest.mark.runs
def test_an_example_runs_from_the_command_line(tmp_path):
    pytest.importorskip("vmas")
    small = ["--total-frames", "192", "--frames-per-batch", "192", "--minibatch-size", "96"]
    command = [sys.executable, str(FOLDER / "mappo.py"), *small]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "192 frames" in done.stdout
