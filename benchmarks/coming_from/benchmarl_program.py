"""BenchMARL: MAPPO on VMAS `balance`, 60,000 frames in ten iterations."""

from benchmarl.algorithms import MappoConfig
from benchmarl.environments import VmasTask
from benchmarl.experiment import Experiment, ExperimentConfig
from benchmarl.models import MlpConfig

config = ExperimentConfig.get_from_yaml()
config.max_n_frames = 60_000
config.on_policy_collected_frames_per_batch = 6_000
config.on_policy_n_envs_per_worker = 60
config.on_policy_n_minibatch_iters = 10
config.on_policy_minibatch_size = 400
config.lr = 3e-4
config.gamma = 0.99
config.evaluation_interval = 30_000
config.evaluation_episodes = 50
config.render = False
config.loggers = ["csv"]
config.save_folder = "."

task = VmasTask.BALANCE.get_from_yaml()
task.config["n_agents"] = 3

model = MlpConfig.get_from_yaml()
model.num_cells = [64, 64]

experiment = Experiment(
    task=task,
    algorithm_config=MappoConfig.get_from_yaml(),
    model_config=model,
    critic_model_config=model,
    seed=0,
    config=config,
)
experiment.run()
print("mean return of an agent:", experiment.mean_return)
