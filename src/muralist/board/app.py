"""What the board answers: its own page, and what it reads from the folders under the root. Every answer is to a GET."""

from __future__ import annotations

import functools
import gzip
import hashlib
import json
from pathlib import Path
from typing import Annotated, Any

import plotly
from fastapi import FastAPI, Header, Query, Request
from fastapi.responses import FileResponse, Response
from pydantic_core import to_json
from starlette.middleware.gzip import GZipMiddleware

from muralist.board.curves import Axis, Curves, Have
from muralist.board.evaluations import Evaluations
from muralist.board.generation import Generations, summary
from muralist.board.guard import PAGE_POLICY, Guard
from muralist.board.root import PAGES, PICTURES, NotHere, Root
from muralist.board.runs import Runs
from muralist.board.scan import Scanner
from muralist.board.thumbs import SIDES, Thumbnails, facts
from muralist.board.walls import Walls

_STATIC = Path(__file__).parent / "static"
_PALETTE = Path(__file__).parent.parent / "look" / "palette.css"
_PLOTLY = Path(plotly.__file__).parent / "package_data" / "plotly.min.js"
_KINDS = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
_ASK_AGAIN = {"Cache-Control": "no-cache"}  # it may be kept, but not shown before asking whether it is still so
_FOR_A_MINUTE = {"Cache-Control": "private, max-age=60"}
_MOST_PICTURES = 500

ETag = Annotated[str | None, Header(alias="if-none-match")]


def create(root_path: Path, host: str = "127.0.0.1", cache: Path | None = None) -> Any:
    """The board of one folder, as an ASGI application."""
    root = Root(root_path)
    scanner, runs, curves, walls = Scanner(root.path), Runs(), Curves(), Walls()
    generations, evaluations, thumbnails = Generations(), Evaluations(root), Thumbnails(cache)
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)

    @app.exception_handler(NotHere)
    def not_here(request: Request, error: Exception) -> Response:
        return Response("There is nothing of this name here.", 404, media_type="text/plain")

    @app.get("/api/overview")
    def overview(known: ETag = None) -> Response:
        """Everything under the root, in a few words each."""
        things: dict[str, list[dict[str, Any]]] = {"run": [], "generation": [], "evaluation": []}
        for kind, folder, name in scanner.things():
            told = {"run": runs.summary, "generation": summary, "evaluation": evaluations.summary}[kind](folder)
            if told is not None:
                things[kind].append({"id": root.relative(name), **told})
        return _json({"root": str(root.path), "name": root.path.name, **things}, known)

    @app.get("/api/curves")
    def curves_of(
        run: str,
        x: Axis = "step",
        low: float | None = None,
        high: float | None = None,
        have: Annotated[str | None, Query(pattern=r"^[0-9a-f]{8}\.\d{1,12}\.\d{1,12}$")] = None,
        known: ETag = None,
    ) -> Response:
        """The curves of a run; `have` is version.width.row of what the page already shows."""
        held = None
        if have:
            version, width, row = have.split(".")
            held = Have(version, int(width), int(row))
        return _json(curves.window(root.folder(run) / "metrics.jsonl", x, held, low, high), known)

    @app.get("/api/samples")
    def samples(run: str, known: ETag = None) -> Response:
        """The wall of a run."""
        return _json(walls.wall(root.folder(run) / "samples"), known)

    @app.get("/api/generation")
    def generation(folder: str, known: ETag = None) -> Response:
        """How far a generation folder is."""
        return _json(generations.of(root.folder(folder)).progress(), known)

    @app.get("/api/pictures")
    def pictures(
        folder: str,
        begin: Annotated[int, Query(ge=0, lt=1 << 40)] = 0,
        count: Annotated[int, Query(ge=1, le=_MOST_PICTURES)] = 100,
        known: ETag = None,
    ) -> Response:
        """Some pictures of a generation folder, by their number there."""
        return _json(generations.of(root.folder(folder)).pictures(begin, count), known)

    @app.get("/api/facts")
    def facts_of(path: str, known: ETag = None) -> Response:
        """What a picture says of itself."""
        return _json(facts(root.file(path, PICTURES)[0]), known)

    @app.get("/thumb")
    def thumb(path: str, side: int = SIDES[1], known: ETag = None) -> Response:
        """A small copy of a picture."""
        picture, kind = root.file(path, PICTURES)
        status = picture.stat()
        tag = f'"{status.st_mtime_ns:x}-{status.st_size:x}"'
        if tag == known:
            return Response(status_code=304, headers={"ETag": tag, **_FOR_A_MINUTE})
        thumbnail = thumbnails.get(picture, min(SIDES, key=lambda known_side: (known_side < side, known_side)))
        if thumbnail is None:
            raise NotHere
        data = picture.read_bytes() if thumbnail.data is None else thumbnail.data
        return Response(data, media_type=thumbnail.kind or kind, headers={"ETag": tag, **_FOR_A_MINUTE})

    @app.get("/files/{path:path}")
    def file(path: str) -> Response:
        """A picture or an evaluation's page as it is."""
        found, kind = root.file(path, PICTURES | PAGES)
        headers = _FOR_A_MINUTE if kind in PICTURES.values() else {**_ASK_AGAIN, "Content-Security-Policy": PAGE_POLICY}
        return FileResponse(found, media_type=kind, headers=headers)

    @app.get("/{name}")
    def static(
        name: str, known: ETag = None, accepted: Annotated[str, Header(alias="accept-encoding")] = ""
    ) -> Response:
        """A part of the page itself."""
        places = {"plotly.js": _PLOTLY, "palette.css": _PALETTE}
        path = places.get(name, _STATIC / name)
        if name not in places and name not in _own_files():
            raise NotHere
        status = path.stat()
        tag = f'"{status.st_mtime_ns:x}-{status.st_size:x}"'
        headers = {"ETag": tag, "Vary": "Accept-Encoding", **_ASK_AGAIN}
        if known in (tag, f"W/{tag}"):
            return Response(status_code=304, headers=headers)
        if name == "plotly.js" and "gzip" in accepted:
            headers["Content-Encoding"] = "gzip"
            return Response(_compressed(path), media_type=_KINDS[path.suffix], headers=headers)
        return Response(path.read_bytes(), media_type=_KINDS[path.suffix], headers=headers)

    @app.get("/")
    def page(known: ETag = None) -> Response:
        """The page."""
        return static("index.html", known)

    app.add_middleware(GZipMiddleware, minimum_size=2048, compresslevel=4)
    return Guard(app, host)


@functools.cache
def _compressed(path: Path) -> bytes:
    """A large file, made small once; the quickest way, since somebody waits."""
    return gzip.compress(path.read_bytes(), 1, mtime=0)


def _own_files() -> set[str]:
    return {path.name for path in _STATIC.iterdir() if path.suffix in _KINDS}


def _json(content: Any, known: str | None) -> Response:
    """An answer with a name by its content: one that the page already has is not sent again."""
    try:
        data = json.dumps(content, separators=(",", ":"), allow_nan=False).encode()
    except ValueError:  # a NaN out of a file that others wrote, which JSON does not know
        data = to_json(content, inf_nan_mode="null")
    tag = f'"{hashlib.sha256(data).hexdigest()[:20]}"'
    headers = {"ETag": tag, **_ASK_AGAIN}
    if known in (tag, f"W/{tag}"):
        return Response(status_code=304, headers=headers)
    return Response(data, media_type="application/json", headers=headers)
