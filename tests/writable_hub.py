"""The stand-in for the Hub that takes repos, branches, large files and commits, as huggingface_hub sends them.

Not here: Xet, whose storage has a protocol of its own, and uploads in several parts.
"""

import base64
import binascii
import hashlib
import json
import os
import re
import shutil
from collections import defaultdict
from collections.abc import Callable
from itertools import count
from pathlib import Path
from urllib.parse import parse_qs, quote

import yaml
from huggingface_hub.repocard import REGEX_YAML_BLOCK

from .hub import REPO, Handler, Hub, HubError, files_in, is_large, path_info, sha256, xet_hash

REPOS = re.compile("/api/repos/create")
YAML = re.compile("/api/validate-yaml")
BRANCH = re.compile(rf"/api/models/(?P<repo>{REPO})/branch/(?P<branch>[^/]+)")
PREUPLOAD = re.compile(rf"/api/models/(?P<repo>{REPO})/preupload/(?P<revision>[^/]+)")
PATHS = re.compile(rf"/api/models/(?P<repo>{REPO})/paths-info/(?P<revision>[^/]+)")
DUPLICATE = re.compile(rf"/api/models/(?P<repo>{REPO})/lfs-files/duplicate")
COMMIT = re.compile(rf"/api/models/(?P<repo>{REPO})/commit/(?P<revision>[^/]+)")
BATCH = re.compile(rf"/(?P<repo>{REPO})\.git/info/lfs/objects/batch")
VERIFY = re.compile(rf"/(?P<repo>{REPO})\.git/info/lfs/objects/verify")
STORE = re.compile(r"/lfs/(?P<repo>[^/]+)/(?P<oid>[0-9a-f]{64})")

ATTRIBUTES = "*.bin filter=lfs diff=lfs merge=lfs -text\n*.safetensors filter=lfs diff=lfs merge=lfs -text\n"
FULL = "Repository storage limit reached."


class WritableHub(Hub):
    """The stand-in, with access tokens.

    place: an empty folder for what it is given.
    tokens: for each access token the namespaces that its holder may write to.
    discreet: namespaces whose repos are private unless asked for otherwise.
    full: namespaces whose storage takes no more.
    elsewhere: repos in another storage region, from which nothing can be copied.
    uploaded: (repo, digest, bytes) of every large file that was sent.
    committed: the operations of every commit, as the client sent them, without contents of files.
    before_storing: called with the digest of a large file that has arrived; what it raises keeps the file out.
    """

    def __init__(self, place: Path, tokens: dict[str, tuple[str, ...]]):
        super().__init__(WritingHandler)
        self.tokens = dict(tokens)
        self.discreet: set[str] = set()
        self.full: set[str] = set()
        self.elsewhere: set[str] = set()
        self.uploaded: list[tuple[str, str, int]] = []
        self.committed: list[list[dict]] = []
        self.before_storing: Callable[[str], None] = lambda oid: None
        self._place = place
        self._objects: dict[str, dict[str, Path]] = defaultdict(dict)
        self._numbers = count(1)

    def may_write(self, repo: str, token: str | None) -> bool:
        return repo.partition("/")[0] in self.tokens.get(token, ())

    def check_write(self, repo: str, token: str | None) -> None:
        """Refuse with `HubError` who may not write to a repo."""
        if token not in self.tokens:
            raise HubError(401, None, "Invalid username or password.")
        if not self.may_write(repo, token):
            raise HubError(403, None, f"You don't have the rights to write to {repo}")

    def folder(self, repo: str, revision: str = "main") -> Path:
        """Return the folder with the files of a repo."""
        return self._commits[repo][self._refs[repo].get(revision, revision)]

    def exists(self, repo: str) -> bool:
        return repo in self._commits

    def remove(self, repo: str) -> None:
        """Forget a repo."""
        del self._commits[repo], self._refs[repo]

    def refs(self, repo: str) -> dict[str, str]:
        """Return the commit of every branch and pull request of a repo."""
        return self._refs[repo]

    def holds(self, repo: str, oid: str) -> bool:
        """Return whether a large file is in the storage of a repo."""
        return oid in self._objects[repo]

    def store(self, repo: str, oid: str, content: bytes) -> None:
        """Keep a large file for a repo."""
        file = self._place / f"object {next(self._numbers)}"
        file.write_bytes(content)
        self._objects[repo][oid] = file

    def duplicate(self, source: str, target: str, oid: str) -> bool:
        """Give a large file of one repo to another; return whether the first one has it."""
        for folder in self._commits[source].values():
            for name, file in files_in(folder).items():
                if is_large(name, file.stat().st_size) and sha256(file) == oid:
                    self._objects[target][oid] = file
                    return True
        return False

    def begin(self, repo: str, private: bool) -> None:
        """Make a repo, as the Hub does: with a commit of .gitattributes."""
        folder = self._place / f"commit {next(self._numbers)}"
        folder.mkdir()
        (folder / ".gitattributes").write_text(ATTRIBUTES)
        self.push(repo, folder)
        if private:
            self.private.add(repo)

    def commit(self, repo: str, operations: list[dict], parent: str) -> str:
        """Make a commit on top of another, on no branch yet. Raises `HubError` for an operation that can't be done."""
        number = next(self._numbers)
        folder = self._place / f"commit {number}"
        shutil.copytree(self._commits[repo][parent], folder, copy_function=os.link)
        for operation in operations:
            key, value = operation["key"], operation["value"]
            file = folder / value["path"]
            if key in ("file", "lfsFile"):
                file.parent.mkdir(parents=True, exist_ok=True)
                file.unlink(missing_ok=True)
            match key:
                case "file":
                    file.write_bytes(base64.b64decode(value["content"], validate=True))
                case "lfsFile" if self.holds(repo, value["oid"]):
                    os.link(self._objects[repo][value["oid"]], file)
                case "deletedFile" if file.is_file():
                    file.unlink()
                case _:
                    raise HubError(400, None, f"Can't do {key} of {value['path']}")
        commit = hashlib.sha1(f"{repo}, {number}".encode()).hexdigest()
        self._commits[repo][commit] = folder
        return commit


class WritingHandler(Handler):
    """Answers what a push sends."""

    server: WritableHub

    def do_POST(self):
        self.respond()

    do_PUT = do_POST

    def _create(self):
        request = json.loads(self.body)
        namespace = request["organization"] or self.server.tokens.get(self.token, ("nobody",))[0]
        repo = f"{namespace}/{request['name']}"
        self.server.check_write(repo, self.token)
        answer = {"url": f"{self.server.url}/{repo}", "name": repo}
        if self.server.exists(repo):
            return _json({**answer, "error": "You already created this model repo"}, 409)
        # older releases of huggingface_hub send `private`
        visibility = request.get("visibility", {True: "private", False: "public"}.get(request.get("private")))
        usual = "private" if namespace in self.server.discreet else "public"
        self.server.begin(repo, private=(visibility or usual) == "private")
        return _json(answer)

    def _validate(self):
        match = REGEX_YAML_BLOCK.search(json.loads(self.body)["content"])
        errors = []
        try:
            metadata = yaml.safe_load(match[2] if match else "") or {}
            if not isinstance(metadata.get("license", ""), str | list):
                errors.append({"message": '"license" must be a string'})
        except yaml.YAMLError as error:
            errors.append({"message": str(error)})
        return _json({"errors": errors, "warnings": []}, 400 if errors else 200)

    def _branch(self, repo: str, branch: str):
        self.server.check_write(repo, self.token)
        commit, _ = self.server.find(repo, json.loads(self.body).get("startingPoint", "main"), self.token)
        if branch in self.server.refs(repo):
            raise HubError(409, None, "Reference already exists")
        self.server.refs(repo)[branch] = commit
        return _json({})

    def _preupload(self, repo: str, revision: str):
        self._check(repo, pull_request="create_pr" in self.query)
        _, folder = self.server.find(repo, revision, self.token)
        answers = []
        for file in json.loads(self.body)["files"]:
            answer = {"path": file["path"], "shouldIgnore": False, "uploadMode": "regular"}
            if is_large(file["path"], file["size"]):
                answer["uploadMode"] = "lfs"
            if (held := folder / file["path"]).is_file():
                info = path_info(file["path"], held)
                answer["oid"] = info.get("lfs", info)["oid"]
            answers.append(answer)
        return _json({"files": answers})

    def _paths(self, repo: str, revision: str):
        _, folder = self.server.find(repo, revision, self.token)
        files = files_in(folder)
        names = parse_qs(self.body.decode())["paths"]
        return _json([path_info(name, files[name]) for name in names if name in files])

    def _batch(self, repo: str):
        request = json.loads(self.body)
        self._check(repo, pull_request="ref" not in request)  # huggingface_hub names a branch only to commit to it
        assert "basic" in request["transfers"]
        answers = []
        for item in request["objects"]:
            answer = {"oid": item["oid"], "size": item["size"]}
            if repo.partition("/")[0] in self.server.full:
                answer["error"] = {"code": 403, "message": FULL}
            elif not self.server.holds(repo, item["oid"]):
                store = f"{self.server.url}/lfs/{quote(repo, safe='')}/{item['oid']}"
                verify = f"{self.server.url}/{repo}.git/info/lfs/objects/verify"
                answer["actions"] = {"upload": {"href": store}, "verify": {"href": verify}}
            answers.append(answer)
        return _json({"transfer": "basic", "objects": answers})

    def _store(self, repo: str, oid: str):
        if hashlib.sha256(self.body).hexdigest() != oid:
            raise HubError(400, None, "the content has another digest")
        self.server.before_storing(oid)
        self.server.store(repo, oid, self.body)
        self.server.uploaded.append((repo, oid, len(self.body)))
        return _json({})

    def _verify(self, repo: str):
        if not self.server.holds(repo, json.loads(self.body)["oid"]):
            raise HubError(404, None, "there is no such object")
        return _json({})

    def _duplicate(self, repo: str):
        request = json.loads(self.body)
        target = request["target"]["name"]
        self.server.check_write(target, self.token)
        self.server.find(repo, "main", self.token)
        if repo in self.server.gated:
            raise HubError(403, "GatedRepo", f"Access to model {repo} is restricted.")
        failed = []
        for file in request["files"]:
            digest = file["sha256"]
            if repo in self.server.elsewhere:
                failed.append({"sha256": digest, "error": "the repos are in different storage regions"})
            elif file["xetHash"] != xet_hash(digest) or not self.server.duplicate(repo, target, digest):
                failed.append({"sha256": digest, "error": "there is no such file"})
        return _json({"failed": failed})

    def _commit(self, repo: str, revision: str):
        self._check(repo, pull_request="create_pr" in self.query)
        header, *operations = map(json.loads, self.body.splitlines())
        assert header["key"] == "header"
        assert header["value"]["summary"]
        parent, _ = self.server.find(repo, revision, self.token)
        if (expected := header["value"].get("parentCommit")) not in (None, parent):
            raise HubError(412, None, f"A commit has happened since {expected}. Please refresh and try again.")
        try:
            commit = self.server.commit(repo, operations, parent)
        except binascii.Error as error:
            raise HubError(400, None, str(error)) from error
        pull_request = None
        refs = self.server.refs(repo)
        if "create_pr" in self.query:
            number = sum(name.startswith("refs/pr/") for name in refs) + 1
            refs[f"refs/pr/{number}"] = commit
            pull_request = f"{self.server.url}/{repo}/discussions/{number}"
        else:
            refs[revision] = commit
        for operation in operations:
            operation["value"].pop("content", None)
        self.server.committed.append(operations)
        url = f"{self.server.url}/{repo}/commit/{commit}"
        return _json({"commitUrl": url, "commitOid": commit, "pullRequestUrl": pull_request})

    def _check(self, repo: str, pull_request: bool):
        """Refuse who may not write; anyone known may send files of a pull request."""
        if not (pull_request and self.token in self.server.tokens):
            self.server.check_write(repo, self.token)

    routes = [
        *Handler.routes,
        ("POST", REPOS, _create),
        ("POST", YAML, _validate),
        ("POST", BRANCH, _branch),
        ("POST", PREUPLOAD, _preupload),
        ("POST", PATHS, _paths),
        ("POST", DUPLICATE, _duplicate),
        ("POST", COMMIT, _commit),
        ("POST", BATCH, _batch),
        ("POST", VERIFY, _verify),
        ("PUT", STORE, _store),
    ]


def _json(answer: dict | list, status: int = 200) -> tuple[int, bytes, dict[str, str]]:
    return status, json.dumps(answer).encode(), {"Content-Type": "application/json"}
