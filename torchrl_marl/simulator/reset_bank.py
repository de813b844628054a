"""Fresh start states for any subset of envs in one batched operation."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from torchrl_marl.errors import SimulatorStateError
from torchrl_marl.random_state import RandomState
from torchrl_marl.simulator.copy_settings import copy_settings
from torchrl_marl.simulator.env_slots import EnvSlots
from torchrl_marl.simulator.settings import Settings, refuse_dependent_starts, written_by
from torchrl_marl.simulator.state import Path, SimulatorState

__all__ = ["ResetBank", "random_draws"]


class ResetBank:
    """Bank of a simulator's fresh start states, handed out env by env without a loop over envs.

    A twin of the simulator is reset as a whole, once for many episodes; an env that ends takes
    its own row by ``torch.where``. What such a reset writes is what is taken, so that constants
    of a running env, and its structure, stay. Rows are used once: when an env asks again, the
    twin is reset again.

    Args:
        state (SimulatorState): of this kind of simulator.
        simulator: the running one.
        twin: another one of the same size, after a reset and one step.
        reset (callable): ``reset(twin)`` draws new starts for all envs.
        num_envs (int): number E of envs.
        device (torch.device): of the simulator.

    Keyword Args:
        step (callable): ``step(twin)`` makes a step, to see what is state and what a setting.

    Raises:
        SimulatorStateError: starts that depend on what the envs had before.
    """

    def __init__(
        self,
        state: SimulatorState,
        simulator: Any,
        twin: Any,
        reset: Callable[[Any], None],
        num_envs: int,
        device: torch.device | str,
        *,
        step: Callable[[Any], Any],
    ) -> None:
        self._reset, self._step = reset, step
        self._twin = twin
        self._settings: Settings | None = None
        self._moving: set[Path] = set()
        self._checked = False
        self._running = EnvSlots(simulator, state)
        self._starts = EnvSlots(twin, state)
        self._paths: frozenset[Path] = frozenset()
        self.used = torch.ones(num_envs, dtype=torch.bool, device=device)

    def draw(self, envs: Tensor) -> None:
        """Starts new episodes in the envs where ``envs`` ``[E]`` is True."""
        if self._is_outdated():
            self.empty()
        if bool((self.used & envs).any()):
            self._refill()
        elif self._settings is None:  # saved rows
            self._look_at_twin()
            self._note_settings()
        self.used |= envs
        starts = {path: self._starts.get(path) for path in self._paths}
        self._running.merge(starts, envs)

    def empty(self) -> None:
        """Discards the remaining rows, as after a new seed."""
        self.used.fill_(True)

    def _is_outdated(self) -> bool:
        return self._settings is not None and self._settings.changed()

    def _refill(self) -> None:
        running, n = self._running, len(self.used)
        if not self._moving:
            self._look_at_twin()
        rows, exclude = self._starts.paths, running.exclude
        copy_settings(self._twin, running.simulator, (n, n), exclude, rows, self._moving)
        if not self._checked or self._is_outdated():
            self._refuse_dependence()
        written = written_by(self._twin, exclude, lambda: self._reset(self._twin))
        self._paths = self._paths | written.intersection(rows)
        self._note_settings()
        self.used.fill_(False)

    def _note_settings(self) -> None:
        simulator, exclude = self._running.simulator, self._running.exclude
        self._settings = Settings(simulator, exclude, self._moving | self._paths)

    def _look_at_twin(self) -> None:
        """Steps a twin, since what a step writes is no setting."""
        twin, exclude = copy.deepcopy(self._twin), self._running.exclude
        with RandomState(0, self.used.device).active():
            self._moving = written_by(twin, exclude, lambda: self._step(twin))

    def _refuse_dependence(self) -> None:
        """Refuses dependent starts: resets a copy of the twin from several states."""
        twin, random = copy.deepcopy(self._twin), RandomState(0, self.used.device)

        def reset() -> dict[str, Tensor]:
            with random.active():
                self._reset(twin)
            return {}

        exclude, step = self._running.exclude, lambda: self._step(twin)
        refuse_dependent_starts(twin, exclude, random, reset, step, SimulatorStateError)
        self._checked = True

    def state_dict(self, state: SimulatorState) -> TensorDict:
        """Returns the remaining rows as a TensorDict."""
        if self._is_outdated():
            self.empty()
        return TensorDict(
            {
                "twin": state.read(self._twin),
                "used": self.used.clone(),
                "paths": json.dumps(sorted(self._paths)),
            },
            [],
        )

    def load_state_dict(self, state: SimulatorState, saved: TensorDict) -> None:
        """Restores saved rows."""
        state.write(self._twin, saved["twin"])
        self.used.copy_(saved["used"])
        self._paths = frozenset(tuple(path) for path in json.loads(saved["paths"]))
        self._settings = None  # those present when it continues


def random_draws(call: Callable[[], Any]) -> list[torch.Size]:
    """Returns the shapes of the random numbers that a call draws from torch."""
    recorder = _DrawRecorder()
    with recorder:
        call()
    return recorder.shapes


class _DrawRecorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[torch.Size] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if torch.Tag.nondeterministic_seeded in func.tags and isinstance(result, Tensor):
            self.shapes.append(result.shape)
        return result
