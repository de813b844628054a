"""What all kinds of communication have in common.

Shapes: B any batch dims, N agents that listen, M that speak, H features, K numbers of a message, V
numbers of what is heard of all messages.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable

from torch import Tensor, nn

__all__ = ["Round"]


class Round(nn.Module):
    """Everybody speaks once and listens to those whom it is linked to.

    ``forward`` is ``read(features, code(send(features)), links)``: an agent that runs alone sends
    and reads by the very code of the team. To read is to ``mix`` all messages, which may take
    effect later, and to ``take_in`` what is heard of them.

    Attributes:
        message_size (int): numbers K of a message.
        heard_size (int): numbers V of what is heard.

    Shapes:
        - features: ``[*B, N, H]``, finite, those of the dead 0; links: ``[*B, N, M]``, bool
        - position: ``[*B, N, P]``, for what depends on how far away words are said
        - returns: ``[*B, N, H]``
    """

    message_size: int
    heard_size: int

    @abstractmethod
    def send(self, features: Tensor, position: Tensor | None = None) -> Tensor:
        """Returns what agents say, ``[*B, N, K]``."""

    @abstractmethod
    def mix(
        self, features: Tensor, inbox: Tensor, heard: Tensor, position: Tensor | None = None
    ) -> Tensor:
        """Returns what agents hear of all messages, ``[*B, N, V]``; 0 where they hear nobody.

        Args:
            features, inbox, heard, position: of :meth:`read`.
        """

    @abstractmethod
    def take_in(self, features: Tensor, words: Tensor) -> Tensor:
        """Returns what agents make of what they hear, ``[*B, N, H]``.

        Args:
            features (Tensor): of those who listen, ``[*B, N, H]``.
            words (Tensor): from :meth:`mix`, ``[*B, N, V]``.
        """

    def read(
        self, features: Tensor, inbox: Tensor, heard: Tensor, position: Tensor | None = None
    ) -> Tensor:
        """Returns what agents make of messages, ``[*B, N, H]``.

        Args:
            features (Tensor): of those who listen, ``[*B, N, H]``.
            inbox (Tensor): all messages, ``[*B, M, K]``.
            heard (Tensor): bool, which of them are heard, ``[*B, N, M]``.
            position (Tensor, optional): of those who listen.
        """
        return self.take_in(features, self.mix(features, inbox, heard, position))

    def forward(
        self,
        features: Tensor,
        links: Tensor,
        speaks: Tensor,
        position: Tensor | None = None,
        code: Callable[[Tensor], Tensor] | None = None,
        *,
        later: Callable[[Tensor], Tensor] | None = None,
    ) -> Tensor:
        """Runs the round.

        Args:
            features, links, position: as above.
            speaks (Tensor): bool, who says anything, ``[*B, N]``; links know it already.
            code (callable, optional): what becomes of messages on their way.

        Keyword Args:
            later (callable, optional): of what is heard in this step, to what is known of it now.
        """
        messages = self.send(features, position)
        messages = messages if code is None else code(messages)
        words = self.mix(features, messages, links, position)
        return self.take_in(features, words if later is None else later(words))
