"""The choice of ``execution=auto``, where it is written, and its use on resume."""

import pytest
import torch
import yaml

import torchrl_marl
from torchrl_marl.envs import VmasEnv
from torchrl_marl.recipes import load_config
from torchrl_marl.training import environments as execution
from torchrl_marl.training.environments import choose_execution

pytestmark = pytest.mark.runs

SMALL = {
    "total_frames": 16,
    "frames_per_batch": 8,
    "env": {"num_envs": 2, "max_steps": 4},
    "evaluation": {"episodes": 2},
    "learner": {"minibatch_size": 8},
    "logging": {"progress": False},
}


@pytest.fixture(autouse=True)
def compiler(monkeypatch):
    monkeypatch.setattr(execution.shutil, "which", lambda command: f"/usr/bin/{command}")


@pytest.mark.parametrize(
    ("recipe", "chosen"),
    [
        ("vmas_balance_mappo", "compile"),
        ("vmas_simple_tag_mappo", "eager"),  # 3,000 steps
        ("pettingzoo_simple_spread_mappo", "compile"),  # steps in Python, but 15,360 updates
        ("jaxmarl_smax_3m_qmix", "compile"),
        ("external_meet_mappo", "eager"),  # 4,000 updates
        ("toy_arena_mappo", "eager"),
    ],
)
def test_auto_compiles_runs_with_enough_frames(recipe, chosen):
    config = load_config(recipe)
    assert config.execution == "auto" and choose_execution(config) == chosen


def test_auto_counts_steps_of_all_envs():
    settings = {"total_frames": 96 * 5_000, "frames_per_batch": 9_600}
    assert choose_execution(load_config("vmas_balance_mappo", settings)) == "compile"
    settings["total_frames"] -= 1
    assert choose_execution(load_config("vmas_balance_mappo", settings)) == "eager"


def test_auto_counts_updates_if_the_simulator_is_not_captured():
    settings = {"total_frames": 200_000, "frames_per_batch": 1_600}
    recipe = "pettingzoo_simple_spread_mappo"  # 10 epochs of minibatches of 400
    assert choose_execution(load_config(recipe, settings)) == "compile"
    settings["total_frames"] -= 1_600
    assert choose_execution(load_config(recipe, settings)) == "eager"
    off_policy = {"total_frames": 99_200, "learner": {"updates_per_frame": 0.05}}
    assert choose_execution(load_config("pettingzoo_ant_matd3", off_policy)) == "eager"
    off_policy["learner"]["updates_per_frame"] = 0.051
    assert choose_execution(load_config("pettingzoo_ant_matd3", off_policy)) == "compile"
    assert choose_execution(load_config(recipe, {"device": "cuda"})) == "eager"  # not measured


def test_uncapturable_simulator_is_stepped_eagerly_without_warning(tmp_path, monkeypatch, recwarn):
    monkeypatch.setattr(execution, "_MIN_STEPS_TO_COMPILE", 1)
    monkeypatch.setattr(execution, "_compiled_mode", lambda device: "trace")
    env = {"library": "pettingzoo", "name": "mpe2/simple_spread_v3"}
    run = torchrl_marl.train(
        folder=str(tmp_path / "run"), **{**SMALL, "env": {**SMALL["env"], **env}}
    )
    assert run.config.execution == "trace" and run.summary["frames"] == 16
    assert not [one for one in recwarn if "collected eagerly" in str(one.message)]


def test_explicit_execution_is_kept():
    for wanted in ("eager", "trace", "compile"):
        config = load_config("vmas_balance_mappo", {"execution": wanted, "total_frames": 9_600})
        assert choose_execution(config) == wanted


@pytest.mark.parametrize(("device", "graphs"), [("cpu", "compile"), ("cuda:1", "cudagraph")])
def test_auto_is_eager_without_a_compiler(device, graphs, monkeypatch):
    config = load_config("vmas_balance_mappo", {"device": device})
    monkeypatch.setattr(execution.importlib.util, "find_spec", lambda name: name)
    assert choose_execution(config) == graphs
    monkeypatch.setattr(execution.shutil, "which", lambda command: None)
    monkeypatch.setattr(execution.importlib.util, "find_spec", lambda name: None)
    assert choose_execution(config) == "eager"


def test_message_if_only_the_compiler_is_missing(monkeypatch, capsys):
    monkeypatch.setattr(execution.shutil, "which", lambda command: None)
    monkeypatch.delenv("CXX", raising=False)
    short = {"total_frames": 9_600}
    assert choose_execution(load_config("vmas_balance_mappo", short)) == "eager"
    assert capsys.readouterr().err == ""
    assert choose_execution(load_config("vmas_balance_mappo")) == "eager"
    assert "no C++ compiler 'g++' was found" in capsys.readouterr().err


def test_choice_with_a_user_environment():
    config = load_config("vmas_balance_mappo", {"total_frames": 10_000}, own_env=True)
    env = VmasEnv("balance", num_envs=2, n_agents=2)
    assert choose_execution(config, env) == "compile"
    assert choose_execution(config, _Other()) == "eager"  # 50 updates


class _Other:
    batch_size = torch.Size([2])


def test_choice_is_written_and_kept_on_resume(tmp_path, monkeypatch):
    run = torchrl_marl.train(folder=str(tmp_path / "run"), **SMALL)
    text = yaml.safe_load((run.folder / "config.yaml").read_text())
    assert text["execution"] == "eager"
    monkeypatch.setattr(execution, "_MIN_STEPS_TO_COMPILE", 1)
    run = torchrl_marl.resume(run.folder, total_frames=32)  # a new run would be compiled
    assert run.config.execution == "eager" and run.summary["frames"] == 32
    run = torchrl_marl.resume(run.folder, execution="trace", total_frames=48)  # explicit setting
    assert run.config.execution == "trace" and run.summary["frames"] == 48
    assert yaml.safe_load((run.folder / "config.yaml").read_text())["execution"] == "trace"


def test_run_without_stored_execution_stays_eager(tmp_path, monkeypatch):
    run = torchrl_marl.train(folder=str(tmp_path / "run"), **SMALL)
    path = run.folder / "config.yaml"
    lines = path.read_text().splitlines()
    path.write_text("\n".join(x for x in lines if not x.startswith("execution")) + "\n")
    monkeypatch.setattr(execution, "_MIN_STEPS_TO_COMPILE", 1)
    assert torchrl_marl.resume(run.folder, total_frames=32).config.execution == "eager"
