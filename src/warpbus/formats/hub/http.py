"""Requests to a hub: with a token for it alone, with limits, and with errors that say what to do."""

import json
from email.message import Message
from http.client import HTTPException, HTTPResponse
from typing import IO, Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import HTTPRedirectHandler, Request, build_opener

from warpbus.errors import DownloadError, UsageError

TIMEOUT = 30.0  # seconds without a byte
MAX_JSON_BYTES = 2**26
_AGENT = "warpbus"
_LOOPBACK = ("localhost", "127.0.0.1", "::1")


class Connection:
    """How a hub is asked.

    Args:
        endpoint: where it is, `https://huggingface.co`.
        token: who asks; it goes to the endpoint's host alone, and never unencrypted over a network.

    Raises:
        UsageError: the endpoint is no address of the web, the token is none, or it would be sent in the clear.
    """

    def __init__(self, endpoint: str, token: str | None = None) -> None:
        self.endpoint = endpoint.rstrip("/")
        try:
            parts = urlsplit(self.endpoint)
        except ValueError:
            parts = urlsplit("")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UsageError(f"{endpoint!a} is no address of a hub: expected one such as https://huggingface.co")
        if token is not None and not (token.isascii() and token.isprintable() and " " not in token):
            raise UsageError("HF_TOKEN, or the file that has the token, holds more than a token: store it anew")
        if token is not None and parts.scheme == "http" and parts.hostname not in _LOOPBACK:
            raise UsageError(f"{endpoint}: a token would be sent there unencrypted: use https, or unset the token")
        self.host = parts.netloc
        self.has_token = token is not None
        self._token = token
        self._opener = build_opener(_Redirects)

    def get(self, path: str, *, offset: int = 0) -> HTTPResponse:
        """Ask for a path, from a byte on. Raises what urllib raises, and DownloadError for a redirect that is not
        followed or leads nowhere."""
        request = Request(self.endpoint + path, headers={"User-Agent": _AGENT})
        if self._token is not None:
            request.add_header("Authorization", f"Bearer {self._token}")
        if offset:
            request.add_header("Range", f"bytes={offset}-")
        try:
            response: HTTPResponse = self._opener.open(request, timeout=TIMEOUT)
        except ValueError as error:
            raise DownloadError(
                f"{self.host}: redirects to what is no address ({one_line(str(error))}): try another source"
            ) from error
        return response

    def json(self, path: str) -> Any:
        """Ask for JSON.

        Raises:
            HTTPError: the hub refuses.
            DownloadError: it cannot be reached, or answers something else.
        """
        try:
            with self.get(path) as response:
                body = response.read(MAX_JSON_BYTES + 1)
        except HTTPError:
            raise
        except (OSError, HTTPException) as error:
            raise self.unreachable(error) from error
        if len(body) > MAX_JSON_BYTES:
            raise DownloadError(
                f"{self.host}: answers with more than {MAX_JSON_BYTES:,} bytes: expected a list of files"
            )
        try:
            return json.loads(body)
        except (ValueError, RecursionError) as error:
            raise DownloadError(
                f"{self.host}: does not answer as a hub does (no JSON): check its address, and proxies on the way"
            ) from error

    def unreachable(self, error: Exception) -> DownloadError:
        """What to raise where no answer came."""
        return DownloadError(
            f"{self.host}: cannot be reached ({reason_of(error)}): check the network "
            "and HTTPS_PROXY, or give a directory that has the model"
        )


def reason_of(error: Exception) -> str:
    """Why a request failed, in a few words."""
    reason = error.reason if isinstance(error, URLError) else error
    return one_line(getattr(reason, "strerror", None) or str(reason)) or type(reason).__name__


def one_line(text: str) -> str:
    """What a server has said, for a message: neither long nor able to control a terminal."""
    return " ".join("".join(char if char.isprintable() else " " for char in text).split())[:200]


class _Redirects(HTTPRedirectHandler):
    """Follows redirects to hosts of files, which must not learn the token, and never out of encryption."""

    def redirect_request(
        self, req: Request, fp: IO[bytes], code: int, msg: str, headers: Message, newurl: str
    ) -> Request | None:
        followed = super().redirect_request(req, fp, code, msg, headers, newurl)  # type: ignore[arg-type]
        before, after = urlsplit(req.full_url), urlsplit(newurl)
        if after.scheme not in ("http", "https") or (before.scheme, after.scheme) == ("https", "http"):
            raise DownloadError(f"{before.netloc}: redirects to {after.scheme}://{after.netloc}, which is not followed")
        if followed is not None and (before.scheme, before.netloc) != (after.scheme, after.netloc):
            followed.remove_header("Authorization")
        return followed
