"""Readers of TorchRL's environments, which report observations, deaths and ends differently.

Shapes: E envs, N agents of a group, S state features.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby
from operator import itemgetter
from typing import Any

import torch
import torchrl.envs
from tensordict import TensorDictBase
from torch import Tensor
from torchrl.data import Categorical, Composite, MultiCategorical, MultiOneHot, OneHot, TensorSpec
from torchrl.envs import EnvBase, SerialEnv
from torchrl.envs.batched_envs import BatchedEnvBase

from torchrl_marl.envs.agents.kinds import GroupKinds
from torchrl_marl.errors import ConfigError
from torchrl_marl.specs import AgentSpec, GroupSpec, TeamSpec
from torchrl_marl.specs.groups import is_lazy

__all__ = ["Reading", "reading_of"]

_BRANCHES = (MultiCategorical, MultiOneHot)

Ends = tuple[Tensor | None, Tensor | None]


class Reading:
    """Reads the outputs of a grouped environment, by the keys in its specs.

    Args:
        env (EnvBase): environment, including its transforms.
        base (EnvBase): the same environment without transforms.

    Attributes:
        kinds (dict of str to tuple of AgentSpec): agents by group.
        state_spec (TensorSpec, optional): spec of the critic's state, ``[S]``.
        max_steps (int, optional): time limit of the environment, if it reports one.
    """

    def __init__(self, env: EnvBase, base: EnvBase) -> None:
        self.base = base
        limit = _limit_of(env, base)
        self.max_steps = limit if isinstance(limit, int) and limit > 0 else None
        self.done_keys = set(env.full_done_spec.keys(True, True))
        team = self._team(env)
        self.groups = team.groups
        self.kinds = {name: _kinds_of(group) for name, group in team.groups.items()}
        state = team.state_spec
        flat = state is not None and state.ndim == 1 and state.dtype.is_floating_point
        self.state_spec = state if flat else None

    def _team(self, env: EnvBase) -> TeamSpec:
        return TeamSpec.from_env(env)

    def read(
        self, td: TensorDictBase, kinds: Mapping[str, GroupKinds], rewards: bool
    ) -> dict[str, Any]:
        """Returns observations, rewards, masks and flags by group or kind.

        Args:
            td (TensorDictBase): output of the environment, ``[E]``.
            kinds (mapping): kinds of agents by group.
            rewards (bool): True for the output of a step, which has rewards.
        """
        source: dict[str, Any] = {}
        if self.state_spec is not None:
            source["state"] = td.get("state")
        for name, group in self.groups.items():
            source[name] = self._read_group(td, group, kinds[name])
            if rewards:
                source[name]["reward"] = self._reward(td, group)
        return source

    def _read_group(
        self, td: TensorDictBase, group: GroupSpec, kinds: GroupKinds
    ) -> dict[str, Any]:
        own = td.get(group.name)
        observed = ("observation", *(("action_mask",) if group.action_mask_key else ()))
        if kinds.lazy:
            parts = kinds.split(own)
            leaves: dict[str, Any] = {
                kind: {leaf: _to_nested_dicts(part.get(leaf)) for leaf in observed}
                for kind, part in parts.items()
            }
        else:
            leaves = {leaf: _to_nested_dicts(own.get(leaf)) for leaf in observed}
        if group.mask_key is not None:
            leaves["mask"] = td.get(group.mask_key)
        if group.agent_done:
            for flag in ("terminated", "truncated"):
                if group.key(flag) in self.done_keys:
                    leaves[flag] = td.get(group.key(flag))
            if "terminated" in leaves and group.done_key in self.done_keys:
                leaves["terminated"] = _with_done(leaves, td.get(group.done_key))
        return leaves

    def _reward(self, td: TensorDictBase, group: GroupSpec) -> Tensor:
        reward = td.get(group.reward_key).float()
        if isinstance(group.reward_key, tuple):
            return reward
        return reward.unsqueeze(1).expand(-1, group.n_agents, -1).clone()

    def ends(self, td: TensorDictBase, steps: Tensor) -> Ends:
        """Returns the episode's flags as the environment reports them: terminated and truncated.

        Each flag has the shape ``[E, 1]``; it is None if the environment does not report it.

        Args:
            td (TensorDictBase): output of a step.
            steps (Tensor): number of steps made in each episode, ``[E, 1]``.
        """
        if "done" not in self.done_keys:
            return None, None
        flags = {"terminated": td.get("terminated"), "truncated": td.get("truncated", None)}
        terminated, truncated = _with_done(flags, td.get("done")), flags["truncated"]
        terminated = terminated.reshape(steps.shape)
        if truncated is not None:
            return terminated, truncated.reshape(steps.shape) & ~terminated
        return self._split_done(terminated, steps)

    def _split_done(self, done: Tensor, steps: Tensor) -> Ends:
        """Splits a done flag: an end at the time limit is truncated, any other is terminated."""
        if self.max_steps is None:
            return done, None
        at_limit = done & (steps >= self.max_steps)
        return done & ~at_limit, at_limit

    def write(
        self, td: TensorDictBase, name: str, kinds: GroupKinds, own: Mapping[str, Any]
    ) -> None:
        """Writes a group's actions, given for all agents ``[E, N, ...]`` or by kind."""
        td.set(name, kinds.with_leaves(td.get(name), own))


class VmasReading(Reading):
    """Reads TorchRL's VMAS wrapper, which reports an episode at its time limit as terminated."""

    def _split_done(self, done: Tensor, steps: Tensor) -> Ends:
        if self.max_steps is None:
            return done, None
        scenario_done = self.base._env.scenario.done().reshape(steps.shape)
        return done & scenario_done, done & ~scenario_done


class SmacReading(Reading):
    """Reads SMACv2. A unit is dead if its only legal action is the no-op; the reward is shared.

    Written from TorchRL's source and tested with a stand-in, because the game was not available.
    """

    def _team(self, env: EnvBase) -> TeamSpec:
        # TorchRL keeps the currently legal actions in the spec. So from_env would treat agents with
        # different legal actions as different kinds.
        n_agents, action = self.base.n_agents, self.base.full_action_spec["agents", "action"]
        spec: TensorSpec = (OneHot if isinstance(action, OneHot) else Categorical)(
            self.base.n_actions, dtype=action.dtype, device=action.device
        )
        observation_spec = env.full_observation_spec["agents", "observation"][0]
        agents = AgentSpec("agent", n_agents, observation_spec, spec, action_mask=True)
        return TeamSpec({"agents": [agents]}, env.full_observation_spec.get("state", None))

    def _read_group(
        self, td: TensorDictBase, group: GroupSpec, kinds: GroupKinds
    ) -> dict[str, Any]:
        own = td.get(group.name)
        legal = own.get("action_mask")
        alive = legal[..., 1:].any(-1)
        return {
            "observation": own.get("observation"),
            "action_mask": legal,
            "mask": alive,
            "terminated": ~alive.unsqueeze(-1),
        }

    def _reward(self, td: TensorDictBase, group: GroupSpec) -> Tensor:
        return td.get("reward").unsqueeze(1).expand(-1, group.n_agents, -1).clone()

    def ends(self, td: TensorDictBase, steps: Tensor) -> Ends:
        done = td.get("done").reshape(steps.shape)
        at_limit = td.get(("info", "episode_limit")).reshape(steps.shape).bool()
        return done & ~at_limit, done & at_limit


class MeltingpotReading(Reading):
    """Reads Melting Pot, where all episodes end at a time limit.

    Written from TorchRL's source and tested with a stand-in, because the game was not available.
    """

    def _split_done(self, done: Tensor, steps: Tensor) -> Ends:
        return torch.zeros_like(done), done


class UnityReading(Reading):
    """Reads Unity, which has one entry per agent and no done flags of the whole episode.

    The agents of a group are stacked. The actions of a group are either continuous, or have one or
    more discrete branches. The reward is the sum of the agent's and the group's reward. An agent
    that ends waits for the others, because a reset restarts all of them.

    Written from TorchRL's source and tested with a stand-in, because the engine was not available.
    """

    def _team(self, env: EnvBase) -> TeamSpec:
        agents = {}
        for name, names in self.base.group_map.items():
            observation_spec = env.full_observation_spec[name, names[0]]
            action = env.full_action_spec[name, names[0]]
            agents[name] = [self._agent_spec(name, tuple(names), observation_spec, action)]
        return TeamSpec(agents)

    def _agent_spec(
        self, name: str, names: tuple[str, ...], observation_specs: Composite, action: Composite
    ) -> AgentSpec:
        if len(action.keys()) != 1:
            raise ConfigError(
                f"group {name!r} of {type(self.base).__name__} has {sorted(action.keys())}, "
                "expected discrete or continuous actions; agents with both cannot be trained."
            )
        leaves = list(observation_specs.keys())
        observation = (
            observation_specs[leaves[0]] if len(leaves) == 1 else observation_specs.clone()
        )
        (spec,) = action.values()
        sizes = [box.n for box in spec.space] if isinstance(spec, _BRANCHES) else []
        is_single_choice = len(sizes) == 1
        if sizes:  # builds a new spec, without the currently legal actions
            options = {"dtype": spec.dtype, "device": spec.device}
            one_hot = isinstance(spec, MultiOneHot)
            single, multiple = (OneHot, MultiOneHot) if one_hot else (Categorical, MultiCategorical)
            spec = single(sizes[0], **options) if is_single_choice else multiple(sizes, **options)
        return AgentSpec(
            name, len(names), observation, spec, action_mask=is_single_choice, agent_names=names
        )

    def _read_group(
        self, td: TensorDictBase, group: GroupSpec, kinds: GroupKinds
    ) -> dict[str, Any]:
        agents = [td.get((group.name, agent)) for agent in group.agent_names]
        single = not isinstance(group.observation_spec, Composite)
        leaf = next(iter(self.base.full_observation_spec[group.name, group.agent_names[0]].keys()))
        keys = [leaf] if single else list(group.observation_spec.keys())
        observed = {key: torch.stack([x.get(key) for x in agents], 1) for key in keys}
        leaves: dict[str, Any] = {"observation": observed[leaf] if single else observed}
        for flag in ("terminated", "truncated"):
            leaves[flag] = torch.stack([x.get(flag).reshape(-1, 1) for x in agents], 1)
        if group.action_mask_key is not None:
            leaves["action_mask"] = self._legal_actions(group)
        return leaves

    def _legal_actions(self, group: GroupSpec) -> Tensor:
        rows = []
        for agent in group.agent_names:
            mask = self.base.full_action_spec[group.name, agent, "discrete_action"].mask
            all_legal = torch.ones(group.n_actions, dtype=torch.bool)
            rows.append(all_legal if mask is None else mask.reshape(-1))
        return torch.stack(rows).unsqueeze(0)

    def _reward(self, td: TensorDictBase, group: GroupSpec) -> Tensor:
        agents = [td.get((group.name, agent)) for agent in group.agent_names]
        rewards = [(x.get("reward") + x.get("group_reward")).reshape(-1, 1) for x in agents]
        return torch.stack(rewards, 1)

    def ends(self, td: TensorDictBase, steps: Tensor) -> Ends:
        """Returns None for both flags of the episode, because it ends with its last agent."""
        return None, None

    def write(
        self, td: TensorDictBase, name: str, kinds: GroupKinds, own: Mapping[str, Any]
    ) -> None:
        group = self.groups[name]
        for i, agent in enumerate(group.agent_names):
            (key,) = self.base.full_action_spec[name, agent].keys()
            spec = self.base.full_action_spec[name, agent, key]
            action = own["action"][:, i].reshape(-1, *spec.shape).to(spec.dtype)
            td.set((name, agent, key), action)


def reading_of(env: EnvBase, base: EnvBase) -> Reading:
    """Returns the reader for the class of a TorchRL environment."""
    for cls, reading in (
        (torchrl.envs.VmasWrapper, VmasReading),
        (torchrl.envs.SMACv2Wrapper, SmacReading),
        (torchrl.envs.MeltingpotWrapper, MeltingpotReading),
        (torchrl.envs.UnityMLAgentsWrapper, UnityReading),
    ):
        if isinstance(base, cls):
            return reading(env, base)
    return Reading(env, base)


def _with_done(flags: Mapping[str, Any], done: Tensor) -> Tensor:
    """Returns terminated, also where only done is True, as in batches of TorchRL."""
    truncated = flags.get("truncated")
    return flags["terminated"] | (done if truncated is None else done & ~truncated)


def _limit_of(env: EnvBase, base: EnvBase) -> Any:
    """Returns the time limit that an environment reports; of a batch, one that all envs share.

    In a ParallelEnv it is not read, because an unknown attribute ends the workers.
    """
    if not isinstance(base, BatchedEnvBase):
        return getattr(env, "max_steps", None)
    if not isinstance(base, SerialEnv):
        return None
    if base.is_closed:  # its attributes are those of its running envs
        base.start()
    limits = set(getattr(base, "max_steps", ()))
    return limits.pop() if len(limits) == 1 else None


def _kinds_of(group: GroupSpec) -> tuple[AgentSpec, ...]:
    """Returns the kinds of a group; adjacent agents with equal specs form one kind."""
    mask = group.action_mask_key is not None
    if group.members is None:
        runs = [(group.observation_spec[0], group.action_spec[0], group.agent_names)]
    else:
        pairs = [(member["observation"], member["action"]) for member in group.members]
        rows = zip(pairs, group.agent_names)
        runs = [
            (*pair, tuple(name for _, name in run)) for pair, run in groupby(rows, itemgetter(0))
        ]
    kinds = []
    for observation_spec, action, names in runs:
        name = group.name if group.members is None else names[0]
        kinds.append(
            AgentSpec(
                name, len(names), observation_spec, action, action_mask=mask, agent_names=names
            )
        )
    return tuple(kinds)


def _to_nested_dicts(value: Any) -> Any:
    """Converts a TensorDict to nested dicts; returns tensors unchanged."""
    if not isinstance(value, TensorDictBase):
        return value
    value = value.to_tensordict() if is_lazy(value) else value
    return {key: _to_nested_dicts(x) for key, x in value.items()}
