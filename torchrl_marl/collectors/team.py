"""The policy of a team, and snapshots of its environment."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from tensordict import LazyStackedTensorDict, NestedKey, TensorDict, TensorDictBase, unravel_key
from tensordict.nn import TensorDictModuleBase, TensorDictSequential
from torchrl.envs import EnvBase, TransformedEnv

from torchrl_marl.errors import SpecError
from torchrl_marl.modules.joined_actor import merge_parts
from torchrl_marl.simulator.state import SimulatorStateError
from torchrl_marl.specs import TeamSpec
from torchrl_marl.specs.groups import is_lazy

__all__ = [
    "TeamPolicy",
    "carry_from_dict",
    "carry_to_dict",
    "check_carry",
    "restore_env",
    "snapshot_env",
]


class TeamPolicy(TensorDictSequential):
    """The actors of all groups of a team, called in order on one TensorDict.

    Args:
        actors (iterable of TensorDictModuleBase): one actor for each group, with different output
            keys. If several actors are parts of one joined actor, it is called once for all of
            them.
        team (TeamSpec, optional): team whose groups must all have an actor.

    Raises:
        ValueError: two actors write the same entry, there are no actors, or a group of the team has
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
                f"{'more than once' if twice else ''}; give each group its own actor."
            )
        if team is not None:
            check_actions(written, [group.action_key for group in team.groups.values()])
        super().__init__(*actors)


def check_actions(written: Sequence[NestedKey], needed: Sequence[NestedKey]) -> None:
    """Refuses a policy that does not act for every group.

    Args:
        written (sequence of NestedKey): keys that the policy writes.
        needed (sequence of NestedKey): the action keys of all groups.

    Raises:
        SpecError: a group has no action; the message names it and its action key.
    """
    known = [unravel_key(key) for key in written]
    missing = [key for key in map(unravel_key, needed) if key not in known]
    if not missing:
        return
    key = missing[0]
    subject = f"group {key[0]!r}" if isinstance(key, tuple) else "the environment"
    acts = [shown for shown in known if isinstance(shown, tuple) and shown[-1] == "action"]
    raise SpecError(
        f"{subject} has no action: the policy does not write {key!r}, it writes "
        f"{', '.join(map(repr, acts or known))}; give every group an actor, such as RandomActor."
    )


def snapshot_env(env: EnvBase) -> dict[str, Any] | None:
    """Returns a snapshot of an environment and its transforms; None if it supports no snapshots."""
    base = env.base_env if isinstance(env, TransformedEnv) else env
    if not hasattr(type(base), "snapshot"):
        return None
    try:
        state: dict[str, Any] = {"base": base.snapshot().to_dict()}
    except SimulatorStateError:
        return None
    if isinstance(env, TransformedEnv):
        state["transforms"] = env.transform.state_dict()
    return state


def restore_env(env: EnvBase, state: dict[str, Any]) -> None:
    """Restores a snapshot from :func:`snapshot_env`."""
    base = env.base_env if isinstance(env, TransformedEnv) else env
    base.restore(TensorDict(state["base"]))
    if isinstance(env, TransformedEnv):
        env.transform.load_state_dict(state["transforms"])


def carry_to_dict(carry: TensorDictBase) -> dict[str, Any]:
    """Returns a step as a dict, in which a lazily stacked group becomes a list of its agents."""
    state: dict[str, Any] = {}
    for key, value in carry.items():
        if is_lazy(value):
            state[key] = [member.to_dict() for member in value.unbind(value.ndim - 1)]
        else:
            state[key] = value.to_dict() if isinstance(value, TensorDictBase) else value
    return state


def carry_from_dict(
    state: dict[str, Any], batch_size: torch.Size, device: torch.device | None
) -> TensorDict:
    """Returns a step from a dict, the inverse of :func:`carry_to_dict`."""
    carry = TensorDict({}, batch_size, device=device)
    for key, value in state.items():
        if isinstance(value, list):
            members = [TensorDict(member, batch_size, device=device) for member in value]
            value = LazyStackedTensorDict(*members, stack_dim=len(batch_size))
        carry.set(key, value)
    return carry


def check_carry(carry: TensorDictBase, env: EnvBase) -> None:
    """Refuses a saved step that does not fit the environment, before a policy acts on it."""
    expected = [*env.full_observation_spec.items(True, True), *env.full_done_spec.items(True, True)]
    for key, spec in expected:
        group = carry.get(key[0]) if isinstance(key, tuple) else None
        if is_lazy(group):
            continue
        value = carry.get(key, None)
        if value is None or value.shape != spec.shape or value.dtype != spec.dtype:
            found = "nothing" if value is None else f"{list(value.shape)} of {value.dtype}"
            raise SpecError(
                f"the saved step has {found} as {key!r}, expected {list(spec.shape)} of "
                f"{spec.dtype}; resume with the environment that it was saved with."
            )
