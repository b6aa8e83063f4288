"""A server on the loopback that answers each request with the next of a list of replies, and keeps the requests."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Reply:
    """What is sent back. ``drip_s``: seconds between single bytes of the body."""

    body: Any = None
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    wait_s: float = 0.0
    drip_s: float = 0.0

    @property
    def content(self) -> bytes:
        return self.body if isinstance(self.body, bytes) else json.dumps(self.body).encode()


@dataclass
class Loopback:
    """``requests`` holds (path, headers, body) of every request; the last reply is repeated."""

    url: str
    replies: list[Any]
    requests: list[tuple[str, dict[str, str], Any]] = field(default_factory=list)
    most_at_once: int = 0


@contextmanager
def serve(*replies: Any) -> Iterator[Loopback]:
    """A running server; a reply may also be a function of the request's body."""
    lock, running = threading.Lock(), [0]

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):  # the name is http.server's
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with lock:
                place = min(len(server.requests), len(server.replies) - 1)
                server.requests.append((self.path, dict(self.headers), body))
                running[0] += 1
                server.most_at_once = max(server.most_at_once, running[0])
            reply = server.replies[place]
            reply = reply(body) if callable(reply) else reply
            time.sleep(reply.wait_s)
            with lock:
                running[0] -= 1
            self.send_response(reply.status)
            for name, value in {"Content-Length": str(len(reply.content)), **reply.headers}.items():
                self.send_header(name, value)
            self.end_headers()
            try:
                for byte in [reply.content[i : i + 1] for i in range(len(reply.content))] if reply.drip_s else []:
                    self.wfile.write(byte)
                    self.wfile.flush()
                    time.sleep(reply.drip_s)
                if not reply.drip_s:
                    self.wfile.write(reply.content)
            except OSError:
                self.close_connection = True  # the client has given up

        def log_message(self, *_):
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    http.daemon_threads = True
    server = Loopback(f"http://127.0.0.1:{http.server_port}", list(replies))
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        http.shutdown()
        http.server_close()
