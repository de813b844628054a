"""Off-policy updates on TorchRL's classes: baseline of off_policy_update.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tensordict import TensorDictBase
    from torch import nn

    from torchrl_marl.learners.off_policy_config import OffPolicyConfig
    from torchrl_marl.specs import GroupSpec

GROUP = "agents"


class TorchRLUpdate:
    """One update of a group as TorchRL's recipes write it, from a buffer that it fills.

    Sample, losses, ``backward``, clip, Adam, ``SoftUpdate``; MATD3's actor every second time.

    Args:
        steps (TensorDictBase): what the buffer holds, ``[R]``, with flags for each agent.
        group (GroupSpec): the agents.
        config (OffPolicyConfig): algorithm, sizes and rates.
        tuned (bool): with what makes TorchRL faster: fused Adam, and ``use_td_params=False``.
        compiled (bool): the losses through ``torch.compile``, too.
    """

    def __init__(
        self,
        steps: TensorDictBase,
        group: GroupSpec,
        config: OffPolicyConfig,
        *,
        tuned: bool,
        compiled: bool = False,
    ) -> None:
        import torch
        from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
        from torchrl.objectives import SoftUpdate, ValueEstimators

        self.group, self.config, self.tuned, self.count = group, config, tuned, 0
        self.device = steps.device
        self.buffer = TensorDictReplayBuffer(
            storage=LazyTensorStorage(len(steps), device=steps.device),
            batch_size=config.minibatch_size,
        )
        self.buffer.extend(steps)
        losses: dict[str, Callable[[], Any]] = {
            "maddpg": self._ddpg, "matd3": self._td3, "masac": self._sac, "qmix": self._qmix,
        }  # fmt: skip
        self.loss = losses[config.algorithm]().to(self.device)
        self.loss.make_value_estimator(ValueEstimators.TD0, gamma=config.gamma)
        self.targets = SoftUpdate(self.loss, tau=config.tau)
        names = ("value_loss", "actor_loss") if config.algorithm == "matd3" else ("forward",)
        self.losses = [getattr(self.loss, name) for name in names]
        if compiled:
            self.losses = [torch.compile(loss) for loss in self.losses]
        self.optimizers = {}
        for name, (parameters, rate) in self._parameters().items():
            fused = True if tuned else None
            adam = torch.optim.Adam(parameters, lr=rate, eps=config.adam_eps, fused=fused)
            self.optimizers[name] = (adam, parameters)

    def __call__(self) -> None:
        """One update."""
        sample = self.buffer.sample()
        self.count += 1
        if self.config.algorithm == "matd3":
            value_loss, actor_loss = self.losses
            self._step("loss_qvalue", value_loss(sample)[0])
            if self.count % self.config.actor_interval == 0:
                self._step("loss_actor", actor_loss(sample)[0])
                self.targets.step()
            return
        losses = self.losses[0](sample)
        for name in self.optimizers:
            self._step(name, losses[name])
        self.targets.step()

    def _step(self, name: str, loss: Any) -> None:
        from torch import nn

        optimizer, parameters = self.optimizers[name]
        loss.backward()
        if self.config.max_grad_norm is not None:
            nn.utils.clip_grad_norm_(parameters, self.config.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()

    def _parameters(self) -> dict[str, tuple[list[Any], float]]:
        def of(*names: str) -> list[Any]:
            return [p for n in names for p in getattr(self.loss, n).flatten_keys().values()]

        config = self.config
        if config.algorithm == "qmix":
            return {"loss": (list(self.loss.parameters()), config.lr)}
        value, critic = {
            "maddpg": ("loss_value", "value_network_params"),
            "matd3": ("loss_qvalue", "qvalue_network_params"),
            "masac": ("loss_qvalue", "qvalue_network_params"),
        }[config.algorithm]
        found = {
            "loss_actor": (of("actor_network_params"), config.actor_lr),
            value: (of(critic), config.critic_lr),
        }
        if config.algorithm == "masac":
            found["loss_alpha"] = ([self.loss.log_alpha], config.alpha_lr)
        return found

    # ------------------------------------------------------------------------- the losses

    def _ddpg(self) -> Any:
        from torchrl.objectives import DDPGLoss

        loss = DDPGLoss(self._deterministic_actor(), self._critic(), delay_value=True)
        loss.set_keys(state_action_value=(GROUP, "state_action_value"), **_ENDS)
        return loss

    def _td3(self) -> Any:
        from torchrl.objectives import TD3Loss

        loss = TD3Loss(self._deterministic_actor(), self._critic(), bounds=(-1.0, 1.0))
        loss.set_keys(
            action=(GROUP, "action"), state_action_value=(GROUP, "state_action_value"), **_ENDS
        )
        return loss

    def _sac(self) -> Any:
        from tensordict.nn import TensorDictModule
        from torch import nn
        from torchrl.modules import NormalParamExtractor, ProbabilisticActor, TanhNormal
        from torchrl.objectives import SACLoss

        n_actions = self.group.action_dim
        network = nn.Sequential(self._network(2 * n_actions), NormalParamExtractor())
        scales = [(GROUP, "loc"), (GROUP, "scale")]
        actor = ProbabilisticActor(
            TensorDictModule(network, [(GROUP, "observation")], scales),
            in_keys=scales,
            out_keys=[(GROUP, "action")],
            distribution_class=TanhNormal,
            return_log_prob=True,
            log_prob_key=(GROUP, "log_prob"),
        )
        loss = SACLoss(actor, self._critic(), target_entropy=-float(n_actions))
        loss.set_keys(
            action=(GROUP, "action"),
            log_prob=(GROUP, "log_prob"),
            state_action_value=(GROUP, "state_action_value"),
            **_ENDS,
        )
        return loss

    def _qmix(self) -> Any:
        from tensordict.nn import TensorDictModule, TensorDictSequential
        from torchrl.modules import QValueModule
        from torchrl.modules.models.multiagent import QMixer
        from torchrl.objectives import QMixerLoss

        value, chosen = (GROUP, "action_value"), (GROUP, "chosen_action_value")
        network = self._network(self.group.n_actions)
        greedy = QValueModule(
            action_space="categorical",
            action_value_key=value,
            out_keys=[(GROUP, "action"), value, chosen],
        )
        observation_key = (GROUP, "observation")
        agents = TensorDictSequential(TensorDictModule(network, [observation_key], [value]), greedy)
        shape = (self.group.n_agents, self.group.observation_dim)
        mixer = QMixer(shape, self.config.mixer.hidden, shape[0], self.device)
        mixer = TensorDictModule(mixer, [chosen, observation_key], ["chosen_action_value"])
        loss = QMixerLoss(agents, mixer, delay_value=True, action_space="categorical")
        loss.set_keys(
            action=(GROUP, "action"),
            action_value=value,
            local_value=chosen,
            global_value="chosen_action_value",
            priority="td_error",
        )
        return loss

    # ----------------------------------------------------------------------- the networks

    def _network(self, n_outputs: int, n_inputs: int | None = None) -> nn.Module:
        from torch import nn
        from torchrl.modules import MultiAgentMLP

        network_config = self.config.critic if n_inputs else self.config.actor
        return MultiAgentMLP(
            n_inputs or self.group.observation_dim,
            n_outputs,
            self.group.n_agents,
            centralized=n_inputs is not None,
            share_params=True,
            num_cells=list(network_config.num_cells),
            activation_class=nn.Tanh,
            use_td_params=not self.tuned,
            device=self.device,
        )

    def _deterministic_actor(self) -> Any:
        from tensordict.nn import TensorDictModule
        from torchrl.modules import ProbabilisticActor, TanhDelta

        network = TensorDictModule(
            self._network(self.group.action_dim), [(GROUP, "observation")], [(GROUP, "param")]
        )
        return ProbabilisticActor(
            network,
            in_keys=[(GROUP, "param")],
            out_keys=[(GROUP, "action")],
            distribution_class=TanhDelta,
            distribution_kwargs={"low": -1.0, "high": 1.0},
        )

    def _critic(self) -> Any:
        import torch
        from tensordict.nn import TensorDictModule, TensorDictSequential

        n_inputs = self.group.observation_dim + self.group.action_dim
        input_keys = [(GROUP, "observation"), (GROUP, "action")]
        concatenate = TensorDictModule(lambda *x: torch.cat(x, -1), input_keys, [(GROUP, "both")])
        value = self._network(1, n_inputs)
        return TensorDictSequential(
            concatenate, TensorDictModule(value, [(GROUP, "both")], [(GROUP, "state_action_value")])
        )


_ENDS = {name: (GROUP, name) for name in ("reward", "done", "terminated")}


def with_flags_of_agents(batch: TensorDictBase, n_agents: int) -> TensorDictBase:
    """Returns steps ``[R]`` with what TorchRL's losses of several agents read."""
    flat = batch.reshape(-1)
    keys = [(GROUP, "observation"), (GROUP, "action")]
    steps = flat.select(*keys, *(("next", *key) for key in keys[:1]), ("next", GROUP, "reward"))
    # The mixer's loss reads the team's reward and end, the others those of each agent.
    steps["next", "reward"] = flat["next", GROUP, "reward"].mean(-2)
    for name in ("done", "terminated"):
        flag = flat["next", name]
        steps["next", name] = flag
        steps["next", GROUP, name] = flag.unsqueeze(-2).expand(-1, n_agents, 1).clone()
    return steps
