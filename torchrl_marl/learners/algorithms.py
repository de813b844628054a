"""Algorithms by their names: what each is, its settings and its learner. Imports no torch.

A new algorithm is a config, a learner and one line: below, by :func:`register_algorithm`, or in
the ``setup.py`` of a package of one's own, whose entry point names an :class:`Algorithm`::

    entry_points={"torchrl_marl.algorithms": ["reinforce = my_package.reinforce:ALGORITHM"]}
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torchrl_marl.learners.config import LearnerConfig
from torchrl_marl.settings import Tagged, overridden
from torchrl_marl.settings.registry import Registry

__all__ = [
    "ALGORITHMS",
    "Algorithm",
    "Algorithms",
    "LearnerSettings",
    "group_config",
    "register_algorithm",
]


@dataclass(frozen=True)
class Algorithm:
    """An algorithm: what it is, and where its settings and its learner are.

    Args:
        meaning (str): one line for ``torchrl-marl list algorithms``.
        config (str): ``"module:Class"`` of its settings, a :class:`LearnerConfig`.
        learner (str): ``"module:Class"`` of its learner, which is made as
            ``Learner(groups, config, team=, device=, execution=)``.
        no_league (str): why it does not learn against stored players; empty where it does.
    """

    meaning: str
    config: str
    learner: str
    no_league: str = ""


_USE = "use {{at}}.algorithm={}".format
# What algorithms that are not here by their name are called here.
_ELSEWHERE = {
    "ppo": f"PPO for a team is mappo, or ippo with critics of single agents: {_USE('mappo')}",
    "a2c": f"the nearest is mappo: {_USE('mappo')}",
    "coma": f"the nearest is mappo: {_USE('mappo')}",
    "sac": f"SAC for a team is masac, or isac with critics of single agents: {_USE('masac')}",
    "td3": f"TD3 for a team is matd3, or itd3 with critics of single agents: {_USE('matd3')}",
    "ddpg": f"DDPG for a team is maddpg, or iddpg with critics of single agents: {_USE('maddpg')}",
    "dqn": f"DQN of each agent is iql, and vdn or qmix learn one value: {_USE('iql')}",
    "facmac": "FACMAC is maddpg, or matd3, with a mixer of its critics: "
    + _USE("maddpg {at}.mixer.kind=monotonic"),
    "rmappo": f"it is mappo with a memory: {_USE('mappo {at}.actor.memory=gru')}",
    "vtrace": f"it is an estimator of mappo: {_USE('mappo {at}.estimator=vtrace')}",
}
_ELSEWHERE |= {"ddqn": _ELSEWHERE["dqn"], "impala": _ELSEWHERE["vtrace"]}
_PPO = (
    "torchrl_marl.learners.config:OnPolicyConfig",
    "torchrl_marl.learners.on_policy:OnPolicyLearner",
)
_HAPPO = (
    "torchrl_marl.learners.happo_config:HAPPOConfig",
    "torchrl_marl.learners.sequential:SequentialLearner",
)
_NO_LEAGUE = "whose learners are on-policy"
_OFF_POLICY = (
    "torchrl_marl.learners.off_policy_config:OffPolicyConfig",
    "torchrl_marl.learners.off_policy:OffPolicyLearner",
    _NO_LEAGUE,
)
_VALUES = (
    "torchrl_marl.learners.off_policy_config:ValueConfig",
    "torchrl_marl.learners.value_learner:ValueLearner",
    _NO_LEAGUE,
)
_PARALLEL_Q = (
    "torchrl_marl.learners.off_policy_config:ParallelQConfig",
    "torchrl_marl.learners.parallel_q:ParallelQLearner",
    _NO_LEAGUE,
)
_RANDOM = (
    "torchrl_marl.learners.config:RandomConfig",
    "torchrl_marl.learners.fixed_policy:FixedPolicy",
    _NO_LEAGUE,
)


class Algorithms(Registry[Algorithm]):
    """Registry of algorithms; the variants of ``learner``."""

    def words(self) -> dict[str, str]:
        """Returns the name of every algorithm and what it is."""
        return {name: algorithm.meaning for name, algorithm in self.items()}

    def schema(self, word: str) -> type[LearnerConfig] | None:
        """Returns the dataclass of an algorithm's settings, or None for an unknown name."""
        found = self.find(word)
        return None if found is None else self.load(word, found.config)

    def advice(self, word: str) -> str | None:
        """Returns what an algorithm of another name is called here, or None."""
        return _ELSEWHERE.get(word.lower().replace("-", "").replace("_", ""))

    def learner(self, word: str) -> Any:
        """Returns the class of an algorithm's learner."""
        found = self.find(word)
        assert found is not None
        return self.load(word, found.learner)


ALGORITHMS = Algorithms(
    "algorithm",
    Algorithm,
    "torchrl_marl.algorithms",
    {
        "mappo": Algorithm(
            "PPO for a team; the critic sees what all agents of the group see, or the state", *_PPO
        ),
        "ippo": Algorithm("PPO for a team; each agent's critic sees what the agent sees", *_PPO),
        "happo": Algorithm(
            "MAPPO with a policy for each agent; agents are updated one after the other, in random "
            "order, each taking account of those before it",
            *_HAPPO,
        ),
        "maddpg": Algorithm(
            "deterministic policies from stored steps; the critic sees all agents and their "
            "actions, or the state",
            *_OFF_POLICY,
        ),
        "iddpg": Algorithm(
            "deterministic policies from stored steps; each agent's critic sees what the agent "
            "sees and does",
            *_OFF_POLICY,
        ),
        "matd3": Algorithm(
            "MADDPG with two critics, noise on the target's actions and a slower actor",
            *_OFF_POLICY,
        ),
        "itd3": Algorithm(
            "IDDPG with two critics, noise on the target's actions and a slower actor",
            *_OFF_POLICY,
        ),
        "masac": Algorithm(
            "soft actor-critic: stochastic policies from stored steps, with a learned temperature; "
            "two critics see all agents and their actions, or the state",
            *_OFF_POLICY,
        ),
        "isac": Algorithm(
            "soft actor-critic: each agent's critics see what the agent sees and does",
            *_OFF_POLICY,
        ),
        "qmix": Algorithm(
            "values of discrete actions from stored steps, mixed by a network that rises in each "
            "agent's",
            *_VALUES,
        ),
        "vdn": Algorithm(
            "values of discrete actions from stored steps; the team's is their sum", *_VALUES
        ),
        "iql": Algorithm(
            "values of discrete actions from stored steps; each agent by itself, a team's DQN",
            *_VALUES,
        ),
        "pqn": Algorithm(
            "values of discrete actions by the returns of each batch, without replay and targets; "
            "with any mixer",
            *_PARALLEL_Q,
        ),
        "random": Algorithm(
            "random actions, nothing is learned: for a group that the others play against", *_RANDOM
        ),
    },
)
"""Every algorithm that there is."""

LearnerSettings = Tagged("algorithm", ALGORITHMS)
"""How the schema of ``learner`` is chosen."""


def register_algorithm(
    name: str, meaning: str, *, config: str, learner: str, no_league: str = ""
) -> None:
    """Makes an algorithm of one's own known, as ``learner.algorithm``.

    Args:
        name, meaning, config, learner, no_league: as in :class:`Algorithm`.

    Raises:
        ConfigError: another algorithm has the name.

    Examples:
        >>> register_algorithm("mine", "my own", config="mine:Config", learner="mine:Learner")
        >>> ALGORITHMS.words()["mine"]
        'my own'
        >>> ALGORITHMS.remove("mine")
    """
    ALGORITHMS.add(name, Algorithm(meaning, config, learner, no_league))


def group_config(default: LearnerConfig, own: Mapping[str, Any] | None, name: str) -> LearnerConfig:
    """Returns the settings of a group's learner: the default ones, and what differs.

    Args:
        default (LearnerConfig): settings of all groups.
        own (mapping, optional): what differs for this one.
        name (str): the group's.

    Raises:
        ConfigError: an unknown setting or a wrong type.
    """
    return overridden(LearnerSettings, default, own or {}, at=f"groups.{name}.")
