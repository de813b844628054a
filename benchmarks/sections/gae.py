"""Advantages: ``functional.gae`` against TorchRL's functions."""

from __future__ import annotations

from calibrate import gae_work

from sections.case import DEFAULT, OURS, TUNED, Case, Settings

TITLE = "Advantages (GAE)"
TEXT = """At ``[envs, 100, 4, 1]`` with 2 % ends, half of them terminations. *TorchRL* is its
vectorized function, the default of its losses; *tuned* is its loop. ``gae.py`` has more sizes and
the errors."""
N_STEPS, N_AGENTS = 100, 4


def measure(settings: Settings) -> list[Case]:
    """A case for every number of envs."""
    return [measure_size(n, settings) for n in ([32] if settings.quick else [64, 600, 4096])]


def measure_size(num_envs: int, settings: Settings) -> Case:
    """The three functions on the same numbers."""
    from gae import GAMMA, LMBDA, draw
    from torchrl.objectives.value.functional import (
        generalized_advantage_estimate,
        vec_generalized_advantage_estimate,
    )

    from torchrl_marl.functional import gae

    batch = {k: x.to(settings.device) for k, x in draw(num_envs, N_STEPS, N_AGENTS).items()}
    ours = [batch[k] for k in ("reward", "value", "next_value", "done", "terminated")]
    torchrl_inputs = [batch[k] for k in ("value", "next_value", "reward", "done", "terminated")]
    timings = settings.timings(
        {
            DEFAULT: lambda: vec_generalized_advantage_estimate(
                GAMMA, LMBDA, *torchrl_inputs, time_dim=-3
            ),
            TUNED: lambda: generalized_advantage_estimate(
                GAMMA, LMBDA, *torchrl_inputs, time_dim=-3
            ),
            OURS: lambda: gae(*ours, gamma=GAMMA, lmbda=LMBDA),
        },
        warmup=3,
    )
    return Case(
        f"{num_envs:,} envs",
        timings,
        frames=num_envs * N_STEPS,
        in_picture=num_envs not in (64, 4096),
        least=None
        if settings.rates is None
        else gae_work(num_envs, N_STEPS, N_AGENTS).seconds(settings.rates),
    )
