"""Execution modes of tensor programs: eager, or as graphs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from torchrl_marl.errors import ConfigError, nearest

if TYPE_CHECKING:
    import torch

__all__ = ["EXECUTIONS", "Execution", "check_execution"]

Execution = Literal["eager", "trace", "compile", "cudagraph"]
EXECUTIONS = {
    "eager": "one operation at a time, without graphs",
    "trace": "graphs that run one operation at a time, for debugging",
    "compile": "compiled graphs, on CPU or GPU",
    "cudagraph": "compiled graphs, replayed on a GPU as CUDA graphs",
}
"""Execution mode -> description."""


def check_execution(execution: str, device: torch.device | str | None, where: str) -> None:
    """Raises for an unknown execution mode, and for CUDA graphs without a GPU.

    Args:
        execution (str): ``eager``, ``compile`` (compiled graphs, on CPU or GPU), ``cudagraph``
            (compiled graphs that a GPU replays), or ``trace`` (graphs that are run operation by
            operation, for debugging).
        device (torch.device, optional): device of the program.
        where (str): name of the caller, for the message.

    Raises:
        ConfigError: the mode is unknown, or needs a GPU that is not there; the message names the
            possible modes.

    Examples:
        >>> check_execution("compile", "cpu", "VmasEnv")
    """
    if execution not in EXECUTIONS:
        raise ConfigError(
            f"{where}: execution is {execution!r}; {nearest(str(execution), EXECUTIONS)}"
            f"expected one of {', '.join(EXECUTIONS)}."
        )
    if execution != "cudagraph":
        return
    import torch

    on = torch.device("cpu" if device is None else device).type
    if on != "cuda" or not torch.cuda.is_available():
        has = "" if torch.cuda.is_available() else ", and torch finds no GPU"
        raise ConfigError(
            f"{where}: execution='cudagraph' needs a GPU, the device is {on!r}{has}; "
            "use execution='compile', or device='cuda' on a machine with a GPU."
        )
