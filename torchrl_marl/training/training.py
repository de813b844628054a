"""Training of a run: collection, learning, logging, evaluation and checkpoints."""

from __future__ import annotations

import contextlib
import dataclasses
import time
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor
from torchrl.envs import EnvBase

from torchrl_marl.capture.program import listen_to_slow_work
from torchrl_marl.collectors.team import TeamPolicy
from torchrl_marl.envs.libraries import LIBRARIES
from torchrl_marl.envs.remember import hidden_sizes
from torchrl_marl.errors import ConfigError, SpecError, TrustError, quoted
from torchrl_marl.learners.build import build_learners, partition
from torchrl_marl.learners.config import finds_clusters
from torchrl_marl.runtime.random_state import ProcessState, RandomState, with_run_rng
from torchrl_marl.runtime.ranks import SINGLE_PROCESS, SingleProcess
from torchrl_marl.specs import TeamSpec
from torchrl_marl.training.checkpoint import load_learners, save_checkpoint
from torchrl_marl.training.config import TrainConfig
from torchrl_marl.training.environments import Environments, choose_execution, make_collector
from torchrl_marl.training.evaluation import Episodes, restoring_env
from torchrl_marl.training.folder import RunFolder
from torchrl_marl.training.interruption import Interruption
from torchrl_marl.training.metrics import EpisodeTracker, count_agent_frames, metrics_of
from torchrl_marl.training.origin import run_provenance
from torchrl_marl.training.part import Part, Progress
from torchrl_marl.training.progress import (
    Iteration,
    Until,
    evaluation_period,
    is_due,
    summary_entries,
)
from torchrl_marl.training.results import RunResults

__all__ = ["Iteration", "Training", "with_run_rng"]


class Training:
    """All components of a run, and the training iteration.

    A run has one or several members (``population.size``), in one or several processes (``ranks``).
    A run's random state and number of threads are separate from the rest of the process, so several
    trainings do not affect each other.

    Args:
        config (TrainConfig): config of the run.
        folder (RunFolder): folder of the run.
        env (EnvBase, optional): environment to use in place of the one in the settings.
        ranks (SingleProcess): the ranks of the run.
        trials (callable, optional): function of the settings, the population and its learners. It
            returns a part that starts and ends members during the run.
        callbacks (sequence of Callback): the callbacks that ``config.callbacks`` names.

    Attributes:
        parts (dict): optional parts, such as ``"league"``.
        results (RunResults or Population): writer of tables, evaluations and summaries.
    """

    def __init__(
        self,
        config: TrainConfig,
        folder: RunFolder,
        env: EnvBase | None,
        *,
        ranks: SingleProcess = SINGLE_PROCESS,
        trials: Callable[..., Part] | None = None,
        callbacks: Sequence[Any] = (),
    ) -> None:
        self.config = dataclasses.replace(config, execution=choose_execution(config, env))
        self._run_folder, self.folder = folder, folder.path
        self.ranks = ranks
        self.interruption = Interruption(ranks)
        self.left: weakref.finalize | None = None
        self.device = torch.device(config.device)
        self.process = ProcessState(config.seed, self.device, config.threads)
        self.parts: dict[str, Part] = {}
        with self.process.active():
            self._build(env, trials)
            if config.callbacks:
                self.parts["callbacks"] = self._make_callbacks(callbacks)
            if config.evaluation.absolute_episodes:
                from torchrl_marl.training.best import BestParameters

                self.parts["best"] = BestParameters(self.n_members)
            if config.until:  # after callbacks, whose metrics it may compare
                self.parts["until"] = Until(config)
        self.iteration = 0
        self.seconds = 0.0
        self.saved_at: int | None = None
        self._last_save_time = time.monotonic()

    # ------------------------------------------------------------------------------------- parts

    def _build(self, env: EnvBase | None, trials: Callable[..., Part] | None) -> None:
        self.environments = self._make_environments(env)
        self.env = self.environments.training
        self.team = TeamSpec.from_env(self.env)
        self.config = config = self._complete_config(self.config)
        self.learners: list[Any] = self._make_learners()
        self.policy = TeamPolicy(
            actor for learner in self.learners for actor in learner.actors.values()
        )
        remembers = any(learner.remembered for learner in self.learners)
        if remembers:
            self.environments.remember(hidden_sizes(self.policy))
        if config.league.enabled:
            self.parts["league"] = self._make_league()
        self.env = self.environments.training
        if config.distributed.enabled:
            from torchrl_marl.training.shards import share_minibatches

            share_minibatches(config, self.learners, self.shards)
        behavior_policy = self.policy if self.league is None else self.league.policy
        parts = self.env, behavior_policy, self.team, remembers, self.shards
        stop_requested, labels = lambda: self.interruption.stop_requested, self._make_labels()
        self.collector: Any = make_collector(config, *parts, stop_requested, labels)
        self.tracker = EpisodeTracker(self.team, self.n_members)
        self.tracker.exploited = 0 if self.league is None else self.league.n_exploiter_envs
        self.results: Any = self._make_results()
        if config.evolution.method != "none":
            from torchrl_marl.training.evolution import Evolution

            self.parts["evolution"] = Evolution(config, self.folder, self.results.rating)
        if trials is not None:
            self.parts["trials"] = trials(config, self.results, self.learners)
        if self.ranks.size > 1:
            self._copy_networks_from_rank_zero()

    def _make_environments(self, env: EnvBase | None) -> Environments:
        if self.n_members == 1:
            return Environments(self.config, env, self.device)
        from torchrl_marl.training.population import environments_of_members

        return environments_of_members(self.config, env, self.device)

    def _complete_config(self, config: TrainConfig) -> TrainConfig:
        """Returns the settings, completed by values that depend on the environment."""
        with_declared = LIBRARIES.hook(config.env.library, "declared")
        if with_declared is not None:
            config = with_declared(config, self.env)
        settings = partition(self.team, config.learner, config.groups)
        if any(finds_clusters(learner_config) for learner_config, _ in settings):
            from torchrl_marl.training.clusters import with_clusters

            config = with_clusters(config, self.team, self.env)
        return config

    def _make_learners(self) -> list[Any]:
        config = self.config
        if self.n_members == 1:
            options: dict[str, Any] = {"device": self.device, "execution": config.execution}
            return build_learners(self.team, config.learner, config.groups, **options)
        from torchrl_marl.training.population import learners_of_members

        return learners_of_members(config, self.team, self.device)

    def _make_labels(self) -> Callable[[Any], Any] | None:
        if self.config.data.expert is None:
            return None
        from torchrl_marl.training.data import make_labels

        return make_labels(self.config, self.environments, self.team)

    def _make_league(self) -> Part:
        from torchrl_marl.training.league import League

        parts = self.policy, self.learners, self.environments, self.folder
        return League(self.config, self.team, *parts)

    def _make_results(self) -> Any:
        parts = self.config, self._run_folder, self.team, self.policy, self.environments
        if self.n_members == 1:
            return RunResults(*parts)
        from torchrl_marl.training.population import Population

        return Population(*parts, self.learners, self.device)

    def _make_callbacks(self, callbacks: Sequence[Any]) -> Part:
        from torchrl_marl.training.callbacks import Callbacks

        return Callbacks(self.config, self.results, self.learners, self.ranks, callbacks)

    def _copy_networks_from_rank_zero(self) -> None:
        """Copies the first rank's networks and running statistics to this rank."""
        if self.environments.shared:
            raise ConfigError(
                f"a process can hold only one {self.config.env.name!r}, so that the first rank "
                "cannot evaluate while it trains; start one process."
            )
        states = [x for learner in self.learners for x in learner.state_dict().values()]
        tensors = [x for x in states if isinstance(x, Tensor)]
        for x, first in zip(tensors, self.ranks.broadcast([x.cpu() for x in tensors])):
            x.copy_(first)

    def open(self) -> None:
        """Opens the loggers and the tables, and removes rows after this iteration."""
        if self.config.execution == "compile" and self.n_members == 1 and self._run_folder.writes:
            from torchrl_marl.training.background_compile import BackgroundCompile

            self.parts["ahead"] = BackgroundCompile(self.folder, self.config, self.env)
        self.results.open(self.progress, done=self.done)
        for part in self.parts.values():
            part.open(self.iteration)

    @property
    def writes(self) -> bool:
        """True if this process writes the run folder."""
        return self._run_folder.writes

    @property
    def league(self) -> Any:
        """The league, or None if the run has none."""
        return self.parts.get("league")

    @property
    def trials(self) -> Any:
        """The part that starts and ends members, or None if the run has none."""
        return self.parts.get("trials")

    @property
    def run(self) -> Any:
        """The run that the training returns."""
        return self.results.run

    @property
    def recorder(self) -> Any:
        """Writer of the run's tables."""
        return self.results.recorder

    # ------------------------------------------------------------------------------------ numbers

    @property
    def n_members(self) -> int:
        """Number of members; 1 without a population."""
        return self.config.population.size

    @property
    def num_envs(self) -> int:
        """Number of envs of this process, including those on Ray actors."""
        if self.config.distributed.enabled or self.config.data.folder is not None:
            return self.config.env.num_envs // self.ranks.size
        return self.env.batch_size.numel()

    @property
    def shards(self) -> range:
        """The shards of this process, including those on Ray actors."""
        n = (self.config.distributed.collectors or 0) // self.ranks.size
        return range(self.ranks.rank * n, (self.ranks.rank + 1) * n)

    @property
    def frames(self) -> int:
        """Number of environment steps so far, per member, summed over all ranks."""
        return self.collector.frames * self.ranks.size // self.n_members

    @property
    def progress(self) -> Progress:
        """Progress of the run."""
        return Progress(self.iteration, self.frames, self.seconds)

    def _count_frames(self, batch: TensorDictBase) -> int:
        """Returns the number of environment steps of the run in a batch."""
        return batch.numel() * self.ranks.size

    @property
    def done(self) -> bool:
        """True if the run has reached ``total_frames`` or a condition that ends it."""
        if self.trials is not None:
            return self.trials.done
        if self.frames >= self.config.total_frames or self.results.reached:
            return True
        return any(part.done for part in self.parts.values())

    # ----------------------------------------------------------------------------------- the loop

    @with_run_rng
    def begin(self) -> None:
        """Evaluates the untrained, random and heuristic policies, and writes a checkpoint."""
        if "return_before" not in self.run.summary:
            for part in self.parts.values():
                part.begin(self)
            self.results.note("before", self.evaluate())
            self.results.add_returns_to_summary("random", self._play_evaluation(None))
            self.results.record_heuristic(self._play_evaluation)
            self.save()
        if self.trials is not None:
            self.trials.replace_ended(self)
        self.interruption.agree()

    @with_run_rng
    def step(self) -> Iteration:
        """Runs one iteration: collects, learns, writes a row, and evaluates and saves if due."""
        began = time.perf_counter()
        with listen_to_slow_work(self.recorder.show_slow_work):
            batch = self._collect()
            self._discard_lost_episodes(batch)
            for part in self.parts.values():
                part.collect(self, batch)
            metrics = self._learn_and_count(batch)
        table = torch.stack([v.double().reshape(-1) for v in metrics.values()], 1).tolist()
        values: list[dict[str, Any]] = [dict(zip(metrics, row)) for row in table]
        self.tracker.warn_of_games()
        seconds = time.perf_counter() - began
        self.iteration += 1
        self.seconds += seconds
        self.run.frames = self.frames
        extra: dict[str, Any] = {}
        for part in self.parts.values():
            part.measure(self, batch, values)
            extra |= part.update(self, batch)
        extra |= self.environments.restarts() | self.collector.counters
        row = self.results.write(values, extra, self.progress, self._count_frames(batch) / seconds)
        self._run_periodic_tasks(self._count_frames(batch) // self.n_members)
        self.interruption.agree()
        return Iteration(self.run, self.iteration, self.frames, row, batch)

    def _discard_lost_episodes(self, batch: TensorDictBase) -> None:
        """Discards running episodes that a batch does not continue."""
        lost_rows = self.collector.renewed
        if not self.collector.follows:
            lost_rows = torch.ones(len(batch), dtype=torch.bool, device=batch.device)
        if lost_rows is not None:
            self.tracker.forget(lost_rows)
            self._cut_sequences()

    def _cut_sequences(self) -> None:
        """Informs stateful learners that the next batch does not continue the last one."""
        for learner in self.learners:
            learner.cut()

    def _learn_and_count(self, batch: TensorDictBase) -> dict[str, Tensor]:
        """Learns from a batch; returns metrics, and counts of agent frames and ended episodes."""
        single_rank = self.ranks.size == 1
        with contextlib.nullcontext() if single_rank else self.ranks.active():
            episodes, learned = self.tracker.update(batch), self._learn(batch)
        if taken := sorted(episodes.keys() & learned.keys()):
            raise SpecError(
                f"a learner returns {quoted(taken[0])}, which is the name of a metric of the run; "
                "choose another name."
            )
        done = batch.get(("next", "done")).reshape(self.n_members, -1)
        counts = count_agent_frames(self.team, batch, self.n_members), done.sum(-1)
        agent_frames, ended = counts if single_rank else self.ranks.sum_all(counts)
        return {**episodes, **learned, "agent_frames": agent_frames, "episodes": ended}

    @with_run_rng
    def learn_once(self) -> None:
        """Collects a batch and learns from it, without writing anything."""
        self._learn(self._collect())

    def _collect(self) -> TensorDictBase:
        """Collects a batch; moves the schedules first, because agents explore by them."""
        self._move_schedules(self.frames)
        return self.collector.rollout()

    def _move_schedules(self, frames: int) -> float:
        """Moves all schedules to a number of frames; returns the progress of the run, 0 to 1."""
        progress = min(1.0, frames / self.config.total_frames)
        for learner in self.learners:
            learner.set_progress(progress)
        return progress

    def _learn(self, batch: TensorDictBase) -> dict[str, Tensor]:
        learned: dict[str, Tensor] = {}
        collected = self._count_frames(batch) // self.n_members
        progress = self._move_schedules(self.frames - collected)  # callbacks may change settings
        try:
            filtered_batch = batch
            for part in self.parts.values():
                filtered_batch = part.take(filtered_batch)
            for learner in self.learners:
                learned |= metrics_of(learner, learner.learn(filtered_batch), self.n_members)
            for part in self.parts.values():
                part.learn(batch, progress)
        finally:
            self.collector.finish(batch)
        return learned

    def _run_periodic_tasks(self, collected: int) -> None:
        settings, progress = self.config.evaluation, (self.frames, collected)
        evaluation_frames = evaluation_period(self.config)
        if self.trials is None and not self.done and is_due(evaluation_frames, *progress):
            self.results.scheduled(self.evaluate())
        if not self.done and is_due(settings.animate_every, *progress):
            self._write_animation(f"animations/episode_{self.frames}.gif")
        for part in self.parts.values():
            part.finish(self)
        self._save_if_due()

    def _save_if_due(self) -> None:
        every = self.config.checkpoint.every_iterations
        if self._timed_checkpoint_is_due() or (every and self.iteration % every == 0):
            self.save()

    def _timed_checkpoint_is_due(self) -> bool:
        """Returns whether the next timed checkpoint is due, by the first rank's clock."""
        minutes = self.config.checkpoint.every_minutes
        if minutes is None:
            return False
        due = time.monotonic() - self._last_save_time >= 60 * minutes
        return due if self.ranks.size == 1 else self.ranks.broadcast(due)

    @with_run_rng
    def evaluate(self) -> Any:
        """Evaluates the policy, and writes a row to ``evaluation.csv``.

        Returns:
            dict: the row, which is empty if no episodes are played; with several members, a list of
            rows.
        """
        played = self._play_evaluation(self.policy)
        return self.results.evaluation(self.progress, played, self._pass_evaluation_to_parts)

    def _pass_evaluation_to_parts(self, results: Sequence[dict[str, Any]]) -> None:
        for part in self.parts.values():
            part.evaluated(self, results)

    def _play_evaluation(self, policy: Any, *, other: bool = False) -> list[Episodes]:
        """Plays an evaluation's episodes; ``other`` swaps the most likely and sampled actions."""
        return self.play(lambda: self.results.play(policy, other=other))

    def play(self, episodes: Callable[[], list[Episodes]]) -> list[Episodes]:
        """Plays episodes in the first process, apart from the training; returns them in all.

        Args:
            episodes (callable): plays the episodes and returns them.
        """
        found: list[Episodes] = []
        with self.ranks.rank_zero_first() as first, SINGLE_PROCESS.active():
            if first:
                with self._preserve_training_state():
                    found = episodes()
        return self.ranks.broadcast(found)

    def _write_animation(self, path: str) -> None:
        """Writes an animation; this does not affect the training."""
        if self._run_folder.writes:
            with self._preserve_training_state():
                self.environments.draw(self.policy, self.team, self.folder / path)
            self.recorder.picture(self.folder / path, self.frames)

    @contextlib.contextmanager
    def _preserve_training_state(self) -> Iterator[None]:
        shared = self.environments.shared
        with restoring_env(self.env) if shared else contextlib.nullcontext(True) as restored:
            yield
        # After an evaluation, a shared environment is restored, or else starts new episodes.
        if not restored:
            self.collector.load_state_dict({})
            self.env.set_seed(self.config.seed + self.iteration)
            self.tracker.load_state_dict({})  # the evaluation has ended its episodes
            self._cut_sequences()

    @with_run_rng
    def end(self) -> None:
        """Evaluates the trained policy, and writes a checkpoint and the summary."""
        self.recorder.close_bar()
        if self.trials is None:
            self._add_final_results()
        else:
            self.run.summary |= summary_entries(self.config, self.frames, self.seconds)
        self.save()
        if self._run_folder.writes:
            self.results.write_summaries(self.progress)
        if self.config.evaluation.gif:
            self._write_animation("episode.gif")

    def _add_final_results(self) -> None:
        """Adds the returns after training, the frames and the time to the summary."""
        if "return_after" not in self.run.summary:
            known = self.results.known(self.iteration)
            self.results.note("after", self.evaluate() if known is None else known)
            self.results.conclude(
                self.progress, lambda: self._play_evaluation(self.policy, other=True)
            )
            for part in self.parts.values():
                part.end(self)
            self.saved_at = None  # the checkpoint must be written again, with the new summary
        self.results.end(self.progress)

    # ------------------------------------------------------------------------------------ state

    def save(self) -> None:
        """Writes a checkpoint, unless there is one of this iteration."""
        if self.saved_at != self.iteration:
            with self.interruption.unbroken():
                state = self.state_dict()
                if self._run_folder.writes:
                    keep = self.config.checkpoint.keep
                    save_checkpoint(self.folder, self.iteration, state, keep)
                    self.save_members(state)
            self.saved_at = self.iteration
            self._last_save_time = time.monotonic()
            for part in self.parts.values():
                part.saved(self)
        if not self.interruption.entered:
            self.interruption.handle_signal(self.folder)

    @with_run_rng
    def save_members(self, state: dict[str, Any]) -> None:
        """Writes a checkpoint of each member of a population."""
        self.results.save(state, self.progress)

    def leave(self) -> None:
        """Saves and closes the run after its loop was left early."""
        if self._run_folder.release.alive:
            if "return_before" in self.run.summary and not self.interruption.entered:
                self.save()
            self.close()

    def close(self) -> None:
        """Closes tables, loggers and environments, and releases the run folder."""
        for part in self.parts.values():
            part.close()
        self.results.close()
        if self.config.distributed.enabled:
            self.collector.shutdown()
        self.environments.close()
        self._run_folder.release()
        if self.left is not None:
            self.left.detach()

    @with_run_rng
    def state_dict(self) -> dict[str, Any]:
        """Returns the complete state, for exact resuming; rank 0 gathers it from all ranks."""
        collector = self.collector.state_dict()
        collector.pop("policy_state_dict", None)  # it is part of the learners' states
        parts = {name: own.state_dict() for name, own in self.parts.items() if name != "ahead"}
        state = {
            "iteration": self.iteration,
            "seconds": self.seconds,
            "summary": dict(self.run.summary),
            "learners": [learner.state_dict() for learner in self.learners],
            "collector": collector,
            "tracker": self.tracker.state_dict(),
            "random": RandomState.of_process(self.device).state_dict(),
            "made_by": run_provenance(self.config),
            "league": None,
            **self.results.state_dict(),
            **parts,
        }
        if self.ranks.size == 1:
            return state
        from torchrl_marl.training.ddp import gather_state

        return gather_state(state, self.ranks)

    @with_run_rng
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores the state in a checkpoint; with several ranks, this rank's part of it."""
        if self.ranks.size > 1:
            from torchrl_marl.training.ddp import state_of_rank

            state = state_of_rank(state, self.ranks, self.shards, self.num_envs)
        self.results.check(state)
        for name, part in self.parts.items():
            part.load_state_dict(state.get(name, {}))
        self.iteration = state["iteration"]
        # Checkpoints of members follow that of the population, and a killed run may lack them.
        self.saved_at = self.iteration if self.n_members == 1 else None
        self.seconds = state["seconds"]
        self.run.summary.update(state["summary"])
        load_learners(self.learners, state["learners"])
        self.results.load_state_dict(state)
        self._load_episodes(state)
        process = RandomState(0, self.device)
        process.load_state_dict(state["random"])
        process.install()
        self.run.frames = self.frames

    def _load_episodes(self, state: dict[str, Any]) -> None:
        """Restores the running episodes, if the environments support this."""
        resumed = False
        try:
            resumed = self.collector.load_state_dict(state["collector"])
        except TrustError as error:
            hint = "resume with --trust (in Python: trust=True), if you trust its author."
            warnings.warn(f"{error} New episodes start; to resume exactly, {hint}", stacklevel=2)
        tracker = {name: value.to(self.device) for name, value in state["tracker"].items()}
        if any(len(value) != self.num_envs for value in tracker.values()):
            raise ValueError("running episodes of another number of envs")
        self.tracker.load_state_dict(tracker if resumed else {})
        if not resumed:
            self._cut_sequences()
