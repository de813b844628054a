"""A thousand random settings: each is accepted, or refused in one sentence."""

import random

import pytest

from torchrl_marl.apps.cli.main import main
from torchrl_marl.errors import ConfigError, UserError
from torchrl_marl.recipes import explain, load_config

pytestmark = pytest.mark.pages

BASE = "env: {library: toy, name: arena}\nframes_per_batch: 640\nlearner: {minibatch_size: 320}\n"
KEYS = [setting.key for setting in explain()]
KEYS += [f"groups.agents.{k.removeprefix('learner.')}" for k in KEYS if k.startswith("learner.")]
KEYS += ["env", "learner", "learner.actor", "groups.agents", "groups.x.y.z", "env.kwargs.a.b"]
KEYS += ["env.group_map.team", "nothing", "learner.nothing.x", "seed.x", "", "learner.", ".lr"]
KEYS += ["k" * 5000, "läuft", "groups.null.lr"]
TEXTS = [
    "1",
    "0",
    "-1",
    "3",
    "1e3",
    "1.5",
    "true",
    "false",
    "null",
    "~",
    "yes",
    "no",
    "x",
    "''",
    '""',
    "nan",
    ".nan",
    ".inf",
    "-.inf",
    "1_000",
    "0x10",
    "1:30",
    "2026-01-01",
    "2026-13-45",
    "12e999",
    "[",
    "]",
    "{",
    "}",
    "[[[]]]",
    "[1,[2]]",
    "[1,2",
    "{}",
    "[]",
    "[null]",
    "[true]",
    "[1.5]",
    "['']",
    "[a,b]",
    "[64,64]",
    "[-1]",
    "[0]",
    "[1e400]",
    "*a",
    "%x",
    "@x",
    "`x",
    "?",
    ">",
    "|",
    "#c",
    "${seed}",
    "${nothing}",
    "${",
    "${env}",
    "${oc.env:HOME}",
    "${.x}",
    "???",
    "'",
    '"',
    "a:",
    "==",
    "a=b",
    "<<:x",
    "vmas",
    "toy",
    "pettingzoo",
    "jaxmarl",
    "isaaclab",
    "mujoco",
    "mjlab",
    "foraging",
    "own",
    "arena",
    "balance",
    "a/b",
    "../x.py",
    "x.py:Y",
    "mod:Y",
    ":Y",
    "os:",
    "mpe2/simple_spread_v3",
    "mappo",
    "ippo",
    "random",
    "state",
    "team",
    "observations",
    "index",
    "clusters",
    "masks",
    "agent_id",
    "embedding",
    "cuda:9",
    "cpu",
    "compile",
    "cudagraph",
    "[wandb]",
    "agent",
    "set",
    "attention",
    "l2",
    "none",
    "full",
]
TEXTS += ["", " ", "{a: 1}", "{a: {b: [1, {c: 2}]}}", "{1: 2}", "{null: 1}", "{[1]: 2}", "{a.b: 1}"]
TEXTS += ["{a: b: c}", "&a [*a]", "&a {b: *a}", "!!python/object:os.system x", "!!binary aGk="]
TEXTS += ["!!set {a}", "!!int x", "!!float x", "!!timestamp x", "!!omap [a: 1]", "!x y", "{<<: 1}"]
TEXTS += ["2026-01-01 25:00:00", "- [", "\x00", "\x07", "\ud800", "é", "a" * 3000, "9" * 310]
TEXTS += ["9" * 5000, "-" + "9" * 400, "[" * 500 + "]" * 500, "[" * 1000, "{a: " * 200 + "}" * 200]


def random_text(draw):
    value = draw.choice(TEXTS)
    form = draw.random()
    if form < 0.15:
        value = f"[{value}, {draw.choice(TEXTS)}]"
    elif form < 0.3:
        value = f"{{{draw.choice(['a', 'lr', 'actor', '1', 'x.y'])}: {value}}}"
    elif form < 0.35:
        value += draw.choice(TEXTS)
    return value if form > 0.98 else f"{draw.choice(KEYS)}={value}"


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of PyYAML, about invalid input
def test_random_settings_raise_only_user_errors(tmp_path):
    recipe = tmp_path / "base.yaml"
    recipe.write_text(BASE)
    draw, told = random.Random(0), 0
    for _ in range(1000):
        texts = [random_text(draw) for _ in range(draw.choice([1, 1, 2]))]
        try:
            load_config(recipe, texts)
        except UserError as error:
            told += 1
            assert len(str(error)) < 1000, texts
        except BaseException as error:
            raise AssertionError(f"{texts!r:.1000} gives {error!r:.200}") from error
    assert 800 < told < 1000


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("groups=[1]", "groups is [1], expected key: value pairs."),
        ("env.group_map=[1]", "env.group_map is [1], expected key: value pairs."),
        (
            "learner.actor.num_cells=[1,[2]]",
            "learner.actor.num_cells is [1, [2]], expected a list of integers, such as [64, 64].",
        ),
        ("learner.lr=" + "9" * 310, "learner.lr is 999"),
        ("total_frames=" + "9" * 310, "total_frames is 999"),
        ("seed=" + "9" * 5000, "seed is '999"),
        ("seed=" + "[" * 5000, "seed is '[[["),
        ("device=" + "x" * 1000, "device is 'xxx"),
        ("x" * 1000 + "=1", "unknown setting 'xxx"),
    ],
)
def test_messages_for_long_and_nested_values_are_short(text, message, capsys):
    assert main(["train", "toy_arena_mappo", text]) == 2
    line = capsys.readouterr().err
    assert line.startswith(f"torchrl-marl: error: {message}")
    assert line.count("\n") == 1
    assert len(line) < 400


@pytest.mark.parametrize("text", ["", "# nothing but a comment\n", "{}\n"])
def test_empty_recipe_file_is_refused(text, tmp_path):
    path = tmp_path / "empty.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match="holds no settings, expected settings such as 'seed: 0'"):
        load_config(path)


@pytest.mark.parametrize("key", ["foo", "learner.colour", "env.foo", "qwertz.asdf"])
def test_unknown_key_without_similar_key_has_no_suggestion(key):
    with pytest.raises(ConfigError) as error:
        load_config("toy_arena_mappo", [f"{key}=1"])
    assert str(error.value) == f"unknown setting '{key}'; `torchrl-marl list settings` shows all."


def test_list_worlds_prints_environments(capsys):
    assert main(["list", "worlds"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("environments:\n")
    assert "speaker_listener" in out
    assert "module:Class" in out
