"""Statistics over runs: by hand, against rliable, and the coverage of intervals."""

import itertools
import json
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from scipy import stats
from support.tiers import second_tier_cases

from torchrl_marl.errors import ConfigError
from torchrl_marl.training import statistics
from torchrl_marl.training.statistics import (
    difference_of_runs,
    estimate,
    interquartile_mean,
    mean,
    median,
    optimality_gap,
    paired_difference,
    permutation_p_value,
    probability_of_improvement,
    score_distribution,
    sign_flip_p_value,
    smallest_p_value,
    student_p_value,
    student_quantile,
)

# Written by benchmarks/rliable_statistics.py.
RLIABLE = json.loads((Path(__file__).parent / "rliable.json").read_text(encoding="utf-8"))
CASES = pytest.mark.parametrize("case", RLIABLE["cases"], ids=lambda case: case["name"])


def tasks_of(matrix):
    return list(np.array(matrix).T)


def agrees(found, answer, monte_carlo):
    np.testing.assert_allclose(np.ravel(found.value), np.ravel(answer["value"]), atol=1e-12)
    for end, other in zip((found.low, found.high), answer["interval"]):
        np.testing.assert_allclose(np.ravel(end), np.ravel(other), atol=monte_carlo)


@CASES
@pytest.mark.parametrize("name", ["interquartile_mean", "mean", "optimality_gap"])
def test_aggregates_equal_rliable(case, name):
    found = estimate(getattr(statistics, name), tasks_of(case["scores"]), resamples=20_000)
    agrees(found, case[name], 0.02)


@CASES
def test_median_equals_rliable(case):
    tasks = tasks_of(case["scores"])
    if len(tasks) == 1:  # rliable takes the mean of one task; here it is the median of the runs
        assert median(tasks) == sorted(tasks[0])[1]
    else:
        agrees(estimate(median, tasks, resamples=20_000), case["median"], 0.02)


@CASES
def test_probability_of_improvement_equals_rliable(case):
    tasks, others = tasks_of(case["scores"]), tasks_of(case["others"])
    found = estimate(probability_of_improvement, tasks, others)
    agrees(found, case["probability_of_improvement"], 0.03)


@CASES
def test_performance_profiles_equal_rliable(case):
    profile = partial(score_distribution, thresholds=RLIABLE["thresholds"])
    found = estimate(profile, tasks_of(case["scores"]), resamples=20_000)
    agrees(found, case["score_distribution"], 0.051)  # shares of 20 runs jump by 0.05


def test_interquartile_mean_worked_out_by_hand():
    assert interquartile_mean([[7.0]]) == 7
    assert interquartile_mean([[1.0, 2.0, 9.0]]) == 4  # a quarter of 3 runs is below one run
    assert interquartile_mean([[-50.0, 1.0, 2.0, 3.0, 900.0]]) == 2
    assert interquartile_mean([[0.0, 8.0], [2.0, 4.0]]) == 3


def test_tasks_have_equal_weight_for_any_number_of_runs():
    # Runs of the first task weigh 1/8, that of the second 1/2, which is the middle half.
    assert interquartile_mean([[0.0, 0.0, 9.0, 9.0], [5.0]]) == pytest.approx(5)
    # Runs of the first task twice, of the second thrice: of 12 runs, 3 on both sides are cut.
    twelve = sorted([1.0, 2.0, 3.0] * 2 + [4.0, 0.0] * 3)
    unlike = interquartile_mean([[1.0, 2.0, 3.0], [4.0, 0.0]])
    assert unlike == pytest.approx(np.mean(twelve[3:-3]))
    assert mean([[0.0, 0.0, 9.0, 9.0], [5.0]]) == 4.75
    assert optimality_gap([[0.0, 2.0], [0.5]], target=1.0) == 0.5
    assert score_distribution([[0.0, 0.0, 0.0, 1.0], [1.0]], [0.5]).tolist() == [0.625]


def test_probability_of_improvement_worked_out_by_hand():
    assert probability_of_improvement([[3.0, 4.0]], [[1.0, 2.0]]) == 1
    assert probability_of_improvement([[1.0, 2.0, 3.0]], [[2.0]]) == 0.5
    both = probability_of_improvement([[3.0, 4.0], [0.0]], [[1.0], [0.0]])
    assert both == 0.75
    with pytest.raises(ConfigError, match="1 tasks and the second of 2"):
        probability_of_improvement([[1.0]], [[1.0], [2.0]])


def test_leading_dims_are_kept():
    """Curves are resampled by run: the interval of a point equals that of the point alone."""
    curves = [np.random.default_rng(0).normal(size=(7, 5)), np.ones((7, 3))]
    together = estimate(interquartile_mean, curves, seed=3)
    assert together.value.shape == together.low.shape == (7,)
    for point in range(7):
        alone = estimate(interquartile_mean, [task[point] for task in curves], seed=3)
        assert together.value[point] == pytest.approx(alone.value)
        assert together.low[point] == pytest.approx(alone.low)
        assert together.high[point] == pytest.approx(alone.high)


def test_interval_equals_that_of_all_resamples():
    scores = [0.0, 1.0, 5.0, 7.0]
    means = [np.mean(drawn) for drawn in itertools.product(scores, repeat=4)]
    found = estimate(mean, [scores], resamples=40_000, confidence=0.8)
    np.testing.assert_allclose(found.low, np.quantile(means, 0.1), atol=0.25)
    np.testing.assert_allclose(found.high, np.quantile(means, 0.9), atol=0.25)
    assert found.runs == (4,) and found.confidence == 0.8


def test_resampling_in_chunks_gives_the_same_interval(monkeypatch):
    scores = [np.random.default_rng(1).normal(size=8)]
    whole = estimate(mean, scores, resamples=20_000)
    monkeypatch.setattr(statistics, "LARGEST_CHUNK", 1000)
    parts = estimate(mean, scores, resamples=20_000)
    np.testing.assert_allclose([whole.low, whole.high], [parts.low, parts.high], atol=0.05)


def test_same_seed_gives_the_same_interval():
    scores = [np.random.default_rng(1).normal(size=8)]
    assert estimate(mean, scores, seed=1) == estimate(mean, scores, seed=1)
    assert estimate(mean, scores, seed=1) != estimate(mean, scores, seed=2)


def test_one_run_has_no_interval():
    found = estimate(interquartile_mean, [[1.0, 2.0], [3.0]])
    assert found.value == pytest.approx(2.5) and not found.has_interval
    assert "one run" in found.why_none


@pytest.mark.parametrize(
    ("scores", "sentence"),
    [([], "no runs"), ([[]], "no runs"), ([[1.0, float("nan")]], "a score is nan")],
)
def test_empty_or_nan_scores_raise(scores, sentence):
    with pytest.raises(ConfigError, match=sentence):
        estimate(mean, scores)


def test_paired_difference_worked_out_by_hand():
    first, second = np.array([3.0, 5.0, 9.0, 2.0]), np.array([1.0, 6.0, 9.0, 0.0])
    found = paired_difference(first, second, resamples=40_000)
    assert found.difference.value == 0.75 and found.won == 0.625
    gaps = [np.mean(drawn) for drawn in itertools.product(first - second, repeat=4)]
    above = np.mean(np.sign(gaps) / 2 + 0.5)
    assert found.probability == pytest.approx(above, abs=0.01)
    other = paired_difference(second, first, resamples=40_000)
    assert other.difference.low == pytest.approx(-found.difference.high)
    assert other.probability == pytest.approx(1 - found.probability)


def test_paired_difference_removes_variance_of_start_states():
    """Returns vary a hundred times more by start state than by player."""
    random = np.random.default_rng(0)
    starts = random.normal(scale=100, size=200)
    better = starts + 1 + random.normal(scale=0.5, size=200)
    found = paired_difference(better, starts)
    assert found.difference.low > 0.8 and found.difference.high < 1.2 and found.probability == 1
    assert probability_of_improvement([better], [starts]) < 0.6
    assert paired_difference(starts, starts).probability == 0.5


def test_paired_difference_with_one_pair_or_unequal_lengths():
    assert paired_difference([1.0], [0.0]).probability is None
    with pytest.raises(ConfigError, match="are not pairs"):
        paired_difference([1.0, 2.0], [1.0])


def test_statistics_do_not_import_torch():
    program = "import sys, torchrl_marl.training.statistics; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0


@pytest.mark.parametrize("sizes", [[(3, 2)], [(2, 2), (3, 2)], [(1, 4), (2, 3)]])
def test_permutation_p_value_equals_all_permutations(sizes):
    random = np.random.default_rng(3)
    ours = [random.integers(0, 4, n).astype(float) for n, _ in sizes]
    theirs = [random.integers(0, 3, n).astype(float) for _, n in sizes]
    off = abs(probability_of_improvement(ours, theirs) - 0.5)
    dealt = []
    for one, other in zip(ours, theirs):
        both = np.concatenate([one, other])
        ways = itertools.combinations(range(len(both)), len(one))
        dealt.append([(both[list(way)], np.delete(both, way)) for way in ways])
    found = [abs(probability_of_improvement(*zip(*way)) - 0.5) for way in itertools.product(*dealt)]
    assert permutation_p_value(ours, theirs) == pytest.approx(
        np.mean(np.array(found) >= off - 1e-9)
    )


@pytest.mark.parametrize(("seeds", "chance"), [(2, 1 / 3), (3, 1 / 10), (4, 2 / 70)])
def test_permutation_p_value_of_few_separated_runs(seeds, chance):
    better = np.arange(seeds) + 100.0
    assert permutation_p_value([better], [-better]) == pytest.approx(chance)
    assert permutation_p_value([-better], [better]) == pytest.approx(chance)
    assert permutation_p_value([better] * 2, [-better] * 2) == pytest.approx(chance**2 / 2)
    assert permutation_p_value([better], [better]) == 1


@pytest.mark.parametrize("freedom", [1, 2, 3, 4, 9, 10, 199])
def test_student_distribution_equals_scipy(freedom):
    for confidence in (0.5, 0.95, 0.999):
        expected = stats.t.ppf((1 + confidence) / 2, freedom)
        assert student_quantile(confidence, freedom) == pytest.approx(expected)
    for value in (-3.0, 0.0, 0.2, 12.7):
        expected = 2 * stats.t.sf(abs(value), freedom)
        assert student_p_value(value, freedom) == pytest.approx(expected, abs=1e-12)


def test_sign_flip_p_value_by_enumeration_and_of_many_pairs():
    gaps = np.random.default_rng(0).normal(0.5, size=14)
    for n in (1, 2, 5, 10):
        sums = [abs(np.dot(s, gaps[:n])) for s in itertools.product((-1, 1), repeat=n)]
        expected = np.mean(np.array(sums) >= abs(gaps[:n].sum()) - 1e-9)
        assert sign_flip_p_value(gaps[:n]) == expected
    many = np.random.default_rng(1).normal(0.3, size=40)
    assert sign_flip_p_value(many) == pytest.approx(stats.ttest_1samp(many, 0).pvalue)
    assert sign_flip_p_value(np.zeros(40)) == 1 and sign_flip_p_value(np.ones(40)) == 0


def test_smallest_p_value_of_n_runs():
    assert [smallest_p_value(n, n) for n in (2, 3, 4)] == pytest.approx([1 / 3, 1 / 10, 1 / 35])
    assert smallest_p_value(2, 10) == pytest.approx(2 / 66)
    assert smallest_p_value([2, 2], [2, 3]) == pytest.approx(2 / 60)


def sides(kind, seeds, random, starts=20):
    """Two equal algorithms: runs share the effects of start states and seeds."""
    own = random.normal(scale=3, size=starts) + 0.5 * random.normal(size=(seeds, 1))
    draw = {
        "normal": lambda size: random.normal(size=size),
        "unlike": lambda size: random.normal(size=size),
        "skewed": lambda size: random.exponential(size=size),
        "solved": lambda size: random.choice([-1.0, 1.0], size=size),
    }[kind]
    found = [own + draw((seeds, 1)) + random.normal(size=(seeds, starts)) for _ in range(2)]
    if kind == "unlike":
        found[0] = own + 4 * (found[0] - own)
    return found


@pytest.mark.parametrize("by_seed", [False, True])
@pytest.mark.parametrize("seeds", [2, 3, 5, 10])
@pytest.mark.parametrize(
    "kind", ["skewed", *second_tier_cases("learning", "normal", "solved", "unlike")]
)
def test_false_positives_are_rare_for_any_number_of_seeds(kind, seeds, by_seed):
    """Percentile bootstrap had 24 % false positives with 2 seeds, 26 % with 3, 10 % with 5."""
    random = np.random.default_rng([seeds, by_seed])
    told, out = 0, 0
    for _ in range(600):
        found = difference_of_runs(*sides(kind, seeds, random), by_seed=by_seed)
        told += found.distinguishable
        out += not found.difference.low <= 0 <= found.difference.high
    assert told <= 0.05 * 600
    assert told == 0 or seeds > (5 if by_seed else 3)
    if kind != "solved":  # intervals of two runs that are equal by chance have no width
        assert out <= 0.05 * 600


def test_true_differences_are_detected():
    random = np.random.default_rng(0)
    for seeds, by_seed, least in ((5, False, 0.9), (10, False, 0.99), (10, True, 0.99)):
        found = 0
        for _ in range(100):
            one, other = sides("normal", seeds, random)
            found += difference_of_runs(one + 4, other, by_seed=by_seed).distinguishable
        assert found >= least * 100


if __name__ == "__main__":
    pytest.main([__file__])
