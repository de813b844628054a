"""Records whole episodes of a policy as a dataset.

Shapes: E envs, T steps of a batch, S steps of all episodes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor
from torchrl.envs import EnvBase
from torchrl.envs.utils import ExplorationType

from torchrl_marl.apps.console import number, silence_libraries, table
from torchrl_marl.apps.vaults import is_vault, read_vault
from torchrl_marl.collectors.dataset import Dataset, check_new, write_dataset
from torchrl_marl.collectors.rollout import RolloutCollector
from torchrl_marl.envs.make import make_env
from torchrl_marl.envs.remember import remembered_keys
from torchrl_marl.envs.transforms import with_dense_groups
from torchrl_marl.errors import ConfigError, quoted
from torchrl_marl.objectives.flags import Births
from torchrl_marl.recipes import load_config
from torchrl_marl.settings import normalized, parse_overrides
from torchrl_marl.specs import TeamSpec
from torchrl_marl.training.config import TrainConfig
from torchrl_marl.training.entrants import HEURISTIC, RANDOM, scripted_policy
from torchrl_marl.training.evaluation import Episodes, own_rewards
from torchrl_marl.training.metrics import group_reward
from torchrl_marl.training.run import Run, check_played

__all__ = ["episodes_of", "play_episodes", "record", "record_command"]

Policy = Callable[[TensorDictBase], TensorDictBase]

_MAX_ENVS = 100
_STEPS_PER_BATCH = 25


def record(
    player: str | Path,
    out: str | Path,
    recipe: str | Path | None = None,
    *,
    episodes: int = 1000,
    deterministic: bool = False,
    seed: int = 0,
    device: str | None = None,
    trust: bool = False,
    settings: Mapping[str, Any] | None = None,
) -> Dataset:
    """Plays whole episodes with a policy, and writes them as a dataset.

    Args:
        player (str or Path): run folder, ``heuristic`` (of the environment) or ``random``; or the
            folder of an OG-MARL vault, which is converted.
        out (str or Path): new folder of the dataset.
        recipe (str or Path, optional): recipe that names the environment of ``heuristic``,
            ``random`` or a vault.

    Keyword Args:
        episodes (int): number of whole episodes; a vault is converted as a whole.
        deterministic (bool): whether a run takes its most likely actions; False: sampled actions.
        seed (int): random seed of the episodes.
        device (str, optional): device of the environment; by default, as in the settings.
        trust (bool): whether to trust another user's run.
        settings (mapping, optional): settings of the environment that differ from those of the run
            or recipe, such as ``{"env.kwargs.n_agents": 8}``.

    Raises:
        ConfigError: invalid settings, no recipe, or no heuristic.
        CheckpointError: the folder has no run.
        DatasetError: the folder ``out`` exists.

    Examples:
        >>> import tempfile
        >>> out = Path(tempfile.mkdtemp(), "data")
        >>> dataset = record("random", out, "toy_arena_mappo", episodes=3)
        >>> dataset.n_episodes, dataset.about["source"]
        (3, 'random')
    """
    folder = check_new(out)
    num_envs = min(episodes, _MAX_ENVS)
    policy: Policy | None
    options: dict[str, Any] = {"seed": seed, "device": device, "settings": settings}
    if str(player) not in (HEURISTIC, RANDOM) and not is_vault(player):
        config, env, policy = _load_run(player, recipe, num_envs, trust=trust, **options)
    else:
        config, env, policy = _load_recipe(str(player), recipe, num_envs, **options)
    team = TeamSpec.from_env(env)
    kind = ExplorationType.DETERMINISTIC if deterministic else ExplorationType.RANDOM
    if policy is None:
        steps = read_vault(player, team)
    else:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            steps = play_episodes(env, policy, episodes, kind)
    env.close()
    about = {
        "environment": _as_json(dataclasses.asdict(config.env)),
        "source": str(player),
        "deterministic": deterministic,
        "seed": seed,
        "episodes": int(steps.get(("next", "done")).sum()),
        "groups": {name: list(group.agent_names) for name, group in team.groups.items()},
        "returns": _return_statistics(team, steps),
    }
    return write_dataset(folder, steps, about)


def record_command(texts: Sequence[str], *, player: str, **options: Any) -> None:
    """Records a dataset, and prints its size and returns.

    Args:
        texts (sequence of str): a recipe for ``heuristic`` and ``random``, then settings of the
            environment as ``key=value``.

    Keyword Args:
        player (str): as for :func:`record`.
        **options: as for :func:`record`.
    """
    silence_libraries()
    recipe = texts[0] if texts and "=" not in texts[0] else None
    given = parse_overrides(texts if recipe is None else texts[1:])
    dataset = record(player, recipe=recipe, settings=given, **options)
    returns = dataset.about["returns"]
    rows = [
        ("episodes", f"{dataset.n_episodes:,}"),
        ("steps", f"{len(dataset):,}"),
        ("return", f"{number(returns['mean'])} (standard deviation {number(returns['std'])})"),
        ("dataset", str(dataset.folder)),
    ]
    print(table(rows))


def _load_run(
    player: str | Path,
    recipe: str | Path | None,
    num_envs: int,
    *,
    seed: int,
    device: str | None,
    trust: bool,
    settings: Mapping[str, Any] | None,
) -> tuple[TrainConfig, EnvBase, Policy]:
    """Returns a run's settings, environment and policy."""
    if recipe is not None:
        raise ConfigError(
            f"the player is {quoted(str(player))} with recipe {quoted(str(recipe))}, expected "
            "heuristic, random or a vault; a run has its own environment: leave the recipe out."
        )
    run = Run.load(player, device=device, trust=trust, settings=settings)
    env = with_dense_groups(run.make_env(num_envs))
    env.set_seed(seed)
    return run.config, env, cast(Any, run.policy)


def _load_recipe(
    player: str,
    recipe: str | Path | None,
    num_envs: int,
    *,
    seed: int,
    device: str | None,
    settings: Mapping[str, Any] | None,
) -> tuple[TrainConfig, EnvBase, Policy | None]:
    """Returns a recipe's settings, environment, and a policy of that name; None for a vault."""
    if recipe is None:
        raise ConfigError(
            f"record {player} needs a recipe that names the environment, such as `torchrl-marl "
            f"record {player} vmas_balance_mappo`."
        )
    config = load_config(recipe, dict(settings or {}))
    check_played(normalized(TrainConfig, settings or {}))
    config = config if device is None else dataclasses.replace(config, device=device)
    built = make_env(config.played_env, seed=seed, device=config.device, num_envs=num_envs)
    env = with_dense_groups(built)
    if is_vault(player):
        return config, env, None
    return config, env, scripted_policy(player, env, TeamSpec.from_env(env), config.env)


def play_episodes(
    env: EnvBase,
    policy: Policy,
    episodes: int,
    kind: ExplorationType = ExplorationType.RANDOM,
) -> TensorDictBase:
    """Plays whole episodes; returns their steps, one episode after the other, ``[S]``.

    Each env plays the same number of episodes, or one more, so that short episodes are not more
    frequent than they are. Rewards are those of evaluations, without shaping for training.

    Args:
        env (EnvBase): environment with dense groups.
        policy (callable): joint policy.
        episodes (int): number of episodes.
        kind (ExplorationType): how actions are chosen.
    """
    n_envs = env.batch_size.numel()
    due = torch.full((n_envs,), episodes // n_envs)
    due[: episodes % n_envs] += 1
    keys, ended = _recorded_keys(env), torch.zeros(n_envs, dtype=torch.long)
    collector = RolloutCollector(
        env, policy, frames_per_batch=n_envs * _STEPS_PER_BATCH, exploration_type=kind
    )
    pieces, places = [], []
    while bool((ended < due).any()):
        with own_rewards(env):
            batch = collector.rollout().cpu()
        done = batch.get(("next", "done")).squeeze(-1).long()
        episode = ended.unsqueeze(-1) + done.cumsum(1) - done
        keep = episode < due.unsqueeze(-1)
        pieces.append(batch.select(*keys, strict=False)[keep].contiguous())
        env_of = torch.arange(n_envs).unsqueeze(-1).expand_as(episode)
        places.append((env_of * (episodes + 1) + episode)[keep])
        ended = ended + done.sum(1)
    order = torch.cat(places).argsort(stable=True)
    return torch.cat(pieces)[order]


def _recorded_keys(env: EnvBase) -> list[NestedKey]:
    """Returns the entries of a step to record: those of the environment, without hidden states."""
    step = env.rand_step(env.reset())
    hidden = set(remembered_keys(env))
    own = [key for key in step.keys(True, True) if _without_next(key) not in hidden]
    return cast(list[NestedKey], own)


def _without_next(key: NestedKey) -> NestedKey:
    """Returns a key without ``next``."""
    if not isinstance(key, tuple) or key[0] != "next":
        return key
    return key[1] if len(key) == 2 else key[1:]


def _return_statistics(team: TeamSpec, steps: TensorDictBase) -> dict[str, float]:
    """Returns mean, standard deviation, minimum and maximum of the episodes' returns."""
    total = episodes_of(team, steps).total
    return {
        "mean": total.mean().item(),
        "std": total.std(correction=0).item(),
        "min": total.min().item(),
        "max": total.max().item(),
    }


def episodes_of(team: TeamSpec, steps: TensorDictBase) -> Episodes:
    """Returns the returns and lengths of recorded episodes, and the groups that lived in them.

    Args:
        team (TeamSpec): the groups.
        steps (TensorDictBase): steps of whole episodes, ``[S]``, one episode after the other.
    """
    done = steps.get(("next", "done")).flatten().long()
    episode, n = done.cumsum(0) - done, int(done.sum())
    born = Births(team.groups).update(steps)

    def sums(x: Tensor) -> Tensor:
        return x.new_zeros(n).index_add(0, episode, x)

    returns = {
        name: sums(group_reward(group, steps, born.get(name)).double())
        for name, group in team.groups.items()
    }
    lived = {name: sums(own.any(-1).long()) > 0 for name, own in born.items()}
    sizes = {name: group.n_agents for name, group in team.groups.items()}
    return Episodes(returns, episode.bincount(), sizes, lived)


def _as_json(value: Any) -> Any:
    """Returns settings as JSON can write them."""
    if isinstance(value, Mapping):
        return {str(key): _as_json(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_as_json(one) for one in value]
    return value if isinstance(value, (str, int, float, bool, type(None))) else str(value)
