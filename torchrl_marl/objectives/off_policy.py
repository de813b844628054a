"""Base class of off-policy losses: n-step returns, targets and importance weights.

Shapes: B any batch dims, E envs, T steps, L steps of a window, N agents, G groups that are trained
as one, K critics, S numbers of a hidden state.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from tensordict import NestedKey, TensorDict, TensorDictBase, TensorDictParams
from tensordict.nn import TensorDictModule
from torch import Tensor, nn
from torchrl.modules import set_recurrent_mode
from torchrl.objectives import LossModule, ValueEstimators
from torchrl.objectives.utils import distance_loss

from torchrl_marl.functional import expand_mask
from torchrl_marl.functional.statistics import PerGroup
from torchrl_marl.modules.memory.states import (
    has_cells,
    state_size,
    states_after,
)
from torchrl_marl.modules.normalization import ObservationNorm
from torchrl_marl.modules.stacks.module_stack import run_only_agents
from torchrl_marl.objectives.estimator import estimator_keys
from torchrl_marl.objectives.flags import (
    TEAM_REWARD,
    alive_mask_of,
    blank_masked_inputs,
    bootstrap_mask_of,
    learning_mask,
    of_agents,
    share,
    team_mean,
    team_reward,
    with_flags,
)
from torchrl_marl.specs import GroupSpec
from torchrl_marl.specs.teams import check_group

__all__ = ["OffPolicyLoss"]


def _as_tuple(key: NestedKey) -> tuple[str, ...]:
    return (key,) if isinstance(key, str) else tuple(key)


class OffPolicyLoss(LossModule):
    r"""Base class of losses with target networks, for a group of agents that may die.

    .. math::
        L_Q = \sum_k \big(Q_k(o, a) - r - \gamma (1 - \mathrm{terminated}) V'(o')\big)^2

    for every agent that acts. With ``bootstrap="team"`` an agent without a next observation gets
    the mean next value of the agents of its group that have one. With ``"agent"`` each agent's own
    termination counts, and steps without a known outcome are left out. Masked slots affect no loss
    and no gradient.

    With a recurrent acting network, the last dim of ``*B`` is time. The hidden state of the first
    step, ``(group, "hidden")``, is read; the target reads it too unless there is a
    ``(group, "target_hidden")``. The value of a next step is computed by one more step of the
    network, from the hidden state after the current step. If there is an entry ``valid``, steps in
    which it is False are left out.

    With mixed values, the team's reward is stored, under ``("next", group, "team", "reward")``;
    without, each agent's reward is stored. With ``bootstrap="team"`` dead agents get the team's
    reward.

    A subclass defines the next value (``next_value``), the actor's loss (``actor_loss``), and the
    networks with targets (``with_target``).

    Args:
        actor_network, qvalue_network (TensorDictModule): networks that write actions and their
            values; policies that are greedy in Q-values have no actor, and policies that imitate
            have no values.
        group (GroupSpec): sets every key.
        bootstrap ("team" or "agent"): done flag at which a return ends: the team's or each agent's.
        gamma (float): discount factor, for data without a ``discount`` entry. With
            ``steps_to_next_obs``, as of TorchRL's ``MultiStep``, its power is used.
        mixed (bool): whether values are mixed into one per group. The reward is then the team's:
            the mean over born and living agents. A step counts if any agent acts in it.
        loss_function (str): loss of the critics: ``"l2"``, ``"l1"`` or ``"smooth_l1"``.
        functional (bool): whether the parameters of networks and targets are kept separately from
            the networks, as TorchRL's ``SoftUpdate`` needs. If False, the networks are used
            directly, and ``target_actor_network`` and ``target_qvalue_network`` are copies.
            Differentiate each loss with respect to the parameters of its network only.

    Raises:
        ValueError: an unknown ``bootstrap``, or ``"agent"`` with mixed values.

    Examples:
        >>> from torchrl.data import Bounded, Unbounded
        >>> from torchrl_marl import AgentSpec, TeamSpec
        >>> from torchrl_marl.modules import make_action_critic, make_deterministic_actor
        >>> class ZeroAfter(OffPolicyLoss):
        ...     def next_value(self, following):
        ...         return torch.zeros(*following.batch_size, self.group.n_agents, 1)
        ...
        ...     def actor_loss(self, tensordict):
        ...         return -self.values(self.inputs(tensordict)).mean(), {}
        >>> team = TeamSpec([AgentSpec("car", 3, Unbounded((4,)), Bounded(-1, 1, (2,)))])
        >>> car = team.groups["car"]
        >>> loss = ZeroAfter(make_deterministic_actor(car), make_action_critic(car), group=car)
        >>> seen = {"observation": torch.zeros(5, 3, 4), "mask": torch.ones(5, 3).bool()}
        >>> now = seen | {"action": torch.zeros(5, 3, 2)}
        >>> then = seen | {"reward": torch.ones(5, 3, 1)}
        >>> ended = torch.zeros(5, 1, dtype=torch.bool)
        >>> steps = TensorDict({"car": now, "next": {"car": then, "terminated": ended}}, [5])
        >>> loss(steps)["target_value"]  # the reward, since the next value is 0
        tensor(1.)
    """

    @dataclass
    class _AcceptedKeys:
        action: NestedKey = "action"
        state_action_value: NestedKey = "state_action_value"
        reward: NestedKey = "reward"
        terminated: NestedKey = "terminated"
        discount: NestedKey = "discount"
        steps_to_next_obs: NestedKey = "steps_to_next_obs"
        priority: NestedKey = "td_error"
        priority_weight: NestedKey = "priority_weight"

    default_keys = _AcceptedKeys
    with_target: ClassVar[tuple[str, ...]] = ("actor_network", "qvalue_network")
    tensor_keys: _AcceptedKeys
    actor_network: TensorDictModule
    actor_network_params: TensorDictParams
    target_actor_network_params: TensorDictParams
    qvalue_network: TensorDictModule
    qvalue_network_params: TensorDictParams
    target_qvalue_network_params: TensorDictParams

    def __init__(
        self,
        actor_network: TensorDictModule | None,
        qvalue_network: TensorDictModule | None,
        *,
        group: GroupSpec,
        bootstrap: Literal["team", "agent"] = "team",
        gamma: float = 0.99,
        mixed: bool = False,
        loss_function: str = "l2",
        functional: bool = True,
    ) -> None:
        super().__init__()
        check_group(group, type(self).__name__)
        if bootstrap not in ("team", "agent"):
            raise ValueError(f"bootstrap is {bootstrap!r}, expected 'team' or 'agent'.")
        if mixed and bootstrap == "agent":
            raise ValueError(
                "bootstrap is 'agent', but a mixer has one value for all, expected 'team'; "
                "use bootstrap='team', or no mixer."
            )
        self.group, self.bootstrap, self.gamma, self.mixed = group, bootstrap, gamma, mixed
        self.loss_function, self._functional = loss_function, functional
        acting = qvalue_network if actor_network is None else actor_network
        assert acting is not None
        self.acting = "qvalue_network" if actor_network is None else "actor_network"
        self.remembers = has_cells(acting)
        if actor_network is not None:
            self.add_network("actor_network", actor_network)
        if qvalue_network is not None:
            self.add_network("qvalue_network", qvalue_network)
        keys = estimator_keys(group, bootstrap)
        self.set_keys(
            action=group.action_key,
            state_action_value=group.key("state_action_value"),
            priority=group.key("td_error"),
            reward=keys["reward"],
            terminated=keys["terminated"],
        )
        self.per_group = PerGroup(group.membership, next(acting.parameters()).device)

    def add_network(self, name: str, network: nn.Module) -> None:
        """Registers a network and its target, if it has one."""
        has_target = name in self.with_target
        if self.functional:
            self.convert_to_functional(network, name, create_target_params=has_target)
            return
        setattr(self, name, network)
        if has_target:
            setattr(self, f"target_{name}", _make_target_network(network))

    @property
    def state_keys(self) -> dict[bool, NestedKey]:
        """Keys of the acting network's hidden state (False) and of its target's (True)."""
        keys = {False: self.group.key("hidden")} if self.remembers else {}
        has_target = keys and self.acting in self.with_target
        return {**keys, True: self.group.key("target_hidden")} if has_target else keys

    @property
    def followed(self) -> list[tuple[nn.Module, nn.Module]]:
        """Networks and their targets, if parameters are not kept separately."""
        held = [name for name in self.with_target if hasattr(self, f"target_{name}")]
        return [(getattr(self, name), getattr(self, f"target_{name}")) for name in held]

    def next_value(self, following: TensorDictBase) -> Tensor:
        """Returns the value of the next step for each agent, ``[*B, N, 1]``.

        Args:
            following (TensorDictBase): networks' inputs in the next step; may be changed.
        """
        raise NotImplementedError

    def actor_loss(
        self, tensordict: TensorDictBase, turn: Tensor | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns the actor's loss, and metrics.

        Args:
            tensordict (TensorDictBase): a minibatch.
            turn (Tensor, optional): agents that learn now, ``[N]``; None for all.
        """
        raise NotImplementedError

    @torch.no_grad()
    def current_actions(
        self, tensordict: TensorDictBase, turn: Tensor | None = None, others: Tensor | None = None
    ) -> Tensor:
        """Returns actions of the current policies, ``[*B, N, A]``, without a gradient.

        Args:
            tensordict (TensorDictBase): a minibatch.
            turn (Tensor, optional): agents to compute, at most one of each group, ``[N]``.
            others (Tensor, optional): actions of all other agents, ``[*B, N, A]``; None to compute
                all.
        """
        actions = self._policy_actions_of_turn(
            self.inputs(self.group.dense(tensordict)), turn, others
        )[0]
        return self._merge_actions(others, actions, turn)

    def _policy_actions(self, data: TensorDictBase) -> tuple[Any, ...]:
        """Returns the policy's actions, and what its loss reads besides them."""
        raise NotImplementedError

    def _policy_actions_of_turn(
        self, data: TensorDictBase, turn: Tensor | None, others: Tensor | None
    ) -> Any:
        """Returns the same; if others' actions are given, runs one agent of each group only."""
        evaluated_agents: Any = contextlib.nullcontext()
        if others is not None and turn is not None:
            evaluated_agents = run_only_agents(self.actor_network, self.per_group.one_of(turn))
        with self.in_time(), evaluated_agents:
            return self._policy_actions(data)

    def _merge_actions(
        self, others: Tensor | None, turn_actions: Tensor, turn: Tensor | None
    ) -> Tensor:
        """Returns the actions of the agents of a turn beside the given ones of all others."""
        if others is None or turn is None:
            return turn_actions
        return torch.where(turn.unsqueeze(-1), turn_actions, others)

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Returns the losses and metrics of a minibatch."""
        loss_value, metrics = self.value_loss(tensordict)
        loss_actor, more = self.actor_loss(tensordict)
        terms = {"loss_actor": loss_actor, "loss_value": loss_value, **metrics, **more}
        return TensorDict(terms, [])

    @property
    def functional(self) -> bool:
        """True if parameters are kept separately from the networks."""
        return self._functional

    def make_value_estimator(self, value_type: Any = None, *, gamma: float = 0.99) -> None:
        """Sets the discount of one-step targets; n-step data have an entry ``discount``.

        Raises:
            ValueError: another estimator than ``ValueEstimators.TD0``.
        """
        if value_type not in (None, ValueEstimators.TD0):
            raise ValueError(
                f"value_type is {value_type}, expected ValueEstimators.TD0; for longer returns "
                "read several steps at once, as with TeamReplay.look(rows, n_step=3, gamma=0.99)."
            )
        self.gamma = gamma

    def _forward_value_estimator_keys(self, **kwargs: Any) -> None:
        """Does nothing, since there is no separate estimator."""

    @property
    def in_keys(self) -> list[NestedKey]:
        """Entries that the loss reads, if present."""
        return list(dict.fromkeys([*self._step_keys, *self._flag_keys]))

    @property
    def _flag_keys(self) -> list[NestedKey]:
        """Done flags, from which the loss derives which agents are alive, and which truncated."""
        group = self.group
        keys: list[NestedKey] = [group.done_key] if group.agent_done else []
        if group.mask_key is not None and group.truncated_key is not None:
            ends = (group.terminated_key, group.truncated_key)
            keys += [("next", *_as_tuple(key)) for key in ends]
        return keys

    @property
    def _step_keys(self) -> list[NestedKey]:
        """Entries of a step that the loss reads, except done flags."""
        keys = self.tensor_keys
        mask = [] if self.group.mask_key is None else [self.group.mask_key]
        read = [key for key in dict.fromkeys([*self.read_keys, *mask]) if key != keys.action]
        hidden_states = set(self.state_keys.values())
        following = [
            *(key for key in read if key not in hidden_states),
            keys.reward,
            keys.terminated,
        ]
        return [*read, keys.action, *(("next", *_as_tuple(key)) for key in following)]

    @property
    def read_keys(self) -> list[NestedKey]:
        """Entries that the networks read."""
        return [*self.actor_network.in_keys, *self.qvalue_network.in_keys]

    def weighted(self, data: TensorDictBase, loss: Tensor) -> Tensor:
        """Returns the losses ``[*B, N, 1]`` times the weights of prioritized replay, if any."""
        weight = data.get(self.tensor_keys.priority_weight, None)
        return loss if weight is None else loss * weight.reshape(*weight.shape[: data.ndim], 1, 1)

    def value_loss(self, tensordict: TensorDictBase) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns the critics' loss, and metrics; writes the TD errors."""
        data = self.group.dense(tensordict)
        with self.in_time():
            value = self.values(self.inputs(data))
        target, learned = self.target(data, value[..., 0])
        error = value - target
        loss = self.weighted(data, self.distance(value, target.expand_as(value)).sum(-1, True))
        with torch.no_grad():
            largest_error = error.abs().amax(-1, keepdim=True)
            largest_error = (
                largest_error
                if learned is None
                else torch.where(learned.unsqueeze(-1), largest_error, 0.0)
            )
            self.group.write(tensordict, "td_error", largest_error)
            metrics = {
                "pred_value": self.per_group.mean(value[..., :1].detach(), learned),
                "target_value": self.per_group.mean(target, learned),
            }
        return self.per_group.mean(loss, learned), metrics

    @torch.no_grad()
    def target(self, data: TensorDictBase, everyone: Tensor) -> tuple[Tensor, Tensor | None]:
        """Returns the value targets, ``[*B, N, 1]``, and the mask of steps with a known target.

        Args:
            data (TensorDictBase): steps, dense.
            everyone (Tensor): tensor of shape ``[*B, N]``; its values are not used.
        """
        reward, next_value, terminated, learned = self.outcome(data, everyone)
        discount = self._discount(data, everyone)
        target = reward + discount * torch.where(terminated, 0.0, next_value)
        if learned is not None:  # other steps may hold anything
            target = torch.where(learned.unsqueeze(-1), target, 0.0)
        return target, learned

    def _discount(self, data: TensorDictBase, everyone: Tensor) -> Tensor | float:
        """Returns the discount of each next value: a number, or ``[*B, N, 1]``."""
        discount = data.get(self.tensor_keys.discount, None)
        steps = data.get(self.tensor_keys.steps_to_next_obs, None)
        if discount is None and steps is not None:  # of TorchRL's multi-step transforms
            steps = steps.unsqueeze(-1) if steps.shape == data.batch_size else steps
            discount = self.gamma ** steps.to(torch.get_default_dtype())
        return self.gamma if discount is None else of_agents(discount, everyone)

    def outcome(
        self, data: TensorDictBase, everyone: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Returns reward, next value and termination, each ``[*B, N, 1]``.

        The fourth result is the mask of steps to learn from, ``[*B, N]``; None for all.
        """
        keys, group = self.tensor_keys, self.group
        following = data["next"].copy()
        seen = bootstrap_mask_of(group, data)
        reward = self.rewards(data, everyone)
        terminated = of_agents(following[keys.terminated], everyone)
        if seen is not None:
            following.set(group.mask_key, seen)
        for key, state in self.recall(data).items():
            following.set(key, state)
        with set_recurrent_mode(False):  # TorchRL sets it in all losses
            next_value = self.next_value(self.inputs(following))
        learned = self.learned(data)
        if self.bootstrap == "team":
            sources = learning_mask(data, group, seen)
            next_value = share(next_value, seen, sources, self.per_group)
        elif seen is not None and learned is not None:
            learned = learned & (terminated.squeeze(-1) | seen)
        return reward, next_value, terminated, learned

    # ------------------------------------------------------------------------------- rewards

    def rewards(self, data: TensorDictBase, everyone: Tensor) -> Tensor:
        """Returns each agent's reward, or the team's for mixed values.

        Shapes:
            - everyone: ``[*B, N]``, its values are not used; returns ``[*B, N, 1]``
        """
        stored = data.get(self._team_reward_key, None) if self.mixed else None
        if stored is not None:
            return stored
        reward = of_agents(data[self._reward_key], everyone)
        if not self.mixed or not self._agents_have_rewards:
            return reward
        return team_reward(self.group, data, reward, self.per_group)

    def settle_rewards(self, data: TensorDictBase) -> None:
        """Writes the rewards that ``bootstrap="team"`` needs, before a step is stored.

        With mixed values every agent gets the team's reward; without, only dead agents do. If the
        rewards of several steps are added later, the sum then contains the mean of each step.

        Args:
            data (TensorDictBase): steps ``[E, T]``; the group must be dense.
        """
        if self.bootstrap != "team" or not self._agents_have_rewards:
            return
        key, flagged = self._reward_key, with_flags(self.group, data)
        reward, alive = data.get(key), alive_mask_of(self.group, flagged)
        if self.mixed:
            earned = team_reward(self.group, flagged, reward, self.per_group)
            data.set(self._team_reward_key, earned)
        elif alive is not None:
            sources = learning_mask(flagged, self.group, alive)
            data.set(key, share(reward, alive, sources, self.per_group))

    @property
    def stored_keys(self) -> list[NestedKey]:
        """Entries of a step to store, once its rewards are written."""
        keys = self._step_keys
        if not self.mixed or not self._agents_have_rewards:
            return keys
        reward_key = self._reward_key
        return [self._team_reward_key if key == reward_key else key for key in keys]

    def add_team_reward(
        self, leaves: dict[tuple[str, ...], Tensor], arrange: Any, restore: Any
    ) -> None:
        """Adds the team's reward to rows that an older version stored with agents' rewards only.

        It is the mean over the agents that acted, or over all agents if none acted.

        Args:
            leaves (dict): key -> rows; the reward is added to it.
            arrange, restore (callable): map stored rows to ``[*B, N, 1]`` of this group, and back.
        """
        reward_key = self._reward_key
        if self._team_reward_key not in self.stored_keys or reward_key not in leaves:
            return
        reward = arrange(leaves.pop(reward_key))
        mask = leaves.get((self.group.name, "mask"))
        acts = torch.ones_like(reward) > 0 if mask is None else arrange(mask.unsqueeze(-1))
        acts = acts.squeeze(-1)
        any_acts = self.to_agents(self.per_group.sum(acts.to(reward.dtype))).squeeze(-1) > 0
        mean = team_mean(reward, acts | ~any_acts, self.per_group)
        leaves[self._team_reward_key] = restore(mean.expand(acts.shape).unsqueeze(-1).contiguous())

    @property
    def _agents_have_rewards(self) -> bool:
        """True if each agent has a reward, not only the team."""
        return self._reward_key[1:-1] == _as_tuple(self.group.key("reward"))[:-1]

    @property
    def _reward_key(self) -> tuple[str, ...]:
        return ("next", *_as_tuple(self.tensor_keys.reward))

    @property
    def _team_reward_key(self) -> tuple[str, ...]:
        return ("next", self.group.name, *TEAM_REWARD)

    # ------------------------------------------------------------------------- masks and inputs

    def learned(self, data: TensorDictBase) -> Tensor | None:
        """Returns the mask of steps to learn from, ``[*B, N]``; None for all.

        These are the steps in which the agent acts; with mixed values, those in which any agent of
        its group acts.
        """
        acts = self.acts(data)
        if acts is None or not self.mixed:
            return acts
        count = self.per_group.sum(acts.to(torch.get_default_dtype()))
        return self.to_agents(count).squeeze(-1) > 0

    def acts(self, data: TensorDictBase) -> Tensor | None:
        """Returns the mask of agents that act in valid steps, ``[*B, N]``; None for all."""
        mask = None if self.group.mask_key is None else data.get(self.group.mask_key)
        valid = data.get("valid", None) if self.remembers else None
        if valid is None:
            return mask
        valid = valid.unsqueeze(-1).expand(*valid.shape, self.group.n_agents)
        return valid if mask is None else mask & valid

    def acts_in_turn(self, data: TensorDictBase, turn: Tensor | None) -> Tensor | None:
        """Returns the mask of agents of a turn, ``[N]``, that act; None for all."""
        acts = self.acts(data)
        if turn is None:
            return acts
        return turn.expand(*data.shape, len(turn)) if acts is None else acts & turn

    @property
    def states(self) -> dict[str, int]:
        """Leaf -> size of the hidden state of the acting network."""
        return {"hidden": state_size(getattr(self, self.acting))} if self.remembers else {}

    def in_time(self) -> contextlib.AbstractContextManager:
        """Within a context, a recurrent acting network reads sequences."""
        return set_recurrent_mode(True) if self.remembers else contextlib.nullcontext()

    @torch.no_grad()
    def recall(self, data: TensorDictBase) -> dict[NestedKey, Tensor]:
        """Returns the hidden states of the acting network and its target after each step.

        Args:
            data (TensorDictBase): windows of steps.

        Shapes:
            - data: ``[*B, L]``; returns key -> ``[*B, L, N, S]``; empty without memory
        """
        found: dict[NestedKey, Tensor] = {}
        inputs = self.inputs(self.group.dense(data)) if self.remembers else data
        for target, key in self.state_keys.items():
            with self.network(self.acting, target) as network:
                after = states_after(network, self.inputs_of(network, inputs, target))
            found[key] = after[self.state_keys[False]]
        return found

    def distribution(self, data: TensorDictBase) -> Any:
        """Returns the actor's distribution over actions for its inputs, ``[*B, N]``."""
        with self.in_time(), self.network("actor_network") as actor:
            return actor.get_dist(self.inputs_of(actor, data))

    def inputs_of(
        self, network: Any, inputs: TensorDictBase, target: bool = False
    ) -> TensorDictBase:
        """Returns the inputs of a network; a target may read a separate hidden state."""
        selected = inputs.select(*network.in_keys)
        state = inputs.get(self.state_keys[True], None) if target and self.remembers else None
        return selected if state is None else selected.set(self.state_keys[False], state)

    def to_agents(self, of_groups: Tensor) -> Tensor:
        """Gives every agent its group's value, ``[*B, G]`` to ``[*B, N, 1]``."""
        rows = self.per_group.to_agents(of_groups)
        return rows.expand(*rows.shape[:-1], self.group.n_agents).unsqueeze(-1)

    def distance(self, value: Tensor, target: Tensor) -> Tensor:
        """Returns the loss between values ``[*B, N, K]`` and their targets."""
        return distance_loss(value, target, self.loss_function)

    def values(self, data: TensorDictBase, target: bool = False, detached: bool = False) -> Tensor:
        """Returns the values of all critics, or of their targets, ``[*B, N, K]``."""
        with self.network("qvalue_network", target, detached) as critic:
            values = critic(data.select(*critic.in_keys))
        return values.get(self.tensor_keys.state_action_value)

    def inputs(self, data: TensorDictBase) -> TensorDictBase:
        """Returns the networks' inputs, with 0 in masked slots; 0 times NaN would be NaN."""
        mask, action = self.group.mask_key, self.tensor_keys.action
        read = self.read_keys
        read = [*read, *self.state_keys.values()]
        inputs = data.select(*dict.fromkeys(read if mask is None else [*read, mask]), strict=False)
        for key in (action, *self.state_keys.values()):
            if (acted := inputs.get(key, None)) is not None:
                inputs.set(key, acted.detach())  # ``env.rollout`` keeps the graph of the policy
        acted = inputs.get(action, None)
        if mask is not None and acted is not None and not acted.is_floating_point():
            inputs.set(action, torch.where(expand_mask(data.get(mask), acted), acted, 0))
        return blank_masked_inputs(inputs, mask, data)

    @contextlib.contextmanager
    def network(self, name: str, target: bool = False, detached: bool = False) -> Iterator[Any]:
        """Yields a network with its parameters, those of its target, or detached ones."""
        if not self.functional:
            yield getattr(self, f"target_{name}" if target else name)
            return
        parameters = getattr(self, f"target_{name}_params" if target else f"{name}_params")
        parameters = parameters.detach() if detached else parameters
        with parameters.to_module(getattr(self, name), preserve_module_state=False):
            yield getattr(self, name)


def _make_target_network(network: nn.Module) -> nn.Module:
    """Returns a copy that is not trained and that shares the network's observation statistics."""
    norms = [module for module in network.modules() if isinstance(module, ObservationNorm)]
    return copy.deepcopy(network, {id(norm): norm for norm in norms}).requires_grad_(False)
