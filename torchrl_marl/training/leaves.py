"""Named tensors in the states of learners, and the parts of a run that they belong to."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from torchrl_marl.errors import ConfigError
from torchrl_marl.settings import flatten, shown
from torchrl_marl.training.checkpoint import leaves

__all__ = ["Leaves", "described", "init_part_of", "leaves_of", "live_leaves", "load_actors"]

Leaves = dict[str, Tensor]
_STATISTICS = ("running_mean", "running_mean_sq", "debiasing_term", "count", "mean", "variance")
_PART_BY_HEAD = {"actors": "actor", "optimizer": "optimizer", "targets": None, "_extra_state": None}
_POLICY_PREFIXES = ("actors.", "observation_norms.")  # what a policy needs
_MOMENT_KEYS = {"means", "squares", "steps"}


def init_part_of(name: str) -> str | None:
    """Returns the part of ``init`` to which a leaf belongs; None for state that a run makes itself.

    Args:
        name (str): dotted name in the state of a learner.

    Examples:
        >>> init_part_of("actors.car.module.0.weight")
        'actor'
        >>> init_part_of("mixers.car.module.bias.0.weight")
        'critic'
        >>> init_part_of("observation_norms.car.mean"), init_part_of("targets.car.0.weight")
        ('normalization', None)
    """
    head, last = name.partition(".")[0], name.rpartition(".")[2]
    if head not in ("optimizer", "targets") and last in _STATISTICS:
        return "normalization"
    if head == "actors" and last in ("epsilon", "sigma"):  # exploration follows the new schedule
        return None
    return _PART_BY_HEAD.get(head, "critic")


def leaves_of(states: Iterable[Mapping[str, Any]]) -> Leaves:
    """Returns the tensors and moments in the states of a run's learners, by dotted name."""
    found: Leaves = {}
    for i, state in enumerate(states):
        found |= {name: x for name, x in state.items() if isinstance(x, Tensor)}
        found |= _optimizer_moments(i, state)
    return {name: x for name, x in found.items() if init_part_of(name) is not None}


def _optimizer_moments(i: int, state: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Yields the moments of the optimizers in a learner's state, by name."""
    for name, own in state.get("_extra_state", {}).items():
        if name == "optimizer" or (isinstance(own, Mapping) and own.keys() == _MOMENT_KEYS):
            inner = own["state"] if name == "optimizer" else own
            yield from ((f"optimizer.{i}.{name}.{key}", x) for key, x in leaves(inner))


@torch.no_grad()
def load_actors(
    learners: Sequence[Any], states: Iterable[Mapping[str, Any]], settings: Mapping[str, Any]
) -> None:
    """Copies the actors and the statistics of observations of a run into learners, in place.

    Args:
        learners (sequence of Learner): ordinary learners, for another environment than the run's.
        states (iterable of mapping): states of the run's learners.
        settings (mapping): settings of that environment, for the message.

    Raises:
        ConfigError: a leaf does not fit; nothing is copied.
    """
    given, own = (
        {name: x for name, x in found.items() if name.startswith(_POLICY_PREFIXES)}
        for found in (leaves_of(states), live_leaves(learners))
    )
    given = {name: x for name, x in given.items() if init_part_of(name) is not None}
    faults = [
        f"{name} is {described(given.get(name))} in the run and {described(own.get(name))} here"
        for name in {**own, **given}
        if described(own.get(name)) != described(given.get(name))
    ]
    if faults:
        changed = ", ".join(f"{key}={shown(value)}" for key, value in flatten(settings).items())
        raise ConfigError(
            f"{changed} needs networks of other shapes than the run has: {', '.join(faults)}; keep "
            "the size of observations and actions, and train with networks that do not depend on "
            "the number of agents, such as learner.actor.sharing=group."
        )
    for name, x in own.items():
        x.copy_(given[name])


def live_leaves(learners: Iterable[Any]) -> Leaves:
    """Returns the tensors of learners that a checkpoint holds, not copied."""
    return leaves_of(_live_state(learner) for learner in learners)


def _live_state(learner: Any) -> Mapping[str, Any]:
    if isinstance(learner, torch.nn.Module):
        return learner.state_dict(keep_vars=True)
    found: Mapping[str, Any] = learner.state_dict()
    return found


def described(leaf: Tensor | None) -> str:
    """Returns the dtype and shape of a leaf, for messages."""
    if leaf is None:
        return "missing"
    kind = "" if leaf.dtype == torch.float32 else f"{str(leaf.dtype).removeprefix('torch.')} "
    return f"{kind}{list(leaf.shape)}"
