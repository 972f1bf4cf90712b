"""`muralist board`: serve its page, and JSON about the folders under the root, until Ctrl+C. Only GET is answered."""

from __future__ import annotations

import hashlib
import importlib.util
import ipaddress
import json
import socket
import webbrowser
from collections.abc import Awaitable, Callable, MutableMapping
from pathlib import Path
from typing import Annotated, Any

from fastapi import FastAPI, Header, Query, Request
from fastapi.responses import FileResponse, Response
from pydantic_core import to_json
from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware.gzip import GZipMiddleware
from starlette.responses import PlainTextResponse
from starlette.staticfiles import StaticFiles

from muralist.board.curves import Axis, ClientState, Curves
from muralist.board.files import IMAGES, PAGES, BoardRoot, NotFound
from muralist.board.generation import Generations, summary
from muralist.board.images import SIDES, SampleGrids, Thumbnails, image_facts
from muralist.board.readers import Evaluations, Runs, Scanner
from muralist.core.errors import UserError
from muralist.evaluate.report import METRICS
from muralist.settings import BoardSettings

_CONTENT_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; "
    "connect-src 'self'; manifest-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
# A report of an evaluation has inline scripts: they run in a sandbox, where they cannot query the board.
_REPORT_POLICY = (
    "sandbox allow-scripts allow-popups; default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_REVALIDATE = {"Cache-Control": "no-cache"}
_CACHE_ONE_MINUTE = {"Cache-Control": "private, max-age=60"}
_HEADERS = _REVALIDATE | {
    "Content-Security-Policy": _CONTENT_POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}
_STATIC = Path(__file__).parent / "static"
_STATIC_PACKAGES: list[str | tuple[str, str]] = [("muralist.core", "static"), ("plotly", "package_data")]
_MAX_IMAGES = 500

ETag = Annotated[str | None, Header(alias="if-none-match")]
Message = MutableMapping[str, Any]


class RequestGuard:
    """Refuses every method but GET, and host names that are not this machine's.

    With DNS rebinding, a page elsewhere could otherwise read the board under its own name. Numeric addresses cannot be
    rebound and are accepted.
    """

    def __init__(self, app: Any, host: str) -> None:
        self.app = app
        self.host_names = {"localhost", host.lower(), socket.gethostname().lower(), socket.getfqdn().lower()}

    async def __call__(self, scope: Message, receive: Any, send: Callable[[Message], Awaitable[None]]) -> None:
        """Answer a refused request, or pass it on."""
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self.app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(raw=message["headers"])
                for name, value in _HEADERS.items():
                    headers.setdefault(name, value)
                message["headers"] = headers.raw
            await send(message)

        app = self.app
        if scope["method"] != "GET":
            app = PlainTextResponse("The board is read-only.", 405, {"Allow": "GET"})
        elif not self._is_own_host(Headers(scope=scope).get("host", "")):
            app = PlainTextResponse("The board has another host name.", 421)
        await app(scope, receive, send_with_headers)

    def _is_own_host(self, host: str) -> bool:
        name = host.lower()
        if name.startswith("["):
            name = name[1:].partition("]")[0]
        elif name.count(":") <= 1:
            name = name.partition(":")[0]
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return name.rstrip(".") in self.host_names
        return True


def create(root_path: Path, host: str = "127.0.0.1", cache: Path | None = None) -> Any:
    """Create the board of one folder, as an ASGI application."""
    root = BoardRoot(root_path)
    scanner, runs, curves, grids = Scanner(root.path), Runs(), Curves(), SampleGrids()
    generations, evaluations, thumbnails = Generations(), Evaluations(root), Thumbnails(cache)
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    metrics = {name: [info.title, info.higher_is_better] for name, info in METRICS.items()}

    @app.exception_handler(NotFound)
    def not_found(request: Request, error: Exception) -> Response:
        return Response("Not found.", 404, media_type="text/plain")

    @app.get("/api/overview")
    def get_overview(known: ETag = None) -> Response:
        """Return a summary of everything under the root."""
        entries: dict[str, list[dict[str, Any]]] = {"run": [], "generation": [], "evaluation": []}
        summaries = {"run": runs.summary, "generation": summary, "evaluation": evaluations.summary}
        for kind, folder, name in scanner.entries():
            if (found := summaries[kind](folder)) is not None:
                entries[kind].append({"id": root.relative(name), **found})
        return _json({"root": str(root.path), "name": root.path.name, "metrics": metrics, **entries}, known)

    @app.get("/api/curves")
    def get_curves(
        run: str,
        x: Axis = "step",
        low: float | None = None,
        high: float | None = None,
        have: Annotated[str | None, Query(pattern=r"^[0-9a-f]{8}\.\d{1,12}\.\d{1,12}$")] = None,
        known: ETag = None,
    ) -> Response:
        """Return the curves of a run; `have` is version.width.row of what the page already shows."""
        state = None
        if have:
            version, width, row = have.split(".")
            state = ClientState(version, int(width), int(row))
        return _json(curves.window(root.folder(run) / "metrics.jsonl", x, state, low, high), known)

    @app.get("/api/samples")
    def get_samples(run: str, known: ETag = None) -> Response:
        """Return the sample grid of a run."""
        return _json(grids.get(root.folder(run) / "samples"), known)

    @app.get("/api/generation")
    def get_generation(folder: str, known: ETag = None) -> Response:
        """Return the progress of a generation folder."""
        return _json(generations.get(root.folder(folder)).progress(), known)

    @app.get("/api/images")
    def get_images(
        folder: str,
        begin: Annotated[int, Query(ge=0, lt=1 << 40)] = 0,
        count: Annotated[int, Query(ge=1, le=_MAX_IMAGES)] = 100,
        known: ETag = None,
    ) -> Response:
        """Return some images of a generation folder."""
        return _json(generations.get(root.folder(folder)).images(begin, count), known)

    @app.get("/api/facts")
    def get_facts(path: str, known: ETag = None) -> Response:
        """Return the size and the text fields of an image."""
        return _json(image_facts(root.file(path, IMAGES)[0]), known)

    @app.get("/thumb")
    def get_thumbnail(path: str, side: int = SIDES[1], known: ETag = None) -> Response:
        """Return a thumbnail."""
        image, media_type = root.file(path, IMAGES)
        status = image.stat()
        headers = {"ETag": f'"{status.st_mtime_ns:x}-{status.st_size:x}"', **_CACHE_ONE_MINUTE}
        if headers["ETag"] == known:
            return Response(status_code=304, headers=headers)
        thumbnail = thumbnails.get(image, min(SIDES, key=lambda available: (available < side, available)))
        if thumbnail is None:
            raise NotFound
        data = image.read_bytes() if thumbnail.data is None else thumbnail.data
        return Response(data, media_type=thumbnail.media_type or media_type, headers=headers)

    @app.get("/files/{path:path}")
    def get_file(path: str) -> Response:
        """Return an image or the page of an evaluation."""
        found, media_type = root.file(path, IMAGES | PAGES)
        is_image = media_type in IMAGES.values()
        headers = _CACHE_ONE_MINUTE if is_image else {"Content-Security-Policy": _REPORT_POLICY}
        return FileResponse(found, media_type=media_type, headers=headers)

    app.mount("/", StaticFiles(directory=_STATIC, packages=_STATIC_PACKAGES, html=True))
    app.add_middleware(GZipMiddleware, minimum_size=2048, compresslevel=4)
    return RequestGuard(app, host)


def _json(content: Any, known: str | None) -> Response:
    """Return JSON whose ETag is a hash of the content, or 304 where the page has it already."""
    try:
        data = json.dumps(content, separators=(",", ":"), allow_nan=False).encode()
    except ValueError:  # a NaN from a file of another tool
        data = to_json(content, inf_nan_mode="null")
    headers = {"ETag": f'"{hashlib.sha256(data).hexdigest()[:20]}"'}
    if known in (headers["ETag"], f"W/{headers['ETag']}"):
        return Response(status_code=304, headers=headers)
    return Response(data, media_type="application/json", headers=headers)


_PORTS_TRIED = 50


def board(settings: BoardSettings) -> int:
    """Check the folder, find a port, print the address, and serve until interrupted."""
    root = Path(settings.root).expanduser()
    if not root.is_dir():
        what = "is a file, not a folder" if root.exists() else "does not exist"
        raise UserError(
            f"{root} {what}.", fix="Give the folder that holds your runs, such as `muralist board results/`."
        )
    if missing := [name for name in ("fastapi", "uvicorn") if importlib.util.find_spec(name) is None]:
        raise UserError(
            f"`muralist board` needs {' and '.join(missing)}, not installed here.",
            fix="Run `pip install 'muralist[board]'`.",
        )
    listener = _listen(settings.host, settings.port)
    port = listener.getsockname()[1]
    host = {"0.0.0.0": socket.gethostname(), "::": socket.gethostname()}.get(settings.host, settings.host)
    address = f"http://{f'[{host}]' if ':' in host else host}:{port}/"
    taken = f" (port {settings.port} is taken)" if settings.port not in (0, port) else ""
    print(f"{address} shows {root.resolve()}{taken}. Ctrl+C ends it.", flush=True)

    import uvicorn

    server = uvicorn.Server(
        uvicorn.Config(
            create(root, settings.host),
            log_level="error",
            access_log=False,
            timeout_graceful_shutdown=1,
            server_header=False,
        )
    )
    if settings.open:
        webbrowser.open(address)
    try:
        server.run(sockets=[listener])
    except KeyboardInterrupt:
        pass
    return 0


def _listen(host: str, port: int) -> socket.socket:
    """Return a socket on this port, or on the next free one."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except OSError:
        raise UserError(
            f"--host {host} is not an address of this machine.", fix="Leave it out, or give 0.0.0.0."
        ) from None
    reason = ""
    for number in range(port, port + (_PORTS_TRIED if port else 1)):
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((address[0], number, *address[2:]))
            listener.listen(128)
            return listener
        except (OSError, OverflowError) as error:
            listener.close()
            reason = getattr(error, "strerror", None) or "there are no higher ports"
    raise UserError(f"Cannot listen on {host}, port {port} or one after it: {reason}.", fix="Give another --port.")
