"""What of a batch is stored: masks settled, masked slots blanked, ends of look-aheads.

Shapes: E envs, T steps, N agents of a group.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tensordict import TensorDictBase
from torch import Tensor

from torchrl_marl.errors import SpecError
from torchrl_marl.functional import expand_mask
from torchrl_marl.learners.replay.ring import Key
from torchrl_marl.modules.memory.network import STATES
from torchrl_marl.objectives.flags import ALIVE, BOOTSTRAPS
from torchrl_marl.objectives.masking import bootstrap_mask

__all__ = ["settle"]

_FLAGS = ("done", "terminated", "truncated", "team_terminated", "mask")
_CARRIED = ("is_init", *STATES)  # of who waits, too
_KEPT = [(leaf,) for leaf in (*_FLAGS, *_CARRIED)]


def settle(
    batch: TensorDictBase, keys: Sequence[Key], dead_earn: bool = False
) -> tuple[dict[Key, Tensor], Tensor]:
    """Returns a batch's leaves as they are stored, and where no look-ahead goes on.

    What stands beside a stored ``mask`` is its group's. The mask of the next step is settled: who
    was cut off by a time limit is seen once more, as the flags of a gathered batch say, or else
    :func:`~torchrl_marl.objectives.masking.bootstrap_mask`. Observations, actions and action masks
    of slots that are masked then, and rewards of agents that were not alive, are 0.

    Args:
        batch (TensorDictBase): ``[E, T]``, with the keys, the root's ``done`` and, where the
            agents have such, flags of their own.
        keys (sequence of tuple): what is stored.
        dead_earn (bool): rewards of agents that were not alive stay as they are.

    Shapes:
        - returns: leaves ``[E, T, ...]`` by key, and ``[E, T]``, bool: an episode's end, or a
          step in which an agent is cut off

    Raises:
        SpecError: a key that the batch has not.
    """
    leaves = {key: _get(batch, key) for key in keys}
    ends = _get(batch, ("next", "done")).squeeze(-1)
    for group in (key[:-1] for key in keys if key[-1] == "mask" and key[0] != "next" and key[1:]):
        mask, then = _get(batch, (*group, "mask")), ("next", *group, "mask")
        alive = _alive(batch, group, mask)
        truncated, terminated = _flags_of(batch, group)
        next_mask = batch.get(("next", *group, *BOOTSTRAPS), None)
        if next_mask is None:
            next_mask = bootstrap_mask(alive, _get(batch, then), truncated, terminated)
        _blank(leaves, group, mask, mask)
        earning = None if dead_earn else alive
        _blank(leaves, ("next", *group), next_mask, earning)
        if then in leaves:
            leaves[then] = next_mask
        # An agent that is cut off alone has its last observation in this step, and none later.
        ends = ends | (alive & (truncated & ~terminated).squeeze(-1)).any(-1)
    return leaves, ends


def _get(batch: TensorDictBase, key: Key) -> Tensor:
    found = batch.get(key, None)
    if found is None:
        known = ", ".join(sorted(map(str, batch.keys(True, True))))
        raise SpecError(f"the batch has no {key}, which is to be stored or needed; it has {known}.")
    return found


def _alive(batch: TensorDictBase, group: Key, mask: Tensor) -> Tensor:
    """Returns who is alive: by the flags that a learner gathered, or by the agents' ends."""
    flagged = batch.get((*group, *ALIVE), None)
    if flagged is not None:
        return flagged
    done = batch.get((*group, "done"), None)
    return mask if done is None else ~done.squeeze(-1)


def _flags_of(batch: TensorDictBase, group: Key) -> tuple[Tensor, Tensor]:
    """Returns who was cut off and for whom all is over, ``[E, T, N, 1]``, N = 1 for a team's."""
    own = batch.get(("next", *group, "terminated"), None) is not None
    own = own and batch.get(("next", *group, "done"), None) is not None
    source = batch.get(("next", *group) if own else "next")
    done, terminated = source.get("done"), source.get("terminated")
    truncated = source.get("truncated", None)
    truncated = done & ~terminated if truncated is None else truncated
    return (truncated, terminated) if own else (truncated.unsqueeze(-2), terminated.unsqueeze(-2))


def _blank(leaves: dict[Key, Tensor], group: Key, mask: Tensor, rewarded: Tensor | None) -> None:
    for key in _keys_of(leaves, group):
        kept = rewarded if key[-1] == "reward" else mask
        value = leaves[key]
        if kept is not None and value.shape[: kept.ndim] == kept.shape:
            leaves[key] = value.masked_fill(~expand_mask(kept, value), 0)


def _keys_of(leaves: dict[Key, Tensor], group: Key) -> Iterator[Key]:
    for key in list(leaves):
        if key[: len(group)] == group and key[len(group) :] not in _KEPT:
            yield key
