"""Tuning with Optuna: trials as populations, resuming, pruning, and the best trial as a recipe."""

import csv
import signal

import pytest

from torchrl_marl.apps.cli.main import main
from torchrl_marl.apps.jobs.halving import Halving
from torchrl_marl.apps.jobs.trials import Trials
from torchrl_marl.apps.jobs.tuning import Choice, parse_choice
from torchrl_marl.errors import ConfigError
from torchrl_marl.recipes import load_config
from torchrl_marl.training import Run
from torchrl_marl.training.folder import RunFolder
from torchrl_marl.training.training import Training

pytestmark = pytest.mark.runs

SMALL = [
    "total_frames=40",
    "frames_per_batch=40",
    "execution=eager",
    "env.num_envs=4",
    "learner.minibatch_size=20",
    "learner.num_epochs=1",
    "evaluation.episodes=2",
    "logging.progress=false",
]


def rows_of(folder):
    with (folder / "trials.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_tune_trains_populations_and_writes_the_best_recipe(tmp_path, capsys):
    pytest.importorskip("optuna")
    out = tmp_path / "tuned"
    command = ["tune", "toy_arena_mappo", "learner.lr=1e-4..1e-2:log", "learner.gamma=0.8..0.99"]
    options = ["--together", "2", "--out", str(out), *SMALL]
    assert main([*command, "--trials", "4", *options]) == 0
    assert str(out / "best.yaml") in capsys.readouterr().out
    rows = rows_of(out)
    assert [row["trial"] for row in rows] == ["0", "1", "2", "3"]
    assert all(1e-4 <= float(row["learner.lr"]) <= 1e-2 for row in rows)
    assert all((out / row["folder"] / "metrics.csv").exists() for row in rows)
    best = max(rows, key=lambda row: float(row["return"]))
    config = load_config(str(out / "best.yaml"))
    assert config.learner.lr == pytest.approx(float(best["learner.lr"]), rel=1e-4)
    assert config.learner.gamma == pytest.approx(float(best["learner.gamma"]), rel=1e-4)
    assert config.population.size == 1
    # The same command resumes the search.
    assert main([*command, "--trials", "6", *options]) == 0
    assert rows_of(out)[:4] == rows and len(rows_of(out)) == 6
    rates = [row["learner.lr"] for row in rows_of(out)]
    assert len(set(rates)) == 6  # the resumed search draws other numbers
    capsys.readouterr()
    # Another search in the same folder would mix its trials with these.
    for other, words in (
        ([*command, "total_frames=160"], "with total_frames=40, and total_frames=160 is asked for"),
        ([*command[:2], "learner.lr=1e-3..1e-2:log", command[3]], "learner.lr=0.0001..0.01:log, "),
        ([*command, "learner.lmbda=0.8..0.9"], "and learner.lmbda=0.8..0.9 is asked for"),
        (command[:3], "with learner.gamma=0.8..0.99, and learner.gamma=0.99 is asked for"),
        ([command[0], "toy_arena_mappo_hybrid", *command[2:]], "with recipe=toy_arena_mappo, "),
    ):
        kept = options if other[-1] != "total_frames=160" else [x for x in options if x != SMALL[0]]
        assert main([*other[:2], *kept, *other[2:], "--trials", "6"]) == 2
        assert words in capsys.readouterr().err
    assert main([*command, "--trials", "6", *options, "threads=1"]) == 0


def test_folder_of_a_running_search_is_refused(tmp_path, capsys):
    pytest.importorskip("optuna")
    arguments = ["tune", "toy_arena_mappo", "learner.lr=1e-4..1e-2:log", "--together", "2", *SMALL]
    arguments += ["--trials", "2", "--out", str(tmp_path)]
    other = RunFolder(tmp_path)
    assert main(arguments) == 2
    assert f"folder of a tuning {str(tmp_path)!r} is in use by " in capsys.readouterr().err
    assert not (tmp_path / "study.log").exists()
    other.release()
    assert main(arguments) == 0 and len(rows_of(tmp_path)) == 2


def test_unwritable_folder_raises_one_sentence(tmp_path, capsys):
    pytest.importorskip("optuna")
    (tmp_path / "file").write_text("")
    arguments = ["tune", "toy_arena_mappo", "learner.lr=1e-4..1e-2:log", "--together", "2", *SMALL]
    assert main([*arguments, "--out", str(tmp_path / "file" / "below")]) == 2
    assert "below' cannot be written (Not a directory); " in capsys.readouterr().err


def test_resumed_search_proposes_the_same_trials(tmp_path):
    pytest.importorskip("optuna")
    arguments = ["tune", "toy_arena_mappo", "learner.lr=1e-4..1e-2:log", "--together", "2", *SMALL]
    for name, counts in (("whole", "4"), ("parts", "24")):
        for count in counts:
            assert main([*arguments, "--trials", count, "--out", str(tmp_path / name)]) == 0
    assert rows_of(tmp_path / "whole") == rows_of(tmp_path / "parts")


def test_log_with_an_incomplete_line_is_mended(tmp_path, capsys):
    """A power failure may leave the log so. Other damage ends the search in a sentence."""
    pytest.importorskip("optuna")
    arguments = ["tune", "toy_arena_mappo", "learner.lr=1e-4..1e-2:log", "--together", "2", *SMALL]
    arguments += ["--out", str(tmp_path / "out"), "--trials"]
    log = tmp_path / "out" / "study.log"
    assert main([*arguments, "2"]) == 0
    before = rows_of(tmp_path / "out")
    log.write_bytes(log.read_bytes()[:-5])
    assert main([*arguments, "4"]) == 0
    assert rows_of(tmp_path / "out")[:2] == before and len(rows_of(tmp_path / "out")) == 4
    text = log.read_text()
    for damaged in (text.replace('"op_code": 6', '"op_code" 6', 1), text.replace("tune", "tone")):
        log.write_text(damaged)
        capsys.readouterr()
        assert main([*arguments, "4"]) == 2
        assert f"{str(log)!r} is damaged" in capsys.readouterr().err


def test_interrupted_population_resumes_with_the_same_size_only(tmp_path, monkeypatch, capsys):
    pytest.importorskip("optuna")
    command = [
        "tune",
        "toy_arena_mappo",
        "learner.lr=1e-4..1e-2:log",
        "total_frames=80",
        *SMALL[1:],
    ]
    command += ["--trials", "4", "--out", str(tmp_path), "--together"]
    step = Training.step

    def stopping(self):
        signal.raise_signal(signal.SIGINT)
        return step(self)

    with monkeypatch.context() as patch:
        patch.setattr(Training, "step", stopping)
        assert main([*command, "2"]) == 130
    capsys.readouterr()
    assert main([*command, "3"]) == 2
    assert "has 2 unfinished trials, trained together; resume" in capsys.readouterr().err
    assert main([*command, "2"]) == 0
    assert [row["state"] for row in rows_of(tmp_path)] == ["complete"] * 4


@pytest.mark.parametrize(
    ("text", "choice"),
    [
        ("learner.lr=1e-4..1e-2:log", Choice("learner.lr", 1e-4, 1e-2, True)),
        ("learner.entropy_coeff=0..0.05", Choice("learner.entropy_coeff", 0.0, 0.05)),
        ("learner.gamma=0.5..0.99", Choice("learner.gamma", 0.5, 0.99)),
        ("learner.lr=1e-3", None),
        ("folder=../there", None),
    ],
)
def test_parse_choice(text, choice):
    assert parse_choice(text) == choice


@pytest.mark.parametrize(
    "text",
    [
        "learner.lr=1e-2..1e-4",
        "learner.lr=0..1:log",
        "learner.lr=a..b",
        "learner.lr=1..2:lin",
        "learner.num_epochs=1..9",
    ],
)
def test_invalid_ranges_are_refused(text):
    with pytest.raises(ConfigError, match="expected"):
        parse_choice(text)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["toy_arena_mappo"], "no setting has a range"),
        (
            ["toy_arena_mappo", "learner.lr=0.1..0.2", "--prune", "asha", "total_frames=1920"],
            "4 times",
        ),
        (
            ["toy_arena_mappo", "learner.lr=0.1..0.2", "--prune", "asha"]
            + ["learner.lr_schedule=linear"],
            "learner.lr_schedule is 'linear'",
        ),
        (
            ["toy_arena_mappo", "learner.lr=0.1..0.2", "--prune", "asha"]
            + ["evaluation.absolute_episodes=9"],
            "which ends trials at different times; use evaluation.absolute_episodes=0",
        ),
        (["toy_arena_mappo", "learner.lr=0.1..0.2", "--together", "1"], "expected together >= 2"),
        (["toy_matrix_game_happo", "learner.lr=0.1..0.2"], "expected one of mappo, ippo"),
        (["toy_arena_qmix", "learner.lr=0.1..0.2", "--prune", "asha"], "would learn from"),
        (["toy_speaker_listener_mappo_pbt", "learner.lr=0.1..0.2"], "evolution.method is 'pbt'"),
        (["toy_arena_mappo", "learner.gamma=0.5..1.5"], "learner.gamma"),
        (["toy_arena_mappo", "learner.lr=0.1..0.2", "population.size=3"], "use --out for"),
        (["toy_arena_mappo", "learner.lr=0.1..0.2", "folder=x"], "folder cannot be given"),
        (["toy_arena_mappo", "learner.lr=0.1..0.2", "learner.lr=1"], "learner.lr is given twice"),
        (["toy_arena_mappo", *2 * ["learner.lr=0.1..0.2"]], "learner.lr is given twice"),
    ],
)
def test_invalid_tune_arguments_are_refused(arguments, words, capsys, tmp_path):
    pytest.importorskip("optuna")
    assert main(["tune", *arguments, "--out", str(tmp_path / "out")]) == 2
    assert words in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_search_killed_between_two_results_equals_an_uninterrupted_one(tmp_path, monkeypatch):
    study = pytest.importorskip("optuna").Study
    arguments = ["tune", "toy_arena_mappo", "learner.lr=1e-4..1e-2:log", "--together", "2", *SMALL]
    tell, told = study.tell, []

    def killed(self, number, *args, **options):
        told.append(number)
        if told == [0, 1, 2, 3]:
            raise RuntimeError("killed")
        return tell(self, number, *args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(study, "tell", killed)
        with pytest.raises(RuntimeError, match="killed"):
            main([*arguments, "--trials", "6", "--out", str(tmp_path / "killed")])
    (tmp_path / "killed" / "trials_old").mkdir()  # a folder that the user has set aside
    for name in ("killed", "whole"):
        assert main([*arguments, "--trials", "6", "--out", str(tmp_path / name)]) == 0
    assert rows_of(tmp_path / "killed") == rows_of(tmp_path / "whole")


PRUNED = [
    "total_frames=640",
    "frames_per_batch=40",
    "execution=eager",
    "env.num_envs=4",
    "env.kwargs={n_agents: 2, years: 2}",
    "learner.minibatch_size=20",
    "learner.num_epochs=1",
    "learner.actor.num_cells=[8]",
    "learner.critic.num_cells=[8]",
    "evaluation.episodes=2",
    "logging.progress=false",
]


def pruned(out, trials, *more):
    command = ["tune", "toy_arena_mappo", "learner.lr=1e-4..1e-2:log", "--prune", "asha", *more]
    options = ["--together", "3", "--out", str(out), "--trials", str(trials), *PRUNED]
    return main([*command, *options])


def test_pruned_trials_free_their_members_for_new_trials(tmp_path, capsys):
    pytest.importorskip("optuna")
    out = tmp_path / "tuned"
    assert pruned(out, 8) == 0
    rows = rows_of(out)
    assert [row["trial"] for row in rows] == [str(i) for i in range(8)]
    states = {row["state"] for row in rows}
    assert states <= {"complete", "pruned"} and "pruned" in states
    lengths = {}
    for row in rows:
        folder = out / row["folder"]
        frames = [int(r["frames"]) for r in csv.DictReader((folder / "metrics.csv").open())]
        assert frames == list(range(40, frames[-1] + 1, 40))
        assert (row["state"] == "complete") == (frames[-1] == 640)
        lengths[int(row["trial"])] = frames[-1]
        run = Run.load(folder)
        assert run.frames == frames[-1] and run.evaluate(episodes=2)["episodes"] == 2
        assert run.config.learner.lr == pytest.approx(float(row["learner.lr"]), rel=1e-4)
        assert ("return_after" in run.summary) == (row["state"] == "complete")
    whole = out / "trials_0000"
    steps = len(list(csv.DictReader((whole / "metrics.csv").open())))
    assert steps * 40 * 3 < 8 * 640 and sum(lengths.values()) <= steps * 40 * 3
    assert load_config(str(out / "best.yaml")).population.size == 1
    # The same command resumes the search, in the members whose trials ended.
    assert pruned(out, 10) == 0
    assert rows_of(out)[:8] == rows and len(rows_of(out)) == 10
    capsys.readouterr()
    assert main(["tune", "toy_arena_mappo", "learner.lr=1e-4..1e-2:log", "--out", str(out)]) == 2
    assert "was begun with --prune asha --together 3" in capsys.readouterr().err


def search_with(diverging, monkeypatch, out):
    """Runs a search of six trials in pairs, of which the given ones diverge at once."""
    optuna = pytest.importorskip("optuna")
    lr = lambda _, study, trial, *__: 1e30 if trial.number in diverging else 1e-3  # noqa: E731
    monkeypatch.setattr(optuna.samplers.TPESampler, "sample_independent", lr)
    command = ["tune", "toy_arena_mappo", "learner.lr=1e-4..1e30:log", "--out", str(out)]
    return main([*command, "--together", "2", "--trials", "6", *PRUNED])


def test_diverging_trials_fail_and_the_search_continues(tmp_path, monkeypatch, capsys):
    assert search_with({0, 2, 3}, monkeypatch, tmp_path) == 0
    assert "trials failed: the gradients of every member" in capsys.readouterr().out
    states = [row["state"] for row in rows_of(tmp_path)]
    assert states == ["fail", "complete", "fail", "fail", "complete", "complete"]


def test_search_resumes_after_all_first_trials_diverged(tmp_path, monkeypatch, capsys):
    assert search_with({0, 1}, monkeypatch, tmp_path) == 2
    assert "of every member of the population became NaN" in capsys.readouterr().err
    assert search_with({0, 1}, monkeypatch, tmp_path) == 0
    assert [row["state"] for row in rows_of(tmp_path)] == ["fail"] * 2 + ["complete"] * 4


@pytest.mark.parametrize("how", ["interrupted", "killed"])
def test_interrupted_search_with_pruning_resumes(tmp_path, monkeypatch, capsys, how):
    pytest.importorskip("optuna")
    out, learn, batches = tmp_path / "tuned", Trials.take, []

    def stopping(self, batch):
        batches.append(len(batches))
        if len(batches) == 7:
            if how == "killed":
                raise RuntimeError("killed")
            signal.raise_signal(signal.SIGINT)
        return learn(self, batch)

    monkeypatch.setattr(Trials, "take", stopping)
    if how == "killed":
        with pytest.raises(RuntimeError, match="killed"):
            pruned(out, 5)
    else:
        assert pruned(out, 5) == 130
        assert "and saved; resume with the same command" in capsys.readouterr().err
        assert main(["train", "--resume", str(out / "trials_0000")]) == 2
        assert "resume it with the `torchrl-marl tune` command" in capsys.readouterr().err
    assert pruned(out, 5) == 0
    rows = rows_of(out)
    assert [row["trial"] for row in rows] == [str(i) for i in range(len(rows))]
    ends = [row["state"] for row in rows]
    assert len(rows) == 5 and set(ends) <= {"complete", "pruned", "fail"}
    assert "complete" in ends and (how == "killed" or "fail" not in ends)
    for row in rows:
        table = list(csv.DictReader((out / row["folder"] / "metrics.csv").open()))
        frames = [int(line["frames"]) for line in table]
        assert frames == list(range(40, 40 * len(frames) + 1, 40))


KILLED_BEFORE = [
    (Trials, "finish", 8),
    (Training, "save_members", 2),
    (Trials, "_end_trial", 1),
    (Halving, "ended", 2),
    (Trials, "_start_next_trial", 1),
    (Trials, "_assign_trial", 2),
    (Training, "save", 3),
]


@pytest.fixture(scope="module")
def uninterrupted_rows(tmp_path_factory):
    pytest.importorskip("optuna")
    out = tmp_path_factory.mktemp("whole") / "tuned"
    assert pruned(out, 7) == 0
    return rows_of(out)


@pytest.mark.parametrize(("owner", "method", "call"), KILLED_BEFORE)
def test_killed_search_equals_an_uninterrupted_one(
    tmp_path, monkeypatch, uninterrupted_rows, owner, method, call
):
    original, calls = getattr(owner, method), []

    def killed(self, *args, **options):
        calls.append(method)
        if len(calls) == call:
            raise RuntimeError("killed")
        return original(self, *args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(owner, method, killed)
        patch.setattr(Training, "leave", Training.close)  # a killed process saves nothing
        with pytest.raises(RuntimeError, match="killed"):
            pruned(tmp_path / "tuned", 7)
    assert pruned(tmp_path / "tuned", 7) == 0
    assert rows_of(tmp_path / "tuned") == uninterrupted_rows
    for row in uninterrupted_rows:
        assert (tmp_path / "tuned" / row["folder"] / "summary.json").exists()
