"""Sub-collectors: different policies in different environments of one batch.

Shapes: E environments, T steps, K policies.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

import torch
from tensordict import NestedKey, TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor, nn

from torchrl_marl.errors import SpecError
from torchrl_marl.modules.actors import GroupActor
from torchrl_marl.modules.players import act_by_row, stored, tensors_of

__all__ = ["SplitPolicy", "parts", "split"]

_WHO = ("collector", "policy")


class SplitPolicy(TensorDictModuleBase):
    """Several policies, each of which acts in some of the environments; from :func:`split`.

    Policies with the same structure (actors of one group with networks of equal shapes) act in one
    batched forward, with their current parameters. Other policies act in sequence.

    Args:
        policies (mapping): name -> policy.
        sizes (sequence of int, optional): number of environments of each policy, in order.
        key (NestedKey, optional): entry of the environment with the index of the policy that acts.

    Attributes:
        names (list of str): names of the policies, in order.
        batched (bool): whether the policies act in one batched forward.

    Shapes:
        - the entry at ``key``: integers, ``[E]`` or ``[E, 1]``

    Keys:
        - reads: the policies' keys, and ``key``
        - writes: the policies' keys, and ``("collector", "policy")``, the index of the acting
          policy, ``[E]``
    """

    def __init__(
        self,
        policies: Mapping[str, TensorDictModuleBase],
        sizes: Sequence[int] | None = None,
        key: NestedKey | None = None,
    ) -> None:
        super().__init__()
        self.names, self.sizes, self.key = list(policies), sizes, key
        self.policies = nn.ModuleList(policies.values())
        first, *others = (policy.out_keys for policy in policies.values())
        self.in_keys = list(dict.fromkeys(k for p in policies.values() for k in p.in_keys))
        if key is not None:
            self.in_keys.append(key)
        written = [k for k in first if all(k in keys for keys in others)]
        self.written = [k for k in written if k[-1] in ("action", "action_log_prob", "hidden")]
        self.out_keys = [*self.written, _WHO]
        self.batched = _are_alike(list(policies.values()))
        if sizes is not None:
            chosen = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
            self.register_buffer("_chosen", chosen, persistent=False)
        self._block = 32 if sizes is None else min(min(sizes), 64)

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Acts in every environment with its policy."""
        chosen = self._acting(tensordict)
        if self.batched:
            actors = [cast(GroupActor, policy) for policy in self.policies]
            act_by_row(actors[0], stored(actors), chosen, tensordict, block=self._block)
        elif self.sizes is not None:
            self._act_in_slices(tensordict)
        else:
            self._act_everywhere(tensordict, chosen)
        return tensordict.set(_WHO, chosen)

    def _acting(self, tensordict: TensorDictBase) -> Tensor:
        if self.key is None:
            if len(self._chosen) != tensordict.shape[0]:
                raise SpecError(
                    f"policies are split over {len(self._chosen)} environments "
                    f"({list(self.sizes or ())}), but there are {tensordict.shape[0]}; give sizes "
                    "that add up to it."
                )
            return self._chosen
        chosen = tensordict.get(self.key, None)
        if chosen is None:
            raise SpecError(f"the environment gives no {self.key!r}, by which policies are split.")
        return chosen.reshape(tensordict.shape[0]).long()

    def _act_in_slices(self, tensordict: TensorDictBase) -> None:
        found = [
            policy(part) for policy, part in zip(self.policies, tensordict.split(self.sizes, 0))
        ]
        for key in self.written:
            tensordict.set(key, torch.cat([part.get(key) for part in found]))

    def _act_everywhere(self, tensordict: TensorDictBase, chosen: Tensor) -> None:
        """Runs every policy in every environment and selects the chosen one; no device transfer."""
        found = [policy(tensordict.copy()) for policy in self.policies]
        for key in self.written:
            rows = torch.stack([one.get(key) for one in found])
            tensordict.set(key, rows[chosen, torch.arange(len(chosen), device=chosen.device)])


def split(
    policies: Mapping[str, TensorDictModuleBase],
    sizes: Sequence[int] | None = None,
    *,
    key: NestedKey | None = None,
) -> SplitPolicy:
    """Splits the environments of a batch among policies, as sub-collectors of one collector.

    Args:
        policies (mapping): name -> policy, such as a trained actor and frozen ones.
        sizes (sequence of int, optional): number of environments of each policy, in order.
        key (NestedKey, optional): used instead of ``sizes``: entry of the environment with the
            index of the policy that acts, such as the index of a sub-task.

    Raises:
        ValueError: fewer than two policies, both or neither of ``sizes`` and ``key``, or sizes
            that do not fit the policies.

    Examples:
        >>> from torchrl_marl import TeamSpec
        >>> from torchrl_marl.collectors import RolloutCollector
        >>> from torchrl_marl.contrib import parts, split
        >>> from torchrl_marl.envs import VmasEnv
        >>> from torchrl_marl.modules import make_actor
        >>> env = VmasEnv("balance", num_envs=6, max_steps=100, seed=0)
        >>> group = TeamSpec.from_env(env).groups["agents"]
        >>> policy = split({"main": make_actor(group), "old": make_actor(group)}, sizes=[4, 2])
        >>> batch = RolloutCollector(env, policy, frames_per_batch=60).next()
        >>> {name: rows.shape for name, rows in parts(batch, policy).items()}
        {'main': torch.Size([4, 10]), 'old': torch.Size([2, 10])}
    """
    if len(policies) < 2 or (sizes is None) == (key is None):
        raise ValueError(
            f"split: {len(policies)} policies, sizes={sizes} and key={key}; expected two policies "
            "or more, and either sizes or key."
        )
    if sizes is not None and (len(sizes) != len(policies) or min(sizes) < 1):
        raise ValueError(
            f"split: sizes is {list(sizes)}, expected {len(policies)} numbers of environments, "
            "1 or more, one for each policy."
        )
    return SplitPolicy(policies, sizes, key)


def parts(batch: TensorDictBase, policy: SplitPolicy) -> dict[str, TensorDictBase]:
    """Returns the batch of each policy.

    Args:
        batch (TensorDictBase): batch ``[E, T]`` that a collector collected with the policy.
        policy (SplitPolicy): policy from :func:`split` with ``sizes``.

    Raises:
        ValueError: a policy that is split by an entry, which may change between steps; choose
            rows by ``batch["collector", "policy"]``.
    """
    if policy.sizes is None:
        raise ValueError(
            "parts: policies are split by an entry of the environment, which may change between "
            'steps; take batch[batch["collector", "policy"] == i].'
        )
    return dict(zip(policy.names, batch.split(list(policy.sizes), 0)))


def _are_alike(policies: Sequence[nn.Module]) -> bool:
    """Returns whether one batched forward can run all policies."""
    if not all(isinstance(policy, GroupActor) for policy in policies):
        return False
    actors = [cast(GroupActor, policy) for policy in policies]
    shapes = [{k: x.shape for k, x in tensors_of(actor).items()} for actor in actors]
    same = all(a.group == actors[0].group for a in actors)
    keys = all(a.in_keys == actors[0].in_keys for a in actors)
    return same and keys and all(own == shapes[0] for own in shapes)
