"""Server that answers simulators with a trained policy."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import nn
from torchrl.envs.utils import ExplorationType

from torchrl_marl.apps.external.declaration import Declared, DeclaredKind
from torchrl_marl.apps.external.env import tls_context
from torchrl_marl.apps.external.graph_acting import (
    GraphActing,
    copy_tensors,
    same_structure,
    sizes_for,
)
from torchrl_marl.apps.external.listener import Listener, read_token
from torchrl_marl.apps.external.server import ActionServer
from torchrl_marl.collectors.team import TeamPolicy
from torchrl_marl.envs.remember import hidden_sizes
from torchrl_marl.errors import CheckpointError, ConfigError
from torchrl_marl.learners.build import build_learners
from torchrl_marl.runtime.random_state import RandomState
from torchrl_marl.specs import GroupSpec, TeamSpec
from torchrl_marl.training.checkpoint import latest_checkpoint, load_latest, load_learners
from torchrl_marl.training.config import TrainConfig, last_stage
from torchrl_marl.training.leaves import load_actors
from torchrl_marl.training.run import Run

__all__ = ["PolicyServer", "declared_of", "serve"]


def declared_of(team: TeamSpec) -> Declared:
    """Declares a team's agents: each group is a kind, with agents ``<group>_0``, ``<group>_1``...

    If agents of a group have different sizes, all are declared with the largest size. Features
    beyond an agent's own size are not read, and actions beyond it are never chosen. Bounds are the
    widest of the group; actions without bounds are declared with bounds -1 and 1. The environment's
    state is not declared.

    Args:
        team (TeamSpec): team of the environment in which the run was trained.

    Raises:
        ConfigError: an agent has several observations, images, or composite actions.

    Examples:
        >>> from torchrl.data import Bounded, Unbounded
        >>> from torchrl_marl import AgentSpec
        >>> team = TeamSpec([AgentSpec("car", 2, Unbounded((4,)), Bounded(-2, 2, (1,)))])
        >>> declared_of(team).settings()["agents"]
        {'car': {'n': 2, 'observation': 4, 'action': {'size': 1, 'low': [-2.0], 'high': [2.0]}}}
    """
    return Declared({name: _declare_group(name, group) for name, group in team.groups.items()})


def _declaration_of_clients(config: TrainConfig, team: TeamSpec) -> Declared:
    if config.env.has_clients:  # declared by its clients, with the state
        kwargs = config.env.kwargs
        return Declared.read(kwargs.get("agents"), kwargs.get("state_size"))
    return declared_of(team)


def _declare_group(name: str, group: GroupSpec) -> DeclaredKind:
    if len(group.observation_keys) > 1 or group.observation_ndims != (1,):
        shapes = ", ".join(str(shape[1:]) for shape in group.observation_shapes)
        raise ConfigError(
            f"agents {name!r} have observations of shape {shapes}, expected one vector, since the "
            "protocol sends no other; export the run instead: torchrl-marl export."
        )
    if group.branches:
        raise ConfigError(
            f"agents {name!r} have actions that are {group.choices}, which the protocol "
            "does not send; export the run instead: torchrl-marl export."
        )
    n, width = group.n_agents, group.observation_dim
    if group.discrete:
        masked = group.action_mask_key is not None
        return DeclaredKind(n, width, n_actions=group.n_actions, mask=masked)
    size = group.action_dim
    low, high = (-1.0,) * size, (1.0,) * size
    if group.action_bounds is not None:
        low, high = (
            tuple(bound.tolist())
            for bound in (group.action_bounds[0].amin(0), group.action_bounds[1].amax(0))
        )
    return DeclaredKind(n, width, low=low, high=high)


class PolicyServer:
    """Server that answers clients with the policy of a run, until it is closed.

    It serves the last checkpoint, and every answer holds the checkpoint's number of frames.
    Recurrent agents keep a hidden state for each client and episode. Observations are not stored.

    Args:
        folder (str or Path): folder of the run.

    Keyword Args:
        host (str): host to listen on; a token is needed if other machines can reach it.
        port (int): port to listen on; 0: a free one.
        token_file (str, optional): file with the token of the clients; by default the environment
            variable ``TORCHRL_MARL_TOKEN``.
        tls_certificate, tls_key (str, optional): certificate and key file for TLS.
        max_clients (int): maximum number of clients.
        stochastic (bool): True to sample actions, False to take the likeliest.
        execution ("compile", "trace" or "eager"): how the policy runs; ``compile`` takes some
            seconds at the start, and then answers fastest.
        trust (bool): True to import the environment module of another user's run.
        settings (mapping, optional): settings of the environment that differ from the training's,
            such as ``{"env.kwargs.n_agents": 8}``.

    Attributes:
        declared (Declared): the agents that clients must declare.
        server (ActionServer): server with ``counts`` and ``version``.

    Raises:
        CheckpointError: the folder holds no run, or the run has no complete checkpoint.
        ConfigError: the protocol cannot send the observations, the port is in use, or the host
            needs a token.
        TrustError: the environment's module is imported only with ``trust``.

    Examples:
        >>> import tempfile, torchrl_marl
        >>> folder = tempfile.mkdtemp() + "/run"
        >>> run = torchrl_marl.train("toy_matrix_game_mappo", folder=folder, total_frames=640,
        ...                          frames_per_batch=320, env={"num_envs": 32},
        ...                          learner={"minibatch_size": 160}, evaluation={"both": False},
        ...                          logging={"progress": False})
        >>> with PolicyServer(folder, port=0, execution="trace") as served:
        ...     served.version, served.declared.settings()["agents"]
        (640, {'agents': {'n': 2, 'observation': 2, 'action': {'n_actions': 2}}})
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        host: str = "127.0.0.1",
        port: int = 7777,
        token_file: str | None = None,
        tls_certificate: str | None = None,
        tls_key: str | None = None,
        max_clients: int = 256,
        stochastic: bool = False,
        execution: str = "compile",
        trust: bool = False,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        self._root = Path(folder)
        self._options: dict[str, Any] = {"trust": trust, "settings": settings}
        self._execution = execution
        run, self._team = self._load_run()
        self.folder, self._config = run.folder, run.config
        self._checkpoint = latest_checkpoint(self.folder)
        self.declared = _declaration_of_clients(run.config, self._team)
        self.server = ActionServer(
            self.declared, token=read_token(token_file), max_clients=max_clients
        )
        drawn = ExplorationType.RANDOM if stochastic else ExplorationType.DETERMINISTIC
        self.server.exploration_type = drawn
        self._policy = _IndexActions(run.policy, self._team)
        if any(key[-1] == "is_init" for key in self._policy.in_keys):
            self.server.track_hidden(hidden_sizes(self._policy))
        # Open the port first, so that its errors come before graphs are compiled.
        self.listener = Listener(
            self.server, host=host, port=port, ssl=tls_context(tls_certificate, tls_key)
        )
        try:
            self.listener.ask(
                self._switch_policy, self._policy, self._capture_graphs(self._policy), run.frames
            )
        except BaseException:
            self.listener.close()
            raise

    @property
    def version(self) -> int:
        """Number of frames on which the served policy was trained."""
        return self.server.version

    @property
    def address(self) -> str:
        """Host and port for clients."""
        return f"{self.listener.host}:{self.listener.port}"

    def refresh(self) -> bool:
        """Switches to a newer checkpoint, if there is one; returns whether there was.

        Clients' episodes continue, and agents keep their hidden states. A run with stages is
        followed into its next stage.

        Raises:
            CheckpointError: the run's folder has no complete checkpoint.
            ConfigError: the newer policy does not fit the agents that are served.
        """
        folder = self._newest_folder()
        newest = latest_checkpoint(folder)
        if newest == self._checkpoint:
            return False
        self._checkpoint = newest
        if folder != self.folder:
            self._switch_stage()
            return True
        self._checkpoint, state = load_latest(self.folder)
        policy = self._policy_from_state(state)
        acting = None
        if not same_structure(policy, self._policy):  # agents no longer share networks
            acting = self._capture_graphs(policy)
        self.listener.ask(self._switch_policy, policy, acting, state["collector"]["frames"])
        return True

    def _newest_folder(self) -> Path:
        """Returns the folder of the last stage that has begun; without stages the run's own."""
        return self.folder if self.folder == self._root else last_stage(self._root)

    def _switch_stage(self) -> None:
        """Switches to the run's next stage, with new graphs, since its networks may differ."""
        run, team = self._load_run()
        policy = _IndexActions(run.policy, team)
        agents = _declaration_of_clients(run.config, team), hidden_sizes(policy)
        if agents != (self.declared, hidden_sizes(self._policy)):
            raise ConfigError(
                f"stage {run.folder.name!r} has other agents or another memory than the stage "
                "before it, which clients have declared; start torchrl-marl serve again."
            )
        acting = self._capture_graphs(policy)
        self.folder, self._config, self._team = run.folder, run.config, team
        self.listener.ask(self._switch_policy, policy, acting, run.frames)

    def close(self) -> None:
        """Closes the port; a second call does nothing."""
        self.listener.close()

    def __enter__(self) -> PolicyServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _load_run(self) -> tuple[Run, TeamSpec]:
        run = Run.load(self._root, device="cpu", **self._options)
        env = run.make_env()
        team = TeamSpec.from_env(env)
        env.close()
        return run, team

    def _policy_from_state(self, state: dict[str, Any]) -> _IndexActions:
        config = self._config
        with RandomState(config.seed, "cpu").active():
            learners = build_learners(self._team, config.learner, config.groups, device="cpu")
        if settings := self._options["settings"]:
            load_actors(learners, state["learners"], settings)
        else:
            load_learners(learners, state["learners"])
        actors = [actor for learner in learners for actor in learner.actors.values()]
        return _IndexActions(TeamPolicy(actors), self._team)

    def _capture_graphs(self, policy: _IndexActions) -> GraphActing:
        """Captures a policy as graphs, for the batch sizes that ``max_clients`` clients need."""
        needed = sizes_for(self.server.max_clients)
        leaves = self.server.example()
        _check_policy_inputs(policy, set(leaves))
        acting = GraphActing(policy, execution=self._execution, sizes=needed)
        acting.prepare(leaves, self.server.exploration_type)
        return acting

    def _switch_policy(
        self, policy: _IndexActions, acting: GraphActing | None, version: int
    ) -> None:
        """Switches to a newer policy between two batches; runs in the server's thread."""
        if acting is None:
            copy_tensors(self._policy, policy)
        else:
            self.server.policy, self._policy = acting, policy
        self.server.version = version
        self.server.resume_waiting()


class _IndexActions(nn.Module):
    """Wraps a team's policy, and returns one-hot actions as indices."""

    def __init__(self, policy: Any, team: TeamSpec) -> None:
        super().__init__()
        self.policy = policy
        self.in_keys = [key if isinstance(key, tuple) else (key,) for key in policy.in_keys]
        self._one_hot = [group.action_key for group in team.groups.values() if group.one_hot]

    def forward(self, td: TensorDictBase) -> TensorDictBase:
        acted = self.policy(td)
        for key in self._one_hot:
            acted.set(key, acted.get(key).to(torch.uint8).argmax(-1))
        return acted


def serve(folder: str | Path, *, follow: bool = False, every: float = 1.0, **options: Any) -> None:
    """Serves a run until Ctrl-C; prints the address and the agents that clients must declare.

    Args:
        folder (str or Path): folder of the run.
        follow (bool): True to switch to newer checkpoints while a training writes them.
        every (float): seconds between two checks for a newer checkpoint.
        **options: arguments of :class:`PolicyServer`.
    """
    with PolicyServer(folder, **options) as served:
        # Batches are small; torch's number of threads is set separately in each Python thread.
        served.listener.ask(torch.set_num_threads, 1)
        print(f"serves {served.folder} ({served.version:,} frames) at {served.address}")
        for name, kind in served.declared.settings()["agents"].items():
            print(f"  {name}: {kind}")
        print("Ctrl-C ends it", flush=True)
        try:
            while True:
                time.sleep(every)
                served.listener.raise_error()
                if follow:
                    _refresh_if_newer(served)
        except KeyboardInterrupt:
            counts = served.server.counts
            text = ", ".join(f"{counts[name]:,} {name}" for name in ("steps", "refused"))
            print(f"ends: {text}")


def _refresh_if_newer(served: PolicyServer) -> None:
    try:
        if served.refresh():
            print(f"serves {served.version:,} frames from now on", flush=True)
    except (CheckpointError, ConfigError) as error:
        print(f"still serves {served.version:,} frames: {error}", flush=True)


def _check_policy_inputs(policy: _IndexActions, given: set[tuple[str, ...]]) -> None:
    """Raises an error if a policy reads keys that clients do not send."""
    for key in policy.in_keys:
        if key not in given:
            raise ConfigError(
                f"this run's policy reads {key!r}, which clients do not send; export the run "
                "instead: torchrl-marl export."
            )
