"""JaxMARL's worlds that several tests play."""

from contract import E

from torchrl_marl.envs import JaxMarlEnv

SPREAD, SMAX = "MPE_simple_spread_v3", "HeuristicEnemySMAX"


def spread(**kwargs):
    kwargs = {"num_envs": E, "seed": 0, "continuous_actions": False, **kwargs}
    return JaxMarlEnv(SPREAD, **kwargs)
