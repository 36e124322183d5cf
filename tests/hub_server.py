"""A hub on this machine: what the package `datasets` asks it for of its one dataset, ``org/sums``,
and what `huggingface_hub` sends it of a model.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import io
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

ID = "org/sums"
ROWS = [{"prompt": "1+1=", "answer": "2"}, {"prompt": "1+2=", "answer": "3"}]
TOKEN = "hf_of_this_hub"
"""Of who may write."""
_FILE, _COMMIT = "data/train-00000-of-00001.parquet", "1" * 40


@dataclass
class Model:
    """A repository that was made, and what was committed to it."""

    made: dict[str, Any] = field(default_factory=dict)
    """What the repository was asked to be."""
    blobs: dict[str, bytes] = field(default_factory=dict)
    """Contents of large files, by their SHA-256."""
    files: dict[str, bytes] = field(default_factory=dict)
    message: str = ""
    """Of the commit."""


@contextlib.contextmanager
def hub(model: Model | None = None) -> Iterator[tuple[str, list[str]]]:
    """Serve it; gives its URL, and the paths that it is asked for.

    Args:
        model: Gets what is pushed.
    """
    data, asked = io.BytesIO(), []
    pq.write_table(pa.Table.from_pylist(ROWS), data)

    class Hub(_Hub):
        file, paths, pushed = data.getvalue(), asked, model or Model()

    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", asked
        finally:
            server.shutdown()
            thread.join()


class _Hub(BaseHTTPRequestHandler):
    file = b""
    paths: list[str]
    pushed: Model

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        self.paths.append(path)
        oid = hashlib.sha1(self.file).hexdigest()
        api = f"/api/datasets/{ID}"
        headers, body = {"X-Repo-Commit": _COMMIT}, b""
        if path == api or path.startswith(f"{api}/revision/"):
            body = _json({"id": ID, "sha": _COMMIT, "siblings": [{"rfilename": _FILE}]})
        elif path.startswith(f"{api}/tree/"):
            file = {"type": "file", "path": _FILE, "size": len(self.file), "oid": oid}
            folder = {"type": "directory", "path": "data", "oid": _COMMIT, "size": 0}
            body = _json([file] if path.endswith("/data") else [folder])
        elif path.startswith(f"/datasets/{ID}/resolve/") and path.endswith(_FILE):
            body, headers["ETag"] = self.file, f'"{oid}"'
        else:
            headers["X-Error-Code"] = "EntryNotFound" if ID in path else "RepoNotFound"
        self._answer(200 if body else 404, headers, body)

    def do_PUT(self) -> None:
        self.pushed.blobs[self.path.rpartition("/")[2]] = self._body()
        self._answer(200, {}, b"")

    def do_POST(self) -> None:
        if self.headers["Authorization"] != f"Bearer {TOKEN}":
            self._answer(401, {}, b"")
            return
        body, path, answer = self._body(), self.path, dict[str, Any]()
        lines = [json.loads(line) for line in body.splitlines()]
        if path == "/api/repos/create":
            self.pushed.made = lines[0]
            answer["url"] = f"{self._url}/{lines[0]['organization']}/{lines[0]['name']}"
        elif "/preupload/" in path:
            answer["files"] = [
                {"path": name, "uploadMode": _mode(name), "shouldIgnore": False}
                for name in (file["path"] for file in lines[0]["files"])
            ]
        elif path.endswith("/info/lfs/objects/batch"):
            answer["objects"] = [
                one | {"actions": {"upload": {"href": f"{self._url}/lfs/{one['oid']}"}}}
                for one in lines[0]["objects"]
            ]
        elif "/commit/" in path:
            self._commit(lines)
            repo = "/".join(path.split("/")[3:5])
            answer["commitUrl"] = f"{self._url}/{repo}/commit/{_COMMIT}"
            answer["commitOid"] = _COMMIT
        self._answer(200, {}, _json(answer))

    def _commit(self, lines: list[dict[str, Any]]) -> None:
        for of, value in ((line["key"], line["value"]) for line in lines):
            if of == "header":
                self.pushed.message = value["summary"]
            elif of == "file":
                self.pushed.files[value["path"]] = base64.b64decode(value["content"])
            elif of == "lfsFile":
                self.pushed.files[value["path"]] = self.pushed.blobs[value["oid"]]

    @property
    def _url(self) -> str:
        return f"http://{self.headers['Host']}"

    def _body(self) -> bytes:
        return self.rfile.read(int(self.headers["Content-Length"]))

    def _answer(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Nothing."""


def _mode(name: str) -> str:
    return "lfs" if name.endswith(".safetensors") else "regular"


def _json(value: Any) -> bytes:
    return json.dumps(value).encode()
