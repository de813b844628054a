"""Separate networks against one shared padded network, and masks against none.

    python benchmarks/heterogeneous.py --write

Three comparisons at equal frames, each with seeds 0, 1 and 2:

- speech: the speaker and the listener, two kinds of agents with different observations and actions;
- tag: VMAS ``simple_tag``, where predators and prey learn together; afterwards all predators play
  the same episodes against a random prey, and against each side's trained prey;
- arena: agents that die during an episode. Dead agents are masked everywhere (ours), or, as an
  option of this benchmark only, nothing is masked, with several substitutes that environments give
  for a dead agent's observation.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import haunted_arena
import report

if TYPE_CHECKING:
    from torchrl.envs import EnvBase

SPEECH, TAG = "toy_speaker_listener_mappo", "vmas_simple_tag_mappo"
SHARING = {
    "own networks (ours)": "group",
    "one shared network": "full",
    "one shared network, told the agent": "agent_id",
}
ONE_GROUP = {
    "env.continuous_actions": True,
    "env.kwargs.continuous_speech": True,
    "env.kwargs.one_group": True,
}
EVALUATION_SEED = 10_000
QUICK: dict[str, Any] = {
    "frames_per_batch": 80,
    "total_frames": 160,
    "learner.minibatch_size": 40,
    "learner.num_epochs": 2,
    "evaluation.episodes": 8,
}
Runs = dict[str, list[Any]]
OF_SHARING = """
"own networks": one for each kind, `sharing: group`. "one shared network": all agents' observations
and actions are padded to the largest, and one actor and one critic serve all agents,
`sharing: full`; "told the agent": it also reads the agent's number, one-hot, `sharing: agent_id`.
All sides run the same code and the recipe's settings but for what the tables name. On all of them
the central critic has an output for each agent, and padding counts in no log-probability. The
recipes were tuned, by a handful of short runs each, with own networks."""
METHODS = {"speech": OF_SHARING, "tag": OF_SHARING, "arena": haunted_arena.METHOD}


class Trainer:
    """Trains a recipe with some changes, once for each seed.

    Args:
        folder (Path): for the runs.
        args (Namespace): seeds, threads, sizes.
    """

    def __init__(self, folder: Path, args: argparse.Namespace) -> None:
        self.folder = folder
        self.args = args
        self._count = 0

    def __call__(
        self,
        recipe: str,
        title: str,
        changes: Mapping[str, Any],
        make_env: Callable[[int], EnvBase] | None = None,
    ) -> list[Any]:
        """The runs, one for each seed."""
        import torchrl_marl

        args, runs = self.args, []
        for seed in args.seeds:
            print(f"{recipe}, {title}, seed {seed} ...", file=sys.stderr, flush=True)
            self._count += 1
            settings = {
                **changes,
                "seed": seed,
                "threads": args.threads,
                "folder": str(self.folder / str(self._count)),
                "logging.progress": False,
                "checkpoint.every_iterations": 0,
            }
            env = None if make_env is None else make_env(seed)
            if args.quick:
                settings |= QUICK | ({} if env is not None else {"env.num_envs": 8})
            runs.append(torchrl_marl.train(recipe, env=env, **settings))
        return runs


def sharing_settings(sharing: str) -> dict[str, str]:
    """Who shares a network, of actors and critics alike."""
    return {"learner.actor.sharing": sharing, "learner.critic.sharing": sharing}


# ---------------------------------------------------------------------------------------- speech


def compare_speech(train: Trainer) -> tuple[str, str]:
    """The speaker and the listener."""
    runs = {"two groups, one symbol (the recipe)": train(SPEECH, "recipe", {})}
    rate = next(iter(runs.values()))[0].config.learner.lr
    for name, sharing in SHARING.items():
        for lr in (rate, rate / 2):
            changes = {**ONE_GROUP, **sharing_settings(sharing), "learner.lr": lr}
            title = f"{name}, learning rate {lr:g}"
            runs[title] = train(SPEECH, title, changes)
    env = env_of_run(runs["two groups, one symbol (the recipe)"][0])
    table = report.markdown_table(header("return", train.args), return_rows(runs))
    return (
        "Speech: the speaker and the listener",
        f"{table}\n\nRandom actions reach {env.random_return:.1f}; without a word no listener does "
        f"better than {-2 / 3 * 2 / 3 * 25:.1f}; a speaker who names the goal and a listener who "
        f"waits for it and goes there straight, {env.heuristic_return:.2f}. Below the recipe, the "
        "two kinds are one heterogeneous group with continuous speech, so that one network can "
        "serve both; all sides were tried with the same two learning rates, and everything else is "
        "the recipe's.",
    )


def env_of_run(run: Any, num_envs: int = 1) -> EnvBase:
    """The environment that a run was trained on, anew."""
    from torchrl_marl.envs.make import make_env

    return make_env(run.config.env, seed=EVALUATION_SEED, num_envs=num_envs)


# ------------------------------------------------------------------------------------------- tag


def compare_tag(train: Trainer) -> tuple[str, str]:
    """Predators and prey."""
    runs = {name: train(TAG, name, sharing_settings(sharing)) for name, sharing in SHARING.items()}
    sides = {name: [run.policy for run in seed_runs] for name, seed_runs in runs.items()}
    run = next(iter(runs.values()))[0]
    hunt = Hunt(env_of_run(run, train.args.episodes), train.args.episodes)
    rows = []
    for name, policies in sides.items():
        caught = [hunt(policy, None) for policy in policies]
        against = [
            statistics.mean(hunt(*pair) for pair in zip(policies, other))
            for other in sides.values()
        ]
        cells = [f"{value:.1f}" for value in (statistics.mean(caught), *caught, *against)]
        rows.append([name, *cells, *cost(runs[name])])
    for name, policy in (("untrained", untrained_policy(run)), ("random actions", None)):
        caught = hunt(policy, None)
        against = [
            statistics.mean(hunt(policy, p) for p in policies) for policies in sides.values()
        ]
        cells = [f"{value:.1f}" for value in (caught, *against)]
        rows.append([name, cells[0], *[""] * len(train.args.seeds), *cells[1:], "", ""])
    heading = [
        *header("random prey", train.args)[:-2],
        *(f"prey of: {name}" for name in sides),
        "frames",
        "training, s",
    ]
    return (
        "Tag: what the predators earn",
        f"{report.markdown_table(heading, rows)}\n\nReturn of the predators (10 for each step in "
        "which one of them touches the prey, minus a tenth of the distance, summed over the three) "
        f"in the same {train.args.episodes} episodes of {run.config.env.max_steps} steps, by the "
        "likeliest actions: against a prey that acts at random (mean and each seed), and against "
        "the trained prey of each side (mean over the seeds, each seed against the same seed).",
    )


class Hunt:
    """Plays the same episodes with anybody's predators and anybody's prey.

    Args:
        env (EnvBase): ``simple_tag``.
        episodes (int): how many.
    """

    def __init__(self, env: EnvBase, episodes: int) -> None:
        from torchrl_marl.modules import RandomActor
        from torchrl_marl.specs import TeamSpec

        self.env = env
        self.episodes = episodes
        self.team = TeamSpec.from_env(env)
        self._random = {name: RandomActor(group) for name, group in self.team.groups.items()}

    def __call__(self, predators: Any, prey: Any) -> float:
        """What the predators earn; nobody's policy (None) acts at random."""
        from torchrl_marl.training.evaluation import evaluate

        def act(tensordict: Any) -> Any:
            actions = {}
            for group, policy in (("agent", prey), ("adversary", predators)):
                policy = self._random[group] if policy is None else policy
                actions[group] = policy(tensordict.copy())[group, "action"]
            for group, action in actions.items():
                tensordict[group, "action"] = action
            return tensordict

        result = evaluate(self.env, act, self.team, episodes=self.episodes, seed=EVALUATION_SEED)
        return result["adversary/episode_reward"]


def untrained_policy(run: Any) -> Any:
    """A policy as it is before the first iteration."""
    import torch

    from torchrl_marl.collectors import TeamPolicy
    from torchrl_marl.learners.build import build_learners
    from torchrl_marl.specs import TeamSpec

    torch.manual_seed(run.config.seed)
    team = TeamSpec.from_env(env_of_run(run))
    learners = build_learners(team, run.config.learner, run.config.groups)
    return TeamPolicy(actor for learner in learners for actor in learner.actors.values())


# ---------------------------------------------------------------------------------------- report


def header(title: str, args: argparse.Namespace) -> list[str]:
    """Of a table of runs."""
    return ["", title, *(f"seed {seed}" for seed in args.seeds), "frames", "training, s"]


def return_rows(runs: Runs) -> list[list[str]]:
    """Mean and each seed of the return after training."""
    rows = []
    for name, seed_runs in runs.items():
        after = [run.summary["return_after"] for run in seed_runs]
        cells = [f"{value:.2f}" for value in (statistics.mean(after), *after)]
        rows.append([name, *cells, *cost(seed_runs)])
    return rows


def cost(runs: Sequence[Any]) -> list[str]:
    """Frames and mean seconds of training."""
    seconds = statistics.mean(run.summary["seconds"] for run in runs)
    return [f"{runs[0].summary['frames']:,}", f"{seconds:.0f}"]


COMPARISONS = {"speech": compare_speech, "tag": compare_tag, "arena": haunted_arena.arena}


def main() -> None:
    """Trains and reports."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=COMPARISONS, default=list(COMPARISONS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--episodes", type=int, default=200, help="episodes of tag's evaluation")
    parser.add_argument("--threads", type=int, default=1, help="torch's threads")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, as a smoke test")
    parser.add_argument("--write", action="store_true", help="write the tables to results")
    args = parser.parse_args()
    args.write = args.write and not args.quick
    report.be_quiet()
    folder = Path(tempfile.mkdtemp())
    try:
        train = Trainer(folder, args)
        sections = [COMPARISONS[name](train) for name in args.only]
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    methods = dict.fromkeys(METHODS[name] for name in args.only)
    all_comparisons = args.only == list(COMPARISONS)
    report.publish(
        "heterogeneous" if all_comparisons else f"heterogeneous_{'_'.join(args.only)}",
        "Networks of their own against one shared padded network, and masks against none",
        sections,
        {"threads of torch": args.threads, "recipes": f"{SPEECH}, {TAG}, {haunted_arena.ARENA}"},
        "".join(["Trained by `torchrl_marl.train`, one run after the other.", *methods]),
        write=args.write,
    )


if __name__ == "__main__":
    main()
