"""The page of each algorithm explains exactly the metrics that its learner logs."""

import re
from pathlib import Path

import pytest

from torchrl_marl import TeamSpec
from torchrl_marl.collectors import RolloutCollector
from torchrl_marl.envs.toy import Arena
from torchrl_marl.learners import build_learners
from torchrl_marl.learners.algorithms import ALGORITHMS
from torchrl_marl.modules.config import DrawnCommunicationConfig, TeamNetworkConfig
from torchrl_marl.settings import settings_of

PAGES = Path(__file__).parents[2] / "docs" / "algorithms"
SMALL = {"learning_starts": 0, "minibatch_size": 16, "num_epochs": 1, "entropy_coeff": 0.1}
SMALL |= {"updates_per_frame": 0.05, "clip_value": True}


def tables_of(page):
    """The names in each table under "What is logged" or "What every run logs"."""
    text = re.search(r"\n## What (?:is|every run) log.*?\n(.*?)(?:\n## |\Z)", page, re.S)[1]
    tables = re.findall(r"<!-- metrics: .*?<!-- end -->", text, re.S)
    return [set(re.findall(r"^\| `(\w+)` \|", table, re.M)) for table in tables] or text


def explained(algorithm):
    found = tables_of((PAGES / f"{algorithm}.md").read_text())
    if isinstance(found, list):
        return found[0]
    [(name, link)] = re.findall(
        r"^The \[metrics of (\w+)\]\((\w+)\.md#what-is-logged\)", found, re.M
    )
    assert link == name.lower()
    return explained(link)


def logged(algorithm, **settings):
    schema = ALGORITHMS.schema(algorithm)
    known = settings_of(schema)
    config = schema(algorithm, **{k: x for k, x in SMALL.items() if k in known}, **settings)
    env = Arena(4, continuous_actions=False)
    [learner] = build_learners(TeamSpec.from_env(env), config)
    batch = RolloutCollector(env, learner.actors["agents"], frames_per_batch=40).next()
    return set(learner.learn(batch)["agents"].keys())


@pytest.mark.parametrize("algorithm", [x for x in ALGORITHMS.names() if x != "random"])
def test_page_explains_logged_metrics(algorithm):
    assert logged(algorithm) == explained(algorithm)


@pytest.mark.parametrize("algorithm", ["bc", "iql_offline"])
def test_actors_that_never_explore_log_no_epsilon(algorithm):
    assert "epsilon" not in logged(algorithm)


def test_communication_metrics_are_explained():
    [talk] = tables_of((PAGES.parent / "communication.md").read_text())
    actor = TeamNetworkConfig(communication=DrawnCommunicationConfig("commnet"))
    assert logged("mappo", actor=actor) - explained("mappo") == talk


@pytest.mark.parametrize("algorithm", [x for x in ALGORITHMS.names() if x != "random"])
def test_page_has_every_section(algorithm):
    page = (PAGES / f"{algorithm}.md").read_text()
    parts = re.findall(r"^## (.*)$", page, re.M)
    needed = ["How it works", "Usage", "Settings", "What is logged", "Pitfalls", "Results"]
    assert [part for part in parts if part in needed] == needed
    assert f"<!-- settings: {algorithm}" in page and "https://" in page.partition("\n## ")[0]
    assert f"({algorithm}.md)" in (PAGES / "index.md").read_text()
