"""Teams whose number of agents changes between episodes. Empty slots are ignored."""

import json

import pytest
import torch
from learner_twins import assert_masked_slots_change_no_bit, check_resume_and_read_metrics
from runs import small_config
from torchrl.data import Categorical, Unbounded

from torchrl_marl import AgentSpec, TeamSpec
from torchrl_marl.apps.cli.main import main as cli
from torchrl_marl.apps.record import episodes_of, play_episodes
from torchrl_marl.collectors import RolloutCollector, TeamPolicy
from torchrl_marl.envs import MarlEnv, check_marl_env
from torchrl_marl.envs.toy import Arena
from torchrl_marl.errors import ConfigError
from torchrl_marl.learners import OffPolicyConfig, OnPolicyConfig, build_learners
from torchrl_marl.learners.off_policy_config import ParallelQConfig, ValueConfig
from torchrl_marl.modules import CriticConfig, NetworkConfig, QNetworkConfig
from torchrl_marl.training import evaluate
from torchrl_marl.training.metrics import EpisodeTracker, count_agent_frames


class Sides(MarlEnv):
    """Two steps. Agents of ``a`` earn 1 in each, those of ``b`` 3. Even envs have no agent in b."""

    def __init__(self, num_envs, poison=0.0, **kwargs):
        super().__init__(num_envs, **kwargs)
        self.poison = poison
        for name in ("a", "b"):
            self.register_agent(AgentSpec(name, 2, Unbounded((1,)), Categorical(2)))

    def _reset(self, tensordict):
        self.clock = torch.zeros(self.num_envs, 1, 1)
        self.there = torch.arange(self.num_envs).view(-1, 1) % 2 == 1
        return self._observe()

    def _step(self, tensordict):
        self.clock = self.clock + 1
        over = (self.clock >= 2).expand(-1, 2, 1)
        out = self._observe(terminated=over)
        out["a"]["reward"] = torch.ones(self.num_envs, 2, 1)
        out["b"]["reward"] = torch.where(self.there.unsqueeze(-1), 3.0, self.poison).expand(
            -1, 2, 1
        )
        out["b"]["terminated"] = over | ~self.there.unsqueeze(-1)
        return out

    def _observe(self, **leaves):
        seen = self.clock.expand(-1, 2, 1)
        empty = torch.where(self.there.unsqueeze(-1), seen, self.poison)
        b = {"observation": empty, "mask": self.there.expand(-1, 2), **leaves}
        return {"a": {"observation": seen, **leaves}, "b": b}


def arena(num_envs=8, **settings):
    return Arena(num_envs, **{"n_agents": [2, 5], "years": 2, "lives": 2, "seed": 0} | settings)


# ------------------------------------------------------------------------------- environment


def test_every_team_size_is_drawn_and_other_slots_stay_empty():
    td = arena(256).rollout(12)
    size = td["agents", "mask"][:, 0].sum(-1)
    assert set(size.tolist()) == {2, 3, 4, 5}
    there = torch.arange(5) < size.unsqueeze(-1)
    ever = td["agents", "mask"].any(1)
    assert torch.equal(ever, there)
    assert not td["agents", "observation"][~there.unsqueeze(1).expand(-1, td.shape[1], -1)].any()
    assert (td["next", "agents", "terminated"].squeeze(-1) | there.unsqueeze(1)).all()
    # Empty slots end no episode and delay none.
    last = td["next", "agents", "terminated"].squeeze(-1).all(-1)
    assert torch.equal(last, td["next", "terminated"].squeeze(-1))


def test_team_size_changes_between_episodes():
    batch = RolloutCollector(arena(4), None, frames_per_batch=800).rollout()
    first = torch.cat([torch.ones(4, 1).bool(), batch["next", "done"][:, :-1, 0]], 1)
    for env in range(4):
        assert len(set(batch["agents", "mask"][env].sum(-1)[first[env]].tolist())) > 1


@pytest.mark.parametrize("settings", [{}, {"respawn": 2}, {"late_spawn": 1}])
def test_returns_are_exact_and_check_marl_env_passes(settings):
    env = arena(20_000, **settings)
    found = evaluate(env, None, TeamSpec.from_env(env), episodes=20_000)
    assert found["return_mean"] == pytest.approx(env.random_return, abs=0.03)
    assert env.optimal_return == sum(2 * (n + 1) / 2 for n in (2, 3, 4, 5)) / 4
    assert "keeps the rules" in check_marl_env(arena(5, **settings))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"n_agents": [6, 2]}, r"\[6, 2\], expected a number, or the least and the largest"),
        ({"n_agents": [1, 2, 3]}, r"\[1, 2, 3\], expected a number, or"),
        ({"n_agents": [0, 2]}, "n_agents is 0, expected 1 or more"),
        ({"n_agents": [2, 4], "n_groups": 2}, "expected one number with several groups"),
    ],
)
def test_invalid_team_sizes_raise(settings, message):
    with pytest.raises(ConfigError, match=message):
        Arena(2, **settings)


def test_empty_slots_are_not_bootstrapped_at_a_time_limit():
    env = arena(64, years=9, lives=99, max_steps=3)
    td = env.rollout(3)
    assert torch.equal(td["next", "agents", "mask"][:, -1], td["agents", "mask"][:, 0])
    assert td["next", "truncated"][:, -1].all()


# --------------------------------------------------------------------------------- learners

SMALL = {"minibatch_size": 40}
OFF = {**SMALL, "learning_starts": 0, "updates_per_frame": 0.02}
CONFIGS = {
    "mappo": OnPolicyConfig(actor=NetworkConfig([8]), normalize_observations=True, **SMALL),
    "mappo of a set": OnPolicyConfig(
        actor=NetworkConfig([8]), critic=CriticConfig([8], architecture="set"), **SMALL
    ),
    "mappo with attention": OnPolicyConfig(
        actor=NetworkConfig([8]), critic=CriticConfig([8], architecture="attention"), **SMALL
    ),
    "pqn": ParallelQConfig(actor=QNetworkConfig([8]), **SMALL),
    "qmix": ValueConfig(actor=QNetworkConfig([8]), **OFF),
    "maddpg": OffPolicyConfig(actor=NetworkConfig([8]), **OFF),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_values_in_empty_slots_have_no_effect_on_learning(name):
    env, twins = arena(max_steps=6), []
    for _ in range(2):
        torch.manual_seed(0)
        twins += build_learners(TeamSpec.from_env(env), CONFIGS[name])
    assert_masked_slots_change_no_bit(*twins, env, float("nan"))


def test_statistics_include_only_existing_agents():
    env = arena()
    [learner] = build_learners(TeamSpec.from_env(env), CONFIGS["mappo"])
    policy = TeamPolicy(learner.actors.values())
    batch = RolloutCollector(env, policy, frames_per_batch=160).rollout()
    learner.learn(batch)
    mask = batch["agents", "mask"]
    assert count_agent_frames(TeamSpec.from_env(env), batch) == mask.sum()
    [norm] = learner.observation_norms.children()
    seen = batch["agents", "observation"][mask].double()
    torch.testing.assert_close(norm.mean.flatten(), seen.mean(0))
    assert norm.count.item() == mask.sum()


# ----------------------------------------------------------------------------------- returns


@pytest.mark.parametrize("poison", [0.0, float("nan")])
def test_group_without_agents_is_left_out_of_returns(poison):
    """Group a earns 2, group b 6 if it has agents. Then the mean is (2 + 6) / 2 = 4."""
    env = Sides(4, poison)
    team = TeamSpec.from_env(env)
    found = evaluate(env, None, team, episodes=4)
    assert (found["a/episode_reward"], found["b/episode_reward"]) == (2, 6)
    assert (found["return_mean"], found["return_min"], found["return_max"]) == (3, 2, 4)
    tracker = EpisodeTracker(team)
    batch = RolloutCollector(env, None, frames_per_batch=16).rollout()
    means = tracker.update(batch)
    assert means["a/episode_reward"] == 2 and means["b/episode_reward"] == 6
    recorded = episodes_of(team, play_episodes(env, env.rand_action, 4))
    assert sorted(recorded.total.tolist()) == [2, 2, 4, 4]
    assert recorded.of_group("b").tolist() == [6, 6]
    assert "keeps the rules" in check_marl_env(Sides(4))


# -------------------------------------------------------------------------------------- runs


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "sizes"
    words = ["env.kwargs.n_agents=[2,6]", "env.kwargs.years=2", "learner.critic.architecture=set"]
    words += ["env.num_envs=8", "total_frames=160", "frames_per_batch=80"]
    words += ["learner.minibatch_size=40", "evaluation.episodes=4", f"folder={folder}"]
    assert cli(["train", "toy_arena_mappo", *words]) == 0
    return folder


@pytest.mark.parametrize("n_agents", ["2", "4", "6", "[3,5]"])
def test_policy_is_evaluated_in_teams_of_any_size(folder, n_agents, capsys):
    words = [f"env.kwargs.n_agents={n_agents}", "--episodes", "4"]
    assert cli(["evaluate", str(folder), *words]) == 0
    row = json.loads((folder / "evaluations.jsonl").read_text().splitlines()[-1])
    assert row["episodes"] == 4 and row["length_max"] <= 12


def test_resume_is_exact(tmp_path):
    def make(folder):
        env = {"kwargs": {"n_agents": [2, 4]}}
        return small_config(total_frames=320, folder=str(folder), env=env)

    assert len(check_resume_and_read_metrics(make, tmp_path, (2,))) == 4


@pytest.mark.learning
def test_one_actor_learns_teams_of_all_sizes(tmp_path):
    import torchrl_marl

    env = {"kwargs": {"n_agents": [2, 6]}}
    run = torchrl_marl.train("toy_arena_mappo", env=env, folder=tmp_path / "run")
    for n in (2, 4, 6):
        other = torchrl_marl.training.Run.load(run.folder, settings={"env.kwargs.n_agents": n})
        best = Arena(1, n_agents=n).optimal_return
        assert other.evaluate(episodes=64)["return_mean"] > 0.9 * best
