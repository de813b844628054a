"""Memory check of networks, before they are built."""

from __future__ import annotations

from itertools import pairwise

from torch.types import Device

from torchrl_marl.errors import quoted
from torchrl_marl.modules.config import NetworkConfig, sharing_of
from torchrl_marl.runtime.memory import refuse_too_large
from torchrl_marl.specs import GroupSpec

__all__ = ["check_size"]

_NUMBERS_PER_WEIGHT = 4  # float32 numbers per weight: the weight, its gradient, two moments of Adam


def check_size(what: str, group: GroupSpec, config: NetworkConfig, device: Device) -> None:
    """Refuses networks of a group that do not fit into memory.

    Args:
        what (str): ``"actor"`` or ``"critic"``.
        group (GroupSpec): group of the networks.
        config (NetworkConfig): widths and sharing.
        device (torch.device, optional): device of the parameters.

    Raises:
        ConfigError: too little memory; the message names the bytes needed and those available.
    """
    networks = {"none": group.n_agents, "index": len(set(config.sharing_index or [0]))}
    widths = [group.observation_dim, *config.num_cells, 1]
    weights = sum(one * (before + 1) for before, one in pairwise(widths))
    if config.body == "simba":
        weights += sum(8 * width**2 for width in config.num_cells)
    refuse_too_large(
        weights * networks.get(sharing_of(config), 1) * _NUMBERS_PER_WEIGHT * 4,
        device or "cpu",
        f"group {group.name!r}: {what}.num_cells is {quoted(list(config.num_cells))}, of which "
        "training",
        "use smaller widths",
    )
