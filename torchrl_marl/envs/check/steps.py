"""Rules of one step: flags, masks, observations, rewards and the end of an episode.

Shapes: B any batch dims, N agents of a group.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor
from torchrl.data import Composite
from torchrl.envs import EnvBase

from torchrl_marl.envs.check.layout import Findings, base_of, differs, leaves, outside, spec_leaves
from torchrl_marl.specs import GroupSpec, TeamSpec

__all__ = ["StepRules"]

_HOW_TO_SET_FLAGS = (
    "set terminated if the environment ended the episode, else truncated; set done if either is set"
)


@dataclass
class StepRules:
    """Checks single steps, and collects the broken rules.

    Args:
        env (EnvBase): the environment to check.
        team (TeamSpec): agents of the environment.
        findings (Findings): collection that receives the broken rules.
        max_steps (int, optional): the time limit, if known.
    """

    env: EnvBase
    team: TeamSpec
    findings: Findings
    max_steps: int | None = None
    step: int = 0
    episodes: int = 0
    steps: Tensor | None = None
    at_limit: dict[str, int] = field(default_factory=lambda: {"terminated": 0, "truncated": 0})
    ended_before: bool = False
    terminal_repeats_reset: list[bool] = field(default_factory=list)
    observations_change: bool = False

    def begin(self, td: TensorDictBase) -> None:
        """Checks the output of a reset of all envs."""
        self.steps = torch.zeros_like(td.get("done"), dtype=torch.int64)
        self._check_flags_cleared(td, torch.ones_like(td.get("done")))
        self._check_values(td)

    def check(self, before: TensorDictBase, after: TensorDictBase, carry: TensorDictBase) -> None:
        """Checks a step: its start, its result, and the start of the next step."""
        self.step += 1
        assert self.steps is not None  # set by begin
        self.steps = self.steps + 1
        self._check_flags(after, "")
        for group in self.groups_with_ends:
            self._check_flags(after.get(group.name), group.name)
            self._check_flags_stay(before, after, group)
        if self.groups_with_ends:
            self._check_episode_end(before, after)
        for group in self.team.groups.values():
            if group.mask_key is not None:
                self._check_mask(before, after, group)
            self._check_reward(after, group)
        self._check_values(after)
        self._check_end(before, after, carry)

    def finish(self) -> None:
        """Runs the checks that need all steps; call it after the last step."""
        self._check_time_limit()
        if (
            self.terminal_repeats_reset
            and all(self.terminal_repeats_reset)
            and self.observations_change
        ):
            self.findings.add(
                ("next", "observation"),
                "where an episode ends, it is the first observation of the next one",
                "the last observation of the ended episode",
                "read the observation before the environment is reset",
            )
        if not self.episodes and self.max_steps is None and not _has_own_time_limit(self.env):
            self.findings.add(
                "done",
                f"no episode ended in {self.step} steps, and no time limit is known",
                "episodes that end",
                "give the environment a time limit (max_steps, or TransformedEnv(env, "
                "StepCounter(max_steps=...))), or raise n_steps of check_marl_env for long "
                "episodes",
            )

    def _check_time_limit(self) -> None:
        counts = self.at_limit
        if not counts["terminated"] or counts["truncated"]:
            return
        found = (
            f"all {counts['terminated']} episodes that reached the time limit of "
            f"{self.max_steps} steps are terminated"
        )
        if self.ended_before:
            self.findings.hint(f"{found}; a time limit must be truncated.")
            return
        self.findings.add(
            "truncated",
            found,
            "truncated at a time limit, so that returns bootstrap",
            "set truncated there, and terminated only where the environment itself ends; "
            "if it does end there, pass a larger max_steps to check_marl_env",
        )

    def _add_where_broken(
        self, broken: Tensor, key: NestedKey, found: str, expected: str, fix: str
    ) -> None:
        """Adds a broken rule of this step if a bool tensor has a True entry."""
        self.findings.add_where_broken(broken, key, self.step, found, expected, fix)

    @property
    def groups_with_ends(self) -> list[GroupSpec]:
        """Groups in which each agent has done flags."""
        return [group for group in self.team.groups.values() if group.agent_done]

    # ------------------------------------------------------------------------------------ flags

    def _check_flags(self, td: TensorDictBase, group: str) -> None:
        done, terminated, truncated = (td.get(key) for key in ("done", "terminated", "truncated"))
        key = (group, "done") if group else "done"
        add = self._add_where_broken
        expected = "done = terminated | truncated, and never both"
        both = terminated & truncated
        add(both, key, "both terminated and truncated are True", expected, _HOW_TO_SET_FLAGS)
        for wrong, text in (
            (
                done & ~terminated & ~truncated,
                "done is True, but neither terminated nor truncated is",
            ),
            (
                ~done & (terminated | truncated),
                "done is False, but terminated or truncated is True",
            ),
        ):
            add(wrong, key, text, expected, f"set {_HOW_TO_SET_FLAGS}")

    def _check_flags_stay(
        self, before: TensorDictBase, after: TensorDictBase, group: GroupSpec
    ) -> None:
        revived = before.get(group.done_key) & ~after.get(group.done_key)
        expected = "True until the episode's reset"
        if group.respawns:
            self._check_first_steps(before, after, group, revived)
            expected = (
                "True until the reset, or until the agent comes back with all its flags False"
            )
        for flag in ("done", "terminated", "truncated"):
            key = (group.name, flag)
            cleared = before.get(key) & ~after.get(key)
            self._add_where_broken(
                cleared & ~revived if group.respawns else cleared,
                key,
                "it is False again for an agent that had ended",
                expected,
                "keep the flag of ended agents; if agents come back, set the environment's "
                "attribute respawns = True",
            )

    def _check_first_steps(
        self, before: TensorDictBase, after: TensorDictBase, group: GroupSpec, revived: Tensor
    ) -> None:
        """Checks that an agent's ``is_init``, if there is one, marks the beginning of each life."""
        key = group.key("is_init")
        is_init, mask_before = after.get(key, None), before.get(group.mask_key, None)
        if is_init is None or mask_before is None:
            return
        self._add_where_broken(
            revived & ~is_init,
            key,
            "it is False for an agent that comes back",
            "True up to its first step of the new life",
            "use torchrl_marl.envs.AgentInitTracker, from which memories restart",
        )
        self._add_where_broken(
            is_init & mask_before.unsqueeze(-1),
            key,
            "it is True for an agent that has acted in this life",
            "True up to an agent's first step of a life",
            "use torchrl_marl.envs.AgentInitTracker, or end the life first",
        )

    def _check_episode_end(self, before: TensorDictBase, after: TensorDictBase) -> None:
        if len(self.groups_with_ends) < len(self.team.groups):
            return
        done = torch.cat([after.get(group.done_key) for group in self.groups_with_ends], -2)
        terminated = torch.cat([after.get(g.terminated_key) for g in self.groups_with_ends], -2)
        root, add = after.get("done"), self._add_where_broken
        add(
            root & ~done.all(-2),
            "done",
            "the episode ends while an agent lives",
            "an end when all agents have ended, or the root's flag for all living agents",
            "do not end the episode at a death (done = all agents, not any); if the environment "
            "ends it, set the root's flag for every living agent",
        )
        if self.groups_with_ends[0].respawns:
            return  # agents may come back, so the environment ends the episode
        add(
            ~root & done.all(-2),
            "done",
            "all agents ended, but the episode continues",
            "True when all agents ended",
            "set done, and terminated if all agents terminated, else truncated",
        )
        add(
            root & terminated.all(-2) & ~after.get("terminated"),
            "terminated",
            "all agents terminated, but the episode is truncated",
            "terminated",
            "set the root's terminated if all agents terminated",
        )

    def _check_mask(self, before: TensorDictBase, after: TensorDictBase, group: GroupSpec) -> None:
        mask_before, mask = before.get(group.mask_key), after.get(group.mask_key)
        root, add, key = after.get("done"), self._add_where_broken, group.mask_key
        done, terminated = (
            self._flag_of_agents(after, group, f).expand(mask.shape) for f in ("done", "terminated")
        )
        add(
            mask & terminated,
            key,
            "it is True after the agent terminated",
            "False, because nothing follows",
            "set the mask of terminated agents to False in their last step",
        )
        add(
            mask & done & ~terminated & ~root.expand(mask.shape),
            key,
            "a truncated agent still acts",
            "False for ended agents until the reset",
            "return mask = alive and acting",
        )
        add(
            mask_before & ~terminated & ~mask & after.get("truncated").expand(mask.shape),
            key,
            "it is False for a living agent in a truncated episode",
            "True, because its return bootstraps from the last observation",
            "keep the mask of living agents True at a time limit",
        )

    def _flag_of_agents(self, td: TensorDictBase, group: GroupSpec, flag: str) -> Tensor:
        """Returns a flag ``[*B, N]`` per agent; if agents have none, the episode's ``[*B, 1]``."""
        return td.get(group.key(flag)).squeeze(-1) if group.agent_done else td.get(flag)

    # ----------------------------------------------------------------------------------- values

    def _check_reward(self, after: TensorDictBase, group: GroupSpec) -> None:
        reward = after.get(group.reward_key)
        self._add_where_broken(
            ~reward.isfinite(),
            group.reward_key,
            f"it is {reward[~reward.isfinite()][:1].tolist()}",
            "a finite number",
            "return 0 for dead and waiting agents, and look for a division by zero",
        )

    def _check_values(self, td: TensorDictBase) -> None:
        specs = dict(spec_leaves(self.env.full_observation_spec))
        observed = dict(leaves(td.select(*self.env.full_observation_spec.keys(), strict=False)))
        for path, value in observed.items():
            spec = specs.get(path)
            if spec is None or path[-1] in ("mask", "action_mask"):
                continue
            wrong = outside(value, spec)
            group = self.team.groups.get(path[0])
            if group is not None:
                wrong = wrong & self._acting_mask(td, group, path, value)
            self._add_where_broken(
                wrong,
                path if len(path) > 1 else path[0],
                f"it is {value[wrong][:1].tolist()}",
                f"finite, and inside {spec.__class__.__name__}",
                "return valid observations of living agents, and declare correct bounds",
            )
        for group in self.team.groups.values():
            if group.action_mask_key is not None:
                self._check_legal_actions(td, group)

    def _acting_mask(
        self, td: TensorDictBase, group: GroupSpec, path: tuple, value: Tensor
    ) -> Tensor:
        """Returns a mask that selects the values of acting agents; it has the shape of a leaf."""
        if group.mask_key is None:
            return torch.ones_like(value, dtype=torch.bool)
        acts = td.get(group.mask_key)
        acts = acts[..., path[1]] if isinstance(path[1], int) else acts
        return acts.reshape(*acts.shape, *[1] * (value.ndim - acts.ndim)).expand(value.shape)

    def _check_legal_actions(self, td: TensorDictBase, group: GroupSpec) -> None:
        running = ~td.get("done")  # [*B, 1]
        for path, legal in leaves(td.get(group.name), (group.name,)):
            if path[-1] != "action_mask":
                continue
            acts = self._acting_mask(td, group, path, legal)[..., 0]
            running_rows = running if acts.ndim == running.ndim else running.squeeze(-1)
            self._add_where_broken(
                acts & running_rows & ~legal.any(-1),
                (group.name, "action_mask"),
                "an agent that acts has no legal action",
                "at least one legal action for each agent with mask True",
                "make an action legal (such as a no-op), or set the mask to False",
            )

    # --------------------------------------------------------------------------- episodes' ends

    def _check_flags_cleared(self, td: TensorDictBase, fresh: Tensor) -> None:
        for group in (None, *self.groups_with_ends):
            key = "done" if group is None else group.done_key
            started = fresh if group is None else fresh.unsqueeze(-2)
            self._add_where_broken(
                td.get(key) & started,
                key,
                "it is True at the start of an episode",
                "False after a reset",
                "clear the flags of the envs that are reset",
            )

    def _check_end(
        self, before: TensorDictBase, after: TensorDictBase, carry: TensorDictBase
    ) -> None:
        done = after.get("done")
        self._check_flags_cleared(carry, done)
        self._check_values(carry)
        if self.max_steps is not None:
            assert self.steps is not None  # set by begin
            beyond_limit = self.steps > self.max_steps
            self._add_where_broken(
                beyond_limit,
                "truncated",
                f"an episode continues beyond the time limit of {self.max_steps} steps",
                "an end",
                "count the steps of each env, and truncate it",
            )
            reached = self.steps == self.max_steps
            self.ended_before |= bool((after.get("terminated") & ~reached).any())
            for flag in self.at_limit:
                self.at_limit[flag] += int((reached & after.get(flag)).sum())
        self.episodes += int(done.sum())
        self._compare_terminal_observations(before, after, carry, done)
        self.steps = torch.where(done, 0, self.steps)  # type: ignore[arg-type]

    def _compare_terminal_observations(
        self, before: TensorDictBase, after: TensorDictBase, carry: TensorDictBase, done: Tensor
    ) -> None:
        """Compares the terminal observations with the first observations of the next episodes."""
        observed = [td.select(*self.team.groups, strict=False) for td in (before, after, carry)]
        ended = done.squeeze(-1)
        equal, changed = True, False
        for path, last in leaves(observed[1]):
            if "observation" not in path:
                continue
            first, old = dict(leaves(observed[2])).get(path), dict(leaves(observed[0])).get(path)
            if bool(ended.any()):
                equal = equal and not differs(last[ended], first[ended])  # type: ignore[index]
            changed = changed or differs(last[~ended], old[~ended])  # type: ignore[index]
        self.observations_change = self.observations_change or changed
        if bool(ended.any()):
            self.terminal_repeats_reset.append(equal)


def _has_own_time_limit(env: EnvBase) -> bool:
    """Returns True if the environment reports that its simulator has a time limit."""
    return isinstance(getattr(base_of(env), "own_limit", None), int)


def full_specs(env: EnvBase) -> list[Composite]:
    """Returns the specs of a step's output: observations, rewards and flags."""
    return [env.full_observation_spec, env.full_reward_spec, env.full_done_spec]
