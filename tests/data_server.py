"""A web server in a thread that serves bytes, breaks off, or knows no ranges."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Files:
    """What is served, how it misbehaves, and what was asked for."""

    def __init__(self) -> None:
        self.content: dict[str, bytes] = {}
        self.break_after: list[int] = []  # bytes after which the next responses end
        self.errors: list[int] = []  # statuses of the next responses
        self.ranges = True
        self.asked: list[tuple[str, str | None]] = []


@contextmanager
def serve() -> Iterator[tuple[str, Files]]:
    """The server's address and its files."""
    files = Files()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            wanted = self.headers.get("Range")
            files.asked.append((self.path, wanted))
            data = files.content.get(self.path)
            if data is None:
                self.send_error(404)
                return
            if files.errors:
                self.send_error(files.errors.pop(0))
                return
            start = 0
            if wanted and files.ranges:
                start = int(wanted.removeprefix("bytes=").removesuffix("-"))
                self.send_response(206)
            else:
                self.send_response(200)
            body = data[start:]
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if files.break_after:
                self.wfile.write(body[: files.break_after.pop(0)])
                self.wfile.flush()
                self.close_connection = True
                self.connection.close()
                return
            self.wfile.write(body)

        def log_message(self, *arguments: object) -> None:
            pass

    class Server(ThreadingHTTPServer):
        def handle_error(self, request: object, client_address: object) -> None:
            """A connection that broke off is what some tests want."""

    server = Server(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", files
    finally:
        server.shutdown()
        server.server_close()
