"""Actors that do not sample: deterministic policies, and policies greedy in Q-values."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from tensordict.nn import (
    InteractionType,
    TensorDictModule,
    TensorDictModuleBase,
    TensorDictSequential,
)
from torch import Tensor, nn
from torch.distributions import Categorical
from torch.types import Device
from torchrl.modules import OneHotCategorical

from torchrl_marl.errors import ConfigError
from torchrl_marl.modules.actors import ActsForGroup, GroupActor
from torchrl_marl.modules.build import (
    legal_logits,
    make_actor_network,
    refuse_choices,
    refuse_half_bounded,
    refuse_overflow,
    wrap_for_group,
)
from torchrl_marl.modules.config import NetworkConfig
from torchrl_marl.modules.inputs import LegalLogits, register_constants
from torchrl_marl.modules.normalization import ObservationNorm
from torchrl_marl.specs import GroupSpec
from torchrl_marl.specs.teams import check_group

__all__ = ["DeterministicActor", "make_deterministic_actor", "make_q_actor"]


class DeterministicActor(ActsForGroup, TensorDictSequential):
    """Deterministic actor, for dense (padded) and lazily stacked data.

    Args:
        group (GroupSpec): group of the agents.
        network (TensorDictModule): writes ``(group, "loc")``, or action values.
        squash (TensorDictModule): maps the network's outputs to actions.
    """

    def __init__(
        self, group: GroupSpec, network: TensorDictModule, squash: TensorDictModule
    ) -> None:
        super().__init__(network, squash)
        self.serve(group)


def make_deterministic_actor(
    group: GroupSpec,
    config: NetworkConfig | None = None,
    *,
    observation_norm: ObservationNorm | None = None,
    device: Device = None,
) -> TensorDictModuleBase:
    """Builds a deterministic policy, such as MADDPG trains.

    Bounded continuous actions are squashed by tanh to their bounds; unbounded ones are the
    network's outputs. Discrete actions are sampled from a categorical, as in :func:`make_actor`;
    without sampling, the most likely action is taken.

    Args:
        group, config, observation_norm, device: as in :func:`make_actor`.

    Shapes:
        - observation: ``[*B, N, O]``; mask: ``[*B, N]``; action_mask: ``[*B, N, n_actions]``
        - action: ``[*B, N, A]``, ``[*B, N]`` or one-hot ``[*B, N, n_actions]``

    Keys:
        - reads: ``group.observation_keys``, ``group.mask_key``, ``group.action_mask_key``
        - writes: ``group.action_key``, and ``(group, "loc")``, before squashing, or ``(group,
          "logits")``
        - with ``config.memory`` also the keys that it adds in :func:`make_actor`

    Reference: Lowe et al., 2017, https://arxiv.org/abs/1706.02275.

    Raises:
        ValueError: an action spec without a known distribution, or bounds too far apart.
        ConfigError: multi-discrete or hybrid actions.

    Examples:
        >>> from torchrl.data import Bounded, Unbounded
        >>> from torchrl_marl import AgentSpec, TeamSpec
        >>> from tensordict import TensorDict
        >>> team = TeamSpec([AgentSpec("car", 3, Unbounded((4,)), Bounded(0, 4, (2,)))])
        >>> actor = make_deterministic_actor(team.groups["car"])
        >>> td = TensorDict({"car": {"observation": torch.zeros(5, 3, 4),
        ...                          "mask": torch.ones(5, 3, dtype=torch.bool)}}, [5])
        >>> actor(td)["car", "action"][0, 0]
        tensor([2., 2.], grad_fn=<SelectBackward0>)
    """
    check_group(group, "make_deterministic_actor")
    refuse_choices(group)
    outputs = group.n_actions if group.discrete else group.action_dim
    network = make_actor_network(group, config, outputs, None, observation_norm, device)
    if not group.discrete:
        if group.action_bounds is None:
            refuse_half_bounded(group)
        else:
            refuse_overflow(group)
        loc, squash = group.key("loc"), Squash(group, device)
        module = wrap_for_group(group, network, [loc])
        squashed = TensorDictModule(squash, [loc], [group.action_key])
        return DeterministicActor(group, module, squashed)
    return GroupActor(
        group,
        module=legal_logits(group, network, device),
        in_keys={"logits": group.key("logits")},
        out_keys=[group.action_key],
        distribution_class=OneHotCategorical if group.one_hot else Categorical,
        default_interaction_type=InteractionType.RANDOM,
    )


class Squash(nn.Module):
    """Squashes outputs to the bounds of a group's actions; unbounded actions stay unchanged.

    Shapes:
        - loc: ``[*B, N, A]``; returns the same, 0 at padding
    """

    middle: Tensor | None
    half_range: Tensor  # of bounded actions
    own: Tensor | None

    def __init__(self, group: GroupSpec, device: Device = None) -> None:
        super().__init__()
        middle, half = group.action_range or (None, None)
        own = group.action_padding
        register_constants(self, device, middle=middle, half_range=half, own=own)

    def forward(self, loc: Tensor) -> Tensor:
        """Squashes the outputs."""
        action = loc if self.middle is None else self.middle + self.half_range * loc.tanh()
        return action if self.own is None else torch.where(self.own, action, 0.0)


def make_q_actor(
    group: GroupSpec,
    config: NetworkConfig | None = None,
    *,
    dueling: bool = False,
    observation_norm: ObservationNorm | None = None,
    device: Device = None,
) -> DeterministicActor:
    r"""Builds a policy that is greedy in Q-values, such as Q-learning trains.

    Illegal actions are never chosen, whatever their value. An agent without a legal action (it
    waits or is dead) chooses from all actions. A following :class:`Explore` makes some actions
    random. With ``dueling``

    .. math:: Q(o, a) = V(o) + A(o, a) - \mathrm{mean}_{a'} A(o, a')

    Args:
        group (GroupSpec): group with discrete actions, or several groups joined into one.
        config, observation_norm, device: as in :func:`make_actor`.
        dueling (bool): whether values are split into state value and advantages.

    Shapes:
        - observation: ``[*B, N, O]``; mask: ``[*B, N]``; action_mask: ``[*B, N, n_actions]``
        - action_value: ``[*B, N, n_actions]``, also of illegal actions; chosen_action_value:
          ``[*B, N, 1]``; action: ``[*B, N]`` or one-hot ``[*B, N, n_actions]``

    Keys:
        - reads: ``group.observation_keys``, ``group.mask_key``, ``group.action_mask_key``
        - writes: ``(group, "action_value")``, ``group.action_key``, ``(group,
          "chosen_action_value")``
        - with ``config.memory`` also the keys that it adds in :func:`make_actor`

    Reference: Mnih et al., 2015, https://doi.org/10.1038/nature14236; Wang et al., 2016,
    https://arxiv.org/abs/1511.06581, equation 9.

    Raises:
        ConfigError: continuous, multi-discrete or hybrid actions.

    Examples:
        >>> from tensordict import TensorDict
        >>> from torchrl.data import Categorical, Unbounded
        >>> from torchrl_marl import AgentSpec, TeamSpec
        >>> team = TeamSpec([AgentSpec("car", 3, Unbounded((4,)), Categorical(2))])
        >>> actor = make_q_actor(team.groups["car"], dueling=True)
        >>> td = TensorDict({"car": {"observation": torch.zeros(5, 3, 4),
        ...                          "mask": torch.ones(5, 3, dtype=torch.bool)}}, [5])
        >>> actor(td)["car", "action"].shape, td["car", "action_value"].shape
        (torch.Size([5, 3]), torch.Size([5, 3, 2]))
    """
    check_group(group, "make_q_actor")
    refuse_choices(group)
    if not group.discrete:
        raise ConfigError(
            f"group {group.name!r}: its actions are continuous, expected discrete ones for a value "
            "of each; use maddpg or mappo, or an environment with discrete actions."
        )
    head = Dueling(group, device) if dueling else None
    outputs = group.n_actions + int(dueling)
    network = make_actor_network(group, config, outputs, head, observation_norm, device, gain=1.0)
    values, chosen = group.key("action_value"), group.key("chosen_action_value")
    legal = [] if group.action_mask_key is None else [group.action_mask_key]
    module = wrap_for_group(group, network, [values])
    greedy = Greedy(group, device)
    best = TensorDictModule(greedy, [values, *legal], [group.action_key, chosen])
    return DeterministicActor(group, module, best)


class Dueling(nn.Module):
    """Combines a state value and advantages into action values.

    Shapes:
        - outputs: ``[*B, N, 1 + n_actions]``; returns ``[*B, N, n_actions]``
    """

    own: Tensor | None

    def __init__(self, group: GroupSpec, device: Device = None) -> None:
        super().__init__()
        register_constants(self, device, own=group.action_padding)

    def forward(self, outputs: Tensor) -> Tensor:
        """Combines value and advantages; padding does not count in the mean."""
        common, advantage = outputs[..., :1], outputs[..., 1:]
        if self.own is None:
            return common + advantage - advantage.mean(-1, keepdim=True)
        total = torch.where(self.own, advantage, 0.0).sum(-1, keepdim=True)
        return common + advantage - total / self.own.sum(-1, keepdim=True)


class Greedy(nn.Module):
    """Chooses the legal action with the highest value.

    Shapes:
        - value, action_mask: ``[*B, N, n_actions]``; returns the action, and its value
          ``[*B, N, 1]``
    """

    def __init__(self, group: GroupSpec, device: Device = None) -> None:
        super().__init__()
        masked = group.action_mask_key is not None or group.action_padding is not None
        self.legal = LegalLogits(group, device) if masked else None
        self.one_hot, self.n_actions = group.one_hot, group.n_actions
        self.dtype = group.padded_spec["action"].dtype

    def forward(self, value: Tensor, action_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Chooses an action."""
        legal = value if self.legal is None else self.legal(value, action_mask)
        best = legal.argmax(-1, keepdim=True)
        chosen = value.gather(-1, best)
        best = best.squeeze(-1)
        action = F.one_hot(best, self.n_actions) if self.one_hot else best
        return action.to(self.dtype), chosen
