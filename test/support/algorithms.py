"""Which algorithms have a setting, as sentences list them."""

from torchrl_marl.learners.algorithms import ALGORITHMS
from torchrl_marl.settings import settings_of
from torchrl_marl.settings.formatting import listed


def algorithms_with(key):
    names = [x for x in ALGORITHMS.names() if key in settings_of(ALGORITHMS.schema(x))]
    return listed(names)
