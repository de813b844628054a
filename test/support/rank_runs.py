"""Runs of two ranks in one pair of processes: trained, resumed, interrupted and failed."""

import contextlib
import io
import os
import signal
import sys
from pathlib import Path

from runs import small_config

import torchrl_marl
from torchrl_marl.envs.toy.arena import Arena
from torchrl_marl.errors import SpecError, UserError
from torchrl_marl.runs import resume

TALK = {
    "env": {"num_envs": 8, "max_steps": 16},
    "total_frames": 512,
    "frames_per_batch": 128,
    "learner": {"minibatch_size": 64, "critic": {"memory": {"kind": "gru"}}},
}


def arena_config(folder, **overrides):
    """Two groups, each with deaths, a separate number of epochs and observation statistics."""
    defaults = {
        "env": {"kwargs": {"n_groups": 2}},
        "distributed": {"collectors": 4},
        "learner": {"normalize_observations": True, "target_kl": 0.01, "num_epochs": 3},
    }
    return small_config(folder=str(folder), **(defaults | overrides))


def talking_config(folder):
    """Recurrent actors and critics with communication."""
    config = small_config("toy_echo_rmappo_talk", folder=str(folder), **TALK)
    return torchrl_marl.recipes.read_config(config, {"distributed": {"collectors": 2}})


def early_stopping_config(folder):
    """Stops at a return, with checkpoints by time and periodic evaluations."""
    return arena_config(
        folder,
        stop_at_return=0.5,
        checkpoint={"every_minutes": 1e-4},
        evaluation={"every_frames": 160},
    )


def runs_of_a_rank(folder):
    """Trains, resumes, is interrupted, disagrees and fails; returns the outcomes."""
    rank = int(os.environ["RANK"])
    output, written = io.StringIO(), []
    sys.addaudithook(noting_writes(folder, written))
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        torchrl_marl.train(arena_config(folder / "ranks", logging={"progress": True}))
        torchrl_marl.train(talking_config(folder / "talk"))
        torchrl_marl.train(early_stopping_config(folder / "early"))
        resume(folder / "turns", total_frames=320)
    found = {"said": output.getvalue(), "written": sorted({Path(path).name for path in written})}
    found["stopped"] = outcome(
        lambda: torchrl_marl.train(arena_config(folder / "stopped")), at_step=25, action=interrupt
    )
    found["edited"] = outcome(lambda: resume(folder / "edited"))
    found["disagree"] = outcome(
        lambda: torchrl_marl.train(arena_config(folder / "seed", seed=rank))
    )
    found["broken"] = outcome(
        lambda: torchrl_marl.train(arena_config(folder / "broken")),
        at_step=25,
        action=break_environment,
    )
    found["bug"] = outcome(
        lambda: torchrl_marl.train(arena_config(folder / "bug")), at_step=5, action=bug
    )
    return found


def noting_writes(folder, written):
    """An audit hook that records the files in a folder that are opened for writing."""
    writes = os.O_WRONLY | os.O_RDWR | os.O_CREAT

    def note(event, args):
        if event == "open" and str(folder) in str(args[0]) and args[2] & writes:
            written.append(str(args[0]))

    return note


def outcome(work, at_step=None, action=None):
    """The exception of a run, as texts; the second rank calls ``action()`` in step ``at_step``."""
    step, steps = Arena._step, 0

    def counting_step(self, tensordict):
        nonlocal steps
        steps += 1
        if steps == at_step and os.environ["RANK"] == "1":
            action()
        return step(self, tensordict)

    Arena._step = counting_step
    try:
        work()
    except BaseException as error:
        notes = " ".join(getattr(error, "__notes__", []))
        return type(error).__name__, f"{error}{notes}", isinstance(error, UserError)
    finally:
        Arena._step = step
    return None


def interrupt():
    os.kill(os.getpid(), signal.SIGINT)


def break_environment():
    raise SpecError("the environment broke.")


def bug():
    raise KeyError("a bug")
