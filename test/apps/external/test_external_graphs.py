"""External simulators get answers from graphs of the policy or of a copy of it."""

import copy
import threading

import pytest
import torch
from external import AGENTS, encode_values
from torchrl_marl_client import Client

from torchrl_marl import TeamSpec
from torchrl_marl.apps.external import ExternalCollector, ExternalEnv
from torchrl_marl.apps.external.graph_acting import GraphActing
from torchrl_marl.collectors import TeamPolicy
from torchrl_marl.modules import NetworkConfig, make_actor


def play(port, stop):
    """A client that sends steps until ``stop`` is set."""
    client, t = Client(port=port, agents=AGENTS, patience=-1.0), 0
    try:
        client.begin(encode_values(0.1, 0.2))
        while not stop.is_set():
            t += 1
            client.step(encode_values(0.1 * t, -0.2 * t), {"walker_0": 1.0})
    except (OSError, EOFError, RuntimeError):
        pass  # the listener is closed
    finally:
        client.close()


@pytest.mark.parametrize("hold", [True, False])
def test_recorded_version_is_that_of_the_acting_policy(hold):
    torch.manual_seed(0)
    env = ExternalEnv("game", num_envs=2, agents=AGENTS, port=0, hold=hold, max_clients=2)
    policy = TeamPolicy([make_actor(TeamSpec.from_env(env).groups["walker"], NetworkConfig([8]))])
    collector = ExternalCollector(env, policy, frames_per_batch=12)
    env.open()
    stop, policies, found = threading.Event(), [], []
    thread = threading.Thread(target=play, args=(env.listener.port, stop), daemon=True)
    thread.start()
    try:
        for _ in range(3):
            policies.append(copy.deepcopy(policy))
            found.append(collector.rollout())
            assert isinstance(env.server.policy, GraphActing)
            assert (env.server.policy.policy is policy) is hold
            with torch.no_grad():
                for parameter in policy.parameters():
                    parameter.add_(0.2)
    finally:
        stop.set()
        collector.shutdown()
        thread.join()
    batch = torch.cat(found)
    versions = batch["collector", "policy_version"].flatten()
    if hold:
        assert versions.unique().tolist() == [0, 1, 2]
    for version in versions.unique().tolist():
        given = batch.select(("walker", "observation"), ("walker", "mask")).clone()
        with torch.no_grad():
            expected = policies[version](given)["walker", "loc"]
        own = (versions == version).view(batch.shape)
        torch.testing.assert_close(batch["walker", "loc"][own], expected[own])
