"""Every recipe has no default values, keeps its meaning, loads, and runs one iteration."""

import contextlib
import functools
import json
import math
import re
import socket
import sys
from pathlib import Path

import pytest
import yaml

import torchrl_marl
from torchrl_marl.errors import ConfigError
from torchrl_marl.learners import OnPolicyConfig, ParallelQConfig
from torchrl_marl.recipes import load_config, read_config, recipe_names
from torchrl_marl.settings import flatten, override, settings_of
from torchrl_marl.training.config import TrainConfig

EXPECTED = {
    *(
        f"vmas_{scenario}_{algorithm}"
        for scenario in ("balance", "navigation", "transport", "simple_spread")
        for algorithm in ("mappo", "ippo")
    ),
    "vmas_balance_mappo_stages",
    *("vmas_balance_mappo_discrete", "vmas_navigation_mappo_randomized"),
    *("vmas_balance_mappo_population", "toy_speaker_listener_mappo_pbt"),
    "toy_arena_qmix_population",
    *(f"vmas_{scenario}_mappo" for scenario in ("simple_tag", "simple_world_comm", "football")),
    *(f"toy_{world}_mappo" for world in ("arena", "matrix_game", "speaker_listener")),
    *(f"toy_{world}_mappo" for world in ("levers", "traffic_junction")),
    *("toy_echo_rmappo_talk", "toy_predator_prey_rmappo", "pettingzoo_simple_reference_mappo"),
    *("toy_arena_mappo_kinds", "toy_arena_mappo_hybrid"),
    *(
        f"pettingzoo_{world}_{algorithm}"
        for world in ("simple_speaker_listener", "simple_spread")
        for algorithm in ("mappo", "ippo")
    ),
    *("toy_echo_rmappo", "toy_echo_rqmix", "toy_echo_rmaddpg", "vmas_balance_rmappo"),
    *(
        "toy_kuhn_ippo",
        "toy_leduc_mappo",
        "toy_matrix_game_happo",
        "toy_zero_sum_ippo_psro",
        "toy_matching_levers_mappo",
        "toy_matching_levers_ippo_other_play",
    ),
    "vmas_balance_matd3",
    *("vmas_navigation_maddpg_bicnet", "toy_levers_mappo_bicnet"),
    *("vmas_balance_masac", "vmas_balance_bc"),
    *(f"vmas_navigation_{algorithm}" for algorithm in ("maddpg", "matd3", "masac")),
    *(f"vmas_simple_tag_mappo_{word}" for word in ("maddpg", "masac", "league")),
    *(f"pettingzoo_simple_speaker_listener_{algorithm}" for algorithm in ("maddpg", "matd3")),
    "pettingzoo_ant_matd3",
    *("mujoco_ant_mappo", "mujoco_ant_matd3", "mujoco_halfcheetah_masac"),
    "pettingzoo_foraging_mappo",
    "mjlab_formation_mappo",
    *("foraging_lbf_15x15_3p_5f_mappo", "foraging_rware_tiny_4ag_mappo"),
    "isaaclab_handover_mappo",
    "isaaclab_pendulum_mappo",
    "pettingzoo_ant_ippo",
    *("pettingzoo_connect_four_ippo", "pettingzoo_connect_four_ippo_league"),
    *(f"jaxmarl_{world}_mappo" for world in ("smax_3m", "smax_2s3z", "simple_spread")),
    *(f"jaxmarl_{world}_pqn" for world in ("smax_3m", "smax_2s3z", "simple_spread")),
    "vmas_simple_spread_pqn",
    *("jaxmarl_overcooked_cramped_room_ippo", "jaxmarl_switch_riddle_rpqn"),
    "jaxmarl_smax_3m_rmappo",
    *("external_meet_mappo", "external_meet_mappo_iql"),
}
GOLDEN = Path(__file__).with_name("recipes.json")
VALUES = {"iql", "vdn", "qmix", "pqn"}  # of discrete actions
WRITE = "python test/test_recipes.py --write"


@functools.cache
def effective():
    """Every recipe -> section -> every setting in it with its value."""
    found = {}
    for name in recipe_names():
        sections = found[name] = {}
        for key, setting in settings_of(read_config(name)).items():
            section, _, leaf = key.rpartition(".")
            sections.setdefault(section, {})[leaf] = setting.default
    return found


def golden_text(recipes):
    """One line per section, so that diffs are readable."""
    blocks = []
    for name, sections in recipes.items():
        lines = [f"    {json.dumps(key)}: {json.dumps(value)}" for key, value in sections.items()]
        blocks.append(f"  {json.dumps(name)}: {{\n" + ",\n".join(lines) + "\n  }")
    return "{\n" + ",\n".join(blocks) + "\n}\n"


def recipe_text(name):
    return (Path(torchrl_marl.__file__).parent / "configs" / f"{name}.yaml").read_text()


def needs(name):
    library = read_config(name).env.library
    if library == "vmas":
        pytest.importorskip("vmas")
    if library == "pettingzoo":
        package = read_config(name).env.name.partition("/")[0]
        pytest.importorskip("pettingzoo.classic" if package == "classic" else package)
    if library == "mujoco":
        pytest.importorskip("gymnasium_robotics")
    if library == "jaxmarl":
        pytest.importorskip("jaxmarl")
    if library == "external":
        pytest.importorskip("msgpack")
    if library == "mjlab":
        pytest.skip("needs mjlab; test/envs/test_mjlab.py trains its recipe")
    if library == "isaaclab":
        pytest.skip("needs Isaac Lab; test/envs/test_isaaclab*.py train its recipes")


def test_expected_recipes_exist():
    assert set(recipe_names()) >= EXPECTED


@pytest.mark.parametrize("name", recipe_names())
def test_effective_settings_of_a_recipe_are_unchanged(name):
    """Compares all settings of a recipe, defaults included, with the stored ones."""
    kept = json.loads(GOLDEN.read_text())
    now = json.loads(json.dumps(effective()[name]))
    assert now == kept.get(name), f"if this change is meant, write it down: {WRITE}"


def test_stored_settings_cover_all_recipes():
    assert list(json.loads(GOLDEN.read_text())) == recipe_names(), f"write it down: {WRITE}"


@pytest.mark.parametrize("name", recipe_names())
def test_recipe_has_no_default_values_and_a_comment(name):
    own = settings_of(type(read_config(name).learner))
    known = {f"learner.{key}": setting for key, setting in own.items()}
    known = settings_of(TrainConfig) | known
    known["learner.algorithm"] = settings_of(TrainConfig)["learner.algorithm"]
    text = recipe_text(name)
    written = flatten(yaml.safe_load(text), stop=known)
    same = [key for key, value in written.items() if value == known[key].default]
    assert same == [], "these are the defaults: leave them out"
    assert "recipe" not in written  # the file name is the name
    comments = [line for line in text.splitlines() if line.startswith("# ")]
    assert sum(map(len, comments)) > 50
    assert 5 <= len(text.splitlines()) - len(comments) <= 25


@pytest.mark.parametrize("name", recipe_names())
def test_recipe_loads_and_matches_its_name(name):
    needs(name)
    config = load_config(name)
    library, _, rest = name.partition("_")
    assert config.env.library == library
    world = config.env.name.rpartition("/")[2].lower()
    world = "smax" if world.endswith("smax") else world.removeprefix("mpe_")
    world = "foraging" if world.startswith("foraging-") else world.replace("-", "_")
    assert rest.startswith(re.sub(r"_v\d+$", "", world))
    words = rest.split("_")
    remembers = getattr(config.learner, "remembers", False)
    assert f"{'r' if remembers else ''}{config.learner.algorithm}" in words
    if library in ("vmas", "toy"):
        discrete = rest.endswith("discrete") or library == "toy" or not VALUES.isdisjoint(words)
        assert config.env.continuous_actions is not discrete
    assert config.seed == 0
    assert config.device == "cpu"
    assert config.folder is None
    if isinstance(config.learner, OnPolicyConfig | ParallelQConfig):
        assert config.frames_per_batch % config.learner.minibatch_size == 0


def short_learner(learner):
    """Settings with which the learner of a recipe learns from 40 frames."""
    at_once = isinstance(learner, OnPolicyConfig | ParallelQConfig)
    window = {"window": 10} if getattr(learner, "remembers", False) else {}
    more = {"num_epochs": 2} if at_once else {"learning_starts": 20}
    return {"minibatch_size": 20, **more, **window}


def unused_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def clients_of(name, port):
    """Running external clients for a recipe that needs them."""
    from external import run_meeting_clients

    return run_meeting_clients(port, 1, caller="iql" in name) if port else contextlib.nullcontext()


# The first tier trains a selection of algorithms and libraries; the second trains the others.
FIRST = {
    "pettingzoo_simple_spread_mappo",
    "toy_arena_mappo",
    "toy_arena_qmix",
    "toy_echo_rmappo",
    "toy_matrix_game_happo",
    "vmas_balance_masac",
    "vmas_simple_spread_pqn",
    "vmas_simple_tag_mappo_maddpg",
}
RECIPES = [
    pytest.param(name, marks=[] if name in FIRST else pytest.mark.recipes)
    for name in recipe_names()
]


@pytest.mark.parametrize("name", RECIPES)
def test_recipe_runs_one_iteration(name, tmp_path):
    needs(name)
    config = read_config(name)
    short = {group: short_learner(override(config, "groups", group)) for group in config.groups}
    external = config.env.library == "external"
    env = {"port": unused_port()} if external else {}
    measured = {"episodes": 4, "every_frames": None, "gif": False}
    stages = {one: {"total_frames": 40, "until": {"return": None}} for one in config.stages}
    with clients_of(name, env.get("port")):
        run = torchrl_marl.train(
            name,
            env={
                "num_envs": 4,
                "workers": 0,
                **({"kwargs": env} if external else {"max_steps": 5}),
            },
            frames_per_batch=40,
            total_frames=40,
            stages=stages,
            learner=short_learner(config.learner),
            groups=short,
            evaluation={} if external else measured,
            logging={"progress": False},
            folder=str(tmp_path / "run"),
        )
    assert run.folder == tmp_path / "run" / (list(stages)[-1] if stages else "")
    assert run.summary["frames"] == 40
    for key in ("return_before", "return_after", "return_random"):
        assert run.summary[key] is None if external else math.isfinite(run.summary[key]), key
    header, *rows = (run.folder / "metrics.csv").read_text().splitlines()
    assert header.startswith("iteration,frames,agent_frames,seconds,frames_per_second")
    assert len(rows) == 1
    assert load_config(run.folder / "config.yaml").recipe == name


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        raise SystemExit(f"usage: {WRITE}")
    GOLDEN.write_text(golden_text(effective()))


@pytest.mark.parametrize(
    ("recipe", "overrides"),
    [
        ("toy_two_step_game_qmix", {"learner.algorithm": "mappo"}),
        ("vmas_balance_matd3", {"learner": "qmix", "env.continuous_actions": False}),
        ("vmas_balance_matd3", {"learner": "random"}),
        ("vmas_simple_tag_mappo_masac", {"groups.agent.algorithm": "mappo"}),
        ("vmas_simple_tag_mappo_iql", {"groups.agent.algorithm": "random"}),
        ("toy_speaker_listener_mappo", {"learner": "pqn"}),
        ("vmas_simple_spread_pqn",
         {"learner.mixer.kind": "monotonic", "learner.central_input": "team"}),
    ],
)  # fmt: skip
def test_changed_algorithm_ignores_unused_recipe_settings(recipe, overrides):
    load_config(recipe, overrides)


def test_pqn_refuses_team_input_without_monotonic_mixer():
    with pytest.raises(ConfigError, match="learner.central_input is 'team', which is read only"):
        load_config("vmas_simple_spread_pqn", {"learner.central_input": "team"})
