"""Evaluation of a policy on whole episodes, and statistics of their returns.

Shapes: E envs, N agents of a group, n episodes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from tensordict import TensorDictBase
from torch import Tensor
from torchrl.envs import Compose, EnvBase, TransformedEnv
from torchrl.envs.batched_envs import BatchedEnvBase
from torchrl.envs.utils import ExplorationType, set_exploration_type, step_mdp

from torchrl_marl.collectors.team import restore_env, snapshot_env
from torchrl_marl.envs.scene import watched
from torchrl_marl.errors import ConfigError
from torchrl_marl.objectives.flags import begun
from torchrl_marl.runtime.applications import import_application
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
    "describe_action_difference",
    "episode_statistics",
    "evaluate",
    "evaluate_members",
    "first_episodes",
    "kind_of",
    "last_evaluation_entries",
    "own_rewards",
    "play",
    "record_animation",
    "restoring_env",
    "seeded_play",
]

AT_ONCE = 200
"""Largest number of episodes that are played in parallel."""
EVALUATION_SEED = 1_000_003
"""Random seed of an evaluation's initial states, the same for all policies, but not training's."""

_ACTION_SEED_OFFSET = 7_368_787
_BATCH_SEED_OFFSET = 15_485_863  # added to the seed for each further batch of episodes
Policy = Callable[[TensorDictBase], TensorDictBase]


@dataclass(frozen=True)
class Episodes:
    """Returns and lengths of whole episodes, in the order of their initial states.

    Args:
        returns (dict): group -> return of each episode, averaged over the group's agents, ``[n]``.
        lengths (Tensor): number of steps of each episode, ``[n]``.
        sizes (dict): group -> number of agents.
        lived (dict): group -> mask of the episodes in which any of its agents lived, ``[n]``; a
            group that lived in all of them may be missing. Means leave out the other episodes.
    """

    returns: Mapping[str, Tensor]
    lengths: Tensor
    sizes: Mapping[str, int]
    lived: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def total(self) -> Tensor:
        """Return of each episode, averaged over all agents, ``[n]``."""
        weights = {name: size * self.lived.get(name, 1) for name, size in self.sizes.items()}
        weighted = [self.returns[name] * weight for name, weight in weights.items()]
        n_agents = sum(weights.values())
        n_agents = n_agents.clamp_min(1) if isinstance(n_agents, Tensor) else n_agents
        return torch.stack(weighted).sum(0) / n_agents

    def of_group(self, name: str) -> Tensor:
        """Returns the returns of a group in the episodes in which it lived, ``[at most n]``."""
        lived, own = self.lived.get(name), self.returns[name]
        return own if lived is None else own[lived]

    def figures(self) -> dict[str, float]:
        """Returns the same statistics as :func:`~torchrl_marl.training.evaluate`."""
        total, lengths = self.total, self.lengths
        found = {
            "return_mean": total.mean().item(),
            "return_std": total.std(correction=0).item(),
            "length_mean": lengths.float().mean().item(),
            "episodes": len(lengths),
        }
        own = {name: self.of_group(name) for name in self.returns}
        found |= {f"{name}/episode_reward": x.mean().item() for name, x in own.items()}
        found |= {"return_min": total.min().item(), "return_max": total.max().item()}
        found |= _interval("return", total)
        found |= {"length_min": lengths.min().item(), "length_max": lengths.max().item()}
        for name, x in own.items() if len(own) > 1 else ():
            found |= _interval(f"{name}/episode_reward", x)
        return found

    def against(self, other: Episodes) -> Paired:
        """Compares the returns, in pairs, with another policy's from the same initial states."""
        return paired_difference(self.total.double().cpu(), other.total.double().cpu())


def _interval(name: str, values: Tensor) -> dict[str, float]:
    """Returns the interval of the mean; empty for a single episode or non-finite values."""
    if len(values) < 2 or not bool(values.isfinite().all()):
        return {}
    found = estimate(mean, [values.double().cpu()])
    return {f"{name}_low": found.low, f"{name}_high": found.high}


def episode_statistics(played: Episodes | None) -> dict[str, float]:
    """Returns the statistics of episodes; empty if none were played."""
    return {} if played is None else played.figures()


def kind_of(deterministic: bool) -> str:
    """Returns ``likeliest`` for deterministic actions, and ``drawn`` for sampled ones."""
    return "likeliest" if deterministic else "drawn"


def describe_action_difference(likeliest: Episodes, drawn: Episodes) -> str | None:
    """Returns a sentence if likeliest and sampled actions clearly differ in return, else None.

    The difference must be significant by both the interval and the exact test; this takes at least
    6 episodes. The difference must also be at least 0.2 standard deviations of the returns (a small
    effect according to Cohen), since over many episodes even tiny differences are significant.

    Args:
        likeliest (Episodes): episodes with the most likely actions.
        drawn (Episodes): episodes with sampled actions, from the same initial states.

    Reference: Cohen, 1988, Statistical Power Analysis for the Behavioral Sciences, section 2.2.
    """
    if len(likeliest.lengths) < 2:
        return None
    found = likeliest.against(drawn)
    if not found.distinguishable:
        return None
    gap = found.difference
    spread = _pooled_std(likeliest.total, drawn.total)
    if not matters(gap.value, spread):
        return None
    one, other = likeliest.total.mean().item(), drawn.total.mean().item()
    gap_note = f", {abs(gap.value) / spread:.2g} standard deviations of returns" if spread else ""
    return (
        f"the most likely actions earn {one:.4g} and sampled ones {other:.4g} from the same "
        f"starts, a significant difference (95 % interval {gap.low:.3g} to "
        f"{gap.high:.3g}{gap_note})"
    )


def _pooled_std(one: Tensor, other: Tensor) -> float:
    """Returns the square root of the mean of the two samples' variances."""
    variance = one.double().var(correction=0) + other.double().var(correction=0)
    return float((variance / 2).sqrt())


def last_evaluation_entries(
    own: Episodes, other: Episodes | None, deterministic: bool
) -> dict[str, Any]:
    """Returns the entries of a run's summary that describe its last evaluation.

    Args:
        own (Episodes): episodes with actions as in the settings, deterministic or sampled.
        other (Episodes, optional): episodes with sampled actions if those of ``own`` are
            deterministic, else with the most likely actions.
        deterministic (bool): True if the settings ask for the most likely actions.
    """
    found = {kind_of(deterministic): own.figures()}
    if other is None:
        return {"evaluation": found}
    found[kind_of(not deterministic)] = other.figures()
    pair = (own, other) if deterministic else (other, own)
    return {"evaluation": found, "actions_differ": describe_action_difference(*pair)}


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
        ``<group>/episode_reward``. With two or more episodes, it also has the interval of the mean,
        ``return_low`` and ``return_high``; with several groups, each group's interval, too, under
        ``<group>/episode_reward_low`` and ``_high``.

    Raises:
        ConfigError: ``episodes`` is below 1, an episode does not end, or the environment cannot be
            drawn.
        MissingExtraError: a GIF is requested, but matplotlib is not installed.
    """
    options: dict[str, Any] = {"deterministic": deterministic, "seed": seed, "longest": longest}
    with record_animation(env, team, [] if gif is None else [gif], shown) as film:
        return play(env, policy, team, episodes=episodes, film=film, **options).figures()


@contextlib.contextmanager
def record_animation(
    env: EnvBase, team: TeamSpec, paths: Sequence[Path], shown: int
) -> Iterator[Film | None]:
    """Context that records the episodes played in it, and writes an animation of them on exit.

    Args:
        env (EnvBase): environment of the episodes.
        team (TeamSpec): groups of agents.
        paths (sequence of Path): files of the animation. If empty, nothing is recorded, and the
            context yields None.
        shown (int): number of episodes in the animation.

    Raises:
        ConfigError: the environment cannot be drawn.
        MissingExtraError: a package required for animations is not installed.
    """
    if not paths:
        yield None
        return
    pictures = import_application("pictures")
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

    Only the first episode of each env counts; counting the first episodes to *finish* would favor
    short ones. If there are more episodes than envs, all envs are reset with a new seed. The
    initial states thus depend on the environment, the seed and the number of envs, but not on the
    policy, so two policies can be compared episode by episode. A group's reward in a step is the
    mean over its agents that are born and alive. Rewards that an environment adds only for training
    are left out (by its method ``measured()``). Actions are sampled from a separate random state.

    Args:
        env (EnvBase): environment, which is reset and seeded with ``seed``.
        policy (callable, optional): policy; by default random actions.
        team (TeamSpec): groups of agents.

    Keyword Args:
        episodes (int): number of episodes.
        deterministic (bool): True for the likeliest actions, False for sampled ones.
        seed (int): random seed of the environment and the actions.
        longest (int): largest number of steps of an episode; a longer one is an error.
        film (Film, optional): object that records the first episodes.

    Raises:
        ConfigError: ``episodes`` is below 1, or an episode does not end.
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
        with seeded_play(env, deterministic, seed + i * _BATCH_SEED_OFFSET):
            count, batch_film = min(num_envs, episodes - first), None if i else film
            reward, length = first_episodes(env, act, team, count, longest, batch_film)
        rewards.append(reward)
        lengths.append(length)
    found = {key: torch.cat([r[key] for r in rewards]) for key in rewards[0]}
    return _make_episodes(team, {**found, "length": torch.cat(lengths)})


def _make_episodes(team: TeamSpec, rows: Mapping[str, Tensor]) -> Episodes:
    """Returns episodes from their returns, lengths, and groups that lived, each ``[n]``."""
    lived = {name: rows[key] for name in team.groups if (key := f"{name}/lived") in rows}
    lived = {name: mask for name, mask in lived.items() if not bool(mask.all())}
    returns = {name: rows[name] for name in team.groups}
    sizes = {name: group.n_agents for name, group in team.groups.items()}
    return Episodes(returns, rows["length"], sizes, lived)


@contextlib.contextmanager
def seeded_play(
    env: EnvBase, deterministic: bool, seed: int, actions: int = _ACTION_SEED_OFFSET
) -> Iterator[None]:
    """Context with a seeded environment, in which actions are sampled from a separate random state.

    Args:
        env (EnvBase): environment; rewards that it adds only for training are switched off.
        deterministic (bool): True for the likeliest actions, False for sampled ones.
        seed (int): random seed of the environment.
        actions (int): number added to ``seed`` for the random seed of the actions.
    """
    mode = ExplorationType.DETERMINISTIC if deterministic else ExplorationType.RANDOM
    # With the environment's seed, the actions would repeat the environment's random numbers.
    random_state = RandomState(seed + actions, env.device or "cpu")
    with torch.no_grad(), random_state.active(), set_exploration_type(mode), own_rewards(env):
        env.set_seed(seed)
        yield


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
        list of dict: statistics of each member, as returned by :func:`evaluate`.
    """
    act = env.rand_action if policy is None else policy
    num_envs = env.batch_size.numel()
    found: list[dict[str, Tensor]] = []
    for i, _ in enumerate(range(0, episodes, num_envs // n_members)):
        with seeded_play(env, deterministic, seed + i * _BATCH_SEED_OFFSET):
            sums, length = first_episodes(env, act, team, num_envs, longest)
        rows = {**sums, "length": length}
        found.append({k: x.unflatten(0, (n_members, -1)) for k, x in rows.items()})
    rows = {k: torch.cat([x[k] for x in found], 1)[:, :episodes] for k in found[0]}
    return [
        _make_episodes(team, {k: x[i] for k, x in rows.items()}).figures() for i in range(n_members)
    ]


@contextlib.contextmanager
def restoring_env(env: EnvBase) -> Iterator[bool]:
    """Context that restores an environment's state on exit; yields False if that is impossible.

    Args:
        env (EnvBase): environment, which may be used for anything in the context.
    """
    before = snapshot_env(env)
    try:
        yield before is not None
    finally:
        if before is not None:
            restore_env(env, before)


@contextlib.contextmanager
def own_rewards(env: EnvBase) -> Iterator[None]:
    """Context without the rewards that an environment adds only for training.

    Args:
        env (EnvBase): environment; it and its transforms may have a method ``measured()``.
    """
    with contextlib.ExitStack() as stack:
        while isinstance(env, TransformedEnv):
            parts = env.transform if isinstance(env.transform, Compose) else [env.transform]
            for part in parts:
                if hasattr(type(part), "measured"):  # others pass names on to the environment
                    stack.enter_context(part.measured())
            env = env.base_env
        measured = None if isinstance(env, BatchedEnvBase) else getattr(env, "measured", None)
        if measured is not None:
            stack.enter_context(measured())
        yield


def first_episodes(
    env: EnvBase,
    act: Policy,
    team: TeamSpec,
    count: int,
    longest: int,
    film: Film | None = None,
) -> tuple[dict[str, Tensor], Tensor]:
    """Plays one episode in each env; returns ``count`` episodes' returns (by group) and lengths.

    ``<group>/lived`` beside the returns tells in which episodes an agent of the group lived. It is
    missing for groups whose agents are all born with the episode.

    Args:
        env (EnvBase): environment; it is reset first.
        act (callable): policy.
        team (TeamSpec): groups of agents.
        count (int): number of episodes to return.
        longest (int): largest number of steps of an episode; a longer one is an error.
        film (Film, optional): object that records the episodes.

    Raises:
        ConfigError: an episode does not end.
    """
    with contextlib.nullcontext() if film is None else watched(env, film.shown):
        return _play_first_episodes(env, act, team, count, longest, film)


def _play_first_episodes(
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
    lived: dict[str, Tensor] = {}
    for _ in range(longest):
        if film is None:
            step, carry = env.step_and_maybe_reset(act(carry))
        else:  # step and reset separately, since the film needs the state between them
            step = env.step(act(carry))
        born = begun(team.groups, step, born)
        for name, own in born.items():
            key = f"{name}/lived"
            lives = own.any(-1).reshape(running.shape) & running
            lived[key] = lives | lived[key] if key in lived else lives
        for name, group in team.groups.items():
            reward = group_reward(group, step, born.get(name)).reshape(running.shape)
            sums[name] += torch.where(running, reward, 0.0)
        if film is not None:
            film.update(act, step, sums)
            carry = env.maybe_reset(step_mdp(step))
        length += running
        running = running & ~step.get(("next", "done")).reshape(running.shape)
        if not bool(running[:count].any()):
            return {key: x[:count] for key, x in {**sums, **lived}.items()}, length[:count]
    raise ConfigError(
        f"evaluation: {int(running[:count].sum())} episodes did not end in {longest} steps; "
        "give the environment a time limit (env.max_steps)."
    )
