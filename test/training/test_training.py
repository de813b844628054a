"""The training loop: exact resume, early stops, and environments that return NaN."""

import json
import random
import signal

import numpy as np
import pytest
import torch
from runs import assert_equal, assert_same_run, final_state, small_config, table
from support.tiers import second_tier_cases
from torchrl.envs import TransformedEnv
from torchrl.envs.transforms import RewardSum

from torchrl_marl import TeamSpec
from torchrl_marl.envs import VmasEnv
from torchrl_marl.envs.toy import Arena, TwoStepGame
from torchrl_marl.errors import ConfigError, NonFiniteError
from torchrl_marl.training import Run, iterate, train
from torchrl_marl.training.trainer import Training, resume

ARENA = {"name": "arena", "kwargs": {"n_agents": 3, "years": 4, "lives": 2}}
WORLDS = {
    "arena": lambda: small_config(**{"env.kwargs": ARENA["kwargs"]}),
    "balance": lambda: small_config("vmas_balance_mappo"),
    "everything": lambda: small_config(
        **{
            "env.kwargs": {"n_agents": 4, "n_groups": 2, "action_mask": True, "years": 3},
            "learner.normalize_observations": True,
            "learner.lr_schedule": "linear",
            "learner.entropy_schedule": "linear",
            "learner.target_kl": 0.01,
            "groups": {
                "agents_1": {"lr": 1e-3, "bootstrap": "agent", "normalize_advantage": "agent"}
            },
        }
    ),
}


def at(config, folder, **overrides):
    return small_config(config, **{"folder": str(folder), **overrides})


def play_with_generators():
    torch.rand(7)
    np.random.rand(7)
    random.random()


def stop_after(iterations, config, env=None):
    for iteration in iterate(config, env=env):
        if iteration.number == iterations:
            break


# ------------------------------------------------------------------------------------- resume


@pytest.mark.parametrize(
    ("world", "evaluate_every"),
    [("arena", None), ("arena", 160), ("balance", 160), ("everything", None)],
)
def test_resume_is_exact(world, evaluate_every, tmp_path):
    config = WORLDS[world]()
    every = {"evaluation.every_frames": evaluate_every}
    settings = {"total_frames": 480, "frames_per_batch": 80}
    whole = train(at(config, tmp_path / "whole", **settings, **every))
    stop_after(3, at(config, tmp_path / "parts", **settings, **every))
    assert len(table(tmp_path / "parts" / "metrics.csv")) == 3
    play_with_generators()
    resumed = resume(tmp_path / "parts")
    assert_same_run(whole.folder, resumed.folder)
    assert_equal(whole.summary | {"recipe": ""}, resumed.summary | {"recipe": ""})
    rows = table(whole.folder / "metrics.csv")
    assert [int(row["iteration"]) for row in rows] == [1, 2, 3, 4, 5, 6]
    assert [int(row["frames"]) for row in rows] == [80, 160, 240, 320, 400, 480]
    evaluations = [int(row["iteration"]) for row in table(whole.folder / "evaluation.csv")]
    assert evaluations == ([0, 6] if evaluate_every is None else [0, 2, 4, 6])
    for a, b in zip(whole.policy.parameters(), resumed.policy.parameters()):
        assert torch.equal(a, b)


@pytest.mark.runs
@pytest.mark.parametrize("own", [True, False])
def test_evaluation_does_not_affect_training(own, tmp_path):
    """Weights, episodes and generators are the same with more evaluations."""

    def run(name, **settings):
        env = Arena(8, n_agents=3, years=4, max_steps=13) if own else None
        return train(at(WORLDS["arena"](), tmp_path / name, **settings), env=env)

    plain, often = run("plain"), run("often", **{"evaluation.every_frames": 80})
    assert_equal(final_state(plain.folder), final_state(often.folder))
    assert table(plain.folder / "metrics.csv") == table(often.folder / "metrics.csv")
    assert len(table(often.folder / "evaluation.csv")) == 7  # the last one only once


def test_same_seed_gives_the_same_run_and_other_seeds_differ(tmp_path):
    config = WORLDS["arena"]()
    one, two = (train(at(config, tmp_path / name)) for name in "ab")
    assert_same_run(one.folder, two.folder)
    other = train(at(config, tmp_path / "c", seed=1))
    assert table(other.folder / "metrics.csv") != table(one.folder / "metrics.csv")


def test_metrics_are_truncated_to_the_checkpoint_on_resume(tmp_path, monkeypatch):
    """After a power cut, iterations after the last checkpoint are repeated."""
    config = WORLDS["arena"]()
    settings = {"checkpoint.every_iterations": 2, "evaluation.every_frames": 160}
    whole = train(at(config, tmp_path / "whole", **settings))
    plain_step = Training.step

    def step(self):
        if self.iteration == 5:
            raise RuntimeError("power cut")
        return plain_step(self)

    monkeypatch.setattr(Training, "step", step)
    with pytest.raises(RuntimeError, match="power cut"):
        train(at(config, tmp_path / "cut", **settings))
    monkeypatch.undo()
    assert len(table(tmp_path / "cut" / "metrics.csv")) == 5
    with (tmp_path / "cut" / "metrics.csv").open("a") as file:
        file.write("6,480,12")  # a row that was being written
    resumed = resume(tmp_path / "cut")
    assert_same_run(whole.folder, resumed.folder)


def test_resume_of_a_finished_run_changes_nothing(tmp_path):
    config = at(WORLDS["arena"](), tmp_path / "run", **{"checkpoint.every_iterations": 2})
    run = train(config)
    files = {p.name: p.read_bytes() for p in run.folder.iterdir() if p.is_file()}
    state = final_state(run.folder)
    again = resume(run.folder)
    assert_equal(state, final_state(run.folder))
    assert table(run.folder / "evaluation.csv") == [
        dict(row) for row in table(run.folder / "evaluation.csv")
    ]
    assert len(table(run.folder / "evaluation.csv")) == 2
    assert again.summary["return_after"] == run.summary["return_after"]
    assert files["metrics.csv"] == (run.folder / "metrics.csv").read_bytes()


# ----------------------------------------------------------------------------- stopping early


def test_ctrl_c_saves_and_resumes(tmp_path, monkeypatch, capsys):
    config = WORLDS["arena"]()
    whole = train(at(config, tmp_path / "whole"))
    plain_step = Training.step

    def step(self):
        if self.iteration == 1:
            signal.raise_signal(signal.SIGINT)
        return plain_step(self)

    before = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(Training, "step", step)
    with pytest.raises(KeyboardInterrupt):
        train(at(config, tmp_path / "cut"))
    monkeypatch.undo()
    assert signal.getsignal(signal.SIGINT) is before
    assert "stopping after this iteration" in capsys.readouterr().err
    assert final_state(tmp_path / "cut")["iteration"] == 2
    assert_same_run(whole.folder, resume(tmp_path / "cut").folder)


def test_second_ctrl_c_stops_immediately(tmp_path, monkeypatch):
    def step(self):
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        raise AssertionError("went on")

    monkeypatch.setattr(Training, "step", step)
    with pytest.raises(KeyboardInterrupt):
        train(at(WORLDS["arena"](), tmp_path / "run"))


def test_break_from_iterate_saves_a_checkpoint(tmp_path):
    config = at(WORLDS["arena"](), tmp_path / "run")
    seen = []
    for iteration in iterate(config):
        seen.append(iteration)
        assert iteration.batch.shape == (8, 10)
        assert iteration.metrics["frames"] == iteration.frames == 80 * iteration.number
        assert ("agents", "advantage") in iteration.batch.keys(True)
        if iteration.number == 2:
            break
    assert final_state(config.folder)["iteration"] == 2
    # The policy of the iteration is the one in training.
    loaded = Run.load(config.folder)
    for a, b in zip(seen[0].run.policy.parameters(), loaded.policy.parameters()):
        assert torch.equal(a, b)


def test_error_in_the_iterate_loop_saves_a_checkpoint(tmp_path):
    config = at(WORLDS["arena"](), tmp_path / "run")
    with pytest.raises(ZeroDivisionError):
        for iteration in (generator := iterate(config)):
            if iteration.number == 2:
                1 / 0  # noqa: B018
    generator.close()
    assert final_state(config.folder)["iteration"] == 2


# -------------------------------------------------------------------- environments that break


class Broken(Arena):
    """An arena with NaN after a number of steps, or for dead agents."""

    def __init__(self, *args, what, when, only_the_dead=False, **kwargs):
        super().__init__(*args, **kwargs)
        self.what, self.when, self.only_the_dead = what, when, only_the_dead
        self.count = torch.zeros(self.num_envs, dtype=torch.int64)

    def _step(self, tensordict):
        out = super()._step(tensordict)
        self.count = self.count + 1
        given, key = (out if self.what == "state" else out["agents"]), self.what
        broken = (self.count > self.when).view(-1, *[1] * (given[key].ndim - 1))
        if self.only_the_dead:
            # Rewards belong to agents that acted, observations to those that act next.
            alive = tensordict["agents", "mask"] if self.what == "reward" else self.alive
            broken = ~alive.unsqueeze(-1)
        given[key] = torch.where(broken, torch.nan, given[key])
        return out


BROKEN = {"n_agents": 3, "years": 4, "lives": 2, "max_steps": 13, "seed": 0}


@pytest.mark.parametrize("what", ["observation", "reward", "state"])
@pytest.mark.parametrize(
    "when", [24, *second_tier_cases("runs", 30, 39), 40]
)  # evaluation before training takes up to 13
def test_nan_of_the_environment_raises_and_keeps_checkpoint(what, when, tmp_path):
    config = at(WORLDS["arena"](), tmp_path / "run", **{"checkpoint.every_iterations": 1})
    env = Broken(8, what=what, when=when, **BROKEN)
    with pytest.raises(NonFiniteError) as caught:
        train(config, env=env)
    message = str(caught.value)
    assert what in message
    assert "'agents'" in message or what == "state"
    assert "\n" not in message
    assert "lower" not in message  # it is not the learning rate
    state = final_state(config.folder)
    rows = table(config.folder + "/metrics.csv")
    assert 1 <= len(rows) == state["iteration"] < 6
    assert all(torch.isfinite(x).all() for x in _tensors(state["learners"]))
    policy = Run.load(config.folder, env=Arena(8, **BROKEN)).policy
    assert all(bool(p.isfinite().all()) for p in policy.parameters())


def _tensors(tree):
    if isinstance(tree, torch.Tensor):
        return [tree.double()]
    values = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else ()
    return [x for value in values for x in _tensors(value)]


@pytest.mark.parametrize("what", ["observation", "reward"])
def test_nan_of_dead_agents_has_no_effect(what, tmp_path):
    """The run exactly equals one without NaN."""
    config = WORLDS["arena"]()
    runs = []
    for name, only_the_dead in (("clean", False), ("poison", True)):
        env = Broken(8, what=what, when=10**9, only_the_dead=only_the_dead, **BROKEN)
        run = train(at(config, tmp_path / name), env=env)
        runs.append((final_state(run.folder)["learners"], table(run.folder / "metrics.csv")))
    assert_equal(runs[0], runs[1])


# ---------------------------------------------------------------------------- environment objects


@pytest.mark.runs
@pytest.mark.parametrize("transform", [False, True])
def test_run_with_env_object_resumes_exactly(transform, tmp_path):
    def make():
        env = Arena(8, n_agents=3, years=4, max_steps=13, seed=5)
        if transform:
            keys = {"in_keys": [("agents", "reward")], "out_keys": [("agents", "episode_reward")]}
            env = TransformedEnv(env, RewardSum(**keys))
        return env

    config = WORLDS["arena"]()
    every = {"evaluation.every_frames": 160}
    whole = train(at(config, tmp_path / "whole", **every), env=make())
    stop_after(3, at(config, tmp_path / "parts", **every), env=make())
    with pytest.raises(ConfigError, match="env="):
        resume(tmp_path / "parts")
    resumed = resume(tmp_path / "parts", env=make())
    assert_same_run(whole.folder, resumed.folder)
    assert Run.load(whole.folder, env=make()).evaluate(episodes=3)["episodes"] == 3


def test_team_spec_of_a_torchrl_env():
    from torchrl.envs import SerialEnv

    team = TeamSpec.from_env(SerialEnv(2, lambda: TwoStepGame(4)))
    assert team.groups["agents"].n_agents == 2


def test_vmas_env_of_torchrl_trains(tmp_path):
    import torchrl.envs

    env = torchrl.envs.VmasEnv("balance", num_envs=8, max_steps=13, seed=0)
    config = at(WORLDS["arena"](), tmp_path / "run", total_frames=160)
    run = train(config, env=env)
    assert len(table(run.folder / "metrics.csv")) == 2
    assert run.summary["frames"] == 160


def test_several_groups_train(tmp_path):
    env = VmasEnv("simple_tag", num_envs=8, max_steps=13, seed=0)
    groups = {"adversary": {"lr": 1e-4, "algorithm": "ippo"}}
    config = at(WORLDS["balance"](), tmp_path / "run", total_frames=80, groups=groups)
    run = train(config, env=env)
    (row,) = table(run.folder / "metrics.csv")
    for group in ("adversary", "agent"):
        for name in ("loss_objective", "loss_critic", "kl_approx", "grad_norm", "lr"):
            assert float(row[f"{group}/{name}"]) == float(row[f"{group}/{name}"])
    assert float(row["adversary/lr"]) == pytest.approx(1e-4)
    loaded = Run.load(run.folder, env=env)
    for a, b in zip(run.policy.parameters(), loaded.policy.parameters()):
        assert torch.equal(a, b)


# -------------------------------------------------------------------------------- run folders


def test_files_of_a_finished_run(tmp_path):
    config = at(WORLDS["arena"](), tmp_path / "run")
    run = train(config)
    summary = json.loads((run.folder / "summary.json").read_text())
    assert summary == run.summary
    assert summary["frames"] == 480
    evaluations = table(run.folder / "evaluation.csv")
    assert float(evaluations[0]["return_mean"]) == pytest.approx(summary["return_before"], rel=1e-5)
    assert float(evaluations[-1]["return_mean"]) == pytest.approx(summary["return_after"], rel=1e-5)
    first = list(table(run.folder / "metrics.csv")[0])
    assert first[:3] == ["iteration", "frames", "agent_frames"]
    living = [int(row["agent_frames"]) for row in table(run.folder / "metrics.csv")]
    assert living == sorted(living)
    assert 480 < living[-1] < 480 * 3  # some of the three agents died
    loaded = Run.load(run.folder)
    assert loaded.summary == summary
    for a, b in zip(run.policy.parameters(), loaded.policy.parameters()):
        assert torch.equal(a, b)
    one, other = run.evaluate(), loaded.evaluate()
    assert one == other
    assert one["return_mean"] == pytest.approx(summary["return_after"])
    env = Arena(2, n_agents=3, seed=0)
    assert env.rollout(3, loaded.policy)["agents", "action"].shape == (2, 3, 3)


def test_existing_folder_raises(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "precious.txt").write_text("mine")
    with pytest.raises(ConfigError, match="run folder .* exists; choose another folder=...\\.$"):
        train(at(WORLDS["arena"](), folder))
    assert [p.name for p in folder.iterdir()] == ["precious.txt"]


def test_env_object_is_seeded_by_the_run(tmp_path):
    """An env object is seeded by the run, also after it was used."""
    config = WORLDS["arena"]()
    runs = []
    for name, used in (("fresh", 0), ("used", 3)):
        env = Arena(8, n_agents=3, max_steps=13, seed=used)
        if used:
            env.rollout(used)
        runs.append(train(at(config, tmp_path / name), env=env).folder)
    assert table(runs[0] / "metrics.csv") == table(runs[1] / "metrics.csv")
