"""Domain randomization of custom environments: parameters, noise and delays."""

import numpy as np
import pytest
import torch
from carts import Carts, rollout_with_forces
from contract import asking_reset, assert_same, base_of
from torchrl.data import Bounded, Unbounded
from torchrl.envs import Compose, TransformedEnv, check_env_specs
from torchrl.envs.utils import step_mdp

from torchrl_marl.collectors import RolloutCollector
from torchrl_marl.envs import MarlEnv, PadAgents, make_env
from torchrl_marl.envs.randomization import (
    ActionDelay,
    ActionNoise,
    ObservationDelay,
    ObservationNoise,
    randomized,
)
from torchrl_marl.envs.ranges import EVERYWHERE, ValueRange
from torchrl_marl.envs.toy import Arena
from torchrl_marl.errors import ConfigError
from torchrl_marl.specs import AgentSpec

EVERYTHING = {
    "mass": [0.5, 2.0, "log"],
    "friction": [0.1, 0.9],
    "observation_delay": [0, 2],
    "observation_noise": [0.01, 0.1],
    "action_delay": [0, 3],
    "action_noise": 0.2,
}


def seen(td, agent=0, feature=0):
    """``[E, T]``"""
    return td["cart", "observation"][:, :, agent, feature].int().tolist()


# ------------------------------------------------------------------------- delays, by hand


def test_observation_delay_of_two_steps_in_each_episode():
    env = TransformedEnv(Carts(2, lengths=[4, 6]), ObservationDelay(2))
    td = rollout_with_forces(env, 8)
    assert seen(td) == [[0, 0, 0, 1, 0, 0, 0, 1], [0, 0, 0, 1, 2, 3, 0, 0]]
    assert seen(td["next"]) == [[0, 0, 1, 2, 0, 0, 1, 2], [0, 0, 1, 2, 3, 4, 0, 0]]
    # The first episode's last observation is of step 2; its action 2 was the second.
    assert td["next", "cart", "observation"][0, 3, 0, 1] == 2


def test_action_delay_of_two_steps_in_each_episode():
    env = TransformedEnv(Carts(2, lengths=[4, 6]), ActionDelay(2))
    td = rollout_with_forces(env, 8)
    executed = seen(td["next"], feature=1)
    assert executed == [[1, 1, 1, 2, 5, 5, 5, 6], [1, 1, 1, 2, 3, 4, 7, 7]]
    assert td["cart", "action"][:, :, 0, 0].tolist() == [[1, 2, 3, 4, 5, 6, 7, 8]] * 2


def test_partial_reset_clears_only_the_histories_of_its_envs():
    env = TransformedEnv(Carts(2), Compose(ActionDelay(1), ObservationDelay(1)))
    td = step_mdp(rollout_with_forces(env, 4)[:, -1])
    td = env.reset(asking_reset(env, td, [1]))
    td["cart", "action"] = torch.full((2, 2, 1), 5.0)
    after = env.step(td)["next", "cart"]
    assert td["cart", "observation"][:, 0, 0].tolist() == [3, 0]
    assert after["observation"][:, 0, 0].tolist() == [4, 0]
    assert base_of(env).executed[:, 0, 0].tolist() == [4, 5]


def test_each_episode_and_agent_draws_its_delay():
    env = TransformedEnv(Carts(50, lengths=[6], seed=0), ObservationDelay([1, 3]))
    td = rollout_with_forces(env, 12)
    delay = td["cart", "observation_delay"]
    assert delay[:, :6].unique().tolist() == [1, 2, 3]
    assert (delay[:, :6] == delay[:, :1]).all() and (delay[:, 6:] == delay[:, 6:7]).all()
    assert (delay[:, 0] != delay[:, 6]).any() and (delay[:, 0, 0] != delay[:, 0, 1]).any()
    step = (torch.arange(12) % 6).view(1, 12, 1)
    assert torch.equal(td["cart", "observation"][..., 0], (step - delay).clamp(min=0).float())


def test_delay_counts_only_steps_in_which_the_agent_acts():
    """The second cart spawns in step 2 and waits in step 4; no acting agent observes NaN."""
    acts = [[1, 0], [1, 0], [1, 1], [1, 1], [1, 0], [1, 1], [1, 1], [1, 1]]
    td = rollout_with_forces(TransformedEnv(Carts(1, acts=acts), ObservationDelay(2)), 8)
    acting = td["cart", "mask"][0, :, 1]
    assert acting.int().tolist() == [row[1] for row in acts]
    assert td["cart", "observation"][0, :, 0, 0].tolist() == [0, 0, 0, 1, 2, 3, 4, 5]
    assert td["cart", "observation"][0, acting, 1, 0].tolist() == [2, 2, 2, 3, 5]
    assert not td["cart", "past_observation_0"].isnan().any()
    td = rollout_with_forces(TransformedEnv(Carts(1, acts=acts), ActionDelay(1)), 8)
    executed = td["next", "cart", "observation"][0, :, 1, 1]
    # Its actions in steps 2, 5 and 6; it waits after step 3, and sees NaN.
    assert executed[[2, 5, 6]].tolist() == [3, 4, 6]


class Ghost(MarlEnv):
    """Agents act for three steps, end in the last of them, and respawn a step later."""

    respawns = True

    def __init__(self, num_envs, **kwargs):
        super().__init__(num_envs, **kwargs)
        self.register_agent(AgentSpec("cart", 2, Unbounded((2,)), Bounded(-9, 9, (1,))))

    def _reset(self, tensordict):
        self.time = torch.zeros(self.num_envs, 2)
        return self.told(self.time)

    def _step(self, tensordict):
        self.time = self.time + 1
        ends = (self.time % 4 == 3).unsqueeze(-1)
        told = self.told(tensordict["cart", "action"].squeeze(-1))
        told["cart"] |= {"reward": torch.zeros(self.num_envs, 2, 1), "terminated": ends}
        return told

    def told(self, executed):
        """The step and the last action; whether it acts next."""
        seen = {"observation": torch.stack([self.time, executed], -1), "mask": self.time % 4 < 3}
        return {"cart": seen}


def test_respawned_agent_starts_with_new_histories():
    """Neither an observation nor an action of an earlier life reaches the next one."""
    td = rollout_with_forces(TransformedEnv(Ghost(1, max_steps=8), ObservationDelay(1)), 8)
    acting = td["cart", "mask"][0, :, 0]
    assert acting.int().tolist() == [1, 1, 1, 0] * 2
    assert td["cart", "observation"][0, acting, 0, 0].tolist() == [0, 0, 1, 4, 4, 5]
    td = rollout_with_forces(TransformedEnv(Ghost(1, max_steps=8), ActionDelay(1)), 8)
    assert td["next", "cart", "observation"][0, acting, 0, 1].tolist() == [1, 1, 2, 5, 5, 6]


# --------------------------------------------------------------------- reductions and noise


@pytest.mark.parametrize("kind", [ActionDelay, ActionNoise, ObservationDelay, ObservationNoise])
def test_zero_randomization_has_no_effect(kind):
    plain, env = (
        Carts(4, lengths=[3], seed=1),
        TransformedEnv(Carts(4, lengths=[3], seed=1), kind(0)),
    )
    env.base_env.randomize({"mass": [1, 1], "friction": 0.5})
    expected, found = rollout_with_forces(plain, 8), rollout_with_forces(env, 8)
    assert_same(expected, found.select(*expected.keys(True, True)))
    states = [base_of(x).random_state.state_dict()["torch"] for x in (plain, env)]
    assert torch.equal(*states)
    assert randomized(plain, {kind.leaf: [0, 0], "mass": 1}) is plain


def test_observation_noise_has_the_drawn_deviation():
    env = TransformedEnv(Carts(40, seed=0), ObservationNoise([0.1, 1.0, "log"]))
    td = rollout_with_forces(env, 300, [0.0] * 300)
    std = td["cart", "observation_noise"]
    assert (std == std[:, :1]).all() and 0.1 <= std.min() < 0.15 and 0.8 < std.max() <= 1.0
    speeds = td["cart", "observation"][..., 2]
    assert (speeds.std(1) / std[:, 0] - 1).abs().max() < 0.2
    assert (speeds.mean(1) / std[:, 0]).abs().max() < 0.25


def test_action_noise_is_clipped_and_not_recorded():
    env = TransformedEnv(Carts(500, seed=0), ActionNoise(2.0))
    td = rollout_with_forces(env, 1, [8.5])
    executed = td["next", "cart", "observation"][..., 1]
    assert (td["cart", "action"] == 8.5).all()
    assert executed.max() == 9 and (executed == 9).float().mean() == pytest.approx(0.40, abs=0.05)
    assert executed.min() > -9


def test_central_state_has_no_noise_and_no_delay():
    arena = Arena(3, n_agents=2, continuous_actions=True, seed=0)
    env = TransformedEnv(arena, Compose(ObservationNoise(0.5), ObservationDelay(1)))
    td = env.rollout(4)
    state = td["state"].view(3, -1, 2, 3)
    assert ((td["agents", "observation"] - state).abs() > 0).all(-1).all()
    assert ((state[..., 0] >= -1) & (state[..., 0] <= 1)).all()


# ------------------------------------------------------------------------------- parameters


def test_parameters_change_the_simulation():
    env = Carts(2, seed=0)
    env.randomize({"mass": 2.0, "friction": 0.0})
    assert rollout_with_forces(env, 2, [3.0, 4.0])["next", "cart", "observation"][
        0, :, 0, 2
    ].tolist() == (pytest.approx([0.15, 0.35]))
    env.randomize({})
    assert env.domain_parameters["friction"].tolist() == [0.5, 0.5]
    env.randomize({"mass": [0.5, 2.0, "log"]})
    td = rollout_with_forces(env, 1, [3.0])
    mass = env.domain_parameters["mass"]
    assert torch.allclose(td["next", "cart", "observation"][:, 0, :, 2], 0.3 / mass)


@pytest.mark.parametrize(("log", "middle"), [(False, 5.05), (True, 1.0)])
def test_draws_fill_the_range(log, middle):
    torch.manual_seed(0)
    x = ValueRange(0.1, 10.0, log).draw((100_000,))
    assert 0.1 <= x.min() < 0.11 and 9.9 < x.max() <= 10.0
    assert x.median() == pytest.approx(middle, rel=0.03)


def test_partial_reset_draws_only_for_its_envs():
    env = Carts(4, seed=0)
    env.randomize(dict.fromkeys(("mass", "friction"), [0.5, 1.5]))
    td = env.reset()
    before = env.domain_parameters
    env.reset(asking_reset(env, td, [1, 2]))
    for name, x in env.domain_parameters.items():
        assert (x != before[name]).view(4, -1).all(1).tolist() == [False, True, True, False]


def test_snapshot_reproduces_draws_and_delays():
    env = randomized(Carts(5, lengths=[4], seed=0), EVERYTHING)
    td = step_mdp(rollout_with_forces(env, 6)[:, -1])
    saved = base_of(env).snapshot().to_dict()
    runs = []
    for _ in range(2):
        base_of(env).restore(type(base_of(env).snapshot())(saved))
        torch.manual_seed(0)
        runs.append(env.rollout(9, break_when_any_done=False, auto_reset=False, tensordict=td))
    assert_same(*runs)


def test_seeds_reproduce_all_draws():
    """All is drawn from the environment's own random state."""
    env, runs = randomized(Carts(5, lengths=[4], seed=0), EVERYTHING), []
    for seed, others in ((1, 0), (1, 5), (2, 0)):
        env.set_seed(seed)
        torch.manual_seed(others)
        runs.append(rollout_with_forces(env, 9))
    assert_same(runs[0], runs[1])
    for leaf in ("observation", "action_delay"):
        assert not torch.equal(runs[0]["cart", leaf], runs[2]["cart", leaf])


# ------------------------------------------------------------------------ heterogeneous, graphs


def test_heterogeneous_groups_are_padded_first():
    env = randomized(Arena(3, kinds=2, lives=9, seed=0), {"observation_delay": 1})
    plain = TransformedEnv(Arena(3, kinds=2, lives=9, seed=0), PadAgents())
    check_env_specs(env, seed=0)
    runs = []
    for x in (plain, env):
        x.set_seed(0)
        torch.manual_seed(0)
        runs.append(x.rollout(5)["agents", "observation"])
    now, late = runs
    assert torch.equal(late[:, 1:], now[:, :-1]) and torch.equal(late[:, 0], now[:, 0])
    assert not torch.equal(late, now)
    with pytest.raises(ConfigError, match="PadAgents"):
        TransformedEnv(Arena(3, kinds=2), ObservationDelay(1)).reset()


def test_specs_of_every_transform():
    check_env_specs(randomized(Carts(3, lengths=[5]), EVERYTHING))


def act(td):
    """Actions that depend on what is seen."""
    return td.set(("cart", "action"), (td["cart", "observation"].sum(-1, keepdim=True) - 3).sin())


def collected(execution, lengths, frames, ranges):
    env = randomized(Carts(6, lengths=lengths, seed=0), ranges)
    return RolloutCollector(env, act, frames_per_batch=frames, execution=execution)


DELAYED = {"mass": [0.5, 2.0], "observation_delay": [0, 2], "action_delay": [0, 3]}


def test_graph_equals_eager_bit_for_bit():
    eager, graph = (collected(x, [50], 60, DELAYED) for x in ("eager", "trace"))
    for _ in range(2):
        expected, found = eager.rollout(), graph.rollout()
        assert graph.execution == "trace"
        assert_same(expected, found)
    leaves = {key for key in expected.keys(True, True) if "past" in str(key) or "delay" in str(key)}
    assert not leaves  # buffers stay out of batches


def test_graph_draws_for_each_new_episode():
    collector = collected("trace", [5], 120, {**DELAYED, "observation_noise": 0})
    batch = collector.rollout()
    assert collector.execution == "trace"
    steps, seen = torch.arange(20) % 5, batch["cart", "observation"][..., 0]
    delays = (steps.view(1, -1, 1) - seen).unflatten(1, (4, 5))[:, :, 2:]
    assert (delays == delays[:, :, :1]).all() and delays.unique().tolist() == [0, 1, 2]
    assert (delays[:, 0] != delays[:, 1]).any()
    masses = base_of(collector.env).domain_parameters["mass"]
    assert masses.unique().numel() == 12 and masses.min() >= 0.5 and masses.max() <= 2


def test_graph_with_noise_is_captured():
    collector = collected("trace", [5], 120, EVERYTHING)
    assert collector.rollout()["cart", "observation"].isfinite().all()
    assert collector.execution == "trace"


def test_new_ranges_reach_the_graph():
    env = Carts(6, lengths=[5], seed=0)
    collector = RolloutCollector(env, act, frames_per_batch=60, execution="trace")
    for ranges in ([0.5, 0.6], [5.0, 6.0]):
        env.randomize({"mass": ranges})
        collector.rollout()
        mass = env.domain_parameters["mass"]
        assert ranges[0] <= mass.min() and mass.max() <= ranges[1]


# -------------------------------------------------------------------------------- refusals


class Cart(MarlEnv):
    def __init__(self, num_envs, names=("mass",)):
        super().__init__(num_envs)
        self.register_agent(AgentSpec("cart", 1, Unbounded((1,)), Bounded(-1, 1, (1,))))
        for name in names:
            self.register_domain_parameter(name, 1.0)

    def _reset(self, tensordict):
        return {"cart": {"observation": torch.zeros(self.num_envs, 1, 1)}}

    _step = _reset


def test_duplicate_or_late_parameter_registration_raises():
    with pytest.raises(ConfigError, match="'mass' is registered twice"):
        Cart(2, ["mass", "mass"])
    env = Cart(2)
    env.reset()
    with pytest.raises(ConfigError, match="'drag' is registered too late"):
        env.register_domain_parameter("drag", 2.0)


@pytest.mark.parametrize(
    ("ranges", "message"),
    [
        ({"mas": 1}, "Carts has no parameter 'mas' to randomize; did you mean 'mass'\\? it has"),
        ({"observation_dealy": 1}, "mean 'observation_delay'\\? it has .*, action_noise"),
        ({3: 1}, "Carts has no parameter 3 to randomize; it has"),
        ({"observation_delay": [2, 0]}, r"use for example observation_delay=\[0,2\]"),
        ({"action_noise": "much"}, r"use for example action_noise=\[0,0.1\]"),
        ({"mass": [2, 1]}, r"mass is \[2, 1\], expected a number, \[low, high\] or"),
        ({"mass": "heavy"}, "mass is 'heavy', expected a number"),
        ({"mass": [1, float("inf")]}, "expected a number"),
        ({"mass": True}, "mass is True, expected a number"),
        ({"mass": [0, 1, "log"]}, "expected positive bounds with log"),
        ({"observation_delay": [0, 1.5]}, "expected whole numbers of steps"),
        (
            {"observation_delay": [1, 4, "log"]},
            r"drawn without log; use .* observation_delay=\[1,4",
        ),
        ({"action_delay": 1e9}, "expected at most 10,000 steps"),
        ({"action_noise": -1}, "action_noise is -1, expected 0 or more"),
    ],
)
def test_invalid_ranges_raise(ranges, message):
    with pytest.raises(ConfigError, match=message):
        randomized(Carts(2), ranges)


def test_numpy_numbers_are_accepted():
    ranges = {"mass": np.float32(1.5), "observation_delay": [np.int64(0), np.int64(1)]}
    env = randomized(Carts(2, seed=0), ranges)
    assert set(env.rollout(2)["cart", "observation_delay"].flatten().tolist()) <= {0, 1}
    assert (env.domain_parameters["mass"] == 1.5).all()


def test_messages_name_the_parameters_of_every_environment():
    kinds = ActionDelay, ActionNoise, ObservationDelay, ObservationNoise
    assert sorted(kind.leaf for kind in kinds) == sorted(EVERYWHERE)


def test_randomization_that_does_not_fit_the_actions_raises():
    with pytest.raises(ConfigError, match="discrete actions"):
        randomized(Arena(2), {"action_noise": 0.1}).reset()
    with pytest.raises(ConfigError, match="a delayed action may be illegal"):
        randomized(Arena(2, action_mask=True), {"action_delay": 1}).reset()


def test_randomize_setting_of_make_env():
    env = make_env("toy/arena", num_envs=3, seed=0, randomize={"observation_delay": [0, 1]})
    assert env.rollout(3)["agents", "observation_delay"].shape == (3, 3, 4)
    with pytest.raises(
        ConfigError, match="Arena has no parameter 'mass' to randomize; it has none"
    ):
        make_env("toy/arena", num_envs=3, randomize={"mass": 2})
    found = make_env(
        "carts:Carts",
        num_envs=2,
        randomize={"mass": 2, "action_delay": 1},
    )
    assert found.domain_parameters["mass"].tolist() == [[2, 2]] * 2


def test_ranges_must_be_a_dict():
    with pytest.raises(ConfigError, match="ranges is None, expected a dict of ranges by name"):
        randomized(Carts(2, lengths=[4], seed=0), None)
