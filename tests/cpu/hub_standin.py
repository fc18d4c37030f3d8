"""A hub on this machine: it answers what `huggingface_hub` and `modelscope_hub` ask, and fails on request."""

import base64
import hashlib
import json
import threading
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self
from urllib.parse import parse_qs, unquote, urlsplit

LARGE = (".safetensors", ".bin", ".model")
"""How the names of those files end that Hugging Face keeps beside Git, under their SHA-256."""


@dataclass(frozen=True)
class Asked:
    method: str
    path: str
    token: str | None
    range: str | None


@dataclass
class Model:
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)


class StandIn:
    """Use it in a `with` statement.

    Attributes:
        asked: the requests so far.
        cuts: of the next answers with a file: after how many bytes of it the connection is cut.
        errors: the status codes of the next answers with a file.
        wrong: files whose bytes are not those that are listed.
        token: who does not send it gets the answer that there is no such model.
        gated: models whose terms were not accepted.
        cdn: another host, where files are redirected to.
        ranges: whether parts of files are given; else they come whole.
        gate: files stop in the middle until it is set.
        created: the repositories that were created, and whether they are private.
        licences: of the repositories that were created on ModelScope.
        refused: the status with which commits are refused; None if they are accepted.
    """

    def __init__(self) -> None:
        self.models: dict[str, Model] = {}
        self.asked: list[Asked] = []
        self.cuts: list[int] = []
        self.errors: list[int] = []
        self.wrong: set[str] = set()
        self.token: str | None = None
        self.gated: set[str] = set()
        self.cdn: StandIn | None = None
        self.ranges = True
        self.gate = threading.Event()
        self.gate.set()
        self.created: dict[str, bool] = {}
        self.licences: dict[str, str] = {}
        self.refused: int | None = None
        self.objects: dict[str, bytes] = {}
        hub = self

        class Handler(_Handler):
            standin = hub

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._server.block_on_close = False
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.gate.set()
        self._server.shutdown()
        self._server.server_close()

    def add(self, repository: str, files: dict[str, bytes], branch: str = "main") -> str:
        """Let a branch of a model be these files; the name of the commit."""
        reported = repr(sorted((name, hashlib.sha256(content).hexdigest()) for name, content in files.items()))
        commit = hashlib.sha1(reported.encode()).hexdigest()
        model = self.models.setdefault(repository, Model())
        model.commits[commit] = files
        model.branches[branch] = commit
        return commit

    def files_asked(self) -> list[Asked]:
        """The requests for the content of files."""
        files = [asked for asked in self.asked if "/resolve/" in asked.path or "FilePath=" in asked.path]
        return [asked for asked in files if asked.method == "GET"]


class _Handler(BaseHTTPRequestHandler):
    standin: StandIn
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        hub, url = self.standin, urlsplit(self.path)
        hub.asked.append(Asked(self.command, self.path, self.headers.get("Authorization"), None))
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        parts = [unquote(part) for part in url.path.strip("/").split("/")]
        if hub.token is not None and self.headers.get("Authorization") != f"Bearer {hub.token}":
            self._refuse(401, "")
        elif parts == ["api", "repos", "create"]:
            self._create(json.loads(body))
        elif parts == ["api", "v1", "models"]:
            self._modelscope_create(json.loads(body))
        elif parts[:4] == ["api", "v1", "repos", "models"]:
            self._modelscope_change("/".join(parts[4:6]), parts[6:], json.loads(body))
        elif parts == ["api", "validate-yaml"]:
            self._json({"errors": [], "warnings": []})
        elif parts[-1] == "batch":
            self._batch(json.loads(body))
        elif parts[-2] == "preupload":
            files = [each["path"] for each in json.loads(body)["files"]]
            modes = ["lfs" if name.endswith(LARGE) else "regular" for name in files]
            known = [
                {"path": name, "uploadMode": mode, "shouldIgnore": False}
                for name, mode in zip(files, modes, strict=True)
            ]
            self._json({"files": known})
        elif parts[-2] == "commit":
            self._commit("/".join(parts[2:4]), [json.loads(line) for line in body.splitlines()])
        else:
            self._refuse(404, "")

    def do_PUT(self) -> None:
        content = self.rfile.read(int(self.headers["Content-Length"]))
        hub = self.standin
        hub.asked.append(Asked(self.command, self.path, self.headers.get("Authorization"), None))
        hub.objects[hashlib.sha256(content).hexdigest()] = content
        self._json({})

    def _create(self, asked: dict[str, Any]) -> None:
        repository = "/".join(part for part in (asked.get("organization"), asked["name"]) if part)
        hub = self.standin
        if repository in hub.created:
            self._json({"error": "You already created this model repo", "url": f"{hub.url}/{repository}"}, 409)
            return
        hub.created[repository] = asked.get("visibility") == "private" or bool(asked.get("private"))
        self._json({"url": f"{hub.url}/{repository}", "name": repository})

    def _batch(self, asked: dict[str, Any]) -> None:
        """Where each large file goes that is not there yet."""
        hub, objects = self.standin, []
        for each in asked["objects"]:
            entry: dict[str, Any] = {"oid": each["oid"], "size": each["size"]}
            if each["oid"] not in hub.objects:
                entry["actions"] = {"upload": {"href": f"{hub.url}/objects/{each['oid']}"}}
            objects.append(entry)
        self._json({"transfer": "basic", "objects": objects})

    def _commit(self, repository: str, lines: list[dict[str, Any]]) -> None:
        hub = self.standin
        if hub.refused is not None:
            self._refuse(hub.refused, "")
            return
        model = hub.models.get(repository, Model())
        files = dict(model.commits.get(model.branches.get("main", ""), {}))
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = hub.objects[value["oid"]]
        commit = hub.add(repository, files)
        about = {"commitUrl": f"{hub.url}/{repository}/commit/{commit}", "commitOid": commit, "success": True}
        self._json(about)

    def log_message(self, *_: Any) -> None:
        pass

    def _answer(self) -> None:
        hub, headers = self.standin, self.headers
        token = headers.get("Authorization")
        hub.asked.append(Asked(self.command, self.path, token, headers.get("Range")))
        url = urlsplit(self.path)
        parts, query = [unquote(part) for part in url.path.strip("/").split("/")], parse_qs(url.query)
        with suppress(ConnectionError):
            if parts[:3] == ["api", "v1", "models"]:
                self._modelscope("/".join(parts[3:5]), parts[5:], query)
            elif parts[:3] == ["openapi", "v1", "models"]:
                self._modelscope("/".join(parts[3:5]), [], query)
            elif parts[:2] == ["api", "models"]:
                what, revision = parts[4:6] or ("revision", "main")
                self._huggingface("/".join(parts[2:4]), what, revision, token)
            else:
                self._file("/".join(parts[:2]), parts[3], "/".join(parts[4:]), token)

    def _huggingface(self, repository: str, what: str, revision: str, token: str | None) -> None:
        found = self._found(repository, revision, token)
        if found is None:
            return
        commit, files = found
        if what == "tree":
            self._json([_tree_entry(name, content) for name, content in files.items()])
        else:
            siblings = [_sibling(name, content) for name, content in files.items()]
            self._json({"id": repository, "sha": commit, "siblings": siblings})

    def _found(self, repository: str, revision: str, token: str | None) -> tuple[str, dict[str, bytes]] | None:
        hub = self.standin
        model = hub.models.get(repository)
        if model is None or (hub.token is not None and token != f"Bearer {hub.token}"):
            self._refuse(404 if token else 401, "RepoNotFound")
            return None
        commit = model.branches.get(revision, revision)
        if commit not in model.commits:
            self._refuse(404, "RevisionNotFound")
            return None
        return commit, model.commits[commit]

    def _file(self, repository: str, revision: str, name: str, token: str | None) -> None:
        hub = self.standin
        found = self._found(repository, revision, token)
        if found is None:
            return
        if repository in hub.gated:  # what there is may be seen
            self._refuse(403 if token else 401, "GatedRepo")
            return
        commit, files = found
        if name not in files:
            self._refuse(404, "EntryNotFound")
            return
        content = files[name]
        about = {"X-Repo-Commit": commit, "ETag": f'"{_key(name, content)}"'}
        if name.endswith(LARGE):
            about |= {"X-Linked-Etag": about["ETag"], "X-Linked-Size": str(len(content))}
        if hub.cdn is not None and name.endswith(LARGE):
            self.send_response(302)
            for key, value in {**about, "Location": hub.cdn.url + self.path, "Content-Length": "0"}.items():
                self.send_header(key, value)
            self.end_headers()
            return
        self._send(name, content, about)

    def _modelscope_create(self, asked: dict[str, Any]) -> None:
        hub, repository = self.standin, f"{asked['Path']}/{asked['Name']}"
        if repository in hub.created:  # the library tries it before each upload
            self._json({"Code": 400, "Message": "repository already exists", "Success": False}, 400)
            return
        hub.created[repository] = asked["Visibility"] == 1
        hub.licences[repository] = asked["License"]
        hub.add(repository, {}, "master")
        self._json({"Code": 200, "Data": {"Path": asked["Path"], "Name": asked["Name"]}, "Success": True})

    def _modelscope_change(self, repository: str, what: list[str], asked: dict[str, Any]) -> None:
        hub = self.standin
        if what[-1] == "batch":
            objects = [{**each, "actions": {}} for each in asked["objects"]]
            for each in objects:
                if each["oid"] not in hub.objects:
                    each["actions"] = {"upload": {"href": f"{hub.url}/objects/{each['oid']}"}}
            self._json({"Code": 200, "Data": {"objects": objects}, "Success": True})
        elif hub.refused is not None:
            self._json({"Code": hub.refused, "Message": "no\nwriting", "Success": False}, hub.refused)
        else:
            model = hub.models[repository]
            files = dict(model.commits[model.branches["master"]])
            for each in asked["actions"]:
                large = each["type"] == "lfs"
                files[each["path"]] = hub.objects[each["sha256"]] if large else base64.b64decode(each["content"])
            hub.add(repository, files, "master")
            self._json({"Code": 200, "Data": {}, "Success": True})

    def _modelscope(self, repository: str, what: list[str], query: dict[str, list[str]]) -> None:
        model = self.standin.models.get(repository)
        if not what:
            if model is None:
                self._json({"Code": 10010205001, "Message": "no such model", "Success": False}, 404)
            else:
                owner, _, name = repository.partition("/")
                self._json({"Code": 200, "Data": {"Path": owner, "Name": name}, "Success": True})
            return
        commit = None if model is None else model.branches.get(query["Revision"][0])
        if model is None or commit is None:
            self._json({"Code": 10010205001, "Message": "no such\nmodel or revision", "Success": False}, 404)
            return
        files = model.commits[commit]
        if what == ["repo", "files"]:
            listed: list[dict[str, Any]] = [
                {"Name": "figures", "Path": "figures", "Type": "tree", "Size": 0, "Sha256": ""}
            ]
            for path, content in files.items():
                sha = hashlib.sha256(content).hexdigest()
                listed.append({"Name": path, "Path": path, "Type": "blob", "Size": len(content), "Sha256": sha})
            self._json({"Code": 200, "Data": {"Files": listed}, "Message": "success", "Success": True})
        else:
            name = query["FilePath"][0]
            self._send(name, files[name], {})

    def _send(self, name: str, content: bytes, about: dict[str, str]) -> None:
        hub = self.standin
        if self.command == "GET" and hub.errors:
            self._refuse(hub.errors.pop(0), "")
            return
        if name in hub.wrong:
            content = bytes(255 - byte for byte in content)
        asked = self.headers.get("Range") if hub.ranges else None
        start = int(asked.removeprefix("bytes=").partition("-")[0]) if asked else 0
        self.send_response(206 if asked else 200)
        if asked:
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        for key, value in {**about, "Content-Length": str(len(content) - start)}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        rest = content[start:]
        if name.endswith(LARGE) and hub.cuts:
            self.wfile.write(rest[: hub.cuts.pop(0)])
            self.close_connection = True
            return
        if name.endswith(LARGE) and not hub.gate.is_set():
            self.wfile.write(rest[: len(rest) // 2])
            hub.gate.wait()
            self.close_connection = True
            return
        self.wfile.write(rest)

    def _refuse(self, status: int, code: str) -> None:
        self._json({"error": code}, status, {"X-Error-Code": code})

    def _json(self, content: Any, status: int = 200, about: dict[str, str] | None = None) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        for key, value in {"Content-Length": str(len(body)), **(about or {})}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def _git_key(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def _key(name: str, content: bytes) -> str:
    return hashlib.sha256(content).hexdigest() if name.endswith(LARGE) else _git_key(content)


def _lfs(name: str, content: bytes, key: str) -> dict[str, Any]:
    if not name.endswith(LARGE):
        return {}
    return {"lfs": {key: hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 134}}


def _sibling(name: str, content: bytes) -> dict[str, Any]:
    key = _git_key(content)
    return {"rfilename": name, "size": len(content), "blobId": key} | _lfs(name, content, "sha256")


def _tree_entry(name: str, content: bytes) -> dict[str, Any]:
    return {"type": "file", "path": name, "size": len(content), "oid": _git_key(content)} | _lfs(name, content, "oid")
