"""Rollouts with steps that are captured as a graph."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from tensordict import NestedKey, TensorDict, TensorDictBase
from torch import Tensor, nn
from torchrl.envs import Compose, EnvBase, TensorDictPrimer, Transform, TransformedEnv
from torchrl.envs.utils import ExplorationType, set_exploration_type

from torchrl_marl.capture.cuda_graph import CudaGraph
from torchrl_marl.capture.program import Program
from torchrl_marl.collectors.team import TeamPolicy, check_actions
from torchrl_marl.envs.remember import Remember, remembered_keys, unrecorded_keys
from torchrl_marl.errors import CaptureError, UserError
from torchrl_marl.modules.exploration import RandomActor
from torchrl_marl.simulator.captured import CapturedSimulator
from torchrl_marl.simulator.packing import ResetPool, TensorDictLayout, begin_episodes
from torchrl_marl.simulator.python_state import PythonState, watched
from torchrl_marl.simulator.step_graphs import OuterTensors, refuse_many_structures
from torchrl_marl.specs import TeamSpec

__all__ = ["CapturedRollout", "fingerprint"]

_SCALAR_TYPES = (bool, int, float, str, type(None))


def fingerprint(part: Any) -> tuple:
    """Returns a fingerprint of the modules, tensors and attributes of a policy or transform.

    The values of tensors are left out, since a graph reads the tensors' current values.

    Args:
        part (callable): a policy or a transform.

    Examples:
        >>> net = nn.Sequential(nn.Linear(2, 2), nn.Dropout())
        >>> before = fingerprint(net)
        >>> fingerprint(net) == before, fingerprint(net.eval()) == before
        (True, False)
    """
    part = getattr(part, "__self__", part)  # the object of a bound method
    if not isinstance(part, nn.Module):
        return (id(part), *_scalar_attributes(part))
    marks: list[Any] = []
    for name, module in part.named_modules():
        marks += [(name, id(module)), *_scalar_attributes(module)]
        tensors = [*module._parameters.items(), *module._buffers.items()]
        marks += [(name, key, id(x)) for key, x in tensors]
    return tuple(marks)


def _scalar_attributes(part: Any) -> list[tuple[str, Any]]:
    attributes = getattr(part, "__dict__", {})
    return [(key, x) for key, x in attributes.items() if type(x) in _SCALAR_TYPES]


_MAX_PROGRAMS = 16

Policy = Callable[[TensorDictBase], TensorDictBase]
Loop = Callable[..., Sequence[Tensor]]


class CapturedRollout:
    """Steps an environment T times with a policy, without waiting for the device.

    Args:
        env (EnvBase): environment with a simulator that can be captured. Its transforms must keep
            no tensors from step to step.
        execution (str): execution of the graphs.
        n_steps (int): number T of steps in a batch.

    Shapes:
        - a batch: ``[E, T]``

    Raises:
        CaptureError: the environment or a transform cannot be captured.
    """

    def __init__(self, env: EnvBase, execution: Any, n_steps: int) -> None:
        self.env = env
        self._execution, self._n_steps = execution, n_steps
        base = env.base_env if isinstance(env, TransformedEnv) else env
        if not hasattr(base, "captured"):
            raise CaptureError(f"{type(base).__name__} is not known to be a tensor simulator")
        _refuse_stateful(env)
        self._base: Any = base
        self.captured: CapturedSimulator = base.captured()
        self.pool = ResetPool(
            self.captured.packing,
            self.captured.simulator,
            self._make_twin,
            env.batch_size.numel(),
            depth=min(n_steps, 128),
        )
        self._hidden_keys, self._unrecorded = remembered_keys(env), unrecorded_keys(env)
        self._is_prepared = False
        self._fingerprints: Any = None  # fingerprints of the transforms
        self._random_policy = _random_policy(env)
        self._programs: dict[Any, tuple[Program, TensorDictLayout, Loop, OuterTensors, Policy]] = {}

    def _make_twin(self, num_envs: int) -> tuple[EnvBase, Any]:
        base = self._base.twin(num_envs)
        simulator = base.simulator
        # Hidden states start at zero: they are not drawn, and the pool does not store them.
        parts = [part for part in _transforms(self.env) if not isinstance(part, Remember)]
        if not parts:
            return base, simulator
        return TransformedEnv(base, Compose(*(part.clone() for part in parts))), simulator

    def run(
        self,
        policy: Policy | None,
        carry: TensorDictBase,
        exploration: ExplorationType,
    ) -> tuple[TensorDict, TensorDict]:
        """Returns a batch, and the step from which the next batch continues.

        Args:
            policy (callable, optional): policy that acts for all groups; by default random actions.
            carry (TensorDictBase): the step from which the batch starts, ``[E]``.
            exploration (ExplorationType): how the policy's actions are sampled.
        """
        policy = self._random_policy if policy is None else policy
        random = {} if self._programs else self._base.random_state.state_dict()
        try:
            self.prepare()
            self._is_prepared = False
            leaves = [x.contiguous() for x in self._carry_layout().leaves(carry)]
            state = self.captured.state
            program, nesting, loop, outer = self._find_program(policy, exploration, state, leaves)
            outer.refresh(program, self.captured.simulator)
        except CaptureError:
            if random:  # undo the random draws of the failed attempt
                self._base.random_state.load_state_dict(random)
            raise
        inputs = [*state, *leaves, self.pool.tensors["used"], *self._pool_leaves()]
        out = list(loop(*inputs))
        if program.traced.checks:
            program.gather(out.pop())
        n, m = len(state), len(leaves)
        self.captured.state, leaves, self.pool.tensors["used"] = out[:n], out[n : n + m], out[n + m]
        self.captured.release()  # the simulator's attributes now show its current state
        size = tuple(self.env.batch_size)
        batch = nesting.build(out[n + m + 1 :], (*size, self._n_steps))
        return batch, self._carry_layout().build(leaves, size)

    def _carry_layout(self) -> TensorDictLayout:
        """Returns the layout of a step: the entries of a reset, and the hidden states."""
        nesting = self.pool.nesting
        if not self._hidden_keys:
            return nesting
        keys = [*nesting.keys, *self._hidden_keys]
        return TensorDictLayout.of(keys, nesting.inner, nesting.device)

    def _make_loop(self, program: Program, n_state: int, n_carry: int) -> Loop:
        """Returns a function of flat tensors that makes T steps; a CUDA graph contains all T."""
        moving = n_state + n_carry + 1  # 1: the number of initial states used

        def loop(*inputs: Tensor) -> list[Tensor]:
            now: Sequence[Tensor] = inputs[:moving]
            starts = inputs[moving:]
            history: list[Sequence[Tensor]] = []
            failed: Tensor | None = None
            for _ in range(self._n_steps):
                out, found = program.checked([*now, *starts])
                now = out[:moving]
                history.append(out[moving:])
                failed = found if failed is None or found is None else failed | found
            leaves = [torch.stack(steps, 1) for steps in zip(*history)]
            return [*now, *leaves, *([] if failed is None else [failed])]

        if self._execution != "cudagraph":
            return loop
        return CudaGraph(loop, mutated=(), name="a rollout")

    def prepare(self) -> None:
        """Refills the pool of initial states; waits for the device, so call it between batches.

        Raises:
            CaptureError: a copy of the environment, from which initial states are drawn, cannot be
                reset with its transforms.
        """
        transforms = [(fingerprint(x), _tensor_versions(x)) for x in self._env_transforms()]
        changed = self._fingerprints is not None and transforms != self._fingerprints
        # Initial states may be outdated, for example if the goal or a transform has changed.
        self.pool.discard_if_other_structure(self.captured.structure())
        if changed or self.pool.is_outdated():
            self.pool.empty()
        if changed:
            self.pool.discard_twin()
        self._fingerprints = transforms
        if self.pool.is_stale or not self._is_prepared:
            self.captured.read_assumed()
            _attempt(self.pool.prepare, "a reset of a twin environment, which draws starts ahead,")
        self._is_prepared = True

    def _pool_leaves(self) -> list[Tensor]:
        tensors = self.pool.tensors
        return [*tensors["state"], *tensors["carry"].values(), *tensors["written"]]

    def _find_program(
        self, policy: Policy, exploration: ExplorationType, state: list[Tensor], now: list[Tensor]
    ) -> tuple[Program, TensorDictLayout, Loop, OuterTensors]:
        policy_key = (fingerprint(policy), *self._transforms(), exploration)
        key = (*policy_key, self.captured.signature())
        if key not in self._programs:
            refuse_many_structures([*{key[-1]: None for key in self._programs}, key[-1]])
            before = PythonState(policy, tensors=True) if _is_module(policy) else None
            try:
                program, nesting, outer = _attempt(
                    lambda: self._capture_step(policy, exploration, state, now), "a trial step"
                )
            except CaptureError:
                if before is not None:
                    before.restore()
                raise
            if policy_key != (fingerprint(policy), *self._transforms(), exploration):
                raise CaptureError("the policy or a transform changes attributes when it is called")
            loop = self._make_loop(program, len(state), len(now))
            # Capturing finds the tensors that determine the path; they change the signature.
            key = (*policy_key, self.captured.signature())
            # A reference to the policy is kept, so that no other object gets its id.
            self._programs[key] = program, nesting, loop, outer, policy
            while len(self._programs) > _MAX_PROGRAMS:
                del self._programs[next(iter(self._programs))]
        return self._programs[key][:4]

    def _transforms(self) -> list[tuple]:
        return [fingerprint(part) for part in self._env_transforms()]

    def _env_transforms(self) -> list[Any]:
        return [self.env.transform] if isinstance(self.env, TransformedEnv) else []

    def _capture_step(
        self, policy: Policy, exploration: ExplorationType, state: list[Tensor], now: list[Tensor]
    ) -> tuple[Program, TensorDictLayout, OuterTensors]:
        found: list[TensorDictLayout] = []
        n_carry, nesting = len(now), self._carry_layout()
        now = [x.clone() for x in now]  # a policy may write to its inputs
        self._check_policy(policy, exploration, now)
        # After the trial steps, which replace the simulator's tensors by copies.
        outer = OuterTensors(self.captured.simulator, self.captured.packing.exclude)

        def step(*inputs: Tensor) -> Any:
            carry = nesting.build(inputs[:n_carry], self.env.batch_size)
            drawn = self._pool_entries(inputs[n_carry], inputs[n_carry + 1 :])
            with set_exploration_type(exploration):
                stepped = self.env.step(policy(carry))
            following = self.env.step_mdp(stepped)
            if self._unrecorded:
                stepped = stepped.exclude(*self._unrecorded)
            if not found:
                found.append(TensorDictLayout(stepped))
            after = {key: following.get(key) for key in nesting.keys}
            ended = stepped.get(("next", "done")).reshape(-1)
            return ended, after, drawn, found[0].leaves(stepped)

        def finish(state: list[Tensor], output: Any) -> list[Tensor]:
            ended, after, drawn, leaves = output
            state, after, used = begin_episodes(ended, state, after, drawn)
            # Compiled graphs require inputs that have the same memory layout in every step.
            return [*(x.contiguous() for x in (*state, *after.values(), used)), *leaves]

        with watched(policy) if _is_module(policy) else contextlib.nullcontext():
            program = self.captured.capture(
                step,
                *now,
                self.pool.tensors["used"],
                *self._pool_leaves(),
                name=f"a step of {type(self._base).__name__} with its policy",
                # The steps of a batch are one CUDA graph: see _make_loop.
                execution="compile" if self._execution == "cudagraph" else self._execution,
                finish=finish,
            )
        outer.record_paths(program)
        return program, found[0], outer

    def _check_policy(
        self, policy: Policy, exploration: ExplorationType, now: list[Tensor]
    ) -> None:
        """Checks in two eager steps that the policy acts for all groups and keeps no state."""
        captured, nesting = self.captured, self._carry_layout()
        size = self.env.batch_size

        def act(td: TensorDictBase) -> TensorDictBase:
            torch.manual_seed(0)
            return policy(td)

        with captured.trial(), torch.random.fork_rng(), set_exploration_type(exploration):
            acted = act(nesting.build([x.clone() for x in now], size))
            check_actions(
                [k for k in self.env.action_keys if _has_entry(acted, k)], self.env.action_keys
            )
            if hasattr(self._base, "check_actions"):
                self._base.check_actions(self._invert(acted))
            following = self.env.step_mdp(self.env.step(acted))
            kept = nesting.build([x.clone() for x in nesting.leaves(following)], size)
            expected, found = act(following), act(kept)
            for key in self.env.action_keys:
                if not torch.equal(expected.get(key), found.get(key)):
                    raise CaptureError(
                        "the policy keeps a state between calls, which a graph does not carry; "
                        "use torchrl_marl.envs.Remember, which does"
                    )

    def _invert(self, acted: TensorDictBase) -> TensorDictBase:
        """Returns a step in the form in which the transforms pass it to the environment."""
        if not isinstance(self.env, TransformedEnv):
            return acted
        return self.env.transform.inv(acted.copy())

    def _pool_entries(self, used: Tensor, leaves: tuple[Tensor, ...]) -> dict[str, Any]:
        n, m = len(self.captured.packing), len(self.pool.nesting.keys)
        return {
            "used": used,
            "state": list(leaves[:n]),
            "carry": dict(zip(self.pool.nesting.keys, leaves[n : n + m])),
            "written": list(leaves[n + m :]),
        }

    def raise_failed(self) -> None:
        """Raises the errors of the simulator's deferred checks; waits for the device.

        Raises:
            GraphCheckError: a check failed; the message names the line of the simulator.
        """
        for program, *_ in self._programs.values():
            program.raise_failed()


def _is_module(policy: Policy) -> bool:
    return isinstance(policy, nn.Module) and not isinstance(policy, EnvBase)


def _attempt(call: Callable[[], Any], what: str) -> Any:
    """Calls a function; turns its errors into :class:`CaptureError`, so steps then run eagerly."""
    try:
        return call()
    except UserError:
        raise
    except Exception as error:
        why = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise CaptureError(f"{what} raised {why}") from error


def _transforms(env: EnvBase) -> list[Transform]:
    if not isinstance(env, TransformedEnv):
        return []
    return list(env.transform) if isinstance(env.transform, Compose) else [env.transform]


def _has_entry(td: TensorDictBase, key: NestedKey) -> bool:
    return td.get(key, None) is not None


def _tensor_versions(module: torch.nn.Module) -> list[int]:
    return [x._version for x in module.buffers()]


def _random_policy(env: EnvBase) -> Policy:
    """Returns a policy that acts like ``env.rand_action``, but does not check the actions."""
    team = TeamSpec.from_env(env)
    try:
        return TeamPolicy(RandomActor(group, env.device) for group in team.groups.values())
    except ValueError:  # only the spec can sample these actions
        return env.rand_action


def _refuse_stateful(env: EnvBase) -> None:
    """Refuses transforms that keep tensors from step to step, or that add a memory."""
    if not isinstance(env, TransformedEnv):
        return
    for part in _transforms(env):
        if isinstance(part, TensorDictPrimer):
            raise CaptureError(
                f"the transform {type(part).__name__} adds a memory, which a graph does not carry; "
                "use torchrl_marl.envs.Remember"
            )
        for name, value in vars(part).items():
            # A graph can read a module's buffers, but refuses to write to them.
            if isinstance(value, (Tensor, TensorDictBase)) or hasattr(value, "acquire"):
                raise CaptureError(f"the transform {type(part).__name__} keeps a state, {name}")
