"""Policies over hybrid actions: choices and numbers in one action."""

import math
from functools import partial

import pytest
import torch
from ppo_losses import make_networks
from support.samples import make_batch, make_group, make_observed
from support.tiers import first_tier_cases
from torch.distributions import Categorical, Normal
from torchrl.data import Bounded, Composite, Unbounded
from torchrl.data import Categorical as CategoricalSpec
from torchrl.envs import EnvBase, StepCounter, TransformedEnv
from torchrl.envs.utils import ExplorationType, check_env_specs, set_exploration_type
from torchrl.modules import IndependentNormal, TanhNormal

from torchrl_marl import AgentSpec, TeamSpec
from torchrl_marl.apps.export.agent import find_agents
from torchrl_marl.apps.export.player import Player
from torchrl_marl.apps.export.write import export_agents
from torchrl_marl.envs import MarlEnv
from torchrl_marl.errors import ConfigError
from torchrl_marl.learners.algorithms import ALGORITHMS
from torchrl_marl.modules import (
    Explore,
    RandomActor,
    make_action_critic,
    make_actor,
    make_deterministic_actor,
    make_q_actor,
)
from torchrl_marl.modules.distributions import Gated, Hybrid
from torchrl_marl.objectives import MAPPOLoss
from torchrl_marl.objectives.ppo import entropy_of
from torchrl_marl.recipes import load_config
from torchrl_marl.specs import Hybrid as Spec
from torchrl_marl.training import resume
from torchrl_marl.training.trainer import start_training

SMALL = {
    "threads": 1,
    "total_frames": 256,
    "frames_per_batch": 64,
    "env.num_envs": 8,
    "env.kwargs": {"n_agents": 3, "years": 2, "lives": 2, "hybrid_actions": True},
    "learner.minibatch_size": 32,
    "learner.num_epochs": 2,
    "evaluation.episodes": 4,
    "logging.progress": False,
}
WEIGHTS = torch.tensor([3.0, 2.0, 1.0])


def by_hand(of=IndependentNormal, **keywords):
    """Options (1/2, 1/3, 1/6), and two normals: of mean 0 and 1, and scale 1 and 2."""
    loc, scale = torch.tensor([0.0, 1.0]), torch.tensor([1.0, 2.0])
    return Hybrid(WEIGHTS.log(), (3,), of=of, loc=loc, scale=scale, **keywords)


def test_log_prob_and_entropy_by_hand():
    policy = by_hand()
    action = torch.tensor([[0.0, 0.0, 1.0], [2.0, 1.0, -1.0]])
    log_2pi = math.log(2 * math.pi)
    first = -math.log(2) - log_2pi - math.log(2)  # both numbers are the means
    second = -math.log(6) - log_2pi - math.log(2) - 1 / 2 - 1 / 2  # each is one scale away
    torch.testing.assert_close(policy.log_prob(action), torch.tensor([first, second]))
    choice = math.log(2) / 2 + math.log(3) / 3 + math.log(6) / 6
    numbers = 1 + log_2pi + math.log(2)
    assert policy.entropy().item() == pytest.approx(choice + numbers, rel=1e-6)
    assert policy.deterministic_sample.tolist() == policy.mode.tolist() == [0.0, 0.0, 1.0]


def test_squashed_numbers_lie_in_their_bounds():
    policy = by_hand(TanhNormal, low=torch.tensor([0.0, -2.0]), high=torch.tensor([4.0, 2.0]))
    drawn = policy.sample([2000])
    assert drawn.shape == (2000, 3) and set(drawn[:, 0].tolist()) == {0.0, 1.0, 2.0}
    assert bool((drawn[:, 1] > 0).all()) and bool((drawn[:, 1] < 4).all()) and drawn[:, 1].max() > 3
    bounds = {"low": policy.numbers.low, "high": policy.numbers.high}
    alone = TanhNormal(torch.tensor([0.0, 1.0]), torch.tensor([1.0, 2.0]), **bounds)
    choice = (WEIGHTS / 6).log()[drawn[:, 0].long()]
    torch.testing.assert_close(policy.log_prob(drawn), choice + alone.log_prob(drawn[:, 1:]))


def test_entropy_is_sampled_for_numbers_and_exact_for_choices():
    choice = Categorical(WEIGHTS).entropy()
    bounds = {"low": -torch.ones(2), "high": torch.ones(2)}
    policy = by_hand(TanhNormal, **bounds)
    torch.manual_seed(0)
    numbers = entropy_of(policy.numbers, 7)
    torch.manual_seed(0)
    torch.testing.assert_close(entropy_of(policy, 7), choice + numbers)
    gate = torch.ones(1), torch.zeros(1)  # it sent a message, of probability 1/2
    parameters = {"loc": torch.tensor([0.0, 1.0]), "scale": torch.tensor([1.0, 2.0]), **bounds}
    actions = partial(Hybrid, of=TanhNormal)
    gated = Gated(*gate, of=actions, logits=WEIGHTS.log(), branches=(3,), **parameters)
    torch.manual_seed(0)
    torch.testing.assert_close(entropy_of(gated, 7), choice + numbers + math.log(2))


@pytest.mark.parametrize("sent", [0.0, 1.0])
def test_entropy_of_a_gate_beside_squashed_numbers_is_exact(sent):
    """Whether the agent sent says nothing about the entropy, or about its gradient."""
    logits = torch.tensor([2.0], requires_grad=True)
    gated = Gated(torch.tensor([sent]), logits, of=TanhNormal, loc=torch.zeros(2), scale=1.0)
    torch.manual_seed(0)
    numbers = entropy_of(gated.actions, 7)
    torch.manual_seed(0)
    entropy = entropy_of(gated, 7)
    chance = 1 / (1 + math.exp(-2))
    gate = -chance * math.log(chance) - (1 - chance) * math.log(1 - chance)
    assert (entropy - numbers).item() == pytest.approx(gate, rel=1e-5)
    [slope] = torch.autograd.grad(entropy, logits)  # of the entropy: -logit p (1 - p)
    assert slope.item() == pytest.approx(-2 * chance * (1 - chance), rel=1e-5)


def test_gradients_equal_those_of_the_parts():
    logits, loc = torch.randn(5, 3, requires_grad=True), torch.randn(5, 2, requires_grad=True)
    scale = torch.rand(5, 2).add(0.5).requires_grad_()
    action = torch.cat([torch.randint(3, (5, 1)).float(), torch.randn(5, 2)], -1)
    policy = Hybrid(logits, (3,), of=IndependentNormal, loc=loc, scale=scale)
    choice, numbers = Categorical(logits=logits), Normal(loc, scale)
    parts = choice.log_prob(action[:, 0]) + numbers.log_prob(action[:, 1:]).sum(-1)
    parts = parts + choice.entropy() + numbers.entropy().sum(-1)
    whole = policy.log_prob(action) + policy.entropy()
    inputs = logits, loc, scale
    expected = torch.autograd.grad(parts.sum(), inputs)
    for found, own in zip(torch.autograd.grad(whole.sum(), inputs), expected, strict=True):
        torch.testing.assert_close(found, own)


def test_importance_ratio_covers_the_whole_action():
    """The loss's ratio is the product of the parts' ratios."""
    group = make_group("hybrid")
    actor, critic = make_networks(group)
    td = make_batch(group, actor, 16)
    loss, old = MAPPOLoss(actor, critic, group=group), td["car", "action_log_prob"]
    action, mask = td["car", "action"], td["car", "mask"]
    own = actor.get_dist(td)
    parts = own.choices.log_prob(action[..., :1].long()), own.numbers.log_prob(action[..., 1:])
    expected = torch.where(mask, sum(parts) - old, 0.0)
    torch.testing.assert_close(loss.log_ratio(td).squeeze(-1), expected)


@pytest.mark.parametrize("random", [True, False])
@pytest.mark.parametrize("numbers", [Bounded(1, 3, (2,)), Unbounded((2,))], ids=["bounded", "not"])
def test_sampled_actions_are_in_their_spec(random, numbers):
    group = TeamSpec([AgentSpec("car", 3, Unbounded((5,)), Spec([3, 2], numbers))]).groups["car"]
    td = make_observed(group, 2000)
    with torch.no_grad():
        (RandomActor(group) if random else make_actor(group))(td)
    action = td["car", "action"]
    assert action.shape == (2000, 3, 4) and action.dtype == torch.float32
    assert group.action_spec.expand(2000, 3, 4).is_in(action)
    for choice, n in enumerate((3, 2)):
        share = action[..., choice].flatten().long().bincount(minlength=n) / 6000
        torch.testing.assert_close(share, torch.full((n,), 1 / n), atol=0.03, rtol=0)


def test_deterministic_action_is_argmax_and_squashed_loc():
    group = make_group("hybrid")
    actor, td = make_actor(group), make_observed(group, 7)
    with set_exploration_type(ExplorationType.DETERMINISTIC), torch.no_grad():
        actor(td)
    expected = td["car", "logits"].argmax(-1, keepdim=True), td["car", "loc"].tanh()
    torch.testing.assert_close(td["car", "action"], torch.cat(expected, -1))


@pytest.mark.parametrize("algorithm", ["qmix", "pqn", "masac", "matd3", "vdn", "hasac"])
def test_unsupported_algorithms_raise(algorithm):
    config = ALGORITHMS.schema(algorithm)(algorithm=algorithm)
    message = (
        rf"'car': its actions are hybrid, \[3\] and 2 numbers, which {algorithm} does not support; "
        "use algorithm=mappo, ippo, happo or bc"
    )
    with pytest.raises(ConfigError, match=message):
        ALGORITHMS.learner(algorithm)({"car": make_group("hybrid")}, config)


def test_noise_changes_continuous_part_only():
    group = make_group("hybrid")
    td = RandomActor(group)(make_observed(group, 500))
    before = td["car", "action"].clone()
    with set_exploration_type(ExplorationType.RANDOM):
        Explore(group, sigma=0.5)(td)
    moved = td["car", "action"] - before
    assert bool((moved[..., 0] == 0).all()) and bool((moved[..., 1:].std((0, 1)) > 0.2).all())
    assert group.action_spec.expand(500, 3, 3).is_in(td["car", "action"])


def test_half_bounded_numbers_are_refused():
    half = Bounded(torch.tensor([-1.0, -torch.inf]), torch.ones(2))
    group = TeamSpec([AgentSpec("car", 1, Unbounded((5,)), Spec([3], half))]).groups["car"]
    with pytest.raises(ValueError, match="some action bounds are finite and some are not"):
        make_actor(group)


@pytest.mark.parametrize("make", [make_deterministic_actor, make_action_critic, make_q_actor])
@pytest.mark.parametrize("kind", ["hybrid", "multi_discrete"])
def test_value_networks_refuse_hybrid_and_multi_discrete_actions(make, kind):
    with pytest.raises(ConfigError, match=r"are (hybrid|multi-discrete), \[.*use MAPPOLoss"):
        make(make_group(kind))


class Noise(EnvBase):
    """A TorchRL environment of two agents with hybrid actions."""

    def __init__(self, num_envs):
        super().__init__(batch_size=[num_envs])
        n, flag = num_envs, CategoricalSpec(2, shape=(num_envs, 1), dtype=torch.bool)
        action = torch.stack([Spec([3], Bounded(-1, 1, (2,)))] * 2, 0).expand(n, 2, 3)

        def of_cars(**leaf):
            return Composite(car=Composite(leaf, shape=(n, 2)), shape=(n,))

        self.full_action_spec = of_cars(action=action)
        self.full_observation_spec = of_cars(observation=Unbounded((n, 2, 4)))
        self.full_reward_spec = of_cars(reward=Unbounded((n, 2, 1)))
        self.full_done_spec = Composite(done=flag, terminated=flag.clone(), shape=(n,))
        self.group_map = {"car": ["car_0", "car_1"]}

    def _reset(self, tensordict=None, **kwargs):
        return self.full_observation_spec.rand().update(self.full_done_spec.zero())

    def _step(self, tensordict):
        reward = tensordict["car", "action"][..., 1:2].clone()
        return self._reset().set(("car", "reward"), reward)

    def _set_seed(self, seed):
        torch.manual_seed(0 if seed is None else seed)


def test_training_on_a_torchrl_environment(tmp_path):
    check_env_specs(Noise(4))
    env = TransformedEnv(Noise(8), StepCounter(10))
    settings = {key: value for key, value in SMALL.items() if not key.startswith("env")}
    training = make_training(tmp_path / "run", env, **settings)
    training.step()
    assert all(bool(torch.isfinite(p).all()) for p in training.run.policy.parameters())
    training.close()


class Gears(MarlEnv):
    """Three agents choose a gear and a force by the clock; the first one dies after six steps.

    Nothing is drawn, since a captured rollout draws resets in another order.
    """

    def __init__(self, num_envs, **kwargs):
        super().__init__(num_envs, max_steps=10, **kwargs)
        self.register_agent(AgentSpec("car", 3, Unbounded((2,)), Spec([3], Bounded(-1, 1, (2,)))))

    def _reset(self, tensordict):
        self.clock = torch.zeros(self.num_envs, 1, device=self.device)
        return self._observe()

    def _observe(self, **leaves):
        phase = (self.clock + torch.arange(3, device=self.device)) % 3
        seen = torch.stack([phase, self.clock.expand_as(phase) / 10], -1)
        alive = torch.ones_like(phase, dtype=torch.bool)
        return {"car": {"observation": seen, "mask": alive, **leaves}}

    def _step(self, tensordict):
        action = tensordict["car", "action"]
        phase = (self.clock + torch.arange(3, device=self.device)) % 3
        right = (action[..., 0] == phase).float()
        earned = right * (1 - (action[..., 1:] - phase.unsqueeze(-1) + 1).abs().mean(-1))
        self.clock = self.clock + 1
        first = torch.arange(3, device=self.device) == 0
        dead = first & (self.clock >= 6)
        return self._observe(reward=earned.unsqueeze(-1), terminated=dead.unsqueeze(-1))


@pytest.mark.parametrize("numbers", [Bounded(1, 3, (2,)), Unbounded((2,))], ids=["bounded", "not"])
def test_exported_agents_act_as_the_policy(numbers, tmp_path):
    team = TeamSpec([AgentSpec("car", 1, Unbounded((5,)), Spec([3, 2], numbers))])
    actor, td = make_actor(team.groups["car"]), make_observed(team.groups["car"], 1, alive=2.0)
    agents = find_agents(actor)
    player = Player(export_agents(agents, tmp_path, "pt2")["car_0"], trust=True, seed=0)
    seen = td["car", "observation"][0, 0].numpy()
    with set_exploration_type(ExplorationType.DETERMINISTIC), torch.no_grad():
        actor(td)
    found = torch.from_numpy(player.act(seen))
    torch.testing.assert_close(found, td["car", "action"][0, 0], rtol=1e-4, atol=1e-4)
    drawn = torch.stack(
        [torch.from_numpy(player.act(seen, deterministic=False)) for _ in range(400)]
    )
    assert team.groups["car"].action_spec[0].expand(400, 4).is_in(drawn)
    expected = td["car", "logits"][0, 0, :3].softmax(-1)
    share = drawn[:, 0].long().bincount(minlength=3) / 400
    torch.testing.assert_close(share, expected, atol=0.08, rtol=0)
    assert drawn[:, 2].std() > 0.3
    described = agents["car_0"].describe()["action"]
    assert (described["distribution"], described["branches"]) == ("hybrid", [3, 2])
    assert ("low" in described) is isinstance(numbers, Bounded)


def make_training(folder, env=None, **settings):
    config = load_config("toy_arena_mappo", SMALL | {"folder": str(folder)} | settings)
    return start_training(config, env)


def parameters_of(training):
    return [p.detach().clone() for p in training.run.policy.parameters()]


@pytest.mark.parametrize(
    "algorithm", first_tier_cases(["mappo"], ["mappo", "ippo", "happo"], "runs")
)
def test_captured_training_equals_eager(algorithm, tmp_path):
    """Simulator, policy and update are captured and equal the eager ones bitwise."""
    parameters = []
    for execution in ("eager", "trace"):
        own = {"learner.algorithm": algorithm, "execution": execution}
        training = make_training(tmp_path / execution, Gears(8, seed=0), **own)
        for _ in range(3):
            training.step()
        parameters.append(parameters_of(training))
        training.close()
    for x, y in zip(*parameters, strict=True):
        assert torch.equal(x, y)


def test_resumed_run_is_bitwise_equal(tmp_path):
    whole = make_training(tmp_path / "whole")
    for _ in range(4):
        whole.step()
    parts = make_training(tmp_path / "parts")
    parts.step()
    parts.save()
    parts.close()
    torch.rand(7)
    resumed = resume(tmp_path / "parts")
    expected = parameters_of(whole)
    whole.close()
    for x, y in zip(expected, resumed.policy.parameters(), strict=True):
        assert torch.equal(x, y)
