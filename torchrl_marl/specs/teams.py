"""Spec of a team, built from declared agents or read from an environment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from tensordict import NestedKey, unravel_key
from torch import nn
from torchrl.data import Categorical, Composite, OneHot, TensorSpec
from torchrl.data.tensor_specs import Stacked, StackedComposite
from torchrl.envs import Compose, EnvBase, TransformedEnv
from torchrl.envs.batched_envs import BatchedEnvBase

from torchrl_marl.errors import SpecError
from torchrl_marl.specs.agents import AgentSpec, check_names, is_discrete, n_options
from torchrl_marl.specs.groups import GroupSpec, own_keys
from torchrl_marl.specs.stacking import unpad_specs

__all__ = [
    "TeamSpec",
    "check_group",
    "group_from_agents",
    "group_from_env",
    "padded_members",
    "read_group_map",
]

RESERVED_NAMES = frozenset(
    {"state", "next", "action", "collector", "done", "terminated", "truncated", "reward", "_reset"}
)


def _check_group_name(name: str) -> None:
    if "." in name or hasattr(nn.ModuleDict, name):
        raise ValueError(
            f"a group is named {name!r}, which is not allowed as a module's name; "
            "choose a plain word such as 'rovers'."
        )
    if name in RESERVED_NAMES:
        raise ValueError(
            f"a group is named {name!r}, which is a reserved key; "
            f"choose a name other than {sorted(RESERVED_NAMES)}."
        )
    check_names("a group", [name])


def _observation_keys(name: str, observation_specs: Sequence[TensorSpec]) -> tuple[NestedKey, ...]:
    """Returns the keys of all observation leaves, even of leaves that only some agents have."""
    keys: dict[NestedKey, None] = {}
    for spec in observation_specs:
        if not isinstance(spec, Composite):
            return ((name, "observation"),)
        keys |= dict.fromkeys(spec.keys(True, True))
    return tuple(unravel_key((name, "observation", key)) for key in keys)


def group_from_agents(
    name: str, specs: Sequence[AgentSpec], state_spec: TensorSpec | None, in_turns: bool
) -> GroupSpec:
    """Builds the spec of a group from the declared kinds of its agents."""
    _check_group_name(name)
    if not specs:
        raise ValueError(f"group {name!r} has no agents; register at least one kind in it.")
    if len({spec.action_mask for spec in specs}) > 1:
        raise ValueError(
            f"group {name!r}: all kinds of a group have an action_mask, or none; set it in all."
        )
    if len({spec.state_spec is None for spec in specs}) > 1:
        raise ValueError(
            f"group {name!r}: all kinds of a group have a state_spec, or none; set it in all."
        )
    members = [_specs_of_agent(spec) for spec in specs for _ in range(spec.n_agents)]
    return GroupSpec(
        name=name,
        agent_names=tuple(agent for spec in specs for agent in spec.agent_names),
        observation_spec=torch.stack([member["observation"] for member in members], 0),
        action_spec=torch.stack([member["action"] for member in members], 0),
        **own_keys(name),
        observation_keys=_observation_keys(name, [member["observation"] for member in members]),
        mask_key=(name, "mask"),
        action_mask_key=(name, "action_mask") if specs[0].action_mask else None,
        state_key=None if state_spec is None else "state",
        state_spec=state_spec,
        **_agent_state_fields(name, [member.get("state", None) for member in members]),
        agent_done=True,
        members=tuple(members) if any(own != members[0] for own in members[1:]) else None,
        kinds=tuple(k for k, spec in enumerate(specs) for _ in range(spec.n_agents)),
        in_turns=in_turns,
    )


def _specs_of_agent(spec: AgentSpec) -> Composite:
    """Returns the specs of one agent of a kind."""
    member = Composite(observation=spec.observation_spec, action=spec.action_spec)
    if spec.action_mask:
        n = n_options(spec.action_spec)
        member["action_mask"] = Categorical(2, shape=(n,), dtype=torch.bool)
    if spec.state_spec is not None:
        member["state"] = spec.state_spec
    return member


def _agent_state_fields(name: str, specs: Sequence[TensorSpec | None]) -> dict[str, Any]:
    """Returns the key and the spec of the agents' own states, if all agents have one."""
    state_specs: list[Any] = [spec for spec in specs if spec is not None and spec.ndim]
    if len(state_specs) < len(specs) or any(isinstance(spec, Composite) for spec in state_specs):
        return {}
    return {"agent_state_key": (name, "state"), "agent_state_spec": torch.stack(state_specs, 0)}


def read_group_map(env: EnvBase) -> dict[str, list[str]]:
    """Returns a dict, group -> names of agents, from ``env.group_map`` or the action keys."""
    base = env.base_env if isinstance(env, TransformedEnv) else env
    # Reading a batched env's group_map would start its workers; its action keys give the groups.
    group_map = None if isinstance(base, BatchedEnvBase) else getattr(env, "group_map", None)
    if group_map:
        return dict(group_map)
    action_spec = env.full_action_spec_unbatched
    groups = {
        key[0]: action_spec[key].shape[0]
        for key in action_spec.keys(True, True)
        if isinstance(key, tuple) and len(key) == 2 and action_spec[key].ndim
    }
    if not groups:
        keys = list(action_spec.keys(True, True))
        expected = "expected (group, 'action') with one row per agent"
        fix = f"{expected}. Give the environment a group_map."
        if keys == ["action"]:
            fix = (
                f"as in an environment of one agent, {expected}; write a team of one as a MarlEnv "
                "(docs/environments/own.md), or train one agent by TorchRL's own losses."
            )
        raise SpecError(f"{type(env).__name__} has no groups: its action keys are {keys}, {fix}")
    return {name: [f"{name}_{i}" for i in range(n)] for name, n in groups.items()}


def padded_members(env: EnvBase) -> dict[str, tuple[Composite, ...]]:
    """Returns a dict: each group that a transform pads -> the specs of each of its agents."""
    known: dict[str, tuple[Composite, ...]] = {}
    while isinstance(env, TransformedEnv):
        for transform in env.transform if isinstance(env.transform, Compose) else [env.transform]:
            known |= getattr(transform, "members", None) or {}
        env = env.base_env
    return known


def _members_of_lazy_specs(env: EnvBase, name: str) -> tuple[Composite, ...] | None:
    """Returns each agent's specs if any spec is lazily stacked or has an action mask, or None."""
    observation_spec, action = env.full_observation_spec[name], env.full_action_spec[name, "action"]
    stacked = [
        observation_spec,
        action,
        *(observation_spec.values(True, False) if isinstance(observation_spec, Composite) else ()),
    ]
    if not any(isinstance(spec, (Stacked, StackedComposite)) for spec in stacked):
        return _members_of_masked_spec(env, name, action)
    ndim = len(env.batch_size)
    first = (0,) * ndim
    members = []
    for agent_spec, action_spec in zip(observation_spec.unbind(ndim), action.unbind(ndim)):
        if ndim:
            agent_spec, action_spec = agent_spec[first], action_spec[first]
        member = agent_spec.clone()
        member["action"] = action_spec
        members.append(member)
    return tuple(members)


def _members_of_masked_spec(
    env: EnvBase, name: str, action: TensorSpec
) -> tuple[Composite, ...] | None:
    """Returns each agent's specs if the dense action spec has a mask; otherwise None."""
    mask = getattr(action, "mask", None)
    if mask is None or not is_discrete(action) or bool(mask.all()):
        return None
    mask = mask[(0,) * len(env.batch_size)]
    shape = mask.shape if isinstance(action, OneHot) else mask.shape[:-1]
    agent_actions = type(action)(action.space.n, shape=shape, dtype=action.dtype, mask=mask)
    observation_spec = env.full_observation_spec_unbatched[name]
    members = unpad_specs(Composite(action=agent_actions, shape=shape[:1]), {})
    for i, member in enumerate(members):
        for key in observation_spec.keys():
            member[key] = observation_spec[key][i]
    return tuple(members)


def _declared_kinds(env: EnvBase, name: str, n_agents: int) -> tuple[int, ...] | None:
    """Returns the index of each agent's kind; None if the environment does not declare kinds."""
    kinds = (_base_env_attribute(env, "group_kinds") or {}).get(name)
    sizes = () if kinds is None else kinds.sizes
    index = tuple(k for k, size in enumerate(sizes) for _ in range(size))
    return index if len(index) == n_agents else None


def _base_env_attribute(env: EnvBase, attribute: str) -> Any:
    """Returns an attribute of the innermost environment; None if it runs in other processes."""
    while isinstance(env, TransformedEnv):
        env = env.base_env
    return None if isinstance(env, BatchedEnvBase) else getattr(env, attribute, None)


def group_from_env(
    env: EnvBase,
    name: str,
    agent_names: Sequence[str],
    state_spec: TensorSpec | None,
    members: tuple[Composite, ...] | None,
) -> GroupSpec:
    """Reads the spec of a group from an environment's specs.

    Args:
        env (EnvBase): environment whose keys follow the group convention.
        name (str): key of the group.
        agent_names (sequence of str): names of the agents, in the order of the data.
        state_spec (TensorSpec, optional): spec of the environment's state.
        members (tuple of Composite, optional): specs of each agent, if they are already known.
    """
    _check_group_name(name)
    if not agent_names:
        raise ValueError(
            f"group {name!r} of {type(env).__name__} has no agents; leave it out of the group_map."
        )
    check_names(f"an agent of group {name!r}", agent_names)
    _check_action_key(env, name)
    members = _members_of_lazy_specs(env, name) if members is None else members
    observation_group_spec = (
        env.full_observation_spec_unbatched[name] if members is None else members[0]
    )
    if "observation" not in observation_group_spec.keys():
        raise SpecError(
            f"group {name!r} of {type(env).__name__} has no 'observation', found "
            f"{list(observation_group_spec.keys())}; rename it with torchrl.envs.RenameTransform."
        )
    if members is None:
        action_spec = env.full_action_spec_unbatched[name, "action"]
        specs = _specs_of_equal_agents(name, observation_group_spec, action_spec, len(agent_names))
    else:
        specs = _specs_of_members(name, members)
    if kinds := _declared_kinds(env, name, len(agent_names)):
        specs["kinds"] = kinds
    return GroupSpec(
        name=name,
        agent_names=tuple(agent_names),
        **specs,
        **_keys_in_env(env, name, observation_group_spec),
        state_key=None if state_spec is None else "state",
        state_spec=state_spec,
        members=members,
        in_turns=_base_env_attribute(env, "in_turns") is True,
        respawns=_base_env_attribute(env, "respawns") is True,
    )


def _check_action_key(env: EnvBase, name: str) -> None:
    own = env.full_action_spec.get(name, None)
    found = sorted(own.keys()) if isinstance(own, Composite) else []
    if "action" not in found:
        raise SpecError(
            f"group {name!r} of {type(env).__name__} has no 'action', found {found}, expected one "
            "with a row for each agent; rename it with torchrl.envs.RenameTransform."
        )


def _specs_of_equal_agents(
    name: str, observation_group_spec: Composite, action_spec: TensorSpec, n_agents: int
) -> dict[str, Any]:
    """Returns the fields of a group whose agents have equal specs."""
    _check_masks(name, observation_group_spec, action_spec, (n_agents,))
    observation_spec = observation_group_spec["observation"]
    states = _spec_of_each_agent(observation_group_spec.get("state", None), n_agents)
    return {
        "observation_spec": observation_spec,
        "action_spec": action_spec,
        "observation_keys": _observation_keys(name, [observation_spec]),
        "kinds": (0,) * n_agents,
        **_agent_state_fields(name, states),
    }


def _specs_of_members(name: str, members: Sequence[Composite]) -> dict[str, Any]:
    """Returns the fields of a group with one spec for each agent."""
    for member in members:
        _check_masks(name, member, member["action"], ())
    leaves = [member["observation"] for member in members]
    return {
        "observation_spec": torch.stack(leaves, 0),
        "action_spec": torch.stack([member["action"] for member in members], 0),
        "observation_keys": _observation_keys(name, leaves),
        "kinds": _kinds_by_equal_specs(members),
        **_agent_state_fields(name, [member.get("state", None) for member in members]),
    }


def _keys_in_env(env: EnvBase, name: str, observation_group_spec: Composite) -> dict[str, Any]:
    """Returns the keys under which an environment has a group's entries."""
    rewards = set(env.full_reward_spec_unbatched.keys(True, True))
    dones = set(env.full_done_spec_unbatched.keys(True, True))
    agent_done = (name, "done") in dones
    done, terminated, truncated = (
        (name, flag) if agent_done else flag for flag in ("done", "terminated", "truncated")
    )
    return {
        "action_key": (name, "action"),
        "reward_key": (name, "reward") if (name, "reward") in rewards else "reward",
        "done_key": done,
        "terminated_key": terminated,
        "truncated_key": truncated if truncated in dones else None,
        "agent_done": agent_done,
        **{
            f"{leaf}_key": (name, leaf) if leaf in observation_group_spec.keys() else None
            for leaf in ("mask", "action_mask")
        },
    }


def _spec_of_each_agent(spec: TensorSpec | None, n_agents: int) -> Sequence[TensorSpec | None]:
    """Returns the spec of each agent's row of a leaf; None for agents without one."""
    rows = spec is not None and spec.shape[:1] == (n_agents,)
    return spec.unbind(0) if spec is not None and rows else [None] * n_agents


def _check_masks(
    name: str, observation_spec: Composite, action: TensorSpec, agents: tuple[int, ...]
) -> None:
    """Raises an error if the spec of a mask or action mask has a wrong shape or is not bool."""
    expected_shapes = {"mask": agents}
    if n := n_options(action):
        expected_shapes["action_mask"] = (*agents, n)
    for leaf, shape in expected_shapes.items():
        spec = observation_spec.get(leaf, None)
        if spec is not None and (spec.dtype is not torch.bool or tuple(spec.shape) != shape):
            raise SpecError(
                f"group {name!r}: the spec of {(name, leaf)!r} is {spec.dtype} "
                f"{tuple(spec.shape)}, expected torch.bool {shape}; fix the environment."
            )


def _kinds_by_equal_specs(members: Sequence[Composite]) -> tuple[int, ...]:
    """Returns the index of each agent's kind; agents with equal specs have the same kind."""
    known: list[Composite] = []
    for member in members:
        if member not in known:
            known.append(member)
    return tuple(known.index(member) for member in members)


def _unbatched_observations(env: EnvBase) -> Composite:
    try:
        return env.full_observation_spec_unbatched
    except IndexError as error:  # the last dim of Binary is no batch dim, whatever its shape
        raise SpecError(
            f"{type(env).__name__}: TorchRL cannot index the observation specs ({error}); declare "
            "masks [*B, N] as Categorical(2, shape=(*B, N), dtype=torch.bool), not as Binary."
        ) from None


def check_group(group: Any, taker: str) -> None:
    """Raises an error unless a group's spec is given.

    Args:
        group (GroupSpec): the value to check.
        taker (str): what takes it, for the message.

    Raises:
        TypeError: anything else, such as a group's name or a team.
    """
    if isinstance(group, GroupSpec):
        return
    if isinstance(group, TeamSpec):
        first = next(iter(group.groups), "agents")
        found = f"a TeamSpec; give it one of its groups, such as team.groups[{first!r}]."
    elif isinstance(group, str):
        found = f"{group!r}; use TeamSpec.from_env(env).groups[{group!r}]."
    else:
        found = f"a {type(group).__name__}; use TeamSpec.from_env(env).groups['agents']."
    raise TypeError(f"{taker} takes the GroupSpec of a group, found {found}")


class TeamSpec:
    """All groups of one environment, with their keys, sizes and masks.

    Args:
        agents (sequence of AgentSpec, or mapping of group name to a sequence of AgentSpec):
            kinds of agents, by group. In a sequence, each kind is a group.
        state_spec (TensorSpec, optional): spec of the critic's state, ``[S]``.
        in_turns (bool): True for a turn-based team, in which all agents are born at the reset.

    Raises:
        ValueError: a group name is reserved or repeated, or a group has no agents.

    Examples:
        >>> from torchrl.data import Bounded, Unbounded
        >>> team = TeamSpec([AgentSpec("rover", 3, Unbounded((9,)), Bounded(-1, 1, (2,)))])
        >>> team.groups["rover"].observation_key, team.groups["rover"].action_dim
        (('rover', 'observation'), 2)
    """

    def __init__(
        self,
        agents: Sequence[AgentSpec] | Mapping[str, Sequence[AgentSpec]],
        state_spec: TensorSpec | None = None,
        in_turns: bool = False,
    ) -> None:
        grouped = agents if isinstance(agents, Mapping) else {spec.name: [spec] for spec in agents}
        if not isinstance(agents, Mapping) and len(grouped) < len(agents):
            names = [spec.name for spec in agents]
            raise ValueError(
                f"two kinds of agents have the same name in {names}; use different names."
            )
        self.agents = {name: tuple(specs) for name, specs in grouped.items()}
        self.state_spec = state_spec
        self.groups = {
            name: group_from_agents(name, specs, state_spec, in_turns)
            for name, specs in self.agents.items()
        }

    @classmethod
    def from_env(cls, env: EnvBase) -> TeamSpec:
        """Reads the spec of a team from a TorchRL environment that follows the group convention.

        Args:
            env (EnvBase): environment whose groups are those of ``env.group_map``, or of its action
                keys ``(group, "action")``.

        Returns:
            TeamSpec: spec with one :class:`GroupSpec` per group. Its ``agents`` is empty.

        Raises:
            ValueError: the environment does not follow the group convention, or a group name is
                reserved.
            SpecError: TorchRL cannot read its specs without batch dims.
            TypeError: not an environment of TorchRL.
        """
        if not isinstance(env, EnvBase):
            kind = repr(env) if isinstance(env, str) else f"a {type(env).__name__}"
            raise TypeError(
                f"TeamSpec.from_env takes an environment of TorchRL, found {kind}; "
                "torchrl_marl.envs.make_env builds one from a name or another library's object."
            )
        team = cls.__new__(cls)
        team.agents = {}
        team.state_spec = _unbatched_observations(env).get("state", None)
        group_map = read_group_map(env)
        known = padded_members(env)
        team.groups = {
            n: group_from_env(env, n, names, team.state_spec, known.get(n))
            for n, names in group_map.items()
        }
        return team

    @cached_property
    def n_agents(self) -> int:
        """Number of agents in all groups."""
        return sum(group.n_agents for group in self.groups.values())

    def stacked_spec(self) -> Composite:
        """Returns the stacked specs ``[n_agents]`` of the agents of all groups."""
        members = [
            Composite(observation=own["observation"], action=own["action"])
            for group in self.groups.values()
            for own in group.own_specs
        ]
        return torch.stack(members, 0)

    def __repr__(self) -> str:
        groups = ", ".join(f"{name}: {group.n_agents}" for name, group in self.groups.items())
        return f"TeamSpec({groups}{'' if self.state_spec is None else ', state'})"
