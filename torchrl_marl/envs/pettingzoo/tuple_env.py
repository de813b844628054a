"""Gymnasium environments of several agents, with ``Tuple`` spaces. Imports no torch.

RWARE and LBF are such environments: observations, actions and rewards are sequences with one entry
for each agent.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torchrl_marl.errors import ConfigError, SpecError, nearest
from torchrl_marl.runtime.import_path import check_not_in_current_folder

__all__ = ["PACKAGES", "TupleEnv", "as_team", "has_tuple_spaces", "named", "newest"]

# Package -> ids of the environments for which returns are published; the package has more. LBF 2.0
# registers at most four foods; five, as in the published 15x15-3p-5f, are ``max_num_food=5``.
PACKAGES = {
    "rware": ("rware-tiny-2ag-v2", "rware-tiny-4ag-v2", "rware-small-4ag-v2"),
    "lbforaging": (
        "Foraging-8x8-2p-2f-coop-v3",
        "Foraging-10x10-3p-3f-v3",
        "Foraging-15x15-3p-4f-v3",
    ),
}
_VERSION = re.compile(r"[-_]v\d+$")
_LIMITS = ("max_steps", "_max_episode_steps", "max_episode_steps")


class TupleEnv:
    """Gymnasium environment of several agents, as a parallel environment of PettingZoo.

    The agents are ``agent_0``, ``agent_1`` and so on. They begin and end together. If the
    reward is a single number, every agent earns it. An end at the environment's own time limit is
    ``truncated``, even if the environment calls it ``terminated``, as RWARE and LBF do.

    Args:
        env (gymnasium.Env): environment with ``Tuple`` observation and action spaces.
        common_reward (bool): True if each agent gets the sum of all agents' rewards.

    Raises:
        SpecError: if the spaces are not tuples of the same length.
    """

    def __init__(self, env: Any, *, common_reward: bool = False) -> None:
        self.env, self.common_reward = env, common_reward
        self._observations, self._actions = env.observation_space, env.action_space
        lengths = [len(getattr(x, "spaces", ())) for x in (self._observations, self._actions)]
        if not has_tuple_spaces(env) or lengths[0] != lengths[1]:
            raise SpecError(
                f"the observation space is {self._observations}, expected a Tuple with one space "
                f"for each of the {lengths[1]} agents."
            )
        self.possible_agents = [f"agent_{i}" for i in range(lengths[1])]
        self._index = {agent: i for i, agent in enumerate(self.possible_agents)}
        self.agents: list[str] = []
        self.metadata, self.render_mode = env.metadata, env.render_mode
        self.max_steps = _limit_of(env)
        self._steps = 0

    def observation_space(self, agent: str) -> Any:
        """Returns an agent's observation space."""
        return self._observations[self._index[agent]]

    def action_space(self, agent: str) -> Any:
        """Returns an agent's action space."""
        return self._actions[self._index[agent]]

    def reset(self, seed: int | None = None, options: dict | None = None) -> tuple[dict, dict]:
        """Begins an episode; returns observations and infos by agent."""
        _clear_positions(self.env.unwrapped)
        observations, info = self.env.reset(seed=seed, options=options)
        self.agents, self._steps = list(self.possible_agents), 0
        return self._by_agent(observations), self._infos(info)

    def step(self, actions: Mapping[str, Any]) -> tuple[dict, dict, dict, dict, dict]:
        """Steps the environment; returns observations, rewards, both done flags and infos."""
        joint_action = tuple(actions[agent] for agent in self.possible_agents)
        observations, reward, terminated, truncated, info = self.env.step(joint_action)
        self._steps += 1
        at_limit = self.max_steps is not None and self._steps >= self.max_steps
        truncated = bool(truncated or (terminated and at_limit))
        ended = bool(terminated and not truncated)
        is_common = not hasattr(reward, "__len__")
        rewards = [reward] * len(joint_action) if is_common else [float(x) for x in reward]
        if self.common_reward and not is_common:
            rewards = [sum(rewards)] * len(rewards)
        agents = self.possible_agents
        if ended or truncated:
            self.agents = []
        return (
            self._by_agent(observations),
            self._by_agent(rewards),
            dict.fromkeys(agents, ended),
            dict.fromkeys(agents, truncated),
            self._infos(info),
        )

    def state(self) -> Any:
        """Gymnasium has no state; raises ``NotImplementedError``."""
        raise NotImplementedError("Gymnasium environments have none")

    def render(self) -> Any:
        """Returns a picture, as the environment draws it."""
        return self.env.render()

    def close(self) -> None:
        """Closes the environment."""
        self.env.close()

    def _by_agent(self, rows: Sequence[Any]) -> dict[str, Any]:
        if len(rows) != len(self.possible_agents):
            raise SpecError(
                f"the environment returned {len(rows)} observations or rewards, expected one for "
                f"each of {len(self.possible_agents)} agents."
            )
        return dict(zip(self.possible_agents, rows))

    def _infos(self, info: dict) -> dict[str, dict]:
        return dict.fromkeys(self.possible_agents, info)


def _clear_positions(env: Any) -> None:
    """Clears the positions of LBF's players, so that equal seeds give equal episodes.

    A reset of LBF does not place players where they stood at the end of the last episode.
    """
    for player in getattr(env, "players", None) or ():
        if hasattr(player, "position"):
            player.position = None


def _limit_of(env: Any) -> int | None:
    """Returns the time limit that an environment or its registration declares, in steps."""
    registered = getattr(env, "spec", None)
    found = [getattr(registered, "max_episode_steps", None)]
    found += [getattr(env.unwrapped, name, None) for name in _LIMITS]
    return next((limit for limit in found if isinstance(limit, int) and limit > 0), None)


def has_tuple_spaces(env: Any) -> bool:
    """Returns whether an environment is a Gymnasium one with a ``Tuple`` of action spaces."""
    return type(getattr(env, "action_space", None)).__name__ == "Tuple"


def as_team(env: Any) -> Any:
    """Converts a Gymnasium team to a PettingZoo environment; returns others unchanged."""
    return TupleEnv(env) if has_tuple_spaces(env) else env


def newest(name: str, known: Iterable[str]) -> str:
    """Returns the newest version of a name without version; any other name as it is.

    Examples:
        >>> newest("chess", ["chess-v6", "chess-v10", "go-v5"]), newest("go-v5", ["go-v6"])
        ('chess-v10', 'go-v5')
    """
    versions = [candidate for candidate in known if _VERSION.sub("", candidate) == name]
    return max(versions, key=lambda candidate: int(re.split(r"\D", candidate)[-1]), default=name)


def named(name: str) -> Callable[..., Any] | None:
    """Returns the factory of ``package/id``; None for packages without such environments.

    Args:
        name (str): ``"rware/rware-tiny-2ag-v2"``, for example.

    Raises:
        ConfigError: if the package is not installed, or has no environment of this id.
    """
    package, _, env_id = name.partition("/")
    if package not in PACKAGES:
        return None
    if importlib.util.find_spec(package) is None:
        raise ConfigError(f"{package} is not installed; run: pip install {package}")
    import gymnasium

    check_not_in_current_folder(package)
    importlib.import_module(package)
    env_id = newest(env_id, gymnasium.registry)
    try:
        gymnasium.spec(env_id)
    except gymnasium.error.Error as error:
        known = PACKAGES[package]
        raise ConfigError(
            f"{name!r} is not an environment of the package; {nearest(env_id, known)}expected the "
            f"id of one, such as {package}/{known[0]}."
        ) from error
    return functools.partial(_make_registered, package, env_id)


def _make_registered(
    package: str,
    own_id: str,
    render_mode: str | None = None,
    common_reward: bool = False,
    **kwargs: Any,
) -> Any:
    """Builds a registered environment; its package registers it when it is imported."""
    import gymnasium

    importlib.import_module(package)
    # Gymnasium's checker allows only a number as reward.
    env = gymnasium.make(own_id, disable_env_checker=True, render_mode=render_mode, **kwargs)
    return TupleEnv(env, common_reward=True) if common_reward else env
