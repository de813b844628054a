"""The reference returns for normalization match the tasks of the VMAS suite."""

import pytest

from torchrl_marl.apps.reports.aggregates import read_references
from torchrl_marl.apps.suites.plan import make_plan
from torchrl_marl.settings import flatten

ENTRIES = {
    entry["task"].removeprefix("vmas/"): entry
    for entry in read_references()
    if entry["task"].startswith("vmas/")
}


@pytest.mark.parametrize("task", ENTRIES)
def test_reference_has_the_arguments_of_its_task(task):
    [run] = make_plan("vmas", tasks=task, algorithms="mappo", seeds=1).runs
    env = run.config.env
    settings = {"env.max_steps": env.max_steps, **flatten({"env": {"kwargs": dict(env.kwargs)}})}
    assert ENTRIES[task]["settings"] == settings


def test_every_task_has_a_reference():
    assert set(ENTRIES) == {run.task for run in make_plan("vmas", seeds=1).runs}
