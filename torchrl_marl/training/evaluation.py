"""Evaluation of a policy on whole episodes, and what they say.

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
"""Episodes that are played side by side: fewer where fewer are asked for, never more."""
EVALUATION_SEED = 1_000_003
"""Of the starts that every policy of an environment is measured on: not those of training."""

_ACTIONS = 7_368_787
_NEXT_STARTS = 15_485_863  # between the seeds of the first episodes of all envs, and of the next
Policy = Callable[[TensorDictBase], TensorDictBase]


@dataclass(frozen=True)
class Episodes:
    """Whole episodes, in the order of their starts.

    Args:
        returns (dict): group -> return of each episode, ``[n]``; the mean over its agents.
        lengths (Tensor): steps, ``[n]``.
        sizes (dict): group -> its number of agents.
    """

    returns: Mapping[str, Tensor]
    lengths: Tensor
    sizes: Mapping[str, int]

    @property
    def total(self) -> Tensor:
        """All agents' mean return of each episode, ``[n]``."""
        weighted = [self.returns[name] * size for name, size in self.sizes.items()]
        return torch.stack(weighted).sum(0) / sum(self.sizes.values())

    def figures(self) -> dict[str, float]:
        """Returns what :func:`~torchrl_marl.training.evaluate` returns."""
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
    """Returns the mean's interval, where there is more than one episode."""
    if len(values) < 2 or not bool(values.isfinite().all()):
        return {}
    found = estimate(mean, [values.double().cpu()])
    return {f"{name}_low": found.low, f"{name}_high": found.high}


def figures_of_all(played: Episodes | None) -> dict[str, float]:
    """Returns the figures of episodes; nothing where none were played."""
    return {} if played is None else played.figures()


def kind_of(deterministic: bool) -> str:
    """Returns the word for a kind of actions."""
    return "likeliest" if deterministic else "drawn"


def where_they_differ(likeliest: Episodes, drawn: Episodes) -> str | None:
    """Returns a sentence where both kinds of actions differ by an amount that matters, or None.

    It matters where the interval and the exact test tell both apart, which takes 6 episodes, and
    beside the spread of the episodes' returns it is at least what Cohen calls small: of many
    episodes the least difference is beyond chance.

    Args:
        likeliest, drawn (Episodes): from the same starts.

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
    beside = f", {abs(gap.value) / spread:.2g} standard deviations of episodes" if spread else ""
    return (
        f"the likeliest actions earn {one:.4g} and drawn ones {other:.4g} from the same starts, "
        f"which is more than chance (they differ by {gap.low:.3g} to {gap.high:.3g}{beside})"
    )


def _spread(one: Tensor, other: Tensor) -> float:
    """The root of the mean variance of both."""
    variance = one.double().var(correction=0) + other.double().var(correction=0)
    return float((variance / 2).sqrt())


def after_training(own: Episodes, other: Episodes | None, deterministic: bool) -> dict[str, Any]:
    """Returns what a run's summary says of its last evaluation.

    Args:
        own (Episodes): as the run's settings say.
        other (Episodes, optional): by the other kind of actions.
        deterministic (bool): whether the run's own are the likeliest.
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

    The same as ``play(...).figures()``, and the interval of the mean is its 95 % bootstrap interval
    over episodes (percentiles of 5,000 resamples).

    Args:
        env, policy, team: of :func:`play`.

    Keyword Args:
        episodes, deterministic, seed, longest: of :func:`play`.
        gif (Path, optional): where to write an animation of the first episodes.
        shown (int): how many of them, side by side.

    Returns:
        dict: ``return_mean`` (all agents' mean, over episodes), ``return_std``, ``return_low`` and
        ``return_high`` (of the mean; of two episodes or more), ``return_min``, ``return_max``,
        ``length_mean``, ``length_min``, ``length_max``, ``episodes``, and
        ``<group>/episode_reward``, of each group of several with ``_low`` and ``_high``.

    Raises:
        ConfigError: no episodes, one that does not end, or a GIF of what cannot be drawn.
        MissingExtraError: a GIF without matplotlib.
    """
    options: dict[str, Any] = {"deterministic": deterministic, "seed": seed, "longest": longest}
    with filmed(env, team, [] if gif is None else [gif], shown) as film:
        return play(env, policy, team, episodes=episodes, film=film, **options).figures()


@contextlib.contextmanager
def filmed(
    env: EnvBase, team: TeamSpec, paths: Sequence[Path], shown: int
) -> Iterator[Film | None]:
    """Gives a film for what is played, which is written afterwards; None without paths.

    Args:
        env (EnvBase): that is played.
        team (TeamSpec): the groups.
        paths (sequence of Path): where to write the animation.
        shown (int): how many of the first episodes, side by side.

    Raises:
        ConfigError: an environment that cannot be drawn.
        MissingExtraError: a package that an animation takes is not installed.
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

    The first episode of each env counts, by the env's index: the first to *finish* would favor
    short ones. With more episodes than envs, all envs start anew, from a seed of their own: so
    where an episode starts depends on the environment, the seed and the number of envs, and not on
    the policy, and two policies are compared start by start. A group's reward of a step is the
    mean over its agents that are born and live. Draws from a random state of its own. What an env
    adds to the reward for training only is left out, in its ``measured()``.

    Args:
        env (EnvBase): played from a reset; seeded with ``seed``.
        policy (callable, optional): random actions without one.
        team (TeamSpec): the groups.

    Keyword Args:
        episodes (int): how many.
        deterministic (bool): the likeliest action, or a drawn one.
        seed (int): of the environment and of the actions.
        longest (int): steps after which an episode that does not end is an error.
        film (Film, optional): looks on at the first episodes.

    Raises:
        ConfigError: no episodes, or one that does not end.
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
    """Seeds an environment, and lets actions be drawn from a random state of their own.

    Args:
        env (EnvBase): without what it adds to rewards in training.
        deterministic (bool): the likeliest actions, or drawn ones.
        seed (int): of the environment.
        actions (int): beside it the seed of the actions.
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
        env (EnvBase): whose envs are the members', one after the other.
        policy, team, episodes, deterministic, seed, longest: of :func:`evaluate`.
        n_members (int): how many members.

    Returns:
        list of dict: of each member, as :func:`evaluate` returns it.
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
    """Restores an environment's state afterwards; yields whether that is possible.

    Args:
        env (EnvBase): on which something else plays in the meantime.
    """
    before = snapshot_env(env)
    try:
        yield before is not None
    finally:
        if before is not None:
            restore_env(env, before)


def _measured(env: EnvBase) -> AbstractContextManager[Any]:
    """Switches an environment's rewards to those of evaluation."""
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
        env (EnvBase): played from a reset.
        act (callable): the policy.
        team (TeamSpec): the groups.
        count (int): envs that count.
        longest (int): steps after which an episode that does not end is an error.
        film (Film, optional): looks on.

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
        else:  # the same in two steps: in between the last state can still be seen
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
