"""Comparable evaluations: the same start states for every policy, and significance."""

import json
import re

import numpy as np
import pytest
import torch
from runs import small_config, table

from torchrl_marl import TeamSpec
from torchrl_marl.apps.cli import main as cli
from torchrl_marl.apps.comparison import Comparison, Side, compare, win_interval
from torchrl_marl.envs.toy import Arena, ZeroSum
from torchrl_marl.errors import CheckpointError, ConfigError
from torchrl_marl.training import train
from torchrl_marl.training.crossplay import cross_play
from torchrl_marl.training.evaluation import (
    Episodes,
    describe_action_difference,
    evaluate_members,
    last_evaluation_entries,
    play,
)
from torchrl_marl.training.messages import print_message
from torchrl_marl.training.run import Run
from torchrl_marl.training.statistics import difference_of_runs, paired_difference

pytestmark = pytest.mark.runs


def episodes(*returns):
    found = torch.tensor(returns)
    return Episodes({"agents": found}, torch.ones(len(found)), {"agents": 2})


class Seen(Arena):
    """Records the cues with which episodes start."""

    def _reset(self, tensordict):
        out = super()._reset(tensordict)
        if tensordict is None or "_reset" not in tensordict.keys():
            self.starts.append(self.cue.clone())
        return out

    starts: list = []


def answer(right):
    def act(td):
        cue = td["agents", "observation"][..., :4].argmax(-1)
        return td.set(("agents", "action"), cue if right else (cue + 1) % 4)

    return act


class TestStarts:
    def test_start_states_depend_only_on_the_env_and_the_seed(self):
        """Episodes of 20 and of 3 steps draw different amounts of random numbers."""
        found = {}
        for right in (True, False):
            env = Seen(3, seed=right)
            env.starts = Seen.starts = []
            played = play(env, answer(right), TeamSpec.from_env(env), episodes=7, seed=5)
            assert played.lengths.tolist() == [20 if right else 3] * 7
            found[right] = torch.cat(Seen.starts[-3:])
        assert torch.equal(found[True], found[False])
        assert len(found[True].unique(dim=0)) > 3  # and blocks differ

    def test_more_episodes_begin_with_the_same_ones(self):
        env = Arena(4, seed=0)
        team = TeamSpec.from_env(env)
        few, many = (play(env, None, team, episodes=n, seed=3) for n in (4, 10))
        assert torch.equal(few.total, many.total[:4])
        assert not torch.equal(many.total[:4], many.total[4:8])

    def test_runs_of_any_seed_and_size_use_the_same_start_states(self, tmp_path):
        found = []
        for seed, num_envs in ((0, 8), (3, 16)):
            own = {"seed": seed, "env": {"num_envs": num_envs}, "total_frames": 80}
            run = train(small_config(**own, folder=str(tmp_path / f"run{seed}")))
            found.append(run.summary["return_random"])
            assert run.evaluate()["return_mean"] == run.summary["return_after"]
        assert found[0] == found[1]

    def test_members_of_a_population_play_the_given_episodes(self):
        env = Arena(6, seed=0)
        team = TeamSpec.from_env(env)
        found = evaluate_members(env, answer(True), team, 2, episodes=5)
        assert [own["return_mean"] for own in found] == [12.5, 12.5]
        assert [own["episodes"] for own in found] == [5, 5]


class TestFigures:
    def test_figures_worked_out_by_hand(self):
        own = Episodes(
            {"cat": torch.tensor([1.0, 2.0]), "dog": torch.tensor([4.0, 8.0])},
            torch.tensor([3, 9]),
            {"cat": 2, "dog": 1},
        ).figures()
        assert (own["return_min"], own["return_max"], own["return_mean"]) == (2.0, 4.0, 3.0)
        assert (own["return_low"], own["return_high"]) == (
            2.0,
            4.0,
        )  # 2 twice in 1/4 of resamples
        assert (own["dog/episode_reward_low"], own["cat/episode_reward_high"]) == (4.0, 2.0)
        assert (own["length_min"], own["length_mean"], own["length_max"]) == (3, 6.0, 9)

    def test_one_episode_has_no_interval(self):
        assert {"return_low", "return_high"}.isdisjoint(episodes(3.0).figures())
        assert describe_action_difference(episodes(3.0), episodes(5.0)) is None

    def test_message_if_deterministic_and_sampled_actions_differ(self):
        one, other = episodes(*[1.0, 5.0, 2.0] * 2), episodes(*[2.0, 6.5, 3.0] * 2)
        words = describe_action_difference(one, other)
        assert "the most likely actions earn 2.667 and sampled ones 3.833" in words
        assert describe_action_difference(one, episodes(*[2.0, 4.0, 2.0] * 2)) is None
        found = last_evaluation_entries(other, one, deterministic=False)
        assert list(found["evaluation"]) == ["drawn", "likeliest"]
        assert found["actions_differ"] == words

    def test_no_message_on_a_difference_that_is_small_to_the_spread(self):
        """0.1 more in each of 100 episodes is significant but small compared to -5 to 5."""
        spread = torch.linspace(-5, 5, 100)
        one, small, large = (episodes(*(spread + gap).tolist()) for gap in (0, 0.1, 0.7))
        gap = one.against(small).difference
        assert gap.high < 0 and describe_action_difference(one, small) is None
        assert describe_action_difference(one, large).endswith(
            "(95 % interval -0.7 to -0.7, 0.24 standard deviations of returns)"
        )
        # If all episodes are equal, any difference counts.
        assert "0.1" in describe_action_difference(episodes(*[1.0] * 6), episodes(*[1.1] * 6))

    @pytest.mark.parametrize("count", [2, 3, 5, 10])
    def test_false_positives_with_few_episodes_are_rare(self, count):
        """Returns of 0 or 1. Earlier, 12 % of the cases were called significant."""
        random = np.random.default_rng(count)
        said = 0
        for _ in range(400):
            one, other = random.integers(2, size=(2, count)).astype(float)
            said += describe_action_difference(episodes(*one), episodes(*other)) is not None
        assert said <= 0.05 * 400 and (count >= 6 or said == 0)

    def test_message_on_a_difference_is_printed_as_a_result(self, capsys):
        print_message("a result", is_warning=False)
        assert capsys.readouterr() == ("torchrl_marl: a result.\n", "")
        print_message("a warning")
        assert capsys.readouterr() == ("", "torchrl_marl: a warning.\n")


class TestDifference:
    def test_difference_with_one_run_is_paired_by_start_state(self):
        """A single run has no variance over seeds."""
        one, other = np.random.default_rng(0).normal(size=(2, 1, 30))
        assert difference_of_runs(one, other) == paired_difference(one[0], other[0])
        several = np.stack([one[0] - 1, one[0] + 1])
        found = difference_of_runs(several, other)
        assert found == paired_difference(several.mean(0), other[0])
        assert found.difference.runs == (30,)  # start states

    def test_interval_includes_variance_of_runs_and_start_states(self):
        """Variances of both means and of the differences by start state, computed separately."""
        stats = pytest.importorskip("scipy.stats")
        one, other = (np.random.default_rng(i).normal(size=(4 + i, 30)) for i in range(2))
        gap = difference_of_runs(one, other).difference
        parts = [
            stats.sem(one.mean(1)),
            stats.sem(other.mean(1)),
            stats.sem(one.mean(0) - other.mean(0)),
        ]
        half = stats.t.ppf(0.975, 3) * np.sqrt(np.square(parts).sum())
        value = one.mean() - other.mean()
        assert (gap.value, gap.low, gap.high) == pytest.approx((value, value - half, value + half))

    def test_pairing_by_seed_removes_variance_of_seeds(self):
        """Effects of a seed on both sides are not in the interval."""
        random = np.random.default_rng(0)
        seeds = random.normal(scale=50, size=(6, 1))
        one, other = (seeds + random.normal(size=(6, 40)) for _ in range(2))
        apart, pairs = (difference_of_runs(one + 3, other, by_seed=x) for x in (False, True))
        assert apart.difference.low < 0 < pairs.difference.low and pairs.p_value == 2 / 64

    def test_variance_of_start_states_cancels(self):
        """Effects of a start state on both sides are not in the interval."""
        noise = np.random.default_rng(0).normal(size=(2, 200))
        start = 100 * np.arange(200)
        one, other = (start + 1 + 0.1 * noise), (start + 0.1 * noise[::-1])
        gap = difference_of_runs(one, other).difference
        assert 0.8 < gap.low < 1.0 < gap.high < 1.2

    def test_win_interval_equals_scipy(self):
        stats = pytest.importorskip("scipy.stats")
        for won, games in ((0, 10), (62, 100), (200, 200)):
            expected = stats.binomtest(won, games).proportion_ci(method="wilson")
            assert win_interval(won, games) == pytest.approx(tuple(expected), abs=1e-6)


def verdict(one, other, by_seed=False):
    """The verdict on sides named a and b with given returns."""
    both = []
    for name, returns in (("a", one), ("b", other)):
        played = [episodes(*own) for own in np.asarray(returns).tolist()]
        n = len(played)
        both.append(Side(name, [f"{name}{i}" for i in range(n)], [1] * n, [1] * n, [], played))
    return Comparison(*both, difference_of_runs(one, other, by_seed=by_seed), by_seed).verdict


class TestVerdict:
    start = np.random.default_rng(0).normal(size=40)

    def test_verdict_on_equal_means(self):
        """0 (-0.15 to 0.15) with one run each and with several."""
        gap = np.tile([-0.47, 0.47], 20)
        found = difference_of_runs([self.start + gap], [self.start]).difference
        assert (found.value, found.low, found.high) == pytest.approx((0, -0.15, 0.15), abs=0.003)
        assert verdict([self.start + gap], [self.start]) == (
            "these episodes cannot tell them apart"
        )
        runs = np.stack([self.start + gap, self.start - gap] * 3)
        assert verdict(runs, -runs + 2 * self.start) == "these runs cannot tell them apart"

    def test_verdict_on_one_run_each_is_about_policies(self):
        said = verdict([self.start], [self.start + 1 + 0.1 * self.start])
        assert said == (
            "b is better than a, a significant difference over episodes; this holds for these two "
            "policies, not the algorithms"
        )
        assert verdict([self.start] * 2, [self.start - 1 + 0.1 * self.start]).endswith(
            "for these 3 policies, not the algorithms"
        )

    @pytest.mark.parametrize(("seeds", "cases"), [(2, "1 of 3"), (3, "1 of 10")])
    def test_verdict_with_few_seeds_is_never_significant(self, seeds, cases):
        """Four runs have 6 splits in two sides, six have 20, so p-values are above 5 %."""
        one = np.stack([self.start + 0.01 * seed for seed in range(seeds)])
        said = verdict(one + 100, one)
        assert said == (
            f"a is better than b among these, but this can be chance: {seeds} seeds each differ as "
            f"much by chance in {cases} cases, and a verdict takes at least 4 seeds each"
        )
        assert "takes at least 6 seeds each" in verdict(one + 100, one, by_seed=True)

    def test_verdict_with_few_seeds_and_equal_means_names_no_side(self):
        runs = np.stack([self.start, self.start + 3, self.start + 1])
        said = verdict(runs, runs + 0.1)
        assert said == (
            "these runs cannot tell them apart, and a verdict takes at least 4 seeds each"
        )

    def test_verdict_with_five_seeds_can_be_significant(self):
        one = np.stack([self.start + 0.5 * seed for seed in range(5)])
        assert verdict(one, one + 4) == "b is better than a, a significant difference over seeds"
        few = "these episodes"
        assert few not in verdict(one[:2, :2] + 4, one[:2, :2])

    def test_verdict_with_few_episodes_is_not_significant(self):
        said = verdict([[1.0, 2.0, 3.0]], [[0.0, 1.0, 2.1]])
        assert "3 episodes each differ as much by chance in 1 of 4 cases" in said

    def test_report_gives_the_same_verdict(self, tmp_path):
        from reported import write_run

        from torchrl_marl.apps.reports import make_report
        from torchrl_marl.apps.reports.answers import answers

        for seeds, gap in ((2, 9), (3, 0.5), (3, 9), (5, 0.5), (5, 9)):
            ends = [np.arange(seeds) + gap, np.arange(seeds) * 1.0]
            folder = tmp_path / f"{seeds} {gap}"
            for name, own in zip(("mappo", "ippo"), ends):
                for seed, end in enumerate(own):
                    settings = {"learner.algorithm": name, "seed": seed}
                    write_run(folder / f"{name}{seed}", [0, float(end)], **settings)
            said = answers(make_report(folder))[1].rstrip(".")
            ours = verdict(*(end[:, None] + 0.001 * self.start for end in ends))
            ending = said[said.index("these runs cannot") :] if "these runs" in said else ""
            ending = ending or re.split("among these, but |], ", said)[1]
            assert ours.endswith(ending), (ours, said)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Three runs of one environment, one of them well trained, and a run of another."""
    folder = tmp_path_factory.mktemp("runs")
    good = {"learner": {"lr": 1e-2}, "evaluation": {"every_frames": 240}}
    train(small_config(total_frames=1600, **good, folder=str(folder / "good")))
    for seed in (0, 1):
        train(small_config(total_frames=80, seed=seed, folder=str(folder / f"bad/seed{seed}")))
    train(small_config("toy_zero_sum_ippo_psro", total_frames=80, folder=str(folder / "game")))
    return folder


class TestCompare:
    def test_compare_two_runs(self, trained):
        found = compare(trained / "good", trained / "bad/seed0", episodes=50, deterministic=True)
        one, other = (
            Run.load(trained / name).evaluate(50, deterministic=True)["return_mean"]
            for name in ("good", "bad/seed0")
        )
        assert found.paired.difference.value == pytest.approx(one - other, abs=1e-5)
        assert found.first.kinds == ["likeliest"] and found.of_policies
        assert "is better than" in found.verdict and found.verdict.endswith(
            "for these two policies, not the algorithms"
        )

    def test_compare_with_several_seeds(self, trained, capsys):
        command = ["compare", str(trained / "good"), str(trained / "bad"), "--episodes", "20"]
        assert cli.main(command) == 0
        out = capsys.readouterr().out
        assert re.search(r"runs +1 +2\n", out) and re.search(r"starts +20", out)
        assert out.rstrip().endswith("for these 3 policies, not the algorithms.")

    def test_compare_by_seed_needs_the_same_seeds(self, trained, tmp_path, capsys):
        for seed in (0, 1):
            folder = str(tmp_path / f"other/{seed}")
            train(small_config(total_frames=80, seed=1 - seed, folder=folder))
        command = ["compare", str(trained / "bad"), str(tmp_path / "other"), "--episodes", "4"]
        assert cli.main([*command, "--by-seed"]) == 0  # the same runs, paired by seed
        assert "both earn the same from every start" in capsys.readouterr().out
        with pytest.raises(ConfigError, match=r"has \[0\] and .* has \[0, 1\]; compare without"):
            compare(trained / "good", trained / "bad", by_seed=True)

    def test_unfinished_run_is_marked(self, trained, tmp_path, capsys):
        import shutil

        folder = tmp_path / "half"
        shutil.copytree(trained / "bad/seed1", folder)
        text = (folder / "config.yaml").read_text()
        (folder / "config.yaml").write_text(re.sub("total_frames: 80", "total_frames: 960", text))
        assert cli.main(["compare", str(folder), str(trained / "good"), "--episodes", "2"]) == 0
        assert f"{folder} at 80 of 960 frames" in capsys.readouterr().out

    def test_invalid_runs_to_compare_raise(self, trained, tmp_path):
        with pytest.raises(ConfigError, match="has env.name='zero_sum' and .* 'arena'; expected"):
            compare(trained / "good", trained / "game")
        with pytest.raises(ConfigError, match="is on both sides, expected two different runs"):
            compare(trained / "good", trained / "good")
        with pytest.raises(ConfigError, match="is on both sides"):
            compare(trained / "bad", trained / "bad/seed1")
        with pytest.raises(CheckpointError, match="is not a run folder: it does not exist"):
            compare(trained / "good", tmp_path / "none")

    def test_each_run_of_a_side_counts_once(self, trained, tmp_path):
        """A link to seed0 is no third run, and a copy of it would halve the variance."""
        import shutil

        side = shutil.copytree(trained / "bad", tmp_path / "bad")
        (side / "seed2").symlink_to("seed0")
        found = compare(side, trained / "good", episodes=3)
        assert found.first.folders == [side / "seed0", side / "seed1"]
        shutil.copytree(side / "seed0", side / "seed3")
        with pytest.raises(ConfigError, match="seed3' has the seed and the settings of .*seed0'"):
            compare(side, trained / "good", episodes=3)

    def test_single_episode_gives_no_verdict(self, trained):
        found = compare(trained / "good", trained / "bad/seed0", episodes=1)
        assert found.paired.probability is None and "play more episodes" in found.verdict


class TestSummary:
    def test_summary_has_deterministic_and_sampled_evaluations(self, trained):
        summary = json.loads((trained / "good/summary.json").read_text())
        kinds = summary["evaluation"]
        assert set(kinds) == {"likeliest", "drawn"}
        assert kinds["likeliest"]["return_mean"] == summary["return_after"]
        run = Run.load(trained / "good")
        assert kinds["drawn"] == run.evaluate(deterministic=False)
        rows = table(trained / "good/evaluation.csv")
        first = list(rows[0])[:6]
        assert first == [
            *("iteration", "frames", "return_mean", "return_std", "length_mean", "episodes")
        ]
        assert len(rows) == 1 + 6 + 1

    def test_summary_has_one_evaluation_without_both(self, tmp_path):
        own = {"evaluation": {"both": False, "deterministic": False}, "total_frames": 80}
        summary = train(small_config(**own, folder=str(tmp_path / "run"))).summary
        assert set(summary["evaluation"]) == {"drawn"} and "actions_differ" not in summary


class TestAgainst:
    def test_win_rate_from_both_seats(self, trained, capsys):
        run = trained / "game"
        command = ["evaluate", str(run), "--against", "random", "--episodes", "40"]
        assert cli.main(command) == 0
        lines = [line.strip().split("  ", 1) for line in capsys.readouterr().out.splitlines()]
        rows = {name: text.strip() for name, text in lines}
        env = ZeroSum(40, seed=0)
        table_of = cross_play([Run.load(run).policy], [env.rand_action], env, 40)[0, 0]
        assert rows["actions"] == "drawn" and rows["seats"].startswith("both")
        counts = list(map(int, re.findall(r"\d+", rows["games"])))
        assert counts[0] == 40 == sum(counts[1:])
        assert abs(counts[1] - int(table_of["wins"])) < 20  # about 13.3 wins, draws and losses each
        share, low, high = map(float, re.findall(r"\d\.\d+|\d", rows["win rate"])[:3])
        assert share == pytest.approx((counts[1] + counts[2] / 2) / 40, abs=1e-3)
        assert (low, high) == pytest.approx(win_interval(share * 40, 40), abs=1e-3)

    def test_against_with_one_team_raises(self, trained, capsys):
        assert cli.main(["evaluate", str(trained / "good"), "--against", "random"]) == 2
        assert "plays in an environment of one team, expected two" in capsys.readouterr().err
        gif = ["evaluate", str(trained / "game"), "--against", "random", "--gif"]
        assert cli.main(gif) == 2
        assert "--gif or --mp4 is given with --against" in capsys.readouterr().err
