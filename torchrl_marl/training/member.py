"""A member of a population, and the writer of its run folder."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchrl_marl.collectors.team import TeamPolicy
from torchrl_marl.errors import CheckpointError
from torchrl_marl.learners.rows import make_member_view
from torchrl_marl.specs import TeamSpec
from torchrl_marl.training.checkpoint import all_checkpoints, save_checkpoint, set_aside_later
from torchrl_marl.training.config import TrainConfig, with_settings
from torchrl_marl.training.evaluation import kind_of
from torchrl_marl.training.files import open_atomically
from torchrl_marl.training.folder import RunFolder
from torchrl_marl.training.origin import run_provenance, sign_run, signed_yaml
from torchrl_marl.training.part import Progress
from torchrl_marl.training.progress import (
    StopAtReturn,
    return_entries,
    summary_entries,
    write_summary,
)
from torchrl_marl.training.recorder import Recorder
from torchrl_marl.training.run import Run

__all__ = [
    "MOST_EVALUATED",
    "Member",
    "MemberPolicy",
    "PopulationRun",
    "means_of",
    "row_of_all",
    "together",
]

MOST_EVALUATED = 1000
"""Largest number of parallel evaluation episodes, over all members."""


class PopulationRun:
    """The results of a population's training.

    Args:
        folder (Path): folder with ``config.yaml``, ``metrics.csv`` (means over the members, and the
            best member), ``checkpoints/`` of the population, and a run folder for each member.
        config (TrainConfig): config of the population.
        folders (sequence of Path): run folders of the members.

    Attributes:
        summary (dict): summary like that of a run, with means over the members.
        frames (int): environment steps per member.
    """

    def __init__(self, folder: Path, config: TrainConfig, folders: Sequence[Path]) -> None:
        self.folder, self.config, self.folders = folder, config, list(folders)
        self.summary: dict[str, Any] = {}
        self.frames = 0

    @property
    def members(self) -> list[Run]:
        """The members as ordinary runs, loaded from their latest checkpoints."""
        return [Run.load(folder) for folder in self.folders]

    def __repr__(self) -> str:
        return f"PopulationRun({str(self.folder)!r}, {len(self.folders)} members)"


class MemberPolicy:
    """Policy of one member of a population at a time.

    Args:
        learners (sequence of BlockLearner): learners of all members.
        alone (sequence of BlockLearner): learners of an ordinary run with the same settings, to
            which members are copied.
    """

    def __init__(self, learners: Sequence[Any], alone: Sequence[Any]) -> None:
        self._views = [make_member_view(many, one) for many, one in zip(learners, alone)]
        self.policy = TeamPolicy(actor for one in alone for actor in one.actors.values())

    def read(self, member: int) -> TeamPolicy:
        """Returns the policy, with the networks of a member."""
        for view in self._views:
            view.read(member, replay=False)
        return self.policy


def row_of_all(
    rows: Sequence[Mapping[str, Any]], team: TeamSpec, seeds: Sequence[int], diverged: Tensor
) -> dict[str, Any]:
    """Returns each group's mean return, and the best member's return and seed; NaN if unknown.

    Args:
        rows (sequence of mapping): current row of each member's ``metrics.csv``.
        team (TeamSpec): the groups.
        seeds (sequence of int): seeds of the members.
        diverged (Tensor): mask of the members to leave out, bool.

    Shapes:
        - diverged: ``[P]`` for P members
    """
    row: dict[str, Any] = {}
    for name in team.groups:
        found = torch.tensor([own[f"{name}/episode_reward"] for own in rows])
        found = found.masked_fill(diverged, torch.nan)
        best = int(found.nan_to_num(-torch.inf).argmax())
        row[f"{name}/episode_reward"] = float(found.nanmean())
        row[f"{name}/best"] = float(found[best])
        row[f"{name}/best_seed"] = math.nan if found.isnan().all() else seeds[best]
    return row


def means_of(rows: Sequence[Mapping[str, float]], diverged: Tensor) -> dict[str, float]:
    """Returns the mean of each entry over the members that have not diverged.

    Args:
        rows (sequence of mapping): entries of each member.
        diverged (Tensor): mask of the members to leave out, bool.

    Shapes:
        - diverged: ``[P]`` for P members

    Examples:
        >>> means_of([{"a": 1.0}, {"a": 5.0}, {"a": 3.0}], torch.tensor([False, True, False]))
        {'a': 2.0}
    """
    kept = [row for row, out in zip(rows, diverged.tolist()) if not out]
    return {name: sum(row[name] for row in kept) / max(len(kept), 1) for name in rows[0]}


def together(config: TrainConfig) -> TrainConfig:
    """Returns the settings with ``env.num_envs`` multiplied by the number of members."""
    size = config.population.size
    episodes = min(config.evaluation.episodes, max(1, MOST_EVALUATED // size))
    return dataclasses.replace(
        config,
        env=dataclasses.replace(config.env, num_envs=size * config.env.num_envs),
        evaluation=dataclasses.replace(config.evaluation, episodes=size * episodes),
    )


class Member:
    """Writer of a member's run folder, with the same files as an ordinary run.

    Args:
        config (TrainConfig): config of the member, with its folder.
        begun (Progress): progress of the population when the member began.

    Attributes:
        idle (bool): whether the member has ended.
        folder (Path): run folder, which is locked while the population trains.
        summary (dict): summary, like that of :class:`~torchrl_marl.training.Run`.
        agent_frames (int): number of steps of acting agents so far.
        evaluated (tuple, optional): iteration and result of the last evaluation.
    """

    def __init__(self, config: TrainConfig, begun: Progress = Progress()) -> None:  # noqa: B008
        assert config.folder is not None
        self.folder = Path(config.folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self._run_folder = RunFolder(self.folder)
        # The path is not stored, since a population's folder may be moved.
        self.config = dataclasses.replace(config, folder=None)
        self.begun, self.idle = begun, False
        self._config_is_outdated = False
        self.summary: dict[str, Any] = {}
        self.agent_frames = 0
        self.evaluated: tuple[int, dict[str, float]] | None = None

    def open(self, now: Progress, *, resumed: bool = False) -> None:
        """Opens the member's tables, without rows after ``now``, and writes its settings.

        Args:
            now (Progress): progress of the population.
            resumed (bool): whether the last iteration is evaluated again.
        """
        if self.idle:
            return
        quiet = dataclasses.replace(self.config.logging, progress=False)
        self.recorder = Recorder(
            dataclasses.replace(self.config, logging=quiet),
            self.folder,
            iterations=now.iteration - self.begun.iteration,
            frames=now.frames - self.begun.frames,
            done=True,
            resumed=resumed,
        )
        self._write_config()
        sign_run(self.folder, self.config)

    def take_settings(self, settings: Mapping[str, float]) -> None:
        """Records changed settings of the member's learner."""
        learner = with_settings(self.config.learner, settings)
        self.config = dataclasses.replace(self.config, learner=learner)
        self._config_is_outdated = True  # written together with the next checkpoint

    def _write_config(self) -> None:
        self._config_is_outdated = False
        with open_atomically(self.folder / "config.yaml") as file:
            file.write(signed_yaml(self.config))

    def note(self, when: str, result: Mapping[str, float], *, diverged: bool = False) -> None:
        """Adds an evaluation's returns to the summary; with several groups, also by group.

        The returns of a diverged member are NaN: its frozen networks are not a result.
        """
        tail = "/episode_reward"
        groups = [key.removesuffix(tail) for key in result if key.endswith(tail)]
        found = return_entries(when, result, groups)
        self.summary |= dict.fromkeys(found, math.nan) if diverged else found
        if when == "after":
            kind = kind_of(self.config.evaluation.deterministic)
            self.summary["evaluation"] = {kind: dict(result)}

    def write(
        self, values: dict[str, Any], now: Progress, rate: float, groups: Sequence[str]
    ) -> dict[str, Any]:
        """Writes the row of an iteration and returns it.

        Args:
            values (dict): metrics of the iteration.
            now (Progress): progress of the population.
            rate (float): frames per second.
            groups (sequence of str): names of the groups, for the progress bar.
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
        """Refuses to resume if the member was trained further as a separate run.

        Args:
            newest (Path): latest checkpoint of the population.

        Raises:
            CheckpointError: the member has a later checkpoint than the population.
        """
        own = [path for path in all_checkpoints(self.folder) if path.name > newest.name]
        if own:
            raise CheckpointError(
                f"{str(self.folder)!r} was trained further alone, to {own[-1].stem}, but the "
                f"population has {newest.stem}; move that folder away to resume the population "
                "without this training, or resume only this member."
            )

    def save(
        self,
        progress: Mapping[str, Any],
        state: Mapping[str, Any],
        learners: list[dict[str, Any]],
    ) -> None:
        """Writes a checkpoint of the member, like that of an ordinary run.

        Args:
            progress (mapping): progress of the member.
            state (mapping): state of the population; some entries are replaced by the member's.
            learners (list of dict): states of the member's learners.
        """
        own = {
            **state,
            "iteration": progress["iteration"],
            "seconds": progress["seconds"],
            "agent_frames": self.agent_frames,
            "summary": dict(self.summary),
            "learners": learners,
            "collector": {"frames": progress["frames"]},  # a resumed member starts new episodes
            "tracker": {},
            "stopping": StopAtReturn(self.config).state_dict(),
            "members": {},
            "evolution": {},
            "made_by": run_provenance(self.config),
        }
        keep = self.config.checkpoint.keep
        path = save_checkpoint(self.folder, own["iteration"], own, keep)
        set_aside_later(path)
        if self._config_is_outdated:
            self._write_config()

    def complete_summary(self, now: Progress) -> None:
        """Adds frames and times to the summary."""
        own = now.frames - self.begun.frames, now.seconds - self.begun.seconds
        self.summary |= summary_entries(self.config, *own)

    def end(self, now: Progress) -> None:
        """Writes the summary."""
        self.complete_summary(now)
        write_summary(self.folder, self.summary)
        self.recorder.summary(self.summary, now.frames - self.begun.frames)

    def close(self) -> None:
        """Closes tables and loggers; releases the folder."""
        if hasattr(self, "recorder") and not self.idle:
            self.recorder.close()
        self._run_folder.release()
