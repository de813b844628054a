"""Whole captured runs: equal to eager ones, exact resume, no host synchronization."""

import numpy as np
import pytest
import torch
from runs import assert_equal, assert_same_run, final_state, small_config, table

from torchrl_marl.capture import count_syncs
from torchrl_marl.collectors import RolloutCollector
from torchrl_marl.envs import MarlEnv, VmasEnv
from torchrl_marl.errors import ConfigError, GraphCheckError, NonFiniteError, SpecError
from torchrl_marl.recipes import load_config, validate
from torchrl_marl.specs import AgentSpec
from torchrl_marl.training import resume, train
from torchrl_marl.training.trainer import start_training

SCENARIO = {"library": "vmas", "name": "dropout", "kwargs": {"n_agents": 2}, "info": False}


def config_of(folder, execution="trace", recipe="vmas_balance_mappo", **overrides):
    settings = {"execution": execution, "folder": str(folder), **overrides}
    if recipe == "vmas_balance_mappo":  # minibatches of one size, so that one graph is recorded
        settings = {"learner.minibatch_size": 40, **settings}
        settings["env"] = {**SCENARIO, **settings.get("env", {})}
    return small_config(recipe, **settings)


def test_traced_run_equals_eager_run_in_a_deterministic_env(tmp_path):
    for execution in ("eager", "trace"):
        train(config_of(tmp_path / execution, execution, "toy_matrix_game_mappo"))
    eager, traced = tmp_path / "eager", tmp_path / "trace"
    assert table(eager / "metrics.csv") == table(traced / "metrics.csv")
    assert_equal(final_state(eager)["learners"], final_state(traced)["learners"])


@pytest.mark.parametrize("recipe", ["vmas_balance_mappo", "toy_arena_mappo"])
def test_traced_run_resumes_exactly(recipe, tmp_path):
    whole = train(config_of(tmp_path / "whole", recipe=recipe))
    training = start_training(config_of(tmp_path / "parts", recipe=recipe), None)
    training.begin()
    for _ in range(3):
        training.step()
    training.save()
    training.close()
    torch.rand(7)
    resumed = resume(tmp_path / "parts")
    assert_same_run(whole.folder, resumed.folder)


def test_resume_with_another_execution(tmp_path):
    config = config_of(tmp_path / "run")
    training = start_training(config, None)
    training.step()
    training.save()
    training.close()
    path = tmp_path / "run" / "config.yaml"
    text = path.read_text(encoding="utf-8")
    path.write_text(text.replace("execution: trace", "execution: eager"), encoding="utf-8")
    assert resume(tmp_path / "run").summary["frames"] == 480


def test_iteration_has_at_most_one_host_synchronization(tmp_path):
    training = start_training(config_of(tmp_path / "run"), None)
    training.step()
    [learner] = training.learners
    with count_syncs() as syncs:
        batch = training.collector.rollout()
        training.tracker.update(batch)
        learner.learn(batch)
    # The last read: which metrics count, and whether they are finite.
    assert len(syncs) <= 1, str(syncs)
    training.close()


class Poisoned(MarlEnv):
    """Gives NaN from the fourth step on."""

    def __init__(self, num_envs, **kwargs):
        from torchrl.data import Bounded, Unbounded

        super().__init__(num_envs, **kwargs)
        self.register_agent(AgentSpec("rover", 2, Unbounded((1,)), Bounded(-1, 1, (1,))))

    def _reset(self, tensordict):
        self.age = torch.zeros(self.num_envs, 2, 1)
        return {"rover": {"observation": self.age}}

    def _step(self, tensordict):
        self.age = self.age + 1
        seen = torch.where(self.age > 23, torch.nan, self.age)
        return {"rover": {"observation": seen, "reward": tensordict["rover", "action"]}}


def test_nan_in_a_graph_names_its_source(tmp_path):
    training = start_training(config_of(tmp_path / "run", recipe="toy_arena_mappo"), Poisoned(8))
    training.step()
    training.step()
    with pytest.raises(NonFiniteError, match=r"\('rover', 'observation'\) of the environment"):
        training.step()
    training.close()


class Careful(Poisoned):
    def _step(self, tensordict):
        self.age = self.age + 1
        assert (self.age < 23).all(), "too old"
        return {"rover": {"observation": self.age, "reward": tensordict["rover", "action"]}}


def test_failed_assert_of_the_env_in_a_graph_raises(tmp_path):
    training = start_training(config_of(tmp_path / "run", recipe="toy_arena_mappo"), Careful(8))
    training.step()
    training.step()
    with pytest.raises(GraphCheckError, match=r"assert \(self.age < 23\).*test_execution.py"):
        training.step()
    training.close()


def test_traced_run_with_group_settings(tmp_path):
    env = {"name": "simple_adversary", "kwargs": {}}
    groups = {"agent": {"algorithm": "random"}, "adversary": {"lr": 1e-3}}
    run = train(config_of(tmp_path / "run", env=env, groups=groups))
    assert run.summary["frames"] == 480


@pytest.mark.runs
def test_traced_run_keeps_episodes_of_an_env_object(tmp_path):
    env = VmasEnv("dropout", num_envs=8, seed=0, max_steps=13, info=False, n_agents=2)
    run = train(config_of(tmp_path / "run"), env=env)
    assert run.summary["frames"] == 480 and (env._env.steps == 60 % 13).all()


def test_invalid_executions_raise():
    with pytest.raises(ConfigError, match="did you mean 'compile'"):
        validate(load_config("vmas_balance_mappo", {"execution": "compiled"}))
    with pytest.raises(ConfigError, match="execution is 'cudagraph'.*use execution=compile"):
        validate(load_config("vmas_balance_mappo", {"execution": "cudagraph"}))


@pytest.mark.compiled
def test_compiled_run_equals_eager_run(tmp_path):
    settings = {"total_frames": 160, "learner.minibatch_size": 40}
    # A small update; test_captured_update.py compiles large ones.
    settings |= {"learner.value_norm": False, "learner.normalize_advantage": "none"}
    for execution in ("eager", "compile"):
        config = config_of(tmp_path / execution, execution, "toy_matrix_game_mappo", **settings)
        train(config)
    eager, compiled = (final_state(tmp_path / x)["learners"][0] for x in ("eager", "compile"))
    for key, x in eager.items():
        if isinstance(x, torch.Tensor):
            torch.testing.assert_close(compiled[key], x, rtol=1e-3, atol=1e-4)


class Spread(Poisoned):
    """Starts from its attributes, with a time limit that may change."""

    def __init__(self, num_envs, **kwargs):
        super().__init__(num_envs, **kwargs)
        self.spread, self.centre = 1.0, torch.zeros(1)

    def _reset(self, tensordict):
        self.age = torch.zeros(self.num_envs, 2, 1) + self.spread + self.centre
        return {"rover": {"observation": self.age}}

    def _step(self, tensordict):
        return {"rover": {"observation": self.age, "reward": self.age}}


@pytest.mark.parametrize("when", ["before", "between"])
def test_resets_in_a_graph_follow_changed_env_attributes(when):
    env = Spread(4, max_steps=2, seed=0)
    collector = RolloutCollector(env, frames_per_batch=24, execution="trace")
    if when == "between":
        collector.next()
    env.spread, env.centre = 3.0, torch.full((1,), 10.0)
    seen = collector.next()["rover", "observation"]
    assert (seen[:, 2:] == 13.0).all() and collector.execution == "trace"
    env.max_steps = 3
    done = collector.next()["next", "done"]
    assert done.squeeze(-1)[0].tolist() == [False, False, True] * 2


def test_uncapturable_env_falls_back_to_eager():
    class Numpy(Spread):
        def _step(self, tensordict):
            self.age = self.age + float(np.random.rand())
            return {"rover": {"observation": self.age, "reward": self.age}}

    class Array(Spread):
        def __init__(self, num_envs, **kwargs):
            super().__init__(num_envs, **kwargs)
            self.count = np.zeros(1)

        def _step(self, tensordict):
            self.count += 1
            return {"rover": {"observation": self.age, "reward": self.age * self.count[0].item()}}

    for world, words in ((Numpy, "numpy or Python"), (Array, "count")):
        collector = RolloutCollector(world(4, seed=0), frames_per_batch=24, execution="trace")
        with pytest.warns(UserWarning, match=words):
            collector.next()
        assert collector.execution == "eager"


def test_invalid_actions_of_a_policy_in_a_graph_raise():
    def policy(td):
        td["rover", "action"] = torch.full((4, 2, 1), torch.nan)
        return td

    collector = RolloutCollector(Spread(4, seed=0), policy, frames_per_batch=24, execution="trace")
    with pytest.raises(SpecError, match="'rover_0' in env 0 is nan"):
        collector.next()
