"""Metrics of communication: the links in use, and how many numbers agents send.

Shapes: E envs, T steps, N agents of groups that are trained as one.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from tensordict import TensorDict, TensorDictBase
from torch import nn

from torchrl_marl.functional import masked_moments
from torchrl_marl.modules.communication.channel import channel_module, channel_of, used_links
from torchrl_marl.runtime.ranks import current
from torchrl_marl.specs import GroupSpec

__all__ = ["add_communication_metrics"]


@torch.no_grad()
def add_communication_metrics(
    metrics: TensorDict,
    actors: nn.Module,
    joined: Mapping[str, GroupSpec],
    data: TensorDictBase,
) -> None:
    """Adds ``links_used`` and ``numbers_sent`` of the groups with communication.

    ``links_used`` is the number of senders from which an agent receives messages. ``numbers_sent``
    is how many numbers the agent's own message contains. Both metrics are means over the steps in
    which agents act.

    Args:
        metrics (TensorDict): metrics by group; the new metrics are added to them.
        actors (nn.Module): actors by the name of a group, or of several groups that are trained as
            one.
        joined (mapping): the same names -> the groups.
        data (TensorDictBase): a batch ``[E, T]`` in the layout of the joined groups.
    """
    for name, group in joined.items():
        module = channel_module(actors.get_submodule(name))
        if module is None:
            continue
        channel = channel_of(module)
        links = used_links(module, data)
        used = links.sum(-1).float()
        sent = torch.full_like(used, channel.numbers)
        if channel.gate is not None:
            sent = torch.where(data.get(group.key("channel"))[..., 0] > 0.5, sent, 0.0)
        mask = None if group.mask_key is None else data.get(group.mask_key)
        mask = torch.ones_like(used, dtype=torch.bool) if mask is None else mask
        start = 0
        for own in group.groups:
            rows = slice(start, start + own.n_agents)
            start = rows.stop
            for key, value in (("links_used", used), ("numbers_sent", sent)):
                part = value[..., rows], mask[..., rows]
                metrics[own.name, key] = masked_moments(*part, ranks=current())[0]
