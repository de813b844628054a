"""Training of a run: collects, learns and logs; evaluates and saves when due."""

from __future__ import annotations

import contextlib
import dataclasses
import time
import warnings
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from tensordict import TensorDictBase
from torch import Tensor
from torchrl.envs import EnvBase

from torchrl_marl.capture.program import announced_to
from torchrl_marl.collectors.team import TeamPolicy
from torchrl_marl.envs.libraries import LIBRARIES
from torchrl_marl.envs.remember import remembered_by
from torchrl_marl.errors import TrustError
from torchrl_marl.learners.build import build_learners, partition
from torchrl_marl.learners.config import finds_clusters
from torchrl_marl.runtime.random_state import RandomState
from torchrl_marl.specs import TeamSpec
from torchrl_marl.training.checkpoint import load_learners, save_checkpoint
from torchrl_marl.training.collecting import (
    begun_anew,
    counters,
    cut,
    make_collector,
    remember,
)
from torchrl_marl.training.config import TrainConfig
from torchrl_marl.training.environments import Environments
from torchrl_marl.training.evaluation import Episodes, after_training, figures_of_all, put_back
from torchrl_marl.training.folder import RunFolder
from torchrl_marl.training.interruption import Interruption
from torchrl_marl.training.metrics import EpisodeTracker, count_agent_frames, mean_return
from torchrl_marl.training.origin import made_by
from torchrl_marl.training.process_state import ProcessState, choose_execution, in_its_own_state
from torchrl_marl.training.progress import (
    Iteration,
    StopAtReturn,
    figures_of,
    is_due,
    returns_of,
    write_summary,
)
from torchrl_marl.training.recorder import Recorder, say
from torchrl_marl.training.run import Run

if TYPE_CHECKING:
    from torchrl_marl.training.ahead import CompilingAhead
    from torchrl_marl.training.league import League

__all__ = ["Iteration", "Training", "in_its_own_state"]


class Training:
    """All parts of a run, and its step.

    It works with random generators and threads of its own, so that several trainings in one
    process, and the code around them, do not disturb each other.

    Args:
        config (TrainConfig): a recipe.
        folder (RunFolder): where it is kept.
        env (EnvBase, optional): an environment of one's own.
    """

    league: League | None = None
    ahead: CompilingAhead | None = None

    def __init__(self, config: TrainConfig, folder: RunFolder, env: EnvBase | None) -> None:
        self.config = dataclasses.replace(config, execution=choose_execution(config, env))
        self._kept = folder
        self.folder = folder.path
        self.interruption = Interruption()
        self.left: weakref.finalize | None = None
        self.device = torch.device(config.device)
        self.process = ProcessState(config.seed, self.device, config.threads)
        with self.process.active():
            self._build(env)
        self.iteration = 0
        self.agent_frames = 0
        self.seconds = 0.0
        self.saved_at: int | None = None
        self._saved_when = time.monotonic()
        self._evaluated: tuple[int, Episodes] | None = None

    def _build(self, env: EnvBase | None) -> None:
        config = self.config
        self.environments = Environments(config, env, self.device)
        self.env = self.environments.training
        self.team = TeamSpec.from_env(self.env)
        with_declared = LIBRARIES.hook(config.env.library, "declared")
        if with_declared is not None:
            config = with_declared(config, self.env)
        settings = partition(self.team, config.learner, config.groups)
        if any(finds_clusters(own) for own, _ in settings):
            from torchrl_marl.training.clusters import with_clusters

            config = with_clusters(config, self.team, self.env)
        self.config = config
        self.learners = build_learners(
            self.team,
            config.learner,
            config.groups,
            device=self.device,
            execution=config.execution,
        )
        self.policy = TeamPolicy(
            actor for learner in self.learners for actor in learner.actors.values()
        )
        if remember(self.learners):
            self.environments.remember(remembered_by(self.policy))
            self.env = self.environments.training
        if config.league.enabled:
            from torchrl_marl.training.league import League

            self.league = League(
                config, self.team, self.policy, self.learners, self.environments, self.folder
            )
            self.env = self.environments.training
        acting = self.policy if self.league is None else self.league.policy
        if config.distributed.enabled:
            from torchrl_marl.training.shards import share_minibatches

            share_minibatches(config, self.learners, self.shards)
        parts = config, self.env, acting, self.team, self.learners, self.shards
        self.collector: Any = make_collector(*parts, lambda: self.interruption.asked)
        self.tracker = EpisodeTracker(self.team)
        self.stopping = StopAtReturn(config)
        self.run = Run(self.folder, config, self.policy, {}, self.environments.own)
        self.run.trained_on = self.env if self.environments.shared else None

    def open(self) -> None:
        """Opens the tables, truncated to this iteration, and the loggers."""
        if self.league is not None:
            self.league.open(self.iteration)
        if self.config.execution == "compile":
            from torchrl_marl.training.ahead import CompilingAhead

            self.ahead = CompilingAhead(self.folder, self.config, self.env)
        self.recorder = Recorder(
            self.config,
            self.folder,
            iterations=self.iteration,
            frames=self.frames,
            done=self.done,
        )

    @property
    def num_envs(self) -> int:
        """Number of envs that are collected from, wherever they are."""
        sharded = self.config.distributed.enabled
        return self.config.env.num_envs if sharded else self.env.batch_size.numel()

    @property
    def shards(self) -> range:
        """The shards that are collected from in this process, or from here."""
        return range(self.config.distributed.collectors or 0)

    @property
    def frames(self) -> int:
        """Number of env steps so far."""
        return self.collector.frames

    def _count(self, batch: TensorDictBase) -> int:
        """Returns the number of env steps of the run that a batch is of."""
        return batch.numel()

    @property
    def done(self) -> bool:
        """Whether all frames are collected, or the return is high enough."""
        return self.frames >= self.config.total_frames or self.stopping.reached

    @in_its_own_state
    def begin(self) -> None:
        """Evaluates the untrained, the random and the heuristic policy, once, and saves."""
        if "return_before" in self.run.summary:
            return
        if self.league is not None:
            self.league.begin()
        self._note("before", self.evaluate())
        self._note("random", figures_of_all(self._measure(None)))
        self.run.summary["return_heuristic"] = None
        if self.config.evaluation.episodes and (own := self.environments.heuristic()) is not None:
            self._note("heuristic", figures_of_all(self._measure(own)))
        self.save()

    def _note(self, when: str, result: dict[str, float]) -> None:
        self.run.summary |= returns_of(when, result, list(self.team.groups))

    @in_its_own_state
    def step(self) -> Iteration:
        """Collects a batch, learns from it, writes a row; evaluates and saves when due."""
        began = time.perf_counter()
        with announced_to(self.recorder.working):
            batch = self.collector.rollout()
            if (renewed := begun_anew(self.collector, batch)) is not None:
                self.tracker.forget(renewed)
                cut(self.learners)
            if self.ahead is not None:
                self.ahead.wait()
            found = self._learn_and_count(batch)
            if self.ahead is not None:
                self.ahead.learned()
        numbers = torch.stack([v.double() for v in found.values()]).tolist()
        values: dict[str, Any] = dict(zip(found, numbers))
        self.tracker.warn_of_games()
        seconds = time.perf_counter() - began
        self.iteration += 1
        self.agent_frames += int(values.pop("agent_frames"))
        self.stopping.saw_episodes(mean_return(self.team, values), int(values.pop("episodes")))
        self.run.frames = self.frames
        self.seconds += seconds
        if self.league is not None:
            now = self.collector.carry, self.iteration, self.frames
            values |= self.league.update(batch, self.tracker.episodes, *now)
        row = {
            "iteration": self.iteration,
            "frames": self.frames,
            "agent_frames": self.agent_frames,
            "seconds": round(self.seconds, 3),
            "frames_per_second": round(self._count(batch) / seconds, 1),
            **values,
            **(self.environments.restarts() | counters(self.collector)),
        }
        self.recorder.iteration(row, [row[f"{name}/episode_reward"] for name in self.team.groups])
        self._do_what_is_due(self._count(batch))
        return Iteration(self.run, self.iteration, self.frames, row, batch)

    def _learn_and_count(self, batch: TensorDictBase) -> dict[str, Tensor]:
        """Learns from a batch; returns its metrics, and of how much they are."""
        episodes, learned = self.tracker.update(batch), self._learn(batch)
        counts = {"agent_frames": count_agent_frames(self.team, batch)}
        counts["episodes"] = batch.get(("next", "done")).sum()
        return {**episodes, **learned, **counts}

    @in_its_own_state
    def learn_once(self) -> None:
        """Collects a batch and learns from it, and no more."""
        self._learn(self.collector.rollout())

    def _learn(self, batch: TensorDictBase) -> dict[str, Tensor]:
        learned: dict[str, Tensor] = {}
        collected = self._count(batch) // self.config.population.size
        progress = min(1.0, (self.frames - collected) / self.config.total_frames)
        try:
            own = batch if self.league is None else self.league.own(batch)
            for learner in self.learners:
                learner.set_progress(progress)
                metrics = learner.learn(own).items(True, True)
                learned |= {f"{group}/{name}": value for (group, name), value in metrics}
            if self.league is not None:
                self.league.learn(batch, progress)
        finally:
            self.collector.finish(batch)
        return learned

    def _do_what_is_due(self, collected: int) -> None:
        settings, now = self.config.evaluation, (self.frames, collected)
        if not self.done and is_due(settings.every_frames, *now):
            self.stopping.saw_evaluation(self.evaluate()["return_mean"])
        if not self.done and is_due(settings.animate_every, *now):
            self._draw(f"animations/episode_{self.frames}.gif")
        self._save_if_due()

    def _save_if_due(self) -> None:
        every = self.config.checkpoint.every_iterations
        if self._late() or (every and self.iteration % every == 0):
            self.save()

    def _late(self) -> bool:
        minutes = self.config.checkpoint.every_minutes
        return minutes is not None and time.monotonic() - self._saved_when >= 60 * minutes

    @in_its_own_state
    def evaluate(self) -> dict[str, float]:
        """Evaluates the policy and writes a row of ``evaluation.csv``; empty without episodes."""
        if (played := self._measure(self.policy)) is None:
            return {}
        result, seconds = played.figures(), round(self.seconds, 3)
        progress = {"iteration": self.iteration, "frames": self.frames, "seconds": seconds}
        self.recorder.evaluation(progress, result)
        self._evaluated = self.iteration, played
        return result

    def _measure(self, policy: Any, other: bool = False) -> Episodes | None:
        """Plays the evaluation's episodes, by the settings' actions or by the other kind's."""
        if not self.config.evaluation.episodes:
            return None
        with self._apart():
            return self.environments.play(policy, self.team, other)

    def _draw(self, path: str) -> None:
        """Writes an animation; the training goes on as if nothing had been."""
        if self._kept.writes:
            with self._apart():
                self.environments.draw(self.policy, self.team, self.folder / path)

    @contextlib.contextmanager
    def _apart(self) -> Iterator[None]:
        shared = self.environments.shared
        with put_back(self.env) if shared else contextlib.nullcontext(True) as goes_on:
            yield
        # Where one environment serves both, training goes on in its place, or starts anew.
        if not goes_on:
            self.collector.load_state_dict({})
            self.env.set_seed(self.config.seed + self.iteration)
            self.tracker.load_state_dict({})  # the evaluation cut off its episodes
            cut(self.learners)

    @in_its_own_state
    def end(self) -> None:
        """Evaluates the trained policy, saves and writes the summary."""
        self.recorder.close_bar()
        if "return_after" not in self.run.summary:
            at, played = self._evaluated or (None, None)
            self._note("after", figures_of_all(played) if at == self.iteration else self.evaluate())
            self._note_kinds()
            self.stopping.tell(self.frames)
            self.saved_at = None  # the last iteration's checkpoint lacks it
        self.run.summary |= figures_of(self.config, self.frames, self.seconds)
        self.save()
        if self._kept.writes:
            write_summary(self.folder, self.run.summary)
        if self.config.evaluation.gif:
            self._draw("episode.gif")

    def _note_kinds(self) -> None:
        """Adds all figures to the summary, of both kinds of actions where that is asked for."""
        settings = self.config.evaluation
        at, played = self._evaluated or (None, None)
        if played is None or at != self.iteration:
            return  # nothing is measured
        other = self._measure(self.policy, other=True) if settings.both else None
        self.run.summary |= after_training(played, other, settings.deterministic)
        if self.run.summary.get("actions_differ"):
            say(self.run.summary["actions_differ"], warns=False)

    def save(self) -> None:
        """Writes a checkpoint, unless this iteration has one."""
        if self.saved_at != self.iteration:
            with self.interruption.unbroken():
                keep = self.config.checkpoint.keep
                save_checkpoint(self.folder, self.iteration, self.state_dict(), keep)
            self.saved_at = self.iteration
            self._saved_when = time.monotonic()
        if not self.interruption.entered:
            self.interruption.heed(self.folder)

    def leave(self) -> None:
        """Saves and closes a run whose loop was left."""
        if self._kept.release.alive:
            if "return_before" in self.run.summary and not self.interruption.entered:
                self.save()
            self.close()

    def close(self) -> None:
        """Closes tables, loggers and environments; releases the folder for resuming."""
        if self.ahead is not None:
            self.ahead.close()
        self.recorder.close()
        if self.config.distributed.enabled:
            self.collector.shutdown()
        self.environments.close()
        self.run.trained_on = None
        self._kept.release()
        if self.left is not None:
            self.left.detach()

    @in_its_own_state
    def state_dict(self) -> dict[str, Any]:
        """Returns all state that exact resuming needs."""
        collector = self.collector.state_dict()
        collector.pop("policy_state_dict", None)  # the learners save it
        return {
            "iteration": self.iteration,
            "agent_frames": self.agent_frames,
            "seconds": self.seconds,
            "summary": dict(self.run.summary),
            "learners": [learner.state_dict() for learner in self.learners],
            "collector": collector,
            "tracker": self.tracker.state_dict(),
            "stopping": self.stopping.state_dict(),
            "random": RandomState.of_process(self.device).state_dict(),
            "league": None if self.league is None else self.league.state_dict(),
            "made_by": made_by(self.config),
        }

    @in_its_own_state
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores a checkpoint."""
        self.iteration = self.saved_at = state["iteration"]
        self.agent_frames = state["agent_frames"]
        self.seconds = state["seconds"]
        self.run.summary.update(state["summary"])
        if "stopping" in state:  # missing in version 0.1
            self.stopping.load_state_dict(state["stopping"])
        load_learners(self.learners, state["learners"])
        if self.league is not None:
            self.league.load_state_dict(state["league"])
        resumed = False
        try:
            resumed = self.collector.load_state_dict(state["collector"])
        except TrustError as error:
            how = "resume with --trust (in Python: trust=True), if you trust who made it."
            warnings.warn(f"{error} Episodes begin anew; to go on exactly, {how}", stacklevel=2)
        tracker = {name: value.to(self.device) for name, value in state["tracker"].items()}
        if any(len(value) != self.num_envs for value in tracker.values()):
            raise ValueError("running episodes of another number of envs")
        self.tracker.load_state_dict(tracker if resumed else {})
        if not resumed:
            cut(self.learners)
        process = RandomState(0, self.device)
        process.load_state_dict(state["random"])
        process.install()
        self.run.frames = self.frames
