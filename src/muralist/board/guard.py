"""Who may ask, and what a page may do: only looking, only by names that are this machine's, nothing from elsewhere."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse

_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; "
    "connect-src 'self'; manifest-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
PAGE_POLICY = (
    # A report of an evaluation brings its own scripts: they run in a sandbox, where they cannot ask the board anything.
    "sandbox allow-scripts allow-popups; default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}
Message = MutableMapping[str, Any]
Messages = Callable[[Message], Awaitable[None]]


class Guard:
    """Refuses whatever is not GET, and names of hosts that are not ours: a page elsewhere could else pretend to be
    this one (DNS rebinding). Addresses in numbers cannot be pretended, and are let through."""

    def __init__(self, app: Any, host: str) -> None:
        self.app = app
        self.names = {"localhost", host.lower(), socket.gethostname().lower(), socket.getfqdn().lower()}

    async def __call__(self, scope: Message, receive: Any, send: Messages) -> None:
        """Answer, or let the board answer."""
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self.app(scope, receive, send)
            return

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(raw=message["headers"])
                for name, value in _HEADERS.items():
                    headers.setdefault(name, value)
                message["headers"] = headers.raw
            await send(message)

        if scope["method"] != "GET":
            refusal = PlainTextResponse("The board only shows.", 405, {"Allow": "GET"})
            await refusal(scope, receive, send_guarded)
        elif not self._is_ours(Headers(scope=scope).get("host", "")):
            await PlainTextResponse("This is not the name of this board.", 421)(scope, receive, send_guarded)
        else:
            await self.app(scope, receive, send_guarded)

    def _is_ours(self, host: str) -> bool:
        name = host.lower()
        if name.startswith("["):
            name = name[1:].partition("]")[0]
        elif name.count(":") <= 1:
            name = name.partition(":")[0]
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return name.rstrip(".") in self.names
        return True
