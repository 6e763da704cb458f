"""A real S3 protocol server on a loopback port, and a proxy before it that counts and disturbs."""

from __future__ import annotations

import contextlib
import http.client
import os
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal
from urllib.parse import unquote, urlsplit

Fault = Literal["busy", "broken", "denied", "cut", "drop", "lost"]
"""What befalls a request.

Busy is a 503, broken a 500, denied a 403; of cut the answer ends in the middle; drop resets the
connection before the server hears of the request, lost after it.
"""

ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": "test",
    "AWS_SECRET_ACCESS_KEY": "not-a-secret",
    "AWS_EC2_METADATA_DISABLED": "true",
    "AWS_CONFIG_FILE": os.devnull,
    "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
}

_ANSWERS = {
    "busy": (503, b"<Error><Code>SlowDown</Code><Message>Reduce your rate</Message></Error>"),
    "broken": (500, b"<Error><Code>InternalError</Code><Message>We failed</Message></Error>"),
    "denied": (403, b"<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"),
}


# It ends with whoever started it, however that came to its end: then its input does.
_SERVER = """
import os, sys, threading
threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()
from moto.server import main
main(sys.argv[1:])
"""


def free_port() -> int:
    """A loopback port that nobody listens on."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@contextlib.contextmanager
def serving() -> Iterator[int]:
    """The port of an S3 server that runs in a process of its own."""
    port = free_port()
    command = [sys.executable, "-c", _SERVER, "-H", "127.0.0.1", "-p", str(port)]
    null, pipe = subprocess.DEVNULL, subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=null, stderr=null) as process:
        try:
            deadline = time.monotonic() + 30
            while not _answers(port):
                assert process.poll() is None, "the S3 server ended at once"
                assert time.monotonic() < deadline, "the S3 server does not answer"
                time.sleep(0.05)
            yield port
        finally:
            process.kill()


def _answers(port: int) -> bool:
    with contextlib.suppress(OSError):
        socket.create_connection(("127.0.0.1", port), 1).close()
        return True
    return False


@dataclass
class Request:
    """A request as the proxy saw it: ``sent`` are the bytes of the answer's body."""

    method: str
    key: str
    query: str
    span: str | None
    sent: int = 0


@dataclass
class Proxy:
    """Hands requests on to a server, counts them, and disturbs those that ``faults`` names.

    ``faults`` is asked once a request and may count in its own state.
    """

    server_port: int
    port: int = field(default_factory=free_port)
    faults: Callable[[Request], Fault | None] = lambda request: None
    requests: list[Request] = field(default_factory=list)
    _http: _Listener | None = None

    @property
    def query(self) -> str:
        """The query of a URI that reaches the server by way of the proxy."""
        return f"?endpoint_override=127.0.0.1:{self.port}&scheme=http&region=us-east-1"

    def uri(self, path: str) -> str:
        """The URI of ``bucket/key``."""
        return f"s3://{path}{self.query}"

    def start(self) -> None:
        """Listen; after :meth:`stop` on the same port again."""
        handler = type("_Handler", (_Handler,), {"proxy": self})
        self._http = _Listener(("127.0.0.1", self.port), handler)
        threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True).start()

    def stop(self) -> None:
        """Refuse connections, and end those that there are."""
        if self._http is not None:
            self._http.shutdown()
            self._http.server_close()
            for connection in self._http.connections:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
            self._http = None

    def reset(self) -> None:
        """Forget requests and faults."""
        self.requests.clear()
        self.faults = lambda request: None

    @property
    def sent(self) -> int:
        """Bytes of all answers' bodies since the last reset."""
        return sum(request.sent for request in self.requests)


class _Listener(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 64

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.connections: list[socket.socket] = []

    def get_request(self) -> tuple[socket.socket, Any]:
        connection, address = super().get_request()
        self.connections.append(connection)
        return connection, address

    def handle_error(self, *_: Any) -> None:
        """A client that went away is nothing to tell."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    proxy: Proxy

    def setup(self) -> None:
        self.request.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        super().setup()

    def log_message(self, *_: Any) -> None:
        """Say nothing."""

    def _answer(self) -> None:
        body = self._body()
        split = urlsplit(self.path)
        span = self.headers.get("Range")
        request = Request(self.command, unquote(split.path).strip("/"), split.query, span)
        self.proxy.requests.append(request)
        fault = self.proxy.faults(request)
        if fault == "drop":
            self._drop()
            return
        if fault in _ANSWERS:
            status, text = _ANSWERS[fault]
            self._send(status, [("Content-Type", "application/xml")], text, request)
            return
        upstream = http.client.HTTPConnection("127.0.0.1", self.proxy.server_port)
        with contextlib.closing(upstream):
            sent = {name: value for name, value in self.headers.items() if name != "Expect"}
            chunked = "transfer-encoding" in {name.lower() for name in sent}
            pieces = iter([body]) if chunked else body
            upstream.request(self.command, self.path, pieces, sent, encode_chunked=chunked)
            response = upstream.getresponse()
            data = response.read()
            headers = [
                (name, value)
                for name, value in response.getheaders()
                if name.lower() not in ("connection", "transfer-encoding", "date", "server")
            ]
        if fault == "lost":
            self._drop()
            return
        self._send(response.status, headers, data, request, cut=fault == "cut")

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "").lower() == "chunked":
            pieces = []
            while size := int(self.rfile.readline().split(b";")[0], 16):
                pieces.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(pieces)
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def _send(
        self,
        status: int,
        headers: list[tuple[str, str]],
        data: bytes,
        request: Request,
        cut: bool = False,
    ) -> None:
        self.send_response_only(status)
        for name, value in headers:
            self.send_header(name, value)
        if "content-length" not in {name.lower() for name, _ in headers}:
            self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command == "HEAD":
            return
        data = data[: len(data) // 2] if cut else data
        request.sent = len(data)
        self.wfile.write(data)
        if cut:
            self._drop()

    def _drop(self) -> None:
        """Reset the connection."""
        self.wfile.flush()
        self.request.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close_connection = True
        self.request.close()

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _answer
