"""Stand-ins for the simulator below Isaac Lab: the simulation, the scene, one robot.

The robot is a cart with two poles, whose equations are simpler than Isaac Sim's.
"""

import contextlib
import enum
import importlib
import types

import torch


class SimulationContext:
    """A simulation. Unlike in Isaac Sim, several may exist at once unless ``exclusive``."""

    class RenderMode(enum.IntEnum):
        NO_GUI_OR_RENDERING = -1
        NO_RENDERING = 0
        PARTIAL_RENDERING = 1
        FULL_RENDERING = 2

    exclusive = False
    latest = None

    def __init__(self, cfg):
        self.cfg, self.device = cfg, cfg.device
        self.render_mode = self.RenderMode.NO_RENDERING
        self.articulations = {}
        SimulationContext.latest = self

    @classmethod
    def instance(cls):
        return cls.latest if cls.exclusive else None

    @classmethod
    def clear_instance(cls):
        cls.latest = None

    def step(self, render=True):
        for articulation in self.articulations.values():
            articulation.integrate(self.cfg.dt)

    def get_initial_stage(self):
        return None

    def has_gui(self):
        return False

    has_rtx_sensors = has_gui

    def is_playing(self):
        return True

    def reset(self):
        pass

    clear_all_callbacks = render = reset


class InteractiveScene:
    """Holds the objects of the envs."""

    def __init__(self, cfg):
        simulation = SimulationContext.latest
        self.cfg, self.num_envs = cfg, cfg.num_envs
        self.articulations = simulation.articulations
        self.env_origins = torch.zeros(cfg.num_envs, 3, device=simulation.device)
        simulation.num_envs = cfg.num_envs

    def nothing(self, *args, **kwargs):
        pass

    clone_environments = filter_collisions = write_data_to_sim = update = reset = nothing


class Articulation:
    """A cart with two stacked poles; its buffers are written in place."""

    def __init__(self, cfg):
        simulation = SimulationContext.latest
        self.names = list(cfg.init_state.joint_pos)
        n, joints, device = simulation.num_envs, len(self.names), simulation.device

        def zeros(size):
            return torch.zeros(n, size, device=device)

        self.data = types.SimpleNamespace(
            joint_pos=zeros(joints),
            joint_vel=zeros(joints),
            default_joint_pos=zeros(joints),
            default_joint_vel=zeros(joints),
            default_root_state=zeros(13),
        )
        self.effort = zeros(joints)

    def find_joints(self, name):
        return [self.names.index(name)], [name]

    def set_joint_effort_target(self, effort, joint_ids):
        self.effort[:, joint_ids] = effort

    def write_joint_state_to_sim(self, position, velocity, joint_ids, env_ids):
        self.data.joint_pos[env_ids] = position
        self.data.joint_vel[env_ids] = velocity

    def write_root_pose_to_sim(self, *args):
        pass

    write_root_velocity_to_sim = write_root_pose_to_sim

    def integrate(self, dt):
        position, velocity = self.data.joint_pos, self.data.joint_vel
        first, second = position[:, 1], position[:, 1] + position[:, 2]
        cart = (self.effort[:, 0] - 10 * velocity[:, 0]) / 3
        pole = 9.8 * first.sin() - cart * first.cos() - self.effort[:, 2]
        pendulum = 9.8 * second.sin() - cart * second.cos() + self.effort[:, 2] - pole
        velocity += dt * torch.stack([cart, pole, pendulum], 1)
        position += dt * velocity


def put_below():
    """Puts the stand-ins below Isaac Lab's base class and its cart double pendulum."""
    version = importlib.import_module("packaging.version")
    base = importlib.import_module("isaaclab.envs.direct_marl_env")
    base.SimulationContext, base.InteractiveScene = SimulationContext, InteractiveScene
    base.use_stage = lambda stage: contextlib.nullcontext()
    base.attach_stage_to_usd_context = lambda *args, **kwargs: None
    base.get_isaac_sim_version = lambda: version.Version("5.1.0")
    importlib.import_module("isaaclab.sim").DomeLightCfg = lambda **kwargs: types.SimpleNamespace(
        func=lambda *args: None
    )
    folder = "isaaclab_tasks.direct.cart_double_pendulum"
    task = importlib.import_module(f"{folder}.cart_double_pendulum_env")
    task.Articulation, task.spawn_ground_plane = Articulation, lambda *args, **kwargs: None
