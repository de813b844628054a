"""Returns of agents against sums worked out by hand."""

import pytest
import torch
from torchrl.data import Categorical, Unbounded

from torchrl_marl import AgentSpec, TeamSpec
from torchrl_marl.envs import MarlEnv
from torchrl_marl.envs.toy import Nim
from torchrl_marl.objectives.flags import Births, begun
from torchrl_marl.training import evaluate
from torchrl_marl.training.metrics import EpisodeTracker, group_reward

# Mask of each step: agent 0 waits in the third, 1 is born in the third, 2 dies in the fourth,
# in which it still acts.
ACTS = torch.tensor(
    [[1, 0, 1], [1, 0, 1], [0, 1, 1], [1, 1, 1], [1, 1, 0], [1, 1, 0], [1, 1, 0]]
).bool()
DIES = torch.tensor([[0, 0, 0]] * 3 + [[0, 0, 1]] * 4).bool()
# In step t, counted from 1, the rewards are t, 10 t and 100 t, also for absent agents.
GIVES = torch.arange(1.0, 7).unsqueeze(-1) * torch.tensor([1.0, 10.0, 100.0])
EARNED = [1 + 2 + 3 + 4 + 5 + 6, 10 * (3 + 4 + 5 + 6), 100 * (1 + 2 + 3 + 4)]
# The mean over existing agents: 0 and 2, then all, then 0 and 1.
STEPS = [101 / 2, 202 / 2, 333 / 3, 444 / 3, 55 / 2, 66 / 2]


class Crew(MarlEnv):
    """Env i starts its script i steps late. Until then agent 0 acts alone without reward."""

    def __init__(self, num_envs=2, gives=GIVES, **kwargs):
        super().__init__(num_envs, max_steps=6 + num_envs - 1, **kwargs)
        self.gives = gives
        self.register_agent(AgentSpec("crew", 3, Unbounded((1,)), Categorical(2)))

    def _reset(self, tensordict):
        self.time = -torch.arange(self.num_envs)
        return {"crew": self._see()}

    def _step(self, tensordict):
        begun, now = (self.time >= 0).view(-1, 1), self.time.clamp(0, 5)
        reward = torch.where(begun, self.gives[now], 0.0).unsqueeze(-1)
        dies = (begun & DIES[now]).unsqueeze(-1)
        self.time = self.time + 1
        return {"crew": {**self._see(), "reward": reward, "terminated": dies}}

    def _see(self):
        first = torch.tensor([True, False, False])
        acts = torch.where((self.time < 0).view(-1, 1), first, ACTS[self.time.clamp(0, 6)])
        return {"observation": torch.zeros(self.num_envs, 3, 1), "mask": acts}


class Late(Crew):
    """The same with NaN as the reward of absent agents."""

    def _step(self, tensordict):
        there = (tensordict["crew", "mask"] | self.waits()) & ~tensordict["crew", "done"][..., 0]
        given = super()._step(tensordict)
        reward = given["crew"]["reward"]
        given["crew"]["reward"] = torch.where(there.unsqueeze(-1), reward, torch.nan)
        return given

    def waits(self):
        return (self.time == 2).view(-1, 1) & torch.tensor([True, False, False])


@pytest.mark.parametrize("world", [Crew, Late])
def test_returns_of_agents_worked_out_by_hand(world):
    td = world(1).rollout(6)
    assert td["next", "done"][0, :, 0].tolist() == [False] * 5 + [True]
    assert td["next", "crew", "reward"].sum(1)[0, :, 0].tolist() == EARNED


@pytest.mark.parametrize("sizes", [[14], [1] * 14, [3, 4, 7], [6, 8]])
def test_tracker_counts_only_existing_agents(sizes):
    """Two envs with two episodes of seven steps each, in batches of any sizes."""
    env = Crew(2)
    team, td = TeamSpec.from_env(env), env.rollout(14, break_when_any_done=False)
    tracker, told = EpisodeTracker(team), []
    for part in td.split(sizes, 1):
        state, tracker = tracker.state_dict(), EpisodeTracker(team)
        tracker.load_state_dict(state)
        told.append(tracker.update(part)["crew/episode_reward"].item())
    told = [x for x in told if x == x]
    # The script of env 0 ends a step before its episode, so its last step is repeated.
    assert sum(told) / len(told) == pytest.approx(sum(STEPS) + STEPS[-1] / 2)


def test_evaluation_counts_only_existing_agents():
    env = Crew(1)
    result = evaluate(env, None, TeamSpec.from_env(env), episodes=2)
    assert result["crew/episode_reward"] == result["return_mean"] == pytest.approx(sum(STEPS))
    assert result["return_std"] == pytest.approx(0)


def test_births_equal_a_count_by_step():
    env = Crew(2)
    team, td = TeamSpec.from_env(env), env.rollout(14, break_when_any_done=False)
    births, born = Births(team.groups).update(td)["crew"], {}
    for t in range(7):
        born = begun(team.groups, td[:, t], born)
        assert torch.equal(born["crew"], births[:, t])
    assert torch.equal(births[:, :7], births[:, 7:])
    assert births[0, :7].int().tolist() == [[1, 0, 1]] * 2 + [[1, 1, 1]] * 5
    assert births[1, :7].int().tolist() == [[1, 0, 0]] + [[1, 0, 1]] * 2 + [[1, 1, 1]] * 4
    mean = group_reward(team.groups["crew"], td, births)
    assert mean[0, :6].tolist() == pytest.approx(STEPS)


def test_all_agents_of_a_turn_based_game_are_born_at_reset():
    """With up to three stones the first player may take all, and the second never acts."""
    env = Nim(64, stones=3, most=3, seed=0)
    td = env.rollout(40, break_when_any_done=False)["next"]
    assert not (td["first", "reward"] + td["second", "reward"]).any()
    assert td["done"].sum() == td["first", "reward"].abs().sum()  # each game has one winner
    result = evaluate(env, None, TeamSpec.from_env(env), episodes=64)
    assert result["first/episode_reward"] == -result["second/episode_reward"] != 0
