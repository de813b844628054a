"""Says what an external simulator's server waits for."""

from __future__ import annotations

import sys
import warnings

with warnings.catch_warnings():  # in a notebook without ipywidgets
    warnings.simplefilter("ignore")
    from tqdm.auto import tqdm

__all__ = ["tell"]


def tell(text: str) -> None:
    """Prints a message above a progress bar."""
    tqdm.write(f"torchrl_marl: {text}.", file=sys.stderr)
