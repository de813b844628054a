"""Conversion of JAX arrays to torch tensors and back, without a copy on the CPU.

Torch gets arrays by DLPack, and may write to them in place: JAX must not go on from them, which
:class:`~torchrl_marl.envs.jaxmarl.step.JaxStep` sees to. JAX reads actions where torch has them,
in 32 bits, which is all it takes; they must not be written to until it has, and :func:`to_torch` of
any result of it waits for that. On a GPU DLPack orders the two streams; this is untested.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch import Tensor

from torchrl_marl.errors import SimulatorStateError

__all__ = ["device_of", "read_tree", "to_jax", "to_torch", "write_tree"]

_NARROW = {torch.int64: torch.int32, torch.float64: torch.float32}
_SIGNED = {torch.uint32: torch.int32, torch.uint16: torch.int16}


def device_of(device: torch.device) -> Any:
    """Returns JAX's device for torch's; its CPU where this JAX has no GPU."""
    if device.type != "cpu":
        try:
            return jax.devices("gpu")[device.index or 0]
        except RuntimeError:
            pass
    return jax.devices("cpu")[0]


def to_jax(tensor: Tensor, device: Any) -> Any:
    """Returns a tensor as an argument of jitted calls on a device; both may share memory."""
    tensor = tensor.detach().to(_NARROW.get(tensor.dtype, tensor.dtype)).contiguous()
    if device.platform == "cpu":
        return tensor.cpu().numpy()
    return jnp.from_dlpack(tensor)


def to_torch(nested: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """Returns nested dicts of arrays as tensors of the same memory; waits for the results."""
    return {
        key: to_torch(x, device) if isinstance(x, dict) else torch.from_dlpack(x).to(device)
        for key, x in nested.items()
    }


def read_tree(tree: Any) -> dict[str, Tensor]:
    """Copies all arrays of a tree by their paths; unsigned numbers bit by bit as signed ones."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    tensors = {jax.tree_util.keystr(path): torch.tensor(np.array(x)) for path, x in leaves}
    return {name: x.view(_SIGNED.get(x.dtype, x.dtype)) for name, x in tensors.items()}


def write_tree(like: Any, saved: Mapping[str, Tensor], device: Any) -> Any:
    """Writes copies of the arrays from :func:`read_tree` to a tree.

    Args:
        like: the tree's structure, with shapes and dtypes.
        saved (mapping): path -> tensor.
        device (jax.Device): of the arrays.

    Raises:
        SimulatorStateError: arrays of other paths, shapes or dtypes.
    """
    leaves, structure = jax.tree_util.tree_flatten_with_path(like)
    own = {jax.tree_util.keystr(path): x for path, x in leaves}
    found = {key: tuple(x.shape) for key, x in saved.items()}
    expected = {key: tuple(x.shape) for key, x in own.items()}
    if found != expected:
        key = next(key for key in {**expected, **found} if found.get(key) != expected.get(key))
        raise SimulatorStateError(
            f"a snapshot with {key} of shape {found.get(key)} does not fit {expected.get(key)}; "
            "restore it into an environment that was built with the same arguments."
        )
    arrays = []
    for key, x in own.items():
        value = saved[key].cpu().numpy()
        arrays.append(jax.device_put(value.view(x.dtype).copy(), device))
    return jax.tree_util.tree_unflatten(structure, arrays)
