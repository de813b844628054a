"""AgileRL: a population of two IPPO agents on mpe2's `simple_speaker_listener`, 20,480 steps."""

from agilerl.algorithms import IPPO
from agilerl.hpo.mutation import Mutations
from agilerl.hpo.tournament import TournamentSelection
from agilerl.training.train_multi_agent_on_policy import train_multi_agent_on_policy
from agilerl.vector import AsyncPettingZooVecEnv
from mpe2 import simple_speaker_listener_v4


def make_env():
    return simple_speaker_listener_v4.parallel_env(continuous_actions=True)


if __name__ == "__main__":
    env = AsyncPettingZooVecEnv([make_env] * 8)
    population = [
        IPPO(
            observation_spaces=[env.single_observation_space(agent) for agent in env.agents],
            action_spaces=[env.single_action_space(agent) for agent in env.agents],
            agent_ids=env.agents,
            index=index,
            batch_size=128,
            lr=1e-3,
            learn_step=2_048,
            gamma=0.99,
            gae_lambda=0.95,
            update_epochs=4,
            net_config={"latent_dim": 64, "encoder_config": {"hidden_size": [64]}},
        )
        for index in range(2)
    ]
    population, fitnesses = train_multi_agent_on_policy(
        env,
        "simple_speaker_listener_v4",
        "IPPO",
        population,
        sum_scores=True,
        max_steps=20_480,
        evo_steps=4_096,
        eval_loop=10,
        selection_strategy=TournamentSelection(tournament_size=2, elitism=True, population_size=2),
        mutation=Mutations(
            no_mutation=0.4,
            architecture=0.2,
            new_layer_prob=0.2,
            parameters=0.2,
            activation=0.0,
            rl_hp=0.2,
        ),
        verbose=False,
    )
    env.close()
    print("fitness, the sum of both agents' returns:", fitnesses[-1])
