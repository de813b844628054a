"""Success of each algorithm in games with known optima.

    python benchmarks/exact_games.py --write

Two agents play the climbing game, the penalty game and the two-step game, with every registered
algorithm for discrete actions. Twenty teams learn at once, each as a group of one environment with
its own networks, rewards, statistics and gradient limits. That gives twenty seeds in little more
than the time of one.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import time
from typing import Any, NamedTuple

import report

N_ENVS = 128
UPDATES = 8
PENALTY = -100.0


class Player(NamedTuple):
    """A row of the table: an algorithm, and what differs from the settings of all."""

    algorithm: str
    differs: dict[str, Any] = {}
    note: str = ""

    @property
    def name(self) -> str:
        """What the row says."""
        return self.algorithm + self.note


def games() -> dict[str, tuple[Any, float]]:
    """Name -> payoffs ``[P, A, A]``, of each place, and the best return."""
    from torchrl_marl.envs.toy import MatrixGame, TwoStepGame

    penalty = [[10.0, 0.0, PENALTY], [0.0, 2.0, 0.0], [PENALTY, 0.0, 10.0]]
    climbing = MatrixGame(1, payoff="climbing").payoff
    return {
        "climbing": (climbing.unsqueeze(0), 11.0),
        "penalty": (MatrixGame(1, payoff=penalty).payoff.unsqueeze(0), 10.0),
        "two-step": (TwoStepGame(1).payoff, 8.0),
    }


def make_env(payoff: Any, n_teams: int, num_envs: int) -> Any:
    """Environment in which each group of two agents plays a separate game, state by state."""
    import torch
    from tensordict import TensorDict
    from torchrl.data import Categorical, Unbounded

    from torchrl_marl import AgentSpec
    from torchrl_marl.envs import MarlEnv

    n_places, n_actions = payoff.shape[:2]
    names = [f"team_{i}" for i in range(n_teams)]

    class Teams(MarlEnv):
        def __init__(self) -> None:
            super().__init__(num_envs, seed=0)
            observation, action = Unbounded((n_places + 2,)), Categorical(n_actions)
            for name in names:
                self.register_agent(AgentSpec(name, 2, observation, action))

        def _reset(self, tensordict):
            self.place = torch.zeros(num_envs, n_teams, dtype=torch.int64)
            return self._make_output()

        def _step(self, tensordict):
            actions = torch.stack([tensordict[name, "action"] for name in names], 1)
            reward = payoff[self.place, actions[..., 0], actions[..., 1]]
            ended = (self.place > 0) | (n_places == 1)
            self.place = torch.where(ended, self.place, 1 + actions[..., 0])
            out = self._make_output(reward=reward)
            out["terminated"] = ended[:, :1]  # of all teams in the same step
            return out

        def _make_output(self, reward=None):
            place = torch.nn.functional.one_hot(self.place % n_places, n_places).float()
            agent_ids = torch.eye(2).expand(num_envs, 2, 2)
            out = {}
            for i, name in enumerate(names):
                observation = torch.cat([place[:, i].unsqueeze(1).expand(-1, 2, -1), agent_ids], -1)
                out[name] = {"observation": observation}
                if reward is not None:
                    out[name]["reward"] = reward[:, i].reshape(-1, 1, 1).repeat(1, 2, 1)
            return TensorDict(out, [num_envs])

    return Teams()


def make_learner(env: Any, player: Player) -> Any:
    """A learner of all teams; of the settings below it has those that its algorithm reads."""
    from torchrl_marl import TeamSpec
    from torchrl_marl.learners import build_learners
    from torchrl_marl.learners.algorithms import ALGORITHMS
    from torchrl_marl.modules import NetworkConfig
    from torchrl_marl.modules.config import CriticConfig

    schema = ALGORITHMS.schema(player.algorithm)
    default = schema()
    fields = {field.name for field in dataclasses.fields(schema)}
    settings = {
        "actor": NetworkConfig([32], sharing="none"),
        "critic": CriticConfig([32]),
        "minibatch_size": N_ENVS,
        "lr": 5e-3,
        "actor_lr": 2e-3,
        "critic_lr": 1e-2,
        "alpha_lr": 5e-3,
        "entropy_coeff": 0.01,
        "num_epochs": UPDATES,
        "learning_starts": N_ENVS,
        "updates_per_frame": UPDATES / N_ENVS,
        "tau": 0.05,
        "target_entropy": 0.1,
    }
    chosen = {key: value for key, value in settings.items() if key in fields}
    if "exploration" in fields:
        chosen["exploration"] = dataclasses.replace(
            default.exploration, epsilon=1.0, epsilon_end=1.0
        )
    chosen |= player.differs
    config = dataclasses.replace(default, algorithm=player.algorithm, **chosen)
    [learner] = build_learners(TeamSpec.from_env(env), config)
    return learner


def play(payoff: Any, player: Player, n_teams: int, n_batches: int) -> tuple[list[float], float]:
    """What each team's likeliest actions earn after training; and the seconds that took."""
    import torch

    from torchrl_marl.collectors import RolloutCollector, TeamPolicy

    torch.manual_seed(0)
    began = time.perf_counter()
    n_steps = 1 if len(payoff) == 1 else 2
    env = make_env(payoff, n_teams, N_ENVS // n_steps)
    learner = make_learner(env, player)
    collector = RolloutCollector(env, TeamPolicy(learner.actors.values()), frames_per_batch=N_ENVS)
    for i in range(n_batches):
        learner.set_progress(i / n_batches)
        learner.learn(collector.next())
    return greedy_returns(payoff, learner, n_teams), time.perf_counter() - began


def greedy_returns(payoff: Any, learner: Any, n_teams: int) -> list[float]:
    """The return of each team's likeliest actions."""
    import torch
    from torchrl.envs.utils import ExplorationType, set_exploration_type

    from torchrl_marl.collectors import TeamPolicy

    env = make_env(payoff, n_teams, 1)
    policy = TeamPolicy(learner.actors.values())
    with set_exploration_type(ExplorationType.DETERMINISTIC), torch.no_grad():
        steps = env.rollout(1 if len(payoff) == 1 else 2, policy)
    return [steps["next", f"team_{i}", "reward"][0, :, 0].sum().item() for i in range(n_teams)]


def players() -> list[Player]:
    """Every algorithm of discrete actions that learns, and IQL that trusts the others."""
    from torchrl_marl.learners.algorithms import ALGORITHMS

    found = [Player(name) for name in ALGORITHMS.names() if name != "random"]
    if any(player.algorithm == "iql" for player in found):
        found.append(Player("iql", {"negative_weight": 0.05}, ", negative_weight 0.05"))
    return found


def table(game: str, n_teams: int, n_batches: int, chosen: list[Player]) -> str:
    """Who finds the best of a game."""
    payoff, best = games()[game]
    rows = []
    for player in chosen:
        returns, seconds = play(payoff, player, n_teams, n_batches)
        optimal = sum(abs(x - best) < 1e-4 for x in returns)
        worst = f"{min(returns):g} to {max(returns):g}"
        mean = f"{statistics.mean(returns):.2f}"
        rows.append(
            (player.name, f"{optimal} of {n_teams}", mean, worst, f"{seconds / n_teams:.2f}")
        )
        print(game, *rows[-1], flush=True)
    return report.markdown_table(
        ("algorithm", f"earn {best:g}", "mean", "least to most", "seconds a seed"), rows
    )


def main() -> None:
    """Trains and reports."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--teams", type=int, default=20, help="number of teams, as seeds")
    parser.add_argument("--batches", type=int, default=50, help=f"batches of {N_ENVS} frames")
    parser.add_argument("--games", nargs="+", default=None, help="selected games")
    parser.add_argument("--algorithms", nargs="+", default=None, help="selected algorithms")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, as a smoke test")
    parser.add_argument("--write", action="store_true", help="write the table to results")
    args = parser.parse_args()
    report.be_quiet()
    import torch

    torch.set_num_threads(1)
    n_teams, n_batches = (2, 4) if args.quick else (args.teams, args.batches)
    chosen = [p for p in players() if not args.algorithms or p.algorithm in args.algorithms]
    report.publish(
        "exact_games",
        "Which algorithms find the best of games whose answers are known",
        [(f"The {x} game", table(x, n_teams, n_batches, chosen)) for x in args.games or games()],
        {
            "teams": n_teams,
            "batches": f"{n_batches} of {N_ENVS} frames",
            "threads of torch": 1,
            "execution": "eager",
        },
        f"""Two agents; climbing: [[11, -30, 0], [-30, 7, 6], [0, 0, 5]]; penalty: [[10, 0, k],
        [0, 2, 0], [k, 0, 10]] with k = {PENALTY:g}; two-step: the first agent chooses all sevens or
        [[0, 1], [1, 8]]. Teams are groups of one environment, each with networks, rewards,
        statistics and limits of its own; a seed's seconds are all teams' by their number. The
        return is that of the likeliest actions after training. Each agent has a network of its own,
        32 units. Who learns from stored steps explores uniformly (epsilon 1), with {UPDATES}
        updates for each batch; PQN explores so, too, and makes {UPDATES} epochs of it, as the
        others do. The rest stands in the
        script.""",
        write=args.write and not args.quick,
    )


if __name__ == "__main__":
    main()
