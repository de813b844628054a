"""One member of a population as a run of its own."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchrl_marl.errors import CheckpointError
from torchrl_marl.specs import TeamSpec
from torchrl_marl.training.checkpoint import all_checkpoints, save_checkpoint, set_aside_later
from torchrl_marl.training.config import TrainConfig, with_settings
from torchrl_marl.training.evaluation import kind_of
from torchrl_marl.training.files import whole_file
from torchrl_marl.training.folder import RunFolder
from torchrl_marl.training.origin import made_by, sign_run, signed_yaml
from torchrl_marl.training.part import Progress
from torchrl_marl.training.progress import StopAtReturn, figures_of, returns_of, write_summary
from torchrl_marl.training.recorder import Recorder
from torchrl_marl.training.run import Run

__all__ = ["MOST_EVALUATED", "Member", "PopulationRun", "row_of_all", "together"]

MOST_EVALUATED = 1000
"""Episodes of all members that are played side by side."""


class PopulationRun:
    """The results of a population's training.

    Args:
        folder (Path): with ``config.yaml``, ``metrics.csv`` (means over members, and the best),
            ``checkpoints/`` of all members together, and a run folder for each member.
        config (TrainConfig): its settings.
        folders (sequence of Path): the members' run folders.

    Attributes:
        summary (dict): as a run's, means over members.
        frames (int): env steps that each member was trained for.
    """

    def __init__(self, folder: Path, config: TrainConfig, folders: Sequence[Path]) -> None:
        self.folder, self.config, self.folders = folder, config, list(folders)
        self.summary: dict[str, Any] = {}
        self.frames = 0

    @property
    def members(self) -> list[Run]:
        """The members as ordinary runs, as they were saved last."""
        return [Run.load(folder) for folder in self.folders]

    def __repr__(self) -> str:
        return f"PopulationRun({str(self.folder)!r}, {len(self.folders)} members)"


def row_of_all(
    rows: Sequence[Mapping[str, Any]], team: TeamSpec, seeds: Sequence[int], diverged: Tensor
) -> dict[str, Any]:
    """Returns each group's mean return, the best member's, and whose that is.

    Args:
        rows (sequence of mapping): of each member's ``metrics.csv``.
        team (TeamSpec): the groups.
        seeds (sequence of int): of the members.
        sick (Tensor): members that are left out, bool.

    Shapes:
        - sick: ``[P]``
    """
    row: dict[str, Any] = {}
    for name in team.groups:
        found = torch.tensor([own[f"{name}/episode_reward"] for own in rows])
        found = found.masked_fill(diverged, torch.nan)
        known = found.nan_to_num(-torch.inf)
        row[f"{name}/episode_reward"] = float(found.nanmean())
        row[f"{name}/best"] = float(known.max())
        row[f"{name}/best_seed"] = seeds[int(known.argmax())]
    return row


def together(config: TrainConfig) -> TrainConfig:
    """Returns the settings of all members' environments as one."""
    size = config.population.size
    episodes = min(config.evaluation.episodes, max(1, MOST_EVALUATED // size))
    return dataclasses.replace(
        config,
        env=dataclasses.replace(config.env, num_envs=size * config.env.num_envs),
        evaluation=dataclasses.replace(config.evaluation, episodes=size * episodes),
    )


class Member:
    """Writes what one member of a population leaves, as an ordinary run leaves it.

    Args:
        config (TrainConfig): the member's own settings, with its folder.
        begun (Progress): of the population, when the member began.

    Attributes:
        idle (bool): whether it has ended, and nothing is written any more.
        folder (Path): its run folder, locked while the population trains.
        summary (dict): of :class:`~torchrl_marl.training.Run`.
        agent_frames (int): env steps times living agents so far.
        evaluated (tuple, optional): the iteration of the last evaluation, and its result.
    """

    def __init__(self, config: TrainConfig, begun: Progress = Progress()) -> None:  # noqa: B008
        assert config.folder is not None
        self.folder = Path(config.folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self._kept = RunFolder(self.folder)
        # Its folder is where it is: a population may be moved.
        self.config = dataclasses.replace(config, folder=None)
        self.begun, self.idle = begun, False
        self._config_is_old = False
        self.summary: dict[str, Any] = {}
        self.agent_frames = 0
        self.evaluated: tuple[int, dict[str, float]] | None = None

    def open(self, now: Progress) -> None:
        """Opens its tables, cut back to where the population is; writes its settings."""
        if self.idle:
            return
        quiet = dataclasses.replace(self.config.logging, progress=False)
        self.recorder = Recorder(
            dataclasses.replace(self.config, logging=quiet),
            self.folder,
            iterations=now.iteration - self.begun.iteration,
            frames=now.frames - self.begun.frames,
            done=True,
        )
        self._write_config()
        sign_run(self.folder, self.config)

    def take_settings(self, settings: Mapping[str, float]) -> None:
        """Notes settings of the learner that the member has from now on."""
        learner = with_settings(self.config.learner, settings)
        self.config = dataclasses.replace(self.config, learner=learner)
        self._config_is_old = True  # written with the checkpoint that they belong to

    def _write_config(self) -> None:
        self._config_is_old = False
        with whole_file(self.folder / "config.yaml") as file:
            file.write(signed_yaml(self.config))

    def note(self, when: str, result: Mapping[str, float]) -> None:
        """Adds returns to the summary, by group where there are several."""
        tail = "/episode_reward"
        groups = [key.removesuffix(tail) for key in result if key.endswith(tail)]
        self.summary |= returns_of(when, result, groups)
        if when == "after":
            kind = kind_of(self.config.evaluation.deterministic)
            self.summary["evaluation"] = {kind: dict(result)}

    def write(
        self, values: dict[str, Any], now: Progress, rate: float, groups: Sequence[str]
    ) -> dict[str, Any]:
        """Writes an iteration's row and returns it.

        Args:
            values (dict): its metrics.
            now (Progress): of the population.
            rate (float): frames per second.
            groups (sequence of str): whose returns are shown.
        """
        self.agent_frames += int(values.pop("agent_frames"))
        del values["episodes"]
        passed = now.since(self.begun)
        row = {
            "iteration": passed["iteration"],
            "frames": passed["frames"],
            "agent_frames": self.agent_frames,
            "seconds": passed["seconds"],
            "frames_per_second": round(rate, 1),
            **values,
        }
        if not self.idle:
            self.recorder.iteration(row, [row[f"{name}/episode_reward"] for name in groups])
        return row

    def refuse_later(self, newest: Path) -> None:
        """Refuses a member that has gone on by itself.

        Args:
            newest (Path): the population's latest checkpoint.

        Raises:
            CheckpointError: the member has a later one.
        """
        own = [path for path in all_checkpoints(self.folder) if path.name > newest.name]
        if own:
            raise CheckpointError(
                f"{str(self.folder)!r} has gone on by itself to {own[-1].stem}, but the population "
                f"has {newest.stem}; move that folder away, and train the population on without "
                "what it has learned since, or go on with it alone."
            )

    def save(
        self,
        progress: Mapping[str, Any],
        state: Mapping[str, Any],
        learners: list[dict[str, Any]],
    ) -> None:
        """Writes a checkpoint of an ordinary run.

        Args:
            progress (mapping): how far it is.
            state (mapping): of the population; what is the member's own replaces it.
            learners (list of dict): states of its learners.
        """
        own = {
            **state,
            "iteration": progress["iteration"],
            "seconds": progress["seconds"],
            "agent_frames": self.agent_frames,
            "summary": dict(self.summary),
            "learners": learners,
            "collector": {"frames": progress["frames"]},  # its episodes begin anew
            "tracker": {},
            "stopping": StopAtReturn(self.config).state_dict(),
            "members": {},
            "evolution": {},
            "made_by": made_by(self.config),
        }
        keep = self.config.checkpoint.keep
        path = save_checkpoint(self.folder, own["iteration"], own, keep)
        set_aside_later(path)
        if self._config_is_old:
            self._write_config()

    def end(self, now: Progress) -> None:
        """Writes the summary."""
        own = now.frames - self.begun.frames, now.seconds - self.begun.seconds
        self.summary |= figures_of(self.config, *own)
        write_summary(self.folder, self.summary)

    def close(self) -> None:
        """Closes tables and loggers; releases the folder."""
        if hasattr(self, "recorder") and not self.idle:
            self.recorder.close()
        self._kept.release()
