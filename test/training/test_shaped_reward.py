"""Shaped rewards are used in training and left out of evaluations."""

import csv

import pytest
import torch
from runs import replaced, small_config
from torchrl.envs import RewardSum, TransformedEnv

from torchrl_marl import TeamSpec
from torchrl_marl.training import Run, evaluate, resume, train
from torchrl_marl.training.evaluation import EVALUATION_SEED

pytest.importorskip("jaxmarl")

from torchrl_marl.envs import JaxMarlEnv  # noqa: E402

pytestmark = pytest.mark.environments

KITCHEN = {"layout": "cramped_room", "max_steps": 50, "num_envs": 8, "seed": 0}
SHAPED = {"shaped_reward": 1.0}
KEY = ("next", "agent", "reward")


def measure(env, seed=3):
    return evaluate(env, None, TeamSpec.from_env(env), episodes=8, seed=seed)


def earned(env, actions=None):
    """The return of random actions."""
    torch.manual_seed(1)
    env.set_seed(3)
    td = env.rollout(50)
    return td[KEY].sum().item()


def test_evaluation_of_an_env_excludes_the_shaped_reward():
    shaped, plain = (JaxMarlEnv("overcooked", **KITCHEN, **more) for more in (SHAPED, {}))
    assert earned(shaped) > 10 + earned(plain)
    with_sums = TransformedEnv(shaped, RewardSum(in_keys=[("agent", "reward")]))
    assert measure(shaped) == measure(plain) == measure(with_sums)
    assert earned(shaped) > 10 + earned(plain)  # training rewards are unchanged
    with pytest.raises(ZeroDivisionError), shaped.measured():
        assert earned(shaped) == earned(plain)
        1 / 0  # noqa: B018
    assert earned(shaped) > 10 + earned(plain)


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    env = {"num_envs": 8, "max_steps": 50, "kwargs": {"layout": "cramped_room", **SHAPED}}
    config = small_config(
        "jaxmarl_overcooked_cramped_room_ippo",
        env=env,
        total_frames=800,
        frames_per_batch=400,
        learner={"minibatch_size": 200},
        evaluation={"episodes": 8, "every_frames": 400},
        checkpoint={"every_iterations": 1},
    )
    return replaced(config, folder=str(tmp_path_factory.mktemp("runs") / "run"))


def test_evaluations_of_a_run_exclude_the_shaped_reward(config):
    run = train(config)
    plain = JaxMarlEnv("overcooked", **KITCHEN)
    team, settings = TeamSpec.from_env(plain), {"episodes": 8, "seed": EVALUATION_SEED}
    random = evaluate(plain, None, team, **settings)["return_mean"]
    after = evaluate(plain, run.policy, team, **settings)["return_mean"]
    assert run.summary["return_random"] == random
    assert run.summary["return_after"] == after == run.evaluate()["return_mean"]
    assert Run.load(run.folder).evaluate()["return_mean"] == after
    with (run.folder / "metrics.csv").open(newline="") as file:
        trained_on = [float(row["agent/episode_reward"]) for row in csv.DictReader(file)]
    assert min(trained_on) > 0.1 + random  # shaped
    for last in sorted((run.folder / "checkpoints").iterdir())[1:]:
        last.unlink()
    (run.folder / "summary.json").unlink()
    assert resume(run.folder).summary["return_after"] == after
