"""The two-step game: returns of IQL, VDN and QMIX trained on all states and joint actions.

The first agent's first action leads to one of two last steps: in one everything earns 7, in the
other 0, 1, 1 or 8. A sum of values cannot represent the latter; a monotonic mixer can.
"""

import itertools

import pytest
import torch
from support.tiers import second_tier_cases
from tensordict import TensorDict
from torchrl.data import Categorical, Unbounded

from torchrl_marl import AgentSpec, TeamSpec
from torchrl_marl.functional import soft_update_
from torchrl_marl.modules import NetworkConfig, make_mixer, make_q_actor
from torchrl_marl.objectives import ValueDecompositionLoss

LAST = {1: [[7.0, 7.0], [7.0, 7.0]], 2: [[0.0, 1.0], [1.0, 8.0]]}


def game():
    """Every state and joint action once, ``[12]``, for a group ``car`` of two agents."""
    rows = list(itertools.product(range(3), range(2), range(2)))
    seen = torch.eye(4)
    now, then = ([seen[s] for s, *_ in rows], [seen[1 + a if s == 0 else 3] for s, a, _ in rows])
    earned = [0.0 if s == 0 else LAST[s][a][b] for s, a, b in rows]
    over = torch.tensor([[s > 0] for s, *_ in rows])
    living = torch.ones(len(rows), 2, dtype=torch.bool)
    return TensorDict(
        {
            "car": {
                "observation": torch.stack(now).unsqueeze(1).expand(-1, 2, -1),
                "action": torch.tensor([own for _, *own in rows]),
                "mask": living,
            },
            "next": {
                "car": {
                    "observation": torch.stack(then).unsqueeze(1).expand(-1, 2, -1),
                    "reward": torch.tensor(earned).reshape(-1, 1, 1).expand(-1, 2, 1),
                    "mask": living,
                },
                "terminated": over,
                "truncated": torch.zeros_like(over),
                "done": over,
            },
        },
        [len(rows)],
    )


def played(actor):
    """The return of the greedy actions."""
    state, seen = 0, torch.eye(4)
    for _ in range(2):
        td = TensorDict({"car": {"observation": seen[state].expand(1, 2, -1)}}, [1])
        td["car", "mask"] = torch.ones(1, 2, dtype=torch.bool)
        first, second = actor(td)["car", "action"][0].tolist()
        if state:
            return LAST[state][first][second]
        state = 1 + first


@pytest.mark.parametrize(
    ("kind", "earned", "seed"),
    [
        ("sum", 7.0, 1),
        ("monotonic", 8.0, 0),
        *second_tier_cases("learning", ("none", 7.0, 0), ("monotonic", 8.0, 1)),
    ],
)
def test_return_of_greedy_actions_after_training(kind, earned, seed):
    torch.manual_seed(seed)
    group = TeamSpec([AgentSpec("car", 2, Unbounded((4,)), Categorical(2))]).groups["car"]
    actor = make_q_actor(group, NetworkConfig([16], sharing="none"))
    mixer = make_mixer(group, kind, hidden=8)
    loss = ValueDecompositionLoss(actor, mixer, group=group, gamma=0.99, functional=False)
    networks = [loss.qvalue_network] if mixer is None else [loss.qvalue_network, mixer]
    followers = [loss.target_qvalue_network]
    followers += [] if mixer is None else [loss.target_mixer_network]
    own, targets = ([p for n in x for p in n.parameters()] for x in (networks, followers))
    optimizer, data = torch.optim.Adam(own, lr=1e-2), game()
    for _ in range(600):
        optimizer.zero_grad()
        loss(data)["loss_value"].backward()
        optimizer.step()
        soft_update_(targets, own, 0.05)
    assert played(actor) == earned
