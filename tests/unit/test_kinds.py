"""Columns of prompts: numbers are one kind, and several kinds are an error that can be read."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ray_apr.cli.prompt_files import PromptsSettings, WeightedFile, read_prompts
from ray_apr.core.exceptions import ConfigError
from ray_apr.data import encoding
from ray_apr.data.encoding import encode_dataset
from ray_apr.data.kinds import of_one_kind
from ray_apr.data.mapped import mapped_table
from ray_apr.data.prompts import PromptSource, check_dataset, held_out_prompts
from tests.fakes import ArrowDataset

OF_RAY = (
    'ray::MapBatches(encode)()\n  File "transform_pyarrow.py", line 1215, in concat\n'
    "ArrowConversionError: Error converting data to Arrow: Failed to unify schemas: "
    "Unable to merge: Field answer has incompatible types: int64 vs string\n----------------\n"
)


def encoded(monkeypatch, *tables):
    monkeypatch.setattr("ray.get", lambda ref: ref)
    monkeypatch.setattr(encoding, "load_tokenizer", lambda *_: None)
    settings = {"model": "m", "column": "prompt", "max_prompt_tokens": 9}
    return encode_dataset(ArrowDataset(list(tables)), **settings)


def answers(*values):
    return pa.table({"prompt": [[1]] * len(values), "answer": list(values)})


@pytest.mark.parametrize(("whole", "real"), [(7, 7.5), ([7], [7.5]), ({"n": 7}, {"n": 7.5})])
def test_whole_numbers_of_one_table_go_with_those_of_another(monkeypatch, whole, real) -> None:
    """A .jsonl file of more than 4096 rows is several tables: the run ended with Arrow's error."""
    prompts = encoded(monkeypatch, answers(whole, whole), answers(real))
    table = mapped_table(prompts.schema, prompts.tables)
    assert table["answer"].to_pylist() == [whole, whole, real]
    assert table["answer"].to_pylist() == [
        p.row["answer"] for p in held_out_prompts(prompts.tables)
    ]
    assert len(PromptSource(prompts.tables, seed=0)) == 3


def test_a_column_of_several_kinds_is_named(monkeypatch) -> None:
    with pytest.raises(ConfigError, match=r"^prompts\[\*\]\.answer = 'int64 vs string': a column"):
        encoded(monkeypatch, answers(7), answers("seven"))


def test_the_error_of_ray_data_is_one_of_ours_and_no_traceback() -> None:
    with pytest.raises(ConfigError) as caught, of_one_kind():
        raise RuntimeError(OF_RAY)
    assert str(caught.value).startswith("prompts[*].answer = 'int64 vs string': a column has")
    assert "transform_pyarrow" not in str(caught.value) and caught.value.__suppress_context__
    with pytest.raises(ZeroDivisionError), of_one_kind():
        raise ZeroDivisionError("of the user's own function")


def test_the_schema_of_a_dataset_is_looked_at_before_anything_starts() -> None:
    class Dataset(ArrowDataset):
        def schema(self):
            raise pa.ArrowTypeError("Unable to merge: Field a b has incompatible types: x vs y<z>")

    with pytest.raises(ConfigError, match=r"^prompts\[\*\]\.a b = 'x vs y<z>'"):
        check_dataset(Dataset([]), "m", "prompt")


def test_numbers_of_parquet_files_are_one_kind(tmp_path: Path) -> None:
    files = []
    for name, value in (("a", 1), ("b", 2.5)):
        files.append(WeightedFile(path=str(tmp_path / f"{name}.parquet")))
        pq.write_table(pa.table({"prompt": [name], "answer": [value]}), files[-1].path)
    rows = read_prompts(PromptsSettings(files=tuple(files)))
    assert rows.column("answer") == [1.0, 2.5]
