"""Declaration of a PettingZoo world, as specs and as fields of rows.

Shapes: N agents of a group, M agents of a kind.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from torchrl.data import Composite, OneHot, TensorSpec, Unbounded

from torchrl_marl.envs.agents.declaration import Declaration
from torchrl_marl.envs.agents.spaces import spec_of_space
from torchrl_marl.envs.pettingzoo.agent_rows import AgentSlot, AgentSpaces, Leaf, field_of
from torchrl_marl.errors import ConfigError, SpecError
from torchrl_marl.specs import AgentSpec

__all__ = ["declared", "row_fields", "slots_of", "specs_of"]


def declared(
    owner: str,
    num_envs: int,
    groups: Mapping[str, Sequence[AgentSpaces]],
    one_hot: bool,
    state: int | str | None = None,
    in_turns: bool = False,
) -> Declaration:
    """Returns the declaration of a world with these groups.

    Args:
        owner (str): the world's name, in messages.
        num_envs (int): number E of copies.
        groups (mapping): group -> its agents.
        one_hot (bool): choices of actions are one-hot encoded.
        state (int or "observations", optional): features S of the state, if there is one, or
            all agents' observations.
        in_turns (bool): agents move one after another.

    Raises:
        SpecError: a space that no tensor holds.
        ConfigError: agents that cannot be of one group.
    """
    declaration = Declaration(owner, num_envs, in_turns=in_turns)
    taken: set[str] = set()
    for group, agents in groups.items():
        kinds = _alike(agents)
        for kind in kinds:
            name = group if len(kinds) == 1 else _kind_name(kind, taken)
            taken.add(name)
            try:
                spec = _agent_spec(name, kind, one_hot)
                declaration = declaration.with_agent(spec, group)
            except SpecError:
                raise
            except ValueError as error:
                words = str(error).removeprefix(f"{owner}: ")
                raise ConfigError(f"{owner}: {words}") from error
    if state == "observations":
        every = [kind for own in declaration.kinds.values() for kind in own]
        state = sum(kind.n_agents * _n_features(kind.observation_spec) for kind in every)
    return declaration if state is None else declaration.with_state(Unbounded((int(state),)))


def _n_features(spec: TensorSpec) -> int:
    leaves = spec.values(True, True) if isinstance(spec, Composite) else [spec]
    return sum(leaf.shape.numel() for leaf in leaves)


def _alike(agents: Sequence[AgentSpaces]) -> list[list[AgentSpaces]]:
    """Returns agents in their order, with neighbours of one kind together."""
    kinds: list[list[AgentSpaces]] = []
    for agent in agents:
        if kinds and kinds[-1][0].alike(agent):
            kinds[-1].append(agent)
        else:
            kinds.append([agent])
    return kinds


def _kind_name(kind: Sequence[AgentSpaces], taken: set[str]) -> str:
    first = str(kind[0].agent)
    prefix = re.sub(r"[_-]?\d+$", "", first)
    return prefix if prefix and prefix not in taken and len(kind) > 1 else first


def _agent_spec(name: str, kind: Sequence[AgentSpaces], one_hot: bool) -> AgentSpec:
    first = kind[0]
    seen = spec_of_space(f"the observation of {first.agent!r}", first.observation)
    does = spec_of_space(
        f"the action of {first.agent!r}", first.action, action=True, one_hot=one_hot
    )
    if isinstance(does, Composite):
        raise SpecError(
            f"the action of {first.agent!r} is a Dict, expected Box, Discrete or MultiDiscrete; "
            "wrap the world to give one of these."
        )
    if type(first.action).__name__ == "Box" and does.ndim != 1:
        does = does.reshape(does.shape.numel())
    names = tuple(str(agent.agent) for agent in kind)
    mask = first.masked is not None
    return AgentSpec(name, len(kind), seen, does, action_mask=mask, agent_names=names)


def slots_of(
    declaration: Declaration, groups: Mapping[str, Sequence[AgentSpaces]]
) -> list[AgentSlot]:
    """Returns a slot for each declared agent, in the order of the groups."""
    slots = []
    for name, agents in groups.items():
        kinds = declaration.groups[name]
        for kind, rows in kinds.slices.items():
            specs = declaration.reader.kind_specs[name][kind]
            for i in range(rows.start, rows.stop):
                at = {"": i, kind: i - rows.start}
                own = {
                    leaf: kind if kinds.ragged(leaf) else ""
                    for leaf in ("observation", "action_mask")
                }
                own["action"] = kind if kinds.lazy else ""
                spaces = agents[i]
                leaves = _leaves(spaces.observation, specs["observation"])
                field = field_of(name, own["observation"], "observation")
                masked = spaces.masked is not None
                slots.append(
                    AgentSlot(
                        spaces,
                        name,
                        i,
                        at[own["observation"]],
                        tuple(
                            Leaf(path, "/".join((field, *path)), shape, start)
                            for path, shape, start in leaves
                        ),
                        field_of(name, own["action"], "action"),
                        at[own["action"]],
                        field_of(name, own["action_mask"], "action_mask") if masked else None,
                        at[own["action_mask"]],
                    )
                )
    return slots


def _leaves(
    space: Any, spec: TensorSpec, path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], tuple[int, ...], int | tuple[int, ...]]]:
    if isinstance(spec, Composite):
        for key, leaf in spec.items():
            yield from _leaves(space.spaces[key], leaf, (*path, key))
        return
    start = np.ravel(getattr(space, "start", 0)).tolist() if _chooses(space) else [0]
    yield path, tuple(spec.shape[1:]), tuple(start) if any(start) else 0


def _chooses(space: Any) -> bool:
    return type(space).__name__ in ("Discrete", "MultiDiscrete")


def row_fields(
    declaration: Declaration, infos: Mapping[str, Sequence[str]], state: str | None
) -> dict[str, tuple[tuple[int, ...], str]]:
    """Returns the fields of one copy's rows: its input, and twice its output.

    What a step led to stands under ``after/``, what the next one goes on from under ``begun/``.

    Args:
        declaration (Declaration): of the world.
        infos (mapping): group -> keys of its infos.
        state (str, optional): ``"world"`` where the world writes its own.
    """
    fields: dict[str, tuple[tuple[int, ...], str]] = {}
    written: dict[str, tuple[tuple[int, ...], str]] = {"root": ((3, 1), "bool")}
    for name, kinds in declaration.groups.items():
        n = sum(kinds.sizes)
        written[f"{name}//flags"] = ((3, n, 1), "bool")
        written[f"{name}//mask"] = ((n,), "bool")
        fields[f"after/{name}//reward"] = ((n, 1), "float32")
        for key in infos.get(name, ()):
            written[f"{name}//info/{key}"] = ((n,), "float32")
        for leaf in ("observation", "action_mask", "action"):
            for kind, spec in specs_of(declaration, name, leaf):
                target = fields if leaf == "action" else written
                target.update(_fields(field_of(name, kind, leaf), spec))
    if state == "world":
        assert declaration.state is not None
        written["state"] = (tuple(declaration.state.shape), "float32")
    for part in ("after", "begun"):
        fields.update({f"{part}/{name}": field for name, field in written.items()})
    fields["ended"] = ((1,), "bool")
    return fields


def specs_of(declaration: Declaration, group: str, leaf: str) -> Iterator[tuple[str, TensorSpec]]:
    """Yields each kind, or ``""`` for all agents of a group, with the spec of a leaf."""
    kinds, reader = declaration.groups[group], declaration.reader
    by_kind = kinds.lazy if leaf == "action" else kinds.ragged(leaf)
    owners = reader.kind_specs[group] if by_kind else {"": reader.specs[group]}
    for kind, specs in owners.items():
        if leaf in specs.keys():
            yield kind, specs[leaf]


def _fields(name: str, spec: TensorSpec) -> dict[str, tuple[tuple[int, ...], str]]:
    if isinstance(spec, Composite):
        return {
            key: field
            for leaf, own in spec.items()
            for key, field in _fields(f"{name}/{leaf}", own).items()
        }
    if isinstance(spec, OneHot):
        return {name: (tuple(spec.shape[:-1]), "int64")}
    return {name: (tuple(spec.shape), str(spec.dtype).removeprefix("torch."))}
