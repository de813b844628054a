"""Spec of one kind of agent.

Shapes: E envs, N agents of a group, O observation features, A action features, S state features.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NoReturn

from torchrl.data import (
    Bounded,
    Categorical,
    Composite,
    MultiCategorical,
    MultiOneHot,
    OneHot,
    TensorSpec,
    Unbounded,
)

from torchrl_marl.errors import ConfigError, quoted
from torchrl_marl.runtime.naming import invalid_name_reason

__all__ = ["AgentSpec", "check_names", "invalid_state_reason", "is_discrete", "n_options"]


@dataclass(frozen=True)
class AgentSpec:
    """Kind of agent: the number of its agents, and the specs of one of them.

    Args:
        name (str): name of the kind; its agents are called ``name_0, name_1, ...``.
        n_agents (int): number of agents of this kind in a team.
        observation_spec (TensorSpec): spec of one agent's observation, ``[O]``; a
            :class:`~torchrl.data.Composite` for dict observations.
        action_spec (TensorSpec): spec of one agent's action: ``Bounded [A]``, ``Unbounded [A]``,
            ``Categorical`` (shape ``[]``), ``OneHot [n_actions]``, ``MultiCategorical [K]``, or
            :class:`~torchrl_marl.specs.Hybrid`.
        reward_spec (TensorSpec): spec of one agent's reward, ``[1]``.
        action_mask (bool): True if the environment returns a mask of legal actions,
            ``[n_actions]``; for several choices, their masks concatenated.
        agent_names (tuple of str): names of the agents, instead of the default names.
        state_spec (TensorSpec, optional): spec of one agent's state, ``[S]``, which only critics
            read.

    Raises:
        ValueError: a name or the number of agents is invalid, the number of names differs from the
            number of agents, the state is not of floats, or there is an action mask without
            discrete actions. A name must be a single line of text, and not a path.

    Examples:
        >>> from torchrl.data import Bounded, Unbounded
        >>> rover = AgentSpec("rover", 3, Unbounded((9,)), Bounded(-1, 1, (2,)))
        >>> rover.agent_names
        ('rover_0', 'rover_1', 'rover_2')
    """

    name: str
    n_agents: int
    observation_spec: TensorSpec
    action_spec: TensorSpec
    reward_spec: TensorSpec = field(default_factory=lambda: Unbounded((1,)))
    action_mask: bool = False
    agent_names: tuple[str, ...] = ()
    state_spec: TensorSpec | None = None

    def __post_init__(self) -> None:
        if not self.name:
            raise ValueError("an agent's name is empty; use a name such as 'rover'.")
        if not isinstance(self.n_agents, int):
            self._raise_wrong_spec(f"n_agents is {self.n_agents!r}, expected an int.")
        if self.n_agents < 1:
            self._raise_wrong_spec(f"n_agents is {self.n_agents}, expected 1 or more.")
        names = tuple(self.agent_names) or tuple(f"{self.name}_{i}" for i in range(self.n_agents))
        if len(set(names)) != self.n_agents:
            self._raise_wrong_spec(
                f"agent_names are {list(names)}, expected {self.n_agents} different names, one "
                "for each agent."
            )
        check_names("an agent", (self.name, *names))
        object.__setattr__(self, "agent_names", names)
        self._check_specs()
        if self.action_mask and not n_options(self.action_spec):
            found = type(self.action_spec).__name__
            self._raise_wrong_spec(
                "action_mask=True needs Categorical, OneHot, MultiCategorical or Hybrid actions, "
                f"found {found}."
            )

    def _raise_wrong_spec(self, found: str) -> NoReturn:
        raise ValueError(f"agent {self.name!r}: {found}")

    def _check_specs(self) -> None:
        for leaf in ("observation_spec", "action_spec", "reward_spec"):
            spec = getattr(self, leaf)
            if not isinstance(spec, TensorSpec):
                self._raise_wrong_spec(
                    f"{leaf} is a {type(spec).__name__}, expected a TensorSpec, such as "
                    "torchrl.data.Unbounded((4,))."
                )
        if tuple(self.reward_spec.shape) != (1,):
            self._raise_wrong_spec(
                f"reward_spec has shape {list(self.reward_spec.shape)}, expected [1], the reward "
                "of one agent."
            )
        if self.state_spec is not None and (fault := invalid_state_reason(self.state_spec)):
            self._raise_wrong_spec(f"state_spec is {fault}.")
        action = self.action_spec
        expected = None
        if isinstance(action, Categorical) and is_discrete(action):
            expected = "[]" if action.ndim else None
        elif isinstance(action, (Bounded, Unbounded)) and (action.ndim != 1 or not action.shape[0]):
            expected = "[A], with at least one action"
        if expected is not None:
            self._raise_wrong_spec(
                f"action_spec has shape {list(action.shape)}, expected {expected}."
            )


def check_names(what: str, names: Iterable[object]) -> None:
    """Raises an error for names that cannot be used in tables or as names of folders.

    Args:
        what (str): what is named, for use in messages, such as ``an agent``.
        names (iterable): names to check.

    Raises:
        ConfigError: a name is invalid; the message shows the first invalid name.

    Examples:
        >>> check_names("an agent", ["robot 1", "red/0"])
    """
    for name in map(str, names):
        if (fault := invalid_name_reason(name)) is not None:
            raise ConfigError(
                f"{what} is named {quoted(name)}: {fault}; choose a plain word such as 'rover'."
            )


def invalid_state_reason(spec: object) -> str | None:
    """Returns a description of a wrong spec of a state, for error messages; None for a valid one.

    Examples:
        >>> invalid_state_reason(Unbounded(()))
        'UnboundedContinuous [], expected one of floats [S], such as torchrl.data.Unbounded((8,))'
    """
    simple = isinstance(spec, TensorSpec) and not isinstance(spec, Composite)
    if simple and spec.dtype.is_floating_point and spec.ndim:  # type: ignore[attr-defined]
        return None
    found = f"{type(spec).__name__} {list(getattr(spec, 'shape', []))}"
    return f"{found}, expected one of floats [S], such as torchrl.data.Unbounded((8,))"


def is_discrete(spec: TensorSpec) -> bool:
    """Returns True if an action is a single choice: an index or a one-hot vector."""
    several = isinstance(spec, (MultiCategorical, MultiOneHot))
    return isinstance(spec, (Categorical, OneHot)) and not several


def n_options(spec: Any) -> int:
    """Returns the number of options of all choices of an action, the size of its action mask.

    It is 0 for continuous actions, and for vectors of several one-hot parts.

    Examples:
        >>> n_options(Categorical(4)), n_options(MultiCategorical([3, 2])), n_options(Unbounded(2))
        (4, 5, 0)
    """
    if is_discrete(spec):
        return spec.space.n
    if isinstance(spec, MultiCategorical):
        return int(spec.nvec.flatten(0, -2)[0].sum() if spec.ndim > 1 else spec.nvec.sum())
    return sum(getattr(spec, "branches", ()))
