"""Ratings of a population's members, who play each other.

Shapes: P members.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor
from torchrl.envs import EnvBase

from torchrl_marl.collectors.team import TeamPolicy
from torchrl_marl.errors import ConfigError
from torchrl_marl.games import bradley_terry
from torchrl_marl.learners.on_policy import OnPolicyLearner
from torchrl_marl.learners.rows import rows_of
from torchrl_marl.specs import TeamSpec
from torchrl_marl.training.crossplay import cross_play, seats_of

__all__ = ["MemberRating"]


class MemberRating:
    """Plays every member against every other, in one batch of envs, and rates them.

    Args:
        env (EnvBase): the world, with any number of envs.
        learners (sequence of OnPolicyLearner): of all groups.
        make (callable): returns an ordinary run's learners, into which a member is written.

    Raises:
        ConfigError: a world in which members never play against each other.
    """

    def __init__(
        self,
        env: EnvBase,
        learners: Sequence[OnPolicyLearner],
        make: Callable[[], list[OnPolicyLearner]],
    ) -> None:
        self.env = env
        team = TeamSpec.from_env(env)
        if len(team.groups) != 2 or not seats_of(team).apart:
            raise ConfigError(
                f"evolution.fitness is 'rating', but the world has {len(team.groups)} "
                f"{'group' if len(team.groups) == 1 else 'groups'} ({', '.join(team.groups)}), "
                "expected two that play against each other; use evolution.fitness=return."
            )
        self._pairs = []
        self._policies = []
        for _ in range(learners[0].n_members):
            alone = make()
            self._pairs.append([rows_of(many, one) for many, one in zip(learners, alone)])
            actors = (actor for learner in alone for actor in learner.actors.values())
            self._policies.append(TeamPolicy(actors))

    def rate(self, episodes: int, seed: int) -> Tensor:
        """Returns the Bradley-Terry rating of each member.

        Args:
            episodes (int): of each pair and order of members.
            seed (int): of the games.

        Shapes:
            - returns: ``[P]``, float64

        Raises:
            ConfigError: nobody has won a game.
        """
        for member, pairs in enumerate(self._pairs):
            for pair in pairs:
                pair.read(member)
        # Sampled actions: the likeliest of a mixed strategy are another strategy.
        table = cross_play(self._policies, self._policies, self.env, episodes, seed=seed)
        wins, draws, games = (table[key].double() for key in ("wins", "draws", "games"))
        if bool((draws == games).all()):
            raise ConfigError(
                "evolution.fitness is 'rating', but every game between members is a draw: both "
                "sides earn the same; use evolution.fitness=return."
            )
        return bradley_terry(wins + (games - wins - draws).mT, draws + draws.mT).rating
