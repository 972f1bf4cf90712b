"""Tables of prompts: what was written is what is read, and nonsense is refused in words, in every format."""

from __future__ import annotations

import csv
import io
import json
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from muralist.core.errors import UserError
from muralist.data.prompts import PromptTable, open_prompt_table, open_prompts
from muralist.settings import GenerateSettings
from tests.fuzz.damage import BAD_JSON, NONSENSE, damaged, damaged_json, examples, nonsense, refused_or, untouched

ROWS: list[dict[str, Any]] = [
    {"image_id": "a1", "prompt": "a red car, parked", "seed": 7, "height": 64, "width": 32},
    {"image_id": "b/2", "prompt": 'a sign that says "STOP"', "seed": 8, "height": 64, "width": 64},
    {"image_id": "c", "prompt": "two\nlines, and a café", "seed": 9, "height": 32, "width": 64},
]
_HEADER = ["image_id", "prompt", "seed", "height", "width"]


def _separated(rows: list[dict[str, Any]], separator: str) -> bytes:
    text = io.StringIO()
    writer = csv.DictWriter(text, _HEADER, delimiter=separator)
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue().encode()


def _parquet(table: pa.Table) -> bytes:
    buffer = io.BytesIO()
    pq.write_table(table, buffer)
    return buffer.getvalue()


VALID = {
    "csv": _separated(ROWS, ","),
    "tsv": _separated(ROWS, "\t"),
    "jsonl": b"".join(json.dumps(row).encode() + b"\n" for row in ROWS),
    "txt": b"# traffic\na red car\n\ntwo dogs\r\n\\# snow",
    "json": json.dumps({"annotations": [{"image_id": 5, "id": 1, "caption": "a car"}]}).encode(),
    "parquet": _parquet(pa.Table.from_pylist(ROWS)),
}
_TAGS = tuple(VALID)


def _read(folder: Path, kind: str, data: bytes) -> PromptTable | UserError:
    path = folder / f"table.{kind}"
    path.write_bytes(data)
    with untouched(folder):
        table = refused_or(lambda: open_prompt_table(str(path)))
        if isinstance(table, PromptTable):
            _check(table)
    return table


def _check(table: PromptTable) -> None:
    """A table that was taken can be read again by row, in any order, and its ids never leave a folder."""
    rows = table.rows(range(len(table)))
    assert table.rows(range(len(table))[::-1]) == rows[::-1]
    for number, row in enumerate(rows):
        assert row.index == number
        assert row.id and not set(row.id) & set("/\\\0") and not row.id.startswith(".") and len(row.id.encode()) <= 150
        assert row.seed is None or 0 <= row.seed < 2**62
        row.prompt.encode()


@pytest.mark.parametrize("kind", _TAGS)
@examples(33)
@given(data=st.data())
def test_damaged_tables_are_read_or_refused(kind: str, data: st.DataObject, tmp_path_factory: Any) -> None:
    _read(tmp_path_factory.mktemp("table"), kind, data.draw(damaged(VALID[kind])))


@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet"])
@examples(33)
@given(rows=nonsense(ROWS))
def test_rows_of_nonsense_are_read_or_refused(kind: str, rows: Any, tmp_path_factory: Any) -> None:
    rows = rows if isinstance(rows, list) else [rows]
    if kind == "jsonl":
        data = b"".join(json.dumps(row).encode() + b"\n" for row in rows)
    elif kind == "csv":
        text = io.StringIO()
        csv.writer(text).writerows([_HEADER, *(row.values() if isinstance(row, dict) else [row] for row in rows)])
        data = text.getvalue().encode(errors="surrogatepass")
    else:
        try:
            data = _parquet(pa.Table.from_pylist([row for row in rows if isinstance(row, dict)]))
        except (pa.ArrowException, OverflowError, ValueError, TypeError):
            return  # no Parquet file can hold this
    _read(tmp_path_factory.mktemp("table"), kind, data)


@examples(22)
@given(data=damaged_json({"annotations": [{"image_id": 5, "id": 1, "caption": "a car"}, {"caption": "b"}]}))
def test_captions_of_nonsense_are_read_or_refused(data: bytes, tmp_path_factory: Any) -> None:
    _read(tmp_path_factory.mktemp("table"), "json", data)


@pytest.mark.parametrize("kind", _TAGS)
@pytest.mark.parametrize(
    "data", [*BAD_JSON, VALID["csv"].split(b"\n")[0], b"prompt\n", b"prompt", b'prompt\n"', b"\r" * 9]
)
def test_files_that_are_not_tables_are_read_or_refused(kind: str, data: bytes, tmp_path: Path) -> None:
    found = _read(tmp_path, kind, data)
    if kind in ("json", "parquet"):
        assert isinstance(found, UserError)


_text = st.text(st.characters(codec="utf-8"), max_size=30)


@pytest.mark.parametrize("kind", ["csv", "tsv", "jsonl", "parquet"])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
@pytest.mark.parametrize("line_end", ["\n", "\r\n"])
@examples(13)
@given(rows=st.lists(st.tuples(_text, _text.filter(str.strip), st.integers(0, 2**62 - 1)), min_size=1, max_size=6))
@example(rows=[('"', '""', 0), ("\r", "\n\r", 1), ("\u2028", "\x85\x1c", 2)])
@example(rows=[("", "\ufeff", 0)])
def test_table_round_trip(kind: str, encoding: str, line_end: str, rows: Any, tmp_path_factory: Any) -> None:
    path = tmp_path_factory.mktemp("table") / f"table.{kind}"
    documents = [{"id": id, "prompt": prompt, "seed": seed} for id, prompt, seed in rows]
    if kind == "jsonl":
        lines = [json.dumps(row, ensure_ascii=False) + line_end for row in documents]
        path.write_text(line_end.join(lines), encoding, newline="")
    elif kind == "parquet":
        path.write_bytes(_parquet(pa.Table.from_pylist(documents)))
    else:
        with path.open("w", encoding=encoding, newline="") as file:
            quoting = csv.QUOTE_ALL if line_end == "\n" else csv.QUOTE_MINIMAL
            options = {"delimiter": "," if kind == "csv" else "\t", "quoting": quoting, "lineterminator": line_end}
            writer = csv.DictWriter(file, ["id", "prompt", "seed"], **options)
            writer.writeheader()
            writer.writerows(documents)
    table = open_prompt_table(str(path))
    _check(table)
    assert [(row.prompt, row.seed) for row in table.rows(range(len(table)))] == [
        (p.strip(), seed) for _, p, seed in rows
    ]


@pytest.mark.parametrize("line_end", ["\n", "\r\n"])
@examples(33)
@given(lines=st.lists(_text.map(lambda text: " ".join(text.split())), max_size=9), comments=st.lists(_text, max_size=3))
def test_plain_lines_round_trip(line_end: str, lines: list[str], comments: list[str], tmp_path_factory: Any) -> None:
    """A prompt that begins with # is written with a backslash; comments may stand anywhere between prompts."""
    path = tmp_path_factory.mktemp("table") / "table.txt"
    remarks = [f" # {' '.join(text.split())}" for text in comments]
    escaped = ["\\" + line if line.startswith(("#", "\\#")) else line for line in lines]
    path.write_text(line_end.join(["first", *remarks, *escaped]), "utf-8", newline="")
    table = open_prompt_table(str(path))
    _check(table)
    assert [row.prompt for row in table.rows(range(len(table)))] == ["first", *filter(None, lines)]
    blank = lines.count("")
    assert any("skipped" in note for note in table.notes) == bool(remarks or blank > (lines[-1:] == [""]))


@examples(66)
@given(data=st.data())
def test_damaged_standard_input_is_read_or_refused(data: st.DataObject) -> None:
    content = data.draw(damaged(VALID[data.draw(st.sampled_from(_TAGS))]))
    settings = GenerateSettings(
        prompts_csv="-", output_dir="", model_path="", prompt_column=data.draw(st.sampled_from([None, "image_id", "x"]))
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))
        table = refused_or(lambda: open_prompts(settings))
    if isinstance(table, PromptTable):
        _check(table)


@pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet"])
@examples(13)
@given(data=st.data())
def test_any_column_can_have_any_role(kind: str, data: st.DataObject, tmp_path_factory: Any) -> None:
    column = st.sampled_from([*_HEADER, "absent"])
    columns = data.draw(st.dictionaries(st.sampled_from(["prompt", "id", "seed"]), column))
    path = tmp_path_factory.mktemp("table") / f"table.{kind}"
    path.write_bytes(VALID[kind])
    table = refused_or(lambda: open_prompt_table(str(path), columns=columns))
    if isinstance(table, UserError):
        assert "absent" in columns.values() or "is not" in str(table), table
        return
    _check(table)
    assert table.row(0).prompt == str(ROWS[0][columns.get("prompt", "prompt")])
    assert table.row(0).seed == int(ROWS[0][columns.get("seed", "seed")])


def test_every_kind_of_nonsense_in_every_field(tmp_path: Path) -> None:
    for field in ROWS[0]:
        for value in NONSENSE:
            _read(tmp_path, "jsonl", json.dumps(ROWS[0] | {field: value}).encode())


@pytest.mark.parametrize("name", [b"image_id", b"prompt", b"seed"])
def test_a_parquet_column_name_that_is_not_text_is_refused(name: bytes, tmp_path: Path) -> None:
    """A bit turned in a column's name, in each of the places that it stands in; found by `make fuzz`."""
    pieces = VALID["parquet"].split(name)
    for place in range(1, len(pieces)):
        damage = b"\xe8" + name[1:]
        data = name.join(pieces[:place]) + damage + name.join(pieces[place:])
        _read(tmp_path, "parquet", data)
