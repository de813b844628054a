"""Learners that must end equal: with poison in masked entries, uninterrupted and resumed."""

import csv

import torch
from runs import assert_same_run
from samples import poisoned, states

import torchrl_marl
from torchrl_marl import TeamSpec
from torchrl_marl.collectors import RolloutCollector, TeamPolicy
from torchrl_marl.runs import resume


def assert_masked_slots_change_no_bit(one, other, env, value):
    """Asserts that values of masked entries have no effect on what a learner learns."""
    policy = TeamPolicy(one.actors.values())
    batch = RolloutCollector(env, policy, frames_per_batch=160).rollout()
    bad = batch.clone()
    for name in one.groups:
        mask, alive = batch[name, "mask"], ~batch[name, "done"].squeeze(-1)
        flags = batch["next", name]
        cut = alive & (flags["truncated"] & ~flags["terminated"]).squeeze(-1)
        bad = poisoned(bad, (name, "observation"), mask, value)
        if (name, "state") in batch.keys(True):
            bad = poisoned(bad, (name, "state"), mask, value)
            bad = poisoned(bad, ("next", name, "state"), flags["mask"] | cut, value)
        bad = poisoned(bad, (name, "action"), mask, value)
        bad = poisoned(bad, ("next", name, "reward"), alive, value)
        bad = poisoned(bad, ("next", name, "observation"), flags["mask"] | cut, value)
    assert not bool(mask.all())
    metrics = []
    for learner, own in ((one, batch), (other, bad)):
        torch.manual_seed(3)
        metrics.append(learner.learn(own))
    for key, found in metrics[0].items(True, True):
        assert torch.equal(found, metrics[1][key]), key
    for mine, theirs in zip(states([one]), states([other]), strict=True):
        assert torch.equal(mine, theirs)


def trained(make, env, n_batches, seed=0):
    """A trained learner, and the metrics of each batch of 40 frames.

    Args:
        make: ``make(team)`` returns the learner.
        env: environment of the rollouts.
        n_batches: number of batches.
        seed: seed of networks and random draws.
    """
    torch.manual_seed(seed)
    learner = make(TeamSpec.from_env(env))
    collector = RolloutCollector(env, TeamPolicy(learner.actors.values()), frames_per_batch=40)
    metrics = []
    for i in range(n_batches):
        learner.set_progress(i / n_batches)
        metrics.append(learner.learn(collector.rollout()))
    return learner, metrics


def same_weights(*modules):
    """Sets weights by row and column, so that they are equal in joined and separate networks."""
    for module in modules:
        for name, parameter in module.named_parameters():
            value = 3.0 * torch.arange(parameter.shape[-1])
            if name.endswith("weight"):
                value = value + torch.arange(parameter.shape[-2]).unsqueeze(-1)
            parameter.data.copy_(0.3 * torch.cos(value).expand_as(parameter))


def rows_of_a_run_that_resumes_to_the_bit(recipe, folder, stops):
    """Asserts that a stopped run resumes exactly; returns the metrics of the whole run.

    Args:
        recipe: ``recipe(folder)`` returns the settings.
        folder: parent of the run folders.
        stops: iterations after which a run is stopped, each in a new run.
    """
    torchrl_marl.train(recipe(folder / "whole"))
    for n in stops:
        for iteration in torchrl_marl.iterate(recipe(folder / f"from_{n}")):
            if iteration.number == n:
                break
        resume(folder / f"from_{n}")
        assert_same_run(folder / "whole", folder / f"from_{n}")
    with open(folder / "whole" / "metrics.csv") as file:
        return list(csv.DictReader(file))


EXACT = {"rtol": 0.0, "atol": 0.0}


def assert_same_learning(one, other, **tolerance):
    """Asserts that two trainings, (learners, metrics), have equal states and metrics."""
    (learners, metrics), (others, found) = one, other
    for mine, theirs in zip(learners, others, strict=True):
        for name, x in mine.state_dict().items():
            if isinstance(x, torch.Tensor):
                torch.testing.assert_close(x, theirs.state_dict()[name], **tolerance)
    for mine, theirs in zip(metrics, found, strict=True):
        for key, x in mine.items(True, True):
            torch.testing.assert_close(x, theirs[key], **tolerance)
