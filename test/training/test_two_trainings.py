"""Trainings in one process do not affect each other or the code around them."""

import itertools
import random

import numpy as np
import pytest
import torch
from runs import assert_same_run, small_config

from torchrl_marl.runtime.random_state import ProcessState
from torchrl_marl.training import iterate, train


def draws():
    return torch.rand(3).tolist(), np.random.rand(3).tolist(), random.random()


@pytest.mark.runs
def test_two_concurrent_runs_equal_each_run_alone(tmp_path):
    def config(name, seed):
        return small_config(folder=str(tmp_path / name), seed=seed)

    for seed in (3, 4):
        train(config(f"alone {seed}", seed))
    together = [iterate(config(f"together {seed}", seed)) for seed in (3, 4)]
    for _ in itertools.zip_longest(*together):
        draws(), torch.manual_seed(11)
    for seed in (3, 4):
        assert_same_run(tmp_path / f"alone {seed}", tmp_path / f"together {seed}")


def test_training_does_not_change_global_generators(tmp_path):
    def seeded():
        torch.manual_seed(1)
        np.random.seed(2)
        random.seed(3)

    seeded()
    expected = [draws() for _ in range(8)]
    seeded()
    drawn = [draws()]
    for _ in iterate(small_config(folder=str(tmp_path / "run"))):
        drawn.append(draws())
    drawn.append(draws())
    assert drawn == expected


def test_thread_count_is_set_only_during_training(tmp_path):
    seen = []
    torch.set_num_threads(2)
    for _ in iterate(small_config(folder=str(tmp_path / "run"), threads=1)):
        seen.append(torch.get_num_threads())
    assert seen == [2] * 6 and torch.get_num_threads() == 2
    state = ProcessState(0, threads=1)
    with state.active(), state.active():
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == 2


def test_random_state_is_restored_after_an_error():
    torch.manual_seed(0)
    expected = torch.rand(2)
    torch.manual_seed(0)
    try:
        with ProcessState(5, threads=1).active():
            torch.rand(7)
            raise KeyError
    except KeyError:
        pass
    assert torch.equal(torch.rand(2), expected)
