"""Builds actors and other agents' networks from settings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from tensordict import NestedKey
from tensordict.nn import InteractionType, TensorDictModule, TensorDictSequential
from torch import Tensor, nn
from torch.distributions import Categorical
from torch.types import Device
from torchrl.data import Bounded
from torchrl.modules import (
    IndependentNormal,
    NormalParamExtractor,
    OneHotCategorical,
    ProbabilisticActor,
    TanhNormal,
)

from torchrl_marl.errors import ConfigError, quoted
from torchrl_marl.modules.actors import GroupActor
from torchrl_marl.modules.bodies import make_mlp
from torchrl_marl.modules.config import (
    NetworkConfig,
    communicates,
    has_memory,
    sharing_of,
)
from torchrl_marl.modules.distributions import (
    Gated,
    Hybrid,
    MultiCategorical,
    PaddedNormal,
    PaddedTanhNormal,
)
from torchrl_marl.modules.inputs import (
    AgentInput,
    Features,
    LegalLogits,
    agent_features,
    widest,
)
from torchrl_marl.modules.networks import AgentNetwork, Feedforward, TeamNetwork, position_columns
from torchrl_marl.modules.normalization import ObservationNorm
from torchrl_marl.modules.registry import body_of
from torchrl_marl.modules.sharing.builder import share
from torchrl_marl.modules.size import check_size
from torchrl_marl.specs import GroupSpec
from torchrl_marl.specs.teams import check_group

__all__ = [
    "encoder_maker",
    "extra_keys",
    "feedforward",
    "has_parts",
    "kinds_of",
    "legal_logits",
    "links_of",
    "make_actor",
    "make_actor_network",
    "make_agent_network",
    "make_team_network",
    "refuse_choices",
    "refuse_half_bounded",
    "sharing_of_encoder",
    "teams_of",
    "wrap_for_group",
]


def make_team_network(
    encoder: nn.Module,
    out_features: int,
    kinds: Sequence[int],
    config: NetworkConfig,
    *,
    gain: float,
    device: Device = None,
    teams: Sequence[int] | None = None,
) -> TeamNetwork:
    """Adds channel, memory and head to an encoder, shared between agents as the settings say.

    Args:
        encoder (nn.Module): a body whose outputs are as wide as the last hidden layer.
        out_features (int): number of outputs per agent.
        kinds (sequence of int): number that stands for each agent's group and kind.
        config (NetworkConfig): communication, memory, sharing.
        gain (float): gain of the last layer's orthogonal initialization.
        device (torch.device, optional): device of the parameters.
        teams (sequence of int, optional): team of each agent, as for :func:`share`.
    """
    n, width = len(kinds), config.num_cells[-1]
    memory = norm = channel = None
    if has_memory(config):
        from torchrl_marl.modules.memory.cells import cell_index, make_memory

        own: Any = config
        memory = make_memory(width, own.memory, cell_index(config, kinds, teams), device)
        if config.layer_norm:
            norm = nn.LayerNorm(memory.out_features, elementwise_affine=False)
    memory_width = width if memory is None else memory.out_features
    communicate_first = config.communication.order == "before"
    # A memory shared by all agents has one head for all, or a head for each.
    head_sharing = {"trunk": "none", "agent_id": "full"}.get(sharing_of(config), sharing_of(config))
    head_config = NetworkConfig(
        [], config.activation, sharing=head_sharing, sharing_index=config.sharing_index
    )
    inputs, outputs = [Features(memory_width)] * n, [out_features] * n
    settings: dict = {"gain": gain, "device": device, "teams": teams}
    head = share(make_mlp, inputs, outputs, kinds, head_config, **settings)
    if communicates(config):
        from torchrl_marl.modules.communication.channel import Channel

        channel_width = width if communicate_first else memory_width
        channel = Channel(channel_width, config.communication, n, device)
    parts: dict[str, Any] = {"channel": channel, "memory": memory, "norm": norm}
    return TeamNetwork(encoder, Feedforward(*head), **parts, communicate_first=communicate_first)


def has_parts(config: NetworkConfig) -> bool:
    """Returns whether a network has a channel or a memory before its last layer.

    Examples:
        >>> has_parts(NetworkConfig())
        False
    """
    return has_memory(config) or communicates(config)


def encoder_maker(make: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    """Returns a builder of networks that end with the last hidden layer, without output layer.

    Args:
        make (callable): builds whole networks, as :func:`~torchrl_marl.modules.bodies.make_mlp`
            does.
    """

    def encoder(
        inputs: Features, out_features: int, config: NetworkConfig, **settings: Any
    ) -> nn.Module:
        settings = {"num_cells": config.num_cells[:-1], "activate_last_layer": True, **settings}
        return make(inputs, out_features, config, **{**settings, "gain": 2**0.5})

    return encoder


def sharing_of_encoder(config: NetworkConfig) -> NetworkConfig:
    """Returns the settings of the encoder; with ``trunk`` sharing, all agents share one encoder.

    Raises:
        ConfigError: a way of sharing that supports neither memory nor communication.
    """
    if sharing_of(config) == "trunk":
        return replace(config, sharing="full", share_params=None)
    if sharing_of(config) == "masks":
        raise ConfigError(
            "sharing is 'masks', which allows no memory and no communication; use sharing=group, "
            "or memory=none and communication=none."
        )
    return config


def make_agent_network(
    group: GroupSpec,
    out_features: int,
    config: NetworkConfig,
    *,
    gain: float,
    standardized: bool = False,
    device: Device = None,
) -> nn.Module:
    """Builds a network with outputs for every agent, ``[*B, N, O] -> [*B, N, out]``.

    Args:
        group (GroupSpec): agents with their features and kinds.
        out_features (int): number of outputs per agent.
        config (NetworkConfig): body, widths, activation, sharing.
        gain (float): gain of the last layer's orthogonal initialization.
        standardized (bool): whether observations are standardized before the network.
        device (torch.device, optional): device of the parameters.

    Raises:
        ConfigError: an unknown body or way of sharing, or one that does not fit the group.
    """
    body = body_of(config)
    if body.make_body is not None:
        return body.make_body(group, out_features, config, gain=gain, device=device)
    make, inputs = body.make_network, agent_features(group, standardized)
    assert make is not None
    kinds, shared = kinds_of(group), sharing_of(config)
    settings: dict = {"gain": gain, "device": device, "teams": teams_of(group)}
    if has_memory(config) or communicates(config):
        check_channel(group, config)
        width, own = config.num_cells[-1], sharing_of_encoder(config)
        rows = [width] * group.n_agents
        encoder = feedforward(share(encoder_maker(make), inputs, rows, kinds, own, **settings))
        return make_team_network(encoder, out_features, kinds, config, **settings)
    single_network = shared == "full" or shared == "group" and len(set(kinds)) == 1
    if single_network and len({own.width for own in inputs}) == 1:
        return feedforward(make(widest(inputs), out_features, config, gain=gain, device=device))
    outputs = [out_features] * group.n_agents
    return feedforward(share(make, inputs, outputs, kinds, config, **settings))


def extra_keys(
    network: nn.Module, group: GroupSpec, state: str = "hidden"
) -> tuple[list[NestedKey], list[NestedKey]]:
    """Returns a network's further input and output keys: memory and communication.

    Args:
        network (nn.Module): network of the agents.
        group (GroupSpec): group of the agents.
        state (str): leaf of the hidden state: ``hidden`` (actor) or ``critic_hidden`` (critic).
    """
    reads: Sequence[str] = getattr(network, "reads", ())
    writes: Sequence[str] = getattr(network, "writes", ())
    leaf = {"state": state}
    after: dict[str, NestedKey] = {"state": ("next", group.name, state)}
    read = [group.key(leaf.get(name, name)) for name in reads]
    return read, [after.get(name, group.key(name)) for name in writes]


def feedforward(network: nn.Module) -> Feedforward:
    """Wraps a network that reads features alone as a body; parameters keep their names."""
    return Feedforward(*network) if isinstance(network, nn.Sequential) else Feedforward(network)


def kinds_of(group: GroupSpec) -> tuple[int, ...]:
    """Returns the kind of each agent."""
    return group.kinds or (0,) * group.n_agents


def teams_of(group: GroupSpec) -> tuple[int, ...]:
    """Returns the team of each agent; in a population, each member is a team."""
    return tuple(group.teams[index] for index in group.group_index)


def check_channel(group: GroupSpec, config: NetworkConfig) -> None:
    """Refuses communication settings that do not fit a group.

    Raises:
        ConfigError: a group of one agent, a chain of messages over groups that do not hear each
            other, or positions that are not observed.
    """
    communication = config.communication
    if not communicates(config):
        return
    last_column, n_observed, fault = (
        max(position_columns(communication), default=-1),
        min(group.observation_dims),
        "",
    )
    if group.n_agents == 1:
        fault = (
            f"communication.kind is {communication.kind!r}, but it has only one agent; "
            "use communication=none."
        )
    elif (
        communication.kind == "bicnet" and len(group.groups) > 1 and not communication.across_groups
    ):
        fault = (
            "its groups do not hear each other, but bicnet passes through all agents; use "
            "communication.across_groups=true, or communication=commnet."
        )
    elif communication.links == "env" and len(group.groups) > 1:
        fault = (
            "an environment gives links within a group only; use communication.links=all, or "
            "communication.across_groups=false."
        )
    elif last_column >= n_observed:
        fault = (
            f"communication.position names column {last_column}, but an agent observes "
            f"{n_observed} numbers, 0 to {n_observed - 1}; give the columns of its position."
        )
    if fault:
        raise ConfigError(f"group {group.name!r}: {fault}")


def links_of(group: GroupSpec, config: NetworkConfig, device: Device = None) -> Tensor | None:
    """Returns True for pairs of agents that may hear each other (same group); bool, ``[N, N]``.

    Returns None if all agents may hear each other, or if each network reads a single agent.
    """
    if len(group.groups) == 1 or config.communication.across_groups:
        return None
    if body_of(config).make_body is None and not communicates(config):
        return None
    owner = torch.tensor(group.group_index, device=device)
    return owner.unsqueeze(-1) == owner


def make_actor(
    group: GroupSpec,
    config: NetworkConfig | None = None,
    *,
    observation_norm: ObservationNorm | None = None,
    device: Device = None,
) -> ProbabilisticActor:
    """Builds a stochastic policy for every agent of a group.

    Bounded continuous actions have a :class:`~torchrl.modules.TanhNormal` over the group's
    bounds, unbounded ones a normal. Discrete actions have a categorical that gives illegal
    actions probability 0, multi-discrete ones a categorical for each branch. Hybrid actions have
    categoricals and a normal. An agent without a legal action (it waits or is dead) samples from
    all its actions, so that nothing becomes NaN; the environment ignores the action.

    Args:
        group (GroupSpec): keys, sizes, bounds and masks, from :class:`TeamSpec`.
        config (NetworkConfig, optional): settings of the network.
        observation_norm (ObservationNorm, optional): standardizes observations.
        device (torch.device, optional): device of the parameters.

    Shapes:
        - observation: ``[*B, N, O]``; mask: ``[*B, N]``; action_mask: ``[*B, N, n_actions]``
        - action: ``[*B, N, A]``, ``[*B, N]`` or one-hot ``[*B, N, n_actions]``; multi-discrete
          ``[*B, N, K]``; hybrid ``[*B, N, K + D]``
        - action_log_prob: ``[*B, N]``

    Keys:
        - reads: ``group.observation_keys``, ``group.mask_key``, ``group.action_mask_key``
        - writes: ``group.action_key``, ``(group, "action_log_prob")`` and the parameters of the
          distribution: ``(group, "loc")`` and ``(group, "scale")``, ``(group, "logits")``, or all
        - with ``config.memory`` it also reads ``(group, "is_init")`` and ``(group, "hidden")`` and
          writes ``("next", group, "hidden")``; :func:`~torchrl_marl.envs.with_memory` carries the
          state from step to step

    Groups whose agents differ in shape may be padded or lazily stacked; padding does not count in
    log-probabilities and entropies.

    Raises:
        ValueError: an action spec without a known distribution.

    Examples:
        >>> from torchrl.data import Bounded, Unbounded
        >>> from torchrl_marl import AgentSpec, TeamSpec
        >>> from tensordict import TensorDict
        >>> team = TeamSpec([AgentSpec("car", 3, Unbounded((4,)), Bounded(-1, 1, (2,)))])
        >>> actor = make_actor(team.groups["car"])
        >>> td = TensorDict({"car": {"observation": torch.zeros(5, 3, 4),
        ...                          "mask": torch.ones(5, 3, dtype=torch.bool)}}, [5])
        >>> actor(td)["car", "action"].shape, td["car", "action_log_prob"].shape
        (torch.Size([5, 3, 2]), torch.Size([5, 3]))
    """
    check_group(group, "make_actor")
    outputs, head, make = _choose_policy(group, config)
    network = make_actor_network(group, config, outputs, head, observation_norm, device)
    module, parameters, distribution, settings = make(group, network, device)
    if network.gated:
        parameters |= {"gate": group.key("channel"), "gate_logits": group.key("gate_logits")}
        if distribution is Hybrid:  # it has an argument "of" itself
            distribution = partial(Hybrid, of=settings.pop("of"))
        distribution, settings = Gated, {"of": distribution, **settings}
    return GroupActor(
        group,
        module=module,
        in_keys=parameters,
        out_keys=[group.action_key],
        distribution_class=distribution,
        distribution_kwargs=settings,
        return_log_prob=True,
        log_prob_key=group.key("action_log_prob"),
        default_interaction_type=InteractionType.RANDOM,
    )


def _choose_policy(
    group: GroupSpec, config: NetworkConfig | None
) -> tuple[int, nn.Module | None, Callable[..., Any]]:
    """Returns the number of outputs, the head, and the function that builds the distribution."""
    scale = getattr(config, "initial_scale", 1.0)
    if group.hybrid:
        head = HybridParamExtractor(sum(group.branches), scale)
        return head.n_logits + 2 * group.continuous_spec.shape[-1], head, _hybrid_policy
    if group.branches:
        return sum(group.branches), None, _multi_discrete_policy
    if group.discrete:
        return group.n_actions, None, _discrete_policy
    return 2 * group.action_dim, _make_normal_extractor(scale), _continuous_policy


def _make_normal_extractor(scale: float) -> NormalParamExtractor:
    """Returns a head whose outputs of 0 are a location of 0 and the given scale.

    Raises:
        ConfigError: a scale that is too small, or no number.
    """
    if not isinstance(scale, int | float) or not 0.01 < scale < float("inf"):
        raise ConfigError(
            f"actor.initial_scale is {quoted(scale)}, expected a number above 0.01; use 1.0."
        )
    return NormalParamExtractor(f"biased_softplus_{float(scale)}")


class HybridParamExtractor(nn.Module):
    """Splits outputs into the logits of choices, and location and scale of numbers.

    Args:
        n_logits (int): number L of logits of all choices.
        scale (float): scale for outputs of 0.

    Shapes:
        - outputs: ``[*, L + 2 D]``; returns: ``[*, L]``, ``[*, D]`` and ``[*, D]``
    """

    def __init__(self, n_logits: int, scale: float = 1.0) -> None:
        super().__init__()
        self.n_logits, self.normal = n_logits, _make_normal_extractor(scale)

    def forward(self, outputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Splits the outputs."""
        logits, numbers = outputs[..., : self.n_logits], outputs[..., self.n_logits :]
        return logits, *self.normal(numbers)


def make_actor_network(
    group: GroupSpec,
    config: NetworkConfig | None,
    outputs: int,
    head: nn.Module | None,
    norm: ObservationNorm | None,
    device: Device,
    *,
    gain: float = 0.01,
) -> AgentNetwork:
    """Builds an actor's network with the outputs that its distribution needs.

    Args:
        gain (float): gain of the last layer's orthogonal initialization; small for a policy that
            starts near uniform.

    Raises:
        ValueError: actions that are neither discrete, multi-discrete nor floats.
    """
    config = NetworkConfig() if config is None else config
    spec = group.padded_spec["action"]
    if not (group.discrete or group.branches or spec.dtype.is_floating_point):
        raise ValueError(
            f"group {group.name!r}: {type(spec).__name__} actions have no distribution here, "
            "expected Bounded, Unbounded, Categorical, OneHot, MultiCategorical or Hybrid."
        )
    check_size("actor", group, config, device)
    scales = _count_scales(group, head) if getattr(config, "state_independent_scale", False) else 0
    body = make_agent_network(
        group, outputs - scales, config, gain=gain, standardized=norm is not None, device=device
    )
    if scales:
        from torchrl_marl.modules.scales import append_scales

        of_agents = outputs - scales, scales, kinds_of(group)
        body = append_scales(body, *of_agents, config, device, teams_of(group))
    agents = AgentInput(group, norm, device)
    return AgentNetwork(agents, body, head, links=links_of(group, config, device))


def _count_scales(group: GroupSpec, head: nn.Module | None) -> int:
    """Returns the number of standard deviations of an agent's action."""
    if isinstance(head, NormalParamExtractor | HybridParamExtractor):
        return group.continuous_spec.shape[-1]
    return 0


def _continuous_policy(group, network, device):
    outputs = [group.key("loc"), group.key("scale")]
    module = wrap_for_group(group, network, outputs)
    parameters = {"loc": outputs[0], "scale": outputs[1]}
    bounds, padding = group.action_bounds, group.action_padding
    settings = {} if padding is None else {"mask": padding.to(device)}
    if bounds is None:
        refuse_half_bounded(group)
        return module, parameters, IndependentNormal if padding is None else PaddedNormal, settings
    refuse_ranges(group)
    low, high = (_scalar_or_tensor(bound, padding, device) for bound in bounds)
    settings |= {"low": low, "high": high}
    return module, parameters, TanhNormal if padding is None else PaddedTanhNormal, settings


def wrap_for_group(
    group: GroupSpec, network: nn.Module, outputs: list[NestedKey]
) -> TensorDictModule:
    """Wraps a network to read and write a group's keys, including those of memory and channel."""
    read, written = extra_keys(network, group)
    keys = [*AgentInput.keys(group), *read]
    return TensorDictModule(network, in_keys=keys, out_keys=[*outputs, *written])


def refuse_choices(group: GroupSpec) -> None:
    """Refuses multi-discrete and hybrid actions, of which no critic or Q-network knows."""
    if group.branches:
        raise ConfigError(
            f"group {group.name!r}: its actions are {group.choices}, expected continuous or "
            "discrete ones; use MAPPOLoss, or one Categorical over all combinations."
        )


def refuse_half_bounded(group: GroupSpec) -> None:
    spec, padding = group.continuous_spec, group.action_padding
    if not isinstance(spec, Bounded):
        return
    finite = torch.isfinite(spec.space.low) | torch.isfinite(spec.space.high)
    if bool(finite.any() if padding is None else finite[padding].any()):
        raise ValueError(
            f"group {group.name!r}: some action bounds are finite and some are not, expected "
            "all or none; give each action a finite low and high."
        )


def refuse_ranges(group: GroupSpec) -> None:
    """Refuses actions without a choice, and ranges that overflow to infinity."""
    if not bool((_action_ranges(group) > 0).all()):
        raise ValueError(
            f"group {group.name!r}: an action has equal low and high bounds, expected low below "
            "high; leave this action out, and let the environment fill it in."
        )
    refuse_overflow(group)


def refuse_overflow(group: GroupSpec) -> None:
    """Refuses bounds whose distance overflows to infinity."""
    ranges = _action_ranges(group)
    if not bool(torch.isfinite(ranges).all()):
        raise ValueError(
            f"group {group.name!r}: action bounds are too far apart for {ranges.dtype}; give the "
            "bounds of useful actions, or use Unbounded."
        )


def _action_ranges(group: GroupSpec) -> Tensor:
    """Returns the distances of the bounds, without padding."""
    (low, high), padding = group.action_bounds, group.action_padding  # type: ignore[misc]
    return high - low if padding is None else (high - low)[padding]


def _discrete_policy(group, network, device):
    module = legal_logits(group, network, device)
    distribution = OneHotCategorical if group.one_hot else Categorical
    return module, {"logits": group.key("logits")}, distribution, {}


def _multi_discrete_policy(group, network, device):
    module = legal_logits(group, network, device)
    settings = {"branches": group.branches}
    return module, {"logits": group.key("logits")}, MultiCategorical, settings


def _hybrid_policy(group, network, device):
    _, parameters, numbers, settings = _continuous_policy(group, network, device)
    module = legal_logits(group, network, device, tuple(parameters.values()))
    parameters = {"logits": group.key("logits"), **parameters}
    settings = {"branches": group.branches, "of": numbers, **settings}
    return module, parameters, Hybrid, settings


def legal_logits(
    group: GroupSpec, network: nn.Module, device: Device, others: tuple[NestedKey, ...] = ()
) -> TensorDictModule | TensorDictSequential:
    """Returns a module that writes ``(group, "logits")``, with illegal actions masked.

    Args:
        others (tuple of keys): further outputs of the network, after the logits.
    """
    logits = group.key("logits")
    module = wrap_for_group(group, network, [logits, *others])
    if group.action_mask_key is None and group.action_padding is None:
        return module
    keys = [logits, *([group.action_mask_key] if group.action_mask_key else [])]
    legal = TensorDictModule(LegalLogits(group, device), in_keys=keys, out_keys=[logits])
    return TensorDictSequential(module, legal)


def _scalar_or_tensor(bound: Tensor, padding: Tensor | None, device: Device) -> float | Tensor:
    first = bound.flatten()[0]
    same = bound == first if padding is None else (bound == first)[padding]
    return first.item() if bool(same.all()) else bound.to(device)
