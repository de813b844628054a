"""Ranks with parts of a batch learn the same as one process with the whole batch."""

import functools

import pytest
from rank_cases import Case, compare_all
from ranked import on_ranks

EXACT = 1e-5

CASES = {
    # Two groups side by side, with deaths, and statistics of values and observations.
    "eager": Case(),
    "trace": Case(execution="trace"),
    # The epochs of the groups end separately.
    "kl": Case(settings={"target_kl": 0.02, "num_epochs": 4}),
    "rates": Case(settings={"lr_schedule": "kl", "lr_kl": 2e-3}),
    # A padded heterogeneous group, with advantages normalized per agent.
    "one": Case("one", settings={"normalize_advantage": "agent", "clip_value": True}),
    # Two losses with an optimizer each, and two that share one.
    "apart": Case(groups={"mice": {"lr": 3e-3}}, actions="categorical"),
    "centered": Case(settings={"value_centering": True}),
    "vtrace": Case(settings={"estimator": "vtrace", "lmbda": 0.9}),
    # Unbounded actions, which have a closed-form entropy; other minibatch sizes.
    "unbounded": Case(actions="unbounded", settings={"minibatch_size": 24}),
}
NAIVE = {name: {"case": Case(iterations=3), "naive": True} for name in ["naive"]}


@functools.cache
def found_by_two():
    cases = {name: {"case": case} for name, case in CASES.items()}
    return on_ranks(2, compare_all, cases | NAIVE)


@pytest.mark.processes
def test_compiled_ranks_match_one_process():
    case = Case(execution="compile", iterations=3, settings={"minibatch_size": 80})
    (found,) = on_ranks(2, compare_all, {"compile": {"case": case}})[0].values()
    assert max(found["weights"], found["statistics"]) < EXACT
    assert found["of_updates"] == 2.0


@functools.cache
def found_by_four():
    return on_ranks(4, compare_all, {"eager": {"case": Case(iterations=3)}})


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_match_one_process(name):
    for found in (of_rank[name] for of_rank in found_by_two()):
        assert found["weights"] < EXACT
        assert found["statistics"] < EXACT
        assert found["spread"] == 0.0


@pytest.mark.processes
def test_four_ranks_match_one_process():
    (found,) = found_by_four()[0].values()
    assert max(found["weights"], found["statistics"]) < EXACT


@pytest.mark.processes
def test_averaging_gradients_of_ranks_does_not_match():
    """Plain data parallelism would exceed the tolerance by far."""
    found = found_by_two()[0]["naive"]
    assert found["weights"] > 1000 * EXACT
    assert found["statistics"] > 1000 * EXACT


@pytest.mark.parametrize("name", CASES)
def test_metrics_are_computed_over_all_ranks(name):
    metrics = found_by_two()[1][name]["metrics"]
    assert {"ESS", "max_ratio", "explained_variance", "grad_norm", "entropy"} <= set(metrics)
    assert max(metrics.values()) < 1e-3, metrics


def test_groups_stop_separately():
    epochs = found_by_two()[0]["kl"]["epochs"]
    assert len(set(epochs)) > 1


@pytest.mark.parametrize("name", CASES)
def test_update_takes_two_collectives(name):
    assert found_by_two()[0][name]["of_updates"] == 2.0
