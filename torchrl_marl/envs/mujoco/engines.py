"""Physics engines: MuJoCo on CPU threads, and MuJoCo Warp; a step of all envs is one operator.

Shapes: E envs, with Q positions, V velocities, A actuators and F numbers of the fields that are
read after a step. ``physics`` is ``[E, Q + 2 V]``: positions, velocities, and the accelerations
with which the solver starts.
"""

from __future__ import annotations

import functools
import operator
import threading
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from torchrl_marl.envs.mujoco.build import Task, build_task
from torchrl_marl.errors import MissingExtraError

__all__ = ["SCALES", "BatchEngine", "Engine", "advance", "engine_of"]

SCALES = ("mass", "friction", "damping", "strength", "gravity")
"""Parameters of a model that each env may scale."""
_SCALE_OF_FIELD = {
    "body_mass": "mass",
    "body_inertia": "mass",
    "dof_damping": "damping",
    "actuator_gear": "strength",
    "opt.gravity": "gravity",
}


class Engine(Protocol):
    """Physics engine; it keeps nothing between two steps."""

    task: Task
    dtype: torch.dtype
    """Floating-point type of the physics."""

    def advance(
        self, physics: Tensor, torques: Tensor, scales: Tensor, substeps: int
    ) -> tuple[Tensor, Tensor]:
        """Returns the next physics, and the fields that are read after a step."""
        ...


@functools.cache
def engine_of(kind: str, key: str) -> Engine:
    """Returns the engine of a task, which all its environments in this process share.

    Args:
        kind (str): ``"c"`` or ``"warp"``.
        key (str): output of :func:`~torchrl_marl.envs.mujoco.build.key_of`.
    """
    task = build_task(key)
    if kind == "c":
        return BatchEngine(task)
    from torchrl_marl.envs.mujoco.warp_engine import WarpEngine

    return WarpEngine(task)


class BatchEngine:
    """MuJoCo's own engine in double precision, on as many threads as torch uses.

    The results equal those of Gymnasium to the bit.

    Args:
        task (Task): the task.

    Raises:
        MissingExtraError: MuJoCo is older than 4.0.
    """

    dtype = torch.float64

    def __init__(self, task: Task) -> None:
        try:
            import mujoco.batch  # noqa: F401
        except ImportError:
            raise MissingExtraError("MuJoCo 4.0 or newer", "mujoco") from None
        self.task = task
        self._lock = threading.Lock()
        self._batches: dict[tuple[int, int, bool], Any] = {}
        self._applied_scales: dict[Any, np.ndarray] = {}

    def advance(
        self, physics: Tensor, torques: Tensor, scales: Tensor, substeps: int
    ) -> tuple[Tensor, Tensor]:
        """Returns the next physics, and the fields; without substeps, the fields of these physics.

        Shapes:
            - physics: ``[E, Q + 2 V]``; torques: ``[E, A]``; scales: ``[E, S]``
            - returns: ``[E, Q + 2 V]``, ``[E, F]``
        """
        model = self.task.model
        parts = physics.split([model.nq, model.nv, model.nv], 1)
        with self._lock:
            batch = self._get_batch(len(physics), scales.shape[1] > 0)
            if scales.shape[1]:
                self._apply_scales(batch, scales.double().numpy())
            batch.qpos, batch.qvel, batch.qacc_warmstart = (part.numpy() for part in parts)
            batch.ctrl = torques.numpy()
            if substeps:
                batch.step(nstep=substeps)
            else:
                batch.forward()
            after = np.concatenate([batch.qpos, batch.qvel, batch.qacc_warmstart], 1)
            none = np.empty((len(physics), 0))
            fields = [self._read_field(batch, field, substeps > 0) for field in self.task.fields]
            return torch.from_numpy(after), torch.from_numpy(np.concatenate([none, *fields], 1))

    def _get_batch(self, num_envs: int, scaled: bool) -> Any:
        """Returns the simulations of a number of envs; only their memory is kept."""
        from mujoco.batch import Batch

        size = num_envs, min(num_envs, torch.get_num_threads())
        if (*size, scaled) not in self._batches:
            # Contact forces are computed after a step, from data that must be kept until then.
            keep = "cfrc_ext" in self.task.fields
            self._batches[*size, scaled] = Batch(self.task.model, *size, persistent=keep)
        return self._batches[*size, scaled]

    def _apply_scales(self, batch: Any, scales: np.ndarray) -> None:
        """Gives each env the model's parameters times its scales."""
        applied = self._applied_scales.get(batch, np.zeros_like(scales))
        changed = (applied != scales).any(1).nonzero()[0]
        if not len(changed):
            return
        model, factors = self.task.model, dict(zip(SCALES, scales[changed].T))
        for field, scale in _SCALE_OF_FIELD.items():
            nominal = operator.attrgetter(field)(model)
            batch.expand(field)[changed] = nominal * factors[scale].reshape(
                -1, *(1,) * nominal.ndim
            )
        sliding = model.geom_friction[:, 0] * factors["friction"][:, None]
        batch.expand("geom_friction")[changed, :, 0] = sliding
        batch.set_const(changed)
        self._applied_scales[batch] = scales.copy()

    def _read_field(self, batch: Any, field: str, stepped: bool) -> np.ndarray:
        """Returns a field of all envs, ``[E, *]``."""
        if field != "cfrc_ext":
            return getattr(batch, field).reshape(batch.nsim, -1)
        return self._contact_forces(batch, stepped)

    def _contact_forces(self, batch: Any, stepped: bool) -> np.ndarray:
        """Returns the external forces on the bodies; 0 at a reset, as in Gymnasium.

        A step of the physics does not compute them, so they are computed after it.
        """
        import mujoco

        model = self.task.model
        forces = np.zeros((batch.nsim, model.nbody, 6))
        data = self._scratch_data
        for env in range(batch.nsim if stepped else 0):
            batch.get_data(env, data)
            mujoco.mj_rnePostConstraint(model, data)
            forces[env] = data.cfrc_ext
        return forces.reshape(batch.nsim, -1)

    @functools.cached_property
    def _scratch_data(self) -> Any:
        import mujoco

        return mujoco.MjData(self.task.model)


@torch.library.custom_op(
    "torchrl_marl::advance_physics", mutates_args=(), tags=(torch.Tag.flexible_layout,)
)
def advance(
    physics: Tensor, torques: Tensor, scales: Tensor, kind: str, key: str, substeps: int
) -> tuple[Tensor, Tensor]:
    """Returns the physics after some substeps, and the fields that are read after them.

    Args:
        physics (Tensor): positions, velocities, and the solver's start.
        torques (Tensor): actions of all actuators.
        scales (Tensor): factors of the model's parameters :data:`SCALES`; no columns for the model
            as it is.
        kind (str): the engine, as in :func:`engine_of`.
        key (str): the task, as in :func:`engine_of`.
        substeps (int): number of steps of the physics; 0 only computes the fields.

    Shapes:
        - physics: ``[E, Q + 2 V]``; torques: ``[E, A]``; scales: ``[E, S]`` or ``[E, 0]``
        - returns: ``[E, Q + 2 V]``, ``[E, F]``
    """
    return engine_of(kind, key).advance(physics, torques, scales, substeps)


@advance.register_fake
def _(
    physics: Tensor, torques: Tensor, scales: Tensor, kind: str, key: str, substeps: int
) -> tuple[Tensor, Tensor]:
    n_fields = build_task(key).n_fields
    return physics.new_empty(physics.shape), physics.new_empty(len(physics), n_fields)
