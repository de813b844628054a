"""Settings of the on-policy learner."""

from __future__ import annotations

from dataclasses import dataclass, field

from torchrl_marl.modules.config import CriticConfig, NetworkConfig

__all__ = ["OnPolicyConfig"]


@dataclass(frozen=True)
class OnPolicyConfig:
    """MAPPO or IPPO: what is trained, on which advantages, with which steps."""

    algorithm: str = "mappo"
    """``mappo`` (central critic), ``ippo`` (each agent's critic sees what the agent sees) or
    ``random`` (acts at random, learns nothing)."""
    central_input: str = "observations"
    """What a central critic sees: all ``observations`` of the group, those of the whole ``team``
    (all groups), or the ``state``."""
    actor: NetworkConfig = field(default_factory=NetworkConfig)
    """The actor's network."""
    critic: CriticConfig = field(default_factory=CriticConfig)
    """The critic's network."""
    unshare_at: float | None = None
    """Share of the run, 0 to 1, after which every agent goes on with its own copy of the networks
    that it shared; null for never."""
    gamma: float = 0.99
    """Discount."""
    lmbda: float = 0.95
    """Weight of longer returns in the advantage (GAE)."""
    bootstrap: str = "team"
    """Whose ends stop the return: the ``team``'s (shared reward) or each ``agent``'s own."""
    lr: float = 5e-4
    """Learning rate of Adam."""
    lr_schedule: str = "constant"
    """``constant`` or ``linear`` (to 0 at the end of training)."""
    adam_eps: float = 1e-5
    """Adam's epsilon."""
    max_grad_norm: float | None = 10.0
    """Largest norm of the gradient of each group's actor and critic together; null for none."""
    num_epochs: int = 6
    """Passes over a batch."""
    minibatch_size: int = 1200
    """Env steps of a minibatch; the agents of a step stay together."""
    clip_epsilon: float = 0.2
    """Clip range of the probability ratio."""
    clip_value: bool = False
    """Clip the change of the value, too."""
    critic_coeff: float = 1.0
    """Weight of the critic's loss."""
    loss_critic_type: str = "huber"
    """``huber``, ``l2`` or ``smooth_l1``."""
    huber_delta: float = 10.0
    """Where ``huber`` turns from a square into a line."""
    entropy_coeff: float = 0.0
    """Weight of the entropy bonus."""
    entropy_schedule: str = "constant"
    """``constant`` or ``linear`` (to 0 at the end of training)."""
    target_kl: float | None = None
    """Stop the epochs of a batch at this KL divergence from the old policy; null for never."""
    normalize_advantage: str = "pooled"
    """``pooled`` over the living agents, per ``agent``, or ``none``."""
    value_norm: bool = True
    """The critic works in normalized returns."""
    value_norm_decay: float = 0.99
    """Memory of the return statistics, per batch."""
    normalize_observations: bool = False
    """Running mean and variance of the observations, over living agents."""
    precision: str = "float32"
    """How precisely networks compute: ``float32``, ``tf32`` (matrix products of the learner, on
    a GPU that has it) or ``bf16`` (their forward and backward in bfloat16, in acting as well)."""

    def __post_init__(self) -> None:
        if not isinstance(self.critic, CriticConfig):  # a plain network will do, too
            object.__setattr__(self, "critic", CriticConfig(**vars(self.critic)))
