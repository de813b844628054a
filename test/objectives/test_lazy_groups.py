"""Losses and estimators take a lazily stacked group, with the results of its padded form."""

import pytest
import torch
from tensordict import TensorDict, lazy_stack
from tensordict.nn import TensorDictSequential
from torchrl.collectors import Collector
from torchrl.data import Categorical, LazyTensorStorage, ReplayBuffer, Unbounded
from torchrl.envs import TransformedEnv

from torchrl_marl import AgentSpec, TeamSpec
from torchrl_marl.envs import PadAgents
from torchrl_marl.envs.toy import TOY_ENVS
from torchrl_marl.modules import (
    CommunicationConfig,
    NetworkConfig,
    make_actor,
    make_critic,
    make_q_actor,
)
from torchrl_marl.modules.communication import listening
from torchrl_marl.objectives import (
    ImitationLoss,
    MAPPOLoss,
    ParallelQLoss,
    TeamGAE,
    ValueDecompositionLoss,
)
from torchrl_marl.specs.groups import is_lazy


def make_env(pad):
    env = TOY_ENVS["speaker_listener"](
        6, continuous_speech=True, one_group=True, seed=0, max_steps=4
    )
    return TransformedEnv(env, PadAgents()) if pad else env


@pytest.fixture
def networks():
    group = TeamSpec.from_env(make_env(False)).groups["team"]
    actor, critic = make_actor(group), make_critic(group)
    with torch.no_grad():
        for parameter in (*actor.parameters(), *critic.parameters()):
            parameter.add_(0.3 * torch.randn_like(parameter))
    return group, actor, critic


def collect(actor, pad):
    torch.manual_seed(0)
    return next(iter(Collector(make_env(pad), actor, frames_per_batch=30, total_frames=30)))


def test_cloning_and_attention_equal_those_of_padded_group():
    group = TeamSpec.from_env(make_env(False)).groups["team"]
    config = NetworkConfig([8], communication=CommunicationConfig("tarmac", message_size=4))
    actor = make_actor(group, config)
    loss, policy = ImitationLoss(actor, group=group), TensorDictSequential(actor)
    lazy, dense = collect(actor, False), collect(actor, True)
    for read in (lambda data: loss(data)["loss_actor"], lambda data: listening(policy, data)):
        torch.testing.assert_close(read(lazy), read(dense))


def test_loss_and_estimator_equal_those_of_padded_group(networks):
    group, actor, critic = networks
    lazy, dense = collect(actor, False), collect(actor, True)
    assert is_lazy(lazy["team"]) and not is_lazy(dense["team"])
    found = []
    for batch in (lazy, dense):
        loss = MAPPOLoss(actor, critic, group=group, entropy_bonus=False)
        loss.make_value_estimator(gamma=0.9, lmbda=0.8)
        out = loss(batch)
        loss.zero_grad()
        (out["loss_objective"] + out["loss_critic"]).backward()
        found.append([*out.values(), *(p.grad.clone() for p in loss.parameters())])
        assert ("team", "advantage") not in batch.keys(True)  # a loss writes nothing
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)
    advantages = []
    for batch in (lazy, dense):
        TeamGAE(gamma=0.9, lmbda=0.8, value_network=critic, group=group)(batch)
        advantages.append(batch["team", "advantage"])
    assert is_lazy(lazy["team"])
    torch.testing.assert_close(*advantages)


def test_loss_of_lazy_batch_from_a_replay_buffer(networks):
    group, actor, critic = networks
    batch = collect(actor, False)
    TeamGAE(gamma=0.9, lmbda=0.8, value_network=critic, group=group)(batch)
    buffer = ReplayBuffer(storage=LazyTensorStorage(30), batch_size=30)
    buffer.extend(batch.reshape(-1))
    sample = buffer.sample()
    loss = MAPPOLoss(actor, critic, group=group)
    assert torch.isfinite(loss(sample)["loss_objective"])


class TestAGroupOfEqualAgentsWhoseStepsAreStackedLazily:
    """TorchRL stacks steps lazily if some have another entry; agents are then still equal."""

    @pytest.fixture
    def deck(self):
        return TeamSpec([AgentSpec("deck", 2, Unbounded((3,)), Categorical(2))]).groups["deck"]

    @staticmethod
    def make_batch():
        """Two steps of two envs, in which each agent earns 1 and terminates."""
        seen = {"observation": torch.randn(2, 2, 3), "mask": torch.ones(2, 2).bool()}
        acted = TensorDict(seen | {"action": torch.zeros(2, 2, dtype=torch.long)}, [2, 2])
        steps = lazy_stack([acted, acted.clone().set("reward", torch.ones(2, 2, 1))], 1)
        ended = torch.ones(2, 2, 1, dtype=torch.bool)
        rewarded = (
            steps.exclude("reward")
            .to_tensordict()
            .exclude("action")
            .set("reward", torch.ones(2, 2, 2, 1))
        )
        after = {"deck": rewarded, "done": ended, "terminated": ended}
        return TensorDict({"deck": steps, "next": after}, [2, 2])

    def test_policy_writes_actions(self, deck):
        batch = self.make_batch()
        assert is_lazy(batch["deck"])
        make_actor(deck)(batch)
        assert batch["deck", "action_log_prob"].shape == (2, 2, 2)

    def test_losses_write_targets_and_td_errors(self, deck):
        batch, network = self.make_batch(), make_q_actor(deck)
        loss = ParallelQLoss(network, group=deck, functional=False)
        loss.add_targets(batch)
        assert batch["deck", "value_target"].flatten().tolist() == [1.0] * 8
        ValueDecompositionLoss(network, group=deck, functional=False)(batch)
        assert batch["deck", "td_error"].shape == (2, 2, 2, 1)
