"""Metrics of a batch: one number for each metric of each group.

Shapes: U updates, G groups that are trained as one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import torch
from tensordict import NestedKey, TensorDict
from torch import Tensor

from torchrl_marl.errors import NonFiniteError
from torchrl_marl.functional import masked_mean
from torchrl_marl.specs import GroupSpec

__all__ = ["must_be_finite", "refuse_non_finite", "summarize"]


def summarize(
    history: Mapping[NestedKey, Tensor],
    joined: Mapping[str, GroupSpec],
    groups: Mapping[str, GroupSpec],
    *,
    lr: float,
    epochs: Mapping[str, Tensor],
) -> TensorDict:
    """Returns the metrics of a batch as tensors, ``(group, name)``; of a population ``[P]``.

    Args:
        history (mapping): (name of groups that are trained as one, metric) -> ``[U]``, or
            ``[U, G]`` where they are several.
        joined (mapping): those names -> the groups.
        groups (mapping): all groups by name.
        lr (float): the learning rate.
        epochs (mapping): name of groups that are trained as one -> how often each has passed
            over the batch, ``[G]``; updates behind that changed nothing, and do not count.
    """
    device = next(iter(history.values())).device
    summary = TensorDict({name: {} for name in groups}, [], device=device)
    longest = torch.cat(list(epochs.values())).amax()
    for (name, key), values in cast(Mapping[tuple[str, str], Tensor], history).items():
        values = values.reshape(len(values), -1)
        update = torch.arange(len(values), device=device).unsqueeze(1)
        counts = update * longest < epochs[name] * len(values)
        if key == "max_ratio":
            value = values.masked_fill(~counts, -torch.inf).amax(0)
        else:
            value = masked_mean(values, counts, 0)
        for group, own in joined[name].by_source(value):
            summary[group.name, key] = own
    for name, passes in epochs.items():
        for group, own in joined[name].by_source(passes):
            # Filled on the device: nothing is copied there.
            summary[group.name, "lr"] = torch.full(own.shape, lr, device=device)
            summary[group.name, "epochs"] = own.clone()
    return summary


def must_be_finite(metric: str) -> bool:
    """Whether learning has failed where this metric is NaN or infinite."""
    return metric.startswith("loss_") or metric == "grad_norm"


def refuse_non_finite(summary: TensorDict) -> None:
    """Waits for the device.

    Raises:
        NonFiniteError: a loss or gradient that is NaN or infinite.
    """
    keys = [key for key in summary.keys(True, True) if must_be_finite(key[1])]
    finite = torch.stack([torch.isfinite(summary[key]) for key in keys])
    if bool(finite.all()):
        return
    group, name = keys[int((~finite).nonzero()[0])]
    raise NonFiniteError(
        f"group {group!r}: {name} became NaN or infinite while learning; "
        "lower learner.lr or learner.max_grad_norm, or look at the rewards' scale."
    )
