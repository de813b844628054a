"""Training of a population: its members as one program, each with a run folder of its own.

Shapes: P members, E envs of a member, T steps.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torchrl.envs import EnvBase

from torchrl_marl.capture.program import announced_to
from torchrl_marl.collectors.rollout import RolloutCollector
from torchrl_marl.collectors.team import TeamPolicy
from torchrl_marl.envs.remember import remembered_by
from torchrl_marl.errors import CheckpointError, ConfigError
from torchrl_marl.learners.build import build_learners, build_population
from torchrl_marl.learners.on_policy import OnPolicyLearner
from torchrl_marl.learners.rows import rows_of
from torchrl_marl.runtime.random_state import RandomState
from torchrl_marl.specs import TeamSpec
from torchrl_marl.training.checkpoint import all_checkpoints, save_checkpoint
from torchrl_marl.training.config import TrainConfig, members_of
from torchrl_marl.training.environments import Environments
from torchrl_marl.training.evaluation import EVALUATION_SEED, evaluate_members
from torchrl_marl.training.evolution import Evolution, MemberRating
from torchrl_marl.training.member import MOST_EVALUATED, Member, PopulationRun, row_of_all, together
from torchrl_marl.training.metrics import EpisodeTracker, count_agent_frames
from torchrl_marl.training.progress import StopAtReturn, figures_of, is_due, write_summary
from torchrl_marl.training.recorder import Recorder, say
from torchrl_marl.training.training import Iteration, Training, in_its_own_state

__all__ = ["PopulationTraining"]


class PopulationTraining(Training):
    """All parts of a population's run, and its step.

    Simulator, rollout and updates run once for all members. A member's envs lie one after the
    other in the batch; it sees, learns and remembers nothing of another.

    Args:
        config (TrainConfig): a recipe with ``population.size`` above 1.
        folder (RunFolder): where it is kept.
        env (None): members play the recipe's world.
    """

    def _build(self, env: EnvBase | None) -> None:
        config, n_members = self.config, self.config.population.size
        if env is not None:
            raise ConfigError(
                "a population's members play the recipe's world, but an environment is given; "
                "leave env out, or use population.size=1."
            )
        self.environments = Environments(together(config), None, self.device, MOST_EVALUATED)
        self.env = self.environments.training
        if self.environments.shared:
            self.environments.close()
            raise ConfigError(
                f"population.size is {n_members}, but a process holds one {config.env.name!r} "
                "only, on which members cannot be evaluated while they train; use "
                "population.size=1."
            )
        self.team = TeamSpec.from_env(self.env)
        self.configs = members_of(dataclasses.replace(config, folder=str(self.folder)))
        self.learners = self._make_learners()
        self.policy = TeamPolicy(
            actor for learner in self.learners for actor in learner.actors.values()
        )
        if any(learner.remembered for learner in self._populations):
            self.environments.remember(remembered_by(self.policy))
            self.env = self.environments.training
        self.collector = RolloutCollector(
            self.env,
            self.policy,
            frames_per_batch=n_members * config.frames_per_batch,
            execution=config.execution,  # type: ignore[arg-type]
            team=self.team,
        )
        self.tracker = EpisodeTracker(self.team, n_members)
        self.stopping = StopAtReturn(config)
        self.members = [Member(own) for own in self.configs]
        self._told: set[int] = set()
        self.evolution, self.rating = None, None
        if config.evolution.method != "none":
            self.evolution = Evolution(config, self.folder)
            self.rating = self._make_rating() if config.evolution.fitness == "rating" else None
        folders = [member.folder for member in self.members]
        self.run = PopulationRun(self.folder, config, folders)  # type: ignore[assignment]

    def _make_learners(self) -> list[Any]:
        """Builds the members' learners; each member begins with networks of its own seed."""
        config = self.config
        varied = {k: torch.tensor(v) for k, v in config.population.values(config.seed).items()}
        learners = build_population(
            self.team,
            config.learner,
            config.groups,
            n_members=config.population.size,
            settings=varied,
            share_replay=config.population.share_replay,
            device=self.device,
            execution=config.execution,
        )
        for i, own in enumerate(self.configs):
            with RandomState(own.seed, self.device).active():
                alone = self._alone(own)
            for learner, one in zip(learners, alone):
                rows_of(learner, one).write(i)
        return learners

    @property
    def _populations(self) -> list[OnPolicyLearner]:
        return self.learners  # type: ignore[return-value]

    def _alone(self, config: TrainConfig) -> list[OnPolicyLearner]:
        """Builds the learners of an ordinary run."""
        return build_learners(  # type: ignore[return-value]
            self.team, config.learner, config.groups, device=self.device
        )

    # -------------------------------------------------------------------------------- its course

    def open(self) -> None:
        """Opens the tables of all members, truncated to this iteration."""
        quiet = dataclasses.replace(self.config.logging, backends=[])
        self.recorder = Recorder(
            dataclasses.replace(self.config, logging=quiet),
            self.folder,
            iterations=self.iteration,
            frames=self.frames,
            done=self.done,
        )
        for member in self.members:
            member.open(iteration=self.iteration, frames=self.frames)
        if self.evolution is not None:
            self.evolution.open(self.iteration)

    @property
    def frames(self) -> int:
        """Number of env steps of each member so far."""
        return self.collector.frames // self.config.population.size

    @property
    def done(self) -> bool:
        """Whether all frames are collected."""
        return self.frames >= self.config.total_frames

    @in_its_own_state
    def begin(self) -> None:
        """Evaluates the untrained members and random policies, once, and saves."""
        if "return_before" in self.run.summary:
            return
        if self.rating is not None:
            self._rate()  # refuses worlds in which nobody wins
        self._note("before", self.evaluate())
        self._note("random", self._measure_members(None))
        for member in self.members:
            member.summary["return_heuristic"] = None
        self.save()

    def _note(self, when: str, results: Sequence[Mapping[str, float]]) -> None:  # type: ignore[override]
        sick = self._sick().tolist()
        returns = [result["return_mean"] for result, ill in zip(results, sick) if not ill]
        self.run.summary[f"return_{when}"] = sum(returns) / len(returns)
        for member, result in zip(self.members, results):
            member.note(when, result)

    @in_its_own_state
    def step(self) -> Iteration:
        """Collects a batch, learns from it, writes each member's row; evaluates and saves."""
        began = time.perf_counter()
        with announced_to(self.recorder.working):
            batch = self.collector.rollout()
            episodes = self.tracker.update(batch)
            learned = self._learn(batch)
        if self.evolution is not None and self.tracker.returns is not None:
            self.evolution.fitness.saw(*self.tracker.returns)
        n_members = self.config.population.size
        counts = {"agent_frames": count_agent_frames(self.team, batch, n_members)}
        values = {**episodes, **learned, **counts}
        table = torch.stack([x.double() for x in values.values()], 1).tolist()
        self.tracker.warn_of_games()
        seconds = time.perf_counter() - began
        self.iteration += 1
        self.seconds += seconds
        self.run.frames = self.frames
        own_frames = batch.numel() // n_members
        rows = [
            self._write(member, dict(zip(values, row)), own_frames / seconds)
            for member, row in zip(self.members, table)
        ]
        row = self._write_all(rows, batch.numel() / seconds)
        self._tell_of_the_sick()
        self._do_what_is_due(own_frames)
        return Iteration(self.run, self.iteration, self.frames, row, batch)

    def _write(self, member: Member, values: dict[str, float], rate: float) -> dict[str, Any]:
        """Writes a member's row."""
        member.agent_frames += int(values.pop("agent_frames"))
        head = self._progress_of(member)
        seconds = head.pop("seconds")
        row = {
            **head,
            "agent_frames": member.agent_frames,
            "seconds": seconds,
            "frames_per_second": round(rate, 1),
            **values,
        }
        member.wrote(row, list(self.team.groups))
        return row

    def _progress_of(self, member: Member) -> dict[str, Any]:
        return member.progress(self.iteration, self.frames, self.seconds)

    def _write_all(self, rows: Sequence[Mapping[str, Any]], rate: float) -> dict[str, Any]:
        """Writes the row of all members together."""
        head = {
            "iteration": self.iteration,
            "frames": self.frames,
            "agent_frames": sum(own["agent_frames"] for own in rows) // len(rows),
            "seconds": round(self.seconds, 3),
            "frames_per_second": round(rate, 1),
        }
        seeds = [config.seed for config in self.configs]
        sick = self._sick()
        row = {**head, **row_of_all(rows, self.team, seeds, sick), "sick": int(sick.sum())}
        self.recorder.iteration(row, [row[f"{name}/episode_reward"] for name in self.team.groups])
        return row

    def _sick(self) -> Tensor:
        return torch.stack([learner.sick for learner in self._populations]).any(0).cpu()

    def _tell_of_the_sick(self) -> None:
        for i in self._sick().nonzero().flatten().tolist():
            if i not in self._told:
                self._told.add(i)
                say(
                    f"member {self.members[i].folder.name} is frozen from {self.frames:,} frames "
                    "on: its gradients became NaN or infinite; the others go on"
                )

    # ------------------------------------------------------------------------------- evaluation

    @in_its_own_state
    def evaluate(self) -> list[dict[str, float]]:  # type: ignore[override]
        """Evaluates all members and writes a row of each one's ``evaluation.csv``."""
        results = self._measure_members(self.policy)
        for member, result in zip(self.members, results):
            member.recorder.evaluation(self._progress_of(member), result)
            member.evaluated = self.iteration, result
        return results

    def _measure_members(self, policy: Any) -> list[dict[str, float]]:
        settings = self.config.evaluation
        return evaluate_members(
            self.environments.evaluation,
            policy,
            self.team,
            self.config.population.size,
            episodes=settings.episodes,
            deterministic=settings.deterministic,
            seed=EVALUATION_SEED,
        )

    def _do_what_is_due(self, collected: int) -> None:
        every = self.config.evaluation.every_frames
        if not self.done and is_due(every, self.frames, collected):
            self.evaluate()
        if self.evolution is not None and not self.done and self.evolution.due(self.frames):
            self._evolve(self.evolution)
        self._save_if_due()

    def _evolve(self, evolution: Evolution) -> None:
        """Replaces members by copies of others, whose settings then vary."""
        fitness = evolution.fitness.mean
        if self.config.evolution.fitness == "evaluation":
            fitness = torch.tensor([result["return_mean"] for result in self.evaluate()])
        elif self.rating is not None:
            fitness = self._rate()
        progress = {"iteration": self.iteration, "frames": self.frames}
        evolution.select(self._populations, fitness, **progress)
        self._told &= set(self._sick().nonzero().flatten().tolist())
        self._note_settings()

    def _make_rating(self) -> MemberRating:
        with RandomState(0, self.device).active():
            return MemberRating(
                self.environments.evaluation,
                self._populations,
                lambda: self._alone(self.configs[0]),
            )

    @in_its_own_state
    def _rate(self) -> Tensor:
        """Lets members play each other; as many games as an evaluation has episodes."""
        assert self.rating is not None
        episodes = max(2, self.config.evaluation.episodes // self.config.population.size)
        return self.rating.rate(episodes, self.config.seed + EVALUATION_SEED + self.iteration)

    def _note_settings(self) -> None:
        """Writes the settings that members have now into their folders."""
        settings = self._populations[0].settings
        for i, member in enumerate(self.members):
            now = {name: float(settings[name][i]) for name in self.config.population.bounds()}
            member.take_settings(now)

    @in_its_own_state
    def end(self) -> None:
        """Evaluates the trained members, saves and writes their summaries."""
        self.recorder.close_bar()
        if "return_after" not in self.run.summary:
            known = [m.evaluated for m in self.members]
            fresh = all(one is not None and one[0] == self.iteration for one in known)
            self._note("after", [one[1] for one in known if one] if fresh else self.evaluate())
            self.saved_at = None
        for member in self.members:
            member.end(frames=self.frames, seconds=self.seconds)
        found = figures_of(self.config, self.frames, self.seconds)
        found["members"] = len(self.members)
        found["frames_per_second"] *= len(self.members)  # of all
        self.run.summary |= found
        self.save()
        write_summary(self.folder, self.run.summary)

    # ------------------------------------------------------------------------------------ state

    def save(self) -> None:
        """Writes a checkpoint of all together, and one of each member, unless there is one."""
        if self.saved_at != self.iteration:
            with self.interruption.unbroken():
                keep = self.config.checkpoint.keep
                state = self.state_dict()
                save_checkpoint(self.folder, self.iteration, state, keep)
                self._save_members(state)
            self.saved_at = self.iteration
            self._saved_when = time.monotonic()
        if not self.interruption.entered:
            self.interruption.heed(self.folder)

    @in_its_own_state
    def _save_members(self, state: dict[str, Any]) -> None:
        with RandomState(0, self.device).active():
            alone = self._alone(self.configs[0])
        pairs = [rows_of(many, one) for many, one in zip(self._populations, alone)]
        for i, member in enumerate(self.members):
            if not member.idle:
                learners = [pair.read(i).state_dict() for pair in pairs]
                member.save(self._progress_of(member), state, learners)

    def close(self) -> None:
        """Closes tables, loggers and environments; releases all folders for resuming."""
        self.recorder.close()
        for member in self.members:
            member.close()
        self.environments.close()
        self._kept.release()
        if self.left is not None:
            self.left.detach()

    @in_its_own_state
    def state_dict(self) -> dict[str, Any]:
        """Returns all state that exact resuming needs."""
        members = [
            {"summary": dict(m.summary), "agent_frames": m.agent_frames, "evaluated": m.evaluated}
            for m in self.members
        ]
        evolution = {} if self.evolution is None else self.evolution.state_dict()
        return {**super().state_dict(), "members": members, "evolution": evolution}

    @in_its_own_state
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores a checkpoint of all together."""
        if len(state.get("members", ())) != len(self.members):
            raise CheckpointError(
                f"the checkpoint is of {len(state.get('members', ())) or 'no'} members, expected "
                f"{len(self.members)}; resume the folder that `torchrl-marl train` printed."
            )
        newest = all_checkpoints(self.folder)[-1]
        for member in self.members:
            member.refuse_later(newest)
        super().load_state_dict(state)
        for member, own in zip(self.members, state["members"]):
            member.summary, member.agent_frames = dict(own["summary"]), own["agent_frames"]
            evaluated = own["evaluated"]
            member.evaluated = None if evaluated is None else (evaluated[0], evaluated[1])
        self._told = set(self._sick().nonzero().flatten().tolist())
        if self.evolution is not None:
            self.evolution.load_state_dict(state["evolution"])
            self._note_settings()
