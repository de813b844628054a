"""Client for external simulators: one file for Python 3.9 or newer, without packages.

    client = Client(agents={"walker": {"n": 2, "observation": 4, "action": 1}})
    actions = client.begin({"walker_0": [...], "walker_1": [...]})  # observations
    while not over:  # actions: {"walker_0": [0.3], "walker_1": [-1.0]}
        actions = client.step(observations, rewards={"walker_0": 1.0}, terminated=["walker_1"])
    client.end(rewards={"walker_0": 5.0})  # truncated=True at a time limit

An observation is a list of numbers, float32 bytes, or a numpy array. Agents in ``observations``
act. Rewards are those since the last step; the reward at its termination is an agent's last.
"""

import hmac
import os
import socket
import struct
import time


class Client:
    """Connection to a server; after a lost connection a step is repeated, and counts once.

    agents: kind -> {"n": agents, "observation": features, "action": ...}; the action is a number
    of continuous actions from -1 to 1, {"size", "low", "high"}, or {"n_actions", "mask"}.
    Options: token (default: variable TORCHRL_MARL_TOKEN); state_size, of the critics' state; ssl,
    an SSLContext; timeout of an answer (None: no limit) and patience to reconnect, in seconds.
    """

    def __init__(self, host="127.0.0.1", port=7777, agents=None, name="client", **options):
        self.host, self.port, self.socket, self.episode, self.t = host, port, None, 0, -1
        self.token = options.pop("token", os.environ.get("TORCHRL_MARL_TOKEN", "")).encode()
        self.timeout, self.patience = options.pop("timeout", None), options.pop("patience", 60.0)
        self.ssl, name = options.pop("ssl", None), name + "-" + os.urandom(6).hex()
        self.hello = {"type": "hello", "protocol": 1, "client": name, "agents": agents or {}}
        self.hello["state_size"] = options.pop("state_size", None)
        if options:
            raise TypeError("Client has no " + ", ".join(options))

    def begin(self, observations, **more):
        """Begins an episode; returns agent -> action. Options: action_masks, state."""
        self.episode, self.t = self.episode + 1, -1
        return self.step(observations, **more)

    def step(self, observations, rewards=None, terminated=(), action_masks=None, state=None):
        """Sends the outcome of the last actions; returns the next."""
        return self._ask("step", observations, rewards, terminated, action_masks, state)

    def end(self, rewards=None, truncated=False, observations=None, terminated=(), **more):
        """Ends the episode; at a time limit with ``truncated`` and the last ``observations``."""
        self._ask("end", observations or {}, rewards, terminated, truncated=bool(truncated), **more)

    def _ask(self, kind, seen, rewards, terminated, action_masks=None, state=None, truncated=False):
        if not isinstance(seen, dict) or isinstance(terminated, str):
            raise TypeError("expected a dict of observations, and a list of terminated agents")
        message = {"type": kind, "episode": self.episode, "t": self.t + 1}
        message["observations"] = {name: numbers(own, name) for name, own in seen.items()}
        more = {"rewards": rewards, "terminated": list(terminated), "action_masks": action_masks}
        more.update(truncated=truncated, state=b"" if state is None else numbers(state, "state"))
        message.update({key: value for key, value in more.items() if value})
        data, until, self.t = pack(message), None, self.t + 1  # wrong numbers are no step
        while True:
            try:
                if self.socket is None:
                    self._connect()
                self.socket.sendall(struct.pack("<I", len(data)) + data)
                answer = self._receive()
                while (answer["episode"], answer["t"]) != (self.episode, self.t):
                    answer = self._receive()  # skip the answer to a repeated message
                self.version = answer["version"]  # version of the policy
                return answer["actions"]
            except (OSError, EOFError):
                self.close()
                until = until or time.monotonic() + self.patience
                if time.monotonic() > until:
                    raise
                time.sleep(0.2)

    def _connect(self):
        self.socket = socket.create_connection((self.host, self.port), self.timeout)
        if self.ssl is not None:
            self.socket = self.ssl.wrap_socket(self.socket, server_hostname=self.host)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        proof = hmac.new(self.token, self._receive()["nonce"], "sha256").digest()
        data = pack(dict(self.hello, proof=proof))
        self.socket.sendall(struct.pack("<I", len(data)) + data)
        self._receive()

    def _receive(self):
        message, _ = unpack(self._read(int.from_bytes(self._read(4), "little")))
        if message["type"] == "error":
            self.close()
            raise RuntimeError(message["message"])
        return message

    def _read(self, n):
        data = b""
        while len(data) < n:
            part = self.socket.recv(n - len(data))
            data += part
            if not part:
                raise EOFError("the server closed the connection")
        return data

    def close(self):
        """Closes the connection; the next step opens a new one."""
        if self.socket is not None:
            self.socket = self.socket.close()  # None


def numbers(seen, name="it"):
    """Returns little-endian float32 bytes; errors contain the name."""
    if isinstance(seen, bytes):
        return seen
    try:
        array = hasattr(seen, "astype")
        return seen.astype("<f4").tobytes() if array else struct.pack(f"<{len(seen)}f", *seen)
    except (TypeError, ValueError, OverflowError, struct.error):
        raise TypeError(f"{name!r} has {seen!r:.80}, expected a flat list of numbers") from None


def pack(x):
    """Encodes a value as MessagePack."""
    if x is None or isinstance(x, bool):
        return b"\xc0" if x is None else b"\xc3" if x else b"\xc2"
    if isinstance(x, int):
        return struct.pack(">B", x) if 0 <= x < 128 else struct.pack(">Bq", 0xD3, x)
    if isinstance(x, float):
        return struct.pack(">Bd", 0xCB, x)
    if isinstance(x, (str, bytes)):
        code, x = (0xC6, x) if isinstance(x, bytes) else (0xDB, x.encode())
        return struct.pack(">BI", code, len(x)) + x
    if isinstance(x, dict):
        body = b"".join(pack(key) + pack(value) for key, value in x.items())
        return struct.pack(">BI", 0xDF, len(x)) + body
    if hasattr(x, "tolist"):  # numpy
        return pack(x.tolist())
    return struct.pack(">BI", 0xDD, len(x)) + b"".join(map(pack, x))


def unpack(d, i=0):
    """Decodes the MessagePack value at a byte; returns it and the index of the next byte."""
    c, i = d[i], i + 1
    if c < 0x80 or c >= 0xE0:
        return (c if c < 0x80 else c - 256), i
    if c in (0xC0, 0xC2, 0xC3):
        return {0xC0: None, 0xC2: False, 0xC3: True}[c], i
    if 0xCA <= c <= 0xD3:  # numbers
        code = ">" + "fdBHIQbhiq"[c - 0xCA]
        return struct.unpack_from(code, d, i)[0], i + struct.calcsize(code)
    text, data = 0xA0 <= c < 0xC0 or 0xD9 <= c <= 0xDB, 0xC4 <= c <= 0xC6
    width = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4, 0xDC: 2, 0xDD: 4, 0xDE: 2}
    width = width.get(c, 4 if c == 0xDF else 0)  # 0: a small number, in the first byte
    n, i = int.from_bytes(d[i : i + width], "big") if width else c & (31 if text else 15), i + width
    if text or data:
        return (d[i : i + n].decode() if text else d[i : i + n]), i + n
    items, mapping = [], c < 0x90 or c >= 0xDE
    while len(items) < (2 * n if mapping else n):
        item, i = unpack(d, i)
        items.append(item)
    return (dict(zip(items[::2], items[1::2])) if mapping else items), i
