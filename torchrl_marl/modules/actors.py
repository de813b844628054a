"""Actors: from what an agent sees to what it does.

Shapes: B any batch dims, N agents, O observation features, A action features.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from tensordict import NestedKey, TensorDictBase
from tensordict.nn import (
    InteractionType,
    TensorDictModule,
    TensorDictModuleBase,
    TensorDictSequential,
    dispatch,
)
from tensordict.nn.probabilistic import interaction_type
from torch import Tensor, nn
from torch.distributions import Categorical
from torch.types import Device
from torchrl.data import Bounded, Unbounded
from torchrl.envs.transforms import TensorDictPrimer
from torchrl.modules import (
    IndependentNormal,
    NormalParamExtractor,
    OneHotCategorical,
    ProbabilisticActor,
    TanhNormal,
)

from torchrl_marl.errors import SpecError
from torchrl_marl.modules.build import extra_keys, links_of, make_agent_network
from torchrl_marl.modules.config import NetworkConfig
from torchrl_marl.modules.distributions import Gated, PaddedNormal, PaddedTanhNormal
from torchrl_marl.modules.inputs import AgentInput, LegalLogits
from torchrl_marl.modules.memory.states import state_size
from torchrl_marl.modules.networks import AgentNetwork, channels_of
from torchrl_marl.modules.normalization import ObservationNorm
from torchrl_marl.modules.size import check_size
from torchrl_marl.specs import GroupSpec
from torchrl_marl.specs.groups import is_lazy

__all__ = [
    "ActsForGroup",
    "GroupActor",
    "check_memory",
    "legal_logits",
    "make_actor",
    "make_actor_network",
    "make_primer",
    "of_group",
    "refuse_half_bounded",
]


class ActsForGroup(TensorDictModuleBase):
    """The part that actors share: they act on dense (padded) data, or on lazily stacked ones.

    Where the group is stacked lazily, it is padded on the way in, and every agent gets its own
    actions on the way out.
    """

    group: GroupSpec
    remembered: dict[str, int]
    """Numbers that an agent remembers, by group."""
    hears: bool
    """Whether the environment says who hears whom."""

    def serve(self, group: GroupSpec) -> None:
        """Sets for whom it acts, once its networks are there."""
        size = state_size(self)
        self.group = group
        self.remembered = {own.name: size for own in group.sources if size}
        if self.remembered:  # TorchRL asks for one wherever there is a maker
            self.make_tensordict_primer = partial(make_primer, group, self.remembered)
        self.hears = any(channel.config.links == "env" for channel in channels_of(self))

    @dispatch(auto_batch_size=False)
    def forward(self, tensordict: TensorDictBase, *args: Any, **kwargs: Any) -> TensorDictBase:
        """Acts."""
        if self.remembered:
            check_memory(self.group, tensordict)
        if self.hears:
            check_links(self.group, tensordict)
        if not is_lazy(tensordict.get(self.group.name, None)):
            return self.act(tensordict, *args, **kwargs)
        acted = self.act(self.group.dense(tensordict), *args, **kwargs)
        for leaf in ("action", "action_log_prob", "channel"):
            rows = acted.get((self.group.name, leaf), None)
            if rows is not None:
                self.group.write(tensordict, leaf, rows)
        return tensordict

    def act(self, tensordict: TensorDictBase, *args: Any, **kwargs: Any) -> TensorDictBase:
        """Acts on dense data."""
        return super().forward(tensordict, *args, **kwargs)


class GroupActor(ActsForGroup, ProbabilisticActor):
    """An actor of a group; it takes dense (padded) data, and lazily stacked ones.

    Args:
        group (GroupSpec): whose.
        *args, **kwargs: of :class:`torchrl.modules.ProbabilisticActor`.
    """

    def __init__(self, group: GroupSpec, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.serve(group)
        self.draws = sum(channel.draws for channel in channels_of(self))
        """Numbers that are drawn for an agent in the channel of a step."""

    def act(self, tensordict: TensorDictBase, *args: Any, **kwargs: Any) -> TensorDictBase:
        """Acts on dense data; what the channel needs is drawn anew."""
        if not self.draws:
            return super().act(tensordict, *args, **kwargs)
        from torchrl_marl.modules.communication.channel import drawing

        rows = tensordict.get(self.group.observation_keys[0])
        agents = (*tensordict.batch_size, self.group.n_agents)
        blank = torch.zeros(*agents, self.draws, device=rows.device)
        tensordict.set(self.group.key("channel"), blank)
        how = interaction_type() or self.default_interaction_type
        with drawing("draw" if how is InteractionType.RANDOM else "mode"):
            return super().act(tensordict, *args, **kwargs)

    def get_dist(self, tensordict: TensorDictBase, *args: Any, **kwargs: Any) -> Any:
        """Returns the distribution over padded actions."""
        return super().get_dist(self.group.dense(tensordict), *args, **kwargs)


def check_links(group: GroupSpec, tensordict: TensorDictBase) -> None:
    """Refuses steps or batches that do not say who hears whom.

    Raises:
        SpecError: naming the entry.
    """
    links, n = tensordict.get(group.key("links"), None), group.n_agents
    if links is None or links.shape[-2:] != (n, n) or links.dtype is not torch.bool:
        found = "nothing" if links is None else f"{links.dtype} {tuple(links.shape)}"
        raise SpecError(
            f"group {group.name!r}: communication.links is 'env', but the environment gives "
            f"{found} as {group.key('links')!r}, expected torch.bool [*B, {n}, {n}]; use "
            "communication.links=all."
        )


def make_primer(group: GroupSpec, sizes: Mapping[str, int]) -> TensorDictPrimer:
    """Builds TorchRL's transform that carries what agents remember.

    TorchRL's ``get_primers_from_module`` finds it in an actor; each agent's first step is told by
    :class:`~torchrl_marl.envs.AgentInitTracker`. Captured rollouts take
    :func:`~torchrl_marl.envs.with_memory` instead, which does both.

    Args:
        group (GroupSpec): whose; also several groups as one.
        sizes (mapping): group -> the numbers S that each of its agents remembers.
    """
    primers: dict[NestedKey, Any] = {
        (own.name, "hidden"): Unbounded((own.n_agents, sizes[own.name])) for own in group.sources
    }
    return TensorDictPrimer(primers, default_value=0.0, reset_key="_reset", expand_specs=True)


def check_memory(group: GroupSpec, tensordict: TensorDictBase) -> None:
    """Refuses a step without what agents remember.

    Raises:
        SpecError: naming the entry that is missing.
    """
    for leaf in ("hidden", "is_init"):
        if tensordict.get(group.key(leaf), None) is None:
            raise SpecError(
                f"group {group.name!r}: its actor remembers, but there is no {group.key(leaf)!r}; "
                "let the environment carry it: torchrl_marl.envs.with_memory(env, policy)."
            )


def make_actor(
    group: GroupSpec,
    config: NetworkConfig | None = None,
    *,
    observation_norm: ObservationNorm | None = None,
    device: Device = None,
) -> ProbabilisticActor:
    """Builds a stochastic policy for every agent of a group.

    Bounded continuous actions get a :class:`~torchrl.modules.TanhNormal` over the group's
    bounds, unbounded ones a normal, discrete ones a categorical in which illegal actions have
    no probability. An agent without any legal action (it waits or is dead) draws from all of
    them, so that nothing becomes NaN; the environment ignores it.

    Args:
        group (GroupSpec): keys, sizes, bounds and masks, from :class:`TeamSpec`.
        config (NetworkConfig, optional): the network.
        observation_norm (ObservationNorm, optional): standardizes observations.
        device (torch.device, optional): of the parameters.

    Shapes:
        - observation: ``[*B, N, O]``; mask: ``[*B, N]``; action_mask: ``[*B, N, n_actions]``
        - action: ``[*B, N, A]``, ``[*B, N]`` or one-hot ``[*B, N, n_actions]``
        - action_log_prob: ``[*B, N]``

    Keys:
        - reads: ``group.observation_keys``, ``group.mask_key``, ``group.action_mask_key``
        - writes: ``group.action_key``, ``(group, "action_log_prob")`` and the parameters of the
          distribution: ``(group, "loc")`` and ``(group, "scale")``, or ``(group, "logits")``
        - with ``config.memory`` it also reads ``(group, "is_init")`` and ``(group, "hidden")`` and
          writes ``("next", group, "hidden")``; :func:`~torchrl_marl.envs.with_memory` carries them

    Where the agents of the group differ, it takes padded or lazily stacked groups, and padding
    counts in no log-probability and no entropy.

    Raises:
        ValueError: an action spec that has no distribution here.

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
    outputs = group.n_actions if group.discrete else 2 * group.action_dim
    head = None if group.discrete else NormalParamExtractor()
    network = make_actor_network(group, config, outputs, head, observation_norm, device)
    make = _discrete if group.discrete else _continuous
    module, parameters, distribution, settings = make(group, network, device)
    if network.gated:
        parameters |= {"gate": group.key("channel"), "gate_logits": group.key("gate_logits")}
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
    """Builds an actor's network, with so many outputs for every agent.

    Args:
        gain (float): scale of the last layer's orthogonal start; small for a policy that starts
            near uniform.

    Raises:
        ValueError: actions that are neither discrete nor floats.
    """
    config = NetworkConfig() if config is None else config
    spec = group.padded_spec["action"]
    if not group.discrete and not spec.dtype.is_floating_point:
        raise ValueError(
            f"group {group.name!r}: {type(spec).__name__} actions have no "
            "distribution here, expected Bounded, Unbounded, Categorical or OneHot."
        )
    check_size("actor", group, config, device)
    body = make_agent_network(
        group, outputs, config, gain=gain, standardized=norm is not None, device=device
    )
    agents = AgentInput(group, norm, device)
    return AgentNetwork(agents, body, head, links=links_of(group, config, device))


def _continuous(group, network, device):
    outputs = [group.key("loc"), group.key("scale")]
    module = of_group(group, network, outputs)
    parameters = {"loc": outputs[0], "scale": outputs[1]}
    bounds, own = group.action_bounds, group.action_padding
    settings = {} if own is None else {"mask": own.to(device)}
    if bounds is None:
        refuse_half_bounded(group)
        return module, parameters, IndependentNormal if own is None else PaddedNormal, settings
    low, high = (_scalar_or_tensor(bound, own, device) for bound in bounds)
    settings |= {"low": low, "high": high}
    return module, parameters, TanhNormal if own is None else PaddedTanhNormal, settings


def of_group(group: GroupSpec, network: nn.Module, outputs: list[NestedKey]) -> TensorDictModule:
    """Returns a network that reads a group, with its memory and its channel where it has them."""
    read, written = extra_keys(network, group)
    keys = [*AgentInput.keys(group), *read]
    return TensorDictModule(network, in_keys=keys, out_keys=[*outputs, *written])


def refuse_half_bounded(group: GroupSpec) -> None:
    spec, own = group.padded_spec["action"], group.action_padding
    if not isinstance(spec, Bounded):
        return
    finite = torch.isfinite(spec.space.low) | torch.isfinite(spec.space.high)
    if bool(finite.any() if own is None else finite[own].any()):
        raise ValueError(
            f"group {group.name!r}: some action bounds are finite and some are not, expected "
            "all or none; give each action a finite low and high."
        )


def _discrete(group, network, device):
    module = legal_logits(group, network, device)
    distribution = OneHotCategorical if group.one_hot else Categorical
    return module, {"logits": group.key("logits")}, distribution, {}


def legal_logits(
    group: GroupSpec, network: nn.Module, device: Device
) -> TensorDictModule | TensorDictSequential:
    """Returns what writes ``(group, "logits")``, in which illegal actions have no probability."""
    logits = group.key("logits")
    module = of_group(group, network, [logits])
    if group.action_mask_key is None and group.action_padding is None:
        return module
    keys = [logits, *([group.action_mask_key] if group.action_mask_key else [])]
    legal = TensorDictModule(LegalLogits(group, device), in_keys=keys, out_keys=[logits])
    return TensorDictSequential(module, legal)


def _scalar_or_tensor(bound: Tensor, own: Tensor | None, device: Device) -> float | Tensor:
    first = bound.flatten()[0]
    same = bound == first if own is None else (bound == first)[own]
    return first.item() if bool(same.all()) else bound.to(device)
