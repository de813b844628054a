"""Storage of a module stack: stacked parameters of members with the same structure.

Shapes: K distinct members with the same structure.
"""

from __future__ import annotations

import copy
from collections.abc import Hashable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils import _pytree as pytree

from torchrl_marl.modules.stacks.matmul import GatedCell, Pads, Perceptron

__all__ = ["Bucket", "shared_parameters", "signature"]

_ATTRIBUTES_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
_HOOKS = tuple(sorted(name for name in _ATTRIBUTES_OF_EVERY_MODULE if name.endswith("_hooks")))
_RNN_CACHES = frozenset(
    {"_flat_weights", "_flat_weight_refs", "_flat_weights_names", "_all_weights"}
)

Slot = tuple[nn.Module, str]


def named_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yields parameters and buffers: tied ones under each name, a repeated module's once.

    If one ``functional_call`` got the tensors of a repeated module under both names, it would
    damage the module.
    """
    for path, part in module.named_modules():
        for name, tensor in (*part._parameters.items(), *part._buffers.items()):
            if tensor is not None:
                yield f"{path}.{name}" if path else name, tensor


def shared_parameters(members: Sequence[nn.Module]) -> frozenset[int]:
    """Returns the ``id`` of each parameter that several members share, as in a shared trunk."""
    seen: set[int] = set()
    shared: set[int] = set()
    for member in members:
        own = {id(parameter) for parameter in member.parameters()}
        shared |= own & seen
        seen |= own
    return frozenset(shared)


def has_hooks(module: nn.Module) -> bool:
    """Returns whether a module has hooks."""
    return any(getattr(m, name) for m in module.modules() for name in _HOOKS)


def signature(module: nn.Module, shared: frozenset[int], pad: bool = False) -> Hashable:
    """Returns a value that is equal for modules that one batched call can run.

    Args:
        module (nn.Module): the member.
        shared (frozenset): from :func:`shared_parameters`.
        pad (bool): whether perceptrons that differ only in widths have equal signatures.

    Raises:
        TypeError: a lazy module, or one with an unregistered tensor.
    """
    names: dict[int, str] = {}
    ties = []
    for name, tensor in named_tensors(module):
        if nn.parameter.is_lazy(tensor):
            raise TypeError(f"{name} of {type(module).__name__} is lazy: run it once before.")
        ties.append((name, names.setdefault(id(tensor), name)))
    common = tuple((n, id(p)) for n, p in module.named_parameters() if id(p) in shared)
    plan = Perceptron.plan(module)
    tied = len(names) < len(ties)
    if pad and plan is not None and not common and not tied and not has_hooks(module):
        kinds = tuple((n, p.dtype, p.requires_grad) for n, p in named_tensors(module))
        return ("any width", plan.signature(), kinds)
    tensors = tuple((n, p.shape, p.dtype, p.requires_grad) for n, p in named_tensors(module))
    code = tuple(
        (name, _module_settings(m)) for name, m in module.named_modules(remove_duplicate=False)
    )
    return (code, tensors, tuple(ties), common)


def _module_settings(module: nn.Module) -> tuple[Any, ...]:
    found: list[Any] = [type(module), module.training]
    known = {id(tensor) for tensor in (*module.parameters(), *module.buffers())}
    for name, value in vars(module).items():
        if name in _ATTRIBUTES_OF_EVERY_MODULE or (
            name in _RNN_CACHES and isinstance(module, nn.RNNBase)
        ):
            continue
        if isinstance(value, Iterator):  # torchrl's MLP keeps exhausted iterators
            continue
        if any(isinstance(x, Tensor) and id(x) not in known for x in pytree.tree_leaves(value)):
            raise TypeError(
                f"{type(module).__name__} keeps a tensor in {name!r}, by which members could "
                "differ unseen: register it as a buffer or a parameter."
            )
        found.append((name, repr(value)))
    return (*found, *(tuple(map(id, getattr(module, name).values())) for name in _HOOKS))


class Bucket(nn.Module):
    """K members with the same structure; each parameter is stacked, ``[K, ...]``, under its name.

    The parameters are in bare containers, and the code that runs is a hidden template with empty
    tensors, because TensorDict's parameter swaps and ``functional_call`` damage each other if both
    use the same module. A parameter that is one object in all members is stored unstacked, in the
    first bucket that uses it.

    Args:
        members (sequence of nn.Module): members with the same signature; their tensors are copied.
        shared (frozenset): from :func:`shared_parameters`.
        slots (dict): ``id`` of a shared parameter -> where it is stored; new parameters are added.
    """

    def __init__(
        self, members: Sequence[nn.Module], shared: frozenset[int], slots: dict[int, Slot]
    ) -> None:
        super().__init__()
        self.n_members = len(members)
        self.module = nn.Module()
        self.executor = "vmap"
        self._slots: dict[str, Slot] = {}
        self.stacked: dict[str, bool] = {}
        """Name -> whether it is stacked."""
        self._shapes = [{n: t.shape for n, t in named_tensors(m)} for m in members]
        self.padded = any(shapes != self._shapes[0] for shapes in self._shapes)
        tensors = [dict(named_tensors(member)) for member in members]
        own: dict[int, str] = {}
        for name, first in tensors[0].items():
            tied = own.setdefault(id(first), name)
            if tied != name:
                self._slots[name], self.stacked[name] = self._slots[tied], self.stacked[tied]
            elif id(first) in shared:
                if id(first) not in slots:
                    slots[id(first)] = self._register(name, first, members[0])
                self._slots[name], self.stacked[name] = slots[id(first)], False
            else:
                rows = _stack_rows([t[name] for t in tensors])
                slot = self._register(name, first, members[0], rows)
                self._slots[name], self.stacked[name] = slot, True
        # A tuple in __dict__: hidden from parameters(), state_dict and TensorDict.from_module.
        count = self.n_members if self.padded else 1
        self._templates = tuple(_empty_copy(member) for member in members[:count])
        self._settings = [[dict(vars(m)) for m in t.modules()] for t in self._templates]
        self.plan: Perceptron | GatedCell | None = None
        if not has_hooks(members[0]):
            cell = GatedCell() if type(self.template) is nn.GRUCell else None
            self.plan = Perceptron.plan(self.template) or cell
        self._pads_by_device: dict[torch.device, Pads] = {}
        self.buffer_names = tuple(
            name for name, (box, leaf) in self._slots.items() if leaf in box._buffers
        )

    def _register(
        self, name: str, first: Tensor, member: nn.Module, value: Tensor | None = None
    ) -> Slot:
        """Registers a copy of a tensor under its dotted name, in nested containers."""
        value = first.detach().clone() if value is None else value
        box, owner = self.module, member
        *path, leaf = name.split(".")
        for part in path:
            owner = owner.get_submodule(part)
            if part not in box._modules:
                setattr(box, part, nn.Module())
            box = box.get_submodule(part)
        if isinstance(first, nn.Parameter):
            box.register_parameter(leaf, nn.Parameter(value, requires_grad=first.requires_grad))
        else:
            persistent = leaf not in owner._non_persistent_buffers_set
            box.register_buffer(leaf, value, persistent=persistent)
        return box, leaf

    @property
    def template(self) -> nn.Module:
        """The module that runs with the members' parameters."""
        return self._templates[0]

    def template_of(self, k: int) -> nn.Module:
        """Returns the template with the widths of a member."""
        return self._templates[k if self.padded else 0]

    def __getstate__(self) -> dict[str, Any]:
        self._forget_results()
        return vars(self)

    def _forget_results(self) -> None:
        """Removes tensors that a forward kept as attributes: those of vmap cannot be copied."""
        for template, settings in zip(self._templates, self._settings):
            for module, before in zip(template.modules(), settings):
                for name in [n for n, value in vars(module).items() if _is_result(n, value)]:
                    delattr(module, name)
                    if name in before:
                        setattr(module, name, before[name])

    def train(self, mode: bool = True) -> Bucket:
        """Sets training mode, also of the template."""
        for template in self._templates:
            template.train(mode)
        return super().train(mode)

    def _apply(self, fn, recurse: bool = True):  # type: ignore[no-untyped-def]
        for template in self._templates:
            template._apply(fn)
        self._pads_by_device.clear()
        return super()._apply(fn, recurse)

    def read(self, members: Sequence[int] | None = None) -> dict[str, Tensor]:
        """Returns name -> stacked tensor of the given members, or of all members.

        Tensors are read by ``getattr``, because they are plain attributes while TensorDict swaps
        other tensors in.
        """
        values = {name: getattr(box, leaf) for name, (box, leaf) in self._slots.items()}
        if members is None:
            return values
        in_a_row = _in_a_row(members)

        def rows(value: Tensor) -> Tensor:
            if in_a_row:
                return value.narrow(0, members[0], len(members))
            return torch.stack([value[k] for k in members])

        return {name: rows(x) if self.stacked[name] else x for name, x in values.items()}

    @torch.no_grad()
    def write_back(self, members: Sequence[int], values: dict[str, Tensor]) -> None:
        """Stores the buffers that a forward wrote; those of members in a row are views already."""
        if not self.buffer_names or _in_a_row(members):
            return
        stored = self.read()
        for name in self.buffer_names:
            for k, row in zip(members, values[name]):
                stored[name][k].copy_(row)

    def pads(self, device: torch.device, members: Sequence[int]) -> Pads:
        """Returns the padding masks of the given members of a padded perceptron."""
        pads, every = self._pads_by_device.get(device), len(members) == self.n_members
        if pads is None:
            assert isinstance(self.plan, Perceptron)
            pads = self.plan.pads(self._shapes, device)
            if not torch.compiler.is_compiling():  # a graph's tensors must not be cached
                self._pads_by_device[device] = pads
        return pads if every else tuple(None if p is None else p[list(members)] for p in pads)

    def width(self, k: int, output: bool = False) -> int | None:
        """Returns the number of input or output features of a member, if known."""
        if isinstance(self.plan, Perceptron):
            return self.plan.width(self._shapes[k], output)
        return None if output else input_width(self.template)

    def stored_width(self, output: bool = False) -> int | None:
        """Returns the number of features of the widest member, if known."""
        widths = [self.width(k, output) for k in range(self.n_members if self.padded else 1)]
        return max((width for width in widths if width is not None), default=None)

    def row(self, k: int) -> dict[str, Tensor]:
        """Returns name -> tensor of one member without padding; views that carry gradients."""
        shapes = self._shapes[k if self.padded else 0]
        row = {}
        for name, value in self.read().items():
            value = value[k] if self.stacked[name] else value
            row[name] = _without_padding(value, shapes[name]) if self.padded else value
        return row

    def call(self, k: int, *inputs: object) -> object:
        """Runs one member."""
        return call_with(self.template_of(k), self.row(k), inputs)

    def copy_of(self, k: int, memo: dict[int, nn.Parameter] | None = None) -> nn.Module:
        """Returns an ordinary module with copies of a member's tensors.

        Args:
            k (int): index of the member.
            memo (dict, optional): copies of the shared parameters; modules copied with the same
                memo share them. New copies are added.
        """
        self._forget_results()
        module, row = copy.deepcopy(self.template_of(k)), self.row(k)
        memo = {} if memo is None else memo
        own: dict[Slot, Tensor] = {}
        for name, value in row.items():
            path, _, leaf = name.rpartition(".")
            box, key = slot = self._slots[name]
            if slot not in own:
                own[slot] = value.detach().clone()
                if key not in box._buffers:
                    stored = getattr(box, key)
                    new = nn.Parameter(own[slot], requires_grad=stored.requires_grad)
                    own[slot] = new if self.stacked[name] else memo.setdefault(id(stored), new)
            setattr(module.get_submodule(path), leaf, own[slot])
        return module

    @torch.no_grad()
    def load(self, k: int, module: nn.Module) -> None:
        """Copies a module's tensors into a member's.

        Raises:
            ValueError: names or shapes that differ from the member's.
        """
        new, row = dict(named_tensors(module)), self.row(k)
        found = {name: tuple(tensor.shape) for name, tensor in new.items()}
        expected = {name: tuple(tensor.shape) for name, tensor in row.items()}
        for name in sorted(found.keys() | expected.keys()):
            if found.get(name) != expected.get(name):
                raise ValueError(
                    f"{name!r} of the module to load has shape {found.get(name, 'nowhere')}, "
                    f"expected {expected.get(name, 'nowhere')}, as the member has."
                )
        for name, tensor in row.items():
            tensor.copy_(new[name])


def _is_result(name: str, value: Any) -> bool:
    if name in _ATTRIBUTES_OF_EVERY_MODULE or name in _RNN_CACHES:
        return False
    return any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(value))


def _in_a_row(members: Sequence[int]) -> bool:
    return tuple(members) == tuple(range(members[0], members[0] + len(members)))


def call_with(template: nn.Module, row: dict[str, Tensor], inputs: Sequence[Any]) -> Any:
    """Runs a module with other tensors, in which it also leaves what it assigns to buffers."""
    now = dict(row)
    output = functional_call(template, now, tuple(inputs), tie_weights=False)
    keep_assigned(row, {name: x for name, x in now.items() if x is not row[name]})
    return output


@torch.no_grad()
def keep_assigned(values: dict[str, Tensor], assigned: dict[str, Tensor]) -> None:
    """Copies buffers that a forward assigned (``self.mean = new``) into the stored ones.

    Raises:
        ValueError: a buffer of another shape.
    """
    for name, new in assigned.items():
        if new.shape != values[name].shape:
            raise ValueError(
                f"a forward assigns a tensor of shape {list(new.shape)} to the buffer {name!r}, "
                f"expected {list(values[name].shape)}, as before; a stack cannot change shapes."
            )
        values[name].copy_(new)


def _stack_rows(rows: Sequence[Tensor]) -> Tensor:
    """Stacks rows into one tensor ``[K, ...]``, padded with zeros."""
    if all(row.shape == rows[0].shape for row in rows):
        return torch.stack([row.detach() for row in rows])
    stacked = rows[0].new_zeros(len(rows), *map(max, *(row.shape for row in rows)))
    for k, row in enumerate(rows):
        _without_padding(stacked[k], row.shape).copy_(row.detach())
    return stacked


def _without_padding(value: Tensor, shape: torch.Size) -> Tensor:
    """Returns a tensor without its padding."""
    for dim, size in enumerate(shape):
        value = value.narrow(dim, 0, size)
    return value


def _empty_copy(member: nn.Module) -> nn.Module:
    """Returns a copy with empty tensors; they are not on ``meta``, since ``.to`` must move them."""
    template = copy.deepcopy(member)
    for name, tensor in list(named_tensors(template)):
        path, _, leaf = name.rpartition(".")
        empty = tensor.detach().new_empty(0)
        if isinstance(tensor, nn.Parameter):
            empty = nn.Parameter(empty, requires_grad=False)
        setattr(template.get_submodule(path), leaf, empty)
    return template


def input_width(module: nn.Module) -> int | None:
    """Returns the number of input features of a torch module; None if unknown."""
    if isinstance(module, nn.Sequential):
        return next((w for w in map(input_width, module) if w is not None), None)
    if isinstance(module, nn.LayerNorm):
        return module.normalized_shape[-1]
    width = getattr(module, "in_features", getattr(module, "input_size", None))
    return width if isinstance(width, int) else None
