"""The listed settings of an algorithm are exactly those that it reads."""

import pytest

from torchrl_marl.errors import ConfigError
from torchrl_marl.learners.algorithms import ALGORITHMS
from torchrl_marl.recipes import read_config
from torchrl_marl.settings import (
    Reader,
    all_settings,
    check,
    read,
    read_by_others,
    settings_of,
    settings_within,
    unread,
)
from torchrl_marl.training.config import TrainConfig

EVERY = {k for k in all_settings(TrainConfig) if k.startswith("learner.")}
OF_NONE = {float: [0.5], int: [8], list[int]: [[0, 1]], str: ["first"], bool: [True, False]}


def is_taken(algorithm, key, value, beside):
    try:
        config = read(ALGORITHMS.schema(algorithm), {"algorithm": algorithm, **beside, key: value})
        check(config)
    except ConfigError:
        return False
    return not unread(config)


def other_values(setting):
    """Legal values that are not the default."""
    value = setting.default
    if setting.words:
        return [word for word in setting.words if word != value]
    if value is None or isinstance(value, bool):
        return [x for x in OF_NONE[setting.kind] if x is not value]
    if isinstance(value, list):
        return [[8]]
    found = [value + 1, value // 2] if setting.kind is int else [value / 2, 0.5]
    ranges = [note for note in setting.notes if hasattr(note, "low")]
    return [x for x in found if x != value and all(x in own for own in ranges)]


def needs(config, key):
    """The other settings that are required for a setting to be read."""
    *path, name = key.split(".")
    section = config
    for part in path:
        section = getattr(section, part)
    known, found = settings_within(type(section)), {}
    for where in known[name].read_where():
        if where.key != "algorithm" and not where.holds(section):
            other = ".".join([*path, where.key])
            fit = [x for x in other_values(settings_of(config)[other]) if x not in where.values]
            value = fit[0] if where.but else where.values[0]
            found |= {**needs(config, other), other: value}
            found |= {".".join([*path, "sharing_index"]): [0, 1]} if value == "index" else {}
    return found


@pytest.mark.parametrize("algorithm", ALGORITHMS.names())
def test_listed_settings_are_read(algorithm):
    config = ALGORITHMS.schema(algorithm)(algorithm)
    idle = read_by_others(TrainConfig(learner=config))
    for key, setting in settings_of(config).items():
        if key != "algorithm":
            beside = needs(config, key)
            taken = [x for x in other_values(setting) if is_taken(algorithm, key, x, beside)]
            parts = f"learner.{key}".split(".")
            listed = not any(".".join(parts[:i]) in idle for i in range(2, len(parts) + 1))
            assert bool(taken) is listed, (key, taken)


@pytest.mark.parametrize("algorithm", ALGORITHMS.names())
def test_settings_of_other_algorithms_are_inapplicable(algorithm):
    known = {f"learner.{key}" for key in settings_of(ALGORITHMS.schema(algorithm))}
    reader = Reader(TrainConfig)
    reader.read({"learner": algorithm, **dict.fromkeys(EVERY - known, 1)})
    assert reader.inapplicable.keys() == EVERY - known


def test_settings_that_an_algorithm_does_not_read():
    def idle(algorithm):
        learner = read_config("toy_arena_mappo", {"learner": algorithm})
        return {key.removeprefix("learner.") for key in read_by_others(learner)}

    mixer = {"mixer.hidden", "mixer.init_scale"}
    assert idle("vdn") == {"central_input", "bootstrap", *mixer}
    assert idle("iql") == {"central_input", "mixer.over", *mixer}
    assert idle("qmix") == {"bootstrap"}
    assert {"unshare_at", "actor.sharing", "actor.n_clusters"} < idle("happo")
