"""Routed policies in environments, collectors and losses, ours and TorchRL's."""

import pytest
import torch
from routed import list_actions, make_continuous_actor
from samples import assert_same
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.collectors import Collector
from torchrl.data import Bounded, Composite, LazyTensorStorage, ReplayBuffer, Unbounded
from torchrl.envs import check_env_specs
from torchrl.envs.utils import MarlGroupMapType
from torchrl.testing.mocking_classes import HeterogeneousCountingEnv

from torchrl_marl import AgentSpec, TeamSpec
from torchrl_marl.collectors import RolloutCollector
from torchrl_marl.contrib import RoutedSequential
from torchrl_marl.envs import MarlEnv, VmasEnv

ALL_IN_ONE = MarlGroupMapType.ALL_IN_ONE_GROUP


def make_world(seed=0):
    return VmasEnv("simple_world_comm", num_envs=3, group_map=ALL_IN_ONE, max_steps=5, seed=seed)


def make_tag(seed=0):
    return VmasEnv("simple_tag", num_envs=3, group_map=ALL_IN_ONE, max_steps=5, seed=seed)


class Pair(MarlEnv):
    """Drones see a camera, rovers a lidar."""

    def __init__(self, num_envs, **kwargs):
        super().__init__(num_envs, **kwargs)
        camera, lidar = Composite(camera=Unbounded((5,))), Composite(lidar=Unbounded((4,)))
        self.register_agent(AgentSpec("drone", 2, camera, Bounded(-1, 1, (3,))), group="agents")
        self.register_agent(AgentSpec("rover", 3, lidar, Bounded(-1, 1, (2,))), group="agents")

    def _seen(self):
        camera, lidar = self.x.repeat(1, 2, 5), self.x.repeat(1, 3, 4)
        return {"drone": {"observation": {"camera": camera}},
                "rover": {"observation": {"lidar": lidar}}}  # fmt: skip

    def _reset(self, tensordict):
        self.x = torch.randn(self.num_envs, 1, 1)
        return {"agents": self._seen()}

    def _step(self, tensordict):
        kinds = self.by_kind(tensordict, "agents")
        push = [kinds[kind]["action"].mean((1, 2)).view(-1, 1, 1) for kind in ("drone", "rover")]
        self.x = self.x + push[0] - push[1]
        return {"agents": {**self._seen(), "reward": -self.x.abs().repeat(1, 5, 1)}}


def make_pair(seed=0):
    return Pair(3, max_steps=5, seed=seed)


def policy_for(env, seed=0):
    torch.manual_seed(seed)
    group = TeamSpec.from_env(env).groups["agents"]
    if isinstance(env, Pair):
        kinds = {"camera": (5, 3), "lidar": (4, 2)}
        actors = [make_continuous_actor(*kinds[leaf], leaf=("observation", leaf)) for leaf in kinds]
        return RoutedSequential(*actors, group=group)
    kinds = {}
    for i, member in enumerate(group.members):
        sizes = member["observation"].shape[-1], member["action"].shape[-1]
        kinds.setdefault(sizes, (member["action"], []))[1].append(i)
    entries = [
        (make_continuous_actor(o, a, spec), agents) for (o, a), (spec, agents) in kinds.items()
    ]
    return RoutedSequential(*entries, group=group)


ENVS = {"world_comm": make_world, "tag": make_tag, "pair": make_pair}


@pytest.mark.parametrize("name", ENVS)
def test_rollouts(name):
    env = ENVS[name]()
    if name != "pair":  # TorchRL checks no specs with exclusive keys
        check_env_specs(env)
    policy = policy_for(env)
    batch = env.rollout(4, policy)
    members = TeamSpec.from_env(env).groups["agents"].members
    for action, member in zip(list_actions(batch), members, strict=True):
        assert action.shape == (3, 4, *member["action"].shape)
        assert (action.abs() <= 1).all()
    found = policy.log_prob(batch)
    assert found.shape == (3, 4, len(members))
    torch.testing.assert_close(found, batch["agents", "action_log_prob"], rtol=1e-3, atol=1e-3)
    assert_same(policy.log_prob(batch.reshape(-1)), found.reshape(12, -1))


@pytest.mark.parametrize("name", ENVS)
def test_rollout_collector_and_replay_buffer(name):
    env = ENVS[name]()
    buffer = ReplayBuffer(storage=LazyTensorStorage(100), batch_size=6)
    policy = policy_for(env)
    for batch in RolloutCollector(env, policy, frames_per_batch=12, total_frames=24):
        assert batch.shape == (3, 4)
        buffer.extend(batch.reshape(-1))
    sample = buffer.sample()
    again = policy(sample.clone())
    assert [x.shape for x in list_actions(again)] == [x.shape for x in list_actions(sample)]


@pytest.mark.parametrize("name", ["world_comm", "tag"])
def test_torchrl_collector(name):
    env = ENVS[name]()
    policy = policy_for(env)
    batches = list(Collector(env, policy, frames_per_batch=12, total_frames=24))
    assert [batch.shape for batch in batches] == [(3, 4)] * 2
    torch.testing.assert_close(
        policy.log_prob(batches[1]), batches[1]["agents", "action_log_prob"], rtol=1e-3, atol=1e-3
    )


def test_torchrl_environment_with_exclusive_keys():
    class Flat(nn.Module):
        def __init__(self, o, a, ndim):
            super().__init__()
            self.layer, self.ndim = nn.Linear(o, a), ndim

        def forward(self, x):
            return self.layer(x.flatten(-self.ndim)).tanh()

    def module(leaf, *sizes):
        keys = {"in_keys": [("lazy", leaf)], "out_keys": [("lazy", "action")]}
        return TensorDictModule(Flat(*sizes), **keys)

    policy = RoutedSequential(
        module("tensor_0", 1, 3, 1), module("tensor_1", 2, 2, 2), module("tensor_2", 6, 2, 3)
    )
    env = HeterogeneousCountingEnv()
    check_env_specs(env)
    assert [x.shape for x in list_actions(env.rollout(3, policy), ("lazy", "action"))] == [
        (3, 3), (3, 2), (3, 2)
    ]  # fmt: skip
    for collector in (Collector, RolloutCollector):
        batches = list(collector(env, policy, frames_per_batch=4, total_frames=8))
        assert [batch.shape for batch in batches] == [(4,), (4,)]


def test_custom_loss_on_log_probabilities():
    """A script as a user would write it: log-probabilities ``[E, T, N]`` times returns."""
    env = make_tag()
    policy = policy_for(env)
    optimizer = torch.optim.Adam(policy.parameters(), 1e-2)
    batch = env.rollout(4, policy, break_when_any_done=False).detach()
    reward = torch.stack([r["action"].pow(2).mean(-1) for r in batch["agents"].unbind(-1)], -1)
    before = policy.log_prob(batch).detach()
    for _ in range(5):
        loss = (policy.log_prob(batch) * reward).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert ((policy.log_prob(batch) - before) * reward).mean() < 0
