"""Toy environments with several kinds of agents: speaker-listener, and late spawns in Arena."""

import inspect

import pytest

from torchrl_marl.envs.toy import Arena, SpeakerListener
from torchrl_marl.errors import ConfigError

# --------------------------------------------------------------------------- speaker and listener


SPEAKER_LISTENERS = [{}, {"continuous_speech": True},
                     {"continuous_speech": True, "one_group": True}]  # fmt: skip


def straight_on(env, td):
    """The speaker names the goal, the listener goes there straight as soon as it knows."""
    td = env.rand_action(td)
    kinds = env.by_kind(td, "team") if env.one_group else td
    goal, seen = (kinds[name]["observation"][:, 0] for name in ("speaker", "listener"))
    places, heard = seen[:, :-3].view(-1, 3, 2), seen[:, -3:]
    symbol = not (env.one_group or td["speaker", "action"].is_floating_point())
    actions = {"speaker": goal.argmax(-1)[:, None] if symbol else goal[:, None]}
    way = (heard.unsqueeze(-1) * places).sum(1) / env.speed
    actions["listener"] = way.clamp(-1, 1).unsqueeze(1)
    if env.one_group:
        for member, action in zip(td["team"].unbind(1), actions.values()):
            member["action"] = action[:, 0]
    else:
        for name, action in actions.items():
            td[name, "action"] = action
    return td


@pytest.mark.parametrize("kwargs", SPEAKER_LISTENERS, ids=str)
def test_speaker_listener_matches_its_reference_returns(kwargs):
    env = SpeakerListener(4000, max_steps=10, seed=0, **kwargs)
    group = next(iter(env.group_map))
    for policy, expected in (
        (lambda td: straight_on(env, td), env.heuristic_return),
        (env.rand_action, env.random_return),
    ):
        td, total = env.reset(), 0
        for _ in range(10):
            td = env.step(policy(td))["next"]
            total = total + td[group, "reward"][:, 0, 0]
        assert td["truncated"].all()
        assert abs(total.mean() - expected) < 4 * total.std() / 4000**0.5
    assert env.random_return < 5 * env.heuristic_return


def test_speaker_listener_source_is_short():
    source = inspect.getsource(SpeakerListener)
    body = source[
        source.index("    def __init__") : source.index("    @property\n    def heuristic")
    ]
    lines = [line for line in body.splitlines() if line.strip() and line.strip()[0] != "#"]
    assert len(lines) < 50
    names = [line.strip() for line in lines]
    signature = names.index(") -> None:")
    assert len(lines) - signature <= 40  # the tutorial's version has no options


def test_speaker_listener_refuses_invalid_arguments():
    with pytest.raises(ConfigError, match="one_group=True needs continuous_speech=True"):
        SpeakerListener(2, one_group=True)


# ------------------------------------------------------------------------------------ late spawns


def test_arena_agents_spawn_late():
    env = Arena(3, n_agents=3, years=3, late_spawn=2, kinds=2, seed=0)
    td = env.reset()
    masks, done = [], []
    for _ in range(13):
        masks.append(td["agents", "mask"][0].tolist())
        done.append(td["agents", "done"][0].flatten().tolist())
        td = env.rand_action(td)
        for member in td["agents"].unbind(1):
            member["action"] = member["observation"][:, :-2].argmax(-1)
        td = env.step(td)["next"]
    lived = list(zip(*masks))
    assert [row.index(True) for row in lived] == [0, 2, 4]
    assert [sum(row) for row in lived] == [3, 6, 9]
    assert [sum(row) for row in zip(*done)] == [10, 5, 0]
    assert td["terminated"].all()


def test_agents_that_never_spawn_end_with_the_episode():
    env = Arena(2, n_agents=2, years=3, late_spawn=9, max_steps=5)
    td = env.rollout(5, break_when_any_done=False)["next"]
    assert not td["agents", "mask"][:, :-1, 1].any()  # a waiting agent is alive at the time limit
    assert td["truncated"][:, -1].all()
    assert td["agents", "truncated"][:, -1, 1].all()
    assert not td["agents", "done"][:, :-1, 1].any()
    # No agent is alive between the first death and the second spawn; the episode continues.
    env = Arena(2, n_agents=2, years=1, late_spawn=3)
    td = env.rollout(5, break_when_any_done=False)["next"]
    assert td["terminated"][0].flatten().tolist() == [False] * 4 + [True]
