"""Action masks of several choices, which are multi-discrete or part of hybrid actions."""

import math

import pytest
import torch
from ppo_losses import make_networks
from samples import POISON, assert_same
from support.samples import make_batch, make_group, make_observed
from support.tiers import first_tier_cases
from torchrl.data import Bounded, MultiCategorical, MultiOneHot, Unbounded
from torchrl.envs.utils import ExplorationType, check_env_specs, set_exploration_type

import torchrl_marl
from torchrl_marl import AgentSpec, TeamSpec
from torchrl_marl.apps.export import Player, export_agents
from torchrl_marl.apps.export.agent import find_agents
from torchrl_marl.envs import MarlEnv, check_marl_env
from torchrl_marl.errors import ConfigError, SpecError
from torchrl_marl.learners.algorithms import ALGORITHMS
from torchrl_marl.modules import Explore, RandomActor, make_actor
from torchrl_marl.objectives import MAPPOLoss
from torchrl_marl.recipes import load_config
from torchrl_marl.specs import Hybrid
from torchrl_marl.specs.choices import choosable_options
from torchrl_marl.training.trainer import start_training

BRANCHES = (3, 2)
KINDS = ["multi_discrete", "hybrid_of_two"]


def group_of(kind, n=3):
    if kind == "multi_discrete":
        return make_group(kind, n, action_mask=True)
    action = Hybrid(BRANCHES, Bounded(-1, 1, (2,)))
    spec = AgentSpec("car", n, Unbounded((5,)), action, action_mask=True)
    return TeamSpec([spec]).groups["car"]


def legal_of(td):
    """The options that may be chosen, of both choices."""
    parts = td["car", "action_mask"].split([3, 2], -1)
    return [part | ~part.any(-1, keepdim=True) for part in parts]


def assert_legal(td):
    for choice, legal in zip(td["car", "action"].long().unbind(-1), legal_of(td)):
        assert bool(legal.gather(-1, choice.unsqueeze(-1)).all())


class ConstantLogits(torch.nn.Module):
    """Writes the same logits for each agent, in place of a network's."""

    def forward(self, logits):
        row = torch.tensor([3.0, 2.0, 1.0, 3.0, 1.0]).log()
        return row.expand_as(logits)


def test_probabilities_by_hand():
    """Weights (3, 2, 1) and (3, 1); the options 0 and 4 are illegal."""
    group = make_group("multi_discrete", 1, action_mask=True)
    actor, td = make_actor(group), make_observed(group, alive=2.0)
    td["car", "action_mask"] = torch.tensor([[False, True, True, True, False]])
    actor[0][0].module.head = ConstantLogits()
    dist = actor.get_dist(td)
    rows = torch.tensor([[[1, 0]], [[2, 0]], [[0, 0]], [[1, 1]]])
    expected = torch.tensor([[2 / 3], [1 / 3], [0.0], [0.0]])
    torch.testing.assert_close(dist.log_prob(rows).exp(), expected)
    entropy = -(2 / 3 * math.log(2 / 3) + 1 / 3 * math.log(1 / 3))  # the second has one option
    assert dist.entropy().item() == pytest.approx(entropy, rel=1e-5)
    assert dist.mode.tolist() == [[1, 0]]
    td["car", "action_mask"] = torch.tensor([[False, False, False, False, True]])
    dist = actor.get_dist(td)  # a choice without a legal option draws from all
    torch.testing.assert_close(dist.log_prob(torch.tensor([[1, 1]])).exp(), torch.tensor([1 / 3]))


def test_choosable_options():
    legal = torch.tensor([[True, False, True, False, False], [False] * 5])
    expected = [[True, False, True, True, True], [True] * 5]
    assert choosable_options(legal, BRANCHES).tolist() == expected


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("how", ["policy", "random", "explored"])
def test_drawn_choices_are_legal(kind, how):
    group = group_of(kind)
    td = make_observed(group, 2000)
    with torch.no_grad(), set_exploration_type(ExplorationType.RANDOM):
        (RandomActor(group) if how == "random" else make_actor(group))(td)
        if how == "explored":
            Explore(group, epsilon=1.0)(td)
    assert_legal(td)
    first, legal = td["car", "action"][..., 0].flatten().long(), legal_of(td)[0].flatten(0, 1)
    both = (legal == torch.tensor([True, True, False])).all(-1)  # each legal option is drawn
    share = first[both].bincount(minlength=3) / both.sum()
    torch.testing.assert_close(share, torch.tensor([0.5, 0.5, 0.0]), atol=0.06, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_deterministic_action_is_best_legal_option(kind):
    group = group_of(kind)
    actor, td = make_actor(group), make_observed(group, 50)
    with set_exploration_type(ExplorationType.DETERMINISTIC), torch.no_grad():
        actor(td)
    parts = td["car", "logits"].split([3, 2], -1)
    for choice, logits in zip(td["car", "action"].unbind(-1), parts):
        assert torch.equal(choice.long(), logits.argmax(-1))
    assert_legal(td)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("value", POISON)
def test_values_of_masked_agents_have_no_effect_bitwise(kind, value):
    group = group_of(kind)
    actor, critic = make_networks(group)
    td = make_batch(group, actor, 32)
    results = []
    for bad in (False, True):
        own, masked = td.clone(), ~td["car", "mask"]
        if bad:
            own["car", "observation"][masked] = value
            own["car", "action_mask"][masked] = False
            if own["car", "action"].is_floating_point():
                own["car", "action"][masked] = value
        loss = MAPPOLoss(actor, critic, group=group, functional=False)
        torch.manual_seed(0)
        terms = loss(own)
        parameters = list(actor.parameters())
        total = terms["loss_objective"] + terms["loss_entropy"]
        results.append([terms["kl_approx"], *torch.autograd.grad(total, parameters)])
    for one, other in zip(*results, strict=True):
        assert bool(other.isfinite().all())
        assert_same(one, other)


def test_mask_of_wrong_size_raises():
    group = group_of("multi_discrete")
    td = make_observed(group, 4)
    td["car", "action_mask"] = torch.ones(4, 3, 6, dtype=torch.bool)
    with pytest.raises(SpecError, match=r"'action_mask'\) is \(4, 3, 6\), expected \(4, 3, 5\)"):
        make_actor(group)(td)
    with pytest.raises(ValueError, match="action_mask=True needs.*found MultiOneHot"):
        AgentSpec("car", 1, Unbounded((5,)), MultiOneHot([3, 2]), action_mask=True)


@pytest.mark.parametrize("algorithm", ["qmix", "masac"])
def test_unsupported_algorithms_raise(algorithm):
    config = ALGORITHMS.schema(algorithm)(algorithm=algorithm)
    with pytest.raises(ConfigError, match=rf"multi-discrete, \[3, 2\], which {algorithm} does not"):
        ALGORITHMS.learner(algorithm)({"car": group_of("multi_discrete")}, config)


@pytest.mark.parametrize("kind", KINDS)
def test_exported_agents_obey_their_masks(kind, tmp_path):
    group = group_of(kind, n=1)
    actor, td = make_actor(group), make_observed(group, 20, alive=2.0)
    player = Player(export_agents(find_agents(actor), tmp_path, "pt2")["car_0"], trust=True, seed=0)
    with set_exploration_type(ExplorationType.DETERMINISTIC), torch.no_grad():
        actor(td)
    for row in td:
        legal = row["car", "action_mask"][0]
        if not legal.any():
            continue
        seen = row["car", "observation"][0].numpy(), legal.numpy()
        found = torch.from_numpy(player.act(seen[0], action_mask=seen[1]))
        torch.testing.assert_close(found, row["car", "action"][0], rtol=1e-4, atol=1e-4)
        drawn = torch.from_numpy(player.act(seen[0], action_mask=seen[1], deterministic=False))
        own = choosable_options(legal, BRANCHES)
        assert own[int(drawn[0])] and own[3 + int(drawn[1])]


class Locks(MarlEnv):
    """Agents choose options by the clock; one is locked in each step. The first agent dies.

    Nothing is drawn, since a captured rollout draws resets in another order.
    """

    def __init__(self, num_envs, action=None, **kwargs):
        super().__init__(num_envs, max_steps=10, **kwargs)
        action = MultiCategorical(BRANCHES) if action is None else action
        self.register_agent(AgentSpec("car", 3, Unbounded((2,)), action, action_mask=True))

    def _reset(self, tensordict):
        self.clock = torch.zeros(self.num_envs, 1, dtype=torch.int64, device=self.device)
        return self._observe()

    @property
    def phase(self):
        return self.clock + torch.arange(3, device=self.device)

    def _observe(self, **leaves):
        seen = torch.stack([self.phase % 3, self.phase % 2], -1).float()
        locked = torch.nn.functional.one_hot((self.phase + 1) % 3, 3).bool()
        free = torch.ones_like(locked[..., :2])
        legal = torch.cat([~locked, free], -1)
        return {"car": {"observation": seen, "action_mask": legal, **leaves}}

    def _step(self, tensordict):
        action = tensordict["car", "action"]
        right = (action[..., 0] == self.phase % 3).float() + (action[..., 1] == self.phase % 2)
        self.clock = self.clock + 1
        first = torch.arange(3, device=self.device) == 0
        dead = first & (self.clock >= 6)
        return self._observe(reward=right.unsqueeze(-1) / 2, terminated=dead.unsqueeze(-1))


def actions_of(kind):
    return None if kind == "multi_discrete" else Hybrid(BRANCHES, Bounded(-1, 1, (1,)))


@pytest.mark.parametrize("kind", KINDS)
def test_random_actions_of_the_environment_are_legal(kind):
    env = Locks(16, actions_of(kind), seed=0)
    check_env_specs(env)
    assert "breaks" not in str(check_marl_env(Locks(3, actions_of(kind), seed=0)))
    assert_legal(env.rollout(9, break_when_any_done=False))


def make_training(env, folder, **settings):
    small = {
        "threads": 1,
        "total_frames": 1280,
        "frames_per_batch": 160,
        "learner.minibatch_size": 80,
        "learner.lr": 5e-3,
        "evaluation.episodes": 16,
        "evaluation.both": False,
        "logging.progress": False,
        "folder": str(folder),
    }
    return start_training(load_config("toy_arena_mappo", small | settings), env)


def parameters_of(policy):
    return [p.detach().clone() for p in policy.parameters()]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "algorithm", first_tier_cases(["mappo"], ["mappo", "ippo", "happo"], "runs")
)
def test_captured_training_equals_eager(algorithm, kind, tmp_path):
    parameters = []
    for execution in ("eager", "trace"):
        own = {"learner.algorithm": algorithm, "execution": execution, "learner.num_epochs": 2}
        env = Locks(16, actions_of(kind), seed=0)
        training = make_training(env, tmp_path / execution, **own)
        for _ in range(3):
            training.step()
        parameters.append(parameters_of(training.run.policy))
        training.close()
    for x, y in zip(*parameters, strict=True):
        assert torch.equal(x, y)


@pytest.mark.learning
@pytest.mark.parametrize("kind", KINDS)
def test_training_learns_right_options(kind, tmp_path):
    """The best return of ten steps is 10; random legal options are right in half of them."""
    run = torchrl_marl.train(
        "toy_arena_mappo",
        env=Locks(16, actions_of(kind), seed=0),
        folder=tmp_path / "run",
        total_frames=9600,
        frames_per_batch=320,
        threads=1,
        learner={"minibatch_size": 160, "num_epochs": 6, "lr": 3e-3},
        evaluation={"episodes": 16, "both": False},
        logging={"progress": False},
    )
    assert run.summary["return_after"] > 9 > 6 > run.summary["return_random"]
