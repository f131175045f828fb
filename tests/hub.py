"""A stand-in for the Hugging Face Hub on this machine: serves folders as model repos and records what it is asked."""

import hashlib
import json
import re
from collections import defaultdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import NamedTuple
from urllib.parse import parse_qs, unquote, urlsplit

REPO = "[^/]+(?:/(?!revision/|tree/|resolve/)[^/]+)?"
API = re.compile(rf"/api/models/(?P<repo>{REPO})(?:/(?P<what>revision|tree)/(?P<revision>[^/]+)(?:/(?P<path>.+))?)?")
FILE = re.compile(rf"/(?P<repo>{REPO})/resolve/(?P<revision>[^/]+)/(?P<path>.+)")
RANGE = re.compile(r"bytes=(\d+)-(\d*)")


class Request(NamedTuple):
    """One request: the file it was for (None for the API), how it was answered and how many bytes of the file went."""

    method: str
    url: str
    repo: str | None
    file: str | None
    status: int
    sent: int


class HubError(Exception):
    """An answer other than success: its status, `X-Error-Code` and `X-Error-Message`."""


class Hub(ThreadingHTTPServer):
    """The stand-in; a context manager that serves while it is open.

    requests: all that were answered, in order.
    gated: ids of the repos whose files are refused to everyone.
    """

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.requests: list[Request] = []
        self.gated: set[str] = set()
        self._commits: dict[str, dict[str, Path]] = defaultdict(dict)
        self._refs: dict[str, dict[str, str]] = defaultdict(dict)

    def __enter__(self):
        Thread(target=self.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *exception):
        self.shutdown()
        self.server_close()

    def push(self, repo: str, folder: Path, *tags: str) -> str:
        """Make the folder the newest commit of a repo, with `tags` on it, and return the commit."""
        commit = hashlib.sha1(f"{repo}, commit {len(self._commits[repo])}".encode()).hexdigest()
        self._commits[repo][commit] = folder
        self._refs[repo].update(dict.fromkeys(("main", *tags), commit))
        return commit

    def find(self, repo: str, revision: str) -> tuple[str, Path]:
        """The commit and the folder of a revision. Raises `HubError`."""
        if repo not in self._commits:
            raise HubError(401, "RepoNotFound", "Invalid username or password.")  # what the Hub tells the anonymous
        commit = self._refs[repo].get(revision, revision)
        if commit not in self._commits[repo]:
            raise HubError(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return commit, self._commits[repo][commit]

    def asked(self, repo: str) -> set[str]:
        """The files of a repo that any request named and that exist."""
        return {request.file for request in self.requests if request.repo == repo and request.file}

    def sent(self, repo: str, file: str) -> int:
        """How many bytes of a file went out, over all requests."""
        return sum(request.sent for request in self.requests if (request.repo, request.file) == (repo, file))


class Handler(BaseHTTPRequestHandler):
    """Answers as the Hub does for public, gated and unknown model repos."""

    protocol_version = "HTTP/1.1"
    server: Hub

    def do_GET(self):
        url = urlsplit(self.path)
        self.repo = self.file = None
        try:
            if match := API.fullmatch(url.path):
                self._send(*self._answer_api(blobs="blobs" in parse_qs(url.query), **_unquoted(match)))
            elif match := FILE.fullmatch(url.path):
                self._send(*self._answer_file(**_unquoted(match)))
            else:
                raise HubError(404, None, "Sorry, we can't find the page you are looking for.")
        except HubError as error:
            status, code, message = error.args
            headers = {"X-Error-Code": code, "X-Error-Message": message}
            self._send(status, json.dumps({"error": message}).encode(), {k: v for k, v in headers.items() if v})

    do_HEAD = do_GET

    def _answer_api(self, repo: str, what: str | None, revision: str | None, path: str | None, blobs: bool):
        self.repo = repo
        commit, folder = self.server.find(repo, revision or "main")
        files = {file.relative_to(folder).as_posix(): file for file in sorted(folder.rglob("*")) if file.is_file()}
        if what == "tree":
            inside = {name: file for name, file in files.items() if path is None or name.startswith(f"{path}/")}
            if not inside:
                raise HubError(404, "EntryNotFound", f"{path} does not exist on {revision!r}")
            answer = [
                {"type": "file", "path": name, "size": file.stat().st_size, "oid": _etag(file)}
                for name, file in inside.items()
            ]
        else:
            siblings = [{"rfilename": name, **(_blob(file) if blobs else {})} for name, file in files.items()]
            gated = "manual" if repo in self.server.gated else False
            answer = {"id": repo, "sha": commit, "private": False, "gated": gated, "tags": [], "siblings": siblings}
        return 200, json.dumps(answer).encode(), {"Content-Type": "application/json"}

    def _answer_file(self, repo: str, revision: str, path: str):
        self.repo = repo
        commit, folder = self.server.find(repo, revision)
        if repo in self.server.gated:
            raise HubError(403, "GatedRepo", f"Access to model {repo} is restricted.")
        if not (folder / path).is_file():
            raise HubError(404, "EntryNotFound", "Entry not found")
        self.file = path
        content = (folder / path).read_bytes()
        headers = {"ETag": f'"{_etag(folder / path)}"', "X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
        if not (match := RANGE.fullmatch(self.headers.get("Range", ""))):
            return 200, content, headers
        start, last = int(match[1]), min(int(match[2] or len(content)), len(content) - 1)
        return 206, content[start : last + 1], {**headers, "Content-Range": f"bytes {start}-{last}/{len(content)}"}

    def _send(self, status: int, body: bytes, headers: dict[str, str]):
        sent = len(body) if self.command == "GET" and self.file else 0
        self.server.requests.append(Request(self.command, self.path, self.repo, self.file, status, sent))
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *arguments):
        """Print nothing; `Hub.requests` has it all."""


def _unquoted(match: re.Match) -> dict[str, str | None]:
    return {name: value and unquote(value) for name, value in match.groupdict().items()}


def _blob(file: Path) -> dict:
    """What the Hub tells of a file; weights are in large-file storage."""
    size, digest = file.stat().st_size, _etag(file)
    large = {"lfs": {"sha256": digest, "size": size, "pointerSize": 134}} if file.suffix == ".safetensors" else {}
    return {"size": size, "blobId": digest, **large}


def _etag(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()
