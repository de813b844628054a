"""The message about a dead Ray process is printed whichever process ends first."""

import contextlib
import os
import signal
import subprocess
import sys

import pytest

from torchrl_marl.collectors import death_notice

pytestmark = pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="needs Linux")


@contextlib.contextmanager
def watching():
    """A watched process, and the process that watches it."""
    watched = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    notice = subprocess.Popen(
        [sys.executable, "-I", death_notice.__file__, str(watched.pid), "it has died"],
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        yield watched, notice
    finally:
        watched.kill()
        watched.wait()


def ended(notice, said=None):
    """Output and exit status of the watcher, after its parent wrote to it or ended."""
    return notice.communicate(said, timeout=30)[1], notice.returncode


def test_death_is_printed():
    with watching() as (watched, notice):
        watched.kill()
        assert notice.wait(30) == 1
        assert notice.stderr.read() == b"it has died\n"
        notice.stdin.close()
        notice.stderr.close()


def test_death_together_with_the_parent_is_printed():
    with watching() as (watched, notice):
        os.kill(notice.pid, signal.SIGSTOP)
        watched.kill()
        watched.wait()
        notice.stdin.close()
        os.kill(notice.pid, signal.SIGCONT)
        assert notice.wait(30) == 1
        assert notice.stderr.read() == b"it has died\n"
        notice.stderr.close()


def test_announced_exit_is_not_printed():
    with watching() as (_, notice):
        assert ended(notice, b"x") == (b"", 0)


def test_exit_of_the_parent_alone_is_not_printed():
    with watching() as (_, notice):
        assert ended(notice) == (b"", 0)


def test_earlier_death_is_printed():
    watched = subprocess.Popen([sys.executable, "-c", ""])
    watched.wait()
    command = [sys.executable, "-I", death_notice.__file__, str(watched.pid), "it has died"]
    notice = subprocess.run(command, capture_output=True, timeout=30)
    assert (notice.stderr, notice.returncode) == (b"it has died\n", 1)
