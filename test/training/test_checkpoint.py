"""Checkpoints: written completely or not at all, and errors for broken ones."""

import shutil

import pytest
import torch
from runs import assert_equal, assert_same_run, final_state, small_config

from torchrl_marl.envs.toy import Arena
from torchrl_marl.errors import CheckpointError, UserError
from torchrl_marl.training import Run, iterate, train
from torchrl_marl.training.checkpoint import (
    all_checkpoints,
    latest_checkpoint,
    load_checkpoint,
    save_checkpoint,
)
from torchrl_marl.training.trainer import resume, resume_training

STATE = {"iteration": 1, "weights": {"w": torch.arange(3.0)}, "nested": [1, "a", None, 2.5]}


def make_folder(tmp_path):
    (tmp_path / "config.yaml").write_text("seed: 0\n")
    return tmp_path


def test_checkpoint_round_trip(tmp_path):
    folder = make_folder(tmp_path)
    path = save_checkpoint(folder, 7, STATE, keep=2)
    assert path == latest_checkpoint(folder)
    assert path.name == "iteration_000007.pt"
    state = load_checkpoint(path)
    state.pop("format")
    assert_equal(state, STATE)


def test_latest_checkpoints_are_kept(tmp_path):
    folder = make_folder(tmp_path)
    for iteration in (1, 2, 9, 10, 100):
        save_checkpoint(folder, iteration, STATE, keep=2)
    names = sorted(p.name for p in (folder / "checkpoints").iterdir())
    assert names == ["iteration_000010.pt", "iteration_000100.pt"]
    assert latest_checkpoint(folder).name == "iteration_000100.pt"


def test_checkpoints_are_sorted_beyond_six_digits(tmp_path):
    for iteration in (999_998, 999_999, 1_000_000):
        save_checkpoint(tmp_path, iteration, STATE, keep=2)
    names = [path.name for path in all_checkpoints(tmp_path)]
    assert names == ["iteration_999999.pt", "iteration_1000000.pt"]
    latest = latest_checkpoint(tmp_path)
    assert latest.name == "iteration_1000000.pt"
    cut_in_half(latest)
    with pytest.raises(CheckpointError, match="to resume from iteration_999999.pt"):
        load_checkpoint(latest)


@pytest.mark.parametrize("where", ["writing", "renaming"])
def test_failed_checkpoint_keeps_the_earlier_one(tmp_path, monkeypatch, where):
    folder = make_folder(tmp_path)
    save_checkpoint(folder, 1, STATE, keep=1)
    with monkeypatch.context() as patch:
        if where == "writing":

            def save(state, file):
                file.write(b"half")
                raise OSError("no space left on device")

            patch.setattr(torch, "save", save)
        else:

            def replace(self, target):
                raise OSError("power cut")

            patch.setattr(type(folder), "replace", replace)
        with pytest.raises(OSError):
            save_checkpoint(folder, 2, STATE, keep=1)
    assert latest_checkpoint(folder).name == "iteration_000001.pt"
    assert load_checkpoint(latest_checkpoint(folder))["iteration"] == 1
    save_checkpoint(folder, 2, STATE, keep=1)
    assert load_checkpoint(latest_checkpoint(folder))["iteration"] == 1
    assert latest_checkpoint(folder).name == "iteration_000002.pt"


def test_missing_run_or_checkpoint_raises(tmp_path):
    for use in (resume, Run.load):
        with pytest.raises(
            CheckpointError, match="not a run folder.*config.yaml.*torchrl-marl train"
        ):
            use(tmp_path)
    with pytest.raises(CheckpointError, match="no checkpoint yet.*--resume"):
        latest_checkpoint(make_folder(tmp_path))
    with pytest.raises(CheckpointError, match="no checkpoint yet"):
        Run.load(tmp_path)
    with pytest.raises(CheckpointError, match="there is no checkpoint"):
        load_checkpoint(tmp_path / "iteration_000001.pt")


def cut_in_half(path):
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])


DAMAGE = {
    "half-written": cut_in_half,
    "empty": lambda path: path.write_bytes(b""),
    "no checkpoint at all": lambda path: path.write_text("hello, world" * 100),
    "another archive's": lambda path: torch.save([1, 2, 3], path),
    "without its format": lambda path: torch.save({"iteration": 3}, path),
    "of code": lambda path: torch.save({"format": 1, "code": pytest.raises}, path),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_broken_checkpoint_error_names_the_fix(tmp_path, damage):
    folder = make_folder(tmp_path)
    first = save_checkpoint(folder, 1, STATE, keep=2)
    second = save_checkpoint(folder, 2, STATE, keep=2)
    DAMAGE[damage](second)
    with pytest.raises(CheckpointError, match="broken or half-written") as caught:
        load_checkpoint(latest_checkpoint(folder))
    message = str(caught.value)
    assert str(second) in message
    assert "delete it to resume from iteration_000001.pt" in message
    assert "\n" not in message
    second.unlink()
    assert load_checkpoint(latest_checkpoint(folder))["iteration"] == 1
    DAMAGE[damage](first)
    with pytest.raises(CheckpointError, match="train the run again"):
        load_checkpoint(latest_checkpoint(folder))


def test_checkpoint_of_another_version_raises(tmp_path):
    path = tmp_path / "iteration_000001.pt"
    torch.save({"format": 99}, path)
    with pytest.raises(CheckpointError, match="format 99, expected 1.*another version"):
        load_checkpoint(path)


def test_resume_uses_the_checkpoint_before_a_broken_one(tmp_path):
    """A warning names both files, the run ends the same, and the broken file is renamed."""
    settings = {"checkpoint.every_iterations": 1, "checkpoint.keep": 3}
    whole, run = (
        train(small_config(**settings, folder=str(tmp_path / name))) for name in ("whole", "cut")
    )
    cut_in_half(latest_checkpoint(run.folder))
    both = r"iteration_000006\.pt .*iteration_000005\.pt"
    behind = rf"{both}.* of 400 frames is used instead, 80 frames behind the run's last"
    with pytest.warns(UserWarning, match=behind):
        loaded = Run.load(run.folder)
    assert latest_checkpoint(run.folder).name == "iteration_000006.pt"  # reading changes nothing
    before = load_checkpoint(run.folder / "checkpoints" / "iteration_000005.pt")
    weights = {k: v for k, v in before["learners"][0].items() if isinstance(v, torch.Tensor)}
    own = dict(loaded.policy.named_parameters())
    assert all(any(torch.equal(p, w) for w in weights.values()) for p in own.values())
    with pytest.warns(UserWarning, match=both):
        resumed = resume(run.folder)
    assert_same_run(whole.folder, resumed.folder)
    names = sorted(path.name for path in (run.folder / "checkpoints").iterdir())
    assert names == [
        "iteration_000004.pt",
        "iteration_000005.pt",
        "iteration_000006.pt",
        "iteration_000006.pt.broken",
    ]


def test_untrained_checkpoint_replaces_a_broken_one_only_on_resume(tmp_path):
    folders = [str(tmp_path / name) for name in ("whole", "cut")]
    whole, run = (train(small_config(folder=folder)) for folder in folders)
    names = [path.name for path in all_checkpoints(run.folder)]
    assert names == ["iteration_000000.pt", "iteration_000006.pt"]
    cut_in_half(latest_checkpoint(run.folder))
    with pytest.raises(CheckpointError, match="iteration_000000.pt, .* it is not used; "):
        Run.load(run.folder)
    behind = "iteration_000000.pt, .* of 0 frames is used instead, 480 frames behind"
    with pytest.warns(UserWarning, match=behind):
        resume(run.folder)
    assert_same_run(whole.folder, run.folder)


def test_run_with_only_broken_checkpoints_raises(tmp_path):
    settings = {"checkpoint.every_iterations": 1, "checkpoint.keep": 2}
    run = train(small_config(**settings, total_frames=160, folder=str(tmp_path / "run")))
    for path in all_checkpoints(run.folder):
        cut_in_half(path)
    for use in (resume, Run.load):
        with pytest.raises(CheckpointError, match=r"all checkpoints.*000002.*000001.*train the"):
            use(run.folder)
    assert len(all_checkpoints(run.folder)) == 2  # nothing was lost by trying


def leaves(value, path=()):
    """Paths to all values and containers."""
    yield path
    inner = value.items() if isinstance(value, dict) else ()
    for key, part in enumerate(value) if isinstance(value, (list, tuple)) else inner:
        yield from leaves(part, (*path, key))


def with_other(value, path, make):
    """A copy with another value at a path."""
    if not path:
        return make(value)
    key, *rest = path
    parts = dict(value) if isinstance(value, dict) else list(value)
    parts[key] = with_other(parts[key], rest, make)
    return type(value)(parts)


def longer(value):
    return torch.cat([value, value]) if isinstance(value, torch.Tensor) and value.ndim else None


FOREIGN = {
    "gone": lambda value: None,
    "a text": lambda value: "hello",
    "a list": lambda value: [1, "a", None],
    "of another project": lambda value: {"state_dict": {"layer.weight": torch.zeros(3)}},
    "of another shape": longer,
    "a shape more": lambda value: value[None] if isinstance(value, torch.Tensor) else 3.5,
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained") / "run"
    for _ in iterate(small_config(folder=str(folder), **{"evaluation.episodes": 1})):
        break
    return folder, final_state(folder)


@pytest.mark.runs
@pytest.mark.parametrize("kind", FOREIGN)
def test_wrong_contents_load_or_give_a_one_line_error(tmp_path, trained, kind):
    """Another value at any place of a checkpoint is used, or gives a one-line error."""
    original, state = trained
    folder = tmp_path / "run"
    told = 0
    places = list(leaves(state))
    first = list(FOREIGN).index(kind)
    for path in places[first :: len(FOREIGN)]:  # each place is tried with one of the kinds
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(original, folder)
        save_checkpoint(folder, 1, {}, keep=1)
        torch.save(with_other(state, path, FOREIGN[kind]), latest_checkpoint(folder))
        try:
            training = resume_training(folder, None)
        except UserError as error:
            told += 1
            assert "\n" not in str(error), path
            assert len(str(error)) < 600
        else:
            training.step()
            training.close()
    assert told > 5


def test_checkpoint_of_other_settings_raises(tmp_path):
    """Networks of another size give one line instead of a traceback of torch."""
    run = train(small_config(total_frames=80, folder=str(tmp_path / "run")))
    config = run.folder / "config.yaml"
    config.write_text(config.read_text().replace("num_cells: [8]", "num_cells: [9]"))
    assert "[9]" in config.read_text()
    for use in (Run.load, resume):
        with pytest.raises(UserError, match=r"learner.actor.num_cells was \[8\] .*is \[9\] in '"):
            use(run.folder)
    state = load_checkpoint(latest_checkpoint(run.folder))
    state.pop("made_by")  # as before settings were stored
    torch.save(state, latest_checkpoint(run.folder))
    for use in (Run.load, resume):
        with pytest.raises(CheckpointError, match="does not fit the run's config.yaml"):
            use(run.folder)


@pytest.mark.parametrize("num_envs", [4, 8])
def test_resume_with_another_environment_raises(tmp_path, num_envs):
    """Another number of envs, or other observations."""
    config = small_config(total_frames=160, folder=str(tmp_path / "run"))
    for _ in iterate(config, env=Arena(8, max_steps=13)):
        break
    other = Arena(num_envs, max_steps=13, n_actions=4 if num_envs == 4 else 3)
    with pytest.raises(UserError, match="does not fit|saved with shape"):
        resume(config.folder, env=other)
