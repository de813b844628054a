"""Lazily stacked groups, and modules that are routed to their agents."""

import torch
from tensordict import TensorDict, lazy_stack
from tensordict.nn import TensorDictModule
from torch import nn
from torch.distributions import Categorical
from torchrl.modules import NormalParamExtractor, ProbabilisticActor, TanhNormal

from torchrl_marl.contrib import RoutedSequential

OBSERVATION, ACTION = ("agents", "observation"), ("agents", "action")
BATCHES = [(), (5,), (2, 3)]


def observed(widths, *batch, leaves=None, path=("agents",)):
    """A lazily stacked group of agents with the given observation widths."""
    leaves = leaves or ["observation"] * len(widths)
    rows = [TensorDict({leaf: torch.randn(*batch, w)}, batch) for leaf, w in zip(leaves, widths)]
    td = lazy_stack(rows, len(batch))
    for name in reversed(path):
        td = TensorDict({name: td}, batch)
    return td


def dense(n, width, *batch):
    own = TensorDict({"observation": torch.randn(*batch, n, width)}, [*batch, n])
    return TensorDict({"agents": own}, batch)


def policy_of(o, a, leaf="observation", out="action", path=("agents",)):
    net = nn.Sequential(nn.Linear(o, 8), nn.Tanh(), nn.Linear(8, a))
    return TensorDictModule(net, in_keys=[(*path, leaf)], out_keys=[(*path, out)])


def actor_of(o, a, spec=None, leaf="observation", group="agents"):
    """An actor with continuous actions of ``a`` features."""
    net = nn.Sequential(nn.Linear(o, 2 * a), NormalParamExtractor())
    keys = {"loc": (group, "loc"), "scale": (group, "scale")}
    bounds = {} if spec is None else {"low": spec.space.low, "high": spec.space.high}
    return ProbabilisticActor(
        TensorDictModule(net, in_keys=[(group, leaf)], out_keys=list(keys.values())),
        in_keys=keys,
        out_keys=[(group, "action")],
        distribution_class=TanhNormal,
        distribution_kwargs=bounds,
        return_log_prob=True,
        log_prob_key=(group, "action_log_prob"),
    )


def chooser_of(o, n, group="agents"):
    """An actor with ``n`` discrete actions."""
    logits = (group, "logits")
    return ProbabilisticActor(
        TensorDictModule(nn.Linear(o, n), in_keys=[(group, "observation")], out_keys=[logits]),
        in_keys={"logits": logits},
        out_keys=[(group, "action")],
        distribution_class=Categorical,
        return_log_prob=True,
        log_prob_key=(group, "action_log_prob"),
    )


def actions(td, key=ACTION):
    return td.get(key, as_list=True)


def by_hand(td, players, leaf="observation", group="agents"):
    """The output of each agent's module for its observation."""
    members = td[group].unbind(-1)
    return [player.module(member[leaf]) for player, member in zip(players, members)]


def assert_actions(td, expected):
    for found, wanted in zip(actions(td), expected, strict=True):
        torch.testing.assert_close(found, wanted)


def mixed():
    """Two continuous actors with 2 and 3 features, and a discrete one with 4 actions."""
    actors = [actor_of(5, 2), actor_of(5, 3), chooser_of(3, 4)]
    policy = RoutedSequential((actors[0], [0, 3]), (actors[1], [1]), (actors[2], [2]))
    return actors, policy, lambda *batch: observed([5, 5, 3, 5], *batch)
