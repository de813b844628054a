"""The reader on a test schema: sections, tags, overrides, arguments, former names."""

import json
from dataclasses import dataclass, field

import pytest
import yaml
from example_schema import (
    Fast,
    Memory,
    Ride,
    Schema,
    Slow,
    Walk,
    World,
    refusal,
)

from torchrl_marl.errors import ConfigError
from torchrl_marl.settings import (
    Reader,
    Tagged,
    check,
    json_schema,
    overridden,
    override,
    parse_overrides,
    read,
    settings_of,
    to_yaml,
)
from torchrl_marl.settings.files import _Dumper, _parse_yaml
from torchrl_marl.settings.layers import UNFIT, WORD, converted, merged


class TestPlainWords:
    @pytest.mark.parametrize("texts", [["memory=gru"], ["memory.cell=gru"]])
    def test_single_value_for_a_section_sets_its_first_field(self, texts):
        assert read(Schema, parse_overrides(texts)).memory == Memory("gru", 8)

    @pytest.mark.parametrize(
        "texts", [["memory=gru", "memory.size=3"], ["memory.size=3", "memory=gru"]]
    )
    def test_single_value_combines_with_other_settings(self, texts):
        assert read(Schema, parse_overrides(texts)).memory == Memory("gru", 3)

    def test_later_layer_wins(self):
        assert read(Schema, {"memory": "gru"}, {"memory.cell": "none"}).memory.cell == "none"
        assert read(Schema, {"memory.cell": "none"}, {"memory": "gru"}).memory.cell == "gru"

    def test_later_single_value_keeps_other_settings(self):
        first = merged({"memory": "none"}, {"memory": {"size": 3}})
        assert merged(first, {"memory": "gru"}) == {"memory": {WORD: "gru", "size": 3}}

    def test_boolean_words(self):
        found = [converted(bool, word) for word in ("true", "Yes", "on", "false", "No", "off")]
        assert found == [True, True, True, False, False, False]
        assert converted(bool, "maybe") is UNFIT

    def test_unknown_single_value_is_refused(self):
        assert refusal("memory=lstm").startswith("memory.cell is 'lstm', expected none or gru;")
        assert refusal("memory=3") == (
            "memory is 3, expected settings under it; set one of them, such as memory.cell."
        )


class TestTags:
    def test_tag_selects_the_schema(self):
        assert read(Schema, {"learner": "slow", "learner.patience": 2}).learner == Slow("slow", 2)
        assert read(Schema, {"learner": "quick"}).learner == Fast("quick")

    def test_setting_of_another_tag_is_refused(self):
        assert refusal("learner.patience=2") == (
            "learner.patience is 2, which is read only where learner.method is slow; "
            "leave learner.patience out."
        )
        assert "is read only where learner.method is fast or quick" in refusal(
            "learner=slow", "learner.speed=2"
        )
        assert refusal("learner.patienc=2").startswith(
            "unknown setting 'learner.patienc'; did you mean 'learner.patience'?"
        )

    def test_default_value_of_another_tag_is_refused(self):
        assert refusal("learner=slow", "learner.speed=1") == (
            "learner.speed is 1, which is read only where learner.method is fast or quick; "
            "leave learner.speed out."
        )
        reader = Reader(Schema)
        assert reader.read({"learner": {"method": "slow", "speed": 1, "steps": 4}}).learner == (
            Slow("slow", steps=4)
        )
        assert reader.by_default == set(reader.inapplicable) == {"learner.speed"}

    def test_inapplicable_settings_are_dropped_and_recorded(self):
        reader = Reader(Schema)
        assert reader.read({"learner.patience": 2}).learner == Fast()
        assert list(reader.inapplicable) == ["learner.patience"]

    def test_unknown_tag_is_refused(self):
        assert refusal("learner=fest") == (
            "learner.method is 'fest', expected fast, quick or slow; did you mean 'fast'? "
            "use learner.method=fast."
        )


class TestOverrides:
    def test_group_override_uses_the_schema_of_its_tag(self):
        config = read(Schema, {"learner.steps": 4, "groups": {"a": "slow", "b": {"speed": 2}}})
        assert config.groups == {"a": {"method": "slow"}, "b": {"speed": 2.0}}
        assert override(config, "groups", "a") == Slow("slow", steps=4)
        assert override(config, "groups", "b") == Fast("fast", 2.0, 4)
        assert override(config, "groups", "c") == config.learner

    def test_override_inherits_fields_of_the_common_base_class(self):
        """Fields that only share a name are not inherited, nor are defaults."""

        class Ways:
            def words(self):
                return {"walk": "on foot", "ride": "on a horse"}

            def schema(self, word):
                return {"walk": Walk, "ride": Ride}.get(word)

        by = Tagged("method", Ways())
        assert overridden(by, Walk(), {"method": "ride"}) == Ride()
        base = Walk(far=9, steps=7, pause=4)
        assert overridden(by, base, {"method": "ride"}) == Ride(far=9, pause=4)
        assert overridden(by, base, {"steps": 8}) == Walk(far=9, steps=8, pause=4)

    def test_section_settings_apply_to_group_overrides(self):
        config = read(Schema, {"learner.patience": 2, "groups": {"a": "slow", "b": {"steps": 1}}})
        assert config.learner == Fast()
        assert override(config, "groups", "a") == Slow("slow", 2)
        assert override(config, "groups", "b") == Fast(steps=1)

    def test_invalid_overrides_are_refused(self):
        assert refusal("groups.a.patience=2").startswith(
            "groups.a.patience is 2, which is read only where groups.a.method is slow;"
        )
        assert refusal("groups.a.speed=0") == (
            "groups.a.speed is 0.0, expected above 0; use groups.a.speed=1.0."
        )
        assert refusal("groups.a=3").endswith("set one of them, such as groups.a.steps.")


class TestArguments:
    def test_argument_types_depend_on_another_setting(self):
        config = read(Schema, {"world.kwargs": {"wheels": 6.0, "color": "red"}})
        assert config.world.kwargs == {"wheels": 6, "color": "red"}
        assert isinstance(config.world.kwargs["wheels"], int)
        other = read(Schema, {"world": {"vehicle": "boat", "kwargs": {"wheels": "none"}}})
        assert other.world.kwargs == {"wheels": "none"}

    def test_invalid_arguments_are_refused(self):
        assert refusal("world.kwargs.wheels=x") == (
            "world.kwargs.wheels is 'x', expected an integer, such as 4."
        )
        assert refusal("world.kwargs.wheels=9") == (
            "world.kwargs.wheels is 9, expected from 2 to 8; use world.kwargs.wheels=4."
        )
        assert refusal("world.kwargs.wheels=2", "world.kwargs.spare=true") == (
            "world.kwargs.spare is true, which is read only where world.kwargs.wheels is not 2"
        )
        assert "did you mean 'world.kwargs.spare'?" in refusal("spare=true")

    def test_moved_setting_is_read_with_a_warning(self):
        with pytest.warns(
            FutureWarning, match=r"world\.wheels was renamed to world\.kwargs\.wheels"
        ):
            assert read(Schema, {"world.wheels": 3}).world.kwargs == {"wheels": 3}
        old = {"world": {"vehicle": "boat", "wheels": 4}}  # as a run's complete config.yaml has it
        assert read(Schema, old).world == World("boat")
        with pytest.raises(ConfigError, match=r"world\.wheels and world\.kwargs\.wheels are both"):
            read(Schema, {"world.wheels": 3, "world.kwargs.wheels": 2})


class TestFormerNames:
    def test_old_name_is_read_with_a_warning(self):
        with pytest.warns(FutureWarning, match=r"memory\.width was renamed to memory\.size"):
            assert read(Schema, {"memory": {"cell": "gru", "width": 3}}).memory.size == 3

    def test_old_name_is_read_silently_if_warn_is_false(self, recwarn):
        assert Reader(Schema).read({"memory.width": 3}, warn=False).memory.size == 3
        assert not recwarn


class TestNames:
    """Interpolation: ``${name}`` in a string is another setting."""

    def test_interpolation_alone_and_within_a_string(self):
        config = read(Schema, {"seed": 7, "name": "run_${seed}", "learner.steps": "${seed}"})
        assert (config.name, config.learner.steps) == ("run_7", 7)
        assert read(Schema, {"name": "${memory.cell}_${learner.speed}"}).name == "none_1.0"
        assert read(Schema, {"groups.a.steps": "${learner.steps}"}).groups == {"a": {"steps": 3}}

    @pytest.mark.parametrize("text", ["${none}", "${memory}", "${name}", "${", "${}", "a${b"])
    def test_invalid_interpolation_is_refused(self, text):
        with pytest.raises(ConfigError, match=r"^name(: Interpolation key| is '.*', expected)"):
            read(Schema, {"name": text})


def test_checks_of_fields_and_of_the_whole_config():
    assert refusal("rate=2") == "rate is 2.0, expected from 0 to 1; use rate=null."
    assert refusal("seed=10") == "seed is too large."
    check(read(Schema, {"seed": 10}), skip=("world",))
    assert refusal("memory.size=3") == (
        "memory.size is 3, which is read only where memory.cell is gru"
    )
    assert refusal("world.vehicle=plane").startswith("world.vehicle is 'plane', expected car or")
    check(read(Schema, {"world.vehicle": "my:Plane"}))


@pytest.mark.parametrize(
    "text", ["1e-3", "x # y", "null", "2026-01-01", "a: b", "", " ", "a\nb", "\ud800", "é", "yes"]
)
def test_yaml_round_trip(text):
    config = read(Schema, {"name": text, "world.kwargs": {"a": text, "b": [text, 1e-05]}})
    assert read(Schema, _parse_yaml(to_yaml(config))) == config


def test_yaml_lists_all_choices():
    assert "cell: none  # What remembers. One of none, gru." in to_yaml(Schema())
    assert "method: fast  # Which way. One of fast, quick, slow." in to_yaml(Schema())


@pytest.mark.parametrize(
    "text", ["&a {b: *a}", "!!set {a}", "!!binary aGk=", "{null: 1}", "{a: 1, a: 2}", "[" * 5000]
)
def test_invalid_yaml_values_are_refused(text):
    assert "expected a YAML value" in refusal(f"world.kwargs.x={text}")


@pytest.mark.parametrize(
    ("text", "value"),
    [("010", 10), ("-017", -17), ("08", 8), ("1_000", 1000), ("0x10", 16), ("-0b11", -3)]
    + [("12:30", "12:30"), ("0o17", "0o17"), ("0b2", "0b2")],
)
def test_leading_zeros_are_no_octal_numbers(text, value):
    """`for seed in $(seq -w 0 100)` gave 010 the seed 8, as 008; 12:30 was 750."""
    assert parse_overrides([f"a={text}"]) == {"a": value}
    assert _parse_yaml(yaml.dump(value, Dumper=_Dumper)) == value
    written = yaml.dump(str(value), Dumper=_Dumper)
    assert yaml.safe_load(written) == _parse_yaml(written) == str(value)


def test_yaml_alias_bomb_is_refused():
    bomb = "[&a [x, x, x, x, x, x, x, x, x, x]"
    for one, more in zip("abcdef", "bcdefg"):
        bomb += f", &{more} [{', '.join([f'*{one}'] * 10)}]"
    assert "expected a YAML value" in refusal(f"world.kwargs.x={bomb}]")


class TestJsonSchema:
    @pytest.fixture
    def valid(self):
        validator = pytest.importorskip("jsonschema").Draft202012Validator
        schema = json.loads(json.dumps(json_schema(Schema)))
        validator.check_schema(schema)
        return validator(schema).is_valid

    @pytest.mark.parametrize(
        ("settings", "right"),
        [
            ({"seed": 3, "rate": None, "name": "a"}, True),
            ({"sed": 3}, False),
            ({"seed": "x"}, False),
            ({"rate": 1.5}, False),
            ({"memory": {"cell": "gru", "size": 2}}, True),
            ({"memory": {"cell": "lstm"}}, False),
            ({"memory": {"size": 0}}, False),
            ({"memory": "gru"}, True),
            ({"memory": "lstm"}, False),
            ({"learner": {"speed": 2}}, True),
            ({"learner": {"method": "slow", "speed": 2}}, False),
            ({"learner": {"method": "slow", "patience": 2}}, True),
            ({"learner": "slow"}, True),
            ({"groups": {"a": {"method": "slow", "patience": 1}, "b": "fast"}}, True),
            ({"groups": {"a": {"nothing": 1}}}, False),
            ({"world": {"vehicle": "my:Plane", "kwargs": {"a": 1}}}, True),
            ({"world": {"vehicle": "plane"}}, False),
        ],
    )
    def test_json_schema_and_reader_accept_the_same_settings(self, valid, settings, right):
        assert valid(settings) is right


def test_schema_without_source_has_no_help_texts():
    names = {"dataclass": dataclass}
    exec("@dataclass(frozen=True)\nclass Typed:\n    a: int = 1\n    '''Not found.'''", names)
    assert settings_of(names["Typed"])["a"].help == ""


@dataclass(frozen=True)
class Trip:
    way: Walk = field(default_factory=lambda: Walk(steps=7))
    """How."""


def test_section_starts_with_the_defaults_of_its_field():
    assert read(Trip, {"way.far": 4}).way == Walk(steps=7, far=4)
    assert settings_of(Trip)["way.steps"].default == 7
    assert to_yaml(Trip()).count("steps: 7") == 1
    assert json_schema(Trip)["properties"]["way"]["anyOf"][1]["properties"]["steps"]["default"] == 7
