"""Every metric that a learner gives is explained on the page of its algorithm, and no other."""

import re
from pathlib import Path

import pytest

from torchrl_marl import TeamSpec
from torchrl_marl.collectors import RolloutCollector
from torchrl_marl.envs.toy import Arena
from torchrl_marl.learners import build_learners
from torchrl_marl.learners.algorithms import ALGORITHMS
from torchrl_marl.settings import settings_of

PAGES = [path.read_text() for path in Path(__file__).parents[2].glob("docs/algorithms/*.md")]
OF_THE_RUN = {"iteration", "frames", "agent_frames", "seconds", "frames_per_second"}
OF_THE_RUN |= {"episode_reward", "episode_length"}


def page_of(algorithm):
    [page] = [x for x in PAGES if re.match(rf"# .*\b{algorithm.upper()}\b", x)]
    table = re.search(r"## What is logged\n(.*?)\n## ", page, re.S)[1]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    found = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    return found or page_of("mappo")  # where a page says that they are MAPPO's


@pytest.mark.parametrize("algorithm", [x for x in ALGORITHMS.names() if x != "random"])
def test_the_page_explains_what_is_logged(algorithm):
    schema = ALGORITHMS.schema(algorithm)
    small = {"learning_starts": 0, "minibatch_size": 16, "num_epochs": 1, "entropy_coeff": 0.1}
    small |= {"updates_per_frame": 0.05, "clip_value": True}
    config = schema(algorithm, **{k: x for k, x in small.items() if k in settings_of(schema)})
    env = Arena(4, continuous_actions=False)
    [learner] = build_learners(TeamSpec.from_env(env), config)
    batch = RolloutCollector(env, learner.actors["agents"], frames_per_batch=40).next()
    assert set(learner.learn(batch)["agents"].keys()) == page_of(algorithm) - OF_THE_RUN
