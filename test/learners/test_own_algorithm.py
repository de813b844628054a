"""A custom algorithm in one file: REINFORCE with a mean baseline.

It consists of a loss, settings and a learner, and is then named in a recipe.
"""

import csv
from dataclasses import dataclass

import pytest
import torch
from protocols import missing_names
from tensordict import TensorDict
from torch import nn

from torchrl_marl import TeamSpec, train
from torchrl_marl.collectors import RolloutCollector, TeamPolicy
from torchrl_marl.envs.toy import Arena, MatrixGame
from torchrl_marl.errors import NonFiniteError, SpecError
from torchrl_marl.functional import expand_mask, gae, masked_mean
from torchrl_marl.learners import FixedPolicy, Learner, OnPolicyConfig, OnPolicyLearner
from torchrl_marl.learners.algorithms import ALGORITHMS, register_algorithm
from torchrl_marl.learners.captured import make_updates
from torchrl_marl.learners.config import LearnerConfig
from torchrl_marl.learners.learner import check_learner
from torchrl_marl.modules import make_actor
from torchrl_marl.runs import resume
from torchrl_marl.settings import Positive

# --------------------------------------------------------------- the algorithm: 43 lines


@dataclass(frozen=True)
class ReinforceConfig(LearnerConfig):
    """REINFORCE with a mean baseline."""

    algorithm: str = "reinforce"
    """Learning algorithm of the agents."""
    lr: Positive = 0.02
    """Learning rate of Adam."""


class ReinforceLoss(nn.Module):
    def __init__(self, actor, group):
        super().__init__()
        self.actor, self.group = actor, group
        self.in_keys = [*actor.in_keys, group.action_key, group.key("advantage")]

    def forward(self, minibatch):
        log_prob = self.actor.get_dist(minibatch).log_prob(minibatch[self.group.action_key])
        gain = log_prob * minibatch[self.group.key("advantage")].squeeze(-1)
        mask = self.group.mask(minibatch)
        return TensorDict({"loss_objective": -masked_mean(torch.where(mask, gain, 0.0), mask)}, [])


class Reinforce(nn.Module, Learner):
    def __init__(self, groups, config, *, team=None, device=None, execution="eager"):
        super().__init__()
        self.groups, self.config = dict(groups), config
        self.actors = nn.ModuleDict({n: make_actor(g, device=device) for n, g in groups.items()})
        losses = {n: ReinforceLoss(self.actors[n], g) for n, g in groups.items()}
        self.optimizer = torch.optim.Adam(self.actors.parameters(), lr=config.lr, fused=True)
        self.updates = make_updates(losses, self.optimizer, execution=execution)

    def set_progress(self, fraction):
        pass

    def learn(self, batch):
        for group in self.groups.values():
            reward, mask = batch["next", group.reward_key], group.mask(batch)
            none = torch.zeros_like(reward)
            ends = (
                batch["next", key].unsqueeze(-2).expand_as(none) for key in ("done", "terminated")
            )
            returns, _ = gae(reward, none, none, *ends, gamma=0.99, lmbda=1.0)
            batch[group.key("advantage")] = returns - masked_mean(returns, mask)
        everything = torch.arange(batch.numel())
        history, _ = self.updates.run(batch.reshape(-1), [[everything]])
        return TensorDict({key: value[0] for key, value in history.items()}, [])

    def get_extra_state(self):
        return self.optimizer.state_dict()

    def set_extra_state(self, state):
        self.optimizer.load_state_dict(state)


# ---------------------------------------------------------------------------- its recipe


def recipe(folder, **settings):
    return {
        "recipe": "reinforce",
        "threads": 1,
        "total_frames": 128 * 30,
        "frames_per_batch": 128,
        "folder": str(folder),
        "env": {"library": "toy", "name": "matrix_game", "num_envs": 32},
        "learner": {"algorithm": "reinforce", "lr": 0.02},
        "evaluation": {"episodes": 32},
        "logging": {"progress": False},
    } | settings


@pytest.fixture
def registered():
    here = f"{__name__}:"
    register_algorithm(
        "reinforce",
        "policy gradient with a mean baseline",
        config=here + "ReinforceConfig",
        learner=here + "Reinforce",
    )
    yield
    ALGORITHMS.remove("reinforce")


def rows(path):
    with open(path / "metrics.csv") as file:
        clock = {"seconds", "frames_per_second"}
        return [{k: v for k, v in row.items() if k not in clock} for row in csv.DictReader(file)]


@pytest.mark.usefixtures("registered")
def test_registered_algorithm_learns(tmp_path):
    env = {"library": "toy", "name": "matrix_game", "num_envs": 32}
    settings = recipe(tmp_path / "run", env=env | {"kwargs": {"payoff": "coordination"}})
    run = train(settings)
    found = rows(tmp_path / "run")
    earned = [float(row["agents/episode_reward"]) for row in found]
    assert earned[0] < 5.0 and earned[-1] > 9.0  # of 3.75 at random, 10 at best
    assert run.summary["return_after"] == 10.0
    assert "agents/loss_objective" in found[-1] and "agents/grad_norm" in found[-1]


@pytest.mark.usefixtures("registered")
def test_run_resumes_exactly(tmp_path):
    short = {"total_frames": 128 * 4, "env": {"library": "toy", "name": "arena", "num_envs": 32}}
    train(recipe(tmp_path / "whole", **short))
    train(recipe(tmp_path / "half", **short | {"total_frames": 128 * 2}))
    resume(tmp_path / "half", total_frames=512)
    whole = rows(tmp_path / "whole")
    assert len(whole) == 4 and whole == rows(tmp_path / "half")


def test_traced_update_matches_eager_update():
    env = Arena(8, seed=0)
    groups = TeamSpec.from_env(env).groups
    found = []
    for execution in ("eager", "trace"):
        torch.manual_seed(0)
        learner = Reinforce(groups, ReinforceConfig(), execution=execution)
        batches = RolloutCollector(Arena(8, seed=0), learner.actors["agents"], frames_per_batch=80)
        metrics = [learner.learn(batches.rollout())["agents", "loss_objective"] for _ in range(3)]
        found.append([*metrics, *learner.actors.parameters()])
    for eager, traced in zip(*found, strict=True):
        assert torch.equal(eager, traced)


@pytest.mark.usefixtures("registered")
def test_trains_in_environment_without_masks(tmp_path):
    pytest.importorskip("vmas")
    env = {"library": "vmas", "name": "balance", "num_envs": 16, "max_steps": 8}
    train(recipe(tmp_path / "run", env=env, total_frames=128 * 2))
    assert len(rows(tmp_path / "run")) == 2


@pytest.mark.usefixtures("registered")
def test_trains_beside_another_algorithm(tmp_path):
    env = {"library": "toy", "name": "speaker_listener", "num_envs": 32}
    settings = recipe(tmp_path / "run", env=env, total_frames=128 * 2)
    settings["groups"] = {"speaker": {"algorithm": "mappo", "minibatch_size": 64}}
    train(settings)
    last = rows(tmp_path / "run")[-1]
    assert "listener/loss_objective" in last and "listener/loss_critic" not in last
    assert "speaker/loss_critic" in last


# ------------------------------------------------------------------- the learner protocol


def test_learners_follow_the_protocol():
    groups = TeamSpec.from_env(MatrixGame(2)).groups
    for learner in (
        OnPolicyLearner(groups, OnPolicyConfig()),
        FixedPolicy(groups),
        Reinforce(groups, ReinforceConfig()),
    ):
        assert not missing_names(learner, Learner)
        assert list(learner.actors.keys()) == list(learner.groups)


class Fit(nn.Module):
    """A loss with a target that follows the trained weight."""

    in_keys = ["x"]

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([1.0, -2.0]))
        self.target = torch.zeros(2)

    def forward(self, minibatch):
        error = (minibatch["x"] * self.weight - 0.5 * self.target).square().sum(-1)
        return TensorDict({"loss_fit": error.mean(), "largest": error.amax()}, [])


@pytest.mark.parametrize("execution", ["eager", "trace"])
def test_soft_targets_follow_after_each_update(execution):
    """The target moves half of the way to the weights after each of three updates."""
    loss = Fit()
    optimizer = torch.optim.Adam(loss.parameters(), lr=0.1, fused=True)

    def after():
        loss.target.lerp_(loss.weight, 0.5)

    updates = make_updates(
        {"a": loss}, optimizer, after=after, state=[loss.target], execution=execution
    )
    frames = TensorDict({"x": torch.randn(6, 2, generator=torch.Generator().manual_seed(0))}, [6])
    indices = [torch.tensor([0, 1]), torch.tensor([2, 3]), torch.tensor([4, 5])]
    target, weights = torch.zeros(2), []
    for step in indices:
        history, _ = updates.run(frames, [[step]])
        weights.append(loss.weight.detach().clone())
        target = target.lerp(weights[-1], 0.5)
        assert torch.equal(loss.target, target)
        assert set(history) == {("a", "loss_fit"), ("a", "largest"), ("a", "grad_norm")}
    assert not torch.equal(weights[0], weights[-1])


def test_joined_groups_have_separate_actors():
    env = Arena(4, n_agents=2, n_groups=2, seed=0)
    team = TeamSpec.from_env(env)
    learner = OnPolicyLearner(team.groups, OnPolicyConfig())
    names = list(team.groups)
    assert len(names) == 2 and list(learner.actors) == names
    assert any(key.startswith("actors.agents_0+agents_1.actor.") for key in learner.state_dict())
    td = env.reset()
    torch.manual_seed(0)
    both = learner.actor(td.clone())
    torch.manual_seed(0)
    policy = TeamPolicy(learner.actors.values())
    assert len(policy.module) == 1  # the joined actor acts in one call
    together = policy(td.clone())
    for name in names:
        assert torch.equal(both[name, "action"], together[name, "action"])
        alone = td.clone().select(name, "done", strict=False)
        torch.manual_seed(0)
        learner.actors[name](alone)
        mask = expand_mask(td[name, "mask"], both[name, "action"])
        same = alone[name, "action"] == both[name, "action"]
        assert bool((same | ~mask).all())
        assert set(alone.keys()) <= {name, "done"}
    cat, mouse = names
    others = FixedPolicy({mouse: team.groups[mouse]}).actors
    mixed = TeamPolicy([learner.actors[cat], others[mouse]])
    assert mixed(td.clone())[cat, "action"].shape == td[cat, "mask"].shape


def test_learner_without_required_methods_raises():
    class Bare(nn.Module):
        def __init__(self, groups, config, **others):
            super().__init__()
            self.groups, self.actors = dict(groups), nn.ModuleDict()

    with pytest.raises(SpecError, match="Bare lacks cut, learn, over_ranks.*inherit"):
        check_learner(Bare({}, None))


def test_learner_with_wrong_inheritance_raises():
    """With Learner before nn.Module, checkpoints held None, and resumed runs started over."""

    class Idle(nn.Module, Learner):
        def __init__(self):
            super().__init__()
            self.groups, self.actors = {}, nn.ModuleDict()

    class Swapped(Learner, nn.Module):
        learn = Reinforce.learn

        def __init__(self):
            nn.Module.__init__(self)
            self.groups, self.actors = {}, nn.ModuleDict()

    class NoActors(Reinforce):
        def __init__(self):
            nn.Module.__init__(self)
            self.groups = {}

    with pytest.raises(SpecError, match="Idle inherits learn from Learner, where nothing is done"):
        check_learner(Idle())
    with pytest.raises(SpecError, match="inherits load_state_dict, state_dict from.*nn.Module bef"):
        check_learner(Swapped())
    with pytest.raises(SpecError, match="NoActors lacks actors; set them in __init__"):
        check_learner(NoActors())


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize(
    "returned, error, message",
    [
        (None, SpecError, "Reinforce.learn returned a NoneType, expected a TensorDict"),
        ({"agents": {"loss": 1.0}}, SpecError, "learn returned a dict"),
        (TensorDict({"loss": torch.ones(())}), SpecError, "the metric 'loss'"),
        (TensorDict({"agents": {"x": torch.ones(3)}}), SpecError, r"'x'\) of shape \[3\]"),
        (
            TensorDict({"agents": {"loss_objective": torch.tensor(torch.nan)}}),
            NonFiniteError,
            "group 'agents': loss_objective became NaN",
        ),
        (
            TensorDict({"agents": {"episode_reward": torch.ones(())}}),
            SpecError,
            "'agents/episode_reward', which is the name of a metric of the run",
        ),
    ],
)
def test_metrics_of_custom_learner_are_validated(tmp_path, monkeypatch, returned, error, message):
    monkeypatch.setattr(Reinforce, "learn", lambda self, batch: returned)
    with pytest.raises(error, match=message):
        train(recipe(tmp_path / "run", total_frames=128))
