"""Adapter that corrects the life cycle (masks and done flags) of TorchRL environments.

Shapes: E envs, N agents of a group.
"""

from __future__ import annotations

import inspect
import warnings
from typing import Any

import torch
import torchrl.envs
from tensordict import TensorDictBase
from torch import Tensor
from torchrl.envs import EnvBase, TransformedEnv

from torchrl_marl.envs.agents.declaration import Declaration
from torchrl_marl.envs.agents.declared_env import AutoResetEnv, without_rewards
from torchrl_marl.envs.agents.life_cycle import (
    GroupFlags,
    TeamFlags,
    flags_after_reset,
    flags_after_step,
    mask_rewards,
    where_fresh,
)
from torchrl_marl.envs.marl_env import MarlEnv
from torchrl_marl.envs.scene import FinalFrames, Picture, Stage, check_scene, scene, stage
from torchrl_marl.envs.torchrl.conventions import Reading, reading_of
from torchrl_marl.envs.vmas_scene import VmasScene
from torchrl_marl.errors import ConfigError
from torchrl_marl.runtime.random_state import RandomState, offset_seed

__all__ = ["TorchRLEnv", "adapt", "check_environment"]

_FLAGS = ("done", "terminated", "truncated")


def adapt(env: EnvBase) -> EnvBase:
    """Adapts a TorchRL environment, and corrects its life cycle where necessary.

    A correct environment is returned unchanged. Otherwise agents get flags and masks, episodes are
    truncated at a time limit, dead agents are masked, and an unbatched environment gets the batch
    size ``[1]``; see :class:`TorchRLEnv`. PettingZoo and OpenSpiel environments are taken out of
    TorchRL's wrappers, because these send actions of dead agents, lose rewards of waiting agents,
    and do not support simultaneous games.

    Args:
        env (EnvBase): grouped environment. Do not use it after it is adapted.

    Raises:
        ConfigError: the environment cannot be corrected; the message names an alternative.

    Examples:
        >>> from torchrl_marl.envs.toy import MatrixGame
        >>> env = MatrixGame(2)
        >>> adapt(env) is env
        True
    """
    check_environment(env)
    base = env
    while isinstance(base, TransformedEnv):
        base = base.base_env
    replacement = _replace_wrapper(base)
    if replacement is not None:
        if base is not env:
            raise ConfigError(
                f"{type(base).__name__} must be adapted before it is transformed; use "
                "TransformedEnv(torchrl_marl.envs.make_env(env), transforms)."
            )
        return replacement
    return env if _is_correct(env, base) else TorchRLEnv(env, reading_of(env, base))


def check_environment(env: Any) -> None:
    """Raises an error for objects that are not a TorchRL environment.

    Raises:
        ConfigError: the object is not a TorchRL environment; the message names its type.
    """
    if not isinstance(env, EnvBase):
        what = f"the class {env.__name__}" if inspect.isclass(env) else f"a {type(env).__name__}"
        if _is_gymnasium(env):
            raise ConfigError(
                f"the environment is {what}, a Gymnasium environment of one agent, expected a "
                "team; write a team of one as a MarlEnv (docs/environments/own.md), or train one "
                "agent by TorchRL's own losses."
            )
        raise ConfigError(
            f"the environment is {what}, expected a name such as 'vmas/balance', an EnvConfig, an "
            "environment of TorchRL, such as YourEnv(num_envs=64), or an environment of PettingZoo "
            "or JaxMARL."
        )


def _is_gymnasium(env: Any) -> bool:
    kinds = (env if inspect.isclass(env) else type(env)).__mro__
    modules = {kind.__module__.partition(".")[0] for kind in kinds if kind.__name__ == "Env"}
    return bool(modules & {"gymnasium", "gym"})


def _replace_wrapper(env: EnvBase) -> EnvBase | None:
    """Returns an adapter of the environment inside a wrapper; None if the wrapper can be used."""
    if isinstance(env, torchrl.envs.OpenSpielWrapper):
        from torchrl_marl.envs.torchrl.openspiel import OpenSpielGames

        return OpenSpielGames(env)
    if isinstance(env, torchrl.envs.PettingZooWrapper):
        from torchrl_marl.envs.pettingzoo import PettingZooEnv

        return PettingZooEnv(
            env._env, num_envs=1, group_map=dict(env.group_map), device=env.device or "cpu"
        )
    return None


def _is_correct(env: EnvBase, base: EnvBase) -> bool:
    """Returns True if an environment declares correct flags and masks."""
    if isinstance(base, (MarlEnv, AutoResetEnv)) or hasattr(type(base), "snapshot"):
        return True
    done = set(env.full_done_spec.keys(True, True))
    groups = [key[:-1] for key in env.action_keys if isinstance(key, tuple)]
    ends = {(*group, flag) for group in groups for flag in _FLAGS}
    masks = {(*group, "mask") for group in groups}
    seen = set(env.full_observation_spec.keys(True, True))
    return (
        len(env.batch_size) == 1
        and {*_FLAGS} <= done
        and (ends.isdisjoint(done) or (ends <= done and masks <= seen))
        and set(env.reward_keys) == {(*group, "reward") for group in groups}
    )


class TorchRLEnv(FinalFrames, AutoResetEnv):
    """TorchRL environment with a corrected life cycle: masks and done flags.

    Every agent has a ``mask``, and ``done``, ``terminated`` and ``truncated`` flags that agree with
    those of the episode. Flags of the environment are kept; missing flags are derived from the
    others. The episode is done when all agents are done. An episode that ends at the environment's
    time limit is truncated. A team reward is given to every agent. The adapter has its own random
    state.

    Args:
        env (EnvBase): environment, unbatched or with batch size ``[E]``.
        reading (Reading): reader of the environment's outputs.

    Shapes:
        - all outputs: ``[E, ...]``, with E = 1 for an unbatched environment
    """

    def __init__(self, env: EnvBase, reading: Reading) -> None:
        if len(env.batch_size) > 1:
            raise ConfigError(
                f"{type(env).__name__} has batch size {list(env.batch_size)}, expected [E] or []; "
                "build it with one batch dim."
            )
        declaration = Declaration(
            type(env).__name__, max(env.batch_size.numel(), 1), reading.kinds, reading.state_spec
        )
        super().__init__(declaration, device=env.device or "cpu")
        self._inner, self._reading = env, reading
        self.max_steps, self.environment_name = reading.max_steps, type(env).__name__
        self.random_state = RandomState(int(torch.randint(2**31, ())), self.device)
        self._last_output: TensorDictBase | None = None
        self._flags: dict[str, Any] = {}
        self._born: dict[str, Any] = {}
        self._steps = torch.zeros(self.num_envs, 1, dtype=torch.int64, device=self.device)

    def _set_seed(self, seed: int | None) -> None:
        stream = offset_seed(0 if seed is None else seed)
        self.random_state.seed(stream)
        try:
            with self.random_state.active():  # the environment may draw random numbers for its seed
                self._inner.set_seed(stream % 2**31, static_seed=True)
        except NotImplementedError as refusal:
            warnings.warn(
                f"{self._declaration.owner} cannot be seeded ({refusal}); its runs are not "
                "reproducible.",
                stacklevel=2,
            )

    # ------------------------------------------------------------------------- reset and step

    def _start(self, fresh: Tensor | None) -> dict[str, Any]:
        request = None
        if fresh is not None and self._inner.batch_size:
            request = self._reset_request(fresh)
        with self.random_state.active():
            self._last_output = self._inner.reset(request)
        all_envs = torch.ones(self.num_envs, dtype=torch.bool, device=self.device)
        fresh = all_envs if fresh is None or not self._flags else fresh
        self._steps = torch.where(fresh.unsqueeze(-1), 0, self._steps)
        source = self._read(self._last_output, rewards=False)
        root = TeamFlags.running(self.batch_size, self.device)
        groups = {
            name: x.__dict__ for name, x in flags_after_reset(self.team, root, source).items()
        }
        born = {name: flags["mask"] for name, flags in groups.items()}
        self._born = where_fresh(fresh, born, self._born) if self._born else born
        self._flags = where_fresh(fresh, groups, self._flags) if self._flags else groups
        return self._with_flags(source, root)

    def _play(self, actions: dict[str, dict[str, Any]]) -> tuple[dict[str, Any], dict[str, Any]]:
        with self.random_state.active():
            self._last_output = self._inner.step(self._step_input(actions)).get("next")
        self._steps = self._steps + 1
        source = self._read(self._last_output, rewards=True)
        before = {name: GroupFlags(**flags) for name, flags in self._flags.items()}
        groups = flags_after_step(before, source)
        root = TeamFlags.running(self.batch_size, self.device).after(
            list(groups.values()), *self._reading.ends(self._last_output, self._steps)
        )
        for name, flags in groups.items():
            group_output = source[name]
            group_output["reward"] = mask_rewards(
                group_output["reward"], before[name], self._born[name]
            )
            closed = flags.closed_by(root, source[name].get("mask"))
            # At a time limit, of an agent or of the episode, returns are bootstrapped.
            bootstrapped = before[name].mask & root.truncated & ~closed.terminated.squeeze(-1)
            self._flags[name] = {**closed.__dict__, "mask": closed.mask | bootstrapped}
            self._born[name] = self._born[name] | closed.mask
        after = self._with_flags(source, root)
        self._keep_frames()
        if not bool(root.done.any()):
            return after, without_rewards(after, self.team.groups)
        ended_envs = root.done.squeeze(-1)
        return after, self._start(None if bool(ended_envs.all()) else ended_envs)

    def _with_flags(self, source: dict[str, Any], root: TeamFlags) -> dict[str, Any]:
        """Adds the done flags and masks of the episode and of all agents to an output."""
        output = {**source, "done": root.done, **root.__dict__}
        for name, flags in self._flags.items():
            done = flags["terminated"] | flags["truncated"]
            output[name] = {**source[name], "done": done, **flags}
        return output

    # ---------------------------------------------------------------- the wrapped environment

    def _read(self, td: TensorDictBase, rewards: bool) -> dict[str, Any]:
        """Returns a copy of the environment's output as nested dicts with one batch dim."""
        td = td.clone() if self._inner.batch_size else td.clone().unsqueeze(0)
        return self._reading.read(td, self.group_kinds, rewards)

    def _step_input(self, actions: dict[str, dict[str, Any]]) -> TensorDictBase:
        """Returns the data that the environment steps; actions of masked agents are zeros."""
        if self._last_output is None:
            raise ConfigError(
                f"{self._declaration.owner}: a step before the first reset; call reset() first."
            )
        td = self._last_output.clone(recurse=False)
        td = td if self._inner.batch_size else td.unsqueeze(0)
        for name, kinds in self.group_kinds.items():
            group_actions = kinds.zero_masked_actions(actions[name], self._flags[name]["mask"])
            self._reading.write(td, name, kinds, group_actions)
        return td if self._inner.batch_size else td.squeeze(0)

    def _reset_request(self, fresh: Tensor) -> TensorDictBase | None:
        """Returns the data for a reset of some envs; None before the first reset."""
        if self._last_output is None:
            return None
        request = self._last_output.clone(recurse=False)
        for key in self._inner.reset_keys:
            done = (*key[:-1], "done") if isinstance(key, tuple) else "done"
            shape = self._inner.full_done_spec[done].shape
            request.set(key, fresh.view(-1, *[1] * (len(shape) - 1)).expand(shape))
        return request

    # -------------------------------------------------------------------------------- drawing

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> Any:
        self._drop_frames()
        return super()._reset(tensordict, **kwargs)

    def check_scene(self) -> None:
        """Raises an error for an environment that cannot be drawn.

        Raises:
            ConfigError: the environment cannot be drawn; the message names the missing method.
        """
        check_scene(self._drawable_env())

    def stage(self) -> Stage | None:
        """Returns the view of the environment in drawings; None if it defines no view."""
        return stage(self._drawable_env())

    def _draw(self, index: int) -> Picture:
        return scene(self._drawable_env(), index)

    def _drawable_env(self) -> Any:
        """Returns the inner environment with a method ``scene``."""
        inner: Any = self._inner
        while not hasattr(type(inner), "scene") and isinstance(inner, TransformedEnv):
            inner = inner.base_env
        return VmasScene(inner) if isinstance(inner, torchrl.envs.VmasEnv) else inner

    def close(self, *, raise_if_closed: bool = True) -> None:
        """Closes the environment."""
        super().close(raise_if_closed=raise_if_closed)
        if not self._inner.is_closed:
            self._inner.close()

    def to(self, device: torch.device | str) -> TorchRLEnv:
        """Returns the environment unchanged; raises an error if the device is another one.

        TorchRL's environments cannot move to another device.
        """
        if torch.device(device) != self.device:
            raise ConfigError(
                f"{self._declaration.owner} is on {self.device}, expected {device}; build the "
                "environment on that device, or run on this one."
            )
        return self
