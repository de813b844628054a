"""What an agent, a group and a team are: the only reader of environment specs.

Shapes: E envs, N agents of a group, O observation features, A action features, S state features.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from tensordict import NestedKey, unravel_key
from torch import Tensor, nn
from torchrl.data import (
    Bounded,
    Categorical,
    Composite,
    MultiCategorical,
    MultiOneHot,
    OneHot,
    TensorSpec,
    Unbounded,
)
from torchrl.data.tensor_specs import Stacked, StackedComposite
from torchrl.envs import Compose, EnvBase, TransformedEnv
from torchrl.envs.batched_envs import BatchedEnvBase

from torchrl_marl.errors import SpecError
from torchrl_marl.stacking import Padding, pad_specs, paddings_of

__all__ = ["AgentSpec", "GroupSpec", "TeamSpec"]

RESERVED_NAMES = frozenset(
    {"state", "next", "action", "collector", "done", "terminated", "truncated", "reward", "_reset"}
)


@dataclass(frozen=True)
class AgentSpec:
    """One kind of agent: how many there are and what one of them sees and does.

    Args:
        name (str): name of the kind; its agents are called ``name_0, name_1, ...``.
        n_agents (int): how many agents of this kind a team has.
        observation_spec (TensorSpec): what one agent sees, ``[O]``; a
            :class:`~torchrl.data.Composite` for dict observations.
        action_spec (TensorSpec): what one agent does: ``Bounded [A]``, ``Unbounded [A]``,
            ``Categorical`` (shape ``[]``) or ``OneHot [n_actions]``.
        reward_spec (TensorSpec): reward of one agent, ``[1]``.
        action_mask (bool): the environment says which actions are legal, ``[n_actions]``.

    Raises:
        ValueError: a name or a number of agents that cannot be, or an action mask without
            discrete actions.

    Examples:
        >>> from torchrl.data import Bounded, Unbounded
        >>> rover = AgentSpec("rover", 3, Unbounded((9,)), Bounded(-1, 1, (2,)))
        >>> rover.agent_names
        ('rover_0', 'rover_1', 'rover_2')
    """

    name: str
    n_agents: int
    observation_spec: TensorSpec
    action_spec: TensorSpec
    reward_spec: TensorSpec = field(default_factory=lambda: Unbounded((1,)))
    action_mask: bool = False

    def __post_init__(self) -> None:
        if not self.name:
            raise ValueError("an agent's name is empty; give its kind a name such as 'rover'.")
        if self.n_agents < 1:
            raise ValueError(
                f"agent {self.name!r}: n_agents is {self.n_agents}, expected 1 or more."
            )
        if self.action_mask and not _is_discrete(self.action_spec):
            raise ValueError(
                f"agent {self.name!r}: action_mask=True needs Categorical or OneHot actions, "
                f"found {type(self.action_spec).__name__}."
            )

    @property
    def agent_names(self) -> tuple[str, ...]:
        """Names of the agents of this kind."""
        return tuple(f"{self.name}_{i}" for i in range(self.n_agents))


@dataclass(frozen=True)
class GroupSpec:
    """Agents that share one sub-TensorDict: their keys, sizes, bounds, masks and ends.

    Built by :class:`TeamSpec`; every module, loss and learner takes its keys from here.

    Args:
        name (str): the group's key in the TensorDict.
        agent_names (tuple of str): names of its N agents, in the order of dim -2.
        observation_spec (TensorSpec): of the group, ``[N, O]``, or a Composite of such.
        action_spec (TensorSpec): of the group, ``[N, A]``, ``[N]`` or ``[N, n_actions]``.
        action_key, reward_key (NestedKey): where actions and rewards are.
        done_key, terminated_key, truncated_key (NestedKey): the agents' own flags where
            ``agent_done``, else the root's.
        observation_keys (tuple of NestedKey): leaves that an actor reads, in order.
        mask_key, action_mask_key, state_key (NestedKey, optional): ``None`` where the
            environment has none.
        state_spec (TensorSpec, optional): ``[S]``.
        agent_done (bool): every agent has done flags of its own.
        members (tuple of Composite, optional): each agent's own specs, where they differ. Sizes
            and bounds below are then those of the padded form, see
            :mod:`torchrl_marl.stacking`.
        kinds (tuple of int): which kind each agent is of.

    Examples:
        >>> from torchrl.data import Categorical, Unbounded
        >>> group = TeamSpec([AgentSpec("car", 2, Unbounded((4,)), Categorical(3))]).groups["car"]
        >>> group.n_agents, group.observation_dim, group.n_actions, group.action_key
        (2, 4, 3, ('car', 'action'))
    """

    name: str
    agent_names: tuple[str, ...]
    observation_spec: TensorSpec
    action_spec: TensorSpec
    action_key: NestedKey
    reward_key: NestedKey
    done_key: NestedKey
    terminated_key: NestedKey
    truncated_key: NestedKey | None
    observation_keys: tuple[NestedKey, ...]
    mask_key: NestedKey | None = None
    action_mask_key: NestedKey | None = None
    state_key: NestedKey | None = None
    state_spec: TensorSpec | None = None
    agent_done: bool = False
    members: tuple[Composite, ...] | None = None
    kinds: tuple[int, ...] = ()

    @property
    def n_agents(self) -> int:
        """Number N of agents."""
        return len(self.agent_names)

    @property
    def parts(self) -> tuple[GroupSpec, ...]:
        """The groups of which a joined group is made; itself, for an ordinary one."""
        return (self,)

    @property
    def part_index(self) -> tuple[int, ...]:
        """Which part each agent belongs to."""
        return tuple(i for i, part in enumerate(self.parts) for _ in range(part.n_agents))

    @property
    def membership(self) -> Tensor | None:
        """1 where an agent belongs to a part, ``[N, G]``; None for an ordinary group."""
        if len(self.parts) == 1:
            return None
        return torch.eye(len(self.parts))[torch.tensor(self.part_index)]

    def key(self, leaf: str) -> tuple[str, str]:
        """The key of a leaf of this group, such as ``(name, "advantage")``."""
        return (self.name, leaf)

    @property
    def observation_key(self) -> NestedKey:
        """The key of the observation (a sub-TensorDict for dict observations)."""
        return self.key("observation")

    @property
    def heterogeneous(self) -> bool:
        """Whether the agents' observations or actions differ."""
        return self.members is not None

    @cached_property
    def paddings(self) -> dict[NestedKey, Padding]:
        """Leaf of the group -> its padding, where the agents' shapes differ."""
        return {} if self.members is None else paddings_of(self.members)

    @cached_property
    def padded_spec(self) -> Composite:
        """Observation and action of the padded, dense form, ``[N]``."""
        if self.members is not None:
            return pad_specs(self.members, f"group {self.name!r}")
        leaves = {"observation": self.observation_spec, "action": self.action_spec}
        return Composite(leaves, shape=(self.n_agents,))

    @cached_property
    def observation_dim(self) -> int:
        """Features O that an actor reads: the leaves of the agent that has most, flattened."""
        return max(self.observation_dims)

    @cached_property
    def observation_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shape of each observation leaf without batch dims, ``(N, *features)``, padded."""
        return tuple(tuple(leaf.shape) for leaf in self._observation_leaves)

    @property
    def observation_ndims(self) -> tuple[int, ...]:
        """Number of feature dimensions of each observation leaf (1 for a vector)."""
        return tuple(len(shape) - 1 for shape in self.observation_shapes)

    @cached_property
    def observation_mask(self) -> Tensor | None:
        """True at each agent's own features of all leaves; None where nothing is padded."""
        keys = [key[1:] if len(key) > 2 else key[1] for key in self.observation_keys]
        if not any(key in self.paddings for key in keys):
            return None
        rows = []
        for key, leaf in zip(keys, self._observation_leaves):
            shape = tuple(leaf.shape[1:])
            padding = self.paddings.get(key) or Padding((shape,) * self.n_agents)
            rows.append(padding.mask().reshape(self.n_agents, -1))
        return torch.cat(rows, -1)

    @cached_property
    def observation_dims(self) -> tuple[int, ...]:
        """Each agent's own number of features."""
        if self.observation_mask is None:
            features = sum(leaf.shape[1:].numel() for leaf in self._observation_leaves)
            return (features,) * self.n_agents
        return tuple(self.observation_mask.sum(-1).tolist())

    @cached_property
    def observation_order(self) -> Tensor | None:
        """Which features to take, ``[N, O]``, for an agent's own to come first; None if they do."""
        own = self.observation_mask
        if own is None or bool((own[:, 1:] <= own[:, :-1]).all()):
            return None
        order = (~own).to(torch.uint8).argsort(dim=-1, stable=True)
        return order[:, : self.observation_dim]

    @property
    def _observation_leaves(self) -> list[TensorSpec]:
        spec = self.padded_spec
        return [spec[key[1:]] for key in self.observation_keys]

    @property
    def _action(self) -> TensorSpec:
        return self.padded_spec["action"]

    @property
    def discrete(self) -> bool:
        """Whether the actions are discrete."""
        return _is_discrete(self._action)

    @property
    def one_hot(self) -> bool:
        """Whether discrete actions are one-hot encoded."""
        return isinstance(self._action, OneHot)

    @property
    def n_actions(self) -> int:
        """Number of discrete actions, of the agent that has most."""
        if not self.discrete:
            raise ValueError(f"group {self.name!r} has continuous actions; it has an action_dim.")
        return self._action.space.n

    @cached_property
    def action_dim(self) -> int:
        """Action features A of continuous actions, of the agent that has most."""
        if self.discrete:
            raise ValueError(f"group {self.name!r} has discrete actions; it has n_actions.")
        return self._action.shape[-1]

    @cached_property
    def action_dims(self) -> tuple[int, ...]:
        """Each agent's own number of discrete actions, or of action features."""
        if self.members is None:
            return (self.n_actions if self.discrete else self.action_dim,) * self.n_agents
        own = [member["action"] for member in self.members]
        return tuple(spec.space.n if self.discrete else spec.shape[-1] for spec in own)

    @cached_property
    def action_padding(self) -> Tensor | None:
        """True at each agent's own actions, ``[N, A]`` or ``[N, n_actions]``, or None."""
        largest = max(self.action_dims)
        if min(self.action_dims) == largest:
            return None
        return torch.arange(largest) < torch.tensor(self.action_dims).unsqueeze(-1)

    @property
    def action_bounds(self) -> tuple[Tensor, Tensor] | None:
        """``(low, high)``, each ``[N, A]``; ``None`` where an action is unbounded."""
        if not isinstance(self._action, Bounded):
            return None
        low, high = self._action.space.low, self._action.space.high
        finite = bool(torch.isfinite(low).all() and torch.isfinite(high).all())
        return (low, high) if finite else None

    @property
    def state_dim(self) -> int:
        """Features S of the state."""
        if self.state_spec is None:
            raise ValueError(
                f"group {self.name!r}: this environment gives no 'state'; "
                "VmasEnv(state='observations') adds one."
            )
        return self.state_spec.shape.numel()


class TeamSpec:
    """All the groups of one environment, with their keys, sizes and masks.

    Args:
        agents (sequence of AgentSpec, or mapping of group name to a sequence of AgentSpec):
            without names, each kind is a group of its own.
        state_spec (TensorSpec, optional): what only the critic sees, ``[S]``.

    Raises:
        ValueError: a reserved or repeated group name, or a group without agents.

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
    ) -> None:
        grouped = agents if isinstance(agents, Mapping) else {spec.name: [spec] for spec in agents}
        if not isinstance(agents, Mapping) and len(grouped) < len(agents):
            names = [spec.name for spec in agents]
            raise ValueError(f"two kinds of agents have one name in {names}; names must differ.")
        self.agents = {name: tuple(specs) for name, specs in grouped.items()}
        self.state_spec = state_spec
        self.groups = {
            name: _group_from_agents(name, specs, state_spec) for name, specs in self.agents.items()
        }

    @classmethod
    def from_env(cls, env: EnvBase) -> TeamSpec:
        """Reads the team of any TorchRL environment that keeps the group convention.

        Args:
            env (EnvBase): its groups come from ``env.group_map`` or, without one, from its
                action keys ``(group, "action")``.

        Returns:
            TeamSpec: with one :class:`GroupSpec` a group. ``team.agents`` is empty.

        Raises:
            ValueError: no group convention, or a reserved group name.
        """
        team = cls.__new__(cls)
        team.agents = {}
        team.state_spec = env.full_observation_spec_unbatched.get("state", None)
        group_map = _read_group_map(env)
        known = _padded_members(env)
        team.groups = {
            n: _group_from_env(env, n, names, team.state_spec, known.get(n))
            for n, names in group_map.items()
        }
        return team

    @property
    def n_agents(self) -> int:
        """Number of agents of all groups."""
        return sum(group.n_agents for group in self.groups.values())

    def stacked_spec(self) -> Composite:
        """All agents of all groups as one stacked spec ``[n_agents]``."""
        members = []
        for group in self.groups.values():
            for i in range(group.n_agents):
                own = None if group.members is None else group.members[i]
                leaves = {
                    "observation": group.observation_spec[i] if own is None else own["observation"],
                    "action": group.action_spec[i] if own is None else own["action"],
                }
                members.append(Composite(leaves))
        return torch.stack(members, 0)

    def __repr__(self) -> str:
        groups = ", ".join(f"{name}: {group.n_agents}" for name, group in self.groups.items())
        return f"TeamSpec({groups}{'' if self.state_spec is None else ', state'})"


def _is_discrete(spec: TensorSpec) -> bool:
    several = isinstance(spec, (MultiCategorical, MultiOneHot))
    return isinstance(spec, (Categorical, OneHot)) and not several


def _check_group_name(name: str) -> None:
    if "." in name or hasattr(nn.ModuleDict, name):
        raise ValueError(
            f"a group is named {name!r}, which no network of it could be called; "
            "choose a plain word such as 'rovers'."
        )
    if name in RESERVED_NAMES:
        raise ValueError(
            f"a group is named {name!r}, which is a reserved key; "
            f"choose a name that is none of {sorted(RESERVED_NAMES)}."
        )


def _leaf_keys(name: str, observation_specs: Sequence[TensorSpec]) -> tuple[NestedKey, ...]:
    """Of all agents, which may have leaves that others have not."""
    keys: dict[NestedKey, None] = {}
    for spec in observation_specs:
        if not isinstance(spec, Composite):
            return ((name, "observation"),)
        keys |= dict.fromkeys(spec.keys(True, True))
    return tuple(unravel_key((name, "observation", key)) for key in keys)


def _group_from_agents(
    name: str, specs: Sequence[AgentSpec], state_spec: TensorSpec | None
) -> GroupSpec:
    _check_group_name(name)
    if not specs:
        raise ValueError(f"group {name!r} has no agents; register at least one kind in it.")
    if len({spec.action_mask for spec in specs}) > 1:
        raise ValueError(f"group {name!r}: all kinds of a group have an action_mask, or none has.")
    members = [_member(spec) for spec in specs for _ in range(spec.n_agents)]
    return GroupSpec(
        name=name,
        agent_names=tuple(agent for spec in specs for agent in spec.agent_names),
        observation_spec=torch.stack([member["observation"] for member in members], 0),
        action_spec=torch.stack([member["action"] for member in members], 0),
        action_key=(name, "action"),
        reward_key=(name, "reward"),
        done_key=(name, "done"),
        terminated_key=(name, "terminated"),
        truncated_key=(name, "truncated"),
        observation_keys=_leaf_keys(name, [member["observation"] for member in members]),
        mask_key=(name, "mask"),
        action_mask_key=(name, "action_mask") if specs[0].action_mask else None,
        state_key=None if state_spec is None else "state",
        state_spec=state_spec,
        agent_done=True,
        members=tuple(members) if _differ(members) else None,
        kinds=tuple(k for k, spec in enumerate(specs) for _ in range(spec.n_agents)),
    )


def _member(spec: AgentSpec) -> Composite:
    """What one agent of a kind sees and does."""
    member = Composite(observation=spec.observation_spec, action=spec.action_spec)
    if spec.action_mask:
        n = spec.action_spec.space.n
        member["action_mask"] = Categorical(2, shape=(n,), dtype=torch.bool)
    return member


def _differ(specs: Sequence[TensorSpec]) -> bool:
    return any(spec != specs[0] for spec in specs[1:])


def _read_group_map(env: EnvBase) -> dict[str, list[str]]:
    base = env.base_env if isinstance(env, TransformedEnv) else env
    # A batched env asks its workers, which may not run yet; its action keys say the same.
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
        raise ValueError(
            f"{type(env).__name__} keeps no groups: its action keys are "
            f"{list(action_spec.keys(True, True))}, expected (group, 'action') with one row an "
            "agent. Give the environment a group_map."
        )
    return {name: [f"{name}_{i}" for i in range(n)] for name, n in groups.items()}


def _padded_members(env: EnvBase) -> dict[str, tuple[Composite, ...]]:
    """Group -> its agents' own specs, as a padding transform keeps them."""
    known: dict[str, tuple[Composite, ...]] = {}
    while isinstance(env, TransformedEnv):
        for transform in env.transform if isinstance(env.transform, Compose) else [env.transform]:
            known |= getattr(transform, "members", None) or {}
        env = env.base_env
    return known


def _lazy_members(env: EnvBase, name: str) -> tuple[Composite, ...] | None:
    """The agents' own specs where TorchRL stacks them lazily."""
    seen, action = env.full_observation_spec[name], env.full_action_spec[name, "action"]
    stacked = [seen, action, *(seen.values(True, False) if isinstance(seen, Composite) else ())]
    if not any(isinstance(spec, (Stacked, StackedComposite)) for spec in stacked):
        return None
    ndim = len(env.batch_size)
    first = (0,) * ndim
    members = []
    for own, does in zip(seen.unbind(ndim), action.unbind(ndim)):
        if ndim:
            own, does = own[first], does[first]
        member = own.clone()
        member["action"] = does
        members.append(member)
    return tuple(members)


def _group_from_env(
    env: EnvBase,
    name: str,
    agent_names: Sequence[str],
    state_spec: TensorSpec | None,
    members: tuple[Composite, ...] | None,
) -> GroupSpec:
    _check_group_name(name)
    if not agent_names:
        raise ValueError(
            f"group {name!r} of {type(env).__name__} has no agents; leave it out of the group_map."
        )
    members = _lazy_members(env, name) if members is None else members
    seen = env.full_observation_spec_unbatched[name] if members is None else members[0]
    if "observation" not in seen.keys():
        raise ValueError(
            f"group {name!r} of {type(env).__name__} has no 'observation', found "
            f"{list(seen.keys())}; rename it with torchrl.envs.RenameTransform."
        )
    rewards = set(env.full_reward_spec_unbatched.keys(True, True))
    dones = set(env.full_done_spec_unbatched.keys(True, True))
    agent_done = (name, "done") in dones
    end = (lambda flag: (name, flag)) if agent_done else (lambda flag: flag)
    if members is None:
        observation_spec = seen["observation"]
        action_spec = env.full_action_spec_unbatched[name, "action"]
        leaves, kinds = [observation_spec], (0,) * len(agent_names)
        _check_masks(name, seen, action_spec, (len(agent_names),))
    else:
        for member in members:
            _check_masks(name, member, member["action"], ())
        leaves = [member["observation"] for member in members]
        observation_spec = torch.stack(leaves, 0)
        action_spec = torch.stack([member["action"] for member in members], 0)
        kinds = _kinds_of(members)
    return GroupSpec(
        name=name,
        agent_names=tuple(agent_names),
        observation_spec=observation_spec,
        action_spec=action_spec,
        action_key=(name, "action"),
        reward_key=(name, "reward") if (name, "reward") in rewards else "reward",
        done_key=end("done"),
        terminated_key=end("terminated"),
        truncated_key=end("truncated") if end("truncated") in dones else None,
        observation_keys=_leaf_keys(name, leaves),
        mask_key=(name, "mask") if "mask" in seen.keys() else None,
        action_mask_key=(name, "action_mask") if "action_mask" in seen.keys() else None,
        state_key=None if state_spec is None else "state",
        state_spec=state_spec,
        agent_done=agent_done,
        members=members,
        kinds=kinds,
    )


def _check_masks(name: str, seen: Composite, action: TensorSpec, agents: tuple[int, ...]) -> None:
    """Masks are bool: one for each agent, or for each of its actions."""
    wanted = {"mask": agents}
    if _is_discrete(action):
        wanted["action_mask"] = (*agents, action.space.n)
    for leaf, shape in wanted.items():
        spec = seen.get(leaf, None)
        if spec is not None and (spec.dtype is not torch.bool or tuple(spec.shape) != shape):
            raise SpecError(
                f"group {name!r}: the spec of {(name, leaf)!r} is {spec.dtype} "
                f"{tuple(spec.shape)}, expected torch.bool {shape}; mend the environment."
            )


def _kinds_of(members: Sequence[Composite]) -> tuple[int, ...]:
    """Agents of equal specs are of one kind."""
    known: list[Composite] = []
    kinds = []
    for member in members:
        kind = next((i for i, spec in enumerate(known) if spec == member), len(known))
        if kind == len(known):
            known.append(member)
        kinds.append(kind)
    return tuple(kinds)
