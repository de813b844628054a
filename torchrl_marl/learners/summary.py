"""What a learner says of a batch: one number for each metric of each group.

Shapes: U updates, G groups that are trained as one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import torch
from tensordict import NestedKey, TensorDict
from torch import Tensor

from torchrl_marl.errors import NonFiniteError
from torchrl_marl.specs import GroupSpec

__all__ = ["must_be_finite", "refuse_non_finite", "summarize"]


def summarize(
    history: Mapping[NestedKey, Tensor],
    joined: Mapping[str, GroupSpec],
    groups: Mapping[str, GroupSpec],
    *,
    lr: float,
    epochs: int,
) -> TensorDict:
    """Metrics of a batch as tensors, ``(group, name)``.

    Args:
        history (mapping): (name of groups that are trained as one, metric) -> ``[U]``, or
            ``[U, G]`` where they are several.
        joined (mapping): those names -> the groups.
        groups (mapping): all groups by name.
        lr (float): the learning rate.
        epochs (int): passes over the batch.
    """
    device = next(iter(history.values())).device
    summary = TensorDict({name: {} for name in groups}, [], device=device)
    for (name, key), values in cast(Mapping[tuple[str, str], Tensor], history).items():
        value = values.amax(0) if key == "max_ratio" else values.mean(0)
        parts = joined[name].parts
        for part, own in zip(parts, value.reshape(len(parts))):
            summary[part.name, key] = own
    for name in groups:
        # Filled on the device: nothing is copied there.
        summary[name, "lr"] = torch.full((), lr, device=device)
        summary[name, "epochs"] = torch.full((), epochs, device=device)
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
