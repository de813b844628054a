"""The programs of one agent, from the policy of its team.

Shapes: N agents of an actor, I input features, S numbers that an agent remembers.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torchrl.data import TensorSpec

from torchrl_marl.errors import ConfigError, nearest, quoted
from torchrl_marl.export.actions import Best, Bounded
from torchrl_marl.export.interface import Field, describe, fields_of
from torchrl_marl.export.parts import OneObservation, body_of_agent
from torchrl_marl.modules.actors import GroupActor
from torchrl_marl.modules.bodies import Context
from torchrl_marl.modules.deterministic_actor import DeterministicActor
from torchrl_marl.modules.inputs import observation_leaves
from torchrl_marl.modules.memory.network import state_size
from torchrl_marl.modules.networks import AgentNetwork
from torchrl_marl.modules.normalization import ObservationNorm
from torchrl_marl.modules.q_actor import Dueling, Greedy
from torchrl_marl.specs import GroupSpec

__all__ = ["AgentActor", "Program", "agents_of", "find_agents"]


@dataclass(frozen=True)
class Program:
    """A function of one agent, to be written to a file.

    Args:
        name (str): such as ``act``.
        module (nn.Module): takes and returns tensors without batch dims.
        inputs, outputs (tuple of Field): in order.
    """

    name: str
    module: nn.Module
    inputs: tuple[Field, ...]
    outputs: tuple[Field, ...]

    @classmethod
    def of(
        cls, name: str, module: nn.Module, inputs: tuple[Field, ...], outputs: list[str]
    ) -> Program:
        """Runs a module once to know the shapes of its outputs."""
        with torch.no_grad():
            values = module(*(field.example() for field in inputs))
        return cls(name, module.requires_grad_(False), inputs, fields_of(outputs, values))


@dataclass(frozen=True)
class AgentActor:
    """An agent of a team, and the actor that acts for it.

    Args:
        name (str): the agent's.
        group (GroupSpec): of the environment.
        number (int): the agent's, in its group.
        actor (nn.Module): of its group, or of several groups as one.
        place (int): the agent's, among the N of the actor.
    """

    name: str
    group: GroupSpec
    number: int
    actor: Any
    place: int

    @property
    def network(self) -> AgentNetwork:
        """The network within the actor."""
        found = [m for m in self.actor.modules() if isinstance(m, AgentNetwork)]
        return found[0]

    @property
    def n_actor_agents(self) -> int:
        """Number N of agents of the actor."""
        return self.actor.group.n_agents

    @property
    def action_spec(self) -> TensorSpec:
        """The agent's own, unpadded."""
        group = self.group
        if group.members is None:
            return group.action_spec[self.number]
        return group.members[self.number]["action"]

    def observation(self) -> tuple[Field, ...]:
        """Returns the leaves that it sees, unpadded."""
        leaves = observation_leaves(self.group, self.number)
        return tuple(Field.of(name, spec) for name, spec in leaves)

    def programs(self) -> list[Program]:
        """Builds its programs."""
        network, group = self.network, self.group
        inputs = list(self.observation())
        if group.action_mask_key is not None:
            inputs.append(Field("action_mask", (group.action_dims[self.number],), "bool"))
        outputs = ["action", *self._parameters()]
        size = state_size(network)
        if size:
            inputs += [Field("hidden", (size,)), Field("is_init", (1,), "bool")]
            outputs.append("next_hidden")
        widest = self.actor.group.observation_dim
        width = group.observation_dims[self.number]
        norm = cast(ObservationNorm | None, network.features.norm)
        observe = OneObservation(width, widest, norm, self.place)
        body = body_of_agent(network.network, self.place, self.n_actor_agents)
        module = _Act(observe, body, self._choice(), len(self.observation()), bool(size))
        return [Program.of("act", module.cpu().eval(), tuple(inputs), outputs)]

    def describe(self) -> dict[str, Any]:
        """Returns what the interface says of the agent, without its programs."""
        spec = Field.of("action", self.action_spec)
        action: dict[str, Any] = {
            "distribution": self._distribution(),
            "shape": spec.shape,
            "dtype": spec.dtype,
        }
        if self.group.discrete:
            action["n_actions"] = self.group.action_dims[self.number]
            action["one_hot"] = self.group.one_hot
        elif (bounds := self._bounds()) is not None:
            action |= {"low": bounds[0].tolist(), "high": bounds[1].tolist()}
        size = state_size(self.network)
        return describe(self.name, self.group.name, action, self.observation(), size)

    # ------------------------------------------------------------------------------ its actions

    def _distribution(self) -> str:
        if isinstance(self.actor, DeterministicActor):
            return "none"
        if self.group.discrete:
            return "categorical"
        return "normal" if self._bounds() is None else "tanh_normal"

    def _parameters(self) -> list[str]:
        words = {"categorical": ["logits"], "normal": ["loc", "scale"]}
        if self._distribution() == "none":
            return ["action_value"] if self.group.discrete else ["loc"]
        return words.get(self._distribution(), ["loc", "scale"])

    def _bounds(self) -> tuple[Tensor, Tensor] | None:
        width = self.group.action_dims[self.number]
        bounds = self.group.action_bounds
        if bounds is None:
            return None
        return bounds[0][self.number, :width], bounds[1][self.number, :width]

    def _choice(self) -> nn.Module:
        head, n = self.network.head, self.group.action_dims[self.number]
        if not self.group.discrete:
            return Bounded(n, self._bounds(), copy.deepcopy(head))
        values = any(isinstance(module, Greedy) for module in self.actor.modules())
        dueling, dtype = isinstance(head, Dueling), self.action_spec.dtype
        return Best(n, dtype, self.group.one_hot, dueling, values)


class _Act(nn.Module):
    """What an agent sees, and what it remembers, to what it does."""

    def __init__(
        self, observe: nn.Module, body: nn.Module, choose: nn.Module, n_leaves: int, remembers: bool
    ) -> None:
        super().__init__()
        self.observe, self.body, self.choose = observe, body, choose
        self.n_leaves, self.remembers = n_leaves, remembers

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        leaves, others = inputs[: self.n_leaves], list(inputs[self.n_leaves :])
        context = Context()
        if self.remembers:
            *others, hidden, is_init = others
            context = Context(state=hidden.unsqueeze(0), is_init=is_init.unsqueeze(0))
        output, state = self.body(self.observe(*leaves), None, context)
        state = getattr(state, "state", state)
        chosen = self.choose(output.squeeze(0), *others)
        return (*chosen, state.squeeze(0)) if self.remembers else chosen


def agents_of(policy: nn.Module) -> dict[str, AgentActor]:
    """Returns the agents of a team whose actors are networks, by name.

    Args:
        policy (nn.Module): of a run, or the actors of a team.

    Examples:
        >>> from torchrl.data import Bounded, Unbounded
        >>> from torchrl_marl import AgentSpec, TeamSpec
        >>> from torchrl_marl.modules import make_actor
        >>> team = TeamSpec([AgentSpec("car", 2, Unbounded((4,)), Bounded(-1, 1, (2,)))])
        >>> agents_of(make_actor(team.groups["car"]))["car_1"].programs()[0].outputs[0]
        Field(name='action', shape=(2,), dtype='float32')
    """
    found = list(_agents(policy))
    names = [agent.name for agent in found]
    return {
        agent.name if names.count(agent.name) == 1 else f"{agent.group.name}.{agent.name}": agent
        for agent in found
    }


def _agents(policy: nn.Module) -> Iterator[AgentActor]:
    for actor in policy.modules():
        if not isinstance(actor, (GroupActor, DeterministicActor)):
            continue
        place = 0
        for group in actor.group.groups:
            for number, name in enumerate(group.agent_names):
                yield AgentActor(name, group, number, actor, place)
                place += 1


def find_agents(policy: nn.Module, name: str | None = None) -> dict[str, AgentActor]:
    """Returns one agent of a team, or all.

    Raises:
        ConfigError: nobody has that name, or nobody has a network.
    """
    known = agents_of(policy)
    if not known:
        raise ConfigError("nobody in this team has a network that can be exported; train a team.")
    if name is None:
        return known
    if name not in known:
        raise ConfigError(
            f"agent is {quoted(name)}; {nearest(name, known)}"
            f"expected one of {', '.join(list(known)[:20])}."
        )
    return {name: known[name]}
