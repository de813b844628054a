"""Population: members, each with a run folder, that are trained in one program.

Shapes: P members, E envs per member, T steps.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torchrl.envs import EnvBase

from torchrl_marl.errors import CheckpointError, ConfigError
from torchrl_marl.learners.build import build_learners, build_population
from torchrl_marl.learners.on_policy import OnPolicyLearner
from torchrl_marl.learners.rows import make_member_view
from torchrl_marl.runtime.random_state import RandomState
from torchrl_marl.specs import TeamSpec
from torchrl_marl.training.checkpoint import all_checkpoints
from torchrl_marl.training.config import TrainConfig, members_of
from torchrl_marl.training.environments import Environments
from torchrl_marl.training.evaluation import EVALUATION_SEED, evaluate_members
from torchrl_marl.training.evolution import MemberRating
from torchrl_marl.training.folder import RunFolder
from torchrl_marl.training.member import (
    MOST_EVALUATED,
    Member,
    MemberPolicy,
    PopulationRun,
    means_of,
    row_of_all,
    together,
)
from torchrl_marl.training.messages import print_message
from torchrl_marl.training.part import Progress
from torchrl_marl.training.progress import StopAtReturn, summary_entries, write_summary
from torchrl_marl.training.recorder import Recorder

__all__ = ["Population", "environments_of_members", "learners_of_members"]


def environments_of_members(
    config: TrainConfig, env: EnvBase | None, device: torch.device
) -> Environments:
    """Builds one environment with the envs of all members, in the order of the members.

    Raises:
        ConfigError: the caller passes an environment, or a process can hold only one environment.
    """
    if env is not None:
        raise ConfigError(
            "a population's members play the recipe's environment, but an environment is given; "
            "leave env out, or use population.size=1."
        )
    found = Environments(together(config), None, device, MOST_EVALUATED)
    if found.shared:
        found.close()
        raise ConfigError(
            f"population.size is {config.population.size}, but a process can hold "
            f"only one {config.env.name!r}, so members cannot be evaluated in training; use "
            "population.size=1."
        )
    return found


def learners_of_members(
    config: TrainConfig, team: TeamSpec, device: torch.device
) -> list[OnPolicyLearner]:
    """Builds the members' learners; networks are initialized from each member's seed."""
    varied = {k: torch.tensor(v) for k, v in config.population.values(config.seed).items()}
    learners = build_population(
        team,
        config.learner,
        config.groups,
        n_members=config.population.size,
        settings=varied,
        share_replay=config.population.share_replay,
        device=device,
        execution=config.execution,
    )
    for i, own in enumerate(members_of(config)):
        with RandomState(own.seed, device).active():
            alone = _build_single_learners(own, team, device)
        for learner, one in zip(learners, alone):
            make_member_view(learner, one).write(i)
    return learners


def _build_single_learners(
    config: TrainConfig, team: TeamSpec, device: torch.device
) -> list[OnPolicyLearner]:
    """Builds the learners of an ordinary run."""
    return build_learners(  # type: ignore[return-value]
        team, config.learner, config.groups, device=device
    )


class Population:
    """Results of a run with several members: run folders of the members, and common tables.

    Simulation, rollouts and updates are batched over all members. Each member has consecutive envs
    in the batch, and does not affect the others.

    Args:
        config (TrainConfig): config with ``population.size`` above 1.
        folder (RunFolder): folder of the population.
        team (TeamSpec): the groups.
        policy (TeamPolicy): policy with the networks of all members.
        environments (Environments): environments of all members.
        learners (sequence of OnPolicyLearner): learners of all members.
        device (torch.device): device of the learners.

    Attributes:
        run (PopulationRun): the run that the training returns.
        configs (list of TrainConfig): configs of the members.
        members (list of Member): writers of the members' run folders.
        own_metrics (sequence of str): metrics of callbacks in the members' rows.
    """

    def __init__(
        self,
        config: TrainConfig,
        folder: RunFolder,
        team: TeamSpec,
        policy: Any,
        environments: Environments,
        learners: Sequence[OnPolicyLearner],
        device: torch.device,
    ) -> None:
        self.config, self.folder, self.team, self.policy = config, folder, team, policy
        self.environments, self.learners, self.device = environments, learners, device
        self.configs = members_of(dataclasses.replace(config, folder=str(folder.path)))
        self.members = [Member(own) for own in self.configs]
        self.stopping = StopAtReturn(config)
        self.own_metrics: Sequence[str] = ()
        self._reported_members: set[int] = set()
        self._member_policy: MemberPolicy | None = None
        folders = [member.folder for member in self.members]
        self.run = PopulationRun(folder.path, config, folders)

    def open(self, now: Progress, *, done: bool) -> None:
        """Opens the tables of the population and its members, without rows after ``now``."""
        quiet = dataclasses.replace(self.config.logging, backends=[])
        self.recorder = Recorder(
            dataclasses.replace(self.config, logging=quiet),
            self.folder.path,
            iterations=now.iteration,
            frames=now.frames,
            done=done,
        )
        resumed = done and "return_after" not in self.run.summary  # interrupted before its end
        for member in self.members:
            member.open(now, resumed=resumed)

    def alone(self, i: int = 0) -> list[OnPolicyLearner]:
        """Builds the learners of an ordinary run that has a member's settings."""
        return _build_single_learners(self.configs[i], self.team, self.device)

    def policy_of(self, member: int = 0) -> Any:
        """Returns a policy with the networks of a member, which the next call overwrites."""
        if self._member_policy is None:
            with RandomState(0, self.device).active():
                self._member_policy = MemberPolicy(self.learners, self.alone())
        return self._member_policy.read(member)

    # ------------------------------------------------------------------------------- evaluation

    def play(self, policy: Any, *, other: bool = False) -> list[dict[str, float]]:
        """Plays the evaluation episodes of each member, and returns each member's results."""
        settings = self.config.evaluation
        return evaluate_members(
            self.environments.evaluation,
            policy,
            self.team,
            len(self.members),
            episodes=settings.episodes,
            deterministic=settings.deterministic != other,
            seed=EVALUATION_SEED,
        )

    def evaluation(
        self,
        now: Progress,
        played: Sequence[dict[str, float]],
        add: Callable[[list[dict[str, Any]]], None],
    ) -> list[dict[str, float]]:
        """Writes a row to each member's ``evaluation.csv``, and returns the rows.

        Args:
            now (Progress): progress of the run.
            played (sequence of dict): result of each member.
            add (callable): function that may add entries to the results.
        """
        add(list(played))
        for member, result in zip(self.members, played):
            member.recorder.evaluation(now.since(member.begun), result)
            member.evaluated = now.iteration, result
        return list(played)

    def scheduled(self, results: Sequence[Mapping[str, float]]) -> None:
        """Does nothing, since members do not stop early."""

    def known(self, iteration: int) -> list[dict[str, float]] | None:
        """Returns the results of an evaluation in this iteration, or None."""
        known = [member.evaluated for member in self.members]
        found = [one[1] for one in known if one is not None and one[0] == iteration]
        return found if len(found) == len(known) else None

    def note(self, when: str, results: Sequence[Mapping[str, float]]) -> None:
        """Adds returns to the members' summaries, and their mean to the population's summary."""
        diverged = self.diverged().tolist()
        returns = [result["return_mean"] for result, out in zip(results, diverged) if not out]
        self.run.summary[f"return_{when}"] = sum(returns) / len(returns)
        for member, result, out in zip(self.members, results, diverged):
            member.note(when, result, diverged=out)

    add_returns_to_summary = note

    def record_best_parameters(self, found: Sequence[Mapping[str, Any]]) -> None:
        """Adds the results of the best parameters to the summaries, as :meth:`note` does."""
        key, diverged = "return_absolute", self.diverged().tolist()
        for member, own in zip(self.members, found):
            member.summary |= own
        returns = [own[key] for own, out in zip(found, diverged) if own and not out]
        if returns:
            self.run.summary[key] = sum(returns) / len(returns)

    def record_heuristic(self, measure: Callable[[Any], Any]) -> None:
        """Records in the summaries that the environment's heuristic is not evaluated."""
        for member in self.members:
            member.summary["return_heuristic"] = None

    def conclude(self, now: Progress, measure: Callable[[], Any]) -> None:
        """Does nothing: members are evaluated with deterministic or sampled actions, not both."""

    # ---------------------------------------------------------------------------------- records

    reached = False

    def write(
        self,
        values: Sequence[dict[str, Any]],
        more: Mapping[str, Any],
        now: Progress,
        rate: float,
    ) -> dict[str, Any]:
        """Writes a row for each member and a row for the population; returns the latter.

        Args:
            values (sequence of dict): metrics of each member.
            more (mapping): metrics of the environments.
            now (Progress): progress after the iteration.
            rate (float): frames per second of all members.
        """
        n, groups = len(self.members), list(self.team.groups)
        rows = [
            member.write(own, now, rate / n, groups) for member, own in zip(self.members, values)
        ]
        diverged = self.diverged()
        row = {
            "iteration": now.iteration,
            "frames": now.frames,
            "agent_frames": sum(own["agent_frames"] for own in rows) // n,
            "seconds": round(now.seconds, 3),
            "frames_per_second": round(rate, 1),
            **row_of_all(rows, self.team, [own.seed for own in self.configs], diverged),
            **means_of([{key: own[key] for key in self.own_metrics} for own in rows], diverged),
            "diverged": int(diverged.sum()),
        }
        self.recorder.iteration(row, [row[f"{name}/episode_reward"] for name in groups])
        self._report_diverged(now.frames)
        return row

    def add_to_summary(self, found: Sequence[Mapping[str, float]]) -> None:
        """Adds entries to the members' summaries, and their means to the population's summary."""
        self.run.summary |= means_of(found, self.diverged())
        for member, own in zip(self.members, found):
            member.summary |= own

    def allow_new_columns(self) -> None:
        """Lets rows add columns to the tables of the population and its members."""
        for recorder in (self.recorder, *(member.recorder for member in self.members)):
            recorder.grow()

    def diverged(self) -> Tensor:
        """Returns a mask of the diverged members, bool ``[P]``."""
        return torch.stack([learner.diverged for learner in self.learners]).any(0).cpu()

    def _report_diverged(self, frames: int) -> None:
        for i in sorted(set(self.diverged().nonzero().flatten().tolist()) - self._reported_members):
            self._reported_members.add(i)
            print_message(
                f"member {self._member_name(i)} is frozen from {frames:,} frames "
                "on: its gradients became NaN or infinite; the others continue"
            )

    def _member_name(self, i: int) -> str:
        return self.members[i].folder.relative_to(self.folder.path).as_posix()

    def take_settings(self) -> None:
        """Takes over the learners' current settings, to be written with the next checkpoint."""
        self._reported_members &= set(self.diverged().nonzero().flatten().tolist())
        settings = self.learners[0].settings
        for i, member in enumerate(self.members):
            names = self.config.population.bounds()
            member.take_settings({name: float(settings[name][i]) for name in names})

    def record_changed_settings(self, settings: Mapping[str, Tensor]) -> None:
        """Takes over changed settings, ``[P]`` each, as :meth:`take_settings` does."""
        for i, member in enumerate(self.members):
            member.take_settings({name: float(values[i]) for name, values in settings.items()})

    def replace(self, i: int, config: TrainConfig, begun: Progress) -> None:
        """Replaces a member by a new one with other settings."""
        self.configs[i], self.members[i] = config, Member(config, begun)
        self._reported_members.discard(i)

    def rating(self) -> MemberRating:
        """Returns a :class:`MemberRating` for games between members."""
        with RandomState(0, self.device).active():
            return MemberRating(self.environments.evaluation, self.learners, self.alone)

    # ------------------------------------------------------------------------------------ state

    def save(self, state: Mapping[str, Any], now: Progress) -> None:
        """Writes a checkpoint of each member."""
        with RandomState(0, self.device).active():
            alone = self.alone()
        pairs = [make_member_view(many, one) for many, one in zip(self.learners, alone)]
        state = {k: value for k, value in state.items() if k not in ("trials", "callbacks")}
        for i, member in enumerate(self.members):
            if not member.idle:
                learners = [pair.read(i).state_dict() for pair in pairs]
                own = dict(state)
                if "best" in state:  # lists over the members
                    own["best"] = {name: [values[i]] for name, values in state["best"].items()}
                member.save(now.since(member.begun), own, learners)

    def end(self, now: Progress) -> None:
        """Completes the summaries of the members and of the population."""
        for member in self.members:
            member.complete_summary(now)
        found = summary_entries(self.config, now.frames, now.seconds)
        found["members"] = len(self.members)
        found["frames_per_second"] *= len(self.members)  # of all members
        self.run.summary |= found

    def write_summaries(self, now: Progress) -> None:
        """Writes the summaries after the last checkpoint; a member with a summary is finished."""
        write_summary(self.folder.path, self.run.summary)
        self.recorder.summary(self.run.summary, now.frames)
        for member in self.members:
            if not member.idle:
                member.end(now)

    def close(self) -> None:
        """Closes all tables and loggers, and releases the members' folders."""
        self.recorder.close()
        for member in self.members:
            member.close()

    def state_dict(self) -> dict[str, Any]:
        """Returns the state for a checkpoint."""
        members = [
            {"summary": dict(m.summary), "agent_frames": m.agent_frames, "evaluated": m.evaluated}
            for m in self.members
        ]
        stopping = self.stopping.state_dict()
        return {"agent_frames": 0, "stopping": stopping, "members": members, "evolution": {}}

    def check(self, state: Mapping[str, Any]) -> None:
        """Refuses a checkpoint if it has a different number of members.

        Raises:
            CheckpointError: the numbers differ; the message names both.
        """
        found = len(state.get("members", ()))
        if found != len(self.members):
            raise CheckpointError(
                f"the checkpoint is of {found or 'no'} members, expected "
                f"{len(self.members)}; resume the folder that `torchrl-marl train` printed."
            )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores a saved state.

        Raises:
            CheckpointError: a member was trained further as a separate run.
        """
        newest = all_checkpoints(self.folder.path)[-1]
        for member, own in zip(self.members, state["members"]):
            member.refuse_later(newest)
            member.summary, member.agent_frames = dict(own["summary"]), own["agent_frames"]
            evaluated = own["evaluated"]
            member.evaluated = None if evaluated is None else (evaluated[0], evaluated[1])
        self._reported_members = set(self.diverged().nonzero().flatten().tolist())
        if self.config.evolution.method != "none":
            self.take_settings()
