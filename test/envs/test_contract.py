"""The contract, for every environment of the package."""

import inspect

import pytest
import torchrl.envs
from contract import Case, EnvContract
from torchrl.envs import EnvBase

import torchrl_marl.envs
from torchrl_marl.envs import MarlEnv, VmasEnv
from torchrl_marl.envs.toy import TOY_ENVS, Arena, MatrixGame, TwoStepGame


def toy(cls, **kwargs):
    def make(num_envs, seed, max_steps):
        return cls(num_envs, seed=seed, max_steps=max_steps, **kwargs)

    return make


def vmas(scenario, **kwargs):
    def make(num_envs, seed, max_steps):
        return VmasEnv(scenario, num_envs=num_envs, seed=seed, max_steps=max_steps, **kwargs)

    return make


def toy_case(cls, **kwargs):
    options = {"agent_done": True, "random_starts": cls is Arena}
    longest = {MatrixGame: 1, TwoStepGame: 2}.get(cls, 10**6)
    return Case(toy(cls, **kwargs), longest=longest, **options)


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
    "flocking": {},
    "give_way": {},
    "wheel": {},
    "dispersion": {"continuous_actions": False},
    "ball_passage": {},
}
CASES = {
    "matrix_game": toy_case(MatrixGame),
    "two_step_game": toy_case(TwoStepGame),
    "arena": toy_case(Arena),
    "arena_masked": toy_case(Arena, action_mask=True, lives=1),
    "arena_groups": toy_case(Arena, n_groups=2, continuous_actions=True, years=1),
}
for name, kwargs in SCENARIOS.items():
    scenario = name.removesuffix("_discrete").removesuffix("_one_hot")
    CASES[name] = Case(vmas(scenario, **kwargs), state="state" in kwargs)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
class TestContract(EnvContract):
    pass


def test_no_adapter_is_forgotten():
    exported = {getattr(torchrl_marl.envs, name) for name in torchrl_marl.envs.__all__}
    adapters = {x for x in exported if inspect.isclass(x) and issubclass(x, EnvBase)}
    adapters = (adapters | set(TOY_ENVS.values())) - {MarlEnv}
    under_contract = {type(case.make(2, 0, None)) for case in CASES.values()}
    assert adapters <= under_contract
    assert issubclass(VmasEnv, torchrl.envs.VmasEnv)
