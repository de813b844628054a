"""Checks of an environment's specs and keys, and the collection of broken rules."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor
from torchrl.data import Bounded, Categorical, Composite, TensorSpec
from torchrl.data.tensor_specs import StackedComposite
from torchrl.envs import EnvBase, TransformedEnv

from torchrl_marl.specs import TeamSpec
from torchrl_marl.specs.groups import is_lazy

__all__ = ["Finding", "Findings", "check_layout", "check_specs", "leaves", "spec_leaves"]


@dataclass(frozen=True)
class Finding:
    """A broken rule: the key, the value found there, the expected value, and a fix."""

    key: NestedKey
    found: str
    expected: str
    fix: str

    def __str__(self) -> str:
        return f"{self.key!r}: {self.found}, expected {self.expected}. Fix: {self.fix}."


@dataclass
class Findings:
    """Collection of broken rules and of hints; each rule is listed once per key.

    Examples:
        >>> findings = Findings()
        >>> findings.add("done", "it is 0-dimensional", "[*B, 1]", "unsqueeze it")
        >>> print(findings.message("MyEnv"))
        MyEnv breaks 1 rule of a team's environment:
        1. 'done': it is 0-dimensional, expected [*B, 1]. Fix: unsqueeze it.
    """

    problems: dict[tuple[NestedKey, str], Finding] = field(default_factory=dict)
    hints: dict[str, None] = field(default_factory=dict)

    def add(self, key: NestedKey, found: str, expected: str, fix: str) -> None:
        """Adds a broken rule, unless it was already added for the same key."""
        self.problems.setdefault((key, fix), Finding(key, found, expected, fix))

    def add_where_broken(
        self, broken: Tensor, key: NestedKey, step: int, found: str, expected: str, fix: str
    ) -> None:
        """Adds a broken rule if a bool tensor has a True entry, and names the first such index."""
        if bool(broken.any()):
            index = broken.nonzero()[0].tolist()
            position = f"in step {step} at {index}" if index else f"in step {step}"
            self.add(key, f"{position} {found}", expected, fix)

    def hint(self, text: str) -> None:
        """Adds a hint about something that is unusual, but may be intended."""
        self.hints.setdefault(text, None)

    def message(self, name: str) -> str:
        """Returns all findings as a numbered list."""
        n = len(self.problems)
        lines = [f"{name} breaks {n} rule{'s' * (n != 1)} of a team's environment:"]
        lines += [f"{i}. {finding}" for i, finding in enumerate(self.problems.values(), 1)]
        return "\n".join([*lines, *(f"Hint: {hint}" for hint in self.hints)])


def differs(first: Tensor, second: Tensor) -> bool:
    """Returns True if two tensors differ anywhere; NaN equals NaN."""
    if first.shape != second.shape or first.dtype != second.dtype:
        return True
    if first.is_floating_point():
        return not torch.equal(torch.nan_to_num(first), torch.nan_to_num(second))
    return not torch.equal(first, second)


FLAGS = ("done", "terminated", "truncated")


def check_layout(env: EnvBase, findings: Findings) -> TeamSpec | None:
    """Checks groups, keys and flags; returns None if the environment cannot be played."""
    _check_group_map(env, findings)
    if findings.problems:
        return None
    try:
        team = TeamSpec.from_env(env)
    except (ValueError, KeyError) as error:
        findings.add(
            "group_map",
            f"the team cannot be read from the specs ({error})",
            "(group, 'observation') and (group, 'action') with one row per agent",
            "declare these keys, or rename the groups",
        )
        return None
    _check_root_flags(env, findings)
    for name, group in team.groups.items():
        _check_group_flags(env, name, findings)
        reward = env.full_reward_spec.get(group.reward_key, None)
        rows = (group.n_agents, 1) if isinstance(group.reward_key, tuple) else (1,)
        _check_shape(
            reward,
            group.reward_key,
            (*env.batch_size, *rows),
            findings,
            "return one number per agent",
        )
        if group.agent_done and group.mask_key is None:
            findings.add(
                (name, "mask"),
                "the agents have done flags but no mask",
                "bool [*B, N], True for agents that are alive and act",
                "add it to the observation spec, and return it in reset and step",
            )
    return team


def _check_group_map(env: EnvBase, findings: Findings) -> None:
    group_map = getattr(env, "group_map", None)
    if not group_map:
        findings.hint(
            "there is no group_map; groups are read from the action keys, and agents are named by "
            "numbers."
        )
        return
    _check_each_agent_has_a_group(env, group_map, findings)
    keys = env.full_action_spec.keys(True, True)
    groups_with_actions = {key[0] for key in keys if isinstance(key, tuple)}
    for name in sorted(groups_with_actions - set(group_map)):
        findings.add(
            "group_map",
            f"group {name!r} has actions but is not in it",
            f"of {sorted(groups_with_actions)}",
            f"add {name!r} with its agents' names",
        )
    for name, names in group_map.items():
        _check_action_rows(env, name, names, findings)


def _check_each_agent_has_a_group(
    env: EnvBase, group_map: Mapping[str, Sequence[str]], findings: Findings
) -> None:
    members = [agent for names in group_map.values() for agent in names]
    agent_names = getattr(env, "agent_names", None)
    missing = [agent for agent in agent_names if agent not in members] if agent_names else []
    if missing or len(set(members)) < len(members):
        found = f"{missing} are in no group" if missing else f"an agent is in two of {group_map}"
        findings.add(
            "group_map", found, "every agent in one group", "put each agent into one group"
        )


def _check_action_rows(
    env: EnvBase, name: str, agent_names: Sequence[str], findings: Findings
) -> None:
    action = env.full_action_spec
    spec = action.get((name, "action"), None)
    if spec is None:
        findings.add(
            (name, "action"),
            "it is in no action spec",
            "one action per agent",
            f"declare it in the action spec, or remove {name!r} from the group_map",
        )
        return
    rows = action[name].shape[len(env.batch_size) :] or spec.shape[len(env.batch_size) :]
    if not rows or rows[0] != len(agent_names):
        found = f"names {len(agent_names)} agents, its actions have {list(rows)[:1]} rows"
        findings.add(
            "group_map",
            f"group {name!r} {found}",
            "a name for each row",
            "name all of its agents, in the order of the rows",
        )


def _check_root_flags(env: EnvBase, findings: Findings) -> None:
    for flag in FLAGS:
        _check_shape(
            env.full_done_spec.get(flag, None),
            flag,
            (*env.batch_size, 1),
            findings,
            "declare done, terminated and truncated of the episode at the root of the done spec",
            torch.bool,
        )


def _check_group_flags(env: EnvBase, name: str, findings: Findings) -> None:
    declared = [flag for flag in FLAGS if (name, flag) in env.full_done_spec.keys(True, True)]
    if declared and len(declared) < len(FLAGS):
        findings.add(
            (name, "done"),
            f"the group declares {declared} only",
            f"all of {list(FLAGS)}, or none if agents end with the episode",
            "add the missing flags",
        )


def _check_shape(
    spec: TensorSpec | None,
    key: NestedKey,
    shape: tuple[int, ...],
    findings: Findings,
    fix: str,
    dtype: torch.dtype | None = None,
) -> None:
    expected = f"{list(shape)}" + ("" if dtype is None else f" of {str(dtype)[6:]}")
    if spec is None:
        findings.add(key, "it is not declared", expected, fix)
    elif tuple(spec.shape) != shape or dtype not in (None, spec.dtype):
        findings.add(key, f"its spec is {list(spec.shape)} of {str(spec.dtype)[6:]}", expected, fix)


# -------------------------------------------------------------------------- data against specs


def leaves(td: TensorDictBase, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple, Tensor]]:
    """Yields all tensors with their paths; a lazily stacked group yields each agent's tensors."""
    if is_lazy(td):
        for i, member in enumerate(td.unbind(td.stack_dim)):
            yield from leaves(member, (*path, i))
        return
    for key, x in td.items():
        if isinstance(x, TensorDictBase):
            yield from leaves(x, (*path, key))
        elif isinstance(x, Tensor):
            yield (*path, key), x


def spec_leaves(spec: TensorSpec, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple, TensorSpec]]:
    """Yields the specs of the tensors that :func:`leaves` yields, with the same paths."""
    if isinstance(spec, StackedComposite):
        for i, member in enumerate(spec.unbind(spec.dim)):
            yield from spec_leaves(member, (*path, i))
    elif isinstance(spec, Composite):
        for key, leaf in spec.items():
            yield from spec_leaves(leaf, (*path, key))
    else:
        yield path, spec


def check_specs(td: TensorDictBase, specs: list[Composite], step: int, findings: Findings) -> bool:
    """Checks that data have the keys, shapes and dtypes that the specs declare."""
    found, before = dict(leaves(td)), len(findings.problems)
    for path, spec in (pair for part in specs for pair in spec_leaves(part)):
        key: NestedKey = path if len(path) > 1 else path[0]
        value = found.get(path)
        if value is None and all(isinstance(part, str) for part in path):
            value = td.get(path, None)  # a leaf that has the same shape for all agents
        expected = f"{list(spec.shape)} of {str(spec.dtype)[6:]}, as declared"
        if value is None:
            if isinstance(spec.dtype, torch.dtype):
                findings.add(
                    key, "it is declared but not returned", expected, "return it in every step"
                )
        elif value.shape != spec.shape or value.dtype != spec.dtype:
            fix = "return it as declared, or correct the spec"
            shown = f"{list(value.shape)} of {str(value.dtype)[6:]}"
            findings.add(key, f"in step {step} it is {shown}", expected, fix)
    return len(findings.problems) == before


def outside(value: Tensor, spec: TensorSpec) -> Tensor:
    """Returns a mask of the values that are NaN, infinite, or outside the spec's bounds."""
    wrong = torch.zeros_like(value, dtype=torch.bool)
    if value.is_floating_point():
        wrong = ~value.isfinite()
    if isinstance(spec, Bounded):
        low, high = spec.space.low.to(value.device), spec.space.high.to(value.device)
        wrong = wrong | (value < low) | (value > high)
    elif type(spec) is Categorical and value.dtype is not torch.bool:
        wrong = wrong | (value < 0) | (value >= spec.space.n)
    return wrong


def base_of(env: EnvBase) -> EnvBase:
    """Returns the environment without its transforms."""
    while isinstance(env, TransformedEnv):
        env = env.base_env
    return env
