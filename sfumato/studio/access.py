"""Who may talk to the studio: whoever has shown its token, from a page of its own, by a name that is its own."""

from __future__ import annotations

import hashlib
import hmac
from http.cookies import CookieError, SimpleCookie
from typing import TYPE_CHECKING
from urllib.parse import parse_qsl

from sfumato.serving.connections import trust_connection

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; media-src 'self'; connect-src 'self'; "
    "manifest-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""The content security policy of every answer: nothing of another host, no script or style within a page."""

HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "permissions-policy": "camera=(), microphone=(), geolocation=()",
}

COOKIE_S = 30 * 24 * 3600
"""How long a browser stays known. Every start of the studio has a new token, unless it was given one."""


class TokenGuard:
    """An ASGI application that answers only those who have shown the token, and gives every answer its headers.

    The token comes once, in the address that the studio prints; then a cookie stands for it, which pages of others can
    neither read nor send (HttpOnly, SameSite=Strict). The token is taken out of the address at once.
    """

    def __init__(self, app: ASGIApp, token: str) -> None:
        self.app = app
        self._token = token.encode()
        digest = hmac.new(self._token, b"sfumato studio", hashlib.sha256).hexdigest()
        # cookies are shared by all ports of a host, where several studios may run
        self._cookie_name = f"sfumato_{digest[:8]}"
        self._cookie = digest[8:]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        from starlette.responses import PlainTextResponse, RedirectResponse

        if scope["type"] != "http":
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                named = {name.lower() for name, _ in message.get("headers", ())}
                more = [
                    (name.encode(), value.encode()) for name, value in HEADERS.items() if name.encode() not in named
                ]
                if b"cache-control" not in named:
                    more.append((b"cache-control", b"no-store"))
                message = {**message, "headers": [*message.get("headers", ()), *more]}
            await send(message)

        if self._has_cookie(scope):
            trust_connection(scope)
            await self.app(scope, receive, send_with_headers)
            return
        query = dict(parse_qsl(scope.get("query_string", b"").decode("latin-1"), max_num_fields=64))
        token = query.get("token", "").encode(errors="replace")
        if scope["path"] == "/" and scope["method"] == "GET" and hmac.compare_digest(token, self._token):
            answer = RedirectResponse("/", 303)
            answer.set_cookie(self._cookie_name, self._cookie, max_age=COOKIE_S, httponly=True, samesite="strict")
        else:
            text = "Open the address that `sfumato studio` printed when it started: it ends with the token.\n"
            answer = PlainTextResponse(text, 401)
        await answer(scope, receive, send_with_headers)

    def _has_cookie(self, scope: Scope) -> bool:
        for name, value in scope["headers"]:
            if name == b"cookie":
                try:
                    cookies = SimpleCookie(value.decode("latin-1"))
                except CookieError:  # of another program on this host
                    continue
                shown = cookies.get(self._cookie_name)
                if shown is not None and hmac.compare_digest(shown.value.encode(), self._cookie.encode()):
                    return True
        return False
