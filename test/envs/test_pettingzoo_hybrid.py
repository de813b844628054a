"""Tuple and Dict actions of PettingZoo: discrete and continuous parts in one action."""

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete, MultiDiscrete, Text, Tuple
from pettingzoo import ParallelEnv

import torchrl_marl
from torchrl_marl.envs.pettingzoo import PettingZooEnv
from torchrl_marl.envs.pettingzoo.hybrid import hybrid_spec_of
from torchrl_marl.errors import ConfigError, SpecError
from torchrl_marl.specs import Hybrid

FORCE = Box(np.array([-1.0, 0.0], np.float32), np.array([1.0, 4.0], np.float32))
SPACES = {
    "tuple": Tuple([FORCE, Discrete(3, start=5)]),
    "dict": Dict({"force": FORCE, "gear": Discrete(3), "dials": MultiDiscrete([2, 4])}),
}
SMALL = {
    "threads": 1,
    "total_frames": 6400,
    "frames_per_batch": 320,
    "learner": {"minibatch_size": 80, "num_epochs": 6, "lr": 3e-3},
    "evaluation": {"episodes": 8, "both": False},
    "logging": {"progress": False},
}


class Drivers(ParallelEnv):
    """Each agent earns 1 for the right gear; for the right gear and force it earns 2.

    The force counts in the right gear only. The second agent leaves after two of five steps.
    """

    metadata = {"name": "drivers"}
    render_mode = None

    def __init__(self, kind="tuple"):
        self.space, self.seen = SPACES[kind], []
        self.possible_agents = ["driver_0", "driver_1"]
        self.rng = np.random.default_rng(0)

    def observation_space(self, agent):
        return Box(-1.0, 1.0, (4,), np.float32)

    def action_space(self, agent):
        return self.space

    def _observe(self):
        self.goals = {a: (self.rng.integers(3), self.rng.uniform(-1, 1)) for a in self.agents}
        rows = {a: [*np.eye(3)[gear], force] for a, (gear, force) in self.goals.items()}
        return {agent: np.array(row, np.float32) for agent, row in rows.items()}

    def reset(self, seed=None, options=None):
        self.agents, self.t = list(self.possible_agents), 0
        return self._observe(), {agent: {} for agent in self.agents}

    def _earned(self, agent, action):
        assert self.space.contains(action), action
        self.seen.append(action)
        dict_of_parts = isinstance(action, dict)
        force = action["force"] if dict_of_parts else action[0]
        gear = action["gear"] if dict_of_parts else action[1] - 5
        goal, strength = self.goals[agent]
        return float(gear == goal) * (2 - abs(force[0] - strength))

    def step(self, actions):
        earned = {agent: self._earned(agent, action) for agent, action in actions.items()}
        self.t += 1
        ends = {a: self.t == 5 or (a == "driver_1" and self.t == 2) for a in self.agents}
        self.agents = [a for a in self.agents if not ends[a]]
        observed = {a: np.zeros(4, np.float32) for a in ends} | self._observe()
        return observed, earned, ends, dict.fromkeys(ends, False), {a: {} for a in ends}


@pytest.mark.parametrize("kind", SPACES)
def test_env_receives_actions_in_its_own_format(kind):
    made = []

    def make():
        made.append(Drivers(kind))
        return made[-1]

    env = PettingZooEnv(make, num_envs=2, seed=0)
    (group,) = torchrl_marl.TeamSpec.from_env(env).groups.values()
    assert group.hybrid and group.branches == {"tuple": (3,), "dict": (2, 4, 3)}[kind]
    low, high = group.action_bounds
    assert low[0].tolist() == [-1.0, 0.0] and high[0].tolist() == [1.0, 4.0]
    td = env.rand_action(env.reset())
    action = td["driver", "action"]
    assert action.shape == (2, 2, {"tuple": 3, "dict": 5}[kind]) and action.dtype is torch.float32
    for own in made:
        own.seen.clear()
    env.step(td)
    played = [one for own in made for one in own.seen]
    assert len(played) == 4
    for row, found in zip(action.flatten(0, 1), played):
        if kind == "tuple":  # an index counts from the space's start
            assert isinstance(found, tuple) and found[1] == int(row[0]) + 5
            assert type(found[1]) is int and np.array_equal(found[0], row[1:].numpy())
            continue
        assert list(found) == list(SPACES["dict"].spaces)
        own = {"gear": row[2], "dials": row[:2], "force": row[3:]}  # keys are sorted
        assert set(found) == set(own) and type(found["gear"]) is int
        assert all(np.array_equal(found[key], own[key].numpy()) for key in own)


@pytest.mark.processes
@pytest.mark.parametrize("kind", SPACES)
def test_results_do_not_depend_on_workers(kind):
    """In other processes, which import no torch."""
    found = []
    for workers in (0, 2):
        env = PettingZooEnv(lambda: Drivers(kind), num_envs=2, seed=0, workers=workers)
        torch.manual_seed(0)
        found.append(env.rollout(12, break_when_any_done=False))
        env.close()
    one, other = found
    for key in (("driver", "action"), ("next", "driver", "reward"), ("driver", "mask")):
        assert torch.equal(one[key], other[key])
    assert one["next", "driver", "reward"].max() > 0


def test_purely_discrete_or_continuous_parts():
    """Discrete parts alone are multi-discrete, continuous parts alone are continuous."""
    bounds = {"a": Box(-1, 1, (2, 2)), "b": Box(0, 3, ())}
    numbers = hybrid_spec_of("x", Dict(bounds))
    assert numbers.shape == (5,) and numbers.space.high.tolist() == [1.0, 1.0, 1.0, 1.0, 3.0]
    choices = hybrid_spec_of("x", Tuple([Discrete(2), MultiDiscrete([3, 4])]))
    assert choices.nvec.tolist() == [2, 3, 4] and choices.dtype is torch.int64
    free = hybrid_spec_of("x", Tuple([Box(-np.inf, np.inf, (1,)), Discrete(2), Box(-1, 1, (1,))]))
    assert isinstance(free, Hybrid) and type(free.continuous).__name__ == "UnboundedContinuous"


@pytest.mark.parametrize(
    ("part", "message"),
    [
        (Box(0, 9, (2,), np.int32), r"\[1\] is Box.*int32.*expected Discrete.*Box of floats"),
        (Tuple([Discrete(2)]), r"\[1\] is a Tuple, which has no fixed shape"),
        (Dict({"x": Discrete(2)}), r"\[1\] is Dict.*expected Discrete"),
        (Text(3), r"\[1\] is a Text, which has no fixed shape"),
    ],
    ids=["integers", "tuple", "dict", "text"],
)
def test_unsupported_parts_are_refused(part, message):
    with pytest.raises(SpecError, match=f"the action of 'driver_0'{message}"):
        hybrid_spec_of("the action of 'driver_0'", Tuple([Discrete(2), part]))


def test_unequal_parts_in_one_group_are_refused(tmp_path):
    class Unequal(Drivers):
        def action_space(self, agent):
            return SPACES["tuple" if agent == "driver_0" else "dict"]

    with pytest.raises(ValueError, match="is Hybrid of torch.float32.*put each kind into its own"):
        torchrl_marl.train("toy_arena_mappo", env=Unequal, folder=tmp_path / "run", **SMALL)


def test_algorithms_without_hybrid_actions_are_refused(tmp_path):
    settings = {**SMALL, "learner": {"algorithm": "masac", "learning_starts": 320}}
    with pytest.raises(ConfigError, match=r"hybrid, \[3\] and 2 numbers, which masac does not"):
        torchrl_marl.train("toy_arena_mappo", env=Drivers, folder=tmp_path / "run", **settings)


class MaskedDrivers(Drivers):
    """Drivers of which one gear is locked, and one dial; the masks are in the infos."""

    def __init__(self, kind="tuple", flat=False):
        super().__init__(kind)
        self.kind, self.flat = kind, flat

    def _masks(self, agent):
        gear = np.arange(3) != (self.goals[agent][0] + 1) % 3
        dials = [np.ones(2, np.int8), np.array([0, 1, 1, 1], np.int8)]
        if self.flat:
            return np.concatenate([*(dials if self.kind == "dict" else ()), gear])
        gear = gear.astype(np.int8)
        return (None, gear) if self.kind == "tuple" else {"dials": tuple(dials), "gear": gear}

    def reset(self, seed=None, options=None):
        observed, _ = super().reset(seed, options)
        return observed, {agent: {"action_mask": self._masks(agent)} for agent in observed}

    def step(self, actions):
        for agent, action in actions.items():
            gear = action["gear"] if self.kind == "dict" else action[1] - 5
            assert gear != (self.goals[agent][0] + 1) % 3
            assert self.kind == "tuple" or action["dials"][1] != 0
        observed, *rest, infos = super().step(actions)
        return observed, *rest, {a: {"action_mask": self._masks(a)} for a in self.agents}


@pytest.mark.parametrize("kind", SPACES)
@pytest.mark.parametrize("flat", [True, False])
def test_action_masks_of_hybrid_actions(kind, flat, tmp_path):
    """The environment refuses locked options, also of random actions and of a policy."""
    env = PettingZooEnv(lambda: MaskedDrivers(kind, flat), num_envs=2, seed=0)
    (group,) = torchrl_marl.TeamSpec.from_env(env).groups.values()
    td = env.rollout(12, break_when_any_done=False)
    legal = td["driver", "action_mask"]
    assert group.n_options == legal.shape[-1] == {"tuple": 3, "dict": 9}[kind]
    locked = (~legal).sum(-1)[td["driver", "mask"]]
    assert set(locked.tolist()) == {{"tuple": 1, "dict": 2}[kind]}
    settings = {**SMALL, "total_frames": 640, "learner": {"minibatch_size": 80, "num_epochs": 2}}
    torchrl_marl.train(
        "toy_arena_mappo",
        env=lambda: MaskedDrivers(kind, flat),
        folder=tmp_path / "run",
        **settings,
    )


@pytest.mark.learning
@pytest.mark.parametrize(("algorithm", "kind"), [("mappo", "dict"), ("happo", "tuple")])
def test_gear_and_force_are_learned(algorithm, kind, tmp_path):
    """Five steps earn 10 at most; the right gear with any force earns 6.7, as |x - y| is 2/3."""
    learner = {**SMALL["learner"], "algorithm": algorithm}
    run = torchrl_marl.train(
        "toy_arena_mappo",
        env=lambda: Drivers(kind),
        folder=tmp_path / "run",
        **{**SMALL, "learner": learner},
    )
    assert run.summary["return_after"] > 8.5 > 3 > run.summary["return_random"]
