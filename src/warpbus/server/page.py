"""Pages: the files of a folder, served as they are, under headers that let them load nothing else."""

import gzip
import hashlib
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from importlib import resources
from importlib.resources.abc import Traversable

from fastapi import APIRouter, HTTPException, Request, Response

MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".mjs": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".woff2": "font/woff2",
}

# A model's text is never parsed as HTML. Should it be after all, this policy keeps it from running or sending
# anything (Content Security Policy Level 3).
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; font-src 'self'; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    # A new version of Warpbus has the same names: the browser asks whether what it has is still right.
    "Cache-Control": "no-cache",
    "Vary": "Accept-Encoding",
}


@dataclass(frozen=True)
class PageFile:
    """A file in memory: its bytes, the same compressed, its media type, and a tag that changes with its content."""

    content: bytes
    compressed: bytes
    media_type: str
    tag: str


def page_router(folder: str = "page", shared: Collection[str] = ()) -> APIRouter:
    """Routes `/` and `/page/...`. They need no API key: they hold no secret, and the page is where a key is entered.

    Args:
        folder: of this package, with the page's files; by default the chat page's.
        shared: names of files of the chat page that belong to this page too.
    """
    room = resources.files(__package__)
    files = {name: _read(room / "page" / name) for name in shared}
    files |= {name: _read(file) for name, file in _walk(room / folder)}
    router = APIRouter(include_in_schema=False)

    @router.api_route("/", methods=["GET", "HEAD"])
    def page(request: Request) -> Response:
        return _respond(files["index.html"], request)

    @router.api_route("/page/{name:path}", methods=["GET", "HEAD"])
    def page_file(name: str, request: Request) -> Response:
        if name not in files:
            raise HTTPException(404, f"the page has no file {name!r}")
        return _respond(files[name], request)

    return router


def _walk(directory: Traversable, prefix: str = "") -> Iterator[tuple[str, Traversable]]:
    for entry in directory.iterdir():
        if entry.is_dir():
            yield from _walk(entry, f"{prefix}{entry.name}/")
        else:
            yield prefix + entry.name, entry


def _read(file: Traversable) -> PageFile:
    content = file.read_bytes()
    suffix = file.name[file.name.rfind(".") :]
    tag = hashlib.sha256(content).hexdigest()[:32]
    return PageFile(content, gzip.compress(content, mtime=0), MEDIA_TYPES.get(suffix, "text/plain; charset=utf-8"), tag)


def _respond(file: PageFile, request: Request) -> Response:
    packed = "gzip" in request.headers.get("accept-encoding", "")
    tag = f'"{file.tag}{"-gzip" if packed else ""}"'
    headers = {**HEADERS, "ETag": tag}
    if tag in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    if packed:
        headers["Content-Encoding"] = "gzip"
    return Response(file.compressed if packed else file.content, headers=headers, media_type=file.media_type)
