"""Agents that respawn within an episode: flags, first steps, returns, checks."""

import pytest
from cycles import Cycles
from played import rollout_of_ones, step_values
from scripted import Script
from torchrl.envs import Transform, TransformedEnv, check_env_specs

from torchrl_marl import TeamSpec
from torchrl_marl.envs import AgentInitTracker, check_marl_env
from torchrl_marl.envs.toy import Arena
from torchrl_marl.errors import ConfigError, SpecError
from torchrl_marl.training import evaluate


def row(td, leaf, agent=0):
    return td["cat", leaf][0].squeeze(-1)[:, agent].int().tolist()


def test_flags_of_a_respawned_agent():
    env = TransformedEnv(Cycles(2, max_steps=12), AgentInitTracker())
    check_env_specs(env)
    td = env.rollout(12)
    assert row(td, "mask") == [1, 1, 1, 0, 0, 1, 1, 1, 0, 0, 1, 1]
    assert row(td, "done") == [0, 0, 0, 1, 1, 0, 0, 0, 1, 1, 0, 0]
    assert row(td, "is_init") == [1, 0, 0, 0, 0, 1, 0, 0, 0, 0, 1, 0]
    assert row(td["next"], "terminated") == [0, 0, 1, 1, 0, 0, 0, 1, 1, 0, 0, 0]
    assert row(td["next"], "truncated") == [0] * 11 + [1]
    assert td["next", "done"].sum().item() == 2  # only by the time limit
    assert row(td, "mask", 1) == [1, 1, 1, 1, 1, 0, 0, 1, 1, 1, 1, 1]


@pytest.mark.parametrize("poison", [0.0, float("nan")])
def test_returns_are_sums_over_all_lives(poison):
    """Agent 0 earns 1 + 2 + 3 twice, agent 1 1 + ... + 5; the team the mean over living agents."""
    env = Cycles(3, max_steps=10, poison=poison)
    reward = env.rollout(10)["next", "cat", "reward"].squeeze(-1)
    assert reward[0].T.tolist() == [
        [1, 2, 3, 0, 0, 1, 2, 3, 0, 0],
        [1, 2, 3, 4, 5, 0, 0, 1, 2, 3],
    ]
    team = [1, 2, 3, 4, 5, 1, 2, (3 + 1) / 2, 2, 3]
    found = evaluate(env, None, TeamSpec.from_env(env), episodes=3)
    assert found["return_mean"] == sum(team) and found["length_mean"] == 10


def test_episode_continues_while_no_agent_is_alive():
    env = Cycles(1, lives=(2, 2), gap=3, max_steps=8)
    td = env.rollout(20)
    assert row(td, "mask") == [1, 1, 0, 0, 0, 1, 1, 0] and td.shape[1] == 8
    assert td["next", "truncated"][0, -1].item() and not td["next", "terminated"].any()


def test_no_respawn_in_the_last_step():
    """The episode ends in the step after which agent 0 would act: it stays terminated."""
    td = Cycles(1, lives=(3, 9), gap=2, max_steps=5).rollout(5)["next"]
    assert row(td, "terminated")[-1] and not row(td, "mask")[-1]
    assert row(td, "truncated", 1)[-1] and row(td, "mask", 1)[-1]


def test_mask_does_not_revive_agents_without_respawns():
    class Dead(Cycles):
        respawns = False

    td = Dead(1, lives=(3, 9), max_steps=8).rollout(8)
    assert row(td, "mask") == [1, 1, 1, 0, 0, 0, 0, 0]


def test_respawns_without_a_mask_raise():
    class Maskless(Cycles):
        def _observe(self, **leaves):
            entries = super()._observe(**leaves)
            del entries["cat"]["mask"]
            return entries

    with pytest.raises(SpecError, match=r"respawns=True, but _reset returned no mask; return"):
        Maskless(1).reset()


@pytest.mark.parametrize("settings", [{}, {"max_steps": 9}, {"n_groups": 2, "kinds": 2}])
def test_arena_with_respawns_passes_check_marl_env(settings):
    env = TransformedEnv(Arena(5, lives=1, respawn=2, seed=0, **settings), AgentInitTracker())
    assert "keeps the rules" in check_marl_env(env)


def test_arena_agents_are_absent_for_the_given_steps():
    env = Arena(64, n_agents=2, lives=1, years=9, respawn=3, seed=0)
    td = env.rollout(18)["agents", "mask"][:, :9, 0].int()
    gaps = {tuple(own) for e in td.tolist() for own in [own_gap(e)] if own}
    assert gaps <= {(3,), (3, 3)} and (3,) in gaps
    assert env.rollout(18)["next", "done"].sum(1).eq(1).all()


def own_gap(acts):
    """The numbers of steps between lives."""
    text = "".join(map(str, acts)).strip("0")
    return tuple(len(part) for part in text.split("1") if part)


def test_random_return_of_arena_with_respawns():
    env = Arena(20_000, n_agents=2, lives=2, years=6, respawn=2, seed=0)
    team = env.rollout(12)["next", "agents", "reward"].amax(2).sum(1)
    assert team.mean().item() == pytest.approx(env.random_return, abs=0.02)
    assert env.random_return > Arena(2, n_agents=2, lives=2, years=6).random_return
    assert env.optimal_return == 9.0


# ------------------------------------------------------------------------------------ checks


class Change(Transform):
    """Modifies the output of a step."""

    def __init__(self, change):
        super().__init__()
        self.change = change

    def _step(self, tensordict, next_tensordict):
        self.change(tensordict, next_tensordict)
        return next_tensordict


def half_back(td, then):
    back = td["cat", "done"] & ~then["cat", "done"]
    then["cat", "done"] = then["cat", "done"] | back


def acts_when_dead(td, then):
    then["cat", "mask"] = then["cat", "mask"] | (td["cat", "done"] & then["cat", "done"])[..., 0]


def never_begins(td, then):
    then["cat", "is_init"] = then["cat", "is_init"] & False


def begins_on(td, then):
    then["cat", "is_init"] = ~then["cat", "done"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (half_back, "'terminated'.*False again.*comes back with all its flags False"),
        (acts_when_dead, "'mask'.*True after the agent terminated"),
        (never_begins, "'is_init'.*False for an agent that comes back.*AgentInitTracker"),
        (begins_on, "'is_init'.*True for an agent that has acted in this life"),
    ],
)
def test_check_refuses_inconsistent_flags(change, message):
    env = TransformedEnv(Cycles(2, max_steps=12, seed=0), AgentInitTracker())
    assert "keeps the rules" in check_marl_env(env)
    with pytest.raises(SpecError, match=f"(?s){message}"):
        check_marl_env(TransformedEnv(env, Change(change)))


def test_check_refuses_undeclared_respawns():
    class Undeclared(Cycles):
        respawns = property(lambda self: self._is_completing)  # only within its own steps

    with pytest.raises(SpecError, match=r"(?s)False again.*respawns = True"):
        check_marl_env(Undeclared(2, max_steps=12, seed=0))


# -------------------------------------------------------------------------------- PettingZoo


def test_returning_agent_of_pettingzoo_respawns():
    steps = [
        {"earns": {"bob_0": 1, "bob_1": 2}},
        {"agents": "bob_0", "dies": "bob_1", "earns": {"bob_1": 3}},
        {"earns": {"bob_0": 1, "bob_1": 50}},
        {"agents": "bob_0 bob_1", "earns": {"bob_1": 60}},
        {"earns": {"bob_1": 4}},
        {"agents": "", "dies": "bob_0 bob_1", "earns": {"bob_1": 5}},
    ]
    world = Script("bob_0 bob_1", steps)
    td = rollout_of_ones(world, 6, respawns=True)
    then = td["next"]
    assert [sorted(step) for step in world.got] == [
        *[["bob_0", "bob_1"]] * 2,
        *[["bob_0"]] * 2,
        *[["bob_0", "bob_1"]] * 2,
    ]
    assert [own for _, own in step_values(td, "bob", "mask")] == [True] * 2 + [False] * 2 + [
        True
    ] * 2
    ends = [own for _, own in step_values(then, "bob", "terminated")]
    assert ends == [False, True, True, False, False, True]
    assert [own for _, own in step_values(then, "bob", "reward")] == [2, 3, 0, 0, 4, 5]
    assert then["terminated"][0, :, 0].tolist() == [False] * 5 + [True]
    assert then["bob", "observation"][0, 3:5, 1].tolist() == [[1, 4], [1, 5]]


def test_pettingzoo_episode_ends_when_no_agent_is_left():
    world = Script("bob_0 bob_1", [{}, {"agents": "", "dies": "bob_0 bob_1"}])
    assert (
        rollout_of_ones(world, 4, respawns=True)["next", "done"][0, :, 0].tolist()
        == [False, True] * 2
    )


def test_non_boolean_respawns_raise():
    with pytest.raises(ConfigError, match="respawns is 'no', expected True or False"):
        rollout_of_ones(Script("bob_0", [{}]), 1, respawns="no")


def test_respawns_of_turn_based_environments_are_refused():
    pytest.importorskip("pettingzoo.classic")
    from torchrl_marl.envs import PettingZooEnv

    with pytest.raises(ConfigError, match="turn-based.*respawns is True; leave it out"):
        PettingZooEnv("classic/tictactoe_v3", respawns=True)
