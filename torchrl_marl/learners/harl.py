"""The learner of HADDPG, HATD3 and HASAC, which updates actors sequentially.

Shapes: N agents of a loss.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from tensordict import TensorDictBase
from torch import Tensor

from torchrl_marl.learners.adam import moments_of, start_adam
from torchrl_marl.learners.off_policy import OffPolicyLearner
from torchrl_marl.learners.replay_updates import History, ReplayUpdates, Step

__all__ = ["HARLLearner"]


class SequentialReplayUpdates(ReplayUpdates):
    """Runs updates in which actors take their steps agent after agent, in random order.

    The order is a tensor that an update draws, so one captured graph serves all orders. The first
    turn computes all agents. Later turns compute their own agents alone, beside the others' newest
    actions, which are kept.

    Args:
        *args, **kwargs: arguments of :class:`ReplayUpdates`. The optimizer ``actors`` has
            parameters with rows of single agents, and the actors' clips treat each agent as a
            separate group.
    """

    losses: dict[str, Any]  # MADDPGLoss or MASACLoss

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        index = {name: torch.tensor(x.group.group_index) for name, x in self.losses.items()}
        same = {name: own == own.unsqueeze(-1) for name, own in index.items()}
        self.n_turns = max(int(own.sum(-1).max()) for own in same.values())
        self._same_group = {name: own.to(self.device) for name, own in same.items()}

    def _draw_turns(self) -> dict[str, Tensor]:
        """Draws the turn of each agent within its group, ``[N]``, for every loss."""
        if self.n_turns == 1:
            return {
                name: torch.zeros(len(own), device=self.device)
                for name, own in self._same_group.items()
            }
        turns = {}
        for name, same in self._same_group.items():
            drawn = torch.rand(len(same), device=self.device)
            turns[name] = (same & (drawn < drawn.unsqueeze(-1))).sum(-1)
        return turns

    def _gradients(self, data: TensorDictBase, step: Step, metrics: History) -> list[Tensor | None]:
        """Returns the gradients of the critics' step; of the actors' step, those that remain.

        The actors' steps are taken, from the critics before their step. The gradients of the
        temperatures remain; they are those of the policies before the update.
        """
        if step.of == "value":
            return super()._gradients(data, step, metrics)
        actors, turns = step.optimizers["actors"], self._draw_turns()
        start_adam(actors, actors.parameters)
        counts = moments_of(actors, actors.parameters)[2]
        begun = [count.clone() for count in counts]
        remaining: list[Tensor | None] = []
        total: History = {}
        others: dict[str, Tensor] = {}
        for turn in range(self.n_turns):
            # A parameter has one step count for its rows, but each row takes one step.
            for count, first in zip(counts, begun):
                count.copy_(first)
            active = {name: own == turn for name, own in turns.items()}
            found = self._take_turn(data, step, active, metrics, others)
            if turn + 1 < self.n_turns:
                others = {
                    name: loss.current_actions(data, active[name], others.get(name))
                    for name, loss in self.losses.items()
                }
            remaining = remaining if turn else found
            for key, value in metrics.items():
                if key[1] in ("loss_actor", step.norm):
                    total[key] = total[key] + value if turn else value
        for count, first in zip(counts, begun):
            count.copy_(first + 1)
        for name, loss in self.losses.items():
            n_agents = loss.per_group.count(torch.ones(1, len(turns[name]), device=self.device))
            for key in ("loss_actor", step.norm):
                metrics[name, key] = total[name, key] / n_agents
        return remaining

    def _take_turn(
        self,
        data: TensorDictBase,
        step: Step,
        active: Mapping[str, Tensor],
        metrics: History,
        others: Mapping[str, Tensor],
    ) -> list[Tensor | None]:
        """Takes the step of the active agents' actors; returns the temperatures' gradients.

        Metrics besides the actor's loss and gradient norm are those of the first turn, in which
        there are no kept actions of the others.
        """
        first = not others
        actors = step.optimizers["actors"]
        parameters = [*actors.parameters]
        if first:
            parameters += [
                p for x in step.optimizers.values() if x is not actors for p in x.parameters
            ]
        total: Tensor | float = 0.0
        with torch.enable_grad():
            for name, objective in self.losses.items():
                loss, more = objective.actor_loss(data, active[name], others.get(name))
                metrics[name, "loss_actor"] = loss
                total = total + loss.sum()
                if first:
                    metrics.update({(name, key): x for key, x in more.items()})
                    total = total + sum(x.sum() for k, x in more.items() if k.startswith("loss_"))
            found = list(torch.autograd.grad(cast(Tensor, total), parameters, allow_unused=True))
        by_parameter = dict(zip(parameters, found))
        frozen: dict[Tensor, Tensor] = {}
        for name, clip in step.clips.items():
            norm = clip.scale([by_parameter.get(p) for p in clip.parameters])
            resting = ~active[name]
            own = torch.where(resting, 0.0, norm.reshape(-1))
            metrics[name, step.norm] = self.losses[name].per_group.total(own.unsqueeze(0))
            common = torch.full_like(resting[0], not first)
            frozen.update(zip(clip.parameters, clip.rows_of(resting, common)))
        n_own = len(actors.parameters)
        rows = [frozen[p] for p in actors.parameters] if self.n_turns > 1 else []
        actors.take(found[:n_own], rows)
        return [*[None] * n_own, *found[n_own:]]

    def _take(self, step: Step, found: Any) -> None:
        if step.of == "value":
            super()._take(step, found)
            return
        n_own = len(step.optimizers["actors"].parameters)
        others = {name: x for name, x in step.optimizers.items() if name != "actors"}
        super()._take(Step(step.of, others, {}), found[n_own:])


class HARLLearner(OffPolicyLearner):
    r"""HADDPG, HATD3 or HASAC: each agent has its own actor, and actors are updated in sequence.

    The actors of a group take their steps one after the other, in a new random order for each
    update. Agent :math:`i_k` learns its response to the new policies of the agents before it and to
    the old ones of the agents after it:

    .. math:: L_{\mu^{i_k}} = -Q\big(s, \mu_{\text{new}}^{i_1}, \dots, \mu_{\text{new}}^{i_{k-1}},
        \mu^{i_k}, \mu_{\text{old}}^{i_{k+1}}, \dots, \mu_{\text{old}}^{i_N}\big)

    :math:`Q` is the mean value of the acting agents of the group, or the agent's own, as
    ``actor_gradient`` says. HASAC adds :math:`\alpha \log \pi^{i_k}`, and its values contain the
    entropy bonus of all agents of the group. Each group has its own order, and all groups take
    their turns in parallel.

    The first turn runs the actors of all agents. A later turn runs the actors of its own agents
    alone, if agents do not differ in the structure of their networks. Actions of the others are
    computed after the first turn, and again when their agent has moved. So sampled actions, of
    HASAC or of discrete policies, are kept within an update, as in the authors' code of HASAC.

    Args:
        *args, **kwargs: arguments of :class:`~torchrl_marl.learners.off_policy.OffPolicyLearner`.

    Reference: Zhong et al., 2024, https://arxiv.org/abs/2304.09870 (HADDPG, HATD3); Liu et al.,
    2024, https://arxiv.org/abs/2306.10715 (HASAC).

    Reduces to: for one agent, :class:`~torchrl_marl.learners.off_policy.OffPolicyLearner`.

    Examples:
        >>> from torchrl_marl import TeamSpec
        >>> from torchrl_marl.collectors import RolloutCollector
        >>> from torchrl_marl.envs.toy import Arena
        >>> from torchrl_marl.learners.harl_config import HARLConfig
        >>> env = Arena(8, seed=0)
        >>> config = HARLConfig("hatd3", learning_starts=0, minibatch_size=16)
        >>> learner = HARLLearner(TeamSpec.from_env(env).groups, config)
        >>> batch = RolloutCollector(env, learner.actors["agents"], frames_per_batch=40).next()
        >>> learner.learn(batch)["agents", "updates"]
        tensor(4.)
    """

    per_agent = True
    updating = SequentialReplayUpdates
