"""Trials that start and end as members of a population do not affect other members."""

from functools import partial

import pytest
import torch

from torchrl_marl.apps.jobs.trials import Trials, adam_correction
from torchrl_marl.learners.adam import adam_
from torchrl_marl.recipes import load_config
from torchrl_marl.training import Run
from torchrl_marl.training.trainer import finish, start_training

pytestmark = pytest.mark.runs

LR = [1e-3, 2e-3, 3e-3]
SETTINGS = {
    "total_frames": 240,
    "frames_per_batch": 40,
    "execution": "eager",
    "env": {"num_envs": 4, "kwargs": {"n_agents": 2, "years": 2}},
    "learner": {
        "minibatch_size": 20,
        "num_epochs": 2,
        "actor": {"num_cells": [8]},
        "critic": {"num_cells": [8]},
    },
    "evaluation": {"episodes": 6},
    "logging": {"progress": False},
}


class Listed:
    """A scheduler that prunes the given trials."""

    rungs = [80]

    def __init__(self, prune=(), more=()):
        self.prune, self.more, self.seen = set(prune), list(more), []

    def next(self):
        return self.more.pop(0) if self.more else None

    def is_finished(self, trial):
        return False

    def should_prune(self, trial, frames, value):
        self.seen.append((trial, frames))
        return trial in self.prune

    def ended(self, trial, value, *, pruned):
        self.seen.append((trial, value is not None, pruned))


def trained(folder, scheduler, **settings):
    own = {"population": {"size": 3, "vary": {"learner.lr": LR}}, "folder": str(folder)}
    config = load_config("toy_arena_mappo", {**SETTINGS, **own, **settings})
    training = start_training(config, None, trials=partial(Trials, scheduler=scheduler))
    finish(training)
    return training


def test_other_trials_are_unaffected_by_a_new_trial(tmp_path):
    alone = trained(tmp_path / "alone", Listed())
    scheduler = Listed(prune=[1], more=[(3, {"lr": 1e-3})])
    together = trained(tmp_path / "together", scheduler, execution="trace")
    assert [len(learner.updates.programs) for learner in together.learners] == [1]
    assert {(0, 80), (1, 80), (2, 80), (3, 80), (1, False, True)} <= set(scheduler.seen)
    assert (3, True, True) in scheduler.seen and together.trials.numbers == [None] * 3
    again = trained(tmp_path / "again", Listed(prune=[1], more=[(3, {"lr": 1e-3})]))
    for seed in (0, 2):
        one, other = (Run.load(training.folder / f"seed{seed}") for training in (alone, again))
        for p, q in zip(one.policy.parameters(), other.policy.parameters(), strict=True):
            assert torch.equal(p, q)
        assert one.summary["return_after"] == other.summary["return_after"]
    late = Run.load(together.folder / "seed3")
    assert late.frames == 240 and late.config.learner.lr == 1e-3
    assert not (alone.folder / "seed3").exists()


def test_new_trial_starts_with_networks_of_its_seed(tmp_path):
    scheduler = Listed(prune=[1], more=[(3, {"lr": 0.0})])
    training = trained(tmp_path / "all", scheduler, seed=5)
    own = load_config("toy_arena_mappo", {**SETTINGS, "seed": 8, "folder": str(tmp_path / "one")})
    fresh = start_training(own, None)
    for p, q in zip(
        Run.load(training.folder / "seed8").policy.parameters(), fresh.policy.parameters()
    ):
        assert torch.equal(p, q.squeeze()) or torch.equal(p, q)
    fresh.close()


@pytest.mark.parametrize("before", [1, 40, 3000])
def test_steps_of_a_late_trial_equal_those_of_a_fresh_optimizer(before):
    torch.manual_seed(0)
    gradients = torch.randn(30, 4)
    found = []
    for shared in (0, before):
        x, moments = torch.zeros(4), [[torch.zeros(4)], [torch.zeros(4)], [torch.tensor(0.0)]]
        moments[2][0].fill_(float(shared))
        for i, gradient in enumerate(gradients):
            lr = 1e-2 * adam_correction(torch.tensor([i + 1.0]), i + 1.0 + shared)[0]
            skip = torch.zeros(())
            adam_([x], [gradient], *moments, lr.double(), skip, [], (0.9, 0.999), 1e-12)
        found.append(x)
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-7)
