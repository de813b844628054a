"""Off-policy groups beside on-policy groups: resuming, and equality with separate training."""

from functools import partial

import pytest
import torch
from learner_twins import check_resume_and_read_metrics
from samples import states
from support.tiers import second_tier_cases

from torchrl_marl import TeamSpec
from torchrl_marl.collectors import RolloutCollector, TeamPolicy
from torchrl_marl.envs import VmasEnv
from torchrl_marl.modules import CriticConfig, NetworkConfig


def make_tag():
    pytest.importorskip("vmas")
    return VmasEnv("simple_tag", num_envs=4, max_steps=20, seed=0)


def recipe(folder, store=(), **settings):
    small = {"actor": {"num_cells": [8]}, "critic": {"num_cells": [8]}, "minibatch_size": 24}
    return {
        "recipe": "mixed",
        "threads": 1,
        "total_frames": 480,
        "frames_per_batch": 80,
        "folder": str(folder),
        "env": {"library": "toy", "name": "arena", "num_envs": 8, "max_steps": 13}
        | {"kwargs": {"n_groups": 2}},
        "learner": {"algorithm": "mappo", "num_epochs": 2} | small,
        "groups": {
            "agents_1": {"algorithm": "matd3", "learning_starts": 200, "minibatch_size": 16}
            | {"exploration": {"epsilon": 0.2}, "replay": {"capacity": 256, **dict(store)}}
        },
        "evaluation": {"episodes": 4},
        "logging": {"progress": False},
    } | settings


@pytest.mark.parametrize(
    "store", [*second_tier_cases("runs", {}), {"alpha": 0.6}], ids=["uniform", "prioritized"]
)
def test_mixed_run_resumes_exactly_in_warm_up_and_with_full_buffer(tmp_path, store):
    """256 rows of 8 envs: the ring of 32 steps is full after the fourth of six batches."""
    own = partial(recipe, store=store)
    rows = check_resume_and_read_metrics(own, tmp_path, (1, 5))
    assert [row["agents_1/updates"] for row in rows] == ["0", "0", "8", "8", "8", "8"]
    assert rows[0]["agents_1/loss_value"] == "" and float(rows[-1]["agents_1/loss_value"]) > 0
    assert [row["agents_1/stored"] for row in rows] == ["80", "160", "240", "256", "256", "256"]
    assert "agents_0/clip_fraction" in rows[0] and "agents_1/clip_fraction" not in rows[0]


def test_on_policy_group_learns_as_without_off_policy_group():
    """MAPPO predators beside MADDPG prey match those trained alone on the same batches."""
    from torchrl_marl.learners import OnPolicyConfig, build_learners

    env = make_tag()
    team = TeamSpec.from_env(env)
    sizes = {"actor": NetworkConfig([8]), "critic": CriticConfig([8])}
    config = OnPolicyConfig(**sizes, num_epochs=2, minibatch_size=20)
    prey = {"agent": {"algorithm": "maddpg", "learning_starts": 40, "minibatch_size": 16}}

    def build():
        torch.manual_seed(0)
        return build_learners(team, config, prey)

    mixed, (alone, _) = build(), build()
    policy = TeamPolicy(actor for learner in mixed for actor in learner.actors.values())
    collector = RolloutCollector(env, policy, frames_per_batch=40, team=team)
    for i in range(4):
        batch = collector.rollout()
        same = batch.clone()
        for learner in mixed:
            torch.manual_seed(i)
            found = learner.learn(batch)
            assert ("loss_value" in found["agent"].keys()) if "agent" in found.keys() else True
        torch.manual_seed(i)
        alone.learn(same)
        assert ("agent", "advantage") not in batch.keys(True, True)
    assert int(found["agent", "updates"]) == 4
    for one, other in zip(states(mixed[:1]), states([alone]), strict=True):
        assert torch.equal(one, other)
