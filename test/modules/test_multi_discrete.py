"""Policies over multi-discrete actions: one independent choice in each branch."""

import math

import pytest
import torch
from exported import check_players_alone, team_policy
from support.samples import make_group, make_observed
from torch.distributions import Categorical
from torchrl.data import MultiCategorical as Spec
from torchrl.data import MultiOneHot, Unbounded
from torchrl.envs.utils import ExplorationType, set_exploration_type

from torchrl_marl import AgentSpec, TeamSpec
from torchrl_marl.apps.export.agent import agents_of
from torchrl_marl.envs import make_env
from torchrl_marl.errors import ConfigError
from torchrl_marl.learners.algorithms import ALGORITHMS
from torchrl_marl.modules import NetworkConfig, RandomActor, make_actor
from torchrl_marl.modules.distributions import MultiCategorical
from torchrl_marl.recipes import load_config
from torchrl_marl.training.trainer import start_training

MULTI = {"continuous_actions": False, "multidiscrete_actions": True}
SMALL = {
    "threads": 1,
    "total_frames": 120,
    "frames_per_batch": 40,
    "env.num_envs": 4,
    "env.continuous_actions": False,
    "env.kwargs": {"multidiscrete_actions": True},
    "learner.minibatch_size": 20,
    "learner.num_epochs": 2,
    "evaluation.episodes": 4,
    "logging.progress": False,
}


def test_probabilities_by_hand():
    """Branches (3/4, 1/4) and (1/2, 1/3, 1/6)."""
    weights = torch.tensor([3.0, 1.0, 3.0, 2.0, 1.0])
    choices = MultiCategorical(weights.log(), (2, 3))
    log_prob = choices.log_prob(torch.tensor([[0, 0], [1, 2]]))
    torch.testing.assert_close(log_prob.exp(), torch.tensor([3 / 8, 1 / 24]))
    first = -(3 / 4 * math.log(3 / 4) + 1 / 4 * math.log(1 / 4))
    second = -(math.log(1 / 2) / 2 + math.log(1 / 3) / 3 + math.log(1 / 6) / 6)
    assert choices.entropy().item() == pytest.approx(first + second, rel=1e-6)
    assert choices.mode.tolist() == choices.deterministic_sample.tolist() == [0, 0]


def test_probabilities_of_all_combinations_sum_to_one():
    choices = MultiCategorical(torch.randn(2, 4, 9), (2, 4, 3))
    every = torch.cartesian_prod(torch.arange(2), torch.arange(4), torch.arange(3))
    total = choices.log_prob(every.view(-1, 1, 1, 3).expand(-1, 2, 4, 3)).exp().sum(0)
    torch.testing.assert_close(total, torch.ones(2, 4))


def test_one_branch_equals_a_categorical():
    logits = torch.randn(5, 3, 4, requires_grad=True)
    action = torch.randint(4, (5, 3))
    found, plain = MultiCategorical(logits, (4,)), Categorical(logits=logits)
    assert torch.equal(found.log_prob(action.unsqueeze(-1)), plain.log_prob(action))
    assert torch.equal(found.entropy(), plain.entropy())
    pairs = (found.log_prob(action.unsqueeze(-1)), plain.log_prob(action))
    own, expected = (torch.autograd.grad(x.sum(), logits, retain_graph=True) for x in pairs)
    assert torch.equal(*own, *expected)


def test_gradients_are_finite_with_branches_of_unequal_size():
    logits = torch.tensor([50.0, -50.0, 0.0, 0.0, 0.0], requires_grad=True)
    choices = MultiCategorical(logits, (2, 3))
    (choices.log_prob(torch.tensor([1, 2])) + choices.entropy()).backward()
    assert bool(logits.grad.isfinite().all())


@pytest.mark.parametrize("random", [True, False])
def test_each_option_is_drawn_equally_often(random):
    group = make_group("multi_discrete")
    td = make_observed(group, 3000)
    (RandomActor(group) if random else make_actor(group))(td)
    action = td[group.action_key]
    assert action.dtype == torch.int64 and action.shape == (3000, 3, 2)
    for branch, n in enumerate(group.branches):
        share = action[..., branch].flatten().bincount(minlength=n) / action[..., 0].numel()
        torch.testing.assert_close(share, torch.full((n,), 1 / n), atol=0.03, rtol=0)


def test_deterministic_action_is_argmax_of_each_branch():
    group = make_group("multi_discrete")
    actor, td = make_actor(group), make_observed(group, 7)
    with set_exploration_type(ExplorationType.DETERMINISTIC):
        actor(td)
    logits = td["car", "logits"]
    expected = torch.stack([logits[..., :3].argmax(-1), logits[..., 3:].argmax(-1)], -1)
    assert torch.equal(td["car", "action"], expected)


def test_only_multi_discrete_groups_have_branches():
    assert make_group("multi_discrete").branches == (3, 2)
    assert make_group("categorical").branches == make_group("bounded").branches == ()
    spec = AgentSpec("car", 2, Unbounded((5,)), MultiOneHot([2, 3]))
    assert TeamSpec([spec]).groups["car"].branches == ()


@pytest.mark.parametrize("algorithm", ["qmix", "pqn", "masac", "matd3", "vdn", "hasac"])
def test_unsupported_algorithms_raise(algorithm):
    team = TeamSpec([AgentSpec("car", 2, Unbounded((5,)), Spec([2, 3]))])
    config = ALGORITHMS.schema(algorithm)(algorithm=algorithm)
    with pytest.raises(ConfigError, match=r"'car': its actions are multi-discrete, \[2, 3\]"):
        ALGORITHMS.learner(algorithm)(team.groups, config)


@pytest.mark.parametrize("algorithm", ["mappo", "ippo", "happo"])
def test_captured_training_equals_eager(algorithm, tmp_path):
    """Simulator, policy and update are captured and equal the eager ones bitwise."""
    parameters = []
    for execution in ("eager", "trace"):
        training = start_training(
            load_config(
                "vmas_balance_mappo",
                SMALL
                | {"learner.algorithm": algorithm, "execution": execution}
                | {"folder": str(tmp_path / execution)},
            ),
            None,
        )
        training.step()
        training.step()
        parameters.append([p.detach().clone() for p in training.run.policy.parameters()])
        training.close()
    for x, y in zip(*parameters, strict=True):
        assert torch.equal(x, y)


def test_exported_agents_act_as_the_policy(tmp_path):
    env = make_env("vmas/balance", num_envs=2, **MULTI)
    policy = team_policy(
        TeamSpec.from_env(env).groups.values(), make_actor, config=NetworkConfig([8])
    )
    found = check_players_alone(env, make_actor, config=NetworkConfig([8]))
    assert (found.differ, found.actions > 0, found.largest < 1e-5) == (0, True, True)
    assert next(iter(agents_of(policy).values())).describe()["action"]["branches"] == [3, 3]
