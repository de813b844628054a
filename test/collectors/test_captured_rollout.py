"""Batches of captured rollouts match those of eager steps."""

import pytest
import torch
from graph_batches import assert_equal, batch_of, collector_of, dropout, policy_of
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.envs import Compose, RewardSum, StepCounter, TransformedEnv
from torchrl.envs.utils import ExplorationType, MarlGroupMapType

from torchrl_marl import TeamSpec
from torchrl_marl.capture import count_syncs
from torchrl_marl.envs import EnvConfig, VmasEnv, make_env
from torchrl_marl.envs.toy import (
    Arena,
    Kuhn,
    Leduc,
    MatchingLevers,
    PredatorPrey,
    TrafficJunction,
    ZeroSum,
)
from torchrl_marl.envs.toy.leduc import strength
from torchrl_marl.envs.transforms import with_dense_groups
from torchrl_marl.errors import ConfigError, GraphCheckError
from torchrl_marl.modules import make_actor

CASES = {
    "dropout": lambda: dropout(),
    "with a state and info": lambda: dropout(state="observations", info=True),
    "discrete": lambda: dropout(continuous_actions=False),
    "balance": lambda: VmasEnv("balance", num_envs=6, seed=0, max_steps=7),
    "a goal object": lambda: VmasEnv("simple_push", num_envs=6, seed=0, max_steps=7),
    "kinds, padded": lambda: with_dense_groups(
        VmasEnv(
            "simple_adversary",
            num_envs=6,
            seed=0,
            max_steps=7,
            group_map=MarlGroupMapType.ALL_IN_ONE_GROUP,
            info=False,
        )
    ),
    "transforms": lambda: TransformedEnv(
        dropout(),
        Compose(
            RewardSum(in_keys=[("agents", "reward")], out_keys=[("agents", "sum")]),
            StepCounter(),
        ),
    ),
    "matrix game": lambda: make_env(
        EnvConfig(library="toy", name="matrix_game", num_envs=6, max_steps=7), seed=0
    ),
    "matching levers": lambda: MatchingLevers(6, rounds=9, max_steps=7, seed=0),
    "predators": lambda: PredatorPrey(6, size=9, vision=1, max_steps=7, seed=0),
}


def test_environment_gets_unpadded_actions():
    # Novices have 2 actions, the others 4: the environment itself takes no padded actions.
    env = with_dense_groups(Arena(6, n_agents=4, n_actions=4, kinds=2, max_steps=7, seed=0))
    collector = collector_of(env, "trace")
    action = batch_of(collector)["agents", "action"]
    assert collector.execution == "trace"
    assert action.amax((0, 1)).tolist() == [3, 3, 1, 1]


@pytest.mark.parametrize("case", CASES)
def test_traced_batch_matches_eager_batch(case):
    make = CASES[case]
    by_graph, eager = collector_of(make(), "trace"), collector_of(make(), "eager")
    first = batch_of(by_graph)
    assert by_graph.execution == "trace"
    # Up to the first time limit; later initial states are drawn in another order.
    assert_equal(first, batch_of(eager))
    for _ in range(2):
        batch = batch_of(by_graph)
        keys = set(first.keys(True, True))
        assert set(batch.keys(True, True)) == keys and batch.batch_size == first.batch_size
    ids = batch["collector", "traj_ids"]
    assert len(ids.unique()) > 6 and (ids[:, 1:] >= ids[:, :-1]).all()


def test_traced_two_player_games_follow_their_rules():
    """Rewards of Kuhn poker and of a matrix game match their states and actions."""
    for env in (ZeroSum(20, payoff="biased", seed=0), Kuhn(20, seed=0)):
        collector = collector_of(env, "trace", n_steps=20)
        td = batch_of(collector)
        assert collector.execution == "trace"
        first, second = (td[name, "action"][..., 0] for name in ("first", "second"))
        won = td["next", "first", "reward"].flatten(-2).squeeze(-1)
        assert torch.equal(won, -td["next", "second", "reward"].flatten(-2).squeeze(-1))
        done = td["next", "done"].squeeze(-1)
        if isinstance(env, ZeroSum):
            assert torch.equal(won, env.payoff[first, second]) and done.all()
            continue
        cards, said = td["state"][..., :6].unflatten(-1, (2, 3)).argmax(-1), td["state"][..., 6:]
        higher = torch.where(cards[..., 0] > cards[..., 1], 1.0, -1.0)
        open_, passed, bet, answered = said.bool().unbind(-1)
        showdown = torch.where(passed & (second == 0), higher, 2 * higher)
        expected = torch.where(answered & (first == 0), -1.0, showdown)
        expected = torch.where(bet & (second == 0), 1.0, expected)
        goes_on = open_ | (passed & (second == 1))
        assert torch.equal(won, torch.where(goes_on, 0.0, expected))
        assert torch.equal(done, ~goes_on) and torch.equal(open_[:, 1:], done[:, :-1])
        assert len(cards[open_].unique(dim=0)) == 6


def test_traced_leduc_poker_follows_its_rules():
    """Rewards at the end of a game match its cards and actions."""
    env = Leduc(40, seed=0)
    collector = collector_of(env, "trace", n_steps=20)
    td = batch_of(collector)
    assert collector.execution == "trace"
    first, second = (td[name, "action"][..., 0] for name in ("first", "second"))
    cards, said = td["state"].split([18, 16], -1)
    cards, said = cards.unflatten(-1, (3, 6)).argmax(-1), said.unflatten(-1, (2, 4, 2))
    calls, raises = said.sum(-2).unbind(-1)  # [E, T, round]
    moves_first = (calls + raises).sum(-1).remainder(2) == 0
    second_round = td["first", "observation"][..., 0, 8:14].any(-1)
    moves_first = torch.where(second_round, (calls + raises)[..., 1] % 2 == 0, moves_first)
    assert torch.equal(moves_first, td["first", "mask"][..., 0])
    action = torch.where(moves_first, first, second)
    stake = 1 + 2 * raises[..., 0] + 4 * raises[..., 1]
    fold = torch.where(moves_first, -1.0, 1.0) * (stake - torch.where(second_round, 4, 2))
    showdown = strength(cards) * stake
    folds = action == 0
    ends = (action == 1) & second_round & ((calls + raises)[..., 1] > 0)
    won = td["next", "first", "reward"].flatten(-2).squeeze(-1)
    expected = torch.where(folds, fold, torch.where(ends, showdown, 0.0))
    assert torch.equal(won, expected)
    assert torch.equal(td["next", "done"].squeeze(-1), folds | ends)
    assert folds.any() and ends.any() and (won == 0)[ends].any()


def test_traced_spawns_and_removals_match_eager_steps():
    def collector(execution):
        # A car arrives at each place whatever is drawn; the policy is deterministic.
        env = TrafficJunction(6, size=3, arrival_rate=1.0, max_steps=17, seed=0)
        mode = ExplorationType.DETERMINISTIC
        policy = policy_of(env, seed=4)
        return collector_of(env, execution, policy, n_steps=17, exploration_type=mode)

    by_graph, eager = collector("trace"), collector("eager")
    first = batch_of(by_graph)
    assert by_graph.execution == "trace"
    assert_equal(first, batch_of(eager))
    assert first["next", "agents", "terminated"].any()


def test_new_episodes_start_after_done():
    collector = collector_of(dropout(), "trace", n_steps=20)
    batch = batch_of(collector)
    done = batch["next", "done"].squeeze(-1)
    assert done.any() and not batch["done"].any()
    now, following = batch["agents", "observation"], batch["next", "agents", "observation"]
    goes_on = ~done[:, :-1]
    assert torch.equal(now[:, 1:][goes_on], following[:, :-1][goes_on])
    assert (now[:, 1:][~goes_on] != following[:, :-1][~goes_on]).any(-1).all()
    # Steps count from the start of an episode, which lasts to the limit at most.
    lengths = [len(part) for row in batch["collector", "traj_ids"] for part in runs_of(row)]
    assert max(lengths) == 7


def runs_of(row):
    return [row[row == i] for i in row.unique()]


def test_batches_are_not_overwritten_by_the_next_batch():
    collector = collector_of(dropout(), "trace")
    first = batch_of(collector)
    kept = first.clone()
    collector.rollout()
    assert_equal(first, kept)
    first["agents", "observation"].fill_(torch.nan)  # writing to a batch is allowed
    assert torch.isfinite(collector.rollout()["agents", "observation"]).all()


def test_simulator_state_matches_the_last_collected_step():
    env = dropout()
    collector = collector_of(env, "trace")
    collector.rollout()
    seen = torch.stack([env._env.scenario.observation(agent) for agent in env._env.agents], 1)
    assert torch.equal(collector.carry["agents", "observation"], seen)
    assert (env._env.steps == 5).all()


def test_rollout_uses_updated_parameters():
    env, other = dropout(), dropout()
    collector, eager = collector_of(env, "trace"), collector_of(other, "eager")
    batch_of(collector), batch_of(eager)
    collector.set_seed(3), eager.set_seed(3)
    for policy in (collector.policy, eager.policy):
        with torch.no_grad():
            for parameter in policy.parameters():
                parameter.add_(0.1)
    found, expected = batch_of(collector, 2), batch_of(eager, 2)
    assert_equal(found.exclude("collector"), expected.exclude("collector"))


def test_another_policy_of_the_same_shape_is_captured():
    env = dropout()
    collector = collector_of(env, "trace")
    batch_of(collector)
    collector.policy = policy_of(env, seed=5)
    collector.set_seed(3)
    eager = collector_of(dropout(), "eager", policy=policy_of(env, seed=5))
    eager.set_seed(3)
    found, expected = batch_of(collector, 2), batch_of(eager, 2)
    assert_equal(found.exclude("collector"), expected.exclude("collector"))


def test_random_frames_deterministic_actions_and_resets_each_iteration():
    collector = collector_of(
        dropout(),
        "trace",
        init_random_frames=30,
        exploration_type=ExplorationType.DETERMINISTIC,
        reset_at_each_iter=True,
    )
    first, second, third = (collector.rollout() for _ in range(3))
    assert ("agents", "loc") not in first.keys(True) and ("agents", "loc") in second.keys(True)
    loc = second["agents", "loc"]
    assert torch.allclose(second["agents", "action"], loc.tanh(), atol=1e-5)
    assert not third["done"].any() and collector.execution == "trace"


def test_without_a_policy_actions_are_random():
    batch = collector_of(dropout(), "trace", policy=None).rollout()
    action = batch["agents", "action"]
    assert action.abs().max() <= 1 and action.std() > 0.3


def test_rollout_is_captured_once():
    collector = collector_of(dropout(), "trace", n_steps=10)
    for _ in range(4):
        collector.rollout()
    assert len(collector._captured._programs) == 1


def test_collector_resumes_exactly():
    collector = collector_of(dropout(), "trace", n_steps=10)
    batch_of(collector)
    state = collector.state_dict()
    torch.manual_seed(9)
    expected = [collector.rollout() for _ in range(2)]
    other = collector_of(dropout(seed=4), "trace", policy=policy_of(dropout(), 8), n_steps=10)
    other.load_state_dict(state)
    torch.manual_seed(9)
    for batch in expected:
        assert_equal(batch, other.rollout())


def test_seed_applies_to_initial_states_prepared_before():
    batches = []
    for prepared in (False, True):
        collector = collector_of(dropout(max_steps=3), "trace", n_steps=10)
        batch_of(collector)
        if prepared:
            collector.prepare()
        collector.set_seed(3)
        batches.append(batch_of(collector))
    assert_equal(*batches)


def test_rollout_does_not_synchronize_with_host():
    collector = collector_of(dropout(), "trace", n_steps=10)
    collector.rollout()
    collector.prepare()
    with count_syncs() as syncs:
        collector.rollout()
    assert not syncs, str(syncs)


class Wild(nn.Module):
    """Returns an action that simulators reject."""

    def __init__(self, action):
        super().__init__()
        self.action = nn.Parameter(torch.zeros(()))
        self.wrong = action

    def forward(self, observation):
        return observation[..., :2] * 0 + self.action


def test_failed_check_of_the_simulator_raises():
    keys = [("agents", "observation")], [("agents", "action")]
    policy = TensorDictModule(Wild(0.0), in_keys=keys[0], out_keys=keys[1])
    collector = collector_of(dropout(), "trace", policy)
    for wrong in (torch.nan, 5.0):
        collector = collector_of(dropout(), "trace", policy)
        policy.module.action.data.fill_(0.0)
        collector.next()
        policy.module.action.data.fill_(wrong)
        with pytest.raises(GraphCheckError, match="environment.py"):
            collector.next()
        collector.rollout()  # does not wait for the check
        with pytest.raises(GraphCheckError, match="environment.py"):
            collector.prepare()


def test_unknown_execution_raises():
    with pytest.raises(ConfigError, match="did you mean 'compile'"):
        collector_of(dropout(), "compiled")
    with pytest.raises(ConfigError, match="'cudagraph' needs a GPU"):
        collector_of(dropout(), "cudagraph")


@pytest.mark.compiled
def test_compiled_batch_matches_eager_batch():
    """The settings of docs/one_program.md and the tutorial, which share the compiled graph."""
    settings = {"num_envs": 96, "max_steps": 50, "n_agents": 2, "info": False, "seed": 0}
    worlds = [VmasEnv("dropout", **settings) for _ in range(2)]
    torch.manual_seed(0)
    policy = make_actor(TeamSpec.from_env(worlds[0]).groups["agents"])
    compiled, eager = (
        collector_of(env, execution, policy, n_steps=100)
        for env, execution in zip(worlds, ("compile", "eager"))
    )
    found, expected = batch_of(compiled), batch_of(eager)
    done = expected["next", "done"].squeeze(-1).long()
    first = (done.cumsum(1) - done) == 0  # later episodes start elsewhere
    assert int(first.sum()) >= 96 * 10
    for key in expected.keys(True, True):
        one, other = found.get(key)[first], expected.get(key)[first]
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def pair(make_env, policy, **kwargs):
    """A traced and an eager collector with the same policy."""
    settings = {"n_steps": 5, "policy": policy, **kwargs}
    return [collector_of(make_env(), execution, **settings) for execution in ("trace", "eager")]


def module_policy(*layers):
    keys = [("agents", "observation")], [("agents", "action")]
    torch.manual_seed(0)
    width = dropout().full_observation_spec["agents", "observation"].shape[-1]
    net = nn.Sequential(nn.Linear(width, 8), *layers, nn.Linear(8, 2), nn.Tanh())
    return TensorDictModule(net, in_keys=keys[0], out_keys=keys[1])


@pytest.mark.parametrize("change", ["eval", "layer", "attribute", "parameter"])
def test_changed_policy_is_recaptured(change):
    policy = module_policy(nn.Dropout(0.5), nn.Threshold(0.1, 0.0))
    collectors = pair(dropout, policy)
    for collector in collectors:
        batch_of(collector)
    if change == "eval":
        policy.eval()
    elif change == "layer":
        policy.module[2] = nn.Tanh()
    elif change == "parameter":
        policy.module[0].weight = nn.Parameter(-policy.module[0].weight.detach())
    else:
        policy.module[2].threshold = 0.5
    found, expected = (
        batch_of(collector, 2)["agents", "action"][:, :2] for collector in collectors
    )
    assert torch.equal(found, expected)


def test_unhashable_policy_is_captured():
    class Same:
        def __eq__(self, other):
            return self is other

        def __call__(self, td):
            td["agents", "action"] = torch.zeros(td.shape[0], 2, 2)
            return td

    collector = collector_of(dropout(), "trace", Same())
    assert not collector.next()["agents", "action"].any() and collector.execution == "trace"


def test_changed_transform_applies_to_new_episodes():
    from torchrl.envs import ObservationNorm

    def make():
        norm = ObservationNorm(
            loc=torch.tensor(0.0), scale=torch.tensor(1.0), in_keys=[("agents", "observation")]
        )
        return TransformedEnv(dropout(max_steps=3), norm)

    collector = collector_of(make(), "trace", None, n_steps=9)
    collector.next()
    collector.env.transform.loc.fill_(100.0)
    batch = collector.next()["agents", "observation"][:, 1:]
    assert (batch > 50).all()


def test_collector_raises_the_same_error_again():
    collector = collector_of(dropout(), "eager", lambda td: td)
    for _ in range(2):
        with pytest.raises(Exception, match="action"):
            collector.next()
