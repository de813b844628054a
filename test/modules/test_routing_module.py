"""A routed policy as a module: keys, parts, parameters, copies and compiled graphs."""

import copy
import pickle

import pytest
import torch
from routed import (
    ACTION,
    OBSERVATION,
    assert_actions,
    list_actions,
    make_continuous_actor,
    make_mixed_policy,
    make_policy,
    random_dense_group,
    random_lazy_group,
)
from samples import assert_same
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictSequential, set_skip_existing
from torch import nn
from torchrl.envs.utils import ExplorationType, set_exploration_type

from torchrl_marl.contrib import RoutedSequential


def test_keys_parameters_and_copies():
    drone, rover = make_policy(5, 4), make_policy(3, 2)
    policy = RoutedSequential((drone, [0]), (rover, [1]))
    assert policy.in_keys == [OBSERVATION] and policy.out_keys == [ACTION]
    assert isinstance(policy, TensorDictSequential) and len(policy) == 2
    plain = TensorDictSequential(drone, rover)
    assert policy.state_dict().keys() == plain.state_dict().keys()
    n = sum(p.numel() for p in drone.parameters()) + sum(p.numel() for p in rover.parameters())
    assert sum(p.numel() for p in policy.parameters()) == n
    td = random_lazy_group([5, 3], 7)
    wanted = list_actions(policy(td.clone()))
    for twin in (copy.deepcopy(policy), pickle.loads(pickle.dumps(policy))):
        for one, other in zip(list_actions(twin(td.clone())), wanted):
            assert_same(one, other)
    twin.module[0].module[0].weight.data.zero_()
    twin.load_state_dict(policy.state_dict())
    assert_same(list_actions(twin(td.clone()))[0], wanted[0])
    shared = RoutedSequential((drone, [0]), (drone, [1]))
    assert len(list(shared.parameters())) == len(list(drone.parameters()))


def test_subsequences_keep_their_routes():
    encoders = make_policy(5, 6, out_key="hidden"), make_policy(3, 6, out_key="hidden")
    heads = make_policy(6, 4, "hidden"), make_policy(6, 2, "hidden")
    policy = RoutedSequential(
        {"see": (encoders[0], [0]), "look": (encoders[1], [1]),
         "fly": (heads[0], [0]), "drive": (heads[1], [1])}, group="agents"
    )  # fmt: skip
    td = policy(random_lazy_group([5, 3], 7))
    part = policy.select_subsequence(out_keys=[("agents", "hidden")])
    assert list(part.module) == ["see", "look"]
    found = part(td.select(OBSERVATION))
    assert_same(found["agents", "hidden"], td["agents", "hidden"])
    later = policy.select_subsequence(in_keys=[("agents", "hidden")])
    assert list(later.module) == ["fly", "drive"]
    assert policy["fly"] is heads[0]
    with pytest.raises(ValueError, match="no module leads"):
        policy.select_subsequence(out_keys=["nothing"])
    flat = RoutedSequential([(m, [i % 2]) for i, m in enumerate((*encoders, *heads))])
    half = flat[2:](td.select(("agents", "hidden")))
    assert_actions(half, list_actions(td))
    flat[0] = make_policy(5, 6, out_key="hidden")
    assert flat(random_lazy_group([5, 3], 7))["agents"].tensordicts[0]["action"].shape == (7, 4)
    del flat[3]
    with pytest.raises(ValueError, match="agent 1 of group 'agents' got hidden but no"):
        flat(random_lazy_group([5, 3], 7))


def test_errors_name_the_module():
    policy = RoutedSequential({"fly": make_policy(5, 4, "camera")})
    with pytest.raises(ValueError, match="module 'fly' reads"):
        policy(random_lazy_group([5], 7))


def test_select_out_keys_and_inplace():
    drone, rover = make_continuous_actor(5, 4), make_continuous_actor(3, 2)
    td = random_lazy_group([5, 3], 7)
    chosen = RoutedSequential(drone, rover, selected_out_keys=[ACTION])
    found = chosen(td.clone())
    assert set(found["agents"].tensordicts[0].keys()) == {"observation", "action"}
    apart = RoutedSequential(drone, rover, inplace=False)
    source = td.clone()
    found = apart(source)
    assert set(source["agents"].tensordicts[0].keys()) == {"observation"}
    assert set(found["agents"].tensordicts[0].keys()) == {
        "loc", "scale", "action", "action_log_prob"
    }  # fmt: skip
    target = TensorDict({}, [7])
    assert RoutedSequential(drone, rover)(source, tensordict_out=target) is target
    assert target["agents", "action_log_prob"].shape == (7, 2)


def test_skip_existing_keeps_entries():
    drone, rover = make_policy(5, 2), make_policy(3, 2)
    td = RoutedSequential(drone, rover)(random_lazy_group([5, 3], 7))
    before = td[ACTION].clone()
    other = RoutedSequential(make_policy(5, 2), make_policy(3, 2))
    with set_skip_existing(True):
        assert_same(other(td)[ACTION], before)
    assert not torch.equal(other(td)[ACTION], before)


def test_nested_sequences():
    drone, rover = make_policy(5, 2), make_policy(3, 2)
    double = TensorDictModule(lambda x: 2 * x, in_keys=[ACTION], out_keys=[("agents", "twice")])
    inner = RoutedSequential(drone, rover)
    td = TensorDictSequential(inner, double)(random_lazy_group([5, 3], 7))
    torch.testing.assert_close(td["agents", "twice"], 2 * td[ACTION])
    td = RoutedSequential(inner, double)(random_lazy_group([5, 3], 7))
    torch.testing.assert_close(td["agents", "twice"], 2 * td[ACTION])


def test_several_groups_in_one_policy():
    td = random_lazy_group([5, 3], 7)
    td["others"] = random_lazy_group([4, 3], 7, path=("others",))["others"]
    modules = make_policy(5, 2), make_policy(3, 2)
    others = make_policy(4, 1, path=("others",)), make_policy(3, 2, path=("others",))
    flat = make_policy(5, 6, path=("flat",)), make_policy(5, 2, path=("flat",))
    td["flat"] = random_dense_group(4, 5, 7)["agents"]
    policy = RoutedSequential(*modules, *others, *flat)
    policy(td)
    assert td["flat", "action"].shape == (7, 4, 2), "as in TorchRL, the last one counts"
    assert td[ACTION].shape == (7, 2, 2)
    assert [x.shape[-1] for x in list_actions(td, ("others", "action"))] == [1, 2]


def test_lazy_layers_are_materialized_by_route_inputs():
    lazy = TensorDictModule(nn.LazyLinear(2), in_keys=[OBSERVATION], out_keys=[ACTION])
    policy = RoutedSequential((lazy, [0]), (make_policy(3, 2), [1]))
    assert policy(random_lazy_group([5, 3], 7))[ACTION].shape == (7, 2, 2)
    assert lazy.module.in_features == 5


def test_swapped_parameters():
    drone, rover = make_policy(5, 4), make_policy(3, 2)
    policy = RoutedSequential(drone, rover)
    td = random_lazy_group([5, 3], 7)
    params = TensorDict.from_module(policy)
    with params.data.apply(torch.zeros_like).to_module(policy):
        assert all(not x.any() for x in list_actions(policy(td.clone())))
    assert list_actions(policy(td.clone()))[0].any()

    def loss(params):
        with params.to_module(policy):
            return sum(x.pow(2).sum() for x in list_actions(policy(td.clone())))

    grads = torch.func.grad(loss)(params.data)
    list_actions(policy(td.clone()))[0].pow(2).sum().backward()
    torch.testing.assert_close(
        grads["module", "0", "module", "0", "weight"], drone.module[0].weight.grad
    )


def test_vmap_over_parameter_sets():
    policy = RoutedSequential((make_policy(5, 2), [0]), (make_policy(5, 2), [1]))
    td = random_dense_group(2, 5, 7)
    params = TensorDict.from_module(policy).data.expand(3).clone()

    def run(params):
        with params.to_module(policy):
            return policy(td.clone())[ACTION]

    found = torch.vmap(run)(params)
    assert found.shape == (3, 7, 2, 2)
    assert_same(found[0], found[2])


@pytest.mark.compiled
@pytest.mark.parametrize("kind", ["lazy", "dense", "exclusive", "probabilistic", "dense ragged"])
def test_compiles_to_one_graph(kind):
    torch._dynamo.reset()
    if kind == "exclusive":
        policy = RoutedSequential(make_policy(5, 4, "camera"), make_policy(3, 2, "lidar"))
        td = random_lazy_group([5, 3, 3], 7, leaves=["camera", "lidar", "lidar"])
    elif kind == "probabilistic":
        _, policy, make = make_mixed_policy()
        td = make(7)
    elif kind == "lazy":
        policy, td = (
            RoutedSequential(make_policy(5, 4), make_policy(3, 2)),
            random_lazy_group([5, 3, 5], 7),
        )
    else:
        a = 3 if kind == "dense ragged" else 2
        policy = RoutedSequential((make_policy(5, 2), [0, 2]), (make_policy(5, a), [1]))
        td = random_dense_group(3, 5, 7)
    compiled = torch.compile(lambda td: policy(td), fullgraph=True, backend="aot_eager")
    with set_exploration_type(ExplorationType.DETERMINISTIC):
        wanted, found = policy(td.clone()), compiled(td.clone())
    for one, other in zip(list_actions(found), list_actions(wanted)):
        torch.testing.assert_close(one, other)


@pytest.mark.compiled
def test_log_probabilities_compile_to_one_graph():
    torch._dynamo.reset()
    _, policy, make = make_mixed_policy()
    td = policy(make(7)).detach()
    compiled = torch.compile(lambda td: policy.log_prob(td), fullgraph=True, backend="aot_eager")
    wanted = policy.log_prob(td)
    found = compiled(td)
    torch.testing.assert_close(found, wanted)
    parameters = list(policy.parameters())
    grads = [torch.autograd.grad(value.sum(), parameters) for value in (found, wanted)]
    torch.testing.assert_close(*grads)
