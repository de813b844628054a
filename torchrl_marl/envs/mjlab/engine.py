"""A step of the physics of all envs as one operator, on mjlab's simulation.

Shapes: E envs, with Q positions, V velocities, A actuators and P pairs of robots. ``physics`` is
``[E, Q + 2 V]``: positions, velocities, and the accelerations with which the solver starts.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from torchrl_marl.envs.mjlab.build import build_scenery

__all__ = ["advance", "simulation_of"]


@functools.cache
def simulation_of(key: str, num_envs: int, device: str) -> Any:
    """Returns mjlab's simulation of a scene; only its memory is kept between steps.

    Args:
        key (str): the scene, as in :func:`~torchrl_marl.envs.mjlab.build.build_scenery`.
        num_envs (int): number of envs.
        device (str): device of the physics.
    """
    scenery = build_scenery(key)
    import warp
    from mjlab.sim import Simulation

    warp.config.quiet = True
    return Simulation(num_envs, scenery.simulation, model=scenery.model, device=device)


@torch.library.custom_op(
    "torchrl_marl::advance_mjlab", mutates_args=(), tags=(torch.Tag.flexible_layout,)
)
def advance(physics: Tensor, targets: Tensor, key: str) -> tuple[Tensor, Tensor]:
    """Returns the physics after a step of the environment, and the contact forces during it.

    The force of a pair of robots is the largest of the substeps, in N. An env with more contacts
    than there is memory for becomes NaN.

    Args:
        physics (Tensor): positions, velocities, and the solver's start.
        targets (Tensor): target angles of all actuators.
        key (str): the scene, as in :func:`simulation_of`.

    Shapes:
        - physics: ``[E, Q + 2 V]``; targets: ``[E, A]``
        - returns: ``[E, Q + 2 V]``, ``[E, P]``
    """
    import warp

    scenery = build_scenery(key)
    simulation = simulation_of(key, len(physics), str(physics.device))
    stream = warp.stream_from_torch() if physics.is_cuda else None
    with warp.ScopedDevice(str(physics.device)), warp.ScopedStream(stream):
        data = simulation.wp_data
        state = [warp.to_torch(x) for x in (data.qpos, data.qvel, data.qacc_warmstart)]
        for x, part in zip(state, physics.split([x.shape[1] for x in state], 1)):
            x.copy_(part)
        warp.to_torch(data.ctrl).copy_(targets)
        overflow, sensors = warp.to_torch(data.overflow), warp.to_torch(data.sensordata)
        overflow.zero_()
        columns = torch.as_tensor(scenery.forces, device=physics.device)
        force = physics.new_zeros(len(physics), len(columns))
        for _ in range(scenery.substeps):
            _make_substep(simulation)
            force = torch.maximum(force, sensors[:, columns].norm(dim=-1))
        overflowed = overflow.ne(0).unsqueeze(1)
        return torch.cat(state, 1).masked_fill(overflowed, torch.nan), force


@advance.register_fake
def _(physics: Tensor, targets: Tensor, key: str) -> tuple[Tensor, Tensor]:
    pairs = build_scenery(key).pairs
    return physics.new_empty(physics.shape), physics.new_empty(len(physics), len(pairs))


def _make_substep(simulation: Any) -> None:
    """Makes a step of the physics: on a GPU, mjlab's CUDA graph."""
    if simulation.wp_device.is_cuda and torch.cuda.is_current_stream_capturing():
        import mujoco_warp

        mujoco_warp.step(simulation.wp_model, simulation.wp_data)  # into the graph of torch
    else:
        simulation.step()
