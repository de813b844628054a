"""Metrics of a batch: returns and lengths of finished episodes, and agent frames.

Shapes: E envs, T steps, N agents of a group.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from tensordict import TensorDictBase, is_tensor_collection
from torch import Tensor

from torchrl_marl.errors import SpecError
from torchrl_marl.functional import masked_mean
from torchrl_marl.learners.block import check_finite
from torchrl_marl.learners.learner import Learner
from torchrl_marl.objectives.flags import Births
from torchrl_marl.runtime.ranks import current
from torchrl_marl.specs import GroupSpec, TeamSpec

__all__ = [
    "EpisodeTracker",
    "count_agent_frames",
    "group_reward",
    "mean_return",
    "metrics_of",
]

# Number of steps with rewards after which a group can be recognized as a zero-sum game.
_MIN_REWARDED_STEPS = 10


class EpisodeTracker:
    """Sums of rewards over episodes that may span several batches.

    The reward of a group in a step is the mean over its living agents.

    Args:
        team (TeamSpec): the groups.
        n_members (int): number P of members of a population, each of which has consecutive envs.
            With several members, means are per member, ``[P]``.

    Attributes:
        episodes (tuple): two entries: a dict, group -> return up to each step of the last batch,
            ``[E, T]``; and a mask of the ends of episodes, ``[E, T]``.
        sums (dict): ``"<group>/episode_reward"`` and ``"<group>/episode_length"`` up to each step
            of the last batch, ``[E, T]``.
        lived (dict): group -> mask of the episodes in which one of its agents has lived up to each
            step of the last batch, ``[E, T]``; without groups that live in all of them.
        returns (tuple, optional): for a population, the mean return of all agents up to each step
            of the last batch, and the ends of episodes; both ``[E, T]``.
        exploited (int): number of first envs in which exploiters of the policy learn.
    """

    def __init__(self, team: TeamSpec, n_members: int = 1) -> None:
        self.team, self.n_members = team, n_members
        self.returns: tuple[Tensor, Tensor] | None = None
        self.episodes: tuple[dict[str, Tensor], Tensor] = ({}, torch.zeros(()))
        self.sums: dict[str, Tensor] = {}
        self.lived: dict[str, Tensor] = {}
        self.exploited = 0
        self._running: dict[str, Tensor] = {}
        self._births = Births(team.groups)
        # To detect zero-sum games: numbers of steps with rewards, and with a sum other than 0.
        several = [name for name, group in team.groups.items() if group.n_agents > 1]
        self._reward_counts = {name: torch.zeros(2, dtype=torch.int64) for name in several}

    def update(self, batch: TensorDictBase) -> dict[str, Tensor]:
        """Returns means over the episodes that ended in a batch ``[E, T]``; NaN if none ended."""
        batch = batch.flatten(0, -2) if batch.ndim > 2 else batch
        done = batch.get(("next", "done")).reshape(*batch.shape)
        born = self._births.update(batch)
        self.lived = {
            name: batch.get(("collector", f"{name}/lived"), own.any(-1))
            for name, own in born.items()
        }
        for name, counts in self._reward_counts.items():
            found = self._count_zero_sum_steps(self.team.groups[name], batch)
            self._reward_counts[name] = counts.to(found.device) + found
        known = done & batch.get(("collector", "episode_known"), torch.ones_like(done))
        means, ended = {}, []
        series = {}
        for name, group in self.team.groups.items():
            series[f"{name}/episode_reward"] = group_reward(group, batch, born.get(name))
            series[f"{name}/episode_length"] = torch.ones(batch.shape, device=done.device)
        for name, value in series.items():
            totals = self.sums[name] = self._running_totals(name, value, done, batch)
            group = self.team.groups[name.rpartition("/")[0]]
            ends = _learner_episode_ends(batch, group, known, self.exploited)
            if group.name in self.lived:
                ends = ends & self.lived[group.name]  # in the others the group had no agents
            means[name] = self._mean_over_episodes(totals, ends)
            if name.endswith("/episode_reward"):
                ended.append(totals * group.n_agents)
                self.episodes[0][group.name] = totals
        self.episodes = self.episodes[0], done
        if self.n_members > 1:
            self.returns = torch.stack(ended).sum(0) / self.team.n_agents, done
        return means

    def _running_totals(
        self, name: str, value: Tensor, done: Tensor, batch: TensorDictBase
    ) -> Tensor:
        """Returns the sum of a value over the running episode up to each step, ``[E, T]``."""
        # If rows do not continue those of the last batch, the collector provides the sums.
        if (sums := batch.get(("collector", name), None)) is not None:
            return sums.to(value.dtype)
        start = self._running.get(name, torch.zeros_like(value[:, 0]))
        totals, self._running[name] = _episode_sums(value, done, start)
        return totals

    def _mean_over_episodes(self, totals: Tensor, done: Tensor) -> Tensor:
        if self.n_members == 1:
            own = torch.where(done, totals, 0.0).sum(), done.sum()
            total, count = current().sum_all(own)
            return torch.where(count > 0, total / count.clamp_min(1), torch.nan)
        totals, done = (x.reshape(self.n_members, -1) for x in (totals, done))
        return torch.where(done.any(-1), masked_mean(totals, done, -1), torch.nan)

    def _count_zero_sum_steps(self, group: GroupSpec, batch: TensorDictBase) -> Tensor:
        """Counts the steps with rewards, and the steps in which rewards do not sum to 0."""
        reward = batch.get(("next", group.reward_key))
        if reward.ndim == batch.ndim + 1:  # one reward for all agents
            reward = reward.unsqueeze(-2)
        elif (living := group.living(batch)) is not None:
            reward = torch.where(living.unsqueeze(-1), reward, 0.0)
        size, total = reward.abs().sum((-2, -1)), reward.sum((-2, -1)).abs()
        return torch.stack([(size > 0).sum(), (total > 1e-5 * size).sum()])

    def warn_of_games(self) -> None:
        """Warns once about each group in which rewards add up to zero, as in a zero-sum game.

        A group is decided after 10 steps with rewards, or after rewards that do not add up to zero.
        A call waits for the device as long as a group is undecided.
        """
        for name, counts in list(self._reward_counts.items()):
            rewarded, unequal = counts.tolist()
            if unequal or rewarded >= _MIN_REWARDED_STEPS:
                del self._reward_counts[name]
            if rewarded >= _MIN_REWARDED_STEPS and not unequal:
                warnings.warn(
                    f"group {name!r}: in each of {rewarded} steps its agents' rewards add up to "
                    "0, as in a zero-sum game, so that the group's return is always 0; put each "
                    "side into a separate group (env.group_map).",
                    stacklevel=2,
                )

    def forget(self, envs: Tensor) -> None:
        """Discards the running episodes of the given envs.

        Args:
            envs (Tensor): mask of these envs, bool, ``[E]``.
        """
        for name, total in self._running.items():
            self._running[name] = torch.where(envs, torch.zeros_like(total), total)
        self._births.forget(envs)

    def state_dict(self) -> dict[str, Tensor]:
        """Returns the sums of the running episodes, and masks of the agents born in them."""
        return {**self._running, **self._births.state_dict()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restores saved sums."""
        self._births.load_state_dict(state)
        self._running = {key: x for key, x in state.items() if not key.endswith("/born")}


def _learner_episode_ends(
    batch: TensorDictBase, group: GroupSpec, done: Tensor, exploited: int
) -> Tensor:
    """Returns the ends of the episodes in which the learning policy controls agents of a group.

    In the first ``exploited`` envs, ``learns`` is True for the exploiter's agents, and the policy
    controls the others.
    """
    learns = batch.get(group.key("learns"), None)
    if learns is None:
        return done
    controls = torch.cat([~learns[:exploited], learns[exploited:]]) if exploited else learns
    return done & controls.any(-1)


def count_agent_frames(team: TeamSpec, batch: TensorDictBase, n_members: int = 1) -> Tensor:
    """Returns the number of acting agents, summed over steps; per member (``[P]``) if several."""
    shape = () if n_members == 1 else (n_members,)
    total = torch.zeros(shape, dtype=torch.int64, device=batch.get(("next", "done")).device)
    for group in team.groups.values():
        if group.mask_key is None:
            total += batch.numel() // n_members * group.n_agents
        else:
            total += batch.get(group.mask_key).reshape(*shape, -1).sum(-1)
    return total


def group_reward(group: GroupSpec, batch: TensorDictBase, born: Tensor | None = None) -> Tensor:
    """Returns a group's reward in each step: the mean over its living agents.

    Rewards before an agent's birth and after its end are left out.

    Args:
        group (GroupSpec): the group.
        batch (TensorDictBase): data of any batch size ``[*B]``.
        born (Tensor, optional): mask of the agents already born, bool, ``[*B, N]``; by default,
            all are born.

    Shapes:
        - returns: ``[*B]``
    """
    reward = batch.get(("next", group.reward_key))
    if reward.ndim == batch.ndim + 1:
        return reward.squeeze(-1)
    # A waiting agent is alive: it receives rewards for others' actions.
    living = group.living(batch)
    if born is not None:
        living = born if living is None else living & born
    return masked_mean(reward.squeeze(-1), living, dim=-1)


def _episode_sums(value: Tensor, done: Tensor, start: Tensor) -> tuple[Tensor, Tensor]:
    """Returns a value's sum over the episode up to each step, ``[E, T]``, and the last, ``[E]``."""
    # Double precision: the rewards of all episodes of a batch are added up.
    sums = start.unsqueeze(-1) + value.double().cumsum(-1)
    ends = torch.where(done, sums, 0.0)
    steps = torch.arange(value.shape[1], device=value.device).expand_as(value)
    last_end = torch.where(done, steps, -1).cummax(-1).values
    before = torch.cat([torch.full_like(last_end[:, :1], -1), last_end[:, :-1]], -1)
    base = torch.where(before >= 0, ends.gather(-1, before.clamp_min(0)), 0.0)
    final = torch.where(
        last_end[:, -1] >= 0, ends.gather(-1, last_end[:, -1:].clamp_min(0))[:, 0], 0.0
    )
    return (sums - base).to(value.dtype), (sums[:, -1] - final).to(value.dtype)


def mean_return(team: TeamSpec, row: Mapping[str, float]) -> float:
    """Returns the mean return over all agents, like ``return_mean`` of an evaluation.

    Args:
        team (TeamSpec): the groups.
        row (mapping): row of a table, with ``<group>/episode_reward`` of each group.
    """
    sums = (row[f"{name}/episode_reward"] * own.n_agents for name, own in team.groups.items())
    return sum(sums) / team.n_agents


def metrics_of(learner: Learner, found: Any, n_members: int = 1) -> dict[str, Tensor]:
    """Returns what ``learn`` returned, by the names in ``metrics.csv``, ``"group/name"``.

    Args:
        learner (Learner): the learner.
        found (TensorDict): its metrics ``(group, name)``.
        n_members (int): number of values of a metric.

    Shapes:
        - a metric: one value, or ``[P]`` in a population

    Raises:
        SpecError: not a TensorDict of numbers by group and name.
        NonFiniteError: NaN or infinity in a loss or gradient norm of a learner of your own.

    Examples:
        >>> from tensordict import TensorDict
        >>> found = TensorDict({"agents": {"loss_objective": torch.ones(())}})
        >>> metrics_of(torch.nn.Module(), found)
        {'agents/loss_objective': tensor(1.)}
    """
    wrong = None if is_tensor_collection(found) else f"a {type(found).__name__}"
    metrics = {} if wrong else dict(found.items(True, True))
    for key, value in metrics.items():
        if not isinstance(key, tuple) or len(key) != 2:
            wrong = f"the metric {key!r}"
        elif not isinstance(value, Tensor) or value.numel() != n_members:
            wrong = f"{key!r} of shape {list(value.shape)}"
    if wrong:
        raise SpecError(
            f"{type(learner).__name__}.learn returned {wrong}, expected a TensorDict with one "
            "number for each (group, name), as TensorDict({'agents': {'loss_objective': loss}})."
        )
    if not hasattr(learner, "refuse_diverged"):  # which those of this package have called
        check_finite(metrics)
    return {"/".join(key): value for key, value in metrics.items()}
