"""Policies for lazily stacked groups, in which each module runs in one call on its agents.

TorchRL's ``TensorDictSequential(partial_tolerant=True)`` takes a lazy stack apart only at the
root, member by member. If no member fits a module, it silently does nothing.

Shapes: B any batch dims, N agents of a group, n agents of a route.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias, cast

import torch
from tensordict import NestedKey, TensorDict, TensorDictBase
from tensordict.nn import (
    CompositeDistribution,
    TensorDictModuleBase,
    TensorDictSequential,
    dispatch,
    skip_existing,
)
from torch import Tensor, nn
from torch.distributions import Distribution

from torchrl_marl.contrib.routed.group import (
    AgentTable,
    DataGroup,
    Path,
    SpecGroup,
    Step,
    as_path,
    locate,
    path_of,
    read_agents,
)
from torchrl_marl.specs import GroupSpec, TeamSpec
from torchrl_marl.specs.groups import is_lazy

__all__ = ["DistributionRoute", "RoutedDistribution", "RoutedSequential"]

DistributionRoute: TypeAlias = tuple[tuple[int, ...], Distribution, NestedKey]
Parts: TypeAlias = Sequence[tuple[tuple[int, ...], Tensor]]


class RoutedDistribution(Distribution):
    """Distributions of agents, which may be of different types and widths.

    Args:
        group (DataGroup): group of the agents.
        routes (sequence of (agents, Distribution, leaf)): agents that share a distribution, the
            distribution, and the leaf that it samples.

    Shapes:
        - :meth:`log_prob`, :meth:`entropy`: ``[*B, N]``
        - :meth:`sample`, :meth:`rsample`, :attr:`deterministic_sample`: ``[*B, N, *own]``, or a
          list of N tensors ``[*B, *own]`` if the agents differ

    Raises:
        ValueError: an agent without a distribution.
    """

    arg_constraints: dict = {}

    def __init__(self, group: DataGroup, routes: Sequence[DistributionRoute]) -> None:
        found = {agent for agents, _, _ in routes for agent in agents}
        lacking = [agent for agent in group.everyone if agent not in found]
        if lacking:
            raise ValueError(
                f"{group.describe(lacking)} have no distribution, expected a probabilistic module "
                "for every agent."
            )
        self.routes = tuple(routes)
        self.n, self.path, self.label = group.n, group.path, str(group)
        self.ndim = max(group.data.ndim, group.dim + 1)
        self.dim = group.dim - self.ndim  # of a log-probability, from the right
        batch = list(group.data.batch_size)
        batch[group.dim :] = [group.n, *batch[group.dim + 1 :]]
        super().__init__(torch.Size(batch), validate_args=False)

    @property
    def has_rsample(self) -> bool:  # type: ignore[override]
        """True if all agents' samples carry gradients."""
        return all(dist.has_rsample for _, dist, _ in self.routes)

    def log_prob(self, value: TensorDictBase | Tensor | Sequence[Tensor]) -> Tensor:
        """Returns the agents' log-probabilities.

        Args:
            value (TensorDictBase, Tensor or sequence of Tensor): the root TensorDict with the
                actions in its group; or the actions as one tensor, or as a list with a tensor per
                agent.

        Raises:
            ValueError: a distribution with more than one log-probability per agent.
            KeyError: a missing group.
        """
        if isinstance(value, TensorDictBase):
            found = locate(value, self.path, exact=True)
            if found is None:
                raise KeyError(f"{self.label} is missing, found {list(value.keys())}.")
            group = DataGroup(value, *found, None)
        parts = []
        for agents, dist, leaf in self.routes:
            if isinstance(value, TensorDictBase):
                own = group.take(agents, leaf)
            else:
                dim = self.dim - len(dist.event_shape)
                rows = value.unbind(dim) if isinstance(value, Tensor) else value
                own = torch.stack([rows[agent] for agent in agents], dim)
            parts.append((agents, dist.log_prob(own)))
        return self._per_agent(parts)

    def entropy(self) -> Tensor:
        """Returns the agents' entropies, estimated from one sample if there is no closed form."""
        parts = []
        for agents, dist, _ in self.routes:
            try:
                entropy = dist.entropy()
            except NotImplementedError:
                sample = dist.rsample() if dist.has_rsample else dist.sample()
                entropy = -dist.log_prob(sample)
            parts.append((agents, entropy))
        return self._per_agent(parts)

    def sample(self, sample_shape: Sequence[int] = ()) -> Any:
        """Samples each agent's action."""
        return self._actions(lambda dist: dist.sample(torch.Size(sample_shape)))

    def rsample(self, sample_shape: Sequence[int] = ()) -> Any:
        """Samples each agent's action, with gradients."""
        return self._actions(lambda dist: dist.rsample(torch.Size(sample_shape)))

    @property
    def deterministic_sample(self) -> Any:
        """Returns each agent's deterministic action."""
        return self._actions(_deterministic)

    def _per_agent(self, parts: Parts) -> Tensor:
        for agents, dist, _ in self.routes:
            if isinstance(dist, CompositeDistribution) or len(dist.batch_shape) != self.ndim:
                raise ValueError(
                    f"{self.label}: agents {list(agents)} have a {type(dist).__name__} of batch "
                    f"shape {tuple(dist.batch_shape)}, expected one number per agent; wrap it in "
                    "Independent."
                )
        return cast(Tensor, self._join(parts, [self.dim] * len(parts)))

    def _actions(self, draw: Callable[[Any], Tensor]) -> Tensor | list[Tensor]:
        dims = [self.dim - len(dist.event_shape) for _, dist, _ in self.routes]
        return self._join([(agents, draw(dist)) for agents, dist, _ in self.routes], dims)

    def _join(self, parts: Parts, dims: Sequence[int]) -> Tensor | list[Tensor]:
        order = [agent for agents, _ in parts for agent in agents]
        shapes = {value.shape[dim:][1:] for (_, value), dim in zip(parts, dims)}
        agree = len(shapes) == 1 and len({value.ndim for _, value in parts}) == 1
        if agree and order == sorted(order):
            return torch.cat([value for _, value in parts], dims[0])
        column: list[Any] = [None] * self.n
        for (agents, value), dim in zip(parts, dims):
            for agent, own in zip(agents, value.unbind(dim)):
                column[agent] = own
        return torch.stack(column, dims[0]) if agree else column


def _deterministic(dist: Any) -> Tensor:
    return dist.deterministic_sample if hasattr(dist, "deterministic_sample") else dist.mode


class RoutedSequential(TensorDictSequential):
    """Sequence of modules, each of which runs on its agents of a group.

    In a lazily stacked group, a module runs in one call on the dense stack of the members that have
    its ``in_keys``, and writes into these members only. Entries that earlier modules wrote count as
    ``in_keys``. If members have a key in different widths, a module runs on the members whose width
    fits its first layer. If that is ambiguous, a route decides: ``(module, agents)``. A module with
    a route also runs on a slice of a dense group. Without routes, a dense group is run as by
    :class:`~tensordict.nn.TensorDictSequential`.

    :meth:`log_prob` serves custom losses. TorchRL's losses first read the actions of a lazily
    stacked group agent by agent and fail, so give them a dense one (``envs.PadAgents``).

    Args:
        modules (TensorDictModuleBase, or tuple of one and its agents): modules in order, or one
            list of modules, or one dict of modules by name. Agents are indices, or, if ``group``
            has specs, names or patterns such as ``"rover_*"``.

    Keyword Args:
        group (NestedKey, GroupSpec or TeamSpec, optional): path or specs of the agents; default:
            the prefix that a module's nested keys share. If specs are given, calls are checked at
            construction, and agents have names.
        partial_tolerant (bool): whether members without a module, and modules without a member, are
            allowed.
        selected_out_keys, inplace: as in :class:`~tensordict.nn.TensorDictSequential`.

    Shapes:
        - an entry of a lazily stacked group: ``[*B, *own]`` per member
        - inputs and outputs of a module: ``[*B, n, *own]``

    Keys:
        - reads, writes: those of the modules, ``(group, leaf)``. If agents get different entries,
          their group is lazily stacked afterwards.

    Raises:
        ValueError: a member without module or action, a module without member, two modules that
            write one entry, an agent on a route that lacks a key that its module reads, or widths
            that fit no module. The error is raised at construction if there are specs, otherwise in
            the first call.

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
        if isinstance(group, (GroupSpec, TeamSpec)):
            specs = group.groups if isinstance(group, TeamSpec) else {group.name: group}
            self._specs = {(name,): spec for name, spec in specs.items()}
            self._fixed: list[Path] | None = list(self._specs)
        else:
            self._fixed = None if group is None else [as_path(group)]
        self._read_routes([agents for _, agents in pairs])
        if not partial_tolerant:
            self._check_specs()

    # ------------------------------------------------------------------------- construction

    def _read_routes(self, routes: Sequence[Any]) -> None:
        """Reads the modules' keys, widths and agents."""
        self._steps: list[Step] = []
        for i, (module, route) in enumerate(zip(self._module_iter(), routes)):
            name, path = self._name(i), path_of(module, self._fixed)
            agents = read_agents(name, route, self._specs.get(path))
            self._steps.append(Step(name, module, path, agents))

    def _check_specs(self) -> None:
        """Simulates a call by shapes alone, if they are known."""
        for path, spec in self._specs.items():
            table = SpecGroup(path, spec)
            own = [step for step in self._steps if step.path == path]
            for step in own:
                nested = isinstance(step.module, RoutedSequential)
                agents = None if nested else table.choose(step, False)
                if agents is None:
                    break
                table.record(step, agents)
            else:
                if own:
                    table.check_complete(self._actions_of(table))

    def _name(self, i: int) -> str:
        return repr(list(self.module)[i]) if isinstance(self.module, nn.ModuleDict) else str(i)

    def _actions_of(self, table: AgentTable) -> list[NestedKey]:
        """Returns the keys that must be written for all agents if they are written for one."""
        if (spec := self._specs.get(table.path)) is None:
            return [leaf for leaf in table.writers if as_path(leaf)[-1] == "action"]
        return [leaf for leaf in table.writers if table.key(leaf) == spec.action_key]

    # ------------------------------------------------------------------------------- call

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
        if here:
            return tensordict.update(result)
        if tensordict_out is None:
            tensordict_out = tensordict.empty() if self.inplace == "empty" else TensorDict()
        return tensordict_out.update(result)

    def _has_routes(self, root: TensorDictBase) -> bool:
        if any(step.agents is not None for step in self._steps):
            return True
        paths = dict.fromkeys(step.path for step in self._steps)
        found = [locate(root, path, self._fixed is not None) for path in paths]
        return any(group is not None and is_lazy(group[1]) for group in found)

    def _execute(
        self, root: TensorDictBase, dists: list[DistributionRoute] | None = None
    ) -> TensorDictBase:
        """Runs the modules; with ``dists``, up to the last distribution, which is stored in it."""
        groups: dict[Path, DataGroup] = {}
        steps = list(self._steps)
        if dists is not None:
            while not steps[-1].probabilistic:
                steps.pop()
        for i, step in enumerate(steps):
            group = self._find_group(step, root, groups)
            if group is not None and group.path != step.path:
                step = Step(step.name, step.module, group.path, step.agents)
            if dists is not None and step.probabilistic:
                later = {key for other in steps[i + 1 :] for key in other.module.in_keys}
                needed = any(key in later for key in step.module.out_keys)
                self._keep_distribution(step, root, group, dists, needed)
                continue
            routed = group is not None and (group.lazy or step.agents is not None)
            if group is None or not routed or isinstance(step.module, RoutedSequential):
                root = self._run_unrouted(step.module, root, groups)
                if group is not None:
                    group.record(step, group.everyone, strict=False)
            else:
                self._play(step, root, group)
        for group in groups.values():
            if dists is None and not self.partial_tolerant:
                group.check_complete(self._actions_of(group))
        for group in groups.values():
            group.flush(root)
        return root

    def _find_group(
        self, step: Step, root: TensorDictBase, groups: dict[Path, DataGroup]
    ) -> DataGroup | None:
        if step.path in groups:
            return groups[step.path]
        found = locate(root, step.path, self._fixed is not None)
        if found is None:
            if step.agents is not None:
                raise ValueError(
                    f"module {step.name} has a route, but no group: found {list(root.keys())}, "
                    f"expected {step.path or 'agents under a key that its own keys share'}."
                )
            return None
        path, data = found
        if path not in groups:
            groups[path] = DataGroup(root, path, data, self._specs.get(path))
        return groups[path]

    def _run_unrouted(
        self, module: TensorDictModuleBase, root: TensorDictBase, groups: dict[Path, DataGroup]
    ) -> TensorDictBase:
        """Runs a module on the whole TensorDict, as TorchRL does."""
        for group in groups.values():
            group.flush(root)
        root = self._run_module(module, root)
        for group in groups.values():
            group.refresh(root)
        return root

    def _play(self, step: Step, root: TensorDictBase, group: DataGroup) -> None:
        """Runs a module on its agents."""
        agents = group.choose(step, bool(self.partial_tolerant))
        if not agents:
            return
        try:
            out = step.module(group.view(root, step, agents))
        except Exception as error:
            error.add_note(f"In module {step.name}, for {group.describe(agents)}.")
            raise
        group.write(root, step, agents, out)

    # --------------------------------------------------------------------- probabilistic parts

    def get_dist(self, tensordict: TensorDictBase) -> Distribution:
        """Returns the agents' distributions without writing anything.

        Raises:
            ValueError: no probabilistic module, or modules of more than one group.
        """
        acting = {step.path for step in self._steps if step.probabilistic}
        if len(acting) != 1:
            raise ValueError(
                f"this policy has probabilistic modules in {sorted(acting) or 'no group'}, "
                "expected one group; select its modules with select_subsequence."
            )
        dists: list[DistributionRoute] = []
        root = self._execute(tensordict.copy(), dists)
        found = locate(root, next(iter(acting)), self._fixed is not None)
        if found is None:
            return dists[-1][1]
        return RoutedDistribution(DataGroup(root, *found, self._specs.get(found[0])), dists)

    def log_prob(self, tensordict: TensorDictBase, *, dist: Distribution | None = None) -> Tensor:
        """Returns the log-probabilities of the agents' actions, ``[*B, N]``."""
        dist = self.get_dist(tensordict) if dist is None else dist
        return dist.log_prob(tensordict)

    def _keep_distribution(
        self,
        step: Step,
        root: TensorDictBase,
        group: DataGroup | None,
        dists: list[DistributionRoute],
        needed: bool,
    ) -> None:
        """Stores the distribution of a module's agents; runs the module if needed."""
        module: Any = step.module
        if group is None:
            dists.append(((), module.get_dist(root), module.out_keys[0]))
            if needed:
                module(root)
            return
        agents = group.choose(step, bool(self.partial_tolerant))
        if not agents:
            return
        view = group.view(root, step, agents)
        drawn = [leaf for leaf in step.writes if group.key(leaf) in module.dist_sample_keys]
        # The last distribution counts; entries sampled before are read if the agents have them.
        dists[:] = [other for other in dists if not set(other[0]) & set(agents)]
        dists.append((agents, module.get_dist(view), drawn[0]))
        if needed:
            known = [leaf for leaf in drawn if group.has(agents, leaf)]
            given = {group.key(leaf): group.take(agents, leaf) for leaf in known}
            out = module(view)
            for key, value in given.items():
                out.set(key, value)
            group.write(root, step, agents, out)

    @property
    def log_prob_keys(self) -> list[NestedKey]:
        """Keys of the log-probabilities that the modules write."""
        return self._keys_of("log_prob_keys")

    @property
    def dist_sample_keys(self) -> list[NestedKey]:
        """Keys of the samples that the modules write."""
        return self._keys_of("dist_sample_keys")

    def _keys_of(self, kind: str) -> list[NestedKey]:
        keys = (key for module in self._module_iter() for key in getattr(module, kind, ()))
        return list(dict.fromkeys(keys))

    # -------------------------------------------------------------------------------- part

    def select_subsequence(
        self,
        in_keys: Iterable[NestedKey] | None = None,
        out_keys: Iterable[NestedKey] | None = None,
    ) -> RoutedSequential:
        """Returns the modules between these ``in_keys`` and ``out_keys``, with their routes.

        In the result, members may have no module.

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
        self._read_routes([step.agents for step in self._steps])

    def __delitem__(self, index: int) -> None:
        del self.module[index]
        del self._steps[index]
        self._read_routes([step.agents for step in self._steps])

    def _part(self, indices: Iterable[int]) -> RoutedSequential:
        indices = list(indices)
        modules: Any = [(self._steps[i].module, self._steps[i].agents) for i in indices]
        if isinstance(self.module, nn.ModuleDict):
            modules = [dict(zip([list(self.module)[i] for i in indices], modules))]
        return type(self)(*modules, group=self._group, partial_tolerant=True, inplace=self.inplace)
