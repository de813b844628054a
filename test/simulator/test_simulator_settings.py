"""New episodes use current settings; resets that depend on earlier episodes are refused."""

import re

import pytest
import torch
from contract import asking_reset, draw_actions, reset_some
from operations import CountOperations
from torchrl.data import Bounded, Unbounded
from torchrl.envs.utils import step_mdp

from torchrl_marl.collectors import RolloutCollector
from torchrl_marl.envs import MarlEnv
from torchrl_marl.simulator.settings import Settings, find_dependence
from torchrl_marl.specs import AgentSpec

vmas = pytest.importorskip("vmas")

from torchrl_marl.envs import VmasEnv  # noqa: E402

E = 6
SEEN = ("agents", "observation")
Dropout = vmas.make_env("dropout", 1).scenario.__class__


class Ring(Dropout):
    """The goal's distance is a setting of all envs, or of each env."""

    distance = 0.1
    place = 0

    def make_world(self, batch_dim, device, **kwargs):
        self.shared, self.each = torch.tensor(0.0), torch.zeros(batch_dim)
        return super().make_world(batch_dim, device, **kwargs)

    def reset_world_at(self, env_index=None):
        super().reset_world_at(env_index)
        x = self.each + self.shared + self.distance
        pos = torch.stack([x, torch.zeros_like(x)], -1)
        self.world.landmarks[0].set_pos(pos if env_index is None else pos[env_index], env_index)


class Levels(Dropout):
    """The goal's distance is the number of episodes that an env has begun."""

    def make_world(self, batch_dim, device, **kwargs):
        self.level = torch.zeros(batch_dim)
        return super().make_world(batch_dim, device, **kwargs)

    def reset_world_at(self, env_index=None):
        super().reset_world_at(env_index)
        rows = slice(None) if env_index is None else [env_index]
        self.level[rows] += 1
        pos = torch.stack([self.level, torch.zeros_like(self.level)], -1)
        self.world.landmarks[0].set_pos(pos if env_index is None else pos[env_index], env_index)


def made(scenario, execution):
    env = VmasEnv(scenario, num_envs=E, seed=0, n_agents=2, info=False, execution=execution)
    td = env.reset()
    return env, step_mdp(env.step(td.update(draw_actions(env, 1)[0])))


def distances(env):
    return env._env.world.landmarks[0].state.pos[:, 0]


def set_number(scenario):
    scenario.distance = 0.5
    return torch.full((E,), 0.5)


def set_number_as_tensor(scenario):
    scenario.distance = torch.tensor(0.5)
    return torch.full((E,), 0.5)


def replace_shared(scenario):
    scenario.shared = torch.tensor(0.4)
    return torch.full((E,), 0.5)


def fill_shared(scenario):
    scenario.shared.fill_(0.4)
    return torch.full((E,), 0.5)


def fill_each(scenario):
    scenario.each.copy_(torch.arange(E))
    return torch.arange(E) + 0.1


@pytest.mark.parametrize("execution", ["eager", "trace"])
@pytest.mark.parametrize(
    "change", [set_number, set_number_as_tensor, replace_shared, fill_shared, fill_each]
)
def test_changed_settings_apply_to_new_episodes(change, execution):
    env, td = made(Ring(), execution)
    td = reset_some(env, td, [1])  # unused starts with the old settings remain
    scenario = env._env.scenario
    expected, before = change(scenario), distances(env).clone()
    after = reset_some(env, td, [0, 4])
    torch.testing.assert_close(distances(env)[[0, 4]], expected[[0, 4]])
    running = [1, 2, 3, 5]
    assert torch.equal(distances(env)[running], before[running])
    assert torch.equal(after[SEEN][running], td[SEEN][running])
    # Further partial resets and a full reset give the same.
    reset_some(env, td, [1, 2])
    torch.testing.assert_close(distances(env)[[1, 2]], expected[[1, 2]])
    env.reset()
    torch.testing.assert_close(distances(env), expected)
    assert env._execution == execution and env._bank_refusal is None


@pytest.mark.parametrize("execution", ["eager", "trace"])
def test_curriculum_levels_rise_per_env_with_a_warning(execution):
    env, td = made(Levels(), execution)
    expected = distances(env).clone()
    whys = [r"Levels: envs are reset one by one, since .* before the reset: \S+"]
    if execution == "trace":
        whys = ["Levels: steps run eagerly, .* before the reset", *whys]
    with pytest.warns(UserWarning) as caught:
        for begun in ([1], [1, 4], [1, 2, 3]):
            td = reset_some(env, td, begun)
            expected[begun] += 1
            assert torch.equal(distances(env), expected)
    messages = [str(x.message) for x in caught if "Levels: " in str(x.message)]
    assert len(messages) == len(whys) and all(map(re.search, whys, messages))


def test_snapshot_keeps_unused_starts_and_their_settings():
    env, td = made(Ring(), "eager")
    td = reset_some(env, td, [1])
    env._env.scenario.shared.fill_(0.4)
    snapshot = env.snapshot()
    other, _ = made(Ring(), "eager")
    for one in (env, other):
        one.restore(snapshot)
        reset_some(one, td.clone(), [0, 4])
    torch.testing.assert_close(distances(env)[[0, 4]], torch.full((2,), 0.5))
    assert torch.equal(distances(env), distances(other))
    assert torch.equal(env.agents[0].state.pos, other.agents[0].state.pos)


def test_starts_are_not_redrawn_without_changed_settings(monkeypatch):
    from torchrl_marl.simulator.resets import ResetBank

    drawn, refill = [], ResetBank._refill
    monkeypatch.setattr(ResetBank, "_refill", lambda self: (drawn.append(1), refill(self)))
    env, td = made(Ring(), "eager")
    for begun in ([0], [1], [2], [3], [4], [5]):
        td = step_mdp(env.step(reset_some(env, td, begun).update(draw_actions(env, 1)[0])))
        env._env.scenario.shared = torch.tensor(0.0)  # another tensor, and the same number
    assert len(drawn) == 1


# --------------------------------------------------------------------------- custom environments


class Track(MarlEnv):
    """Starts at configured positions and ends after two steps."""

    def __init__(self, num_envs, level=False, **kwargs):
        super().__init__(num_envs, max_steps=2, seed=0, **kwargs)
        self.register_agent(AgentSpec("car", 1, Unbounded((1,)), Bounded(-1, 1, (1,))))
        self.begin, self.each = torch.tensor(1.0), torch.zeros(num_envs)
        self.level = torch.zeros(num_envs) if level else None
        self.table = torch.arange(float(E))  # shared by all envs, with as many rows as envs

    def _reset(self, tensordict):
        if self.level is not None:
            self.level = self.level + 1
            self.at = self.level.clone()
        else:
            self.at = self.begin + self.each + self.table.sum()
        return {"car": {"observation": self.at.view(-1, 1, 1)}}

    def _step(self, tensordict):
        self.at = self.at + 100
        zero = torch.zeros(self.num_envs, 1, 1)
        return {"car": {"observation": self.at.view(-1, 1, 1), "reward": zero}}


CAR = ("car", "observation")


@pytest.mark.parametrize("execution", ["eager", "trace"])
def test_custom_environments_start_with_current_settings(execution):
    env = Track(E)
    collector = RolloutCollector(env, frames_per_batch=4 * E, execution=execution)
    assert (collector.rollout()[CAR][:, 2] == 16).all()
    env.begin = torch.tensor(2.0)
    assert (collector.rollout()[CAR][:, 2] == 17).all()
    env.begin.fill_(3.0)
    env.each.copy_(torch.arange(E))
    expected = 18 + torch.arange(float(E))
    assert torch.equal(collector.rollout()[CAR][:, 2].flatten(), expected)
    env.table = torch.zeros(E)
    assert torch.equal(collector.rollout()[CAR][:, 2].flatten(), expected - 15)
    assert collector.execution == execution


def test_custom_levels_fall_back_to_eager_execution():
    env = Track(E, level=True)
    collector = RolloutCollector(env, frames_per_batch=4 * E, execution="trace")
    with pytest.warns(UserWarning, match="collected eagerly, .* before the reset: (at|level)"):
        batch = collector.rollout()
    assert (batch[CAR][:, 0] == 1).all() and (batch[CAR][:, 2] == 2).all()
    assert (collector.rollout()[CAR][:, 0] == 3).all()


# ----------------------------------------------------------------------- dependence of resets


class Game:
    """``begin`` sets ``x`` at the start of an episode."""

    def __init__(self, begin):
        self.begin, self.x, self.won = begin, torch.zeros(3), torch.zeros(3, dtype=torch.bool)
        self.rounds, self.setting, self.kept = 0, torch.ones(3), torch.zeros(3)

    def reset(self):
        torch.manual_seed(0)
        self.begin(self)
        return {}

    def step(self):
        self.x = self.x + 1
        self.kept = self.kept + 1
        self.won = self.won & (self.x > 9)


def fresh(game):
    game.x = torch.rand(3) * game.setting


def after_a_win(game):
    game.x = torch.where(game.won, 2.0, 1.0)


def part(game):
    game.x[:2] = 0


def counted(game):
    game.rounds += 1
    game.x = torch.zeros(3)


def raises(game):
    game.x = torch.zeros(3)[game.kept.long() % 2 - (game.kept == 0).long() * 9]


@pytest.mark.parametrize(
    ("begin", "found"),
    [(fresh, None), (after_a_win, "x"), (part, "x"), (counted, "rounds")],
)
def test_dependence_of_resets_on_state_is_found(begin, found):
    game = Game(begin)
    assert find_dependence(game, [], game.reset, game.step) == found


def test_reset_that_raises_in_another_state_depends_on_it():
    game = Game(raises)
    game.kept += 1
    assert "raises IndexError" in find_dependence(game, [], game.reset, game.step)


def test_settings_change_in_place_and_out_of_place():
    game = Game(fresh)
    settings = Settings(game, [], {("x",)})
    game.x = torch.ones(3)
    game.setting = torch.ones(3)
    assert not settings.changed()
    game.setting[1] = 2
    assert settings.changed()
    settings = Settings(game)
    game.rounds = 0
    assert not settings.changed()
    game.rounds = 0.0
    assert settings.changed()
    settings = Settings(game)
    del game.kept
    assert settings.changed()


def test_settings_check_runs_no_tensor_operations(monkeypatch):
    """Settings are read from the device only if a tensor was replaced."""
    env, td = made(Ring(), "eager")
    td = reset_some(env, td, [1])
    env._reset(asking_reset(env, td, [0]))
    with CountOperations() as operations:
        assert not env._bank._is_outdated()
    assert operations.count == 0
