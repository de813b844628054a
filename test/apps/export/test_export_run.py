"""``torchrl-marl export`` and ``Run.export``: files and messages."""

import pytest
from runs import small_config

import torchrl_marl
from torchrl_marl.apps.cli import main as cli
from torchrl_marl.apps.export import Player
from torchrl_marl.errors import ConfigError
from torchrl_marl.training.run import Run

pytestmark = pytest.mark.clients


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("exported") / "run"
    kwargs = {"n_groups": 2, "kinds": 2, "n_agents": 4, "late_spawn": 1}
    settings = {"env": {"kwargs": kwargs}, "learner": {"precision": "bf16"}}
    return torchrl_marl.train(small_config(total_frames=80, folder=str(folder), **settings))


def test_run_is_exported_and_checked(run, tmp_path):
    made = run.export(format="pt2", folder=tmp_path, steps=20)
    assert list(made.agents) == ["agent_0_0", "novice_0_0", "agent_1_0", "novice_1_0"]
    assert made.comparison.steps >= 20 and made.comparison.differ == 0
    assert Player(made.agents["novice_0_0"], trust=True).interface["group"] == "agents_0"
    assert (tmp_path / "player.py").is_file()


def test_export_command(run, capsys):
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    assert cli.main(["export", str(run.folder), "--agent", "novice_1_0"]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first.split() == ["novice_1_0", str(run.folder / "export" / "novice_1_0")]
    assert second.startswith("checked against the team: no action differs in 200 steps")
    assert (run.folder / "export" / "novice_1_0" / "act.onnx").is_file()


def test_agents_of_another_export_are_not_left_in_place(run, tmp_path):
    stranger = tmp_path / "agent_9_0"
    stranger.mkdir()
    (stranger / "interface.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"holds 'agent_9_0' of another export, .* remove that"):
        run.export(format="pt2", folder=tmp_path, steps=20)
    assert [path.name for path in tmp_path.iterdir()] == ["agent_9_0"]
    own = run.export("agent_0_0", format="pt2", folder=tmp_path, steps=20).agents["agent_0_0"]
    assert stranger.is_dir()
    for name in ("act.onnx", "speak.pt2", "notes.txt"):
        (own / name).write_text("")
    run.export("agent_0_0", format="pt2", folder=tmp_path, steps=20)
    assert {path.name for path in own.iterdir()} == {"act.pt2", "interface.json", "notes.txt"}


def test_invalid_arguments_raise_one_sentence(run, tmp_path, capsys):
    def error(*arguments):
        assert cli.main(["export", *arguments]) == 2
        [line] = capsys.readouterr().err.splitlines()
        return line

    assert "agent is 'novice_10'; did you mean 'novice_1_0'?" in error(
        str(run.folder), "--agent", "novice_10", "--format", "pt2"
    )
    assert "found 'pt'; did you mean 'pt2'? choose among onnx, pt2" in error("x", "--format", "pt")
    assert str(tmp_path) in error(str(tmp_path))
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "config.yaml").write_bytes((run.folder / "config.yaml").read_bytes())
    assert "has no checkpoint yet" in error(str(empty), "--format", "pt2")
    (tmp_path / "file").write_text("")
    out = str(tmp_path / "file" / "below")
    assert "cannot be written" in error(str(run.folder), "--format", "pt2", "--out", out)


@pytest.mark.parametrize("format", ["onnx", "pt2"])
def test_full_disk_raises_one_sentence(run, tmp_path, capsys, format):
    resource = pytest.importorskip("resource")
    if format == "onnx":
        pytest.importorskip("onnxscript")
    arguments = [str(run.folder), "--agent", "novice_1_0", "--format", format]
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        code = cli.main(["export", *arguments, "--out", str(tmp_path / "out")])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    [line] = capsys.readouterr().err.splitlines()
    assert code == 2
    assert f"{str(tmp_path / 'out')!r} cannot be written (File too large); check the disk" in line


def test_export_with_given_environment_leaves_it_open(run, tmp_path):
    from torchrl_marl.envs import make_env

    again = Run.load(run.folder)
    env = make_env(again.config.env)
    made = again.export("agent_0_0", format="pt2", folder=tmp_path, steps=5, env=env)
    assert made.comparison.differ == 0
    env.rollout(2)  # it was not closed
