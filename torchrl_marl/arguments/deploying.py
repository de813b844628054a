"""Commands that let agents act elsewhere: ``export`` and ``serve``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torchrl_marl.arguments.words import TRUST, count, execution, port, program_format
from torchrl_marl.export.formats import FORMATS

__all__ = ["add_export", "add_serve"]


def add_export(commands: Any) -> None:
    export = commands.add_parser(
        "export",
        help="write agents that run alone",
        description="Writes what each agent of a run's last checkpoint needs to run alone, with "
        "numpy and onnxruntime only, and plays it beside the team for whole episodes.",
    )
    export.add_argument("run", metavar="RUN", help="the folder that `train` printed")
    export.add_argument("--agent", metavar="NAME", help="one agent; default: all")
    words = ", ".join(f"{word} ({meaning})" for word, meaning in FORMATS.items())
    export.add_argument(
        "--format",
        metavar="FORMAT",
        type=program_format,
        default="onnx",
        help=f"{words}; default: onnx",
    )
    export.add_argument("--out", metavar="FOLDER", type=Path, help="default: RUN/export")
    export.add_argument("--trust", action="store_true", help=TRUST)
    export.set_defaults(rest="")


def add_serve(commands: Any) -> None:
    serve = commands.add_parser(
        "serve",
        help="let a run act for simulators elsewhere",
        description="Opens a port at which simulators elsewhere are clients: they say what their "
        "agents see, and get the actions of a run's last checkpoint. Clients are in the folder "
        "`clients`; they declare what this command prints.",
    )
    serve.add_argument("run", metavar="RUN", help="the folder that `train` printed")
    serve.add_argument(
        "--host",
        default="127.0.0.1",
        help="where to listen; default: 127.0.0.1, any other needs a token",
    )
    serve.add_argument("--port", type=port, default=7777, help="default: 7777; 0: a free one")
    serve.add_argument(
        "--token-file",
        metavar="FILE",
        help="with the token that clients prove to have; default: TORCHRL_MARL_TOKEN, if set",
    )
    serve.add_argument("--tls-cert", metavar="FILE", help="certificate, for TLS")
    serve.add_argument("--tls-key", metavar="FILE", help="its key; default: in the certificate's")
    serve.add_argument(
        "--max-clients", metavar="N", type=count, default=256, help="at once; default: 256"
    )
    serve.add_argument(
        "--stochastic", action="store_true", help="sampled actions; default: the likeliest"
    )
    serve.add_argument(
        "--follow", action="store_true", help="newer checkpoints, as a training writes them"
    )
    serve.add_argument(
        "--execution",
        metavar="WORD",
        type=execution,
        default="compile",
        help="compile (default: some seconds at the start, then quickest), trace or eager",
    )
    serve.add_argument("--trust", action="store_true", help=TRUST)
    serve.set_defaults(rest="")
