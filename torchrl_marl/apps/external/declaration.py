"""Agents declared by an external simulator, and their specs.

Shapes: O observation features, A action features, S state features.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torchrl_marl.errors import ConfigError, nearest, quoted
from torchrl_marl.runtime.naming import invalid_name_reason

if TYPE_CHECKING:
    from torchrl_marl.envs.agents.declaration import Declaration

__all__ = ["Declared", "DeclaredKind"]

_MAX_SIZES = {"n": 10_000, "observation": 1_000_000, "n_actions": 100_000, "size": 100_000}


@dataclass(frozen=True)
class DeclaredKind:
    """One kind of agents: their number, and the sizes of observation and action.

    Args:
        n (int): number of agents, called ``name_0``, ``name_1``, ...
        observation (int): number O of observation features.
        n_actions (int, optional): number of discrete actions.
        low, high (tuple of float): bounds of continuous actions, A numbers each.
        mask (bool): whether the client sends masks of legal actions.
    """

    n: int
    observation: int
    n_actions: int | None = None
    low: tuple[float, ...] = ()
    high: tuple[float, ...] = ()
    mask: bool = False

    @classmethod
    def read(cls, where: str, value: Any) -> DeclaredKind:
        """Reads ``{n, observation, action}``.

        ``action`` is the number of continuous actions from -1 to 1, ``{size, low, high}`` for other
        bounds, or ``{n_actions, mask}``.

        Args:
            where (str): name of the kind, for error messages.
            value: the value received.

        Raises:
            ConfigError: the value has another type, a missing or unknown key, or a number out of
                range.
        """
        kind = _read_mapping(where, value, ("n", "observation", "action"))
        action = kind["action"]
        action = action if isinstance(action, Mapping) else {"size": action}
        n = _read_count(f"{where}: n", kind["n"], _MAX_SIZES["n"])
        observation = _read_count(
            f"{where}: observation", kind["observation"], _MAX_SIZES["observation"]
        )
        where = f"{where}: action"
        if "n_actions" in action:
            own = _read_mapping(where, action, ("n_actions",), ("mask",))
            choices = _read_count(f"{where}: n_actions", own["n_actions"], _MAX_SIZES["n_actions"])
            mask = own.get("mask", False)
            if not isinstance(mask, bool):
                raise ConfigError(f"{where}: mask is {quoted(mask)}, expected true or false.")
            return cls(n, observation, n_actions=choices, mask=mask)
        own = _read_mapping(where, action, ("size",), ("low", "high"))
        size = _read_count(f"{where}: size", own["size"], _MAX_SIZES["size"])
        low = _read_bounds(f"{where}: low", own.get("low", -1.0), size)
        high = _read_bounds(f"{where}: high", own.get("high", 1.0), size)
        if not all(a < b for a, b in zip(low, high)):
            raise ConfigError(f"{where}: low is {list(low)}, expected below high, {list(high)}.")
        return cls(n, observation, low=low, high=high)

    @property
    def n_answers(self) -> int:
        """Number of bytes counted for the action or the action mask of one agent in a message."""
        return self.n_actions or 4 * len(self.low)

    def settings(self) -> dict[str, Any]:
        """Returns the kind as settings, the inverse of :meth:`read`."""
        if self.n_actions is None:
            action: Any = {"size": len(self.low), "low": list(self.low), "high": list(self.high)}
            if set(self.low) == {-1.0} and set(self.high) == {1.0}:
                action = len(self.low)
        else:
            action = {"n_actions": self.n_actions, **({"mask": True} if self.mask else {})}
        return {"n": self.n, "observation": self.observation, "action": action}


@dataclass(frozen=True)
class Declared:
    """The agents of an external simulator, and the size of its state.

    Args:
        kinds (dict of str to DeclaredKind): kinds of agents; each is a group.
        state_size (int, optional): number S of features of the state, which only critics read.

    Examples:
        >>> declared = Declared.read({"walker": {"n": 2, "observation": 3, "action": 1}})
        >>> declared.kinds["walker"].high, declared.n_numbers
        ((1.0,), 6)
        >>> declared.declaration("game", num_envs=4).team
        TeamSpec(walker: 2)
    """

    kinds: dict[str, DeclaredKind]
    state_size: int | None = None

    @classmethod
    def read(cls, agents: Any, state_size: Any = None) -> Declared:
        """Reads the agents by kind; see :meth:`DeclaredKind.read`.

        Raises:
            ConfigError: an invalid kind; the message says what was found and what was expected.
        """
        if not isinstance(agents, Mapping) or not agents:
            raise ConfigError(
                f"agents are {quoted(agents)}, expected kinds of agents, such as "
                "{walker: {n: 3, observation: 18, action: 2}}."
            )
        kinds = {}
        for name, given in agents.items():
            if (fault := invalid_name_reason(name, plain=True)) is not None:
                raise ConfigError(
                    f"a kind of agents is named {quoted(name)}, expected a word: {fault}."
                )
            kinds[name] = DeclaredKind.read(f"agents {name!r}", given)
        if state_size is not None:
            state_size = _read_count("state_size", state_size, _MAX_SIZES["observation"])
        return cls(kinds, state_size)

    @property
    def n_numbers(self) -> int:
        """Total number of features in one step: those of all observations and of the state."""
        observed = sum(kind.n * kind.observation for kind in self.kinds.values())
        return observed + (self.state_size or 0)

    def check_size(self, most: int) -> None:
        """Raises an error if a step of these agents is too large for a message.

        Args:
            most (int): maximum bytes of a message.

        Raises:
            ConfigError: a step is too large; the message gives its size and the maximum.
        """
        size = 4 * self.n_numbers + sum(kind.n * kind.n_answers for kind in self.kinds.values())
        if size > most:
            raise ConfigError(
                f"the observations and actions of a step have {size:,} bytes, expected {most:,} "
                "at most; raise max_message_bytes."
            )

    def settings(self) -> dict[str, Any]:
        """Returns ``agents``, and ``state_size`` if there is a state, as settings of a run."""
        agents = {name: kind.settings() for name, kind in self.kinds.items()}
        state = {} if self.state_size is None else {"state_size": self.state_size}
        return {"agents": agents, **state}

    def check_same(self, other: Declared) -> None:
        """Raises an error if another declaration differs from this one.

        Raises:
            ConfigError: the declarations differ; the message names the first difference.
        """
        for name in {**self.kinds, **other.kinds}:
            if name not in self.kinds:
                raise ConfigError(
                    f"agents {name!r} are declared, {nearest(name, self.kinds)}expected "
                    f"{', '.join(self.kinds)}."
                )
            if name not in other.kinds:
                raise ConfigError(
                    f"agents {', '.join(map(repr, other.kinds))} are declared, but no {name!r}, "
                    f"expected {self._describe_kind(name)} of that name."
                )
            if self.kinds[name] != other.kinds[name]:
                raise ConfigError(
                    f"agents {name!r} are declared as {other._describe_kind(name)}, expected "
                    f"{self._describe_kind(name)}."
                )
        if self.state_size != other.state_size:
            raise ConfigError(
                f"state_size is declared as {other.state_size}, expected {self.state_size}."
            )

    def _describe_kind(self, name: str) -> str:
        return quoted(self.kinds[name].settings())

    def declaration(self, owner: str, num_envs: int) -> Declaration:
        """Returns the specs of these agents, in the form that all library adapters use.

        Args:
            owner (str): the environment's name, for error messages.
            num_envs (int): number E of rows in a batch.
        """
        import torch
        from torchrl.data import Bounded, Categorical, Unbounded

        from torchrl_marl.envs.agents.declaration import Declaration
        from torchrl_marl.specs import AgentSpec

        kinds: dict[str, tuple[AgentSpec, ...]] = {}
        for name, kind in self.kinds.items():
            if kind.n_actions is None:
                low, high = torch.tensor(kind.low), torch.tensor(kind.high)
                action: Any = Bounded(low, high, (len(kind.low),))
            else:
                action = Categorical(kind.n_actions)
            observation = Unbounded((kind.observation,))
            kinds[name] = (AgentSpec(name, kind.n, observation, action, action_mask=kind.mask),)
        state = None if self.state_size is None else Unbounded((self.state_size,))
        try:
            return Declaration(owner, num_envs, kinds, state)
        except ValueError as error:  # a name not allowed for a group
            raise ConfigError(str(error)) from None


def _read_mapping(
    where: str, value: Any, needed: Sequence[str], optional: Sequence[str] = ()
) -> Mapping[str, Any]:
    known = (*needed, *optional)
    if not isinstance(value, Mapping):
        raise ConfigError(f"{where} is {quoted(value)}, expected {{{', '.join(known)}}}.")
    for key in (*needed, *value):
        if key not in value:
            raise ConfigError(f"{where} has no {key!r}, expected {', '.join(known)}.")
        if key not in known:
            raise ConfigError(
                f"{where} has {quoted(key)}, {nearest(str(key), known)}expected {', '.join(known)}."
            )
    return value


def _read_count(where: str, value: Any, most: int) -> int:
    whole = isinstance(value, int) and not isinstance(value, bool)
    if not whole or not 1 <= value <= most:
        raise ConfigError(f"{where} is {quoted(value)}, expected a whole number, 1 to {most:,}.")
    return value


def _read_bounds(where: str, value: Any, size: int) -> tuple[float, ...]:
    values = list(value) if isinstance(value, (list, tuple)) else [value] * size
    numbers = [isinstance(x, (int, float)) and not isinstance(x, bool) for x in values]
    if len(values) != size or not all(numbers) or not all(map(math.isfinite, values)):
        raise ConfigError(f"{where} is {quoted(value)}, expected a number, or {size} of them.")
    return tuple(float(x) for x in values)
