"""What a value of a setting must be beyond its type, said in ``Annotated`` beside the type.

Examples:
    >>> from typing import Annotated
    >>> Share = Annotated[float, Range(0, 1)]
    >>> Schedule = Annotated[str, OneOf({"constant": "stays", "linear": "falls to 0"})]
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass
from operator import attrgetter
from typing import Annotated, Any, Protocol

from torchrl_marl.errors import closest, nearest, quoted
from torchrl_marl.settings.formatting import listed, shown

__all__ = [
    "AlsoCalled",
    "AnyOf",
    "Arguments",
    "Count",
    "Each",
    "Formerly",
    "Matches",
    "OneOf",
    "Overrides",
    "Positive",
    "Range",
    "ReadWhere",
    "Rule",
    "Seed",
    "Share",
    "Tagged",
    "Variants",
    "Weight",
]


class Rule(Protocol):
    """A rule for the values of one setting."""

    def misfit(self, key: str, value: Any, default: Any) -> str | None:
        """Returns what is wrong with a value in one sentence, or None if it is right."""


class OneOf:
    """One word of several.

    Args:
        words (mapping, or function that returns one): word -> meaning.
        form (str, optional): form of further values, such as ``"module:Class"``; any text with a
            colon has it.
        advice (callable, optional): ``advice(word)`` returns what to use in place of a word that is
            known elsewhere, the end of a sentence, or None; ``{at}`` in it is the section.
    """

    def __init__(
        self,
        words: Mapping[str, str] | Callable[[], Mapping[str, str]],
        form: str | None = None,
        advice: Callable[[str], str | None] | None = None,
    ) -> None:
        self._words, self.form, self._advice = words, form, advice

    @property
    def words(self) -> Mapping[str, str]:
        """Word -> meaning."""
        return self._words() if callable(self._words) else self._words

    def word_of(self, value: Any) -> Any:
        """Returns the form of a value that has it, and any other value itself."""
        return self.form if self.form and ":" in str(value) else value

    def misfit(self, key: str, value: Any, default: Any) -> str | None:
        """Returns the words to choose among, if the value is none of them."""
        words = list(self.words)
        if value in words or (self.form is not None and self.word_of(value) == self.form):
            return None
        found = f"{key} is {shown(value)}, expected {listed(words)}"
        advice = None if self._advice is None else self._advice(str(value))
        if advice is not None:
            return f"{found}; {advice.format(at=key.rpartition('.')[0])}."
        use = closest(str(value), words) or words[0]
        return f"{found}; {nearest(str(value), words)}use {key}={use}."


class AnyOf(OneOf):
    """A list of words."""

    def misfit(self, key: str, value: Any, default: Any) -> str | None:
        """Returns the words to choose among, if the list holds another."""
        words = list(self.words)
        wrong = next((word for word in value if word not in words), None)
        if wrong is None:
            return None
        return (
            f"{key} holds {quoted(wrong)}, expected any of {', '.join(words)}; "
            f"{nearest(wrong, words)}use {key}=[{closest(wrong, words) or words[0]}]."
        )


@dataclass(frozen=True, eq=False)
class Range:
    """A number from ``low`` to ``high``, and finite.

    Args:
        low, high (float): the bounds.
        above, below (bool): leave out ``low``, leave out ``high``.
        advised (float, optional): what messages advise where the default is null.
    """

    low: float = -math.inf
    high: float = math.inf
    _: KW_ONLY
    above: bool = False
    below: bool = False
    advised: float | None = None

    def __contains__(self, value: float) -> bool:
        low = value > self.low if self.above else value >= self.low
        high = value < self.high if self.below else value <= self.high
        return bool(math.isfinite(value) and low and high)

    def __str__(self) -> str:
        if math.isinf(self.low):
            return "a finite number"
        low = f"above {self.low:g}" if self.above else f"{self.low:g} or more"
        if math.isinf(self.high):
            return low
        if self.above or self.below:
            return f"{low} and {'below' if self.below else 'at most'} {self.high:g}"
        return f"from {self.low:g} to {self.high:g}"

    def misfit(self, key: str, value: Any, default: Any) -> str | None:
        """Returns the range, if the value lies outside."""
        if value in self:
            return None
        default = self.advised if default is None else default
        use = "null" if default is None else default
        return f"{key} is {quoted(value)}, expected {self}; use {key}={use}."


class Each:
    """A list of numbers that each lie in a range.

    Args:
        range (Range): of every number.
        what (str): what the numbers are, in the plural.
    """

    def __init__(self, range: Range, what: str = "numbers") -> None:
        self.range, self.what = range, what

    def misfit(self, key: str, value: Any, default: Any) -> str | None:
        """Returns the range, if a number lies outside."""
        if all(number in self.range for number in value):
            return None
        use = str(default).replace(" ", "")
        return f"{key} is {quoted(value)}, expected {self.what} of {self.range}; use {key}={use}."


class Matches:
    """A text that a pattern matches as a whole.

    Args:
        pattern (str): a regular expression.
        expected (str): the pattern in words.
    """

    def __init__(self, pattern: str, expected: str) -> None:
        self.pattern, self.expected = pattern, expected

    def misfit(self, key: str, value: Any, default: Any) -> str | None:
        """Returns what was expected, if the pattern does not match."""
        if re.fullmatch(self.pattern, value):
            return None
        return f"{key} is {quoted(value)}, expected {self.expected}; use {key}={default}."


class ReadWhere:
    """A setting that is read only where another one of its section has a certain value.

    Args:
        key (str): the other setting.
        values: those with which this one is read.
        but (bool): those with which it is *not* read.
        of (tuple of str): on a section: which of its settings this is about.
    """

    def __init__(self, key: str, *values: Any, but: bool = False, of: tuple[str, ...] = ()) -> None:
        self.key, self.values, self.but, self.of = key, values, but, of

    def holds(self, section: Any, value_of: Callable[[Any], Any] = lambda value: value) -> bool:
        """Whether a section's settings are such that this one is read."""
        return (value_of(attrgetter(self.key)(section)) in self.values) is not self.but

    def in_words(self, at: str) -> str:
        """Returns the condition as it stands in a sentence."""
        values = " or ".join(shown(value).strip("'") for value in self.values)
        return f"{at}{self.key} is {'not ' if self.but else ''}{values}"


class Formerly:
    """Names that a setting had in its section in an earlier version, still understood."""

    def __init__(self, *names: str) -> None:
        self.names = names


class AlsoCalled:
    """Names that a setting has elsewhere; they are not understood, but lead to it."""

    def __init__(self, *names: str) -> None:
        self.names = names


class Variants(Protocol):
    """Words, each with a schema of its own: a registry of algorithms or of libraries."""

    def words(self) -> Mapping[str, str]:
        """Returns word -> meaning."""

    def schema(self, word: str) -> type | None:
        """Returns the dataclass that says which settings go with a word, or None if none does."""


class Tagged:
    """A section whose schema is chosen by one of its settings, the tag.

    Args:
        by (str): the tag, the first field of each schema.
        variants (Variants): word -> schema; it may have an ``advice`` for :class:`OneOf`.
    """

    def __init__(self, by: str, variants: Variants) -> None:
        self.by, self.variants = by, variants

    @property
    def rule(self) -> OneOf:
        """The rule of the tag: one of the variants' words."""
        return OneOf(self.variants.words, advice=getattr(self.variants, "advice", None))


class Overrides:
    """A mapping of names to settings that differ from those of another section.

    Args:
        of (str): the other section.
        example (str): a setting of it that a message may name.
    """

    def __init__(self, of: str, example: str) -> None:
        self.of, self.example = of, example


class Arguments:
    """A mapping of arguments, of which some are typed by a schema that another setting chooses.

    Arguments that the schema does not name are taken as they are.

    Args:
        by (str): the other setting, in the same section.
        variants (Variants): word -> schema, or None where nothing is known of the arguments.
    """

    def __init__(self, by: str, variants: Variants) -> None:
        self.by, self.variants = by, variants


Count = Annotated[int, Range(1)]
"""The type of a field that counts: an integer of at least 1."""
Share = Annotated[float, Range(0, 1)]
"""The type of a field that is a share of something: a number from 0 to 1."""
Positive = Annotated[float, Range(0, above=True)]
"""The type of a field above 0."""
Weight = Annotated[float, Range(0)]
"""The type of a field that weighs something: a number of at least 0."""
Seed = Annotated[int, Range(0, 2**32 - 1)]
"""The type of a field that is a seed: an integer of 32 bits."""
