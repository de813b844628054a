"""Transitions for off-policy losses, and invariances: masked values, order, other groups."""

import torch
from samples import POISON, assert_same, make_group, make_trajectory, poisoned
from tensordict import TensorDict

from torchrl_marl.modules import RandomActor
from torchrl_marl.specs.joining import join


def random_steps(group, *batch, seed=0, alive=0.7):
    """Random transitions; masks and flags may be inconsistent."""
    td = make_trajectory(group, *batch, seed=seed, alive=alive)
    torch.manual_seed(seed)
    return RandomActor(group)(td)


def one_step_of_two_agents(action, mask=(True, True), next_mask=(True, True), **flags):
    """Two agents observe 1 and 2, then 2 and 4, and earn 1 and 5; ``flags`` are done flags."""
    end_flags = {"terminated": [[False], [False]], "truncated": [[False], [False]]} | flags
    done = (torch.tensor(end_flags["terminated"]) | torch.tensor(end_flags["truncated"])).unsqueeze(
        0
    )
    agent_flags = {key: torch.tensor([x]) for key, x in end_flags.items()} | {"done": done}
    next_step = {
        "observation": torch.tensor([[[2.0], [4.0]]]),
        "mask": torch.tensor([next_mask]),
        "reward": torch.tensor([[[1.0], [5.0]]]),
    }
    step = {
        "observation": torch.tensor([[[1.0], [2.0]]]),
        "action": torch.tensor([action]),
        "mask": torch.tensor([mask]),
    }
    root = {key: torch.zeros(1, 1, dtype=torch.bool) for key in ("done", "terminated")}
    return TensorDict({"car": step, "next": {"car": next_step | agent_flags, **root}}, [1])


def two_groups_and_batch(kind, sizes, *batch, **settings):
    """Two groups of different sizes, and a batch of both."""
    cats, mice = (
        make_group(kind, n, name=name, o=o)
        for n, name, o in zip(sizes, ("cat", "mouse"), (4, 3), strict=True)
    )
    td, other = random_steps(cats, *batch, **settings), random_steps(mice, *batch, **settings)
    td["mouse"], td["next", "mouse"] = other["mouse"], other["next", "mouse"]
    return (cats, mice), td


def join_groups_and_batch(groups, td):
    """The joined group of several groups, and its batch."""
    joined = join(groups)
    step = joined.gather(td, leaves=("action",), flags=False)
    next_step = joined.gather(td["next"], leaves=("reward",), flags=True)
    root = td["next"].select("done", "terminated")
    step["next"] = next_step.update(root)
    return joined, step


def load_rows(network, joined, i):
    """Copies the i-th group's parameters from the stacked and padded ones."""
    for parameter, joined_parameter in zip(network.parameters(), joined.parameters(), strict=True):
        parameter.data.copy_(joined_parameter.data[i][tuple(slice(0, n) for n in parameter.shape)])


def gradients_of(terms, parameters_of):
    """The terms, and the gradient of each named loss with respect to its parameters."""
    found = []
    for name, parameters in parameters_of.items():
        found += torch.autograd.grad(terms[name].sum(), list(parameters), retain_graph=True)
    return terms, found


def rows_moved(term, parameter):
    """Indices of the rows of a parameter with nonzero gradient."""
    (found,) = torch.autograd.grad(term, [parameter], retain_graph=True)
    return [i for i, row in enumerate(found) if bool((row != 0).any())]


def assert_poison_changes_no_bit(gradients, loss, td, *, ends_of_team=False, masks=False):
    """Asserts that masked values do not affect losses, TD errors and gradients.

    Args:
        gradients: ``gradients(loss, td)`` returns losses by name, and gradients.
        ends_of_team: the next observation also counts if the team is truncated.
        masks: action masks are poisoned, too.

    Returns:
        The gradients, which are finite.
    """
    group = loss.group
    mask, following = td[group.mask_key], td["next", group.mask_key]
    readable = following | (mask & _cut_off(td["next", group.name]).squeeze(-1))
    if ends_of_team:
        readable = readable | (mask & _cut_off(td["next"]))
    hidden = [(group.observation_key, mask), (group.action_key, mask)]
    hidden += [
        (("next", group.name, "reward"), mask),
        (("next", group.name, "observation"), readable),
    ]
    hidden += [(group.action_mask_key, mask)] if masks else []
    torch.manual_seed(1)
    terms, found = gradients(loss, expected := td.clone())
    assert all(bool(g.isfinite().all()) for g in found)
    for value in POISON:
        poisoned_td = td.clone()
        for key, alive in hidden:
            poisoned_td = poisoned(poisoned_td, key, alive, value)
        torch.manual_seed(1)
        poisoned_terms, poisoned_gradients = gradients(loss, poisoned_td)
        for key, term in terms.items():
            assert_same(term, poisoned_terms[key], key)
        for one, other in zip(found, poisoned_gradients, strict=True):
            assert_same(one, other)
        assert_same(expected[group.name, "td_error"], poisoned_td[group.name, "td_error"])
    return found


def _cut_off(flags):
    return flags["truncated"] & ~flags["terminated"]


def assert_order_changes_nothing(loss, td, order):
    """Asserts that losses and metrics do not depend on the order of agents."""
    other = td.clone()
    for key in td.keys(True, True):
        if isinstance(key, tuple) and loss.group.name in key:
            other[key] = td[key][:, list(order)]
    one, permuted = loss(td), loss(other)
    for key, value in one.items():
        torch.testing.assert_close(value, permuted[key])
