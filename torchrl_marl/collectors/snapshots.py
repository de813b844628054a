"""Running episodes as dicts: the state of an environment, and the step to go on from.

Shapes: E envs.
"""

from __future__ import annotations

from typing import Any

import torch
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase
from torchrl.envs import EnvBase, TransformedEnv

from torchrl_marl.errors import SpecError
from torchrl_marl.simulator.state import SimulatorStateError
from torchrl_marl.stacking import is_lazy

__all__ = ["carry_from_dict", "carry_to_dict", "check_carry", "restore_env", "snapshot_env"]


def snapshot_env(env: EnvBase) -> dict[str, Any] | None:
    """Returns the state of an environment and its transforms, or None where it has no snapshot."""
    base = env.base_env if isinstance(env, TransformedEnv) else env
    if not hasattr(type(base), "snapshot"):
        return None
    try:
        state: dict[str, Any] = {"base": base.snapshot().to_dict()}
    except SimulatorStateError:
        return None
    if isinstance(env, TransformedEnv):
        state["transforms"] = env.transform.state_dict()
    return state


def restore_env(env: EnvBase, state: dict[str, Any]) -> None:
    """Puts back what :func:`snapshot_env` gave."""
    base = env.base_env if isinstance(env, TransformedEnv) else env
    base.restore(TensorDict(state["base"]))
    if isinstance(env, TransformedEnv):
        env.transform.load_state_dict(state["transforms"])


def carry_to_dict(carry: TensorDictBase) -> dict[str, Any]:
    """Returns a step as a dict; a lazily stacked group is a list of its agents."""
    state: dict[str, Any] = {}
    for key, value in carry.items():
        if is_lazy(value):
            state[key] = [member.to_dict() for member in value.unbind(value.ndim - 1)]
        else:
            state[key] = value.to_dict() if isinstance(value, TensorDictBase) else value
    return state


def carry_from_dict(
    state: dict[str, Any], batch_size: torch.Size, device: torch.device | None
) -> TensorDict:
    """Returns a step from a dict, the inverse of :func:`carry_to_dict`."""
    carry = TensorDict({}, batch_size, device=device)
    for key, value in state.items():
        if isinstance(value, list):
            members = [TensorDict(member, batch_size, device=device) for member in value]
            value = LazyStackedTensorDict(*members, stack_dim=len(batch_size))
        carry.set(key, value)
    return carry


def check_carry(carry: TensorDictBase, env: EnvBase) -> None:
    """Refuses a saved step of another environment, before a policy acts on it."""
    expected = [*env.full_observation_spec.items(True, True), *env.full_done_spec.items(True, True)]
    for key, spec in expected:
        group = carry.get(key[0]) if isinstance(key, tuple) else None
        if is_lazy(group):
            continue
        value = carry.get(key, None)
        if value is None or value.shape != spec.shape or value.dtype != spec.dtype:
            found = "nothing" if value is None else f"{list(value.shape)} of {value.dtype}"
            raise SpecError(
                f"the saved step has {found} as {key!r}, expected {list(spec.shape)} of "
                f"{spec.dtype}; go on with the environment that it was saved with."
            )
