"""A valid environment of two agents, and variants with one error each."""

import torch
from tensordict import TensorDict
from torchrl.data import Bounded, Categorical, Composite, Unbounded
from torchrl.envs import EnvBase

E, N = 3, 2
SHARED = torch.Generator()


def flag(*shape):
    return Categorical(2, shape=shape, dtype=torch.bool)


class Camp(EnvBase):
    """The valid one: the first agent dies in the second step, the time limit is four steps."""

    max_steps = 4

    def __init__(self, batch_size=(E,)):
        super().__init__(batch_size=torch.Size(batch_size))
        self.group_map = {"scouts": ["ann", "bob"]}
        self.agent_names = ["ann", "bob"]
        n = (*batch_size, N)
        flags = {key: flag(*n, 1) for key in ("done", "terminated", "truncated")}
        self.observation_spec = Composite(
            scouts=Composite(
                observation=Bounded(0, 1, (*n, 2)),
                mask=flag(*n),
                action_mask=flag(*n, 3),
                shape=n,
            ),
            shape=batch_size,
        )
        self.action_spec = Composite(
            scouts=Composite(action=Categorical(3, shape=n), shape=n), shape=batch_size
        )
        self.reward_spec = Composite(
            scouts=Composite(reward=Unbounded((*n, 1)), shape=n), shape=batch_size
        )
        self.done_spec = Composite(
            {key: flag(*batch_size, 1) for key in flags} | {"scouts": Composite(flags, shape=n)},
            shape=batch_size,
        )
        self.generator = torch.Generator().manual_seed(0)
        self.t = torch.zeros(*batch_size, 1, dtype=torch.int64)
        self.seen = torch.zeros(*n, 2)
        self.sum = torch.zeros(*n)

    def _set_seed(self, seed):
        self.generator.manual_seed(seed)

    def draw(self):
        return torch.rand(*self.batch_size, N, 2, generator=self.generator)

    def _reset(self, tensordict=None, **kwargs):
        all_envs = torch.ones_like(self.t, dtype=torch.bool)
        restarted = all_envs if tensordict is None else tensordict.get("_reset", all_envs)
        self.t = torch.where(restarted, 0, self.t)
        self.seen = torch.where(restarted.unsqueeze(-1), self.draw(), self.seen)
        return self.give()

    def _step(self, tensordict):
        self.t = self.t + 1
        self.seen = self.draw()
        mask = self.give()["scouts", "mask"] | (self.t == 2)
        action = torch.where(mask, tensordict["scouts", "action"], 0)
        out = self.give()
        out["scouts", "reward"] = action.float().unsqueeze(-1)
        return out

    def give(self):
        n = (*self.batch_size, N, 1)
        dead = torch.zeros(n, dtype=torch.bool)
        dead[..., 0, :] = self.t >= 2
        timed_out = (self.t >= 4).unsqueeze(-1).expand(n) & ~dead
        root = {"terminated": torch.zeros_like(self.t, dtype=torch.bool), "truncated": self.t >= 4}
        scouts = {
            "observation": self.seen,
            "mask": ~dead.squeeze(-1),
            "action_mask": torch.ones(*n[:-1], 3, dtype=torch.bool),
            "terminated": dead,
            "truncated": timed_out,
            "done": dead | timed_out,
        }
        source = {**root, "done": root["truncated"], "scouts": scouts}
        td = TensorDict(source, self.batch_size)
        td["scouts"].batch_size = n[:-1]
        return td


def camp_with_change(change):
    """A camp whose steps return changed data."""

    class Wrong(Camp):
        def _step(self, tensordict):
            out = super()._step(tensordict)
            change(self, out)
            return out

    return Wrong


def camp_with_value(*key, value):
    def change(env, out):
        key_ = key if len(key) > 1 else key[0]
        out[key_] = torch.full_like(out[key_], value)

    return camp_with_change(change)


def end_by(terminated):
    def change(env, out):
        terminated_any = out["scouts", "terminated"].any(-2)
        out["terminated"], out["truncated"], out["done"] = (
            terminated_any,
            terminated_any & False,
            terminated_any,
        )

    def limit(env, out):
        out["terminated"], out["truncated"] = out["truncated"], out["terminated"]
        terminated_any = out["terminated"].unsqueeze(-2) | out["scouts", "terminated"]
        out["scouts", "terminated"], out["scouts", "truncated"] = (
            terminated_any,
            terminated_any & False,
        )
        out["scouts", "mask"] = ~terminated_any.squeeze(-1)

    return camp_with_change(limit if terminated else change)


def clear_done_in_third_step(env, out):
    out["scouts", "done"] = out["scouts", "done"] & (env.t != 3).unsqueeze(-1)
    out["scouts", "terminated"] = out["scouts", "terminated"] & (env.t != 3).unsqueeze(-1)


def end_with_both_flags(env, out):
    out["scouts", "truncated"] = out["scouts", "done"].clone()


def never_end(env, out):
    for key in ("done", "truncated"):
        out[key] = out[key] & False
        dead = out["scouts", "terminated"]
        out["scouts", key] = dead.clone() if key == "done" else dead & False


def end_all_agents(env, out):
    timed_out = (env.t >= 3).unsqueeze(-1)
    for key in ("done", "terminated"):
        out["scouts", key] = out["scouts", key] | timed_out
    out["scouts", "truncated"] = out["scouts", "truncated"] & False
    out["scouts", "mask"] = out["scouts", "mask"] & ~timed_out.squeeze(-1)


def mask_agents_at_the_limit(env, out):
    out["scouts", "mask"] = out["scouts", "mask"] & ~out["truncated"]


class WritesIntoObservation(Camp):
    """Overwrites the observation that it returned."""

    def draw(self):
        return self.seen.copy_(super().draw())


class ResetsAll(Camp):
    def _reset(self, tensordict=None, **kwargs):
        return super()._reset(None)


class Unseeded(Camp):
    def draw(self):
        return torch.rand(*self.batch_size, N, 2)


class IgnoresSeed(Camp):
    def _set_seed(self, seed):
        pass


class SharesGenerator(Camp):
    """All camps draw from one generator."""

    def __init__(self):
        super().__init__()
        self.generator = SHARED


class RewardsDeadActions(Camp):
    def _step(self, tensordict):
        out = super()._step(tensordict)
        out["scouts", "reward"] = tensordict["scouts", "action"].float().unsqueeze(-1)
        return out


class RefusesDeadActions(Camp):
    def _step(self, tensordict):
        dead = ~self.give()["scouts", "mask"]
        if self.played and not (tensordict["scouts", "action"][dead] == 0).all():
            raise RuntimeError("an action of the dead")
        return super()._step(tensordict)

    @property
    def played(self):
        return True


class Overwrites(Camp):
    """Starts the next episode inside the step, so that the reset does nothing."""

    def _step(self, tensordict):
        out = super()._step(tensordict)
        self.over = out["done"]
        self.seen = torch.where(self.over.unsqueeze(-1), self.draw(), self.seen)
        out["scouts", "observation"] = self.seen
        return out

    def _reset(self, tensordict=None, **kwargs):
        seen = self.seen
        out = super()._reset(tensordict)
        if tensordict is not None and "_reset" in tensordict.keys():
            self.seen = out["scouts", "observation"] = seen
        return out


class WritesActions(Camp):
    def _step(self, tensordict):
        out = super()._step(tensordict)
        tensordict["scouts", "action"].zero_()
        return out


class StaysDone(Camp):
    def _reset(self, tensordict=None, **kwargs):
        out = super()._reset(tensordict)
        out["scouts", "done"][:, 0] = out["scouts", "terminated"][:, 0] = True
        out["scouts", "mask"][:, 0] = False
        return out


class Crashes(Camp):
    def _step(self, tensordict):
        raise ZeroDivisionError("no food left")


def camp_with_specs(**changes):
    """A camp with other specs."""

    def make():
        env = Camp()
        for name, spec in changes.items():
            setattr(env, name, spec(env))
        return env

    return make


def spec_without(spec, key):
    def make_spec(env):
        shortened_spec = getattr(env, spec).clone()
        del shortened_spec[key]
        return shortened_spec

    return make_spec


def flat_reward(env):
    return Composite(scouts=Composite(reward=Unbounded((E, N)), shape=(E, N)), shape=(E,))


def forget_mask(env, out):
    del out["scouts", "mask"]


def other_dtype(env, out):
    out["scouts", "observation"] = out["scouts", "observation"].double()
