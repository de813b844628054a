"""Animations in evaluation and training: files, videos, and invalid requests."""

import importlib.util

import pytest
import torch
from torchrl.envs import TransformedEnv

pytest.importorskip("vmas")
pytest.importorskip("matplotlib")

from films import balance, film_of, frames_of
from runs import assert_same_run, small_config

import torchrl_marl
from torchrl_marl import TeamSpec
from torchrl_marl.apps.pictures import animation
from torchrl_marl.apps.pictures.animation import draw_frames, write
from torchrl_marl.envs.toy import Arena
from torchrl_marl.errors import ConfigError, MissingExtraError, WriteError
from torchrl_marl.training.evaluation import evaluate

pytestmark = pytest.mark.pictures


@pytest.fixture(autouse=True)
def _no_gradients():
    with torch.no_grad():
        yield


class TestWhereItIsAskedFor:
    def test_evaluate_with_animation_returns_the_same_metrics(self, tmp_path):
        env = balance()
        team = TeamSpec.from_env(env)
        path = tmp_path / "episode.gif"
        measured = evaluate(env, None, team, episodes=2, gif=path)
        assert measured == evaluate(env, None, team, episodes=2)
        assert len(list(frames_of(path))) == 7

    @pytest.mark.filterwarnings("ignore")  # imageio-ffmpeg leaves pipes open
    def test_video_is_written_with_imageio_ffmpeg(self, tmp_path, monkeypatch):
        writer = pytest.importorskip("imageio_ffmpeg")
        path = tmp_path / "episode.mp4"
        film, _ = film_of(balance(), shown=2)
        write(film, path)
        reader = writer.read_frames(str(path))
        size = next(reader)["source_size"]
        height, width, _ = draw_frames(film)[0].shape
        assert size == (width + width % 2, height + height % 2)
        assert len(list(reader)) >= 7
        assert [own.name for own in tmp_path.iterdir()] == ["episode.mp4"]
        without("imageio_ffmpeg", monkeypatch)
        with pytest.raises(MissingExtraError, match=r"pip install '\.\[video\]'"):
            animation.check_drawable(balance(), [path])

    def test_video_without_matplotlib_names_the_video_extra(self, tmp_path, monkeypatch):
        for package in ("matplotlib", "imageio_ffmpeg"):
            without(package, monkeypatch)
        with pytest.raises(MissingExtraError, match=r"pip install '\.\[video\]'"):
            animation.check_drawable(balance(), [tmp_path / "episode.mp4"])

    def test_missing_folder_or_unknown_file_type_raises(self, tmp_path):
        film, _ = film_of(balance())
        for ending in ("gif", "mp4"):
            with pytest.raises(WriteError, match="cannot be written"):
                write(film, tmp_path / "none" / f"episode.{ending}")
        with pytest.raises(ConfigError, match="expected a name that ends in .gif or .mp4"):
            animation.check_drawable(balance(), [tmp_path / "episode.avi"])

    def test_env_without_scene_raises_before_it_is_stepped(self, tmp_path, monkeypatch):
        monkeypatch.delattr(Arena, "scene")
        env = TransformedEnv(Arena(num_envs=2, seed=0))
        message = (
            "^Arena cannot be drawn, expected an environment with a method scene.index. .* leave"
        )
        with pytest.raises(ConfigError, match=message):
            evaluate(
                env,
                lambda tensordict: pytest.fail("played"),
                TeamSpec.from_env(env),
                episodes=2,
                gif=tmp_path / "episode.gif",
            )
        for setting in ({"gif": True}, {"animate_every": 80}):
            config = small_config(evaluation=setting, folder=str(tmp_path / "run"))
            with pytest.raises(ConfigError, match=message):
                torchrl_marl.train(config)
        assert list(tmp_path.iterdir()) == []

    def test_missing_matplotlib_raises(self, monkeypatch, tmp_path):
        without("matplotlib", monkeypatch)
        env = balance()
        with pytest.raises(MissingExtraError, match=r"pip install '\.\[plot\]'"):
            evaluate(env, None, TeamSpec.from_env(env), episodes=1, gif=tmp_path / "episode.gif")

    def test_animations_during_training_do_not_affect_the_run(self, tmp_path):
        runs = {}
        for name, more in (
            ("plain", {}),
            ("drawn", {"gif": True, "animate_every": 160, "episodes_shown": 3}),
        ):
            with torch.enable_grad():
                config = small_config(
                    total_frames=400,
                    evaluation={"episodes": 4, "deterministic": False, **more},
                    folder=str(tmp_path / name),
                )
                runs[name] = torchrl_marl.train(config)
        assert_same_run(tmp_path / "plain", tmp_path / "drawn")
        found = sorted(p.name for p in (tmp_path / "drawn/animations").iterdir())
        assert found == ["episode_160.gif", "episode_320.gif"]
        lengths = runs["drawn"].play(deterministic=False).lengths[:3]
        assert len(list(frames_of(tmp_path / "drawn/episode.gif"))) == 1 + int(lengths.max())

    def test_animations_of_a_population_raise(self):
        config = {"population": {"size": 2}, "evaluation": {"animate_every": 80}}
        with pytest.raises(ConfigError, match="a population renders no animations"):
            small_config(**config).check()


def without(package, monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == package else found(name)
    )
