"""When an agent begins: ``is_init`` of each agent.

Shapes: E envs, N agents of a group.
"""

from __future__ import annotations

from functools import cached_property

import torch
from tensordict import TensorDictBase
from torch import Tensor
from torchrl.data import Categorical, Composite
from torchrl.envs import Transform

from torchrl_marl.specs import GroupSpec, TeamSpec

__all__ = ["AgentInitTracker"]


class AgentInitTracker(Transform):
    """Tells each agent's first step, by which recurrent policies begin anew agent by agent.

    ``(group, "is_init")`` is True from the reset of an agent's episode until it has acted: in its
    first own step, and before, while it waits to be born. TorchRL's ``InitTracker`` tells the
    same of the env's episode, at the root. Groups may be dense, padded or stacked lazily; in a
    group without masks all agents begin with the episode.

    Args:
        init_key (str): name of the leaf.

    Shapes:
        - ``(group, "is_init")``: ``[E, N, 1]``, as the agents' done flags

    Reduces to: the root's ``is_init``, in groups without masks.

    Examples:
        >>> from torchrl.envs import TransformedEnv
        >>> from torchrl_marl.envs.toy import Arena
        >>> env = TransformedEnv(Arena(1, n_agents=2, late_spawn=2), AgentInitTracker())
        >>> env.rollout(4)["agents", "is_init"][0, ..., 0].int().T
        tensor([[1, 0, 0, 0],
                [1, 1, 1, 0]], dtype=torch.int32)
    """

    def __init__(self, init_key: str = "is_init") -> None:
        super().__init__()
        self.init_key = init_key

    @cached_property
    def _groups(self) -> dict[str, GroupSpec]:
        return TeamSpec.from_env(self.parent).groups

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        for name, group in self._groups.items():
            init = tensordict.get((name, self.init_key))
            if group.mask_key is None:
                init = torch.zeros_like(init)
            else:
                init = init & ~tensordict.get(group.mask_key).unsqueeze(-1)
            next_tensordict.get(name).set(self.init_key, init)
        return next_tensordict

    def _reset(
        self, tensordict: TensorDictBase, tensordict_reset: TensorDictBase
    ) -> TensorDictBase:
        for name, group in self._groups.items():
            before = tensordict.get((name, self.init_key), None)
            init = self._fresh(tensordict, group.n_agents)
            # Agents of running envs may still wait.
            init = init if before is None else init | before
            tensordict_reset.get(name).set(self.init_key, init)
        return tensordict_reset

    def _fresh(self, tensordict: TensorDictBase, n_agents: int) -> Tensor:
        """Whose episode starts, ``[E, N, 1]``."""
        shape = (*self.parent.batch_size, n_agents, 1)
        reset = tensordict.get("_reset", None)
        if reset is None:
            return torch.ones(shape, dtype=torch.bool, device=self.parent.device)
        return reset.view(*self.parent.batch_size, 1, 1).expand(shape).clone()

    def transform_observation_spec(self, observation_spec: Composite) -> Composite:
        """With ``(group, "is_init")``."""
        for name, group in self._groups.items():
            shape = (*observation_spec.shape, group.n_agents, 1)
            observation_spec[name, self.init_key] = Categorical(
                2, shape=shape, dtype=torch.bool, device=observation_spec.device
            )
        return observation_spec
