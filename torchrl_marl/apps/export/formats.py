"""Formats of exported programs; this module does not import torch."""

from __future__ import annotations

import importlib.util

from torchrl_marl.errors import ConfigError, MissingExtraError, nearest, quoted

__all__ = ["FORMATS", "check_format"]

FORMATS = {"onnx": "for onnxruntime", "pt2": "for torch, by torch.export"}


def check_format(word: str) -> None:
    """Raises an error if a format is unknown or its packages are missing.

    Raises:
        ConfigError: the format is unknown.
        MissingExtraError: onnx, onnxscript or onnxruntime is not installed.

    Examples:
        >>> check_format("pt2")
    """
    if word not in FORMATS:
        raise ConfigError(
            f"format is {quoted(word)}; {nearest(str(word), FORMATS)}"
            f"expected one of {', '.join(FORMATS)}."
        )
    for package in ("onnx", "onnxscript", "onnxruntime") if word == "onnx" else ():
        if importlib.util.find_spec(package) is None:
            raise MissingExtraError(package, "export")
