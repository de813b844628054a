"""simple_spread: ours on VMAS beside JaxMARL on its own MPE."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from calibrate import policy_work, step_work, update_work
from foreign import Worker
from loops import Form, OurLoop, TorchRLLoop, execution_kwargs, reset_compiler

from sections.case import DEFAULT, EAGER, JAXMARL, OURS, TUNED, Case, Settings

TITLE = "simple_spread, and JaxMARL"
TEXT = """Three agents cover three landmarks, at most 25 steps an episode. These are two simulators
of one game: ours is VMAS's scenario (continuous actions), JaxMARL's is its MPE_simple_spread_v3, a
port of OpenAI's world (five discrete actions), so the rows say what a user of each gets, not which
library runs the same arithmetic faster. *Stepping*: random actions and automatic resets, JaxMARL's
in one ``lax.scan``, TorchRL's and ours by ``step_and_maybe_reset``. *Training*: a whole iteration
of IPPO, actor and critic of two layers of 64 with tanh, 4 epochs of 4 minibatches, the same number
of envs and steps; JaxMARL's is one jitted program, written as its baseline script is. With n
threads, JAX's process is bound to n cores."""
SCRIPT = Path(__file__).parent.parent / "jaxmarl_spread.py"
N_AGENTS, MAX_STEPS, EPOCHS, MINIBATCHES = 3, 25, 4, 4
FORMS = {DEFAULT: Form(fused=False), TUNED: Form(tuned=True, compiled=True)}


def measure(settings: Settings) -> list[Case]:
    """Stepping and training."""
    sizes = [8] if settings.quick else [256, 4096]
    return [*(measure_steps(n, settings) for n in sizes), measure_training(settings)]


class Stepper:
    """An env with random actions, step after step."""

    def __init__(self, env: Any, steps: int) -> None:
        self.env, self.steps = env, steps
        self.carry = env.reset()
        self.shape = env.full_action_spec["agents", "action"].shape

    def play(self) -> None:
        """So many steps."""
        import torch

        for _ in range(self.steps):
            action = torch.empty(self.shape, device=self.env.device).uniform_(-1, 1)
            acted = self.carry.set(("agents", "action"), action)
            _, self.carry = self.env.step_and_maybe_reset(acted)


def measure_steps(num_envs: int, settings: Settings) -> Case:
    """Env steps with random actions."""
    import torchrl.envs

    from torchrl_marl.envs import VmasEnv

    steps = 5 if settings.quick else 50
    arguments: dict[str, Any] = {
        "num_envs": num_envs,
        "max_steps": MAX_STEPS,
        "n_agents": N_AGENTS,
        "device": settings.device,
        "seed": 0,
    }
    kwargs = execution_kwargs(settings.execution)
    envs = {
        DEFAULT: torchrl.envs.VmasEnv("simple_spread", **arguments),
        EAGER: VmasEnv("simple_spread", info=False, **arguments),
        OURS: VmasEnv("simple_spread", info=False, **arguments, **kwargs),
    }
    candidates: dict[str, Any] = {n: Stepper(env, steps).play for n, env in envs.items()}
    work = num_envs * steps * step_work("simple_spread", N_AGENTS)
    options = {"--mode": "step", "--envs": num_envs, "--steps": steps}
    name = f"stepping, {num_envs:,} envs"
    baselines, frames = {DEFAULT: DEFAULT}, num_envs * steps
    case = _case(name, candidates, baselines, options, frames, work, settings)
    case.in_picture = num_envs != 4096
    return case


def measure_training(settings: Settings) -> Case:
    """A whole iteration."""
    import torch

    from torchrl_marl.recipes import load_config

    num_envs, n_steps = (8, 8) if settings.quick else (256, 128)
    frames = num_envs * n_steps
    config = load_config(
        "vmas_simple_spread_ippo",
        {
            "device": settings.device,
            "threads": None,
            "env.num_envs": num_envs,
            "env.max_steps": MAX_STEPS,
            "frames_per_batch": frames,
            "learner.num_epochs": EPOCHS,
            "learner.minibatch_size": frames // MINIBATCHES,
        },
    )
    reset_compiler()
    candidates: dict[str, Any] = {}
    for name in (DEFAULT, TUNED, EAGER, OURS):
        torch.manual_seed(0)
        if name in FORMS:
            candidates[name] = TorchRLLoop(config, FORMS[name]).iterate
        else:
            loop_execution = "eager" if name == EAGER else settings.execution
            candidates[name] = OurLoop(config, loop_execution).iterate
    acting = policy_work(14, [64, 64], 4, N_AGENTS)
    learning = update_work(14, [64, 64], 4, N_AGENTS, central=False)
    work = frames * (step_work("simple_spread", N_AGENTS) + acting + EPOCHS * learning)
    options = {"--mode": "train", "--envs": num_envs, "--steps": n_steps}
    options |= {"--epochs": EPOCHS, "--minibatches": MINIBATCHES}
    baselines = {DEFAULT: DEFAULT, TUNED: TUNED}
    name = f"training, {num_envs} envs x {n_steps} steps"
    return _case(name, candidates, baselines, options, frames, work, settings)


def _case(
    name: str,
    candidates: dict[str, Any],
    baselines: dict[str, str],
    options: dict[str, Any],
    frames: int,
    work: Any,
    settings: Settings,
) -> Case:
    """Measured in turn with JaxMARL, where there is one."""
    import torch

    worker = None
    if JAXMARL in settings.pythons:
        python = Path(settings.pythons[JAXMARL])
        options = {**options, "--device": settings.device}
        worker = Worker(python, SCRIPT, options, torch.get_num_threads())
        candidates[JAXMARL] = worker
        baselines = {**baselines, JAXMARL: JAXMARL}
    try:
        timings = settings.timings(candidates, warmup=3, shortest=0.0)
    finally:
        if worker is not None:
            worker.close()
    lower_bound = None if settings.rates is None else work.seconds(settings.rates)
    case = Case(name, timings, frames, least=lower_bound, baselines=baselines)
    if worker is not None:
        case.versions[JAXMARL] = worker.versions
    return case
