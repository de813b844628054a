"""PettingZoo environments as TorchRL environments, with copies in this process or in workers.

Agents act simultaneously or in turns.

Shapes: E copies, N agents of a group, S state features.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor
from torchrl.data import Composite, Unbounded
from torchrl.envs.utils import MarlGroupMapType

from torchrl_marl.envs.agents.declaration import (
    check_parts,
    check_snapshot,
    check_state,
    check_whole_numbers,
)
from torchrl_marl.envs.agents.declared_env import AutoResetEnv, without_rewards
from torchrl_marl.envs.agents.life_cycle import where_fresh
from torchrl_marl.envs.agents.spaces import group_agents
from torchrl_marl.envs.pettingzoo.build import Backend, info_keys, maker_of, probe
from torchrl_marl.envs.pettingzoo.drawing import check_modes, mode_of
from torchrl_marl.envs.pettingzoo.instance import CopyPlan, ParallelCopy, TurnCopy
from torchrl_marl.envs.pettingzoo.rng import OwnRandom
from torchrl_marl.envs.pettingzoo.tensors import RowTensors, declared, row_fields, slots_of
from torchrl_marl.envs.processes.copies import RowLayout
from torchrl_marl.envs.processes.workers import Workers
from torchrl_marl.envs.scene import FinalFrames, Picture
from torchrl_marl.errors import (
    ConfigError,
    SimulatorStateError,
    TrustError,
    UserError,
    WorkerError,
    quoted,
)
from torchrl_marl.runtime.trust import is_signed_by_user, signature

__all__ = ["PettingZooEnv"]


_SIGNED_PREFIX = b"worlds of PettingZoo"  # prefix of the signed bytes


class PettingZooEnv(FinalFrames, AutoResetEnv):
    """Vectorized PettingZoo environment, parallel or AEC, with masks and done flags of each agent.

    Agents that died or wait have ``mask`` False, and their actions never reach the environment.
    When a single agent ends, the episode continues for the other agents. In an AEC environment a
    step is one agent's move. A parallel environment may return observations only for the agents
    that act next; waiting agents keep their last observation. Every episode begins with its own
    seed.

    Args:
        env (str, module, callable or environment): name, such as ``"mpe2/simple_spread_v3"``,
            ``"sisl/pursuit-v5"``, ``"classic/connect_four_v3"``, ``"magent2/battle_v4"`` or
            ``"gymnasium_robotics/Ant"``; or a factory or an instance of a custom environment.

    Keyword Args:
        num_envs (int): number E of copies.
        workers (int): number of worker processes; 0 runs the copies in this process.
        worker_timeout (float): time in seconds that a worker has to answer.
        restart_workers (bool): True to restart a copy that raises an error, or a worker that died
            or hangs; restarts are counted. Programming errors are still raised, and so is the third
            failure of a copy in the same step.
        max_steps (int, optional): time limit of an episode in steps, in addition to the
            environment's.
        seed (int, optional): random seed; if None, it is drawn from torch's global generator.
        device (torch.device): device of the tensors; the environments run on the CPU.
        state ("observations" or "world", optional): the central critic's input. It is either the
            concatenated observations of all agents (zeros for agents that are gone), or the result
            of the environment's ``state()``.
        info (bool or sequence of str): True to return all numeric infos as
            ``(group, "info", key)``, or a list of the wanted keys. An entry is 0 in steps in which
            the environment gives no value.
        group_map (MarlGroupMapType or dict, optional): group -> ids of its agents; if None, agents
            are grouped by the prefixes of their ids.
        continuous_actions (bool, optional): True for continuous actions, False for discrete ones,
            in environments that have both.
        categorical_actions (bool): True if a discrete action is an index, False for one-hot.
        backend ("auto", "parallel" or "aec"): PettingZoo API of a named environment; ``auto`` is
            parallel if the environment has it.
        respawns (bool): True if an agent that ended and left the environment's ``agents`` may
            appear there again, for a new life; parallel environments only. Without it, that is an
            error.
        drawn (bool): True to build the environment so that :meth:`scene` can draw it.
        **kwargs: arguments of the environment.

    Attributes:
        max_steps (int, optional): time limit that was passed to the adapter, in steps.
        own_limit (int, optional): time limit that the environment declares, in steps.

    Shapes:
        - ``(group, "observation")``: ``[E, N, *]``; ``(group, "mask")``: ``[E, N]``
        - ``("next", group, "reward")``, ``(group, "done")``, ...: ``[E, N, 1]``
        - ``done``, ``terminated``, ``truncated``: ``[E, 1]``; ``"state"``: ``[E, S]``

    Raises:
        ConfigError: if an environment or argument is unknown, or an agent has no group.
        MissingExtraError: if a package is not installed.
        SpecError: if values of a space are not tensors of a fixed shape, if a space changes, or if
            an agent is not in ``possible_agents`` or disappears without a done flag.
        NonFiniteError: if the environment returns NaN, or an active agent's action has NaN.
        WorkerError: if a worker died or hangs.

    Reference: Terry et al., 2021, https://arxiv.org/abs/2009.14471.

    Examples:
        >>> env = PettingZooEnv("mpe2/simple_speaker_listener_v4", num_envs=2, seed=0)
        >>> env.rollout(5)["next", "listener", "reward"].shape
        torch.Size([2, 5, 1, 1])
    """

    _seeds: list[int | None]

    def __init__(
        self,
        env: Any,
        *,
        num_envs: int = 1,
        workers: int = 0,
        worker_timeout: float = 60.0,
        restart_workers: bool = False,
        max_steps: int | None = None,
        seed: int | None = None,
        device: torch.device | str = "cpu",
        state: Literal["observations", "world"] | None = None,
        info: bool | Sequence[str] = False,
        group_map: MarlGroupMapType | Mapping[str, Sequence[str]] | None = None,
        continuous_actions: bool | None = None,
        categorical_actions: bool = True,
        backend: Backend = "auto",
        respawns: bool = False,
        drawn: bool = False,
        **kwargs: Any,
    ) -> None:
        check_whole_numbers("PettingZooEnv", {"num_envs": num_envs, "max_steps": max_steps})
        check_whole_numbers("PettingZooEnv", {"workers": workers}, least=0)
        check_state("PettingZooEnv", state)
        make = maker_of(env, backend, kwargs, continuous_actions, num_envs, drawn)
        with OwnRandom(0).active(look=True):
            first = make()
        info = [info] if isinstance(info, str) else info
        facts = probe(make.name, first, bool(info), state == "world")
        _check_respawns(respawns, make.name, facts.turns)
        self._supported_mode = mode_of(first)
        self._render_mode = getattr(first, "render_mode", None)
        self._built_by_user = not isinstance(env, str) and not drawn
        if first is not env:
            _close_probe(make.name, first)
        groups = group_agents([own.agent for own in facts.agents], group_map)
        spaces = {own.agent: own for own in facts.agents}
        group_spaces = {group: [spaces[agent] for agent in ids] for group, ids in groups.items()}
        features = facts.n_state if state == "world" else state
        declaration = declared(
            make.name, num_envs, group_spaces, not categorical_actions, features, facts.turns
        )
        keys = info_keys(facts, groups, info)
        slots = tuple(slots_of(declaration, group_spaces))
        super().__init__(declaration, device=device, info=_info_specs(keys, groups))
        self._set_seed(int(torch.randint(2**31, ())) if seed is None else seed)
        self.respawns = respawns
        self.max_steps, self.own_limit, self.environment_name = max_steps, facts.limit, make.name
        plan = CopyPlan(make.name, slots, max_steps, keys, state == "world", respawns)
        copy = TurnCopy if facts.turns else ParallelCopy
        self._workers = Workers(
            functools.partial(copy, make, plan),
            RowLayout(row_fields(declaration, keys, state)),
            num_envs,
            workers,
            timeout=worker_timeout,
            restart=restart_workers,
            seeds=[seed for seed in self._seeds if seed is not None],
            name=make.name,
        )
        self._rows = RowTensors(declaration, self._workers.rows, state, keys, self.device)

    # ------------------------------------------------------------------------ reset and step

    def _start(self, fresh: Tensor | None) -> dict[str, Any]:
        fresh_mask = np.ones(self.num_envs, bool) if fresh is None else fresh.cpu().numpy()
        seeds = [seed if is_fresh else None for seed, is_fresh in zip(self._seeds, fresh_mask)]
        self._seeds = [
            None if is_fresh else seed for seed, is_fresh in zip(self._seeds, fresh_mask)
        ]
        self._workers.begin(fresh_mask, seeds)
        self._rows.check("begun")
        return self._rows.read("begun")

    def _play(self, actions: dict[str, dict[str, Any]]) -> tuple[dict[str, Any], dict[str, Any]]:
        before = self._next_input
        self._rows.write_actions(actions)
        self._rows.check_actions()
        restarted = self._workers.play()
        if restarted is not None:
            return self._truncate_restarted(restarted, before)
        self._rows.check("after")
        after = self._rows.read("after")
        if not self._rows.ended.any():
            return after, without_rewards(after, self.team.groups)
        self._rows.check("begun")
        return after, self._rows.read("begun")

    # ------------------------------------------------------------------------------ drawing

    def watch(self, number: int) -> None:
        """Draws the first ``number`` copies in every later step; 0 stops the drawing."""
        self._workers.watch(number)

    def check_scene(self) -> None:
        """Raises an error if the environment cannot be rendered.

        Raises:
            ConfigError: if the environment cannot be rendered; the message says how to fix that.
        """
        check_modes(
            self._declaration.owner, self._supported_mode, self._render_mode, self._built_by_user
        )

    def _draw(self, index: int) -> Picture:
        self.check_scene()
        if self._render_mode != self._supported_mode:
            raise ConfigError(
                f"{self._declaration.owner} was built without rendering; use drawn=True, or "
                f"render_mode={self._supported_mode!r}."
            )
        picture: Picture = self._workers.draw(index)
        return picture

    def _truncate_restarted(
        self, restarted: np.ndarray, before: dict[str, Any] | None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Returns the result of a step; the episodes of restarted copies are truncated in it."""
        after, next_start = self._rows.read("after"), self._rows.read("begun")
        last = self._rows.cut_off(next_start if before is None else before)
        return where_fresh(torch.from_numpy(restarted).to(self.device), last, after), next_start

    def close(self, *, raise_if_closed: bool = True) -> None:
        """Closes the environments and ends the workers."""
        self._workers.close()
        super().close(raise_if_closed=raise_if_closed)

    @property
    def restarts(self) -> int:
        """Number of times that copies or workers were restarted."""
        return self._workers.restarts

    # ------------------------------------------------------------------ random state, snapshot

    def _set_seed(self, seed: int | None) -> None:
        children = np.random.SeedSequence(seed).spawn(self.num_envs)
        self._seeds = [int(s.generate_state(1)[0]) >> 1 for s in children]

    def snapshot(self) -> TensorDict:
        """Returns the state of all environments, for :meth:`restore`.

        Raises:
            SimulatorStateError: if an environment cannot be pickled.
        """
        try:
            envs = self._workers.save()
        except WorkerError:
            raise
        except UserError as error:
            raise SimulatorStateError(str(error)) from error
        seeds = [-1 if seed is None else seed for seed in self._seeds]
        ended = (
            np.zeros(self.num_envs, bool)
            if self._already_reset is None
            else self._already_reset.cpu().numpy()
        )
        saved = {
            "of": f"{self._declaration.owner} x {self.num_envs}",
            "worlds": {
                str(i): torch.frombuffer(bytearray(env), dtype=torch.uint8)
                for i, env in enumerate(envs)
            },
            "signature": signature(_SIGNED_PREFIX, *envs),
            "rows": {name: torch.from_numpy(x).clone() for name, x in self._rows.rows.items()},
            "seeds": torch.tensor(seeds),
            "ended": torch.from_numpy(ended).clone(),
        }
        return TensorDict(saved)

    def restore(self, snapshot: TensorDict) -> None:
        """Restores a snapshot of an environment that was built with the same arguments.

        The environments are stored as pickles, which can run any code. They are loaded only if the
        same user wrote them on this machine, or within
        :func:`torchrl_marl.runtime.trust.trusting`.

        Raises:
            SimulatorStateError: if the snapshot has another environment or number of copies.
            TrustError: if another user or machine wrote the snapshot.
        """
        check_parts(snapshot, ["of", "worlds"], type(self).__name__)
        description = f"{self._declaration.owner} x {self.num_envs}"
        check_snapshot(snapshot["of"], description)
        pickles = snapshot["worlds"]
        envs = [pickles[str(i)].cpu().numpy().tobytes() for i in range(self.num_envs)]
        signed = snapshot["signature"] if "signature" in snapshot.keys() else None
        if not is_signed_by_user(signed, _SIGNED_PREFIX, *envs):
            raise TrustError(
                f"the environments of this snapshot of {description} are pickles, which can run "
                "any code when loaded, and were not written by you on this machine."
            )
        self._workers.load(envs)
        for name, rows in self._rows.rows.items():
            rows[...] = snapshot["rows"][name].cpu().numpy()
        self._seeds = [None if seed < 0 else seed for seed in snapshot["seeds"].tolist()]
        self._next_input = self._rows.read("begun")
        self._already_reset = snapshot["ended"].to(self.device)


def _check_respawns(respawns: Any, name: str, has_turns: bool) -> None:
    if not isinstance(respawns, bool):
        raise ConfigError(f"respawns is {quoted(respawns)}, expected True or False.")
    if respawns and has_turns:
        raise ConfigError(
            f"{name} is turn-based, where agents cannot come back, but respawns is True; "
            "leave it out, or use a parallel environment."
        )


def _close_probe(name: str, env: Any) -> None:
    """Closes an environment that was built only to find facts about it; errors are ignored."""
    try:
        getattr(env, "close", bool)()
    except Exception as error:  # noqa: BLE001 - environments of other libraries may raise anything
        warnings.warn(
            f"{name}: close() raised {type(error).__name__}: {error}; the environment is used "
            "nevertheless, but may leave resources open.",
            RuntimeWarning,
            stacklevel=3,
        )


def _info_specs(
    keys: Mapping[str, Sequence[str]], groups: Mapping[str, Sequence[Any]]
) -> dict[str, Composite]:
    return {
        group: Composite({key: Unbounded((n,)) for key in own}, shape=(n,))
        for group, own in keys.items()
        for n in [len(groups[group])]
    }
