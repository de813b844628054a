"""Findings of an environment check, and their wording."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from tensordict import NestedKey
from torch import Tensor

__all__ = ["Finding", "Findings"]


@dataclass(frozen=True)
class Finding:
    """A broken rule: where, found, expected, and the fix."""

    key: NestedKey
    found: str
    expected: str
    fix: str

    def __str__(self) -> str:
        return f"{self.key!r}: {self.found}, expected {self.expected}. Fix: {self.fix}."


@dataclass
class Findings:
    """All broken rules, once each, and hints at possible mistakes.

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
        """Adds a problem; a rule broken again at the same key is listed once."""
        self.problems.setdefault((key, fix), Finding(key, found, expected, fix))

    def where(
        self, broken: Tensor, key: NestedKey, step: int, found: str, expected: str, fix: str
    ) -> None:
        """Adds a problem where a tensor of bools is true, with its first place."""
        if bool(broken.any()):
            place = broken.nonzero()[0].tolist()
            at = f"in step {step} at {place}" if place else f"in step {step}"
            self.add(key, f"{at} {found}", expected, fix)

    def hint(self, words: str) -> None:
        """Adds a hint: something unusual that may be intended."""
        self.hints.setdefault(words, None)

    def message(self, name: str) -> str:
        """Returns all findings as a numbered text."""
        n = len(self.problems)
        lines = [f"{name} breaks {n} rule{'s' * (n != 1)} of a team's environment:"]
        lines += [f"{i}. {finding}" for i, finding in enumerate(self.problems.values(), 1)]
        return "\n".join([*lines, *(f"Hint: {hint}" for hint in self.hints)])


def shape_of(value: Tensor) -> str:
    """Returns a tensor's shape and dtype as text."""
    return f"{list(value.shape)} of {str(value.dtype).removeprefix('torch.')}"


def differs(first: Tensor, second: Tensor) -> bool:
    """Returns whether two tensors differ anywhere; NaN equals NaN."""
    if first.shape != second.shape or first.dtype != second.dtype:
        return True
    if first.is_floating_point():
        return not torch.equal(torch.nan_to_num(first), torch.nan_to_num(second))
    return not torch.equal(first, second)
