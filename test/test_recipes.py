"""Every recipe is complete, loads, and runs one iteration."""

import math
import re

import pytest

import torchrl_marl
from torchrl_marl.recipes import load_config, read_config, recipe_names
from torchrl_marl.settings import flatten, read_yaml, settings_of
from torchrl_marl.training.config import TrainConfig

EXPECTED = {
    *(
        f"vmas_{scenario}_{algorithm}"
        for scenario in ("balance", "navigation", "transport", "simple_spread")
        for algorithm in ("mappo", "ippo")
    ),
    "vmas_balance_mappo_discrete",
    *(f"vmas_{scenario}_mappo" for scenario in ("simple_tag", "simple_world_comm", "football")),
    *(f"toy_{world}_mappo" for world in ("arena", "matrix_game", "speaker_listener")),
    "toy_arena_mappo_kinds",
    *(
        f"pettingzoo_{world}_{algorithm}"
        for world in ("simple_speaker_listener", "simple_spread")
        for algorithm in ("mappo", "ippo")
    ),
    "pettingzoo_ant_ippo",
    "pettingzoo_connect_four_ippo",
    *(f"jaxmarl_{world}_mappo" for world in ("smax_3m", "smax_2s3z", "simple_spread")),
    "jaxmarl_overcooked_cramped_room_ippo",
}
FREE = ("env.kwargs", "env.group_map", "groups")
# What some ways of sharing need, and share_params, which is another word for two of them.
DETAILS = {
    f"learner.{network}.{key}"
    for network in ("actor", "critic")
    for key in (
        *("sharing_index", "agent_id", "agent_id_size", "mask_ratio", "mask_seed"),
        *("n_clusters", "clustering_frames", "share_params"),
    )
}


def recipe_file(name):
    from torchrl_marl import recipes

    return next(recipes._FOLDER.glob(f"{name}.yaml"))


def needs(name):
    library = read_config(name).env.library
    if library == "vmas":
        pytest.importorskip("vmas")
    if library == "pettingzoo":
        package = read_config(name).env.name.partition("/")[0]
        pytest.importorskip("pettingzoo.classic" if package == "classic" else package)
    if library == "jaxmarl":
        pytest.importorskip("jaxmarl")
    if library == "isaaclab":
        pytest.skip("needs Isaac Sim; test/envs/test_isaaclab.py trains it on stand-ins")


def test_the_recipes_that_are_promised_are_there():
    assert set(recipe_names()) >= EXPECTED


@pytest.mark.parametrize("name", recipe_names())
def test_recipe_spells_out_every_setting(name):
    written = read_yaml(recipe_file(name))
    keys = {next((free for free in FREE if key.startswith(free)), key) for key in flatten(written)}
    assert keys | DETAILS == set(settings_of(TrainConfig)) | DETAILS
    assert written["recipe"] == name


@pytest.mark.parametrize("name", recipe_names())
def test_recipe_loads_and_its_name_says_what_it_is(name):
    needs(name)
    config = load_config(name)
    library, _, rest = name.partition("_")
    assert config.env.library == library
    world = config.env.name.rpartition("/")[2].lower()
    world = "smax" if world.endswith("smax") else world.removeprefix("mpe_")
    assert rest.startswith(re.sub(r"_v\d+$", "", world))
    assert config.learner.algorithm in rest.split("_")
    if library in ("vmas", "toy"):
        assert config.env.continuous_actions != (rest.endswith("discrete") or library == "toy")
    assert config.seed == 0
    assert config.device == "cpu"
    assert config.folder is None
    assert config.frames_per_batch % config.learner.minibatch_size == 0


@pytest.mark.parametrize("name", recipe_names())
def test_recipe_runs_one_iteration(name, tmp_path):
    needs(name)
    run = torchrl_marl.train(
        name,
        env={"num_envs": 4, "max_steps": 5, "workers": 0},
        frames_per_batch=40,
        total_frames=40,
        learner={"minibatch_size": 20, "num_epochs": 2},
        evaluation={"episodes": 4, "every_frames": None, "gif": False},
        logging={"progress": False},
        folder=str(tmp_path / "run"),
    )
    assert run.folder == tmp_path / "run"
    assert run.summary["frames"] == 40
    for key in ("return_before", "return_after", "return_random"):
        assert math.isfinite(run.summary[key]), key
    header, *rows = (run.folder / "metrics.csv").read_text().splitlines()
    assert header.startswith("iteration,frames,agent_frames,seconds,frames_per_second")
    assert len(rows) == 1
    assert load_config(run.folder / "config.yaml").recipe == name
