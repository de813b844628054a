"""Hybrid actions on the command line: train, load, record, clone, and refused algorithms."""

import pytest
import torch

from torchrl_marl.apps.cli import main as cli
from torchrl_marl.training.run import Run

pytestmark = pytest.mark.runs

SETTINGS = [
    "env.kwargs.hybrid_actions=true",
    "threads=1",
    "total_frames=19200",
    "evaluation.episodes=32",
    "evaluation.both=false",
    "logging.progress=false",
]


def test_hybrid_actions_on_the_command_line(tmp_path, capsys):
    """The optimal return is 12.5. A right index with any number earns 5/12 of it."""
    folder, data = tmp_path / "run", tmp_path / "data"
    assert cli.main(["train", "toy_arena_mappo", *SETTINGS, f"folder={folder}"]) == 0
    run = Run.load(folder)
    assert run.summary["return_after"] > 9 > 1 > run.summary["return_random"]
    again = run.play(32, deterministic=True, seed=5).returns["agents"].mean().item()
    assert again == pytest.approx(run.summary["return_after"], abs=0.5)

    record = ["record", str(folder), "--out", str(data), "--episodes", "32", "--deterministic"]
    assert cli.main(record) == 0
    cloning = ["learner.algorithm=bc", "learner.lr=3e-3", "total_frames=6400"]
    settings = [*SETTINGS, *cloning, f"data.folder={data}"]
    assert cli.main(["train", "toy_arena_mappo", *settings, f"folder={tmp_path}/clone"]) == 0
    assert Run.load(tmp_path / "clone").summary["return_after"] > 9

    capsys.readouterr()
    settings = [*SETTINGS, "learner.algorithm=iql", "learner.learning_starts=640"]
    assert cli.main(["train", "toy_arena_mappo", *settings, f"folder={tmp_path}/iql"]) == 2
    assert capsys.readouterr().err == (
        "torchrl-marl: error: group 'agents': its actions are hybrid, [4] and 1 number, which iql "
        "does not support; use algorithm=mappo, ippo, happo or bc.\n"
    )


@pytest.mark.parametrize(
    "more",
    [
        ["learner.actor.memory=gru", "learner.window=10"],
        ["learner.actor.communication=commnet", "learner.actor.communication.gate=true"],
        ["learner.estimator=vtrace"],
        ["learner.actor.sharing=none", "learner.critic.sharing=none"],
        ["learner.precision=bf16"],
    ],
    ids=lambda more: more[0].split(".")[-1],
)
def test_hybrid_actions_with_other_features(more, tmp_path):
    settings = [*SETTINGS, "total_frames=1280", *more, f"folder={tmp_path}/run"]
    assert cli.main(["train", "toy_arena_mappo", *settings]) == 0
    policy = Run.load(tmp_path / "run").policy
    assert all(bool(torch.isfinite(p).all()) for p in policy.parameters())
