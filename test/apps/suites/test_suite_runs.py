"""Runs of a suite: interrupted and resumed, failed, in parallel, and as one population."""

import csv
import dataclasses
import json
import os
import re
import shutil
import signal
from pathlib import Path

import failing_arena
import pytest
from runs import assert_same_run

from torchrl_marl.apps.cli.main import main
from torchrl_marl.apps.suites import run_suite
from torchrl_marl.apps.suites.board import Board
from torchrl_marl.errors import ConfigError
from torchrl_marl.training import training
from torchrl_marl.training.config import read_run_config
from torchrl_marl.training.files import frames_of
from torchrl_marl.training.folder import RunFolder

pytestmark = pytest.mark.runs

TABLE = """
common:
  total_frames: 160
  frames_per_batch: 40
  threads: 1
  execution: eager
  env: {library: toy, name: arena, num_envs: 4, max_steps: 13, continuous_actions: false}
  learner:
    minibatch_size: 20
    num_epochs: 1
    actor: {num_cells: [8]}
    critic: {num_cells: [8]}
  evaluation: {episodes: 4, every_frames: 80}
algorithms:
  mappo, ippo: {}
tasks:
  two: {env: {kwargs: {n_agents: 2}}}
  three: {env: {kwargs: {n_agents: 3}}}
"""


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text(TABLE)
    return tmp_path


def rows():
    with open("suite_mine/results.csv", newline="") as file:
        return list(csv.DictReader(file))


def stop_at(step, monkeypatch):
    """Sends SIGTERM at the end of the ``step``-th iteration, counted over all runs."""
    steps, own = [], training.Training.step

    def counted(self):
        found = own(self)
        steps.append(0)
        if len(steps) == step:
            os.kill(os.getpid(), signal.SIGTERM)
        return found

    monkeypatch.setattr(training.Training, "step", counted)


def test_stopped_suite_resumes_exactly(monkeypatch, capsys):
    command = ["suite", "mine.yaml", "algorithms=mappo", "seeds=1", "--jobs", "0"]
    with monkeypatch.context() as patched:
        stop_at(6, patched)  # the second iteration of the second run
        assert main(command) == 143
    assert "resume with the same command and --resume" in capsys.readouterr().err
    assert [row["state"] for row in rows()] == ["finished", "stopped"]
    assert frames_of(run_of("three")) == 80
    assert main(["suite", "mine.yaml", "--resume", "--jobs", "0"]) == 0
    assert [row["state"] for row in rows()] == ["finished", "finished"]
    run_suite("mine.yaml", algorithms=["mappo"], seeds=[0], out="whole", jobs=0, log=list)
    for task in ("two", "three"):
        assert_same_run(run_of(task), run_of(task, "whole"))
    assert float(rows()[1]["elapsed"]) >= float(rows()[1]["seconds"]) > 0


def test_results_name_the_runs_that_have_begun(monkeypatch):
    """A suite that is killed leaves them so."""
    states = []
    began = Board.began

    def record(board, *places):
        states.append([row["state"] for row in rows()])
        began(board, *places)

    monkeypatch.setattr(Board, "began", record)
    run_suite("mine.yaml", algorithms="mappo", seeds=1, frames=40, jobs=0, log=list)
    assert states == [["begun", "waiting"], ["finished", "begun"]]
    assert [row["state"] for row in rows()] == ["finished", "finished"]


def run_of(task, out="suite_mine"):
    return Path(out, task, "mappo", "seed0")


def test_invalid_summary_is_rewritten():
    options = {"algorithms": "mappo", "tasks": "two", "seeds": 1, "jobs": 0, "log": list}
    (first,) = run_suite("mine.yaml", frames=40, **options)
    path = run_of("two") / "summary.json"
    path.write_text(json.dumps(first.summary | {"return_after": "high"}))
    (found,) = run_suite("mine.yaml", frames=40, resume=True, **options)
    assert found.finished and found.summary["return_after"] == first.summary["return_after"]


def test_suite_can_be_extended_in_its_folder():
    options = {"jobs": 0, "log": list, "frames": 40}
    run_suite("mine.yaml", algorithms="mappo", tasks="two", seeds=1, **options)
    before = run_of("two").joinpath("summary.json").stat().st_mtime_ns
    lines = []
    options["log"] = lines.append
    found = run_suite("mine.yaml", algorithms="mappo,ippo", tasks="two", resume=True, **options)
    assert [one.state for one in found] == ["finished", "finished"]
    assert run_of("two").joinpath("summary.json").stat().st_mtime_ns == before
    assert len(lines) == 1 and lines[0].startswith("two ippo seed 0: return ")
    assert lines[0].endswith("(2 of 2 runs)") and " 40 frames in " in lines[0]
    # The record and the table grow; without arguments, all runs of the folder are selected.
    run_suite("mine.yaml", algorithms="mappo", tasks="three", resume=True, **options)
    assert [(row["task"], row["algorithm"], row["state"]) for row in rows()] == [
        ("two", "mappo", "finished"),
        ("two", "ippo", "finished"),
        ("three", "mappo", "finished"),
    ]
    record = json.loads(Path("suite_mine/suite.json").read_text())
    assert record["algorithms"] == ["mappo", "ippo"] and record["tasks"] == ["two", "three"]
    assert record["seeds"] == [0]
    found = run_suite("mine.yaml", resume=True, **options)
    assert len(found) == len(rows()) == 4 and lines[-1].endswith("(4 of 4 runs)")
    shutil.rmtree("suite_mine/two/ippo")
    run_suite("mine.yaml", algorithms="mappo", resume=True, **options)
    assert len(rows()) == 3


def test_suite_with_together_resumes_as_populations(monkeypatch):
    command = ["suite", "mine.yaml", "tasks=two", "algorithms=mappo", "seeds=2", "--jobs", "0"]
    with monkeypatch.context() as patched:
        stop_at(2, patched)
        assert main([*command, "--together"]) == 143
    assert json.loads(Path("suite_mine/suite.json").read_text())["together"] is True
    assert main(["suite", "mine.yaml", "--resume", "--jobs", "0"]) == 0
    assert read_run_config(run_of("two").parent).population.size == 2
    assert not Path(run_of("two"), "checkpoint").exists()
    assert [row["state"] for row in rows()] == ["finished", "finished"]


def test_changed_settings_are_refused_on_resume(capsys):
    run_suite("mine.yaml", algorithms="mappo", tasks="two", seeds=1, frames=40, jobs=0, log=list)
    command = ["suite", "mine.yaml", "--resume", "--jobs", "0"]
    assert main([*command, "learner.lr=0.5"]) == 2
    found = capsys.readouterr().err
    assert "learner.lr of two with mappo is 0.5" in found and "started with 0.0005" in found
    with open("mine.yaml", "a") as file:
        file.write("  four: {env: {kwargs: {n_agents: 4}}}\n")
    assert main([*command, "threads=2", "tasks=two"]) == 0  # where it runs may change
    with open("mine.yaml", "w") as file:
        file.write(TABLE.replace("n_agents: 2", "n_agents: 5"))
    assert main(command) == 2
    assert "env.kwargs.n_agents of two with mappo is 5" in capsys.readouterr().err
    assert main(["suite", "mine.yaml"]) == 2
    assert "suite folder 'suite_mine' exists; add --resume to" in capsys.readouterr().err
    assert main(["suite", "toy", "--resume", "--out", "suite_mine"]) == 2
    assert "holds the suite 'mine', but 'toy' is given" in capsys.readouterr().err


@pytest.mark.parametrize("place", [shutil.copytree, lambda _, new: new.symlink_to("seed0")])
def test_run_of_another_seed_is_refused_on_resume(place, capsys):
    """A copy of seed 0 in the folder of seed 1 would be a second seed of the results."""
    run_suite("mine.yaml", algorithms="mappo", tasks="two", seeds=1, frames=40, jobs=0, log=list)
    place(run_of("two"), run_of("two").with_name("seed1"))
    assert main(["suite", "mine.yaml", "--resume", "--jobs", "0", "seeds=2"]) == 2
    assert "seed1' has a run of seed 0, expected seed 1; move it" in capsys.readouterr().err
    assert [row["seed"] for row in rows()] == ["0"]


def test_settings_without_effect_may_differ_on_resume():
    """Earlier versions kept the table's ``every_frames`` beside a given ``count``."""
    given = ["suite", "mine.yaml", "seeds=1", "tasks=two", "evaluation.count=2", "--jobs", "0"]
    assert main([*given, "algorithms=mappo"]) == 0
    path = Path("suite_mine/two/mappo/seed0/config.yaml")
    text, count = re.subn(r"(?m)^  every_frames: null", "  every_frames: 80", path.read_text())
    assert count == 1
    path.write_text(text)
    assert main([*given, "algorithms=mappo,ippo", "--resume"]) == 0


def test_folders_that_are_no_suite_are_not_overwritten(here, capsys):
    (here / "papers").mkdir()
    (here / "papers" / "thesis.tex").write_text("chapter one")
    for more in ([], ["--dry-run"]):
        assert main(["suite", "mine.yaml", "--out", "papers", *more]) == 2
        assert "exists and is not a suite's folder" in capsys.readouterr().err
    assert [path.name for path in (here / "papers").iterdir()] == ["thesis.tex"]
    run_suite("mine.yaml", algorithms="mappo", tasks="two", seeds=1, frames=40, jobs=0, log=list)
    assert main(["suite", "mine.yaml", "--dry-run"]) == 2
    assert "exists; add --resume to continue it" in capsys.readouterr().err
    assert main(["suite", "mine.yaml", "--dry-run", "--resume", "learner.gamma=0.5"]) == 2
    assert "was started with" in capsys.readouterr().err
    lock = RunFolder(here / "suite_mine")
    assert main(["suite", "mine.yaml", "--resume"]) == 2
    assert re.search("suite folder '.*suite_mine' is in use", capsys.readouterr().err)
    lock.release()
    record = json.loads((here / "suite_mine" / "suite.json").read_text())
    broken = [{**record, "settings": other} for other in (["env.name=x"], "x", 3, None)]
    broken += [{**record, key: other} for key in ("tasks", "seeds") for other in (10**9, None)]
    for text in ("{", *map(json.dumps, [*broken, [record]])):
        (here / "suite_mine" / "suite.json").write_text(text)
        assert main(["suite", "mine.yaml", "--resume"]) == 2
        assert "cannot be read; start the suite again" in capsys.readouterr().err


def test_failed_run_is_reported_and_the_others_continue(here, capsys):
    """Each run has a separate process; the environment of one fails."""
    orders = here / "orders"
    orders.mkdir()
    (orders / "always").touch()
    failing = f"{failing_arena.__file__}:FailingArena"
    table = TABLE.replace(
        "two: {env: {kwargs: {n_agents: 2}}}",
        f"""broken:
    env: {{library: "{failing}", name: FailingArena, kwargs: {{orders: {orders}}}}}""",
    )
    (here / "mine.yaml").write_text(table)
    command = ["suite", "mine.yaml", "algorithms=mappo", "seeds=1", "frames=40", "--jobs", "2"]
    assert main(command) == 2
    shown = capsys.readouterr()
    assert "broken mappo seed 0: failed: ValueError: the engine broke" in shown.out
    assert "1 of 2 runs did not finish: broken/mappo/seed0" in shown.err
    assert [row["state"] for row in rows()] == ["failed", "finished"]
    log = here / "suite_mine" / "logs" / "broken_mappo_seed0.log"
    assert "Traceback" in log.read_text()
    (orders / "always").unlink()
    assert main(["suite", "mine.yaml", "--resume", "--jobs", "0"]) == 0  # tried again
    assert [row["state"] for row in rows()] == ["finished", "finished"]


def test_interrupt_stops_all_processes(monkeypatch, capsys):
    """Ctrl-C, while the first run is starting."""
    pressed = []

    def show(self, working):
        if not pressed:
            pressed.append(os.kill(os.getpid(), signal.SIGINT))

    monkeypatch.setattr(Board, "show", show)
    assert main(["suite", "mine.yaml", "seeds=1"]) == 130
    assert [row["state"] for row in rows()] == ["stopped", "waiting", "waiting", "waiting"]
    assert json.loads(Path("suite_mine/suite.json").read_text())["seeds"] == [0]


def test_frames_of_ignores_incomplete_rows(tmp_path):
    assert frames_of(tmp_path) == 0
    table = tmp_path / "metrics.csv"
    table.write_text("iteration,frames,seconds\n")
    assert frames_of(tmp_path) == 0
    table.write_text("iteration,frames,seconds\n1,40,0.1\n2,80,0.2\n3,12")
    assert frames_of(tmp_path) == 80


class TestTogether:
    """All seeds of a task and algorithm as one population, in the folders of separate runs."""

    def test_members_equal_separate_runs_of_the_suite(self, here, capsys):
        every = {"tasks": "two", "algorithms": "mappo", "seeds": 2, "jobs": 0}
        apart = run_suite("mine.yaml", out="apart", **every)
        both = run_suite("mine.yaml", out="both", together=True, **every)
        assert [one.state for one in both] == ["finished", "finished"]
        assert (here / "both" / "two" / "mappo" / "config.yaml").is_file()
        for alone, member in zip(apart, both):
            assert alone.run == member.run and member.summary["frames"] == 160
            one, other = (
                dataclasses.replace(read_run_config(x.folder), folder=None) for x in (alone, member)
            )
            assert one == other
        with open("both/results.csv", newline="") as file:
            assert [row["seed"] for row in csv.DictReader(file)] == ["0", "1"]
        assert "two mappo seed 1: return" in capsys.readouterr().out

    def test_stopped_population_resumes_exactly(self, monkeypatch):
        every = {"tasks": "two", "algorithms": "mappo", "seeds": 2, "jobs": 0, "together": True}
        whole = run_suite("mine.yaml", out="whole", **every)
        with monkeypatch.context() as patch, pytest.raises(SystemExit):
            stop_at(2, patch)
            run_suite("mine.yaml", out="cut", **every)
        with open("cut/results.csv", newline="") as file:
            assert [row["state"] for row in csv.DictReader(file)] == ["stopped", "stopped"]
        again = run_suite("mine.yaml", out="cut", resume=True, jobs=0, together=True)
        for one, other in zip(whole, again):
            assert_same_run(one.folder, other.folder)

    @pytest.mark.parametrize(
        ("given", "sentence"),
        [
            ("seeds=0,2", "expected consecutive numbers with --together; use seeds=0..1"),
            (
                "evaluation.gif=true",
                "with mappo: --together makes the runs members of a population",
            ),
            ("stop_at_return=3", "use stop_at_return=null, or leave --together out."),
        ],
    )
    def test_settings_that_exclude_populations_are_refused(self, given, sentence, capsys):
        assert main(["suite", "mine.yaml", "--together", "--dry-run", given]) == 2
        assert sentence in capsys.readouterr().err

    def test_together_is_refused_for_existing_separate_runs(self):
        every = {"tasks": "two", "algorithms": "mappo", "seeds": 2, "jobs": 0}
        run_suite("mine.yaml", **every)
        with pytest.raises(ConfigError, match="seed0, seed1, which are not the members of this"):
            run_suite("mine.yaml", resume=True, together=True, **every)
