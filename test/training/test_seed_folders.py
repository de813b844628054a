"""A folder with one run per seed, as made by ``--seeds`` with ``folder=``."""

import pytest

from torchrl_marl.apps.cli import main as cli
from torchrl_marl.errors import CheckpointError
from torchrl_marl.recipes import load_config, save_config
from torchrl_marl.training.config import read_run_config, seed_folders


@pytest.fixture
def parent(tmp_path):
    """Runs of seeds 2 and 10, and two folders that are not runs."""
    for seed in (10, 2):
        folder = tmp_path / "runs" / f"seed{seed}"
        folder.mkdir(parents=True)
        config = load_config("toy_arena_mappo", {"seed": seed, "folder": str(folder)})
        save_config(config, folder / "config.yaml")
        (folder / "metrics.csv").write_text(f"frames,agents/episode_reward\n640,{seed}\n")
    (tmp_path / "runs" / "seedling").mkdir()
    (tmp_path / "runs" / "seed3").mkdir()
    return tmp_path / "runs"


def test_seed_folders_are_sorted_by_seed(parent):
    assert [folder.name for folder in seed_folders(parent)] == ["seed2", "seed10"]
    assert seed_folders(parent / "seed2") == seed_folders(parent / "none") == []


@pytest.mark.parametrize("command", [["train", "--resume"], ["evaluate"]])
def test_seed_parent_as_run_folder_raises(command, parent, capsys):
    with pytest.raises(
        CheckpointError, match="holds 2 run folders, one for each seed; give one of"
    ):
        read_run_config(parent)
    assert cli.main([*command, str(parent)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert f"give one of {parent / 'seed2'}, {parent / 'seed10'}." in error


def test_plot_of_a_seed_parent_draws_all_runs(parent, capsys):
    pytest.importorskip("matplotlib")
    from torchrl_marl.apps.plotting import learning_curve

    (axes,) = learning_curve(parent).axes
    line = next(line for line in axes.lines if "2 seeds" in line.get_label())
    assert line.get_ydata().tolist() == [6.0]  # the mean of 2 and 10
    assert cli.main(["plot", str(parent)]) == 0
    written = [str(parent / f"learning_curve.{kind}") for kind in ("png", "csv")]
    assert capsys.readouterr().out.split() == written
