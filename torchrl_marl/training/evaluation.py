"""Evaluation of a policy on whole episodes, with figures over their returns.

Shapes: E envs, N agents of a group, n episodes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from tensordict import TensorDictBase
from torch import Tensor
from torchrl.envs import EnvBase, TransformedEnv
from torchrl.envs.batched_envs import BatchedEnvBase
from torchrl.envs.utils import ExplorationType, set_exploration_type, step_mdp

from torchrl_marl.collectors.team import restore_env, snapshot_env
from torchrl_marl.envs.scene import watched
from torchrl_marl.errors import ConfigError
from torchrl_marl.objectives.flags import begun
from torchrl_marl.runtime.applications import application
from torchrl_marl.runtime.random_state import RandomState
from torchrl_marl.specs import TeamSpec
from torchrl_marl.training.metrics import group_reward
from torchrl_marl.training.statistics import (
    Paired,
    estimate,
    matters,
    mean,
    paired_difference,
)

if TYPE_CHECKING:
    from torchrl_marl.apps.pictures import Film

__all__ = [
    "AT_ONCE",
    "EVALUATION_SEED",
    "Episodes",
    "after_training",
    "evaluate",
    "evaluate_members",
    "figures_of_all",
    "filmed",
    "first_episodes",
    "kind_of",
    "play",
    "put_back",
    "seeded_play",
    "where_they_differ",
]

AT_ONCE = 200
"""Most episodes played in parallel."""
EVALUATION_SEED = 1_000_003
"""Random seed of the evaluation starts, the same for every policy and not that of training."""

_ACTIONS = 7_368_787
_NEXT_STARTS = 15_485_863  # added to the seed for each further batch of episodes
Policy = Callable[[TensorDictBase], TensorDictBase]


@dataclass(frozen=True)
class Episodes:
    """Whole episodes, in the order of their starts.

    Args:
        returns (dict): group -> return of each episode, mean over its agents, ``[n]``.
        lengths (Tensor): number of steps, ``[n]``.
        sizes (dict): group -> number of agents.
    """

    returns: Mapping[str, Tensor]
    lengths: Tensor
    sizes: Mapping[str, int]

    @property
    def total(self) -> Tensor:
        """Return of each episode, mean over all agents, ``[n]``."""
        weighted = [self.returns[name] * size for name, size in self.sizes.items()]
        return torch.stack(weighted).sum(0) / sum(self.sizes.values())

    def figures(self) -> dict[str, float]:
        """Returns the figures of :func:`~torchrl_marl.training.evaluate`."""
        total, lengths = self.total, self.lengths
        found = {
            "return_mean": total.mean().item(),
            "return_std": total.std(correction=0).item(),
            "length_mean": lengths.float().mean().item(),
            "episodes": len(lengths),
        }
        found |= {f"{name}/episode_reward": own.mean().item() for name, own in self.returns.items()}
        found |= {"return_min": total.min().item(), "return_max": total.max().item()}
        found |= _interval("return", total)
        found |= {"length_min": lengths.min().item(), "length_max": lengths.max().item()}
        for name, own in self.returns.items() if len(self.returns) > 1 else ():
            found |= _interval(f"{name}/episode_reward", own)
        return found

    def against(self, other: Episodes) -> Paired:
        """Compares the returns with another policy's from the same starts, start by start."""
        return paired_difference(self.total.double().cpu(), other.total.double().cpu())


def _interval(name: str, values: Tensor) -> dict[str, float]:
    """Returns the interval of the mean; nothing for a single episode or non-finite values."""
    if len(values) < 2 or not bool(values.isfinite().all()):
        return {}
    found = estimate(mean, [values.double().cpu()])
    return {f"{name}_low": found.low, f"{name}_high": found.high}


def figures_of_all(played: Episodes | None) -> dict[str, float]:
    """Returns the figures of episodes; nothing if none were played."""
    return {} if played is None else played.figures()


def kind_of(deterministic: bool) -> str:
    """Returns the name of a kind of actions: ``likeliest`` or ``drawn``."""
    return "likeliest" if deterministic else "drawn"


def where_they_differ(likeliest: Episodes, drawn: Episodes) -> str | None:
    """Returns a sentence if likeliest and sampled actions earn clearly different returns, or None.

    The difference must be significant by the interval and the exact test, which takes 6 episodes.
    It must also be at least 0.2 standard deviations of the returns, Cohen's small effect, since
    over many episodes even a tiny difference is significant.

    Args:
        likeliest, drawn (Episodes): episodes from the same starts.

    Reference: Cohen, 1988, Statistical Power Analysis for the Behavioral Sciences, section 2.2.
    """
    if len(likeliest.lengths) < 2:
        return None
    found = likeliest.against(drawn)
    if not found.distinguishable:
        return None
    gap = found.difference
    spread = _spread(likeliest.total, drawn.total)
    if not matters(gap.value, spread):
        return None
    one, other = likeliest.total.mean().item(), drawn.total.mean().item()
    beside = f", {abs(gap.value) / spread:.2g} standard deviations of returns" if spread else ""
    return (
        f"the likeliest actions earn {one:.4g} and drawn ones {other:.4g} from the same starts, "
        f"a significant difference (95 % interval {gap.low:.3g} to {gap.high:.3g}{beside})"
    )


def _spread(one: Tensor, other: Tensor) -> float:
    """Returns the root mean variance of both."""
    variance = one.double().var(correction=0) + other.double().var(correction=0)
    return float((variance / 2).sqrt())


def after_training(own: Episodes, other: Episodes | None, deterministic: bool) -> dict[str, Any]:
    """Returns the entries of a run's summary for its last evaluation.

    Args:
        own (Episodes): episodes with the kind of actions that the run is configured for.
        other (Episodes, optional): episodes with the other kind of actions.
        deterministic (bool): True if the run is configured for the likeliest actions.
    """
    found = {kind_of(deterministic): own.figures()}
    if other is None:
        return {"evaluation": found}
    found[kind_of(not deterministic)] = other.figures()
    pair = (own, other) if deterministic else (other, own)
    return {"evaluation": found, "actions_differ": where_they_differ(*pair)}


def evaluate(
    env: EnvBase,
    policy: Policy | None,
    team: TeamSpec,
    *,
    episodes: int,
    deterministic: bool = True,
    seed: int = 0,
    longest: int = 10_000,
    gif: Path | None = None,
    shown: int = 1,
) -> dict[str, float]:
    """Plays exactly ``episodes`` whole episodes and averages their returns.

    It returns ``play(...).figures()``. The interval of the mean is a 95 % bootstrap interval over
    episodes (percentiles of 5,000 resamples).

    Args:
        env, policy, team: as for :func:`play`.

    Keyword Args:
        episodes, deterministic, seed, longest: as for :func:`play`.
        gif (Path, optional): file for an animation of the first episodes.
        shown (int): number of episodes in the animation.

    Returns:
        dict: ``return_mean`` (over agents and episodes), ``return_std``, ``return_min``,
        ``return_max``, ``length_mean``, ``length_min``, ``length_max``, ``episodes`` and
        ``<group>/episode_reward``. Two episodes or more also give the interval of the mean,
        ``return_low`` and ``return_high``; several groups each have ``_low`` and ``_high``, too.

    Raises:
        ConfigError: no episodes, an episode that does not end, or an environment that cannot be
            drawn.
        MissingExtraError: a GIF without matplotlib.
    """
    options: dict[str, Any] = {"deterministic": deterministic, "seed": seed, "longest": longest}
    with filmed(env, team, [] if gif is None else [gif], shown) as film:
        return play(env, policy, team, episodes=episodes, film=film, **options).figures()


@contextlib.contextmanager
def filmed(
    env: EnvBase, team: TeamSpec, paths: Sequence[Path], shown: int
) -> Iterator[Film | None]:
    """Records the episodes played in the context and writes an animation of them afterwards.

    Args:
        env (EnvBase): environment of the episodes.
        team (TeamSpec): groups of agents.
        paths (sequence of Path): files of the animation; without any, the context yields None.
        shown (int): number of episodes in the animation.

    Raises:
        ConfigError: an environment that cannot be drawn.
        MissingExtraError: a package required for animations is not installed.
    """
    if not paths:
        yield None
        return
    pictures = application("pictures")
    pictures.check_drawable(env, paths)
    film = pictures.Film(env, team, shown)
    yield film
    for path in paths:
        pictures.write(film, path)


def play(
    env: EnvBase,
    policy: Policy | None,
    team: TeamSpec,
    *,
    episodes: int,
    deterministic: bool = True,
    seed: int = 0,
    longest: int = 10_000,
    film: Film | None = None,
) -> Episodes:
    """Plays exactly ``episodes`` whole episodes.

    The first episode of each env counts; counting the first episodes to *finish* would favor short
    ones. With more episodes than envs, all envs are reset with a new seed. The starts thus depend
    on the environment, the seed and the number of envs, but not on the policy, and two policies can
    be compared start by start. A group's reward of a step is the mean over its born, living agents.
    Rewards added for training only are left out (``measured()`` of the env). Actions are sampled
    from a separate random state.

    Args:
        env (EnvBase): environment, reset and seeded with ``seed``.
        policy (callable, optional): policy; default: random actions.
        team (TeamSpec): groups of agents.

    Keyword Args:
        episodes (int): number of episodes.
        deterministic (bool): True for the likeliest actions, False for sampled ones.
        seed (int): random seed of the environment and the actions.
        longest (int): most steps of an episode; a longer one is an error.
        film (Film, optional): records the first episodes.

    Raises:
        ConfigError: no episodes, or an episode that does not end.
    """
    if episodes < 1:
        raise ConfigError(f"evaluation: episodes is {episodes}, expected 1 or more.")
    act = env.rand_action if policy is None else policy
    if film is not None:
        film.shown = min(film.shown, episodes)
    num_envs = env.batch_size.numel()
    rewards: list[dict[str, Tensor]] = []
    lengths: list[Tensor] = []
    for i, first in enumerate(range(0, episodes, num_envs)):
        with seeded_play(env, deterministic, seed + i * _NEXT_STARTS):
            count, looks_on = min(num_envs, episodes - first), None if i else film
            reward, length = first_episodes(env, act, team, count, longest, looks_on)
        rewards.append(reward)
        lengths.append(length)
    returns = {name: torch.cat([r[name] for r in rewards]) for name in team.groups}
    return Episodes(returns, torch.cat(lengths), _sizes(team))


@contextlib.contextmanager
def seeded_play(
    env: EnvBase, deterministic: bool, seed: int, actions: int = _ACTIONS
) -> Iterator[None]:
    """Seeds an environment and samples actions from a separate random state in the context.

    Args:
        env (EnvBase): environment; rewards added for training only are switched off.
        deterministic (bool): True for the likeliest actions, False for sampled ones.
        seed (int): random seed of the environment.
        actions (int): offset from it to the seed of the actions.
    """
    mode = ExplorationType.DETERMINISTIC if deterministic else ExplorationType.RANDOM
    # Not the environment's own seed, or actions would repeat its random numbers.
    random_state = RandomState(seed + actions, env.device or "cpu")
    with torch.no_grad(), random_state.active(), set_exploration_type(mode), _measured(env):
        env.set_seed(seed)
        yield


def _sizes(team: TeamSpec) -> dict[str, int]:
    return {name: group.n_agents for name, group in team.groups.items()}


def evaluate_members(
    env: EnvBase,
    policy: Policy | None,
    team: TeamSpec,
    n_members: int,
    *,
    episodes: int,
    deterministic: bool = True,
    seed: int = 0,
    longest: int = 10_000,
) -> list[dict[str, float]]:
    """Plays exactly ``episodes`` whole episodes of each member of a population.

    Args:
        env (EnvBase): environment whose batch is split evenly among the members, in order.
        policy, team, episodes, deterministic, seed, longest: as for :func:`evaluate`.
        n_members (int): number of members.

    Returns:
        list of dict: figures of each member, as returned by :func:`evaluate`.
    """
    act = env.rand_action if policy is None else policy
    num_envs = env.batch_size.numel()
    found: list[dict[str, Tensor]] = []
    for i, _ in enumerate(range(0, episodes, num_envs // n_members)):
        with seeded_play(env, deterministic, seed + i * _NEXT_STARTS):
            sums, length = first_episodes(env, act, team, num_envs, longest)
        rows = {**sums, "length": length}
        found.append({k: x.unflatten(0, (n_members, -1)) for k, x in rows.items()})
    rows = {k: torch.cat([x[k] for x in found], 1)[:, :episodes] for k in found[0]}
    return [
        Episodes({k: rows[k][i] for k in team.groups}, rows["length"][i], _sizes(team)).figures()
        for i in range(n_members)
    ]


@contextlib.contextmanager
def put_back(env: EnvBase) -> Iterator[bool]:
    """Restores an environment's state after the context; yields False if that is not possible.

    Args:
        env (EnvBase): environment that is used otherwise in the context.
    """
    before = snapshot_env(env)
    try:
        yield before is not None
    finally:
        if before is not None:
            restore_env(env, before)


def _measured(env: EnvBase) -> AbstractContextManager[Any]:
    """Switches off rewards that an environment adds for training only."""
    while isinstance(env, TransformedEnv):
        env = env.base_env
    own = None if isinstance(env, BatchedEnvBase) else getattr(env, "measured", None)
    return contextlib.nullcontext() if own is None else own()


def first_episodes(
    env: EnvBase,
    act: Policy,
    team: TeamSpec,
    count: int,
    longest: int,
    film: Film | None = None,
) -> tuple[dict[str, Tensor], Tensor]:
    """Plays an episode in each env; returns the first ``count`` returns by group, and lengths.

    Args:
        env (EnvBase): environment; it is reset first.
        act (callable): policy.
        team (TeamSpec): groups of agents.
        count (int): number of envs that count.
        longest (int): most steps of an episode; a longer one is an error.
        film (Film, optional): records the episodes.

    Raises:
        ConfigError: an episode that does not end.
    """
    with contextlib.nullcontext() if film is None else watched(env, film.shown):
        return _first_episodes(env, act, team, count, longest, film)


def _first_episodes(
    env: EnvBase, act: Policy, team: TeamSpec, count: int, longest: int, film: Film | None
) -> tuple[dict[str, Tensor], Tensor]:
    carry = env.reset()
    if film is not None:
        film.begin(carry)
    running = torch.ones(env.batch_size, dtype=torch.bool, device=carry.get("done").device)
    running = running.flatten()
    sums = {name: torch.zeros(running.shape, device=running.device) for name in team.groups}
    length = torch.zeros(running.shape, dtype=torch.int64, device=running.device)
    born: dict[str, Tensor] = {}
    for _ in range(longest):
        if film is None:
            step, carry = env.step_and_maybe_reset(act(carry))
        else:  # in two steps, since the film needs the last state before the reset
            step = env.step(act(carry))
        born = begun(team.groups, step, born)
        for name, group in team.groups.items():
            reward = group_reward(group, step, born.get(name)).reshape(running.shape)
            sums[name] += torch.where(running, reward, 0.0)
        if film is not None:
            film.update(act, step, sums)
            carry = env.maybe_reset(step_mdp(step))
        length += running
        running = running & ~step.get(("next", "done")).reshape(running.shape)
        if not bool(running[:count].any()):
            return {name: value[:count] for name, value in sums.items()}, length[:count]
    raise ConfigError(
        f"evaluation: {int(running[:count].sum())} episodes did not end in {longest} steps; "
        "give the environment a time limit (env.max_steps)."
    )
