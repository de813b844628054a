"""The server of external simulators, and its clients."""

from __future__ import annotations

import hmac
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Protocol, cast

import numpy as np
from tensordict import TensorDictBase
from torchrl.envs.utils import ExplorationType

from torchrl_marl.apps.external.client_slots import Fragments, Seats
from torchrl_marl.apps.external.declaration import Declared
from torchrl_marl.apps.external.graph_acting import Acting, Leaves
from torchrl_marl.apps.external.wire import PROTOCOL, Refused, framed
from torchrl_marl.errors import ConfigError, quoted

__all__ = ["ActionServer", "Client", "Line"]


class Line(Protocol):
    """Where a client is connected."""

    def send(self, data: bytes) -> None:
        """Sends a message."""

    def refuse(self, why: str) -> None:
        """Says why, and closes."""


class Client:
    """A simulator: where it sits, what it sent last, and the answer that it may ask for again.

    Args:
        name (str): which it gave itself.
        seat (int): its place in all arrays.

    Attributes:
        episode, t (int): of its last message; that is what tells its steps apart.
        busy (bool): the message is not answered yet.
        over (bool): the episode has ended.
        recorded (bool): its last step is one that is recorded, and open.
        answer (bytes): to the last message.
        heard (float): when, by the server's clock.
        line (Line, optional): where it is connected; None while it is away.
    """

    __slots__ = (
        "answer", "busy", "episode", "heard", "last", "line", "name", "over", "recorded", "seat",
        "t",
    )  # fmt: skip

    def __init__(self, name: str, seat: int, line: Line, now: float) -> None:
        self.name, self.seat, self.heard = name, seat, now
        self.line: Line | None = line
        self.episode, self.t, self.answer = 0, -1, b""
        self.busy = self.recorded = self.last = False
        self.over = True

    def say(self) -> str:
        """Returns who it is and what it last sent."""
        where = f"step {self.t} of episode {self.episode}" if self.t >= 0 else "hello"
        return f"{self.name!r} (last sent: {where}{'' if self.line else '; not connected'})"


Policy = Callable[[TensorDictBase], TensorDictBase]


class ActionServer:
    """Acts for simulators that are clients, and lets somebody who learns record their steps.

    All that it does happens in the thread of its event loop.

    Args:
        declared (Declared, optional): the agents; those of the first client, if None.
        policy (callable or Acting, optional): TensorDict ``[n]`` in, TensorDict out; nobody is
            answered before there is one.

    Keyword Args:
        token (str): that clients prove to have; none is needed where it is empty.
        max_clients (int): how many may be there.
        grace (float): seconds for which an absent client's place is kept.
        idle_timeout (float): seconds of silence after which a client is left.
        max_message_bytes (int): of a message; what agents see and do in a step has no more.
        max_number (float): that an agent may see or earn, either way.
        clock (callable): the time in seconds.

    Attributes:
        clients (dict of str to Client): by name.
        counts (dict of str to int): of ``steps``, ``batches``, ``reconnects``, ``duplicates``,
            ``late``, ``truncated`` episodes and ``refused`` messages.
        version (int): of the policy; every answer says it.
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
        self._remembered: dict[str, int] | None = None
        self._heard: list[Client] = []
        self._asking: deque[Client] = deque()
        self._scheduled = False
        self._free = list(range(max_clients))[::-1]
        if declared is not None:
            self._declare(declared)

    @property
    def policy(self) -> Acting | None:
        """Who acts."""
        return self._acting

    @policy.setter
    def policy(self, policy: Policy | Acting | None) -> None:
        known = policy is None or isinstance(policy, Acting)
        self._acting = cast("Acting | None", policy) if known else Acting(cast(Policy, policy))

    def _declare(self, declared: Declared) -> None:
        self.declared, self.seats = declared, Seats(declared, self.max_clients, self.max_number)
        self.seats.carry_memory(self._remembered)

    def carry_memory(self, sizes: Mapping[str, int]) -> None:
        """Lets actors remember, group -> the numbers of each agent, and know where they begin."""
        self._remembered = dict(sizes)
        if self.declared is not None:
            self.seats.carry_memory(sizes)

    def example(self) -> Leaves:
        """Returns what a policy reads of one client that has said nothing yet."""
        assert self.declared is not None
        seats = Seats(self.declared, 1)
        seats.carry_memory(self._remembered)
        return seats.inputs(np.zeros(1, int))

    # --------------------------------------------------------------------------------- clients

    def hello(self, message: Mapping[str, Any], nonce: bytes, line: Line) -> Client:
        """Takes a client in, or back.

        Raises:
            Refused: another protocol, a wrong proof, other agents, or no place.
        """
        if message.get("type") != "hello":
            raise Refused(f"the first message is {quoted(message.get('type'))}, expected 'hello'.")
        proof = message.get("proof")
        mine = hmac.new(self.token.encode(), nonce, "sha256").digest()
        given = proof if isinstance(proof, bytes) else b""
        if self.token and not hmac.compare_digest(mine, given):
            raise Refused("the proof is of a wrong token, or missing; give the server's token.")
        if message.get("protocol") != PROTOCOL:
            found = quoted(message.get("protocol"))
            raise Refused(f"the protocol is {found}, expected {PROTOCOL}; use its client.")
        name = message.get("client")
        if not isinstance(name, str) or not 0 < len(name) <= 200:
            raise Refused(f"client is {quoted(name)}, expected a name of its own.")
        self._check_agents(message)
        client = self.clients.get(name)
        if client is None:
            return self._take_in(name, line)
        self.counts["reconnects"] += 1
        before, client.line, client.heard = client.line, line, self.clock()
        if before is not None:
            before.refuse(f"client {name!r} has come on another connection.")
        return client

    def _check_agents(self, message: Mapping[str, Any]) -> None:
        try:
            declared = Declared.read(message.get("agents"), message.get("state_size"))
            if self.declared is not None:
                self.declared.refuse_other(declared)
            else:
                declared.check_size(self.max_message_bytes)
                declared.declaration("client", 1)
                self._declare(declared)
        except ConfigError as error:
            raise Refused(str(error)) from None

    def _take_in(self, name: str, line: Line) -> Client:
        if not self._free:
            raise Refused(
                f"{self.max_clients} clients are here, expected no more; come later, or raise "
                "max_clients."
            )
        client = self.clients[name] = Client(name, self._free.pop(), line, self.clock())
        self.seats.begin(client.seat)
        return client

    def lost(self, client: Client, line: Line) -> None:
        """Notes that a connection is gone; the client may come back."""
        if client.line is line:
            client.line, client.heard = None, self.clock()

    def dismiss(self, client: Client) -> None:
        """Truncates a client's running episode and gives its place free."""
        if self.clients.pop(client.name, None) is not client:
            return
        self._cut(client)
        for waiting in (self._heard, self._asking):
            if client in waiting:
                waiting.remove(client)
        if self.recording is not None:
            self.recording.leave(client.seat)
        self._free.append(client.seat)
        self.go_on()

    def _cut(self, client: Client) -> None:
        """Truncates an episode that nobody ends, at its last observation."""
        if not client.over:
            self.counts["truncated"] += 1
            client.over = True
        if client.recorded and self.recording is not None:
            self.recording.cut(client.seat)
        client.recorded = False

    def reap(self) -> None:
        """Leaves clients that are away for too long, or silent though it is their turn."""
        now = self.clock()
        for client in list(self.clients.values()):
            silent = now - client.heard
            if client.line is None and silent > self.grace:
                self.dismiss(client)
            elif client.line is not None and not client.busy and silent > self.idle_timeout:
                line = client.line
                self.dismiss(client)
                line.refuse(f"nothing came for {self.idle_timeout:g} s (idle_timeout).")

    # -------------------------------------------------------------------------------- messages

    def receive(self, client: Client, message: Mapping[str, Any]) -> None:
        """Takes a message of a client.

        Raises:
            Refused: what is no step or end, or none that can follow.
        """
        kind, episode, t = message.get("type"), message.get("episode"), message.get("t")
        if kind != "step" and kind != "end":
            raise Refused(f"type is {quoted(kind)}, expected 'step' or 'end'.")
        if type(episode) is not int or type(t) is not int or t < 0 or not 0 <= episode < 2**63:
            raise Refused(
                f"episode is {quoted(episode)} and t {quoted(t)}, expected whole numbers from 0."
            )
        client.heard = self.clock()
        at = client.episode, client.t
        if (episode, t) <= at and client.t >= 0:
            self._hear_again(client, (episode, t) == at)
            return
        self._follow(client, episode, t, kind)
        self.seats.read(client.seat, message, kind == "end")
        client.episode, client.t, client.last = episode, t, kind == "end"
        client.busy, client.answer = True, b""
        self._heard.append(client)
        self._wake()

    def _hear_again(self, client: Client, same: bool) -> None:
        """Answers a message that was sent again as before; leaves a late one out."""
        self.counts["duplicates" if same else "late"] += 1
        if same and client.answer and client.line is not None:
            client.line.send(client.answer)

    def _follow(self, client: Client, episode: int, t: int, kind: str) -> None:
        """Lets a step follow on the last one, or an episode begin."""
        if client.busy:
            raise Refused(
                f"step {t} of episode {episode} came before the last was answered, expected one "
                "message at a time."
            )
        if episode > client.episode or client.t < 0:
            # A client that nobody knows may be in the middle of an episode.
            if client.t >= 0 and (t or kind == "end"):
                raise Refused(
                    f"{kind} {t} is the first message of episode {episode}, expected a step with t "
                    "0."
                )
            self._cut(client)
            self.seats.begin(client.seat)
            client.over = False
            if self.recording is not None:
                self.recording.begin(client.seat, t == 0)
        elif t != client.t + 1:
            raise Refused(f"t is {t}, expected {client.t + 1}, the next of episode {episode}.")
        elif client.over and (kind == "step" or client.last):
            raise Refused(f"episode {episode} has ended, expected the next one's first step.")

    def _wake(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            self.schedule(self.flush)

    # --------------------------------------------------------------------------------- a batch

    def flush(self) -> None:
        """Answers all who asked since the last time, as far as they may go on."""
        self._scheduled = False
        heard, self._heard = self._heard, []
        if heard:
            self._hear(heard)
        acting = self._admit()
        if acting:
            self._act(acting)

    def _hear(self, heard: list[Client]) -> None:
        """Ends the steps whose outcomes were heard; those who go on are asking."""
        seats = np.array([client.seat for client in heard])
        faults = self.seats.faults(seats)
        if faults:
            for client in [one for one in heard if one.seat in faults]:
                heard.remove(client)
                self.refuse(client, faults[client.seat])
            if not heard:
                return
            seats = np.array([client.seat for client in heard])
        outcome = self.seats.outcome(seats)
        if self.recording is not None:
            kept = np.array([client.recorded for client in heard])
            if kept.all():
                self.recording.close(seats, outcome)
            elif kept.any():
                self.recording.close(seats[kept], {k: x[kept] for k, x in outcome.items()})
        for client, ended in zip(heard, outcome["done",][:, 0].tolist()):
            client.recorded = False
            if ended or client.last:
                client.over = True
                self._answer(client, {})
            else:
                self._asking.append(client)

    def _admit(self) -> list[Client]:
        """Returns those of the asking whose next step may begin."""
        if self.policy is None:
            return []
        if self.recording is None:
            acting = list(self._asking)
            self._asking.clear()
            return acting
        acting, waiting = [], deque[Client]()
        for client in self._asking:
            (acting if self.recording.may_open(client.seat) else waiting).append(client)
        self._asking = waiting
        return acting

    def go_on(self) -> None:
        """Lets those go on who wait for the recording."""
        if self._asking:
            self._wake()

    def _act(self, acting: list[Client]) -> None:
        seats = np.array([client.seat for client in acting])
        leaves = self.seats.inputs(seats)
        assert self._acting is not None
        acted = self._acting.act(leaves, self.exploration_type)
        self.seats.remember(seats, acted)
        self.counts["batches"] += 1
        self.counts["steps"] += len(acting)
        if self.recording is not None:
            written = {key: rows for key, rows in acted.items() if key[0] != "next"}
            self.recording.open(seats, {**leaves, **written}, self.version)
        rows = [self._actions(name, acted, leaves) for name in self.seats.groups]
        for i, client in enumerate(acting):
            client.recorded = self.recording is not None
            actions = (
                rows[0][i] if len(rows) == 1 else {k: x for r in rows for k, x in r[i].items()}
            )
            self._answer(client, actions)

    def _actions(self, name: str, acted: Leaves, leaves: Leaves) -> list[dict[str, Any]]:
        """Returns the actions of a group's acting agents, of each client."""
        actions, mask = acted[name, "action"].tolist(), leaves[name, "mask"]
        names = self.seats.groups[name].names
        if mask.all():
            return [dict(zip(names, own)) for own in actions]
        return [
            {agent: action for agent, action, acts in zip(names, own, who) if acts}
            for own, who in zip(actions, mask.tolist())
        ]

    def _answer(self, client: Client, actions: dict[str, Any]) -> None:
        message = {"type": "actions", "episode": client.episode, "t": client.t}
        client.answer = framed({**message, "actions": actions, "version": self.version})
        client.busy = False
        if client.line is not None:
            client.line.send(client.answer)

    def refuse(self, client: Client, why: str) -> None:
        """Tells a client what is wrong with what it sent, and leaves it."""
        self.counts["refused"] += 1
        line = client.line
        self.dismiss(client)
        if line is not None:
            line.refuse(why)
