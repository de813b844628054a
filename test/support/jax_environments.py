"""JaxMARL's environments that several tests use."""

from contract import E

from torchrl_marl.envs import JaxMarlEnv

SPREAD, SMAX = "MPE_simple_spread_v3", "HeuristicEnemySMAX"


def spread(**kwargs):
    kwargs = {"num_envs": E, "seed": 0, "continuous_actions": False, **kwargs}
    return JaxMarlEnv(SPREAD, **kwargs)


# Settings for environments with rounds; equal in all tests, so each is compiled once.
ROUNDS = {"num_envs": 2, "state": "observations", "num_inner_steps": 3, "num_outer_steps": 2}
