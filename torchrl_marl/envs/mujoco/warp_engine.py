"""MuJoCo Warp: the physics of all envs in kernels, in single precision.

Shapes: as in :mod:`torchrl_marl.envs.mujoco.engines`.
"""

from __future__ import annotations

from typing import Any

import mujoco
import torch
from torch import Tensor

from torchrl_marl.envs.mujoco.build import Task
from torchrl_marl.errors import MissingExtraError

try:
    import mujoco_warp
    import warp
    from mujoco_warp._src import collision_primitive
except ImportError:
    raise MissingExtraError("MuJoCo Warp", "warp") from None

__all__ = ["WarpEngine"]

_CONTACTS_PER_GEOM = 4  # largest number of contacts, as a multiple of the number of geoms
_plane_capsule = collision_primitive.plane_capsule


@warp.func
def _contacts_along_capsule(
    normal: warp.vec3,
    point: warp.vec3,
    center: warp.vec3,
    axis: warp.vec3,
    radius: float,
    half_length: float,
):
    """Returns contacts of a capsule with a plane, with friction along the capsule's axis.

    MuJoCo Warp 4.0 follows the axis only if the capsule is at most 60 degrees from lying. MuJoCo
    always does. With pyramidal friction cones, the direction changes the forces.
    """
    distances, points, frame = _plane_capsule(normal, point, center, axis, radius, half_length)
    along = axis - normal * warp.dot(normal, axis)
    length = warp.length(along)
    if length > 1.0e-6:
        x = along / length
        y = warp.cross(normal, x)
        frame = warp.mat33(
            normal[0], normal[1], normal[2], x[0], x[1], x[2], y[0], y[1], y[2]
        )  # fmt: skip
    return distances, points, frame


class WarpEngine:
    """MuJoCo Warp, in which a step of all envs is a sequence of kernels.

    On a GPU, the kernels of a step are recorded once as a CUDA graph. Envs with more contacts or
    constraints than there is memory for become NaN.

    Args:
        task (Task): the task.

    Raises:
        MissingExtraError: MuJoCo Warp is not installed.
    """

    dtype = torch.float32

    def __init__(self, task: Task) -> None:
        warp.config.quiet = True
        collision_primitive.plane_capsule = _contacts_along_capsule
        self.task = task
        self._memories: dict[tuple[int, str], tuple[Any, Any]] = {}
        self._graphs: dict[Any, Any] = {}

    def advance(
        self, physics: Tensor, torques: Tensor, scales: Tensor, substeps: int
    ) -> tuple[Tensor, Tensor]:
        """Returns the next physics, and the fields; without substeps, the fields of these physics.

        Shapes:
            - physics: ``[E, Q + 2 V]``; torques: ``[E, A]``; scales: ``[E, 0]``
            - returns: ``[E, Q + 2 V]``, ``[E, F]``
        """
        stream = warp.stream_from_torch() if physics.is_cuda else None
        with warp.ScopedDevice(str(physics.device)), warp.ScopedStream(stream):
            model, data = self._get_memory(len(physics), str(physics.device))
            state = [data.qpos, data.qvel, data.qacc_warmstart]
            sizes = [x.shape[1] for x in state]
            for x, part in zip(state, physics.split(sizes, 1)):
                warp.to_torch(x).copy_(part)
            warp.to_torch(data.ctrl).copy_(torques)
            warp.to_torch(data.overflow).zero_()
            self._run_kernels(model, data, substeps)
            after = torch.cat([warp.to_torch(x) for x in state], 1)
            fields = [self._read_field(data, field, substeps) for field in self.task.fields]
            overflowed = warp.to_torch(data.overflow).ne(0).unsqueeze(1)
            return after.masked_fill(overflowed, torch.nan), torch.cat([after[:, :0], *fields], 1)

    def _get_memory(self, num_envs: int, device: str) -> tuple[Any, Any]:
        """Returns model and data of a number of envs; only their memory is kept."""
        key = num_envs, device
        if key not in self._memories:
            self._memories[key] = self._allocate(num_envs)
        return self._memories[key]

    def _allocate(self, num_envs: int) -> tuple[Any, Any]:
        model = self.task.model
        at_rest = mujoco.MjData(model)
        mujoco.mj_forward(model, at_rest)
        contacts = _CONTACTS_PER_GEOM * model.ngeom
        # A contact has up to four constraints, and a joint two limits.
        capacity = {"nconmax": contacts, "njmax": 4 * contacts + 2 * model.njnt}
        data = mujoco_warp.put_data(model, at_rest, nworld=num_envs, **capacity)
        return mujoco_warp.put_model(model), data

    def _run_kernels(self, model: Any, data: Any, substeps: int) -> None:
        device = data.qpos.device
        if not device.is_cuda or torch.cuda.is_current_stream_capturing():
            self._launch_kernels(model, data, substeps)
            return
        key = data, substeps
        if key not in self._graphs:
            self._launch_kernels(model, data, 0)  # loads the kernels
            with warp.ScopedCapture() as capture:
                self._launch_kernels(model, data, substeps)
            self._graphs[key] = capture.graph
        warp.capture_launch(self._graphs[key])

    def _launch_kernels(self, model: Any, data: Any, substeps: int) -> None:
        for _ in range(substeps):
            mujoco_warp.step(model, data)
        if not substeps:
            mujoco_warp.forward(model, data)
        if "cfrc_ext" in self.task.fields:
            mujoco_warp.rne_postconstraint(model, data)

    def _read_field(self, data: Any, field: str, substeps: int) -> Tensor:
        """Returns a field of all envs, ``[E, *]``; forces are 0 at a reset, as in Gymnasium."""
        values = warp.to_torch(getattr(data, field)).flatten(1)
        return values.clone() if substeps or field != "cfrc_ext" else torch.zeros_like(values)
