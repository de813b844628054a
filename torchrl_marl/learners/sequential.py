"""The learner of HAPPO, which updates agents sequentially.

Shapes: F frames of a batch, U updates, N agents and G groups of a loss.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from torchrl_marl.learners.on_policy import OnPolicyLearner
from torchrl_marl.learners.updates import KLStop
from torchrl_marl.objectives.ppo import MAPPOLoss

__all__ = ["SequentialLearner"]

_OF_CRITIC = ("loss_critic", "explained_variance", "value_clip_fraction")


class AgentTurns(KLStop):
    """Trains one agent of each group at a time, and freezes the networks of all other agents.

    A tensor holds which agents are trained, so one captured update serves all turns.

    Args:
        *args, **kwargs: arguments of :class:`KLStop`, in which each agent is a group.

    Attributes:
        resting (Tensor): 1 for frozen agents, else 0; ``[N]``, for the agents of all losses.
        freeze_shared (Tensor): 1 to freeze parameters that serve several agents, such as the
            critic's.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.resting = torch.zeros_like(self.stopped)
        self.freeze_shared = torch.zeros((), device=self.stopped.device)

    def start_turn(self, active: Tensor, *, train_shared: bool) -> None:
        """Begins a turn.

        Args:
            active (Tensor): agents to train, bool, ``[N]``.
            train_shared (bool): whether to train parameters that serve several agents, too.
        """
        self.resting.copy_(~active)
        self.freeze_shared.fill_(0.0 if train_shared else 1.0)
        self.begin()

    def begin(self) -> None:
        """Begins a batch with the agents of this turn."""
        super().begin()
        self.stopped.copy_(self.resting)

    @property
    def tensors(self) -> list[Tensor]:
        """Tensors that an update reads."""
        return [*super().tensors, self.freeze_shared]

    def frozen(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        """Returns masks of each parameter's frozen rows, as :class:`KLStop` does."""
        return [] if len(self.stopped) == 1 else self._rows(parameters, self.freeze_shared > 0)


class SequentialLearner(OnPolicyLearner):
    r"""HAPPO: each agent has its own policy, and policies are updated in random sequence.

    Each agent's advantage is the group's advantage, multiplied by the importance ratios of the
    agents that were updated earlier. All updates together then improve the joint policy:

    .. math:: \hat A^{i_k} = \hat A \prod_{j < k}
        \frac{\pi^{i_j}_{\text{after}}(a^{i_j} | o^{i_j})}
             {\pi^{i_j}_{\text{before}}(a^{i_j} | o^{i_j})}

    Advantages are standardized before the first update. The factor of an agent that does not act is
    1. Each group has its own order, and all groups take their turns in parallel. The critic, which
    serves several agents, learns in the first turn. A turn runs the networks of its own agents
    alone, if agents do not differ in the structure of their networks.

    Reference: Kuba et al., 2022, https://arxiv.org/abs/2109.11251 (algorithm 4).

    Reduces to: for one agent, :class:`OnPolicyLearner`, to the bit.

    Examples:
        >>> from torchrl_marl import TeamSpec
        >>> from torchrl_marl.collectors import RolloutCollector
        >>> from torchrl_marl.envs.toy import MatrixGame
        >>> from torchrl_marl.learners.happo_config import HAPPOConfig
        >>> env = MatrixGame(8, payoff="climbing", seed=0)
        >>> config = HAPPOConfig(minibatch_size=16)
        >>> learner = SequentialLearner(TeamSpec.from_env(env).groups, config)
        >>> batch = RolloutCollector(env, learner.actors["agents"], frames_per_batch=16).next()
        >>> learner.learn(batch)["agents", "epochs"]
        tensor(6.)
    """

    over_ranks = False
    per_agent = True
    stopping = AgentTurns

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._chosen_agents_by_loss: dict[str, Tensor] = {}

    def networks_in_use(self, loss: MAPPOLoss) -> tuple[Any, ...]:
        """Returns the networks of a turn: the critic only in the first."""
        return self.networks(loss)[: 2 if loss.trains_critic else 1]

    def _train(self, frames: TensorDictBase) -> TensorDict:
        groups = [g for joined in self.block.joined.values() for g in joined.groups]
        rank = torch.cat([torch.randperm(g.n_agents, device=frames.device) for g in groups])
        n_turns = max(g.n_agents for g in groups)
        begun, turns = self._step_counts(), []
        for turn in range(n_turns):
            active = rank == turn
            cast(AgentTurns, self.updates.stop).start_turn(active, train_shared=turn == 0)
            self._reset_step_counts(begun)
            with self._evaluate_active_agents(active if n_turns > 1 else None, critic=turn == 0):
                history, finite = self.updates.run(frames, self._epochs(len(frames)))
            if turn + 1 < n_turns:
                with self._evaluate_active_agents(active, critic=False):
                    self._multiply_advantages_by_ratios(frames, active)
            turns.append(self._metrics_of(history, finite, active, critic=turn == 0))
        return self._mean_over_turns(turns)

    @contextlib.contextmanager
    def _evaluate_active_agents(self, active: Tensor | None, *, critic: bool) -> Iterator[None]:
        """Within the context, losses evaluate the active agents, and the critic if it learns."""
        with contextlib.ExitStack() as contexts:
            own = {} if active is None else dict(self.updates.stop.by_loss(active))
            for name, loss in self.losses.items():
                chosen = self._chosen_agents(name, own[name]) if own else None
                contexts.enter_context(loss.restricted(chosen, critic=critic))
            yield

    def _chosen_agents(self, name: str, active: Tensor) -> Tensor:
        """Returns an agent of each group of a loss, ``[G]``: the active one, if there is one."""
        chosen = self.losses[name].per_group.one_of(active)
        return self._chosen_agents_by_loss.setdefault(name, chosen).copy_(chosen)

    def _multiply_advantages_by_ratios(self, frames: TensorDictBase, moved: Tensor) -> None:
        """Multiplies advantages by the ratios of the agents that have just learned."""
        for name, own in self.updates.stop.by_loss(moved):
            loss = self.losses[name]
            key, per = loss.tensor_keys.advantage, loss.per_group
            of_all = self.updates.compute(name, loss.log_ratio, frames)
            log_ratio = torch.where(own, of_all.squeeze(-1), 0.0)
            factor = per.to_agents(per.sum(log_ratio)).exp().unsqueeze(-1)
            frames.set(key, frames.get(key) * factor)

    def _step_counts(self) -> dict[Tensor, Tensor]:
        """Returns Adam's step count of each parameter with optimizer state."""
        state = self.optimizer.state
        return {p: own["step"].clone() for p, own in state.items() if own}

    def _reset_step_counts(self, begun: Mapping[Tensor, Tensor]) -> None:
        """Resets the step counts of this turn's parameters to the beginning of the batch.

        A parameter holds rows of several agents but has one step count. The steps of one agent must
        not count for the next agent.
        """
        now = self._step_counts()
        for parameter, rows in zip(now, self.updates.stop.frozen(list(now))):
            step = begun.get(parameter, torch.zeros_like(now[parameter]))
            self.optimizer.state[parameter]["step"].copy_(
                torch.where(rows.all(), now[parameter], step)
            )

    def _metrics_of(
        self, history: Mapping[Any, Tensor], finite: bool, active: Tensor, *, critic: bool
    ) -> TensorDict:
        """Returns the metrics of a turn: for each group, the metrics of the trained agent."""
        stop, of_turn = self.updates.stop, {}
        acted = dict(stop.by_loss(active))
        for (name, key), values in history.items():
            if key not in _OF_CRITIC:
                values = torch.where(acted[name], values.reshape(len(values), -1), 0.0)
                values = self.losses[name].per_group.sum(values)
            elif not critic:
                continue
            of_turn[name, key] = values
        epochs, rates = (
            {name: self.losses[name].per_group.sum(own) for name, own in stop.by_loss(values)}
            for values in (stop.epochs, torch.where(active, self.group_rates, 0.0))
        )
        return self._summary(of_turn, finite, epochs, rates)

    def _mean_over_turns(self, turns: Sequence[TensorDict]) -> TensorDict:
        """Returns the metrics' means over the agents of each group."""
        metrics = turns[0].clone()
        for name, group in self.groups.items():
            for key in metrics[name].keys():
                of_agents = [turn[name].get(key, None) for turn in turns[: group.n_agents]]
                values = torch.stack([x for x in of_agents if x is not None])
                metrics[name, key] = values.amax(0) if key == "max_ratio" else values.mean(0)
        return metrics
