"""A server on this machine that answers as the Hugging Face Hub does, as far as downloads ask it."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit


class Hub(ThreadingHTTPServer):
    """Serves folders as models, and remembers which paths were asked for."""

    def __init__(self, models: dict[str, Path]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.models, self.gated, self.asked = models, set[str](), list[str]()
        self.url = f"http://127.0.0.1:{self.server_port}"

    def files(self, name: str) -> dict[str, Path]:
        root = self.models[name]
        return {path.relative_to(root).as_posix(): path for path in sorted(root.rglob("*")) if path.is_file()}

    def commit(self, name: str) -> str:
        """A revision, which changes with the files."""
        listing = json.dumps([(path, hash_of(file)) for path, file in self.files(name).items()])
        return hashlib.sha1(listing.encode()).hexdigest()

    @property
    def downloaded(self) -> set[str]:
        """The files that were sent."""
        return {path.split("/resolve/")[1].split("/", 1)[1] for path in self.asked if path.startswith("GET /")
                and "/resolve/" in path}  # fmt: skip


def hash_of(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def log_message(self, *words: object) -> None:
        """Print nothing."""

    def _answer(self) -> None:
        hub, path = self.server, unquote(urlsplit(self.path).path)
        hub.asked.append(f"{self.command} {path}")
        words = path.strip("/").removeprefix("api/models/").split("/")
        name, rest = "/".join(words[:2]), words[2:]
        if name not in hub.models:
            return self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"})
        if name in hub.gated:
            return self._send(403, b"{}", {"X-Error-Code": "GatedRepo"})
        commit, files = hub.commit(name), hub.files(name)
        if rest[0] == "resolve":
            file = files.get("/".join(rest[2:]))
            if file is None:
                return self._send(404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit})
            return self._send(200, file.read_bytes(), {"ETag": f'"{hash_of(file)}"', "X-Repo-Commit": commit})
        if rest[0] == "tree":
            tree = [{"type": "file", "path": path, "size": file.stat().st_size, "oid": hash_of(file)[:40]}
                    for path, file in files.items()]  # fmt: skip
            return self._send(200, json.dumps(tree).encode(), {})
        info = {"id": name, "modelId": name, "sha": commit, "siblings": [{"rfilename": path} for path in files]}
        return self._send(200, json.dumps(info).encode(), {})

    def _send(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for key, value in ({"Content-Length": str(len(body)), "Content-Type": "application/json"} | headers).items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)


@contextmanager
def serve(models: dict[str, Path]) -> Iterator[Hub]:
    """Run a server for folders by model id."""
    hub = Hub(models)
    thread = threading.Thread(target=hub.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.shutdown()
        hub.server_close()
