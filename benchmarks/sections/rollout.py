"""Collecting a batch with a policy: TorchRL's collector against ours."""

from __future__ import annotations

import math
from typing import Any

from calibrate import policy_work, step_work
from loops import Form, collector, execution_kwargs, make_policy, reset_compiler

from sections.case import DEFAULT, EAGER, OURS, TUNED, Case, Settings

TITLE = "A rollout with a policy"
TEXT = """VMAS balance, 3 agents, at most 100 steps an episode, networks of two layers of 64,
untrained. *TorchRL* is ``Collector`` on ``torchrl.envs.VmasEnv`` with ``MultiAgentMLP``,
``ProbabilisticActor`` and ``TanhNormal``; *tuned* the same with ``compile_policy``,
``trust_policy``, ``track_traj_ids=False`` and ``use_td_params=False``. Ours is
``RolloutCollector`` with ``make_actor``, without the scenario's info, as in the recipes; *with
info* with it, as TorchRL always has it. The warm-up is longer than an episode, so that episodes
end at different times; the share of steps that end one ("done") must agree between the rows."""
WITH_INFO = "torchrl_marl, with info"
N_AGENTS, MAX_STEPS = 3, 100


def measure(settings: Settings) -> list[Case]:
    """A case for every number of envs."""
    sizes = [(8, 5)] if settings.quick else [(64, 100), (1024, 25)]
    if settings.device == "cuda":
        sizes = sizes if settings.quick else [*sizes, (4096, 100)]
    return [measure_size(num_envs, steps, settings) for num_envs, steps in sizes]


class Candidate:
    """A collector, and how often its envs are done."""

    def __init__(self, batches: Any) -> None:
        self._collector, self._batches = batches, iter(batches)
        self.done: list[Any] = []

    def collect(self) -> None:
        """One batch."""
        self.done.append(next(self._batches)["next", "done"].float().mean())

    def close(self) -> None:
        """Closes the env."""
        self._collector.shutdown()

    def share(self, skipped: int) -> str:
        """Of the steps that end an episode, after the warm-up."""
        shares = [share.item() for share in self.done[skipped:]]
        return f"{100 * sum(shares) / len(shares):.2f} %"


def make_candidates(num_envs: int, steps: int, settings: Settings) -> dict[str, Candidate]:
    """Everything that collects."""
    import torch
    import torchrl.envs

    from torchrl_marl import TeamSpec
    from torchrl_marl.collectors import RolloutCollector
    from torchrl_marl.envs import VmasEnv
    from torchrl_marl.modules import NetworkConfig, make_actor

    frames = num_envs * steps
    arguments: dict[str, Any] = {
        "num_envs": num_envs,
        "max_steps": MAX_STEPS,
        "n_agents": N_AGENTS,
        "device": settings.device,
        "seed": 0,
    }
    made = {}
    for name, tuned in ((DEFAULT, False), (TUNED, True)):
        torch.manual_seed(0)
        env = torchrl.envs.VmasEnv("balance", **arguments)
        policy = make_policy(env, [64, 64], tuned)
        made[name] = Candidate(collector(env, policy, frames, Form(tuned, compiled=tuned)))
    for name, info in ((EAGER, False), (WITH_INFO, True), (OURS, False)):
        torch.manual_seed(0)
        env = VmasEnv("balance", info=info, **arguments)
        group = TeamSpec.from_env(env).groups["agents"]
        actor = make_actor(group, NetworkConfig([64, 64])).to(settings.device)
        kwargs = {} if name == EAGER else execution_kwargs(settings.execution)
        made[name] = Candidate(RolloutCollector(env, actor, frames_per_batch=frames, **kwargs))
    return made


def measure_size(num_envs: int, steps: int, settings: Settings) -> Case:
    """The collectors, one batch each in turn."""
    reset_compiler()
    candidates = make_candidates(num_envs, steps, settings)
    warmup = 3 if settings.quick else math.ceil((MAX_STEPS + 20) / steps)
    timings = settings.timings(
        {name: candidate.collect for name, candidate in candidates.items()},
        warmup=warmup,
        shortest=0.0,
    )
    for candidate in candidates.values():
        candidate.close()
    policy = policy_work(16, [64, 64], 4, N_AGENTS)
    work = num_envs * steps * (step_work("balance", N_AGENTS) + policy)
    return Case(
        f"balance, {num_envs:,} envs, {steps} steps",
        timings,
        frames=num_envs * steps,
        least=None if settings.rates is None else work.seconds(settings.rates),
        notes={"done": {name: x.share(warmup) for name, x in candidates.items()}},
    )
