"""JaxMARL's environments that several tests play."""

from contract import E

from torchrl_marl.envs import JaxMarlEnv

SPREAD, SMAX = "MPE_simple_spread_v3", "HeuristicEnemySMAX"


def spread(**kwargs):
    kwargs = {"num_envs": E, "seed": 0, "continuous_actions": False, **kwargs}
    return JaxMarlEnv(SPREAD, **kwargs)


# Of environments of several rounds; compiled once for all tests of an environment.
ROUNDS = {"num_envs": 2, "state": "observations", "num_inner_steps": 3, "num_outer_steps": 2}
