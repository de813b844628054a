"""The joint policy: every group's actor in one call."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tensordict import NestedKey, TensorDictBase, unravel_key
from tensordict.nn import TensorDictModuleBase, TensorDictSequential

from torchrl_marl.errors import SpecError
from torchrl_marl.modules.joined_actor import merge_parts
from torchrl_marl.specs import TeamSpec

__all__ = ["TeamPolicy"]


class TeamPolicy(TensorDictSequential):
    """The actors of all groups of a team, one after the other on one TensorDict.

    Args:
        actors (iterable of TensorDictModuleBase): one for each group; their keys differ. The
            parts of a joined actor act together, in one call.
        team (TeamSpec, optional): whose groups all must act.

    Raises:
        ValueError: two actors that write the same entry, or none; a group of the team that has
            no actor.

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

    def __init__(
        self, actors: Iterable[TensorDictModuleBase], team: TeamSpec | None = None
    ) -> None:
        actors = merge_parts(actors)
        written = [key for actor in actors for key in actor.out_keys]
        twice = sorted({str(key) for key in written if written.count(key) > 1})
        if not actors or twice:
            raise ValueError(
                f"a team's actors write {', '.join(twice) or 'nothing'} "
                f"{'more than once' if twice else ''}; give each group one actor of its own."
            )
        if team is not None:
            check_actions(written, [group.action_key for group in team.groups.values()])
        super().__init__(*actors)


def without_next_states(step: TensorDictBase, keys: Sequence[NestedKey]) -> TensorDictBase:
    """Returns a step without what is remembered behind it: the next step has it.

    Args:
        step (TensorDictBase): with ``"next"``.
        keys (sequence of NestedKey): of what is remembered.
    """
    return step.exclude(*(("next", *key) for key in keys)) if keys else step


def check_actions(written: Sequence[NestedKey], needed: Sequence[NestedKey]) -> None:
    """Refuses a policy that leaves out a group.

    Args:
        written (sequence of NestedKey): what the policy writes.
        needed (sequence of NestedKey): the action keys of all groups.

    Raises:
        SpecError: naming the group and its action key.
    """
    known = [unravel_key(key) for key in written]
    missing = [key for key in map(unravel_key, needed) if key not in known]
    if not missing:
        return
    key = missing[0]
    who = f"group {key[0]!r}" if isinstance(key, tuple) else "the environment"
    acts = [shown for shown in known if isinstance(shown, tuple) and shown[-1] == "action"]
    raise SpecError(
        f"{who} has no action: the policy does not write {key!r}, it writes "
        f"{', '.join(map(repr, acts or known))}; give every group an actor, such as RandomActor."
    )
