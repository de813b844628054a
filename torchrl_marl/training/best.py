"""The parameters of a run's best evaluation, and their return over more episodes.

Shapes: P members of a population; 1 without a population.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from torchrl_marl.collectors import TeamPolicy
from torchrl_marl.learners import build_learners
from torchrl_marl.runtime.random_state import RandomState
from torchrl_marl.training.part import Part

if TYPE_CHECKING:
    from torchrl_marl.training.training import Training

__all__ = ["BestParameters"]


class BestParameters(Part):
    """Part that keeps the policy of the best evaluation, and evaluates it longer at the end.

    Its return is the *absolute metric*. The episodes have other initial states than those by which
    the policy was selected. The summary gets ``return_absolute``, and the figures as ``absolute``.
    Each member of a population has its own best evaluation.

    Args:
        n_members (int): number P of members.

    Attributes:
        best (list of float): mean return of each member's best evaluation.
        frames (list of int): frames at that evaluation.

    Reference: Colas et al., 2018, GEP-PG; Gorsane et al., 2022, Towards a Standardised Performance
    Evaluation Protocol for Cooperative MARL.
    """

    def __init__(self, n_members: int = 1) -> None:
        self.best, self.frames = [-math.inf] * n_members, [0] * n_members
        self._parameters: list[dict[str, Tensor]] = [{} for _ in range(n_members)]

    def evaluated(self, training: Training, results: Sequence[dict[str, Any]]) -> None:
        """Keeps the parameters if the evaluation is the best one so far."""
        for i, result in enumerate(results):
            reached = float(result["return_mean"])
            if reached > self.best[i]:
                self.best[i], self.frames[i] = reached, training.frames
                self._parameters[i] = _copy_parameters(training.results.policy_of(i))

    def end(self, training: Training) -> None:
        """Plays ``evaluation.absolute_episodes`` with the best parameters."""
        found = [self._evaluate_best(training, i) for i in range(len(self._parameters))]
        training.results.record_best_parameters(found)

    def _evaluate_best(self, training: Training, i: int) -> dict[str, Any]:
        """Plays with the best parameters of a member; returns entries of its summary."""
        if not self._parameters[i]:  # no evaluation had a finite return
            return {}
        policy, environments = training.results.policy_of(i), training.environments
        if policy.state_dict().keys() != self._parameters[i].keys():
            policy = _make_shared_policy(training)
        with _temporary_parameters(policy, self._parameters[i]):
            [played] = training.play(
                lambda: [environments.play(policy, training.team, absolute=True)]
            )
        figures = played.figures()
        absolute = {**figures, "frames": self.frames[i]}
        return {"return_absolute": figures["return_mean"], "absolute": absolute}

    def state_dict(self) -> dict[str, Any]:
        """Returns the state for a checkpoint; each entry is a list over the members."""
        return {
            "best": [*self.best],
            "frames": [*self.frames],
            "parameters": [*self._parameters],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores a saved state; that of a run without this part is empty."""
        if state:
            entries = (state[name] for name in ("best", "frames", "parameters"))
            # In older checkpoints the entries are those of one run.
            self.best, self.frames, self._parameters = (
                [*own] if isinstance(own, list) else [own] for own in entries
            )


def _make_shared_policy(training: Training) -> nn.Module:
    """Returns a policy with the networks that the run had before it un-shared them."""
    config, device = training.config, training.device
    with RandomState(0, device).active():
        learners = build_learners(training.team, config.learner, config.groups, device=device)
    return TeamPolicy(actor for learner in learners for actor in learner.actors.values())


def _copy_parameters(policy: nn.Module) -> dict[str, Tensor]:
    """Returns copies of a module's parameters and buffers."""
    return {name: x.detach().clone() for name, x in policy.state_dict().items()}


@contextlib.contextmanager
def _temporary_parameters(policy: nn.Module, parameters: Mapping[str, Tensor]) -> Iterator[None]:
    """Context in which a module has other parameters."""
    own = _copy_parameters(policy)
    policy.load_state_dict(parameters)
    try:
        yield
    finally:
        policy.load_state_dict(own)
