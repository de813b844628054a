"""The algorithms that have a setting, formatted as in messages."""

from torchrl_marl.learners.algorithms import ALGORITHMS
from torchrl_marl.settings import settings_of
from torchrl_marl.settings.formatting import listed


def algorithms_with(key):
    names = [x for x in ALGORITHMS.names() if reads(x, key)]
    return listed(names)


def reads(algorithm, key):
    """True if the algorithm has the setting, and no condition on its name hides it."""
    setting = settings_of(ALGORITHMS.schema(algorithm)).get(key)
    hides = [where for where in setting.read_where() if where.but] if setting else []
    return setting is not None and not any(algorithm in where.values for where in hides)
