"""Policies for lazily stacked groups: each module runs on the members it is for, in one call.

TorchRL's ``TensorDictSequential(partial_tolerant=True)`` takes a lazy stack apart at the root
only, member by member, and where it finds none that fits it silently does nothing.

Shapes: B any batch dims, N agents of a group, n agents of a route.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Any, TypeAlias

from tensordict import NestedKey, TensorDict, TensorDictBase
from tensordict.nn import (
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModuleBase,
    TensorDictSequential,
    dispatch,
    skip_existing,
)
from torch import Tensor, nn
from torch.distributions import Distribution

from torchrl_marl.modules.routing_data import DataGroup
from torchrl_marl.modules.routing_distribution import DistributionRoute, RoutedDistribution
from torchrl_marl.modules.routing_group import Path, Roster, SpecGroup, as_path, locate, make_step
from torchrl_marl.specs import GroupSpec, TeamSpec
from torchrl_marl.stacking import is_lazy

__all__ = ["RoutedSequential"]

Agents: TypeAlias = int | str | Sequence[int | str]
Routes: TypeAlias = list[tuple[tuple[int, ...], Distribution, NestedKey]]
PROBABILISTIC = (ProbabilisticTensorDictModule, ProbabilisticTensorDictSequential)


class RoutedSequential(TensorDictSequential):
    """Modules one after the other, each on those agents of a group that it is for.

    Where a group is stacked lazily, a module runs in one call on the dense stack of the members
    that have its ``in_keys``, and writes into these only; what an earlier module gave a member
    counts. Where members have a key in different widths, a module is for those whose width its
    first layer takes. Where that does not say it, a route does: ``(module, agents)``. A module
    with a route runs on a dense group's slice, too; without any route, a dense group is run as
    by :class:`~tensordict.nn.TensorDictSequential`.

    Args:
        modules (TensorDictModuleBase, or tuple of one and its agents): in order; or one list of
            them, or one dict by name. Agents are indices, or, where ``group`` gives specs, names
            or patterns such as ``"rover_*"``.

    Keyword Args:
        group (NestedKey, GroupSpec or TeamSpec, optional): where the agents are; by default what
            all of a module's nested keys share. Specs are checked at once, and give names.
        partial_tolerant (bool): allow members that no module runs on, and modules that run on
            no member.
        selected_out_keys, inplace: as in :class:`~tensordict.nn.TensorDictSequential`.

    Shapes:
        - an entry of a lazily stacked group: ``[*B, *own]`` a member
        - what a module reads and writes: ``[*B, n, *own]``

    Keys:
        - reads, writes: those of the modules, ``(group, leaf)``. Where agents differ in what
          they are given, their group is stacked lazily afterwards.

    Raises:
        ValueError: a member without a module or without an action, a module without a member,
            two modules that write one entry, an agent on a route without the key that is read,
            or widths that fit no module: at once where specs are given, else in the first call.

    Examples:
        >>> import torch
        >>> from tensordict import lazy_stack
        >>> from tensordict.nn import TensorDictModule
        >>> keys = {"in_keys": [("agents", "observation")], "out_keys": [("agents", "action")]}
        >>> drone = TensorDictModule(nn.Linear(18, 4), **keys)
        >>> rover = TensorDictModule(nn.Linear(9, 2), **keys)
        >>> policy = RoutedSequential((drone, [0, 1]), (rover, [2]))
        >>> seen = [TensorDict({"observation": torch.ones(5, o)}, [5]) for o in (18, 18, 9)]
        >>> td = policy(TensorDict({"agents": lazy_stack(seen, 1)}, [5]))
        >>> [tuple(action.shape) for action in td.get(("agents", "action"), as_list=True)]
        [(5, 4), (5, 4), (5, 2)]
    """

    def __init__(
        self,
        *modules: Any,
        group: NestedKey | GroupSpec | TeamSpec | None = None,
        partial_tolerant: bool = False,
        selected_out_keys: list[NestedKey] | None = None,
        inplace: bool | str | None = None,
    ) -> None:
        names, entries = None, modules
        if len(modules) == 1 and isinstance(modules[0], dict):
            names, entries = list(modules[0]), tuple(modules[0].values())
        elif len(modules) == 1 and isinstance(modules[0], list):
            entries = tuple(modules[0])
        pairs = [entry if isinstance(entry, tuple) else (entry, None) for entry in entries]
        steps = [step for step, _ in pairs]
        super().__init__(
            *(steps if names is None else [collections.OrderedDict(zip(names, steps))]),
            partial_tolerant=partial_tolerant,
            selected_out_keys=selected_out_keys,
            inplace=inplace,
        )
        self._group = group
        self._specs: dict[Path, GroupSpec] = {}
        if isinstance(group, TeamSpec):
            self._specs = {(name,): spec for name, spec in group.groups.items()}
        elif isinstance(group, GroupSpec):
            self._specs = {(group.name,): group}
        self._survey()
        self._agents = [self._indices(i, agents) for i, (_, agents) in enumerate(pairs)]
        if not partial_tolerant:
            self._check_specs()

    # ------------------------------------------------------------------------- construction

    def _survey(self) -> None:
        """Where each module's group is, and the width of its first layer."""
        steps = list(self._module_iter())
        self._paths = [self._path_of(module) for module in steps]
        self._widths = [_first_width(module) for module in steps]

    def _path_of(self, module: TensorDictModuleBase) -> Path:
        keys = [as_path(key) for key in (*module.in_keys, *module.out_keys)]
        for path in self._fixed():
            if any(key[: len(path)] == path for key in keys):
                return path
        if self._group is not None:
            return ()
        nested = [key[:-1] for key in keys if len(key) > 1]
        shared = nested[0] if nested else ()
        for other in nested:
            while shared != other[: len(shared)]:
                shared = shared[:-1]
        return shared

    def _fixed(self) -> list[Path]:
        """The groups that were named."""
        if self._group is None or self._specs:
            return list(self._specs)
        return [as_path(self._group)]  # type: ignore[arg-type]

    def _indices(self, i: int, agents: Agents | None) -> tuple[int, ...] | None:
        if agents is None:
            return None
        spec = self._specs.get(self._paths[i])
        found: list[int] = []
        for agent in [agents] if isinstance(agents, (int, str)) else agents:
            found += self._named(i, agent, spec) if isinstance(agent, str) else [int(agent)]
        last = None if spec is None else spec.n_agents - 1
        beyond = [agent for agent in found if agent < 0 or (last is not None and agent > last)]
        if not found or beyond or len(set(found)) < len(found):
            raise ValueError(
                f"module {self._name(i)} has the route {found}, expected different agents from 0 "
                f"to {'N - 1' if last is None else last}."
            )
        return tuple(found)

    def _named(self, i: int, agent: str, spec: GroupSpec | None) -> list[int]:
        if spec is None:
            raise ValueError(
                f"module {self._name(i)} has a route to {agent!r}, but only specs know names; give "
                "group=GroupSpec or TeamSpec, or indices."
            )
        found = [k for k, name in enumerate(spec.agent_names) if fnmatchcase(name, agent)]
        if not found:
            raise ValueError(
                f"module {self._name(i)} has a route to {agent!r}, expected agents of group "
                f"{spec.name!r}: {', '.join(spec.agent_names)}."
            )
        return found

    def _check_specs(self) -> None:
        """Plays a step with shapes alone, as far as they are known."""
        for path, spec in self._specs.items():
            roster = SpecGroup(path, spec)
            own = [i for i, other in enumerate(self._paths) if other == path]
            for i in own:
                module = self._step(i)
                agents = None
                if not isinstance(module, RoutedSequential):
                    agents = self._choose(i, module, roster)
                if agents is None:
                    return
                roster.note(self._name(i), module, agents)
            if own:
                roster.check_complete(self._action_leaves(roster))

    def _step(self, i: int) -> TensorDictModuleBase:
        return list(self._module_iter())[i]

    def _name(self, i: int) -> str:
        return repr(list(self.module)[i]) if isinstance(self.module, nn.ModuleDict) else str(i)

    def _choose(
        self, i: int, module: TensorDictModuleBase, roster: SpecGroup | DataGroup
    ) -> tuple[int, ...] | None:
        def width() -> int | None:
            return self._widths[i] or _first_width(module)

        name, tolerant = self._name(i), bool(self.partial_tolerant)
        return roster.choose(name, module, self._agents[i], width, tolerant)

    def _action_leaves(self, roster: SpecGroup | DataGroup) -> list[NestedKey]:
        spec = self._specs.get(roster.path)
        written = [key for module in self._module_iter() for key in module.out_keys]
        if spec is None:
            written = [key for key in written if as_path(key)[-1] == "action"]
        else:
            written = [key for key in written if key == spec.action_key]
        return roster.leaves(dict.fromkeys(written))

    # ------------------------------------------------------------------------------ a call

    @dispatch(auto_batch_size=False)
    def forward(
        self,
        tensordict: TensorDictBase,
        tensordict_out: TensorDictBase | None = None,
        **kwargs: Any,
    ) -> TensorDictBase:
        """Runs the modules."""
        if kwargs or not self._has_routes(tensordict):
            return super().forward(tensordict, tensordict_out, **kwargs)
        if skip_existing() and all(key in tensordict.keys(True) for key in self.out_keys):
            return tensordict
        here = tensordict_out is None and self.inplace in (None, True)
        if here and not self._select_before_return:
            return self._execute(tensordict)
        result = self._execute(tensordict.copy()).select(*self.out_keys, strict=False)
        if tensordict_out is None:
            if here:
                tensordict_out = tensordict
            else:
                tensordict_out = tensordict.empty() if self.inplace == "empty" else TensorDict()
        return tensordict_out.update(result)

    def _has_routes(self, root: TensorDictBase) -> bool:
        if any(agents is not None for agents in self._agents):
            return True
        found = [locate(root, path, self._group is not None) for path in dict.fromkeys(self._paths)]
        return any(group is not None and is_lazy(group[1]) for group in found)

    def _execute(self, root: TensorDictBase, routes: Routes | None = None) -> TensorDictBase:
        """Runs the modules; with ``routes``, up to the last distribution, which it keeps there."""
        groups: dict[Path, DataGroup] = {}
        steps = list(self._module_iter())
        if routes is not None:
            steps = steps[: 1 + max(i for i, m in enumerate(steps) if _is_probabilistic(m))]
        for i, module in enumerate(steps):
            group = self._find_group(i, root, groups)
            routed = group is not None and (group.lazy or self._agents[i] is not None)
            if routes is None or not _is_probabilistic(module):
                needed = True
            else:
                needed = self._keep_distribution(i, module, root, group, routes)
            if not needed:
                continue
            if group is not None and routed and not isinstance(module, RoutedSequential):
                self._play(i, module, root, group)
                continue
            for other in groups.values():
                other.flush(root)
            root = self._run_module(module, root)
            for other in groups.values():
                other.refresh(root)
            if group is not None:
                group.note(self._name(i), module, group.everyone)
        for group in groups.values():
            if routes is None and not self.partial_tolerant:
                group.check_complete(self._action_leaves(group))
        for group in groups.values():
            group.flush(root)
        return root

    def _find_group(
        self, i: int, root: TensorDictBase, groups: dict[Path, DataGroup]
    ) -> DataGroup | None:
        path = self._paths[i]
        if path in groups:
            return groups[path]
        found = locate(root, path, self._group is not None)
        if found is None:
            if self._agents[i] is not None:
                raise ValueError(
                    f"module {self._name(i)} has a route, but there is no group for it: found "
                    f"{list(root.keys())}, expected {path or 'keys under a group'}."
                )
            return None
        path, data = found
        if path not in groups:
            groups[path] = DataGroup(root, path, data, self._specs.get(path))
        return groups[path]

    def _play(
        self, i: int, module: TensorDictModuleBase, root: TensorDictBase, group: DataGroup
    ) -> None:
        """Runs a module on the agents that it is for."""
        agents = self._choose(i, module, group)
        if not agents:
            return
        view = group.view(root, module, agents)
        try:
            out = module(view)
        except Exception as error:
            error.add_note(f"In module {self._name(i)}, for {group.describe(agents)}.")
            raise
        group.write(root, self._name(i), module, agents, out)

    # --------------------------------------------------------------------- probabilistic parts

    def get_dist(self, tensordict: TensorDictBase) -> Distribution:
        """The agents' distributions; nothing is written.

        Raises:
            ValueError: no probabilistic module, or those of more than one group.
        """
        acting = {self._paths[i] for i, m in enumerate(self._module_iter()) if _is_probabilistic(m)}
        if len(acting) != 1:
            raise ValueError(
                f"this policy has probabilistic modules in the groups {sorted(acting)}, expected "
                "those of one group; take one with select_subsequence."
            )
        routes: Routes = []
        root = self._execute(tensordict.copy(), routes)
        found = locate(root, next(iter(acting)), self._group is not None)
        if found is None:
            return routes[-1][1]
        return RoutedDistribution(DataGroup(root, *found, self._specs.get(found[0])), routes)

    def log_prob(self, tensordict: TensorDictBase, *, dist: Distribution | None = None) -> Tensor:
        """The log-probabilities of the actions that the agents have, ``[*B, N]``."""
        dist = self.get_dist(tensordict) if dist is None else dist
        return dist.log_prob(tensordict)

    def _keep_distribution(
        self,
        i: int,
        module: TensorDictModuleBase,
        root: TensorDictBase,
        group: DataGroup | None,
        routes: Routes,
    ) -> bool:
        """Keeps the distribution of a module's agents; whether its sample is needed, too."""
        if group is None:
            routes.append(((), module.get_dist(root), module.out_keys[-1]))
            return True
        agents = self._choose(i, module, group)
        if not agents:
            return False
        leaves = group.leaves(module.dist_sample_keys)
        dist = module.get_dist(group.view(root, module, agents))
        routes[:] = [route for route in routes if not set(route[0]) & set(agents)]
        routes.append((agents, dist, leaves[0]))
        later = (key for other in list(self._module_iter())[i + 1 :] for key in other.in_keys)
        if not any(key in module.out_keys for key in later):
            return False
        return any(group.shapes(leaf)[agent] is None for leaf in leaves for agent in agents)

    @property
    def log_prob_keys(self) -> list[NestedKey]:
        """Where the modules write log-probabilities."""
        return self._keys_of("log_prob_keys")

    @property
    def dist_sample_keys(self) -> list[NestedKey]:
        """Where the modules write samples."""
        return self._keys_of("dist_sample_keys")

    @property
    def dist_params_keys(self) -> list[NestedKey]:
        """Where the modules write the parameters of their distributions."""
        return self._keys_of("dist_params_keys")

    def _keys_of(self, kind: str) -> list[NestedKey]:
        keys = (key for module in self._module_iter() for key in getattr(module, kind, ()))
        return list(dict.fromkeys(keys))

    # ------------------------------------------------------------------------------- a part

    def select_subsequence(
        self,
        in_keys: Iterable[NestedKey] | None = None,
        out_keys: Iterable[NestedKey] | None = None,
    ) -> RoutedSequential:
        """The modules that lead from these ``in_keys`` to these ``out_keys``, with their routes.

        A part may leave members out.

        Raises:
            ValueError: no module is left.
        """
        known = [as_path(key) for key in (self.in_keys if in_keys is None else in_keys)]
        wanted = [as_path(key) for key in (self.out_keys if out_keys is None else out_keys)]
        forward, kept = [], []
        for i, module in enumerate(self._module_iter()):
            if all(as_path(key) in known for key in module.in_keys):
                forward.append((i, module))
                known += [as_path(key) for key in module.out_keys]
        for i, module in reversed(forward):
            if any(as_path(key) in wanted for key in module.out_keys):
                kept.append(i)
                wanted += [as_path(key) for key in module.in_keys]
        if not kept:
            raise ValueError(f"no module leads from {in_keys} to {out_keys}.")
        return self._part(sorted(kept))

    def __getitem__(self, index: int | slice | str) -> Any:
        if isinstance(index, slice):
            return self._part(range(len(self.module))[index])
        return self.module[index]

    def __setitem__(self, index: int | str, module: TensorDictModuleBase) -> None:
        self.module[index] = module  # type: ignore[index]
        self._survey()

    def __delitem__(self, index: int) -> None:
        del self.module[index]
        del self._agents[index]
        self._survey()

    def _part(self, indices: Iterable[int]) -> RoutedSequential:
        entries = [(self._step(i), self._agents[i]) for i in indices]
        modules: Any = entries
        if isinstance(self.module, nn.ModuleDict):
            modules = [dict(zip([list(self.module)[i] for i in indices], entries))]
        return type(self)(*modules, group=self._group, partial_tolerant=True, inplace=self.inplace)


def _is_probabilistic(module: nn.Module) -> bool:
    return isinstance(module, PROBABILISTIC)


def _first_width(module: nn.Module) -> int | None:
    """How many features the first layer takes; None where it does not say."""
    for layer in module.modules():
        if next(layer.parameters(recurse=False), None) is not None:
            if isinstance(layer, nn.LayerNorm):
                return layer.normalized_shape[-1]
            return getattr(layer, "in_features", None) or getattr(layer, "input_size", None)
    return None
