"""Schedules of a run: the values with which each batch is collected and learned from."""

import pytest
from runs import table

from torchrl_marl.recipes import load_config
from torchrl_marl.training.trainer import resume_training, start_training

LINEAR = {"epsilon": 1.0, "epsilon_end": 0.0, "annealing": 1.0}
CASES = {
    "pqn": {"lr": 0.5, "minibatch_size": 80},
    "qmix": {"learning_starts": 0, "minibatch_size": 16},
    "matd3": {"learning_starts": 0, "minibatch_size": 16},
}


def config_of(algorithm, folder):
    learner = {"algorithm": algorithm, "exploration": LINEAR, **CASES[algorithm]}
    sizes = {"total_frames": 320, "frames_per_batch": 80, "execution": "eager"}
    env = {"library": "toy", "name": "arena", "num_envs": 8, "continuous_actions": False}
    return load_config({"learner": learner, "env": env, "folder": str(folder), **sizes})


def collected_with(training, n):
    """Epsilon of each of the next n batches while it is collected."""
    [explore], rollout, found = training.learners[0].explorers, training.collector.rollout, []

    def recorded():
        found.append(float(explore.epsilon))
        return rollout()

    training.collector.rollout = recorded
    for _ in range(n):
        training.step()
    training.collector.rollout = rollout
    return found


@pytest.mark.parametrize("algorithm", CASES)
def test_batch_is_collected_at_its_place_in_the_schedule(algorithm, tmp_path):
    """The k-th of four batches begins at k quarters of the run, also after a resume."""
    training = start_training(config_of(algorithm, tmp_path / "run"), None)
    training.open()
    found = collected_with(training, 2)
    training.save()
    training.close()
    resumed = resume_training(tmp_path / "run", None)
    found += collected_with(resumed, 2)
    resumed.close()
    assert found == pytest.approx([1.0, 0.75, 0.5, 0.25])
    rows = table(tmp_path / "run" / "metrics.csv")
    assert [float(row["agents/epsilon"]) for row in rows] == pytest.approx(found)
    if algorithm == "pqn":
        assert [float(row["agents/lr"]) for row in rows] == pytest.approx([0.5, 0.375, 0.25, 0.125])
