"""Collects from external simulators."""

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
from torchrl_marl.apps.external.env import ExternalEnv, tell
from torchrl_marl.apps.external.graph_acting import (
    GraphActing,
    Leaves,
    alike,
    sizes_for,
    take_tensors,
)
from torchrl_marl.collectors.collector import Interrupted
from torchrl_marl.envs.remember import remembered_by
from torchrl_marl.training.config import TrainConfig

__all__ = ["ExternalCollector", "as_batch", "external_collector", "with_declared"]

_LOOK = 0.1  # seconds between two looks for Ctrl-C


class ExternalCollector:
    """Gives batches of what clients of an :class:`~torchrl_marl.apps.external.ExternalEnv` play.

    So many steps of one client after the other are a fragment, whatever its pace, and as many
    fragments as the env has rows are a batch: a quick client gives several. Rows do not follow
    on those of the batch before. A fragment that is cut in mid-episode ends with what its client
    saw next.

    Args:
        env (ExternalEnv): with E rows.
        policy (callable): TensorDict in, TensorDict out; where clients play on during an update
            (``env.hold`` is False), they are answered by a copy, which is taken with each batch.

    Keyword Args:
        frames_per_batch (int): steps of all clients; rounded up to whole steps of E rows.
        total_frames (int): of a run; -1: no end.
        remembers (bool): networks read what they remember, or where episodes begin.
        asked (callable): whether waiting for a batch should end.

    Attributes:
        frames (int): steps so far.
        follows (bool): False, since rows do not follow on those of the batch before.

    Keys:
        - writes: what clients and policy say, ``("next", ...)``, ``("collector", "traj_ids")``,
          ``("collector", "policy_version")``, and the running episodes' sums:
          ``("collector", "<group>/episode_reward")`` and ``"<group>/episode_length"``, up to each
          step, and ``("collector", "episode_known")``, whether that is all of it

    Shapes:
        - every entry of a batch: ``[E, T, ...]``

    Raises:
        Interrupted: ``asked()`` has said so in :meth:`rollout`.
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
        self.carry, self._asked = None, asked
        groups, most = tuple(env.group_map), env.server.max_clients
        self.fragments = Fragments(self.n_steps, num_envs, groups, most, env.hold)
        if remembers or (isinstance(policy, nn.Module) and remembered_by(policy)):
            env.server.carry_memory(remembered_by(cast(nn.Module, policy)))
        self._opened, self._acting = False, cast("GraphActing | None", None)

    @property
    def version(self) -> int:
        """Number of batches that the policy has learned from."""
        return self.frames // self.frames_per_batch

    def rollout(self) -> TensorDictBase:
        """Waits for the fragments of a batch."""
        policy = self._answering()
        if not self._opened:
            self._open(policy)
        else:
            self.env.listener.ask(self._release, policy)
        batch = as_batch(self._wait()).to(self.env.device)
        self.frames += self.frames_per_batch
        return batch

    def _answering(self) -> Any:
        """Returns who answers from now on: the policy, or a copy of it where clients play on.

        On a CPU it is graphs that do, which are made here: none is recorded while another thread
        learns.
        """
        policy, on_cpu = self.policy, self.env.device in (None, torch.device("cpu"))
        if not isinstance(policy, nn.Module) or not on_cpu:
            return _on(policy if self.env.hold else copy.deepcopy(policy), self.env.device)
        acting, server = self._acting, self.env.server
        if acting is None or not alike(policy, cast(nn.Module, acting.policy)):
            own = policy if self.env.hold else copy.deepcopy(policy)
            acting = GraphActing(own, execution="trace", sizes=sizes_for(server.max_clients))
        acting.prepare(server.example(), server.exploration_type)
        self._acting = acting
        return acting

    def _open(self, policy: Any) -> None:
        """Begins to record, with the first batch."""
        self._opened = True
        self.env.open()
        self.env.listener.ask(self._begin, policy)

    def _begin(self, policy: Any) -> None:
        server = self.env.server
        for client in server.clients.values():  # who came before is recorded from now on
            self.fragments.begin(client.seat, client.t <= 0)
        server.recording = self.fragments
        self._release(policy)

    def _release(self, policy: Any) -> None:
        server = self.env.server
        if isinstance(policy, GraphActing) and policy.policy is not self.policy:
            take_tensors(cast(nn.Module, policy.policy), cast(nn.Module, self.policy))
        server.policy, server.version = policy, self.version
        self.fragments.release()
        server.go_on()

    def _wait(self) -> list[Leaves]:
        """Waits for the fragments, and says for whom, where it takes long."""
        fragments, began = self.fragments, time.monotonic()
        ready, since = len(fragments.ready), began
        while (found := fragments.take()) is None:
            self.env.listener.raise_error()
            if self._asked():
                raise Interrupted
            with fragments.changed:
                fragments.changed.wait(_LOOK)
            now = time.monotonic()
            if len(fragments.ready) != ready:
                ready, since = len(fragments.ready), now
            if now - since > self.env.patience:
                since = now
                tell(self.env.waited_for(now - began, ready, fragments.per_batch))
        return found

    def finish(self, batch: TensorDictBase) -> None:
        """Does nothing: what clients send is looked at as it comes."""

    def prepare(self) -> None:
        """Does nothing."""

    @property
    def counters(self) -> dict[str, int]:
        """Returns what the server counts, as metrics."""
        return self.env.counts()

    def state_dict(self) -> dict[str, Any]:
        """Returns the number of frames: clients begin new episodes when a run is resumed."""
        return {"frames": self.frames}

    def load_state_dict(self, state: dict[str, Any]) -> bool:
        """Goes on counting frames.

        Returns:
            bool: False, since episodes begin anew.
        """
        self.frames = state.get("frames", self.frames)
        return False

    def shutdown(self, *args: Any, **kwargs: Any) -> None:
        """Closes the door."""
        if not self.env.is_closed:
            self.env.close()


def as_batch(fragments: list[Leaves]) -> TensorDict:
    """Returns fragments as a batch ``[E, T]``, groups ``[E, T, N]``."""
    shape = torch.Size([len(fragments), len(next(iter(fragments[0].values())))])
    batch = TensorDict({}, shape)
    for key in fragments[0]:
        batch.set(key, torch.from_numpy(np.stack([fragment[key] for fragment in fragments])))
    for place in (batch, batch.get("next")):
        for value in place.values():
            if isinstance(value, TensorDictBase) and "mask" in value.keys():
                value.batch_size = value.get("mask").shape
    return batch


def _on(policy: Any, device: torch.device | None) -> Any:
    """Returns a policy that takes and gives what lies on the CPU."""
    if device is None or device.type == "cpu":
        return policy
    return lambda given: policy(given.to(device)).to("cpu")


def with_declared(config: TrainConfig, env: EnvBase) -> TrainConfig:
    """Returns the settings with the agents that the first client declared.

    Args:
        config (TrainConfig): the run's.
        env (EnvBase): its environment.
    """
    base = _base_of(env)
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
        config (TrainConfig): the run's.
        env (EnvBase): its environment.
        policy (TensorDictModuleBase): who acts.
        remembers (bool): networks read what they remember, or where episodes begin.
        asked (callable): whether waiting for a batch should end.
    """
    base = _base_of(env)
    assert isinstance(base, ExternalEnv)
    return ExternalCollector(
        base,
        policy,
        frames_per_batch=config.frames_per_batch,
        total_frames=config.total_frames,
        remembers=remembers,
        asked=asked,
    )


def _base_of(env: EnvBase) -> EnvBase:
    while isinstance(env, TransformedEnv):
        env = env.base_env
    return env
