"""Results of a run with one member: tables, evaluations and summary."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torchrl_marl.specs import TeamSpec
from torchrl_marl.training.config import TrainConfig
from torchrl_marl.training.environments import Environments
from torchrl_marl.training.evaluation import Episodes, last_evaluation_entries
from torchrl_marl.training.folder import RunFolder
from torchrl_marl.training.messages import print_message
from torchrl_marl.training.metrics import mean_return
from torchrl_marl.training.part import Progress
from torchrl_marl.training.progress import (
    StopAtReturn,
    return_entries,
    summary_entries,
    write_summary,
)
from torchrl_marl.training.recorder import Recorder
from torchrl_marl.training.run import Run

__all__ = ["RunResults"]


class RunResults:
    """Results of a run with one member.

    :class:`~torchrl_marl.training.population.Population` has the same methods for several members.

    Args:
        config (TrainConfig): config of the run.
        folder (RunFolder): folder of the run.
        team (TeamSpec): the groups.
        policy (TeamPolicy): policy to evaluate.
        environments (Environments): environments of the run.

    Attributes:
        run (Run): the run that the training returns.
        agent_frames (int): number of steps of acting agents so far.
    """

    def __init__(
        self,
        config: TrainConfig,
        folder: RunFolder,
        team: TeamSpec,
        policy: Any,
        environments: Environments,
    ) -> None:
        self.config, self.folder, self.team, self.policy = config, folder, team, policy
        self.environments = environments
        self.run = Run(folder.path, config, policy, {}, environments.own)
        self.run.trained_on = environments.training if environments.shared else None
        self.agent_frames = 0
        self.stopping = StopAtReturn(config)
        self._last_evaluation: tuple[int, Episodes] | None = None

    def open(self, now: Progress, *, done: bool) -> None:
        """Opens the tables, without rows after ``now``, and the loggers."""
        self.recorder = Recorder(
            self.config,
            self.folder.path,
            iterations=now.iteration,
            frames=now.frames,
            done=done,
            resumed=done and "return_after" not in self.run.summary,  # interrupted before its end
            writes=self.folder.writes,
        )

    # ------------------------------------------------------------------------------- evaluation

    def play(self, policy: Any, *, other: bool = False) -> list[Episodes]:
        """Plays the episodes of an evaluation.

        Args:
            policy (callable, optional): policy; by default random actions.
            other (bool): True to sample actions if the settings ask for the most likely ones, and
                vice versa.
        """
        if not self.config.evaluation.episodes:
            return []
        return [self.environments.play(policy, self.team, other)]

    def evaluation(
        self,
        now: Progress,
        played: Sequence[Episodes],
        add: Callable[[list[dict[str, Any]]], None],
    ) -> dict[str, float]:
        """Writes the row of an evaluation, and returns it; empty if no episodes were played.

        Args:
            now (Progress): progress of the run.
            played (sequence of Episodes): the episodes; empty if none were played.
            add (callable): function that may add entries to the result.
        """
        if not played:
            return {}
        self._last_evaluation = now.iteration, played[0]
        result = played[0].figures()
        add([result])
        self.recorder.evaluation(now.since(Progress()), result)
        return result

    def scheduled(self, result: Mapping[str, float]) -> None:
        """Records an evaluation during training, for the stopping condition."""
        self.stopping.update_from_evaluation(result["return_mean"])

    def known(self, iteration: int) -> dict[str, float] | None:
        """Returns the result of an evaluation in this iteration, or None."""
        played = self._evaluation_at(iteration)
        return None if played is None else played.figures()

    def _evaluation_at(self, iteration: int) -> Episodes | None:
        at, played = self._last_evaluation or (None, None)
        return played if at == iteration else None

    def note(self, when: str, result: Mapping[str, float]) -> None:
        """Adds the returns of an evaluation to the summary.

        Args:
            when (str): ``before``, ``after`` or ``random``.
            result (mapping): result of :meth:`evaluation`.
        """
        self.run.summary |= return_entries(when, result, list(self.team.groups))

    def policy_of(self, member: int = 0) -> Any:
        """Returns the policy of the only member."""
        return self.policy

    def record_best_parameters(self, found: Sequence[Mapping[str, Any]]) -> None:
        """Adds the results of the best parameters to the summary."""
        self.run.summary |= found[0]

    def add_returns_to_summary(self, when: str, played: Sequence[Episodes]) -> None:
        """Adds returns to the summary without writing a row of ``evaluation.csv``."""
        self.note(when, played[0].figures() if played else {})

    def record_heuristic(self, measure: Callable[[Any], Sequence[Episodes]]) -> None:
        """Adds the returns of the environment's heuristic, if it has one, to the summary."""
        self.run.summary["return_heuristic"] = None
        if self.config.evaluation.episodes and (own := self.environments.heuristic()) is not None:
            self.add_returns_to_summary("heuristic", measure(own))

    def conclude(self, now: Progress, measure: Callable[[], Sequence[Episodes]]) -> None:
        """Adds the last evaluation to the summary, and reports an early end.

        Args:
            now (Progress): progress at the end.
            measure (callable): plays episodes with sampled actions if ``evaluation.deterministic``
                is set, else with the most likely actions. Called only for ``evaluation.both``.
        """
        settings, played = self.config.evaluation, self._evaluation_at(now.iteration)
        if played is not None:
            other = measure()[0] if settings.both else None
            self.run.summary |= last_evaluation_entries(played, other, settings.deterministic)
            if self.run.summary.get("actions_differ"):
                print_message(self.run.summary["actions_differ"], is_warning=False)
        self.stopping.report(now.frames)

    # ---------------------------------------------------------------------------------- records

    @property
    def reached(self) -> bool:
        """True if the stopping condition is fulfilled."""
        return self.stopping.reached

    def write(
        self,
        values: Sequence[dict[str, Any]],
        more: Mapping[str, Any],
        now: Progress,
        rate: float,
    ) -> dict[str, Any]:
        """Writes the row of an iteration and returns it.

        Args:
            values (sequence of dict): metrics of the only member.
            more (mapping): metrics of the run's parts and environments.
            now (Progress): progress after the iteration.
            rate (float): frames per second.
        """
        [own] = values
        self.agent_frames += int(own.pop("agent_frames"))
        self.stopping.update_from_episodes(mean_return(self.team, own), int(own.pop("episodes")))
        row = {
            "iteration": now.iteration,
            "frames": now.frames,
            "agent_frames": self.agent_frames,
            "seconds": round(now.seconds, 3),
            "frames_per_second": round(rate, 1),
            **own,
            **more,
        }
        self.recorder.iteration(row, [row[f"{name}/episode_reward"] for name in self.team.groups])
        return row

    def add_to_summary(self, found: Sequence[Mapping[str, float]]) -> None:
        """Adds entries to the summary.

        Args:
            found (sequence of mapping): the entries of the only member.
        """
        self.run.summary |= found[0]

    def allow_new_columns(self) -> None:
        """Lets rows add columns to the tables."""
        self.recorder.grow()

    def save(self, state: Mapping[str, Any], now: Progress) -> None:
        """Does nothing, since a single member needs no checkpoint besides the run's."""

    def end(self, now: Progress) -> None:
        """Completes the summary."""
        self.run.summary |= summary_entries(self.config, now.frames, now.seconds)

    def write_summaries(self, now: Progress) -> None:
        """Writes the summary, after the last checkpoint."""
        write_summary(self.folder.path, self.run.summary)
        self.recorder.summary(self.run.summary, now.frames)

    def close(self) -> None:
        """Closes tables and loggers."""
        self.recorder.close()
        self.run.trained_on = None

    def state_dict(self) -> dict[str, Any]:
        """Returns the state for a checkpoint."""
        stopping = self.stopping.state_dict()
        return {"agent_frames": self.agent_frames, "stopping": stopping}

    def check(self, state: Mapping[str, Any]) -> None:
        """Refuses a checkpoint of a population."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores a saved state."""
        self.agent_frames = state["agent_frames"]
        if "stopping" in state:  # missing in version 0.1
            self.stopping.load_state_dict(state["stopping"])
