"""Spec of an agent.

Shapes: E envs, N agents of a group, O observation features, A action features, S state features.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NoReturn

from torchrl.data import (
    Bounded,
    Categorical,
    MultiCategorical,
    MultiOneHot,
    OneHot,
    TensorSpec,
    Unbounded,
)

from torchrl_marl.errors import ConfigError, quoted
from torchrl_marl.runtime.naming import fault_of

__all__ = ["AgentSpec", "check_names", "is_discrete"]


@dataclass(frozen=True)
class AgentSpec:
    """One kind of agent: how many there are, and the specs of one of them.

    Args:
        name (str): name of the kind; its agents are called ``name_0, name_1, ...``.
        n_agents (int): how many agents of this kind a team has.
        observation_spec (TensorSpec): what one agent sees, ``[O]``; a
            :class:`~torchrl.data.Composite` for dict observations.
        action_spec (TensorSpec): what one agent does: ``Bounded [A]``, ``Unbounded [A]``,
            ``Categorical`` (shape ``[]``) or ``OneHot [n_actions]``.
        reward_spec (TensorSpec): reward of one agent, ``[1]``.
        action_mask (bool): the environment says which actions are legal, ``[n_actions]``.
        agent_names (tuple of str): of all agents, where they are called otherwise.

    Raises:
        ValueError: a name or a number of agents that cannot be, names that are not one for each
            agent, or an action mask without discrete actions. A name is one line of text that
            leads out of no folder.

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

    def __post_init__(self) -> None:
        if not self.name:
            raise ValueError("an agent's name is empty; give its kind a name such as 'rover'.")
        if not isinstance(self.n_agents, int):
            self._refuse(f"n_agents is {self.n_agents!r}, expected an int.")
        if self.n_agents < 1:
            self._refuse(f"n_agents is {self.n_agents}, expected 1 or more.")
        names = tuple(self.agent_names) or tuple(f"{self.name}_{i}" for i in range(self.n_agents))
        if len(set(names)) != self.n_agents:
            self._refuse(
                f"agent_names are {list(names)}, expected {self.n_agents} names that differ, one "
                "for each agent."
            )
        check_names("an agent", (self.name, *names))
        object.__setattr__(self, "agent_names", names)
        self._check_specs()
        if self.action_mask and not is_discrete(self.action_spec):
            found = type(self.action_spec).__name__
            self._refuse(f"action_mask=True needs Categorical or OneHot actions, found {found}.")

    def _refuse(self, found: str) -> NoReturn:
        raise ValueError(f"agent {self.name!r}: {found}")

    def _check_specs(self) -> None:
        for leaf in ("observation_spec", "action_spec", "reward_spec"):
            spec = getattr(self, leaf)
            if not isinstance(spec, TensorSpec):
                self._refuse(
                    f"{leaf} is a {type(spec).__name__}, expected a TensorSpec, such as "
                    "torchrl.data.Unbounded((4,))."
                )
        if tuple(self.reward_spec.shape) != (1,):
            self._refuse(
                f"reward_spec has shape {list(self.reward_spec.shape)}, expected [1], the reward "
                "of one agent."
            )
        action = self.action_spec
        expected = None
        if isinstance(action, Categorical) and is_discrete(action):
            expected = "[]" if action.ndim else None
        elif isinstance(action, (Bounded, Unbounded)) and (action.ndim != 1 or not action.shape[0]):
            expected = "[A], with one action or more"
        if expected is not None:
            self._refuse(f"action_spec has shape {list(action.shape)}, expected {expected}.")


def check_names(what: str, names: Iterable[object]) -> None:
    """Refuses names that tables, lines and folders cannot hold.

    Args:
        what (str): such as ``an agent``.
        names (iterable): of those.

    Raises:
        ConfigError: naming the first one.

    Examples:
        >>> check_names("an agent", ["robot 1", "red/0"])
    """
    for name in map(str, names):
        if (fault := fault_of(name)) is not None:
            raise ConfigError(
                f"{what} is named {quoted(name)}: {fault}; choose a plain word such as 'rover'."
            )


def is_discrete(spec: TensorSpec) -> bool:
    """Returns whether an action is one choice of several."""
    several = isinstance(spec, (MultiCategorical, MultiOneHot))
    return isinstance(spec, (Categorical, OneHot)) and not several
