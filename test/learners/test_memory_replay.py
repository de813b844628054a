"""Learners with replay and memory: sampled windows, states, burn-in, graphs, masks."""

import pytest
import torch
from learner_twins import EXACT, assert_same_learning, set_same_weights
from samples import poisoned
from support.tiers import second_tier_cases

from torchrl_marl import TeamSpec
from torchrl_marl.collectors import RolloutCollector, TeamPolicy
from torchrl_marl.envs import with_memory
from torchrl_marl.envs.remember import hidden_sizes
from torchrl_marl.envs.toy import Arena, Nim
from torchrl_marl.errors import ConfigError, SpecError
from torchrl_marl.learners import OffPolicyConfig, ValueConfig, build_learners
from torchrl_marl.learners.off_policy_config import ReplayConfig
from torchrl_marl.learners.windows import drop_burn_in
from torchrl_marl.modules import MemoryConfig, QNetworkConfig, RecurrentNetworkConfig
from torchrl_marl.settings import check

ALGORITHMS = ("iql", "vdn", "qmix", "maddpg", "matd3", "masac")
L = 5


def arena(**settings):
    return Arena(4, **{"n_agents": 3, "years": 3, "lives": 2, "seed": 0} | settings)


def config_of(algorithm="qmix", kind="gru", sharing="group", **settings):
    values = algorithm in ("iql", "vdn", "qmix")
    make, network = (
        (ValueConfig, QNetworkConfig) if values else (OffPolicyConfig, RecurrentNetworkConfig)
    )
    actor = network([8], sharing=sharing, memory=MemoryConfig(kind, size=6))
    defaults = {"minibatch_size": 20, "learning_starts": 80, "updates_per_frame": 0.03}
    return make(algorithm, actor=actor, **(defaults | {"window": L} | settings))


def learners_of(env, config, execution="eager", own=None):
    torch.manual_seed(0)
    learners = build_learners(TeamSpec.from_env(env), config, own, execution=execution)
    policy = TeamPolicy(actor for learner in learners for actor in learner.actors.values())
    env = with_memory(env, hidden_sizes(policy))
    return learners, RolloutCollector(env, policy, frames_per_batch=80)


def stored(config, n=2, env=None, awake=False):
    """A learner that has stored batches without learning from them, and the joined batches."""
    [learner], collector = learners_of(env or arena(late_spawn=2), config)
    if awake:  # an untrained head hardly depends on its state
        set_same_weights(*(x for loss in learner.losses.values() for x in loss.followed[0]))
    batches = [collector.rollout() for _ in range(n)]
    for batch in batches:
        learner._store(batch)
    return learner, torch.cat(batches, 1)


# ------------------------------------------------------------------------------ windows


@pytest.mark.parametrize("capacity", [400, 124])
def test_windows_hold_consecutive_steps(capacity):
    """They start anywhere and cross ends of episodes, but never the write head."""
    learner, whole = stored(config_of(replay=ReplayConfig(capacity=capacity)), 2)
    replay, steps = learner.replay, min(40, capacity // 4)
    whole = whole[:, -steps:]
    rows = replay.rows(20, 100, L).flatten()
    windows = replay.windows(rows, L)
    assert windows["valid"].all()
    seen = whole["agents", "observation"] * whole["agents", "mask"].unsqueeze(-1)
    begun = set()
    for row, observed, init, hidden in zip(
        rows.tolist(),
        windows["agents", "observation"],
        windows["agents", "is_init"],
        windows["agents", "hidden"],
    ):
        slot, env = divmod(row, 4)
        t = (slot - replay.ring.head) % steps if replay.ring.n_filled == steps else slot
        begun.add(t)
        assert torch.equal(observed, seen[env, t : t + L])
        assert torch.equal(init, whole["agents", "is_init"][env, t : t + L])
        assert torch.equal(hidden, whole["agents", "hidden"][env, t].expand_as(hidden))
    assert begun == set(range(steps - L + 1))
    assert windows["agents", "is_init"][:, 1:].any()


def test_windows_do_not_cross_a_cut():
    learner, _ = stored(config_of(), 1)
    learner.cut()
    learner._store(learners_of(arena(), config_of())[1].rollout())
    windows = learner.replay.windows(torch.tensor([18 * 4 + 1]), L)
    assert windows["valid"].tolist() == [[True, True, False, False, False]]
    observed = windows["agents", "observation"][0]
    assert torch.equal(observed[2:], observed[1].expand_as(observed[2:]))
    one, other = windows.clone(), windows.clone()
    other["next", "agents", "team", "reward"][:, 2:] += 5.0
    [loss] = learner.losses.values()
    assert torch.equal(loss.value_loss(one)[0], loss.value_loss(other)[0])


def test_windows_need_enough_stored_steps():
    learner, _ = stored(config_of(), 1)
    with pytest.raises(RuntimeError, match="20 steps of each env are stored, .* at least 21"):
        learner.replay.rows(1, 3, 21)
    config = config_of(window=25, minibatch_size=25, learning_starts=0, updates_per_frame=0.1)
    [learner], collector = learners_of(arena(), config)
    assert learner.learn(collector.rollout())["agents", "updates"] == 0
    assert learner.learn(collector.rollout())["agents", "updates"] == 8


# ------------------------------------------------------------------------------- states


@pytest.mark.parametrize("kind", ["gru", "lstm", "mingru", "lru"])
@pytest.mark.parametrize("algorithm", ["qmix", "maddpg", "masac"])
def test_recomputed_states_match_those_of_acting(algorithm, kind):
    """Across ends of episodes, deaths and births, also in mid-episode."""
    learner, _ = stored(config_of(algorithm, kind))
    [loss] = learner.losses.values()
    windows = learner.replay.windows(learner.replay.rows(1, 200, L)[0], L)
    found = loss.recall(windows)
    first = learner.replay.windows(windows["index"].flatten(), 1).reshape(200, L)
    stored_states, acts = first["agents", "hidden"], windows["agents", "mask"][:, :-1]
    goes_on = ~windows["agents", "is_init"][:, 1:, :, 0] & acts
    after = found["agents", "hidden"][:, :-1]
    assert goes_on.any() and not goes_on.all()
    torch.testing.assert_close(after[goes_on], stored_states[:, 1:][goes_on], rtol=1e-5, atol=1e-6)
    for key, state in found.items():  # the target network still equals the network
        torch.testing.assert_close(state, found["agents", "hidden"], msg=str(key))


def test_bfloat16_states_match_those_of_acting_up_to_rounding():
    learner, _ = stored(config_of("iql", precision="bf16"))
    [loss] = learner.losses.values()
    windows = learner.replay.windows(learner.replay.rows(1, 100, L)[0], L)
    after = loss.recall(windows)["agents", "hidden"]
    assert after.dtype == windows["agents", "hidden"].dtype == torch.float32
    still = ~windows["agents", "is_init"][:, 1:, :, 0] & windows["agents", "mask"][:, :-1]
    first = learner.replay.windows(windows["index"].flatten(), 1).reshape(100, L)
    expected = first["agents", "hidden"][:, 1:][still]
    torch.testing.assert_close(after[:, :-1][still], expected, rtol=0.02, atol=0.02)


def test_agents_waiting_for_their_turn_keep_their_state():
    with pytest.warns(UserWarning, match="in turns"):
        learner, _ = stored(config_of("vdn"), 1, Nim(4, seed=0))
    [name] = learner.losses
    [loss] = learner.losses.values()
    windows = learner.replay.windows(learner.replay.rows(1, 64, L)[0], L)
    after, mask = loss.recall(windows)[name, "hidden"], windows[name, "mask"]
    waits = ~mask[:, 1:] & ~windows[name, "is_init"][:, 1:, :, 0]
    assert waits.any()
    assert torch.equal(after[:, 1:][waits], after[:, :-1][waits])


@pytest.mark.parametrize("double_q", [True, False])
def test_next_value_matches_value_of_next_step_in_window(double_q):
    """The value after one more step from a state equals that of the window in mid-episode."""
    learner, _ = stored(config_of("iql", double_q=double_q), awake=True)
    [loss] = learner.losses.values()
    windows = learner.replay.windows(learner.replay.rows(1, 200, L)[0], L)
    data = loss.group.dense(windows)
    following = data["next"].copy()
    for key, state in loss.recall(data).items():
        following.set(key, state)
    with torch.no_grad(), loss.in_time():
        values = loss.qvalue_network(loss.inputs(data))["agents", "action_value"]
    with torch.no_grad():
        found = loss.next_value(loss.inputs(following))
    mask, init = data["agents", "mask"], data["agents", "is_init"][..., 0]
    goes_on = mask[:, 1:] & ~init[:, 1:] & ~data["next", "terminated"][:, :-1]
    best = values.amax(-1, keepdim=True)[:, 1:][goes_on]
    assert len(best) > 50
    torch.testing.assert_close(found[:, :-1][goes_on], best, rtol=1e-4, atol=1e-5)
    # With states of zeros, values differ.
    following["agents", "hidden"] = following["agents", "target_hidden"] = torch.zeros_like(
        following["agents", "hidden"]
    )
    with torch.no_grad():
        forgetful = loss.next_value(loss.inputs(following))
    assert (forgetful[:, :-1][goes_on] - best).abs().max() > 1e-3


# ------------------------------------------------------------------------------ burn-in


@pytest.mark.parametrize("algorithm", ["qmix", "maddpg", "masac"])
def test_burn_in_with_unchanged_networks_has_no_effect(algorithm):
    """Windows after burn-in equal windows that start at the later steps."""
    learner, _ = stored(config_of(algorithm))
    [loss] = learner.losses.values()
    replay, recall = learner.replay, [loss.recall]
    rows = replay.rows(1, 50, L)[0]
    spent = drop_burn_in(replay.windows(rows, L), 2, recall)
    assert spent.batch_size == (50, L - 2)
    later = replay.windows((rows + 2 * 4) % replay.capacity, L - 2)
    torch.manual_seed(1)
    found, _ = loss.value_loss(spent)
    torch.manual_seed(1)
    expected, _ = loss.value_loss(later)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_burn_in_updates_states_of_network_and_target_separately():
    learner, _ = stored(config_of("qmix"))
    [loss] = learner.losses.values()
    windows = learner.replay.windows(learner.replay.rows(1, 50, L)[0], L)
    with torch.no_grad():
        for parameter in loss.qvalue_network.parameters():
            parameter.mul_(2.0)
    spent = drop_burn_in(windows, 2, [loss.recall])
    own, target = spent["agents", "hidden"], spent["agents", "target_hidden"]
    assert not own.requires_grad and (own - target).abs().max() > 1e-2
    begins = windows["index"].flatten()
    first = learner.replay.windows(begins, 1).reshape(50, L)["agents", "hidden"][:, 2]
    still = ~windows["agents", "is_init"][:, 2, :, 0] & windows["agents", "mask"][:, 1]
    torch.testing.assert_close(target[:, 0][still], first[still], rtol=1e-5, atol=1e-6)
    # The burn-in steps have no effect on the loss.
    torch.manual_seed(0)
    windows["next", "agents", "team", "reward"][:, :2] += 100.0
    again = drop_burn_in(windows, 2, [loss.recall])
    assert torch.equal(loss.value_loss(spent)[0], loss.value_loss(again)[0])


# ------------------------------------------------------------------- graphs, poison, joins


def trained(env, config, n=3, execution="eager", own=None):
    learners, collector = learners_of(env, config, execution, own)
    metrics = []
    for _ in range(n):
        batch = collector.rollout()
        metrics += [learner.learn(batch) for learner in learners]
    return learners, metrics


@pytest.mark.parametrize(("algorithm", "settings"), [
    ("qmix", {"kind": "lstm", "sharing": "none"}),
    ("maddpg", {"sharing": "agent_id", "actor_gradient": "agent"}),
    ("masac", {"burn_in": 2}),
    *second_tier_cases("compiled", *((algorithm, {"burn_in": 2}) for algorithm in ALGORITHMS[:-1])),
    *second_tier_cases(
        "compiled",
        ("iql", {"kind": "lru", "bootstrap": "agent", "sharing": "trunk"}),
        ("vdn", {"precision": "bf16", "normalize_observations": True}),
        ("masac", {"precision": "bf16", "normalize_observations": True}),
    ),
], ids=str)  # fmt: skip
def test_traced_updates_match_eager_updates(algorithm, settings):
    make = lambda: arena(late_spawn=1)  # noqa: E731
    config = config_of(algorithm, **settings)
    runs = [trained(make(), config, execution=how) for how in ("eager", "trace")]
    assert_same_learning(*runs, equal_nan=True, **EXACT)


@pytest.mark.parametrize("value", [float("nan"), 1e9])
@pytest.mark.parametrize("algorithm", ["qmix", "iql", "matd3", "masac"])
def test_values_in_masked_slots_have_no_effect(algorithm, value):
    runs = []
    for poison in (False, True):
        [learner], collector = learners_of(arena(late_spawn=1), config_of(algorithm, burn_in=1))
        for _ in range(2):
            batch = collector.rollout()
            mask, alive = batch["agents", "mask"], ~batch["agents", "done"].squeeze(-1)
            if poison:
                flags = batch["next", "agents"]
                cut = alive & (flags["truncated"] & ~flags["terminated"]).squeeze(-1)
                batch = poisoned(batch, ("agents", "observation"), mask, value)
                batch = poisoned(batch, ("agents", "action"), mask, value)
                batch = poisoned(batch, ("agents", "hidden"), alive, value)
                begun = ~batch["agents", "is_init"].squeeze(-1)
                batch = poisoned(batch, ("agents", "hidden"), begun, value)
                batch = poisoned(
                    batch, ("next", "agents", "observation"), flags["mask"] | cut, value
                )
            torch.manual_seed(1)
            metrics = learner.learn(batch)
            torch.manual_seed(2)
        runs.append(([learner], [metrics]))
    assert metrics["agents", "updates"] > 0
    assert_same_learning(*(([], metrics) for _, metrics in runs), equal_nan=True, **EXACT)
    for mine, theirs in zip(*(learners[0].parameters() for learners, _ in runs), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("algorithm", ["iql", "qmix"])
def test_joined_groups_match_separate_learners(algorithm):
    settings = {"learning_starts": 0, "updates_per_frame": 0.0125, "minibatch_size": 80}
    config = config_of(algorithm, max_grad_norm=0.01, burn_in=1, **settings)
    env = arena(n_agents=4, n_groups=2)
    joined, collector = learners_of(env, config)
    apart, _ = learners_of(env, config, own={"agents_1": {"adam_eps": 1.0001e-8}})
    assert (len(joined), len(apart)) == (1, 2)
    set_same_weights(*joined, *apart)
    batch = collector.rollout()
    found = []
    for learners in (joined, apart):
        for learner in learners:
            torch.manual_seed(5)  # the same windows
            found.append(learner.learn(batch.clone()))
    for metrics in found[1:]:
        for key, value in metrics.items(True, True):
            torch.testing.assert_close(found[0][key], value, rtol=1e-4, atol=1e-5)


# ----------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(("settings", "words"), [
    ({"minibatch_size": 24}, r"minibatch_size is 24, .* use learner.minibatch_size=25"),
    ({"burn_in": 5}, "burn_in is 5, expected less than learner.window, 5.* learner.burn_in=2"),
    ({"n_step": 3}, "n_step is 3, but networks with memory .* use learner.n_step=1"),
    ({"replay": ReplayConfig(alpha=0.6)}, "replay.alpha is 0.6, .* use learner.replay.alpha=0"),
    ({"replay": ReplayConfig(capacity=20), "window": 10, "num_envs": 4},
     "window is 10, expected at most 5, the steps of each of 4 environments"),
], ids=str)  # fmt: skip
def test_invalid_settings_raise(settings, words):
    num_envs = settings.pop("num_envs", None)
    config = config_of(**settings)
    with pytest.raises(ConfigError, match=words):
        check(config, "learner.")
        config.check_store(num_envs, 20, "learner.")


def test_environment_without_memory_raises():
    env = arena()
    [learner], collector = learners_of(env, config_of())
    with pytest.raises(SpecError, match="with_memory"):
        learner.actors["agents"](env.reset())
    batch = collector.rollout()
    del batch["agents", "hidden"]
    with pytest.raises(SpecError, match="no \\('agents', 'hidden'\\)"):
        learner.learn(batch)


if __name__ == "__main__":
    pytest.main([__file__])
