"""A TCP proxy in the test's own event loop, which does to a Redis connection what networks do."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections import deque
from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import Any, Self, cast

from local_ports import HOST, free_port
from resp_stream import RespStream, has_reply, is_reply, is_request

RESET = struct.pack("ii", 1, 0)
"""SO_LINGER that makes the kernel send RST, not FIN."""


class FaultProxy:
    """
    Stands in front of one server and passes everything on, until it is told to fail.

    A server that is down shows as connections that are reset as soon as they are made. As in TCP, bytes of one
    connection are delivered in order or not at all: what was held back by `blackhole` and `half_open` arrives late,
    when the network heals, even from a client that has given up meanwhile. Call `cut` before `heal` to have it lost.
    """

    def __init__(self, port: int) -> None:
        self.port = 0
        self.server_port = port
        self.accepted = 0
        """Connections since the start."""
        self.bytes_up = 0
        self.bytes_down = 0
        self.requests: list[tuple[bytes, ...]] = []
        """Every command that clients sent, with its arguments; none when they speak TLS."""
        self.links: set[Link] = set()
        self._forgotten: list[Link] = []
        self._tasks: set[asyncio.Task[Any]] = set()
        self._listener: socket.socket | None = None
        self._cuts = 0
        self._losses: list[_Loss] = []
        self._awaited: list[tuple[bytes, asyncio.Future[None]]] = []
        self._calm()

    async def __aenter__(self) -> Self:
        self.port = free_port()
        self._listen()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.refuse()
        await asyncio.gather(*self._tasks)
        while self.links:
            self.cut()
            await asyncio.sleep(0.001)

    @property
    def url(self) -> str:
        return f"redis://{HOST}:{self.port}"

    @property
    def connections(self) -> int:
        """How many clients are connected now."""
        return sum(link.client is not None for link in self.links)

    @property
    def commands(self) -> list[str]:
        """The names of the commands that clients sent, in upper case."""
        return [request[0].decode(errors="replace").upper() for request in self.requests]

    def saw(self, of: str | bytes) -> asyncio.Future[None]:
        """Done when the next command with *of* in its name or arguments came from a client, delivered or not."""
        seen: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._awaited.append((_bytes(of), seen))
        return seen

    # Faults

    def blackhole(self) -> None:
        """Deliver nothing in either direction; connections stay open and new ones are taken."""
        self._hold_requests = self._hold_replies = True

    def half_open(self) -> None:
        """Deliver requests and no replies."""
        self._hold_requests, self._hold_replies = False, True
        self._drain()

    def lose_ends(self) -> None:
        """Do not tell the server that a client closes its connection from now on, as when a machine loses its power."""
        self._losing_ends = True

    def forget(self) -> None:
        """Lose the state of the connections that are open, as a NAT gateway may: they never carry a byte again."""
        for link in self.links:
            link.up.stop()
            link.down.stop()
            self._forgotten.append(link)

    def cut_forgotten(self) -> None:
        """Tell both ends at last that the connections of `forget` are gone."""
        while self._forgotten:
            self._forgotten.pop().cut()

    def delay(self, *, requests: float = 0.0, replies: float = 0.0) -> None:
        """Let what arrives from now on take so many seconds more."""
        self._request_delay, self._reply_delay = requests, replies

    def lose_replies(self, number: int = 1, *, of: str | bytes = b"") -> asyncio.Future[None]:
        """
        Cut the connection after the server executed a command and before its reply is delivered, *number* times.

        Only commands with *of* in their name or arguments count, such as a script's digest or a key. Replies to
        earlier commands are delivered. Done when the last of these connections was cut.
        """
        return self._plan(_Loss(_bytes(of), number, applied=True))

    def lose_requests(self, number: int = 1, *, of: str | bytes = b"") -> asyncio.Future[None]:
        """Cut the connection before the command reaches the server: to the client the same as `lose_replies`."""
        return self._plan(_Loss(_bytes(of), number, applied=False))

    def cut(self) -> None:
        """Reset all connections, and lose what was under way."""
        self._cuts += 1
        for link in list(self.links):
            link.cut()

    def refuse(self) -> None:
        """Take no new connections: connecting fails at once. Those that are open go on."""
        listener, self._listener = self._listener, None
        if listener is not None:
            asyncio.get_running_loop().remove_reader(listener.fileno())
            listener.close()

    def heal(self) -> None:
        """End every fault, planned ones too, and deliver what was held back."""
        self._calm()
        self._losses.clear()
        self._drain()
        if self._listener is None:
            self._listen()

    # The inside

    def _calm(self) -> None:
        self._hold_requests = self._hold_replies = self._losing_ends = False
        self._request_delay = self._reply_delay = 0.0

    def _drain(self) -> None:
        for link in list(self.links):
            link.up.drain()
            link.down.drain()

    def _plan(self, loss: _Loss) -> asyncio.Future[None]:
        self._losses.append(loss)
        return loss.done

    def _do(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _listen(self) -> None:
        """
        Listen at once, and accept as soon as the loop turns.

        Not by a server of asyncio: one that is closed between the acceptance of a connection and its first turn of the
        loop leaves it open, and no one reads from it.
        """
        self._listener = socket.create_server((HOST, self.port), backlog=200)
        self._listener.setblocking(False)
        asyncio.get_running_loop().add_reader(self._listener.fileno(), self._accept, self._listener)

    def _accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(BlockingIOError, ConnectionAbortedError):
            while True:
                self._do(self._take(listener.accept()[0], self._cuts))

    async def _take(self, accepted: socket.socket, cuts: int) -> None:
        """Serve a connection; reset it if all were reset in the meantime."""
        link = self._new_link()
        await asyncio.get_running_loop().connect_accepted_socket(lambda: link.client_end, accepted)
        if cuts != self._cuts:
            link.cut()

    def _new_link(self) -> Link:
        """Take a connection; another protocol has links of another kind."""
        return Link(self)

    def _note(self, request: list[bytes]) -> None:
        self.requests.append(tuple(request))
        for marker, seen in list(self._awaited):
            if _matches(request, marker):
                self._awaited.remove((marker, seen))
                if not seen.done():
                    seen.set_result(None)

    def _loss_of(self, request: list[bytes]) -> _Loss | None:
        return next((loss for loss in self._losses if loss.takes(request)), None)


class _Loss:
    def __init__(self, marker: bytes, number: int, *, applied: bool) -> None:
        self.applied = applied
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._marker = marker
        self._to_mark = self._to_cut = number

    def takes(self, request: list[bytes]) -> bool:
        return self._to_mark > 0 and _matches(request, self._marker)

    def mark(self) -> None:
        self._to_mark -= 1

    def happened(self) -> None:
        self._to_cut -= 1
        if not self._to_cut and not self.done.done():
            self.done.set_result(None)


class _Way:
    """One direction of a link: what arrived and was not delivered yet, in order; None is the end."""

    def __init__(self, held: Callable[[], bool], judge: Callable[[Any], bool]) -> None:
        self.stream = RespStream()
        self.target: asyncio.Transport | None = None
        self._held = held
        self._judge = judge
        self._waiting: deque[tuple[bytes, Any] | None] = deque()
        self._due = 0

    def arrive(self, items: list[tuple[bytes, Any]] | list[None], delay: float) -> None:
        self._waiting.extend(items)
        if delay:
            asyncio.get_running_loop().call_later(delay, self._let_go, len(items))
        else:
            self._let_go(len(items))

    def drain(self) -> None:
        while self._due and self._waiting and self.target is not None and not self._held():
            self._due -= 1
            self._deliver(self._waiting.popleft(), self.target)

    def stop(self) -> None:
        """Deliver nothing any more."""
        self._held = lambda: True

    def lose(self) -> None:
        self._waiting.clear()
        self._due = 0

    def _let_go(self, number: int) -> None:
        self._due += number
        self.drain()

    def _deliver(self, item: tuple[bytes, Any] | None, target: asyncio.Transport) -> None:
        if item is None:
            target.close()
        elif self._judge(item[1]) and not target.is_closing():
            target.write(item[0])


class Link:
    """A client's connection and the one to the server that goes with it."""

    def __init__(self, proxy: FaultProxy) -> None:
        self._proxy = proxy
        self._unanswered: deque[_Loss | None] = deque()
        self._doomed = False
        self.client: asyncio.Transport | None = None
        self.server: asyncio.Transport | None = None
        self.up = _Way(lambda: proxy._hold_requests, self._request)
        self.down = _Way(lambda: proxy._hold_replies, self._reply)
        self.client_end = _End(self._client_made, self._from_client, self.client_lost)
        self._server_end = _End(self._server_made, self._from_server, self._server_lost)

    def cut(self) -> None:
        self._drop()
        for transport in (self.client, self.server):
            if transport is not None:
                with contextlib.suppress(OSError):
                    transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
                transport.abort()

    # The client's end

    def _client_made(self, transport: asyncio.Transport) -> None:
        self.client = self.down.target = transport
        self._proxy.links.add(self)
        self._proxy.accepted += 1
        self._proxy._do(self.connect())

    async def connect(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            await loop.create_connection(lambda: self._server_end, HOST, self._proxy.server_port)
        except OSError:
            self.cut()

    def _from_client(self, data: bytes) -> None:
        self._proxy.bytes_up += len(data)
        messages = self.up.stream.feed(data)
        for _, message in messages:
            if is_request(message):
                self._proxy._note(message)
        self.up.arrive(messages, self._proxy._request_delay)

    def client_lost(self) -> None:
        self.client = None
        if not self._proxy._losing_ends:
            self.up.arrive([None], self._proxy._request_delay)
        self._forget()

    # The server's end

    def _server_made(self, transport: asyncio.Transport) -> None:
        self.server = self.up.target = transport
        self._proxy.links.add(self)  # its client may be gone already, and both be forgotten
        self.up.drain()

    def _from_server(self, data: bytes) -> None:
        self._proxy.bytes_down += len(data)
        self.down.arrive(self.down.stream.feed(data), self._proxy._reply_delay)

    def _server_lost(self) -> None:
        self.server = None
        self.down.arrive([None], self._proxy._reply_delay)
        self._forget()

    # What becomes of a message

    def _request(self, message: Any) -> bool:
        """Whether to deliver the request."""
        if not is_request(message):
            return True
        if message[0].upper() in {b"PSYNC", b"SYNC", b"MONITOR"}:
            self.up.stream.give_up()
            self.down.stream.give_up()
        loss = None if self._doomed else self._proxy._loss_of(message)
        if loss is not None:
            loss.mark()
            self._doomed = True
        if loss is not None and not loss.applied:
            self._lose(loss)
            return False
        if has_reply(message):
            self._unanswered.append(loss)
        return True

    def _reply(self, message: Any) -> bool:
        """Whether to deliver the reply."""
        loss = self._unanswered.popleft() if is_reply(message) and self._unanswered else None
        if loss is not None:
            self._lose(loss)
        return loss is None

    def _lose(self, loss: _Loss) -> None:
        """End both connections after what was delivered before."""
        self._drop()
        for transport in (self.client, self.server):
            if transport is not None:
                transport.close()
        loss.happened()

    def _drop(self) -> None:
        self.up.lose()
        self.down.lose()

    def _forget(self) -> None:
        if self.client is None and self.server is None:
            self._proxy.links.discard(self)


class _End(asyncio.Protocol):
    def __init__(
        self,
        made: Callable[[asyncio.Transport], None],
        received: Callable[[bytes], None],
        lost: Callable[[], None],
    ) -> None:
        self._made, self._received, self._lost = made, received, lost

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._made(cast(asyncio.Transport, transport))

    def data_received(self, data: bytes) -> None:
        self._received(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost()


def _bytes(of: str | bytes) -> bytes:
    return of.encode() if isinstance(of, str) else of


def _matches(request: list[bytes], marker: bytes) -> bool:
    return any(marker.lower() in part.lower() for part in request)
