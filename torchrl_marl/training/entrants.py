"""Players of a cross-play table (runs, ``random`` and ``heuristic``), and their environment."""

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
from torchrl_marl.envs.remember import hidden_sizes
from torchrl_marl.errors import CheckpointError, ConfigError, quoted
from torchrl_marl.modules.exploration import RandomActor
from torchrl_marl.runtime.trust import trusting
from torchrl_marl.specs import GroupSpec, TeamSpec
from torchrl_marl.training.config import last_stage, read_run_config
from torchrl_marl.training.pool import Networks, networks_of, read_player, with_networks
from torchrl_marl.training.run import Run

__all__ = [
    "HEURISTIC",
    "RANDOM",
    "find_players",
    "load_players",
    "runs_of_players",
    "same_players",
    "scripted_policy",
]

RANDOM, HEURISTIC = "random", "heuristic"
"""Names of players that need no run."""
Policy = Callable[[TensorDictBase], TensorDictBase]


def load_players(
    names: Sequence[str], num_envs: int, *, device: str | None = None, trust: bool = False
) -> tuple[EnvBase, dict[str, Policy]]:
    """Returns the environment of the runs, and the joint policy of each player, by name.

    Args:
        names (sequence of str): run folders, files of stored players (``RUN/players/NAME.pt``),
            ``random``, or ``heuristic`` (the heuristic policy of the environment).
        num_envs (int): number of envs.

    Keyword Args:
        device (str, optional): device of the policies; by default, that of the first run.
        trust (bool): whether to run code that is named in the settings of another user's run.

    Raises:
        ConfigError: there is only one player, a name occurs twice, no player is a run, the runs'
            environments or shapes differ, or the environment has no heuristic.
        CheckpointError: a folder is not a run folder.
    """
    twice = [name for i, name in enumerate(names) if name in names[:i]]
    if twice:
        raise ConfigError(f"player {quoted(twice[0])} is given twice, expected every player once.")
    for name in names:
        _refuse_suite_folder(Path(name))
    if len(names) < 2:
        if not Path(names[0]).exists() and names[0] not in (RANDOM, HEURISTIC):
            raise CheckpointError(f"{quoted(names[0])} does not exist, expected a run folder.")
        raise ConfigError(
            f"found one player, {quoted(names[0])}, expected two or more; name another run, "
            f"{RANDOM} or {HEURISTIC}."
        )
    folders = [name for name in names if name not in (RANDOM, HEURISTIC)]
    if not folders:
        raise ConfigError(
            f"found no run among {', '.join(names)}, expected one or more, to define the "
            "environment; name a run."
        )
    with trusting(trust):
        configs = {name: read_run_config(_find_run_folder(name)) for name in folders}
    environments = {name: config.env for name, config in configs.items()}
    _check_same_environment(environments)
    device = configs[folders[0]].device if device is None else device
    runs = {name: _load_run(name, device, trust) for name in folders}
    _check_shapes(environments, runs)
    env = _run_with_hidden_states(runs).make_env(num_envs)
    team = TeamSpec.from_env(env)
    players: dict[str, Policy] = {name: run.policy for name, run in runs.items()}
    for name in (RANDOM, HEURISTIC):
        if name in names:
            players[name] = scripted_policy(name, env, team, environments[folders[0]])
    return env, {name: players[name] for name in names}


def _refuse_suite_folder(folder: Path) -> None:
    """Refuses the folder of a suite or of one of its tasks; names folders that hold seeds."""
    if (folder / "config.yaml").is_file():
        return
    found = [*folder.glob("*/seed*/config.yaml"), *folder.glob("*/*/seed*/config.yaml")]
    groups = sorted({str(path.parent.parent) for path in found})
    if groups:
        rest = f" (and {len(groups) - 2} more)" if len(groups) > 2 else ""
        raise ConfigError(
            f"{quoted(str(folder))} is the folder of a suite, expected runs of one task; give "
            f"folders of its seeds, such as {' or '.join(groups[:2])}{rest}."
        )


def runs_of_players(names: Sequence[str]) -> list[Path]:
    """Returns the run folders of the players other than ``random`` and ``heuristic``.

    Args:
        names (sequence of str): as for :func:`load_players`.

    Raises:
        ConfigError: a file is not a stored player of a run.
    """
    return [_find_run_folder(name) for name in names if name not in (RANDOM, HEURISTIC)]


def same_players(players: Mapping[str, Policy]) -> dict[str, str]:
    """Maps each player's name to the name of the first player with the same weights.

    For example, the current policy of a run and its latest stored player may be equal.

    Args:
        players (mapping): name -> policy, from :func:`load_players`.

    Raises:
        ConfigError: all players have the same weights.
    """
    first: dict[str, str] = {}
    known: list[tuple[str, Path, dict[str, Tensor]]] = []
    for name, policy in players.items():
        first[name] = name
        if name in (RANDOM, HEURISTIC):
            continue
        folder, own = _find_run_folder(name).resolve(), _policy_tensors(cast(TeamPolicy, policy))
        equal = (one for one, of, saved in known if of == folder and _same_tensors(saved, own))
        first[name] = next(equal, name)
        known.append((name, folder, own))
    if len(set(first.values())) < 2:
        raise ConfigError(
            f"the players {', '.join(map(quoted, first))} have the same weights, expected two "
            "policies or more; name another player."
        )
    return first


def _policy_tensors(policy: TeamPolicy) -> dict[str, Tensor]:
    saved = policy.state_dict()
    return {name: value for name, value in saved.items() if isinstance(value, Tensor)}


def _same_tensors(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(value.cpu(), other[name].cpu()) for name, value in one.items()
    )


def find_players(paths: str) -> list[tuple[str, Networks]]:
    """Returns the names and networks of the players in a run, a file, or a folder of files.

    Raises:
        CheckpointError: the path is neither a run nor a stored player.
    """
    path = Path(paths)
    if path.is_file():
        return [(path.stem, read_player(path))]
    files = sorted(path.glob("*.pt"))
    if files and not (path / "config.yaml").is_file():
        return [(file.stem, read_player(file)) for file in files]
    run = Run.load(path, device="cpu")
    return [(path.resolve().name, networks_of(cast(TeamPolicy, run.policy)))]


def scripted_policy(name: str, env: EnvBase, team: TeamSpec, environment: EnvConfig) -> Policy:
    """Returns the joint policy of ``random`` or ``heuristic``.

    Args:
        name (str): ``random`` or ``heuristic``.
        env (EnvBase): the environment.
        team (TeamSpec): the groups of the environment.
        environment (EnvConfig): settings of the environment, for messages.

    Raises:
        ConfigError: the environment has no heuristic.
    """
    if name == RANDOM:
        return TeamPolicy(RandomActor(g, env.device) for g in team.groups.values())
    return _find_heuristic(env, environment)


def _find_run_folder(name: str) -> Path:
    """Returns the run folder of a player."""
    path = Path(name)
    if not path.is_file():
        return last_stage(path)
    folder = path.parent.parent
    if path.parent.name != "players" or not (folder / "config.yaml").is_file():
        raise ConfigError(
            f"{quoted(name)} is a file, but not a stored player of a run; expected a run folder, "
            "or RUN/players/NAME.pt within its run."
        )
    return folder


def _load_run(name: str, device: str, trust: bool) -> Run:
    """Loads a run, with the networks of a stored player if its file is given."""
    run = Run.load(_find_run_folder(name), device=device, trust=trust)
    if Path(name).is_file():
        run.policy = with_networks(cast(TeamPolicy, run.policy), read_player(Path(name)))
    return run


def _check_same_environment(environments: Mapping[str, EnvConfig]) -> None:
    (first, one), *others = environments.items()
    for name, other in others:
        if (other.library, other.name) != (one.library, one.name):
            raise ConfigError(
                f"run {quoted(name)} was trained in {other.library}/{other.name} and "
                f"{quoted(first)} in {one.library}/{one.name}; expected runs of one environment."
            )


def _check_shapes(environments: Mapping[str, EnvConfig], runs: Mapping[str, Run]) -> None:
    """Refuses runs if their shapes of observations or actions differ from the first run's."""
    first, *others = environments
    same = {
        name: dataclasses.replace(environment, num_envs=1)
        for name, environment in environments.items()
    }
    others = [name for name in others if same[name] != same[first]]
    if not others:
        return
    expected = _describe_shapes(runs[first])
    for name in others:
        found = _describe_shapes(runs[name])
        if found != expected:
            differ = next(g for g in {**expected, **found} if found.get(g) != expected.get(g))
            raise ConfigError(
                f"run {quoted(name)} cannot play in the environment of {quoted(first)}: group "
                f"{differ!r} is {found.get(differ, 'missing')}, expected "
                f"{expected.get(differ, 'none')}; play runs of equal env settings."
            )


def _describe_shapes(run: Run) -> dict[str, str]:
    env = run.make_env(1)
    try:
        return {
            name: _describe_group(group) for name, group in TeamSpec.from_env(env).groups.items()
        }
    finally:
        env.close()


def _describe_group(group: GroupSpec) -> str:
    actions = f"{group.n_actions} actions" if group.discrete else f"actions of {group.action_dim}"
    observations = ", ".join(sorted({str(list(shape)) for shape in group.observation_shapes}))
    return f"{group.n_agents} agents with observations {observations} and {actions}"


def _run_with_hidden_states(runs: Mapping[str, Run]) -> Run:
    """Returns a run with an environment that can carry the hidden states of all players."""
    sizes = {name: hidden_sizes(run.policy) for name, run in runs.items()}
    largest = max(sizes, key=lambda name: len(sizes[name]))
    for name, group_sizes in sizes.items():
        for group, size in group_sizes.items():
            if sizes[largest].get(group) != size:
                raise ConfigError(
                    f"run {quoted(name)} has a hidden state of size {size} in group {group!r}, "
                    f"expected {sizes[largest].get(group, 0)} as in {quoted(largest)}; play them "
                    "in separate tables."
                )
    return runs[largest]


def _find_heuristic(env: EnvBase, environment: EnvConfig) -> Policy:
    while isinstance(env, TransformedEnv):
        env = env.base_env
    make = getattr(env, "heuristic", None)
    policy = None if make is None else make()
    if policy is None:
        raise ConfigError(
            f"{environment.library}/{environment.name} has no heuristic that runs here; use "
            f"{RANDOM} or a run in its place."
        )
    return policy  # type: ignore[no-any-return]
