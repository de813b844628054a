"""BenchMARL on VMAS balance, one training iteration per request; worker process of benchmarks.

``one_program.py`` and ``off_policy_iteration.py`` run it in BenchMARL's virtual environment. Task,
algorithm and experiment have BenchMARL's defaults except for the sizes on the command line;
nothing is logged or evaluated. An iteration is BenchMARL's loop body: collecting, then advantages
and epochs, or updates from its buffer, and the transfer of the policy's new weights.
"""

from __future__ import annotations

import argparse
import functools
import importlib.metadata
import sys
import tempfile
import warnings
from typing import Any

import benchmarl.experiment.experiment as experiment_module
import foreign
import torch
from benchmarl.algorithms import algorithm_config_registry
from benchmarl.environments import VmasTask
from benchmarl.experiment import Callback, Experiment, ExperimentConfig
from benchmarl.models.gru import GruConfig
from benchmarl.models.mlp import MlpConfig
from torchrl import logger as torchrl_logger

PACKAGES = ("benchmarl", "torchrl", "tensordict", "torch", "vmas")


class WaitBetweenIterations(Callback):
    """Waits after every iteration until the next one is asked for."""

    def __init__(self, channel: foreign.Channel, facts: dict[str, Any]) -> None:
        super().__init__()
        self.channel, self.facts = channel, facts

    def __getstate__(self) -> dict[str, Any]:
        return {}  # BenchMARL pickles its callbacks; a channel cannot be.

    def on_train_end(self, training_td: Any, group: str) -> None:
        """The updates of an iteration are done; those of the first are a warm-up."""
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        if not self.channel.answer(self.facts):
            sys.exit()


def parse_args() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--envs", type=int, required=True)
    parser.add_argument("--frames", type=int, required=True, help="frames of a batch")
    parser.add_argument("--algorithm", default="mappo", help="BenchMARL's name of the algorithm")
    parser.add_argument(
        "--epochs", type=int, required=True, help="epochs, or updates from its buffer"
    )
    parser.add_argument("--minibatch", type=int, required=True)
    parser.add_argument("--cells", type=int, required=True, help="units of both hidden layers")
    parser.add_argument("--agents", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--memory", choices=["none", "gru"], default="none")
    parser.add_argument("--device", default="cpu")
    return parser.parse_args()


def make_model(args: argparse.Namespace) -> Any:
    """The settings of an actor or a critic."""
    cells = [args.cells, args.cells]
    if args.memory == "gru":
        model = GruConfig.get_from_yaml()
        model.hidden_size, model.mlp_num_cells = args.cells, cells
    else:
        model = MlpConfig.get_from_yaml()
        model.num_cells = cells
    return model


def main() -> None:
    """Trains as long as it is asked."""
    channel, args = foreign.Channel(), parse_args()
    torch.set_num_threads(args.threads)
    torchrl_logger.setLevel("WARNING")
    warnings.filterwarnings("ignore")
    # BenchMARL has no setting for its progress bar.
    experiment_module.tqdm = functools.partial(experiment_module.tqdm, disable=True)
    task = VmasTask.BALANCE.get_from_yaml()
    task.config["n_agents"] = args.agents
    model, critic = make_model(args), make_model(args)
    config = ExperimentConfig.get_from_yaml()
    settings = {
        "sampling_device": args.device,
        "train_device": args.device,
        "buffer_device": args.device,
        "on_policy_collected_frames_per_batch": args.frames,
        "on_policy_n_envs_per_worker": args.envs,
        "on_policy_n_minibatch_iters": args.epochs,
        "on_policy_minibatch_size": args.minibatch,
        "off_policy_collected_frames_per_batch": args.frames,
        "off_policy_n_envs_per_worker": args.envs,
        "off_policy_n_optimizer_steps": args.epochs,
        "off_policy_train_batch_size": args.minibatch,
        "max_n_frames": args.frames * 10**6,
        "evaluation": False,
        "render": False,
        "loggers": [],
        "create_json": False,
    }
    for name, value in settings.items():
        setattr(config, name, value)
    facts = {"versions": {name: importlib.metadata.version(name) for name in PACKAGES}}
    with tempfile.TemporaryDirectory() as folder:
        config.save_folder = folder  # BenchMARL always writes its configuration somewhere.
        Experiment(
            task=task,
            algorithm_config=algorithm_config_registry[args.algorithm].get_from_yaml(),
            model_config=model,
            critic_model_config=critic,
            seed=0,
            config=config,
            callbacks=[WaitBetweenIterations(channel, facts)],
        ).run()


if __name__ == "__main__":
    main()
