"""A Unix socket to every other rank of the host: hands file descriptors over and tells who is still alive.

Sockets have abstract addresses, which vanish with them. A peer proves itself with a random word that only the ranks of
the group have heard. The kernel says when a process has ended: its pidfd becomes readable, also where a child of it
holds the socket open; where process ids of another namespace mean nothing here, the end of the socket says it.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import socket
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

from comm_core.runtime.errors import CommError

# Gathers one picklable object from each rank, in rank order.
Gather = Callable[[Any], list[Any]]
_HELLO = struct.Struct("=16si")
_NOTE = struct.Struct("=qq")
_CREDENTIALS = struct.Struct("=3i")  # process, user, group


class Peers:
    """Connections of one rank. Building is collective.

    Args:
        rank: this rank.
        num_ranks: size of the group.
        gather: how the ranks meet; bounded by itself.
        timeout: bound of every wait in seconds.

    Raises:
        CommError: the ranks are not on one host, or a connection failed.
    """

    def __init__(self, rank: int, num_ranks: int, gather: Gather, timeout: float) -> None:
        self._sockets: dict[int, socket.socket] = {}
        self._process: dict[int, int] = {}
        word = secrets.token_bytes(16)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with listener:
            listener.settimeout(timeout)
            address = f"\0mt-moe-{secrets.token_hex(16)}"
            listener.bind(address)
            listener.listen(num_ranks)
            met = gather((_host(), address, word))
            if len({host for host, _, _ in met}) > 1:
                raise CommError(
                    "the ranks of the group are not processes of one host (or of one network namespace); "
                    "use backend='collective' between hosts"
                )
            try:
                for peer in range(rank):
                    self._connect(rank, peer, met[peer], timeout)
                for _ in range(rank + 1, num_ranks):
                    self._accept(listener, word, timeout)
                self._watch()
            except OSError as error:
                self.close()
                raise CommError(f"rank {rank} can not connect to the other ranks of its host: {error}") from error

    def send_file(self, peer: int, handle: int, generation: int, num_bytes: int) -> None:
        """Hands a file descriptor over, with its number and size; does not wait for the peer."""
        # A peer that has ended is noticed where its answer is waited for.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            socket.send_fds(self._sockets[peer], [_NOTE.pack(generation, num_bytes)], [handle])

    def take_file(self, peer: int) -> tuple[int, int, int]:
        """The next file descriptor a peer sent, its number and size; the caller closes it."""
        try:
            note, handles, _, _ = socket.recv_fds(self._sockets[peer], _NOTE.size, 1)
        except OSError as error:
            raise CommError(f"rank {peer} did not hand its memory over: {error}") from error
        if len(note) != _NOTE.size or len(handles) != 1:
            raise CommError(f"rank {peer} ended while it handed its memory over")
        generation, num_bytes = _NOTE.unpack(note)
        return handles[0], generation, num_bytes

    def ended(self, peer: int) -> bool:
        """True where the process of a peer is gone."""
        poll = select.poll()
        if peer in self._process:
            poll.register(self._process[peer], select.POLLIN)
        else:
            poll.register(self._sockets[peer], 0)  # the end of a connection is always reported
        return bool(poll.poll(0))

    def close(self) -> None:
        """Closes all connections; idempotent."""
        for item in self._sockets.values():
            item.close()
        for handle in self._process.values():
            os.close(handle)
        self._sockets, self._process = {}, {}

    def _connect(self, rank: int, peer: int, where: tuple[str, str, bytes], timeout: float) -> None:
        link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        link.settimeout(timeout)
        self._sockets[peer] = link
        link.connect(where[1])
        link.sendall(_HELLO.pack(where[2], rank))

    def _accept(self, listener: socket.socket, word: bytes, timeout: float) -> None:
        """Takes the next connection that knows our word; others are turned away."""
        while True:
            link, _ = listener.accept()
            link.settimeout(timeout)
            hello = link.recv(_HELLO.size, socket.MSG_WAITALL)
            if len(hello) == _HELLO.size:
                said, peer = _HELLO.unpack(hello)
                if secrets.compare_digest(said, word):
                    self._sockets[peer] = link
                    return
            link.close()

    def _watch(self) -> None:
        """Takes hold of the processes at the other ends, once all are connected."""
        for peer, link in self._sockets.items():
            credentials = link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
            process = _CREDENTIALS.unpack(credentials)[0]
            # A process of another namespace has no number here; then the connection has to tell.
            with contextlib.suppress(OSError, AttributeError):
                self._process[peer] = os.pidfd_open(process)


def _host() -> tuple[str, int]:
    """What processes share that can meet at abstract addresses: the running kernel and the network namespace."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip(), os.stat("/proc/self/ns/net").st_ino
