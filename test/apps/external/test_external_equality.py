"""An external client yields the same batch and advantages as the environment itself."""

import pytest
import torch
from external import ManualClient, f32, make_server
from torchrl.envs.utils import ExplorationType

from torchrl_marl.apps.external.client_slots import Fragments
from torchrl_marl.apps.external.collector import stack_fragments
from torchrl_marl.collectors.rollout import RolloutCollector
from torchrl_marl.envs.toy import Arena
from torchrl_marl.learners import OnPolicyConfig, OnPolicyLearner
from torchrl_marl.specs import TeamSpec

T, BATCHES = 15, 3


def arena():
    """Agents are born late and die; episodes are terminated or truncated."""
    return Arena(1, seed=3, max_steps=6, n_agents=3, years=3, late_spawn=2, lives=2, n_actions=3)


def make_learner(bootstrap):
    torch.manual_seed(0)
    team = TeamSpec.from_env(arena())
    config = OnPolicyConfig(bootstrap=bootstrap, central_input="state", minibatch_size=T)
    return OnPolicyLearner(team.groups, config, team=team)


class ArenaClient:
    """Steps an arena as an external simulator, with a client's messages."""

    def __init__(self, server):
        self.env, self.server = arena(), server
        n, seen = self.env.n_agents, self.env.full_observation_spec["agents", "observation"]
        agents = {"agents": {"n": n, "observation": seen.shape[-1], "action": {"n_actions": 3}}}
        self.pen = ManualClient(
            server, agents=agents, state_size=self.env.full_observation_spec["state"].shape[-1]
        )
        self.episode = 0

    @staticmethod
    def declared():
        return {"agents": {"n": 3, "observation": 5, "action": {"n_actions": 3}}}, 15

    def message(self, td, acting):
        rows = td["agents", "observation"][0]
        seen = {f"agents_{i}": f32(rows[i]) for i in range(3) if acting[i]}
        return {"observations": seen, "state": f32(td["state"][0])}

    def say(self, kind, **message):
        self.pen.send(kind, episode=self.episode, t=self.t, **message)
        self.server.flush()
        self.t += 1

    def play(self):
        """Runs an episode; yields while it waits for an answer."""
        td = self.env.reset()
        self.episode, self.t = self.episode + 1, 0
        told = {}
        while True:
            self.say("step", **self.message(td, td["agents", "mask"][0]), **told)
            while (answer := self.pen.connection.read()) is None:
                yield
            action = torch.zeros(1, 3, dtype=torch.long)
            for name, choice in answer["actions"].items():
                action[0, int(name[-1])] = choice
            following = self.env.step(td.set(("agents", "action"), action))["next"]
            dead = following["agents", "terminated"][0, :, 0]
            rewards = following["agents", "reward"][0, :, 0].tolist()
            told = {
                "rewards": {f"agents_{i}": x for i, x in enumerate(rewards)},
                "terminated": [f"agents_{i}" for i in range(3) if dead[i]],
            }
            if following["done"]:
                cut = bool(following["truncated"])
                self.say("end", truncated=cut, **self.message(following, ~dead), **told)
                assert self.pen.connection.read()["actions"] == {}
                return
            td = following


def external_batches(policy):
    agents, state = ArenaClient.declared()
    server = make_server(policy, agents, state_size=state)
    server.exploration_type = ExplorationType.DETERMINISTIC
    server.recording = fragments = Fragments(T, 1, ("agents",), server.max_clients, True)
    fragments.release()
    client = ArenaClient(server)
    batches = []
    while True:
        for _ in client.play():
            batches.append(stack_fragments(fragments.take()))
            if len(batches) == BATCHES:
                return batches
            fragments.release()
            server.flush()


@pytest.mark.parametrize("bootstrap", ["team", "agent"])
def test_external_batches_equal_local_rollouts(bootstrap):
    learner, twin = make_learner(bootstrap), make_learner(bootstrap)
    policy = learner.actors["agents"]
    collector = RolloutCollector(
        arena(), policy, frames_per_batch=T, exploration_type=ExplorationType.DETERMINISTIC
    )
    found = external_batches(policy)
    ends = set()
    for theirs, ours in zip(found, (collector.rollout() for _ in range(BATCHES))):
        seen = {"": ours["agents", "mask"], "next": ours["next", "agents", "mask"]}
        for key in ours.keys(True, True):
            if key[0] == "collector":
                continue
            a, b = theirs[key], ours[key]
            assert (a.shape, a.dtype) == (b.shape, b.dtype), key
            if key[-1] in ("observation", "action", "action_log_prob", "logits"):
                mask = seen["next" if key[0] == "next" else ""]
                a, b = a[mask], b[mask]
            assert torch.equal(a, b), key
        ends |= {tuple(x) for x in ours["next", "terminated"].nonzero().tolist()}
        learner.add_targets(ours)
        twin.add_targets(theirs)
        for leaf in ("advantage", "value_target"):
            torch.testing.assert_close(
                theirs["agents", leaf], ours["agents", leaf], rtol=0, atol=1e-6
            )
    assert ends and any(one["next", "truncated"].any() for one in found)
    assert any(~one["next", "done"][0, -1, 0] for one in found)  # cut in mid-episode


def test_episode_returns_continue_across_fragments():
    learner = make_learner("team")
    policy = learner.actors["agents"]
    batches = external_batches(policy)
    sums, length, expected, found = torch.zeros(()), 0, [], []
    born = torch.zeros(3, dtype=torch.bool)
    for batch in batches:
        for t in range(T):
            step = batch[0, t]
            born = born | step["agents", "mask"]
            earns = born & ~step["agents", "done"][:, 0]
            reward = step["next", "agents", "reward"][:, 0]
            sums, length = sums + reward[earns].sum() / max(int(earns.sum()), 1), length + 1
            if step["next", "done"]:
                expected.append((round(sums.item(), 5), length))
                names = ("agents/episode_reward", "agents/episode_length")
                got = [step["collector", name].item() for name in names]
                found.append((round(got[0], 5), got[1]))
                sums, length, born = torch.zeros(()), 0, torch.zeros(3, dtype=torch.bool)
    assert found == expected and len(found) >= 3
