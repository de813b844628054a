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
    poisoned_batch = batch.clone()
    for name in one.groups:
        mask, alive = batch[name, "mask"], ~batch[name, "done"].squeeze(-1)
        flags = batch["next", name]
        cut_off = alive & (flags["truncated"] & ~flags["terminated"]).squeeze(-1)
        poisoned_batch = poisoned(poisoned_batch, (name, "observation"), mask, value)
        if (name, "state") in batch.keys(True):
            poisoned_batch = poisoned(poisoned_batch, (name, "state"), mask, value)
            poisoned_batch = poisoned(
                poisoned_batch, ("next", name, "state"), flags["mask"] | cut_off, value
            )
        poisoned_batch = poisoned(poisoned_batch, (name, "action"), mask, value)
        poisoned_batch = poisoned(poisoned_batch, ("next", name, "reward"), alive, value)
        poisoned_batch = poisoned(
            poisoned_batch, ("next", name, "observation"), flags["mask"] | cut_off, value
        )
    assert not bool(mask.all())
    metrics = []
    for learner, learner_batch in ((one, batch), (other, poisoned_batch)):
        torch.manual_seed(3)
        metrics.append(learner.learn(learner_batch))
    for key, found in metrics[0].items(True, True):
        assert torch.equal(found, metrics[1][key]), key
    for tensor, other_tensor in zip(states([one]), states([other]), strict=True):
        assert torch.equal(tensor, other_tensor)


def train_on_batches(make, env, n_batches, seed=0):
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


def set_same_weights(*modules):
    """Sets weights by row and column, so that they are equal in joined and separate networks."""
    for module in modules:
        for name, parameter in module.named_parameters():
            value = 3.0 * torch.arange(parameter.shape[-1])
            if name.endswith("weight"):
                value = value + torch.arange(parameter.shape[-2]).unsqueeze(-1)
            parameter.data.copy_(0.3 * torch.cos(value).expand_as(parameter))


def check_resume_and_read_metrics(recipe, folder, stops):
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
    for item, other_item in zip(learners, others, strict=True):
        for name, x in item.state_dict().items():
            if isinstance(x, torch.Tensor):
                torch.testing.assert_close(x, other_item.state_dict()[name], **tolerance)
    for item, other_item in zip(metrics, found, strict=True):
        for key, x in item.items(True, True):
            torch.testing.assert_close(x, other_item[key], **tolerance)
