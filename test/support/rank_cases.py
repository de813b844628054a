"""Learners that learn from whole batches, or as one of several ranks from parts of them."""

import dataclasses

import torch
from meadow import make_meadow

from torchrl_marl import TeamSpec
from torchrl_marl.collectors import RolloutCollector, TeamPolicy
from torchrl_marl.learners import OnPolicyConfig, build_learners
from torchrl_marl.modules import CriticConfig, NetworkConfig
from torchrl_marl.runtime.ranks import SINGLE_PROCESS

SHARDS = 4
E, T = 8, 10


@dataclasses.dataclass(frozen=True)
class Case:
    """Settings of the learners, and the layout of the meadow."""

    layout: str = "two"
    execution: str = "eager"
    actions: str = "bounded"
    iterations: int = 6
    groups: dict = dataclasses.field(default_factory=dict)
    settings: dict = dataclasses.field(default_factory=dict)


def config_of(case):
    defaults = {
        "actor": NetworkConfig([8]),
        "critic": CriticConfig([8]),
        "num_epochs": 2,
        "minibatch_size": 40,
        "entropy_coeff": 0.01,
        "normalize_observations": True,
        "lr": 1e-2,
    }
    return OnPolicyConfig(**(defaults | case.settings))


def learners_of(case, shards):
    torch.manual_seed(0)
    team = TeamSpec.from_env(make_meadow(2, case.layout, actions=case.actions))
    execution = case.execution
    learners = build_learners(team, config_of(case), case.groups, execution=execution)
    for learner in learners:
        learner.use_shards(shards, SHARDS, seed=7)
    return learners


def flat_parameters(learners):
    """All parameters and all buffers of the learners, each flattened."""
    weights = [p.detach().reshape(-1) for one in learners for p in one.parameters()]
    buffers = [b.detach().double().reshape(-1) for one in learners for b in one.buffers()]
    return torch.cat(weights), torch.cat(buffers)


def train_alone(case):
    """Batches, learners, metrics and initial parameters of training in one process."""
    learners = learners_of(dataclasses.replace(case, execution="eager"), range(SHARDS))
    env = make_meadow(E, case.layout, actions=case.actions)
    policy = TeamPolicy(actor for one in learners for actor in one.actors.values())
    collector = RolloutCollector(env, policy, frames_per_batch=E * T)
    initial = flat_parameters(learners)[0]
    batches, metrics = [], []
    for i in range(case.iterations):
        torch.manual_seed(i)
        batch = collector.rollout()
        batches.append(batch.clone())
        torch.manual_seed(i)
        metrics.append([one.learn(batch) for one in learners])
    return batches, learners, metrics, initial


def train_on_rank(case, ranks, batches, naive=False):
    """Learns from this rank's part of each batch; ``naive``: only gradients are averaged."""
    shards_per_rank = SHARDS // ranks.size
    learners = learners_of(
        case, range(ranks.rank * shards_per_rank, (ranks.rank + 1) * shards_per_rank)
    )
    rows = E // ranks.size
    metrics, counted = [], []
    for learner in learners:
        learner.updates.run = count_messages(learner.updates.run, ranks, counted)
    for i, batch in enumerate(batches):
        rank_batch = batch[ranks.rank * rows : (ranks.rank + 1) * rows].clone()
        torch.manual_seed(i)
        if naive:
            for learner in learners:
                average_gradients(learner, ranks)
                learner.learn(rank_batch)
        else:
            with ranks.active():
                metrics.append([learner.learn(rank_batch) for learner in learners])
    # Recording a graph runs one update with the first batch.
    counted = counted[len(learners) :]
    return learners, metrics, sum(n for n, _ in counted) / sum(updates for _, updates in counted)


def count_messages(run, ranks, counted):
    """Wraps a learner's updates, and counts messages and updates."""

    def counting_run(frames, epochs):
        before = ranks.messages
        history, finite = run(frames, epochs)
        counted.append((ranks.messages - before, len(next(iter(history.values())))))
        return history, finite

    return counting_run


def average_gradients(learner, ranks):
    """Plain data parallelism: gradients are averaged over ranks, statistics are separate."""
    if hasattr(learner.updates, "averaged"):
        return
    clips = learner.updates.clips
    first, learner.updates.averaged = next(iter(clips)), True
    inner = clips[first]
    parameters = learner.optimizer.param_groups[0]["params"]

    class Averaging:
        def __getattr__(self, name):
            return getattr(inner, name)

        def __call__(self):
            found = [p.grad for p in parameters if p.grad is not None]
            for gradient, all_gather in zip(found, ranks.sum_all(found)):
                gradient.copy_(all_gather / ranks.size)
            return inner()

    clips[first] = Averaging()


def compare(ranks, case, naive=False):
    """Differences between ranks and one process, relative to the change, and other figures."""
    with SINGLE_PROCESS.active():
        batches, learners, expected, initial = train_alone(case)
    rank_learners, metrics, messages = train_on_rank(case, ranks, batches, naive)
    (weights, buffers), (others, statistics) = (
        flat_parameters(learners),
        flat_parameters(rank_learners),
    )
    distance = (weights - initial).norm()
    found = {
        "weights": ((weights - others).norm() / distance).item(),
        "statistics": ((buffers - statistics).abs() / buffers.abs().clamp_min(1e-3)).max().item(),
        "of_updates": messages,
        "spread": max((others - x).abs().max().item() for x in ranks.all_gather(others)),
        "epochs": [
            one[group, "epochs"].item()
            for batch in expected
            for one in batch
            for group in one.keys()
        ],
    }
    worst = {}
    for rank_metrics, expected_metrics in zip(metrics, expected):
        for one, other in zip(rank_metrics, expected_metrics):
            for key, value in other.items(True, True):
                deviation = ((one[key] - value).abs() / value.abs().clamp_min(1e-2)).max().item()
                worst[key[1]] = max(worst.get(key[1], 0.0), deviation)
    return found | {"metrics": worst}


def compare_all(ranks, cases):
    """Results of :func:`compare` for each case, by name."""
    return {name: compare(ranks, **case) for name, case in cases.items()}
