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
SMALL = {"frames_per_batch": 960, "total_frames": 2880, "seed": 3}
EPOCHS = {"learner": {"minibatch_size": 320}}
REPLAY = {"learner": {"learning_starts": 1000, "updates_per_frame": 0.01}}
BALANCE = {"env": {"max_steps": 20}}
# A policy is stored after each of three batches.
POOL = {"env": {"num_envs": 96}, "league": {"snapshot_every": 960}}
CASES = {
    "mappo": ("vmas_balance_mappo", {**BALANCE, **EPOCHS}),
    "qmix": ("vmas_balance_qmix", {**BALANCE, **REPLAY}),
    "masac": ("vmas_balance_masac", {**BALANCE, **REPLAY}),
    "league": ("toy_kuhn_ippo", {**POOL, **EPOCHS}),
}
QUIET = {"evaluation.episodes": 0, "evaluation.every_frames": None, "logging.progress": False}
# Settings of a recipe that its example lacks; a league needs evaluations.
MORE = {"league": {"league.opponents": "uniform", "evaluation.episodes": 1}}


def load(name):
    spec = importlib.util.spec_from_file_location(f"example_{name}", FOLDER / f"{name}.py")
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", CASES)
def test_example_equals_its_recipe(name, tmp_path, capsys):
    recipe, sections = CASES[name]
    if recipe.startswith("vmas"):
        pytest.importorskip("vmas")
    example = load(name)
    own = {setting: value for one in sections.values() for setting, value in one.items()}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in the recipe
    try:
        learner = example.train(example.Settings(**SMALL, **own))
    finally:
        torch.set_num_threads(threads)
    run = torchrl_marl.train(
        recipe,
        folder=tmp_path / "run",
        execution="eager",
        **SMALL,
        **sections,
        **QUIET | MORE.get(name, {}),
    )
    found = [p for p in learner.actor.parameters() if p.requires_grad]
    expected = [p for p in run.policy.parameters() if p.requires_grad]
    assert len(found) == len(expected) > 0
    assert all(map(torch.equal, found, expected))
    trained = getattr(learner, "optimizers", None) or {"all": learner.optimizer}
    assert all(one.state for one in trained.values())
    assert capsys.readouterr().out.count("frames/s") >= 3


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.py")), ids=lambda path: path.stem)
def test_example_is_short_and_tested(path):
    assert len(path.read_text().splitlines()) <= LONGEST
    assert path.stem in CASES


@pytest.mark.runs
def test_example_runs_from_the_command_line(tmp_path):
    pytest.importorskip("vmas")
    small = ["--total-frames", "192", "--frames-per-batch", "192", "--minibatch-size", "96"]
    command = [sys.executable, str(FOLDER / "mappo.py"), *small]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "192 frames" in done.stdout
