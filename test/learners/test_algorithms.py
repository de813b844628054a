"""The registry of algorithms: a registered custom algorithm is trained, listed and saved."""

import dataclasses
import types
from dataclasses import dataclass

import pytest
import yaml
from algorithms import algorithms_with

from torchrl_marl.apps.cli.main import main
from torchrl_marl.errors import ConfigError
from torchrl_marl.learners.algorithms import ALGORITHMS, Algorithm, register_algorithm
from torchrl_marl.learners.config import LearnerConfig, OnPolicyConfig, RandomConfig
from torchrl_marl.learners.fixed_policy import FixedPolicy
from torchrl_marl.recipes import load_config, read_config, save_config
from torchrl_marl.settings import Positive, override, read_yaml
from torchrl_marl.training.config import read_run_config

TOY = "toy_arena_mappo"


@dataclass(frozen=True)
class LazyConfig(LearnerConfig):
    """Settings of a custom algorithm."""

    algorithm: str = "lazy"
    """Learning algorithm of the agents."""
    sloth: Positive = 0.5
    """How little is done."""


class LazyPlayers(FixedPolicy):
    """A learner that does not learn."""


@pytest.fixture
def lazy():
    register_algorithm(
        "lazy", "rests", config=f"{__name__}:LazyConfig", learner=f"{__name__}:LazyPlayers"
    )
    yield
    ALGORITHMS.remove("lazy")


def refusal(*texts):
    with pytest.raises(ConfigError) as error:
        load_config(TOY, texts)
    return str(error.value)


class TestOnesOwn:
    def test_config_of_custom_algorithm_is_saved_and_loaded(self, lazy, tmp_path):
        config = load_config(TOY, ["learner=lazy", "learner.sloth=2"])
        assert config.learner == LazyConfig("lazy", 2.0)
        save_config(config, tmp_path / "config.yaml")
        assert "sloth: 2.0  # How little is done." in (tmp_path / "config.yaml").read_text()
        assert "lr" not in read_yaml(tmp_path / "config.yaml")["learner"]
        assert load_config(tmp_path / "config.yaml") == config

    def test_options_of_other_algorithms_raise(self, lazy):
        assert refusal("learner=lazy", "learner.lr=1") == (
            "learner.lr is 1, which is read only where learner.algorithm is "
            f"{algorithms_with('lr')}; leave learner.lr out."
        )
        assert "is read only where learner.algorithm is lazy" in refusal("learner.sloth=1")
        assert refusal("learner=lazy", "learner.sloth=0").startswith("learner.sloth is 0.0, exp")
        assert "'learner.sloth'" in refusal("slooth=1")

    def test_custom_algorithm_is_listed(self, lazy, capsys):
        assert main(["list", "algorithms"]) == 0
        rows = [line.split() for line in capsys.readouterr().out.splitlines()]
        assert ["lazy", "rests"] in rows

    def test_group_with_custom_algorithm_trains_beside_others(self, lazy, tmp_path):
        import torchrl_marl

        run = torchrl_marl.train(
            "toy_speaker_listener_mappo",
            **{"groups.speaker": "lazy"},
            env={"num_envs": 4},
            frames_per_batch=40,
            total_frames=40,
            learner={"minibatch_size": 20},
            evaluation={"episodes": 4},
            logging={"progress": False},
            folder=str(tmp_path / "run"),
        )
        assert run.summary["frames"] == 40
        assert read_run_config(run.folder).groups == {"speaker": {"algorithm": "lazy"}}

    def test_registering_a_name_twice_raises(self, lazy):
        with pytest.raises(ConfigError, match="'lazy' is registered already"):
            register_algorithm("lazy", "other", config="a:B", learner="a:C")

    def test_error_names_missing_config_module(self):
        register_algorithm("lost", "?", config="no_such_module:X", learner="no_such_module:Y")
        try:
            assert "needs no_such_module:X, which cannot be imported" in refusal("learner=lost")
        finally:
            ALGORITHMS.remove("lost")

    def test_algorithm_that_cannot_be_imported_does_not_stop_others(self):
        register_algorithm("lost", "?", config="no_such_module:X", learner="no_such_module:Y")
        try:
            assert load_config(TOY, ["learner=ippo"]).learner.algorithm == "ippo"
            assert "lost" in refusal("learner=lots")
        finally:
            ALGORITHMS.remove("lost")

    def test_settings_that_are_no_learner_config_raise(self):
        place = f"{__name__}:NotSettings"
        register_algorithm("odd", "?", config=place, learner=place)
        try:
            assert "expected a dataclass derived from" in refusal("learner=odd")
        finally:
            ALGORITHMS.remove("odd")


class NotSettings:
    """A class that is no LearnerConfig."""


RECORD = Algorithm("rests", f"{__name__}:LazyConfig", f"{__name__}:LazyPlayers")


class TestEntryPoints:
    @pytest.fixture
    def installed(self, monkeypatch):
        def install(value):
            def points(group):
                point = types.SimpleNamespace(name="lazy", value=value)
                return [point] if group == "torchrl_marl.algorithms" else []

            monkeypatch.setattr("torchrl_marl.settings.registry.entry_points", points)

        return install

    def test_algorithm_of_entry_point_is_available(self, installed):
        installed(f"{__name__}:RECORD")
        assert ALGORITHMS.words()["lazy"] == "rests"
        assert load_config(TOY, ["learner=lazy"]).learner == LazyConfig()

    def test_broken_entry_point_does_not_stop_other_algorithms(self, installed):
        installed("no_such_module:RECORD")
        assert load_config(TOY, ["learner=ippo"]).learner.algorithm == "ippo"
        assert "cannot be imported" in ALGORITHMS.words()["lazy"]

    def test_broken_entry_point_is_imported_once(self, installed, tmp_path, monkeypatch):
        code = (
            "from pathlib import Path\nPath(__file__).with_suffix('.txt').open('a').write('x')\n1/0"
        )
        (tmp_path / "broken_algorithm.py").write_text(code)
        monkeypatch.syspath_prepend(tmp_path)
        installed("broken_algorithm:RECORD")
        load_config(TOY)
        for _ in range(2):
            assert "cannot be imported (ZeroDivisionError" in refusal("learner=lazy")
        assert (tmp_path / "broken_algorithm.txt").read_text() == "x"

    def test_entry_point_that_is_no_algorithm_raises(self, installed):
        installed(f"{__name__}:LazyConfig")
        assert "expected a torchrl_marl.learners.algorithms.Algorithm" in refusal("learner=lazy")


class TestFoldersOfBefore:
    """Runs of an old version, in which all learners had the settings of MAPPO."""

    @pytest.fixture
    def folder(self, tmp_path):
        def write(**learner):
            settings = dataclasses.asdict(load_config(TOY))
            settings["learner"] = dataclasses.asdict(OnPolicyConfig(**learner))
            (tmp_path / "config.yaml").write_text(yaml.safe_dump(settings))
            return tmp_path

        return write

    def test_default_settings_of_another_algorithm_are_ignored(self, folder):
        path = folder(algorithm="random")
        assert read_run_config(path).learner == RandomConfig()
        assert load_config(path / "config.yaml").learner == RandomConfig()

    def test_settings_that_were_never_read_are_ignored_on_resume(self, folder):
        path = folder(algorithm="random", lr=0.25)
        assert read_run_config(path).learner == RandomConfig()
        with pytest.raises(ConfigError, match=r"learner\.lr is 0\.25, which is read only where"):
            load_config(path / "config.yaml")  # as a recipe for a new run


def test_learner_settings_apply_to_groups_that_learn():
    config = load_config(
        TOY, ["learner=random", "learner.lr=0.25", "groups.agents.algorithm=mappo"]
    )
    assert config.learner == RandomConfig()
    learner = override(config, "groups", "agents")
    assert learner == dataclasses.replace(load_config(TOY).learner, lr=0.25)


def test_algorithm_name_alone_selects_it():
    assert read_config(TOY, ["learner=ippo"]).learner.algorithm == "ippo"
    assert read_config(TOY, ["learner=ippo", "learner.lr=1e-3"]).learner.lr == 1e-3
    assert read_config(TOY, ["groups.agents=random"]).groups == {"agents": {"algorithm": "random"}}
    assert read_config(TOY, ["env=jaxmarl"]).env.library == "jaxmarl"
