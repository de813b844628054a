"""Every task of every suite is trained for a short batch, and every algorithm on one task."""

import dataclasses

import pytest

from torchrl_marl.apps.suites import read_suite, suite_names
from torchrl_marl.training import train

pytestmark = pytest.mark.recipes

ENVS, STEPS = 4, 16


def pairs():
    """Each task with the first default algorithm, and each algorithm on the first task."""
    for name in suite_names():
        table = read_suite(name)
        first = next(iter(table.tasks))
        found = [(task, table.default[0]) for task in table.tasks]
        found += [(first, algorithm) for algorithm in table.algorithms]
        for task, algorithm in dict.fromkeys(found):
            yield pytest.param(name, task, algorithm, id=f"{name}-{task}-{algorithm}")


@pytest.mark.parametrize(("name", "task", "algorithm"), list(pairs()))
def test_task_and_algorithm_train_one_batch(name, task, algorithm, tmp_path):
    table = read_suite(name)
    learner = table.run(task, algorithm).config.learner
    frames = ENVS * getattr(learner, "window", STEPS)
    own = {"minibatch_size": frames}
    if hasattr(learner, "learning_starts"):
        own["learning_starts"] = frames // 2
    small = {
        "env": {"num_envs": ENVS},
        "frames_per_batch": frames,
        "total_frames": frames,
        "learner": own,
        "evaluation": {"episodes": 0, "every_frames": None, "count": None},
        "logging": {"progress": False},
    }
    run = train(
        dataclasses.replace(table.run(task, algorithm, 0, small).config, folder=str(tmp_path))
    )
    assert run.summary["frames"] == frames
    assert all(x.isfinite().all() for x in run.policy.state_dict().values())
