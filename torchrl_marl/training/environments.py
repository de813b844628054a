"""The environments and the collector of a run, and the choice of its execution mode."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from tensordict.nn import TensorDictModuleBase
from torchrl.envs import EnvBase, TransformedEnv
from torchrl.envs.batched_envs import BatchedEnvBase

from torchrl_marl.collectors.rollout import RolloutCollector, has_graphs
from torchrl_marl.envs.external_code import as_environment
from torchrl_marl.envs.libraries import LIBRARIES
from torchrl_marl.envs.make import make_env
from torchrl_marl.envs.remember import with_memory, with_players
from torchrl_marl.envs.torchrl.env import adapt
from torchrl_marl.envs.transforms import with_dense_groups
from torchrl_marl.runtime.applications import import_application
from torchrl_marl.runtime.random_state import RandomState
from torchrl_marl.specs import TeamSpec
from torchrl_marl.specs.teams import padded_members
from torchrl_marl.training.config import TrainConfig
from torchrl_marl.training.evaluation import AT_ONCE, EVALUATION_SEED, Episodes, play
from torchrl_marl.training.messages import print_message

if TYPE_CHECKING:
    from torchrl_marl.collectors.collector import Collector

__all__ = ["Environments", "choose_execution", "make_collector", "time_limit"]


class Environments:
    """Environments of a run, built from its settings or given by the user.

    Args:
        config (TrainConfig): config of the run.
        env (EnvBase, optional): environment of the user, which is seeded and reset, but not closed.
        device (torch.device): device of the environments.
        at_once (int): largest number of parallel episodes in an evaluation.

    Attributes:
        own (EnvBase, optional): environment of the user, adapted if necessary.
        training (EnvBase): training environment, with dense groups.
    """

    def __init__(
        self,
        config: TrainConfig,
        env: EnvBase | None,
        device: torch.device,
        at_once: int = AT_ONCE,
    ) -> None:
        self._config, self._device, self._max_parallel_episodes = config, device, at_once
        self.own = None if env is None else adapt(as_environment(env, config.env, device))
        if self.own is None:
            # With shards or a dataset, this environment only provides the specs.
            idle = config.distributed.enabled or config.data.folder is not None
            num_envs = 1 if idle else None
            built = make_env(config.env, seed=config.seed, device=device, num_envs=num_envs)
        else:
            built = self.own
            built.set_seed(config.seed)
            built.reset()  # to undo the effects of its earlier use
        if self._needs_rendering:
            import_application("pictures").check_drawable(built)
        self.training = with_dense_groups(built)
        self._evaluation: EnvBase | None = None
        self._hidden_sizes: dict[str, int] | None = None

    def remember(self, sizes: Mapping[str, int]) -> None:
        """Adds the actors' hidden states to the training and the evaluation environment.

        Args:
            sizes (mapping): group -> size of each agent's hidden state.
        """
        self._hidden_sizes = dict(sizes)
        self.training = with_memory(self.training, self._hidden_sizes)

    def carry_players(self, groups: Iterable[str]) -> None:
        """Adds the key ``player``, which a league needs, to the training environment."""
        self.training = with_players(self.training, groups)

    @property
    def shared(self) -> bool:
        """Returns whether training and evaluation use the same environment."""
        return self.own is not None or getattr(self.training, "one_per_process", False)

    @property
    def evaluation(self) -> EnvBase:
        """The evaluation environment, built on first use."""
        if self.shared:
            return self.training
        if self._evaluation is None:
            settings = self._config.evaluation
            with RandomState(EVALUATION_SEED, self._device).active():
                env = make_env(
                    self._config.played_env,
                    seed=EVALUATION_SEED,
                    device=self._device,
                    num_envs=min(
                        settings.episodes or settings.episodes_shown, self._max_parallel_episodes
                    ),
                    drawn=self._needs_rendering,
                )
            env = with_dense_groups(env)
            self._evaluation = (
                env if self._hidden_sizes is None else with_memory(env, self._hidden_sizes)
            )
        return self._evaluation

    def play(
        self, policy: Any, team: TeamSpec, other: bool = False, *, absolute: bool = False
    ) -> Episodes:
        """Plays the episodes of an evaluation; all runs use the same initial states.

        Args:
            policy (callable, optional): policy; by default random actions.
            team (TeamSpec): the groups.
            other (bool): True to sample actions if the settings ask for the most likely ones, and
                vice versa.

        Keyword Args:
            absolute (bool): True for ``evaluation.absolute_episodes`` from other initial states.
        """
        settings = self._config.evaluation
        return play(
            self.evaluation,
            policy,
            team,
            episodes=settings.absolute_episodes if absolute else settings.episodes,
            deterministic=settings.deterministic != other,
            seed=EVALUATION_SEED + absolute,
        )

    @property
    def _needs_rendering(self) -> bool:
        settings = self._config.evaluation
        return settings.gif or settings.animate_every is not None

    def draw(self, policy: Any, team: TeamSpec, path: Path) -> None:
        """Writes an animation of the first episodes of an evaluation.

        Args:
            policy (callable): policy.
            team (TeamSpec): the groups.
            path (Path): file of the animation.
        """
        settings, pictures = self._config.evaluation, import_application("pictures")
        film = pictures.Film(self.evaluation, team, settings.episodes_shown)
        play(
            self.evaluation,
            policy,
            team,
            episodes=film.shown,
            deterministic=settings.deterministic,
            seed=EVALUATION_SEED,
            film=film,
        )
        path.parent.mkdir(exist_ok=True)
        pictures.write(film, path)

    def heuristic(self) -> Any:
        """Returns the heuristic policy of the environment, or None if it has none."""
        # Heuristics expect that all agents have the same shapes, without padding.
        env = None if self.own is not None or padded_members(self.evaluation) else self.evaluation
        make = None if env is None else getattr(_base_env(env), "heuristic", None)
        return None if make is None else make()

    def restarts(self) -> dict[str, int]:
        """Returns the number of restarted workers as a metric; empty if there are no workers."""
        base = _base_env(self.training)
        restarts = None if isinstance(base, BatchedEnvBase) else getattr(base, "restarts", None)
        return {"worker_restarts": restarts} if isinstance(restarts, int) else {}

    def close(self) -> None:
        """Closes the environments, except one given by the user."""
        for env in (None if self.own is not None else self.training, self._evaluation):
            if env is not None and not env.is_closed:
                env.close()


def time_limit(env: EnvBase) -> int | None:
    """Returns the time limit of an environment."""
    base = _base_env(env)
    # Reading the limit from a batched environment would start its workers.
    limit = None if isinstance(base, BatchedEnvBase) else getattr(base, "max_steps", None)
    return limit if isinstance(limit, int) else None


def _base_env(env: EnvBase) -> EnvBase:
    return env.base_env if isinstance(env, TransformedEnv) else env


def make_collector(
    config: TrainConfig,
    env: EnvBase,
    policy: TensorDictModuleBase,
    team: TeamSpec,
    remembers: bool,
    shards: range,
    stop_requested: Callable[[], bool],
    labels: Callable[[Any], Any] | None = None,
) -> Collector:
    """Returns the collector of a run.

    Args:
        config (TrainConfig): config of the run.
        env (EnvBase): environment with dense groups; not stepped if there are shards.
        policy (TensorDictModuleBase): the joint policy.
        team (TeamSpec): the groups.
        remembers (bool): whether networks read hidden states or flags of episode starts.
        shards (range): shards of this process.
        stop_requested (callable): function that returns whether to stop waiting for a batch.
        labels (callable, optional): function that replaces the actions of a batch.
    """
    own = LIBRARIES.hook(config.env.library, "collector")
    if own is not None:
        return own(config, env, policy, remembers, stop_requested)
    if config.data.folder is not None:
        from torchrl_marl.training.data import make_dataset_collector

        return make_dataset_collector(config, team, config.device)
    if config.distributed.enabled:
        from torchrl_marl.training.shards import sharded_collector

        return sharded_collector(config, policy, remembers, shards)
    return RolloutCollector(
        env,
        policy,
        frames_per_batch=config.population.size * config.frames_per_batch,
        total_frames=config.population.size * config.total_frames,
        execution=config.execution if has_graphs(env) else "eager",  # type: ignore[arg-type]
        team=team,
        postproc=labels,
    )


# For `balance` with 96 envs, compilation takes 20 to 40 s and saves 9 ms per step, including the
# step's share of the update. Both numbers are similar on an H100. Compiling updates alone takes
# 5 to 23 s and saves 4 ms or more each, on a CPU.
_MIN_STEPS_TO_COMPILE = 5_000


def choose_execution(config: TrainConfig, env: Any = None) -> str:
    """Returns the execution mode of a run; ``auto`` is resolved to a concrete mode.

    ``auto`` becomes ``compile`` on a CPU with a C++ compiler, and ``cudagraph`` on a GPU with
    Triton, provided that the simulator can be captured and every env makes at least 5,000 steps.
    With another simulator, it becomes ``compile`` on a CPU for runs of at least 5,000 gradient
    steps. Otherwise it becomes ``eager``; a message is printed if only the C++ compiler is missing.
    The choice depends only on the settings and the machine.

    Args:
        config (TrainConfig): config of the run.
        env (EnvBase, optional): environment of the run, if it is not built from the settings.

    Examples:
        >>> choose_execution(TrainConfig(total_frames=6_400))
        'eager'
    """
    if config.execution != "auto":
        return config.execution
    if env is None:
        library = LIBRARIES.find(config.env.library)
        captured = library is not None and library.captured
        n_envs = config.env.num_envs
    else:
        captured = has_graphs(env)
        n_envs = env.batch_size.numel()
    steps = config.total_frames // n_envs
    if not captured:  # only the updates can be compiled, which was measured on CPUs
        on_cpu = config.device == "cpu"
        steps = on_cpu * max(
            own.n_updates(config.total_frames) for own in config.learners().values()
        )
    return _compiled_mode(config.device) if steps >= _MIN_STEPS_TO_COMPILE else "eager"


def _compiled_mode(device: str) -> str:
    """Returns the execution mode for compiled steps on a device; ``eager`` without a compiler."""
    if device != "cpu":
        return "eager" if importlib.util.find_spec("triton") is None else "cudagraph"
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is not None:
        return "compile"
    print_message(
        f"no C++ compiler {compiler!r} was found, so this run is not compiled, and several times "
        "slower; install g++ and start a new run"
    )
    return "eager"
