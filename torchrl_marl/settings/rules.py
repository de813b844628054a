"""Rules for the values of settings, given in ``Annotated`` in addition to a type.

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
        """Returns an error message of one sentence for a wrong value, or None for a valid one."""


class OneOf:
    """A choice among several words.

    Args:
        words (mapping, or function that returns one): allowed word -> its meaning.
        form (str, optional): form of further allowed values, such as ``"module:Class"``. Any text
            with a colon is taken to have this form.
        advice (callable, optional): ``advice(word)`` returns the end of the error message for a
            name from another library, or None. ``{at}`` in this text is replaced by the section's
            name.
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
        """The meaning of each allowed word."""
        return self._words() if callable(self._words) else self._words

    def word_of(self, value: Any) -> Any:
        """Returns ``form`` if the value has this form, else the value."""
        return self.form if self.form and ":" in str(value) else value

    def misfit(self, key: str, value: Any, default: Any) -> str | None:
        """Returns an error message if the value is not allowed."""
        words = list(self.words)
        if value in words or (self.form is not None and self.word_of(value) == self.form):
            return None
        found = f"{key} is {shown(value)}, expected {listed(words)}"
        advice = None if self._advice is None else self._advice(str(value))
        if advice is not None:
            return f"{found}; {advice.format(at=key.rpartition('.')[0])}."
        near = closest(str(value), words)
        own = callable(self._words) and near is None  # words of a registry
        register = f", or register {shown(value)} first (docs/extending.md)" if own else ""
        return f"{found}; {nearest(str(value), words)}use {key}={near or words[0]}{register}."


class AnyOf(OneOf):
    """A list of allowed words."""

    def misfit(self, key: str, value: Any, default: Any) -> str | None:
        """Returns an error message if the list holds an unknown word."""
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
    """A finite number from ``low`` to ``high``.

    Args:
        low, high (float): the bounds.
        above, below (bool): whether ``low`` and ``high`` themselves are excluded.
        advised (float, optional): value that error messages suggest if the default is null.
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
        low = (
            f"above {_format_number(self.low)}"
            if self.above
            else f"{_format_number(self.low)} or more"
        )
        if math.isinf(self.high):
            return low
        high = _format_number(self.high)
        if self.above or self.below:
            return f"{low} and {'below' if self.below else 'at most'} {high}"
        return f"from {_format_number(self.low)} to {high}"

    def misfit(self, key: str, value: Any, default: Any) -> str | None:
        """Returns an error message if the value is outside the range."""
        if value in self:
            return None
        default = self.advised if default is None else default
        use = "null" if default is None else default
        return f"{key} is {quoted(value)}, expected {self}; use {key}={use}."


class Each:
    """A list of numbers in a range.

    Args:
        range (Range): range of every number.
        what (str): plural noun by which messages call the numbers.
    """

    def __init__(self, range: Range, what: str = "numbers") -> None:
        self.range, self.what = range, what

    def misfit(self, key: str, value: Any, default: Any) -> str | None:
        """Returns an error message if a number is outside the range."""
        if all(number in self.range for number in value):
            return None
        use = str(default).replace(" ", "")
        return f"{key} is {quoted(value)}, expected {self.what} of {self.range}; use {key}={use}."


class Matches:
    """A string that fully matches a pattern.

    Args:
        pattern (str): regular expression.
        expected (str): description of the pattern for messages.
    """

    def __init__(self, pattern: str, expected: str) -> None:
        self.pattern, self.expected = pattern, expected

    def misfit(self, key: str, value: Any, default: Any) -> str | None:
        """Returns an error message if the pattern does not match."""
        if re.fullmatch(self.pattern, value):
            return None
        return f"{key} is {quoted(value)}, expected {self.expected}; use {key}={default}."


class ReadWhere:
    """Condition for reading a setting: another setting of its section has certain values.

    Args:
        key (str): name of the other setting.
        values: values of the other setting for which this setting is read.
        but (bool): True if ``values`` are those for which this setting is *not* read.
        of (tuple of str): settings to which the condition applies, if it annotates a section.
        always (tuple): values of this setting that are read in any case.
    """

    always: tuple[Any, ...] = ()

    def __init__(
        self,
        key: str,
        *values: Any,
        but: bool = False,
        of: tuple[str, ...] = (),
        always: tuple[Any, ...] = (),
    ) -> None:
        self.key, self.values, self.but, self.of, self.always = key, values, but, of, always

    def holds(self, section: Any, value_of: Callable[[Any], Any] = lambda value: value) -> bool:
        """Returns whether the values of a section fulfil the condition."""
        return (value_of(attrgetter(self.key)(section)) in self.values) is not self.but

    def in_words(self, at: str) -> str:
        """Returns the condition as a clause of a sentence."""
        values = " or ".join(shown(value).strip("'") for value in self.values)
        return f"{at}{self.key} is {'not ' if self.but else ''}{values}"


class Formerly:
    """Former names of a setting in its section, which are still accepted."""

    def __init__(self, *names: str) -> None:
        self.names = names


class AlsoCalled:
    """Names of a setting in other libraries, for which error messages suggest this setting."""

    def __init__(self, *names: str) -> None:
        self.names = names


class Variants(Protocol):
    """Protocol of a registry (of algorithms or libraries) in which a name can have a schema."""

    def words(self) -> Mapping[str, str]:
        """Returns the meaning of each name."""

    def schema(self, word: str) -> type | None:
        """Returns the dataclass of a name's settings, or None if it has none."""


class Tagged:
    """A section that has a schema for each value of one of its settings, the tag.

    Args:
        by (str): name of the tag, the first field of each schema.
        variants (Variants): registry of schemas, optionally with ``advice`` for :class:`OneOf`.
    """

    def __init__(self, by: str, variants: Variants) -> None:
        self.by, self.variants = by, variants

    @property
    def rule(self) -> OneOf:
        """Rule that allows only the names of the variants as the tag."""
        return OneOf(self.variants.words, advice=getattr(self.variants, "advice", None))


class Overrides:
    """A mapping of names to settings that override those of another section.

    Args:
        of (str): name of the other section.
        example (str): one setting of that section, as an example in messages.
    """

    def __init__(self, of: str, example: str) -> None:
        self.of, self.example = of, example


class Arguments:
    """A mapping of arguments, with types from a schema that depends on another setting.

    Arguments that are not in the schema are passed on unchanged.

    Args:
        by (str): name of the other setting, in the same section.
        variants (Variants): registry of schemas; None in it means that arguments are not checked.
    """

    def __init__(self, by: str, variants: Variants) -> None:
        self.by, self.variants = by, variants


Count = Annotated[int, Range(1)]
"""Type of a count: an integer of at least 1."""
Share = Annotated[float, Range(0, 1)]
"""Type of a share: a number from 0 to 1."""
Positive = Annotated[float, Range(0, above=True)]
"""Type of a positive number."""
Weight = Annotated[float, Range(0)]
"""Type of a weight: a number of at least 0."""
Seed = Annotated[int, Range(0, 2**32 - 1)]
"""Type of a random seed: an unsigned 32-bit integer."""


def _format_number(x: float) -> str:
    return str(x) if isinstance(x, int) else f"{x:g}"
