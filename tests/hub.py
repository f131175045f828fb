"""A stand-in for the Hugging Face Hub on this machine: serves folders as model repos and records requests."""

import hashlib
import json
import re
from collections import defaultdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import NamedTuple
from urllib.parse import parse_qs, unquote, urlsplit

from huggingface_hub.repocard import metadata_load
from huggingface_hub.utils.sha import git_hash

REPO = "[^/]+(?:/(?!revision/|tree/|resolve/)[^/]+)?"
API = re.compile(rf"/api/models/(?P<repo>{REPO})(?:/(?P<what>revision|tree)/(?P<revision>[^/]+)(?:/(?P<path>.+))?)?")
FILE = re.compile(rf"/(?P<repo>{REPO})/resolve/(?P<revision>[^/]+)/(?P<path>.+)")
RANGE = re.compile(r"bytes=(\d+)-(\d*)")
LARGE = (".bin", ".pt", ".pth", ".safetensors")  # of the suffixes that the Hub's own .gitattributes gives to LFS
LARGEST_OUTSIDE_LFS = 10_000_000  # bytes, on the Hub too


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
    private: ids of the repos that only who may write to them can see.
    """

    daemon_threads = True

    def __init__(self, handler: "type[Handler] | None" = None):
        super().__init__(("127.0.0.1", 0), handler or Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.requests: list[Request] = []
        self.gated: set[str] = set()
        self.private: set[str] = set()
        self._commits: dict[str, dict[str, Path]] = defaultdict(dict)
        self._refs: dict[str, dict[str, str]] = defaultdict(dict)

    def __enter__(self):
        Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()
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

    def may_write(self, repo: str, token: str | None) -> bool:
        """Return whether the holder of an access token may write to a repo: here nobody."""
        return False

    def find(self, repo: str, revision: str, token: str | None = None) -> tuple[str, Path]:
        """Return the commit and the folder of a revision. Raises `HubError`."""
        if repo not in self._commits or (repo in self.private and not self.may_write(repo, token)):
            raise HubError(401, "RepoNotFound", "Invalid username or password.")  # what the Hub tells the anonymous
        commit = self._refs[repo].get(revision, revision)
        if commit not in self._commits[repo]:
            raise HubError(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return commit, self._commits[repo][commit]

    def files_requested(self, repo: str) -> set[str]:
        """Return the existing files of a repo that requests named."""
        return {request.file for request in self.requests if request.repo == repo and request.file}

    def sent(self, repo: str, file: str) -> int:
        """Return how many bytes of a file went out, over all requests."""
        return sum(request.sent for request in self.requests if (request.repo, request.file) == (repo, file))


class Handler(BaseHTTPRequestHandler):
    """Answers as the Hub does for public, gated and unknown model repos."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # headers and body go out one after the other
    server: Hub

    def do_GET(self):
        self.respond()

    do_HEAD = do_GET

    def respond(self):
        """Answer by the first of `routes` that fits; its groups are the arguments."""
        url = urlsplit(self.path)
        self.repo = self.file = None
        self.query = parse_qs(url.query)
        self.body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.token = self.headers.get("Authorization", "").removeprefix("Bearer ") or None
        method = "GET" if self.command == "HEAD" else self.command
        try:
            for accepted, pattern, answer in self.routes:
                if method == accepted and (match := pattern.fullmatch(url.path)):
                    return self._send(*answer(self, **_unquoted(match)))
            raise HubError(404, None, "Sorry, we can't find the page you are looking for.")
        except HubError as error:
            status, code, message = error.args
            headers = {"X-Error-Code": code, "X-Error-Message": message}
            self._send(status, json.dumps({"error": message}).encode(), {k: v for k, v in headers.items() if v})

    def _answer_api(self, repo: str, what: str | None, revision: str | None, path: str | None):
        self.repo = repo
        commit, folder = self.server.find(repo, revision or "main", self.token)
        files = files_in(folder)
        if what == "tree":
            inside = {name: file for name, file in files.items() if path is None or name.startswith(f"{path}/")}
            if not inside:
                raise HubError(404, "EntryNotFound", f"{path} does not exist on {revision!r}")
            answer = [path_info(name, file) for name, file in inside.items()]
        else:
            answer = {
                "id": repo,
                "sha": commit,
                "private": repo in self.server.private,
                "gated": "manual" if repo in self.server.gated else False,
                "tags": [],
                "cardData": metadata_load(files["README.md"]) if "README.md" in files else None,
                "siblings": [
                    {"rfilename": name, **(_sibling(name, file) if "blobs" in self.query else {})}
                    for name, file in files.items()
                ],
            }
        return 200, json.dumps(answer).encode(), {"Content-Type": "application/json"}

    def _answer_file(self, repo: str, revision: str, path: str):
        self.repo = repo
        commit, folder = self.server.find(repo, revision, self.token)
        if repo in self.server.gated:
            raise HubError(403, "GatedRepo", f"Access to model {repo} is restricted.")
        if not (folder / path).is_file():
            raise HubError(404, "EntryNotFound", "Entry not found")
        self.file = path
        content = (folder / path).read_bytes()
        headers = {"ETag": f'"{sha256(folder / path)}"', "X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
        if not (match := RANGE.fullmatch(self.headers.get("Range", ""))):
            return 200, content, headers
        start, last = int(match[1]), min(int(match[2] or len(content)), len(content) - 1)
        return 206, content[start : last + 1], {**headers, "Content-Range": f"bytes {start}-{last}/{len(content)}"}

    routes = [("GET", API, _answer_api), ("GET", FILE, _answer_file)]

    def _send(self, status: int, body: bytes, headers: dict[str, str]):
        sent = len(body) if self.command == "GET" and self.file else 0
        self.server.requests.append(Request(self.command, self.path, self.repo, self.file, status, sent))
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *arguments):
        """Print nothing; `Hub.requests` has it all."""


def _unquoted(match: re.Match) -> dict[str, str | None]:
    return {name: value and unquote(value) for name, value in match.groupdict().items()}


def _sibling(name: str, file: Path) -> dict:
    """Return the entry of a file in the info of a repo."""
    info = path_info(name, file)
    sibling = {"size": info["size"], "blobId": info["oid"]}
    return {**sibling, "lfs": {**info["lfs"], "sha256": info["lfs"]["oid"]}} if "lfs" in info else sibling


def path_info(name: str, file: Path) -> dict:
    """Return the entry of a file in the tree of a repo, with git's digest of it, or of the pointer to a large one."""
    size = file.stat().st_size
    info = {"type": "file", "path": name, "size": size}
    if not is_large(name, size):
        return {**info, "oid": git_hash(file.read_bytes())}
    digest = sha256(file)
    pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{digest}\nsize {size}\n".encode()
    lfs = {"oid": digest, "size": size, "pointerSize": len(pointer)}
    return {**info, "oid": git_hash(pointer), "lfs": lfs, "xetHash": xet_hash(digest)}


def files_in(folder: Path) -> dict[str, Path]:
    """Return all files of a folder by their names in a repo."""
    return {file.relative_to(folder).as_posix(): file for file in sorted(folder.rglob("*")) if file.is_file()}


def is_large(name: str, size: int) -> bool:
    """Return whether LFS keeps a file."""
    return name.endswith(LARGE) or size > LARGEST_OUTSIDE_LFS


def sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def xet_hash(digest: str) -> str:
    """Return the Xet hash of a file with a SHA-256; only equality matters here."""
    return hashlib.sha256(f"xet {digest}".encode()).hexdigest()
