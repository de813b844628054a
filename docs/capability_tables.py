"""Tables of which settings go together, from the checks of the settings."""

from __future__ import annotations

import re
from collections.abc import Iterator

from torchrl_marl.errors import ConfigError, UserError
from torchrl_marl.learners.algorithms import ALGORITHMS
from torchrl_marl.learners.capabilities import FEATURES, RANKS, Feature
from torchrl_marl.recipes import load_config

CAPABILITIES = """\
# Supported combinations

<!-- written by `python docs/generate.py`; edit torchrl_marl/learners/capabilities.py instead -->

This page shows which algorithm supports which feature. It is generated from the checks that every
run makes before training. A run with an unsupported combination raises one of the errors below.

- For your own environment, run `torchrl-marl list algorithms --for ENVIRONMENT`.
- Networks, estimators and kinds of replay are in
  [another table](algorithms/index.md#features-and-combinations).

"""

_TURNS = "turn-based environments"

# Feature, a setting that enables it, and its page.
_FEATURES = (
    ("memory (RMAPPO, RQMIX, RMADDPG, ...)", "learner.actor.memory=gru", "../memory.md"),
    (
        "messages (CommNet, TarMAC, BicNet, IC3Net, DIAL)",
        "learner.actor.communication=tarmac",
        "../communication.md",
    ),
    (
        "the environment's state for critics and mixers",
        "learner.central_input=state",
        "../teams.md",
    ),
    (
        "each agent's own state for its critic",
        "learner.central_input=agent_state",
        "../teams.md#a-state-for-each-agent",
    ),
    (
        "credit per agent",
        "learner.bootstrap=agent",
        "../life_cycle.md#credit-after-death",
    ),
    (_TURNS, "learner.bootstrap=agent", "../turns.md"),
    ("a network for each agent", "learner.actor.sharing=none", "../sharing.md"),
    ("shared networks that are split during training", "learner.unshare_at=0.5", "../sharing.md"),
    ("mixed value of the team (FACMAC)", "learner.mixer.kind=monotonic", "facmac.md"),
    ("V-trace", "learner.estimator=vtrace", "vtrace.md"),
    ("prioritized replay", "learner.replay.alpha=0.6", "../replay.md"),
    ("n-step returns", "learner.n_step=3", "../replay.md"),
    ("stored opponents and partners", "league.opponents=pfsp", "../leagues.md"),
    ("many runs in one program", "population.size=2", "../populations.md"),
    ("shards", "distributed.collectors=2", "../ray.md"),
    ("compiled graphs", "execution=compile", "../one_program.md"),
)


def combinations_table(_: str) -> str:
    """Returns the table of features with their algorithms, from the checks of the settings."""
    lines = ["| feature | setting | algorithms | page |", "|---|---|---|---|"]
    names = [name for name in ALGORITHMS.names() if name != "random"]
    for feature, setting, page in _FEATURES:
        in_turns = feature == _TURNS
        fits = [x for x in names if not (_refused_turns(x) if in_turns else _refusal(x, setting))]
        lacking = [name for name in names if name not in fits]
        shown = f"all but {', '.join(lacking)}" if len(lacking) < len(fits) else ", ".join(fits)
        words = shown if lacking else "all"
        lines.append(f"| {feature} | `{setting}` | {words} | [page]({page}) |")
    return "\n".join(lines)


# Recorded actions, for the algorithms that need them.
_RECORDED: dict[str, dict[str, str]] = {
    "bc": {"expert": "heuristic"},
    **dict.fromkeys(("td3_bc", "iql_offline"), {"folder": "data"}),
}


def _run_of(algorithm: str) -> dict[str, object]:
    """Returns the settings of a short run."""
    return {
        "env": {"library": "toy", "name": "arena", "num_envs": 8},
        "learner": {"algorithm": algorithm, "minibatch_size": 256},
        "frames_per_batch": 1024,
        "total_frames": 102_400,
        "data": _RECORDED.get(algorithm, {}),
    }


def _refusal(algorithm: str, *settings: str, ranks: bool = False) -> str:
    """Returns the message that refuses some settings for an algorithm, or an empty string."""
    try:
        config = load_config(_run_of(algorithm), settings)
        if ranks:
            RANKS.check(config)
    except ConfigError as error:
        return str(error)
    return ""


# Columns of the page of capabilities, and the settings that enable each feature.
_COLUMNS = {
    "[league](leagues.md)": ["league.opponents=pfsp"],
    "[population](populations.md)": ["population.size=2"],
    "[shards](ray.md)": ["distributed.collectors=2"],
    "[asynchronous](ray.md)": [
        "distributed={backend: ray, collectors: 2, asynchronous: true}",
    ],
    "[ranks](ranks.md)": [],
    "[credit per agent](life_cycle.md#credit-after-death)": ["learner.bootstrap=agent"],
    "[communication](communication.md)": ["learner.actor.communication=tarmac"],
    "[memory](memory.md)": ["learner.actor.memory=gru"],
}
_ACTIONS = ("discrete actions", "continuous actions")


def capabilities_page() -> str:
    """Returns ``capabilities.md``: algorithms by features, and the reasons of refusals."""
    names = [name for name in ALGORITHMS.names() if name != "random"]
    refusals = {
        column: {name: _refusal(name, *settings, ranks="ranks" in column) for name in names}
        for column, settings in _COLUMNS.items()
    }
    refusals["[turns](turns.md)"] = {name: _refused_turns(name) for name in names}
    refusals |= {kind: {name: _refused_actions(name, kind) for name in names} for kind in _ACTIONS}
    lines = [f"| algorithm | {' | '.join(refusals)} |", "|---|" + "---|" * len(refusals)]
    for name in names:
        cells = ["no" if refused[name] else "yes" for refused in refusals.values()]
        lines.append(f"| `{name}` | {' | '.join(cells)} |")
    lines += [
        "",
        "A team with discrete and continuous actions needs an algorithm that supports both.",
    ]
    lines += ["", "## Why an algorithm does not support a feature", ""]
    for column, refused in refusals.items():
        lines += _reasons(column, {name: why for name, why in refused.items() if why})
    limits = [_limits_of(feature) for feature in (*FEATURES, RANKS)]
    return CAPABILITIES + "\n".join(lines) + "\n\n" + "\n".join(limits)


def _refused_actions(algorithm: str, kind: str) -> str:
    """Returns the message that refuses a kind of actions for an algorithm."""
    from torchrl_marl.envs.toy import Arena
    from torchrl_marl.learners.build import build_learners
    from torchrl_marl.specs import TeamSpec

    env = Arena(num_envs=2, continuous_actions=kind == "continuous actions", seed=0)
    try:
        build_learners(TeamSpec.from_env(env), ALGORITHMS.schema(algorithm)(algorithm), {})
    except UserError as error:
        return str(error)
    return ""


def _refused_turns(algorithm: str) -> str:
    """Returns the message that refuses a turn-based game for an algorithm."""
    own = [] if algorithm == "bc" else ["learner.bootstrap=agent"]  # copied actions need no credit
    own += ["learner.mixer.kind=none"] if algorithm == "pqn" else []
    return _refusal(algorithm, *own) or _refused_batch(algorithm, own)


def _refused_batch(algorithm: str, settings: list[str]) -> str:
    """Returns the message with which a learner refuses a batch of Nim."""
    from torchrl_marl.collectors import RolloutCollector
    from torchrl_marl.envs.toy import Nim
    from torchrl_marl.learners.build import build_learners
    from torchrl_marl.specs import TeamSpec

    config = load_config(_run_of(algorithm), settings).learner
    env = Nim(4, seed=0)
    batch = RolloutCollector(env, frames_per_batch=80).next()
    try:
        for learner in build_learners(TeamSpec.from_env(env), config, {}):
            learner.inspect_first_batch(batch)
    except UserError as error:
        return str(error)
    return ""


def _reasons(column: str, refused: dict[str, str]) -> Iterator[str]:
    """Yields an item for each message, with its algorithms."""
    names: dict[str, list[str]] = {}
    for name, why in refused.items():
        names.setdefault(re.sub(rf"'?\b{name}\b'?", "...", why), []).append(name)
    for why, own in names.items():
        algorithms = ", ".join(f"`{name}`" for name in own)
        yield f"- {column}, {algorithms}:\n\n    ```text\n    {why}\n    ```\n"


def _limits_of(feature: Feature) -> str:
    """Returns the table of all settings that a feature does not support."""
    lines = [f"## With {feature.name}", "", "| setting | why not | supported |", "|---|---|---|"]
    rows = [("", limit) for limit in feature.run] + [("learner.", own) for own in feature.learner]
    for at, limit in rows:
        if limit.key != "algorithm":  # which the table above has
            goes = "" if limit.goes is None else f"`{limit.instead}`"
            lines.append(
                f"| `{at}{limit.key}` | {limit.why.format('given').removeprefix('but ')} | {goes} |"
            )
    return "\n".join(lines) + "\n"
