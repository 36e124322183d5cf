"""A hub on this machine with one dataset, ``org/sums``: what the package `datasets` asks it for."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

ID = "org/sums"
ROWS = [{"prompt": "1+1=", "answer": "2"}, {"prompt": "1+2=", "answer": "3"}]
_FILE, _COMMIT = "data/train-00000-of-00001.parquet", "1" * 40


@contextlib.contextmanager
def hub() -> Iterator[tuple[str, list[str]]]:
    """Serve it; gives its URL, and the paths that it is asked for."""
    data, asked = io.BytesIO(), []
    pq.write_table(pa.Table.from_pylist(ROWS), data)

    class Hub(_Hub):
        file, paths = data.getvalue(), asked

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
        self.send_response(200 if body else 404)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Nothing."""


def _json(value: Any) -> bytes:
    return json.dumps(value).encode()
