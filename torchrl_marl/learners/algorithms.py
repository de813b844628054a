"""Registry of algorithms with their descriptions, settings and learners; imports no torch.

A new algorithm needs a config, a learner and one line: an entry of the table below, a call of
:func:`register_algorithm`, or an entry point for an :class:`Algorithm` in the ``setup.py`` of your
package::

    entry_points={"torchrl_marl.algorithms": ["reinforce = my_package.reinforce:ALGORITHM"]}
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, is_dataclass
from inspect import isclass
from typing import Any

from torchrl_marl.errors import ConfigError, quoted
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
    """An algorithm: its description, and the import paths of its settings and learner.

    Args:
        meaning (str): description of one line, for ``torchrl-marl list algorithms``.
        config (str): ``"module:Class"`` of its settings, a :class:`LearnerConfig`.
        learner (str): ``"module:Class"`` of its learner, built by
            ``Learner(groups, config, team=, device=, execution=)``.
        no_league (str): reason why it cannot be trained in a league, as part of a sentence; empty
            if it can.
    """

    meaning: str
    config: str
    learner: str
    no_league: str = ""


_USE = "use {{at}}.algorithm={}".format
# Advice for common names of algorithms that have another name in this library.
_ELSEWHERE = {
    "ppo": f"PPO for a team is mappo, or ippo with critics of single agents: {_USE('mappo')}",
    "a2c": f"the nearest is mappo: {_USE('mappo')}",
    "coma": f"the nearest is mappo: {_USE('mappo')}",
    "sac": f"SAC for a team is masac, or isac with critics of single agents: {_USE('masac')}",
    "td3": f"TD3 for a team is matd3, or itd3 with critics of single agents: {_USE('matd3')}",
    "ddpg": f"DDPG for a team is maddpg, or iddpg with critics of single agents: {_USE('maddpg')}",
    "dqn": f"DQN of each agent is iql, and vdn or qmix learn one value: {_USE('iql')}",
    "facmac": "FACMAC is maddpg or matd3 with a mixer of the critics: "
    + _USE("maddpg {at}.mixer.kind=monotonic"),
    "dagger": f"it is bc with the actions of an expert: {_USE('bc data.expert=heuristic')}",
    "behaviorcloning": f"it is called bc: {_USE('bc')}",
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
_NO_LEAGUE = "which trains on-policy learners only"
_OFF_POLICY = (
    "torchrl_marl.learners.off_policy_config:OffPolicyConfig",
    "torchrl_marl.learners.off_policy:OffPolicyLearner",
    _NO_LEAGUE,
)
_HARL = (
    "torchrl_marl.learners.harl_config:HARLConfig",
    "torchrl_marl.learners.harl:HARLLearner",
    _NO_LEAGUE,
)
_IMITATION = (
    "torchrl_marl.learners.offline_config:ImitationConfig",
    "torchrl_marl.learners.imitation:ImitationLearner",
    _NO_LEAGUE,
)
_TD3_BC = (
    "torchrl_marl.learners.offline_config:TD3BCConfig",
    "torchrl_marl.learners.off_policy:OffPolicyLearner",
    _NO_LEAGUE,
)
_IMPLICIT_Q = (
    "torchrl_marl.learners.offline_config:ImplicitQConfig",
    "torchrl_marl.learners.implicit_q:ImplicitQLearner",
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
    """Registry of algorithms; each selects the schema of the settings section ``learner``."""

    def schema(self, word: str) -> type[LearnerConfig] | None:
        """Returns the dataclass of an algorithm's settings, or None for an unknown name.

        Raises:
            ConfigError: it cannot be imported, or is not a dataclass derived from LearnerConfig.
        """
        found = self.find(word)
        if found is None:
            return None
        schema = self.load(word, found.config)
        if isclass(schema) and issubclass(schema, LearnerConfig) and is_dataclass(schema):
            return schema
        raise ConfigError(
            f"the settings of algorithm {quoted(word)}, {found.config}, are {quoted(schema)}; "
            "expected a dataclass derived from torchrl_marl.learners.config.LearnerConfig."
        )

    def advice(self, word: str) -> str | None:
        """Returns advice on an algorithm that has another name in this library, or None."""
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
            "PPO with a central critic, which reads all observations of the group, or the state",
            *_PPO,
        ),
        "ippo": Algorithm("PPO with a critic that reads only the agent's observation", *_PPO),
        "happo": Algorithm(
            "MAPPO with one policy per agent, updated in random order; each update is weighted by "
            "the importance ratios of the agents already updated",
            *_HAPPO,
        ),
        "maddpg": Algorithm(
            "DDPG with a central critic, which reads all actions, and the group's observations or "
            "the state",
            *_OFF_POLICY,
        ),
        "iddpg": Algorithm(
            "DDPG with a critic that reads only the agent's observation and action", *_OFF_POLICY
        ),
        "matd3": Algorithm(
            "MADDPG with twin critics, delayed policy updates and target policy smoothing (TD3)",
            *_OFF_POLICY,
        ),
        "itd3": Algorithm(
            "IDDPG with twin critics, delayed policy updates and target policy smoothing (TD3)",
            *_OFF_POLICY,
        ),
        "masac": Algorithm(
            "soft actor-critic with a learned temperature and twin central critics, which read the "
            "same inputs as the critic of MADDPG",
            *_OFF_POLICY,
        ),
        "isac": Algorithm(
            "MASAC with critics that read only the agent's observation and action",
            *_OFF_POLICY,
        ),
        "haddpg": Algorithm(
            "MADDPG with one actor per agent, updated in random order; each agent responds to the "
            "new actors of the agents before it",
            *_HARL,
        ),
        "hatd3": Algorithm(
            "HADDPG with twin critics, delayed policy updates and target policy smoothing (TD3)",
            *_HARL,
        ),
        "hasac": Algorithm(
            "MASAC with one policy per agent, updated in random order; values contain the entropy "
            "of all agents of the group",
            *_HARL,
        ),
        "qmix": Algorithm(
            "Q-learning for discrete actions; a monotonic network mixes the agents' values into "
            "Q_tot",
            *_VALUES,
        ),
        "vdn": Algorithm(
            "Q-learning for discrete actions; Q_tot is the sum of the agents' values", *_VALUES
        ),
        "iql": Algorithm(
            "independent Q-learning for discrete actions: a DQN for each agent", *_VALUES
        ),
        "pqn": Algorithm(
            "Q(lambda) for discrete actions, learned from each new batch; no replay buffer, no "
            "target networks, any mixer",
            *_PARALLEL_Q,
        ),
        "bc": Algorithm(
            "behavior cloning: actors learn to choose the recorded actions of a dataset, or an "
            "expert's (DAgger)",
            *_IMITATION,
        ),
        "td3_bc": Algorithm(
            "MATD3 for datasets: actors also stay close to the recorded actions (TD3+BC)",
            *_TD3_BC,
        ),
        "iql_offline": Algorithm(
            "implicit Q-learning for datasets: values of recorded actions only, and actors that "
            "prefer the better ones",
            *_IMPLICIT_Q,
        ),
        "random": Algorithm("random actions without learning, for a group of opponents", *_RANDOM),
    },
)
"""All known algorithms."""

LearnerSettings = Tagged("algorithm", ALGORITHMS)
"""The schemas of ``learner``, selected by ``learner.algorithm``."""


def register_algorithm(
    name: str, meaning: str, *, config: str, learner: str, no_league: str = ""
) -> None:
    """Registers an external algorithm as a value of ``learner.algorithm``.

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
    """Returns the settings of a group's learner: the default settings with the group's overrides.

    Args:
        default (LearnerConfig): settings of all groups.
        own (mapping, optional): overrides of this group.
        name (str): name of the group.

    Raises:
        ConfigError: an unknown setting or a wrong type.
    """
    return overridden(LearnerSettings, default, own or {}, at=f"groups.{name}.")
