"""Serves a trained policy to simulators."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import nn
from torchrl.envs.utils import ExplorationType

from torchrl_marl.apps.external.declaration import Declared, DeclaredKind
from torchrl_marl.apps.external.env import tls_context
from torchrl_marl.apps.external.graph_acting import GraphActing, alike, sizes_for, take_tensors
from torchrl_marl.apps.external.listener import Listener, read_token
from torchrl_marl.apps.external.server import ActionServer
from torchrl_marl.collectors.team import TeamPolicy
from torchrl_marl.envs.remember import remembered_by
from torchrl_marl.errors import CheckpointError, ConfigError
from torchrl_marl.learners.build import build_learners
from torchrl_marl.runtime.random_state import RandomState
from torchrl_marl.specs import GroupSpec, TeamSpec
from torchrl_marl.training.checkpoint import latest_checkpoint, load_latest, load_learners
from torchrl_marl.training.run import Run

__all__ = ["PolicyServer", "declared_of", "serve"]


def declared_of(team: TeamSpec) -> Declared:
    """Returns a team's declaration: a group is a kind, its agents are ``<group>_0``, ...

    Agents of one group that see or do different numbers of things are declared as the largest:
    what a client sends beyond an agent's own is not read, and illegal actions are never chosen.
    Bounds are the widest of the group's; actions without bounds are declared as those from -1 to 1.
    What only critics see is left out.

    Args:
        team (TeamSpec): of the environment that the run was trained in.

    Raises:
        ConfigError: agents that see several things or pictures, or do several things at once.

    Examples:
        >>> from torchrl.data import Bounded, Unbounded
        >>> from torchrl_marl import AgentSpec
        >>> team = TeamSpec([AgentSpec("car", 2, Unbounded((4,)), Bounded(-2, 2, (1,)))])
        >>> declared_of(team).settings()["agents"]
        {'car': {'n': 2, 'observation': 4, 'action': {'size': 1, 'low': [-2.0], 'high': [2.0]}}}
    """
    return Declared({name: _kind(name, group) for name, group in team.groups.items()})


def _kind(name: str, group: GroupSpec) -> DeclaredKind:
    if len(group.observation_keys) > 1 or group.observation_ndims != (1,):
        shapes = ", ".join(str(shape[1:]) for shape in group.observation_shapes)
        raise ConfigError(
            f"agents {name!r} see arrays of shape {shapes}, expected one row of numbers, which is "
            "all that the protocol has words for; export the run instead: torchrl-marl export."
        )
    n, seen = group.n_agents, group.observation_dim
    if group.discrete:
        masked = group.action_mask_key is not None
        return DeclaredKind(n, seen, n_actions=group.n_actions, mask=masked)
    size = group.action_dim
    low, high = (-1.0,) * size, (1.0,) * size
    if group.action_bounds is not None:
        low, high = (
            tuple(bound.tolist())
            for bound in (group.action_bounds[0].amin(0), group.action_bounds[1].amax(0))
        )
    return DeclaredKind(n, seen, low=low, high=high)


class PolicyServer:
    """A run's policy, which answers clients on a port until it is closed.

    The last checkpoint is served; every answer says of how many frames it is. Agents that remember
    do so for each client and episode. What clients send is not kept.

    Args:
        folder (str or Path): of the run.

    Keyword Args:
        host (str): where to listen; another than this machine needs a token.
        port (int): 0: a free one.
        token_file (str, optional): with the token that clients prove to have; by default the
            environment's ``TORCHRL_MARL_TOKEN``.
        tls_certificate, tls_key (str, optional): files, for TLS.
        max_clients (int): how many may be there.
        stochastic (bool): draw actions; otherwise the likeliest.
        execution ("compile", "trace" or "eager"): how the policy runs; the first takes some seconds
            at the start, and answers quickest.
        trust (bool): import the environment's module though the run is somebody else's.

    Attributes:
        declared (Declared): what clients must declare.
        server (ActionServer): with ``counts`` and ``version``.

    Raises:
        CheckpointError: no run, or none that has a whole checkpoint.
        ConfigError: agents that the protocol has no words for; a port that is taken, or a host
            without a token.
        TrustError: a module would be imported that nobody has said may be.

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
    ) -> None:
        self.folder = Path(folder)
        run = Run.load(self.folder, device="cpu", trust=trust)
        self._config, self._checkpoint = run.config, latest_checkpoint(self.folder)
        self._execution = execution
        env = run.make_env()
        self._team = TeamSpec.from_env(env)
        env.close()
        self.declared = self._declaration()
        self.server = ActionServer(
            self.declared, token=read_token(token_file), max_clients=max_clients
        )
        drawn = ExplorationType.RANDOM if stochastic else ExplorationType.DETERMINISTIC
        self.server.exploration_type = drawn
        self._policy = _Choosing(run.policy, self._team)
        if any(key[-1] == "is_init" for key in self._policy.in_keys):
            self.server.carry_memory(remembered_by(self._policy))
        # The door first: what is wrong with it is told before graphs are compiled.
        self.listener = Listener(
            self.server, host=host, port=port, ssl=tls_context(tls_certificate, tls_key)
        )
        try:
            self.listener.ask(self._take, self._policy, self._graphs(self._policy), run.frames)
        except BaseException:
            self.listener.close()
            raise

    @property
    def version(self) -> int:
        """Frames for which the policy that answers was trained."""
        return self.server.version

    @property
    def address(self) -> str:
        """Where clients connect to."""
        return f"{self.listener.host}:{self.listener.port}"

    def refresh(self) -> bool:
        """Serves a newer checkpoint from the next answer on; returns whether there was one.

        Clients' episodes go on, and agents keep what they remember.

        Raises:
            CheckpointError: the run's checkpoints are gone, or none is whole.
        """
        newest = latest_checkpoint(self.folder)
        if newest == self._checkpoint:
            return False
        self._checkpoint, state = load_latest(self.folder)
        policy = self._policy_of(state)
        acting = None
        if not alike(policy, self._policy):  # every agent has networks of its own now
            acting = self._graphs(policy)
        self.listener.ask(self._take, policy, acting, state["collector"]["frames"])
        return True

    def close(self) -> None:
        """Closes the door; a second time nothing happens."""
        self.listener.close()

    def __enter__(self) -> PolicyServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _declaration(self) -> Declared:
        env = self._config.env
        if env.has_clients:  # what its clients have declared, their state included
            return Declared.read(env.kwargs.get("agents"), env.kwargs.get("state_size"))
        return declared_of(self._team)

    def _policy_of(self, state: dict[str, Any]) -> _Choosing:
        config = self._config
        with RandomState(config.seed, "cpu").active():
            learners = build_learners(self._team, config.learner, config.groups, device="cpu")
        load_learners(learners, state["learners"])
        actors = [actor for learner in learners for actor in learner.actors.values()]
        return _Choosing(TeamPolicy(actors), self._team)

    def _graphs(self, policy: _Choosing) -> GraphActing:
        """Returns a policy as graphs of the sizes that so many clients need."""
        needed = sizes_for(self.server.max_clients)
        leaves = self.server.example()
        _check_reads(policy, set(leaves))
        acting = GraphActing(policy, execution=self._execution, sizes=needed)
        acting.prepare(leaves, self.server.exploration_type)
        return acting

    def _take(self, policy: _Choosing, acting: GraphActing | None, version: int) -> None:
        """Acts by a newer policy; between two batches, in the door's thread."""
        if acting is None:
            take_tensors(self._policy, policy)
        else:
            self.server.policy, self._policy = acting, policy
        self.server.version = version
        self.server.go_on()


class _Choosing(nn.Module):
    """A team's policy whose one-hot actions are told as numbers of choices."""

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
    """Serves a run until Ctrl-C, and tells where, and what clients are to declare.

    Args:
        folder (str or Path): of the run.
        follow (bool): serve newer checkpoints as a training writes them.
        every (float): seconds between two looks for one.
        **options: of :class:`PolicyServer`.
    """
    with PolicyServer(folder, **options) as served:
        # Answers are small; threads count for each thread.
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
                    _follow(served)
        except KeyboardInterrupt:
            counts = served.server.counts
            told = ", ".join(f"{counts[name]:,} {name}" for name in ("steps", "refused"))
            print(f"ends: {told}")


def _follow(served: PolicyServer) -> None:
    try:
        if served.refresh():
            print(f"serves {served.version:,} frames from now on", flush=True)
    except CheckpointError as error:
        print(f"goes on with {served.version:,} frames: {error}", flush=True)


def _check_reads(policy: _Choosing, given: set[tuple[str, ...]]) -> None:
    """Refuses a policy that reads what no client says."""
    for key in policy.in_keys:
        if key not in given:
            raise ConfigError(
                f"this run's policy reads {key!r}, which no client says; export it instead: "
                "torchrl-marl export."
            )
