"""Multi-agent environment transforms.

Shapes: E envs, N agents of a group.
"""

from __future__ import annotations

from functools import cached_property

import torch
from tensordict import TensorDictBase
from torch import Tensor
from torchrl.data import Categorical, Composite, TensorSpec
from torchrl.data.tensor_specs import Stacked, StackedComposite
from torchrl.envs import EnvBase, Transform, TransformedEnv

from torchrl_marl.specs import GroupSpec, TeamSpec
from torchrl_marl.specs.groups import is_lazy
from torchrl_marl.specs.stacking import pad_group, pad_specs, unpad_group

__all__ = ["AgentInitTracker", "PadAgents", "with_dense_groups"]


class PadAgents(Transform):
    """Pads lazily stacked groups of an environment to dense tensors.

    Outputs are padded with zeros to the shape of the largest agent. Before actions reach the
    environment, they are cut to each agent's shape. Buffers, losses and compiled code need dense
    groups.
    :class:`~torchrl_marl.specs.TeamSpec` finds each agent's shapes in spite of the padding.

    Homogeneous groups are not changed.

    Shapes:
        - a leaf of a lazy group: from ``[E, *own]`` per agent to ``[E, N, *largest]``

    Reduces to: the identity, if no group is heterogeneous.

    Examples:
        >>> from torchrl.envs import TransformedEnv
        >>> from torchrl.envs.utils import MarlGroupMapType
        >>> from torchrl_marl.envs import VmasEnv
        >>> group_map = MarlGroupMapType.ALL_IN_ONE_GROUP
        >>> env = VmasEnv("simple_tag", num_envs=3, group_map=group_map, seed=0)
        >>> TransformedEnv(env, PadAgents()).rollout(2)["agents", "observation"].shape
        torch.Size([3, 2, 4, 16])
    """

    @cached_property
    def groups(self) -> dict[str, GroupSpec]:
        """Heterogeneous groups of the environment."""
        parent = self.parent
        groups = {} if parent is None else TeamSpec.from_env(parent).groups
        return {name: group for name, group in groups.items() if group.paddings}

    @property
    def members(self) -> dict[str, tuple[Composite, ...]]:
        """For each heterogeneous group, the specs of its agents."""
        return {n: group.members for n, group in self.groups.items() if group.members is not None}

    def _call(self, next_tensordict: TensorDictBase) -> TensorDictBase:
        for name, spec in self.groups.items():
            group = next_tensordict.get(name, None)
            if is_lazy(group):
                next_tensordict.set(name, pad_group(group, spec.paddings))
        return next_tensordict

    def _reset(
        self, tensordict: TensorDictBase, tensordict_reset: TensorDictBase
    ) -> TensorDictBase:
        return self._call(tensordict_reset)

    def _inv_call(self, tensordict: TensorDictBase) -> TensorDictBase:
        for name, spec in self.groups.items():
            group = tensordict.get(name, None)
            if group is not None and not is_lazy(group):
                # All leaves are unpadded, because other transforms read their sums and counts here.
                tensordict.set(name, unpad_group(group, spec.paddings))
        return tensordict

    def transform_input_spec(self, input_spec: Composite) -> Composite:
        """Returns the spec with dense actions."""
        for key in ("full_action_spec", "full_state_spec"):
            if input_spec.get(key, None) is not None:
                input_spec[key] = self._dense_groups(input_spec[key])
        return input_spec

    def _dense_groups(self, spec: Composite) -> Composite:
        """Returns the spec with dense groups."""
        if not isinstance(spec, Composite):
            return spec
        for name in self.groups:
            group = spec.get(name, None)
            if group is not None and _is_stacked(group):
                spec[name] = _dense_spec(group, name, spec.shape)
        return spec

    transform_observation_spec = transform_reward_spec = transform_done_spec = _dense_groups


class AgentInitTracker(Transform):
    """Marks each agent's first step, at which recurrent policies reset their state.

    ``(group, "is_init")`` is True from the reset up to and including the first step in which the
    agent acts. So it is True for all agents that are not born yet. TorchRL's ``InitTracker``
    marks only the first step of the episode. Groups may be dense, padded or stacked lazily. In a
    group without masks, all agents act from the first step of the episode. An ended agent that
    comes back is marked until its first step of the new life.

    Args:
        init_key (str): name of the leaf, such as ``"is_init"``.

    Shapes:
        - ``(group, "is_init")``: ``[E, N, 1]``, like the agents' done flags

    Reduces to: TorchRL's ``InitTracker``, in groups without masks.

    Examples:
        >>> from torchrl.envs import TransformedEnv
        >>> from torchrl_marl.envs.toy import Arena
        >>> env = TransformedEnv(Arena(1, n_agents=2, late_spawn=2), AgentInitTracker())
        >>> env.rollout(4)["agents", "is_init"][0, ..., 0].int().T
        tensor([[1, 0, 0, 0],
                [1, 1, 1, 0]], dtype=torch.int32)
    """

    def __init__(self, init_key: str = "is_init") -> None:
        super().__init__()
        self.init_key = init_key

    @cached_property
    def _groups(self) -> dict[str, GroupSpec]:
        return TeamSpec.from_env(self.parent).groups

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        for name, group in self._groups.items():
            init = tensordict.get((name, self.init_key))
            if group.mask_key is None:
                init = torch.zeros_like(init)
            else:
                init = init & ~tensordict.get(group.mask_key).unsqueeze(-1)
            if group.respawns and group.agent_done:
                was_done, is_done = (td.get(group.done_key) for td in (tensordict, next_tensordict))
                init = init | (was_done & ~is_done)
            next_tensordict.get(name).set(self.init_key, init)
        return next_tensordict

    def _reset(
        self, tensordict: TensorDictBase, tensordict_reset: TensorDictBase
    ) -> TensorDictBase:
        for name, group in self._groups.items():
            before = tensordict.get((name, self.init_key), None)
            init = self._reset_mask(tensordict, group.n_agents)
            # Some agents of running envs may not be born yet.
            init = init if before is None else init | before
            tensordict_reset.get(name).set(self.init_key, init)
        return tensordict_reset

    def _reset_mask(self, tensordict: TensorDictBase, n_agents: int) -> Tensor:
        """Returns a mask ``[E, N, 1]`` of the agents in envs that are being reset."""
        shape = (*self.parent.batch_size, n_agents, 1)
        reset = tensordict.get("_reset", None)
        if reset is None:
            return torch.ones(shape, dtype=torch.bool, device=self.parent.device)
        return reset.view(*self.parent.batch_size, 1, 1).expand(shape).clone()

    def transform_observation_spec(self, observation_spec: Composite) -> Composite:
        """Adds ``(group, "is_init")`` to the spec."""
        for name, group in self._groups.items():
            shape = (*observation_spec.shape, group.n_agents, 1)
            observation_spec[name, self.init_key] = Categorical(
                2, shape=shape, dtype=torch.bool, device=observation_spec.device
            )
        return observation_spec


def with_dense_groups(env: EnvBase) -> EnvBase:
    """Adds :class:`PadAgents` to an environment with lazily stacked groups."""
    groups = TeamSpec.from_env(env).groups.values()
    lazy = any(
        _is_stacked(spec[group.name])
        for group in groups
        for spec in (env.full_observation_spec, env.full_action_spec)
    )
    return TransformedEnv(env, PadAgents(), auto_unwrap=True) if lazy else env


class _PaddedComposite(Composite):
    """Spec of a padded group; it compares equal to the lazily stacked spec of the same group.

    In a transformed environment, TorchRL calls the inner environment's ``rand_action`` only if the
    action specs of the two environments are equal. Environments with legal-action masks need that
    method.
    """

    def __eq__(self, other: object) -> bool:
        if isinstance(other, StackedComposite):
            other = _dense_spec(other, "", other.shape[: other.dim])
        return super().__eq__(other)


def _is_stacked(group: TensorSpec) -> bool:
    leaves = [group, *group.values(True, False)]
    return any(isinstance(leaf, (Stacked, StackedComposite)) for leaf in leaves)


def _dense_spec(group: Composite, name: str, batch: torch.Size) -> Composite:
    first = (0,) * len(batch)
    members = [member[first] if batch else member for member in group.unbind(len(batch))]
    dense = pad_specs(members, f"group {name!r}").to(group.device)
    batched = dense.expand(*batch, *dense.shape)
    for key, leaf in dense.items(True, True):
        if getattr(leaf, "mask", None) is not None:  # Categorical.expand drops it
            batched[key].update_mask(leaf.mask.expand(*batch, *leaf.mask.shape))
    return _PaddedComposite(dict(batched.items()), shape=batched.shape, device=batched.device)
