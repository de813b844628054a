"""Cases of ``same_bits.py``: small versions of the recipes, and features that no recipe uses."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, NamedTuple

GOLDEN = Path(__file__).parents[1] / "test" / "recipes.json"
LEFT_OUT = {
    "isaaclab": "needs a simulator that is no package",
    "external": "its simulators are processes of their own, which connect when they like",
}
"""Libraries whose recipes are no cases, and why."""

SIZES: dict[str, Any] = {
    "threads": 1,
    "total_frames": 120,
    "frames_per_batch": 40,
    "env.num_envs": 4,
    "env.max_steps": 7,
    "env.workers": 0,
    "evaluation.episodes": 4,
    "evaluation.every_frames": 80,
    "logging.progress": False,
}
AT_ONCE = {"mappo", "ippo", "happo", "pqn"}  # learn from a batch, and store no steps
EVOLUTION = {"evolution.every_frames": 40, "evolution.least_episodes": 1}


class Case(NamedTuple):
    """A run that both sides make."""

    name: str
    kind: str
    """train, resume or ranks."""
    recipe: str
    overrides: dict[str, Any]
    quick: bool = False

    @property
    def stem(self) -> str:
        """Name of its files: another one when its settings change."""
        what = json.dumps([self.kind, self.recipe, self.overrides], sort_keys=True)
        return f"{self.name.replace('/', '__')}-{hashlib.sha256(what.encode()).hexdigest()[:8]}"

    def as_dict(self) -> dict[str, Any]:
        """The case as JSON, for the process that runs it."""
        return {**self._asdict(), "stem": self.stem}


def short_run_settings(
    recipe: str, golden: dict[str, Any], extra_settings: dict[str, Any]
) -> dict[str, Any]:
    """Overrides that make a recipe train for a second, and settings of one's own above them."""
    overrides = dict(SIZES)
    sections = golden[recipe]
    algorithm = extra_settings.get("learner", sections["learner"]["algorithm"])
    parts = ("learner.actor.memory", "learner.critic.memory")
    kinds = [
        extra_settings.get(f"{part}.kind", sections.get(part, {}).get("kind")) for part in parts
    ]
    remembers = any(kind not in (None, "none") for kind in kinds)
    overrides |= short_learner_settings("learner", algorithm, remembers)
    for group, group_settings in sections[""]["groups"].items():
        overrides |= short_learner_settings(
            f"groups.{group}", group_settings.get("algorithm", algorithm), remembers
        )
    if sections["population"]["size"] > 1:
        overrides["population.size"] = 4 if sections["evolution"]["method"] != "none" else 2
    if sections["evolution"]["method"] != "none":
        overrides |= EVOLUTION
    overrides["league.snapshot_every"] = 40
    return overrides | extra_settings


def short_learner_settings(section: str, algorithm: str, remembers: bool) -> dict[str, Any]:
    """Settings with which a learner learns from 40 frames."""
    settings: dict[str, Any] = {"minibatch_size": 20}
    if algorithm in AT_ONCE:
        settings["num_epochs"] = 2
    else:
        settings |= {"learning_starts": 20, "replay.capacity": 100}
    if remembers:
        settings["window"] = 5
    return {f"{section}.{key}": value for key, value in settings.items()}


COMPILED: dict[str, tuple[str, dict[str, Any]]] = {
    "mappo": ("toy_matrix_game_mappo", {}),
    "qmix": ("toy_two_step_game_qmix", {}),
    "maddpg": ("toy_speaker_listener_mappo", {"learner": "maddpg"}),
    "memory": ("toy_echo_rmappo", {}),
    "pqn": ("toy_matrix_game_mappo", {"learner": "pqn"}),
    "population": ("toy_arena_qmix_population", {}),
}

LR = [1e-3, 2e-3, 3e-3]
MAPPO, QMIX, MATD3 = "toy_arena_mappo", "toy_arena_qmix", "vmas_balance_matd3"
TALK, SPREAD = "toy_echo_rmappo_talk", "toy_speaker_listener_mappo"
COMMUNICATION = "learner.actor.communication"

MORE: dict[str, tuple[str, str, dict[str, Any]]] = {
    "resume/on_policy": ("resume", MAPPO, {"learner.lr_schedule": "linear"}),
    "resume/off_policy": ("resume", QMIX, {}),
    "resume/memory": ("resume", "toy_echo_rqmix", {}),
    "resume/league": ("resume", "toy_kuhn_ippo", {"league.opponents": "pfsp"}),
    "resume/population": ("resume", "toy_arena_qmix_population", {}),
    "resume/evolved": ("resume", "toy_speaker_listener_mappo_pbt", {}),
    "resume/shards": ("resume", MAPPO, {"distributed.collectors": 2}),
    "resume/vmas": ("resume", "vmas_balance_mappo", {}),
    "ranks/on_policy": ("ranks", MAPPO, {}),
    "ranks/talk": ("ranks", TALK, {}),
    "shards/on_policy": ("train", MAPPO, {"distributed.collectors": 2}),
    "shards/overlap": (
        "train",
        MAPPO,
        {
            "distributed.collectors": 2,
            "distributed.overlap": 1,
            "learner.estimator": "vtrace",
        },
    ),
    "population/on_policy": (
        "train",
        MAPPO,
        {"population.size": 3, "population.vary": {"learner.lr": LR}},
    ),
    "population/share_replay": (
        "train",
        "toy_arena_qmix_population",
        {"population.share_replay": True},
    ),
    "population/matd3": ("train", MATD3, {"population.size": 2}),
    "population/tournament": (
        "train",
        "toy_speaker_listener_mappo_pbt",
        {"evolution.method": "tournament"},
    ),
    "league/exploiters": (
        "train",
        "toy_kuhn_ippo",
        {
            "league.opponents": "pfsp",
            "league.exploiters": 1,
            "env.num_envs": 8,
            "frames_per_batch": 80,
            "total_frames": 240,
        },
    ),
    "league/pfsp": ("train", "toy_kuhn_ippo", {"league.opponents": "pfsp"}),
    "league/partners": ("train", "toy_matching_levers_mappo", {"league.partners": "uniform"}),
    "unshare/on_policy": ("train", MAPPO, {"learner.unshare_at": 0.5}),
    "unshare/off_policy": ("train", QMIX, {"learner.unshare_at": 0.5}),
    "unshare/memory": ("train", "toy_echo_rmappo", {"learner.unshare_at": 0.5}),
    "vtrace/mappo": ("train", MAPPO, {"learner.estimator": "vtrace"}),
    "vtrace/memory": ("train", "toy_echo_rmappo", {"learner.estimator": "vtrace"}),
    "mappo/statistics": (
        "train",
        MAPPO,
        {"learner.normalize_observations": True, "learner.target_kl": 0.01},
    ),
    "mappo/clipped_value": (
        "train",
        MAPPO,
        {"learner.clip_value": True, "learner.loss_critic_type": "l2"},
    ),
    "mappo/value_centering": ("train", MAPPO, {"learner.value_centering": True}),
    "vtrace/joint_ratio": (
        "train",
        MAPPO,
        {"learner.estimator": "vtrace", "learner.ratio": "joint"},
    ),
    "mappo/deaths_two_groups": ("train", MAPPO, {"env.kwargs.n_groups": 2}),
    "mappo/own_advantages": ("train", MAPPO, {"learner.normalize_advantage": "agent"}),
    "mappo/bfloat16": ("train", MAPPO, {"learner.precision": "bf16"}),
    "qmix/prioritized": ("train", QMIX, {"learner.replay.alpha": 0.6, "learner.n_step": 3}),
    "qmix/small_start": ("train", "jaxmarl_smax_3m_qmix", {"learner.mixer.init_scale": 1e-3}),
    "qmix/dueling": ("train", QMIX, {"learner.actor.dueling": True}),
    "qmix/one_team": (
        "train",
        QMIX,
        {"learner.mixer.over": "team", "env.kwargs.n_groups": 2, "learner.central_input": "team"},
    ),
    "facmac/discrete": (
        "train",
        SPREAD,
        {
            "learner": "maddpg",
            "learner.mixer.kind": "monotonic",
            "learner.central_input": "observations",
        },
    ),
    "maddpg/prioritized": (
        "train",
        "vmas_navigation_maddpg",
        {"learner.replay.alpha": 0.6, "learner.replay.beta_end": 1.0},
    ),
    "masac/discrete": ("train", SPREAD, {"learner": "masac"}),
    "iddpg": ("train", MATD3, {"learner": "iddpg"}),
    "itd3": ("train", MATD3, {"learner": "itd3"}),
    "isac": ("train", MATD3, {"learner": "isac"}),
    "iql/waits": ("train", MAPPO, {"learner": "iql", "env.kwargs.late_spawn": 2}),
    "vdn/memory": ("train", "toy_echo_rqmix", {"learner": "vdn"}),
    "pqn/monotonic": ("train", MAPPO, {"learner": "pqn", "learner.mixer.kind": "monotonic"}),
    "happo/vmas": ("train", "vmas_balance_mappo", {"learner": "happo"}),
    "happo/memory": ("train", "toy_echo_rmappo", {"learner": "happo"}),
    "memory/burn_in": ("train", "toy_echo_rmappo", {"learner.burn_in": 2}),
    "critic/memory": ("train", TALK, {"learner.critic.memory.kind": "gru"}),
    "critic/set": ("train", MAPPO, {"learner.critic.architecture": "set"}),
    "critic/attention": ("train", MAPPO, {"learner.critic.architecture": "attention"}),
    "critic/team_value": ("train", MAPPO, {"learner.critic.value_per": "team"}),
}
MORE |= {
    f"memory/{kind}": ("train", "toy_echo_rmappo", {"learner.actor.memory.kind": kind})
    for kind in ("lstm", "mingru", "lru")
}
MORE |= {
    f"talk/{kind}": ("train", TALK, {f"{COMMUNICATION}.kind": kind})
    for kind in ("commnet", "graph", "bicnet")
}
MORE |= {
    f"talk/{name}": ("train", TALK, {f"{COMMUNICATION}.{key}": value})
    for name, key, value in (
        ("gate", "gate", True),
        ("dropout", "dropout", 0.3),
        ("delay", "delay", 1),
        ("symbols", "discrete", "gumbel"),
        ("bits", "discrete", "dial"),
        ("ring", "links", "ring"),
        ("after_memory", "order", "after"),
    )
}
MORE |= {
    f"sharing/{kind}": ("train", MAPPO, {"learner.actor.sharing": kind, **more})
    for kind, more in (
        ("none", {}),
        ("full", {}),
        ("trunk", {}),
        ("agent_id", {}),
        ("masks", {}),
        ("clusters", {"learner.actor.clustering_frames": 40}),
    )
}

QUICK = {
    *("vmas_balance_mappo", "vmas_navigation_matd3", "toy_echo_rqmix", "toy_echo_rmaddpg"),
    *("toy_matrix_game_happo", "vmas_simple_tag_mappo_iql", "toy_zero_sum_ippo_psro"),
    *("toy_speaker_listener_mappo_pbt", "pettingzoo_simple_spread_mappo", "vmas_balance_masac"),
    *("jaxmarl_switch_riddle_rpqn", "toy_arena_qmix_population", "vmas_simple_spread_pqn"),
    *("resume/on_policy", "resume/off_policy", "resume/league", "shards/overlap", "talk/gate"),
    *("population/on_policy", "league/exploiters", "unshare/on_policy", "unshare/off_policy"),
    *("vtrace/mappo", "ranks/on_policy", "qmix/prioritized", "mappo/statistics", "critic/memory"),
    *("facmac/discrete", "sharing/agent_id", "mappo/deaths_two_groups", "compile/qmix"),
}
"""Cases of ``--quick``: recipes eagerly and as recorded programs, and these cases."""


def all_cases() -> list[Case]:
    """Every case, those that share imports side by side."""
    golden = json.loads(GOLDEN.read_text(encoding="utf-8"))
    cases = []
    for recipe, sections in golden.items():
        if sections["env"]["library"] not in LEFT_OUT:
            for execution in ("eager", "trace"):
                settings = {**short_run_settings(recipe, golden, {}), "execution": execution}
                name = f"{execution}/{recipe}"
                cases.append(Case(name, "train", recipe, settings, recipe in QUICK))
    for name, (kind, recipe, extra_settings) in MORE.items():
        settings = {"execution": "eager", **short_run_settings(recipe, golden, extra_settings)}
        cases.append(Case(name, kind, recipe, settings, name in QUICK))
    for name, (recipe, extra_settings) in COMPILED.items():
        settings = {**short_run_settings(recipe, golden, extra_settings), "execution": "compile"}
        cases.append(Case(f"compile/{name}", "train", recipe, settings, f"compile/{name}" in QUICK))
    return cases
