"""Value estimator of a team: a critic and masked :func:`~torchrl_marl.functional.gae`.

Shapes: B any batch dims, T time, N agents, G groups that are trained as one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from tensordict import NestedKey, TensorDictBase, unravel_key
from tensordict.nn import TensorDictModule
from torch import Tensor
from torchrl.modules import set_recurrent_mode
from torchrl.objectives.value import MultiAgentGAE

from torchrl_marl.functional import fill_next, gae
from torchrl_marl.functional.statistics import PerGroup
from torchrl_marl.modules.memory.states import has_cells, state_size
from torchrl_marl.modules.normalization import ValueNorm
from torchrl_marl.objectives.flags import (
    alive_mask_of,
    blank_masked_inputs,
    bootstrap_mask_of,
    learning_mask,
    own_reward,
    share,
    with_flags,
)
from torchrl_marl.runtime.ranks import current
from torchrl_marl.specs import GroupSpec

__all__ = ["TeamGAE", "estimator_keys", "policy_ratio", "transition_complete"]

# If targets follow a shift of all values except for this fraction, no shift brings values and
# targets together.
_MIN_GAP_PER_SHIFT = 1e-5

# Steps of which a critic's activations fit into a processor's cache; twice as many or half as many
# take about the same time.
_CACHED_CHUNK = 2048


class _Steps(NamedTuple):
    """The first arguments of :func:`~torchrl_marl.functional.gae`, ``[*B, T, N, 1]`` each."""

    reward: Tensor
    value: Tensor
    next_value: Tensor
    done: Tensor
    terminated: Tensor

    def of_unit_values(self) -> _Steps:
        """Returns these steps without rewards, and with 1 for all values."""
        ones = torch.ones_like(self.value)
        return self._replace(reward=torch.zeros_like(ones), value=ones, next_value=ones)

    def with_open_transitions(self, complete: Tensor) -> _Steps:
        """Returns these steps, where an open transition keeps its estimated value."""
        return self._replace(
            reward=torch.where(complete, self.reward, self.value),
            done=self.done | ~complete,
            terminated=self.terminated | ~complete,
        )


class TeamGAE(MultiAgentGAE):
    """Advantages and value targets of one group of agents that may die or wait.

    ``bootstrap="agent"`` is for agents that act in turns or at different rates. Each agent is then
    credited separately. A transition runs from a step in which the agent acts (its turn) to its
    next turn, or to its end. It earns all rewards in between, and only turns are discounted. A
    transition that is still open when the batch ends has no next observation to bootstrap from. Its
    advantage is 0, and it is left out of the loss mask. The transition before it bootstraps, as
    usual, from the value at the first step of the open one.

    Args:
        gamma (float): discount factor.
        lmbda (float): lambda of the estimator.
        value_network (TensorDictModule): the critic.
        group (GroupSpec, optional): sets every key; without it, set them with ``set_keys``.
        bootstrap ("team" or "agent"): ``team`` uses the done flags of the root TensorDict. A dead
            agent then earns the mean reward of the living agents of its group, and its value is the
            mean of these agents' values. An unborn agent does not count. If some agents do not
            learn, means are over the learning agents. If agents may come back, a step without
            living agents has the discounted value of the next step with one, or 0 if the batch
            ends before. ``agent`` uses each agent's done flags, and
            skips steps in which the agent does not act.
        value_norm (ValueNorm, optional): statistics that are updated by the value targets of every
            batch that is estimated in training mode.
        centering (bool): whether, in training mode, all values of a batch and the mean of the value
            norm are shifted by one number, chosen so that values and returns then have the same
            mean.
        **kwargs: arguments of :class:`torchrl.objectives.value.MultiAgentGAE`.

    Attributes:
        fast_values (bool): for CPUs: whether the critic reads steps in parts that fit into the
            processor's cache, and reads a next step only if it differs from the step after it in
            the batch. Values may then be rounded differently. Default: False.

    Shapes:
        - reward: ``[*B, T, N, 1]``, or the team's ``[*B, T, 1]``
        - done, terminated: ``[*B, T, 1]`` or ``[*B, T, N, 1]``; mask: ``[*B, T, N]``
        - advantage, value_target, state_value: ``[*B, T, N, 1]``

    Keys:
        - reads: the critic's keys, here and under ``"next"``; ``("next", reward)``,
          ``("next", done)``, ``("next", terminated)``; the mask; the flags of
          :mod:`torchrl_marl.objectives.flags`, which are computed from the batch if missing
        - writes: advantage, value_target and value, all under the group (it may be lazily stacked).
          ``loss_mask``, in the same place as the mask, marks the steps to learn from. It is written
          for ``bootstrap="agent"``, and if ``(group, "learns")`` marks the agents of the learning
          policy
        - if the critic has memory: reads ``(group, "critic_hidden")`` of the first step (default:
          0), and writes it for every step, and the next step's under ``"next"``

    Reference: Schulman et al., 2016, https://arxiv.org/abs/1506.02438. Centering: with a long
    horizon, most of a value is one number that all states share: the mean reward per step, divided
    by (1 - gamma). Each batch moves values towards it only by a step (Naik et al., 2024,
    https://arxiv.org/abs/2405.09999, subtract it from the rewards). Targets are linear in the
    values, so this number can be computed directly. If no episode ends and gamma is 1, there is no
    such number, and nothing is shifted.

    Reduces to: TorchRL's ``MultiAgentGAE`` without masks; for ``agent``, GAE of each agent's
    sequence of turns. Centering changes nothing if values and returns have the same mean.
    """

    fast_values = False

    def __init__(
        self,
        *,
        gamma: float,
        lmbda: float,
        value_network: TensorDictModule,
        group: GroupSpec | None = None,
        bootstrap: Literal["team", "agent"] = "team",
        value_norm: ValueNorm | None = None,
        centering: bool = False,
        **kwargs,
    ) -> None:
        if centering and not isinstance(value_norm, ValueNorm):
            raise ValueError(
                "centering=True shifts the mean of a torchrl_marl.modules.ValueNorm, "
                f"but value_norm is {value_norm!r}."
            )
        if bootstrap not in ("team", "agent"):
            raise ValueError(f"bootstrap is {bootstrap!r}, expected 'team' or 'agent'.")
        device = next((p.device for p in value_network.parameters()), None)
        # Without a device its tensors are on the CPU, where no CUDA graph may read them.
        kwargs = {"device": device, **kwargs}
        super().__init__(gamma=gamma, lmbda=lmbda, value_network=value_network, **kwargs)
        self._discount: tuple[float | Tensor, float | Tensor] = (float(gamma), float(lmbda))
        self.bootstrap, self.group, self.centering = bootstrap, group, centering
        self.mask_key: NestedKey | None = None if group is None else group.mask_key
        self.remembers = has_cells(value_network)
        self.per_group = PerGroup(None if group is None else group.membership, device)
        # In a tuple: the norm is a part of the critic, not of the estimator.
        self._value_norm = (value_norm,)
        if group is not None:
            self.set_keys(**estimator_keys(group, bootstrap))

    def set_discount(self, gamma: float | Tensor, lmbda: float | Tensor) -> None:
        """Sets discount and lambda, each a number or a value per agent, ``[N, 1]``."""
        self._discount = gamma, lmbda

    def forward(
        self,
        tensordict: TensorDictBase,
        *,
        params: TensorDictBase | None = None,
        target_params: TensorDictBase | None = None,
        time_dim: int | None = None,
    ) -> TensorDictBase:
        """Writes advantage, value target and value into a batch ``[*B, T]``."""
        keys, data = self.tensor_keys, tensordict
        if self.group is not None:
            data = with_flags(self.group, self.group.dense(tensordict))
        mask = None if self.mask_key is None else data.get(self.mask_key)
        turns = mask if self.bootstrap == "agent" else None
        with torch.no_grad():
            value, next_value, following = self._values(tensordict, data, params, target_params)
            reward, done, terminated = self._signals(data, mask, value)
            steps = [_Steps(reward, value, next_value, done, terminated)]
            if self.centering and self.training:
                # The second estimate is the change of the first if all values shift by 1.
                steps.append(steps[0].of_unit_values())
            learned = mask
            if turns is not None:
                complete = self._complete_transitions(steps[0], following)
                steps = [one.with_open_transitions(complete) for one in steps]
                learned = turns & complete.squeeze(-1)
            elif mask is not None:
                steps = self._share_values(data, mask, following, steps)
            if self.group is not None:
                learned = learning_mask(data, self.group, learned)
                if learned is not mask:
                    tensordict.set(self.group.key("loss_mask"), learned)
            advantage, value_target, value = self._estimate(data, learned, turns, *steps)
        tensordict.set(keys.advantage, advantage)
        tensordict.set(keys.value_target, value_target)
        tensordict.set(keys.value, value)
        return tensordict

    def _values(
        self,
        tensordict: TensorDictBase,
        data: TensorDictBase,
        params: TensorDictBase | None,
        target_params: TensorDictBase | None,
    ) -> tuple[Tensor, Tensor, TensorDictBase]:
        """Returns the values of each step and of its next step, and the next steps."""
        following = self._next_step(data)
        if self.remembers:
            following = self._run_recurrent_critic(tensordict, data, following, params)
            value = tensordict.get(self.tensor_keys.value)
        else:
            value = self._value_of_steps(data, params)
        following_params = params if target_params is None else target_params
        with set_recurrent_mode(False):  # TorchRL sets it in all losses
            if self.fast_values and not self.remembers and following_params is params:
                next_value = self._next_value(data, following, value, params)
            else:
                next_value = self._value_of_steps(following, following_params)
        return value, next_value, following

    def _signals(
        self, data: TensorDictBase, mask: Tensor | None, value: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns each agent's rewards and end flags."""
        keys = self.tensor_keys
        reward, done, terminated = (
            self._signal_per_agent(data, key, value)
            for key in (keys.reward, keys.done, keys.terminated)
        )
        agents_have_rewards = data.get(("next", keys.reward)).ndim == value.ndim
        if mask is not None and agents_have_rewards:
            if self.bootstrap == "team":
                alive = self._alive_mask(data)
                sources = self._only_learning(data, alive)  # opponents do not count
                reward = share(reward, alive, sources, self.per_group)
            elif self.group is not None:
                reward = own_reward(self.group, data, reward)
        return reward, done, terminated

    def _complete_transitions(self, steps: _Steps, following: TensorDictBase) -> Tensor:
        """Returns whether each agent's transition ends within the batch."""
        seen = following.get(self.mask_key).unsqueeze(-1)
        return transition_complete(steps.done, steps.terminated, seen)

    def _share_values(
        self,
        data: TensorDictBase,
        mask: Tensor,
        following: TensorDictBase,
        steps: Sequence[_Steps],
    ) -> list[_Steps]:
        """Gives dead agents the mean value of the living agents of their group."""
        alive, next_seen = self._alive_mask(data), following.get(self.mask_key)
        next_alive = next_seen | (alive & self._next_alive_mask(following))
        only_learning = partial(self._only_learning, data)  # opponents do not count
        sources, next_sources = (
            self._value_sources(only_learning(seen), only_learning(living))
            for seen, living in ((mask, alive), (next_seen, next_alive))
        )
        shared = []
        for one in steps:
            value = share(one.value, alive, sources, self.per_group)
            next_value = share(one.next_value, next_alive, next_sources, self.per_group)
            if self.group is not None and self.group.respawns:
                value, next_value = self._fill_steps_without_agents(
                    value, next_value, alive, next_alive, one.done
                )
            shared.append(one._replace(value=value, next_value=next_value))
        return shared

    def _fill_steps_without_agents(
        self, value: Tensor, next_value: Tensor, alive: Tensor, next_alive: Tensor, done: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Returns both values, where steps without living agents have that of a later step.

        Args:
            value, next_value, done (Tensor): as in :func:`~torchrl_marl.functional.gae`.
            alive, next_alive (Tensor): masks of agents that live before and after each step.
        """
        gamma, _ = self._discount
        any_alive, any_next_alive = (
            self._sum_over_group(mask.to(value.dtype)).unsqueeze(-1) > 0
            for mask in (alive, next_alive)
        )
        next_value = fill_next(next_value, any_next_alive, done, gamma=gamma)
        return torch.where(any_alive, value, gamma * torch.where(done, 0.0, next_value)), next_value

    def _estimate(
        self,
        data: TensorDictBase,
        learned: Tensor | None,
        turns: Tensor | None,
        steps: _Steps,
        unit_steps: _Steps | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns advantages, value targets and values; updates the value norm."""
        estimate, value, shift = self._make_estimate(data, learned, turns), steps.value, None
        advantage, value_target = estimate(*steps)
        if unit_steps is not None:
            advantage_per_shift, target_per_shift = estimate(*unit_steps)
            gaps = value_target - value, unit_steps.value - target_per_shift
            shift = self._mean_matching_shift(*gaps, learned)
            shift_per_agent = self._shift_per_agent(shift)
            advantage = advantage + advantage_per_shift * shift_per_agent
            value_target = value_target + target_per_shift * shift_per_agent
        return advantage, value_target, self._update_value_norm(value_target, value, learned, shift)

    def _make_estimate(
        self, data: TensorDictBase, learned: Tensor | None, turns: Tensor | None
    ) -> Callable[..., tuple[Tensor, Tensor]]:
        """Returns a function of rewards, values and flags that computes advantages and targets."""
        gamma, lmbda = self._discount
        return partial(gae, gamma=gamma, lmbda=lmbda, mask=turns)

    def _mean_matching_shift(
        self, gap: Tensor, gap_per_shift: Tensor, learned: Tensor | None
    ) -> Tensor:
        """Returns the shift of all values after which values and targets have the same mean.

        Args:
            gap (Tensor): targets minus values.
            gap_per_shift (Tensor): 1 minus the change of each target if all values shift by 1.
            learned (Tensor, optional): mask of the values that count.

        Shapes:
            - gap, gap_per_shift: ``[*B, N, 1]``; learned: ``[*B, N]``
            - returns: ``[]`` for one group, ``[G]`` for several
        """
        groups = self._require_value_norm().per_group
        sums = [groups.total(gap, learned), groups.total(gap_per_shift, learned)]
        gap, gap_per_shift, count = current().sum_all([*sums, groups.number(gap, learned)])
        return torch.where(gap_per_shift > _MIN_GAP_PER_SHIFT * count, gap / gap_per_shift, 0.0)

    def _shift_per_agent(self, shift: Tensor) -> Tensor:
        """Broadcasts a shift of each group to its agents, ``[G]`` to ``[N, 1]``."""
        groups = self._require_value_norm().per_group
        return shift if groups.n_groups == 1 else groups.to_agents(shift).unsqueeze(-1)

    def _require_value_norm(self) -> ValueNorm:
        [norm] = self._value_norm
        assert isinstance(norm, ValueNorm)
        return norm

    def _value_of_steps(self, tensordict: TensorDictBase, params: TensorDictBase | None) -> Tensor:
        return self._run_critic(self._critic_inputs(tensordict), params)

    def _critic_inputs(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Returns what the critic reads, with zeros in masked slots."""
        inputs = tensordict.select(*self.value_network.in_keys)
        return blank_masked_inputs(inputs, self.mask_key, tensordict)

    def _run_critic(self, inputs: TensorDictBase, params: TensorDictBase | None) -> Tensor:
        network, key = self.value_network, self.tensor_keys.value
        stateless = contextlib.nullcontext() if params is None else params.to_module(network)
        with stateless:
            if not self.fast_values or inputs.numel() <= _CACHED_CHUNK:
                return network(inputs).get(key)
            parts = [network(part).get(key) for part in inputs.reshape(-1).split(_CACHED_CHUNK)]
            return torch.cat(parts).unflatten(0, inputs.shape)

    def _next_value(
        self,
        data: TensorDictBase,
        following: TensorDictBase,
        value: Tensor,
        params: TensorDictBase | None,
    ) -> Tensor:
        """Returns values of next steps; runs the critic only on those that are not in the batch."""
        time_dim = value.ndim - 3
        inputs, next_inputs = self._critic_inputs(data), self._critic_inputs(following)
        not_in_batch = ~_next_step_is_in_batch(inputs, next_inputs, value.shape[: time_dim + 1])
        next_value = value.roll(-1, time_dim)
        next_value[not_in_batch] = self._run_critic(next_inputs[not_in_batch], params)
        return next_value

    def _run_recurrent_critic(
        self,
        tensordict: TensorDictBase,
        data: TensorDictBase,
        following: TensorDictBase,
        params: TensorDictBase | None,
    ) -> TensorDictBase:
        """Runs a critic with memory over the steps; returns the next steps with hidden states.

        Writes the values, the hidden state before each step, and the hidden state after it under
        ``"next"``. The critic runs one more step to value the next step, also where an episode is
        truncated.
        """
        network, keys = self.value_network, self.tensor_keys
        [key] = [k for k in network.in_keys if k[-1] == "critic_hidden"]
        inputs = data.select(*network.in_keys, strict=False)
        before = inputs.get(key, None)
        if before is None:
            shape = inputs.get((*key[:-1], "is_init")).shape[:-1]
            size, dtype = state_size(network), torch.get_default_dtype()
            before = torch.zeros(*shape, size, dtype=dtype, device=data.device)
            inputs.set(key, before)
        inputs = blank_masked_inputs(inputs, self.mask_key, data)
        stateless = contextlib.nullcontext() if params is None else params.to_module(network)
        with stateless, set_recurrent_mode(True):
            output = network(inputs)
        after = output.get(("next", *key))
        tensordict.set(key, torch.cat([before[..., :1, :, :], after[..., :-1, :, :]], -3))
        tensordict.set(keys.value, output.get(keys.value))
        tensordict.set(("next", *key), after)
        return following.copy().set(key, after)

    def _next_step(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Returns the next step in the form that the critic reads."""
        following = tensordict.get("next")
        if self.mask_key is None or self.group is None:
            return following
        following = following.clone(recurse=False)
        return following.set(self.mask_key, bootstrap_mask_of(self.group, tensordict))

    def _alive_mask(self, tensordict: TensorDictBase) -> Tensor:
        """Returns the mask of born and living agents."""
        alive = None if self.group is None else alive_mask_of(self.group, tensordict)
        return tensordict.get(self.mask_key) if alive is None else alive

    def _next_alive_mask(self, following: TensorDictBase) -> Tensor:
        """Returns the mask of agents that are alive after the step."""
        living = None if self.group is None else self.group.living(following)
        return following.get(self.mask_key) if living is None else living

    def _only_learning(self, data: TensorDictBase, agents: Tensor) -> Tensor:
        """Returns a mask of agents, restricted to those that the learning policy controls."""
        learning = None if self.group is None else learning_mask(data, self.group, agents)
        return agents if learning is None else learning

    @staticmethod
    def _signal_per_agent(tensordict: TensorDictBase, key: NestedKey, value: Tensor) -> Tensor:
        signal = tensordict[unravel_key(("next", key))]
        if signal.ndim == value.ndim - 1:
            signal = signal.unsqueeze(-2)
        if signal.ndim != value.ndim or signal.shape[:-2] != value.shape[:-2]:
            raise ValueError(
                f"{key!r} has shape {tuple(signal.shape)}, expected {tuple(value.shape)} "
                "(an agent's) or the same without the agent dim (the team's)."
            )
        return signal.expand_as(value)

    def _value_sources(self, seen: Tensor, alive: Tensor) -> Tensor:
        """Returns the agents that the critic sees; in a group without any, the living ones."""
        any_seen = self._sum_over_group(seen.to(torch.get_default_dtype())) > 0
        return torch.where(any_seen, seen, alive)

    def _sum_over_group(self, value: Tensor) -> Tensor:
        """Sums over the agents of each agent's group, ``[*B, N]`` to ``[*B, N]`` or ``[*B, 1]``."""
        return self.per_group.to_agents(self.per_group.sum(value))

    def _update_value_norm(
        self, value_target: Tensor, value: Tensor, mask: Tensor | None, shift: Tensor | None
    ) -> Tensor:
        """Updates the value norm; returns the critic's value with the new statistics."""
        norm = self._value_norm[0]
        if norm is None or not self.training:
            return value
        normalized = norm.normalize(value)
        if isinstance(norm, ValueNorm):
            if shift is not None:
                norm.shift(shift)
            norm.update(value_target, mask)
        else:  # TorchRL's norms take no mask
            norm.update(value_target if mask is None else value_target[mask])
        return norm.denormalize(normalized)


def _next_step_is_in_batch(
    inputs: TensorDictBase, next_inputs: TensorDictBase, batch_size: torch.Size
) -> Tensor:
    """Returns whether each next step equals the step after it in the batch, bool ``[*B, T]``."""
    time_dim, last = len(batch_size) - 1, batch_size[-1] - 1
    in_batch = torch.ones(batch_size, dtype=torch.bool, device=inputs.device)
    in_batch.select(time_dim, last).fill_(False)
    for key, value in inputs.items(True, True):
        equal = value.narrow(time_dim, 1, last) == next_inputs.get(key).narrow(time_dim, 0, last)
        in_batch.narrow(time_dim, 0, last).logical_and_(equal.flatten(time_dim + 1).all(-1))
    return in_batch


def transition_complete(done: Tensor, terminated: Tensor, seen: Tensor) -> Tensor:
    """Returns whether an agent's next turn, or its end, comes before the batch ends.

    Args:
        done, terminated (Tensor): bool, as in :func:`~torchrl_marl.functional.gae`.
        seen (Tensor): bool, True if the agent can be bootstrapped after the step, because it acts
            next or was truncated.

    Shapes:
        - all arguments and the result: ``[*B, T, N, 1]``

    Examples:
        >>> never = torch.zeros(4, 1, 1, dtype=torch.bool)
        >>> turn_is_next = torch.tensor([False, True, False, False]).view(4, 1, 1)
        >>> transition_complete(never, never, turn_is_next).flatten()
        tensor([ True,  True, False, False])
    """
    n_steps = done.shape[-3]
    closing = terminated | seen
    steps = torch.arange(n_steps, device=done.device).view(-1, 1, 1)
    events = torch.where(closing | done, steps, n_steps)
    first = events.flip(-3).cummin(-3).values.flip(-3)
    return (first < n_steps) & closing.gather(-3, first.clamp_max(n_steps - 1))


def estimator_keys(group: GroupSpec, bootstrap: str) -> dict[str, NestedKey]:
    """Returns the keys of an estimator or a loss for a group."""
    team = bootstrap == "team" or not group.agent_done
    done, terminated = group.team_end_keys if team else (group.done_key, group.terminated_key)
    return {
        "advantage": group.key("advantage"),
        "value_target": group.key("value_target"),
        "value": group.key("state_value"),
        "reward": group.reward_key,
        "done": done,
        "terminated": terminated,
    }


def policy_ratio(
    actor: Any,
    tensordict: TensorDictBase,
    *,
    action: NestedKey,
    sample_log_prob: NestedKey,
    valid: Tensor | None = None,
) -> tuple[torch.distributions.Distribution, Tensor, Tensor]:
    """Returns a policy's distribution, log-probabilities, and log importance ratios.

    Args:
        actor (ProbabilisticTensorDictSequential): the policy.
        tensordict (TensorDictBase): its inputs, with zeros in masked slots.
        action, sample_log_prob (NestedKey): keys of the actions, and of the log-probabilities with
            which they were sampled.
        valid (Tensor, optional): bool, from :func:`valid_actions`.

    Shapes:
        - log-probability: ``[*B, N]``; log-ratio: ``[*B, N, 1]``

    Raises:
        KeyError: missing log-probabilities of the actions.
        ValueError: log-probabilities of different shapes.
    """
    previous = tensordict.get(sample_log_prob, None)
    if previous is None:
        raise KeyError(_missing_log_prob_message(sample_log_prob, tensordict))
    distribution = actor.get_dist(tensordict)
    # ``env.rollout`` keeps the graph of the collecting policy, which would cancel the gradient.
    previous, actions = previous.detach(), tensordict.get(action).detach()
    if valid is not None:
        actions = torch.where(valid, actions, 0)
    log_prob = distribution.log_prob(actions)
    if previous.shape != log_prob.shape:
        raise ValueError(
            f"log-probability {tuple(log_prob.shape)} and {sample_log_prob!r} "
            f"{tuple(previous.shape)} do not fit; expected [*B, N] both."
        )
    return distribution, log_prob, (log_prob - previous).unsqueeze(-1)


def _missing_log_prob_message(key: NestedKey, tensordict: TensorDictBase) -> str:
    """Returns an error message for a missing log-probability, with similar keys of the batch."""
    keys = tensordict.keys(True, True)
    leaves = {found: found if isinstance(found, str) else found[-1] for found in keys}
    similar = [found for found, leaf in leaves.items() if leaf.endswith("log_prob")]
    if not similar:
        return f"the batch has no {key!r}; let the actor write it."
    return (
        f"the batch has no {key!r}, but {similar[0]!r}; if that is the log-probability, use "
        f"loss.set_keys(sample_log_prob={similar[0]!r})."
    )
