"""JaxMARL's switch riddle, whose optimal return is known: the bulb carries messages."""

import itertools

import pytest
import torch

from torchrl_marl.envs import JaxMarlEnv

pytest.importorskip("jaxmarl")

NOTHING, SWITCH, TELL = range(3)
DAYS = 6


def protocol(day, is_new, bulb):
    """The first switches the bulb on; newcomers switch it off, or announce if it is off."""
    news = torch.where((day == 0) | bulb, SWITCH, TELL)
    return torch.where(is_new, news, NOTHING)


def silent(day, is_new, bulb):
    """The first switches the bulb on; the others do nothing."""
    return torch.full_like(is_new, SWITCH if day == 0 else NOTHING, dtype=torch.int64)


def episodes(decide, num_envs):
    """Return and last day of each episode, and the agents that were in the room."""
    env = JaxMarlEnv("switch_riddle", num_envs=num_envs, seed=0)
    td, been = env.reset(), torch.zeros(num_envs, 3, dtype=torch.bool)
    running, returns = torch.ones(num_envs, dtype=torch.bool), torch.zeros(num_envs)
    days = torch.zeros(num_envs, dtype=torch.int64)
    for day in range(DAYS):
        inside, bulb = td["agent", "observation"].bool().unbind(-1)
        assert (inside.sum(-1) == 1).all() and not (bulb & ~inside).any()
        legal = td["agent", "action_mask"]
        assert legal[inside].all() and (legal[~inside] == torch.tensor([True, False, False])).all()
        td["agent", "action"] = torch.where(inside, decide(day, ~been, bulb), NOTHING)
        been |= inside & running.unsqueeze(-1)
        step, td = env.step_and_maybe_reset(td)
        reward, done = step["next", "agent", "reward"].squeeze(-1), step["next", "done"].squeeze(-1)
        assert (reward == reward[:, :1]).all()
        returns += reward[:, 0] * running
        days += running
        running &= ~done
    assert not running.any()
    return returns, days, been


def test_bulb_protocol_attains_the_optimal_return():
    returns, days, been = episodes(protocol, 8192)
    # The announcement comes on the day on which the last agent enters the room.
    assert torch.equal(returns, been.all(-1).float())
    assert ((days == DAYS) | (returns == 1)).all()
    sequences = itertools.product(range(3), repeat=DAYS)
    best = sum(len(set(rooms)) == 3 for rooms in sequences) / 3**DAYS
    assert best == pytest.approx(0.7407, abs=1e-4)
    assert returns.mean().item() == pytest.approx(best, abs=0.015)


def test_policy_without_announcement_earns_nothing():
    returns, days, _ = episodes(silent, 64)
    assert (returns == 0).all() and (days == DAYS).all()
