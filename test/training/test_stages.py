"""Stages of a curriculum, and evaluation metrics that end a run early."""

import json
import os
import shutil
import signal

import pytest
import torch
from runs import assert_equal, assert_same_run, final_state, small_config, table

import torchrl_marl
from torchrl_marl.apps.cli.main import main
from torchrl_marl.apps.comparison import find_run_folders
from torchrl_marl.apps.reports.curves import read_run
from torchrl_marl.errors import CheckpointError, ConfigError
from torchrl_marl.recipes import load_config, stages_of
from torchrl_marl.training import iterate
from torchrl_marl.training.callbacks import Callback
from torchrl_marl.training.checkpoint import all_checkpoints, load_checkpoint
from torchrl_marl.training.config import last_stage, read_run_config
from torchrl_marl.training.run import Run
from torchrl_marl.training.start_from import read_source
from torchrl_marl.training.training import Training

STAGES = {"near": {"total_frames": 240}, "far": {"env.max_steps": 17, "learner.lr": 1e-4}}
SETTINGS = {"total_frames": 320, "checkpoint": {"every_iterations": 1, "keep": 9}}
NAMES = list(STAGES)
EVALUATED = {"evaluation.every_frames": 80}


def settings(folder, **overrides):
    """The settings of a run in two stages, of 3 and 4 iterations."""
    return small_config(**{"stages": STAGES, "folder": str(folder), **SETTINGS, **overrides})


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """An uninterrupted run in two stages. Tests must not change it."""
    folder = tmp_path_factory.mktemp("stages") / "whole"
    torchrl_marl.train(settings(folder))
    return folder


def learners(path):
    """The tensors of the learner in a checkpoint, by name."""
    state = load_checkpoint(path)["learners"][0]
    return {name: x for name, x in state.items() if isinstance(x, torch.Tensor)}


def assert_same_stages(one, other, frames=240):
    """Both stages are exactly equal except for the source path of the second."""
    for name in NAMES:
        states = [final_state(folder / name) for folder in (one, other)]
        for state, folder in zip(states, (one, other)):
            source = state["summary"].get("init_from", {}).pop("from", None)
            assert source == (f"{folder / 'near'}@{frames}" if name == "far" else None)
        assert_equal(*states)
        for file in ("metrics.csv", "evaluation.csv"):
            assert table(one / name / file) == table(other / name / file)


def test_stage_starts_with_the_last_weights_of_the_previous_one(whole):
    near, far = (all_checkpoints(whole / name) for name in NAMES)
    assert_equal(learners(far[0]), learners(near[-1]))
    assert not torch.equal(*(next(iter(learners(x).values())) for x in (near[0], near[-1])))
    one, two = (read_run_config(whole / name) for name in NAMES)
    assert (one.total_frames, one.env.max_steps, one.init_from, one.stages) == (240, 13, None, {})
    assert (two.total_frames, two.env.max_steps, two.learner.lr) == (320, 17, 1e-4)
    assert two.init_from == f"{whole / 'near'}@240"
    summary = json.loads((whole / "summary.json").read_text())["stages"]
    assert {name: own["frames"] for name, own in summary.items()} == {"near": 240, "far": 320}


def test_first_stage_equals_a_run_without_stages(whole, tmp_path):
    alone = torchrl_marl.train(
        small_config(**SETTINGS | {"total_frames": 240}, folder=str(tmp_path / "run"))
    )
    assert_same_run(alone.folder, whole / "near")


@pytest.fixture
def interrupt(monkeypatch):
    """Train until Ctrl-C in an iteration, counted over all stages."""

    def train(config, step):
        calls, own = [], Training.step

        def interrupted(self):
            calls.append(1)
            if len(calls) == step:
                os.kill(os.getpid(), signal.SIGINT)
            return own(self)

        with monkeypatch.context() as patch:
            patch.setattr(Training, "step", interrupted)
            with pytest.raises(KeyboardInterrupt) as stop:
                torchrl_marl.train(config)
        assert str(stop.value.args[0]) == config.folder  # the folder of the whole run

    return train


@pytest.mark.parametrize("step", [2, 3, 4, 6])
def test_interrupted_run_with_stages_resumes_exactly(whole, tmp_path, interrupt, step):
    """In either stage, and at the end of the first one."""
    folder = tmp_path / "run"
    interrupt(settings(folder), step)
    assert (folder / "far").exists() is (step > 3)
    assert torchrl_marl.resume(folder).folder == folder / "far"
    assert_same_stages(folder, whole)


def test_stage_that_has_reached_its_metric_ends_on_resume(tmp_path, interrupt):
    def config(name):
        until = {"until": {"return": -1e6}}
        return settings(tmp_path / name, **EVALUATED, stages={"near": until, "far": {}})

    torchrl_marl.train(config("whole"))
    interrupt(config("run"), 1)
    torchrl_marl.resume(tmp_path / "run")
    assert_same_stages(tmp_path / "run", tmp_path / "whole", frames=80)


def test_run_killed_between_stages_resumes_in_the_next_stage(whole, tmp_path):
    folder = tmp_path / "moved"
    shutil.copytree(whole, folder)
    shutil.rmtree(folder / "far")
    torchrl_marl.resume(folder, logging={"project": "other"})
    own = [learners(all_checkpoints(one / "far")[-1]) for one in (folder, whole)]
    assert_equal(*own)
    assert read_run_config(folder / "far").init_from == f"{folder / 'near'}@240"
    assert read_run_config(folder / "far").logging.project == "other"
    assert read_run_config(folder / "near").logging.project == "torchrl_marl"


def test_run_with_stages_loads_as_its_last_stage(whole, tmp_path):
    far = whole / "far"
    assert last_stage(whole) == Run.load(whole).folder == read_run(whole).folder == far
    assert Run.load(whole).evaluate(episodes=4) == Run.load(far).evaluate(episodes=4)
    assert find_run_folders(whole) == [far] and read_source(str(whole)).name == f"{far}@320"
    assert last_stage(far) == far and last_stage(tmp_path) == tmp_path
    begun = tmp_path / "begun"
    shutil.copytree(whole, begun)
    shutil.rmtree(begun / "far")
    assert last_stage(begun) == begun / "near"


def test_seeds_with_equal_stages_have_equal_report_settings(whole, tmp_path):
    other = settings(tmp_path / "seed1", seed=1)
    torchrl_marl.train(other)
    assert read_run(whole).settings == read_run(other.folder).settings


def test_until_ends_a_stage_early(tmp_path, capsys):
    until = {"until": {"return": -1e6, "length_mean": 0}}
    run = torchrl_marl.train(
        settings(tmp_path / "run", **EVALUATED, stages={"near": until, "far": {}})
    )
    near = json.loads((tmp_path / "run" / "near" / "summary.json").read_text())
    assert (near["frames"], run.summary["frames"]) == (80, 320)
    assert "has reached until.return, -1e+06" in near["stopped"]
    assert "ends after 80 frames: " in capsys.readouterr().err
    assert run.summary["init_from"]["frames"] == 80


def test_until_needs_all_metrics_from_an_evaluation_in_training(tmp_path):
    limits = {"return": -1e6, "length_max": 1e6}
    run = torchrl_marl.train(
        small_config(folder=str(tmp_path / "run"), **SETTINGS, **EVALUATED, until=limits)
    )
    assert run.summary["frames"] == 320 and "stopped" not in run.summary
    saved = load_checkpoint(all_checkpoints(run.folder)[2])["until"]
    row = table(run.folder / "evaluation.csv")[2]
    assert saved == {
        "return": pytest.approx(float(row["return_mean"]), rel=1e-5),
        "length_max": float(row["length_max"]),
    }
    assert load_checkpoint(all_checkpoints(run.folder)[0])["until"] == {}


class Success(Callback):
    """Logs a success rate."""

    def on_evaluation(self, control, result):
        return {"success": 0.25 * control.iteration}


def test_until_reads_metrics_of_callbacks(tmp_path):
    how = {"callbacks": [f"{__file__}:Success"], **EVALUATED}
    run = torchrl_marl.train(
        settings(tmp_path / "run", **how, stages={"near": {"until.success": 0.5}, "far": {}})
    )
    assert read_source(str(run.folder.parent / "near")).frames == 160
    with pytest.raises(ConfigError, match="until has 'sucess', which no evaluation measures; exp"):
        torchrl_marl.train(settings(tmp_path / "no", **how, until={"sucess": 1}, stages={}))
    assert not (tmp_path / "no" / "metrics.csv").exists()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"stages.far.lerner.lr": 1}, "stages.far: unknown setting 'lerner.lr'"),
        ({"stages.far.learner.lr": -1}, "stages.far: learner.lr is -1"),
        ({"stages.far.stages": {"x": {}}}, "stages.far.stages is given, but stages is set for the"),
        ({"stages.far.init_from": "x"}, "stages.far.init_from is given, but init_from is set for"),
        ({"stages.far": 3}, "stages.far is 3, expected settings under it, such as stages.far.tot"),
        ({"stages": {"seed1": {}}}, "stages has 'seed1', expected names of folders"),
        ({"stages": {"x/y": {}}}, "stages has 'x/y', expected names of folders"),
        ({"stages.far.callbacks": ["a.b:C"]}, "stages.far: "),
        (
            {"stages.far.until": {"succes": 1}, **EVALUATED},
            "stages.far: until has 'succes', which no evaluation measures; expected return, ",
        ),
        (
            {"stages.far.until": {"team/episode_reward": 1}, **EVALUATED},
            "stages.far.until has 'team/episode_reward', but the groups are agents; use for exa",
        ),
        ({"stages.far.until.return": "x", **EVALUATED}, "until.return is 'x', expected a finite"),
        ({"stages.far.until.return": 1}, "until is given, but evaluation.every_frames is null"),
        ({"stages.far.learner.actor.num_cells": [32]}, "stages.far: init_from is '"),
        ({"stages.far.env.kwargs.n_agents": 5}, "stages.far: init_from is '"),
        ({"stages.far.population.size": 2}, "stages.far: population.size is 2, but stages are"),
        ({"population.size": 2}, "population.size is 2, but stages are runs of one policy"),
        ({"league.opponents": "pfsp"}, "league is given, but stages are runs of one policy"),
        ({"distributed.backend": "ray"}, "distributed.backend is 'ray', but stages are runs of"),
    ],
)
def test_invalid_stages_raise_before_training(tmp_path, overrides, message):
    base = small_config(stages=STAGES, folder=str(tmp_path / "run"))
    with pytest.raises(ConfigError) as error:
        torchrl_marl.train(base, **overrides)
    assert str(error.value).startswith(message) or f": {message}" in str(error.value)
    assert str(error.value).endswith(".") and not (tmp_path / "run").exists()


def test_unsupported_arguments_with_stages_raise(whole, tmp_path, monkeypatch):
    config = settings(tmp_path / "run")
    with pytest.raises(ConfigError, match="stages is given with a callback object"):
        torchrl_marl.train(config, callbacks=[Success()])
    with pytest.raises(ConfigError, match="stages is given with an environment object"):
        torchrl_marl.train(config, env=Run.load(whole).make_env())
    with pytest.raises(ConfigError, match="stages is near, far, but this function trains a sing"):
        iterate(config)
    with pytest.raises(ConfigError, match="run folder .* exists; .* --resume"):
        torchrl_marl.train(settings(whole))
    with pytest.raises(ConfigError, match="total_frames is given, but .* has stages"):
        torchrl_marl.resume(whole, total_frames=9600)
    with pytest.raises(ConfigError, match=r"stages\.far\.learner\.lr was 0\.0001"):
        torchrl_marl.resume(whole, stages={"far": {"learner": {"lr": 1e-3}}})
    monkeypatch.setattr("torchrl_marl.training.stages.place", lambda: 0)
    with pytest.raises(ConfigError, match="but several processes of torchrun do not support it"):
        torchrl_marl.train(config)
    assert not (tmp_path / "run").exists()


def test_stage_with_external_code_not_named_by_the_run_raises(tmp_path):
    own = tmp_path / "own.py"
    own.write_text(f"open({str(tmp_path / 'imported')!r}, 'w')\nclass World: pass\n")
    stages = {"near": {}, "far": {"env": f"{own}:World"}}
    with pytest.raises(ConfigError, match=r"stages\.far: it would import .* name it there"):
        torchrl_marl.train(settings(tmp_path / "run", stages=stages))
    assert not (tmp_path / "imported").exists()


def test_init_selects_the_parts_for_one_stage():
    stages = {"one": {}, "two": {"init": ["actor"]}, "three": {}}
    config = load_config("toy_arena_mappo", {"stages": stages, "init_from": "x", "folder": "r"})
    assert [own.init_from for own in stages_of(config).values()] == ["x", "r/one", "r/two"]
    assert [own.init for own in stages_of(config).values()] == [None, ["actor"], None]


def test_stages_on_the_command_line(tmp_path, capsys):
    recipe, run = tmp_path / "recipe.yaml", tmp_path / "run"
    recipe.write_text(
        "env: {library: toy, name: arena, num_envs: 8, max_steps: 13}\n"
        "frames_per_batch: 80\nlearner: {minibatch_size: 40}\nexecution: eager\n"
        "evaluation: {episodes: 4}\nlogging: {progress: false}\ntotal_frames: 80\n"
        "stages:\n  near:\n  far: {env.kwargs.n_agents: 4}\n"
    )
    assert main(["train", str(recipe), f"folder={run}", "stages.far.init=[actor]"]) == 0
    told = capsys.readouterr()
    assert f"stage 2 of 2: far, in {str(run / 'far')!r}" in told.err
    assert str(run / "far") in told.out
    assert read_run_config(run / "far").env.kwargs == {"n_agents": 4}
    assert main(["train", "--resume", str(run)]) == 0
    assert "is finished" in capsys.readouterr().err
    assert main(["evaluate", str(run), "--episodes", "4"]) == 0
    assert (run / "far" / "evaluations.jsonl").is_file()
    assert main(["train", str(recipe), f"folder={tmp_path / 'no'}", "stages.far.sed=1"]) == 2
    assert "stages.far: unknown setting 'sed'; did you mean 'seed'?" in capsys.readouterr().err


def test_damaged_stage_raises(whole, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(whole, folder)
    (folder / "far" / "config.yaml").unlink()
    with pytest.raises(CheckpointError, match="far' is not a run folder"):
        torchrl_marl.resume(folder)


def test_stage_starts_with_the_optimizer_of_the_previous_one(tmp_path):
    """Before a run optimizers have no moments, but those of a trained stage do."""
    far = {"init": ["actor", "critic", "optimizer"]}
    run = torchrl_marl.train(settings(tmp_path / "run", stages={"near": {}, "far": far}))
    assert run.summary["init_from"]["parts"] == far["init"]
