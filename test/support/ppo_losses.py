"""Networks and batches for PPO losses, and comparisons of losses and gradients."""

import math

import torch
from samples import assert_same, make_group
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn
from torch.distributions import Categorical
from torchrl.modules import ProbabilisticActor

from torchrl_marl.modules import NetworkConfig, make_actor, make_critic
from torchrl_marl.objectives import MAPPOLoss

LOSSES = ("loss_objective", "loss_critic", "loss_entropy")


def make_networks(group, *, centralized=True, value_norm=None, share=True, seed=0):
    torch.manual_seed(seed)
    config = NetworkConfig(num_cells=[8], share_params=share)
    actor = make_actor(group, config)
    critic = make_critic(group, config, centralized=centralized, value_norm=value_norm)
    # The initialization gives small outputs; the noise makes differences visible.
    with torch.no_grad():
        for parameter in (*actor.parameters(), *critic.parameters()):
            parameter.add_(0.3 * torch.randn_like(parameter))
    return actor, critic


def outputs_and_gradients(loss, td, seed=0):
    """Outputs and gradients of a loss."""
    parameters = [p for p in loss.parameters() if p.requires_grad]
    for parameter in parameters:
        parameter.grad = None
    torch.manual_seed(seed)
    out = loss(td)
    sum(out[key] for key in out.keys() if key.startswith("loss_")).sum().backward()
    assert all(p.grad is not None for p in parameters)
    return {k: v.detach() for k, v in out.items()}, [p.grad.clone() for p in parameters]


def assert_same_outcome(one, other, keys=None):
    for key in one[0] if keys is None else keys:
        assert_same(one[0][key], other[0][key], key)
    for a, b in zip(one[1], other[1]):
        assert_same(a, b, "gradient")
    assert any(bool(g.abs().sum() > 0) for g in one[1])
    assert all(bool(g.isfinite().all()) for g in one[1])


class Constants(nn.Module):
    """Outputs that are parameters, independent of the input: [B, N, K]."""

    def __init__(self, values):
        super().__init__()
        self.values = nn.Parameter(torch.tensor(values))

    def forward(self, observation):
        return self.values.expand(*observation.shape[:-1], self.values.shape[-1])


def make_hand_case(**kwargs):
    """Two agents, one step: two actions, each of probability one half."""
    group = make_group("categorical", 2, o=1)
    actor = ProbabilisticActor(
        TensorDictModule(Constants([0.0, 0.0]), [("car", "observation")], [("car", "logits")]),
        in_keys={"logits": ("car", "logits")},
        out_keys=[("car", "action")],
        distribution_class=Categorical,
        return_log_prob=True,
        log_prob_key=("car", "action_log_prob"),
    )
    critic = TensorDictModule(Constants([3.0]), [("car", "observation")], [("car", "state_value")])
    kwargs = {"normalize_advantage": False, "entropy_coeff": 0.1} | kwargs
    return group, MAPPOLoss(actor, critic, group=group, **kwargs)


def make_hand_batch(mask=(True, True)):
    """Ratios 2 and 0.5, advantages 1 and -1, value targets 1 and 8, old values 2.9 and 1."""
    car = {
        "observation": torch.zeros(1, 2, 1),
        "mask": torch.tensor([mask]),
        "action": torch.tensor([[0, 1]]),
        "action_log_prob": torch.tensor([[math.log(0.25), 0.0]]),
        "advantage": torch.tensor([[[1.0], [-1.0]]]),
        "value_target": torch.tensor([[[1.0], [8.0]]]),
        "state_value": torch.tensor([[[2.9], [1.0]]]),
    }
    return TensorDict({"car": car}, [1])
