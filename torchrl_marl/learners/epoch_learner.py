"""Base class of learners that train on each batch in epochs of minibatches.

Shapes: E envs, T steps, F frames of a batch, N agents of a group, G groups that are trained as one.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn

from torchrl_marl.learners.adam import Adam
from torchrl_marl.learners.block import BlockLearner
from torchrl_marl.learners.clipping import GradientClip
from torchrl_marl.learners.updates import (
    KLStop,
    Updates,
    minibatch_keys,
    shuffled_epochs,
    summarize,
)

if TYPE_CHECKING:
    from torchrl_marl.learners.shards import ShardOrder

__all__ = ["EpochLearner"]


class EpochLearner(BlockLearner):
    """Base class of learners that train on each batch in epochs, with one optimizer.

    The learner adds targets to a batch, and then trains in epochs of minibatches. Each update runs
    eagerly or as one graph. A subclass builds actors and losses, calls ``start_optimizer``, and
    implements ``add_targets``.

    ``state_dict()`` holds everything that resuming needs, including the optimizer's state.

    Args:
        groups (mapping of name to GroupSpec): the groups that it trains; they have the same
            settings.
        config: settings, an
            :class:`~torchrl_marl.learners.config.OnPolicyConfig` or a
            :class:`~torchrl_marl.learners.off_policy_config.ParallelQConfig`.
        team (TeamSpec, optional): all groups of the environment, for a network across groups.
        device (torch.device, optional): device of networks and optimizer.
        execution ("eager", "compile" or "cudagraph"): how updates run: eagerly, or as compiled
            graphs. One graph is a whole update, from the minibatch to Adam; ``cudagraph`` replays
            it on a GPU.
    """

    written: ClassVar[tuple[str, ...]] = ("value_target", "loss_mask")
    """Entries that targets add to the batch, if they exist."""

    over_ranks = False
    """True if several ranks can train it, each on its part of a batch."""
    shards: ShardOrder | None = None
    _inspected = False

    @abstractmethod
    def networks(self, loss: Any) -> Sequence[nn.Module]:
        """Returns the networks that a loss trains."""

    def networks_in_use(self, loss: Any) -> Sequence[nn.Module]:
        """Returns the networks that the next update runs; by default those that a loss trains."""
        return self.networks(loss)

    @abstractmethod
    def make_clip(self, name: str) -> GradientClip:
        """Returns the gradient clip of a loss."""

    @abstractmethod
    def add_targets(self, data: TensorDictBase) -> None:
        """Writes the losses' targets into a batch ``[E, T]`` in the block's layout."""

    @abstractmethod
    def inspect_first_batch(self, batch: TensorDictBase) -> None:
        """Checks the first batch for turns, and for agents that compete; warns, or refuses it."""

    def make_stop(self, clips: Mapping[str, GradientClip], device: torch.device) -> KLStop:
        """Returns the early stop of a batch's epochs; the default never stops."""
        return KLStop(clips, None, device)

    def start_optimizer(self) -> None:
        """Creates the optimizer of all losses, and the object that runs updates."""
        networks = [x for loss in self.losses.values() for x in self.networks(loss)]
        parameters = list(dict.fromkeys(p for net in networks for p in net.parameters()))
        lr, eps = self.config.lr, self.config.adam_eps
        self.optimizer: torch.optim.Adam = Adam(parameters, lr, eps)
        self._prepare_updates()

    def _prepare_updates(self) -> None:
        """Creates the object that runs the updates of the learner's networks."""
        clips = {name: self.make_clip(name) for name in self.losses}
        if self.members is not None:
            self.members.take_over(clips.values(), self.optimizer_of.values())
        device = self.optimizer.param_groups[0]["params"][0].device
        make: Callable[..., Updates] = Updates
        if self.execution != "eager":
            from torchrl_marl.learners.captured import CapturedUpdates

            make = partial(CapturedUpdates, execution=self.execution)
        self.updates = make(
            self.losses,
            self.optimizer,
            clips=clips,
            stop=self.make_stop(clips, device),
            prepare=self._warmed_up if self._burn_in else None,
            members=self.members,
        )

    @property
    def optimizer_of(self) -> dict[str, Adam]:
        """Name of each learning-rate setting -> its optimizer."""
        return {"lr": cast(Adam, self.optimizer)}

    @property
    def trained(self) -> list[Tensor]:
        """Parameters that an update changes."""
        return self.optimizer.param_groups[0]["params"]

    @property
    def clips(self) -> list[GradientClip]:
        """Gradient clips of all losses."""
        return list(self.updates.clips.values())

    @property
    def _burn_in(self) -> int:
        return self.config.burn_in if self.remembers else 0

    def _warmed_up(self, windows: TensorDictBase) -> TensorDictBase:
        """Returns windows without their burn-in, with refreshed hidden states."""
        from torchrl_marl.learners.windows import drop_burn_in, hidden_states_after

        recall = [
            partial(hidden_states_after, self.networks_in_use(loss), self.block.joined[name])
            for name, loss in self.losses.items()
        ]
        return drop_burn_in(windows, self._burn_in, recall)

    @property
    def actor(self) -> nn.Module:
        """The actor of all groups, if they are trained as one.

        Raises:
            ValueError: there are several actors; use ``actors``.
        """
        trained = list(self.actors.children())
        if len(trained) > 1:
            raise ValueError(f"this learner has the actors {list(self.actors)}; use .actors[name].")
        return trained[0]

    def set_progress(self, fraction: float) -> None:
        """Moves the schedules to a fraction, 0 to 1, of the run."""
        config, self.progress = self.config, fraction
        if config.lr_schedule == "linear":
            for parameters in self.optimizer.param_groups:
                parameters["lr"] = config.lr * (1.0 - fraction)
        if config.unshare_at is not None and fraction >= config.unshare_at:
            self.unshare()

    def unshare(self) -> None:
        """Replaces shared networks by one copy for each agent; the outputs do not change.

        Networks that read a single agent's observation are un-shared; a network that reads the
        whole team is not. The optimizer keeps its state.
        """
        from torchrl_marl.learners.unshare import unshare_networks

        if self.unshared:
            return
        sizes = {
            network: self.block.joined[name].n_agents
            for name, loss in self.losses.items()
            for network in self.networks(loss)
        }
        self.optimizer = unshare_networks(sizes, self.optimizer)
        self._prepare_updates()
        self.unshared = True

    def use_shards(self, own: range, total: int, seed: int) -> None:
        """Makes each minibatch consist of equal parts from all shards of all processes.

        Args:
            own (range): shards of this process, in the order of its batches.
            total (int): number of shards of the run.
            seed (int): random seed of the minibatches.
        """
        from torchrl_marl.learners.shards import ShardOrder

        self.shards = ShardOrder(own, total, seed)

    def _learn(self, batch: TensorDictBase) -> TensorDict:
        self.check_remembered(batch)
        if not self._inspected:
            self._inspected = True
            self.inspect_first_batch(batch)
        data = self.block.gather(batch)
        self.add_targets(data)
        self.block.scatter(data, batch, self.written)
        metrics = self._train(self._frames(data))
        self.add_communication(metrics, data)
        if self.observation_norms:
            self.observation_norms.update_all(data)
        return metrics

    def _frames(self, data: TensorDictBase) -> TensorDictBase:
        """Returns the frames of a batch, or its windows for networks with memory."""
        keys = minibatch_keys(self.losses.values())
        if self.remembers:
            from torchrl_marl.learners.windows import cut_windows

            return cut_windows(data, keys, self.config.window)
        return data.select(*keys, strict=False).reshape(-1)

    def _train(self, frames: TensorDictBase) -> TensorDict:
        """Trains on the frames of a batch, ``[F]``, with the entries that the losses read."""
        history, finite = self.updates.run(frames, self._epochs(len(frames)))
        stop = self.updates.stop
        epochs, rates = (dict(stop.by_loss(own)) for own in (stop.epochs, self.group_rates))
        return self._summary(history, finite, epochs, rates)

    def _epochs(self, n_frames: int) -> Any:
        config, device = self.config, self.updates.device
        size = config.minibatch_size // (config.window if self.remembers else 1)
        draw = shuffled_epochs if self.shards is None else self.shards.epochs
        return draw(n_frames, size, n_epochs=config.num_epochs, device=device)

    @property
    def group_rates(self) -> Tensor:
        """Learning rate of each group of all losses, ``[G]``."""
        stop = self.updates.stop
        if stop.rate is not None:
            return stop.rate.values
        # Filled on the device, without a transfer.
        return torch.full_like(stop.epochs, self.optimizer.param_groups[0]["lr"])

    def _summary(
        self,
        history: Mapping[Any, Tensor],
        finite: bool,
        epochs: Mapping[str, Tensor],
        rates: Mapping[str, Tensor],
    ) -> TensorDict:
        summary = summarize(history, self.block.joined, self.groups, rates=rates, epochs=epochs)
        if self.members is not None or not finite:
            self.refuse_diverged(dict(summary.items(True, True)))
        if self.members is not None:
            self.members.add_rates(summary, self.optimizer_of["lr"].rates)
        return summary

    # ------------------------------------------------------------------------------- state

    def get_extra_state(self) -> dict[str, Any]:
        """The part of ``state_dict()`` in addition to networks and statistics."""
        state = {"optimizer": self.optimizer.state_dict(), "unshared": self.unshared}
        state |= self._births_state()
        state |= {} if self.shards is None else {"drawn": self.shards.drawn}
        return state if self.members is None else {**state, **self.members.state_dict()}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Restores the optimizer's state."""
        self.optimizer.load_state_dict(state["optimizer"])
        self._load_births(state)
        if self.shards is not None:
            self.shards.drawn = state["drawn"]
        if self.members is not None:
            self.members.load_state_dict(state)
