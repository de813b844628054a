"""Registries of named objects from this package, user code or installed packages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from importlib import import_module, metadata
from importlib.metadata import EntryPoint
from inspect import isclass, isfunction
from typing import Any, Generic, Protocol, TypeVar

from torchrl_marl.errors import ConfigError, UserError, quoted

__all__ = ["Registry", "import_object"]


class Described(Protocol):
    """An object with a description of one line."""

    @property
    def meaning(self) -> str:
        """The description."""


T = TypeVar("T", bound=Described)


@cache
def entry_points(group: str) -> tuple[EntryPoint, ...]:
    """Returns the entry points of a group, looked up once since the lookup is slow."""
    return tuple(metadata.entry_points(group=group))


class Registry(Generic[T]):
    """Registry of objects by the names that settings use, imported on first use.

    A name is registered in ``known``, by :meth:`add`, or by an entry point of an installed
    package, ``name = module:NAME``.

    Args:
        what (str): what a registered object is called in messages, such as ``"algorithm"``.
        kind (type): class of the registered objects.
        group (str, optional): group of the entry points; None if packages cannot add names.
        known (mapping): name -> object, or the path for its import, ``"module:NAME"``.
    """

    def __init__(
        self, what: str, kind: type[T], group: str | None, known: Mapping[str, T | str]
    ) -> None:
        self.what, self.kind, self.group = what, kind, group
        self._known: dict[str, T | str] = dict(known)
        self._failed: dict[str, UserError] = {}  # path of an entry point -> why it failed

    def names(self) -> tuple[str, ...]:
        """Returns all names, with those of installed packages last."""
        return tuple(dict.fromkeys([*self._known, *self._entry_points()]))

    def items(self) -> Iterator[tuple[str, T]]:
        """Yields every name and its object, without objects that cannot be imported."""
        for word in self.names():
            try:
                found = self.find(word)
            except UserError:
                continue
            assert found is not None
            yield word, found

    def words(self) -> dict[str, str]:
        """Returns the description of each name, or why its object cannot be imported.

        Examples:
            >>> from torchrl_marl.modules.registry import SHARINGS
            >>> SHARINGS.words()["none"]
            'a network for each agent'
        """
        return {word: self._describe(word) for word in self.names()}

    def _describe(self, word: str) -> str:
        try:
            found = self.find(word)
        except UserError as error:
            return str(error)
        assert found is not None
        return found.meaning

    def find(self, word: str) -> T | None:
        """Returns the object of a name, or None if the name is unknown.

        Raises:
            ConfigError: the object cannot be imported, or has the wrong type.
        """
        found: Any = self._known.get(word)
        if found is None:
            point = self._entry_points().get(word)
            if point is None:
                return None
            found = self._load_entry_point(word, point.value)
        if isinstance(found, str):
            found = self.load(word, found)
        if not isinstance(found, self.kind):
            raise ConfigError(
                f"{self.what} {quoted(word)} is {quoted(found)}, expected a "
                f"{self.kind.__module__}.{self.kind.__name__}."
            )
        return found

    def _load_entry_point(self, word: str, place: str) -> Any:
        """Imports the object of an entry point, once even if that fails, since it can be slow."""
        if place not in self._failed:
            try:
                return self.load(word, place)
            except UserError as error:
                self._failed[place] = error
        raise self._failed[place].with_traceback(None)

    def load(self, word: str, place: str) -> Any:
        """Imports the object at ``"module:NAME"``.

        Raises:
            ConfigError: the module cannot be imported, or does not define ``NAME``.
        """
        return import_object(f"{self.what} {quoted(word)}", place)

    def add(self, word: str, record: T) -> None:
        """Registers an object under a name.

        A notebook's cell can run again: a function or class with the module and name of the
        registered one replaces it.

        Raises:
            ConfigError: the name is taken.
        """
        before = self._known.get(word, record)
        if _definition(before) != _definition(record) or word in self._entry_points():
            raise ConfigError(
                f"{self.what} {quoted(word)} is registered already; choose another name."
            )
        self._known[word] = record

    def remove(self, word: str) -> None:
        """Removes a registered name."""
        del self._known[word]

    def _entry_points(self) -> dict[str, EntryPoint]:
        points = () if self.group is None else entry_points(self.group)
        return {point.name: point for point in points}


def import_object(what: str, place: str) -> Any:
    """Imports the object at ``"module:NAME"``.

    Args:
        what (str): what needs the object, for the message.
        place (str): the path.

    Raises:
        ConfigError: the module cannot be imported, or does not define ``NAME``.

    Examples:
        >>> import_object("a circle", "math:pi")
        3.141592653589793
    """
    module, _, name = place.partition(":")
    try:
        return getattr(import_module(module), name)
    except UserError:
        raise
    except Exception as error:
        raise ConfigError(
            f"{what} needs {place}, which cannot be imported "
            f"({type(error).__name__}: {error}); fix it, or uninstall its package."
        ) from error


def _definition(record: Any) -> Any:
    """Returns what stays equal if a notebook's cell runs again with another text or function."""
    if is_dataclass(record):
        own = [part.name for part in fields(record) if part.name != "meaning"]
        return [_definition(getattr(record, name)) for name in own]
    if isfunction(record) or isclass(record):
        name = record.__module__, record.__qualname__
        return record if "<lambda>" in name[1] else name
    return record
