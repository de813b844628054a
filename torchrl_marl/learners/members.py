"""Members of a population, trained in parallel and independently by one learner.

Shapes: P members, G groups of all members, E envs of a member, T steps, N agents of a member.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from torchrl_marl.errors import ConfigError, NonFiniteError
from torchrl_marl.learners.adam import Adam
from torchrl_marl.learners.algorithms import ALGORITHMS
from torchrl_marl.learners.capabilities import check_members, varying_of
from torchrl_marl.learners.clipping import GradientClip
from torchrl_marl.learners.config import OnPolicyConfig
from torchrl_marl.learners.off_policy_config import ReplayLearnerConfig
from torchrl_marl.learners.rows import Rows
from torchrl_marl.specs import GroupSpec

__all__ = [
    "Members",
    "OffPolicyPopulation",
    "PopulationLearner",
    "ValuePopulation",
    "learner_of_members",
    "settings_of_members",
]


class Members:
    """Members of a population: their settings, their divergence flags and their parameters' rows.

    A learner with members trains all of them in one program, and each member trains exactly as it
    would alone. Members are stacked along the agents' dim. A replay buffer holds the same number of
    rows for each member, and an update samples for each member the rows that it would sample alone.
    A member whose gradients become NaN or infinite is frozen at its last parameters. The other
    members continue to train. Their results are the same, to the bit, as in a run without the
    frozen member.

    Args:
        config (LearnerConfig): settings of one member.
        n_members (int): number P of members, 2 or more.
        settings (mapping, optional): name of a setting -> its value for each member, ``[P]``, which
            replaces the value in ``config``. :func:`~torchrl_marl.learners.capabilities.varying_of`
            returns the possible names.
        share_replay (bool): whether all members learn from one replay buffer.
        device (torch.device, optional): device of the learner.

    Attributes:
        settings (dict): name -> ``[P]``, the learning rates and the given settings. Values that are
            written into these tensors take effect with the next batch, without capturing a graph
            again.
        diverged (Tensor): bool, ``[P]``, True for members that are frozen because a gradient was
            not finite.
        rows (Rows): the member to which each row of a parameter belongs.
        tensors (list of Tensor): tensors of the members that an update reads and writes.

    Raises:
        ConfigError: settings with which members would not learn independently.

    Reference: Flajolet et al., 2022, https://arxiv.org/abs/2206.08888 (vectorized populations).

    Reduces to: a learner without members, for each member.
    """

    def __init__(
        self,
        config: Any,
        n_members: int,
        settings: Mapping[str, Tensor] | None = None,
        *,
        share_replay: bool = False,
        device: torch.device | str | None = None,
    ) -> None:
        check_members(config)
        self.settings = settings_of_members(config, n_members, settings or {}, device)
        self.n, self.share_replay = n_members, share_replay
        self.diverged = torch.zeros(n_members, dtype=torch.bool, device=device)
        self.rows = Rows(n_members)
        self.tensors = [self.diverged]

    def full(self, value: float) -> Tensor:
        """Returns a constant for all members, ``[P]``."""
        return torch.full((self.n,), value, device=self.diverged.device)

    def take_over(self, clips: Iterable[GradientClip], optimizers: Iterable[Adam]) -> None:
        """Assigns parameters' rows to members, so clips and optimizers treat members separately."""
        for clip in clips:
            self.rows.add(clip)
            if "max_grad_norm" in self.settings:
                clip.limit = torch.full(
                    (clip.n_groups + 1,), torch.inf, device=self.diverged.device
                )
                self.tensors.append(clip.limit)
        for optimizer in optimizers:
            for parameter in optimizer.parameters:
                self.rows.add_parameter(parameter)
            optimizer.members, optimizer.rates = self, self.full(float(optimizer.lr))

    # ------------------------------------------------------------------------------- learning

    @contextlib.contextmanager
    def learning(self, learner: Any, batch: TensorDictBase) -> Iterator[None]:
        """Context in which a learner's members train on a batch ``[P * E, T]``, sorted by member.

        Raises:
            ConfigError: a batch whose envs cannot be split equally among the members.
        """
        if batch.shape[0] % self.n:
            raise ConfigError(
                f"a batch of {batch.shape[0]} envs, expected a multiple of the {self.n} members."
            )
        self._write_settings(learner)
        before = {p: p.detach().clone() for p in self.rows.owners}
        yield
        self._exclude_diverged(learner, before)

    @torch.no_grad()
    def note(self, norms: Tensor) -> None:
        """Flags members with a gradient norm that is NaN or infinite; norms: ``[G]``."""
        self.diverged.logical_or_((~norms.unflatten(0, (self.n, -1)).isfinite()).any(-1))

    @torch.no_grad()
    def _exclude_diverged(self, learner: Any, before: Mapping[Tensor, Tensor]) -> None:
        """Restores the parameters that diverged members had when they last acted.

        A member has also diverged if the norm of its parameters overflows. The learner's statistics
        are made finite, too, because they are saved.
        """
        self.rows.note_broken(self.diverged)
        if not bool(self.diverged.any()):
            return
        self.rows.put_back(before, self.diverged)
        for statistic in (*learner.buffers(), *learner.critic_states.values()):
            if statistic.is_floating_point():
                statistic.nan_to_num_(0.0, 0.0, 0.0)

    def refuse_all_diverged(self, rates: str) -> None:
        """Refuses a population in which every member has diverged; waits for the device.

        Args:
            rates (str): names of the settings to lower, for the message.

        Raises:
            NonFiniteError: every member has diverged.
        """
        if bool(self.diverged.all()):
            raise NonFiniteError(
                "the gradients of every member of the population became NaN or infinite; lower "
                f"{rates} or learner.max_grad_norm, or check the rewards' scale."
            )

    # ------------------------------------------------------------------------------- settings

    @torch.no_grad()
    def _write_settings(self, learner: Any) -> None:
        """Writes the members' settings to the updates, clips and losses that read them."""
        config, left = learner.config, 1.0 - learner.progress
        falls = getattr(config, "lr_schedule", "constant") == "linear"
        for name, optimizer in learner.optimizer_of.items():
            optimizer.prepare(self.settings[name] * (left if falls else 1.0))
        if "max_grad_norm" in self.settings:
            for clip in learner.clips:
                clip.limit[:-1].copy_(
                    self._repeat_per_member(self.settings["max_grad_norm"], clip.n_groups)
                )
        if isinstance(config, ReplayLearnerConfig):
            if "gamma" in self.settings:
                learner.updates.gamma.copy_(self.settings["gamma"])
            return
        learner.optimizer.param_groups[0]["lr"] = float(learner.optimizer.lr)
        for name, loss in learner.losses.items():
            by_agent = self._settings_per_agent(learner.block.joined[name])
            if isinstance(config, OnPolicyConfig):
                self._write_coefficients(loss, by_agent, config, left)
            else:
                loss.gamma = by_agent.get("gamma", config.gamma)
                loss.lmbda = by_agent.get("lmbda", config.lmbda)

    def _settings_per_agent(self, group: GroupSpec) -> dict[str, Tensor]:
        """Returns the settings of each agent's member, ``[P * N, 1]``."""
        return {
            name: self._repeat_per_member(values, group.n_agents).unsqueeze(-1)
            for name, values in self.settings.items()
        }

    def _write_coefficients(
        self, loss: Any, by_agent: Mapping[str, Tensor], config: OnPolicyConfig, left: float
    ) -> None:
        """Writes the coefficients of a MAPPO loss, one for each agent."""
        loss.entropy_bonus |= "entropy_coeff" in self.settings
        falling = left if config.entropy_schedule == "linear" else 1.0
        for name in ("entropy_coeff", "critic_coeff", "clip_epsilon"):
            if name in by_agent:
                factor = falling if name == "entropy_coeff" else 1.0
                _write_in_place(loss, name, by_agent[name] * factor)
        if "clip_epsilon" in by_agent and config.clip_value:
            _write_in_place(loss, "clip_value", by_agent["clip_epsilon"])
        loss.value_estimator.set_discount(
            by_agent.get("gamma", config.gamma), by_agent.get("lmbda", config.lmbda)
        )

    @torch.no_grad()
    def explore(self, learner: Any) -> None:
        """Sets the exploration's epsilon of each member, if members have different epsilons."""
        found = self.settings.items()
        at = "exploration."
        known = {name.removeprefix(at): own for name, own in found if name.startswith(at)}
        if not known:
            return
        for explore in learner.explorers:
            if not explore.epsilon.ndim:
                explore.epsilon = explore.epsilon.repeat(explore.group.n_agents)
        if learner.started:
            settings = learner.config.exploration
            first = known.get("epsilon", settings.epsilon)
            last = known.get("epsilon_end", settings.epsilon_end)
            epsilon = first + learner.annealed * (last - first)
            for explore in learner.explorers:
                explore.epsilon.copy_(self._repeat_per_member(epsilon, explore.group.n_agents))

    def _repeat_per_member(self, values: Tensor, n: int) -> Tensor:
        """Repeats each member's value, ``[P]``, equally often, up to n values in total."""
        return values.repeat_interleave(n // self.n)

    def first_of(self, values: Tensor) -> Tensor:
        """Returns the first value of each member, ``[P]``; the values are sorted by member."""
        return values.unflatten(0, (self.n, -1))[:, 0]

    def add_rates(self, summary: TensorDict, rates: Tensor) -> None:
        """Adds the learning rates of the members to the metrics of each group."""
        for name in summary.keys():
            summary[name, "lr"] = rates.clone()

    # ------------------------------------------------------------------------------- copies

    @torch.no_grad()
    def copy(self, learner: Any, parent: Tensor) -> None:
        """Replaces members by copies of others, as in :meth:`BlockLearner.copy_members`.

        Raises:
            ConfigError: a wrong length, or indices out of range.
        """
        if parent.shape != (self.n,) or not set(parent.tolist()) <= set(range(self.n)):
            raise ConfigError(
                f"copy_members: parent is {parent.tolist()}, expected the number of a member, 0 to "
                f"{self.n - 1}, for each of {self.n}."
            )
        self.rows.copy(learner, parent)
        for x in learner.critic_states.values():
            x.copy_(x.unflatten(1, (self.n, -1))[:, parent].flatten(1, 2))
        self.diverged.copy_(self.diverged[parent])

    def state_dict(self) -> dict[str, Any]:
        """Returns the members' part of a learner's extra state."""
        return {"settings": dict(self.settings), "diverged": self.diverged}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores the settings and the divergence flags."""
        for name, values in state["settings"].items():
            self.settings[name].copy_(values)
        self.diverged.copy_(state["diverged"] if "diverged" in state else state["sick"])


def _write_in_place(loss: Any, name: str, values: Tensor) -> None:
    """Writes the agents' coefficients in place, because graphs hold the tensor."""
    own = getattr(loss, name)
    if own.shape == values.shape:
        own.copy_(values)
    else:
        setattr(loss, name, values.to(own).clone())


def settings_of_members(
    config: Any,
    n_members: int,
    settings: Mapping[str, Tensor],
    device: torch.device | str | None = None,
) -> dict[str, Tensor]:
    """Returns the members' learning rates and the given settings, ``[P]`` each.

    Args:
        config (LearnerConfig): settings of one member.
        n_members (int): number P of members, 2 or more.
        settings (mapping): name of a setting -> its value for each member, ``[P]``.
        device (torch.device, optional): device of the tensors.

    Raises:
        ConfigError: fewer than two members, or a setting that cannot differ between members.

    Examples:
        >>> from torchrl_marl.learners.config import OnPolicyConfig
        >>> settings_of_members(OnPolicyConfig(lr=0.5), 2, {"gamma": torch.tensor([0.5, 0.25])})
        {'lr': tensor([0.5000, 0.5000]), 'gamma': tensor([0.5000, 0.2500])}
    """
    if n_members < 2:
        raise ConfigError(f"n_members is {n_members}, expected 2 or more.")
    known = varying_of(config)
    for name, values in settings.items():
        if name not in known or len(values) != n_members:
            raise ConfigError(
                f"settings[{name!r}] has {len(values)} values, expected {n_members}, one for "
                f"each member, of {', '.join(known)}."
            )
    rates = [name for name in known if name == "lr" or name.endswith("_lr")]
    found = {name: torch.full((n_members,), getattr(config, name)) for name in rates} | dict(
        settings
    )
    return {
        name: torch.as_tensor(values, dtype=torch.float32).to(device).clone()
        for name, values in found.items()
    }


def learner_of_members(
    groups: Mapping[str, GroupSpec],
    config: Any,
    *,
    n_members: int,
    settings: Mapping[str, Tensor] | None = None,
    share_replay: bool = False,
    device: torch.device | str | None = None,
    **kwargs: Any,
) -> Any:
    """Builds the learner of an algorithm with several members.

    Args:
        groups (mapping of name to GroupSpec): the groups of one member.
        config, n_members, settings, share_replay, device: as for :class:`Members`.
        **kwargs: arguments of the algorithm's learner.

    Shapes:
        - batches of the learner: ``[P * E, T]``, sorted by member
        - metrics of the learner: ``[P]``

    Raises:
        ConfigError: settings with which members would not learn independently.

    Examples:
        >>> from torchrl_marl import TeamSpec
        >>> from torchrl_marl.collectors import RolloutCollector, TeamPolicy
        >>> from torchrl_marl.envs import VmasEnv
        >>> from torchrl_marl.learners import OnPolicyConfig
        >>> env = VmasEnv("balance", num_envs=8, max_steps=100, seed=0)
        >>> groups = TeamSpec.from_env(env).groups
        >>> lr = torch.tensor([1e-3, 1e-4])
        >>> config = OnPolicyConfig(minibatch_size=40)
        >>> learner = learner_of_members(groups, config, n_members=2, settings={"lr": lr})
        >>> policy = TeamPolicy(learner.actors.values())
        >>> batch = RolloutCollector(env, policy, frames_per_batch=80).next()
        >>> learner.learn(batch)["agents", "loss_critic"].shape
        torch.Size([2])
    """
    members = Members(config, n_members, settings, share_replay=share_replay, device=device)
    make = ALGORITHMS.learner(config.algorithm)
    return make(groups, config, device=device, members=members, **kwargs)


PopulationLearner = ValuePopulation = OffPolicyPopulation = learner_of_members
"""Its former names, which scripts may import."""
