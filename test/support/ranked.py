"""Ranks on this machine: processes that are connected by gloo."""

import multiprocessing
import os
import socket
import sys
import traceback

import torch

from torchrl_marl.runtime.ranks import Ranks

# Ranks are forked from a process that has only imported these modules.
PRELOADED = ["torchrl_marl.training.trainer", "torchrl_marl.runs", "torchrl_marl.envs.toy"]


def on_ranks(n, work, *args, joined=True):
    """The results of ``work(ranks, *args)`` on n ranks, each in a separate process.

    Args:
        n (int): number of ranks.
        work (callable): function of a module that the processes can import.
        *args: picklable arguments.
        joined (bool): If False, ``work(*args)`` joins the other ranks itself.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    found = [context.Pipe(duplex=False) for _ in range(n)]
    port = free_port()
    processes = [
        context.Process(
            target=_run,
            args=(variables_of(n, rank, port), send, list(sys.path), work, args, joined),
        )
        for rank, (_, send) in enumerate(found)
    ]
    for process, (_, send) in zip(processes, found):
        process.start()
        send.close()
    try:
        results = [receive.recv() for receive, _ in found]
    except EOFError:
        raise AssertionError("a rank ended without a result; its words are above") from None
    finally:
        for process in processes:
            process.join(60)
            process.kill()
    return results


def free_port():
    """An unused port of this machine."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def variables_of(n, rank, port):
    """The environment variables of torchrun for a rank, and those of this process."""
    return {
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(n),
        "LOCAL_WORLD_SIZE": str(n),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo",
    }


def _run(variables, send, path, work, args, joined):
    sys.path[:] = path
    os.environ.update(variables)
    torch.set_num_threads(1)
    ranks = Ranks.start() if joined else None
    try:
        send.send(work(ranks, *args) if joined else work(*args))
    except BaseException:
        traceback.print_exc()
        raise
    finally:
        if joined:
            ranks.leave()
