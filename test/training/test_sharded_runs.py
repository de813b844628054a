"""Sharded runs learn the same at any placement and after any number of resumes."""

import contextlib

import pytest
import torch
from support.runs import assert_equal, assert_same_run, final_state, small_config, table

import torchrl_marl
from torchrl_marl.collectors.shard import shard_seed
from torchrl_marl.collectors.sharded import LocalPlacement, ShardedCollector
from torchrl_marl.envs.make import make_env
from torchrl_marl.errors import ConfigError, NonFiniteError
from torchrl_marl.recipes import load_config, read_config
from torchrl_marl.runtime.random_state import RandomState
from torchrl_marl.training import iterate
from torchrl_marl.training.shards import ShardMaker
from torchrl_marl.training.trainer import start_training

FEW = {"logging": {"progress": False}, "evaluation": {"episodes": 4}}
SIZES = {
    "toy_echo_rmappo": {
        **FEW,
        "total_frames": 256 * 5,
        "frames_per_batch": 256,
        "env": {"num_envs": 16},
        "learner": {"minibatch_size": 128, "num_epochs": 2},
    },
    "toy_arena_qmix": {
        **FEW,
        "total_frames": 480,
        "frames_per_batch": 80,
        "env": {"num_envs": 8},
        "learner": {"learning_starts": 80, "minibatch_size": 32},
    },
}


def settings_of(folder, recipe="toy_arena_mappo", **overrides):
    overrides = {"distributed": {"collectors": 4}, "execution": "eager", **overrides}
    if recipe in SIZES:
        return read_config(read_config(recipe, SIZES[recipe]), {"folder": str(folder), **overrides})
    return small_config(recipe, folder=str(folder), **overrides)


@contextlib.contextmanager
def started(config):
    training = start_training(config, None)
    try:
        yield training
    finally:
        training.close()


def batches(folder, n=3, **overrides):
    with started(settings_of(folder, **overrides)) as training:
        return [training.collector.rollout() for _ in range(n)]


def test_batch_is_the_concatenation_of_its_shards(tmp_path):
    """Each shard equals one that is built and run alone."""
    together = batches(tmp_path / "run")
    for number in (2, 0):
        torch.manual_seed(number)
        config = settings_of(tmp_path / "other")
        shard = ShardMaker(config, number)()
        alone = [shard.rollout() for _ in range(3)]
        for whole, own in zip(together, alone):
            rows = whole[2 * number : 2 * number + 2].exclude(("collector", "traj_ids"))
            assert_equal(rows.to_dict(), own.exclude(("collector", "traj_ids")).to_dict())


def test_envs_of_a_shard_depend_on_its_seed(tmp_path):
    """The envs of the first shard equal an environment that is made with its seed."""
    config = settings_of(tmp_path / "run")
    seed = shard_seed(config.seed, 0)
    with RandomState(seed).active():
        expected = make_env(config.env, seed=seed, num_envs=2).reset()
    batch = batches(tmp_path / "run", 1)[0]
    assert_equal(
        batch[:2, 0]["agents", "observation"].clone(), expected["agents", "observation"].clone()
    )


def test_trajectory_ids_of_shards_are_disjoint(tmp_path):
    ids = torch.cat([b["collector", "traj_ids"] for b in batches(tmp_path / "run")], 1)
    owners = [set(rows.flatten().tolist()) for rows in ids.split(2)]
    assert not set.intersection(*owners)
    assert len(set.union(*owners)) == sum(map(len, owners))


@pytest.mark.runs
@pytest.mark.parametrize(
    "overrides",
    [
        {"distributed": {"collectors": 4, "overlap": 1}},
        {"distributed": {"collectors": 2, "overlap": 2}},
        {"recipe": "toy_echo_rmappo"},
        {"recipe": "toy_arena_qmix"},
        {"distributed": {"collectors": 4}, "execution": "trace"},
    ],
    ids=["ahead", "further_ahead", "memory", "replay", "captured"],
)
def test_sharded_run_resumes_exactly(overrides, tmp_path):
    recipe = overrides.pop("recipe", "toy_arena_mappo")
    torchrl_marl.train(settings_of(tmp_path / "whole", recipe, **overrides))
    for step in iterate(settings_of(tmp_path / "parts", recipe, **overrides)):
        if step.number == 3:
            break
    torchrl_marl.resume(tmp_path / "parts")
    assert_same_run(tmp_path / "whole", tmp_path / "parts")


def test_overlap_collects_with_the_policy_of_the_last_iteration(tmp_path):
    """Batch 2 is collected by the untrained policy, batch 3 by that of iteration 1."""
    config = settings_of(tmp_path / "run", distributed={"collectors": 4, "overlap": 1})
    with started(config) as training:
        check_ahead(training, config)


def check_ahead(training, config):
    shards = [ShardMaker(config, i)() for i in range(4)]
    weights = []
    for number in range(4):
        weights.append({k: v.clone() for k, v in training.policy.state_dict().items()})
        batch = training.collector.rollout()
        acting = weights[max(0, number - 1)]
        own = torch.cat([shard.rollout(acting) for shard in shards])
        ignored = ("collector", "traj_ids")
        assert_equal(batch.exclude(ignored).to_dict(), own.exclude(ignored).to_dict())
        training._learn(batch)
    assert not torch.equal(*(next(iter(w.values())) for w in (weights[0], weights[3])))


def test_shard_raises_for_nan_in_its_envs(tmp_path):
    config = settings_of(tmp_path / "run")
    with started(config) as training, torch.no_grad():
        training.collector.rollout()
        shard = training.collector.placement.shards[1]
        shard.collector.carry["agents", "observation"][0] = torch.nan
        with pytest.raises(NonFiniteError, match="agents"):
            training.collector.rollout()


def test_tracker_drops_episodes_of_a_lost_shard(tmp_path):
    """Episode sums of a lost shard restart, those of the others continue."""

    class Losing(LocalPlacement):
        def take(self, journal):
            played = super().take(journal)
            if len(calls) == 1:
                self.shards[1].collector.load_state_dict({})
                self.begin(None)
                again = super().take(journal)[1]
                again.lost = True
                played[1] = again
            calls.append(1)
            return played

    calls = []
    own = {"distributed": {"collectors": 2}, "frames_per_batch": 24}
    own["env"] = {"kwargs": {"n_agents": 4, "lives": 99, "years": 50}}
    config = settings_of(tmp_path / "run", **own)
    with started(config) as training:
        makers = [ShardMaker(config, i, policy=training.policy) for i in range(2)]
        training.collector = ShardedCollector(Losing(makers), training.policy, shares_policy=True)
        first, second = training.step(), training.step()
        running = training.tracker.state_dict()["agents/episode_length"]
    done = second.batch["next", "done"].squeeze(-1)
    kept = torch.where(done[:4].any(1), 0, 3) + first.batch.shape[1]
    assert not done.any() and not first.batch["next", "done"].any()
    assert running.tolist() == [*kept.tolist(), 3, 3, 3, 3]


BAD = [
    (
        {"distributed.collectors": 3},
        "collectors is 3, expected a divisor of env.num_envs, 8; use distributed.collectors=2, or "
        "env.num_envs=9.",
    ),
    ({"distributed.collectors": 16}, "is 16, expected at most env.num_envs, 8; use .*=8, or .*=16"),
    ({"distributed.collectors": 2, "population.size": 2}, "population.size is 2, but distributed"),
    ({"distributed.collectors": 2, "league": "latest"}, "league is given, but distributed"),
    ({"distributed": "slurm"}, "distributed.backend is 'slurm', expected none or ray"),
    (
        {"distributed": "ray", "distributed.collectors": 2, "distributed.actors": 4},
        "actors is 4, expected at most distributed.collectors, 2",
    ),
    (
        {
            "distributed": {"backend": "ray", "collectors": 2, "overlap": 1, "snapshot_every": 0},
        },
        "snapshot_every is 0, expected 1 or more with distributed.overlap=1",
    ),
    (
        {"distributed": {"collectors": 2, "overlap": 1}, "learner.unshare_at": 0.5},
        "learner.unshare_at is 0.5, but the networks of shards",
    ),
]


@pytest.mark.parametrize(("overrides", "message"), BAD)
def test_invalid_distributed_settings_raise(overrides, message):
    with pytest.raises(ConfigError, match=message):
        load_config(small_config(), overrides)


def test_overlap_without_shards_raises(tmp_path):
    with pytest.raises(ConfigError, match="overlap is 1, but distributed.collectors is null"):
        torchrl_marl.train(small_config(folder=str(tmp_path / "run"), distributed={"overlap": 1}))


def test_env_object_with_shards_raises(tmp_path):
    env = make_env("toy/arena", num_envs=8, seed=0)
    with pytest.raises(ConfigError, match="cannot be split into shards"):
        torchrl_marl.train(settings_of(tmp_path / "run"), env=env)


def test_resume_with_another_number_of_shards_raises(tmp_path):
    torchrl_marl.train(settings_of(tmp_path / "run", total_frames=160))
    with pytest.raises(ConfigError, match=r"distributed.collectors was 4 when .* 2 is asked for"):
        torchrl_marl.resume(tmp_path / "run", total_frames=320, distributed={"collectors": 2})
    torchrl_marl.resume(tmp_path / "run", total_frames=240)
    assert final_state(tmp_path / "run")["collector"]["frames"] == 240
    assert len(table(tmp_path / "run" / "metrics.csv")) == 3


def test_shards_on_ray_equal_local_shards(tmp_path):
    """The only Ray test of the first tier. The others are in test_ray.py."""
    pytest.importorskip("ray")
    own = {"evaluation": {"episodes": 0}, "total_frames": 120}
    on_ray = {"collectors": 2, "backend": "ray", "actors": 2}
    for name, where in (("here", {"collectors": 2}), ("ray", on_ray)):
        torchrl_marl.train(settings_of(tmp_path / name, distributed=where, **own))
    one, other = (final_state(tmp_path / name) for name in ("here", "ray"))
    for name in ("iteration", "learners", "tracker", "random"):
        assert_equal(one[name], other[name])
