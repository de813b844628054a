"""Captures the steps of custom environments as graphs, which are compiled.

Shapes: E envs.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import warnings
from collections.abc import Callable, Iterator
from typing import Any
from weakref import WeakKeyDictionary

import torch
from tensordict import TensorDictBase

from torchrl_marl.envs.agents.declaration import Declaration
from torchrl_marl.envs.ranges import ValueRange
from torchrl_marl.errors import CaptureError
from torchrl_marl.runtime.random_state import RandomState
from torchrl_marl.simulator.captured import CapturedSimulator
from torchrl_marl.simulator.settings import copy_settings, shared_tables
from torchrl_marl.simulator.state import Path, SimulatorState, slots_of_envs, walk_simulator

__all__ = ["EnvGraphs"]

# Tensors with the envs as first dim, by class of the environment and by the key of _probe_key.
_known_slots: WeakKeyDictionary[type, dict[tuple, dict[Path, bool]]] = WeakKeyDictionary()


class EnvGraphs:
    """Part of :class:`~torchrl_marl.envs.MarlEnv` that captures its steps as graphs."""

    random_state: RandomState
    device: Any
    batch_size: Any
    reset: Callable[..., Any]
    rand_action: Callable[..., Any]
    _step: Callable[..., Any]
    _to_tensordict: Callable[..., Any]
    _episode: dict[str, Any]
    _not_simulator: frozenset[Any]
    _declaration: Declaration
    _checked_methods: set[str]
    _check_values: Callable[..., None]
    _captured: CapturedSimulator | None
    _leader: Any
    _is_completing: bool
    step: Callable[..., Any]
    _ranges: dict[str, ValueRange]
    _env_slots: Any
    _init_arguments: tuple[tuple, dict[str, Any]]

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        env = super().__new__(cls, *args, **kwargs)  # type: ignore[call-arg]
        env.__dict__["_init_arguments"] = (args, kwargs)
        return env

    @property
    def simulator(self) -> Any:
        """Object that holds the simulation's state, which is the environment itself."""
        return self

    def captured(self) -> CapturedSimulator:
        """Returns the environment in a form that can be captured as a graph.

        Raises:
            CaptureError, SimulatorStateError: the state cannot be packed.
        """
        if not self._episode:
            self.reset()
        if self._captured is None:
            random = self.random_state.state_dict()
            with torch.random.fork_rng():  # building other envs must not change the random state
                # A graph is valid for one time limit only, so the limit is not part of the state.
                exclude = self._not_simulator - {("max_steps",), ("_ranges",)}
                state = SimulatorState(lambda n: self.twin(n)._advance_one_step(), exclude)
            self.random_state.load_state_dict(random)
            self._captured = CapturedSimulator(
                self, state, self._advance_one_step, self.random_state
            )
        return self._captured

    def twin(self, num_envs: int) -> Any:
        """Builds a twin of this environment: the same environment with another number of envs.

        The twin has the same settings, and shares the random state of this environment.

        Raises:
            CaptureError: the class does not take ``num_envs``, or does not pass it to its parent.
        """
        args, kwargs = list(self._init_arguments[0]), dict(self._init_arguments[1])
        position = _position_of_num_envs(type(self))
        if position is not None and position < len(args):
            args[position] = num_envs
        else:
            kwargs["num_envs"] = num_envs
        try:
            with torch.random.fork_rng():
                twin = type(self)(*args, **kwargs)
        except TypeError as error:
            raise CaptureError(
                f"{type(self).__name__} cannot be built with another number of envs ({error}); let "
                "__init__ take num_envs and pass it on"
            ) from None
        if twin.batch_size[0] != num_envs:
            raise CaptureError(
                f"{type(self).__name__}(num_envs={num_envs}) has {twin.batch_size[0]} envs; let "
                "__init__ pass num_envs on"
            )
        twin = twin.to(self.device)
        twin.random_state, twin._leader, twin._ranges = self.random_state, self, self._ranges
        return twin

    def _find_env_slots(self) -> dict[Path, bool] | None:
        """Finds the tensors that have the envs as first dim.

        Builds this environment with other numbers of envs, and compares the shapes. Returns None
        if it cannot be built with another number of envs.
        """
        if self._env_slots is ...:
            exclude = {*self._not_simulator, ("_episode",)}
            known, key = _known_slots.setdefault(type(self), {}), self._probe_key(exclude)
            if key in known:
                self._env_slots = known[key]
                return self._env_slots
            random = self.random_state.state_dict()
            try:
                with RandomState(0, self.device).active():  # twins must not change the env's
                    self._env_slots = slots_of_envs(
                        lambda n: self.twin(n)._advance_one_step(), exclude
                    )
            # An environment may raise any error for a number of envs that it does not support.
            except Exception:
                self._env_slots = None
                self._warn_of_shared_tables(exclude)
            finally:
                self.random_state.load_state_dict(random)
            if key is not None and self._env_slots is not None:
                known[key] = self._env_slots
        return self._env_slots

    def _probe_key(self, exclude: set[Path]) -> tuple | None:
        """Returns a key under which :meth:`_find_env_slots` can reuse its result.

        The key consists of the constructor's arguments and the shapes of all tensors. It is None
        if an argument is not a plain value.
        """
        args, kwargs = self._init_arguments
        arguments = (*args, *((key, x) for key, x in kwargs.items() if key != "seed"))
        if not _is_plain(arguments):
            return None
        tensors = walk_simulator(self, frozenset(exclude)).tensors
        shapes = tuple((path, x.dtype, tuple(x.shape)) for path, x in tensors.items())
        return repr(arguments), str(self.device), shapes

    def _warn_of_shared_tables(self, exclude: set[Path]) -> None:
        """Warns of tensors that all envs share, but that have as many rows as there are envs.

        Such a tensor looks like one row per env. So a reset of some envs would change rows that
        the other envs read, too.
        """

        def step(env: EnvGraphs) -> TensorDictBase:
            with RandomState(0, self.device).active():
                return env.step(env.rand_action(env._to_tensordict(env._episode["given"])))["next"]

        try:
            env = copy.deepcopy(self)
            env._is_completing = False
            tables = shared_tables(env, self.batch_size[0], exclude, type(self).reset, step)
        except Exception:  # the environment cannot be copied, or fails with changed tables
            return
        if tables:
            warnings.warn(
                f"{type(self).__name__}: a reset of some envs treats each row of "
                f"{', '.join(tables)} as one env's, but other envs read it, too. If it is one "
                "table for all envs, let __init__ take num_envs and pass it on.",
                stacklevel=2,
            )

    def _follow_leader(self) -> None:
        """Copies the settings of the environment of which this is a twin; see :meth:`twin`."""
        if self._leader is not None:
            sizes = (self.batch_size[0], self._leader.batch_size[0])
            exclude = {*self._not_simulator, ("_episode",)}
            captured = self._leader._captured
            if captured is None:  # this twin was built to find the state
                copy_settings(self, self._leader, sizes, exclude)
            else:
                packing = captured.packing
                copy_settings(self, self._leader, sizes, exclude, packing.batched, packing.written)
            self.max_steps, self._ranges = self._leader.max_steps, self._leader._ranges

    @contextlib.contextmanager
    def _isolated(self, random: RandomState) -> Iterator[None]:
        """Context in which a twin has its original's settings, but a separate random state."""
        self._follow_leader()
        kept = self._leader, self.random_state
        self._leader, self.random_state = None, random
        try:
            yield
        finally:
            self._leader, self.random_state = kept

    def check_actions(self, tensordict: TensorDictBase) -> None:
        """Checks that actions are inside their specs; waits for the device.

        Raises:
            SpecError: an action is outside its spec; the message names the agent and the env.
        """
        actions = self._declaration.reader.read_actions(tensordict)
        self._checked_methods.discard("step")
        self._check_values("step", "action", actions)

    def _advance_one_step(self) -> Any:
        """Makes a step with random actions; returns the environment itself."""
        if not self._episode:
            self.reset()
        self._step(self.rand_action(self._to_tensordict(self._episode["given"])))
        return self


def _is_plain(value: Any) -> bool:
    """Returns True for a number, string, device or None, or a collection of such values."""
    if isinstance(value, dict):
        return all(_is_plain(x) for item in value.items() for x in item)
    if isinstance(value, (tuple, list)):
        return all(map(_is_plain, value))
    return value is None or type(value) in (bool, int, float, str, torch.device)


def _position_of_num_envs(cls: type) -> int | None:
    """Returns the position of a class's argument ``num_envs``; None if it cannot be positional.

    If the only positional arguments of a class are ``*args``, the parent's signature is read.
    """
    for init in (vars(parent)["__init__"] for parent in cls.__mro__ if "__init__" in vars(parent)):
        parameters = list(inspect.signature(init).parameters.values())[1:]
        positional = [
            x for x in parameters if x.kind in (x.POSITIONAL_ONLY, x.POSITIONAL_OR_KEYWORD)
        ]
        names = [x.name for x in positional]
        if "num_envs" in names:
            return names.index("num_envs")
        if names or all(x.kind is not x.VAR_POSITIONAL for x in parameters):
            return None
    return None
