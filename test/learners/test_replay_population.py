"""A population with replay: each member learns as in a run of one member."""

import copy
import dataclasses

import pytest
import torch
from support.pictured import PicturedArena

from torchrl_marl import TeamSpec
from torchrl_marl.collectors import RolloutCollector, TeamPolicy
from torchrl_marl.envs.toy import Arena
from torchrl_marl.errors import ConfigError, NonFiniteError
from torchrl_marl.learners.members import learner_of_members
from torchrl_marl.learners.off_policy_config import ReplayConfig, TeamMixerConfig, ValueConfig
from torchrl_marl.learners.rows import make_member_view
from torchrl_marl.learners.value_learner import ValueLearner
from torchrl_marl.modules import MemoryConfig
from torchrl_marl.modules.config import QNetworkConfig

MEMBERS, ENVS, STEPS = 3, 4, 10
CONFIG = ValueConfig(
    "qmix",
    actor=QNetworkConfig(num_cells=[8]),
    mixer=TeamMixerConfig(hidden=4),
    learning_starts=0,
    minibatch_size=12,
    max_grad_norm=0.5,
    normalize_observations=True,
    replay=ReplayConfig(capacity=60),
)
DIFFERENT = {
    "lr": [1e-3, 5e-3, 2e-4],
    "gamma": [0.9, 0.99, 0.8],
    "max_grad_norm": [0.1, 10.0, 0.5],
    "exploration.epsilon": [0.5, 0.2, 1.0],
    "exploration.epsilon_end": [0.1, 0.0, 0.3],
}


def world(**settings):
    return Arena(MEMBERS * ENVS, **{"n_agents": 2, "years": 2, "lives": 2, "seed": 0} | settings)


def population(env, config=CONFIG, settings=None, **options):
    torch.manual_seed(0)
    own = {name: torch.tensor(values) for name, values in (settings or {}).items()}
    groups = TeamSpec.from_env(env).groups
    many = learner_of_members(groups, config, n_members=MEMBERS, settings=own, **options)
    policy = TeamPolicy(many.actors.values())
    return many, RolloutCollector(env, policy, frames_per_batch=MEMBERS * ENVS * STEPS)


def alone(env, config, settings, member):
    for name, values in settings.items():
        if name.startswith("exploration."):
            own = dataclasses.replace(config.exploration, **{name[12:]: values[member]})
            config = dataclasses.replace(config, exploration=own)
        else:
            config = dataclasses.replace(config, **{name: values[member]})
    return ValueLearner(TeamSpec.from_env(env).groups, config)


def numbers_of(learner):
    tensors = [x for x in learner.state_dict(keep_vars=True).values() if torch.is_tensor(x)]
    moments = [x for own in learner.updates.moments.values() for x in own.values()]
    return [x.detach().clone() for x in (*tensors, *moments, *stored_of(learner.replay))]


def stored_of(replay):
    """The tensors of a replay buffer; its entries in the order of their names."""
    if replay is None:
        return []
    entries = sorted(replay.ring.store.keys(True, True), key=str)
    n_entries = len(entries)
    return [*map(replay.ring.store.get, entries), *replay.tensors[n_entries:]]


def assert_as_alone(env, config, settings, execution="eager", batches=4):
    """Checks 16 updates, four of each batch; the replay buffer holds the last 1.5 batches."""
    many, collector = population(env, config, settings, execution=execution)
    ones = [alone(env, config, settings, i) for i in range(MEMBERS)]
    for i, one in enumerate(ones):
        make_member_view(many, one).write(i)
    for n in range(batches):
        for learner in (many, *ones):
            learner.set_progress(0.05 * n)
        batch = collector.rollout()
        torch.manual_seed(n)
        metrics = many.learn(batch.clone())
        for name in many.groups:
            assert metrics[name, "updates"].tolist() == [4.0] * MEMBERS
        for i, one in enumerate(ones):
            torch.manual_seed(n)
            own = one.learn(batch[i * ENVS : (i + 1) * ENVS].clone())
            for key, value in own.items(True, True):
                torch.testing.assert_close(metrics[key][i], value, rtol=1e-3, atol=2e-5)
        collector.finish(batch)
    for i, one in enumerate(ones):
        taken = make_member_view(many, alone(env, config, settings, i)).read(i)
        for x, y in zip(numbers_of(taken), numbers_of(one), strict=True):
            torch.testing.assert_close(x, y, rtol=0, atol=1e-6)
    return many


@pytest.mark.parametrize("algorithm", ["iql", "vdn", "qmix"])
@pytest.mark.parametrize("execution", ["eager", "trace"])
def test_members_match_single_learners(algorithm, execution):
    config = dataclasses.replace(CONFIG, algorithm=algorithm)
    many = assert_as_alone(world(), config, DIFFERENT, execution)
    assert len(many.updates.programs) == (execution == "trace")


@pytest.mark.parametrize(
    ("env", "config"),
    [
        ({"n_groups": 2, "n_agents": 4}, {}),
        ({"n_groups": 2, "n_agents": 4}, {"central_input": "team"}),
        ({"kinds": 2, "n_actions": 6, "action_mask": True}, {"n_step": 3}),
        ({}, {"algorithm": "iql", "bootstrap": "agent", "n_step": 2}),
        ({}, {"actor": QNetworkConfig(num_cells=[8], sharing="none"), "double_q": False}),
        ({}, {"actor": QNetworkConfig(num_cells=[8], sharing="agent_id")}),
    ],
    ids=["groups", "across", "kinds", "own ends", "apart", "ids"],
)
def test_members_with_other_settings_match_single_learners(env, config):
    config = dataclasses.replace(CONFIG, **config)
    assert_as_alone(world(**env), config, DIFFERENT, batches=2)


@pytest.mark.parametrize("execution", ["eager", "trace"])
@pytest.mark.parametrize("groups", [1, 2])
def test_members_with_state_mixers_match_single_learners(groups, execution):
    config = dataclasses.replace(CONFIG, central_input="state")
    assert_as_alone(
        world(n_groups=groups, n_agents=2 * groups), config, DIFFERENT, execution, batches=2
    )


def test_members_with_image_states_match_single_learners():
    env = PicturedArena(MEMBERS * ENVS, n_agents=2, years=2, lives=2, seed=0)
    config = dataclasses.replace(CONFIG, central_input="state", n_step=2)
    many = assert_as_alone(env, config, DIFFERENT, batches=2)
    taken = make_member_view(many, alone(env, config, {}, 0)).read(1)
    assert taken.replay.ring.store["state"].shape[2:] == (6, 6, 3)


@pytest.mark.parametrize("execution", ["eager", "trace"])
@pytest.mark.parametrize("where", ["reward", "observation", "state", "parameter"])
def test_diverged_member_is_frozen_without_effect_on_others(where, execution):
    found, seen = {}, "state" if where == "state" else "observations"
    for diverged in (False, True):
        config = dataclasses.replace(CONFIG, central_input=seen)
        many, collector = population(world(), config, DIFFERENT, execution=execution)
        batch = collector.rollout()
        torch.manual_seed(1)
        many.learn(batch.clone())
        before = numbers_of_networks(many, 1)
        if diverged and where == "parameter":
            with torch.no_grad():
                for p, owner in many.members.rows.owners.items():
                    p[owner == 1] = torch.nan
        elif diverged:
            place = batch["next", "agents"] if where == "reward" else batch["agents"]
            place = batch if where == "state" else place
            place[where][ENVS : 2 * ENVS] = torch.nan
        for _ in range(2):
            many.learn(batch.clone())
        own = [make_member_view(many, alone(world(), config, {}, 0)).read(i) for i in (0, 2)]
        found[diverged] = many, [numbers_of(one) for one in own]
    for well, ill in zip(found[False][1], found[True][1]):
        for x, y in zip(well, ill, strict=True):
            assert torch.equal(x, y)
    many = found[True][0]
    assert many.diverged.tolist() == [False, True, False] and not found[False][0].diverged.any()
    if where != "parameter":
        for x, y in zip(before, numbers_of_networks(many, 1), strict=True):
            assert torch.equal(x, y)
    assert all(x.isfinite().all() for x in many.buffers())


def numbers_of_networks(many, member):
    owners = many.members.rows.owners
    return [p.detach()[rows == member].clone() for p, rows in owners.items()]


def test_raises_when_all_members_diverge():
    many, collector = population(world())
    batch = collector.rollout()
    batch["next", "agents", "reward"].fill_(torch.nan)
    with pytest.raises(NonFiniteError, match="every member of the population"):
        many.learn(batch)


def test_changed_settings_take_effect_without_recapture():
    many, collector = population(world(), settings=DIFFERENT, execution="trace")
    many.learn(collector.rollout())
    recorded, before = dict(many.updates.programs), numbers_of_networks(many, 0)
    many.settings["lr"].mul_(torch.tensor([0.0, 1.0, 1.0]))
    many.learn(collector.rollout())
    assert many.updates.programs == recorded
    n_trained = len(many.updates.moments)
    for x, y in zip(before[:n_trained], numbers_of_networks(many, 0)):
        assert torch.equal(x, y)


def test_population_resumes_exactly():
    many, collector = population(world(), settings=DIFFERENT)
    batch = collector.rollout()
    many.learn(batch.clone())
    other, _ = population(world(), settings={name: [0.5] * MEMBERS for name in DIFFERENT})
    many.diverged[1] = True
    other.load_state_dict(copy.deepcopy(many.state_dict()))
    for learner in (many, other):
        torch.manual_seed(3)
        learner.learn(batch.clone())
    for x, y in zip(numbers_of(many), numbers_of(other), strict=True):
        assert torch.equal(x, y)
    assert torch.equal(many.diverged, other.diverged)


def test_copied_members_equal_their_parents_except_replay():
    many, collector = population(world(), settings={"lr": DIFFERENT["lr"]})
    for _ in range(2):
        many.learn(collector.rollout())
    many.diverged[0] = True
    n_stored = len(many.replay.tensors)
    one = alone(world(), CONFIG, {}, 0)
    before = [numbers_of(make_member_view(many, one).read(i)) for i in range(MEMBERS)]
    parent = torch.tensor([2, 1, 2])
    many.copy_members(parent)
    for i, source in enumerate(parent.tolist()):
        now = numbers_of(make_member_view(many, one).read(i))
        for x, y in zip(now[:-n_stored], before[source][:-n_stored], strict=True):
            assert torch.equal(x, y)
        for x, y in zip(now[-n_stored:], before[i][-n_stored:], strict=True):
            assert torch.equal(x, y)
    assert not many.diverged.any() and many.settings["lr"].tolist() == pytest.approx(
        DIFFERENT["lr"]
    )
    with pytest.raises(ConfigError, match="expected the number of a member"):
        many.copy_members(torch.tensor([0, 1, 3]))


def test_members_with_shared_replay_learn_from_all_steps():
    """Each matches a single learner of all envs with a third of the updates per frame."""
    settings = {"lr": DIFFERENT["lr"]}
    plain = dataclasses.replace(CONFIG, normalize_observations=False)
    every = dataclasses.replace(
        plain,
        updates_per_frame=CONFIG.updates_per_frame / MEMBERS,
        replay=ReplayConfig(capacity=MEMBERS * 60),
    )
    many, collector = population(world(), plain, settings, share_replay=True)
    ones = [alone(world(), every, settings, i) for i in range(MEMBERS)]
    for i, one in enumerate(ones):
        make_member_view(many, one).write(i)
    for n in range(2):
        batch = collector.next()
        for learner in (many, *ones):
            torch.manual_seed(n)
            learner.learn(batch.clone())
    assert len(many.replay) == MEMBERS * 60
    for i, one in enumerate(ones):
        rows = many.members.rows.owners
        own = [*one.updates.moments, *one.updates.targets]
        for p, q in zip(rows, own, strict=True):
            found = p.detach()[rows[p] == i].reshape(q.shape)
            torch.testing.assert_close(found, q.detach(), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"unshare_at": 0.5}, "unshare_at is 0.5"),
        ({"actor": QNetworkConfig(sharing="full")}, "learner.actor.sharing is 'full'"),
        ({"replay": ReplayConfig(alpha=0.6)}, "learner.replay.alpha is 0.6"),
        ({"mixer": TeamMixerConfig(over="team")}, "learner.mixer.over is 'team'"),
        ({"actor": QNetworkConfig(memory=MemoryConfig("gru"))}, "actor.memory.kind is 'gru'"),
    ],
)
def test_settings_that_link_members_raise(settings, words):
    with pytest.raises(ConfigError, match=words):
        population(world(), dataclasses.replace(CONFIG, **settings))


def test_error_names_the_group_of_the_environment():
    config = dataclasses.replace(CONFIG, central_input="agent_state")
    with pytest.raises(ConfigError) as error:
        population(world(), config)
    assert "expected ('agents', 'state')" in str(error.value)
    assert "of member" not in str(error.value)


def test_invalid_arguments_raise():
    with pytest.raises(ConfigError, match=r"settings\['lmbda'\] has 3 values"):
        population(world(), settings={"lmbda": [0.5] * MEMBERS})
    many, collector = population(world())
    with pytest.raises(ConfigError, match="expected a multiple of the 3 members"):
        many.learn(collector.rollout()[:7])
