"""Links in a stranger's run folder: what they lead to stays as it is."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from runs import assert_same_run, small_config

import torchrl_marl
from torchrl_marl.apps.cli.main import main
from torchrl_marl.apps.jobs.tuning import _study
from torchrl_marl.apps.reports.curves import read_run
from torchrl_marl.apps.suites import run_suite
from torchrl_marl.errors import TrustError, UserError, WriteError
from torchrl_marl.runtime.trust import refuse_links, trusting
from torchrl_marl.training import Run, iterate, train
from torchrl_marl.training.files import append, whole_file
from torchrl_marl.training.folder import RunFolder
from torchrl_marl.training.trainer import resume

pytestmark = pytest.mark.runs

MINE = "what I have written\n" * 20
PLACES = [
    ".lock",
    "metrics.csv",
    "metrics.csv.part",
    "config.yaml.part",
    "summary.json.part",
    "evaluation.csv",
    "evaluations.jsonl",
    "learning_curve.png",
    "learning_curve.png.part",
    "loggers.json",
    "checkpoints/iteration_000004.pt.part",
    "players/0.pt.part",
    "animations/frames_000000.gif",
    "export/agent/interface.json",
]


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """A run that was stopped after its second iteration of four, without matplotlib's picture."""
    folder = tmp_path_factory.mktemp("begun") / "run"
    for step in iterate(small_config(folder=str(folder), total_frames=320)):
        if step.number == 2:
            break
    return folder


@pytest.fixture
def theirs(begun, tmp_path):
    return shutil.copytree(begun, tmp_path / "theirs")


@pytest.fixture
def mine(tmp_path):
    path = tmp_path / "home" / "mine.txt"
    path.parent.mkdir()
    path.write_text(MINE)
    return path


def command(*words, cwd):
    line = [sys.executable, "-P", "-m", "torchrl_marl", *map(str, words)]
    environment = {**os.environ, "PYTHONPATH": str(Path(torchrl_marl.__file__).parents[1])}
    return subprocess.run(line, cwd=cwd, env=environment, capture_output=True, text=True)


def put(link, target):
    link.parent.mkdir(parents=True, exist_ok=True)
    link.unlink(missing_ok=True)
    link.symlink_to(target)


@pytest.mark.parametrize("place", PLACES)
def test_a_link_in_the_place_of_a_file_is_not_followed(theirs, mine, place, capsys):
    put(theirs / place, mine)
    for words in (["train", "--resume"], ["evaluate", "--episodes", "2"], ["export"]):
        capsys.readouterr()
        assert main([words[0], *words[1:], str(theirs)]) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        assert repr(str(theirs / place)) in error and str(mine) in error and "--trust" in error
    for way in (resume, Run.load, torchrl_marl.runs.resume):
        with pytest.raises(TrustError, match="leads out of it"):
            way(theirs)
    assert mine.read_text() == MINE


@pytest.mark.parametrize("words", [["train", "--resume"], ["evaluate", "--episodes", "2"]])
def test_the_command_line_follows_none(theirs, mine, tmp_path, words):
    for place in (".lock", "config.yaml.part", "evaluations.jsonl"):
        put(theirs / place, mine)
    done = command(*words, theirs, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1 and "leads out of it" in done.stderr
    assert mine.read_text() == MINE


@pytest.mark.parametrize("name", ["checkpoints", "players", "animations", "export", "tensorboard"])
def test_a_link_in_the_place_of_a_folder_is_not_followed(theirs, mine, name):
    kept = mine.parent / "iteration_000001.pt.part"
    shutil.rmtree(theirs / name, ignore_errors=True)
    kept.write_text(MINE)
    put(theirs / name, mine.parent)
    for way in (resume, Run.load):
        with pytest.raises(TrustError, match="leads out of it"):
            way(theirs)
    assert kept.read_text() == mine.read_text() == MINE
    assert len(list(mine.parent.iterdir())) == 2


def test_what_reports_read_is_no_link(theirs, mine):
    put(theirs / "summary.json", mine)
    with pytest.raises(TrustError, match="replace it by the file itself"):
        read_run(theirs)
    put(theirs / "config.yaml", mine)
    with pytest.raises(TrustError, match=r"config\.yaml"):
        read_run(theirs)


def test_what_is_no_file_is_refused(theirs):
    os.mkfifo(theirs / "metrics.csv.part")
    with pytest.raises(TrustError, match="a pipe or a device"):
        resume(theirs)


def test_a_folder_that_is_reached_by_a_link_is_one_s_own(begun, theirs, tmp_path):
    other = shutil.copytree(begun, tmp_path / "other")
    (tmp_path / "scratch").mkdir()
    shutil.move(theirs, tmp_path / "scratch" / "run")
    (tmp_path / "runs").symlink_to(tmp_path / "scratch")
    (tmp_path / "here").symlink_to(tmp_path / "runs" / "run")
    (tmp_path / "here" / "latest.pt").symlink_to("checkpoints/iteration_000002.pt")
    logs = tmp_path / "here" / "wandb" / "run-1" / "logs"
    logs.mkdir(parents=True)
    (logs / "debug-core.log").symlink_to("/var/cache/core.log")  # as W&B has it
    (logs.parents[1] / "latest-run").symlink_to("run-1")
    assert Run.load(tmp_path / "runs" / "run").evaluate(2, record=True)["episodes"] == 2
    assert_same_run(resume(tmp_path / "here").folder, resume(other).folder)
    assert (tmp_path / "here" / "evaluations.jsonl").is_file()


def test_links_of_whom_one_trusts_are_followed(begun, theirs, tmp_path):
    other = shutil.copytree(begun, tmp_path / "other")
    shutil.move(theirs / "checkpoints", tmp_path / "checkpoints")
    put(theirs / "checkpoints", tmp_path / "checkpoints")
    with pytest.raises(TrustError):
        Run.load(theirs)
    assert Run.load(theirs, trust=True).evaluate(2)["episodes"] == 2
    assert main(["evaluate", str(theirs), "--episodes", "2", "--trust"]) == 0
    assert_same_run(resume(theirs, trust=True).folder, resume(other).folder)
    assert (tmp_path / "checkpoints" / "iteration_000004.pt").is_file()


def test_a_new_run_writes_through_no_link(tmp_path, mine):
    folder = tmp_path / "run"
    folder.mkdir()
    put(folder / ".lock", mine)
    with pytest.raises(TrustError, match="run folder .* holds the link"):
        train(small_config(folder=str(folder), total_frames=80))
    assert mine.read_text() == MINE


def test_a_suite_s_folder_has_no_links(tmp_path, mine):
    out = tmp_path / "suite"
    words = {"tasks": "matrix_game", "algorithms": "mappo", "seeds": 1, "frames": 256}
    run_suite("toy", **words, jobs=0, out=out, said=lambda text: None)
    put(out / "logs" / "matrix_game_mappo_seed0.log", mine)
    with pytest.raises(TrustError, match="suite folder .* holds the link"):
        run_suite("toy", **words, jobs=0, out=out, resume=True, said=lambda text: None)
    assert mine.read_text() == MINE


@pytest.mark.parametrize("place", ["player.py", "walker_0/interface.json", "walker_0"])
def test_an_export_follows_no_link(begun, tmp_path, mine, place):
    pytest.importorskip("onnxscript")
    run = Run.load(begun)
    name = next(iter(run.make_env(1).group_map.values()))[0]
    put(tmp_path / "out" / place.replace("walker_0", name), mine if "." in place else mine.parent)
    with pytest.raises(UserError, match="link.* leads out of"):
        run.export(name, folder=tmp_path / "out")
    assert mine.read_text() == MINE
    assert os.listdir(mine.parent) == ["mine.txt"]


# --------------------------------------------------------------------------------- single files


def test_a_part_that_is_a_link_is_replaced(tmp_path, mine):
    put(tmp_path / "a.txt.part", mine)
    with whole_file(tmp_path / "a.txt") as file:
        file.write("new")
    put(tmp_path / "b.txt", mine)
    with whole_file(tmp_path / "b.txt") as file:
        file.write("new")
    for name in "ab":
        path = tmp_path / f"{name}.txt"
        assert path.read_text() == "new" and not path.is_symlink()
    assert mine.read_text() == MINE
    put(tmp_path / "c.csv", mine)
    with pytest.raises(WriteError, match=r"c\.csv"):
        append(tmp_path / "c.csv", "row\n")
    assert mine.read_text() == MINE
    with trusting():
        append(tmp_path / "c.csv", "row\n")
    assert mine.read_text() == MINE + "row\n"


def test_a_file_of_another_name_does_not_grow(tmp_path, mine):
    """As backups with hard links have it, and as a stranger could have it."""
    os.link(mine, tmp_path / "evaluations.jsonl")
    append(tmp_path / "evaluations.jsonl", "row\n")
    append(tmp_path / "evaluations.jsonl", "row\n")
    assert (tmp_path / "evaluations.jsonl").read_text() == MINE + "row\nrow\n"
    assert mine.read_text() == MINE
    folder = tmp_path / "run"
    folder.mkdir()
    os.link(mine, folder / ".lock")
    lock = RunFolder(folder)
    with pytest.raises(UserError, match="in use"):
        RunFolder(folder)
    lock.release()
    assert mine.read_text() == MINE


def test_an_export_leaves_files_of_another_name_as_they_are(begun, tmp_path, mine):
    pytest.importorskip("onnxscript")
    run = Run.load(begun)
    name = next(iter(run.make_env(1).group_map.values()))[0]
    run.export(name, folder=tmp_path / "out")
    places = ["player.py", *(f"{name}/{path.name}" for path in (tmp_path / "out" / name).iterdir())]
    assert len(places) > 2
    for place in places:
        (tmp_path / "out" / place).unlink()
        os.link(mine, tmp_path / "out" / place)
    run.export(name, folder=tmp_path / "out")
    assert mine.read_text() == MINE and mine.stat().st_nlink == 1


def test_a_tuning_leaves_files_of_another_name_as_they_are(tmp_path):
    pytest.importorskip("optuna")
    (tmp_path / "tuning").mkdir()
    _study(tmp_path / "tuning", 0, None)
    shutil.copytree(tmp_path / "tuning", tmp_path / "backup", copy_function=os.link)
    before = (tmp_path / "backup" / "study.log").read_text()
    _study(tmp_path / "tuning", 0, None).ask()
    assert (tmp_path / "backup" / "study.log").read_text() == before
    assert (tmp_path / "tuning" / "study.log").read_text().startswith(before)


def test_links_within_a_folder_may_lead_to_each_other(tmp_path, mine):
    (tmp_path / "run" / "inner").mkdir(parents=True)
    (tmp_path / "run" / "file").touch()
    for target in ("file", ".", "inner/../file", tmp_path / "run" / "inner", "not_there"):
        put(tmp_path / "run" / "link", target)
        refuse_links(tmp_path / "run")
    for target in ("../..", "../../home", "/dev/zero", "../../run_2/x", "../../not_there", mine):
        put(tmp_path / "run" / "inner" / "link", target)
        with pytest.raises(TrustError, match="inner/link"):
            refuse_links(tmp_path / "run")
    put(tmp_path / "run" / "wandb" / "latest-run.txt", mine)
    (tmp_path / "run" / "inner" / "link").unlink()
    with pytest.raises(TrustError, match=r"latest-run\.txt"):
        refuse_links(tmp_path / "run")
