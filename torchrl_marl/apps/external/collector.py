"""Collection of batches from external simulators."""

from __future__ import annotations

import copy
import dataclasses
import math
import time
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor, nn
from torchrl.envs import EnvBase, TransformedEnv

from torchrl_marl.apps.external.client_slots import Fragments
from torchrl_marl.apps.external.env import ExternalEnv, print_notice
from torchrl_marl.apps.external.graph_acting import (
    GraphActing,
    Leaves,
    copy_tensors,
    same_structure,
    sizes_for,
)
from torchrl_marl.collectors.collector import Interrupted
from torchrl_marl.envs.remember import hidden_sizes
from torchrl_marl.training.config import TrainConfig

__all__ = ["ExternalCollector", "external_collector", "stack_fragments", "with_declared_agents"]

_POLL_SECONDS = 0.1  # between two checks for Ctrl-C


class ExternalCollector:
    """Collector of batches from the clients of an :class:`~torchrl_marl.apps.external.ExternalEnv`.

    A fragment is T consecutive steps of one client, and a batch is E fragments. A fast client
    contributes several fragments to a batch. So a row of a batch does not continue the same row of
    the previous batch. If a fragment ends before its episode does, its last step still contains the
    client's next observation.

    Args:
        env (ExternalEnv): environment, with batches of E rows.
        policy (callable): TensorDict in, TensorDict out. With ``env.hold=False``, a copy of
            it answers the clients; the copy is renewed with each batch.

    Keyword Args:
        frames_per_batch (int): steps in a batch, over all clients; rounded up to a multiple of E.
        total_frames (int): total steps of the run; -1: no end.
        remembers (bool): whether networks read hidden states or ``is_init``.
        asked (callable): returns True if waiting for a batch should end.

    Attributes:
        frames (int): number of steps collected.
        follows (bool): False: a row does not continue the same row of the previous batch.

    Keys:
        - writes: the keys from clients and policy, ``("next", ...)``, ``("collector", "traj_ids")``
          and ``("collector", "policy_version")``; the return and length of the running episode up
          to each step, ``("collector", "<group>/episode_reward")`` and
          ``"<group>/episode_length"``; ``("collector", "<group>/lived")``: whether an agent of the
          group has lived in it; ``("collector", "episode_known")``: whether these cover the episode
          from its start

    Shapes:
        - every entry of a batch: ``[E, T, ...]``

    Raises:
        Interrupted: ``asked()`` returned True in :meth:`rollout`.
    """

    follows = False
    renewed: Tensor | None = None

    def __init__(
        self,
        env: ExternalEnv,
        policy: Callable[[TensorDictBase], TensorDictBase],
        *,
        frames_per_batch: int,
        total_frames: int = -1,
        remembers: bool = False,
        asked: Callable[[], bool] = lambda: False,
    ) -> None:
        num_envs = env.batch_size.numel()
        self.env, self.policy = env, policy
        self.n_steps = math.ceil(frames_per_batch / num_envs)
        self.frames_per_batch = self.n_steps * num_envs
        self.total_frames, self.frames = total_frames, 0
        self.carry, self._stop_requested = None, asked
        groups, most = tuple(env.group_map), env.server.max_clients
        self.fragments = Fragments(self.n_steps, num_envs, groups, most, env.hold)
        if remembers or (isinstance(policy, nn.Module) and hidden_sizes(policy)):
            env.server.track_hidden(hidden_sizes(cast(nn.Module, policy)))
        self._opened, self._acting = False, cast("GraphActing | None", None)

    @property
    def version(self) -> int:
        """Number of batches that the policy has learned from."""
        return self.frames // self.frames_per_batch

    def rollout(self) -> TensorDictBase:
        """Waits until the next batch is complete, and returns it."""
        policy = self._serving_policy()
        if not self._opened:
            self._open_port(policy)
        else:
            self.env.listener.ask(self._start_batch, policy)
        batch = stack_fragments(self._wait_for_fragments()).to(self.env.device)
        self.frames += self.frames_per_batch
        return batch

    def _serving_policy(self) -> Any:
        """Returns the policy that answers clients: the original with ``hold``, otherwise a copy.

        On a CPU, answers come from traced graphs. They are recorded here, so no graph is recorded
        while another thread trains.
        """
        policy, on_cpu = self.policy, self.env.device in (None, torch.device("cpu"))
        if not isinstance(policy, nn.Module) or not on_cpu:
            return _run_on_device(
                policy if self.env.hold else copy.deepcopy(policy), self.env.device
            )
        acting, server = self._acting, self.env.server
        if acting is None or not same_structure(policy, cast(nn.Module, acting.policy)):
            own = policy if self.env.hold else copy.deepcopy(policy)
            acting = GraphActing(own, execution="trace", sizes=sizes_for(server.max_clients))
        acting.prepare(server.example(), server.exploration_type)
        self._acting = acting
        return acting

    def _open_port(self, policy: Any) -> None:
        """Opens the port and starts to record; called before the first batch."""
        self._opened = True
        self.env.open()
        self.env.listener.ask(self._start_recording, policy)

    def _start_recording(self, policy: Any) -> None:
        server = self.env.server
        for client in server.clients.values():  # clients that connected before the first batch
            self.fragments.begin(client.slot, client.t <= 0)
        server.recording = self.fragments
        self._start_batch(policy)

    def _start_batch(self, policy: Any) -> None:
        server = self.env.server
        if isinstance(policy, GraphActing) and policy.policy is not self.policy:
            copy_tensors(cast(nn.Module, policy.policy), cast(nn.Module, self.policy))
        server.policy, server.version = policy, self.version
        self.fragments.release()
        server.resume_waiting()

    def _wait_for_fragments(self) -> list[Leaves]:
        """Waits for the fragments of a batch; if this takes long, prints which clients are slow."""
        fragments, began = self.fragments, time.monotonic()
        ready, since = len(fragments.ready), began
        while (found := fragments.take()) is None:
            self.env.listener.raise_error()
            if self._stop_requested():
                raise Interrupted
            with fragments.changed:
                fragments.changed.wait(_POLL_SECONDS)
            now = time.monotonic()
            if len(fragments.ready) != ready:
                ready, since = len(fragments.ready), now
            if now - since > self.env.patience:
                since = now
                print_notice(self.env.waiting_message(now - began, ready, fragments.per_batch))
        return found

    def finish(self, batch: TensorDictBase) -> None:
        """Does nothing, since clients' messages are checked when they arrive."""

    def prepare(self) -> None:
        """Does nothing, since collection from clients needs no preparation."""

    @property
    def counters(self) -> dict[str, int]:
        """Returns the server's counters, as metrics."""
        return self.env.counts()

    def state_dict(self) -> dict[str, Any]:
        """Returns the state for a checkpoint: only the number of frames.

        Running episodes are not saved, because clients begin new episodes when a run is resumed.
        """
        return {"frames": self.frames}

    def load_state_dict(self, state: dict[str, Any]) -> bool:
        """Restores the number of frames.

        Returns:
            bool: False, since running episodes are not restored.
        """
        self.frames = state.get("frames", self.frames)
        return False

    def shutdown(self, *args: Any, **kwargs: Any) -> None:
        """Closes the port."""
        if not self.env.is_closed:
            self.env.close()


def stack_fragments(fragments: list[Leaves]) -> TensorDict:
    """Stacks fragments into a batch ``[E, T]``, with groups ``[E, T, N]``."""
    shape = torch.Size([len(fragments), len(next(iter(fragments[0].values())))])
    batch = TensorDict({}, shape)
    for key in fragments[0]:
        batch.set(key, torch.from_numpy(np.stack([fragment[key] for fragment in fragments])))
    for place in (batch, batch.get("next")):
        for value in place.values():
            if isinstance(value, TensorDictBase) and "mask" in value.keys():
                value.batch_size = value.get("mask").shape
    return batch


def _run_on_device(policy: Any, device: torch.device | None) -> Any:
    """Returns a policy that takes and returns CPU tensors, but runs on the given device."""
    if device is None or device.type == "cpu":
        return policy
    return lambda given: policy(given.to(device)).to("cpu")


def with_declared_agents(config: TrainConfig, env: EnvBase) -> TrainConfig:
    """Adds the agents that the first client declared to the settings of a run.

    Args:
        config (TrainConfig): settings of the run.
        env (EnvBase): environment of the run.
    """
    base = _without_transforms(env)
    if not isinstance(base, ExternalEnv):
        return config
    kwargs = {**config.env.kwargs, **base.declared.settings()}
    return dataclasses.replace(config, env=dataclasses.replace(config.env, kwargs=kwargs))


def external_collector(
    config: TrainConfig,
    env: EnvBase,
    policy: TensorDictModuleBase,
    remembers: bool,
    asked: Callable[[], bool],
) -> ExternalCollector:
    """Returns the collector of a run on external simulators.

    Args:
        config (TrainConfig): settings of the run.
        env (EnvBase): environment of the run.
        policy (TensorDictModuleBase): policy of all groups.
        remembers (bool): whether networks read hidden states or ``is_init``.
        asked (callable): returns True if waiting for a batch should end.
    """
    base = _without_transforms(env)
    assert isinstance(base, ExternalEnv)
    return ExternalCollector(
        base,
        policy,
        frames_per_batch=config.frames_per_batch,
        total_frames=config.total_frames,
        remembers=remembers,
        asked=asked,
    )


def _without_transforms(env: EnvBase) -> EnvBase:
    while isinstance(env, TransformedEnv):
        env = env.base_env
    return env
