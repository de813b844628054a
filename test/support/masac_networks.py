"""Networks of MASAC for a group, and the gradients of its losses."""

from off_policy_losses import (
    gradients_of,
)
from torch import nn

from torchrl_marl.modules import NetworkConfig, make_action_critic, make_actor

SMALL = NetworkConfig([8])


def networks(group, *, centralized=True, config=SMALL, **kwargs):
    actor = make_actor(group, config)
    critic = make_action_critic(group, config, centralized=centralized, n_critics=2, **kwargs)
    for parameter in [*actor.parameters(), *critic.parameters()]:
        nn.init.normal_(parameter, std=0.3)
    return actor, critic


def gradients(loss, td):
    """The gradient of each loss with respect to its parameters."""
    parameters_of = {
        "loss_actor": loss.actor_network.parameters(),
        "loss_value": loss.qvalue_network.parameters(),
        "loss_alpha": [loss.log_alpha],
    }
    return gradients_of(loss(td), parameters_of)
