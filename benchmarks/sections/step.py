"""A step of the simulator: stock VMAS against ours."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from calibrate import step_work
from loops import execution_kwargs, reset_compiler

from sections.case import DEFAULT, EAGER, OURS, Case, Settings
from sections.counts import count

TITLE = "A step of the simulator"
TEXT = """All step the same scenario with the same prepared random actions, from a reset before
each measurement, without a policy and without resets in between; ``info`` included. *TorchRL* is
``torchrl.envs.VmasEnv.step``; *VMAS* is ``step`` of stock ``vmas.make_env``; *VMAS, tuned* is that
through ``torch.compile``. Ours is ``VmasEnv.step`` with a TensorDict, as a user calls it."""
SIZES = [("balance", 64), ("balance", 600), ("navigation", 64), ("navigation", 600)]
SIZES.append(("navigation", 4096))
N_AGENTS = {"balance": 3, "navigation": 4}
STOCK, STOCK_TUNED = "VMAS", "VMAS, tuned"


def measure(settings: Settings) -> list[Case]:
    """A case for every size."""
    sizes = [("balance", 8)] if settings.quick else SIZES
    return [measure_size(scenario, num_envs, settings) for scenario, num_envs in sizes]


def measure_size(scenario: str, num_envs: int, settings: Settings) -> Case:
    """Stock VMAS, compiled by torch, in TorchRL, and ours."""
    reset_compiler()
    steps = 5 if settings.quick else 50
    candidates = make_candidates(scenario, num_envs, steps, settings)
    timings = settings.timings(
        {name: candidate.play for name, candidate in candidates.items()},
        warmup=2,
        shortest=0.0,
        before=lambda name: candidates[name].reset(),
    )
    counts: dict[str, dict[str, str]] = {}
    for name, candidate in candidates.items():
        if name == STOCK_TUNED:
            continue  # what its graphs run cannot be seen from outside
        for column, text in count(candidate.step, settings.device).items():
            counts.setdefault(column, {})[name] = text
    rates, work = settings.rates, step_work(scenario, N_AGENTS[scenario])
    return Case(
        f"{scenario}, {num_envs:,} envs",
        timings,
        frames=steps * num_envs,
        calls=steps,
        least=None if rates is None else (steps * num_envs * work).seconds(rates),
        baselines={STOCK: STOCK, STOCK_TUNED: STOCK_TUNED, DEFAULT: DEFAULT},
        notes=counts,
        in_picture=(scenario, num_envs) not in (("navigation", 64), ("navigation", 4096)),
    )


class Candidate:
    """Something that steps, with prepared actions.

    Args:
        reset (callable): before a measurement.
        step (callable): of one set of actions.
        actions (list): as many as there are steps.
    """

    def __init__(
        self, reset: Callable[[], Any], step: Callable[[Any], Any], actions: list[Any]
    ) -> None:
        self.reset, self._step, self._actions = reset, step, actions

    def play(self) -> None:
        """A step with each set of actions."""
        for action in self._actions:
            self._step(action)

    def step(self) -> None:
        """One."""
        self._step(self._actions[0])


def make_candidates(
    scenario: str, num_envs: int, steps: int, settings: Settings
) -> dict[str, Candidate]:
    """Everything that steps a scenario."""
    import torch
    import torchrl.envs

    from torchrl_marl.envs import VmasEnv
    from torchrl_marl.envs.vmas.build import import_vmas

    import_vmas()
    import vmas

    n_agents, device = N_AGENTS[scenario], settings.device
    torch.manual_seed(0)
    actions = (2 * torch.rand(steps, num_envs, n_agents, 2) - 1).to(device)
    of_agents = [
        [agent_action.contiguous() for agent_action in action.unbind(1)] for action in actions
    ]
    arguments = {"num_envs": num_envs, "n_agents": n_agents, "device": device, "seed": 0}
    plain = vmas.make_env(scenario, **arguments)
    # Dynamo does not take scenarios that VMAS has loaded by name.
    imported = importlib.import_module(f"vmas.scenarios.{scenario}").Scenario()
    compiled = vmas.make_env(imported, **arguments)
    kwargs = execution_kwargs(settings.execution)
    envs = {
        DEFAULT: torchrl.envs.VmasEnv(scenario, **arguments),
        EAGER: VmasEnv(scenario, **arguments),
        OURS: VmasEnv(scenario, **arguments, **kwargs),
    }
    made = {
        STOCK: Candidate(plain.reset, plain.step, of_agents),
        STOCK_TUNED: Candidate(compiled.reset, torch.compile(compiled.step), of_agents),
    }
    for name, env in envs.items():
        start = env.reset()
        acted = [start.clone().set(("agents", "action"), action) for action in actions]
        made[name] = Candidate(env.reset, env.step, acted)
    return made
