"""Symmetries of environments, and Other-Play, in which each agent draws one in every episode.

Shapes: E envs, N agents of a group, L labels, F features of an observation, A actions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor
from torchrl.data import Unbounded
from torchrl.envs import EnvBase, TransformedEnv

from torchrl_marl.envs.carried import CarriedTransform, inner_keys, use_random_state
from torchrl_marl.errors import ConfigError
from torchrl_marl.specs import GroupSpec

__all__ = ["WITH_SYMMETRIES", "Labels", "OtherPlay", "symmetries_of", "with_other_play"]

WITH_SYMMETRIES = "toy/matching_levers, jaxmarl/hanabi, jaxmarl/overcooked_v2"
"""Environments of the package that have symmetries."""


class Labels:
    """Labels that can be exchanged, such as colors: the game stays the same in any order.

    A symmetry is an order ``[L]``: a permutation of the labels. To the agent, what belongs to label
    ``order[l]`` seems to belong to label ``l``. The environment declares which features and actions
    belong to which label. The i-th feature of one label corresponds to the i-th of another.

    Args:
        features (sequence of int): label of each feature of an observation's last dimension, -1 for
            a feature that belongs to none, ``[F]``.
        actions (sequence of int): label of each action, -1 for one that belongs to none, ``[A]``.

    Raises:
        ConfigError: there are fewer than two labels, or they differ in their number of features or
            actions.

    Reference: Hu et al., 2020, https://arxiv.org/abs/2003.02979 (section 4).

    Examples:
        >>> labels = Labels(features=[0, 1, 2, -1], actions=[-1, 0, 1, 2])
        >>> labels.n, labels.actions_of(torch.tensor([2, 0, 1])).tolist()
        (3, [0, 3, 1, 2])
    """

    def __init__(self, features: Sequence[int], actions: Sequence[int]) -> None:
        self.n = max([*features, *actions, -1]) + 1
        self._tables = tuple(_index_tables(x, self.n) for x in (features, actions))
        self.n_features, self.n_actions = len(features), len(actions)

    def draw(self, shape: Sequence[int], device: torch.device | str | None = None) -> Tensor:
        """Draws orders with equal probability, ``[*shape, L]``."""
        return torch.rand(*shape, self.n, device=device).argsort(-1)

    def features_of(self, order: Tensor) -> Tensor:
        """Returns the index of the environment's feature that an agent sees as each feature."""
        return self._indices(order, 0)

    def actions_of(self, order: Tensor) -> Tensor:
        """Returns the index of the environment's action for each action of an agent."""
        return self._indices(order, 1)

    def _indices(self, order: Tensor, table: int) -> Tensor:
        identity, places, labels, ranks = (x.to(order.device) for x in self._tables[table])
        new_labels = order[..., labels.clamp_min(0)]
        return torch.where(labels < 0, identity, places[new_labels, ranks])


def _index_tables(labels: Sequence[int], n: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns the indices, the indices of each label ``[L, K]``, the labels, and their ranks."""
    places = [[i for i, own in enumerate(labels) if own == label] for label in range(n)]
    sizes = sorted({len(entries) for entries in places})
    if n < 2 or len(sizes) > 1:
        raise ConfigError(
            f"Labels: found {n} labels with {sizes or 'no'} features or actions each, expected two "
            "labels or more with equal numbers."
        )
    if min(labels, default=0) < -1:
        raise ConfigError(f"Labels: found the label {min(labels)}, expected -1 or more.")
    ranks = [places[own].index(i) if own >= 0 else 0 for i, own in enumerate(labels)]
    places = places if sizes[0] else [[0]] * n
    identity, entries_of_label = torch.arange(len(labels)), torch.tensor(places)
    return identity, entries_of_label, torch.tensor(labels, dtype=torch.int64), torch.tensor(ranks)


class OtherPlay(CarriedTransform):
    """Lets each agent draw a symmetry of the environment at the start of every episode.

    Observations, action masks and actions are those in the agent's order of the labels. So agents
    cannot agree on a label, such as a color, but only on what unknown partners would also find out.
    Everything that the policy sees, and its recorded actions, are in its own order; updates need no
    change. Rewards, done flags and the critic's ``"state"`` are the environment's.

    Args:
        labels (mapping): group -> :class:`Labels`.

    Shapes:
        - ``(group, "symmetry")``: ``[E, N, L]``, the order of each agent

    Raises:
        ConfigError: a group has several observations, different agents, or actions that are not
            one choice; or the labels are for other numbers of features or actions.

    Reference: Hu et al., 2020, https://arxiv.org/abs/2003.02979.
    Differs: every agent draws a symmetry, in the paper all but one; both give the same objective.

    Reduces to: the environment itself, if every agent draws the order ``0, ..., L - 1``.

    Examples:
        >>> from torchrl_marl.envs.toy import MatchingLevers
        >>> env = with_other_play(MatchingLevers(3, n_levers=4, seed=0))
        >>> env.rollout(8)["agents", "symmetry"].shape
        torch.Size([3, 8, 2, 4])
    """

    leaf = "symmetry"

    def __init__(self, labels: Mapping[str, Labels]) -> None:
        super().__init__()
        self.labels = dict(labels)

    def _check_group(self, group: GroupSpec) -> None:
        labels = self.labels.get(group.name)
        if not isinstance(labels, Labels):
            given = type(labels).__name__ if group.name in self.labels else [*self.labels]
            raise ConfigError(
                f"OtherPlay: group {group.name!r} has no labels, found {given}; expected "
                f"{{{group.name!r}: Labels(...)}}."
            )
        plain = group.discrete and not group.branches and not group.heterogeneous
        if not plain or len(group.observation_keys) > 1:
            raise ConfigError(
                f"OtherPlay: group {group.name!r} has several observations, different agents or "
                "actions that are not one choice; expected equal agents with one observation and "
                "one discrete action."
            )
        found = group.observation_shapes[0][-1], group.n_actions
        expected = labels.n_features, labels.n_actions
        if found != expected:
            raise ConfigError(
                f"OtherPlay: group {group.name!r} has {found[0]} features and {found[1]} actions, "
                f"and its labels are for {expected[0]} and {expected[1]}."
            )

    def _carried_specs(self, group: GroupSpec) -> dict[str, Unbounded]:
        shape = group.n_agents, self.labels[group.name].n
        return {self.leaf: Unbounded(shape, dtype=torch.int64)}

    def _start_episodes(self, group: TensorDictBase, spec: GroupSpec) -> None:
        shape = (*self.parent.batch_size, spec.n_agents)
        with use_random_state(self.parent):
            group.set(self.leaf, self.labels[spec.name].draw(shape, self.parent.device))

    def _transform_output(self, group: TensorDictBase, spec: GroupSpec) -> None:
        labels, order = self.labels[spec.name], group.get(self.leaf)
        [key] = inner_keys(spec)
        group.set(key, _take_entries(group.get(key), labels.features_of(order)))
        if spec.action_mask_key is not None:
            legal = group.get("action_mask")
            group.set("action_mask", _take_entries(legal, labels.actions_of(order)))

    def _inv_call(self, tensordict: TensorDictBase) -> TensorDictBase:
        for name, spec in self.groups.items():
            group = self._dense_group(tensordict, name)
            labels, action, order = self.labels[name], group.get("action"), group.get(self.leaf)
            if spec.one_hot:
                environment_action = _take_entries(action, labels.actions_of(order.argsort(-1)))
            else:
                environment_action = _take_entries(
                    labels.actions_of(order), action.unsqueeze(-1)
                ).squeeze(-1)
            group.set("action", environment_action)
        return tensordict


def _take_entries(x: Tensor, index: Tensor) -> Tensor:
    """Takes entries of the last dimension ``[E, N, ..., F]`` by an index ``[E, N, F]``."""
    middle = x.shape[2:-1]
    index = index.view(*index.shape[:2], *(1 for _ in middle), index.shape[-1])
    return x.gather(-1, index.expand(*x.shape[:-1], index.shape[-1]))


def symmetries_of(env: EnvBase) -> dict[str, Labels]:
    """Returns the symmetries of an environment by group; empty if it has none.

    Args:
        env (EnvBase): any environment.
    """
    base = _base_env(env)
    return dict(base.symmetries()) if hasattr(base, "symmetries") else {}


def _base_env(env: EnvBase) -> Any:
    return env.base_env if isinstance(env, TransformedEnv) else env


def with_other_play(env: EnvBase) -> EnvBase:
    """Adds :class:`OtherPlay` with the symmetries of an environment.

    Args:
        env (EnvBase): environment with a method ``symmetries()``, which returns :class:`Labels` by
            group.

    Raises:
        ConfigError: the environment has no symmetries, or they do not fit its groups.
    """
    labels = symmetries_of(env)
    if not labels:
        raise ConfigError(
            f"{type(_base_env(env)).__name__} has no symmetries for Other-Play; use "
            f"env.other_play=false, or an environment with symmetries() ({WITH_SYMMETRIES})."
        )
    transform = OtherPlay(labels)
    transformed = TransformedEnv(env, transform, auto_unwrap=True)
    _ = transform.groups  # checks them
    return transformed
