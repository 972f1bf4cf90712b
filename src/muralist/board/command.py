"""`muralist board`: serves the board of a folder until Ctrl+C."""

from __future__ import annotations

import importlib.util
import socket
import webbrowser
from pathlib import Path

from muralist.core.errors import UserError
from muralist.settings import BoardSettings

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

    from muralist.board.app import create

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
