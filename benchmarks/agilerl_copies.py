"""AgileRL's vectorized PettingZoo env with random actions; worker process of pettingzoo_copies.py.

``pettingzoo_copies.py`` runs it in AgileRL's virtual environment. One piece of work is --steps
steps of --envs copies, each in its own process as AgileRL does it. NumPy draws the actions of all
copies, and the step returns arrays.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from importlib.metadata import version

import foreign


def make_env():
    """One copy."""
    from mpe2 import simple_speaker_listener_v4

    return simple_speaker_listener_v4.parallel_env(continuous_actions=True)


def make_stepper(args: argparse.Namespace) -> Callable[[], None]:
    """Makes the copies; the function makes one piece of work."""
    import numpy as np
    from agilerl.vector import AsyncPettingZooVecEnv

    env = AsyncPettingZooVecEnv([make_env] * args.envs)
    env.reset(seed=0)
    generator = np.random.default_rng(0)
    sizes = {agent: env.single_action_space(agent).shape for agent in env.agents}

    def work() -> None:
        for _ in range(args.steps):
            env.step(
                {
                    agent: generator.random((args.envs, *size), dtype=np.float32)
                    for agent, size in sizes.items()
                }
            )

    return work


def main() -> None:
    """Answers each request with one piece of work."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--envs", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    channel = foreign.Channel()
    work = make_stepper(args)
    packages = ("agilerl", "pettingzoo", "mpe2", "numpy")
    for _ in channel.requests({"versions": {name: version(name) for name in packages}}):
        work()


if __name__ == "__main__":
    main()
