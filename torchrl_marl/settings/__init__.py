"""Settings, declared once as fields of frozen dataclasses with types, rules and meanings.

Reading, checks, help, YAML, JSON schema and error messages are derived from the fields.
"""

from typing import TYPE_CHECKING

from torchrl_marl._lazy import attach

if TYPE_CHECKING:
    from torchrl_marl.settings.checking import check, override, read_by_others, unread
    from torchrl_marl.settings.fields import (
        Setting,
        all_settings,
        json_schema,
        settings_of,
        settings_within,
    )
    from torchrl_marl.settings.files import parse_overrides, read_yaml, to_yaml
    from torchrl_marl.settings.formatting import shown
    from torchrl_marl.settings.layers import flatten, merged, unfold
    from torchrl_marl.settings.reading import Reader, normalized, overridden, read, warn_renamed
    from torchrl_marl.settings.rules import (
        AlsoCalled,
        AnyOf,
        Arguments,
        Count,
        Each,
        Formerly,
        Matches,
        OneOf,
        Overrides,
        Positive,
        Range,
        ReadWhere,
        Rule,
        Seed,
        Share,
        Tagged,
        Variants,
        Weight,
    )

__getattr__, __dir__, __all__ = attach(__name__)
