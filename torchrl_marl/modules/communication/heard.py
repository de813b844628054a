"""What is heard in a batch: who listened to whom, and how much was said.

Shapes: B any batch dims, N agents.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule, TensorDictModuleBase
from torch import Tensor, nn

from torchrl_marl.modules.communication.channel import Channel, drawing
from torchrl_marl.modules.communication.rounds import Attention

__all__ = ["heard_in", "listening", "listening_by_group", "talking_module"]


def talking_module(actor: nn.Module) -> TensorDictModule | None:
    """Returns the part of an actor whose network has a channel, or None where agents are silent.

    Args:
        actor (nn.Module): of a group, or of several as one.
    """
    for module in actor.modules():
        body = getattr(getattr(module, "module", None), "network", None)
        if isinstance(module, TensorDictModule) and isinstance(
            getattr(body, "channel", None), Channel
        ):
            return module
    return None


def heard_in(module: TensorDictModule, data: TensorDictBase) -> Tensor:
    """Returns who heard whom in steps of a batch.

    Args:
        module (TensorDictModule): from :func:`talking_module`.
        data (TensorDictBase): what it has read, with what was drawn in the channel.

    Shapes:
        - returns: bool, ``[*B, N, N]``, True where the agent of a row heard that of a column
    """
    return cast(Any, module.module).heard(*(data.get(key) for key in module.in_keys))


@torch.no_grad()
def listening(actor: nn.Module, data: TensorDictBase) -> Tensor:
    """Returns how much each agent listened to whom, the mean over the rounds of a step.

    With attention it is its weights; for a mean, and along a chain, all that are heard count alike.

    Args:
        actor (nn.Module): of a group, or of several as one.
        data (TensorDictBase): steps of a batch in which it acted.

    Shapes:
        - returns: ``[*B, N, N]``; rows sum to 1, or to 0 where nobody is heard

    Raises:
        ValueError: agents that do not communicate.

    Examples:
        >>> from torchrl_marl import TeamSpec
        >>> from torchrl_marl.envs.toy import Arena
        >>> from torchrl_marl.modules import CommunicationConfig, NetworkConfig, make_actor
        >>> env = Arena(2, n_agents=3)
        >>> config = NetworkConfig([8], communication=CommunicationConfig("commnet"))
        >>> actor = make_actor(TeamSpec.from_env(env).groups["agents"], config)
        >>> listening(actor, env.rollout(1, actor))[0, 0, 0]
        tensor([0.0000, 0.5000, 0.5000])
    """
    module = talking_module(actor)
    if module is None:
        raise ValueError("the agents of this actor do not communicate; nobody listens to anybody.")
    found: list[Tensor] = []

    def look(one: nn.Module, inputs: tuple) -> None:
        features, links, speaks, position, code = inputs
        if isinstance(one, Attention):
            messages = one.send(features, position)
            messages = messages if code is None else code(messages)
            found.append(one.weights(features, messages, links, position))
        else:
            weight = links.to(features.dtype)
            found.append(weight / weight.sum(-1, keepdim=True).clamp_min(1))

    channel = cast(Channel, cast(Any, module.module).network.channel)
    hooks = [one.register_forward_pre_hook(look) for one in channel.rounds]
    try:
        with drawing("replay"):
            module(data.copy())
    finally:
        for hook in hooks:
            hook.remove()
    return torch.stack(found).mean(0)


def listening_by_group(policy: nn.Module, data: TensorDictBase) -> dict[str, Tensor]:
    """Returns :func:`listening` of each group whose agents have a channel of their own.

    Args:
        policy (nn.Module): with the actors of groups.
        data (TensorDictBase): steps in which it acted.
    """
    actors = [part for part in policy.modules() if isinstance(part, TensorDictModuleBase)]
    groups = [(actor, getattr(actor, "group", None)) for actor in actors]
    return {
        group.name: listening(actor, data)
        for actor, group in groups
        if group is not None and group.name in data and talking_module(actor) is not None
    }
