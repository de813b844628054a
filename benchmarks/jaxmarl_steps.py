"""Steps of JaxMARL's environments from torch, against a Python loop over JAX's own jitted step.

    python benchmarks/jaxmarl_steps.py --write

Measured in alternation, in one process, with random actions, on environments whose episodes end at
different times:

- pure JAX: a Python loop over one jitted call that draws the actions and makes JaxMARL's own step,
  all copies at once, which resets the copies that ended and loses their last observation;
- ours: torch draws the actions, ``JaxMarlEnv.step_and_maybe_reset`` makes the step, and the result
  is a TensorDict with the terminal observations, the masks and the flags of every agent.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable
from typing import Any

import report

BASELINE = "pure JAX, a call a step"
OURS = "JaxMarlEnv.step_and_maybe_reset"
ENVIRONMENTS: dict[str, tuple[str, dict[str, Any]]] = {
    "simple_spread": ("MPE_simple_spread_v3", {"continuous_actions": False}),
    "SMAX 3m": ("HeuristicEnemySMAX", {"scenario": "3m", "state": "world"}),
}


def make_pure(name: str, num_envs: int, n_steps: int, warmup: int) -> Callable[[], Any]:
    """Calls of JAX's own step, in a loop."""
    import jax
    import jaxmarl
    from jaxmarl.environments.smax import map_name_to_scenario

    smax = "SMAX" in name
    env = jaxmarl.make(name, **({"scenario": map_name_to_scenario("3m")} if smax else {}))
    n_actions = env.action_space(env.agents[0]).n

    @jax.jit
    def step(key: Any, state: Any) -> Any:
        key, acting, stepping = jax.random.split(key, 3)
        keys = jax.random.split(acting, len(env.agents))
        random_actions = [
            jax.random.randint(agent_key, (num_envs,), 0, n_actions) for agent_key in keys
        ]
        actions = dict(zip(env.agents, random_actions))
        keys = jax.random.split(stepping, num_envs)
        return (key, *jax.vmap(env.step)(keys, state, actions))

    key = jax.random.PRNGKey(0)
    _, state = jax.jit(jax.vmap(env.reset))(jax.random.split(key, num_envs))
    if not smax:  # SMAX's battles end at different times by themselves
        state = state.replace(step=jax.random.randint(key, (num_envs,), 0, 25))
    carry = [key, state]

    def loop(steps: int = n_steps) -> Any:
        for _ in range(steps):
            carry[0], observations, carry[1], rewards, dones, _ = step(*carry)
        return jax.block_until_ready((observations, rewards, dones))

    loop(warmup)
    return loop


def make_ours(
    name: str, kwargs: dict[str, Any], num_envs: int, n_steps: int, warmup: int
) -> Callable[[], Any]:
    """Steps of our environment."""
    import torch

    from torchrl_marl.envs import JaxMarlEnv

    env = JaxMarlEnv(name, num_envs=num_envs, seed=0, **kwargs)
    (group,) = env.group_map
    spec = env.full_action_spec[group, "action"]
    current = [env.reset()]
    for _ in range(warmup):  # new episodes here and there, so that they end at different times
        carry = env.step_and_maybe_reset(env.rand_action(current[0]))[1]
        current[0] = env.reset(carry.set("_reset", torch.rand(num_envs, 1) < 0.1))

    def loop() -> Any:
        carry = current[0]
        for _ in range(n_steps):
            action = torch.randint(spec.space.n, spec.shape)
            step, carry = env.step_and_maybe_reset(carry.set((group, "action"), action))
        current[0] = carry
        return step

    return loop


def measure(args: argparse.Namespace) -> list[list[str]]:
    """Returns a row for each candidate in each environment."""
    warnings.filterwarnings("ignore")
    rows = []
    for env_name, (name, kwargs) in ENVIRONMENTS.items():
        sizes = (args.envs, args.steps, args.warmup)
        candidates = {
            BASELINE: make_pure(name, *sizes),
            OURS: make_ours(name, kwargs, *sizes),
        }
        timings = report.alternate(candidates, args.rounds, shortest=0)
        for candidate in candidates:
            frames = args.envs * args.steps / timings.median(candidate)
            ratio = timings.ratio_text(candidate, BASELINE)
            rows.append([env_name, candidate, f"{frames:,.0f}", ratio, str(timings.rounds())])
    return rows


def main() -> None:
    """Measures and reports."""
    parser = report.parser(__doc__, threads=(1,))
    parser.add_argument("--envs", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=100, help="steps of one measurement")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--warmup", type=int, default=40, help="warmup steps")
    args = parser.parse_args()
    if args.quick:
        args.envs, args.steps, args.rounds, args.warmup = 16, 5, 2, 3
    header = ["environment", "", "env-steps/s", "of pure JAX", "rounds"]
    tables = report.for_each_number_of_threads(measure, args.threads, args)
    report.publish(
        "jaxmarl_steps",
        "Steps of JaxMARL's environments from torch",
        [
            (f"{report.count_of(count, 'thread')} of torch", report.markdown_table(header, rows))
            for count, rows in tables.items()
        ],
        {"copies": args.envs, "steps a measurement": args.steps},
        """Both run in one process, in turn, in random order in each round; the ratio is the median
        of the rounds' ratios, with quartiles. JAX uses as many threads as it likes in both.""",
        write=args.write and not args.quick,
    )


if __name__ == "__main__":
    main()
