"""A Hugging Face hub on this host: the few endpoints that its own library asks for a download."""

import hashlib
import json
import re
import threading
import urllib.parse
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

LARGE = ".safetensors"  # these have a sha256, as files in large file storage
_MODEL = re.compile(r"/api/models/([^/]+/[^/]+)/revision/(.+)")
_FILE = re.compile(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)")
_RANGE = re.compile(r"bytes=(\d+)-")


@dataclass
class FakeHub:
    """Repositories by id; each has branches, and files by commit. Tests change what it holds."""

    files: dict[str, dict[str, dict[str, bytes]]] = field(default_factory=dict)
    branches: dict[str, dict[str, str]] = field(default_factory=dict)
    token: str | None = None  # whoever has it may read
    gated: set[str] = field(default_factory=set)  # may be read by nobody
    break_after: dict[str, int] = field(default_factory=dict)  # bytes of a file, then it hangs up
    damaged: set[str] = field(default_factory=set)  # files of which other bytes come
    status: int | None = None  # of every answer, where it is not well
    asked: list[str] = field(default_factory=list)  # "GET /path", with where a range began

    def publish(self, repo_id: str, files: dict[str, bytes], branch: str = "main") -> str:
        """Make a commit of these files; its name."""
        digest = hashlib.sha1(usedforsecurity=False)
        for name, content in sorted(files.items()):
            digest.update(name.encode() + content)
        commit = digest.hexdigest()
        self.files.setdefault(repo_id, {})[commit] = files
        self.branches.setdefault(repo_id, {})[branch] = commit
        return commit

    def commit(self, repo_id: str, revision: str) -> str | None:
        if revision in self.files[repo_id]:
            return revision
        return self.branches[repo_id].get(revision)

    def downloads(self) -> list[str]:
        """Names of the files that were asked for, without repetition."""
        names = [_FILE.fullmatch(line.split()[1]) for line in self.asked if line.startswith("GET")]
        return list(dict.fromkeys(match[3] for match in names if match))


@contextmanager
def serving(hub: FakeHub) -> Iterator[str]:
    """The hub's address, inside the block."""

    class Handler(_Handler):
        content = hub

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    content: FakeHub
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        hub, path = self.content, urllib.parse.unquote(urllib.parse.urlsplit(self.path).path)
        hub.asked.append(f"{self.command} {path} {self.headers.get('Range', '')}".strip())
        if hub.status is not None:
            return self._answer(hub.status, {}, b"{}")
        if match := _MODEL.fullmatch(path):
            return self._model(match[1], match[2])
        if match := _FILE.fullmatch(path):
            return self._file(match[1], match[2], match[3])
        return self._answer(404, {}, b"{}")

    def _model(self, repo_id: str, revision: str) -> None:
        if not self._may_read(repo_id):
            return
        commit = self.content.commit(repo_id, revision)
        if commit is None:
            return self._answer(404, {"X-Error-Code": "RevisionNotFound"}, b"{}")
        siblings = [
            {"rfilename": name, "size": len(content), "blobId": "0" * 40}
            | ({"lfs": _stored(content)} if name.endswith(LARGE) else {})
            for name, content in self.content.files[repo_id][commit].items()
        ]
        body = json.dumps({"id": repo_id, "sha": commit, "siblings": siblings}).encode()
        self._answer(200, {"Content-Type": "application/json"}, body)

    def _file(self, repo_id: str, commit: str, name: str) -> None:
        if not self._may_read(repo_id):
            return
        content = self.content.files[repo_id][commit].get(name)
        if content is None:
            return self._answer(404, {"X-Error-Code": "EntryNotFound"}, b"")
        etag = hashlib.sha256(content).hexdigest()
        if name in self.content.damaged:
            content = bytes(len(content))
        headers = {"ETag": f'"{etag}"', "X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
        ranged = _RANGE.fullmatch(self.headers.get("Range", ""))
        begin = int(ranged[1]) if ranged else 0
        if ranged:
            headers["Content-Range"] = f"bytes {begin}-{len(content) - 1}/{len(content)}"
        self._answer(206 if ranged else 200, headers, content[begin:], name)

    def _may_read(self, repo_id: str) -> bool:
        hub = self.content
        shown = self.headers.get("Authorization") == f"Bearer {hub.token}"
        if repo_id in hub.gated:
            self._answer(403, {"X-Error-Code": "GatedRepo"}, b"{}")
        elif hub.token is not None and not shown:
            self._answer(401, {"X-Error-Code": "RepoNotFound"}, b"{}")
        elif repo_id not in hub.files:
            self._answer(404, {"X-Error-Code": "RepoNotFound"}, b"{}")
        else:
            return True
        return False

    def _answer(
        self, status: int, headers: dict[str, str], body: bytes, name: str | None = None
    ) -> None:
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "HEAD":
            return
        stop = self.content.break_after.get(name or "")
        self.wfile.write(body[:stop])
        if stop is not None:
            self.close_connection = True

    def log_message(self, *_: object) -> None:
        """Nothing."""


def _stored(content: bytes) -> dict[str, object]:
    digest = hashlib.sha256(content).hexdigest()
    return {"sha256": digest, "oid": digest, "size": len(content), "pointerSize": 134}
