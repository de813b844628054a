"""JaxMARL's environments as TorchRL environments.

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

from torchrl_marl.envs.agents.declaration import Declaration, check_whole_numbers
from torchrl_marl.envs.agents.declared_env import AutoResetEnv
from torchrl_marl.envs.agents.kinds import map_leaves
from torchrl_marl.envs.agents.life_cycle import where_fresh
from torchrl_marl.envs.jaxmarl.build import import_jaxmarl
from torchrl_marl.envs.scene import FinalFrames, Picture

__all__ = ["JaxMarlEnv"]


class JaxMarlEnv(FinalFrames, AutoResetEnv):
    """World of JaxMARL in groups: one jitted call steps all copies.

    A step gives an episode's last observation and the next one's first, and the life cycle is
    worked out in JAX. Tensors are exchanged by DLPack, without a copy on the CPU. An episode has
    exactly ``max_steps`` steps, or as many as the environment's class says (25 in MPE, 100 in SMAX,
    400 in Overcooked, where JaxMARL itself makes one more in the first two), and is ``truncated``
    then; what an environment ends by itself is ``terminated``, also where its class is not known
    here, and so is the switch riddle on its last day, after which nobody can tell any more.

    - SMAX: a unit that dies is ``terminated``, its mask False, and earns no more; with
      ``bootstrap: team`` it is credited with what the living earn. ``info=True`` gives
      ``(group, "info", "won")``: 1 at the end of an episode that was won.
    - Hanabi: the mask is True of the one whose turn it is.
    - Switch riddle: who is not in the room may do nothing only (``action_mask``); in JaxMARL
      other actions have no effect there.
    - Overcooked: ``shaped_reward=1.0`` adds the environment's shaped reward, linearly less until
      ``shaped_reward_steps`` env steps of all copies; ``info=True`` gives the reward without. It
      is for training: policies are measured without it (:meth:`measured`).

    On a CPU one thread of torch is best (``torch.set_num_threads(1)``, ``threads: 1`` in a
    recipe): torch's and JAX's threads get in each other's way. JAX does not survive a fork: start
    processes by spawn. On a GPU it needs JAX's own GPU build, else the environment runs on the CPU
    and its tensors are moved; GPUs are untested.

    Args:
        environment (str or MultiAgentEnv): one of ``jaxmarl.registered_envs``, or an environment of
            JaxMARL's of one's own, which stays as it is.

    Keyword Args:
        num_envs (int): number E of copies.
        max_steps (int, optional): time limit of an episode; None: as the environment's class says.
        seed (int, optional): drawn from torch's global generator if None.
        device (torch.device): of the tensors.
        state ("observations", "world" or callable, optional): what a central critic sees: all
            agents' observations side by side, the environment's own state (of SMAX, MPE and
            Overcooked), or what ``state(environment)`` gives of a copy's JAX state, ``[S]``.
        info (bool): with ``(group, "info")``.
        group_map (dict or MarlGroupMapType, optional): group -> agents; by the ids' prefixes.
        continuous_actions (bool, optional): in MPE, which has both; ignored elsewhere.
        categorical_actions (bool): discrete actions as an index, otherwise one-hot.
        shaped_reward (float): how much of the environment's shaped reward is added.
        shaped_reward_steps (int, optional): env steps after which none is.
        **kwargs: of the environment; ``scenario`` (SMAX) and ``layout`` (Overcooked) may be names.

    Shapes:
        - ``(group, "observation")``: ``[E, N, ...]``; ``("next", group, "reward")``: ``[E, N, 1]``
        - ``(group, "mask")``: ``[E, N]``; ``(group, "action_mask")``: ``[E, N, n_actions]``
        - ``done``, ``terminated``, ``truncated``: ``[E, 1]``; ``"state"``: ``[E, S]``

    Raises:
        ConfigError: an unknown environment, scenario, layout or argument; a state, shaped reward or
            grouping that the environment has not.
        MissingExtraError: JaxMARL is not installed.

    Reference: Rutherford et al., 2024, https://arxiv.org/abs/2311.10090.

    Examples:
        >>> env = JaxMarlEnv("MPE_simple_spread_v3", num_envs=4, seed=0)
        >>> env.rollout(5)["next", "agent", "reward"].shape
        torch.Size([4, 5, 3, 1])
    """

    def __init__(
        self,
        world: Any,
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
        self._after: Any = None  # the watched environments after the last step
        self._is_measured = False
        self._dlpack = dlpack
        self._jax_device = dlpack.device_of(torch.device(device))
        self._calls = step.compiled(
            step.Settings(
                world,
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
        self._flags, self._places = step.FLAGS, self._calls.places
        self.environment_name, self.max_steps = self._calls.world.name, self._calls.world.limit
        kinds, leaves = self._calls.kinds, self._calls.leaves
        super().__init__(
            Declaration(
                type(self).__name__,
                num_envs,
                {name: tuple(kind.spec() for kind in group) for name, group in kinds.items()},
                Unbounded(leaves["state"].shape[1:]) if "state" in leaves else None,
                in_turns=self._calls.world.traits.acts is not None,
            ),
            device=device,
            info={name: _info_spec(leaves[name]) for name in kinds if "info" in leaves[name]},
        )
        self._set_seed(int(torch.randint(2**31, ())) if seed is None else seed)

    # ------------------------------------------------------------------------ reset and step

    def _start(self, fresh: Tensor | None) -> dict[str, Any]:
        running = self._carry is not None
        self._drop_frames()
        self._after = None
        key = (self._carry["key"], self._carry["calls"]) if running else self._seeded
        carry, leaves = self._calls.start(*key)
        if fresh is None or not running:
            self._carry = carry
            return self._output(leaves)
        asked = self._dlpack.to_jax(fresh, self._jax_device)
        self._carry = self._calls.merge(self._carry, carry, asked)
        return where_fresh(fresh, self._output(leaves), self._begun or {})

    def _play(self, actions: dict[str, dict[str, Any]]) -> tuple[dict[str, Any], dict[str, Any]]:
        rows = [
            self._action(action, self._declaration.kinds[name][i].action_spec)
            for name, kinds in self.group_kinds.items()
            for i, action in enumerate(kinds.parts(actions[name], "action").values())
        ]
        if self._watched:
            self._after = self._calls.look(self._carry, rows)
            self._keep_frames()
        self._carry, after, next_start = self._calls.step(self._carry, rows)
        return self._output(after), self._output(next_start)

    def _action(self, action: Tensor, spec: Any) -> Any:
        if isinstance(spec, OneHot):
            action = action.to(torch.int32).argmax(-1)
        return self._dlpack.to_jax(action, self._jax_device)

    def _output(self, leaves: dict[str, Any]) -> dict[str, Any]:
        """Returns the leaves as tensors, with the flags beside the others."""
        output = self._dlpack.to_torch(leaves, self.device)
        flags, root = (zip(names, output.pop(key)) for key, names in self._flags.items())
        rows = {key: x if key == "mask" else x.unsqueeze(-1) for key, x in flags}
        for name, place in self._places.items():
            own = output[name]
            own.update({key: x[:, place] for key, x in rows.items()})
            unshaped = own.pop("unshaped", None)
            if unshaped is not None and self._is_measured:
                own["reward"] = unshaped
        output.update(root)
        return output

    def _draw(self, index: int) -> Picture:
        import jax

        from torchrl_marl.envs.jaxmarl.drawing import draw_environment

        if self._carry is None:
            self.reset()
        after = self._after if self._watched else None
        worlds = self._carry["world"] if after is None else after
        own = jax.device_get(jax.tree.map(lambda x: x[index], worlds))
        return draw_environment(self._calls.world.env, own)

    @contextlib.contextmanager
    def measured(self) -> Iterator[None]:
        """Leaves shaped rewards out of the rewards within this context, for evaluation."""
        before, self._is_measured = self._is_measured, True
        try:
            yield
        finally:
            self._is_measured = before

    # --------------------------------------------------------------- random state, snapshot

    def _set_seed(self, seed: int | None) -> None:
        import jax

        key = jax.random.PRNGKey(0 if seed is None else seed)
        zero = jax.numpy.zeros((), jax.numpy.int32)
        self._seeded = jax.device_put((key, zero), self._jax_device)
        self._carry = None
        self._begun = None

    def snapshot(self) -> TensorDict:
        """Returns the environment's whole state: environments, running episodes and JAX's random
        key.

        Returns:
            TensorDict: to be given to :meth:`restore`; saves with ``torch.save(x.to_dict())``.
        """
        if self._carry is None:
            self.reset()
        shared = {key: self._carry[key] for key in ("key", "calls")}
        world = {key: x for key, x in self._carry.items() if key not in shared}
        read = self._dlpack.read_tree
        source = {"world": {"batched": read(world), "shared": read(shared)}}
        if self._begun is not None:
            source["begun"] = map_leaves(self._begun, torch.clone)
            source["ended"] = self._ended.clone()  # type: ignore[union-attr,assignment]
        return TensorDict(source)

    def restore(self, snapshot: TensorDict) -> None:
        """Continues from a snapshot of an environment that was built with the same arguments.

        Raises:
            SimulatorStateError: a snapshot of another environment or another number of envs.
        """
        saved = {**snapshot["world", "batched"], **snapshot["world", "shared"]}
        carry = self._dlpack.write_tree(self._calls.carry, saved, self._jax_device)
        self._begun, self._ended = None, None
        if "begun" in snapshot.keys():
            self._begun = map_leaves(snapshot["begun"].to_dict(), torch.clone)
            self._ended = snapshot["ended"].clone()
        self._carry = carry


def _info_spec(leaves: Mapping[str, Any]) -> Composite:
    own = {name: Unbounded(tuple(x.shape[1:])) for name, x in leaves["info"].items()}
    return Composite(own, shape=next(iter(own.values())).shape[:1])
