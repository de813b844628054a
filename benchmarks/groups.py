"""Cost of groups: eight groups of one agent each against one group of eight unshared agents.

    python benchmarks/groups.py --write

The environment is VMAS `navigation`; numbers and sizes of the networks are equal. Timed are the
actions of all agents (draw), collecting a batch with them (sample), a whole training step on that
batch (learn: advantages, minibatches, update), and both (iteration). "eight losses" acts with
and trains the eight groups in a loop, as many systems do.
"""

from __future__ import annotations

import argparse

import report
from loops import execution_kwargs

N_AGENTS = N_GROUPS = 8


def measure(args: argparse.Namespace) -> list[list[str]]:
    """The rows for every number of envs."""
    return [row for num_envs in args.envs for row in measure_size(num_envs, args)]


def measure_size(num_envs: int, args: argparse.Namespace) -> list[list[str]]:
    """The rows of one size."""
    import torch

    one, eight, looped = (Side(n_groups, num_envs, args) for n_groups in (1, N_GROUPS, N_GROUPS))
    looped.split_up()
    rows = []
    for method in ("draw", "sample", "learn", "iteration"):
        with torch.set_grad_enabled(method in ("learn", "iteration")):
            candidates = {
                "eight groups": getattr(eight, method),
                "one group": getattr(one, method),
                "eight losses": getattr(looped, method),
            }
            timings = report.alternate(candidates, args.rounds, seconds=args.seconds, warmup=3)
        rows += [
            [
                f"{num_envs:,}",
                method,
                name,
                f"{1e3 * timings.median(name):.2f}",
                timings.ratio_text("one group", name),
                timings.rounds(),
            ]
            for name in candidates
        ]
    return rows


class Side:
    """One way to train the same agents.

    Args:
        n_groups (int): into which they are divided.
        num_envs (int): number of envs.
        args (Namespace): agents, steps, execution and device.
    """

    def __init__(self, n_groups: int, num_envs: int, args: argparse.Namespace) -> None:
        import torch

        from torchrl_marl import TeamSpec
        from torchrl_marl.envs import VmasEnv
        from torchrl_marl.learners import OnPolicyConfig, OnPolicyLearner
        from torchrl_marl.modules import NetworkConfig

        names = [f"agent_{i}" for i in range(args.agents)]
        size = args.agents // n_groups
        groups = {f"group_{i}": names[i * size : (i + 1) * size] for i in range(n_groups)}
        self.env = VmasEnv(
            "navigation",
            num_envs=num_envs,
            n_agents=args.agents,
            group_map=groups,
            seed=0,
            device=args.device,
        )
        self.learner_kwargs = {"device": args.device, **execution_kwargs(args.execution)}
        self.team = TeamSpec.from_env(self.env)
        network = NetworkConfig([64, 64], sharing="none")
        frames = num_envs * args.steps
        self.config = OnPolicyConfig(
            algorithm="ippo",
            actor=network,
            critic=network,
            num_epochs=2,
            minibatch_size=max(1, frames // 4),
        )
        torch.manual_seed(0)
        self._set_learners(
            [OnPolicyLearner(self.team.groups, self.config, **self.learner_kwargs)], frames
        )

    def _set_learners(self, learners: list, frames: int) -> None:
        from torchrl_marl.collectors import RolloutCollector, TeamPolicy

        self.learners, self.frames = learners, frames
        self.policy = TeamPolicy(actor for learner in learners for actor in learner.actors.values())
        collector_kwargs = {name: x for name, x in self.learner_kwargs.items() if name != "device"}
        self.collector = RolloutCollector(
            self.env, self.policy, frames_per_batch=frames, **collector_kwargs
        )
        self.batch = self.collector.rollout()
        self.carry = self.env.reset()

    def split_up(self) -> None:
        """A learner for each group."""
        from torchrl_marl.learners import OnPolicyLearner

        groups = self.team.groups.items()
        learners = [OnPolicyLearner({n: g}, self.config, **self.learner_kwargs) for n, g in groups]
        self._set_learners(learners, self.frames)

    def draw(self) -> None:
        """Actions of all agents in all envs."""
        self.policy(self.carry)

    def learn(self) -> None:
        """One batch."""
        for learner in self.learners:
            learner.learn(self.batch)

    def sample(self) -> None:
        """One batch."""
        self.collector.rollout()

    def iteration(self) -> None:
        """One batch, and learning from it."""
        self.batch = self.collector.rollout()
        self.learn()


def main() -> None:
    """Measures and reports."""
    parser = report.parser(__doc__)
    parser.add_argument("--envs", type=int, nargs="+", default=[64, 512])
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=20.0, help="time limit of one row")
    parser.add_argument("--execution", default="eager", choices=("eager", "compile", "cudagraph"))
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    args = parser.parse_args()
    args.agents = N_AGENTS
    if args.quick:
        args.write = False
        args.envs, args.steps, args.rounds = [4], 4, 2
    header = ["envs", "", "", "ms", "times one group's", "rounds"]
    measured = report.for_each_number_of_threads(measure, args.threads, args)
    report.publish(
        "groups",
        "Eight groups against one group of as many unshared networks",
        [
            (report.count_of(n, "thread"), report.markdown_table(header, rows))
            for n, rows in measured.items()
        ],
        {"batch": f"{args.steps} steps of all envs, 2 epochs of 4 minibatches"},
        """All three are timed in one process, one after the other in random order every round;
        milliseconds are medians over the rounds, "times" is the median (and the quartiles) of the
        rounds' ratios to one group.""",
        write=args.write,
    )


if __name__ == "__main__":
    main()
