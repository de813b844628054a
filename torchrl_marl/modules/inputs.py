"""Modules around networks: they flatten observations and states, and pick agents' outputs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, cast

import torch
from tensordict import TensorDictBase, unravel_key
from torch import Tensor, nn
from torch.types import Device
from torchrl.data import TensorSpec

from torchrl_marl.modules.normalization import ObservationNorm, ValueNorm
from torchrl_marl.specs import GroupSpec
from torchrl_marl.specs.groups import check_action_mask, check_inputs, flat_leaves

__all__ = [
    "AgentInput",
    "AgentValues",
    "Denormalize",
    "Features",
    "LegalLogits",
    "PickAgents",
    "Picture",
    "StateInput",
    "TeamInput",
    "agent_features",
    "cast_for_network",
    "concatenate",
    "gather_observation",
    "observation_leaves",
    "state_features",
    "widest",
]

Rows = tuple[Tensor, Tensor | None]


def register_constants(module: nn.Module, device: Device, **tensors: Tensor | None) -> None:
    """Registers constant tensors of a module as buffers that are not saved.

    Args:
        module (nn.Module): gets a non-persistent buffer for each tensor.
        device (torch.device, optional): device of the buffers.
        **tensors (Tensor, optional): tensors by buffer name.
    """
    for name, value in tensors.items():
        value = None if value is None else value.to(device)
        module.register_buffer(name, value, persistent=False)


class Picture(NamedTuple):
    """Position of an image in a row of features.

    Args:
        start (int): index of its first feature.
        shape (tuple of int): shape in the environment, ``(H, W, C)`` or ``(C, H, W)``.
        leaf (str): observation leaf; images of one leaf and shape share an encoder.
        scale (float): factor by which its values are multiplied.
    """

    start: int
    shape: tuple[int, int, int]
    leaf: str
    scale: float = 1.0


@dataclass(frozen=True)
class Features:
    """Layout of a network's input: a row of features, some of which are images.

    Args:
        width (int): number of features.
        pictures (tuple of Picture, optional): positions of the images; None if they differ
            between agents of one network.

    Examples:
        >>> Features(4).wider(2)
        Features(width=6, pictures=())
    """

    width: int
    pictures: tuple[Picture, ...] | None = ()

    def wider(self, n: int) -> Features:
        """Returns the layout with ``n`` further features at the end."""
        return replace(self, width=self.width + n)


def widest(rows: Iterable[Features]) -> Features:
    """Returns the input layout of one network that serves agents of all given layouts.

    Examples:
        >>> widest([Features(4), Features(6)])
        Features(width=6, pictures=())
    """
    rows = list(rows)
    alike = all(row.pictures == rows[0].pictures for row in rows)
    return Features(max(row.width for row in rows), rows[0].pictures if alike else None)


def concatenate(rows: Iterable[Features]) -> Features:
    """Returns the layout of several agents' concatenated features.

    Examples:
        >>> concatenate([Features(4), Features(6)])
        Features(width=10, pictures=())
    """
    width, pictures = 0, []
    for row in rows:
        pictures += [p._replace(start=p.start + width) for p in row.pictures or ()]
        width += row.width
    return Features(width, tuple(pictures))


def agent_features(group: GroupSpec, standardized: bool = False) -> list[Features]:
    """Returns the layout of each agent's observation, as :class:`AgentInput` writes it.

    Args:
        group (GroupSpec): group of the agents, or several groups joined into one.
        standardized (bool): whether observations are standardized; byte images are not scaled then.
    """
    if len(group.groups) > 1:
        return [own for one in group.groups for own in agent_features(one, standardized)]
    found = []
    for agent, width in enumerate(group.observation_dims):
        pictures: list[Picture] = []
        start = 0
        for key, leaf in observation_leaves(group, agent):
            pictures += _pictures_of_leaf(leaf, start, key, standardized)
            start += leaf.shape.numel()
        found.append(Features(width, tuple(pictures)))
    return found


def observation_leaves(group: GroupSpec, agent: int) -> Iterable[tuple[str, TensorSpec]]:
    """Returns the name and spec of each observation leaf of an agent."""
    own = group.own_specs[agent]
    for key in group.observation_keys:
        path = unravel_key(key[1:])
        if path in own.keys(True, True):
            yield ".".join(key[1:]), own[path]


def state_features(group: GroupSpec) -> Features:
    """Returns the layout of a team's state."""
    spec = group.team_state_spec
    assert spec is not None
    return Features(spec.shape.numel(), tuple(_pictures_of_leaf(spec, 0, "state", False)))


def _pictures_of_leaf(leaf: TensorSpec, start: int, name: str, standardized: bool) -> list[Picture]:
    if len(leaf.shape) != 3:
        return []
    scale = 1 / 255 if leaf.dtype is torch.uint8 and not standardized else 1.0
    return [Picture(start, tuple(leaf.shape), name, scale)]


class AgentInput(nn.Module):
    """Reads a group's observations: flattened, concatenated, masked, standardized.

    Features of masked agents become 0. Padding is 0, too, and follows an agent's real features.

    Args:
        group (GroupSpec): group to read; if it has a mask, the mask is the last input.
        norm (ObservationNorm, optional): standardizes the observations.

    Shapes:
        - leaves: ``[*B, N, *features]``; mask: ``[*B, N]``; returns ``[*B, N, O]`` and the mask

    Raises:
        SpecError: inputs whose shapes or dtypes differ from the group's specs.
    """

    own: Tensor | None
    order: Tensor | None

    def __init__(
        self, group: GroupSpec, norm: ObservationNorm | None = None, device: Device = None
    ) -> None:
        super().__init__()
        self.group = group
        self.ndims = group.observation_ndims
        self.n_agents = group.n_agents
        self.masked = group.mask_key is not None
        self.norm = norm
        own, order = group.observation_padding, group.observation_order
        register_constants(self, device, own=own, order=order)

    @staticmethod
    def keys(group: GroupSpec) -> list:
        """Returns the input keys."""
        return [*group.observation_keys, *([group.mask_key] if group.mask_key else [])]

    def forward(self, *inputs: Tensor) -> Rows:
        """Returns the concatenated, masked and standardized leaves."""
        leaves = inputs[: len(self.ndims)]
        mask = inputs[len(self.ndims)] if self.masked else None
        check_inputs(self.group, leaves, mask)
        features = self.rows(*inputs)
        real = None if mask is None else mask.unsqueeze(-1)
        if self.own is not None:
            real = self.own if real is None else real & self.own
        if self.norm is not None:
            features = self.norm(features)
        if real is not None:
            features = torch.where(real, features, 0.0)
        return features, mask

    def rows(self, *inputs: Tensor) -> Tensor:
        """Returns the concatenated leaves without further processing, ``[*B, N, O]``."""
        return flat_leaves(inputs[: len(self.ndims)], self.ndims, self.order)


class TeamInput(nn.Module):
    """Reads all agents' observations as one row.

    Args:
        agents (AgentInput): reads the observations as ``[*B, N, O]``.
        own (sequence of int): number of real features of each agent, without padding.

    Shapes:
        - inputs: those of ``agents``; returns ``[*B, F]`` with F the sum of ``own``, and the mask
    """

    index: Tensor | None

    def __init__(self, agents: AgentInput, own: Sequence[int]) -> None:
        super().__init__()
        self.agents = agents
        device = None if agents.own is None else agents.own.device
        register_constants(self, device, index=packed_index(own))

    def forward(self, *inputs: Tensor) -> Rows:
        """Concatenates the agents, without their padding."""
        features, mask = self.agents(*inputs)
        return pack(features, self.index), mask


def packed_index(widths: Sequence[int]) -> Tensor | None:
    """Returns the indices of real features in a row of all agents; None without padding.

    Examples:
        >>> packed_index([2, 1]).tolist()
        [0, 1, 2]
    """
    most = max(widths)
    own = [i * most + j for i, width in enumerate(widths) for j in range(width)]
    return None if min(widths) == most else torch.tensor(own)


def pack(features: Tensor, index: Tensor | None) -> Tensor:
    """Concatenates agents, ``[*B, N, F]`` to ``[*B, F of all]``; ``index`` drops padding."""
    features = features.flatten(-2)
    return features if index is None else features.index_select(-1, index)


class StateInput(nn.Module):
    """Reads the state.

    Shapes:
        - state: ``[*B, *state]``; returns ``[*B, S]`` and no mask
    """

    def __init__(self, ndim: int) -> None:
        super().__init__()
        self.ndim = ndim

    def forward(self, state: Tensor) -> Rows:
        """Flattens the state, as floats."""
        return flat_leaves([state], [self.ndim], None), None


def cast_for_network(features: Tensor, network: nn.Module) -> Tensor:
    """Returns features in the dtype of the network that reads them; those of float32 unchanged.

    Examples:
        >>> cast_for_network(torch.zeros(2, dtype=torch.float64), nn.Linear(2, 1)).dtype
        torch.float32
    """
    if features.dtype is torch.float32:
        return features
    # Losses put plain tensors in the place of parameters.
    parts = ((*part.parameters(False), *vars(part).values()) for part in network.modules())
    tensors = (x for part in parts for x in part if isinstance(x, Tensor))
    dtypes = (x.dtype for x in tensors if x.is_floating_point())
    return features.to(next(dtypes, torch.get_default_dtype()))


def gather_observation(
    group: GroupSpec, tensordict: TensorDictBase
) -> tuple[Tensor, Tensor | None]:
    """Returns a group's concatenated observation leaves, ``[*B, N, O]``, and its mask."""
    mask = None if group.mask_key is None else tensordict.get(group.mask_key)
    observation = group.flat_observation(tensordict)
    own = group.observation_padding
    if own is not None:
        observation = torch.where(own.to(observation.device), observation, 0.0)
    return observation, mask


class Denormalize(nn.Module):
    """Last layer of a critic: maps normalized returns to reward units."""

    def __init__(self, value_norm: ValueNorm) -> None:
        super().__init__()
        self.value_norm = value_norm

    def forward(self, value: Tensor) -> Tensor:
        """Applies the affine map of the statistics."""
        return self.value_norm.denormalize(value)


class AgentValues(nn.Module):
    """Picks a value for every agent from the outputs of one or several networks.

    Args:
        index (sequence of int): output of each agent, numbered over all networks.
        several (bool): whether a dim of K networks precedes the dim of outputs.
        n_outputs (int): number of outputs of all networks together.
        device (torch.device, optional): device of the indices.
        width (int): count W of numbers per output; 1 for a value.

    Shapes:
        - values: ``[*B, n_outputs * W]``, or ``[*B, K, n_outputs * W / K]`` if ``several``
        - returns: ``[*B, N, W]``
    """

    index: Tensor | None

    def __init__(
        self, index: Sequence[int], several: bool, n_outputs: int, device: Device, width: int = 1
    ) -> None:
        super().__init__()
        self.several, self.width = several, width
        plain = list(index) == list(range(n_outputs))
        register_constants(self, device, index=None if plain else torch.tensor(index))

    def forward(self, values: Tensor) -> Tensor:
        values = values.flatten(-2) if self.several else values
        values = values.unflatten(-1, (-1, self.width))
        return values if self.index is None else values.index_select(-2, self.index)


class PickAgents(nn.Module):
    """Picks the values of the given agents; the value of an agent is one of its K outputs.

    Args:
        agents (sequence of int): indices of the N agents to pick, among all M.
        outputs (sequence of int): index of the value among the K outputs, for each picked agent.
        n_seen (int): number M of agents that have outputs.
        device (torch.device, optional): device of the indices.

    Shapes:
        - values: ``[*B, M, K]``; returns ``[*B, N, 1]``
    """

    agents: Tensor | None
    output: Tensor | None

    def __init__(
        self, agents: Sequence[int], outputs: Sequence[int], n_seen: int, device: Device
    ) -> None:
        super().__init__()
        everyone = list(agents) == list(range(n_seen))
        several = len(set(outputs)) > 1
        index = None if everyone else torch.tensor(agents)
        output = torch.tensor(outputs).unsqueeze(-1) if several else None
        register_constants(self, device, agents=index, output=output)

    def forward(self, values: Tensor) -> Tensor:
        if self.agents is not None:
            values = values.index_select(-2, self.agents)
        if self.output is not None:
            values = values.gather(-1, self.output.expand(*values.shape[:-1], 1))
        return values


class LegalLogits(nn.Module):
    """Sets the probability of illegal actions to 0, unless no action is legal.

    Args:
        group (GroupSpec): group of the agents; padding is never legal.
        device (torch.device, optional): device of the logits.

    Shapes:
        - logits: ``[*B, N, n_actions]``; action_mask: the same, bool
        - of several choices, both: ``[*B, N, n_options]``

    Raises:
        SpecError: an action mask of another shape or dtype.
    """

    own: Tensor | None

    def __init__(self, group: GroupSpec, device: Device = None) -> None:
        super().__init__()
        self.group = group
        register_constants(self, device, own=group.action_padding)

    def forward(self, logits: Tensor, action_mask: Tensor | None = None) -> Tensor:
        """Sets illegal logits to the lowest finite number."""
        if action_mask is None:
            legal = cast(Tensor, self.own)
        else:
            check_action_mask(self.group, action_mask, logits.shape[:-2])
            legal = choosable(action_mask, self.own, self.group.branches)
        return torch.where(legal, logits, torch.finfo(logits.dtype).min)


def choosable(legal: Tensor, own: Tensor | None, branches: Sequence[int] = ()) -> Tensor:
    """Returns the legal actions of each agent; all its actions if none is legal.

    Args:
        legal (Tensor): bool, ``[*B, N, n_actions]``.
        own (Tensor, optional): False at padding, ``[N, n_actions]``.
        branches (sequence of int): number of options of each choice, if there are several.
    """
    if branches:
        from torchrl_marl.specs.choices import choosable_options

        return choosable_options(legal, branches)
    legal = legal if own is None else legal & own
    # An agent without a legal action does not act, so any action will do.
    legal = legal | ~legal.any(-1, keepdim=True)
    return legal if own is None else legal & own
