"""Kinds of agents, and the reader of an environment's outputs and actions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import LazyStackedTensorDict, NestedKey, TensorDict, TensorDictBase
from torch import Tensor
from torchrl.data import Composite, TensorSpec
from torchrl.data.tensor_specs import Stacked, StackedComposite

from torchrl_marl.errors import SpecError, nearest
from torchrl_marl.specs import AgentSpec, GroupSpec
from torchrl_marl.specs.groups import is_lazy
from torchrl_marl.specs.stacking import Padding, unpad_group

__all__ = ["GroupKinds", "OutputReader", "batched", "concatenate_kinds", "map_leaves"]


@dataclass(frozen=True)
class GroupKinds:
    """Kinds of agents of one group, in the order of registration.

    Args:
        names (tuple of str): names of the kinds.
        sizes (tuple of int): number M of agents of each kind.
        paddings (mapping): padding of each leaf whose shape differs between the kinds. A group
            with such leaves is stacked lazily.
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    paddings: Mapping[NestedKey, Padding]

    @classmethod
    def of(cls, kinds: Sequence[AgentSpec], group: GroupSpec) -> GroupKinds:
        """Builds the kinds of a declared group."""
        names = tuple(kind.name for kind in kinds)
        return cls(names, tuple(kind.n_agents for kind in kinds), group.paddings)

    @property
    def lazy(self) -> bool:
        """True if the group's data are stacked lazily."""
        return bool(self.paddings)

    @property
    def slices(self) -> dict[str, slice]:
        """Slice of the kind's agents in the group, by kind."""
        ends = [sum(self.sizes[: i + 1]) for i in range(len(self.sizes))]
        places = (slice(end - n, end) for end, n in zip(ends, self.sizes))
        return dict(zip(self.names, places))

    def ragged(self, leaf: str) -> bool:
        """Returns True if the shape of a leaf, or of one nested in it, differs between kinds."""
        return any(leaf == (key if isinstance(key, str) else key[0]) for key in self.paddings)

    def parts(self, leaves: Mapping[str, Any], leaf: str) -> dict[str, Any]:
        """Returns a leaf as a dict, with one tensor ``[E, M, ...]`` for each kind.

        A leaf that is stored for the whole group is returned as one tensor ``[E, N, ...]`` under
        the key ``""``.
        """
        if leaf in leaves:
            return {"": leaves[leaf]}
        return {name: leaves[name][leaf] for name in self.names}

    def zero_masked_actions(self, actions: Mapping[str, Any], mask: Tensor) -> dict[str, Any]:
        """Returns the actions, with zeros for agents that a mask ``[E, N]`` marks as False."""
        zeroed: dict[str, Any] = {}
        for kind, action in self.parts(actions, "action").items():
            acts = mask[:, self.slices[kind]] if kind else mask
            acts = acts.view(*acts.shape, *[1] * (action.ndim - acts.ndim))
            action = torch.where(acts, action, torch.zeros_like(action))
            zeroed.update({kind: {"action": action}} if kind else {"action": action})
        return zeroed

    def split(self, group: TensorDictBase) -> dict[str, TensorDictBase]:
        """Splits the data of a lazy, padded or dense group into dense data for each kind.

        Shapes:
            - group: ``[*B, N]``; returns: ``[*B, M]`` per kind
        """
        last = group.ndim - 1
        if self.lazy and not is_lazy(group):
            group = unpad_group(group, self.paddings)
        if is_lazy(group):
            members = list(group.unbind(last))
            return {
                name: _stack_members(members[place], last) for name, place in self.slices.items()
            }
        return {name: group[..., place] for name, place in self.slices.items()}

    def stack_lazily(
        self, leaves: Mapping[str, Any], batch_size: torch.Size, device: torch.device | None
    ) -> LazyStackedTensorDict:
        """Stacks the data of a group's agents lazily; the stacked data are views of the leaves.

        Args:
            leaves (mapping): leaves of all agents ``[E, N, ...]``, and, under the name of a kind,
                the leaves ``[E, M, ...]`` of this kind.
            batch_size (torch.Size): batch size ``[E]``.
            device (torch.device, optional): device of the data.
        """
        shared = {key: x for key, x in leaves.items() if key not in self.names}
        members = []
        for name, place in self.slices.items():
            rows = {**map_leaves(shared, lambda x, at=place: x[:, at]), **leaves.get(name, {})}
            for i in range(place.stop - place.start):
                row = map_leaves(rows, lambda x, at=i: x[:, at])
                members.append(TensorDict(row, batch_size, device))
        return LazyStackedTensorDict(*members, stack_dim=len(batch_size))

    def with_leaves(self, group: TensorDictBase, leaves: Mapping[str, Any]) -> TensorDictBase:
        """Returns a copy of a group's data with new leaves, which are for all agents or by kind."""
        if not self.lazy:
            return group.clone(recurse=False).update(dict(leaves))
        new_rows = self.stack_lazily(leaves, group.batch_size[:-1], group.device).unbind(1)
        rows = [old.clone(recurse=False).update(new) for old, new in zip(group.unbind(1), new_rows)]
        return LazyStackedTensorDict(*rows, stack_dim=1)


def _stack_members(members: list[TensorDictBase], dim: int) -> TensorDictBase:
    stack = LazyStackedTensorDict.maybe_dense_stack(members, dim)
    return stack.to_tensordict() if is_lazy(stack) else stack


def map_leaves(nested: Mapping[str, Any], function: Any) -> dict[str, Any]:
    """Applies a function to every tensor in nested dicts; returns dicts of the results."""
    return {
        key: map_leaves(x, function) if isinstance(x, Mapping) else function(x)
        for key, x in nested.items()
    }


def concatenate_kinds(values: Sequence[Any]) -> Any:
    """Concatenates tensors ``[E, M, ...]`` of all kinds, or dicts of such, to ``[E, N, ...]``."""
    if isinstance(values[0], Tensor):
        return torch.cat(list(values), 1)
    return {key: concatenate_kinds([value[key] for value in values]) for key in values[0]}


def batched(spec: TensorSpec, batch_size: torch.Size) -> TensorSpec:
    """Adds leading batch dims to a spec; unlike TorchRL's ``expand``, it keeps the spec's mask."""
    if isinstance(spec, (Stacked, StackedComposite)):
        members = [batched(member, batch_size) for member in spec.unbind(spec.dim)]
        return torch.stack(members, spec.dim + len(batch_size))
    shape = (*batch_size, *spec.shape)
    if isinstance(spec, Composite):
        leaves = {key: batched(leaf, batch_size) for key, leaf in spec.items()}
        return Composite(leaves, shape=shape, device=spec.device)
    expanded = spec.expand(shape).clone()
    if getattr(spec, "mask", None) is not None:
        expanded.update_mask(spec.mask)  # type: ignore[attr-defined]
    return expanded


_DONE_FLAGS = ("terminated", "truncated")
_OPTIONAL = ("mask", *_DONE_FLAGS)

Path = tuple[str, ...]


@dataclass(frozen=True)
class OutputReader:
    """Checks and reads the outputs of ``_reset`` and ``_step``, and the actions of a step.

    Args:
        owner (str): name of the environment in error messages.
        num_envs (int): number E of envs.
        groups (dict of str to GroupKinds): kinds of the agents, by group.
        specs (dict of str to Composite): specs ``[N]`` of each group's observation, masks, action,
            reward, flags and agents' states, without the leaves whose shape differs between kinds.
        kind_specs (dict): specs ``[M]`` of each kind, by group and kind.
        state (TensorSpec, optional): spec of the state, ``[S]``.
    """

    owner: str
    num_envs: int
    groups: dict[str, GroupKinds]
    specs: dict[str, Composite]
    kind_specs: dict[str, dict[str, Composite]]
    state: TensorSpec | None

    # ------------------------------------------------------------------- environments' outputs

    def read(self, output: Any, method: str) -> dict[str, Any]:
        """Checks the output of ``_reset`` or ``_step`` and returns it as nested dicts.

        A leaf whose shape differs between kinds is returned under each kind, such as
        ``(group, kind, "observation")``. All other leaves are returned under the group.

        Args:
            output: TensorDict or dict of the environment's output, by group.
            method (str): ``"_reset"`` or ``"_step"``. Only a step has rewards and done flags.

        Raises:
            SpecError: a key is missing or unknown, or a shape or dtype is wrong.
        """
        where = f"{self.owner}.{method}"
        is_step = method == "_step"
        required = {*self.groups, *(() if self.state is None else ("state",))}
        self._check_keys(where, (), output, required, _DONE_FLAGS if is_step else ())
        source: dict[str, Any] = {}
        if self.state is not None:
            source["state"] = self._read_leaf(where, ("state",), output, self.state)
        for key in _DONE_FLAGS if is_step else ():
            if output.get(key, None) is not None:
                self._check_tensor(where, (key,), output.get(key), (self.num_envs, 1), torch.bool)
                source[key] = output.get(key)
        for name in self.groups:
            source[name] = self._read_group(where, name, output.get(name), is_step)
        return source

    def _read_group(self, where: str, name: str, output: Any, is_step: bool) -> dict[str, Any]:
        kinds = self.groups[name]
        allowed = self._allowed_leaves(name, is_step)
        for_group, by_kind = self._split_by_kind(where, name, output)
        has_kinds = len(kinds.names) > 1
        self._check_keys(where, (name,), for_group, set(), {*allowed, *(kinds.names * has_kinds)})
        for kind, mapping in by_kind.items():
            self._check_keys(where, (name, kind), mapping, set(), allowed)
        if not by_kind and not any(kinds.ragged(leaf) for leaf in allowed):
            self._check_keys(where, (name,), for_group, allowed.difference(_OPTIONAL), allowed)
        source: dict[str, Any] = {kind: {} for kind in kinds.names if kinds.lazy}
        for leaf in sorted(allowed):
            if leaf in for_group.keys():
                if kinds.ragged(leaf) or any(leaf in x.keys() for x in by_kind.values()):
                    self._refuse_shared(where, name, leaf, for_group.get(leaf))
                source[leaf] = self._read_leaf(
                    where, (name, leaf), for_group, self.specs[name][leaf]
                )
                continue
            values = self._read_leaf_by_kind(where, name, leaf, by_kind)
            if kinds.ragged(leaf):
                for kind, value in values.items():
                    source[kind][leaf] = value
            elif values:
                source[leaf] = concatenate_kinds(list(values.values()))
        return source

    def _allowed_leaves(self, name: str, is_step: bool) -> set[str]:
        """Returns the names of all leaves that a group's output may have."""
        kind = next(iter(self.kind_specs[name].values()))
        step_only = {"reward", *_DONE_FLAGS}
        return set(kind.keys()) - {"action", "done", *(() if is_step else step_only)}

    def _split_by_kind(self, where: str, name: str, output: Any) -> tuple[Any, dict[str, Any]]:
        """Splits a group's output into leaves for the whole group and leaves of single kinds."""
        kinds = self.groups[name]
        if not isinstance(output, (TensorDictBase, Mapping)):
            self._check_keys(where, (name,), output, set())
        if is_lazy(output) and len(kinds.names) > 1:
            expected = (self.num_envs, sum(kinds.sizes))
            if output.batch_size != expected or output.stack_dim != 1:
                raise SpecError(
                    f"{where}: {name!r} is stacked in dim {output.stack_dim} to "
                    f"{list(output.batch_size)}, expected dim 1 and {list(expected)}."
                )
            return {}, dict(kinds.split(output))
        allowed = self._allowed_leaves(name, True)
        by_kind = {k: output.get(k) for k in kinds.names if k in output.keys() and k not in allowed}
        return {key: output.get(key) for key in output.keys() if key not in by_kind}, by_kind

    def _read_leaf_by_kind(
        self, where: str, name: str, leaf: str, by_kind: dict[str, Any]
    ) -> dict[str, Any]:
        """Returns a leaf of the output by kind; an empty dict if it is optional and missing."""
        present = [kind for kind, mapping in by_kind.items() if leaf in mapping.keys()]
        if leaf in _OPTIONAL and not present:
            return {}
        values = {}
        for kind, specs in self.kind_specs[name].items():
            if kind in present:
                values[kind] = self._read_leaf(
                    where, (name, kind, leaf), by_kind[kind], specs[leaf]
                )
            elif leaf in _OPTIONAL:
                fill = torch.ones if leaf == "mask" else torch.zeros
                shape, like = (self.num_envs, *specs[leaf].shape), by_kind[present[0]].get(leaf)
                values[kind] = fill(shape, dtype=torch.bool, device=like.device)
            else:
                raise SpecError(
                    f"{where} returned no {_key_text((name, kind, leaf))}, expected shape "
                    f"{self._expected_shape(specs[leaf])}; it has "
                    f"{sorted(by_kind.get(kind, {}).keys())} there."
                )
        return values

    def _refuse_shared(self, where: str, name: str, leaf: str, value: Any) -> None:
        found = f"shape {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        expected = ", ".join(
            f"{_key_text((name, kind, leaf))} of {self._expected_shape(specs[leaf])}"
            for kind, specs in self.kind_specs[name].items()
        )
        raise SpecError(
            f"{where}: {_key_text((name, leaf))} has {found} for all agents, expected it by kind: "
            f"{expected}; or a lazily stacked group."
        )

    # -------------------------------------------------------------------------------- actions

    def read_actions(self, tensordict: TensorDictBase) -> dict[str, dict[str, Any]]:
        """Checks the actions and returns them by group; in lazily stacked groups also by kind.

        Raises:
            SpecError: actions are missing, or have a wrong shape or type.
        """
        where, actions = f"{self.owner}.step", {}
        for name, kinds in self.groups.items():
            group = tensordict.get(name, None)
            if not kinds.lazy:
                value = None if group is None else group.get("action", None)
                self._check_action(where, (name, "action"), value, self.specs[name]["action"])
                actions[name] = {"action": value}
                continue
            if not is_lazy(group):
                value = None if group is None else group.get("action", None)
                found = "nothing" if value is None else f"one tensor of shape {list(value.shape)}"
                raise SpecError(
                    f"{where}: {_key_text((name, 'action'))} is {found}, expected a lazily stacked "
                    f"group of agents with actions of {self._action_shapes(name)}; wrap the env in "
                    "TransformedEnv(env, PadAgents()) to pass padded actions."
                )
            actions[name] = self._read_lazy_actions(where, name, group)
        return actions

    def _read_lazy_actions(self, where: str, name: str, group: TensorDictBase) -> dict[str, Any]:
        members, actions = group.unbind(1), {}
        for kind, place in self.groups[name].slices.items():
            spec = self.kind_specs[name][kind]["action"]
            rows = [member.get("action", None) for member in members[place]]
            for i, row in enumerate(rows):
                self._check_action(where, (name, f"{kind}_{i}", "action"), row, spec[0])
            actions[kind] = {"action": torch.stack(rows, 1)}
        return actions

    def _action_shapes(self, name: str) -> str:
        specs = self.kind_specs[name].items()
        return ", ".join(
            f"{self._expected_shape(own['action'][0])} ({kind})" for kind, own in specs
        )

    def _check_action(self, where: str, key: Path, value: Any, spec: TensorSpec) -> None:
        self._check_tensor(where, key, value, (self.num_envs, *spec.shape), None)
        # Policies return discrete actions as one-hot vectors or indices, in different dtypes.
        is_index = spec.domain == "discrete" and spec.dtype != torch.bool
        if spec.dtype.is_floating_point > value.is_floating_point() or (
            is_index and not spec.dtype.is_floating_point and value.is_floating_point()
        ):
            raise SpecError(f"{where}: {_key_text(key)} is {value.dtype}, expected {spec.dtype}.")

    # --------------------------------------------------------------------------------- checks

    def _expected_shape(self, spec: TensorSpec) -> list[int]:
        return [self.num_envs, *spec.shape]

    def _read_leaf(self, where: str, key: Path, output: Any, spec: TensorSpec) -> Any:
        value = output.get(key[-1], None)
        if isinstance(spec, Composite):
            self._check_keys(where, key, value, set(spec.keys()))
            return {k: self._read_leaf(where, (*key, k), value, spec[k]) for k in spec.keys()}
        self._check_tensor(where, key, value, (self.num_envs, *spec.shape), spec.dtype)
        return value

    def _check_keys(
        self, where: str, path: Path, output: Any, required: set[str], optional: Iterable[str] = ()
    ) -> None:
        if not isinstance(output, (TensorDictBase, Mapping)):
            what = f"{_key_text(path)} as a" if path else "a"
            raise SpecError(
                f"{where} returned {what} {type(output).__name__}, expected a TensorDict."
            )
        found = set(output.keys())
        for key in sorted(required - found):
            raise SpecError(
                f"{where} returned no {_key_text((*path, key))}; it has {sorted(found)} there."
            )
        for key in sorted(found.difference(required, optional)):
            known = sorted({*required, *optional})
            raise SpecError(
                f"{where} returned {_key_text((*path, key))}, which was not declared; "
                f"{nearest(key, known)}expected one of {known}."
            )

    def _check_tensor(
        self, where: str, key: Path, value: Any, shape: tuple[int, ...], dtype: torch.dtype | None
    ) -> None:
        if not isinstance(value, Tensor):
            found = "nothing" if value is None else type(value).__name__
            raise SpecError(f"{where}: {_key_text(key)} is {found}, expected shape {list(shape)}.")
        if value.shape != shape:
            raise SpecError(
                f"{where}: {_key_text(key)} has shape {list(value.shape)}, expected {list(shape)}."
            )
        if dtype is not None and value.dtype != dtype:
            raise SpecError(f"{where}: {_key_text(key)} is {value.dtype}, expected {dtype}.")


def _key_text(key: Path) -> str:
    return repr(key[0]) if len(key) == 1 else repr(key)
