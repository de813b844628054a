"""Converts JAX arrays to torch tensors and back; on the CPU nothing is copied.

Torch receives arrays by DLPack and may write to them in place, so JAX must not use them again.
Therefore :class:`~torchrl_marl.envs.jaxmarl.step.JaxStep` returns copies. JAX reads actions from
torch's memory, in 32 bits. The actions must not be overwritten before JAX has read them. A call of
:func:`to_torch` with a result of the step waits until JAX is done. On a GPU, DLPack makes each
library wait for the other's stream; this is untested.
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

_NARROW_DTYPES = {torch.int64: torch.int32, torch.float64: torch.float32}
_SIGNED_DTYPES = {torch.uint32: torch.int32, torch.uint16: torch.int16}


def device_of(device: torch.device) -> Any:
    """Returns the JAX device that matches a torch device; always the CPU if JAX has no GPU."""
    if device.type != "cpu":
        try:
            return jax.devices("gpu")[device.index or 0]
        except RuntimeError:
            pass
    return jax.devices("cpu")[0]


def to_jax(tensor: Tensor, device: Any) -> Any:
    """Converts a tensor to a JAX array for jitted calls; the two may share memory."""
    tensor = tensor.detach().to(_NARROW_DTYPES.get(tensor.dtype, tensor.dtype)).contiguous()
    if device.platform == "cpu":
        return tensor.cpu().numpy()
    return jnp.from_dlpack(tensor)


def to_torch(nested: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """Converts nested dicts of arrays to tensors in the same memory; waits until JAX is done."""
    return {
        key: to_torch(x, device) if isinstance(x, dict) else torch.from_dlpack(x).to(device)
        for key, x in nested.items()
    }


def read_tree(tree: Any) -> dict[str, Tensor]:
    """Copies a tree of arrays to a dict, path -> tensor; unsigned integers become signed."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    tensors = {jax.tree_util.keystr(path): torch.tensor(np.array(x)) for path, x in leaves}
    return {name: x.view(_SIGNED_DTYPES.get(x.dtype, x.dtype)) for name, x in tensors.items()}


def write_tree(like: Any, saved: Mapping[str, Tensor], device: Any) -> Any:
    """Rebuilds a tree of arrays from the tensors that :func:`read_tree` returned.

    Args:
        like: tree with the same structure, shapes and dtypes.
        saved (mapping): path -> tensor.
        device (jax.Device): device of the arrays.

    Raises:
        SimulatorStateError: if paths, shapes or dtypes differ.
    """
    leaves, structure = jax.tree_util.tree_flatten_with_path(like)
    own = {jax.tree_util.keystr(path): x for path, x in leaves}
    found = {key: tuple(x.shape) for key, x in saved.items()}
    expected = {key: tuple(x.shape) for key, x in own.items()}
    if found != expected:
        key = next(key for key in {**expected, **found} if found.get(key) != expected.get(key))
        raise SimulatorStateError(
            f"the snapshot's {key} of shape {found.get(key)} does not fit {expected.get(key)}; "
            "restore it into an environment that was built with the same arguments."
        )
    arrays = []
    for key, x in own.items():
        value = saved[key].cpu().numpy()
        arrays.append(jax.device_put(value.view(x.dtype).copy(), device))
    return jax.tree_util.tree_unflatten(structure, arrays)
