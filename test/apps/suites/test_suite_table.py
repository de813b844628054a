"""The table of a suite: precedence of settings, selection of runs, and refused input."""

import dataclasses
import re
import textwrap
from pathlib import Path

import pytest

from torchrl_marl.apps.cli.main import main
from torchrl_marl.apps.suites import make_plan, read_suite, suite_names
from torchrl_marl.apps.suites.board import Board, read_result
from torchrl_marl.apps.suites.plan import Pace, seconds_left
from torchrl_marl.errors import ConfigError
from torchrl_marl.learners.algorithms import ALGORITHMS

TABLE = """
about: two tasks
default: [mappo]
common:
  total_frames: 1000
  frames_per_batch: 40
  env: {library: toy, num_envs: 4, continuous_actions: false, name: arena}
  learner: {lr: 0.1, gamma: 0.1, lmbda: 0.1, minibatch_size: 11, num_epochs: 3}
algorithms:
  mappo, ippo: {learner: {gamma: 0.2, lmbda: 0.2, minibatch_size: 12}}
  ippo: {learner: {minibatch_size: 13}}
  vdn: {learner: {learning_starts: 40}}
  narrow: {learner: {algorithm: mappo, actor: {num_cells: [8]}}}
tasks:
  short:
    env: {kwargs: {n_agents: 2}}
    learner: {lmbda: 0.3, minibatch_size: 14}
  long:
    total_frames: 2000
    mappo: {learner: {minibatch_size: 15}}
"""


@pytest.fixture
def suite(tmp_path):
    return written(tmp_path, TABLE)


def written(folder, text):
    path = folder / "mine.yaml"
    path.write_text(textwrap.dedent(text))
    return path


def test_later_sections_take_precedence(suite):
    table = read_suite(suite)
    learner = table.run("short", "mappo", 0, {"learner": {"num_epochs": 5}}).config.learner
    found = (learner.lr, learner.gamma, learner.lmbda, learner.minibatch_size, learner.num_epochs)
    # from common, algorithm, task, task over algorithm, and the given settings
    assert found == (0.1, 0.2, 0.3, 14, 5)
    assert table.run("long", "mappo").config.learner.minibatch_size == 15
    assert table.run("long", "ippo").config.learner.minibatch_size == 13
    assert table.run("short", "mappo").config.total_frames == 1000
    assert table.run("long", "mappo").config.total_frames == 2000
    assert table.run("short", "mappo").config.env.kwargs == {"n_agents": 2}
    assert table.run("long", "mappo").config.env.kwargs == {}


def test_variant_is_an_algorithm_under_another_name(suite):
    run = read_suite(suite).run("long", "narrow", 2)
    assert run.config.learner.algorithm == "mappo" and run.config.learner.actor.num_cells == [8]
    assert run.config.recipe == "narrow" and run.place.as_posix() == "long/narrow/seed2"


def test_unused_common_settings_are_dropped_and_given_ones_refused(suite):
    table = read_suite(suite)
    assert not hasattr(table.run("short", "vdn").config.learner, "num_epochs")
    with pytest.raises(ConfigError, match="short with vdn: learner.num_epochs is 5, which is read"):
        table.run("short", "vdn", 0, {"learner.num_epochs": 5})


def test_period_of_evaluations_beside_the_tables_number_is_refused(tmp_path):
    text = TABLE.replace("frames_per_batch: 40", "frames_per_batch: 40\n  evaluation: {count: 4}")
    table = read_suite(written(tmp_path, text))
    with pytest.raises(ConfigError) as error:
        table.run("short", "mappo", 0, {"evaluation.every_frames": 200})
    assert str(error.value) == (
        "short with mappo: evaluation.every_frames is 200, but the suite sets evaluation.count=4, "
        "which replaces it; leave evaluation.every_frames out, or add evaluation.count=null."
    )
    given = {"evaluation.every_frames": 200, "evaluation.count": None}
    evaluation = table.run("short", "mappo", 0, given).config.evaluation
    assert (evaluation.every_frames, evaluation.count) == (200, None)
    with pytest.raises(ConfigError, match="read only where evaluation.count is null"):
        table.run("short", "mappo", 0, {**given, "evaluation.count": 3})


def test_override_drops_table_settings_that_become_unused(tmp_path):
    text = TABLE.replace("num_cells: [8]", "activation: relu").replace("[mappo]", "[narrow]")
    table = read_suite(written(tmp_path, text))
    assert table.run("short", "narrow").config.learner.actor.activation == "relu"
    actor = table.run("short", "narrow", 0, {"learner.actor.body": "simba"}).config.learner.actor
    assert (actor.body, actor.activation) == ("simba", "tanh")  # a block has its own activation
    both = {"learner.actor.body": "simba", "learner.actor.activation": "relu"}
    with pytest.raises(ConfigError, match="short with narrow: learner.actor.activation is 'relu'"):
        table.run("short", "narrow", 0, both)


def test_runs_are_ordered_by_seed(suite):
    plan = make_plan(suite, algorithms="mappo,vdn", seeds=2, frames=400)
    assert [run.place.as_posix() for run in plan.runs[:5]] == [
        *["short/mappo/seed0", "short/vdn/seed0", "long/mappo/seed0", "long/vdn/seed0"],
        "short/mappo/seed1",
    ]
    assert plan.frames == 8 * 400
    assert make_plan(suite, seeds="3..4").selection["seeds"] == [3, 4]
    assert len(make_plan(suite).runs) == 2 * 1 * 5


def test_table_of_the_docs_page_is_valid(tmp_path):
    page = Path(__file__).parents[3] / "docs" / "suite.md"
    (table,) = re.findall(r"```yaml\n(.*?)```", page.read_text(encoding="utf-8"), re.S)
    plan = make_plan(written(tmp_path, table), algorithms="mappo,narrow", seeds=1)
    gammas = [run.config.learner.gamma for run in plan.runs]
    assert gammas == [0.99, 0.99, 0.95, 0.99] and plan.frames == 2 * 600_000 + 2 * 6_000_000


@pytest.mark.runs
@pytest.mark.parametrize("name", suite_names())
def test_suites_of_the_package_are_valid(name):
    """Every task with the default algorithms, and every exception of the table."""
    table = read_suite(name)
    for run in make_plan(name, seeds=1).runs:
        assert run.config.total_frames % run.config.frames_per_batch == 0, run.place
        assert run.config.threads == 1, run.place
    first = next(iter(table.tasks))
    others = {*table.exceptions, *((first, algorithm) for algorithm in table.algorithms)}
    for task, algorithm in others:
        config = table.run(task, algorithm).config
        known = ALGORITHMS.find(algorithm) is not None  # others are variants
        assert not known or config.learner.algorithm == algorithm
        assert config.total_frames % config.frames_per_batch == 0, (task, algorithm)


def test_vmas_suite_has_the_tasks_of_benchmarl():
    """With BenchMARL's arguments and time limits; `football` has a weaker opponent."""
    environments = {task: read_suite("vmas").run(task, "mappo").config.env for task in TASKS}
    assert set(read_suite("vmas").tasks) == set(TASKS)
    assert {task: env.max_steps for task, env in environments.items()} == TASKS
    assert (
        environments["balance"].kwargs["n_agents"] == 4
        and environments["wheel"].kwargs["line_mass"] == 30
    )
    assert environments["football"].kwargs["ai_strength"] == 0.3


TASKS = dict.fromkeys(
    ["balance", "sampling", "navigation", "transport", "reverse_transport", "wheel", "dispersion"]
    + ["give_way", "flocking", "discovery", "dropout"],
    100,
) | {"multi_give_way": 200, "passage": 500, "football": 200}


def test_robots_suite_has_the_partitions_of_harl():
    """17, 4, 2 and 6 agents, and HARL's algorithms beside those with simultaneous updates."""
    table = read_suite("robots")
    found = {task: tuple(own["env"].values()) for task, own in table.tasks.items()}
    assert found == {
        f"{robot}_{parts}": (robot, {"agent_conf": parts})
        for robot, parts in [("humanoid", "17x1"), ("ant", "4x2"), ("halfcheetah", "2x3"),
                             ("halfcheetah", "6x1"), ("walker2d", "2x3")]
    }  # fmt: skip
    assert table.default == ("mappo", "happo", "matd3", "hatd3", "hasac")


def test_sequential_and_simultaneous_algorithms_share_settings():
    """Uses the settings of the robots suite with a toy environment."""
    table, env = (
        read_suite("robots"),
        {"library": "toy", "name": "arena", "kwargs": {"n_agents": 4}},
    )
    common = {**table.common, "env": {"num_envs": 40, "max_steps": 1000}}
    toy = dataclasses.replace(table, common=common, tasks={"toy": {"env": env}})
    for one, other in (("mappo", "happo"), ("matd3", "hatd3")):
        a, b = (vars(toy.run("toy", name).config.learner) for name in (one, other))
        assert {key for key in a.keys() & b.keys() if a[key] != b[key]} == {"algorithm"}


def test_seconds_left():
    a, b, c = ("x", "mappo"), ("y", "mappo"), ("z", "vdn")
    paces = {a: Pace(100, 10.0) + Pace(100, 30.0), b: Pace(50, 50.0)}
    assert seconds_left([(a, 100)], paces) == 20.0  # 200 frames took 40 s
    # An unknown task uses the pace of the algorithm on other tasks: 250 frames took 90 s.
    assert seconds_left([(("w", "mappo"), 25)], paces) == pytest.approx(9.0)
    # An unknown algorithm uses the pace of all runs.
    assert seconds_left([(c, 25)], paces) == pytest.approx(9.0)
    # Two at once: 20 and 10 s, then 10 s after the second, and 1 s more.
    left = [(a, 100), (b, 10), (b, 10), (b, 1)]
    assert seconds_left(left, paces, jobs=2) == pytest.approx(21.0)
    assert seconds_left(left, paces) == pytest.approx(41.0)
    assert seconds_left([(a, 0)], {}) == 0.0
    assert seconds_left([(a, 1)], {a: Pace(0, 5.0)}) is None


def test_forecast_counts_the_seconds_of_one_program_once(suite, tmp_path, monkeypatch):
    """Ten seeds, of which half of the frames took 50 s, need another 50 s."""
    runs = make_plan(suite, tasks="short", seeds=10).runs
    board = Board({run.place: read_result(tmp_path, run) for run in runs}, 1, bar=False)
    monkeypatch.setattr("time.monotonic", lambda: 100.0)
    board.began(*(run.place for run in runs))
    monkeypatch.setattr("time.monotonic", lambda: 150.0)
    monkeypatch.setattr("torchrl_marl.apps.suites.board.frames_of", lambda folder: 500)
    board.show(run.place for run in runs)
    assert board.seconds_left() == pytest.approx(50.0)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "no suite is given; name one of coordination, foraging, mpe, overcooked, robots"),
        (["seeds=3"], "no suite is given"),
        (["vmsa"], "unknown suite 'vmsa'; did you mean 'vmas'?"),
        (["nothing.yaml"], "'nothing.yaml' is missing"),
        (["toy", "tasks=arana"], "unknown task 'arana' of suite 'toy'; did you mean 'arena'?"),
        (["toy", "algorithms=mapo"], "unknown algorithm 'mapo' of suite 'toy'; did you mean"),
        (["toy", "tasks=arena,arena"], "expected different ones of"),
        (["toy", "seeds=0"], "seeds is '0', expected a number of seeds"),
        (["toy", "seeds=1,1"], "different seeds"),
        (["toy", "seeds=99999999999999999999"], "expected at most 10,000 seeds"),
        (["toy", "seeds=0..10000"], "expected at most 10,000 seeds"),
        (["toy", "seeds=0,99999999999999999999"], "different seeds"),
        (["toy", "frames=many"], "frames is 'many', expected a whole number"),
        (["toy", "frames=640", "frames=640"], "frames is given twice"),
        (["toy", "frames=640", "total_frames=640"], "are the same setting"),
        (["toy", "seed=3"], "seed is given, but the suite sets it for each run; give seeds"),
        (["toy", "folder=there"], "give --out instead"),
        (["toy", "population.size=4"], "population is given"),
        (["toy", "learner.lrr=1"], "unknown setting 'learner.lrr'; did you mean 'learner.lr'?"),
        (["toy", "algorithms=mappo", "learner.lr=-1"], "arena with mappo: learner.lr is -1"),
        (["toy", "--jobs", "-1"], "expected"),
        (["toy", "--resume"], "is not a suite's folder"),
    ],
)
def test_invalid_arguments_are_refused_at_the_start(
    arguments, words, capsys, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    assert main(["suite", *arguments]) == 2
    assert words in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("common:", "comon:", "has the section 'comon', did you mean 'common'?"),
        (
            "  vdn: {",
            "  vnd: {",
            "has algorithms.vnd, which is not an algorithm; did you mean 'vdn'?",
        ),
        ("default: [mappo]", "default: [maddpg]", "has 'maddpg' as default"),
        ("total_frames: 1000", "seed: 1", "has seed under common, but the suite sets it"),
        ("  short:", "  ../there:", "has the name '../there', which cannot be a folder"),
        ("  short:", "  results.csv:", "has the task 'results.csv', which is a file or folder of"),
        ("tasks:\n", "tasks: 3\nabout2:\n", "has the section 'about2'"),
        ("algorithms:", "algorithms: [mappo]\nabout3:", "about3"),
        ("    total_frames: 2000", "    total_frame: 2000", "unknown setting 'total_frame'"),
        ("{gamma: 0.2,", "{alpha_init: 1, gamma: 0.2,", "learner.alpha_init is 1, which is read"),
    ],
)
def test_invalid_table_is_refused(old, new, words, tmp_path, capsys):
    path = written(tmp_path, TABLE.replace(old, new))
    assert main(["suite", str(path), "algorithms=mappo,vdn", "--dry-run"]) == 2
    assert words in capsys.readouterr().err


def test_dry_run_shows_the_plan(suite, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["suite", str(suite), "--dry-run", "seeds=2"]) == 0
    shown = capsys.readouterr().out
    assert "toy arena, at most 100 steps, 2,000 frames" in shown and "6,000" in shown
    assert "4, of which 0 are finished" in shown and not (tmp_path / "suite_mine").exists()
    assert main(["list", "suites"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[1:]] == suite_names()
