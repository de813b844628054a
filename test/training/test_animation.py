"""A GIF of one whole episode: frames, size, motion, and invalid scenes."""

import numpy as np
import pytest
import torch
from torchrl.envs import RewardSum, TransformedEnv

pytest.importorskip("vmas")
pytest.importorskip("matplotlib")

from films import balance, film_of, frames_of

from torchrl_marl import TeamSpec
from torchrl_marl.apps.pictures import animation
from torchrl_marl.apps.pictures.animation import draw_frames, write
from torchrl_marl.apps.pictures.film import ACTS, DEAD, UNBORN, WAITS, Film
from torchrl_marl.envs import VmasEnv
from torchrl_marl.envs.scene import Shape, scene, stage
from torchrl_marl.envs.toy import TOY_ENVS, Arena, Nim
from torchrl_marl.envs.toy.library import TOY_ENVIRONMENTS
from torchrl_marl.errors import ConfigError
from torchrl_marl.training.evaluation import play

pytestmark = pytest.mark.pictures


@pytest.fixture(autouse=True)
def _no_gradients():
    with torch.no_grad():
        yield


def tilt(tensordict):
    """The first agent lifts, the others do nothing, so that the ball falls."""
    action = torch.zeros(*tensordict.batch_size, 3, 2)
    action[:, 0, 1] = 1.0
    return tensordict.set(("agents", "action"), action)


class TestScene:
    def test_scene_has_the_entities_of_the_simulator(self):
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

    def test_reach_of_rotated_shapes(self):
        lying = Shape("beam", "object", "box", 0, 0, 0.0, (0, 0, 0), length=4.0, width=2.0)
        upright = Shape("beam", "object", "box", 0, 0, torch.pi / 2, (0, 0, 0), length=4.0, width=2)
        assert lying.reach == (2.0, 1.0)
        assert upright.reach == pytest.approx((1.0, 2.0))

    @pytest.mark.parametrize(
        ("role", "kind", "words"),
        [
            ("obstacle", "box", "'rock' has the role 'obstacle', expected one of agent, object, "),
            ("object", "circel", "kind 'circel', expected .* text; did you mean 'circle'[?] "),
            ("object", ["box"], r"the kind \['box'\], expected one of circle, box, line, text; "),
        ],
    )
    def test_invalid_roles_and_kinds_raise(self, role, kind, words):
        with pytest.raises(ConfigError, match=words):
            Shape("rock", role, kind, 0, 0, 0.0, (0, 0, 0), length=1.0)

    def test_scene_of_a_transformed_env(self):
        env = TransformedEnv(balance(), RewardSum(in_keys=[("agents", "reward")]))
        assert stage(env).name == "balance"
        assert len(scene(env)) == 7

    def test_border_of_bounded_environments(self):
        assert stage(balance()).border is None
        assert stage(VmasEnv("transport", num_envs=1, seed=0)).border is not None


class TestFilm:
    def test_gif_has_a_frame_per_step_and_the_start(self, tmp_path):
        film, _ = film_of(balance())
        write(film, tmp_path / "episode.gif")
        pictures = list(frames_of(tmp_path / "episode.gif"))
        assert len(pictures) == 7 == len(film.episodes[0])
        assert [path.name for path in tmp_path.iterdir()] == ["episode.gif"]
        height, width, _ = pictures[0].shape
        assert 250 <= width <= 700
        assert 150 <= height <= 700
        for one, next_one in zip(pictures, pictures[1:]):
            field = slice(60, None)  # below the title, which counts the steps
            assert (one[field] != next_one[field]).any()

    def test_film_ends_with_the_last_state_of_a_short_episode(self):
        env = VmasEnv("balance", num_envs=2, max_steps=9, seed=0)
        steps = []

        def drop_in_step_four(tensordict):
            steps.append(len(steps) + 1)
            if steps[-1] == 4:
                env._env.scenario.package.set_pos(torch.tensor([0.5, -1.0]), batch_index=0)
            return tilt(tensordict)

        film, _ = film_of(env, drop_in_step_four, shown=2)
        first, second = film.episodes
        assert [frame.step for frame in first] == [0, 1, 2, 3, 4] and first[-1].over
        assert [len(second), len(steps)] == [10, 9] and not second[4].over
        (package,) = [s for s in first[-1].picture if s.name == "package"]
        assert (package.x, package.y) == pytest.approx((0.5, -1.0), abs=0.2)  # not the next start

    def test_drawn_episode_equals_the_evaluated_one(self):
        env = balance()
        film, played = film_of(env, tilt, shown=2)
        env.set_seed(3)
        rollout = env.rollout(6, tilt)
        expected = rollout["next", "agents", "reward"].mean(2).sum((1, 2)).tolist()
        drawn = [frames[-1].returns["agents"] for frames in film.episodes]
        assert drawn == pytest.approx(expected, abs=1e-5)
        assert played.total.tolist() == pytest.approx(expected, abs=1e-5)
        assert film.episodes[0][0].returns == {"agents": 0.0}
        for i, frames in enumerate(film.episodes):
            at = {shape.name: (shape.x, shape.y) for shape in frames[-1].picture}
            seen = rollout["next", "agents", "observation"][i, -1, :, :2]
            for name, place in zip(("agent_0", "agent_1", "agent_2"), seen.tolist()):
                assert at[name] == pytest.approx(place, abs=1e-5)

    def test_filming_does_not_affect_the_episodes(self):
        env = Arena(6, seed=0)
        team = TeamSpec.from_env(env)
        plain = play(env, None, team, episodes=9, seed=3)
        _, watched = film_of(env, shown=4, episodes=9)
        assert torch.equal(plain.total, watched.total)
        assert torch.equal(plain.lengths, watched.lengths)

    def test_long_episodes_are_drawn_with_a_stride(self, monkeypatch):
        monkeypatch.setattr(animation, "_MAX_FRAMES", 3)
        pictures = draw_frames(film_of(balance())[0])
        assert len(pictures) == 3
        assert len({picture.shape for picture in pictures}) == 1

    def test_several_episodes_are_drawn_side_by_side(self):
        env = Arena(6, seed=0)
        sizes = {}
        for shown in (1, 3, 6):
            film, played = film_of(env, shown=shown, episodes=6)
            pictures = draw_frames(film)
            assert len(pictures) == 1 + int(played.lengths[:shown].max())
            sizes[shown] = pictures[0].shape
        assert sizes[3][1] > 1.3 * sizes[1][1] and sizes[6][0] > 1.5 * sizes[3][0]
        assert Film(env, TeamSpec.from_env(env), 99).shown == 6

    def test_several_groups_and_invisible_shapes(self):
        import dataclasses

        film, _ = film_of(VmasEnv("simple_tag", num_envs=1, max_steps=2, seed=0))
        assert set(film.episodes[0][-1].returns) == {"adversary", "agent"}
        full = draw_frames(film)
        film.episodes = [
            [
                dataclasses.replace(
                    f, picture=[dataclasses.replace(s, visible=False) for s in f.picture]
                )
                for f in film.episodes[0]
            ]
        ]
        empty = draw_frames(film)
        assert len(empty) == len(full)
        red = [(p[0][60:].std(axis=-1) > 20).any() for p in (empty, full)]
        assert red == [False, True]


class TestLife:
    def test_dead_agents_are_drawn_gray(self):
        """Agent 0 is drawn blue for 5 steps and gray after its death."""
        env = Arena(1, n_agents=2, lives=30, seed=0)
        film, _ = film_of(env)
        lives = [[agent.life for agent in frame.agents] for frame in film.episodes[0]]
        assert lives[4] == [ACTS, ACTS] and lives[5] == [DEAD, ACTS]
        assert len(lives) == 11 and lives[10] == [
            DEAD,
            ACTS,
        ]  # also at the team's end
        pictures = draw_frames(film)
        half = pictures[0].shape[1] // 2
        blue = [(p[60:, :half, 2].astype(int) - p[60:, :half, 0] > 40).sum() for p in pictures]
        assert min(blue[:5]) > 500 and max(blue[5:]) < 0.2 * min(blue[:5])

    def test_unborn_agents_are_not_drawn_as_waiting(self):
        film, _ = film_of(Arena(1, n_agents=2, late_spawn=2, lives=30, seed=0))
        lives = [frame.agents[1].life for frame in film.episodes[0]]
        assert lives[:3] == [UNBORN, UNBORN, ACTS]

    def test_agent_in_turn_is_highlighted(self):
        film, _ = film_of(Nim(1, stones=6, seed=0))
        for frame in film.episodes[0][:-1]:
            assert sorted(agent.life for agent in frame.agents) == [ACTS, WAITS]
        first = film.episodes[0][0]
        assert [agent.life for agent in first.agents] == [ACTS, WAITS]
        picture = draw_frames(film)[0].astype(int)
        orange = (picture[..., 0] > 200) & (picture[..., 2] < 60)
        half = picture.shape[1] // 2
        assert orange[:, :half].sum() > 50  # a ring around the first, and none around the second
        assert orange[:, half:].sum() < 0.2 * orange[:, :half].sum()

    def test_messages_between_agents_are_drawn(self):
        """Each agent receives messages of the nearest one. Without messages the picture differs."""
        from dataclasses import replace

        from torchrl_marl.modules import CommunicationConfig, NetworkConfig, make_actor

        torch.manual_seed(0)
        env = VmasEnv("navigation", num_envs=2, max_steps=4, seed=0)
        talk = CommunicationConfig("tarmac", links="nearest")
        actor = make_actor(
            TeamSpec.from_env(env).groups["agents"], NetworkConfig([8], communication=talk)
        )
        film, _ = film_of(env, actor)
        frames = film.episodes[0]
        assert frames[0].words == () and frames[0].agents[0].heard is None
        for listener, speaker, weight in frames[1].words:
            assert weight == 1.0 and speaker != listener
        names = [agent.name for agent in frames[1].agents]
        assert [listener for listener, _, _ in frames[1].words] == names
        loud = [sum(w for _, who, w in frames[1].words if who == name) / 3 for name in names]
        assert [agent.heard for agent in frames[1].agents] == pytest.approx(loud)
        said = draw_frames(film)[2]
        film.episodes = [[replace(frame, words=()) for frame in frames]]
        assert said.sum() < draw_frames(film)[2].sum()


class Pixels(Nim):
    """A scene of pixels: as many white rows as stones."""

    def scene(self, index=0):
        pixels = np.zeros((40, 80, 3), np.uint8)
        pixels[: 4 * int(self.heap[index])] = 255
        return pixels


class Words(Nim):
    def scene(self, index=0):
        return f"stones: {int(self.heap[index])}\nof {self.largest}"


class TestOtherPictures:
    @pytest.mark.parametrize("world", [Pixels, Words])
    def test_scenes_of_pixels_and_texts(self, world, tmp_path):
        film, _ = film_of(world(2, seed=0), shown=2)
        pictures = draw_frames(film)
        assert len({picture.shape for picture in pictures}) == 1
        assert (pictures[0] != pictures[-1]).any()
        write(film, tmp_path / "episode.gif")
        assert len(list(frames_of(tmp_path / "episode.gif"))) == len(pictures)

    @pytest.mark.parametrize("name", TOY_ENVIRONMENTS)
    def test_every_toy_env_is_drawn(self, name):
        limit = {"max_steps": 8} if name in ("paces", "speaker_listener") else {}
        film, played = film_of(TOY_ENVS[name](2, seed=0, **limit), shown=2)
        for frames, length in zip(film.episodes, played.lengths.tolist()):
            assert len(frames) == length + 1
            names = {agent.name for agent in frames[0].agents}
            for frame in frames:
                assert names <= {s.name for s in frame.picture if s.role == "agent"}
                assert [s.name for s in frame.picture] == [s.name for s in frames[0].picture]
            assert frames[0].picture != frames[-1].picture
        assert film.stage is None or film.stage.name == name

    def test_envs_that_render_themselves(self):
        pytest.importorskip("pettingzoo")
        from torchrl_marl.envs import make_env

        name = "pettingzoo/mpe2/simple_spread_v3"
        env = make_env(name, num_envs=2, max_steps=3, seed=0, drawn=True)
        film, played = film_of(env, shown=2)
        assert [len(frames) for frames in film.episodes] == [4, 4]
        picture = film.episodes[1][-1].picture
        assert picture.dtype == np.uint8 and picture.shape[2] == 3 and picture.std() > 0
        plain = make_env(name, num_envs=2, max_steps=3, seed=0)
        team = TeamSpec.from_env(plain)
        assert torch.equal(play(plain, None, team, episodes=2, seed=3).total, played.total)
        with pytest.raises(ConfigError, match="was built without rendering; use drawn=True"):
            film_of(plain)
        # The last picture shows the end of the episode, not the start of the next one.
        assert (film.episodes[0][-1].picture != scene(env, 0)).any()

    def test_jax_environments_show_their_last_state(self):
        """JaxMARL resets within the last step. Positions are also observed."""
        pytest.importorskip("jaxmarl")
        from torchrl_marl.envs import JaxMarlEnv

        env = JaxMarlEnv("MPE_simple_spread_v3", num_envs=2, max_steps=3, seed=0)

        def act(tensordict):
            return tensordict.set(("agent", "action"), torch.full((2, 3), 2))

        film, _ = film_of(env, act, shown=2)
        env.set_seed(3)
        seen = env.rollout(3, act)["next", "agent", "observation"]
        for i, frames in enumerate(film.episodes):
            for frame, observed in zip(frames[1:], seen[i]):
                places = [(s.x, s.y) for s in frame.picture if s.role == "agent"]
                assert torch.allclose(torch.tensor(places), observed[:, 2:4], atol=1e-5)
