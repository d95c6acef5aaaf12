"""The Hugging Face Hub in tests: a cache made by hand, and a small server that answers like the Hub."""

import contextlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def fill(cache: Path, files: dict, *, name="org/small", ref="main", commit=COMMIT, tree=()) -> Path:
    """A snapshot in the cache, laid out as the Hub's client does; a value that is a Path becomes a link to it.

    With `tree` the client knows which files the repository has, as it does after a download of its own.
    """
    at = cache / f"models--{name.replace('/', '--')}"
    (at / "refs").mkdir(parents=True, exist_ok=True)
    (at / "refs" / ref).write_text(commit)
    snapshot = at / "snapshots" / commit
    snapshot.mkdir(parents=True)
    for file, content in files.items():
        (snapshot / file).parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, Path):
            (snapshot / file).symlink_to(content)
        else:
            (snapshot / file).write_text(content)
    if tree:
        listing = {"format_version": 1, "files": {file: {"size": 1, "blob_id": "0" * 40} for file in tree}}
        (at / "trees").mkdir()
        (at / "trees" / f"{commit}.json").write_text(json.dumps(listing))
    return snapshot


class _Answers(BaseHTTPRequestHandler):
    """`org/open` and `org/gated` exist, with the server's `files`; of the second anyone may see the list only."""

    def do_HEAD(self):
        self._answer(with_body=False)

    def do_GET(self):
        self._answer(with_body=True)

    def _answer(self, *, with_body):
        status, headers, body = self._found(self.path.partition("?")[0].removeprefix("/api/models").strip("/"))
        self.server.asked.append(self.path)
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(body))} | headers).items():
            self.send_header(name, value)
        self.end_headers()
        if with_body:
            self.wfile.write(body)

    def _found(self, path):
        name, _, rest = path.partition("/revision/") if "/revision/" in path else path.partition("/tree/")
        name = "/".join(name.split("/")[:2])
        if name not in ("org/open", "org/gated"):
            return 404, {"X-Error-Code": "RepoNotFound"}, b""
        if "/revision/" in path:
            if rest not in ("main", COMMIT):
                return 404, {"X-Error-Code": "RevisionNotFound"}, b""
            return 200, {}, json.dumps({"id": name, "sha": COMMIT, "siblings": []}).encode()
        if "/tree/" in path:
            files = [
                {"type": "file", "path": file, "size": len(content), "oid": f"{n:040x}"}
                for n, (file, content) in enumerate(self.server.files.items())
            ]
            return 200, {}, json.dumps(files).encode()
        if name == "org/gated":
            return 401, {"X-Error-Code": "GatedRepo", "X-Error-Message": "Access is restricted."}, b""
        file = path.removeprefix(f"{name}/resolve/{COMMIT}/")
        content = self.server.files[file].encode()
        number = list(self.server.files).index(file)
        return 200, {"ETag": f'"{number:040x}"', "X-Repo-Commit": COMMIT}, content

    def log_message(self, *_):
        pass


@contextlib.contextmanager
def hub(files: dict):
    """A Hub of two repositories; gives the environment that makes the client ask it, and what was asked."""
    with ThreadingHTTPServer(("127.0.0.1", 0), _Answers) as server:
        server.files, server.asked = files, []
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HF_HUB_DISABLE_XET": "1"}, server.asked
        finally:
            server.shutdown()
            thread.join()
