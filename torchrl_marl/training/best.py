"""The parameters of a run's best evaluation, and their return over more episodes."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from torchrl_marl.training.part import Part

if TYPE_CHECKING:
    from torchrl_marl.training.training import Training

__all__ = ["BestParameters"]


class BestParameters(Part):
    """Part that keeps the policy of the best evaluation, and evaluates it longer at the end.

    Its return is the *absolute metric*. The episodes have other initial states than those by which
    the policy was selected. The summary gets ``return_absolute``, and the figures as ``absolute``.

    Attributes:
        best (float): mean return of the best evaluation.
        frames (int): frames at that evaluation.

    Reference: Colas et al., 2018, GEP-PG; Gorsane et al., 2022, Towards a Standardised Performance
    Evaluation Protocol for Cooperative MARL.
    """

    def __init__(self) -> None:
        self.best, self.frames = -math.inf, 0
        self._parameters: dict[str, Tensor] = {}

    def evaluated(self, training: Training, results: Sequence[dict[str, Any]]) -> None:
        """Keeps the parameters if the evaluation is the best one so far."""
        reached = float(results[0]["return_mean"])
        if reached > self.best:
            self.best, self.frames = reached, training.frames
            self._parameters = _copy(training.policy)

    def end(self, training: Training) -> None:
        """Plays ``evaluation.absolute_episodes`` with the best parameters."""
        if not self._parameters:  # no evaluation had a finite return
            return
        team, environments = training.team, training.environments
        with _loaded(training.policy, self._parameters):
            [played] = training.play(
                lambda: [environments.play(training.policy, team, absolute=True)]
            )
        figures = played.figures()
        training.run.summary["return_absolute"] = figures["return_mean"]
        training.run.summary["absolute"] = {**figures, "frames": self.frames}

    def state_dict(self) -> dict[str, Any]:
        """Returns the state for a checkpoint."""
        return {"best": self.best, "frames": self.frames, "parameters": self._parameters}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores a saved state; an empty one is of a run without this part."""
        if state:
            self.best, self.frames = state["best"], state["frames"]
            self._parameters = dict(state["parameters"])


def _copy(policy: nn.Module) -> dict[str, Tensor]:
    """Returns copies of a module's parameters and buffers."""
    return {name: x.detach().clone() for name, x in policy.state_dict().items()}


@contextlib.contextmanager
def _loaded(policy: nn.Module, parameters: Mapping[str, Tensor]) -> Iterator[None]:
    """Context in which a module has other parameters."""
    own = _copy(policy)
    policy.load_state_dict(parameters)
    try:
        yield
    finally:
        policy.load_state_dict(own)
