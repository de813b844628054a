"""Settings of a resumed run: those of its checkpoint, and edits of its config file."""

import re
import shutil
import warnings
from pathlib import Path

import pytest
import torch
from leagues import settings_of as league_settings
from runs import assert_equal, assert_same_run, final_state, small_config, table

import torchrl_marl
from torchrl_marl.apps.cli import main as cli
from torchrl_marl.apps.jobs.jobs import train_or_resume
from torchrl_marl.errors import CheckpointError, ConfigError
from torchrl_marl.recipes import load_config
from torchrl_marl.runs import resume
from torchrl_marl.training import Run, iterate, train
from torchrl_marl.training.checkpoint import all_checkpoints, latest_checkpoint, load_checkpoint
from torchrl_marl.training.config import TrainConfig, read_run_config
from torchrl_marl.training.evolution import Evolution
from torchrl_marl.training.origin import differences, run_provenance, settings_of
from torchrl_marl.training.trainer import resume as resume_plainly

pytestmark = pytest.mark.runs

ARENA = {"n_agents": 3, "years": 4, "lives": 2}


def at(folder, **overrides):
    return small_config(folder=str(folder), **{"env.kwargs": ARENA, **overrides})


def edit(folder, before, after):
    """Edit the config file of a run as a user would."""
    path = Path(folder) / "config.yaml"
    text = path.read_text()
    assert before in text
    path.write_text(text.replace(before, after, 1))


def all_files(folder):
    return {path: path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def half(tmp_path_factory):
    """A run that was stopped after three of six iterations."""
    folder = tmp_path_factory.mktemp("half") / "run"
    for iteration in iterate(at(folder)):
        if iteration.number == 3:
            break
    return folder


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The same run without interruption."""
    return train(at(tmp_path_factory.mktemp("whole") / "run"))


@pytest.fixture
def run(half, tmp_path):
    return Path(shutil.copytree(half, tmp_path / "run"))


EDITS = [
    ("  lr: 0.0005", "  lr: 0.1", "learner.lr", "0.0005", "0.1"),
    ("\nseed: 0", "\nseed: 3", "seed", "0", "3"),
    ("max_steps: 13", "max_steps: 50", "env.max_steps", "13", "50"),
    ("num_envs: 8", "num_envs: 4", "env.num_envs", "8", "4"),
    ("gamma: 0.99", "gamma: 0.5", "learner.gamma", "0.99", "0.5"),
    ("lives: 2", "lives: 3", "env.kwargs.lives", "2", "3"),
    ("    lives: 2\n", "", "env.kwargs.lives", "2", "not given"),
    (
        "central_input: observations",
        "central_input: none",
        "learner.central_input",
        "'observations'",
        "'none'",
    ),
    ("num_cells: [8]", "num_cells: [9]", "learner.actor.num_cells", "[8]", "[9]"),
    ("algorithm: mappo", "algorithm: ippo", "learner.algorithm", "'mappo'", "'ippo'"),
    ("frames_per_batch: 80", "frames_per_batch: 40", "frames_per_batch", "80", "40"),
]


@pytest.mark.parametrize(("before", "after", "key", "old", "new"), EDITS)
def test_resume_with_edited_settings_raises(run, before, after, key, old, new):
    """The message names setting, both values, file and fix. Nothing is written."""
    edit(run, before, after)
    there = all_files(run)
    path = re.escape(repr(str(run / "config.yaml")))
    said = f"^{re.escape(f'{key} was {old} when this run was made and is {new} in ')}{path}: .*"
    for use in (resume, resume_plainly):
        with pytest.raises(ConfigError, match=said) as caught:
            use(run)
        assert str(caught.value).endswith(f"or put {old} back.")
        assert all_files(run) == there


def test_resume_names_all_edited_settings(run):
    edit(run, "  lr: 0.0005", "  lr: 0.1")
    edit(run, "\nseed: 0", "\nseed: 3")
    said = r"^seed was 0 when this run was made and is 3 in '.*config.yaml', learner.lr was 0.0005"
    with pytest.raises(ConfigError, match=said + " and is 0.1: .*put those back.$"):
        resume(run)
    with pytest.raises(ConfigError, match="learner.gamma was 0.99 .*and 0.5 is asked for"):
        resume(run, **{"learner.gamma": 0.5})


def test_overrides_may_restore_edited_settings(run, whole):
    edit(run, "  lr: 0.0005", "  lr: 0.1")
    resumed = resume(run, **{"learner.lr": 0.0005})
    assert_same_run(whole.folder, resumed.folder)
    assert read_run_config(run).learner.lr == 0.0005
    assert load_config(run / "config.yaml").learner.lr == 0.0005


def test_command_line_reports_edited_settings(run, capsys):
    edit(run, "  lr: 0.0005", "  lr: 0.1")
    assert cli.main(["train", "--resume", str(run)]) == 2
    err = capsys.readouterr().err
    assert err.startswith("torchrl-marl: error: learner.lr was 0.0005 when this run was made")
    assert err.count("\n") == 1
    assert cli.main(["train", "--resume", str(run), "learner.lr=0.2"]) == 2
    assert "learner.lr was 0.0005 when this run was made and 0.2 is asked for" in (
        capsys.readouterr().err
    )


def test_edit_that_makes_settings_invalid_is_named(run, capsys):
    edit(run, "num_envs: 8", "num_envs: 7")
    assert cli.main(["train", "--resume", str(run), "total_frames=960"]) == 2
    err = capsys.readouterr().err
    assert "env.num_envs was 8 when this run was made and is 7 in " in err
    assert err.count("\n") == 1


# ------------------------------------------------------------------------- what may change


def test_more_frames_in_the_file_continue_training(run, tmp_path, capsys):
    whole = train(at(tmp_path / "whole", total_frames=640))
    edit(run, "total_frames: 480", "total_frames: 640")
    resumed = resume(run)
    assert "continues from 240 to 640 frames" in capsys.readouterr().err
    assert resumed.frames == 640
    assert table(whole.folder / "metrics.csv")[3:] == table(run / "metrics.csv")[3:]
    assert_equal(final_state(whole.folder)["learners"], final_state(run)["learners"])


def test_settings_without_effect_are_refused_on_resume(run):
    given = {"evaluation.count": 2, "evaluation.every_frames": 64}
    with pytest.raises(ConfigError, match=r"read only where evaluation\.count is null; leave"):
        resume(run, **given)


def test_fewer_frames_than_trained_raise(run):
    edit(run, "total_frames: 480", "total_frames: 160")
    with pytest.raises(ConfigError, match="total_frames is 160.* has 240 already.*restore 480 in"):
        resume(run)
    assert resume(run, total_frames=320).frames == 320  # the override is used


def test_edits_of_changeable_settings_take_effect(run):
    edit(run, "episodes: 4", "episodes: 6")
    edit(run, "every_iterations: 0", "every_iterations: 1")
    edit(run, "keep: 2", "keep: 4")
    resumed = resume(run)
    assert resumed.summary["evaluation"]["likeliest"]["episodes"] == 6
    assert [path.stem[-1] for path in all_checkpoints(run)] == ["3", "4", "5", "6"]
    made = settings_of(load_checkpoint(latest_checkpoint(run)), run)
    assert (made.evaluation.episodes, made.checkpoint.keep) == (6, 4)


def test_resume_with_another_execution_and_threads(run):
    """Execution and threads do not change the results of a run."""
    assert "execution: eager" in (run / "config.yaml").read_text()
    assert resume(run, execution="trace", threads=2, total_frames=400).frames == 400
    config = read_run_config(run)
    assert (config.execution, config.threads) == ("trace", 2)
    edit(run, "execution: trace", "execution: eager")
    edit(run, "threads: 2", "threads: 1")
    assert resume(run, total_frames=480).frames == 480


# --------------------------------------------------------------------------- every kind of run


def kinds():
    plain = {"total_frames": 240, "checkpoint": {"every_iterations": 1}}
    return {
        "population": lambda folder: at(folder, **{**plain, "population.size": 2}),
        "shards": lambda folder: at(
            folder, **{**plain, "distributed.collectors": 2, "execution": "eager"}
        ),
        "league": lambda folder: load_config("toy_kuhn_ippo", league_settings(folder)),
        "replay": lambda folder: load_config(
            "toy_arena_qmix",
            {
                "folder": str(folder),
                "total_frames": 160,
                "frames_per_batch": 80,
                "env.num_envs": 8,
                "learner.learning_starts": 80,
                "evaluation.episodes": 2,
                "learner.minibatch_size": 32,
                "logging.progress": False,
            },
        ),
    }


@pytest.mark.parametrize("kind", kinds())
def test_edited_settings_of_every_kind_of_run_raise(kind, tmp_path):
    config = kinds()[kind](tmp_path / "run")
    train(config)
    edit(tmp_path / "run", f"  gamma: {config.learner.gamma}", "  gamma: 0.5")
    with pytest.raises(ConfigError, match="^learner.gamma was .* and is 0.5 in"):
        resume(tmp_path / "run")
    edit(tmp_path / "run", "  gamma: 0.5", f"  gamma: {config.learner.gamma}")
    more = config.total_frames + config.frames_per_batch
    assert resume(tmp_path / "run", total_frames=more).frames == more


def test_edited_settings_of_a_suite_run_raise(run):
    edit(run, "  lr: 0.0005", "  lr: 0.1")
    with pytest.raises(ConfigError, match="learner.lr was 0.0005 when this run was made"):
        train_or_resume({}, run)


def test_edited_settings_of_a_population_member_raise(tmp_path):
    vary = {"learner.lr": [1e-3, 2e-3]}
    population = {"population.size": 2, "population.vary": vary}
    train(at(tmp_path / "all", total_frames=160, **population))
    member = tmp_path / "all" / "seed1"
    edit(member, "  lr: 0.002", "  lr: 0.1")
    with pytest.raises(ConfigError, match=r"learner.lr was 0.002.* and is 0.1 in .*seed1"):
        resume(member)
    edit(member, "  lr: 0.1", "  lr: 0.002")
    assert resume(member, total_frames=240).frames == 240


def test_settings_of_an_evolved_member_match_its_checkpoint(tmp_path, monkeypatch):
    """The config file changes together with its checkpoint, not before."""
    evolution = {"method": "pbt", "every_frames": 80, "least_episodes": 0, "worst": 0.5}
    evolution = {f"evolution.{key}": value for key, value in evolution.items()}
    vary = {"learner.lr": {"low": 1e-4, "high": 1e-2}}
    evolved = []
    plain = Evolution.select

    def select(self, learners, fitness, **when):
        plain(self, learners, fitness, **when)
        evolved.append(when["iteration"])
        if len(evolved) == 2:
            raise RuntimeError("power cut")

    monkeypatch.setattr(Evolution, "select", select)
    config = at(
        tmp_path / "all",
        **{**evolution, "population.size": 4, "population.vary": vary},
        **{"checkpoint.every_iterations": 1},
    )
    with pytest.raises(RuntimeError, match="power cut"):
        train(config)
    assert evolved
    for seed in range(4):
        member = tmp_path / "all" / f"seed{seed}"
        path = latest_checkpoint(member)
        assert settings_of(load_checkpoint(path), path) == read_run_config(member)


# ------------------------------------------------------------------------------- the record


@pytest.mark.parametrize("recipe", ["toy_kuhn_ippo", "toy_arena_qmix", "vmas_simple_tag_mappo"])
def test_recorded_settings_equal_the_config(recipe, tmp_path):
    config = load_config(recipe)
    assert settings_of({"made_by": run_provenance(config)}, tmp_path) == config
    assert differences(config, config) == []


def test_recorded_versions_of_packages():
    versions = run_provenance(load_config("vmas_balance_mappo"))["versions"]
    assert versions["vmas"] and versions["torch"] == torch.__version__
    assert versions["torchrl_marl"] == torchrl_marl.__version__
    assert list(run_provenance(TrainConfig())["versions"])[:4] == [
        *("torchrl_marl", "torch", "torchrl", "tensordict")
    ]


def with_record(folder, change):
    path = latest_checkpoint(folder)
    state = load_checkpoint(path)
    change(state)
    torch.save(state, path)
    return path


def test_resume_with_other_versions_warns_once(run, whole):
    path = with_record(
        run, lambda state: state["made_by"]["versions"].update(torch="1.0.0", torchrl="0.1")
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        resumed = resume(run)
    said = [str(one.message) for one in caught if "was made with" in str(one.message)]
    here = f"torch 1.0.0 (here {torch.__version__}), torchrl 0.1 (here "
    assert len(said) == 1
    assert said[0].startswith(f"checkpoint {str(path)!r} was made with {here}")
    assert "may differ from" in said[0]
    assert_same_run(whole.folder, resumed.folder)
    resume(run)  # the last checkpoint has the current versions: no warning


def test_checkpoint_without_record_resumes(run, whole):
    """Without a record there is nothing to compare and no warning."""
    with_record(run, lambda state: state.pop("made_by"))
    with pytest.raises(ConfigError, match="seed was 0 when this run was made and 3 is asked for"):
        resume(run, seed=3)
    assert_same_run(whole.folder, resume(run).folder)


@pytest.mark.parametrize("record", [None, "hello", {"settings": 3}, {"versions": [1]}, {}])
def test_malformed_record_is_ignored(run, record):
    with_record(run, lambda state: state.update(made_by=record))
    assert resume(run, total_frames=240).frames == 240


def test_record_with_unknown_settings_raises(run):
    with_record(run, lambda state: state["made_by"]["settings"].update(wheels=4))
    with pytest.raises(CheckpointError, match="holds settings that do not fit this version: .*wh"):
        resume(run)


# ----------------------------------------------------------------------------- evaluation


def test_load_with_edited_environment_warns(run):
    edit(run, "max_steps: 13", "max_steps: 20")
    with pytest.warns(UserWarning, match="env.max_steps was 13 when this run was made and is 20"):
        loaded = Run.load(run)
    assert loaded.config.env.max_steps == 20
    edit(run, "max_steps: 20", "max_steps: 13")
    edit(run, "episodes: 4", "episodes: 6")
    assert Run.load(run).evaluate()["episodes"] == 6  # may be changed


def test_load_with_edited_network_sizes_raises(run):
    edit(run, "num_cells: [8]", "num_cells: [9]")
    with pytest.raises(
        CheckpointError, match=r"learner.actor.num_cells was \[8\] .*restore the setting"
    ):
        Run.load(run)
