"""Serves the page of runs to browsers on this machine, by Python's own server.

Nothing is loaded from elsewhere, and nobody else is answered: the server listens on the loopback
interface, and refuses names of other hosts, which a page elsewhere could have led here.
"""

import json
import threading
from collections.abc import Sequence
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from fusedrec_torchrec.watch.document import document_of
from fusedrec_torchrec.watch.run import WatchedRun

__all__ = ["HOST", "WatchServer"]

HOST = "127.0.0.1"
NAMES = (HOST, "localhost", "")  # by which a browser here, or at the end of a tunnel, calls it
FOLDER = Path(__file__).parent
FILES = {
    "/": ("page.html", "text/html; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
    "/page.js": ("page.js", "text/javascript; charset=utf-8"),
}
DATA = "/data.json"
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:"
)


class WatchServer(ThreadingHTTPServer):
    """Answers with the page and with what runs have recorded until now.

    Args:
        runs: that are shown.
        port: to listen on; any free one if 0.
        every: seconds after which the page asks again.

    Raises:
        OSError: the port is taken.
    """

    daemon_threads = True

    def __init__(self, runs: Sequence[WatchedRun], port: int, every: float) -> None:
        self._runs, self._every = runs, every
        self._reading = threading.Lock()
        super().__init__((HOST, port), _Answers)

    @property
    def url(self) -> str:
        """The address of the page."""
        return f"http://{HOST}:{self.server_address[1]}/"

    def data(self) -> bytes:
        """Returns the document of all runs as JSON, which browsers can read: without NaN."""
        with self._reading:
            document = document_of(self._runs)
        return json.dumps({**document, "every": self._every}, allow_nan=False).encode()


class _Answers(BaseHTTPRequestHandler):
    server: WatchServer

    def do_GET(self) -> None:
        host = (self.headers.get("Host") or "").rpartition(":")
        if (host[0] or host[2]) not in NAMES:
            self.send_error(HTTPStatus.FORBIDDEN, "Not the name of this machine")
            return
        path = self.path.partition("?")[0]
        if path == DATA:
            self._send(self.server.data(), "application/json")
        elif path in FILES:
            name, kind = FILES[path]
            self._send((FOLDER / name).read_bytes(), kind)
        else:
            self.send_error(HTTPStatus.NOT_FOUND)

    def _send(self, content: bytes, kind: str) -> None:
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("Content-Security-Policy", POLICY)
        self.send_header("X-Content-Type-Options", "nosniff")
        with suppress(ConnectionError):  # the page was closed meanwhile
            self.end_headers()
            self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Says nothing about single requests."""
