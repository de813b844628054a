"""The value estimator: a critic and :func:`~torchrl_marl.functional.gae`, with the life cycle.

Shapes: B any batch dims, T time, N agents.
"""

from __future__ import annotations

import contextlib
from typing import Literal, cast

import torch
from tensordict import NestedKey, TensorDictBase
from tensordict.nn import TensorDictModule
from torch import Tensor
from torchrl.objectives.value import MultiAgentGAE

from torchrl_marl.functional import gae, sum_by_part, to_agents
from torchrl_marl.joining import padded
from torchrl_marl.modules.normalization import ValueNorm
from torchrl_marl.specs import GroupSpec

__all__ = ["TeamGAE", "learned_mask"]


class TeamGAE(MultiAgentGAE):
    """Advantages and value targets of one group, whose agents may die or wait.

    Where agents act in turns or at their own pace, ``bootstrap="agent"`` gives each the credit
    of its own play: a transition runs from its own turn to its next own turn, or to its end; all
    that it earns between belongs to it, and only own turns are discounted. A transition that is
    still open when the batch ends (the next turn is not there yet, so there is no observation to
    bootstrap from) is not learned from: its advantage is 0, and it is left out of the loss mask;
    the turn before bootstraps from it, as from any state.

    Args:
        gamma (float): discount.
        lmbda (float): weight of longer returns.
        value_network (TensorDictModule): the critic.
        group (GroupSpec, optional): sets every key; without it, set them with ``set_keys``.
        bootstrap ("team" or "agent"): ``team`` takes the root's flags: a dead agent still earns
            what the living of its group earn on average, and its state is worth what theirs is.
            ``agent`` takes each agent's own flags, and steps in which it does not act are
            transparent.
        value_norm (ValueNorm, optional): takes in the value targets of every batch that is
            estimated in training mode.
        **kwargs: of :class:`torchrl.objectives.value.MultiAgentGAE`.

    Shapes:
        - reward: ``[*B, T, N, 1]``, or the team's ``[*B, T, 1]``
        - done, terminated: ``[*B, T, 1]`` or ``[*B, T, N, 1]``; mask: ``[*B, T, N]``
        - advantage, value_target, state_value: ``[*B, T, N, 1]``

    Keys:
        - reads: what the critic reads, here and under ``"next"``; ``("next", reward)``,
          ``("next", done)``, ``("next", terminated)``; the mask
        - writes: advantage, value_target and value, all under the group (it may be stacked lazily)
          and, for ``agent``, ``loss_mask`` beside the mask: the own turns to learn from

    Reference: Schulman et al., 2016, https://arxiv.org/abs/1506.02438.

    Reduces to: without masks, TorchRL's ``MultiAgentGAE``; for ``agent``, GAE of each agent's
    sequence of own turns alone.
    """

    def __init__(
        self,
        *,
        gamma: float,
        lmbda: float,
        value_network: TensorDictModule,
        group: GroupSpec | None = None,
        bootstrap: Literal["team", "agent"] = "team",
        value_norm: ValueNorm | None = None,
        **kwargs,
    ) -> None:
        if bootstrap not in ("team", "agent"):
            raise ValueError(f"bootstrap is {bootstrap!r}, expected 'team' or 'agent'.")
        super().__init__(gamma=gamma, lmbda=lmbda, value_network=value_network, **kwargs)
        self._discount = (float(gamma), float(lmbda))
        self.bootstrap, self.group = bootstrap, group
        self.mask_key: NestedKey | None = None if group is None else group.mask_key
        self._own_flags = None if group is None or not group.agent_done else group
        parts = None if group is None else group.membership
        if parts is not None:
            parts = parts.to(next((p.device for p in value_network.parameters()), None))
        self.register_buffer("_parts", parts, persistent=False)
        # Held in a tuple: the norm is a part of the critic, not of the estimator.
        self._value_norm = (value_norm,)
        if group is not None:
            self.set_keys(**estimator_keys(group, bootstrap))

    def forward(
        self,
        tensordict: TensorDictBase,
        *,
        params: TensorDictBase | None = None,
        target_params: TensorDictBase | None = None,
        time_dim: int | None = None,
    ) -> TensorDictBase:
        """Writes advantage, value target and value into a batch ``[*B, T]``."""
        keys, data = self.tensor_keys, padded(self.group, tensordict)
        mask = None if self.mask_key is None else data.get(self.mask_key)
        with torch.no_grad():
            value = self._value(data, params)
            following = self._next(data)
            next_value = self._value(following, params if target_params is None else target_params)
            reward, done, terminated = (
                self._signal(data, key, value) for key in (keys.reward, keys.done, keys.terminated)
            )
            own_rewards = data.get(("next", keys.reward)).ndim == value.ndim
            turns, learned = mask if self.bootstrap == "agent" else None, mask
            if mask is not None and turns is None:
                living, seen = self._living(data), following.get(self.mask_key)
                value = self._share(value, living, self._known(mask, living))
                then = seen | self._living(following)
                next_value = self._share(next_value, then, self._known(seen, then))
                if own_rewards:
                    reward = self._share(reward, living, mask)
            elif turns is not None:
                closed = closes(done, terminated, following.get(self.mask_key).unsqueeze(-1))
                learned = turns & closed.squeeze(-1)
                tensordict.set(loss_mask_key(cast(NestedKey, self.mask_key)), learned)
                # What is open is worth what it was thought to be.
                reward = torch.where(closed, reward, value)
                done, terminated = done | ~closed, terminated | ~closed
            advantage, value_target = gae(
                reward,
                value,
                next_value,
                done,
                terminated,
                gamma=self._discount[0],
                lmbda=self._discount[1],
                mask=turns,
            )
            value = self._take_in(value_target, value, learned)
        tensordict.set(keys.advantage, advantage)
        tensordict.set(keys.value_target, value_target)
        tensordict.set(keys.value, value)
        return tensordict

    def _value(self, tensordict: TensorDictBase, params: TensorDictBase | None) -> Tensor:
        network = self.value_network
        inputs = blank_masked(tensordict.select(*network.in_keys), self.mask_key, tensordict)
        stateless = contextlib.nullcontext() if params is None else params.to_module(network)
        with stateless:
            return network(inputs).get(self.tensor_keys.value)

    def _next(self, tensordict: TensorDictBase) -> TensorDictBase:
        """The next step as the critic should see it."""
        following, group = tensordict.get("next"), self._own_flags
        if self.mask_key is None or group is None or group.truncated_key is None:
            return following
        following = following.clone(recurse=False)
        flags = (following.get(key) for key in (group.truncated_key, group.terminated_key))
        living, next_mask = self._living(tensordict), following.get(self.mask_key)
        return following.set(self.mask_key, last_seen(living, next_mask, *flags))

    def _living(self, tensordict: TensorDictBase) -> Tensor:
        living = None if self.group is None else self.group.living(tensordict)
        return tensordict.get(self.mask_key) if living is None else living

    @staticmethod
    def _signal(tensordict: TensorDictBase, key: NestedKey, value: Tensor) -> Tensor:
        signal = tensordict.get(("next", key))
        if signal.ndim == value.ndim - 1:
            signal = signal.unsqueeze(-2)
        if signal.ndim != value.ndim or signal.shape[:-2] != value.shape[:-2]:
            raise ValueError(
                f"{key!r} has shape {tuple(signal.shape)}, expected {tuple(value.shape)} "
                "(an agent's) or the same without the agent dim (the team's)."
            )
        return signal.expand_as(value)

    def _share(self, signal: Tensor, living: Tensor, told: Tensor) -> Tensor:
        """Gives the dead the mean of those of their group that are told; 0 where nobody is.

        Shapes:
            - signal: ``[*B, N, 1]``; living, told: ``[*B, N]``; returns ``[*B, N, 1]``
        """
        told = told.unsqueeze(-1)
        total = self._sum_of_group(torch.where(told, signal, 0.0))
        count = self._sum_of_group(told.to(signal.dtype)).clamp_min(1.0)
        return torch.where(living.unsqueeze(-1), signal, total / count)

    def _known(self, seen: Tensor, living: Tensor) -> Tensor:
        """Whose values are known best: of those a critic sees; of all living where it sees none."""
        some = self._sum_of_group(seen.unsqueeze(-1).to(torch.get_default_dtype())) > 0
        return torch.where(some.squeeze(-1), seen, living)

    def _sum_of_group(self, value: Tensor) -> Tensor:
        """The sum over the agents of each agent's group, ``[*B, N, 1]``, or ``[*B, 1, 1]``."""
        if self._parts is None:
            return value.sum(-2, keepdim=True)
        return to_agents(sum_by_part(value.squeeze(-1), self._parts), self._parts).unsqueeze(-1)

    def _take_in(self, value_target: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        """Updates the value norm; the value is then what the critic says with the new one."""
        norm = self._value_norm[0]
        if norm is None or not self.training:
            return value
        normalized = norm.normalize(value)
        if isinstance(norm, ValueNorm):
            norm.update(value_target, mask)
        else:  # TorchRL's take no mask
            norm.update(value_target if mask is None else value_target[mask])
        return norm.denormalize(normalized)


def last_seen(living: Tensor, next_mask: Tensor, truncated: Tensor, terminated: Tensor) -> Tensor:
    """Whose next observation a critic reads: of those whose turn is next, and of those cut off.

    An agent cut off by a time limit, in its turn or not, has a last observation to bootstrap from.

    Shapes:
        - living (when the step began), next_mask: ``[*B, N]``; returns ``[*B, N]``
        - truncated, terminated: ``[*B, N, 1]``
    """
    return next_mask | (living & (truncated & ~terminated).squeeze(-1))


def closes(done: Tensor, terminated: Tensor, seen: Tensor) -> Tensor:
    """Whether, from a step on, an agent's next turn or its end comes before the batch ends.

    Args:
        done, terminated (Tensor): bool, as :func:`~torchrl_marl.functional.gae` takes them.
        seen (Tensor): bool, what follows the step can be bootstrapped from: the agent's turn is
            next, or it was cut off.

    Shapes:
        - all, and what is returned: ``[*B, T, N, 1]``

    Examples:
        >>> never = torch.zeros(4, 1, 1, dtype=torch.bool)
        >>> turn_is_next = torch.tensor([False, True, False, False]).view(4, 1, 1)
        >>> closes(never, never, turn_is_next).flatten()
        tensor([ True,  True, False, False])
    """
    n_steps = done.shape[-3]
    closing = terminated | seen
    steps = torch.arange(n_steps, device=done.device).view(-1, 1, 1)
    events = torch.where(closing | done, steps, n_steps)
    first = events.flip(-3).cummin(-3).values.flip(-3)
    return (first < n_steps) & closing.gather(-3, first.clamp_max(n_steps - 1))


def learned_mask(tensordict: TensorDictBase, mask_key: NestedKey) -> Tensor:
    """The steps to learn from: own turns whose outcome is in the batch; ``[*B, N]``.

    Those that an estimator of turns marked, or else all in which an agent acts.
    """
    return tensordict.get(loss_mask_key(mask_key), tensordict.get(mask_key))


def loss_mask_key(mask_key: NestedKey) -> NestedKey:
    """Where the steps to learn from are: ``loss_mask`` beside the mask."""
    return "loss_mask" if isinstance(mask_key, str) else (*mask_key[:-1], "loss_mask")


def estimator_keys(group: GroupSpec, bootstrap: str) -> dict[str, NestedKey]:
    """Keys of an estimator or a loss for a group."""
    team = bootstrap == "team" or not group.agent_done
    return {
        "advantage": group.key("advantage"),
        "value_target": group.key("value_target"),
        "value": group.key("state_value"),
        "reward": group.reward_key,
        "done": "done" if team else group.done_key,
        "terminated": "terminated" if team else group.terminated_key,
    }


def blank_masked(
    inputs: TensorDictBase, mask_key: NestedKey | None, source: TensorDictBase
) -> TensorDictBase:
    """Networks' inputs without what stands in masked slots: 0 times NaN would be NaN.

    The agents' entries are those that stand beside their mask. The ``"state"`` is nobody's, and
    stays as it is, whatever its shape.

    Args:
        inputs (TensorDictBase): a selection, changed in place.
        mask_key (NestedKey, optional): of the mask ``[*B, N]`` in ``source``.
        source (TensorDictBase): where the mask is.
    """
    mask = None if mask_key is None else source.get(mask_key, None)
    if mask is None:
        return inputs
    beside = mask_key[:-1] if isinstance(mask_key, tuple) else ()
    for key in list(inputs.keys(True, True)):
        path = (key,) if isinstance(key, str) else key
        value = inputs.get(key)
        if path[: len(beside)] != beside or path == ("state",) or not value.is_floating_point():
            continue
        if value.shape[: mask.ndim] != mask.shape:
            continue
        rows = mask.reshape(mask.shape + (1,) * (value.ndim - mask.ndim))
        inputs.set(key, torch.where(rows, value, 0.0))
    return inputs
