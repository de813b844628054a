"""What a graph takes for granted of the policy and the transforms that are recorded in it."""

from __future__ import annotations

from typing import Any

from torch import nn

__all__ = ["fingerprint"]

_SCALARS = (bool, int, float, str, type(None))


def fingerprint(thing: Any) -> tuple:
    """Returns the modules, parameters and buffers of something, and its plain attributes.

    What tensors hold is left out: a graph reads them where they are.

    Args:
        thing (callable): a policy or a transform.

    Examples:
        >>> net = nn.Sequential(nn.Linear(2, 2), nn.Dropout())
        >>> before = fingerprint(net)
        >>> fingerprint(net) == before, fingerprint(net.eval()) == before
        (True, False)
    """
    thing = getattr(thing, "__self__", thing)  # of a bound method
    if not isinstance(thing, nn.Module):
        return (id(thing), *_plain(thing))
    marks: list[Any] = []
    for name, module in thing.named_modules():
        marks += [(name, id(module)), *_plain(module)]
        tensors = [*module._parameters.items(), *module._buffers.items()]
        marks += [(name, key, id(x)) for key, x in tensors]
    return tuple(marks)


def _plain(thing: Any) -> list[tuple[str, Any]]:
    attributes = getattr(thing, "__dict__", {})
    return [(key, x) for key, x in attributes.items() if type(x) in _SCALARS]
