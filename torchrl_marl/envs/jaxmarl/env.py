"""JaxMARL environments as TorchRL environments.

Shapes: E envs, N agents of a group, S state features.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor
from torchrl.data import Composite, OneHot, Unbounded
from torchrl.envs.utils import MarlGroupMapType

from torchrl_marl.envs.agents.declaration import Declaration, check_parts, check_whole_numbers
from torchrl_marl.envs.agents.declared_env import AutoResetEnv
from torchrl_marl.envs.agents.kinds import map_leaves
from torchrl_marl.envs.agents.life_cycle import where_fresh
from torchrl_marl.envs.jaxmarl.build import import_jaxmarl
from torchrl_marl.envs.scene import FinalFrames, Picture
from torchrl_marl.envs.symmetries import Labels

__all__ = ["JaxMarlEnv"]


class JaxMarlEnv(FinalFrames, AutoResetEnv):
    """JaxMARL environment with grouped agents; one jitted call steps all copies.

    If an episode ends in a step, the step returns the last observation of that episode, and also
    the first observation of the next episode. Masks and done flags are computed in JAX. Tensors are
    exchanged by DLPack, without a copy on the CPU.

    An episode is ``truncated`` after exactly ``max_steps`` steps. The defaults are 25 steps in
    MPE, 100 in SMAX and 400 in Overcooked. (In MPE and SMAX, JaxMARL's own episodes are one step
    longer.) If the environment ends an episode for another reason, the episode is ``terminated``.
    This also holds for classes that the adapter does not know. The switch riddle is also
    ``terminated`` on its last day, after which it can no longer be solved.

    - SMAX: a unit that dies is ``terminated``, its mask is False and its reward is 0. With
      ``bootstrap: team`` the dead unit is credited with the later rewards of its team.
      ``info=True`` adds ``(group, "info", "won")``, which is 1 at the end of a won episode.
    - Hanabi: the mask is True for the agent that acts.
    - Switch riddle: for agents outside the room, ``action_mask`` allows only the action "nothing";
      in JaxMARL the other actions of these agents have no effect.
    - Overcooked: ``shaped_reward=1.0`` adds the environment's shaped reward. Its weight decays
      linearly to 0 over ``shaped_reward_steps`` env steps, counted over all copies. ``info=True``
      adds the unshaped reward. Evaluations use no shaping (:meth:`measured`).

    On a CPU use one torch thread (``torch.set_num_threads(1)``, ``threads: 1`` in a recipe), since
    the threads of torch and JAX compete. JAX does not work in forked processes; start processes by
    spawn. A GPU needs JAX's GPU build. Without that build the environment runs on the CPU, and its
    tensors are copied to the GPU. GPUs are untested.

    Args:
        env (str or MultiAgentEnv): one of ``jaxmarl.registered_envs``, or a built JaxMARL
            environment, which is not modified.

    Keyword Args:
        num_envs (int): number E of copies.
        max_steps (int, optional): time limit of an episode in steps; if None, the class's default.
        seed (int, optional): random seed; if None, it is drawn from torch's global generator.
        device (torch.device): device of the tensors.
        state ("observations", "world" or callable, optional): the central critic's input.
            It is the concatenated observations of all agents, the environment's state (only in
            SMAX, MPE and Overcooked), or the result ``[S]`` of ``state(jax_state)`` for one copy.
        info (bool): True to add ``(group, "info")``.
        group_map (dict or MarlGroupMapType, optional): group -> agents; if None, agents are
            grouped by the prefixes of their ids.
        continuous_actions (bool, optional): True for continuous actions in MPE, False for discrete
            ones; ignored in other environments.
        categorical_actions (bool): True if a discrete action is an index, False for one-hot.
        shaped_reward (float): initial weight of the environment's shaped reward.
        shaped_reward_steps (int, optional): number of env steps over which this weight decays to 0.
        **kwargs: arguments of the environment; ``scenario`` (SMAX) and ``layout`` (Overcooked) may
            be names.

    Shapes:
        - ``(group, "observation")``: ``[E, N, ...]``; ``("next", group, "reward")``: ``[E, N, 1]``
        - ``(group, "mask")``: ``[E, N]``; ``(group, "action_mask")``: ``[E, N, n_actions]``
        - ``done``, ``terminated``, ``truncated``: ``[E, 1]``; ``"state"``: ``[E, S]``

    Raises:
        ConfigError: if an environment, scenario, layout or argument is unknown, or if the
            environment does not support the state, shaped reward or grouping.
        MissingExtraError: if JaxMARL is not installed.

    Reference: Rutherford et al., 2024, https://arxiv.org/abs/2311.10090.

    Examples:
        >>> env = JaxMarlEnv("MPE_simple_spread_v3", num_envs=4, seed=0)
        >>> env.rollout(5)["next", "agent", "reward"].shape
        torch.Size([4, 5, 3, 1])
    """

    def __init__(
        self,
        env: Any,
        *,
        num_envs: int,
        max_steps: int | None = None,
        seed: int | None = None,
        device: torch.device | str = "cpu",
        state: str | Callable[[Any], Any] | None = None,
        info: bool = False,
        group_map: MarlGroupMapType | Mapping[str, Sequence[Any]] | None = None,
        continuous_actions: bool | None = None,
        categorical_actions: bool = True,
        shaped_reward: float = 0.0,
        shaped_reward_steps: int | None = None,
        **kwargs: Any,
    ) -> None:
        check_whole_numbers("JaxMarlEnv", {"num_envs": num_envs, "max_steps": max_steps})
        if isinstance(group_map, Mapping):
            group_map = tuple((name, tuple(ids)) for name, ids in group_map.items())  # type: ignore
        import_jaxmarl()
        from torchrl_marl.envs.jaxmarl import dlpack, step

        self._carry: Any = None
        # The states after the last step, if pictures are recorded.
        self._states_after_step: Any = None
        self._is_measured = False
        self._dlpack = dlpack
        self._jax_device = dlpack.device_of(torch.device(device))
        self._jitted = step.compiled(
            step.Settings(
                env,
                num_envs,
                max_steps,
                state,
                info,
                group_map,
                continuous_actions,
                not categorical_actions,
                step.Shaping(shaped_reward, shaped_reward_steps),
                tuple(kwargs.items()),
            )
        )
        self._flag_names, self._group_slices = step.FLAGS, self._jitted.places
        wrapped, leaves = self._jitted.wrapped, self._jitted.leaves
        self.environment_name, self.max_steps = wrapped.name, wrapped.limit
        infos = [name for name in self._jitted.kinds if "info" in leaves[name]]
        super().__init__(
            self._declare(num_envs),
            device=device,
            info={name: _info_spec(leaves[name]) for name in infos},
        )
        self._set_seed(int(torch.randint(2**31, ())) if seed is None else seed)

    def _declare(self, num_envs: int) -> Declaration:
        kinds, leaves = self._jitted.kinds, self._jitted.leaves
        return Declaration(
            type(self).__name__,
            num_envs,
            {name: tuple(kind.spec() for kind in group) for name, group in kinds.items()},
            Unbounded(leaves["state"].shape[1:]) if "state" in leaves else None,
            in_turns=self._jitted.wrapped.traits.acts is not None,
        )

    # ------------------------------------------------------------------------ reset and step

    def _start(self, fresh: Tensor | None) -> dict[str, Any]:
        has_started = self._carry is not None
        self._drop_frames()
        self._states_after_step = None
        key_and_calls = (
            (self._carry["key"], self._carry["calls"]) if has_started else self._initial_key
        )
        carry, leaves = self._jitted.start(*key_and_calls)
        if fresh is None or not has_started:
            self._carry = carry
            return self._to_outputs(leaves)
        jax_mask = self._dlpack.to_jax(fresh, self._jax_device)
        self._carry = self._jitted.merge(self._carry, carry, jax_mask)
        return where_fresh(fresh, self._to_outputs(leaves), self._next_input or {})

    def _play(self, actions: dict[str, dict[str, Any]]) -> tuple[dict[str, Any], dict[str, Any]]:
        rows = [
            self._to_jax_action(action, self._declaration.kinds[name][i].action_spec)
            for name, kinds in self.group_kinds.items()
            for i, action in enumerate(kinds.parts(actions[name], "action").values())
        ]
        if self._watched:
            self._states_after_step = self._jitted.preview(self._carry, rows)
            self._keep_frames()
        self._carry, after, next_start = self._jitted.step(self._carry, rows)
        return self._to_outputs(after), self._to_outputs(next_start)

    def _to_jax_action(self, action: Tensor, spec: Any) -> Any:
        if isinstance(spec, OneHot):
            action = action.to(torch.int32).argmax(-1)
        return self._dlpack.to_jax(action, self._jax_device)

    def _to_outputs(self, leaves: dict[str, Any]) -> dict[str, Any]:
        """Converts the leaves of a step to tensors, and splits the packed flags by group."""
        output = self._dlpack.to_torch(leaves, self.device)
        flags, team_flags = (zip(names, output.pop(key)) for key, names in self._flag_names.items())
        agent_flags = {key: x if key == "mask" else x.unsqueeze(-1) for key, x in flags}
        for name, agents in self._group_slices.items():
            group_output = output[name]
            group_output.update({key: x[:, agents] for key, x in agent_flags.items()})
            unshaped = group_output.pop("unshaped", None)
            if unshaped is not None and self._is_measured:
                group_output["reward"] = unshaped
        output.update(team_flags)
        return output

    def _draw(self, index: int) -> Picture:
        import jax

        from torchrl_marl.envs.jaxmarl.drawing import draw_environment

        if self._carry is None:
            self.reset()
        recorded = self._states_after_step if self._watched else None
        states = self._carry["world"] if recorded is None else recorded
        copy_state = jax.device_get(jax.tree.map(lambda x: x[index], states))
        return draw_environment(self._jitted.wrapped.env, copy_state)

    @contextlib.contextmanager
    def measured(self) -> Iterator[None]:
        """Context in which rewards are not shaped, for evaluation."""
        before, self._is_measured = self._is_measured, True
        try:
            yield
        finally:
            self._is_measured = before

    def symmetries(self) -> dict[str, Labels]:
        """Returns the labels that can be exchanged, by group; empty if there are none.

        These are the colors in Hanabi, and the names of the ingredients in OvercookedV2. In
        OvercookedV2 the piles stay where they are, so the symmetry is exact only if the layout is
        symmetric.
        """
        wrapped = self._jitted.wrapped
        labels = None if wrapped.traits.labels is None else wrapped.traits.labels(wrapped.env)
        return {} if labels is None else {name: Labels(*labels) for name in self.group_kinds}

    # --------------------------------------------------------------- random state, snapshot

    def _set_seed(self, seed: int | None) -> None:
        import jax

        key = jax.random.PRNGKey(0 if seed is None else seed)
        zero = jax.numpy.zeros((), jax.numpy.int32)
        self._initial_key = jax.device_put((key, zero), self._jax_device)
        self._carry = None
        self._next_input = None

    def snapshot(self) -> TensorDict:
        """Returns the whole state, including running episodes and JAX's random key.

        Returns:
            TensorDict: argument of :meth:`restore`; save it with ``torch.save(x.to_dict())``.
        """
        if self._carry is None:
            self.reset()
        shared = {key: self._carry[key] for key in ("key", "calls")}
        batched = {key: x for key, x in self._carry.items() if key not in shared}
        read = self._dlpack.read_tree
        source = {"world": {"batched": read(batched), "shared": read(shared)}}
        if self._next_input is not None:
            source["begun"] = map_leaves(self._next_input, torch.clone)
            source["ended"] = self._already_reset.clone()  # type: ignore[union-attr,assignment]
        return TensorDict(source)

    def restore(self, snapshot: TensorDict) -> None:
        """Restores a snapshot of an environment that was built with the same arguments.

        Raises:
            SimulatorStateError: if the snapshot has another environment or number of envs.
        """
        check_parts(snapshot, ["world"], type(self).__name__)
        saved = {**snapshot["world", "batched"], **snapshot["world", "shared"]}
        carry = self._dlpack.write_tree(self._jitted.carry, saved, self._jax_device)
        self._next_input, self._already_reset = None, None
        if "begun" in snapshot.keys():
            self._next_input = map_leaves(snapshot["begun"].to_dict(), torch.clone)
            self._already_reset = snapshot["ended"].clone()
        self._carry = carry


def _info_spec(leaves: Mapping[str, Any]) -> Composite:
    specs = {name: Unbounded(tuple(x.shape[1:])) for name, x in leaves["info"].items()}
    return Composite(specs, shape=next(iter(specs.values())).shape[:1])
