"""Acting on arrays: what a server asks of a policy.

Shapes: n rows of a batch, N agents of a group.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from torchrl.envs.utils import ExplorationType, set_exploration_type

__all__ = ["Acting", "Leaves", "as_tensordict", "flat_leaves"]

Leaves = dict[tuple[str, ...], np.ndarray]
"""Key -> array whose first dim are the rows of a batch."""


class Acting:
    """A policy that takes and gives arrays, step by step.

    A subclass may do it quicker; this is its eager twin.

    Args:
        policy (callable): TensorDict in, TensorDict out, on the CPU.

    Shapes:
        - every array: ``[n, ...]``; of a group ``[n, N, ...]``

    Examples:
        >>> acting = Acting(lambda td: td.set(("car", "action"), 2 * td["car", "observation"]))
        >>> given = {("car", "observation"): np.ones((1, 2, 1), np.float32)}
        >>> acting.act(given, ExplorationType.RANDOM)["car", "action"].tolist()
        [[[2.0], [2.0]]]
    """

    def __init__(self, policy: Callable[[TensorDictBase], TensorDictBase]) -> None:
        self.policy = policy

    def act(self, leaves: Leaves, kind: ExplorationType) -> Leaves:
        """Returns what the policy writes beside what it reads.

        Args:
            leaves (dict): of all rows.
            kind (ExplorationType): how actions are chosen.
        """
        with torch.no_grad(), set_exploration_type(kind):
            acted = self.policy(as_tensordict(leaves))
        return {key: x.numpy() for key, x in flat_leaves(acted) if key not in leaves}


def as_tensordict(leaves: Mapping[tuple[str, ...], Any]) -> TensorDict:
    """Returns arrays or tensors of n rows as a TensorDict ``[n]``, groups ``[n, N]``."""
    nested: dict[str, Any] = {}
    size = torch.Size([len(next(iter(leaves.values())))])
    for key, value in leaves.items():
        tensor = torch.from_numpy(value) if isinstance(value, np.ndarray) else value
        if len(key) == 1:
            nested[key[0]] = tensor
        else:
            nested.setdefault(key[0], {})[key[1]] = tensor
    for name, own in nested.items():
        if isinstance(own, dict):
            of_agents = torch.Size([*size, next(iter(own.values())).shape[1]])
            nested[name] = TensorDict._new_unsafe(own, batch_size=of_agents)
    return TensorDict._new_unsafe(nested, batch_size=size)


def flat_leaves(td: TensorDictBase) -> list[tuple[tuple[str, ...], Tensor]]:
    """Returns the leaves of a TensorDict with their whole keys."""
    return [(key if isinstance(key, tuple) else (key,), x) for key, x in td.items(True, True)]
