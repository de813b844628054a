"""A GIF of one whole episode: its frames, its size, what moves, and what cannot be drawn."""

import importlib.util

import numpy as np
import pytest
import torch
from torchrl.envs import RewardSum, TransformedEnv

pytest.importorskip("vmas")
pytest.importorskip("matplotlib")

from PIL import Image
from runs import small_config

import torchrl_marl
from torchrl_marl import TeamSpec
from torchrl_marl.envs import VmasEnv
from torchrl_marl.envs.scene import Shape, scene, stage
from torchrl_marl.envs.toy import Arena
from torchrl_marl.errors import ConfigError, MissingExtraError
from torchrl_marl.training import animation
from torchrl_marl.training.animation import animate, draw_frames, play
from torchrl_marl.training.evaluation import evaluate


@pytest.fixture(autouse=True)
def _no_gradients():
    with torch.no_grad():
        yield


def balance(**kwargs):
    return VmasEnv("balance", num_envs=2, max_steps=6, seed=0, **kwargs)


def tilt(tensordict):
    """The first agent lifts, the others do nothing: the ball falls."""
    action = torch.zeros(*tensordict.batch_size, 3, 2)
    action[:, 0, 1] = 1.0
    return tensordict.set(("agents", "action"), action)


def frames_of(path):
    with Image.open(path) as image:
        for i in range(image.n_frames):
            image.seek(i)
            yield np.asarray(image.convert("RGB"))


class TestScene:
    def test_entities_are_read_as_they_stand(self):
        env = balance()
        env.reset()
        shapes = {shape.name: shape for shape in scene(env, 1)}
        line = env._env.scenario.line
        assert (shapes["line"].x, shapes["line"].y) == tuple(line.state.pos[1].tolist())
        assert shapes["line"].kind == "line"
        assert shapes["line"].length == line.shape.length
        assert shapes["floor"].kind == "box"
        assert shapes["agent_0"].radius == env._env.agents[0].shape.radius
        roles = {name: shape.role for name, shape in shapes.items()}
        assert roles["goal"] == "goal"
        assert roles["package"] == roles["floor"] == "object"
        assert roles["agent_2"] == "agent"

    def test_reach_of_what_is_turned(self):
        lying = Shape("beam", "object", "box", 0, 0, 0.0, (0, 0, 0), length=4.0, width=2.0)
        upright = Shape("beam", "object", "box", 0, 0, torch.pi / 2, (0, 0, 0), length=4.0, width=2)
        assert lying.reach == (2.0, 1.0)
        assert upright.reach == pytest.approx((1.0, 2.0))

    def test_under_transforms(self):
        env = TransformedEnv(balance(), RewardSum(in_keys=[("agents", "reward")]))
        assert stage(env).name == "balance"
        assert len(scene(env)) == 7

    def test_border_where_the_world_has_one(self):
        assert stage(balance()).border is None
        assert stage(VmasEnv("transport", num_envs=1, seed=0)).border is not None


class TestAnimate:
    def test_a_frame_a_step_and_the_start(self, tmp_path):
        env = balance()
        animate(env, env.rand_action, tmp_path / "episode.gif")
        pictures = list(frames_of(tmp_path / "episode.gif"))
        assert len(pictures) == 7
        assert [path.name for path in tmp_path.iterdir()] == ["episode.gif"]
        height, width, _ = pictures[0].shape
        assert 250 <= width <= 700
        assert 150 <= height <= 700
        for one, next_one in zip(pictures, pictures[1:]):
            field = slice(60, None)  # below the title, which counts the steps
            assert (one[field] != next_one[field]).any()

    def test_an_early_end_ends_it(self):
        env = VmasEnv("balance", num_envs=2, max_steps=100, seed=0)
        steps = []

        def drop_in_step_four(tensordict):
            steps.append(len(steps) + 1)
            if steps[-1] == 4:
                env._env.scenario.package.set_pos(torch.tensor([0.5, -1.0]), batch_index=0)
            return tilt(tensordict)

        frames = play(env, drop_in_step_four)
        assert [frame.step for frame in frames] == [0, 1, 2, 3, 4]
        (package,) = [shape for shape in frames[-1].shapes if shape.name == "package"]
        assert (package.x, package.y) == pytest.approx((0.5, -1.0), abs=0.2)  # not the next start

    def test_returns_are_those_of_the_rollout(self):
        env = balance()
        env.set_seed(3)
        frames = play(env, tilt)
        env.set_seed(3)
        rollout = env.rollout(6, tilt)
        expected = rollout["next", "agents", "reward"][0].mean(1).sum().item()
        assert frames[-1].returns == {"agents": pytest.approx(expected, abs=1e-5)}
        assert frames[0].returns == {"agents": 0.0}

    def test_long_episodes_are_shown_in_strides(self, monkeypatch):
        monkeypatch.setattr(animation, "_MOST_FRAMES", 3)
        env = balance()
        frames = play(env, env.rand_action)
        pictures = draw_frames(frames, stage(env))
        assert len(pictures) == 3
        assert len({picture.size for picture in pictures}) == 1

    def test_endless_episodes_are_refused(self, monkeypatch):
        monkeypatch.setattr(animation, "_LONGEST", 4)
        env = balance()
        with pytest.raises(ConfigError, match="did not end in 4 steps; give the environment"):
            play(env, env.rand_action)

    def test_several_groups_and_hidden_things(self, tmp_path):
        env = VmasEnv("simple_tag", num_envs=1, max_steps=2, seed=0)
        frames = play(env, env.rand_action)
        assert set(frames[-1].returns) == {"adversary", "agent"}
        hidden = [
            animation.Frame(
                f.step, [animation.Shape(**{**vars(s), "visible": False}) for s in f.shapes], {}
            )
            for f in frames
        ]
        empty, full = draw_frames(hidden, stage(env)), draw_frames(frames, stage(env))
        assert len(empty) == len(full)
        red = [
            (np.asarray(p[0].convert("RGB"))[60:].std(axis=-1) > 20).any() for p in (empty, full)
        ]
        assert red == [False, True]


class TestWhereItIsAskedFor:
    def test_evaluate_writes_it_and_measures_the_same(self, tmp_path):
        env = balance()
        team = TeamSpec.from_env(env)
        path = tmp_path / "episode.gif"
        measured = evaluate(env, None, team, episodes=2, gif=path)
        assert measured == evaluate(env, None, team, episodes=2)
        assert len(list(frames_of(path))) == 7

    def test_toy_worlds_are_refused_before_they_are_played(self, tmp_path):
        env = TransformedEnv(Arena(num_envs=2, seed=0))
        message = "^Arena cannot be drawn, expected a VMAS world, or one with .* leave out the GIF."
        with pytest.raises(ConfigError, match=message):
            evaluate(
                env,
                lambda tensordict: pytest.fail("played"),
                TeamSpec.from_env(env),
                episodes=2,
                gif=tmp_path / "episode.gif",
            )
        with pytest.raises(ConfigError, match=message):
            torchrl_marl.train(small_config(evaluation={"gif": True}, folder=str(tmp_path / "run")))
        assert list(tmp_path.iterdir()) == []

    def test_missing_matplotlib(self, monkeypatch, tmp_path):
        found = importlib.util.find_spec
        monkeypatch.setattr(
            importlib.util, "find_spec", lambda name: None if name == "matplotlib" else found(name)
        )
        env = balance()
        with pytest.raises(MissingExtraError, match=r"pip install 'torchrl_marl\[plot\]'"):
            animate(env, env.rand_action, tmp_path / "episode.gif")

    def test_at_the_end_of_a_run(self, tmp_path):
        with torch.enable_grad():
            run = torchrl_marl.train(
                small_config(
                    "vmas_balance_mappo",
                    total_frames=80,
                    evaluation={"gif": True, "episodes": 2},
                    env={"num_envs": 8, "max_steps": 5},
                    folder=str(tmp_path / "run"),
                )
            )
        assert len(list(frames_of(run.folder / "episode.gif"))) <= 6


def test_words_are_drawn_between_those_who_hear_each_other():
    """Each agent hears the nearest one; the picture differs where nobody speaks."""
    from dataclasses import replace

    from torchrl_marl.modules import CommunicationConfig, NetworkConfig, make_actor

    torch.manual_seed(0)
    env = VmasEnv("navigation", num_envs=2, max_steps=4, seed=0)
    talk = CommunicationConfig("tarmac", links="nearest")
    actor = make_actor(
        TeamSpec.from_env(env).groups["agents"], NetworkConfig([8], communication=talk)
    )
    frames = play(env, actor)
    assert frames[0].words == ()
    shapes = frames[1].shapes
    for listener, speaker, weight in frames[1].words:
        assert weight == 1.0 and shapes[speaker].role == "agent" and speaker != listener
    assert [listener for listener, _, _ in frames[1].words] == [0, 1, 2, 3]
    silent = [replace(frame, words=()) for frame in frames]
    said, unsaid = (draw_frames(some, stage(env))[2] for some in (frames, silent))
    assert np.asarray(said.convert("RGB")).sum() < np.asarray(unsaid.convert("RGB")).sum()
