"""Runs that start from the parameters of another run, a stored player or an exported folder."""

import json
import re
import shutil

import pytest
import torch
from leagues import player_files, settings_of
from leagues import train as train_league
from runs import assert_equal, assert_same_run, final_state, small_config, table

from torchrl_marl.apps.cli.main import main
from torchrl_marl.envs.make import make_env
from torchrl_marl.errors import CheckpointError, ConfigError, TrustError
from torchrl_marl.learners.adam import moments_of, start_adam
from torchrl_marl.learners.algorithms import ALGORITHMS
from torchrl_marl.learners.build import build_learners
from torchrl_marl.modules.normalization import ObservationNorm, ValueNorm
from torchrl_marl.recipes import load_config, read_config, validate
from torchrl_marl.specs import TeamSpec
from torchrl_marl.training.checkpoint import all_checkpoints, load_checkpoint
from torchrl_marl.training.config import read_run_config
from torchrl_marl.training.pool import networks_of, read_player
from torchrl_marl.training.start_from import (
    Loaded,
    Source,
    init_part_of,
    leaves_of,
    load_parts,
    read_source,
)
from torchrl_marl.training.trainer import iterate, resume, start_training, train

NORMALIZED = {"learner": {"normalize_observations": True}}
ALL = {"actor", "critic", "normalization"}
TOY = {"seed": 1, **NORMALIZED}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A run with checkpoints of 0, 80 and 160 frames."""
    folder = str(tmp_path_factory.mktemp("source") / "run")
    checkpoint = {"every_iterations": 1, "keep": 3}
    config = small_config(folder=folder, total_frames=160, checkpoint=checkpoint, **NORMALIZED)
    return train(config).folder


@pytest.fixture
def config(source, tmp_path):
    """Makes the settings of a run that starts from the source."""

    def make(given=source, init=None, name="run", **overrides):
        options = {"init_from": str(given), "init": init, "folder": str(tmp_path / name)}
        return read_config(small_config(**TOY, **options), overrides)

    return make


def started(config):
    """Start a run without training and close it."""
    training = start_training(config, None)
    try:
        training.begin()
    finally:
        training.close()
    return training


def saved(folder, index=-1):
    """The tensors of learners in a checkpoint, by name."""
    state = load_checkpoint(all_checkpoints(folder)[index])
    found = {name: x for own in state["learners"] for name, x in own.items()}
    return {name: x for name, x in found.items() if isinstance(x, torch.Tensor)}


def extra_state(folder, index=-1):
    """The state of the only learner in a checkpoint, without its tensors."""
    return load_checkpoint(all_checkpoints(folder)[index])["learners"][0]["_extra_state"]


def equal_parts(one, other):
    """The parts whose tensors are all exactly equal."""
    same = {init_part_of(name): True for name in one if init_part_of(name)}
    for name, x in one.items():
        if init_part_of(name):
            same[init_part_of(name)] &= name in other and torch.equal(x, other[name])
    return {part for part, equal in same.items() if equal}


@pytest.mark.parametrize(
    ("init", "parts"),
    [(None, ALL), (["actor"], {"actor"}), (["critic", "normalization"], ALL - {"actor"})],
)
def test_given_parts_are_loaded_exactly_and_others_are_new(source, config, init, parts):
    training = started(config(init=init))
    fresh = started(config(name="fresh", init_from=None, init=None))
    assert equal_parts(saved(training.folder), saved(source)) == parts
    assert equal_parts(saved(training.folder), saved(fresh.folder)) == ALL - parts
    noted = training.run.summary["init_from"]
    assert noted == {"from": f"{source}@160", "frames": 160, "parts": sorted(parts)}


def test_frames_select_the_checkpoint(source, config):
    for index, frames in enumerate((0, 80, 160)):
        found = read_source(f"{source}@{frames}")
        own = {name: x for name, x in found.leaves.items() if init_part_of(name) != "optimizer"}
        assert_equal(
            own, {name: x for name, x in saved(source, index).items() if init_part_of(name)}
        )
        assert (found.frames, found.name) == (frames, f"{source}@{frames}")
    assert read_source(str(source)).name == f"{source}@160"
    listed = "has no checkpoint of 100 frames, expected one of @0, @80, @160"
    with pytest.raises(CheckpointError, match=listed):
        started(config(f"{source}@100"))
    training = started(config(f"{source}@80"))
    assert equal_parts(saved(training.folder), saved(source, 1)) == ALL
    assert equal_parts(saved(training.folder), saved(source)) == set()
    assert read_run_config(training.folder).init_from == f"{source}@80"


def test_loaded_optimizer_keeps_the_new_learning_rate(source, config):
    training = started(config(init=[*sorted(ALL), "optimizer"], learner={"lr": 0.125}))
    states = [extra_state(folder)["optimizer"] for folder in (training.folder, source)]
    assert_equal(states[0]["state"], states[1]["state"])
    assert states[0]["param_groups"][0]["lr"] == 0.125 != states[1]["param_groups"][0]["lr"]


def test_error_names_all_tensors_of_other_shapes(source, config, tmp_path):
    wide = {"learner": {"critic": {"num_cells": [16]}}}
    with pytest.raises(ConfigError) as caught:
        started(config(**wide))
    text = str(caught.value)
    found = re.findall(r"(critics\S+) is (\[[\d, ]*\]) there and (\[[\d, ]*\]) here", text)
    assert [(name.rpartition("network.0.")[2], *shapes) for name, *shapes in found] == [
        ("0.weight", "[8, 24]", "[16, 24]"),
        ("0.bias", "[8]", "[16]"),
        ("2.weight", "[4, 8]", "[4, 16]"),
    ]
    assert "leave critic out with init=[actor,normalization]" in text
    assert not (tmp_path / "run").exists()
    training = started(config(init=["actor", "normalization"], **wide))
    assert equal_parts(saved(training.folder), saved(source)) == {"actor", "normalization"}


def test_unused_normalization_statistics_raise(config):
    named = r"observation_norms.agents.mean is float64 \[6\] there and missing here"
    with pytest.raises(ConfigError, match=named):
        started(config(learner={"normalize_observations": False}))


def test_other_activation_with_equal_shapes_warns(source, config, capsys):
    started(config(learner={"actor": {"activation": "relu"}}))
    said = capsys.readouterr()
    assert f"starts from {source}@160: actor, critic, normalization." in said.out
    words = "this run differ: learner.actor.activation ('tanh' and 'relu'); the loaded networks may"
    assert words in said.err


def kuhn(folder, **settings):
    """Settings of a small run on Kuhn poker, with a league if it is given."""
    league = settings.pop("league", None)
    found = settings_of(folder, league, total_frames=128, **settings)
    return load_config("toy_kuhn_ippo", found if league else {**found, "league": {}})


@pytest.fixture(scope="module")
def league(tmp_path_factory):
    return train_league(tmp_path_factory.mktemp("league") / "run", total_frames=256).folder


def test_run_starts_from_a_stored_player(league, tmp_path, capsys):
    path = player_files(league)[-1]
    training = started(kuhn(tmp_path / "run", init_from=str(path)))
    assert_equal(networks_of(training.policy), read_player(path))
    noted = {"from": str(path), "frames": None, "parts": ["actor"]}
    assert training.run.summary["init_from"] == noted
    said = f"starts from {path}: actor; it holds no critic and no normalization."
    assert said in capsys.readouterr().out
    with pytest.raises(ConfigError, match=r"which holds no critic; use init=\[actor\]"):
        started(kuhn(tmp_path / "other", init_from=str(path), init=["actor", "critic"]))


def test_league_starts_with_the_loaded_policy(league, tmp_path):
    exploited = {"exploiters": 1, "exploited": 0.5}
    training = started(kuhn(tmp_path / "run", league=exploited, init_from=str(league)))
    assert equal_parts(saved(training.folder), saved(league)) >= {"actor", "critic"}
    loaded = networks_of(training.policy)
    assert_equal(read_player(player_files(training.folder)[0]), loaded)
    assert_equal(networks_of(training.league.exploiters[0].policy), loaded)


def test_all_members_start_from_the_source(config):
    init = ["actor", "normalization", "optimizer"]
    population = started(config(init=init, population={"size": 2}))
    for seed, member in zip((1, 2), population.run.folders):
        alone = started(config(name=f"alone{seed}", init=init, seed=seed))
        assert_equal(saved(member, 0), saved(alone.folder, 0))
        ours, theirs = (extra_state(folder, 0) for folder in (member, alone.folder))
        assert_equal(ours["optimizer"]["state"], theirs["optimizer"]["state"])
        state = load_checkpoint(all_checkpoints(member)[0])
        assert state["summary"]["init_from"] == alone.run.summary["init_from"]


def test_target_networks_follow_the_loaded_ones(tmp_path):
    sizes = {"execution": "eager", "total_frames": 160, "frames_per_batch": 80, "threads": 1}
    sizes |= {"env": {"num_envs": 8}, "evaluation": {"episodes": 4}}
    settings = {**sizes, "learner": {"learning_starts": 80}, "logging": {"progress": False}}
    first = load_config("toy_arena_qmix", {**settings, "folder": str(tmp_path / "first")})
    train(first)
    init = [*sorted({"actor", "critic"}), "optimizer"]
    options = {"init_from": str(tmp_path / "first"), "init": init, "seed": 3}
    training = started(read_config(first, {**options, "folder": str(tmp_path / "run")}))
    ours, theirs = saved(training.folder), saved(tmp_path / "first")
    assert equal_parts(ours, theirs) == {"actor", "critic"}
    targets = {name: x for name, x in ours.items() if name.startswith("targets.")}
    assert targets and not all(torch.equal(x, theirs[name]) for name, x in targets.items())
    updates = training.learners[0].updates
    assert_equal([x.data for x in updates.targets], [x.data for x in updates.sources])
    extra = [extra_state(folder) for folder in (training.folder, tmp_path / "first")]
    assert_equal(extra[0]["values"], extra[1]["values"])
    assert extra[0]["replay"] is None and extra[0]["frames"] == 0


@pytest.mark.runs
def test_captured_run_from_a_source_equals_eager(tmp_path):
    options = {"total_frames": 160, "execution": "eager", "folder": str(tmp_path / "first")}
    first = train(small_config("toy_matrix_game_mappo", **options)).folder
    for execution in ("eager", "trace"):
        options |= {"init_from": str(first), "seed": 1, "execution": execution}
        options["folder"] = str(tmp_path / execution)
        train(small_config("toy_matrix_game_mappo", **options))
    eager, trace = tmp_path / "eager", tmp_path / "trace"
    assert table(eager / "metrics.csv") == table(trace / "metrics.csv")
    assert_equal(final_state(eager)["learners"], final_state(trace)["learners"])


def test_resume_does_not_load_the_source_again(source, config, tmp_path):
    options = {"execution": "eager", "total_frames": 320}
    copy = tmp_path / "copy"
    shutil.copytree(source, copy)
    whole = train(config(f"{copy}@80", name="whole", **options))
    for iteration in iterate(config(f"{copy}@80", name="parts", **options)):
        if iteration.number == 2:
            break
    shutil.rmtree(copy)
    resumed = resume(tmp_path / "parts")
    assert_same_run(whole.folder, resumed.folder)
    written = json.loads((resumed.folder / "summary.json").read_text())
    assert written["init_from"] == {"from": f"{copy}@80", "frames": 80, "parts": sorted(ALL)}
    plain = train(config(name="plain", init_from=None, **options))
    with pytest.raises(AssertionError):
        assert_equal(final_state(plain.folder)["learners"], final_state(whole.folder)["learners"])


def test_run_stopped_before_its_first_checkpoint_loads_again(source, config):
    started_run = start_training(config(f"{source}@80"), None)
    started_run.close()
    resumed = resume(started_run.folder, config=read_run_config(started_run.folder))
    assert equal_parts(saved(resumed.folder, 0), saved(source, 1)) == ALL


def test_single_group_may_have_another_name(source, config):
    theirs = read_source(str(source))
    leaves = {name.replace(".agents.", ".rovers."): x for name, x in theirs.leaves.items()}
    training = start_training(config(init_from=None), None)
    found = load_parts(training.learners, theirs._replace(leaves=leaves), None)
    training.begin()
    training.close()
    assert set(found.parts) == ALL and not found.unused
    assert equal_parts(saved(training.folder), saved(source)) == ALL


def test_invalid_sources_raise(source, config, tmp_path):
    with pytest.raises(ConfigError, match="init is given, but init_from is null"):
        validate(config(init_from=None, init=["actor"]))
    with pytest.raises(ConfigError, match="init is empty"):
        validate(config(init=[]))
    with pytest.raises(ConfigError, match=r"init holds 'actors', .* use init=\[actor\]"):
        validate(config(init=["actors"]))
    with pytest.raises(CheckpointError, match="it does not exist"):
        started(config(tmp_path / "none"))
    with pytest.raises(CheckpointError, match="is not a stored player"):
        started(config(source / "config.yaml"))
    copy = tmp_path / "copy"
    shutil.copytree(source, copy)
    (copy / "link").symlink_to("/")
    with pytest.raises(TrustError, match="which leads out of it"):
        started(config(copy))
    (copy / "link").unlink()
    text = (copy / "config.yaml").read_text()
    text = re.sub(r"(\npopulation:.*\n  size:) 1", r"\1 2", text)
    (copy / "config.yaml").write_text(text)
    with pytest.raises(CheckpointError, match="is a population of 2"):
        started(config(copy))


def balance(folder, **overrides):
    settings = {"total_frames": 80, "execution": "eager", "folder": str(folder), **overrides}
    return small_config("vmas_balance_mappo", **settings)


@pytest.mark.runs
def test_start_from_a_run_with_other_env_arguments(tmp_path, capsys):
    pytest.importorskip("vmas")
    first = train(balance(tmp_path / "first")).folder
    given = f"init_from={first}"
    heavy = {"env": {"kwargs": {"package_mass": 10}}, "init_from": str(first), "seed": 5}
    second = train(balance(tmp_path / "second", **heavy)).folder
    assert equal_parts(saved(second, 0), saved(first)) == ALL  # also statistics of returns
    assert equal_parts(saved(second), saved(first)) == set()  # it has learned since
    four = {"env": {"kwargs": {"n_agents": 4}}, "init_from": str(first)}
    with pytest.raises(ConfigError, match=r"critics\S+0.weight is \[8, 48\] there"):
        train(balance(tmp_path / "four", **four))
    third = train(balance(tmp_path / "four", init=["actor"], **four)).folder
    assert equal_parts(saved(third, 0), saved(first)) == {"actor"}
    settings = ["frames_per_batch=80", "env.num_envs=8", "execution=eager", "total_frames=80"]
    settings += [
        "learner.actor.num_cells=[8]",
        "learner.minibatch_size=24",
        "evaluation.episodes=4",
    ]
    folder = f"folder={tmp_path}/cli"
    command = ["train", "vmas_balance_mappo", given, "init=actor", folder, *settings]
    assert main(command) == 0
    assert f"starts from {first}@80: actor" in capsys.readouterr().out
    assert equal_parts(saved(tmp_path / "cli", 0), saved(first)) == {"actor"}


@pytest.mark.clients
@pytest.mark.parametrize("sharing", ["full", "none"])
def test_run_starts_from_actors_of_an_exported_folder(tmp_path, sharing):
    for package in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(package)
    learner = {"actor": {"sharing": sharing}}
    first = train(small_config(folder=str(tmp_path / "first"), total_frames=80, learner=learner))
    first.export()
    options = {"init_from": str(first.folder / "export"), "seed": 1, "learner": learner}
    training = started(small_config(folder=str(tmp_path / "run"), **options))
    assert equal_parts(saved(training.folder), saved(first.folder)) == {"actor"}
    options["learner"] = {"actor": {"sharing": sharing, "num_cells": [16]}}
    named = r"agent_0.act.body\S+ is \[8, 6\] there and \[16, 6\].*from the run that was exported"
    with pytest.raises(ConfigError, match=named):
        started(small_config(folder=str(tmp_path / "other"), **options))


def learners_of(algorithm, seed):
    """Learners of an algorithm on a toy, with random moments in every optimizer."""
    data = {"folder": "data"} if algorithm in ("bc", "td3_bc", "iql_offline") else {}
    settings = {"learner": {"algorithm": algorithm}, "data": data}
    config = load_config("toy_matrix_game_mappo", settings)
    team = TeamSpec.from_env(make_env(config.env, seed=0))
    torch.manual_seed(seed)
    found = build_learners(team, config.learner)
    for optimizer in (x for learner in found for x in learner.optimizer_of.values()):
        start_adam(optimizer, optimizer.parameters)
        for x in (x for own in moments_of(optimizer, optimizer.parameters) for x in own):
            x.add_(torch.rand_like(x))
    return found


@pytest.mark.parametrize("algorithm", sorted(set(ALGORITHMS.names()) - {"random"}))
def test_all_learned_parts_of_every_algorithm_are_loaded(algorithm):
    theirs, ours = (learners_of(algorithm, seed) for seed in (0, 1))
    (learner,) = ours
    norms = {
        f"{path}.{name}"
        for path, module in learner.named_modules()
        if isinstance(module, (ObservationNorm, ValueNorm))
        for name in module.state_dict()
    }
    names = {name for name, x in learner.state_dict().items() if isinstance(x, torch.Tensor)}
    assert {name for name in names if init_part_of(name) == "normalization"} == norms & names
    leaves = {name: x.clone() for name, x in leaves_of([theirs[0].state_dict()]).items()}
    held = {init_part_of(name) for name in leaves}
    found = load_parts(ours, Source("theirs", "run", leaves), sorted(held))
    assert set(found.parts) == held >= {"actor", "optimizer"} and not found.unused
    assert_equal(leaves_of([learner.state_dict()]), leaves)
    for pair in zip(learner.optimizer_of.values(), theirs[0].optimizer_of.values()):
        assert_equal(*(moments_of(own, own.parameters) for own in pair))
        assert_equal(*([x.data for x in own.parameters] for own in pair))


@pytest.mark.parametrize(
    ("theirs", "ours", "init", "found"),
    [
        ("ippo", "mappo", ["actor"], Loaded(["actor"], [], [])),
        ("qmix", "vdn", None, Loaded(["actor"], [], ["mixers.agents"])),
        ("vdn", "qmix", None, Loaded(["actor"], ["critic"], [])),
    ],
)
def test_actors_are_loaded_across_algorithms(theirs, ours, init, found):
    (one,), (other,) = learners_of(theirs, 0), learners_of(ours, 1)
    source = Source("theirs", "run", leaves_of([one.state_dict()]))
    assert load_parts([other], source, init) == found
    actors = ([x.data for x in own.actors.parameters()] for own in (one, other))
    assert_equal(*actors)
