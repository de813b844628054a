"""The results of a run: folder, settings, policy and summary."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import json
import warnings
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from tensordict.nn import TensorDictModuleBase
from torchrl.envs import EnvBase, TransformedEnv

from torchrl_marl.collectors.team import TeamPolicy
from torchrl_marl.envs.external_code import as_environment
from torchrl_marl.envs.make import make_env
from torchrl_marl.envs.remember import with_memory
from torchrl_marl.envs.torchrl.env import TorchRLEnv, adapt
from torchrl_marl.envs.transforms import with_dense_groups
from torchrl_marl.errors import CheckpointError, ConfigError, WriteError, quoted
from torchrl_marl.learners.build import build_learners
from torchrl_marl.learners.learner import Learner
from torchrl_marl.modules.precision import set_precision
from torchrl_marl.runtime.applications import import_application
from torchrl_marl.runtime.random_state import RandomState
from torchrl_marl.runtime.trust import refuse_links, trusting
from torchrl_marl.settings import Reader, flatten, normalized
from torchrl_marl.specs import TeamSpec
from torchrl_marl.training.checkpoint import load_latest, load_learners
from torchrl_marl.training.config import TrainConfig, last_stage, read_run_config
from torchrl_marl.training.evaluation import (
    AT_ONCE,
    EVALUATION_SEED,
    Episodes,
    play,
    record_animation,
    restoring_env,
)
from torchrl_marl.training.files import append, json_text
from torchrl_marl.training.origin import (
    check_environment,
    check_origin,
    differences,
    in_words,
    settings_of,
)

if TYPE_CHECKING:
    from torchrl_marl.apps.export import Export

__all__ = ["Run", "refuse_population"]


class Run:
    """A trained run, with its folder, settings, policy and summary.

    Args:
        folder (Path): folder with ``config.yaml``, ``metrics.csv``, ``evaluation.csv``,
            ``summary.json`` and ``checkpoints/``.
        config (TrainConfig): config of the run.
        policy (TensorDictModuleBase): the joint policy of the team, for ``env.rollout``.
        summary (dict): ``return_before``, ``return_after``, ``return_random``,
            ``return_heuristic``, ``frames``, ``seconds`` and ``frames_per_second``; with several
            groups also ``<group>/return_after`` and so on.
        env (EnvBase, optional): the environment, if the run was started with an environment object.

    Attributes:
        frames (int): environment steps that the run was trained for.
        trained_on (EnvBase, optional): the environment, while the run is being trained on it.
        other_env (dict): settings of the environment that differ from those of the training.

    Examples:
        >>> import tempfile, torchrl_marl
        >>> folder = tempfile.mkdtemp() + "/run"
        >>> run = torchrl_marl.train("toy_matrix_game_mappo", folder=folder, total_frames=640,
        ...                          frames_per_batch=320, env={"num_envs": 32},
        ...                          learner={"minibatch_size": 160},
        ...                          evaluation={"episodes": 0}, logging={"progress": False})
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
        self.frames = 0
        self.trained_on: EnvBase | None = None
        self.other_env: dict[str, Any] = {}
        self._env = env

    @classmethod
    def load(
        cls,
        folder: str | Path,
        device: torch.device | str | None = None,
        env: EnvBase | None = None,
        trust: bool = False,
        settings: Mapping[str, Any] | None = None,
    ) -> Run:
        """Loads a run from its folder, with the policy of its last checkpoint.

        The random state of the process does not change. With ``settings``, the policy plays in a
        changed environment, such as one with more agents. Its networks must not depend on the
        change.

        Args:
            folder (str or Path): folder of the run.
            device (torch.device, optional): device of the policy; by default, that of the run.
            env (EnvBase, optional): the environment, if the run was started with an environment
                object.
            trust (bool): whether to trust another user's run: to import the module of its
                environment, and to follow links out of the folder.
            settings (mapping, optional): settings of the environment that differ from the run's,
                such as ``{"env.kwargs.n_agents": 8}``.

        Raises:
            ConfigError: ``settings`` has a setting that is not of the environment, or is given with
                ``env``; or the policy does not fit the changed environment.
            CheckpointError: the folder has no run, or no undamaged checkpoint.
            TrustError: the run is another user's, and needs ``trust``.
        """
        with trusting(trust):
            folder = last_stage(folder)
            refuse_links(folder)
            config = read_run_config(folder)
        refuse_population(folder, config)
        device = config.device if device is None else device
        if env is None:
            check_environment(folder, config.env, trust)
            with trusting(trust):
                check_origin(folder / "config.yaml", config, only="env.")
        checkpoint_path, state = load_latest(folder)
        changed = _describe_changes(state, checkpoint_path, config)
        config = _with_env_settings(config, settings, env) if settings else config
        with RandomState(config.seed, device).active():
            example_env = _use_or_make_env(config, env, device, num_envs=1)
            team = TeamSpec.from_env(example_env)
            if env is None:
                example_env.close()
            learners = build_learners(team, config.learner, config.groups, device=device)
        if settings:
            from torchrl_marl.training.leaves import load_actors

            load_actors(learners, state["learners"], settings)
        else:
            _load_learners(learners, state, changed)
        actors = [actor for learner in learners for actor in learner.actors.values()]
        path = folder / "summary.json"
        try:
            summary = dict(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else {}
        except (OSError, ValueError, TypeError):
            summary = {}  # the file is damaged, but only the policy is needed
        run = cls(folder, config, TeamPolicy(actors), summary, env)
        run.frames, run.other_env = state["collector"]["frames"], flatten(settings or {})
        return run

    def players(self) -> dict[str, TeamPolicy]:
        """Returns the stored players of a league as joint policies by name, oldest first.

        Raises:
            CheckpointError: the run has no stored players, or a file is missing.
        """
        from torchrl_marl.training.pool import read_player, stored_players, with_networks

        policy = cast(TeamPolicy, self.policy)
        return {
            one.path.stem: with_networks(policy, read_player(one.path))
            for one in stored_players(self.folder)
        }

    def evaluate(
        self,
        episodes: int | None = None,
        deterministic: bool | None = None,
        gif: bool = False,
        env: EnvBase | None = None,
        seed: int | None = None,
        record: bool = False,
        mp4: bool = False,
        shown: int = 1,
        randomize: Mapping[str, Any] | bool | None = None,
    ) -> dict[str, float]:
        """Plays whole episodes with the trained policy.

        If the run has an environment object, its state is restored afterwards, even within
        ``iterate(env=...)``, so an evaluation does not affect the training.

        Args:
            episodes (int, optional): number of episodes; by default, as in the settings.
            deterministic (bool, optional): whether to take the most likely actions; by default, as
                in the settings.
            gif (bool): whether to write the first episodes to ``episode.gif`` in the run folder.
            env (EnvBase, optional): environment to use in place of the run's.
            seed (int, optional): random seed of the initial states. The default, 0, gives the
                initial states of every run's evaluations; training uses other initial states.
            record (bool): whether to add the result to ``evaluations.jsonl`` in the run folder;
                NaN and infinity are written as null.
            mp4 (bool): whether to write the first episodes to ``episode.mp4``, too.
            shown (int): number of episodes in the animation.
            randomize (mapping or bool, optional): ranges or fixed values of ``env.randomize`` to
                play with, such as ``{"agent_mass": 1.3}``; True: those of the training; False:
                nominal values. By default, as in the settings.

        Returns:
            dict: result of :func:`~torchrl_marl.training.evaluate`.

        Raises:
            ConfigError: ``episodes`` is below 1, the environment cannot be drawn, or it is being
                trained on and its state cannot be restored.
            MissingExtraError: a package for animations is not installed.
        """
        options = (gif, env, seed, record, mp4, shown, randomize)
        return self.play(episodes, deterministic, *options).figures()

    def play(
        self,
        episodes: int | None = None,
        deterministic: bool | None = None,
        gif: bool = False,
        env: EnvBase | None = None,
        seed: int | None = None,
        record: bool = False,
        mp4: bool = False,
        shown: int = 1,
        randomize: Mapping[str, Any] | bool | None = None,
    ) -> Episodes:
        """Plays like :meth:`evaluate`, but returns the returns and length of each episode.

        All policies in an environment start from the same initial states, so they can be compared
        episode by episode.

        Args:
            episodes, deterministic, gif, env, seed, record, mp4, shown, randomize: as for
                :meth:`evaluate`.
        """
        settings = self.config.evaluation
        episodes = settings.episodes if episodes is None else episodes
        deterministic = settings.deterministic if deterministic is None else deterministic
        seed = 0 if seed is None else seed
        if not isinstance(episodes, Integral) or episodes < 1:
            raise ConfigError(
                f"episodes is {quoted(episodes)}, expected a whole number, 1 or more; use "
                f"episodes={settings.episodes}."
            )
        if not isinstance(seed, Integral):
            raise ConfigError(f"seed is {quoted(seed)}, expected a whole number; use seed=0.")
        paths = [self.folder / f"episode.{kind}" for kind in ("gif",) * gif + ("mp4",) * mp4]
        num_envs, config = min(episodes, AT_ONCE), self._config_with_ranges(randomize, env)
        with self._evaluation_env(
            env, seed, num_envs, "evaluate", drawn=bool(paths), config=config
        ) as environment:
            team = TeamSpec.from_env(environment)
            with record_animation(environment, team, paths, shown) as film:
                found = play(
                    environment,
                    self.policy,
                    team,
                    episodes=episodes,
                    deterministic=deterministic,
                    seed=seed + EVALUATION_SEED,
                    film=film,
                )
        if record:
            conditions = dict(self.other_env)
            conditions |= {} if randomize is None else {"randomize": randomize}
            self._append_evaluation(
                {"seed": seed, "deterministic": deterministic, **conditions, **found.figures()}
            )
        return found

    def export(
        self,
        agent: str | None = None,
        *,
        format: str = "onnx",
        folder: str | Path | None = None,
        steps: int = 200,
        env: EnvBase | None = None,
    ) -> Export:
        """Exports standalone programs of agents, and compares their actions with the team's.

        The exported programs compute in float32, and so does the team in the comparison.

        Args:
            agent (str, optional): name of the agent; by default all agents.
            format (str): ``onnx`` or ``pt2``. :class:`~torchrl_marl.apps.export.Player` needs only
                numpy and onnxruntime for ``onnx``, and torch and ``trust=True`` for ``pt2``.
            folder (str or Path, optional): folder for the programs; by default ``export`` in the
                run folder.
            steps (int): smallest number of steps to compare; always at least one whole episode and
                the first step of the next.
            env (EnvBase, optional): environment to use in place of the run's.

        Raises:
            ConfigError: the agent or the format is unknown, the actor cannot be split by agent, or
                the folder holds an agent that is not of this team.
            MissingExtraError: a package is not installed.
            UserError: the actions of a program differ from the team's, or their distributions.
        """
        exporting = import_application("export")
        policy = copy.deepcopy(self.policy)
        set_precision(policy, "float32")
        agents = exporting.find_agents(policy, agent)
        folder = self.folder / "export" if folder is None else Path(folder)
        if agent is None:
            exporting.refuse_agents_but(agents, folder)
        folders = exporting.export_agents(agents, folder, format)
        players = {name: exporting.Player(own, trust=True) for name, own in folders.items()}
        seed = self.config.seed
        with (
            self._evaluation_env(env, seed, 1, "export") as environment,
            RandomState(seed, environment.device or "cpu").active(),
        ):
            environment.set_seed(seed + EVALUATION_SEED)
            found = exporting.check_players(environment, policy, players, steps=steps)
        return exporting.Export(folder, folders, found)

    def _config_with_ranges(
        self, randomize: Mapping[str, Any] | bool | None, env: EnvBase | None
    ) -> TrainConfig:
        """Returns the settings of an evaluation with the given ranges."""
        if randomize is None:
            return self.config
        if env is not None or self._env is not None:
            raise ConfigError(
                f"randomize is {quoted(randomize)}, but the environment is given as an object; "
                "randomize that: torchrl_marl.envs.randomized(env, ranges)."
            )
        on = randomize if isinstance(randomize, bool) else True
        ranges = self.config.env.randomize if isinstance(randomize, bool) else dict(randomize)
        return dataclasses.replace(
            self.config,
            env=dataclasses.replace(self.config.env, randomize=ranges),
            evaluation=dataclasses.replace(self.config.evaluation, randomize=on),
        )

    @contextlib.contextmanager
    def _evaluation_env(
        self,
        env: EnvBase | None,
        seed: int,
        num_envs: int,
        method: str,
        drawn: bool = False,
        config: TrainConfig | None = None,
    ) -> Iterator[EnvBase]:
        """Context with an environment to play in, which is restored or closed on exit."""
        device = next(
            (p.device for p in self.policy.parameters()), torch.device(self.config.device)
        )
        chosen = env if env is not None else self._env
        trained = self.trained_on
        if trained is not None and (
            chosen is None or _innermost_env(chosen) is _innermost_env(trained)
        ):
            chosen = trained
        with RandomState(seed, device).active():
            config = self.config if config is None else config
            env = _use_or_make_env(config, chosen, device, num_envs=num_envs, drawn=drawn)
        env = with_memory(env, self.policy)
        try:
            with restoring_env(env) as undisturbed:
                if env is trained and not undisturbed:
                    raise ConfigError(
                        f"{type(_innermost_env(env)).__name__} is being trained, and its state "
                        f"cannot be restored; play on another one: run.{method}(env=...)."
                    )
                yield env
        finally:
            if chosen is None:
                env.close()

    def make_env(self, num_envs: int = 1) -> EnvBase:
        """Builds the run's environment with the transforms that the policy needs.

        If the run has an environment object, this object is returned. Use it for example with
        ``env.rollout``.

        Args:
            num_envs (int): number of envs.

        Raises:
            CheckpointError: the run was started with an environment object, but loaded without it.
        """
        device = next((p.device for p in self.policy.parameters()), self.config.device)
        env = _use_or_make_env(self.config, self._env, device, num_envs=num_envs)
        return with_memory(env, self.policy)

    def _append_evaluation(self, result: dict[str, Any]) -> None:
        when = datetime.now().astimezone().isoformat(timespec="seconds")
        row = {"time": when, "frames": self.frames, **result}
        try:
            append(self.folder / "evaluations.jsonl", json_text(row))
        except WriteError as error:
            warnings.warn(f"the result is not recorded: {error}", stacklevel=3)

    def __repr__(self) -> str:
        return f"Run({str(self.folder)!r}, return_after={self.summary.get('return_after')})"


def refuse_population(folder: Path, config: TrainConfig) -> None:
    """Refuses the folder of a population; its members have run folders.

    Raises:
        CheckpointError: it is a population; the message names a member.
    """
    if config.population.size > 1:
        first, _ = config.population.place(0, config.seed)
        raise CheckpointError(
            f"{str(folder)!r} is a population of {config.population.size}, each with a run "
            f"folder; give one of them, such as {folder / first}."
        )


def _describe_changes(state: Mapping[str, Any], checkpoint: Path, config: TrainConfig) -> str:
    """Describes the differences between ``config.yaml`` and the checkpoint."""
    trained = settings_of(state, checkpoint)
    trained = None if trained is None else dataclasses.replace(trained, folder=config.folder)
    changes = [] if trained is None else differences(trained, config)
    return in_words(changes, checkpoint.parent.parent / "config.yaml") if changes else ""


_TRAINING_ONLY_SETTINGS = {
    "env.num_envs": "the number of episodes decides how many envs play",
    "env.other_play": "evaluations draw no symmetries",
    "env.reward_scale": "evaluations report the environment's own rewards",
}


def _with_env_settings(
    config: TrainConfig, settings: Mapping[str, Any], env: EnvBase | None
) -> TrainConfig:
    """Returns a run's settings with another environment."""
    given = normalized(TrainConfig, settings)
    if env is not None:
        raise ConfigError(
            f"{next(iter(flatten(given)))} is given with an environment object; set it "
            "when you build the environment, or leave one of the two out."
        )
    check_played(given)
    return Reader(TrainConfig).read(dataclasses.asdict(config), given)


def check_played(settings: Mapping[str, Any]) -> None:
    """Refuses settings that do not change the environment in which whole episodes are played.

    Args:
        settings (mapping): the settings, from :func:`~torchrl_marl.settings.normalized`.

    Raises:
        ConfigError: a setting is not of the environment, or has no effect on episodes.
    """
    for key in _TRAINING_ONLY_SETTINGS.keys() & flatten(settings).keys():
        raise ConfigError(f"{key} is given, but {_TRAINING_ONLY_SETTINGS[key]}; leave it out.")
    other = next((key for key in flatten(settings) if not key.startswith("env.")), None)
    if other is not None:
        raise ConfigError(
            f"{other} is given, expected settings of the environment, such as "
            "env.kwargs.n_agents=8; other settings stay."
        )


def _load_learners(learners: Sequence[Learner], state: Mapping[str, Any], changed: str) -> None:
    """Loads the learners' states; warns if settings were changed since they were saved."""
    try:
        load_learners(learners, state["learners"])
    except CheckpointError as error:
        if not changed:
            raise
        raise CheckpointError(
            f"{changed}: its checkpoint does not fit; restore the setting."
        ) from error
    if changed:
        warnings.warn(f"{changed}; it is played with the new setting.", stacklevel=4)


def _use_or_make_env(
    config: TrainConfig,
    env: EnvBase | None,
    device: torch.device | str,
    num_envs: int,
    drawn: bool = False,
) -> EnvBase:
    if env is not None:
        return with_dense_groups(adapt(as_environment(env, config.env, device)))
    if config.env.library == "own":
        raise CheckpointError(
            "this run was started with an environment object; name its class, such as "
            "env.library=module:Class or env.library=path/to/file.py:Class, or pass it in Python: "
            "torchrl_marl.training.Run.load(folder, env=...)."
        )
    options = {"seed": EVALUATION_SEED, "device": device, "num_envs": num_envs, "drawn": drawn}
    return with_dense_groups(make_env(config.played_env, **options))  # type: ignore[arg-type]


def _innermost_env(env: EnvBase) -> EnvBase:
    """Returns the innermost environment, without its transforms and adapters."""
    while isinstance(env, (TransformedEnv, TorchRLEnv)):
        env = env.base_env if isinstance(env, TransformedEnv) else env._inner
    return env
