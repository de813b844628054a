"""Parameters of VMAS scenarios that each new episode draws, such as the masses of the agents.

Shapes: E envs, n entities that have a parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from torchrl_marl.envs.ranges import ValueRange, read_known_ranges
from torchrl_marl.errors import ConfigError

if TYPE_CHECKING:
    from vmas.simulator.core import Entity, World
    from vmas.simulator.environment import Environment

__all__ = [
    "VmasDomain",
    "VmasParameter",
    "check_domain",
    "parameters_of",
    "read_vmas_ranges",
]


class VmasParameter:
    """Attribute of one entity that a factor scales.

    Args:
        holder: object that has the attribute.
        attribute (str): name of the attribute.
        nominal (float or Tensor): value of the attribute for a factor of 1.
        less (Tensor, optional): value that is subtracted from the scaled one.
    """

    def __init__(self, holder: Any, attribute: str, nominal: Any, less: Any = None) -> None:
        self.holder, self.attribute, self.nominal, self.less = holder, attribute, nominal, less
        self.before = getattr(holder, attribute)

    def scale(self, factor: Any) -> None:
        """Sets the attribute for a factor, a number or a tensor ``[E, 1]``."""
        value = factor * self.nominal
        setattr(self.holder, self.attribute, value if self.less is None else value - self.less)

    def restore(self) -> None:
        """Sets the attribute to its value before any randomization."""
        setattr(self.holder, self.attribute, self.before)


def _movable_entities(entities: list[Entity]) -> list[Entity]:
    return [x for x in entities if (x.movable or x.rotatable) and not x.is_joint]


def _entity_parameters(entity: Entity, world: World) -> Iterator[tuple[str, str, Any]]:
    """Yields the parameters of an entity: name, attribute and nominal value."""
    yield "mass", "_mass", entity.mass
    yield "drag", "_drag", world._drag if entity.drag is None else entity.drag
    friction = entity.linear_friction
    yield "friction", "_linear_friction", world._linear_friction if friction is None else friction


def _gravity_parameters(world: World) -> Iterator[VmasParameter]:
    for entity in _movable_entities(world.entities):
        gravity = torch.zeros_like(world._gravity) if entity.gravity is None else entity.gravity
        if bool((world._gravity + gravity).any()):
            # An entity's gravity is added to the world's, which decides branches of a step.
            yield VmasParameter(entity, "_gravity", world._gravity + gravity, world._gravity)


def parameters_of(world: World) -> dict[str, list[VmasParameter]]:
    """Returns the parameters of a scenario, each with the attributes that it scales.

    Attributes that are None or 0 have no parameter.
    """
    found: dict[str, list[VmasParameter]] = {}
    for kind, entities in (("agent", world.agents), ("landmark", world.landmarks)):
        for entity in _movable_entities(entities):
            for name, attribute, nominal in _entity_parameters(entity, world):
                if nominal is not None and bool(torch.as_tensor(nominal).any()):
                    own = VmasParameter(entity, attribute, nominal)
                    found.setdefault(f"{kind}_{name}", []).append(own)
    for agent in world.agents:
        action = agent.action
        own = VmasParameter(action, "_u_multiplier_tensor", action.u_multiplier_tensor)
        found.setdefault("agent_force", []).append(own)
    gravities = list(_gravity_parameters(world))
    return found | ({"gravity": gravities} if gravities else {})


_SHARED_BY_ENVS = {"agent_max_speed", "agent_max_force", "agent_max_torque", "landmark_max_speed"}


def read_vmas_ranges(
    name: str, env: Environment, ranges: Mapping[str, Any]
) -> dict[str, ValueRange]:
    """Reads the ranges of a scenario's parameters.

    Args:
        name (str): name of the scenario.
        env (Environment): its VMAS environment, before any randomization.
        ranges (mapping): name of a parameter -> range of its factor.

    Raises:
        ConfigError: unknown parameter, malformed range, or a mass of 0 or less.
    """
    known = list(parameters_of(env.world))
    for parameter in ranges:
        if parameter in _SHARED_BY_ENVS:
            raise ConfigError(
                f"{name}: {parameter} cannot differ between envs, since VMAS compares it with all "
                f"envs at once; it has {', '.join(known)}."
            )
    read = read_known_ranges(name, ranges, known)
    for parameter, range in read.items():
        if range.low <= 0 and parameter.endswith("mass"):
            raise ConfigError(
                f"{name}: {parameter} has factors from {range.low:g}, expected positive ones, such "
                f"as {parameter}=[0.8,1.2]."
            )
    return read


class VmasDomain:
    """Randomized parameters of a VMAS environment, as factors of their nominal values.

    It is an attribute of VMAS's environment. So its values, and the attributes that they scale, are
    part of the simulator's state.

    Args:
        env (Environment): VMAS environment.
        ranges (mapping): range of each parameter's factors, by name.

    Attributes:
        values (dict): factors ``[E, n]`` of each parameter's entities, by name.
    """

    def __init__(self, env: Environment, ranges: Mapping[str, ValueRange]) -> None:
        known = parameters_of(env.world)
        self.parameters = {name: known[name] for name in ranges}
        self.ranges = dict(ranges)
        self.values: dict[str, Tensor] = {}
        for name, range in ranges.items():
            shape = (env.num_envs, len(self.parameters[name]))
            self.values[name] = torch.full(shape, range.low, device=env.device)
            for parameter in self.parameters[name] if range.is_fixed else ():
                parameter.scale(range.low)

    def draw(self, env: Environment, index: int | None = None) -> None:
        """Draws the factors of new episodes: in all envs, or in one."""
        for name, range in self.ranges.items():
            if range.is_fixed:
                continue
            new, old = range.draw(self.values[name].shape, env.device), self.values[name]
            if index is not None:
                fresh = torch.arange(env.num_envs, device=env.device) == index
                new = torch.where(fresh.unsqueeze(-1), new, old)
            self.values[name] = new
            for parameter, factor in zip(self.parameters[name], new.split(1, 1)):
                parameter.scale(factor)

    def restore(self) -> None:
        """Undoes the randomization."""
        for parameter in (x for own in self.parameters.values() for x in own):
            parameter.restore()

    def to(self, device: torch.device) -> None:
        """Moves the factors to a device; the attributes of entities move with the entities."""
        self.values = {name: x.to(device) for name, x in self.values.items()}
        for parameter in (x for own in self.parameters.values() for x in own):
            for name, x in vars(parameter).items():
                if isinstance(x, Tensor):
                    setattr(parameter, name, x.to(device))


def check_domain(name: str, env: Environment, step: Callable[[], Any]) -> None:
    """Checks in a trial step that a scenario supports different parameters in each env.

    Args:
        name (str): name of the scenario.
        env (Environment): a randomized environment of several envs.
        step (callable): ``step()`` makes a step and reads observations and rewards.

    Raises:
        ConfigError: a step fails, or a reset of the scenario overwrites a parameter.
    """
    domain: VmasDomain = env.domain
    drawn = [key for key, range in domain.ranges.items() if not range.is_fixed]
    try:
        domain.draw(env)
        step()
        env._reset(return_observations=False)
    except Exception as error:  # a scenario may fail in any way with tensors for numbers
        why = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise ConfigError(
            f"{name}: {', '.join(drawn)} cannot differ between envs ({why}); use a fixed factor, "
            f"such as {drawn[0] if drawn else 'agent_mass'}=1.2."
        ) from error
    for key in drawn:
        for parameter in domain.parameters[key]:
            if not isinstance(getattr(parameter.holder, parameter.attribute), Tensor):
                raise ConfigError(
                    f"{name}: {key} cannot be randomized, since the scenario sets it at each "
                    "reset; leave it out."
                )
