"""The learner's updates on a batch that stays as it is."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from calibrate import update_work
from loops import Form, Loop, OurLoop, TorchRLLoop, reset_compiler

from sections.case import DEFAULT, EAGER, OURS, TUNED, Case, Settings

if TYPE_CHECKING:
    from torchrl_marl.training.config import TrainConfig

TITLE = "An update"
TEXT = """MAPPO on a batch of VMAS balance, 3 agents: minibatch, loss, gradients, limit of their
norm, Adam. *TorchRL* is ``MAPPOLoss`` with ``PopArtValueNorm``, a ``TensorDictReplayBuffer`` and
Adam with its defaults; *tuned* has fused Adam, ``torch.compile`` of the loss with
``functional=False`` and ``use_td_params=False``, plain indexing and no value norm. Measured are
all epochs on a batch, ms is that divided by the number of updates; ours is ``learn``, advantages,
value norm and metrics included, theirs is without advantages."""
SIZES = [(64, 400, 6000, 10), (256, 4096, 8192, 10)]  # cells, minibatch, frames, epochs
FORMS = {DEFAULT: Form(fused=False), TUNED: Form(tuned=True, compiled=True)}
N_AGENTS = 3


def measure(settings: Settings) -> list[Case]:
    """A case for every size."""
    sizes = [(16, 40, 80, 2)] if settings.quick else SIZES
    return [measure_size(*size, settings) for size in sizes]


def recipe(num_envs: int, frames: int, epochs: int, minibatch: int, cells: int, device: str) -> Any:
    """The default recipe at other sizes."""
    from torchrl_marl.recipes import load_config

    return load_config(
        "vmas_balance_mappo",
        {
            "device": device,
            "threads": None,
            "env.num_envs": num_envs,
            "frames_per_batch": frames,
            "learner.num_epochs": epochs,
            "learner.minibatch_size": minibatch,
            "learner.actor.num_cells": [cells, cells],
            "learner.critic.num_cells": [cells, cells],
        },
    )


def training_work(config: TrainConfig) -> Any:
    """What the epochs of an iteration must at least do."""
    cells = config.learner.actor.num_cells
    passes = config.frames_per_batch * config.learner.num_epochs
    return passes * update_work(16, cells, 4, N_AGENTS)


def measure_size(cells: int, minibatch: int, frames: int, epochs: int, settings: Settings) -> Case:
    """TorchRL's loops and ours, all epochs of a batch each in turn."""
    import torch

    reset_compiler()
    num_envs = max(1, frames // 100 if frames % 100 == 0 else frames // 64)
    config = recipe(num_envs, frames, epochs, minibatch, cells, settings.device)
    candidates: dict[str, Any] = {}
    loops: list[Loop] = []
    for name, form in FORMS.items():
        torch.manual_seed(0)
        loop = TorchRLLoop(config, form)
        batch = loop.collect()
        loop.add_advantage(batch)
        candidates[name] = _bound(loop.train, batch)
        loops.append(loop)
    for name, execution in ((EAGER, "eager"), (OURS, settings.execution)):
        torch.manual_seed(0)
        ours = OurLoop(config, execution, collecting="eager")
        candidates[name] = _bound(ours.learn, ours.collect())
        loops.append(ours)
    timings = settings.timings(candidates, warmup=3, shortest=0.0)
    for used in loops:
        used.close()
    rates = settings.rates
    return Case(
        f"2 layers of {cells}, minibatch {minibatch:,}",
        timings,
        frames=frames * epochs,
        calls=epochs * math.ceil(frames / minibatch),
        least=None if rates is None else training_work(config).seconds(rates),
    )


def _bound(learn: Any, batch: Any) -> Any:
    return lambda: learn(batch)
