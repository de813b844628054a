"""A warning where agents act in turns, but are credited by ``bootstrap="team"``.

Shapes: E envs, T steps, N agents of a group.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor

from torchrl_marl.errors import ConfigError
from torchrl_marl.specs import GroupSpec

__all__ = ["acts_in_turns", "refuse_turns", "warn_of_turns"]


def acts_in_turns(group: GroupSpec, batch: TensorDictBase) -> Tensor:
    """Returns whether an agent waits after it has acted, in one episode; waits for no device.

    Who is not born yet waits, too, but has not acted; who is dead does not wait.

    Args:
        group (GroupSpec): whose agents.
        batch (TensorDictBase): ``[E, T]``, with masks and done flags.

    Returns:
        Tensor: bool, a scalar.
    """
    mask = None if group.mask_key is None else batch.get(group.mask_key, None)
    living = group.living(batch)
    if mask is None or living is None:
        return torch.zeros((), dtype=torch.bool, device=batch.device)
    goes_on = ~batch.get(("next", "done"))[..., :-1, :]
    waits = living[..., 1:, :] & ~mask[..., 1:, :]
    return (mask[..., :-1, :] & waits & goes_on).any()


def refuse_turns(groups: Iterable[GroupSpec], batch: TensorDictBase, config: Any) -> None:
    """Refuses turns with ``bootstrap="agent"``, for what does not credit them; else warns of them.

    Args:
        groups (iterable of GroupSpec): that are trained.
        batch (TensorDictBase): ``[E, T]``.
        config (TrainedConfig): the algorithm, and how agents are credited.

    Raises:
        ConfigError: agents act in turns or at their own pace.
    """
    groups = list(groups)
    warn_of_turns(groups, batch, config.bootstrap)
    for group in groups if config.bootstrap == "agent" else ():
        if bool(acts_in_turns(group, batch)):
            raise ConfigError(
                f"group {group.name!r}: agents act in turns or at their own pace, which "
                f"{config.algorithm} does not yet credit with bootstrap=agent; use "
                "algorithm=mappo, or bootstrap=team."
            )


def warn_of_turns(groups: Iterable[GroupSpec], batch: TensorDictBase, bootstrap: str) -> None:
    """Warns of ``bootstrap="team"`` where agents act in turns or at their own pace.

    Args:
        groups (iterable of GroupSpec): that are trained.
        batch (TensorDictBase): ``[E, T]``.
        bootstrap (str): how they are credited.
    """
    if bootstrap != "team":
        return
    for group in groups:
        if bool(acts_in_turns(group, batch)):
            warnings.warn(
                f"group {group.name!r}: agents act in turns or at their own pace, but "
                "learner.bootstrap is 'team', which knows no turns: what an agent earns while it "
                "waits is not credited to its last move; use learner.bootstrap=agent.",
                stacklevel=2,
            )
            return
