"""Callbacks of a run: order of calls, logs, changes of settings, stops, and resume."""

import pytest
import torch
from runs import assert_equal, assert_same_run, final_state, small_config, table
from tiers import second_tier_cases

import torchrl_marl
from torchrl_marl import Callback
from torchrl_marl.errors import CallbackError, ConfigError, UserError
from torchrl_marl.training import recorder as recording
from torchrl_marl.training.checkpoint import all_checkpoints
from torchrl_marl.training.recorder import CsvTable


def train(folder, *callbacks, recipe="toy_arena_mappo", **settings):
    config = small_config(recipe, folder=str(folder), **settings)
    return torchrl_marl.train(config, callbacks=callbacks or None)


class Noting(Callback):
    """Records each call with the number of finished iterations."""

    def __init__(self):
        self.calls = []

    def on_batch(self, control, batch):
        assert ("agents", "advantage") not in batch.keys(True)
        self.calls.append(("batch", control.iteration))

    def on_update(self, control, batch, metrics):
        assert ("agents", "advantage") in batch.keys(True) and "agents/loss_critic" in metrics
        self.calls.append(("update", control.iteration))

    def on_evaluation(self, control, result):
        assert "return_mean" in result
        self.calls.append(("evaluation", control.iteration))

    def on_checkpoint(self, control, path):
        assert path.is_file() and path.parent.parent == control.run.folder
        self.calls.append(("checkpoint", int(path.stem.rpartition("_")[2])))

    def on_end(self, control):
        assert "return_after" in control.run.summary
        self.calls.append(("end", control.iteration))


class Counting(Callback):
    """Counts updates, draws random numbers, and changes the learning rate by both."""

    def __init__(self, until=None):
        self.until, self.count, self.total = until, 0, torch.zeros(())

    def on_batch(self, control, batch):
        control.log("own/before", self.count)

    def on_update(self, control, batch, metrics):
        self.count += 1
        self.total += torch.rand(())
        name = next(iter(control.settings))
        control.change(name, 0.5 * float(self.total) * control.settings[name])
        if self.count == self.until:
            control.stop(f"{self.until} updates")
        return {"own/count": self.count, "own/total": self.total}

    def on_evaluation(self, control, result):
        return {"own/count": self.count}

    def on_end(self, control):
        return {"own/count": self.count}

    def state_dict(self):
        return {"count": self.count, "total": self.total}

    def load_state_dict(self, state):
        self.count, self.total = state["count"], state["total"]


class Changing(Callback):
    """Changes settings before the first update."""

    def __init__(self, **settings):
        self.settings = settings

    def on_batch(self, control, batch):
        if not control.iteration:
            for name, value in self.settings.items():
                control.change(name, value)


# ------------------------------------------------------------------------------- calls and metrics


def test_order_of_calls(tmp_path):
    own = Noting()
    settings = {"evaluation.every_frames": 160, "checkpoint.every_iterations": 2}
    train(tmp_path / "run", own, total_frames=240, **settings)
    assert own.calls == [
        ("evaluation", 0),
        ("checkpoint", 0),
        ("batch", 0),
        ("update", 1),
        ("batch", 1),
        ("update", 2),
        ("evaluation", 2),
        ("checkpoint", 2),
        ("batch", 2),
        ("update", 3),
        ("evaluation", 3),
        ("end", 3),
        ("checkpoint", 3),
    ]
    # A finished run that is resumed calls nothing; with more frames, it continues.
    more = ["batch", "update", "checkpoint", "evaluation", "end", "checkpoint"]
    for frames, calls in ((240, []), (320, more)):
        own = Noting()
        torchrl_marl.resume(tmp_path / "run", callbacks=[own], total_frames=frames)
        assert [name for name, _ in own.calls] == calls


def test_callbacks_are_called_in_order_and_their_logs_are_written(tmp_path, monkeypatch):
    logged = []

    class Backend:
        def log_metrics(self, metrics, step):
            logged.append((step, metrics))

        def log_settings(self, settings):
            assert settings["callbacks"] == "['<object>:Counting', '<object>:Late']"

        def log_summary(self, numbers, texts, step):
            assert numbers["own/count"] == 3 and step == 240

        def shutdown(self):
            pass

    monkeypatch.setitem(
        recording.BACKENDS, "tensorboard", lambda config, folder, run_id: (Backend(), None)
    )

    class Late(Callback):
        def on_update(self, control, batch, metrics):
            assert "own/count" not in metrics
            control.log("own/late", torch.tensor(control.iteration))
            return {"own/frames": batch.numel()} if control.iteration > 1 else None

    run = train(
        tmp_path / "run",
        Counting(),
        Late(),
        total_frames=240,
        **{"logging.backends": ["tensorboard"]},
    )
    rows = table(run.folder / "metrics.csv")
    assert [row["own/before"] for row in rows] == ["0", "1", "2"]
    assert [row["own/count"] for row in rows] == ["1", "2", "3"]
    assert [row["own/late"] for row in rows] == ["1", "2", "3"]
    assert [row["own/frames"] for row in rows] == ["", "80", "80"]  # a column that was added later
    assert [row["own/count"] for row in table(run.folder / "evaluation.csv")] == ["0", "3"]
    assert run.summary["own/count"] == 3
    found = [(step, x["own/count"]) for step, x in logged if "own/count" in x]
    assert found == [(80, 1), (160, 2), (240, 3)]
    assert (240, 3) in [(step, x.get("evaluation/own/count")) for step, x in logged]


def test_table_with_new_columns_keeps_its_rows(tmp_path):
    growing = CsvTable(tmp_path / "metrics.csv")
    growing.write({"iteration": 1, "a": 0.5})
    growing.write({"iteration": 2, "b": 3})  # unknown columns are left out
    growing.grows = True
    growing.write({"iteration": 3, "b": 4})
    text = "iteration,a,b\n1,0.5,\n2,,\n3,,4\n"
    assert (tmp_path / "metrics.csv").read_text().replace("\r\n", "\n") == text


def test_read_only_callback_does_not_affect_the_run(tmp_path):
    """Also where the callback draws random numbers."""

    class Looking(Noting):
        def on_update(self, control, batch, metrics):
            torch.rand(7)
            control.run.evaluate(episodes=2)
            metrics.clear()

    train(tmp_path / "with", Looking())
    train(tmp_path / "without")
    one, other = (final_state(tmp_path / name) for name in ("with", "without"))
    assert set(one) - set(other) == {"callbacks"}
    assert_equal({name: one[name] for name in other}, other)
    for name in ("metrics.csv", "evaluation.csv"):
        assert table(tmp_path / "with" / name) == table(tmp_path / "without" / name)


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        ({"frames": 1}, "a callback logs 'frames', which is the name of a metric of the run"),
        ({"agents/lr": 1}, "choose another name, such as 'callback/agents/lr'"),
        (
            {"x": "much"},
            "callback Odd failed in on_update .*: metric 'x' is 'much', expected a number;",
        ),
        ({"x": torch.ones(3)}, r"tensor\(\[1., 1., 1.\]\), expected a number;"),
    ],
)
def test_invalid_callback_metrics_raise(tmp_path, found, reason):
    class Odd(Callback):
        def on_update(self, control, batch, metrics):
            return found

    with pytest.raises(UserError, match=reason):
        train(tmp_path / "run", Odd())


@pytest.mark.parametrize("name", ["seed", "recipe", "stopped", "return_after"])
def test_callback_metrics_named_as_summary_entries_raise(tmp_path, name):
    """Also entries that are written after ``on_end`` and would replace those of the callback."""

    class Odd(Callback):
        def on_end(self, control):
            return {name: 1.5}

    with pytest.raises(UserError, match=f"a callback logs '{name}', which is the name of a metric"):
        train(tmp_path / "run", Odd())


# --------------------------------------------------------------------------- stops and changes


def test_callback_stops_a_run(tmp_path, capsys):
    whole = train(tmp_path / "whole", Counting())
    run = train(tmp_path / "run", Counting(until=2))
    assert run.summary["frames"] == 160 and run.summary["stopped"] == "Counting: 2 updates"
    assert "ends after 160 frames: Counting: 2 updates." in capsys.readouterr().err
    assert table(run.folder / "metrics.csv") == table(whole.folder / "metrics.csv")[:2]
    # It is finished, until it gets more frames.
    torchrl_marl.resume(run.folder, callbacks=[Counting()])
    assert "is finished, with 160 frames" in capsys.readouterr().err
    assert len(table(run.folder / "metrics.csv")) == 2
    run = torchrl_marl.resume(run.folder, callbacks=[Counting()], total_frames=640)
    assert "stopped" not in run.summary and run.summary["frames"] == 640
    assert table(run.folder / "metrics.csv")[:6] == table(whole.folder / "metrics.csv")


def test_stop_in_on_evaluation_before_the_first_update(tmp_path):
    class Never(Callback):
        def on_evaluation(self, control, result):
            control.stop("enough")
            control.stop("a later reason")

    run = train(tmp_path / "run", Never())
    assert (run.summary["frames"], run.summary["stopped"]) == (0, "Never: enough")
    assert run.summary["return_before"] == run.summary["return_after"]


OTHERS = {
    "toy_matrix_game_happo": {"lr": 1e-4, "entropy_coeff": 0.2},
    "toy_arena_qmix": {"lr": 1e-4, "exploration.epsilon": 0.7},
    "toy_matrix_game_hasac": {"actor_lr": 1e-4, "critic_lr": 1e-2, "alpha_lr": 1e-2},
}
"""Recipe -> settings that its algorithm may change."""


@pytest.mark.parametrize("recipe", OTHERS)
def test_callbacks_change_settings_of_other_algorithms(tmp_path, recipe):
    """After the change, the run exactly equals one with these settings."""
    own = {} if recipe.endswith("happo") else {"learner.learning_starts": 40}
    sizes = {"env.num_envs": 8, "frames_per_batch": 40, "total_frames": 160}
    sizes |= {"execution": "eager", "threads": 1, "learner.minibatch_size": 20, **own}
    sizes |= {"evaluation.episodes": 4, "logging.progress": False}
    given = {f"learner.{name}": value for name, value in OTHERS[recipe].items()}
    for name, more, callbacks in (
        ("changed", {}, [Changing(**OTHERS[recipe])]),
        ("given", given, None),
    ):
        folder = {"folder": str(tmp_path / name)}
        torchrl_marl.train(recipe, callbacks=callbacks, **sizes, **more, **folder)
    one, other = (final_state(tmp_path / name)["learners"] for name in ("changed", "given"))
    assert_equal(one, other)


@pytest.mark.parametrize("execution", ["eager", *second_tier_cases("runs", "trace")])
@pytest.mark.parametrize("schedule", ["constant", "linear"])
def test_changed_learning_rate_equals_one_from_the_settings(tmp_path, schedule, execution):
    """Exactly, with schedules, and in graphs."""
    own = {"learner.lr_schedule": schedule, "learner.entropy_schedule": schedule}
    own |= {"execution": execution}
    train(tmp_path / "changed", Changing(lr=1e-4, entropy_coeff=0.2), **own)
    given = {"learner.lr": 1e-4, "learner.entropy_coeff": 0.2}
    train(tmp_path / "given", **{**own, **given})
    one, other = (final_state(tmp_path / name)["learners"] for name in ("changed", "given"))
    assert_equal(one, other)
    assert table(tmp_path / "changed/metrics.csv") == table(tmp_path / "given/metrics.csv")


@pytest.mark.parametrize(("name", "value"), [("gamma", 0.5), ("lrr", 0.1), ("lr", -1.0)])
def test_change_of_a_fixed_or_invalid_setting_raises(tmp_path, name, value):
    with pytest.raises(CallbackError) as error:
        train(tmp_path / "run", Changing(**{name: value}))
    text = str(error.value)
    assert text.startswith("callback Changing failed in on_batch after 80 frames: learner.")
    expected = {
        "gamma": "learner.gamma cannot change within a run; ",
        "lrr": "did you mean 'lr'? expected one of lr, entropy_coeff",
        "lr": "learner.lr is -1.0, expected above 0",
    }
    assert expected[name] in text


def test_change_of_lr_with_kl_schedule_raises(tmp_path):
    with pytest.raises(CallbackError, match="lr cannot change .* expected one of entropy_coeff;"):
        train(tmp_path / "run", Changing(lr=1e-3), **{"learner.lr_schedule": "kl"})


# --------------------------------------------------------------------------------- resuming


class Leaving(Callback):
    """Leaves the program, as Ctrl-C does."""

    def on_checkpoint(self, control, path):
        if control.iteration == 3:
            raise KeyboardInterrupt


@pytest.mark.parametrize("schedule", ["constant", "linear"])
def test_resume_restores_callback_state(tmp_path, schedule):
    settings = {"learner.lr_schedule": schedule, "checkpoint.every_iterations": 3}
    whole = train(tmp_path / "whole", Counting(), Callback(), **settings)
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "run", Counting(), Leaving(), **settings)
    # The objects are given again, of the same classes.
    with pytest.raises(ConfigError, match=r"'<object>:Counting', an object .* callbacks=\[...\]"):
        torchrl_marl.resume(tmp_path / "run")
    with pytest.raises(
        ConfigError, match=r"callbacks was \['<object>:Counting', '<object>:Leaving'\]"
    ):
        torchrl_marl.resume(tmp_path / "run", callbacks=[Counting()])
    leaving = Leaving()
    leaving.on_checkpoint = Callback.on_checkpoint.__get__(leaving)
    resumed = torchrl_marl.resume(tmp_path / "run", callbacks=[Counting(), leaving])
    assert_same_run(resumed.folder, whole.folder)
    assert [row["own/count"] for row in table(whole.folder / "metrics.csv")] == list("123456")


def test_iterate_calls_callbacks(tmp_path):
    config = small_config(folder=str(tmp_path / "run"))
    rows = [x.metrics for x in torchrl_marl.iterate(config, callbacks=[Counting(until=2)])]
    assert [row["own/count"] for row in rows] == [1, 2]


# ----------------------------------------------------------------------------------- errors


def test_callback_error_keeps_last_checkpoint_and_names_resume_command(tmp_path):
    class Broken(Callback):
        at = 2

        def on_update(self, control, batch, metrics):
            return {"x": 1 / (self.at - control.iteration)}

    settings = {"checkpoint.every_iterations": 1}
    with pytest.raises(CallbackError) as error:
        train(tmp_path / "run", Broken(), **settings)
    text = str(error.value)
    assert text.startswith(
        "callback Broken failed in on_update after 160 frames: ZeroDivisionError: division by "
        "zero (test_callbacks.py, line "
    )
    assert text.endswith(
        "fix it, and resume the run from iteration_000001.pt: torchrl-marl train --resume "
        f"{tmp_path / 'run'}."
    )
    assert [path.name for path in all_checkpoints(tmp_path / "run")][-1] == "iteration_000001.pt"
    Broken.at = 0
    run = torchrl_marl.resume(tmp_path / "run", callbacks=[Broken()])
    rows = table(run.folder / "metrics.csv")
    assert [row["x"] for row in rows] == ["1", *(f"{-1 / i:.6g}" for i in range(2, 7))]


def test_callback_error_before_first_checkpoint_asks_to_start_again(tmp_path):
    class Broken(Callback):
        def on_evaluation(self, control, result):
            raise KeyError("x")

    with pytest.raises(CallbackError, match="on_evaluation after 0 frames: KeyError: 'x'.*again"):
        train(tmp_path / "run", Broken())


@pytest.mark.parametrize(
    ("state", "found"),
    [
        ({"a": {"b": [Callback]}}, "the state holds a type at a.b.0, expected"),
        ({"a": torch.zeros(3).numpy()}, "the state holds a ndarray at a, expected tensors"),
    ],
)
def test_callback_state_of_unsupported_types_raises(tmp_path, state, found):
    class Odd(Callback):
        def state_dict(self):
            return state

    with pytest.raises(CallbackError, match=f"callback Odd failed in state_dict: {found}"):
        train(tmp_path / "run", Odd())
    assert not all_checkpoints(tmp_path / "run")


# --------------------------------------------------------------------------------- populations


class OfMembers(Callback):
    """Logs one number for all members and one for each, and sets a learning rate for each."""

    def on_batch(self, control, batch):
        assert len(batch) == 16  # the envs of both members
        if not control.iteration:
            control.change("lr", torch.tensor([1e-4, 1e-3]))

    def on_update(self, control, batch, metrics):
        assert metrics["agents/episode_reward"].shape == (2,)
        return {"own/all": control.iteration, "own/each": torch.tensor([1.0, 3.0])}

    def on_evaluation(self, control, results):
        return {"own/seen": torch.tensor([float(len(results)), 0.0])}

    def on_end(self, control):
        return {"own/end": torch.tensor([5.0, 7.0])}


@pytest.mark.runs
def test_callbacks_of_a_population(tmp_path):
    size = {"population.size": 2}
    run = train(tmp_path / "run", OfMembers(), total_frames=160, **size)
    rows = [table(folder / "metrics.csv") for folder in run.folders]
    assert [[row["own/all"] for row in own] for own in rows] == [["1", "2"]] * 2
    assert [own[0]["own/each"] for own in rows] == ["1", "3"]
    assert [row["own/each"] for row in table(run.folder / "metrics.csv")] == ["2", "2"]
    seen = [table(folder / "evaluation.csv")[0]["own/seen"] for folder in run.folders]
    assert seen == ["2", "0"]
    assert run.summary["own/end"] == 6.0
    members = run.members
    assert [own.summary["own/end"] for own in members] == [5.0, 7.0]
    # Learning rates by member equal those from the settings.
    vary = {"population.vary": {"learner.lr": [1e-4, 1e-3]}}
    varied = train(tmp_path / "varied", total_frames=160, **size, **vary)
    for own, other in zip(run.folders, varied.folders):
        assert_equal(final_state(own)["learners"], final_state(other)["learners"])
    assert [own.config.learner.lr for own in members] == pytest.approx([1e-4, 1e-3])
    # The population resumes with its callbacks, and a member alone without.
    torchrl_marl.resume(run.folder, callbacks=[OfMembers()], total_frames=240)
    assert table(run.folders[1] / "metrics.csv")[-1]["own/each"] == "3"
    alone = torchrl_marl.resume(run.folders[1], total_frames=320)
    assert alone.config.callbacks == [] and "callbacks" not in final_state(alone.folder)
    assert table(alone.folder / "metrics.csv")[-1]["own/each"] == ""


def test_callback_stops_all_members_of_a_population(tmp_path):
    run = train(tmp_path / "run", Stopping(), **{"population.size": 2})
    assert run.summary["stopped"] == "Stopping: two updates" and run.summary["frames"] == 160


class Stopping(Callback):
    """Stops a run after two updates, with a lower learning rate."""

    def on_update(self, control, batch, metrics):
        control.change("lr", 1e-4)
        if control.iteration == 2:
            control.stop("two updates")


@pytest.mark.parametrize("value", ["a", None, [1e-3, "a"], object()])
def test_change_to_a_value_that_is_not_a_number_raises(tmp_path, value):
    with pytest.raises(CallbackError, match=r"learner\.lr is .*, expected a number;"):
        train(tmp_path / "run", Changing(lr=value))


def test_league_calls_callbacks_with_all_envs(tmp_path):
    own = Noting()
    own.on_update = Callback.on_update.__get__(own)
    settings = {"league.opponents": "uniform", "total_frames": 256, "frames_per_batch": 128}
    settings |= {"env.num_envs": 16, "evaluation.episodes": 4, "logging.progress": False}
    sizes = []
    own.on_batch = lambda control, batch: sizes.append(len(batch))
    torchrl_marl.train(
        "toy_kuhn_ippo",
        callbacks=[own],
        folder=str(tmp_path / "run"),
        execution="eager",
        **{"learner.minibatch_size": 64, **settings},
    )
    assert sizes == [16, 16]
    assert [name for name, _ in own.calls][-2:] == ["end", "checkpoint"]
