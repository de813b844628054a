"""The environment contract, run on every environment of the package."""

import inspect
from dataclasses import replace

import pytest
import torchrl.envs
from contract import Case, EnvContract, base_of
from torchrl.envs import EnvBase, TransformedEnv
from torchrl.envs.utils import MarlGroupMapType

import torchrl_marl.envs
from torchrl_marl.envs import (
    IsaacLabEnv,
    JaxMarlEnv,
    MarlEnv,
    MjlabEnv,
    MujocoEnv,
    PadAgents,
    PettingZooEnv,
    VmasEnv,
    make_env,
)
from torchrl_marl.envs.toy import (
    TOY_ENVS,
    Arena,
    Echo,
    Kuhn,
    Leduc,
    Levers,
    MatchingLevers,
    MatrixGame,
    Nim,
    Paces,
    PredatorPrey,
    SpeakerListener,
    TrafficJunction,
    TwoStepGame,
    ZeroSum,
)


def toy(cls, **kwargs):
    def make(num_envs, seed, max_steps):
        return cls(num_envs, seed=seed, max_steps=max_steps, **kwargs)

    return make


def vmas(scenario, **kwargs):
    def make(num_envs, seed, max_steps):
        return VmasEnv(scenario, num_envs=num_envs, seed=seed, max_steps=max_steps, **kwargs)

    return make


# Environments with a fixed initial state; longest episodes of those that terminate.
ALWAYS_THE_SAME = (MatchingLevers, MatrixGame, TrafficJunction, TwoStepGame, ZeroSum)
LONGEST = {
    Kuhn: 3,
    Leduc: 8,
    Levers: 1,
    MatchingLevers: 8,
    MatrixGame: 1,
    TwoStepGame: 2,
    ZeroSum: 1,
}


def toy_case(cls, **kwargs):
    options = {
        "agent_done": True,
        "random_starts": cls not in ALWAYS_THE_SAME,
    }
    longest = LONGEST.get(cls, 10**6)
    return Case(toy(cls, **kwargs), longest=longest, **options)


def vmas_case(scenario, **kwargs):
    return Case(vmas(scenario, **kwargs), state="state" in kwargs)


def padded(make):
    return lambda *args: TransformedEnv(make(*args), PadAgents())


SCENARIOS = {
    "balance": {"state": "observations"},
    "balance_discrete": {"continuous_actions": False, "info": False},
    "balance_one_hot": {"continuous_actions": False, "categorical_actions": False},
    "navigation": {"state": "observations", "n_agents": 3},
    "transport": {},
    "simple_spread": {"state": lambda env: env.world.agents[0].state.pos.repeat(1, 2)},
    "simple_tag": {},
    "simple_push": {},
    "simple_adversary": {},
    "simple_reference": {},
    "simple_speaker_listener": {},
    "flocking": {"n_agents": 2, "n_obstacles": 2},
    "give_way": {},
    "wheel": {},
    "dispersion": {"continuous_actions": False, "n_agents": 2},
    "ball_passage": {},
    "football": {"n_blue_agents": 2, "n_red_agents": 2, "ai_red_agents": False},
    "football_ai": {"n_blue_agents": 2, "n_red_agents": 1, "ai_red_agents": True},
}
# Steps by graphs; those of other environments are their eager ones (test_step_graphs.py).
GRAPHS = {"dropout": {"n_agents": 2, "state": "observations"}}
CASES = {
    "matrix_game": toy_case(MatrixGame),
    "two_step_game": toy_case(TwoStepGame),
    "zero_sum": toy_case(ZeroSum),
    "arena": toy_case(Arena),
    "arena_masked": toy_case(Arena, action_mask=True, lives=1),
    "arena_groups": toy_case(Arena, n_groups=2, continuous_actions=True, years=1),
    "arena_hybrid": toy_case(Arena, hybrid_actions=True, years=1),
    "echo": toy_case(Echo, late_spawn=1, years=3),
    "kuhn": toy_case(Kuhn),
    "leduc": toy_case(Leduc),
    "levers": toy_case(Levers, n_agents=3, pool=20),
    "matching_levers": toy_case(MatchingLevers),
    "predator_prey": toy_case(PredatorPrey, n_agents=2, size=3, vision=1),
    "traffic_junction": toy_case(TrafficJunction, size=3, arrival_rate=0.8, vision=1),
    "arena_late": toy_case(Arena, late_spawn=2, lives=1, categorical_actions=False),
    "nim": toy_case(Nim),
    "paces": toy_case(Paces, late_spawn=2),
    "speaker_listener": toy_case(SpeakerListener),
    "speaker_listener_continuous": toy_case(SpeakerListener, continuous_speech=True),
}
for name, kwargs in SCENARIOS.items():
    scenario = name.removesuffix("_discrete").removesuffix("_one_hot").removesuffix("_ai")
    CASES[name] = vmas_case(scenario, **kwargs)
for name, kwargs in GRAPHS.items():
    CASES[f"{name}_graphs"] = vmas_case(name, execution="trace", **kwargs)

# Groups of agents that differ in what they see or do: stacked lazily, and padded.
ALL = MarlGroupMapType.ALL_IN_ONE_GROUP
COMM = {"num_adversaries": 2, "num_good_agents": 1, "num_food": 1, "num_forests": 1}
HETEROGENEOUS = {
    "simple_world_comm": vmas_case(
        "simple_world_comm", group_map=ALL, state="observations", **COMM
    ),
    "simple_world_comm_discrete": vmas_case(
        "simple_world_comm", group_map=ALL, continuous_actions=False, **COMM
    ),
    "simple_world_comm_one_hot": vmas_case(
        "simple_world_comm",
        group_map=ALL,
        continuous_actions=False,
        categorical_actions=False,
        **COMM,
    ),
    "simple_adversary": vmas_case("simple_adversary", group_map=ALL, info=False),
    "speaker_listener": toy_case(SpeakerListener, continuous_speech=True, one_group=True),
    "arena": toy_case(Arena, kinds=2),
    "arena_late": toy_case(Arena, kinds=2, late_spawn=2, n_groups=2, lives=1),
    "arena_masked": toy_case(Arena, kinds=2, n_actions=6, action_mask=True, lives=1),
    "arena_masked_one_hot": toy_case(
        Arena, kinds=2, n_actions=7, action_mask=True, lives=2, categorical_actions=False
    ),
}
for name, case in HETEROGENEOUS.items():
    CASES[f"{name}_lazy"] = replace(case, lazy=True)
    CASES[f"{name}_padded"] = replace(case, make=padded(case.make))
# Numbered and one-hot actions are stacked each way by one of the two environments that have both.
del CASES["simple_world_comm_discrete_lazy"], CASES["simple_world_comm_one_hot_padded"]
del CASES["arena_masked_padded"], CASES["arena_masked_one_hot_lazy"]


def pettingzoo(world, **kwargs):
    def make(num_envs, seed, max_steps):
        return PettingZooEnv(world, num_envs=num_envs, seed=seed, max_steps=max_steps, **kwargs)

    return make


def zoo_case(world, random_starts=True, saved=True, **kwargs):
    options = {"agent_done": True, "state": "state" in kwargs, "rows": False}
    lazy = kwargs.pop("lazy", False)
    make = pettingzoo(world, **kwargs)
    return Case(make, random_starts=random_starts, saved=saved, lazy=lazy, **options)


KAZ = {"spawn_delay": 1, "line_death": True, "info": True}
PETTINGZOO = {
    "speaker_listener": zoo_case("mpe2/simple_speaker_listener_v4", continuous_actions=True),
    "spread": zoo_case("mpe2/simple_spread_v3", continuous_actions=False, state="world"),
    "tag_one_group": zoo_case("mpe2/simple_tag_v3", group_map=ALL, state="observations", lazy=True),
    "knights": zoo_case("butterfly/knights_archers_zombies_v11", False, **KAZ),
    "multiwalker": zoo_case(
        "sisl/multiwalker-v9", saved=False, remove_on_fall=True, terminate_on_fall=False
    ),
    "pursuit": zoo_case("sisl/pursuit-v5", n_pursuers=3, n_evaders=4, x_size=8, y_size=8),
    "connect_four": zoo_case("classic/connect_four_v3", False),
    "tictactoe_one_hot": zoo_case("classic/tictactoe-v3", False, categorical_actions=False),
    "spread_aec": zoo_case("mpe2/simple_spread_v3", backend="aec"),
    "battle": zoo_case("magent2/battle_v4", False, False, map_size=12),
}
for name, case in PETTINGZOO.items():
    CASES[f"pettingzoo_{name}"] = case


def jaxmarl(world, **kwargs):
    def make(num_envs, seed, max_steps):
        return JaxMarlEnv(world, num_envs=num_envs, seed=seed, max_steps=max_steps, **kwargs)

    return Case(make, state="state" in kwargs, agent_done=True, lazy="group_map" in kwargs)


JAXMARL = {
    "tag_one_group": jaxmarl("MPE_simple_tag_v3", group_map=ALL, state="world"),
    "smax_3m": jaxmarl("HeuristicEnemySMAX", scenario="3m", state="world", info=True),
    "overcooked": jaxmarl(
        "overcooked", shaped_reward=1.0, shaped_reward_steps=200, categorical_actions=False
    ),
    "hanabi": jaxmarl("hanabi", num_colors=3, state="observations"),
}
for name, case in JAXMARL.items():
    CASES[f"jaxmarl_{name}"] = case


def mujoco(robot, **kwargs):
    def make(num_envs, seed, max_steps):
        return MujocoEnv(robot, num_envs, seed=seed, max_steps=max_steps, **kwargs)

    return make


hopper = Case(mujoco("hopper"), agent_done=True, lazy=True)
CASES["mujoco_ant"] = Case(mujoco("ant"), agent_done=True)
CASES["mujoco_hopper"] = hopper
CASES["mujoco_hopper_padded"] = replace(hopper, make=padded(hopper.make), lazy=False)


def foraging(name, **kwargs):
    def make(num_envs, seed, max_steps):
        settings = {"num_envs": num_envs, "seed": seed, "max_steps": max_steps}
        return make_env(f"foraging/{name}", **settings, **kwargs)

    return Case(make, state=False, agent_done=True)


CASES["foraging_lbf"] = foraging("lbf-5x5-3p-2f", common_reward=True)
CASES["foraging_rware"] = foraging("rware-tiny-4ag")


# One case for each adapter, kind of action and way of stacking; the second tier has the rest.
QUICK = {
    "arena_late",
    "arena_masked_one_hot_padded",
    "balance_discrete",
    "nim",
    "paces",
    "pettingzoo_spread_aec",
    "pettingzoo_tictactoe_one_hot",
    "simple_adversary_lazy",
    "simple_adversary_padded",
    "simple_spread",
    "speaker_listener_lazy",
    "two_step_game",
}
PARAMS = [
    pytest.param(case, id=name, marks=[] if name in QUICK else pytest.mark.environments)
    for name, case in CASES.items()
]


@pytest.mark.parametrize("case", PARAMS, scope="class")
class TestContract(EnvContract):
    pass


def test_every_adapter_is_under_contract():
    exported = {getattr(torchrl_marl.envs, name) for name in torchrl_marl.envs.__all__}
    adapters = {x for x in exported if inspect.isclass(x) and issubclass(x, EnvBase)}
    # IsaacLabEnv is under contract in test_isaaclab.py, since its assets may not be shipped, and
    # MjlabEnv in test_mjlab.py, since it needs another MuJoCo.
    adapters = (adapters | set(TOY_ENVS.values())) - {MarlEnv, IsaacLabEnv, MjlabEnv}
    toys = [case for case in CASES.values() if case.make.__qualname__.startswith("toy.")]
    others = {case.make.__qualname__: case for case in CASES.values()}  # one of each library
    under_contract = {type(base_of(c.make(2, 0, None))) for c in (*toys, *others.values())}
    assert adapters <= under_contract
    assert issubclass(VmasEnv, torchrl.envs.VmasEnv)
