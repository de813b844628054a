"""The part of a team's policy that computes one agent's actions.

Shapes: P outputs of the agent's network, A actions or action features of the agent.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchrl.data import TensorSpec

from torchrl_marl.apps.export.interface import FORMAT, VERSIONS, Field, Program
from torchrl_marl.apps.export.programs import (
    Act,
    AgentState,
    OneObservation,
    body_of_agent,
    communication_programs,
)
from torchrl_marl.errors import ConfigError, nearest, quoted
from torchrl_marl.modules.actors import GroupActor
from torchrl_marl.modules.build import HybridParamExtractor
from torchrl_marl.modules.communication.channel import Channel, living_links
from torchrl_marl.modules.communication.rounds import Chain
from torchrl_marl.modules.inputs import observation_leaves
from torchrl_marl.modules.networks import AgentNetwork, TeamNetwork
from torchrl_marl.modules.normalization import ObservationNorm
from torchrl_marl.modules.q_actor import DeterministicActor, Dueling, Greedy
from torchrl_marl.specs import GroupSpec
from torchrl_marl.specs.choices import choosable_options

__all__ = ["AgentActor", "Best", "Bounded", "agents_of", "find_agents"]


class Best(nn.Module):
    """Selects the legal action with the highest logit or value.

    Args:
        n_actions (int): number A of the agent's actions.
        dtype (torch.dtype): dtype of actions.
        one_hot (bool): whether actions are one-hot.
        dueling (bool): whether the first output is the state value of a dueling head.
        values (bool): True to return action values, including those of illegal actions; False to
            return logits.

    Shapes:
        - outputs: ``[P]``; action_mask: bool ``[A]``
        - returns: the action, ``[]`` or ``[A]``, and the logits or values, ``[A]``

    Examples:
        >>> legal = torch.tensor([True, True, False])
        >>> Best(3, torch.int64)(torch.tensor([0.0, 1.0, 2.0]), legal)[0]
        tensor(1)
    """

    def __init__(
        self,
        n_actions: int,
        dtype: torch.dtype,
        one_hot: bool = False,
        dueling: bool = False,
        values: bool = False,
    ) -> None:
        super().__init__()
        self.n_actions, self.dtype, self.one_hot = n_actions, dtype, one_hot
        self.dueling, self.values = dueling, values

    def forward(self, outputs: Tensor, action_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Returns the action and its parameters."""
        if self.dueling:
            common, advantage = outputs[:1], outputs[1 : 1 + self.n_actions]
            outputs = common + advantage - advantage.mean(-1, keepdim=True)
        outputs = legal = outputs[: self.n_actions]
        if action_mask is not None:
            allowed = action_mask | ~action_mask.any(-1, keepdim=True)
            legal = torch.where(allowed, outputs, torch.finfo(outputs.dtype).min)
        best = legal.argmax(-1)
        action = F.one_hot(best, self.n_actions) if self.one_hot else best
        return action.to(self.dtype), outputs if self.values else legal


class BestOfEach(nn.Module):
    """Selects the choice with the highest logit in each branch of a multi-discrete action.

    Args:
        branches (sequence of int): number of choices of each of the K branches, L in all.
        dtype (torch.dtype): dtype of actions.

    Shapes:
        - outputs: ``[P]``, L or more; action_mask: bool ``[L]``
        - returns: the action, ``[K]``, and the logits, ``[L]``

    Examples:
        >>> BestOfEach((2, 3), torch.int64)(torch.tensor([0.0, 1.0, 2.0, 0.0, 0.0]))[0]
        tensor([1, 0])
    """

    def __init__(self, branches: Sequence[int], dtype: torch.dtype) -> None:
        super().__init__()
        self.branches, self.dtype = list(branches), dtype

    def forward(self, outputs: Tensor, action_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Selects the action."""
        logits = outputs[: sum(self.branches)]
        if action_mask is not None:
            legal = choosable_options(action_mask, self.branches)
            logits = torch.where(legal, logits, torch.finfo(logits.dtype).min)
        best = [branch.argmax(-1) for branch in logits.split(self.branches)]
        return torch.stack(best).to(self.dtype), logits


class BestAndNumbers(nn.Module):
    """Selects a hybrid action: the likeliest choices, and the most likely numbers.

    Args:
        best (BestOfEach): selects the choices.
        numbers (Bounded): computes the numbers.

    Shapes:
        - outputs: ``[L + P]``; action_mask: bool ``[L]``
        - returns: the action, ``[K + D]``, logits, ``[L]``, location and scale, ``[D]``
    """

    def __init__(self, best: BestOfEach, numbers: Bounded) -> None:
        super().__init__()
        self.best, self.numbers = best, numbers

    def forward(self, outputs: Tensor, action_mask: Tensor | None = None) -> tuple[Tensor, ...]:
        """Selects the action."""
        choice, logits = self.best(outputs, action_mask)
        numbers, *parameters = self.numbers(outputs[sum(self.best.branches) :])
        return (torch.cat([choice, numbers]), logits, *parameters)


class Bounded(nn.Module):
    """Squashes outputs into the bounds of actions by tanh; without bounds, returns them as is.

    Args:
        n_features (int): number A of the agent's action features.
        bounds (tuple of Tensor, optional): low and high.
        head (nn.Module, optional): maps outputs to location and scale; without it, the outputs are
            the location.

    Shapes:
        - outputs: ``[P]``; low, high: ``[A]``
        - returns: the action, the location and, with a head, the scale, each ``[A]``

    Examples:
        >>> Bounded(1, (torch.zeros(1), torch.full((1,), 4.0)))(torch.zeros(1))
        (tensor([2.]), tensor([0.]))
    """

    middle: Tensor | None
    half_range: Tensor  # where there is a middle

    def __init__(
        self,
        n_features: int,
        bounds: tuple[Tensor, Tensor] | None = None,
        head: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.n_features, self.head = n_features, head
        middle = None if bounds is None else (bounds[0] + bounds[1]) / 2
        half = None if bounds is None else (bounds[1] - bounds[0]) / 2
        self.register_buffer("middle", middle)
        self.register_buffer("half_range", half)

    def forward(self, outputs: Tensor) -> tuple[Tensor, ...]:
        """Returns the action and its parameters."""
        parts = (outputs,) if self.head is None else self.head(outputs)
        parameters = tuple(part[: self.n_features] for part in parts)
        action = loc = parameters[0]
        if self.middle is not None:
            action = self.middle + self.half_range * loc.tanh()
        return (action, *parameters)


@dataclass(frozen=True)
class AgentActor:
    """An agent of a team, with the actor that computes its actions.

    Args:
        name (str): name of the agent.
        group (GroupSpec): the agent's group.
        number (int): index of the agent in its group.
        actor (nn.Module): actor of the group, or of several groups trained as one.
        place (int): index of the agent among the N agents of the actor.
        peers (tuple of str): names of these N agents.
    """

    name: str
    group: GroupSpec
    number: int
    actor: Any
    place: int
    peers: tuple[str, ...] = ()

    @property
    def network(self) -> AgentNetwork:
        """The neural network inside the actor."""
        return next(m for m in self.actor.modules() if isinstance(m, AgentNetwork))

    @property
    def action_spec(self) -> TensorSpec:
        """The agent's unpadded action spec."""
        group = self.group
        if group.members is None:
            return group.action_spec[self.number]
        return group.members[self.number]["action"]

    @property
    def n_options(self) -> int:
        """Number of options of the agent's choices, the size of its action mask."""
        return sum(self.group.branches) or self.group.action_dims[self.number]

    @property
    def memory_size(self) -> int:
        """Size S of the hidden state.

        Delayed messages are not part of it, since the player stores them.
        """
        memory = getattr(self.network.network, "memory", None)
        return 0 if memory is None else memory.state_size

    def observation(self) -> tuple[Field, ...]:
        """Describes the leaves of the agent's observation, without padding."""
        leaves = observation_leaves(self.group, self.number)
        return tuple(Field.of(name, spec) for name, spec in leaves)

    def programs(self) -> list[Program]:
        """Builds the agent's programs."""
        network = self.network
        group, norm = self.actor.group, cast(ObservationNorm | None, network.features.norm)
        width = self.group.observation_dims[self.number]
        observe = OneObservation(width, group.observation_dim, norm, self.place)
        body = body_of_agent(network.network, self.place, group.n_agents)
        seen, size = self.observation(), self.memory_size
        memory = (Field("hidden", (size,)), Field("is_init", (1,), "bool")) if size else ()
        legal: tuple[Field, ...] = ()
        if self.group.action_mask_key is not None:
            legal = (Field("action_mask", (self.n_options,), "bool"),)
        done = ["action", *self._parameter_names(), *["next_hidden"] * bool(size)]
        if self.channel is None:
            act = Act(observe, body, self._action_selector(), len(seen))
            return [Program.of("act", act, (*seen, *legal, *memory), done)]
        assert isinstance(body, TeamNetwork)
        state = AgentState(observe, body, self._action_selector(), len(seen), network.position)
        return list(
            communication_programs(state, (*seen, *memory), legal, done, self.channel, size)
        )

    def describe(self) -> dict[str, Any]:
        """Returns the agent's interface, except for the programs."""
        spec = Field.of("action", self.action_spec)
        action: dict[str, Any] = {
            "distribution": self._distribution(),
            "shape": spec.shape,
            "dtype": spec.dtype,
        }
        if self.group.branches:
            action["branches"] = list(self.group.branches)
        if self.group.discrete:
            action["n_actions"] = self.group.action_dims[self.number]
            action["one_hot"] = self.group.one_hot
        elif (bounds := self._bounds()) is not None:
            action |= {"low": bounds[0].tolist(), "high": bounds[1].tolist()}
        return {
            "format": FORMAT,
            "agent": self.name,
            "group": self.group.name,
            "observation": [asdict(field) for field in self.observation()],
            "action": action,
            "state_size": self.memory_size,
            "versions": VERSIONS,
            "communication": self._describe_communication(),
        }

    # --------------------------------------------------------------------------- communication

    @property
    def channel(self) -> Channel | None:
        """The channel between the actor's agents; None if they do not communicate."""
        body = self.network.network
        return body.channel if isinstance(body, TeamNetwork) else None

    def senders(self) -> list[int]:
        """Returns the indices of the agents that may send messages to this one."""
        if self.channel is None:
            return []
        alive = torch.ones(self.actor.group.n_agents, dtype=torch.bool)
        fixed, given = self.channel.links.fixed, self.network.links
        links = living_links(alive)[self.place]
        for other in (fixed, given):
            links = links if other is None else links & other[self.place].cpu()
        return links.nonzero().flatten().tolist()

    def sender_groups(self) -> list[str]:
        """Returns the names of the groups that may send messages to this agent."""
        own = self.actor.group
        names = [own.groups[own.group_index[place]].name for place in self.senders()]
        return list(dict.fromkeys(names))

    def _describe_communication(self) -> dict[str, Any] | None:
        if self.channel is None:
            return None
        config, one = self.channel.config, self.channel.rounds[0]
        relays = isinstance(one, Chain)
        return {
            "kind": config.kind,
            "rounds": len(self.channel.rounds),
            "agents": list(self.peers),
            "hears": [self.peers[place] for place in self.senders()],
            "links": "all" if relays else config.links,
            "radius": config.radius,
            "nearest": config.nearest,
            "position": self.network.position,
            "discrete": config.discrete,
            "gate": config.gate,
            "delay": config.delay if self.channel.delay is not None else 0,
            "relays": relays,
            "message_size": one.state_size if relays else one.message_size,
        }

    # ---------------------------------------------------------------------------------- actions

    def _distribution(self) -> str:
        if isinstance(self.actor, DeterministicActor):
            return "none"
        if self.group.branches:
            return "hybrid" if self.group.hybrid else "multi_categorical"
        if self.group.discrete:
            return "categorical"
        return "normal" if self._bounds() is None else "tanh_normal"

    def _parameter_names(self) -> list[str]:
        if self._distribution() == "none":
            return ["action_value"] if self.group.discrete else ["loc"]
        if self.group.hybrid:
            return ["logits", "loc", "scale"]
        chosen = self.group.discrete or self.group.branches
        return ["logits"] if chosen else ["loc", "scale"]

    def _bounds(self) -> tuple[Tensor, Tensor] | None:
        width = self.group.action_dims[self.number]
        bounds = self.group.action_bounds
        if bounds is None:
            return None
        return bounds[0][self.number, :width], bounds[1][self.number, :width]

    def _action_selector(self) -> nn.Module:
        head, n = self.network.head, self.group.action_dims[self.number]
        if self.group.branches:
            best = BestOfEach(self.group.branches, self.action_spec.dtype)
            if not isinstance(head, HybridParamExtractor):
                return best
            width, normal = self.group.continuous_spec.shape[-1], copy.deepcopy(head.normal)
            return BestAndNumbers(best, Bounded(width, self._bounds(), normal))
        if not self.group.discrete:
            return Bounded(n, self._bounds(), copy.deepcopy(head))
        values = any(isinstance(module, Greedy) for module in self.actor.modules())
        dueling, dtype = isinstance(head, Dueling), self.action_spec.dtype
        return Best(n, dtype, self.group.one_hot, dueling, values)


def agents_of(policy: nn.Module) -> dict[str, AgentActor]:
    """Returns, by name, the agents that have a network as their actor.

    Args:
        policy (nn.Module): policy of a run, or the actors of a team.

    Examples:
        >>> from torchrl.data import Bounded, Unbounded
        >>> from torchrl_marl import AgentSpec, TeamSpec
        >>> from torchrl_marl.modules import make_actor
        >>> team = TeamSpec([AgentSpec("car", 2, Unbounded((4,)), Bounded(-1, 1, (2,)))])
        >>> agents_of(make_actor(team.groups["car"]))["car_1"].programs()[0].outputs[0]
        Field(name='action', shape=(2,), dtype='float32')
    """
    found = list(_iterate_agents(policy))
    names = [agent.name for agent in found]
    named = [
        replace(agent, name=f"{agent.group.name}.{agent.name}")
        if names.count(agent.name) > 1
        else agent
        for agent in found
    ]
    peers: dict[int, tuple[str, ...]] = {}
    for agent in named:
        peers[id(agent.actor)] = (*peers.get(id(agent.actor), ()), agent.name)
    return {agent.name: replace(agent, peers=peers[id(agent.actor)]) for agent in named}


def _iterate_agents(policy: nn.Module) -> Iterator[AgentActor]:
    for actor in policy.modules():
        if not isinstance(actor, (GroupActor, DeterministicActor)):
            continue
        place = 0
        for group in actor.group.groups:
            for number, name in enumerate(group.agent_names):
                yield AgentActor(name, group, number, actor, place)
                place += 1


def find_agents(policy: nn.Module, name: str | None = None) -> dict[str, AgentActor]:
    """Returns one agent of a team by name, or all agents.

    Raises:
        ConfigError: the name is unknown, or no actor of the team is a network.
    """
    known = agents_of(policy)
    if not known:
        raise ConfigError("no agent of this team has a network to export; train a team first.")
    if name is None:
        return known
    if name not in known:
        raise ConfigError(
            f"agent is {quoted(name)}; {nearest(name, known)}"
            f"expected one of {', '.join(list(known)[:20])}."
        )
    return {name: known[name]}
