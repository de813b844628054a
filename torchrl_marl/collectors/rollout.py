"""Collects batches of experience from one environment."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, cast

import torch
from tensordict import LazyStackedTensorDict, NestedKey, TensorDict, TensorDictBase
from torch import Tensor
from torchrl.data import ReplayBuffer
from torchrl.envs import EnvBase
from torchrl.envs.utils import ExplorationType, set_exploration_type

from torchrl_marl.capture.execution import Execution, check_execution
from torchrl_marl.collectors.team import (
    carry_from_dict,
    carry_to_dict,
    check_actions,
    check_carry,
    restore_env,
    snapshot_env,
)
from torchrl_marl.envs.remember import unrecorded_keys
from torchrl_marl.errors import (
    CaptureError,
    GraphCheckError,
    NonFiniteError,
    SimulatorStateError,
    SpecError,
)
from torchrl_marl.functional import expand_mask
from torchrl_marl.specs import GroupSpec, TeamSpec
from torchrl_marl.specs.groups import is_lazy
from torchrl_marl.specs.stacking import Padding

if TYPE_CHECKING:
    from torchrl_marl.collectors.captured import CapturedRollout

__all__ = ["RolloutCollector", "check_finite", "has_graphs"]


def has_graphs(env: Any) -> bool:
    """Returns whether the steps of an environment can be captured.

    An environment may still refuse while it is captured, such as for a branch on its state.

    Args:
        env (EnvBase): environment, also with transforms.

    Examples:
        >>> from torchrl_marl.envs.toy import Arena
        >>> has_graphs(Arena(2)), has_graphs(object())
        (True, False)
    """
    return hasattr(type(getattr(env, "base_env", env)), "captured")


def check_finite(team: TeamSpec, data: TensorDictBase) -> None:
    """Refuses NaN or infinite observations, states and rewards of living agents.

    It also refuses agents that act without any legal action.

    Args:
        team (TeamSpec): the groups.
        data (TensorDictBase): a batch ``[E, T]``, or one step ``[E]``.

    Raises:
        NonFiniteError: a value is not finite; the message names group, key, env and step.
        SpecError: an agent has no legal action; the message names group, agent, env and step.
    """
    stuck = list(_agents_without_actions(team, data))
    found = [
        (group, key, _non_finite_mask(value, mask, padding, data))
        for group, key, mask, padding in _checked_entries(team, data)
        if (value := data.get(key, None)) is not None and value.is_floating_point()
    ]
    wrong = [*(broken for *_, broken in found), *(x for _, x in stuck)]
    if not wrong or not bool(torch.stack([x.any() for x in wrong]).any()):
        return
    for group, key, broken in found:
        if bool(broken.any()):
            raise NonFiniteError(
                f"group {group!r}: {key!r} of the environment is NaN or infinite "
                f"({_describe_location(broken, data)} of the batch); training stops, and the "
                "last checkpoint stays. Fix the environment."
            )
    spec, broken = next(entry for entry in stuck if bool(entry[1].any()))
    agent = spec.agent_names[int(broken.nonzero()[0, -1])]
    raise SpecError(
        f"group {spec.name!r}: agent {agent!r} acts and has no legal action "
        f"({_describe_location(broken, data)} of the batch: its {spec.action_mask_key!r} is "
        "False everywhere, "
        f"its {spec.mask_key!r} True); make an action legal, such as a no-op, or the mask False. "
        "Training stops, and the last checkpoint stays."
    )


def _describe_location(broken: Tensor, data: TensorDictBase) -> str:
    """Returns a text with the env and step of the first True in a mask ``[E, T]`` or ``[E]``."""
    where = broken.nonzero()[0].tolist()[: data.ndim]
    return ", ".join(f"{n} {i}" for n, i in zip(("env", "step"), where))


def _agents_without_actions(
    team: TeamSpec, data: TensorDictBase
) -> Iterator[tuple[GroupSpec, Tensor]]:
    """Yields groups with action masks, and masks of agents without legal actions, ``[*B, N]``."""
    for group in team.groups.values():
        if group.action_mask_key is not None:
            without_actions = ~data.get(group.action_mask_key).any(-1)
            acts = None if group.mask_key is None else data.get(group.mask_key)
            yield group, without_actions if acts is None else without_actions & acts


def _checked_entries(
    team: TeamSpec, data: TensorDictBase
) -> Iterator[tuple[str, NestedKey, Tensor | None, Padding | None]]:
    # The observations after the last step of a batch or episode are only under "next".
    for group in team.groups.values():
        mask_key = group.mask_key
        mask, next_mask = (
            None if mask_key is None else data.get((*place, *_as_tuple(mask_key)), None)
            for place in ((), ("next",))
        )
        states = () if group.agent_state_key is None else (group.agent_state_key,)
        keys = (*group.observation_keys, *states)
        for key in keys:
            yield group.name, key, mask, _find_padding(group, key)
        yield group.name, ("next", *_as_tuple(group.reward_key)), group.living(data), None
        for key in keys:
            yield group.name, ("next", *_as_tuple(key)), next_mask, _find_padding(group, key)
    if team.state_spec is not None:
        yield "all groups", "state", None, None
        yield "all groups", ("next", "state"), None, None


def _find_padding(group: GroupSpec, key: NestedKey) -> Padding | None:
    inner = _as_tuple(key)[1:]
    return group.paddings.get(inner if len(inner) > 1 else inner[0])


def _non_finite_mask(
    value: Tensor, mask: Tensor | None, padding: Padding | None, data: TensorDictBase
) -> Tensor:
    """Returns a mask of the steps in which a living agent's value is not finite, ``[*B]``."""
    broken = ~torch.isfinite(value)
    if padding is not None:
        broken = broken & padding.mask(value.device)
    if mask is not None and value.shape[: mask.ndim] == mask.shape:
        broken = broken & expand_mask(mask, value)
    return broken.flatten(data.ndim).any(-1) if value.ndim > data.ndim else broken


def _as_tuple(key: Any) -> tuple[str, ...]:
    return key if isinstance(key, tuple) else (key,)


class RolloutCollector:
    """Steps an environment with a policy and returns batches, like TorchRL's ``Collector``.

    Episodes continue from one batch to the next. :meth:`state_dict` includes them, so a run can be
    resumed in mid-episode. A trajectory ends with the ``done`` at the root of the TensorDict, not
    with the death of an agent.

    Args:
        env (EnvBase or callable): an environment, or a function that builds one.
        policy (callable, optional): function from TensorDict to TensorDict; by default, actions
            are random.

    Keyword Args:
        frames_per_batch (int): environment steps per batch, rounded up to whole steps of all envs.
        total_frames (int): environment steps after which iteration ends; -1 for no end.
        init_random_frames (int): number of initial environment steps with random actions.
        exploration_type (ExplorationType): how the policy's actions are sampled.
        reset_at_each_iter (bool): whether every batch starts with a reset.
        postproc (callable, optional): function that is applied to every batch.
        replay_buffer (ReplayBuffer, optional): buffer to which every batch is added. Iteration then
            yields None.
        storing_device (torch.device, optional): device of batches.
        execution ("eager", "trace", "compile" or "cudagraph"): how steps of policy and environment
            are executed: eagerly, or as a graph that includes resets. ``trace`` runs the graph
            operation by operation, ``compile`` compiles it, and with ``cudagraph`` a GPU replays
            it. The graph is captured with the first batch. An environment that cannot be captured
            runs eagerly, with a warning.
        team (TeamSpec, optional): groups whose observations and rewards must be finite;
            :meth:`rollout` and :meth:`finish` check this.

    Shapes:
        - every entry of a batch: ``[E, T, ...]``; ``("collector", "traj_ids")``: ``[E, T]``

    Keys:
        - writes: the entries of the environment and the policy, ``("next", ...)`` and
          ``("collector", "traj_ids")``

    Raises:
        ValueError: an invalid number of frames, or a policy that leaves out a group.
        ConfigError: an unknown execution, or CUDA graphs without a GPU.
        GraphCheckError: a check of the simulator failed inside a graph.

    Examples:
        >>> from torchrl_marl.envs import VmasEnv
        >>> env = VmasEnv("balance", num_envs=4, max_steps=100, seed=0)
        >>> collector = RolloutCollector(env, frames_per_batch=40, total_frames=80)
        >>> [batch.shape for batch in collector]
        [torch.Size([4, 10]), torch.Size([4, 10])]
    """

    follows = True
    renewed: Tensor | None = None
    counters: Mapping[str, int] = {}

    def __init__(
        self,
        env: EnvBase | Callable[[], EnvBase],
        policy: Callable[[TensorDictBase], TensorDictBase] | None = None,
        *,
        frames_per_batch: int,
        total_frames: int = -1,
        init_random_frames: int = 0,
        exploration_type: ExplorationType = ExplorationType.RANDOM,
        reset_at_each_iter: bool = False,
        postproc: Callable[[TensorDictBase], TensorDictBase] | None = None,
        replay_buffer: ReplayBuffer | None = None,
        storing_device: torch.device | str | None = None,
        execution: Execution = "eager",
        team: TeamSpec | None = None,
    ) -> None:
        if frames_per_batch < 1 or (total_frames < 1 and total_frames != -1):
            raise ValueError(
                f"frames_per_batch is {frames_per_batch} and total_frames {total_frames}; "
                "expected 1 or more (total_frames also -1, for no end)."
            )
        self.env = env if isinstance(env, EnvBase) else env()
        self.policy = policy
        written = getattr(policy, "out_keys", None)
        if written:
            check_actions(written, self.env.action_keys)
        self._checked_policy: Any = None  # the policy whose actions have been checked
        self.n_steps = math.ceil(frames_per_batch / max(self.env.batch_size.numel(), 1))
        self.frames_per_batch = self.n_steps * self.env.batch_size.numel()
        self.total_frames = total_frames
        self.init_random_frames = init_random_frames
        self.exploration_type = exploration_type
        self.reset_at_each_iter = reset_at_each_iter
        self.postproc = postproc
        self.replay_buffer = replay_buffer
        self.storing_device = storing_device
        check_execution(execution, self.env.device, "RolloutCollector")
        self.execution = execution
        self.team = team
        self._captured: CapturedRollout | None = None
        self._captured_state: dict[str, Any] = {}
        self.frames = 0
        self._unrecorded = unrecorded_keys(self.env)
        self._carry: TensorDictBase | None = None
        self._traj_ids: Tensor | None = None
        self._iterator: Iterator[TensorDictBase | None] | None = None

    def __iter__(self) -> Iterator[TensorDictBase | None]:
        while self.total_frames < 0 or self.frames < self.total_frames:
            batch = self.rollout()
            if self.env.device is None or self.env.device.type == "cpu":
                self.raise_failed()  # on a GPU, this would wait for the device
            if self.replay_buffer is not None:
                self.replay_buffer.extend(batch.reshape(-1))
                yield None
            else:
                yield batch

    def next(self) -> TensorDictBase | None:
        """Returns the next batch, or None after the last."""
        try:
            return self.__next__()
        except StopIteration:
            return None

    def __next__(self) -> TensorDictBase | None:
        if self._iterator is None:
            self._iterator = iter(self)
        try:
            return next(self._iterator)
        except StopIteration:
            raise
        except Exception:
            self._iterator = None  # iteration may continue once the cause is removed
            raise

    def rollout(self) -> TensorDictBase:
        """Collects one batch, even after ``total_frames``.

        Raises:
            NonFiniteError: a value is NaN or infinite, and ``team`` is given; the message names the
                entry. For graphs, :meth:`finish` raises this error.
        """
        try:
            batch = self._collect_batch()
        except Exception:
            # NaN actions can make a simulator fail anywhere: report what caused them instead.
            if self.team is not None and self._carry is not None:
                check_finite(self.team, self._carry)
            raise
        if self.team is not None and self.execution == "eager":
            check_finite(self.team, batch)
        return batch

    def finish(self, batch: TensorDictBase) -> None:
        """Checks a batch that has been learned from, and prepares the next one.

        This method reads the simulator's deferred checks, checks the batch, and refills the pool of
        initial states. It waits for the device, which the collection of a batch by graphs does not.

        Raises:
            GraphCheckError: a check of the simulator failed in the batch.
            NonFiniteError: a value is NaN or infinite, and ``team`` is given; the message names the
                entry.
        """
        if self.execution != "eager":
            self.raise_failed()
            if self.team is not None:
                check_finite(self.team, batch)
        self.prepare()

    def _collect_batch(self) -> TensorDictBase:
        if self._carry is None or self.reset_at_each_iter:
            self._reset_env()
        acts_randomly = self.policy is None or self.frames < self.init_random_frames
        with torch.no_grad(), set_exploration_type(self.exploration_type):
            batch = None
            if self.execution != "eager":
                batch = self._run_graph(None if acts_randomly else self.policy)
            if batch is None:
                batch = self._run_steps(self.env.rand_action if acts_randomly else self.policy)
        self.frames += self.frames_per_batch
        self._assign_trajectory_ids(batch)
        if self.storing_device is not None:
            batch = batch.to(self.storing_device)
        return batch if self.postproc is None else self.postproc(batch)

    def _run_steps(self, policy: Any) -> TensorDictBase:
        steps = []
        for _ in range(self.n_steps):
            acted = policy(self._carry)
            if policy is not self._checked_policy:
                self._check_actions(acted)
                self._checked_policy = policy
            step, self._carry = self.env.step_and_maybe_reset(acted)
            steps.append(step.exclude(*self._unrecorded) if self._unrecorded else step)
        return LazyStackedTensorDict.maybe_dense_stack(steps, len(self.env.batch_size))

    def _run_graph(self, policy: Any) -> TensorDictBase | None:
        """Collects a batch by graphs; returns None if the environment cannot be captured."""
        try:
            self.raise_failed()
            if self._captured is None:
                from torchrl_marl.collectors.captured import CapturedRollout

                self._captured = CapturedRollout(self.env, self.execution, self.n_steps)
                self._captured.pool.load_state_dict(self._captured_state)
            batch, self._carry = self._captured.run(policy, self._carry, self.exploration_type)
        except GraphCheckError:
            raise
        except (CaptureError, SimulatorStateError) as refusal:
            self._switch_to_eager(refusal)
            return None
        return batch

    def _switch_to_eager(self, refusal: Exception) -> None:
        self.execution, self._captured = "eager", None
        warnings.warn(
            "RolloutCollector: batches are collected eagerly, since the environment cannot be "
            f"captured: {refusal}",
            stacklevel=4,
        )

    def raise_failed(self) -> None:
        """Raises an error if one of the simulator's checks that graphs have deferred has failed.

        Raises:
            GraphCheckError: a check failed; the message names the line of the simulator.
        """
        if self._captured is not None:
            self._captured.raise_failed()

    def prepare(self) -> None:
        """Reads the simulator's deferred checks, and refills the pool of initial states.

        It waits for the device, so call it between batches. Without this call, the next batch does
        the same at its start.

        Raises:
            GraphCheckError: a check of the simulator failed in the last batch.
        """
        self.raise_failed()
        if self._captured is not None:
            try:
                self._captured.prepare()
            except (CaptureError, SimulatorStateError) as refusal:  # caused by new settings
                self._switch_to_eager(refusal)

    def _check_actions(self, acted: TensorDictBase) -> None:
        """Checks the actions of a policy without ``out_keys``."""
        given = [key for key in self.env.action_keys if _has_entry(acted, key)]
        check_actions(given, self.env.action_keys)

    @property
    def carry(self) -> TensorDictBase | None:
        """The step from which the next batch continues, ``[E]``; None before the first batch."""
        return self._carry

    def _reset_env(self) -> None:
        self._carry = self.env.reset()
        num_envs = self.env.batch_size.numel()
        ids = torch.arange(num_envs, device=self._carry.get(self.env.done_keys[0]).device)
        first = 0 if self._traj_ids is None else self._traj_ids.max() + 1
        self._traj_ids = ids + first

    def _assign_trajectory_ids(self, batch: TensorDictBase) -> None:
        """Writes the id of the episode to which each step of each env belongs."""
        assert self._traj_ids is not None  # set by the reset
        done = self._episode_ends(batch).reshape(-1, self.n_steps).transpose(0, 1)
        numbers = done.flatten().cumsum(0).view_as(done) + self._traj_ids.max()
        after = torch.where(done, numbers, 0)  # number of the episode that starts after a step
        ids = torch.cat([self._traj_ids.unsqueeze(0), after]).cummax(0).values
        self._traj_ids = ids[-1]
        batch.set(("collector", "traj_ids"), ids[:-1].transpose(0, 1).reshape(batch.shape))

    def _episode_ends(self, batch: TensorDictBase) -> Tensor:
        """Returns the ends of episodes: the root's ``done``, or else steps with all agents done."""
        keys = ["done"] if "done" in self.env.done_keys else self.env.done_keys
        ends = [batch.get(("next", key)).reshape(*batch.shape, -1).all(-1) for key in keys]
        return torch.stack(ends).all(0)

    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        """Seeds the environment; the next batch starts with a reset."""
        self._carry = None
        if self._captured is not None:
            self._captured.pool.empty()
        return self.env.set_seed(seed, static_seed=static_seed)

    def update_policy_weights_(self, policy_or_weights: Any = None, **kwargs: Any) -> None:
        """Loads new weights into the policy; does nothing without weights."""
        if policy_or_weights is None:
            return
        weights = policy_or_weights
        if isinstance(weights, torch.nn.Module):
            weights = weights.state_dict()
        elif isinstance(weights, TensorDictBase):
            # In place: an optimizer may hold the parameters.
            TensorDict.from_module(self.policy).data.update_(weights.data)
            return
        cast(torch.nn.Module, self.policy).load_state_dict(weights)

    def state_dict(self) -> dict[str, Any]:
        """Returns the state for resuming; includes running episodes if snapshots are possible."""
        # No snapshot before the first batch: taking one may start an episode in some envs.
        begun = self._carry is not None
        state: dict[str, Any] = {
            "frames": self.frames,
            "env": snapshot_env(self.env) if begun else None,
        }
        if isinstance(self.policy, torch.nn.Module):
            state["policy_state_dict"] = self.policy.state_dict()
        if self._carry is not None:
            state["carry"] = carry_to_dict(self._carry)
            state["traj_ids"] = self._traj_ids
        if self._captured is not None:
            state["starts"] = self._captured.pool.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> bool:
        """Restores a saved state; an empty one starts new episodes.

        Returns:
            bool: whether episodes continue; without a snapshot of the environment, new ones start.
        """
        self.frames = state.get("frames", self.frames)
        if "policy_state_dict" in state and isinstance(self.policy, torch.nn.Module):
            self.policy.load_state_dict(state["policy_state_dict"])
        self._carry, self._iterator = None, None
        self._captured_state = state.get("starts", {})
        if self._captured is not None:
            self._captured.pool.load_state_dict(self._captured_state)
        if state.get("env") is None or "carry" not in state:
            return False
        restore_env(self.env, state["env"])
        carry = carry_from_dict(state["carry"], self.env.batch_size, self.env.device)
        for group, names in getattr(self.env, "group_map", {}).items():
            if not is_lazy(carry.get(group)):
                carry.get(group).batch_size = (*self.env.batch_size, len(names))
        check_carry(carry, self.env)
        self._carry = carry
        ids = state["traj_ids"].reshape(self.env.batch_size.numel())
        self._traj_ids = ids.to(carry.get(self.env.done_keys[0]).device)
        return True

    def shutdown(self, *args: Any, **kwargs: Any) -> None:
        """Closes the environment."""
        if not self.env.is_closed:
            self.env.close()


def _has_entry(tensordict: TensorDictBase, key: NestedKey) -> bool:
    """Returns whether an entry exists; in a lazily stacked group, the first agent is checked."""
    if not isinstance(key, tuple):
        return key in tensordict.keys()
    group = tensordict.get(key[:-1], None)
    group = group.unbind(group.ndim - 1)[0] if is_lazy(group) else group
    return group is not None and key[-1] in group.keys()
