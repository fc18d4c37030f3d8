"""Serving below a path, behind a proxy that does not remove it."""

from starlette.types import ASGIApp, Receive, Scope, Send


class RootPath:
    """Removes a prefix from the paths of requests; requests without it are served, too.

    It comes before everything that looks at paths: access control, logs and routes.

    Args:
        prefix: such as "/llm".
    """

    def __init__(self, app: ASGIApp, prefix: str) -> None:
        self._app, self._prefix = app, prefix

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and f"{scope['path']}/".startswith(f"{self._prefix}/"):
            raw = scope.get("raw_path")
            encoded = self._prefix.encode()
            scope = {**scope, "path": scope["path"][len(self._prefix) :] or "/"}
            if raw is not None and raw.startswith(encoded):
                scope["raw_path"] = raw[len(encoded) :] or b"/"
        await self._app(scope, receive, send)
