"""``in_keys`` names all entries that a loss reads, so others may be left out of a buffer."""

import pytest
import torch
from lives import Lives
from tensordict import TensorDict
from torchrl.data import Categorical, Unbounded

from torchrl_marl import AgentSpec, TeamSpec
from torchrl_marl.modules import (
    NetworkConfig,
    make_action_critic,
    make_actor,
    make_critic,
    make_deterministic_actor,
    make_mixer,
    make_q_actor,
)
from torchrl_marl.modules.config import QNetworkConfig
from torchrl_marl.objectives import (
    MADDPGLoss,
    MAPPOLoss,
    MASACLoss,
    ParallelQLoss,
    ValueDecompositionLoss,
)

SMALL = NetworkConfig([4])


def losses(group, bootstrap):
    own = {"group": group, "bootstrap": bootstrap}
    actor = make_actor(group, SMALL)
    yield MAPPOLoss(actor, make_critic(group, centralized=True), **own, entropy_bonus=False)
    yield MADDPGLoss(make_deterministic_actor(group, SMALL), make_action_critic(group), **own)
    yield MASACLoss(actor, make_action_critic(group, n_critics=2), **own)
    q_actor = make_q_actor(group, QNetworkConfig([4]))
    yield ValueDecompositionLoss(q_actor, **own)
    yield ParallelQLoss(q_actor, **own)
    if bootstrap == "team":
        yield ValueDecompositionLoss(q_actor, make_mixer(group, "monotonic"), **own)
        yield ParallelQLoss(q_actor, make_mixer(group, "monotonic"), **own)


@pytest.mark.parametrize("bootstrap", ["team", "agent"])
def test_losses_read_only_their_in_keys(bootstrap):
    """Agents are born late, wait, die and are truncated by individual time limits."""
    group = TeamSpec([AgentSpec("car", 3, Unbounded((2,)), Categorical(3))]).groups["car"]
    td = Lives(6, 3, seed=0).batch(group, 20, features=2)
    td["car", "action"] = torch.randint(3, (6, 20, 3))
    td["car", "action_log_prob"] = torch.randn(6, 20, 3)
    for loss in losses(group, bootstrap):
        found = []
        for data in (td.clone(), td.select(*loss.in_keys, strict=False)):
            if isinstance(loss, ParallelQLoss):
                loss.add_targets(data)
                data = data.select(*loss.in_keys)  # stored between targets and updates
            torch.manual_seed(0)
            found.append(loss.eval()(data))
        for name, value in found[0].items():
            torch.testing.assert_close(found[1][name], value, msg=f"{type(loss).__name__}: {name}")


@pytest.mark.parametrize(
    "key", [("next", "car", "reward"), ("next", "terminated"), ("next", "car", "mask"), "next"]
)
def test_missing_entry_is_named_in_the_error(key):
    spec = AgentSpec("car", 2, Unbounded((3,)), Categorical(2))
    group = TeamSpec([spec]).groups["car"]
    seen = {"observation": torch.zeros(4, 2, 3), "mask": torch.ones(4, 2).bool()}
    now = seen | {"action": torch.zeros(4, 2, dtype=torch.long)}
    then = {"car": seen | {"reward": torch.ones(4, 2, 1)}, "terminated": torch.zeros(4, 1).bool()}
    step = TensorDict({"car": now, "next": then}, [4])
    loss = ValueDecompositionLoss(make_q_actor(group), group=group, functional=False)
    assert loss(step)["loss_value"] > 0
    with pytest.raises(KeyError, match=f'"{key if isinstance(key, str) else key[-1]}" not found'):
        loss(step.exclude(key))
