"""TorchRL's own environments through our adapters: checked, collected and trained on."""

import warnings

import pytest
import torch
import torchrl.envs
from tensordict import TensorDict
from torchrl.data import Categorical, Composite, Unbounded
from torchrl.envs import (
    EnvBase,
    MarlGroupMapType,
    ParallelEnv,
    RewardSum,
    SerialEnv,
    TransformedEnv,
)
from torchrl_environments import Crew, Engine, Smac, StarCraft, Unity

import torchrl_marl
from torchrl_marl.collectors import RolloutCollector
from torchrl_marl.envs import VmasEnv, check_marl_env, make_env
from torchrl_marl.envs.torchrl.env import adapt
from torchrl_marl.envs.torchrl.openspiel import OpenSpielGames
from torchrl_marl.envs.toy import Arena
from torchrl_marl.errors import ConfigError, SpecError
from torchrl_marl.specs.groups import is_lazy


def spiel(game, **kwargs):
    pytest.importorskip("pyspiel")
    return make_env(torchrl.envs.OpenSpielEnv(game, **kwargs), seed=0)


def foraging():
    pytest.importorskip("lbforaging")
    from torchrl.envs.libs.lbforaging import LBForagingEnv

    return make_env(LBForagingEnv("Foraging-5x5-2p-1f-v3", max_episode_steps=6), seed=0)


def stock_vmas(**kwargs):
    pytest.importorskip("vmas")
    return torchrl.envs.VmasEnv("simple_tag", num_envs=3, seed=0, max_steps=3, **kwargs)


class Lonely(EnvBase):
    """Unbatched; one root flag and one shared reward; dies in step 2 of every other game."""

    max_steps = 3

    def __init__(self):
        super().__init__(batch_size=())
        n = (2,)
        self.observation_spec = Composite(
            pair=Composite(observation=Unbounded((*n, 1)), shape=n), state=Unbounded((1,))
        )
        self.action_spec = Composite(pair=Composite(action=Categorical(3, shape=n), shape=n))
        self.reward_spec = Unbounded((1,))
        self.done_spec = Categorical(2, shape=(1,), dtype=torch.bool)
        self.steps = self.games = 0

    def _set_seed(self, seed):
        self.games = 0

    def _reset(self, tensordict=None, **kwargs):
        self.steps, self.games = 0, self.games + 1
        return self.give()

    def _step(self, tensordict):
        self.steps += 1
        dies = self.games % 2 == 0 and self.steps == 2
        over = torch.tensor([dies or self.steps == 3])
        out = self.give().update({"done": over, "terminated": over.clone()})
        return out.set("reward", torch.tensor([float(self.steps)]))

    def give(self):
        seen = torch.full((2, 1), float(self.steps))
        return TensorDict({"pair": {"observation": seen}, "state": seen[0]}, [])


class Dicer(Lonely):
    """Observes random numbers, and seeds torch globally as many environments do."""

    def _set_seed(self, seed):
        torch.manual_seed(seed)

    def give(self):
        return super().give().set(("pair", "observation"), torch.rand(2, 1))


# --------------------------------------------------------------------------------- compliant


def test_compliant_environments_are_not_wrapped():
    arena = Arena(3, seed=0)
    for env in (arena, TransformedEnv(arena, RewardSum()), SerialEnv(2, lambda: Camp())):
        assert adapt(env) is env
    pytest.importorskip("vmas")
    env = VmasEnv("balance", num_envs=2, seed=0)
    assert make_env(env) is env


class Camp(Lonely):
    """With all flags at the root, and one reward per agent."""

    def __init__(self):
        super().__init__()
        flag = Categorical(2, shape=(1,), dtype=torch.bool)
        keys = ("done", "terminated", "truncated")
        self.done_spec = Composite({key: flag.clone() for key in keys})
        self.reward_spec = Composite(pair=Composite(reward=Unbounded((2, 1)), shape=(2,)))


# ------------------------------------------------------------------- incomplete flags and rewards


def test_environment_with_a_single_root_flag():
    env = make_env(Lonely(), seed=0)
    assert env.batch_size == (1,) and env.max_steps == 3
    td = env.rollout(6, break_when_any_done=False)[0]
    # The first game reaches the limit, the second one ends by itself.
    assert td["next", "truncated"].flatten().tolist() == [False, False, True, False, False, False]
    assert td["next", "terminated"].flatten().tolist() == [False, False, False, False, True, False]
    assert td["next", "pair", "reward"][:3, :, 0].tolist() == [[1.0] * 2, [2.0] * 2, [3.0] * 2]
    assert td["next", "pair", "mask"].all(-1).tolist() == [True, True, True, True, False, True]
    assert td["next", "state"].flatten().tolist() == [1, 2, 3, 1, 2, 1]
    check_marl_env(env, n_steps=12)


@pytest.mark.parametrize("kind", [SerialEnv, ParallelEnv])
def test_batch_of_environments_with_a_single_root_flag(kind):
    """The first game of every env reaches its limit, the second one ends by itself."""
    env = make_env(kind(2, Lonely), seed=0)
    td = env.rollout(6, break_when_any_done=False)
    env.close()
    limit = [False, False, kind is SerialEnv, False, False, False]
    assert td["next", "done"][..., 0].tolist() == 2 * [[False, False, True, False, True, False]]
    assert td["next", "truncated"][..., 0].tolist() == 2 * [limit]
    assert td["pair", "observation"][..., 0, 0].tolist() == 2 * [[0, 1, 2, 0, 1, 0]]


class OnlyDone(Lonely):
    """Writes done, but not terminated, at the root or of its agents."""

    max_steps = None

    def __init__(self, of_agents=False):
        super().__init__()
        self.of_agents = of_agents
        if of_agents:
            flag = Categorical(2, shape=(2, 1), dtype=torch.bool)
            self.done_spec = Composite(pair=Composite(done=flag, shape=(2,)))

    def _step(self, tensordict):
        out = super()._step(tensordict).exclude("terminated")
        if self.of_agents:
            out.set(("pair", "done"), out.pop("done").expand(2, 1).clone())
        return out


@pytest.mark.parametrize("of_agents", [False, True])
def test_batch_of_environments_that_write_only_done(of_agents):
    """TorchRL leaves terminated False there; the episodes end and begin again all the same."""
    env = make_env(SerialEnv(2, lambda: OnlyDone(of_agents)), seed=0)
    td = env.rollout(6, break_when_any_done=False)
    ends = 2 * [[False, False, True, False, True, False]]
    assert td["next", "terminated"][..., 0].tolist() == ends
    assert td["pair", "observation"][..., 0, 0].tolist() == 2 * [[0, 1, 2, 0, 1, 0]]


@pytest.mark.parametrize(("leaf", "name"), [("observation", "view"), ("action", "choice")])
def test_group_with_another_name_of_a_key_is_refused(leaf, name):
    env = Lonely()
    spec = (env.full_observation_spec if leaf == "observation" else env.full_action_spec).clone()
    spec["pair", name] = spec["pair", leaf].clone()
    del spec["pair", leaf]
    setattr(env, f"{leaf}_spec", spec)
    with pytest.raises(SpecError, match=f"'pair' of Lonely has no '{leaf}', found \\['{name}'\\]"):
        make_env(env)


def has_rewards(tensordict):
    return any("reward" in key for key in tensordict.exclude("next").keys(True, True))


def test_step_input_has_no_rewards_of_the_previous_step():
    env = make_env(Lonely())
    step, carry = env.step_and_maybe_reset(env.rand_action(env.reset()))
    assert step["next", "pair", "reward"].flatten().tolist() == [1.0, 1.0]
    assert not has_rewards(carry)
    assert not is_lazy(env.rollout(7, break_when_any_done=False)["pair"])  # equal in all steps


def test_openspiel_step_input_has_no_previous_rewards():
    env = spiel("tic_tac_toe")
    assert not has_rewards(env.step_and_maybe_reset(env.rand_action(env.reset()))[1])


@pytest.mark.parametrize("late", [False, True])
def test_environment_with_done_flags_of_agents_only(late):
    crew = Crew(late)
    env = make_env(crew, seed=0)
    with torch.no_grad():
        td = env.rollout(6, always_one(env), break_when_any_done=False)
    end = "truncated" if late else "terminated"
    assert td["next", end][0].flatten().tolist() == [False, False, True] * 2
    assert td["next", "done"][0].flatten().tolist() == [False, False, True] * 2
    assert td["next", "crew", end][0, :3, :, 0].tolist() == [[0, 0], [1, 0], [1, 1]]
    # At the time limit the living agent keeps its mask; an ended one stays masked.
    expected = [[True, True], [False, True], [False, late]]
    assert td["next", "crew", "mask"][0, :3].tolist() == expected
    # The action of the dead agent in the third step is not sent.
    assert crew.sent[2][0].flatten().tolist() == [0.0, 1.0]
    check_marl_env(env, n_steps=9)


def always_one(env):
    """A policy that always does 1."""
    return lambda td: td.update(env.full_action_spec.zero().apply(lambda x: x + 1))


def test_partial_reset():
    env = make_env(Crew(), seed=0)
    td = env.reset()
    td = env.step(env.rand_action(td))["next"]
    asked = torch.tensor([[False], [True], [False]])
    td = env.reset(td.exclude("reward").set("_reset", asked))
    assert td["crew", "observation"][:, 0, 0].tolist() == [1.0, 0.0, 1.0]
    after = env.step(env.rand_action(td))["next"]
    assert after["crew", "terminated"][:, 0, 0].tolist() == [True, False, True]


def test_unsupported_batch_sizes_raise():
    with pytest.raises(ConfigError, match=r"batch size \[2, 3\], expected \[E\]"):
        adapt(Crew(batch_size=(2, 3)))
    with pytest.raises(ConfigError, match="num_envs is 4, but the environment given has 3"):
        make_env(Crew(), num_envs=4)


# ------------------------------------------------------------------------------------ real ones


def forget_places(world):
    """Makes resets independent of the positions of players in the last episode."""
    reset = world.reset

    def begin(*args, **kwargs):
        for player in world.players:
            player.position = None
        return reset(*args, **kwargs)

    world.reset = begin


def test_foraging():
    env = foraging()
    assert env.batch_size == (1,)
    forget_places(env._inner._env.unwrapped)
    report = check_marl_env(env, n_steps=14)
    assert "LBForagingEnv keeps the rules: 2 agents in 1 group, 14 steps of 1 envs" in report
    td = env.rollout(14, break_when_any_done=False)
    assert td["next", "truncated"].any()  # six steps, with food left


@pytest.mark.environments
@pytest.mark.parametrize("group_map", [None, MarlGroupMapType.ALL_IN_ONE_GROUP])
def test_stock_vmas(group_map):
    raw = stock_vmas(group_map=group_map)
    assert raw.rollout(3)["next", "terminated"][:, -1].all()  # TorchRL terminates at the time limit
    env = make_env(stock_vmas(group_map=group_map), seed=0)
    td = env.rollout(7, break_when_any_done=False)
    assert td["next", "truncated"][0].flatten().tolist() == [False, False, True] * 2 + [False]
    assert not td["next", "terminated"].any()
    check_marl_env(env, n_steps=4)


def test_env_and_policy_with_the_same_seed_draw_different_numbers():
    env = make_env(Dicer(), seed=3)
    drawn = env.reset()["pair", "observation"].flatten()
    torch.manual_seed(3)
    assert not torch.isin(drawn, torch.rand(100)).any()
    env.set_seed(3)
    assert torch.equal(env.reset()["pair", "observation"].flatten(), drawn)


def test_vmas_goal_in_the_last_step_terminates():
    raw = stock_vmas()
    raw._env.scenario.done = lambda: torch.tensor([True, False, False])
    after = adapt(raw).rollout(1)["next"]
    assert after["terminated"].flatten().tolist() == [True, False, False]
    raw._env.max_steps = 1
    after = adapt(raw).rollout(1)["next"]
    assert after["terminated"].flatten().tolist() == [True, False, False]
    assert after["truncated"].flatten().tolist() == [False, True, True]


GAMES = {
    "tic_tac_toe": {"categorical_actions": True},
    "connect_four": {},
    "leduc_poker": {"categorical_actions": True},  # chance, and what one player sees alone
    "hanabi": {"categorical_actions": True},  # a reward in every step
    "goofspiel": {"categorical_actions": True},  # both at once
    "matching_pennies_3p": {},
}


@pytest.mark.parametrize("game", GAMES)
def test_openspiel_passes_check_marl_env(game):
    env = spiel(game, **GAMES[game])
    assert isinstance(env, OpenSpielGames)
    check_marl_env(env, n_steps=45 if game in ("connect_four", "hanabi") else 15)


def test_openspiel_game_without_observations_is_refused():
    with pytest.raises(ConfigError, match="coordinated_mp gives its players no tensor to observe"):
        spiel("coordinated_mp")


def test_turns_and_rewards_of_tic_tac_toe():
    env = spiel("tic_tac_toe", categorical_actions=True)
    td, masks = env.reset(), []
    for cell in (0, 3, 1, 4, 2):  # crosses win in the upper row
        masks.append(td["agents", "mask"][0].tolist())
        assert td["agents", "action_mask"][0, len(masks) % 2 - 1].sum() == 10 - len(masks)
        action = torch.full((1, 2), cell)
        td, carry = env.step_and_maybe_reset(td.set(("agents", "action"), action))
        last, td = td["next"], carry
    assert masks == [[True, False], [False, True]] * 2 + [[True, False]]
    # The loser's -1 lies in a step in which it waits.
    assert last["agents", "reward"].flatten().tolist() == [1.0, -1.0]
    assert last["terminated"].all() and not last["agents", "mask"].any()
    assert td["agents", "mask"].tolist() == [[True, False]]


@pytest.mark.parametrize("game", ["hanabi", "goofspiel", "leduc_poker"])
def test_rewards_sum_to_the_returns(game):
    env = spiel(game, categorical_actions=True)
    td, total, games = env.reset(), torch.zeros(1, 2, 1), 0
    while games < 5:
        state = env._state
        step, td = env.step_and_maybe_reset(env.rand_action(td))
        total = total + step["next", "agents", "reward"]
        if step["next", "done"].all():
            assert total.flatten().tolist() == state.returns()
            total, games = torch.zeros(1, 2, 1), games + 1


def test_illegal_move_raises():
    env = spiel("tic_tac_toe", categorical_actions=True)
    td = env.reset()
    for expected in (None, "the action of player 1 is 0, expected one of"):
        td["agents", "action"] = torch.zeros(1, 2, dtype=torch.int64)
        if expected is None:
            td = env.step(td)["next"]
            continue
        with pytest.raises(SpecError, match=expected):
            env.step(td)


def test_simultaneous_games_fail_in_torchrl():
    """The reason for the adapter, which can go once this works in TorchRL."""
    pyspiel = pytest.importorskip("pyspiel")
    raw = torchrl.envs.OpenSpielEnv("goofspiel", categorical_actions=True)
    with pytest.raises((pyspiel.SpielError, TypeError)):
        raw.rollout(20)


def test_transformed_wrapper_is_refused():
    pytest.importorskip("pyspiel")
    env = TransformedEnv(torchrl.envs.OpenSpielEnv("tic_tac_toe"), RewardSum())
    with pytest.raises(ConfigError, match="adapted before it is transformed"):
        adapt(env)


def test_pettingzoo_wrapper_is_unwrapped():
    pytest.importorskip("pettingzoo")
    speaker_listener = pytest.importorskip("mpe2.simple_speaker_listener_v4")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of TorchRL, for any PettingZoo but 1.24.3
        raw = torchrl.envs.PettingZooWrapper(speaker_listener.parallel_env(max_cycles=4))
    env = make_env(raw, seed=0)
    assert type(env).__name__ == "PettingZooEnv"
    assert {name: list(ids) for name, ids in env.group_map.items()} == raw.group_map
    check_marl_env(env, n_steps=6)


# -------------------------------------------------------------------------------- collect, train


@pytest.mark.parametrize("make", [foraging, lambda: spiel("goofspiel", categorical_actions=True)])
def test_collector_continues_episodes_across_batches(make):
    env = make()
    collector = RolloutCollector(env, frames_per_batch=9, total_frames=27)
    batches = list(collector)
    assert [batch.shape for batch in batches] == [(1, 9)] * 3
    ids = torch.cat([batch["collector", "traj_ids"] for batch in batches], 1)[0]
    done = torch.cat([batch["next", "done"] for batch in batches], 1)[0, :, 0]
    assert ids[0] == 0 and torch.equal(ids.diff(), done[:-1].long())


TRAINED = {
    "foraging": (foraging, "team"),
    "tic_tac_toe": (lambda: spiel("tic_tac_toe", categorical_actions=True), "agent"),
    "goofspiel": (lambda: spiel("goofspiel"), "agent"),
    "smac": (lambda: adapt(Smac(env=StarCraft(limit=4))), "team"),
    "unity": (lambda: adapt(Unity(env=Engine(False), categorical_actions=True)), "agent"),
    "crew": (lambda: adapt(Crew()), "team"),
    "vmas": (lambda: adapt(stock_vmas(group_map=MarlGroupMapType.ALL_IN_ONE_GROUP)), "team"),
}


@pytest.mark.environments
@pytest.mark.parametrize("name", TRAINED)
@pytest.mark.filterwarnings("ignore:.*cannot be seeded")
@pytest.mark.filterwarnings("ignore:.*as in a zero-sum game")
def test_recipe_trains_on_torchrl_environments(name, tmp_path):
    make, bootstrap = TRAINED[name]
    run = torchrl_marl.train(
        "toy_arena_mappo",
        env=make(),
        total_frames=96,
        frames_per_batch=48,
        folder=str(tmp_path / "run"),
        learner={"bootstrap": bootstrap, "minibatch_size": 24, "num_epochs": 1},
        evaluation={"episodes": 2, "every_frames": None},
    )
    assert run.summary["frames"] == 96
