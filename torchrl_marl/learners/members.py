"""Members of a population, which a learner trains side by side, each by itself.

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
    """Members of a population: their settings, who is sick, and which rows are whose.

    A learner that is given them trains all in one program, each as it would be alone. Members
    stand side by side as agents; where steps are stored, each has as many rows in the store, and an
    update draws as many of each, the same that each would draw alone. A member whose gradients
    become NaN or infinite stays as it was before; the others go on, equal to the bit to what they
    were without it.

    Args:
        config (LearnerConfig): how they learn, in numbers of one member.
        n_members (int): number P of members, 2 or more.
        settings (mapping, optional): name -> a setting of each member, ``[P]``, instead of that of
            ``config``; of :func:`~torchrl_marl.learners.capabilities.varying_of`.
        share_replay (bool): all members learn from the stored steps of all.
        device (torch.device, optional): of the learner.

    Attributes:
        settings (dict): name -> ``[P]``, of learning rates and those that were given. What is
            written into them holds from the next batch on, and records no graph again.
        sick (Tensor): bool, ``[P]``, members that are frozen since a gradient was not finite.
        rows (Rows): which rows of parameters are whose.
        tensors (list of Tensor): what an update reads and writes of them.

    Raises:
        ConfigError: settings with which members would not learn by themselves.

    Reference: Flajolet et al., 2022, https://arxiv.org/abs/2206.08888 (vectorized populations).

    Reduces to: a learner without members, for each of them.
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
        """Returns a number for each member, ``[P]``."""
        return torch.full((self.n,), value, device=self.diverged.device)

    def take_over(self, clips: Iterable[GradientClip], optimizers: Iterable[Adam]) -> None:
        """Finds out whose rows of parameters are; limits and optimizers then tell members apart."""
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
        """Lets a learner learn from a batch ``[P * E, T]``, the envs of a member in turn.

        Raises:
            ConfigError: a batch that members cannot share.
        """
        if batch.shape[0] % self.n:
            raise ConfigError(
                f"a batch of {batch.shape[0]} envs, expected as many for each of {self.n} members."
            )
        self._give_settings(learner)
        before = {p: p.detach().clone() for p in self.rows.owners}
        yield
        self._exclude_diverged(learner, before)

    @torch.no_grad()
    def note(self, norms: Tensor) -> None:
        """Notes members of whose gradients a norm is not finite, of those of all groups ``[G]``."""
        self.diverged.logical_or_((~norms.unflatten(0, (self.n, -1)).isfinite()).any(-1))

    @torch.no_grad()
    def _exclude_diverged(self, learner: Any, before: Mapping[Tensor, Tensor]) -> None:
        """Puts members back that are sick to what they were when they acted last.

        Sick are also those whose parameters have a norm that overflows. Their statistics are made
        finite, too: they are saved.
        """
        self.rows.note_broken(self.diverged)
        if not bool(self.diverged.any()):
            return
        self.rows.put_back(before, self.diverged)
        for statistic in (*learner.buffers(), *learner.critic_states.values()):
            if statistic.is_floating_point():
                statistic.nan_to_num_(0.0, 0.0, 0.0)

    def refuse_all_diverged(self, rates: str) -> None:
        """Waits for the device.

        Args:
            rates (str): the settings to lower.

        Raises:
            NonFiniteError: no member is left.
        """
        if bool(self.diverged.all()):
            raise NonFiniteError(
                "the gradients of every member of the population became NaN or infinite; lower "
                f"{rates} or learner.max_grad_norm, or look at the rewards' scale."
            )

    # ------------------------------------------------------------------------------- settings

    @torch.no_grad()
    def _give_settings(self, learner: Any) -> None:
        """Writes what differs by member to where updates, limits and losses read it."""
        config, left = learner.config, 1.0 - learner.progress
        falls = getattr(config, "lr_schedule", "constant") == "linear"
        for name, optimizer in learner.optimizer_of.items():
            optimizer.prepare(self.settings[name] * (left if falls else 1.0))
        if "max_grad_norm" in self.settings:
            for clip in learner.clips:
                clip.limit[:-1].copy_(self._each(self.settings["max_grad_norm"], clip.n_groups))
        if isinstance(config, ReplayLearnerConfig):
            if "gamma" in self.settings:
                learner.updates.gamma.copy_(self.settings["gamma"])
            return
        learner.optimizer.param_groups[0]["lr"] = float(learner.optimizer.lr)
        for name, loss in learner.losses.items():
            by_agent = self._by_agent(learner.block.joined[name])
            if isinstance(config, OnPolicyConfig):
                self._give_coefficients(loss, by_agent, config, left)
            else:
                loss.gamma = by_agent.get("gamma", config.gamma)
                loss.lmbda = by_agent.get("lmbda", config.lmbda)

    def _by_agent(self, group: GroupSpec) -> dict[str, Tensor]:
        """Returns the settings of each agent's member, ``[P * N, 1]``."""
        return {
            name: self._each(values, group.n_agents).unsqueeze(-1)
            for name, values in self.settings.items()
        }

    def _give_coefficients(
        self, loss: Any, by_agent: Mapping[str, Tensor], config: OnPolicyConfig, left: float
    ) -> None:
        """Writes what a loss of MAPPO has of each agent."""
        loss.entropy_bonus |= "entropy_coeff" in self.settings
        falling = left if config.entropy_schedule == "linear" else 1.0
        for name in ("entropy_coeff", "critic_coeff", "clip_epsilon"):
            if name in by_agent:
                factor = falling if name == "entropy_coeff" else 1.0
                _fill(loss, name, by_agent[name] * factor)
        if "clip_epsilon" in by_agent and config.clip_value:
            _fill(loss, "clip_value", by_agent["clip_epsilon"])
        loss.value_estimator.set_discount(
            by_agent.get("gamma", config.gamma), by_agent.get("lmbda", config.lmbda)
        )

    @torch.no_grad()
    def explore(self, learner: Any) -> None:
        """Fills in how often each member acts at random from now on, as far as that differs."""
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
                explore.epsilon.copy_(self._each(epsilon, explore.group.n_agents))

    def _each(self, values: Tensor, n: int) -> Tensor:
        """``[P]`` to as many values for each member as make up n."""
        return values.repeat_interleave(n // self.n)

    def first_of(self, values: Tensor) -> Tensor:
        """Returns the first value of each member, ``[P]``; theirs lie one after the other."""
        return values.unflatten(0, (self.n, -1))[:, 0]

    def add_rates(self, summary: TensorDict, rates: Tensor) -> None:
        """Adds the learning rates of the members to the metrics of each group."""
        for name in summary.keys():
            summary[name, "lr"] = rates.clone()

    # ------------------------------------------------------------------------------- copies

    @torch.no_grad()
    def copy(self, learner: Any, parent: Tensor) -> None:
        """Makes members copies of others, as :meth:`BlockLearner.copy_members` says.

        Raises:
            ConfigError: another length, or numbers that are no members.
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
        """Returns what a learner's extra state holds of them."""
        return {"settings": dict(self.settings), "diverged": self.diverged}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes the settings, and who is sick, back."""
        for name, values in state["settings"].items():
            self.settings[name].copy_(values)
        self.diverged.copy_(state["diverged"] if "diverged" in state else state["sick"])


def _fill(loss: Any, name: str, values: Tensor) -> None:
    """Writes a coefficient of each agent in place: graphs hold the tensor."""
    own = getattr(loss, name)
    if own.shape == values.shape:
        own.copy_(values)
    else:
        setattr(loss, name, values.to(own).clone())


def settings_of_members(
    config: Any,
    n_members: int,
    given: Mapping[str, Tensor],
    device: torch.device | str | None = None,
) -> dict[str, Tensor]:
    """Returns the learning rates of all members, and what else differs, ``[P]`` each.

    Args:
        config (LearnerConfig): how they learn.
        n_members (int): number P of members, 2 or more.
        given (mapping): name -> a setting of each member, ``[P]``.
        device (torch.device, optional): of the tensors.

    Raises:
        ConfigError: less than two members, or a setting that cannot differ.

    Examples:
        >>> from torchrl_marl.learners.config import OnPolicyConfig
        >>> settings_of_members(OnPolicyConfig(lr=0.5), 2, {"gamma": torch.tensor([0.5, 0.25])})
        {'lr': tensor([0.5000, 0.5000]), 'gamma': tensor([0.5000, 0.2500])}
    """
    if n_members < 2:
        raise ConfigError(f"n_members is {n_members}, expected 2 or more.")
    known = varying_of(config)
    for name, values in given.items():
        if name not in known or len(values) != n_members:
            raise ConfigError(
                f"settings[{name!r}] has {len(values)} values, expected {n_members}, one for "
                f"each member, of {', '.join(known)}."
            )
    rates = [name for name in known if name == "lr" or name.endswith("_lr")]
    found = {name: torch.full((n_members,), getattr(config, name)) for name in rates} | dict(given)
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
    """Builds the learner of an algorithm, of several members.

    Args:
        groups (mapping of name to GroupSpec): the groups of one member.
        config, n_members, settings, share_replay, device: of :class:`Members`.
        **kwargs: of the algorithm's learner.

    Shapes:
        - a batch of it: ``[P * E, T]``, the envs of a member one after the other
        - its metrics: ``[P]``

    Raises:
        ConfigError: settings with which members would not learn by themselves.

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
