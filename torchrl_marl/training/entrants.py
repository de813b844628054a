"""Who plays in a table: trained runs, ``random`` and ``heuristic``, and the environment of all."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import cast

import torch
from tensordict import TensorDictBase
from torch import Tensor
from torchrl.envs import EnvBase, TransformedEnv

from torchrl_marl.collectors.team import TeamPolicy
from torchrl_marl.envs.config import EnvConfig
from torchrl_marl.envs.remember import remembered_by
from torchrl_marl.errors import ConfigError, quoted
from torchrl_marl.modules.exploration import RandomActor
from torchrl_marl.runtime.trust import trusting
from torchrl_marl.specs import GroupSpec, TeamSpec
from torchrl_marl.training.config import read_run_config
from torchrl_marl.training.pool import Networks, networks_of, read_player, with_networks
from torchrl_marl.training.run import Run

__all__ = [
    "HEURISTIC",
    "RANDOM",
    "enter",
    "find_players",
    "runs_of_players",
    "same_players",
    "scripted",
]

RANDOM, HEURISTIC = "random", "heuristic"
"""Words for players that are no runs."""
Policy = Callable[[TensorDictBase], TensorDictBase]


def enter(
    names: Sequence[str], num_envs: int, *, device: str | None = None, trust: bool = False
) -> tuple[EnvBase, dict[str, Policy]]:
    """Returns the environment of the runs, and each player's joint policy by name.

    Args:
        names (sequence of str): run folders, files of a run's stored players
            (``RUN/players/NAME.pt``), ``random``, ``heuristic`` (the environment's own).
        num_envs (int): how many play at once.

    Keyword Args:
        device (str, optional): by default, the first run's.
        trust (bool): run the code that a run of somebody else's brings.

    Raises:
        ConfigError: one player, one that is there twice, no run, runs of several environments,
            shapes that differ, or an environment without a heuristic.
        CheckpointError: a folder that is no run.
    """
    twice = [name for i, name in enumerate(names) if name in names[:i]]
    if twice:
        raise ConfigError(f"player {quoted(twice[0])} is given twice, expected each once.")
    if len(names) < 2:
        raise ConfigError(
            f"found one player, {quoted(names[0])}, expected two or more; name another run, "
            f"{RANDOM} or {HEURISTIC}."
        )
    folders = [name for name in names if name not in (RANDOM, HEURISTIC)]
    if not folders:
        raise ConfigError(
            f"found no run among {', '.join(names)}, expected one or more; its environment is "
            "played."
        )
    with trusting(trust):
        configs = {name: read_run_config(_folder_of(name)) for name in folders}
    environments = {name: config.env for name, config in configs.items()}
    _check_environments(environments)
    device = configs[folders[0]].device if device is None else device
    runs = {name: _load(name, device, trust) for name in folders}
    _check_shapes(environments, runs)
    env = _remembering(runs).make_env(num_envs)
    team = TeamSpec.from_env(env)
    players: dict[str, Policy] = {name: run.policy for name, run in runs.items()}
    for name in (RANDOM, HEURISTIC):
        if name in names:
            players[name] = scripted(name, env, team, environments[folders[0]])
    return env, {name: players[name] for name in names}


def runs_of_players(names: Sequence[str]) -> list[Path]:
    """Returns the run folders of players, but for ``random`` and ``heuristic``.

    Args:
        names (sequence of str): as :func:`enter` takes them.

    Raises:
        ConfigError: a file that is no stored player of a run.
    """
    return [_folder_of(name) for name in names if name not in (RANDOM, HEURISTIC)]


def same_players(players: Mapping[str, Policy]) -> dict[str, str]:
    """Returns each player's name -> the first of those that are the same policy as it.

    Of a run, what it is now and what it stored last may have the same weights.

    Args:
        players (mapping): of :func:`enter`.

    Raises:
        ConfigError: all are the same.
    """
    first: dict[str, str] = {}
    known: list[tuple[str, Path, dict[str, Tensor]]] = []
    for name, policy in players.items():
        first[name] = name
        if name in (RANDOM, HEURISTIC):
            continue
        folder, own = _folder_of(name).resolve(), _tensors(cast(TeamPolicy, policy))
        alike = (one for one, of, saved in known if of == folder and _equal(saved, own))
        first[name] = next(alike, name)
        known.append((name, folder, own))
    if len(set(first.values())) < 2:
        raise ConfigError(
            f"the players {', '.join(map(quoted, first))} have the same weights, expected two "
            "policies or more; name another player."
        )
    return first


def _tensors(policy: TeamPolicy) -> dict[str, Tensor]:
    saved = policy.state_dict()
    return {name: value for name, value in saved.items() if isinstance(value, Tensor)}


def _equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(value.cpu(), other[name].cpu()) for name, value in one.items()
    )


def find_players(given: str) -> list[tuple[str, Networks]]:
    """Returns the networks of players by name: of a run, of a file, or of a folder of files.

    Raises:
        CheckpointError: no run and no stored player.
    """
    path = Path(given)
    if path.is_file():
        return [(path.stem, read_player(path))]
    files = sorted(path.glob("*.pt"))
    if files and not (path / "config.yaml").is_file():
        return [(file.stem, read_player(file)) for file in files]
    run = Run.load(path, device="cpu")
    return [(path.resolve().name, networks_of(cast(TeamPolicy, run.policy)))]


def scripted(name: str, env: EnvBase, team: TeamSpec, environment: EnvConfig) -> Policy:
    """Returns the joint policy of a player that is no run.

    Args:
        name (str): ``random`` or ``heuristic``.
        env (EnvBase): where it plays.
        team (TeamSpec): its groups.
        environment (EnvConfig): what the environment is, for messages.

    Raises:
        ConfigError: an environment without a heuristic.
    """
    if name == RANDOM:
        return TeamPolicy(RandomActor(g, env.device) for g in team.groups.values())
    return _heuristic(env, environment)


def _folder_of(name: str) -> Path:
    """Returns the run folder of a player."""
    path = Path(name)
    if not path.is_file():
        return path
    folder = path.parent.parent
    if path.parent.name != "players" or not (folder / "config.yaml").is_file():
        raise ConfigError(
            f"{quoted(name)} is a file, but no stored player of a run, expected a run folder, or "
            "RUN/players/NAME.pt where the run has it."
        )
    return folder


def _load(name: str, device: str, trust: bool) -> Run:
    """Returns a run, with the networks of a stored player where its file is given."""
    run = Run.load(_folder_of(name), device=device, trust=trust)
    if Path(name).is_file():
        run.policy = with_networks(cast(TeamPolicy, run.policy), read_player(Path(name)))
    return run


def _check_environments(environments: Mapping[str, EnvConfig]) -> None:
    (first, one), *others = environments.items()
    for name, other in others:
        if (other.library, other.name) != (one.library, one.name):
            raise ConfigError(
                f"run {quoted(name)} was trained in {other.library}/{other.name} and "
                f"{quoted(first)} in {one.library}/{one.name}; expected runs of one environment."
            )


def _check_shapes(environments: Mapping[str, EnvConfig], runs: Mapping[str, Run]) -> None:
    """Compares what players see and do, where environments were made by other settings."""
    first, *others = environments
    same = {
        name: dataclasses.replace(environment, num_envs=1)
        for name, environment in environments.items()
    }
    others = [name for name in others if same[name] != same[first]]
    if not others:
        return
    expected = _shapes(runs[first])
    for name in others:
        found = _shapes(runs[name])
        if found != expected:
            differ = next(g for g in {**expected, **found} if found.get(g) != expected.get(g))
            raise ConfigError(
                f"run {quoted(name)} cannot play in the environment of {quoted(first)}: group "
                f"{differ!r} is {found.get(differ, 'not there')}, expected "
                f"{expected.get(differ, 'none')}; play runs of equal env settings."
            )


def _shapes(run: Run) -> dict[str, str]:
    env = run.make_env(1)
    try:
        return {name: _described(group) for name, group in TeamSpec.from_env(env).groups.items()}
    finally:
        env.close()


def _described(group: GroupSpec) -> str:
    does = f"{group.n_actions} actions" if group.discrete else f"actions of {group.action_dim}"
    seen = ", ".join(sorted({str(list(shape)) for shape in group.observation_shapes}))
    return f"{group.n_agents} agents with observations {seen} and {does}"


def _remembering(runs: Mapping[str, Run]) -> Run:
    """Returns the run whose environment carries what all players remember."""
    sizes = {name: remembered_by(run.policy) for name, run in runs.items()}
    largest = max(sizes, key=lambda name: len(sizes[name]))
    for name, own in sizes.items():
        for group, size in own.items():
            if sizes[largest].get(group) != size:
                raise ConfigError(
                    f"run {quoted(name)} remembers {size} numbers in group {group!r}, expected "
                    f"{sizes[largest].get(group, 0)} as {quoted(largest)}; play them apart."
                )
    return runs[largest]


def _heuristic(env: EnvBase, environment: EnvConfig) -> Policy:
    while isinstance(env, TransformedEnv):
        env = env.base_env
    make = getattr(env, "heuristic", None)
    policy = None if make is None else make()
    if policy is None:
        raise ConfigError(
            f"{environment.library}/{environment.name} has no heuristic that runs here; leave "
            f"{HEURISTIC} out."
        )
    return policy  # type: ignore[no-any-return]
