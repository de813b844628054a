"""Actors: from what an agent sees to what it does.

Shapes: B any batch dims, N agents, O observation features, A action features.
"""

from __future__ import annotations

import torch
from tensordict.nn import InteractionType, TensorDictModule, TensorDictSequential
from torch import Tensor, nn
from torch.distributions import Categorical
from torchrl.data import Bounded
from torchrl.modules import (
    IndependentNormal,
    NormalParamExtractor,
    OneHotCategorical,
    ProbabilisticActor,
    TanhNormal,
)

from torchrl_marl.modules.config import NetworkConfig
from torchrl_marl.modules.networks import AgentInput, AgentNetwork, make_network
from torchrl_marl.modules.normalization import ObservationNorm
from torchrl_marl.specs import GroupSpec

__all__ = ["make_actor"]


def make_actor(
    group: GroupSpec,
    config: NetworkConfig | None = None,
    *,
    observation_norm: ObservationNorm | None = None,
    device: torch.device | str | None = None,
) -> ProbabilisticActor:
    """A stochastic policy for every agent of a group.

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

    Raises:
        ValueError: a heterogeneous group, or an action spec that has no distribution here.

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
    config = NetworkConfig() if config is None else config
    if not group.discrete and not group.action_spec.dtype.is_floating_point:
        raise ValueError(
            f"group {group.name!r}: {type(group.action_spec).__name__} actions have no "
            "distribution here, expected Bounded, Unbounded, Categorical or OneHot."
        )
    keys = list(group.observation_keys) + ([group.mask_key] if group.mask_key else [])
    features = AgentInput(group.observation_ndims, group.mask_key is not None, observation_norm)
    network = make_network(
        group.observation_dim,
        group.n_actions if group.discrete else 2 * group.action_dim,
        group.n_agents,
        config,
        centralized=False,
        gain=0.01,
        device=device,
    )
    if group.discrete:
        module, parameters, distribution, settings = _discrete(group, keys, features, network)
    else:
        module, parameters, distribution, settings = _continuous(
            group, keys, features, network, device
        )
    return ProbabilisticActor(
        module=module,
        in_keys=parameters,
        out_keys=[group.action_key],
        distribution_class=distribution,
        distribution_kwargs=settings,
        return_log_prob=True,
        log_prob_key=group.key("action_log_prob"),
        default_interaction_type=InteractionType.RANDOM,
    )


def _continuous(group, keys, features, network, device):
    outputs = [group.key("loc"), group.key("scale")]
    module = TensorDictModule(
        AgentNetwork(features, network, NormalParamExtractor()),
        in_keys=keys,
        out_keys=outputs,
    )
    parameters = {"loc": outputs[0], "scale": outputs[1]}
    bounds = group.action_bounds
    if bounds is None:
        _refuse_half_bounded(group)
        return module, parameters, IndependentNormal, {}
    low, high = (_scalar_or_tensor(bound, device) for bound in bounds)
    return module, parameters, TanhNormal, {"low": low, "high": high}


def _refuse_half_bounded(group: GroupSpec) -> None:
    if isinstance(group.action_spec, Bounded):
        space = group.action_spec.space
        if bool(torch.isfinite(space.low).any() | torch.isfinite(space.high).any()):
            raise ValueError(
                f"group {group.name!r}: some action bounds are finite and some are not, expected "
                "all or none; give each action a finite low and high."
            )


def _discrete(group, keys, features, network):
    logits = group.key("logits")
    module = TensorDictModule(AgentNetwork(features, network), in_keys=keys, out_keys=[logits])
    if group.action_mask_key is not None:
        legal = TensorDictModule(
            LegalLogits(), in_keys=[logits, group.action_mask_key], out_keys=[logits]
        )
        module = TensorDictSequential(module, legal)
    distribution = OneHotCategorical if group.one_hot else Categorical
    return module, {"logits": logits}, distribution, {}


class LegalLogits(nn.Module):
    """Takes the probability of illegal actions away, unless none is legal.

    Shapes:
        - logits: ``[*B, N, n_actions]``; action_mask: the same, bool

    Raises:
        ValueError: an action mask of another shape or type.
    """

    def forward(self, logits: Tensor, action_mask: Tensor) -> Tensor:
        """Lowers illegal logits to the least finite number."""
        if action_mask.dtype is not torch.bool or action_mask.shape != logits.shape:
            raise ValueError(
                f"an action mask is {action_mask.dtype} {tuple(action_mask.shape)}, "
                f"expected torch.bool {tuple(logits.shape)}."
            )
        legal = action_mask | ~action_mask.any(-1, keepdim=True)
        return torch.where(legal, logits, torch.finfo(logits.dtype).min)


def _scalar_or_tensor(bound: Tensor, device: torch.device | str | None) -> float | Tensor:
    first = bound.flatten()[0]
    return first.item() if bool((bound == first).all()) else bound.to(device)
