"""Checks that an environment follows the multi-agent conventions, and explains violations.

Shapes: B any batch dims, N agents of a group.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import torch
from torchrl import logger
from torchrl.envs import Compose, EnvBase, StepCounter, TransformedEnv, check_env_specs

from torchrl_marl.envs.check.layout import Findings, base_of, check_layout, check_specs
from torchrl_marl.envs.check.runs import (
    Play,
    check_idle_actions,
    check_outputs_stay,
    check_partial_reset,
    check_seeds,
    check_twin,
    describe_error,
)
from torchrl_marl.envs.check.steps import StepRules, full_specs
from torchrl_marl.errors import ConfigError, SpecError
from torchrl_marl.runtime.random_state import RandomState

__all__ = ["check_marl_env"]


def check_marl_env(
    env: EnvBase,
    *,
    n_steps: int = 100,
    seed: int = 0,
    max_steps: int | None = None,
    make: Callable[[], EnvBase] | None = None,
) -> str:
    """Plays an environment with random legal actions and reports broken rules.

    The rules are:

    - keys, shapes and dtypes are as declared;
    - ``done = terminated | truncated``, for the episode and for agents;
    - ``terminated`` and ``truncated`` are never both True;
    - dead agents stay dead and are masked, unless the environment has ``respawns = True``;
    - the episode ends with its last agent, unless agents may come back;
    - at a time limit episodes are truncated, and the mask of living agents stays True;
    - agents that act have a legal action;
    - rewards and the observations of living agents are finite and within bounds;
    - the last step of an episode returns the terminal observation;
    - a partial reset does not change the other envs;
    - the same seed gives the same episodes;
    - actions of masked agents have no effect;
    - later steps do not write to earlier outputs.

    Args:
        env (EnvBase): grouped environment of any batch size. It is seeded, played and reset.

    Keyword Args:
        n_steps (int): number of steps to play.
        seed (int): random seed of the environment and of the actions.
        max_steps (int, optional): time limit in steps; ``env.max_steps`` by default.
        make (callable, optional): function that builds a second environment, to check that the
            two environments do not disturb each other.

    Returns:
        str: summary of the checks, with hints about possible mistakes.

    Raises:
        SpecError: rules are broken; for each one, the message lists the key, the value found there,
            the expected value, and a fix.
        ConfigError: the object is not a TorchRL environment.

    Examples:
        >>> from torchrl_marl.envs import make_env
        >>> report = check_marl_env(make_env("toy/arena", num_envs=3, seed=0), n_steps=40)
        >>> report.partition(",")[0]
        'Arena keeps the rules: 4 agents in 1 group'
    """
    if not isinstance(env, EnvBase):
        raise ConfigError(
            f"check_marl_env takes a TorchRL environment, found a {type(env).__name__}; "
            "wrap it, for example with torchrl_marl.envs.make_env."
        )
    base = base_of(env)
    declaration = getattr(base, "_declaration", None)
    findings, name = Findings(), getattr(declaration, "owner", type(base).__name__)
    with RandomState.of_process().active():
        report = _check_all(env, n_steps, seed, max_steps, make, findings)
    if findings.problems:
        raise SpecError(findings.message(name))
    return "\n".join([f"{name} {report}", *(f"Hint: {hint}" for hint in findings.hints)])


def _check_all(
    env: EnvBase,
    n_steps: int,
    seed: int,
    max_steps: int | None,
    make: Callable[[], EnvBase] | None,
    findings: Findings,
) -> str:
    """Runs all checks; stops early if the environment cannot be played."""
    team = check_layout(env, findings)
    if team is None or findings.problems:
        return ""
    limit = _lowest_time_limit(env) if max_steps is None else max_steps
    rules = StepRules(env, team, findings, limit)
    try:
        if _play_and_check(Play(env, team, seed), rules, n_steps):
            if not findings.problems:
                _check_torchrl(env, findings)
            check_outputs_stay(Play(env, team, seed), min(n_steps, 10), findings)
            check_partial_reset(env, team, seed, findings)
            played = check_seeds(env, team, seed, n_steps, findings)
            if played is not None:
                check_idle_actions(env, team, seed, played, findings)
                if make is not None:
                    check_twin(env, team, make, seed, played[:21], findings)
    except Exception as error:  # noqa: BLE001 - other libraries may raise anything
        findings.add(
            "step",
            f"playing fails with {describe_error(error)}",
            "reset, rand_action and step_and_maybe_reset to run",
            "fix this error; env.rollout(3) shows the whole traceback",
        )
    n_groups = len(team.groups)
    return (
        f"keeps the rules: {team.n_agents} agents in {n_groups} group{'s' * (n_groups != 1)}, "
        f"{rules.step} steps of {env.batch_size.numel()} envs, {rules.episodes} episodes."
    )


def _lowest_time_limit(env: EnvBase) -> int | None:
    """Returns the lowest time limit of the environment and its transforms."""
    limits = [getattr(base_of(env), "max_steps", None)]
    while isinstance(env, TransformedEnv):
        steps = env.transform if isinstance(env.transform, Compose) else [env.transform]
        limits += [step.max_steps for step in steps if isinstance(step, StepCounter)]
        env = env.base_env
    return min((limit for limit in limits if isinstance(limit, int)), default=None)


def _play_and_check(play: Play, rules: StepRules, n_steps: int) -> bool:
    """Checks every step; returns True if all data have the declared layout."""
    findings = rules.findings
    if not check_specs(play.begin, [rules.env.full_observation_spec], 0, findings):
        return False
    rules.begin(play.begin)
    for i in range(n_steps):
        before = _random_states()
        step = play.step()
        if before != _random_states():
            findings.hint(
                "the environment draws from the global random state: two instances disturb each "
                "other, and torch.manual_seed changes them; draw from the environment's own "
                "generator."
            )
        if not check_specs(step.after, full_specs(rules.env), i + 1, findings):
            return False
        rules.check(step.before, step.after, step.carry)
    rules.finish()
    return True


def _check_torchrl(env: EnvBase, findings: Findings) -> None:
    """Runs TorchRL's ``check_env_specs``."""
    level = logger.level
    logger.setLevel("WARNING")
    try:
        check_env_specs(env)
    except Exception as error:  # noqa: BLE001 - assertions, and errors of other libraries
        findings.add(
            "specs",
            f"torchrl.envs.check_env_specs fails with {describe_error(error)}",
            "specs that match the outputs of reset and step",
            "declare exactly what is returned",
        )
    finally:
        logger.setLevel(level)


def _random_states() -> tuple:
    keys = np.random.get_state(legacy=False)["state"]["key"]
    return torch.get_rng_state().numpy().tobytes(), keys.tobytes(), random.getstate()
