"""A process of torchrun or Ray is killed: the error names it, and the run resumes."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from listening import descendants
from ranked import free_port
from runs import table

import torchrl_marl
from torchrl_marl.runs import resume

pytestmark = pytest.mark.processes

SETTINGS = [
    "env.num_envs=4", "env.kwargs.n_agents=2", "frames_per_batch=40", "total_frames=400000",
    "learner.minibatch_size=20", "learner.num_epochs=1", "evaluation.episodes=0",
    "checkpoint.every_iterations=1", "logging.progress=false", "execution=eager",
]  # fmt: skip


def started(command, folder):
    """A Python process with stdout and stderr in one pipe."""
    path = os.pathsep.join([str(Path(torchrl_marl.__file__).parents[1]), *sys.path])
    return subprocess.Popen(
        [sys.executable, *command, f"folder={folder}", *SETTINGS],
        env={**os.environ, "PYTHONPATH": path, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def torchrun(folder):
    """Two ranks on the loopback interface."""
    launched = "-m torch.distributed.run --nnodes 1 --nproc-per-node 2 --master-addr 127.0.0.1"
    port = ["--master-port", str(free_port())]
    train = ["-m", "torchrl_marl", "train", "toy_arena_mappo"]
    return started([*launched.split(), *port, *train], folder)


def pid_of_rank(rank, parent):
    """The process that torchrun started for a rank."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            own_parent = int(stat.read_text().rpartition(")")[2].split()[1])
            variables = stat.with_name("environ").read_bytes().split(b"\0")
        except (OSError, ValueError):
            continue
        if own_parent == parent and f"RANK={rank}".encode() in variables:
            return int(stat.parent.name)
    raise AssertionError(f"no rank {rank}")


def latest(folder):
    """The number of the last checkpoint."""
    return max(int(path.stem.rpartition("_")[2]) for path in folder.glob("checkpoints/*.pt"))


def wait_for(what, seconds=120):
    until = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < until
        time.sleep(0.05)


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks for processes in /proc")
@pytest.mark.parametrize("killed", [1, 0])
def test_killed_rank_ends_the_run_and_resume_works(killed, tmp_path):
    folder, other = tmp_path / "run", 1 - killed
    process = torchrun(folder)
    try:
        wait_for(lambda: len(list(folder.glob("checkpoints/iteration_*.pt"))) > 1)
        os.kill(pid_of_rank(killed, process.pid), signal.SIGKILL)
        said, _ = process.communicate(timeout=100)
    finally:
        process.terminate()
    last = f"iteration_{latest(folder):06d}.pt"
    lines = [line for line in said.splitlines() if "torchrl-marl: error" in line]
    assert lines == [
        f"torchrl-marl: error: rank {other} of 2: another rank has ended, or has not answered for "
        f"5 minutes; `torchrl-marl train --resume {folder}` resumes it from {last}, also by "
        "torchrun (-m torchrl_marl), once all can be reached."
    ], said
    assert process.returncode
    number = latest(folder)
    resume(folder, total_frames=40 * (number + 2))
    rows = table(folder / "metrics.csv")
    assert [int(row["iteration"]) for row in rows] == list(range(1, number + 3))


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks for processes in /proc")
def test_killed_ray_ends_the_run_and_resume_works(tmp_path):
    """Ray ends the process itself, so no Python error can be raised."""
    pytest.importorskip("ray")
    folder = tmp_path / "a run"
    ray = ["distributed=ray", "distributed.collectors=1", "distributed.spares=0"]
    process = started(["-m", "torchrl_marl", "train", "toy_arena_mappo", *ray], folder)
    try:
        wait_for(lambda: len(list(folder.glob("checkpoints/iteration_*.pt"))) > 1)
        (raylet,) = (
            int(one.name)
            for one in descendants(process.pid)
            if (one / "cmdline").read_bytes().split(b"\0")[0].endswith(b"raylet")
        )
        os.kill(raylet, signal.SIGKILL)
        said, _ = process.communicate(timeout=100)
    finally:
        process.terminate()
    lines = [line for line in said.splitlines() if line.startswith("torchrl_marl: the Ray")]
    assert lines == [
        "torchrl_marl: the Ray that was started for this run has died (its raylet), and this "
        f"process with it; `torchrl-marl train --resume '{folder}'` resumes it from the "
        "last checkpoint."
    ], said
    assert process.returncode
    number = latest(folder)
    resume(folder, total_frames=40 * (number + 2), distributed={"backend": "none"})
    rows = table(folder / "metrics.csv")
    assert [int(row["iteration"]) for row in rows] == list(range(1, number + 3))
