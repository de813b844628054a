"""Credit of an agent that dies in its first step while its team goes on.

    python benchmarks/dead_credit.py --write

The team earns 1 a step for 40 steps, and one of its two agents always dies in the first. With
``bootstrap=team`` and a discount of 0.99 the value of the first step is 33.10 for both. MAPPO,
IPPO and a critic on the state are trained for some batches, and their value targets of first steps
are compared with that number.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

import report

STEPS, GAMMA = 40, 0.99
RETURN = (1 - GAMMA**STEPS) / (1 - GAMMA)
CRITICS: dict[str, dict[str, Any]] = {
    "MAPPO": {"algorithm": "mappo"},
    "MAPPO, critic on the state": {"algorithm": "mappo", "central_input": "state"},
    "IPPO": {"algorithm": "ippo"},
}
HEADER = ("critic", "seed", "who lives on", "who dies at once", "exact")


def make_env(num_envs: int, seed: int) -> Any:
    """Environment whose observation has the time."""
    import torch
    from tensordict import TensorDict
    from torchrl.data import Categorical, Unbounded

    from torchrl_marl import AgentSpec
    from torchrl_marl.envs import MarlEnv

    class EarlyDeath(MarlEnv):
        def __init__(self) -> None:
            super().__init__(num_envs, seed=seed)
            self.register_agent(AgentSpec("pair", 2, Unbounded((1,)), Categorical(2)))
            self.register_state(Unbounded((1,)))

        def _reset(self, tensordict):
            self.time = torch.zeros(num_envs, 1)
            return self._make_output()

        def _step(self, tensordict):
            self.time = self.time + 1
            ends = torch.tensor([False, True]).view(1, 2, 1)
            ends = ends | (self.time >= STEPS).unsqueeze(-1)
            return self._make_output(reward=torch.ones(num_envs, 2, 1), terminated=ends)

        def _make_output(self, **entries):
            time = self.time / STEPS
            observation = time.unsqueeze(1).expand(-1, 2, 1)
            return TensorDict({"pair": {"observation": observation, **entries}, "state": time})

    return EarlyDeath()


def credit(settings: dict[str, Any], seed: int, iterations: int) -> list[float]:
    """The value targets of a first step, mean over the last tenth of the batches."""
    import torch

    from torchrl_marl import TeamSpec
    from torchrl_marl.collectors import RolloutCollector
    from torchrl_marl.learners import OnPolicyConfig, OnPolicyLearner
    from torchrl_marl.modules import CriticConfig, NetworkConfig

    torch.manual_seed(seed)
    env = make_env(32, seed)
    networks = {"actor": NetworkConfig([32]), "critic": CriticConfig([64, 64])}
    steps = {"lr": 1e-3, "minibatch_size": 240, "num_epochs": 6, "gamma": GAMMA}
    config = OnPolicyConfig(**networks, **steps, **settings)
    learner = OnPolicyLearner(TeamSpec.from_env(env).groups, config)
    # 30 steps a batch: episodes of 40 are cut where it ends.
    collector = RolloutCollector(env, learner.actors["pair"], frames_per_batch=32 * 30)
    found = []
    for _ in range(iterations):
        batch = collector.next()
        learner.learn(batch)
        both_act = batch["pair", "mask"].all(-1)
        if bool(both_act.any()):
            found.append(batch["pair", "value_target"][both_act].mean(0).flatten())
    return torch.stack(found[-max(1, len(found) // 10) :]).mean(0).tolist()


def main() -> None:
    """Trains and reports."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--iterations", type=int, default=200, help="batches of 960 frames")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, as a smoke test")
    parser.add_argument("--write", action="store_true", help="write the table to results")
    args = parser.parse_args()
    report.be_quiet()
    import torch

    torch.set_num_threads(1)
    rows: list[tuple[str, ...]] = []
    for name, settings in CRITICS.items():
        found = [
            credit(settings, seed, 4 if args.quick else args.iterations) for seed in args.seeds
        ]
        for seed, values in zip(args.seeds, found):
            rows.append((name, str(seed), *(f"{x:.2f}" for x in values), f"{RETURN:.2f}"))
        means = [f"{statistics.mean(column):.2f}" for column in zip(*found)]
        rows.append((name, "mean", *means, f"{RETURN:.2f}"))
    report.publish(
        "dead_credit",
        "What an agent is credited with that dies in its first step",
        [("Value target of an episode's first step", report.markdown_table(HEADER, rows))],
        {"batches": args.iterations, "envs": 32, "threads of torch": 1},
        """Two agents, 1 a step for 40 steps, one dies in the first step, `bootstrap=team`, discount
        0.99: both first steps are worth 33.10. Means over the last tenth of the batches.""",
        write=args.write and not args.quick,
    )


if __name__ == "__main__":
    main()
