"""Server to which external simulators connect, and its clients."""

from __future__ import annotations

import hmac
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Protocol, cast

import numpy as np
from tensordict import TensorDictBase
from torchrl.envs.utils import ExplorationType

from torchrl_marl.apps.external.client_slots import ClientSlots, Fragments
from torchrl_marl.apps.external.declaration import Declared
from torchrl_marl.apps.external.graph_acting import Acting, Leaves
from torchrl_marl.apps.external.wire import PROTOCOL, InvalidMessageError, encode_message
from torchrl_marl.errors import ConfigError, quoted

__all__ = ["ActionServer", "Client", "ClientConnection"]


class ClientConnection(Protocol):
    """Protocol that a client's connection implements."""

    def send(self, data: bytes) -> None:
        """Sends a message."""

    def refuse(self, why: str) -> None:
        """Sends the reason, and closes the connection."""


class Client:
    """A connected simulator: its slot, its last step, and the last answer, kept for resending.

    Args:
        name (str): name that the client chose.
        slot (int): index of the client in all arrays.

    Attributes:
        episode, t (int): numbers of episode and step in the last message.
        busy (bool): whether the last message has not been answered yet.
        over (bool): whether the episode has ended.
        recorded (bool): whether the last step has been recorded; its outcome is then still missing.
        answer (bytes): answer to the last message.
        last_message (float): time of the last message in seconds, by the server's clock.
        connection (ClientConnection, optional): current connection; None while
            disconnected.
    """

    __slots__ = (
        "answer", "busy", "connection", "episode", "last", "last_message", "name", "over",
        "recorded", "slot", "t",
    )  # fmt: skip

    def __init__(self, name: str, slot: int, connection: ClientConnection, now: float) -> None:
        self.name, self.slot, self.last_message = name, slot, now
        self.connection: ClientConnection | None = connection
        self.episode, self.t, self.answer = 0, -1, b""
        self.busy = self.recorded = self.last = False
        self.over = True

    def describe(self) -> str:
        """Returns the client's name and its last message, as text."""
        where = f"step {self.t} of episode {self.episode}" if self.t >= 0 else "hello"
        return f"{self.name!r} (last sent: {where}{'' if self.connection else '; not connected'})"


Policy = Callable[[TensorDictBase], TensorDictBase]


class ActionServer:
    """Server that answers clients with a policy's actions, and records their steps for a learner.

    All its methods run in the thread of its event loop.

    Args:
        declared (Declared, optional): the agents' description; None: the first client declares it.
        policy (callable or Acting, optional): TensorDict ``[n]`` in, TensorDict out; clients wait
            until a policy is set.

    Keyword Args:
        token (str): token that clients must know; empty: no token is needed.
        max_clients (int): maximum number of clients.
        grace (float): seconds for which a disconnected client's slot is kept.
        idle_timeout (float): seconds of silence after which a client is disconnected.
        max_message_bytes (int): maximum bytes of a message.
        max_number (float): largest absolute value of an observation, reward or state.
        clock (callable): returns the time in seconds.

    Attributes:
        clients (dict of str to Client): clients by name.
        counts (dict of str to int): numbers of ``steps``, ``batches``, ``reconnects``,
            ``duplicates``, ``late`` messages, ``truncated`` episodes and ``refused`` messages.
        version (int): version of the policy, which every answer contains.
    """

    def __init__(
        self,
        declared: Declared | None = None,
        policy: Policy | Acting | None = None,
        *,
        token: str = "",
        max_clients: int = 256,
        grace: float = 10.0,
        idle_timeout: float = 300.0,
        max_message_bytes: int = 1 << 20,
        max_number: float = 1e6,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.token, self.max_clients = token, max_clients
        self.grace, self.idle_timeout, self.clock = grace, idle_timeout, clock
        self.max_message_bytes, self.max_number = max_message_bytes, max_number
        self.policy, self.version = policy, 0
        self.exploration_type = ExplorationType.RANDOM
        self.recording: Fragments | None = None
        self.clients: dict[str, Client] = {}
        names = ("steps", "batches", "reconnects", "duplicates", "late", "truncated", "refused")
        self.counts = dict.fromkeys(names, 0)
        self.schedule: Callable[[Callable[[], None]], Any] = lambda flush: flush()
        self.declared: Declared | None = None
        self._hidden_sizes: dict[str, int] | None = None
        self._received_clients: list[Client] = []
        self._waiting_clients: deque[Client] = deque()
        self._flush_is_scheduled = False
        self._free_slots = list(range(max_clients))[::-1]
        if declared is not None:
            self._allocate_slots(declared)

    @property
    def policy(self) -> Acting | None:
        """The policy that answers the clients."""
        return self._acting

    @policy.setter
    def policy(self, policy: Policy | Acting | None) -> None:
        known = policy is None or isinstance(policy, Acting)
        self._acting = cast("Acting | None", policy) if known else Acting(cast(Policy, policy))

    def _allocate_slots(self, declared: Declared) -> None:
        self.declared, self.slots = (
            declared,
            ClientSlots(declared, self.max_clients, self.max_number),
        )
        self.slots.track_hidden(self._hidden_sizes)

    def track_hidden(self, sizes: Mapping[str, int]) -> None:
        """Starts to keep hidden states, of given sizes by group, and to provide ``is_init``."""
        self._hidden_sizes = dict(sizes)
        if self.declared is not None:
            self.slots.track_hidden(sizes)

    def example(self) -> Leaves:
        """Returns example inputs of the policy for one client; all values are zero."""
        assert self.declared is not None
        slots = ClientSlots(self.declared, 1)
        slots.track_hidden(self._hidden_sizes)
        return slots.inputs(np.zeros(1, int))

    # --------------------------------------------------------------------------------- clients

    def hello(
        self, message: Mapping[str, Any], nonce: bytes, connection: ClientConnection
    ) -> Client:
        """Registers a client, or reconnects a known one.

        Raises:
            InvalidMessageError: the client has another protocol version, a wrong token or other
                agents, or there are too many clients.
        """
        if message.get("type") != "hello":
            raise InvalidMessageError(
                f"the first message is {quoted(message.get('type'))}, expected 'hello'."
            )
        proof = message.get("proof")
        mine = hmac.new(self.token.encode(), nonce, "sha256").digest()
        given = proof if isinstance(proof, bytes) else b""
        if self.token and not hmac.compare_digest(mine, given):
            raise InvalidMessageError(
                "the proof of the token is wrong or missing; give the server's token."
            )
        if message.get("protocol") != PROTOCOL:
            found = quoted(message.get("protocol"))
            raise InvalidMessageError(
                f"the protocol is {found}, expected {PROTOCOL}; use its client."
            )
        name = message.get("client")
        if not isinstance(name, str) or not 0 < len(name) <= 200:
            raise InvalidMessageError(f"client is {quoted(name)}, expected a unique name.")
        self._check_agents(message)
        client = self.clients.get(name)
        if client is None:
            return self._add_client(name, connection)
        self.counts["reconnects"] += 1
        before, client.connection, client.last_message = client.connection, connection, self.clock()
        if before is not None:
            before.refuse(f"client {name!r} has connected again, on another connection.")
        return client

    def _check_agents(self, message: Mapping[str, Any]) -> None:
        try:
            declared = Declared.read(message.get("agents"), message.get("state_size"))
            if self.declared is not None:
                self.declared.check_same(declared)
            else:
                declared.check_size(self.max_message_bytes)
                declared.declaration("client", 1)
                self._allocate_slots(declared)
        except ConfigError as error:
            raise InvalidMessageError(str(error)) from None

    def _add_client(self, name: str, connection: ClientConnection) -> Client:
        if not self._free_slots:
            raise InvalidMessageError(
                f"{self.max_clients} clients are connected, expected no more; try again later, or "
                "raise max_clients."
            )
        client = self.clients[name] = Client(name, self._free_slots.pop(), connection, self.clock())
        self.slots.begin(client.slot)
        return client

    def lost(self, client: Client, connection: ClientConnection) -> None:
        """Records that a connection is lost; the client may reconnect."""
        if client.connection is connection:
            client.connection, client.last_message = None, self.clock()

    def dismiss(self, client: Client) -> None:
        """Truncates a client's running episode and frees its slot."""
        if self.clients.pop(client.name, None) is not client:
            return
        self._truncate_episode(client)
        for waiting in (self._received_clients, self._waiting_clients):
            if client in waiting:
                waiting.remove(client)
        if self.recording is not None:
            self.recording.leave(client.slot)
        self._free_slots.append(client.slot)
        self.resume_waiting()

    def _truncate_episode(self, client: Client) -> None:
        """Truncates a client's unfinished episode at the last observation."""
        if not client.over:
            self.counts["truncated"] += 1
            client.over = True
        if client.recorded and self.recording is not None:
            self.recording.cut(client.slot)
        client.recorded = False

    def reap(self) -> None:
        """Removes clients that have been disconnected for too long.

        Connected clients are removed if they have not sent an expected message for too long.
        """
        now = self.clock()
        for client in list(self.clients.values()):
            silent = now - client.last_message
            if client.connection is None and silent > self.grace:
                self.dismiss(client)
            elif client.connection is not None and not client.busy and silent > self.idle_timeout:
                connection = client.connection
                self.dismiss(client)
                connection.refuse(f"no message for {self.idle_timeout:g} s (idle_timeout).")

    # -------------------------------------------------------------------------------- messages

    def receive(self, client: Client, message: Mapping[str, Any]) -> None:
        """Handles a message from a client.

        Raises:
            InvalidMessageError: the message's type is not ``step`` or ``end``, or its step is out
                of order.
        """
        kind, episode, t = message.get("type"), message.get("episode"), message.get("t")
        if kind != "step" and kind != "end":
            raise InvalidMessageError(f"type is {quoted(kind)}, expected 'step' or 'end'.")
        if type(episode) is not int or type(t) is not int or t < 0 or not 0 <= episode < 2**63:
            raise InvalidMessageError(
                f"episode is {quoted(episode)} and t {quoted(t)}, expected whole numbers from 0."
            )
        client.last_message = self.clock()
        at = client.episode, client.t
        if (episode, t) <= at and client.t >= 0:
            self._handle_repeated(client, (episode, t) == at)
            return
        self._start_step(client, episode, t, kind)
        self.slots.read(client.slot, message, kind == "end")
        client.episode, client.t, client.last = episode, t, kind == "end"
        client.busy, client.answer = True, b""
        self._received_clients.append(client)
        self._schedule_flush()

    def _handle_repeated(self, client: Client, same: bool) -> None:
        """Answers a repeated message with the same answer; ignores messages from earlier steps."""
        self.counts["duplicates" if same else "late"] += 1
        if same and client.answer and client.connection is not None:
            client.connection.send(client.answer)

    def _start_step(self, client: Client, episode: int, t: int, kind: str) -> None:
        """Checks that a step follows the client's last step; begins a new episode if needed."""
        if client.busy:
            raise InvalidMessageError(
                f"step {t} of episode {episode} was sent before the last one was answered, "
                "expected one message at a time."
            )
        if episode > client.episode or client.t < 0:
            # A new client may be in the middle of an episode.
            if client.t >= 0 and (t or kind == "end"):
                raise InvalidMessageError(
                    f"{kind} {t} is the first message of episode {episode}, expected a step with t "
                    "0."
                )
            self._truncate_episode(client)
            self.slots.begin(client.slot)
            client.over = False
            if self.recording is not None:
                self.recording.begin(client.slot, t == 0)
        elif t != client.t + 1:
            raise InvalidMessageError(
                f"t is {t}, expected {client.t + 1}, the next step of episode {episode}."
            )
        elif client.over and (kind == "step" or client.last):
            raise InvalidMessageError(
                f"episode {episode} has ended, expected the next one's first step."
            )

    def _schedule_flush(self) -> None:
        if not self._flush_is_scheduled:
            self._flush_is_scheduled = True
            self.schedule(self.flush)

    # --------------------------------------------------------------------------------- a batch

    def flush(self) -> None:
        """Answers the messages received since the last call, except for clients that must wait."""
        self._flush_is_scheduled = False
        received, self._received_clients = self._received_clients, []
        if received:
            self._end_steps(received)
        acting = self._clients_to_answer()
        if acting:
            self._answer_with_actions(acting)

    def _end_steps(self, received: list[Client]) -> None:
        """Completes the clients' last steps; clients in a running episode then wait for actions."""
        slots = np.array([client.slot for client in received])
        faults = self.slots.faults(slots)
        if faults:
            for client in [one for one in received if one.slot in faults]:
                received.remove(client)
                self.refuse(client, faults[client.slot])
            if not received:
                return
            slots = np.array([client.slot for client in received])
        outcome = self.slots.outcome(slots)
        if self.recording is not None:
            kept = np.array([client.recorded for client in received])
            if kept.all():
                self.recording.close(slots, outcome)
            elif kept.any():
                self.recording.close(slots[kept], {k: x[kept] for k, x in outcome.items()})
        for client, ended in zip(received, outcome["done",][:, 0].tolist()):
            client.recorded = False
            if ended or client.last:
                client.over = True
                self._send_answer(client, {})
            else:
                self._waiting_clients.append(client)

    def _clients_to_answer(self) -> list[Client]:
        """Returns the waiting clients that may begin a step now."""
        if self.policy is None:
            return []
        if self.recording is None:
            acting = list(self._waiting_clients)
            self._waiting_clients.clear()
            return acting
        acting, waiting = [], deque[Client]()
        for client in self._waiting_clients:
            (acting if self.recording.may_begin_step(client.slot) else waiting).append(client)
        self._waiting_clients = waiting
        return acting

    def resume_waiting(self) -> None:
        """Answers the clients that were waiting for the next batch to begin."""
        if self._waiting_clients:
            self._schedule_flush()

    def _answer_with_actions(self, acting: list[Client]) -> None:
        slots = np.array([client.slot for client in acting])
        leaves = self.slots.inputs(slots)
        assert self._acting is not None
        acted = self._acting.act(leaves, self.exploration_type)
        self.slots.store_hidden(slots, acted)
        self.counts["batches"] += 1
        self.counts["steps"] += len(acting)
        if self.recording is not None:
            written = {key: rows for key, rows in acted.items() if key[0] != "next"}
            self.recording.open(slots, {**leaves, **written}, self.version)
        rows = [self._actions_by_client(name, acted, leaves) for name in self.slots.groups]
        for i, client in enumerate(acting):
            client.recorded = self.recording is not None
            actions = (
                rows[0][i] if len(rows) == 1 else {k: x for r in rows for k, x in r[i].items()}
            )
            self._send_answer(client, actions)

    def _actions_by_client(self, name: str, acted: Leaves, leaves: Leaves) -> list[dict[str, Any]]:
        """Returns a group's actions for each client, without agents that do not act now."""
        actions, mask = acted[name, "action"].tolist(), leaves[name, "mask"]
        names = self.slots.groups[name].names
        if mask.all():
            return [dict(zip(names, own)) for own in actions]
        return [
            {agent: action for agent, action, acts in zip(names, own, alive) if acts}
            for own, alive in zip(actions, mask.tolist())
        ]

    def _send_answer(self, client: Client, actions: dict[str, Any]) -> None:
        message = {"type": "actions", "episode": client.episode, "t": client.t}
        client.answer = encode_message({**message, "actions": actions, "version": self.version})
        client.busy = False
        if client.connection is not None:
            client.connection.send(client.answer)

    def refuse(self, client: Client, why: str) -> None:
        """Sends a client the reason why its message is refused, and disconnects it."""
        self.counts["refused"] += 1
        connection = client.connection
        self.dismiss(client)
        if connection is not None:
            connection.refuse(why)
