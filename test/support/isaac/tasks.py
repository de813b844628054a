"""Small tasks on Isaac Lab's ``DirectMARLEnv``: equal robots with separate done flags."""

import types

import torch


def define():
    """The classes ``RobotsCfg`` and ``Robots``; Isaac Lab must be importable."""
    from isaaclab.envs import DirectMARLEnv, DirectMARLEnvCfg
    from isaaclab.scene import InteractiveSceneCfg
    from isaaclab.sim import SimulationCfg
    from isaaclab.utils import configclass

    @configclass
    class RobotsCfg(DirectMARLEnvCfg):
        """Episodes of ``episode_length_s - 1`` steps, as in Isaac Lab's tasks.

        ``script``: agent -> step -> "terminated" or "timed out", instead of by position.
        ``joins``: agent -> the simulation step at which it appears.
        """

        decimation = 1
        episode_length_s = 1000.0
        possible_agents = ["robot_0", "robot_1", "robot_2", "robot_3"]
        action_spaces = dict.fromkeys(possible_agents, 1)
        observation_spaces = dict.fromkeys(possible_agents, 3)
        state_space = 4
        sim: SimulationCfg = SimulationCfg(dt=1.0, device="cpu")
        scene: InteractiveSceneCfg = InteractiveSceneCfg(num_envs=5, env_spacing=4.0)
        script: dict | None = None
        joins: dict = {}

    class Robots(DirectMARLEnv):
        """Robots on a line; a robot outside [-1, 1] is terminated.

        All returned tensors are views of buffers that the next step or reset overwrites.
        """

        def _setup_scene(self):
            names, n = self.cfg.possible_agents, self.scene.num_envs
            sizes = {name: self.cfg.observation_spaces[name] for name in names}
            self.x = torch.zeros(n, len(names))
            self.earned = torch.zeros(n, len(names))
            if isinstance(self.cfg.state_space, dict):
                self.states = {a: torch.zeros(n, size) for a, size in self.cfg.state_space.items()}
            self.seen = {
                name: torch.zeros(n, size if isinstance(size, int) else size.shape[0])
                for name, size in sizes.items()
            }

        def here(self, of):
            joins = self.cfg.joins
            return {a: x for a, x in of.items() if self.common_step_counter >= joins.get(a, 0)}

        def _pre_physics_step(self, actions):
            self.actions = actions

        def _apply_action(self):
            for i, name in enumerate(self.cfg.possible_agents):
                self.x[:, i] += 0.3 * self.actions[name].flatten(1).float().mean(1)

        def _get_observations(self):
            for i, observation in enumerate(self.seen.values()):
                observation[:] = i
                observation[:, 0], observation[:, 1] = self.x[:, i], self.episode_length_buf
            return self.here(self.seen)

        def _get_states(self):
            if not isinstance(self.cfg.state_space, dict):
                return self.x
            # The position of each robot, and its distance from the first ones.
            for i, state in enumerate(self.states.values()):
                state[:] = self.x[:, i : i + 1] - self.x[:, : state.shape[1]]
                state[:, 0] = self.x[:, i]
            return self.here(self.states)

        def _get_rewards(self):
            self.earned[:] = self.x
            rows = zip(self.cfg.possible_agents, self.earned.unbind(1))
            return self.here(dict(rows))

        def _get_dones(self):
            names, no_agent = self.cfg.possible_agents, torch.zeros(self.num_envs, dtype=torch.bool)
            timed_out = self.episode_length_buf >= self.max_episode_length - 1
            if self.cfg.script is None:
                outside = self.x.abs() > 1
                rows = zip(names, outside.unbind(1))
                return self.here(dict(rows)), self.here(dict.fromkeys(names, timed_out))
            flags = {
                "terminated": dict.fromkeys(names, no_agent),
                "timed out": dict.fromkeys(names, timed_out),
            }
            for name, ends in self.cfg.script.items():
                for step, flag in ends.items():
                    at_step = self.episode_length_buf == step
                    flags[flag][name] = flags[flag][name] | at_step
            return self.here(flags["terminated"]), self.here(flags["timed out"])

        def _reset_idx(self, env_ids):
            super()._reset_idx(env_ids)
            self.x[env_ids] = torch.rand(len(env_ids), self.x.shape[1]) * 1.6 - 0.8

    return types.SimpleNamespace(RobotsCfg=RobotsCfg, Robots=Robots)
