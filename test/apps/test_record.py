"""Recording episodes, and learning from the datasets."""

import json

import pytest
import torch

import torchrl_marl
from torchrl_marl.apps.cli.main import main
from torchrl_marl.apps.record import play_episodes, record
from torchrl_marl.collectors.dataset import Dataset
from torchrl_marl.collectors.expert import ExpertLabels
from torchrl_marl.envs import make_env
from torchrl_marl.envs.reward_scale import scaled
from torchrl_marl.envs.toy import Arena
from torchrl_marl.errors import ConfigError, DatasetError
from torchrl_marl.specs import TeamSpec
from torchrl_marl.training.trainer import start_training

BALANCE = {"max_steps": 10, "num_envs": 4, "kwargs": {"n_agents": 3}}
SMALL = {
    "threads": 1,
    "execution": "eager",
    "total_frames": 160,
    "frames_per_batch": 40,
    "env": BALANCE,
    "evaluation": {"episodes": 4, "both": False},
    "logging": {"progress": False},
}
LEARNER = {"algorithm": "bc", "minibatch_size": 16, "actor": {"num_cells": [8]}}
PLAYED = {"env.max_steps": 10, "env.kwargs.n_agents": 3}


def small(folder, recorded, **more):
    learner = {**LEARNER, **more.pop("learner", {})}
    return {**SMALL, "folder": str(folder), "data": recorded, "learner": learner, **more}


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    out = tmp_path_factory.mktemp("recorded") / "data"
    return record("heuristic", out, "vmas_balance_mappo", episodes=9, settings=PLAYED)


class TestRecord:
    def test_recorded_episodes_are_complete(self, dataset):
        assert dataset.n_episodes == 9 and int(dataset.lengths.sum()) == len(dataset)
        assert int(dataset.lengths.max()) <= 10
        flags = dataset.steps["next", "terminated"] | dataset.steps["next", "truncated"]
        assert torch.equal(flags, dataset.steps["next", "done"])
        seen, after = (dataset.steps[key]["agents", "observation"] for key in ((), "next"))
        inside = ~dataset.steps["next", "done"][:-1, 0]
        assert torch.equal(seen[1:][inside], after[:-1][inside])

    def test_returns_are_sums_of_rewards(self, dataset):
        reward = dataset.steps["next", "agents", "reward"].double().mean((1, 2))
        found = [part.sum().item() for part in reward.split(dataset.lengths.tolist())]
        returns = dataset.about["returns"]
        assert returns["mean"] == pytest.approx(sum(found) / 9)
        assert (returns["min"], returns["max"]) == pytest.approx((min(found), max(found)))

    def test_rewards_are_those_of_evaluations(self):
        """An environment with four times its rewards in training, and the same one without."""
        own, shaped = (Arena(3, n_agents=2, years=2, seed=1) for _ in range(2))
        found = []
        for env in (own, scaled(shaped, 4.0)):
            torch.manual_seed(0)
            steps = play_episodes(env, env.rand_action, 5)
            found.append(steps["next", "agents", "reward"])
        assert torch.equal(*found) and bool(found[0].any())

    def test_unborn_agents_do_not_count_in_returns(self, tmp_path):
        """The team's reward is the mean over born, living agents, as in every other report."""
        settings = {"env.kwargs.late_spawn": 3, "env.kwargs.years": 6}
        dataset = record("random", tmp_path / "x", "toy_arena_mappo", episodes=5, settings=settings)
        returns = []
        for start, length in zip(dataset.starts.tolist(), dataset.lengths.tolist()):
            total, born = 0.0, [False] * 4
            for step in dataset.steps[start : start + length].unbind(0):
                born = [was or acts for was, acts in zip(born, step["agents", "mask"].tolist())]
                gone = step["agents", "done"].flatten().tolist()
                rewards = step["next", "agents", "reward"].flatten().tolist()
                earned = [r for r, b, d in zip(rewards, born, gone) if b and not d]
                total += sum(earned) / max(1, len(earned))
            returns.append(total)
        assert dataset.about["returns"]["mean"] == pytest.approx(sum(returns) / 5)

    def test_recorded_actions_are_those_of_the_heuristic(self, dataset):
        env = make_env("vmas/balance", num_envs=2, n_agents=3)
        acted = env.heuristic()(dataset.steps.select(("agents", "observation")).clone())
        torch.testing.assert_close(acted["agents", "action"], dataset.steps["agents", "action"])

    def test_seed_determines_the_dataset(self, dataset, tmp_path):
        how = {"episodes": 9, "settings": PLAYED}
        before = torch.get_rng_state()
        again = record("heuristic", tmp_path / "again", "vmas_balance_mappo", **how)
        other = record("heuristic", tmp_path / "other", "vmas_balance_mappo", seed=1, **how)
        assert torch.equal(torch.get_rng_state(), before)
        assert (again.steps == dataset.steps).all()
        assert not torch.equal(
            again.steps["agents", "observation"][:5], other.steps["agents", "observation"][:5]
        )

    def test_number_of_episodes_is_exact(self, tmp_path):
        """Every env records equally many; otherwise short episodes would be overrepresented."""
        found = record("random", tmp_path / "data", "toy_arena_mappo", episodes=250)
        alone = record("random", tmp_path / "few", "toy_arena_mappo", episodes=100)
        assert found.n_episodes == 250 and alone.n_episodes == 100

    @pytest.mark.parametrize(
        ("player", "recipe", "message"),
        [
            ("heuristic", None, "record heuristic needs a recipe that names the environment"),
            ("heuristic", "toy_arena_mappo", "has no heuristic that runs here"),
            ("nobody", None, "nobody"),
            ("heuristc", "toy_arena_mappo", "'heuristc' with recipe 'toy_arena_mappo', expected"),
        ],
    )
    def test_invalid_arguments_raise_and_write_nothing(self, player, recipe, message, tmp_path):
        with pytest.raises(torchrl_marl.errors.UserError, match=message):
            record(player, tmp_path / "data", recipe, episodes=2)
        assert not list(tmp_path.iterdir())

    @pytest.mark.parametrize(
        ("key", "message"),
        [
            ("learner.lr", "learner.lr is given, expected settings of the environment"),
            ("env.num_envs", "env.num_envs is given, but the number of episodes decides"),
        ],
    )
    def test_settings_without_effect_are_refused(self, key, message, tmp_path):
        with pytest.raises(ConfigError, match=message):
            record("random", tmp_path / "data", "toy_arena_mappo", settings={key: 1})


class TestLearning:
    def test_record_clone_and_train_from_the_command_line(self, tmp_path, monkeypatch, capsys):
        """Records a heuristic, clones it, and starts MAPPO from the clone."""
        monkeypatch.chdir(tmp_path)
        short = ["threads=1", "evaluation.both=false", "evaluation.episodes=4"]
        short += ["env.num_envs=4", "env.max_steps=10", "logging.progress=false"]
        given = ["vmas_balance_mappo", "env.max_steps=10", "--episodes", "8", "--out", "data"]
        assert main(["record", "heuristic", *given]) == 0
        assert "episodes  8" in capsys.readouterr().out
        frames = ["total_frames=160", "frames_per_batch=80"]
        clone = ["vmas_balance_bc", "data.expert=null", "data.folder=data", "folder=bc"]
        assert main(["train", *clone, *short, *frames, "learner.minibatch_size=16"]) == 0
        start = ["vmas_balance_mappo", "init_from=bc", "init=[actor]", "folder=mappo"]
        start += ["learner.actor.num_cells=[128,128]", "learner.minibatch_size=80"]
        assert main(["train", *start, *short, *frames]) == 0
        before = json.loads((tmp_path / "mappo" / "summary.json").read_text())["return_before"]
        after = json.loads((tmp_path / "bc" / "summary.json").read_text())["return_after"]
        assert before == after
        assert main(["record", "bc", "--episodes", "3", "--out", "played"]) == 0
        assert Dataset.open("played").n_episodes == 3

    def test_run_resumes_exactly(self, dataset, tmp_path):
        parameters = []
        for name, halves in (("whole", (160,)), ("halves", (80, 160))):
            config = small(tmp_path / name, {"folder": str(dataset.folder)})
            run = torchrl_marl.train("vmas_balance_mappo", **{**config, "total_frames": halves[0]})
            if len(halves) > 1:
                run = torchrl_marl.resume(tmp_path / name, total_frames=halves[1])
            parameters.append(list(run.policy.parameters()))
        for x, y in zip(*parameters, strict=True):
            assert torch.equal(x, y)

    @pytest.mark.parametrize("name", ["folder", "expert"])
    def test_run_resumes_from_another_working_directory(self, dataset, name, tmp_path, monkeypatch):
        """Relative paths refer to the working directory in which the run began."""
        teacher = small(tmp_path / "teacher", {"folder": str(dataset.folder)})
        torchrl_marl.train("vmas_balance_mappo", **teacher)
        place = dataset.folder if name == "folder" else tmp_path / "teacher"
        monkeypatch.chdir(place.parent)
        config = small(tmp_path / "run", {name: place.name})
        torchrl_marl.train("vmas_balance_mappo", **{**config, "total_frames": 80})
        monkeypatch.chdir("/")
        assert torchrl_marl.resume(tmp_path / "run", total_frames=160).frames == 160

    @pytest.mark.parametrize("algorithm", ["bc", "td3_bc", "matd3", "masac"])
    def test_learners_with_a_replay_buffer(self, dataset, algorithm, tmp_path):
        own = {"algorithm": algorithm, "learning_starts": 40}
        config = small(tmp_path / "run", {"folder": str(dataset.folder)}, learner=own)
        run = torchrl_marl.train("vmas_balance_mappo", **config)
        assert run.frames == 160 and run.summary["return_after"] is not None


class TestDAgger:
    def test_expert_labels_are_actions_of_the_heuristic(self):
        env = make_env("vmas/balance", num_envs=3, n_agents=3)
        batch = env.rollout(4)
        label = ExpertLabels(env.heuristic(), TeamSpec.from_env(env))
        found = label(batch.clone())
        for t in range(4):
            one = env.heuristic()(batch[:, t].select(("agents", "observation")).clone())
            torch.testing.assert_close(found[:, t]["agents", "action"], one["agents", "action"])
        others = [key for key in batch.keys(True, True) if key != ("agents", "action")]
        assert (found.select(*others) == batch.select(*others)).all()

    def test_policy_acts_and_expert_actions_are_stored(self, tmp_path):
        config = small(tmp_path / "run", {"expert": "heuristic"})
        training = start_training(
            torchrl_marl.recipes.load_config("vmas_balance_mappo", config), None
        )
        batch = training.step().batch
        stored = training.learners[0].replay.ring.leaf(("agents", "action"))[:10]
        env = make_env("vmas/balance", num_envs=4, n_agents=3)
        expected = env.heuristic()(batch.select(("agents", "observation")).reshape(-1))
        expected = expected["agents", "action"].reshape(4, 10, 3, 2).transpose(0, 1)
        torch.testing.assert_close(stored, expected)
        training.close()

    def test_run_folder_as_expert(self, dataset, tmp_path):
        teacher = small(tmp_path / "teacher", {"folder": str(dataset.folder)})
        torchrl_marl.train("vmas_balance_mappo", **teacher)
        pupil = small(tmp_path / "pupil", {"expert": str(tmp_path / "teacher")})
        assert torchrl_marl.train("vmas_balance_mappo", **pupil).frames == 160

    def test_expert_of_another_environment_is_refused(self, dataset, tmp_path):
        teacher = small(tmp_path / "teacher", {"folder": str(dataset.folder)})
        torchrl_marl.train("vmas_balance_mappo", **teacher)
        env = {**BALANCE, "kwargs": {"n_agents": 4}}
        pupil = small(tmp_path / "pupil", {"expert": str(tmp_path / "teacher")}, env=env)
        with pytest.raises(ConfigError, match="does not fit the environment .*choose a run of"):
            torchrl_marl.train("vmas_balance_mappo", **pupil)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"learner": {"algorithm": "mappo"}}, "algorithm is 'mappo', which learns from its own"),
        ({"data": {"folder": "x", "expert": "heuristic"}}, "folder and data.expert are both given"),
        ({"data": {}}, "algorithm is 'bc', which copies actions, but there are none"),
        (
            {"data": {}, "learner": {"algorithm": "td3_bc"}},
            "algorithm is 'td3_bc', which learns from recorded steps, but there are none",
        ),
        ({"learner": {"actor": {"memory": "gru"}}}, "memory.kind is 'gru', but a dataset has no"),
        ({"population": {"size": 2}}, "population.size is 2, but a dataset is read by one"),
        (
            {"data": {"expert": "heuristic"}, "learner": {"algorithm": "masac"}},
            "algorithm is 'masac', but an expert is given, whose actions only bc copies",
        ),
        ({"data": {"folder": "nowhere"}}, "nowhere' has no dataset"),
        ({"data": {"expert": "heuristik"}}, "heuristik', expected heuristic, or the folder of"),
        ({"env": {**BALANCE, "kwargs": {"n_agents": 4}}}, "has 4 agents; record it in this"),
    ],
)
def test_invalid_data_settings_raise(dataset, change, message, tmp_path):
    config = small(tmp_path / "run", {"folder": str(dataset.folder)}, **change)
    with pytest.raises((ConfigError, DatasetError), match=message):
        torchrl_marl.train("vmas_balance_mappo", **config)
    assert not (tmp_path / "run" / "metrics.csv").exists()
