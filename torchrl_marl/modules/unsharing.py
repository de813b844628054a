"""Un-sharing during training: each agent gets separate parameters.

Shapes: N agents.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from torch import Tensor, nn

from torchrl_marl.modules.memory.cells import AgentLinear, Memory
from torchrl_marl.modules.networks import Feedforward
from torchrl_marl.modules.stacks.module_stack import ModuleStack, stack
from torchrl_marl.modules.stacks.storage import Bucket

__all__ = ["Origin", "carry_state", "unshare", "unshare_memory"]


@dataclass(frozen=True)
class Origin:
    """Rows of a shared parameter from which an un-shared parameter was copied.

    Args:
        name (str): name of the shared parameter.
        rows (tuple of int): row of the shared parameter for each row of the new one.
        stacked (bool): whether the shared parameter has rows; otherwise every new row is a copy of
            the whole parameter.
    """

    name: str
    rows: tuple[int, ...]
    stacked: bool = True

    def take(self, tensor: Tensor) -> Tensor:
        """Returns the new parameter's rows, from the old one or a tensor of the old one's shape.

        Examples:
            >>> import torch
            >>> Origin("weight", (0, 0, 1)).take(torch.tensor([[1.0], [2.0]])).tolist()
            [[1.0], [1.0], [2.0]]
        """
        tensor = tensor if self.stacked else tensor.unsqueeze(0)
        return tensor[list(self.rows)]


def unshare(
    network: nn.Module, n_agents: int | None = None
) -> tuple[nn.Sequential, dict[str, Origin]]:
    """Returns a network with separate parameters for each agent, and their origins.

    The outputs do not change. A trunk is copied for each agent. A network that reads the agent's id
    still reads it. With ``sharing="masks"`` each agent keeps its pruning mask of hidden units. The
    given network is not changed. :func:`carry_state` copies the optimizer's state.

    Args:
        network (nn.Module): from ``make_shared_mlp``, or any module that all agents share.
        n_agents (int, optional): number N of agents; needed for a module that all agents share.

    Raises:
        TypeError: a module whose number of agents is unknown.

    Examples:
        >>> from torchrl_marl.modules.config import NetworkConfig
        >>> from torchrl_marl.modules.sharing import make_shared_mlp
        >>> network = make_shared_mlp([5] * 3, [2] * 3, [0] * 3, NetworkConfig([8]), gain=1.0)
        >>> alone, origins = unshare(network)
        >>> [sum(p.numel() for p in x.parameters()) for x in (network, alone)]
        [66, 198]
        >>> origins["0.buckets.0.module.0.weight"].rows
        (0, 0, 0)
    """
    if not any(isinstance(step, ModuleStack) for step in network.children()):
        return _unshare_module(network, n_agents)
    steps: list[nn.Module] = []
    origins: dict[str, Origin] = {}
    for i, step in network.named_children():
        if isinstance(step, ModuleStack):
            own = step.unshare()
            found = _find_origins(step, own)
            steps.append(own)
        else:
            # Modules that are not stacks already have a row for each agent.
            found = {n: Origin(n, tuple(range(len(p)))) for n, p in step.named_parameters()}
            steps.append(copy.deepcopy(step))
        for name, origin in found.items():
            origins[f"{i}.{name}"] = replace(origin, name=f"{i}.{origin.name}")
    return nn.Sequential(*steps), origins


def unshare_memory(memory: Memory, n_agents: int) -> tuple[Memory, dict[str, Origin]]:
    """Returns a memory with separate parameters for each agent, and their origins.

    The outputs and states do not change.

    Args:
        memory (Memory): memory that agents may share.
        n_agents (int): number N of agents.

    Examples:
        >>> from torchrl_marl.modules.memory import GRU
        >>> alone, origins = unshare_memory(GRU(4, 8, index=[0, 1, 0]), 3)
        >>> alone.hh.weight.shape, origins["hh.weight"].rows
        (torch.Size([3, 24, 8]), (0, 1, 0))
    """
    own = copy.deepcopy(memory)
    linears = [module for module in own.modules() if isinstance(module, AgentLinear)]
    rows = tuple(linears[0].rows(n_agents))
    origins = {name: Origin(name, rows) for name, _ in own.named_parameters()}
    for module in own.modules():
        for name, parameter in module.named_parameters(recurse=False):
            setattr(module, name, nn.Parameter(parameter.detach()[list(rows)]))
    for linear in linears:
        linear.index, linear.shared = None, n_agents == 1
    return own, origins


def _unshare_module(
    module: nn.Module, n_agents: int | None
) -> tuple[nn.Sequential, dict[str, Origin]]:
    if n_agents is None:
        raise TypeError(
            f"the number of agents of a {type(module).__name__} is unknown; pass n_agents."
        )
    # Consecutive layers without other modules run as one batched call.
    module = nn.Sequential(*module) if isinstance(module, Feedforward) else module
    own = stack([copy.deepcopy(module) for _ in range(n_agents)], pad=True)
    names = _parameter_names(own)
    origins = {
        f"0.{names[id(tensor)]}": Origin(name, (0,) * len(agents), stacked=False)
        for bucket, agents in _members_by_bucket(own)
        for name, tensor in bucket.read().items()
        if id(tensor) in names
    }
    return nn.Sequential(own), origins


def _find_origins(shared: ModuleStack, own: ModuleStack) -> dict[str, Origin]:
    old_names, new_names = _parameter_names(shared), _parameter_names(own)
    origins = {}
    for bucket, agents in _members_by_bucket(own):
        before, _ = shared.bucket(agents[0])
        rows = tuple(shared.places[agent][1] for agent in agents)
        old = before.read()
        for name, tensor in bucket.read().items():
            if id(tensor) in new_names:
                old_name = old_names[id(old[name])]
                origins[new_names[id(tensor)]] = Origin(old_name, rows, before.stacked[name])
    return origins


def _members_by_bucket(own: ModuleStack) -> Iterator[tuple[Bucket, list[int]]]:
    """Yields each structure with the agents of its rows."""
    order = sorted(range(len(own)), key=lambda agent: own.places[agent])
    for _, agents in groupby(order, key=lambda agent: own.places[agent][0]):
        members = list(agents)
        yield own.bucket(members[0])[0], members


def _parameter_names(network: nn.Module) -> dict[int, str]:
    return {id(parameter): name for name, parameter in network.named_parameters()}


def carry_state(
    state: Mapping[str, Mapping[str, Any]], origins: Mapping[str, Origin]
) -> dict[str, dict[str, Any]]:
    """Converts the optimizer state of a shared network to that of the un-shared network.

    Each agent's copy keeps the moments of its origin.

    Args:
        state (mapping): parameter's name -> ``optimizer.state[parameter]``.
        origins (mapping): from :func:`unshare`.

    Returns:
        New parameter's name -> its state, for parameters that have one.

    Examples:
        >>> from torch.optim import Adam
        >>> from torchrl_marl.modules.config import NetworkConfig
        >>> from torchrl_marl.modules.sharing import make_shared_mlp
        >>> network = make_shared_mlp([5] * 3, [2] * 3, [0] * 3, NetworkConfig([8]), gain=1.0)
        >>> alone, origins = unshare(network)
        >>> old, new = Adam(network.parameters()), Adam(alone.parameters())
        >>> state = {name: old.state[p] for name, p in network.named_parameters()}
        >>> parameters = dict(alone.named_parameters())
        >>> for name, own in carry_state(state, origins).items():
        ...     new.state[parameters[name]] = own
    """
    carried = {}
    for name, origin in origins.items():
        before = state.get(origin.name)
        if before:
            carried[name] = {key: _copy_state(value, origin) for key, value in before.items()}
    return carried


def _copy_state(value: Any, origin: Origin) -> Any:
    if not isinstance(value, Tensor):
        return value
    # Moments have the parameter's shape; the count of steps has none.
    return origin.take(value) if value.ndim else value.clone()
