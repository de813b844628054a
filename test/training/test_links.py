"""Links in a stranger's run folder: their targets are never changed."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from runs import assert_same_run, small_config

import torchrl_marl
from torchrl_marl.apps.cli.main import main
from torchrl_marl.apps.jobs.tuning import _open_study
from torchrl_marl.apps.reports.curves import read_run
from torchrl_marl.apps.suites import run_suite
from torchrl_marl.errors import TrustError, UserError, WriteError
from torchrl_marl.runtime.trust import refuse_links, trusting
from torchrl_marl.training import Run, iterate, train
from torchrl_marl.training.files import append, open_atomically
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
def test_link_in_place_of_a_file_is_not_followed(theirs, mine, place, capsys):
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
def test_command_line_follows_no_links(theirs, mine, tmp_path, words):
    for place in (".lock", "config.yaml.part", "evaluations.jsonl"):
        put(theirs / place, mine)
    done = command(*words, theirs, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1 and "leads out of it" in done.stderr
    assert mine.read_text() == MINE


@pytest.mark.parametrize("name", ["checkpoints", "players", "animations", "export", "tensorboard"])
def test_link_in_place_of_a_folder_is_not_followed(theirs, mine, name):
    kept = mine.parent / "iteration_000001.pt.part"
    shutil.rmtree(theirs / name, ignore_errors=True)
    kept.write_text(MINE)
    put(theirs / name, mine.parent)
    for way in (resume, Run.load):
        with pytest.raises(TrustError, match="leads out of it"):
            way(theirs)
    assert kept.read_text() == mine.read_text() == MINE
    assert len(list(mine.parent.iterdir())) == 2


def test_reports_refuse_links(theirs, mine):
    put(theirs / "summary.json", mine)
    with pytest.raises(TrustError, match="replace it by the file itself"):
        read_run(theirs)
    put(theirs / "config.yaml", mine)
    with pytest.raises(TrustError, match=r"config\.yaml"):
        read_run(theirs)


def test_pipe_in_a_run_folder_is_refused(theirs):
    os.mkfifo(theirs / "metrics.csv.part")
    with pytest.raises(TrustError, match="a pipe or a device"):
        resume(theirs)


def test_run_folder_reached_by_a_link_is_accepted(begun, theirs, tmp_path):
    other = shutil.copytree(begun, tmp_path / "other")
    (tmp_path / "scratch").mkdir()
    shutil.move(theirs, tmp_path / "scratch" / "run")
    (tmp_path / "runs").symlink_to(tmp_path / "scratch")
    (tmp_path / "here").symlink_to(tmp_path / "runs" / "run")
    (tmp_path / "here" / "latest.pt").symlink_to("checkpoints/iteration_000002.pt")
    logs = tmp_path / "here" / "wandb" / "run-1" / "logs"
    logs.mkdir(parents=True)
    (logs / "debug-core.log").symlink_to("/var/cache/core.log")  # as W&B writes it
    (logs.parents[1] / "latest-run").symlink_to("run-1")
    assert Run.load(tmp_path / "runs" / "run").evaluate(2, record=True)["episodes"] == 2
    assert_same_run(resume(tmp_path / "here").folder, resume(other).folder)
    assert (tmp_path / "here" / "evaluations.jsonl").is_file()


def test_links_are_followed_with_trust(begun, theirs, tmp_path):
    other = shutil.copytree(begun, tmp_path / "other")
    shutil.move(theirs / "checkpoints", tmp_path / "checkpoints")
    put(theirs / "checkpoints", tmp_path / "checkpoints")
    with pytest.raises(TrustError):
        Run.load(theirs)
    assert Run.load(theirs, trust=True).evaluate(2)["episodes"] == 2
    assert main(["evaluate", str(theirs), "--episodes", "2", "--trust"]) == 0
    assert_same_run(resume(theirs, trust=True).folder, resume(other).folder)
    assert (tmp_path / "checkpoints" / "iteration_000004.pt").is_file()


def test_new_run_does_not_write_through_a_link(tmp_path, mine):
    folder = tmp_path / "run"
    folder.mkdir()
    put(folder / ".lock", mine)
    with pytest.raises(TrustError, match="run folder .* holds the link"):
        train(small_config(folder=str(folder), total_frames=80))
    assert mine.read_text() == MINE


def test_links_in_a_suite_folder_are_refused(tmp_path, mine):
    out = tmp_path / "suite"
    words = {"tasks": "matrix_game", "algorithms": "mappo", "seeds": 1, "frames": 256}
    run_suite("toy", **words, jobs=0, out=out, log=lambda text: None)
    put(out / "logs" / "matrix_game_mappo_seed0.log", mine)
    with pytest.raises(TrustError, match="suite folder .* holds the link"):
        run_suite("toy", **words, jobs=0, out=out, resume=True, log=lambda text: None)
    assert mine.read_text() == MINE


@pytest.mark.parametrize("place", ["player.py", "walker_0/interface.json", "walker_0"])
def test_export_follows_no_links(begun, tmp_path, mine, place):
    pytest.importorskip("onnxscript")
    run = Run.load(begun)
    name = next(iter(run.make_env(1).group_map.values()))[0]
    put(tmp_path / "out" / place.replace("walker_0", name), mine if "." in place else mine.parent)
    with pytest.raises(UserError, match="link.* leads out of"):
        run.export(name, folder=tmp_path / "out")
    assert mine.read_text() == MINE
    assert os.listdir(mine.parent) == ["mine.txt"]


# --------------------------------------------------------------------------------- single files


def test_link_in_place_of_a_partial_file_is_replaced(tmp_path, mine):
    put(tmp_path / "a.txt.part", mine)
    with open_atomically(tmp_path / "a.txt") as file:
        file.write("new")
    put(tmp_path / "b.txt", mine)
    with open_atomically(tmp_path / "b.txt") as file:
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


def test_hard_linked_copies_of_written_files_do_not_change(tmp_path, mine):
    """Backups use hard links, and a stranger could make them."""
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


def test_export_does_not_change_hard_linked_copies(begun, tmp_path, mine):
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


def test_tuning_does_not_change_hard_linked_copies(tmp_path):
    pytest.importorskip("optuna")
    (tmp_path / "tuning").mkdir()
    _open_study(tmp_path / "tuning", 0, None)
    shutil.copytree(tmp_path / "tuning", tmp_path / "backup", copy_function=os.link)
    before = (tmp_path / "backup" / "study.log").read_text()
    _open_study(tmp_path / "tuning", 0, None).ask()
    assert (tmp_path / "backup" / "study.log").read_text() == before
    assert (tmp_path / "tuning" / "study.log").read_text().startswith(before)


def test_links_that_stay_within_a_folder_are_accepted(tmp_path, mine):
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
