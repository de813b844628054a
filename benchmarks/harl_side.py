"""One training by HARL's HAPPO in our MuJoCo environment: a process of harl_happo.py.

HARL's ``OnPolicyHARunner`` trains with the settings of its ``tuned_configs`` for the task. Changed
are the device (a CPU), the threads (one), the frames, the seed and the folder of its log. Instead
of HARL's environments in processes of their own, it gets ours, all envs in one batch, so that
physics and rewards are those of our side.

``--view own`` gives HARL our observations: an agent's own joints, those next to them, and the
torso. HARL's own environment for MuJoCo differs from this one:

- Each agent observes the robot's whole state and its own index, as with ``--view state``.
- Each observation and state is standardized: less its mean, by its deviation. ``--view own`` leaves
  this out; HARL's networks begin with a layer norm, which does the same.
- It is Gymnasium's v2, in which the state of the ant has other contact forces, and others reward.

As in HARL's environment, actions are scaled from [-1, 1] to the torques, and not clipped: MuJoCo
clips them, but their cost does not. Ends by the time limit are marked as there
(``bad_transition``), so that values go on behind them (``use_proper_time_limits``).
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
import tempfile
import time
import types
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from gymnasium.spaces import Box
from tensordict import TensorDictBase
from torch import Tensor

from torchrl_marl.envs import make_env
from torchrl_marl.training.evaluation import EVALUATION_SEED, play

if importlib.util.find_spec("uu") is None:  # HARL imports an error of it; gone since Python 3.13
    sys.modules["uu"] = types.ModuleType("uu")
    sys.modules["uu"].Error = ValueError  # type: ignore[attr-defined]
from harl.runners import on_policy_base_runner
from harl.runners.on_policy_ha_runner import OnPolicyHARunner

MAX_STEPS = 1000
PACKAGES = ("torch", "tensordict", "numpy", "mujoco", "gymnasium")


# --------------------------------------------------------------------------------- environment


class PerAgent:
    """Arrays of agents whose sizes may differ, read as one array ``[E, N, O]``: ``x[:, i]``."""

    def __init__(self, arrays: list[np.ndarray]) -> None:
        self.arrays = arrays

    def __getitem__(self, index: tuple[slice, int]) -> np.ndarray:
        return self.arrays[index[1]]


class HarlObservations:
    """Observations of our environment for HARL's agents.

    Args:
        env (MarlEnv): environment.
        use_state (bool): True for the whole state and the agent's index, standardized.
    """

    def __init__(self, env: Any, use_state: bool) -> None:
        self.env, self.use_state = env, use_state
        self.n_agents = len(env.group_map["agent"])
        bounds = env.full_action_spec["agent", "action"].space
        self.middle, self.half = (bounds.high + bounds.low) / 2, (bounds.high - bounds.low) / 2

    def __call__(self, td: TensorDictBase) -> list[np.ndarray]:
        """Returns the observation of each agent, ``[E, O]``."""
        if self.use_state:
            ids = torch.eye(self.n_agents).unsqueeze(1).expand(-1, len(td), -1)
            return [
                standardized(torch.cat([td["state"], agent_id], -1)).numpy() for agent_id in ids
            ]
        kinds = self.env.by_kind(td, "agent").values()
        return [
            observation.numpy() for kind in kinds for observation in kind["observation"].unbind(1)
        ]

    def state(self, td: TensorDictBase) -> np.ndarray:
        """Returns the critic's input, the same for each agent, ``[E, N, S]``."""
        state = standardized(td["state"]) if self.use_state else td["state"]
        return state.unsqueeze(1).repeat(1, self.n_agents, 1).numpy()

    def torques(self, actions: np.ndarray) -> Tensor:
        """Scales actions in [-1, 1], ``[E, N, A]``."""
        return self.middle + self.half * torch.as_tensor(actions, dtype=torch.float32)


def standardized(x: Tensor) -> Tensor:
    """Returns each row less its mean, by its deviation."""
    return (x - x.mean(-1, keepdim=True)) / x.std(-1, correction=0, keepdim=True)


class HarlEnv:
    """Our batched environment with the methods of HARL's ``ShareVecEnv``.

    Args:
        view (View): environment and observations.
    """

    def __init__(self, view: HarlObservations) -> None:
        self.view, self.n_agents = view, view.n_agents
        self.td = view.env.reset()
        # Our environment checks the bounds of actions in its first step; HARL's exceed them.
        view.env.step(self.td.set(("agent", "action"), view.middle))
        action = Box(-1.0, 1.0, tuple(view.half.shape[2:]))
        self.observation_space = [Box(-10, 10, x.shape[1:]) for x in view(self.td)]
        self.share_observation_space = [Box(-10, 10, view.state(self.td).shape[2:])] * self.n_agents
        self.action_space = [action] * self.n_agents

    def reset(self) -> tuple[PerAgent, np.ndarray, list[None]]:
        """Starts episodes in all envs; returns observations, states and no masks of actions."""
        self.td = self.view.env.reset()
        return self._observe()

    def step(self, actions: np.ndarray) -> tuple[Any, ...]:
        """Takes a step, and starts a new episode in each env whose episode has ended."""
        self.td["agent", "action"] = self.view.torques(actions)
        step, self.td = self.view.env.step_and_maybe_reset(self.td)
        next_step = step["next"]
        dones = next_step["done"].repeat(1, self.n_agents).numpy()
        truncated = (next_step["truncated"] & ~next_step["terminated"]).squeeze(1).tolist()
        infos = [[{"bad_transition": is_truncated}] * self.n_agents for is_truncated in truncated]
        observations, states, masks = self._observe()
        return observations, states, next_step["agent", "reward"].numpy(), dones, infos, masks

    def _observe(self) -> tuple[PerAgent, np.ndarray, list[None]]:
        view = self.view
        return PerAgent(view(self.td)), view.state(self.td), [None] * len(self.td)

    def close(self) -> None:
        """Closes the environment."""
        self.view.env.close()


# ------------------------------------------------------------------------------------ training


class Runner(OnPolicyHARunner):
    """HARL's runner, which is evaluated by our library.

    Attributes:
        curve (list of dict): evaluations so far.
        evaluating (float): seconds that they took.
    """

    curve: list[dict[str, float]]
    evaluating = 0.0

    def eval(self) -> None:
        """Plays the episodes of an evaluation with deterministic actions."""
        began = time.perf_counter()
        view = self.eval_envs.view
        figures = play(
            view.env,
            lambda td: self._act(view, td),
            view.env.team,
            episodes=len(view.half),
            seed=EVALUATION_SEED,
        ).figures()
        frames = self.per_rollout * getattr(self.logger, "episode", 0)
        self.curve.append({"frames": frames, **figures})
        self.evaluating += time.perf_counter() - began
        print(f"frames {frames}, return {figures['return_mean']:.1f}", file=sys.stderr)

    def _act(self, view: HarlObservations, td: TensorDictBase) -> TensorDictBase:
        n = len(td)
        memory = np.zeros((n, self.recurrent_n, self.rnn_hidden_size), np.float32)
        masks = np.ones((n, 1), np.float32)
        actions = [
            actor.act(observation, memory, masks, None, deterministic=True)[0]
            for actor, observation in zip(self.actor, view(td), strict=True)
        ]
        td["agent", "action"] = view.torques(torch.stack(actions, 1))
        return td

    @property
    def per_rollout(self) -> int:
        """Frames of a rollout of all envs."""
        train = self.algo_args["train"]
        return train["episode_length"] * train["n_rollout_threads"]


def settings_of(args: argparse.Namespace, log: str) -> dict[str, Any]:
    """Returns HARL's tuned settings, with what is changed here."""
    settings = json.loads(args.config.read_text(encoding="utf-8"))
    algo = settings["algo_args"]
    algo["device"] |= {"cuda": False, "torch_threads": 1}
    algo["seed"] |= {"seed": args.seed, "seed_specify": True}
    algo["logger"]["log_dir"] = log
    algo["train"]["num_env_steps"] = args.frames
    rollout = algo["train"]["episode_length"] * algo["train"]["n_rollout_threads"]
    if args.frames % rollout or args.evaluate_every % rollout:
        raise SystemExit(f"frames are no multiple of HARL's rollouts, which have {rollout}.")
    algo["train"]["eval_interval"] = args.evaluate_every // rollout
    algo["eval"] |= {"use_eval": True, "eval_episodes": args.episodes}
    return settings


def runner_of(settings: dict[str, Any], args: argparse.Namespace) -> Runner:
    """Returns HARL's runner on our environment."""

    def make(n: int, seed: int) -> HarlEnv:
        env_kwargs = {"num_envs": n, "agent_conf": args.agent_conf, "max_steps": MAX_STEPS}
        return HarlEnv(
            HarlObservations(make_env(args.env, seed=seed, **env_kwargs), args.view == "state")
        )

    with mock.patch.multiple(
        on_policy_base_runner,
        make_train_env=lambda name, seed, n, settings: make(n, seed),
        make_eval_env=lambda *_args: make(args.episodes, EVALUATION_SEED),
    ):
        runner = Runner(settings["main_args"], settings["algo_args"], settings["env_args"])
    runner.curve = []
    return runner


def main() -> None:
    """Trains, and writes the evaluations and the time."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", type=Path, required=True, help="file of tuned_configs")
    parser.add_argument("--env", required=True)
    parser.add_argument("--agent-conf", required=True)
    parser.add_argument("--view", choices=["own", "state"], default="own")
    for name in ("--seed", "--frames", "--evaluate-every", "--episodes"):
        parser.add_argument(name, type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        settings = settings_of(args, scratch)
        runner = runner_of(settings, args)
        runner.prep_rollout()
        runner.eval()
        before, began = runner.evaluating, time.perf_counter()
        runner.run()
        seconds = time.perf_counter() - began - (runner.evaluating - before)
        runner.close()
    settings["algo_args"]["logger"].pop("log_dir")
    result = {"curve": runner.curve, "seconds": seconds, "load": os.getloadavg()[0]}
    result |= {"settings": settings, "versions": {name: version(name) for name in PACKAGES}}
    args.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
