"""The joint policy: every group's actor in one call."""

from __future__ import annotations

from collections.abc import Iterable

from tensordict.nn import TensorDictModuleBase, TensorDictSequential

__all__ = ["TeamPolicy"]


class TeamPolicy(TensorDictSequential):
    """The actors of all groups of a team, one after the other on one TensorDict.

    Args:
        actors (iterable of TensorDictModuleBase): one for each group; their keys differ.

    Raises:
        ValueError: two actors that write the same entry, or none.

    Examples:
        >>> from torchrl.data import Bounded, Unbounded
        >>> from torchrl_marl import AgentSpec, TeamSpec
        >>> from torchrl_marl.modules import make_actor
        >>> bounded = Bounded(-1, 1, (2,))
        >>> team = TeamSpec([AgentSpec("cat", 1, Unbounded((4,)), bounded),
        ...                  AgentSpec("mouse", 2, Unbounded((3,)), bounded)])
        >>> policy = TeamPolicy(make_actor(group) for group in team.groups.values())
        >>> [key for key in policy.out_keys if key[1] == "action"]
        [('cat', 'action'), ('mouse', 'action')]
    """

    def __init__(self, actors: Iterable[TensorDictModuleBase]) -> None:
        actors = list(actors)
        written = [key for actor in actors for key in actor.out_keys]
        twice = sorted({str(key) for key in written if written.count(key) > 1})
        if not actors or twice:
            raise ValueError(
                f"a team's actors write {', '.join(twice) or 'nothing'} "
                f"{'more than once' if twice else ''}; give each group one actor of its own."
            )
        super().__init__(*actors)
