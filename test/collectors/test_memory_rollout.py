"""Rollouts of policies with memory: eager, traced, and in TorchRL's own loops."""

import pytest
import torch
from graph_batches import assert_equal, dropout
from torchrl.collectors import Collector
from torchrl.envs import Compose, TransformedEnv
from torchrl.envs.utils import (
    ExplorationType,
    MarlGroupMapType,
    check_env_specs,
    set_exploration_type,
)
from torchrl.modules.utils import get_primers_from_module

from torchrl_marl import TeamSpec
from torchrl_marl.collectors import RolloutCollector, TeamPolicy
from torchrl_marl.envs import VmasEnv, with_memory
from torchrl_marl.envs.remember import hidden_sizes
from torchrl_marl.envs.toy import Arena
from torchrl_marl.envs.transforms import AgentInitTracker, with_dense_groups
from torchrl_marl.learners import OffPolicyConfig, OnPolicyConfig, ValueConfig, build_learners
from torchrl_marl.modules import MemoryConfig, QNetworkConfig, RecurrentNetworkConfig

CASES = {
    "dropout": dropout,
    "groups": lambda: dropout(group_map=MarlGroupMapType.ONE_GROUP_PER_AGENT),
    "kinds, padded": lambda: with_dense_groups(
        VmasEnv(
            "simple_adversary",
            num_envs=6,
            seed=0,
            max_steps=7,
            group_map=MarlGroupMapType.ALL_IN_ONE_GROUP,
            info=False,
        )
    ),
}


def policy_of(env, kind="gru", seed=0):
    torch.manual_seed(seed)
    actor = RecurrentNetworkConfig([8], memory=MemoryConfig(kind, size=6))
    learners = build_learners(TeamSpec.from_env(env), OnPolicyConfig(actor=actor))
    return TeamPolicy(actor for learner in learners for actor in learner.actors.values())


def collector_of(env, execution="eager", kind="gru", **settings):
    policy = policy_of(env, kind)
    env = with_memory(env, policy)
    return RolloutCollector(env, policy, frames_per_batch=30, execution=execution, **settings)


def batch_of(collector, seed=0):
    torch.manual_seed(seed)
    return collector.rollout()


@pytest.mark.parametrize(
    ("case", "kind"), [*((case, "gru") for case in CASES), ("dropout", "lstm"), ("dropout", "lru")]
)
def test_traced_batch_matches_eager_batch(case, kind):
    by_graph, eager = (collector_of(CASES[case](), how, kind) for how in ("trace", "eager"))
    first = batch_of(by_graph)
    assert by_graph.execution == "trace"
    assert_equal(first, batch_of(eager))
    for name in hidden_sizes(by_graph.policy):
        assert first[name, "hidden"].abs().sum() > 0
        assert (name, "hidden") not in first["next"].keys(True)  # the next step has it
        # Initial states drawn ahead hold no recurrent states.
        assert (name, "hidden") not in by_graph._captured.pool.tensors["carry"]
    for _ in range(2):
        batch = batch_of(by_graph)
        assert set(batch.keys(True, True)) == set(first.keys(True, True))
    for name in hidden_sizes(by_graph.policy):
        init = batch[name, "is_init"].squeeze(-1)
        assert init.any() and (batch[name, "hidden"][init] == 0).all()
        assert (batch[name, "hidden"][~init] != 0).any(-1).all()
        assert_goes_on(by_graph, batch, name)


def assert_goes_on(collector, batch, name):
    """The recurrent state after the last step of a batch is carried to the next batch."""
    last = batch[:, -1].exclude("next", "collector")
    with torch.no_grad():
        after = collector.policy(last.clone())["next", name, "hidden"]
    ended = batch["next", "done"][:, -1]
    expected = torch.where(ended.unsqueeze(-1), 0.0, after)
    torch.testing.assert_close(collector.carry[name, "hidden"], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("algorithm", ["iql", "matd3", "masac"])
def test_traced_batch_with_exploration_matches_eager_batch(algorithm):
    network = {"memory": MemoryConfig("gru", size=6)}
    config = OffPolicyConfig(algorithm, actor=RecurrentNetworkConfig([8], **network))
    if algorithm == "iql":
        config = ValueConfig(actor=QNetworkConfig([8], **network))
    batches = []
    for how in ("trace", "eager"):
        env = dropout(continuous_actions=algorithm != "iql")
        torch.manual_seed(0)
        [learner] = build_learners(TeamSpec.from_env(env), config)
        learner.explorers[0].epsilon.fill_(0.3)
        policy = TeamPolicy(learner.actors.values())
        env = with_memory(env, policy)
        collector = RolloutCollector(env, policy, frames_per_batch=30, execution=how)
        batches.append(batch_of(collector))
        assert collector.execution == how
    assert_equal(*batches)
    assert (batches[0]["agents", "hidden"][:, 1:] != 0).any()


def test_random_actions_keep_the_recurrent_state():
    collector = collector_of(dropout(), "trace", init_random_frames=30)
    batch = collector.rollout()
    assert collector.execution == "trace" and (batch["agents", "hidden"] == 0).all()
    assert (collector.rollout()["agents", "hidden"] != 0).any()


def test_torchrl_rollout_and_collector_carry_the_state():
    env = Arena(5, n_agents=3, late_spawn=2, seed=0)
    policy = policy_of(env)
    env = with_memory(env, policy)
    check_env_specs(env)
    with torch.no_grad():
        rollout = env.rollout(20, policy, break_when_any_done=False)
    hidden, init = rollout["agents", "hidden"], rollout["agents", "is_init"]
    assert (hidden.masked_select(init) == 0).all() and (hidden != 0).any()
    goes_on = ~rollout["next", "done"][:, :-1, 0]
    following = rollout["next", "agents", "hidden"][:, :-1]
    assert torch.equal(hidden[:, 1:][goes_on], following[goes_on])
    [batch] = Collector(env, policy, frames_per_batch=50, total_frames=50)
    assert batch["agents", "hidden"].shape == (5, 10, 3, 6)


@pytest.mark.parametrize("n_groups", [1, 2])
@pytest.mark.parametrize("values", [False, True])
def test_torchrl_primer_matches_with_memory(n_groups, values):
    """TorchRL's primer with our tracker equals ``with_memory``; other policies have no primer."""
    make = lambda: Arena(5, n_agents=4, n_groups=n_groups, late_spawn=2, seed=0)  # noqa: E731
    policy = policy_of(make())
    if values:
        torch.manual_seed(0)
        config = ValueConfig(actor=QNetworkConfig([8], memory=MemoryConfig("gru", size=6)))
        [learner] = build_learners(TeamSpec.from_env(make()), config)
        policy = TeamPolicy(learner.actors.values())
    primer = get_primers_from_module(policy)
    found = []
    for env in (
        TransformedEnv(make(), Compose(AgentInitTracker(), primer)),
        with_memory(make(), policy),
    ):
        torch.manual_seed(0)
        with torch.no_grad():
            found.append(env.rollout(20, policy, break_when_any_done=False))
    for name in hidden_sizes(policy):
        assert found[0][name, "hidden"].shape[-2:] == (4 // n_groups, 6)
        assert torch.equal(found[0][name, "hidden"], found[1][name, "hidden"])
    assert get_primers_from_module(policy_of(make(), "none"), warn=False) is None
    env = with_memory(make(), policy)
    [batch] = Collector(env, policy, frames_per_batch=50, total_frames=50)
    for name in hidden_sizes(policy):
        assert (batch[name, "hidden"] != 0).any()


def test_with_memory_is_idempotent():
    env = Arena(5, n_agents=3, seed=0)
    policy = policy_of(env)
    remembering = with_memory(env, policy)
    assert with_memory(remembering, policy) is remembering
    forgetful = policy_of(env, "none")
    assert with_memory(env, forgetful) is env


if __name__ == "__main__":
    pytest.main([__file__])


def test_recurrent_states_of_lazy_and_padded_kinds_match():
    """Agents of two kinds in TorchRL's own loop, with and without padding."""
    found = []
    for dense in (lambda env: env, with_dense_groups):
        env = dense(Arena(3, n_agents=4, kinds=2, n_actions=6, lives=9, seed=0))
        policy = policy_of(env)
        with set_exploration_type(ExplorationType.DETERMINISTIC):
            batch = with_memory(env, policy).rollout(5, policy)
        found.append([batch[key] for key in (("agents", "hidden"), ("next", "agents", "hidden"))])
    torch.testing.assert_close(*found)
    hidden, after = found[0]
    assert after.abs().amin() > 0
    assert torch.equal(hidden[:, 1:], after[:, :-1])
