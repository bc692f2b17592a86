"""Messages between a launcher and its nodes, protected by a token from forgery, replay, reordering and reflection.

The token never crosses the network. The launcher sends a nonce to each node that connects. The node answers with its
own nonce, its greeting, and a proof: the HMAC-SHA256, with the token, of its role, both nonces and the greeting. The
launcher answers a valid proof with the proof of its own role. From then on, each message has a sequence number and a
MAC, with a key for its direction that is derived from the token, both nonces and the greeting.

A recorded greeting does not fit another nonce, and a reflected one has the wrong role. Nothing is encrypted.

TLS is no alternative here: Python's ``ssl`` supports pre-shared keys since 3.13 only, cannot create a certificate for a
run, and multiprocessing's connections authenticate the handshake but not the messages.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import struct
import time
from dataclasses import dataclass

LAUNCHER, NODE = b"launcher", b"node"
"""The roles of the two ends."""

GREETING_TIMEOUT_S = 10.0
"""Time for a complete greeting to arrive."""

LONGEST_GREETING = 4096
LONGEST_MESSAGE = 1 << 24
"""Limits in bytes, without the header and the MAC."""

_HEAD = b"plumbline nodes 1\n"
"""The first bytes of both ends: the protocol, and its version."""

_SIZE = hmac.new(b"", digestmod="sha256").digest_size
"""Bytes of a nonce, and of a MAC."""

_LENGTH = struct.Struct(">H")
_HEADER = struct.Struct(">QI")
_CHUNK = 1 << 16


class ChannelError(ConnectionError):
    """The other end is not authentic, or its messages were changed on the way."""


@dataclass(frozen=True)
class Handshake:
    """The values that both ends know after a greeting, from which they derive proofs and keys."""

    token: bytes
    launcher_nonce: bytes
    node_nonce: bytes
    greeting: bytes

    def proof(self, role: bytes) -> bytes:
        return self._mac(b"proof", role)

    def key(self, role: bytes) -> bytes:
        return self._mac(b"key", role)

    def _mac(self, purpose: bytes, role: bytes) -> bytes:
        parts = (purpose, role, self.launcher_nonce, self.node_nonce, self.greeting)
        # Each part follows its length, so that different lists of parts give different bytes.
        return hmac.digest(self.token, b"".join(_LENGTH.pack(len(part)) + part for part in parts), "sha256")


class LauncherGreeting:
    """The launcher's side of one greeting, without a socket: send ``challenge``, then feed the answer.

    Only tests set ``nonce``, to replay a recorded greeting.
    """

    def __init__(self, token: str, nonce: bytes | None = None) -> None:
        self._token = token.encode()
        self._nonce = nonce or secrets.token_bytes(_SIZE)
        self.challenge = _HEAD + self._nonce
        self.received = b""

    def feed(self, data: bytes) -> Handshake | None:
        """Add bytes from the node; return the handshake once the greeting is complete.

        Answer the greeting with ``proof(LAUNCHER)``. The node sends nothing more before it has received this.
        """
        self.received += data
        said = self.received
        if not said.startswith(_HEAD[: len(said)]):
            raise ChannelError(f"it uses another protocol or version: its first bytes were {said[:24]!r}")
        begin = len(_HEAD) + _SIZE + _LENGTH.size
        if len(said) < begin:
            return None
        (length,) = _LENGTH.unpack_from(said, begin - _LENGTH.size)
        if length > LONGEST_GREETING:
            raise ChannelError(f"it announced a greeting of {length} bytes; the limit is {LONGEST_GREETING}")
        end = begin + length
        if len(said) < end + _SIZE:
            return None
        if len(said) > end + _SIZE:
            raise ChannelError("it sent more than its greeting")
        nonce = said[len(_HEAD) : len(_HEAD) + _SIZE]
        handshake = Handshake(self._token, self._nonce, nonce, said[begin:end])
        if not hmac.compare_digest(handshake.proof(NODE), said[end:]):
            raise ChannelError("its proof is wrong: it has another token, or replays a recorded greeting")
        return handshake


def greet(connection: socket.socket, token: str, greeting: bytes) -> AuthenticatedChannel:
    """Greet a launcher as a node; return the channel to it."""
    if len(greeting) > LONGEST_GREETING:
        raise ChannelError(f"this node's greeting has {len(greeting)} bytes; the limit is {LONGEST_GREETING}")
    deadline = time.monotonic() + GREETING_TIMEOUT_S
    challenge = _read_exactly(connection, len(_HEAD) + _SIZE, deadline)
    if not challenge.startswith(_HEAD):
        raise ChannelError("the process that listens there is not a launcher of this version")
    handshake = Handshake(token.encode(), challenge[len(_HEAD) :], secrets.token_bytes(_SIZE), greeting)
    answer = _HEAD + handshake.node_nonce + _LENGTH.pack(len(greeting)) + greeting + handshake.proof(NODE)
    connection.sendall(answer)
    if not hmac.compare_digest(handshake.proof(LAUNCHER), _read_exactly(connection, _SIZE, deadline)):
        raise ChannelError("the process that listens there does not know the token of this run")
    return AuthenticatedChannel(connection, handshake, NODE)


class AuthenticatedChannel:
    """One end, ``role``, of a connection after the greeting. Messages are numbered, so only one process may send."""

    def __init__(self, connection: socket.socket, handshake: Handshake, role: bytes) -> None:
        connection.settimeout(None)
        self._connection = connection
        self._key = handshake.key(role)
        self._sent = 0
        self._incoming = IncomingMessages(handshake.key(LAUNCHER if role == NODE else NODE))

    def fileno(self) -> int:
        return self._connection.fileno()

    def send(self, message: bytes) -> None:
        """Send a message; wait until it is in the system's buffer."""
        if len(message) > LONGEST_MESSAGE:
            raise ChannelError(f"a message of {len(message)} bytes is too long: the limit is {LONGEST_MESSAGE}")
        numbered = _HEADER.pack(self._sent, len(message)) + message
        self._sent += 1
        self._connection.sendall(numbered + hmac.digest(self._key, numbered, "sha256"))

    def receive(self) -> list[bytes] | None:
        """Wait for bytes; return the messages that they complete, or None if the other end has closed."""
        chunk = self._connection.recv(_CHUNK)
        return self._incoming.feed(chunk) if chunk else None

    def close(self) -> None:
        self._connection.close()


class IncomingMessages:
    """Parses the messages of one direction, which has its own ``key``."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._due = 0
        self._rest = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        self._rest += data
        messages = []
        while len(self._rest) >= _HEADER.size:
            number, length = _HEADER.unpack_from(self._rest)
            if number != self._due:
                raise ChannelError(
                    f"message {number} came instead of {self._due}: something on the network drops, repeats or changes "
                    "messages"
                )
            if length > LONGEST_MESSAGE:
                raise ChannelError(f"message {number} announced {length} bytes; the limit is {LONGEST_MESSAGE}")
            end = _HEADER.size + length
            if len(self._rest) < end + _SIZE:
                break
            numbered = bytes(self._rest[:end])
            if not hmac.compare_digest(hmac.digest(self._key, numbered, "sha256"), self._rest[end : end + _SIZE]):
                raise ChannelError(f"the MAC of message {number} is wrong: something on the network changes messages")
            messages.append(numbered[_HEADER.size :])
            del self._rest[: end + _SIZE]
            self._due += 1
        return messages


def _read_exactly(connection: socket.socket, count: int, deadline: float) -> bytes:
    data = b""
    while len(data) < count:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError(f"no complete greeting in {GREETING_TIMEOUT_S:g} s")
        connection.settimeout(left)
        chunk = connection.recv(count - len(data))
        if not chunk:
            raise ChannelError("it closed the connection: check that both ends have the same token")
        data += chunk
    return data
