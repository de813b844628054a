"""A team of agents in separate processes, each with its own observations, messages and actions.

    python tutorials/decentralized/environment.py RUN --steps 200

exports the agents of a run, starts a process without torch for each, and lets them play. Messages
go through this process, which runs the environment and knows the living agents and their links. In
each step the team's policy acts, too, and all actions must be equal.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torchrl.envs.utils import ExplorationType, set_exploration_type

from torchrl_marl.apps.export.agent import AgentActor, agents_of
from torchrl_marl.envs import make_env, with_memory
from torchrl_marl.envs.transforms import with_dense_groups
from torchrl_marl.errors import UserError
from torchrl_marl.training.run import Run

HERE = Path(__file__).resolve().parent


class Remote:
    """An agent in a separate process, called through a pipe."""

    def __init__(self, folder: Path) -> None:
        command = [sys.executable, str(HERE / "agent.py"), str(folder)]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)
        self.talk = json.loads((folder / "interface.json").read_text())["communication"]
        imported = self.answer()
        assert imported == [], f"the process has imported {imported}"

    def ask(self, method: str, **arguments: Any) -> None:
        """Sends a call without waiting for the answer."""
        self.process.stdin.write(json.dumps([method, arguments]) + "\n")
        self.process.stdin.flush()

    def answer(self) -> Any:
        """Waits for the answer."""
        return json.loads(self.process.stdout.readline())

    def close(self) -> None:
        """Ends the process."""
        self.process.stdin.close()
        self.process.stdout.close()
        self.process.wait(timeout=10)


def ask_all(agents: Mapping[str, Remote], method: str, given: Mapping[str, dict]) -> dict[str, Any]:
    """Calls agents in parallel; returns name -> answer."""
    for name, agent in agents.items():
        agent.ask(method, **given[name])
    return {name: agent.answer() for name, agent in agents.items()}


def play_step(
    agents: Mapping[str, Remote], seen: Mapping[str, dict], legal: Mapping[str, dict]
) -> dict[str, Any]:
    """Runs a step of the living agents; returns name -> action."""
    talk = next(iter(agents.values())).talk
    if talk and talk["links"] not in ("all", "ring"):
        raise SystemExit(f"links={talk['links']} is not supported, expected all or ring.")
    if talk is None:
        return ask_all(agents, "act", {name: {**seen[name], **legal[name]} for name in agents})
    said = ask_all(agents, "speak", seen)
    if talk["relays"]:  # BicNet: messages pass along the agents and back
        for back in (False, True):
            handed = None
            for agent in list(agents.values())[:: -1 if back else 1]:
                agent.ask("relay", handed=handed, back=back)
                handed = agent.answer()
        return ask_all(agents, "act", legal)
    if talk["delay"]:  # agents act first, and receive messages later
        actions = ask_all(agents, "act", legal)
        ask_all(agents, "hear", {name: {"inbox": said} for name in agents})
        return actions
    for _ in range(talk["rounds"] - 1):  # send all messages to all; players drop those of strangers
        said = ask_all(agents, "hear", {name: {"inbox": said} for name in agents})
    return ask_all(agents, "act", {name: {"inbox": said, **legal[name]} for name in agents})


def what_it_sees(agent: AgentActor, row: Any) -> tuple[dict, dict]:
    """Returns an agent's observation and action mask, unpadded, as arguments."""
    seen = {}
    for field in agent.observation():
        own = row[tuple(field.name.split("."))]
        seen[field.name] = own[tuple(slice(0, size) for size in field.shape)].tolist()
    legal, own = row.get("action_mask", None), agent.group.action_dims[agent.number]
    return {"observation": seen}, {} if legal is None else {"action_mask": legal[:own].tolist()}


def is_same(action: Any, expected: torch.Tensor) -> bool:
    """Returns whether an action equals the team's, which may be padded."""
    found = torch.as_tensor(action)
    own = expected[tuple(slice(0, size) for size in found.shape)]
    return torch.allclose(found.to(own.dtype), own, atol=1e-4)


@torch.no_grad()
def play(run: Run, folder: Path, steps: int) -> str:
    """Plays whole episodes, and returns a summary of the comparison."""
    export = run.export(folder=folder, steps=1)
    agents = agents_of(run.policy)
    remotes = {name: Remote(folder) for name, folder in export.agents.items()}
    env = with_dense_groups(make_env(run.config.env, num_envs=1, seed=run.config.seed))
    env = with_memory(env, run.policy)
    carry, actions, differ, deaths, episodes = env.reset(), 0, 0, 0, 0
    for _ in range(steps):
        with set_exploration_type(ExplorationType.DETERMINISTIC):
            acted = run.policy(carry)
        rows = {name: acted[0][agent.group.name][agent.number] for name, agent in agents.items()}
        living = {name: remotes[name] for name, row in rows.items() if row.get("mask", True)}
        begin = {name: remotes[name] for name in living if rows[name].get("is_init", False)}
        ask_all(begin, "reset", dict.fromkeys(begin, {}))
        given = {name: what_it_sees(agents[name], rows[name]) for name in living}
        seen, legal = ({name: pair[i] for name, pair in given.items()} for i in (0, 1))
        for names in teams_of(agents, living):
            own = {name: living[name] for name in names}
            for name, action in play_step(own, seen, legal).items():
                differ += not is_same(action, rows[name]["action"])
                actions += 1
        deaths += len(agents) - len(living)
        step, carry = env.step_and_maybe_reset(acted)
        episodes += int(step["next", "done"].sum())
    for remote in remotes.values():
        remote.close()
    return (
        f"{len(remotes)} processes, {steps} steps, {episodes} episodes, {actions} actions, "
        f"{deaths} times an agent was dead or not born: {differ or 'no'} action differs"
    )


def teams_of(agents: Mapping[str, AgentActor], living: Iterable[str]) -> list[list[str]]:
    """Returns the living agents, those together who may talk."""
    teams: dict[int, list[str]] = {}
    for name in living:
        teams.setdefault(id(agents[name].actor), []).append(name)
    return list(teams.values())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("run", metavar="RUN", help="the folder of a run")
    parser.add_argument("--steps", type=int, default=200)
    given = parser.parse_args()
    try:
        with tempfile.TemporaryDirectory() as folder:
            print(play(Run.load(given.run), Path(folder), given.steps))
    except UserError as error:
        sys.exit(str(error))
