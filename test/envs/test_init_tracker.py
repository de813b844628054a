"""AgentInitTracker marks the first step of each agent."""

import pytest
import torch
from contract import asking_reset
from torchrl.collectors import Collector
from torchrl.envs import Compose, InitTracker, SerialEnv, TransformedEnv, check_env_specs
from torchrl.envs.utils import step_mdp

from torchrl_marl.envs import AgentInitTracker, PadAgents
from torchrl_marl.envs.toy import Arena, TwoStepGame

LATE = {"n_agents": 3, "years": 2, "late_spawn": 2, "max_steps": 6}
FIRST, SECOND, THIRD = [1, 0, 0, 0, 0, 0], [1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 1, 0]
TRANSFORMS = {
    "dense": (1, AgentInitTracker),
    "lazy": (2, AgentInitTracker),
    "padded": (2, lambda: Compose(PadAgents(), AgentInitTracker())),
    "before_padding": (2, lambda: Compose(AgentInitTracker(), InitTracker(), PadAgents())),
}


def inits(td, group="agents"):
    """``[E, T, N]``"""
    return torch.stack([agent["is_init"] for agent in td[group].unbind(-1)], -2).squeeze(-1).int()


@pytest.mark.parametrize(("kinds", "transform"), TRANSFORMS.values(), ids=TRANSFORMS)
def test_is_init_marks_the_first_step_of_late_agents(kinds, transform):
    env = TransformedEnv(Arena(3, kinds=kinds, lives=9, **LATE), transform())
    check_env_specs(env)
    td = env.rollout(9, break_when_any_done=False)
    assert inits(td)[0].T.tolist() == [row + row[:3] for row in (FIRST, SECOND, THIRD)]
    assert inits(td["next"])[0, :5].T.tolist() == [row[1:] for row in (FIRST, SECOND, THIRD)]
    # Each agent that acts has it in its first step only.
    acts = torch.stack([agent["mask"] for agent in td["agents"].unbind(-1)], -1)
    assert (inits(td) * acts)[:, :6].sum(1).eq(1).all()


def test_partial_reset_keeps_is_init_of_waiting_agents():
    env = TransformedEnv(Arena(3, **LATE), AgentInitTracker())
    td = env.reset()
    td = step_mdp(env.step(env.rand_action(td)))
    after = env.reset(asking_reset(env, td, [1]))
    assert after["agents", "is_init"].squeeze(-1).int().tolist() == [
        [0, 1, 1],
        [1, 1, 1],
        [0, 1, 1],
    ]
    assert env.reset(after)["agents", "is_init"].all()


def test_is_init_of_groups_without_masks_follows_the_episode():
    vmas = pytest.importorskip("torchrl_marl.envs.vmas")
    env = vmas.VmasEnv("simple_tag", num_envs=3, max_steps=3)
    env = TransformedEnv(env, Compose(InitTracker(), AgentInitTracker()))
    check_env_specs(env)
    td = env.rollout(7, break_when_any_done=False)
    assert torch.equal(td["adversary", "is_init"], td["is_init"].unsqueeze(-2).expand(3, 7, 3, 1))
    assert td["is_init"][0, :, 0].tolist() == [True, False, False] * 2 + [True]


def test_tracker_works_in_torchrl_collectors():
    env = SerialEnv(2, lambda: TransformedEnv(TwoStepGame(3), AgentInitTracker()))
    outside = TransformedEnv(SerialEnv(2, lambda: TwoStepGame(3)), AgentInitTracker("begins"))
    for each, key in ((env, "is_init"), (outside, "begins")):
        check_env_specs(each)
        collector = Collector(each, frames_per_batch=24, total_frames=24)
        (batch,) = collector
        expected = torch.tensor([True, False] * 2).view(1, 1, 4, 1, 1).expand(2, 3, 4, 2, 1)
        assert torch.equal(batch["agents", key], expected)
        collector.shutdown()
