"""Small runs, and comparisons of runs."""

import csv
import dataclasses
from pathlib import Path

import torch

from torchrl_marl.recipes import read_config
from torchrl_marl.training.checkpoint import latest_checkpoint, load_checkpoint

CLOCK = {"seconds", "frames_per_second"}

_SMALL = {
    "threads": 1,
    "learner": {
        "actor": {"num_cells": [8]},
        "critic": {"num_cells": [8]},
        "num_epochs": 2,
        "minibatch_size": 24,
        "entropy_coeff": 0.01,
    },
    "evaluation": {"episodes": 4},
    "checkpoint": {"every_iterations": 0},
    "logging": {"progress": False},
}


def small_config(recipe="toy_arena_mappo", **overrides):
    """A recipe with few frames: 8 envs, 10 steps per batch, and longer episodes."""
    sizes = {"total_frames": 480, "frames_per_batch": 80, "env": {"num_envs": 8, "max_steps": 13}}
    return read_config(read_config(read_config(recipe, _SMALL), sizes), overrides)


def replaced(config, **values):
    return dataclasses.replace(config, **values)


def table(path):
    """The rows of a CSV file without columns of time."""
    with Path(path).open(newline="") as file:
        rows = list(csv.DictReader(file))
    return [{k: v for k, v in row.items() if k not in CLOCK} for row in rows]


def final_state(folder):
    """The state of the last checkpoint, without its settings and versions."""
    state = load_checkpoint(latest_checkpoint(Path(folder)))
    return {key: value for key, value in state.items() if key != "made_by"}


def assert_equal(one, other, path=""):
    """Asserts that nested values are bitwise equal, except entries of time."""
    assert type(one) is type(other), path
    if isinstance(one, dict):
        assert set(one) == set(other), path
        for key in one:
            if key not in CLOCK:
                assert_equal(one[key], other[key], f"{path}.{key}")
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other), path
        for i, (a, b) in enumerate(zip(one, other)):
            assert_equal(a, b, f"{path}[{i}]")
    elif isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype, path
        a, b = (x.nan_to_num(nan=12345.0) if x.is_floating_point() else x for x in (one, other))
        assert torch.equal(a, b), path
    else:
        assert one == other, path


def assert_same_run(one, other):
    """Compares weights, optimizers, episodes, random state, metrics and evaluations."""
    assert_equal(final_state(one), final_state(other))
    for name in ("metrics.csv", "evaluation.csv"):
        assert table(Path(one) / name) == table(Path(other) / name)
