"""Tables in a file that is mapped into memory (data/mapped.py)."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ray_apr.cli.prompt_files import PromptFile, read_prompts
from ray_apr.cli.user_files import check_prompts
from ray_apr.core.exceptions import ConfigError, ResourceError
from ray_apr.data import encoding
from ray_apr.data.encoding import encode_dataset
from ray_apr.data.mapped import mapped_table
from ray_apr.data.prompts import PromptSource
from ray_apr.data.rows import PromptRows
from tests.fakes import ArrowDataset

FIRST = pa.table({"id": [1, 2], "note": pa.nulls(2)})
SECOND = pa.table({"id": [3], "note": ["a"]})
SCHEMA = pa.unify_schemas([FIRST.schema, SECOND.schema])


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder for temporary files."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def test_tables_are_one_that_is_in_no_memory_and_leaves_no_file(temporary: Path) -> None:
    before = pa.total_allocated_bytes()
    big = pa.table({"id": range(1_000_000), "note": pa.nulls(1_000_000)})
    allocated = pa.total_allocated_bytes() - before
    table = mapped_table(SCHEMA, iter([FIRST, SECOND, big]))
    del big
    assert table.slice(0, 3).to_pylist() == [
        {"id": 1, "note": None}, {"id": 2, "note": None}, {"id": 3, "note": "a"},
    ]  # fmt: skip
    assert len(table) == 1_000_003
    assert pa.total_allocated_bytes() - before < allocated / 10
    assert not list(temporary.iterdir())
    assert len(mapped_table(SCHEMA, iter([]))) == 0


def test_a_full_disk_is_named(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def tables():
        yield FIRST
        raise OSError(28, "No space left on device")

    with pytest.raises(ResourceError, match=r"temporary does not take .* No space .* TMPDIR"):
        mapped_table(SCHEMA, tables())
    assert not list(temporary.iterdir())


def test_a_parquet_file_is_read_a_batch_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    table = pa.table({"prompt": [f"{n}" for n in range(200_000)], "of": [[1], []] * 100_000})
    pq.write_table(table, path, row_group_size=70_000)
    rows = read_prompts(PromptFile(path=str(path), limit=150_000))
    assert len(rows) == 150_000 and rows.slice(149_999, 150_001) == [{"prompt": "149999", "of": []}]
    data = bytearray(path.read_bytes())
    data[100:20_000] = b"x" * 19_900
    path.write_bytes(data)
    with pytest.raises(ConfigError, match=r"prompts = .*a\.parquet.*: cannot be read"):
        read_prompts(PromptFile(path=str(path)))


def test_dictionary_columns_hold_their_values(tmp_path: Path) -> None:
    """known fault: "Dictionary replacement detected when writing IPC file format"."""
    levels = [f"level {n // 2}" for n in range(200_000)]
    table = pa.table({"prompt": levels, "level": pa.array(levels).dictionary_encode()})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=70_000)
    rows = read_prompts(PromptFile(path=str(tmp_path / "a.parquet")))
    assert rows.column("level") == levels
    inner = pa.array(["a", "b"]).dictionary_encode()
    nested = pa.table({
        "list": pa.ListArray.from_arrays([0, 2], inner),
        "large": pa.LargeListArray.from_arrays([0, 2], inner),
        "struct": pa.StructArray.from_arrays([inner[1:]], ["of"]),
    })  # fmt: skip
    other = [{"list": ["c"], "large": ["d"], "struct": {"of": "e"}}]
    tables = [nested, pa.Table.from_pylist(other).cast(nested.schema)]
    mapped = mapped_table(nested.schema, tables)
    assert mapped.to_pylist() == nested.to_pylist() + other


def test_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    column = pa.array(["1+1="])
    table = pa.Table.from_arrays([column] * 3, names=["prompt", "answer", "answer"])
    pq.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(ConfigError, match=r"^prompts = 'a\.parquet': .*'answer'; rename"):
        check_prompts("a.parquet", tmp_path, "prompt")


def test_large_tables_are_several_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    given = []
    monkeypatch.setattr("ray.data.from_blocks", given.append)
    PromptRows(pa.table({"prompt": range(140_000)})).to_dataset()
    PromptRows(pa.table({"prompt": [1]})).to_dataset()
    assert [[len(part) for part in parts] for parts in given] == [[65_536, 65_536, 8_928], [1]]


def encoded(monkeypatch, *tables):
    monkeypatch.setattr("ray.get", lambda ref: ref)
    monkeypatch.setattr(encoding, "load_tokenizer", lambda *_: None)
    return encode_dataset(
        ArrowDataset(list(tables)), model="m", column="prompt", max_prompt_tokens=9
    )


def test_encoded_prompts_of_a_file_are_handed_out_as_those_in_memory(monkeypatch) -> None:
    first = pa.table({"prompt": [[1], [1, 2]], "note": pa.nulls(2)})
    second = pa.table({"prompt": [[3] * n for n in (3, 4)], "note": list("ab")})
    of = encoded(monkeypatch, first, second)
    mapped = PromptSource([mapped_table(of.schema, of.tables)], seed=3)
    here = PromptSource(of.tables, seed=3)
    prompts = [mapped.next() for _ in range(9)]
    assert prompts == [here.next() for _ in range(9)]
    assert {prompt.row["note"] for prompt in prompts} == {None, "a", "b"}


def test_a_number_that_is_no_token_id_is_an_error(monkeypatch) -> None:
    with pytest.raises(
        ConfigError, match=r"prompts\[1\]\.prompt = \[2147483648\]: are no token ids"
    ):
        encoded(monkeypatch, pa.table({"prompt": [[1], [2**31]]}))
