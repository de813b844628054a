"""Pictures of worlds that begin the next episode in the step that ends one."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from torchrl_marl.envs.scene import Picture

__all__ = ["LastPictures"]


class LastPictures:
    """Keeps what the first envs look like after a step, before ended ones begin anew.

    An adapter gives ``_draw(index)`` and calls ``_look()`` between the step of its world and the
    start of the next episodes, ``_forget()`` where all begin.
    """

    _watched = 0
    _pictures: tuple[Any, ...] = ()

    def watch(self, number: int) -> None:
        """Draws so many envs in each step from now on, from the first; 0 for none.

        Args:
            number (int): of envs.
        """
        self._watched, self._pictures = number, ()

    def scene(self, index: int = 0) -> Picture:
        """Returns what one of the envs looks like: shapes, pixels or a text.

        Args:
            index (int): which; after the end of an episode that is watched, its last state.
        """
        return self._pictures[index] if self._pictures else self._draw(index)

    def _look(self) -> None:
        if self._watched:
            self._pictures = tuple(self._draw(i) for i in range(self._watched))

    def _forget(self) -> None:
        self._pictures = ()

    @abstractmethod
    def _draw(self, index: int) -> Picture: ...
