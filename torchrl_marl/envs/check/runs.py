"""Checks of whole episodes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from torchrl.envs import EnvBase

from torchrl_marl.envs.check.layout import Findings, base_of, differs, leaves
from torchrl_marl.runtime.random_state import RandomState
from torchrl_marl.specs import TeamSpec
from torchrl_marl.specs.groups import is_lazy

__all__ = [
    "Attributes",
    "Play",
    "attribute_name",
    "attributes",
    "check_idle_actions",
    "check_outputs_stay",
    "check_partial_reset",
    "check_seeds",
    "check_twin",
    "describe_error",
    "find_not_reset",
    "restore_attributes",
]

Path = tuple[Any, ...]
Attributes = dict[Path, Any]
"""Copies of tensors, arrays, numbers and strings, by path through attributes, lists and dicts."""

_MAX_DEPTH = 3


def attributes(env: EnvBase) -> Attributes:
    """Returns the values of an environment's attributes, also inside lists and dicts."""
    return {
        path: _copy_value(x)
        for key, attribute in vars(base_of(env)).items()
        for path, x in _iterate_values(attribute, key)
    }


def find_not_reset(
    first: tuple[Attributes, Attributes], second: tuple[Attributes, Attributes]
) -> list[Path]:
    """Returns the attributes that two resets left as they were, so they still differ.

    Args:
        first, second (tuple of Attributes): attributes before and after the first reset, and before
            and after the second.

    Examples:
        >>> was, now = {("level",): 0, ("x",): 3}, {("level",): 0, ("x",): 1}
        >>> find_not_reset((was, now), ({("level",): 5}, {("level",): 5}))
        [('level',)]
    """
    (before, after), (before_second, after_second) = first, second
    common = after.keys() & before.keys() & after_second.keys() & before_second.keys()
    not_reset = (
        path
        for path in common
        if not _equal(after[path], after_second[path])
        and _equal(before[path], after[path])
        and _equal(before_second[path], after_second[path])
    )
    return sorted(not_reset, key=str)


def restore_attributes(env: EnvBase, paths: list[Path], values: Attributes) -> None:
    """Sets attributes of the environment to the given earlier values."""
    for path in paths:
        container: Any = vars(base_of(env))
        for key in path[:-1]:
            container = container[key]
        container[path[-1]] = _copy_value(values[path])


def attribute_name(path: Path) -> str:
    """Returns the path of an attribute in Python syntax."""
    return repr(path[0] + "".join(f"[{key!r}]" for key in path[1:]))


def _iterate_values(value: Any, *path: Any) -> Iterator[tuple[Path, Any]]:
    if isinstance(value, (torch.Tensor, np.ndarray, int, float, str)):
        yield path, value
    elif type(value) in (list, dict) and len(path) < _MAX_DEPTH:
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _iterate_values(item, *path, key)


def _copy_value(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    return value.copy() if isinstance(value, np.ndarray) else value


def _equal(first: Any, second: Any) -> bool:
    if isinstance(first, (torch.Tensor, np.ndarray)):
        if type(first) is not type(second) or first.shape != second.shape:
            return False
        return bool(torch.as_tensor(first == second).all())
    return bool(first == second)


StepValues = dict[tuple, Tensor]
"""Values of one step, by path of the leaf."""


@dataclass(frozen=True)
class Step:
    """Data of one step, copied: its start, actions and result, and the start of the next step."""

    before: TensorDictBase
    action: TensorDictBase
    after: TensorDictBase
    carry: TensorDictBase


class Play:
    """Steps an environment with random legal actions; the seed makes the steps reproducible.

    Args:
        env (EnvBase): the environment.
        team (TeamSpec): agents of the environment.
        seed (int): random seed of the environment and of the actions.
        change (callable, optional): function that changes each joint action before the step.
    """

    def __init__(
        self,
        env: EnvBase,
        team: TeamSpec,
        seed: int,
        change: Callable[[TensorDictBase], None] | None = None,
    ) -> None:
        self.env, self.team, self.change = env, team, change
        self.action_random_state = RandomState(seed)
        self.returned: dict[str, TensorDictBase] = {}
        env.set_seed(seed, static_seed=True)
        self.begin = env.reset().clone()
        self.carry = self.begin.clone()

    def step(self) -> Step:
        """Makes one step."""
        before = self.carry.clone()
        step_input = self.carry.clone()
        with self.action_random_state.active():
            step_input = self.env.rand_action(step_input)
            for group in self.team.groups.values():
                if group.action_mask_key is not None:
                    choose_legal(step_input.get(group.name))
        if self.change is not None:
            self.change(step_input)
        action = step_input.select(*self.env.action_keys).clone()
        transition, carry = self.env.step_and_maybe_reset(step_input)
        self.returned = {"next": transition.get("next"), "the next step": carry}
        self.last_actions = step_input.select(*self.env.action_keys)
        self.carry = carry.clone()
        return Step(before, action, transition.get("next").clone(), carry.clone())

    def record(self, n: int) -> list[StepValues]:
        """Makes several steps, and returns all tensors of each step."""
        return _flatten_steps([self.begin, *(self.step() for _ in range(n))])


def choose_legal(group: TensorDictBase) -> None:
    """Replaces the illegal actions of a group with legal actions, in place."""
    if is_lazy(group):
        for member in group.unbind(group.ndim - 1):
            choose_legal(member)
        return
    action, legal = group.get("action"), group.get("action_mask")
    one_hot = action.shape == legal.shape
    if not one_hot and action.shape != legal.shape[:-1]:
        return
    chosen = action.long().argmax(-1) if one_hot else action
    weights = (legal | ~legal.any(-1, keepdim=True)).float()
    drawn = torch.multinomial(weights.flatten(0, -2), 1).view(chosen.shape)
    allowed = weights.gather(-1, chosen.long().unsqueeze(-1)).squeeze(-1).bool()
    chosen = torch.where(allowed, chosen, drawn)
    if one_hot:
        chosen = torch.nn.functional.one_hot(chosen, legal.shape[-1])
    group.set("action", chosen.to(action.dtype))


def check_outputs_stay(play: Play, n_steps: int, findings: Findings) -> None:
    """Checks that later steps do not write to earlier output."""
    play.step()
    for i in range(n_steps):
        earlier = {name: (td, td.clone()) for name, td in play.returned.items()}
        step = play.step()
        for path in changed(play.last_actions, step.action):
            findings.add(
                path,
                f"in step {i + 2} the step overwrites the actions of its input",
                "unchanged actions, which learners keep",
                "clone the actions before they are changed",
            )
        for name, (td, copy) in earlier.items():
            for path in changed(td, copy):
                findings.add(
                    (name, *path) if name == "next" else path,
                    f"in step {i + 2} the output of the previous step is overwritten",
                    "outputs that never change",
                    "clone the simulator's buffers before returning them",
                )


def check_seeds(
    env: EnvBase, team: TeamSpec, seed: int, n: int, findings: Findings
) -> list[StepValues] | None:
    """Checks that the same seed repeats the episodes, and that another seed changes them.

    Returns the values of each step of the first play; None if a rule is broken.
    """
    first, second = (
        _record_with_attributes(env, team, seed, n),
        _record_with_attributes(env, team, seed, n),
    )
    path = _first_difference(first.played, second.played)
    if path is not None and (names := _stale_attributes(env, team, seed, first, second)):
        findings.add(
            "_reset",
            f"it keeps {names} from the last episode, so the same seed gives a different "
            f"{path!r} the second time",
            "the same episodes for the same seed and actions",
            "set it in _reset, or in _set_seed if it must outlive an episode",
        )
        return None
    if path is not None:
        findings.add(
            "set_seed",
            f"the same seed gives a different {path!r} the second time",
            "the same episodes for the same seed and actions",
            "draw from the environment's own generator, seeded in _set_seed",
        )
        return None
    other_seed_steps = _record(env, team, seed + 1, min(n, 5))
    if _first_difference(first.played, other_seed_steps, ignore=("action",)) is None:
        findings.hint("another seed gives the same episodes: is this environment deterministic?")
    return first.played


def check_twin(
    env: EnvBase,
    team: TeamSpec,
    make: Callable[[], EnvBase],
    seed: int,
    recorded: list[StepValues],
    findings: Findings,
) -> None:
    """Checks that two instances of an environment in one process do not disturb each other."""
    twin = make()
    try:
        first, second = Play(env, team, seed), Play(twin, team, seed)
        pairs = [(first.step(), second.step()) for _ in recorded[1:]]
        for i, name in enumerate(("the environment", "its twin")):
            played = [first.begin if i == 0 else second.begin, *(pair[i] for pair in pairs)]
            path = _first_difference(recorded, _flatten_steps(played))
            if path is not None:
                findings.add(
                    "make",
                    f"with two instances in one process {name} gives a different "
                    f"{path!r} than alone",
                    "the same episodes for the same seed, whatever else runs in the process",
                    "keep all state, including the random generator, in the instance",
                )
    finally:
        if twin is not env and not twin.is_closed:
            twin.close()


def check_idle_actions(
    env: EnvBase, team: TeamSpec, seed: int, recorded: list[StepValues], findings: Findings
) -> None:
    """Checks that actions of dead or waiting agents have no effect."""
    masked = [
        not bool(x.all()) for step in recorded for key, x in step.items() if key[-1] == "mask"
    ]
    if not any(masked):
        return
    groups = [group for group in team.groups.values() if group.mask_key is not None]
    random_state = RandomState(seed + 1)

    def change(td: TensorDictBase) -> None:
        with random_state.active():
            drawn = env.full_action_spec.rand()
        for group in groups:
            _overwrite_masked_actions(
                td.get(group.name), drawn.get(group.name), td.get(group.mask_key)
            )

    try:
        played = _record(env, team, seed, len(recorded) - 1, change)
        path = _first_difference(recorded, played, ignore=("action",))
        found = None if path is None else f"{path!r} changes with the actions of masked agents"
    except Exception as error:  # noqa: BLE001 - such actions may raise any error
        found = f"the actions of masked agents make it fail ({describe_error(error)})"
    if found is not None:
        findings.add(
            "mask",
            found,
            "no effect of the actions of dead and waiting agents",
            "ignore their actions, or replace them by zeros, where the mask is False",
        )


def _overwrite_masked_actions(
    group: TensorDictBase, drawn: TensorDictBase, acts_mask: Tensor
) -> None:
    """Overwrites the actions of masked agents; continuous actions become NaN."""
    if is_lazy(group):
        members = zip(
            group.unbind(group.ndim - 1), drawn.unbind(group.ndim - 1), acts_mask.unbind(-1)
        )
        for member, drawn_member, acting in members:
            _overwrite_masked_actions(member, drawn_member, acting)
        return
    action = group.get("action")
    acts_mask = acts_mask.reshape(*acts_mask.shape, *[1] * (action.ndim - acts_mask.ndim))
    value = drawn.get("action")
    value = torch.full_like(action, torch.nan) if action.is_floating_point() else value
    group.set("action", torch.where(acts_mask, action, value))


def check_partial_reset(env: EnvBase, team: TeamSpec, seed: int, findings: Findings) -> None:
    """Checks that a partial reset restarts only the requested envs."""
    if env.batch_size.numel() < 2:
        return
    base = base_of(env)  # its transforms may change observations
    before = Play(base, team, seed).step().carry
    reset_mask = torch.zeros_like(before.get("done"))
    reset_mask.view(-1)[0] = True
    others = ~reset_mask.squeeze(-1)
    # Calls _reset, because TorchRL's reset restores the data of the other envs.
    after = dict(leaves(base._reset(before.clone().set("_reset", reset_mask))))
    for path, value in leaves(before.select(*team.groups)):
        found = after.get(path)
        if found is None or found.shape != value.shape or not bool(found[others].any()):
            continue
        if differs(value[others], found[others]):
            findings.add(
                "_reset",
                f"a reset of the first env changes {path!r} of other envs",
                "unchanged other envs",
                "reset only the envs of td['_reset'], and return the last output of the others",
            )
            return


# ------------------------------------------------------------------------------------ comparing


def _record(
    env: EnvBase,
    team: TeamSpec,
    seed: int,
    n: int,
    change: Callable[[TensorDictBase], None] | None = None,
) -> list[StepValues]:
    return Play(env, team, seed, change).record(n)


@dataclass(frozen=True)
class _Recording:
    """Recorded steps, and the environment's attributes before and after the first reset."""

    played: list[StepValues]
    attributes: tuple[Attributes, Attributes]


def _record_with_attributes(env: EnvBase, team: TeamSpec, seed: int, n: int) -> _Recording:
    before = attributes(env)
    play = Play(env, team, seed)
    after = attributes(env)
    return _Recording(play.record(n), (before, after))


def _stale_attributes(
    env: EnvBase, team: TeamSpec, seed: int, first: _Recording, second: _Recording
) -> str:
    """Returns the names of the attributes that make two plays differ because no reset sets them.

    The names are found by a test: with the first play's values of these attributes, a new play
    must repeat the first. Otherwise the text is empty.
    """
    paths = find_not_reset(first.attributes, second.attributes)
    if not paths:
        return ""
    restore_attributes(env, paths, first.attributes[0])
    repeated = _record(env, team, seed, len(first.played) - 1)
    same = _first_difference(first.played, repeated) is None
    return ", ".join(map(attribute_name, paths)) if same else ""


def _flatten_steps(played: list) -> list[StepValues]:
    """Returns all tensors of each recorded step, by path."""
    tensordicts = [
        TensorDict({"next": x.after, "carry": x.carry}, []) if isinstance(x, Step) else x
        for x in played
    ]
    return [dict(leaves(td)) for td in tensordicts]


def _first_difference(
    first: list[StepValues], second: list[StepValues], ignore: tuple = ()
) -> tuple | None:
    for a, b in zip(first, second):
        for path, value in a.items():
            if path[-1] not in ignore and (path not in b or differs(value, b[path])):
                return path
    return None


def changed(now: TensorDictBase, then: TensorDictBase) -> list[tuple]:
    """Returns the paths of leaves that differ between two TensorDicts."""
    old = dict(leaves(then))
    return [path for path, value in leaves(now) if path in old and differs(value, old[path])]


def describe_error(error: Exception) -> str:
    """Returns the type and the message of an error as one line, without its last full stop."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:400].removesuffix('.')}"
