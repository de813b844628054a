"""The climbing game: IQL finds its optimum if negative TD errors weigh less than 1/7.

Over uniform joint actions, an agent's values are expectiles. Those of the second agent are
(11 - 30 w) / (1 + 2 w) for its first action and (6 + 5 w) / (1 + 2 w) for its last.
"""

import itertools

import pytest
import torch
from tensordict import TensorDict
from torchrl.data import Categorical, Unbounded

from torchrl_marl import AgentSpec, TeamSpec
from torchrl_marl.modules import NetworkConfig, make_q_actor
from torchrl_marl.objectives import ValueDecompositionLoss

pytestmark = pytest.mark.learning

EARNED = torch.tensor([[11.0, -30.0, 0.0], [-30.0, 7.0, 6.0], [0.0, 0.0, 5.0]])


def game():
    """Every joint action once, ``[9]``, for a group ``car`` of two agents."""
    actions = torch.tensor(list(itertools.product(range(3), range(3))))
    earned = EARNED[actions[:, 0], actions[:, 1]].reshape(-1, 1, 1).expand(-1, 2, 1)
    seen, living = torch.ones(9, 2, 1), torch.ones(9, 2, dtype=torch.bool)
    over = torch.ones(9, 1, dtype=torch.bool)
    then = {"observation": seen, "reward": earned, "mask": living}
    flags = {"terminated": over, "truncated": ~over, "done": over}
    now = {"observation": seen, "action": actions, "mask": living}
    return TensorDict({"car": now, "next": {"car": then, **flags}}, [9])


@pytest.mark.parametrize(
    ("weight", "optimum"), [(0.05, True), (0.13, True), (0.16, False), (1.0, False)]
)
def test_optimum_is_found_for_negative_weights_below_one_seventh(weight, optimum):
    torch.manual_seed(0)
    group = TeamSpec([AgentSpec("car", 2, Unbounded((1,)), Categorical(3))]).groups["car"]
    actor = make_q_actor(group, NetworkConfig([16], sharing="none"))
    loss = ValueDecompositionLoss(actor, group=group, negative_weight=weight, functional=False)
    own, data = list(loss.qvalue_network.parameters()), game()
    optimizer = torch.optim.Adam(own, lr=0.05)
    for _ in range(600):
        optimizer.zero_grad()
        loss(data)["loss_value"].backward()
        optimizer.step()
    td = actor(data)["car"]
    values = td["action_value"][0, 1].detach()
    if weight < 0.5:
        first, last = (x / (1 + 2 * weight) for x in (11 - 30 * weight, 6 + 5 * weight))
        torch.testing.assert_close(values[[0, 2]], torch.tensor([first, last]), rtol=0, atol=0.05)
    assert (td["action"][0].tolist() == [0, 0]) == optimum
