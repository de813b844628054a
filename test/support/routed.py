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


def random_lazy_group(widths, *batch, leaves=None, path=("agents",)):
    """A lazily stacked group of agents with the given observation widths."""
    leaves = leaves or ["observation"] * len(widths)
    rows = [TensorDict({leaf: torch.randn(*batch, w)}, batch) for leaf, w in zip(leaves, widths)]
    td = lazy_stack(rows, len(batch))
    for name in reversed(path):
        td = TensorDict({name: td}, batch)
    return td


def random_dense_group(n, width, *batch):
    group = TensorDict({"observation": torch.randn(*batch, n, width)}, [*batch, n])
    return TensorDict({"agents": group}, batch)


def make_policy(o, a, leaf="observation", out_key="action", path=("agents",)):
    net = nn.Sequential(nn.Linear(o, 8), nn.Tanh(), nn.Linear(8, a))
    return TensorDictModule(net, in_keys=[(*path, leaf)], out_keys=[(*path, out_key)])


def make_continuous_actor(o, a, spec=None, leaf="observation", group="agents"):
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


def make_discrete_actor(o, n, group="agents"):
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


def list_actions(td, key=ACTION):
    return td.get(key, as_list=True)


def actions_one_by_one(td, players, leaf="observation", group="agents"):
    """The output of each agent's module for its observation."""
    members = td[group].unbind(-1)
    return [player.module(member[leaf]) for player, member in zip(players, members)]


def assert_actions(td, expected):
    for found, wanted in zip(list_actions(td), expected, strict=True):
        torch.testing.assert_close(found, wanted)


def make_mixed_policy():
    """Two continuous actors with 2 and 3 features, and a discrete one with 4 actions."""
    actors = [make_continuous_actor(5, 2), make_continuous_actor(5, 3), make_discrete_actor(3, 4)]
    policy = RoutedSequential((actors[0], [0, 3]), (actors[1], [1]), (actors[2], [2]))
    return actors, policy, lambda *batch: random_lazy_group([5, 5, 3, 5], *batch)
