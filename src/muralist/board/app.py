"""`muralist board`: serve its page, and JSON about the folders under the root, until Ctrl+C. Only GET is answered."""

from __future__ import annotations

import hashlib
import ipaddress
import json
import socket
import webbrowser
from collections.abc import Awaitable, Callable, Mapping, Set
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

from pydantic_core import to_json

from muralist.board.curves import Axis, RecentSeries
from muralist.board.files import PAGES, SIDES, BoardRoot, NotFound, Thumbnails, image_facts
from muralist.board.generation import Generation, generation_summary
from muralist.board.readers import evaluation_summary, find_entries, log_tail, run_settings, run_summary, sample_grid
from muralist.core.errors import UserError
from muralist.data.tar_members import TarImage
from muralist.evaluate.report import METRICS
from muralist.settings import BoardSettings

try:
    import uvicorn
    from fastapi import FastAPI, Query, Request
    from fastapi.responses import FileResponse, PlainTextResponse, Response
    from starlette.middleware.gzip import GZipMiddleware
    from starlette.staticfiles import StaticFiles
except ImportError as error:
    fix = "Run `pip install 'muralist[board]'`."
    raise UserError(f"`muralist board` needs {error.name}, not installed here.", fix=fix) from None

_CONTENT_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; "
    "connect-src 'self'; manifest-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
# A report of an evaluation has inline scripts: they run in a sandbox, where they cannot query the board.
_REPORT_POLICY = (
    "sandbox allow-scripts allow-popups; default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_CACHE_ONE_MINUTE = {"Cache-Control": "private, max-age=60"}
_HEADERS = {
    "Cache-Control": "no-cache",
    "Content-Security-Policy": _CONTENT_POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}
_STATIC = Path(__file__).parent / "static"
_STATIC_PACKAGES: list[str | tuple[str, str]] = [("muralist.core", "static"), ("plotly", "package_data")]
_MAX_IMAGES = 500


def create(root_path: Path, host: str = "127.0.0.1", cache: Path | None = None) -> FastAPI:
    """Create the board of one folder, as an ASGI application."""
    root = BoardRoot(root_path)
    thumbnails, series = Thumbnails(cache), RecentSeries()
    generation = lru_cache(maxsize=32)(Generation)
    own_names = {"localhost", host.lower(), socket.gethostname().lower(), socket.getfqdn().lower()}
    metrics = {name: [info.title, info.higher_is_better] for name, info in METRICS.items()}
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)

    @app.exception_handler(NotFound)
    def not_found(request: Request, error: Exception) -> Response:
        return PlainTextResponse("Not found.", 404)

    @app.get("/api/overview")
    def get_overview() -> Response:
        """Return a summary of everything under the root."""
        entries: dict[str, list[dict[str, Any]]] = {"run": [], "generation": [], "evaluation": []}
        summaries = {"run": run_summary, "generation": generation_summary, "evaluation": evaluation_summary}
        for kind, folder, name in find_entries(root.path):
            if (found := summaries[kind](folder)) is not None:
                page = {"page": root.relative(found["page"])} if found.get("page") else {}
                entries[kind].append({"id": root.relative(name), **found, **page})
        return _json({"root": str(root.path), "name": root.path.name, "metrics": metrics, **entries})

    @app.get("/api/curves")
    def get_curves(
        run: str,
        x: Axis = "step",
        low: float | None = None,
        high: float | None = None,
        have: Annotated[str | None, Query(pattern=r"^[0-9a-f]{8}\.\d{1,12}\.\d{1,12}$")] = None,
    ) -> Response:
        """Return the curves of a run; `have` is version.width.row of what the page already shows."""
        return _json(series.get(root.folder(run) / "metrics.jsonl").window(x, have, low, high))

    @app.get("/api/samples")
    def get_samples(run: str) -> Response:
        """Return the sample grid of a run."""
        return _json(sample_grid(root.folder(run) / "samples"))

    @app.get("/api/settings")
    def get_settings(run: str) -> Response:
        """Return the settings of a run."""
        return _json(run_settings(root.folder(run)))

    @app.get("/api/log")
    def get_log(run: str) -> Response:
        """Return the end of a run's log."""
        return _json(log_tail(root.folder(run)))

    @app.get("/api/generation")
    def get_generation(folder: str) -> Response:
        """Return the progress of a generation folder."""
        return _json(generation(root.folder(folder)).progress())

    @app.get("/api/images")
    def get_images(
        folder: str,
        begin: Annotated[int, Query(ge=0, lt=1 << 40)] = 0,
        count: Annotated[int, Query(ge=1, le=_MAX_IMAGES)] = 100,
    ) -> Response:
        """Return some images of a generation folder."""
        return _json(generation(root.folder(folder)).images(begin, count))

    @app.get("/api/facts")
    def get_facts(path: str) -> Response:
        """Return the size and the text fields of an image."""
        return _json(image_facts(root.image(path)[0]))

    @app.get("/thumb")
    def get_thumbnail(path: str, side: int = SIDES[1]) -> Response:
        """Return a thumbnail."""
        side = min(SIDES, key=lambda available: (available < side, available))
        if (thumbnail := thumbnails.get(root.image(path)[0], side)) is None:
            raise NotFound
        return _tagged(*thumbnail, _CACHE_ONE_MINUTE)

    @app.get("/files/{path:path}")
    def get_file(path: str) -> Response:
        """Return an image or the page of an evaluation."""
        if Path(path).suffix.lower() in PAGES:
            page, media_type = root.file(path, PAGES)
            return FileResponse(page, media_type=media_type, headers={"Content-Security-Policy": _REPORT_POLICY})
        found, media_type = root.image(path)
        if isinstance(found, TarImage):
            return Response(found.read(), media_type=media_type, headers=_CACHE_ONE_MINUTE)
        return FileResponse(found, media_type=media_type, headers=_CACHE_ONE_MINUTE)

    app.mount("/", StaticFiles(directory=_STATIC, packages=_STATIC_PACKAGES, html=True))
    app.add_middleware(GZipMiddleware, minimum_size=2048, compresslevel=4)

    @app.middleware("http")
    async def guard(request: Request, call_next: Callable[[Request], Awaitable[Response]]) -> Response:
        """Refuse every method but GET and foreign host names; add the headers of every answer; send none again."""
        if request.method != "GET":
            response: Response = PlainTextResponse("The board is read-only.", 405, {"Allow": "GET"})
        elif not _is_own_host(request.headers.get("host", ""), own_names):
            response = PlainTextResponse("The board has another host name.", 421)
        else:
            response = await call_next(request)
        tag = response.headers.get("etag")
        if tag and request.headers.get("if-none-match") in (tag, f"W/{tag}"):  # the page has this answer already
            kept = {name: response.headers[name] for name in ("etag", "cache-control") if name in response.headers}
            response = Response(status_code=304, headers=kept)
        for name, value in _HEADERS.items():
            response.headers.setdefault(name, value)
        return response

    return app


def _is_own_host(host: str, own_names: Set[str]) -> bool:
    """Return whether a request names this machine: with DNS rebinding, a page elsewhere could read the board otherwise.

    Numeric addresses cannot be rebound and are accepted.
    """
    try:
        name = urlsplit(f"//{host}").hostname or ""
        return name.rstrip(".") in own_names or bool(ipaddress.ip_address(name))
    except ValueError:
        return False


def _json(content: Any) -> Response:
    try:
        data = json.dumps(content, separators=(",", ":"), allow_nan=False).encode()
    except ValueError:  # a NaN from a file of another tool
        data = to_json(content, inf_nan_mode="null")
    return _tagged(data, "application/json")


def _tagged(data: bytes, media_type: str, headers: Mapping[str, str] = {}) -> Response:
    """Return an answer whose ETag is a hash of the content."""
    tag = f'"{hashlib.sha256(data).hexdigest()[:20]}"'
    return Response(data, media_type=media_type, headers={"ETag": tag, **headers})


_PORTS_TRIED = 50


def board(settings: BoardSettings) -> int:
    """Check the folder, find a port, print the address, and serve until interrupted."""
    root = Path(settings.root).expanduser()
    if not root.is_dir():
        what = "is a file, not a folder" if root.exists() else "does not exist"
        raise UserError(
            f"{root} {what}.", fix="Give the folder that holds your runs, such as `muralist board results/`."
        )
    listener = _listen(settings.host, settings.port)
    port = listener.getsockname()[1]
    host = {"0.0.0.0": socket.gethostname(), "::": socket.gethostname()}.get(settings.host, settings.host)
    address = f"http://{f'[{host}]' if ':' in host else host}:{port}/"
    taken = f" (port {settings.port} is taken)" if settings.port not in (0, port) else ""
    print(f"{address} shows {root.resolve()}{taken}. Ctrl+C ends it.", flush=True)
    if settings.open:
        webbrowser.open(address)
    options: dict[str, Any] = {"log_level": "error", "access_log": False, "server_header": False, "ws": "none"}
    config = uvicorn.Config(create(root, settings.host), timeout_graceful_shutdown=1, **options)
    with suppress(KeyboardInterrupt):
        uvicorn.Server(config).run(sockets=[listener])
    return 0


def _listen(host: str, port: int) -> socket.socket:
    """Return a socket on this port, or on the next free one."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
    except OSError:
        raise UserError(
            f"--host {host} is not an address of this machine.", fix="Leave it out, or give 0.0.0.0."
        ) from None
    both = family == socket.AF_INET6 and socket.has_dualstack_ipv6()
    reason = ""
    for number in range(port, min(port + _PORTS_TRIED, 1 << 16)) if port else (0,):
        try:
            return socket.create_server((host, number), family=family, dualstack_ipv6=both)
        except OSError as error:
            reason = error.strerror or str(error)
    raise UserError(f"Cannot listen on {host}, port {port} or one after it: {reason}.", fix="Give another --port.")
