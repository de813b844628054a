"""Environments whose steps are graphs, and eager ones to compare with."""

import pytest
import torch
from contract import assert_same

vmas = pytest.importorskip("vmas")

from torchrl_marl.envs import VmasEnv  # noqa: E402


def make(scenario="dropout", execution="trace", **kwargs):
    if scenario in ("dropout", "navigation"):
        kwargs = {"n_agents": 2, **kwargs}
    settings = {"num_envs": 6, "seed": 0, "max_steps": 7, **kwargs}
    return VmasEnv(scenario, execution=execution, **settings)


def make_graph_and_eager(scenario="dropout", **kwargs):
    return make(scenario, **kwargs), make(scenario, "eager", **kwargs)


def graphs_of(env):
    return list(env._graphs._programs)


def simulator_rows(env):
    return dict(env.snapshot()["simulator", "batched"].items())


def assert_shows_simulator(env, td):
    """Asserts that reset data equal the simulator's; infos may be those of the last step."""
    simulator_state = env._read()
    keys = [key for key in simulator_state.keys(True, True) if "info" not in key]
    assert_same(simulator_state.select(*keys), td.select(*keys))


class WindyScenario(vmas.make_env("dropout", 1).scenario.__class__):
    """A scenario with a wind that all envs share, and an extra number."""

    force = 1.0

    def reset_world_at(self, env_index=None):
        super().reset_world_at(env_index)
        if env_index is None:
            self.wind = torch.rand(2)

    def observation(self, agent):
        return super().observation(agent) + self.wind.sum() * self.force
