"""A run: its folder, its settings, its policy, its figures."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import torch
from tensordict.nn import TensorDictModuleBase
from torchrl.envs import EnvBase

from torchrl_marl.collectors.team import TeamPolicy
from torchrl_marl.envs.build import make_env
from torchrl_marl.envs.torchrl.mending import mended
from torchrl_marl.envs.transforms import with_dense_groups
from torchrl_marl.errors import CheckpointError, ConfigError
from torchrl_marl.learners.build import build_learners
from torchrl_marl.specs import TeamSpec
from torchrl_marl.training.checkpoint import latest_checkpoint, load_checkpoint, load_learners
from torchrl_marl.training.config import TrainConfig, check_folder, read_run_config
from torchrl_marl.training.evaluation import evaluate

__all__ = ["EVALUATION_SEED", "Run", "new_folder"]

EVALUATION_SEED = 1_000_003
"""Added to a run's seed: evaluation plays other episodes than training, and always the same."""


class Run:
    """What training leaves behind.

    Args:
        folder (Path): with ``config.yaml``, ``metrics.csv``, ``evaluation.csv``,
            ``summary.json`` and ``checkpoints/``.
        config (TrainConfig): its settings.
        policy (TensorDictModuleBase): the joint policy of the team; goes into ``env.rollout``.
        summary (dict): ``return_before``, ``return_after``, ``return_random``,
            ``return_heuristic``, ``frames``, ``seconds``, ``frames_per_second``; of each group
            of several, ``<group>/return_after`` and the like.
        env (EnvBase, optional): the user's own environment, where there was one.

    Examples:
        >>> import tempfile, torchrl_marl
        >>> folder = tempfile.mkdtemp() + "/run"
        >>> run = torchrl_marl.train("toy_matrix_game_mappo", folder=folder, total_frames=640,
        ...                          frames_per_batch=320, env={"n_envs": 32},
        ...                          learner={"minibatch_size": 160},
        ...                          logging={"progress": False})
        >>> Run.load(folder).evaluate(episodes=4)["episodes"]
        4
    """

    def __init__(
        self,
        folder: Path,
        config: TrainConfig,
        policy: TensorDictModuleBase,
        summary: dict[str, Any],
        env: EnvBase | None = None,
    ) -> None:
        self.folder = folder
        self.config = config
        self.policy = policy
        self.summary = summary
        self._env = env

    @classmethod
    def load(
        cls,
        folder: str | Path,
        device: torch.device | str | None = None,
        env: EnvBase | None = None,
    ) -> Run:
        """Reads a run from its folder, with the policy of its last checkpoint.

        Args:
            folder (str or Path): of the run.
            device (torch.device, optional): by default, the run's own.
            env (EnvBase, optional): for a run on an environment of one's own.

        Raises:
            CheckpointError: no run, no checkpoint, or a broken one.
        """
        folder = Path(folder)
        config = read_run_config(folder)
        device = config.device if device is None else device
        state = load_checkpoint(latest_checkpoint(folder), device)
        like = _own_or_new(config, env, device, n_envs=1)
        team = TeamSpec.from_env(like)
        if env is None:
            like.close()
        learners = build_learners(team, config.learner, config.groups, device=device)
        load_learners(learners, state["learners"])
        actors = [actor for learner in learners for actor in learner.actors.values()]
        path = folder / "summary.json"
        try:
            summary = json.loads(path.read_text()) if path.is_file() else {}
        except ValueError:
            summary = {}  # half-written; the policy is what counts
        return cls(folder, config, TeamPolicy(actors), summary, env)

    def evaluate(
        self,
        episodes: int | None = None,
        deterministic: bool | None = None,
        gif: bool = False,
        env: EnvBase | None = None,
    ) -> dict[str, float]:
        """Plays whole episodes with the trained policy.

        Args:
            episodes (int, optional): how many; by default, as the recipe says.
            deterministic (bool, optional): likewise.
            gif (bool): write ``episode.gif`` into the run folder.
            env (EnvBase, optional): another environment than the run's.
        """
        settings = self.config.evaluation
        episodes = settings.episodes if episodes is None else episodes
        if episodes < 1:
            raise ConfigError(f"episodes is {episodes}, expected 1 or more.")
        device = next(
            (p.device for p in self.policy.parameters()), torch.device(self.config.device)
        )
        own = env if env is not None else self._env
        env = _own_or_new(self.config, own, device, n_envs=min(episodes, 1000))
        try:
            return evaluate(
                env,
                self.policy,
                TeamSpec.from_env(env),
                episodes=episodes,
                deterministic=settings.deterministic if deterministic is None else deterministic,
                seed=self.config.seed + EVALUATION_SEED,
                gif=self.folder / "episode.gif" if gif else None,
            )
        finally:
            if own is None:
                env.close()

    def __repr__(self) -> str:
        return f"Run({str(self.folder)!r}, return_after={self.summary.get('return_after')})"


def new_folder(config: TrainConfig) -> Path:
    """Where a new run goes: the settings' folder, or a new one under ``runs/``.

    Raises:
        ConfigError: the folder exists and is not empty.
    """
    if config.folder is not None:
        check_folder(config)
        return Path(config.folder)
    stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
    name, world = config.recipe, Path(config.env.name).stem
    if world not in name:
        name = f"{name}_{world}"
    base = Path("runs") / f"{name}_seed{config.seed}_{stamp}"
    folder, n = base, 1
    while folder.exists():
        n += 1
        folder = base.with_name(f"{base.name}_{n}")
    return folder


def _own_or_new(
    config: TrainConfig, env: EnvBase | None, device: torch.device | str, n_envs: int
) -> EnvBase:
    if env is not None:
        return with_dense_groups(mended(env))
    if config.env.library == "own":
        raise CheckpointError(
            "this run was trained on an environment of your own; in Python, "
            "torchrl_marl.training.Run.load(folder, env=...) takes it."
        )
    seed = config.seed + EVALUATION_SEED
    return with_dense_groups(make_env(config.env, seed=seed, device=device, n_envs=n_envs))
