"""OpenSpiel games, turn-based or simultaneous, with a step that replaces TorchRL's.

Shapes: E envs, N players of a group, A actions.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torchrl.data import Categorical, OneHot, Unbounded

from torchrl_marl.envs.agents.declaration import Declaration
from torchrl_marl.envs.agents.declared_env import AutoResetEnv, without_rewards
from torchrl_marl.envs.scene import FinalFrames
from torchrl_marl.errors import ConfigError, SpecError
from torchrl_marl.specs import AgentSpec

if TYPE_CHECKING:
    from torchrl.envs import OpenSpielWrapper

__all__ = ["OpenSpielGames"]


class OpenSpielGames(FinalFrames, AutoResetEnv):
    """OpenSpiel game with batch size ``[1]``, which replaces TorchRL's wrapper.

    The mask is True for the player that moves next; in a simultaneous game, it is True for all
    players that have a choice. The action mask holds the legal actions. A player's reward for a
    step is the change of its return. Chance nodes are sampled as in TorchRL's wrapper. The
    observation is OpenSpiel's flat observation tensor, or the information state tensor in games
    without an observation tensor.

    Args:
        wrapper (OpenSpielWrapper): wrapper from which the game, the groups, the type of actions
            and the chance sampler are taken.

    Shapes:
        - ``(group, "observation")``: ``[1, N, O]``; ``(group, "action_mask")``: ``[1, N, A]``

    Raises:
        ConfigError: the game has neither an observation tensor nor an information state tensor.
        SpecError: an action is illegal.
    """

    _state: Any

    def __init__(self, wrapper: OpenSpielWrapper) -> None:
        game = wrapper._get_game()
        n_actions, kind = game.num_distinct_actions(), game.get_type()
        if not (kind.provides_observation_tensor or kind.provides_information_state_tensor):
            raise ConfigError(
                f"OpenSpiel {kind.short_name} gives its players no tensor to observe; use another "
                "game, or write its observations as a MarlEnv (docs/environments/own.md)."
            )
        shape = (
            game.observation_tensor_shape()
            if kind.provides_observation_tensor
            else game.information_state_tensor_shape()
        )
        n_features = math.prod(shape)
        action = Categorical(n_actions) if wrapper.categorical_actions else OneHot(n_actions)
        kinds: dict[str, tuple[AgentSpec, ...]] = {}
        for group, names in wrapper.group_map.items():
            observation_spec, agent_names = Unbounded((n_features,)), tuple(names)
            spec = AgentSpec(
                group,
                len(agent_names),
                observation_spec,
                action,
                action_mask=True,
                agent_names=agent_names,
            )
            kinds[group] = (spec,)
        declaration = Declaration(f"OpenSpiel {kind.short_name}", 1, kinds, in_turns=True)
        super().__init__(declaration, device=wrapper.device or "cpu")
        self._game, self._wrapper, self._state = game, wrapper, None
        self._has_observation_tensor = kind.provides_observation_tensor
        self._one_hot = not wrapper.categorical_actions
        self._player_indices = dict(wrapper.agent_names_to_indices_map)

    def _set_seed(self, seed: int | None) -> None:
        self._wrapper._set_seed(seed)

    def _start(self, fresh: Tensor | None) -> dict[str, Any]:
        self._state = self._play_chance_nodes(self._game.new_initial_state())
        self._returns = self._state.returns()
        return self._read_outputs()

    def _play(self, actions: dict[str, dict[str, Any]]) -> tuple[dict[str, Any], dict[str, Any]]:
        state, choices = self._state, self._choices(actions)
        if state.is_simultaneous_node():
            state.apply_actions(
                [self._checked_action(player, choices) for player in sorted(choices)]
            )
        else:
            state.apply_action(self._checked_action(state.current_player(), choices))
        self._play_chance_nodes(state)
        before, self._returns = self._returns, state.returns()
        after = self._read_outputs()
        rewards = {p: self._returns[p] - before[p] for p in self._player_indices.values()}
        for name, names in self.group_map.items():
            rows = [rewards[self._player_indices[agent]] for agent in names]
            after[name]["reward"] = self._tensor(rows).view(1, -1, 1)
        self._keep_frames()
        if state.is_terminal():
            return after, self._start(None)
        return after, without_rewards(after, self.team.groups)

    def _draw(self, index: int) -> str:
        return str(self._state)

    def _play_chance_nodes(self, state: Any) -> Any:
        """Makes chance moves until a player must move or the game is over; returns the state."""
        while state.is_chance_node():
            outcomes, probabilities = zip(*state.chance_outcomes())
            state.apply_action(self._wrapper._chance_sampler(list(outcomes), list(probabilities)))
        return state

    def _choices(self, actions: dict[str, dict[str, Any]]) -> dict[int, int]:
        """Returns the action that each player chose, by index of the player."""
        choices: dict[int, int] = {}
        for name, names in self.group_map.items():
            chosen = actions[name]["action"][0]
            chosen = chosen.int().argmax(-1) if self._one_hot else chosen
            choices |= {self._player_indices[a]: c for a, c in zip(names, chosen.tolist())}
        return choices

    def _checked_action(self, player: int, choices: dict[int, int]) -> int:
        """Returns a player's action; OpenSpiel requires 0 for a player without a choice."""
        legal = self._state.legal_actions(player)
        if not legal:
            return 0
        if choices[player] not in legal:
            raise SpecError(
                f"{self._declaration.owner}: the action of player {player} is {choices[player]}, "
                f"expected one of {legal}; use (group, 'action_mask') in the policy."
            )
        return choices[player]

    def _read_outputs(self) -> dict[str, Any]:
        """Returns the observations, masks and flags of the current state."""
        over = torch.tensor([[self._state.is_terminal()]], device=self.device)
        false = torch.zeros_like(over)
        output: dict[str, Any] = {"done": over, "terminated": over.clone(), "truncated": false}
        for name, names in self.group_map.items():
            players = [self._player_indices[agent] for agent in names]
            legal = torch.zeros(1, len(names), self._game.num_distinct_actions(), dtype=torch.bool)
            for i, player in enumerate(players):
                legal[0, i, self._legal_actions(player)] = True
            ended = over.unsqueeze(1).expand(1, len(names), 1)
            output[name] = {
                "observation": self._tensor([self._observation(p) for p in players])[None],
                "action_mask": legal.to(self.device),
                "mask": legal.any(-1).to(self.device),
                "done": ended.clone(),
                "terminated": ended.clone(),
                "truncated": torch.zeros_like(ended),
            }
        return output

    def _legal_actions(self, player: int) -> list[int]:
        """Returns a player's legal actions; an empty list if the player does not move next."""
        state = self._state
        moves = state.is_simultaneous_node() or state.current_player() == player
        return state.legal_actions(player) if moves and not state.is_terminal() else []

    def _observation(self, player: int) -> list[float]:
        if self._has_observation_tensor:
            return self._state.observation_tensor(player)
        return self._state.information_state_tensor(player)

    def _tensor(self, values: Any) -> Tensor:
        return torch.tensor(values, dtype=torch.float32, device=self.device)
