"""Runs with domain randomization: training, evaluation and exact resume."""

import math

import pytest
from runs import assert_same_run, small_config, table
from tiers import second_tier_cases
from torchrl.envs import TransformedEnv

from torchrl_marl.apps.cli.main import main
from torchrl_marl.apps.comparison import compare
from torchrl_marl.errors import ConfigError
from torchrl_marl.recipes import read_config
from torchrl_marl.training.environments import Environments
from torchrl_marl.training.evaluation import EVALUATION_SEED
from torchrl_marl.training.run import Run
from torchrl_marl.training.trainer import iterate, resume, train

pytest.importorskip("vmas")

MASSES = {"agent_mass": [0.5, 2.0], "landmark_mass": [0.5, 2.0]}
SENSORS = {"observation_delay": [0, 2], "observation_noise": [0.0, 0.1], "action_delay": 1}
WORLDS = {
    "arena": ("toy_arena_mappo", SENSORS),
    "balance": ("vmas_balance_mappo", {**MASSES, **SENSORS, "action_noise": 0.1}),
}


def config_of(world, folder, **overrides):
    recipe, ranges = WORLDS[world]
    options = {"env": {"randomize": ranges}, "execution": "eager", **overrides}
    return small_config(recipe, folder=str(folder), **options)


@pytest.mark.parametrize(
    ("world", "execution"),
    [("arena", "eager"), *second_tier_cases("runs", ("balance", "eager"), ("balance", "trace"))],
)
def test_randomized_run_resumes_exactly(world, execution, tmp_path):
    options = {"total_frames": 320, "execution": execution}
    whole = train(config_of(world, tmp_path / "whole", **options))
    for iteration in iterate(config_of(world, tmp_path / "parts", **options)):
        if iteration.number == 2:
            break
    resumed = resume(tmp_path / "parts")
    assert_same_run(whole.folder, resumed.folder)
    assert len(table(whole.folder / "metrics.csv")) == 4


def test_training_is_randomized_and_evaluation_is_not(tmp_path):
    config = config_of("balance", tmp_path / "run", total_frames=80)
    envs = Environments(config, None, "cpu")
    assert len(list(envs.training.transform)) == 4
    assert not envs.training.domain_parameters.is_empty()
    assert not isinstance(envs.evaluation, TransformedEnv)
    assert envs.evaluation.domain_parameters.is_empty()
    config = read_config(config, {"evaluation": {"randomize": True}})
    assert not Environments(config, None, "cpu").evaluation.domain_parameters.is_empty()


@pytest.mark.runs
def test_evaluation_with_given_parameters(tmp_path, capsys):
    run = train(config_of("balance", tmp_path / "run", total_frames=80))
    plain = run.evaluate(4)
    again = [run.evaluate(4, randomize=x) for x in (False, {}, {"agent_mass": 1.0})]
    assert plain == run.evaluate(4) and all(one == plain for one in again)
    heavy, own = (run.evaluate(4, randomize=x)["return_mean"] for x in ({"agent_mass": 4}, True))
    assert len({plain["return_mean"], heavy, own}) == 3
    command = ["evaluate", str(run.folder), "--episodes", "4", "--deterministic"]
    main([*command, "env.randomize.agent_mass=4"])
    assert f"{heavy:.4g}" in capsys.readouterr().out
    main([*command, "evaluation.randomize=true"])
    assert f"{own:.4g}" in capsys.readouterr().out
    rows = (run.folder / "evaluations.jsonl").read_text(encoding="utf-8").splitlines()
    assert ['"randomize": {"agent_mass": 4}' in rows[0], '"randomize": true' in rows[1]] == [
        True
    ] * 2
    run._append_evaluation({"return_mean": math.nan, "return_std": math.inf, "episodes": 4})
    [*_, row] = (run.folder / "evaluations.jsonl").read_text(encoding="utf-8").splitlines()
    assert '"return_mean": null, "return_std": null, "episodes": 4}' in row
    env = run.make_env(2)
    with pytest.raises(ConfigError, match="randomize that: torchrl_marl.envs.randomized"):
        run.evaluate(4, env=env, randomize=True)


@pytest.mark.runs
def test_compare_uses_nominal_parameters(tmp_path):
    plain = small_config("vmas_balance_mappo", folder=str(tmp_path / "plain"), total_frames=80)
    runs = [train(plain), train(config_of("balance", tmp_path / "run", total_frames=80))]
    folders = [run.folder for run in runs]
    found = compare(*folders, episodes=4, deterministic=True)
    expected = [run.play(4, True).total.mean().item() for run in runs]
    assert found.first.returns.mean().item() == pytest.approx(expected[0])
    assert found.second.returns.mean().item() == pytest.approx(expected[1])
    options = ["--episodes", "4", "--deterministic"]
    assert main(["compare", *map(str, folders), *options]) == 0


def test_evaluate_refuses_other_settings(tmp_path, capsys):
    run = train(config_of("arena", tmp_path / "run", total_frames=80))
    for setting, message in (
        ("total_frames=3", "total_frames is given, expected settings of the environment"),
        ("env.randomize.mass=2", "Arena has no parameter 'mass' to randomize"),
    ):
        assert main(["evaluate", str(run.folder), "--episodes", "2", setting]) == 2
        assert message in capsys.readouterr().err


def test_evaluations_of_randomized_and_plain_runs_start_equally(tmp_path):
    plain = small_config("vmas_balance_mappo", folder=str(tmp_path / "plain"), execution="eager")
    config = config_of("balance", tmp_path / "run")
    first, second = (Environments(x, None, "cpu").evaluation for x in (plain, config))
    for env in (first, second):
        env.set_seed(EVALUATION_SEED)
    states = [env.reset()["agents", "observation"] for env in (first, second)]
    assert states[0].equal(states[1])


@pytest.mark.parametrize("value", ["heavy", "{agent_mass: [2, 1]}", "{agent_mass: heavy}"])
def test_invalid_ranges_raise(value, capsys):
    assert main(["train", "vmas_balance_mappo", f"env.randomize={value}"]) == 2
    assert "env.randomize" in capsys.readouterr().err


def test_randomize_with_an_external_simulator_raises(capsys):
    assert main(["train", "external_meet_mappo", "env.randomize.mass=2"]) == 2
    assert "and leave env.randomize out" in capsys.readouterr().err


def test_loaded_run_keeps_its_ranges(tmp_path):
    run = train(config_of("arena", tmp_path / "run", total_frames=80))
    assert Run.load(run.folder).config.env.randomize == SENSORS
