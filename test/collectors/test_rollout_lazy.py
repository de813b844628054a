"""The collector with lazily stacked groups: batches, buffers, resuming in mid-episode."""

import io

import pytest
import torch
from samples import assert_same
from tensordict import LazyStackedTensorDict
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.data import Bounded, Composite, LazyTensorStorage, ReplayBuffer, Unbounded
from torchrl.envs import TransformedEnv
from torchrl.envs.transforms import RewardSum
from torchrl.envs.utils import MarlGroupMapType
from torchrl.testing.mocking_classes import HeterogeneousCountingEnv

from torchrl_marl import AgentSpec
from torchrl_marl.collectors import RolloutCollector
from torchrl_marl.contrib import RoutedSequential
from torchrl_marl.envs import MarlEnv, VmasEnv

KINDS = {"drone": (2, 5, 3), "rover": (3, 4, 2)}


class Pair(MarlEnv):
    """Two kinds of agents: one key with two shapes, or separate keys."""

    def __init__(self, num_envs, exclusive=False, **kwargs):
        super().__init__(num_envs, **kwargs)
        self.exclusive = exclusive
        for kind, (n, o, a) in KINDS.items():
            seen = Composite({kind: Unbounded((o,))}) if exclusive else Unbounded((o,))
            self.register_agent(AgentSpec(kind, n, seen, Bounded(-1, 1, (a,))), group="agents")

    def _seen(self):
        seen = {kind: self.x.repeat(1, n, o) for kind, (n, o, _) in KINDS.items()}
        if self.exclusive:
            return {kind: {"observation": {kind: x}} for kind, x in seen.items()}
        return {kind: {"observation": x} for kind, x in seen.items()}

    def _reset(self, tensordict):
        self.x = torch.randn(self.num_envs, 1, 1)
        return {"agents": self._seen()}

    def _step(self, tensordict):
        kinds = self.by_kind(tensordict, "agents")
        push = [kinds[kind]["action"].mean((1, 2)).view(-1, 1, 1) for kind in KINDS]
        self.x = self.x + push[0] - push[1]
        return {"agents": {**self._seen(), "reward": -self.x.abs().repeat(1, 5, 1)}}


def make_tag():
    return VmasEnv(
        "simple_tag",
        num_envs=3,
        max_steps=5,
        seed=0,
        group_map=MarlGroupMapType.ALL_IN_ONE_GROUP,
    )


def with_sum():
    keys = {"in_keys": [("agents", "reward")], "out_keys": [("agents", "episode_reward")]}
    return TransformedEnv(Pair(3, max_steps=5, seed=0), RewardSum(**keys))


ENVS = {
    "same key": lambda: Pair(3, max_steps=5, seed=0),
    "own keys": lambda: Pair(3, exclusive=True, max_steps=5, seed=0),
    "vmas": make_tag,
    "sum": with_sum,
}


def policy_of(name):
    torch.manual_seed(0)
    sizes = {kind: size[1:] for kind, size in KINDS.items()}
    if name == "vmas":
        sizes = {"predator": (16, 2), "prey": (14, 2)}
    modules = []
    for kind, (o, a) in sizes.items():
        leaf = ("observation", kind) if name == "own keys" else "observation"
        net = nn.Sequential(nn.Linear(o, a), nn.Dropout(0.5), nn.Tanh())  # draws something
        keys = {"in_keys": [("agents", leaf)], "out_keys": [("agents", "action")]}
        modules.append(TensorDictModule(net, **keys))
    return RoutedSequential(*modules)


def collector_of(name, **kwargs):
    return RolloutCollector(ENVS[name](), policy_of(name), frames_per_batch=9, **kwargs)


def assert_same_batches(one, other):
    assert one.shape == other.shape
    for step in ((), ("next",)):
        rows, others = (b[(*step, "agents")].unbind(-1) for b in (one, other))
        for row, twin in zip(rows, others, strict=True):
            assert set(row.keys(True, True)) == set(twin.keys(True, True))
            for key in row.keys(True, True):
                assert_same(row[key], twin[key], key)
    for key in ("done", ("next", "done"), ("collector", "traj_ids")):
        assert_same(one[key], other[key], key)


@pytest.mark.parametrize("name", ENVS)
def test_batches_stay_lazy(name):
    collector = collector_of(name, total_frames=27)
    batches = list(collector)
    assert [batch.shape for batch in batches] == [(3, 3)] * 3
    for batch in batches:
        group = batch["agents"]
        assert isinstance(group, LazyStackedTensorDict)
        assert group.shape[:2] == (3, 3) and group.stack_dim == 2
    whole = torch.cat([batch["collector", "traj_ids"] for batch in batches], 1)
    assert whole[:, :5].eq(whole[:, :1]).all() and whole[:, 5:].ne(whole[:, :1]).all()


@pytest.mark.parametrize("name", ENVS)
def test_resumes_in_mid_episode(name):
    collector = collector_of(name)
    torch.manual_seed(1)
    collector.next()
    file = io.BytesIO()
    torch.save(collector.state_dict(), file)
    torch.manual_seed(2)
    wanted = [collector.next() for _ in range(2)]

    other = collector_of(name)
    other.next()
    file.seek(0)
    other.load_state_dict(torch.load(file, weights_only=True))
    assert other.carry is not None and isinstance(other.carry["agents"], LazyStackedTensorDict)
    torch.manual_seed(2)
    for batch in wanted:
        assert_same_batches(other.next(), batch)


@pytest.mark.parametrize("name", ENVS)
def test_fills_a_buffer(name):
    buffer = ReplayBuffer(storage=LazyTensorStorage(100), batch_size=18)
    torch.manual_seed(1)
    assert list(collector_of(name, total_frames=18, replay_buffer=buffer)) == [None, None]
    torch.manual_seed(1)
    batches = [batch.reshape(-1) for batch in collector_of(name, total_frames=18)]
    stored = buffer[:]
    assert stored.shape == (18,)
    for step in ((), ("next",)):
        rows = [batch[(*step, "agents")].unbind(-1) for batch in batches]
        for i, member in enumerate(stored[(*step, "agents")].unbind(-1)):
            for key in member.keys(True, True):
                assert_same(member[key], torch.cat([part[i][key] for part in rows]), key)


def test_random_actions_without_a_policy():
    collector = RolloutCollector(ENVS["own keys"](), frames_per_batch=9, total_frames=9)
    (batch,) = collector
    sizes = [action.shape[-1] for action in batch.get(("agents", "action"), as_list=True)]
    assert sizes == [3, 3, 2, 2, 2]


def test_environment_without_root_done():
    env = HeterogeneousCountingEnv(max_steps=3)
    collector = RolloutCollector(env, frames_per_batch=10, total_frames=10)
    (batch,) = collector
    done = batch["next", "lazy", "done"].all(-2).squeeze(-1)
    ids = batch["collector", "traj_ids"]
    assert done.any() and torch.equal(ids[1:] != ids[:-1], done[:-1])
