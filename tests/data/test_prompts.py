from __future__ import annotations

import csv
import io
import json
import sys
import tempfile
import time
import tracemalloc
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from muralist.core.errors import UserError
from muralist.data import tables
from muralist.data.image_inputs import ImageInputs
from muralist.data.prompts import (
    PromptRow,
    PromptTable,
    image_file_stem,
    open_prompt_table,
    open_prompts,
    refuse_collision,
    safe_id,
)
from muralist.settings import GenerateSettings
from tests.support.disks import leave_free, small_disk

COLUMNS = ["image_id", "prompt", "seed", "negative_prompt", "height", "width"]
CELLS = [
    ["cat", 'A "red", fat cat', 7, "dog", 480, 832],
    ["", "Zwei Zeilen:\nähnlich, 猫 🐈", None, None, None, None],
    ["0007", "", 0, None, None, None],
]
ROWS = [
    PromptRow(0, "cat", 'A "red", fat cat', 7, "dog", 480, 832),
    PromptRow(1, "000002", "Zwei Zeilen:\nähnlich, 猫 🐈", None, None, None, None),
    PromptRow(2, "0007", "", 0, None, None, None),
]


def write(folder: Path, text: str | bytes, name: str = "prompts.csv") -> str:
    data = text.encode() if isinstance(text, str) else text
    (folder / name).write_bytes(data)
    return str(folder / name)


def write_cells(folder: Path, suffix: str) -> str:
    path = folder / f"prompts{suffix}"
    if suffix == ".parquet":
        columns = {name: [row[number] for row in CELLS] for number, name in enumerate(COLUMNS)}
        pyarrow.parquet.write_table(pyarrow.table(columns), path)
    elif suffix == ".jsonl":
        path.write_text("".join(json.dumps(dict(zip(COLUMNS, row, strict=True))) + "\n" for row in CELLS))
    else:
        with path.open("w", newline="", encoding="utf-8") as file:
            csv.writer(file, delimiter="\t" if suffix == ".tsv" else ",").writerows([COLUMNS, *CELLS])
    return str(path)


@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".jsonl", ".parquet"])
def test_every_format_gives_the_same_rows(suffix: str, tmp_path: Path) -> None:
    table = open_prompt_table(write_cells(tmp_path, suffix))
    assert len(table) == 3
    assert [table.row(2), table.row(0), table.row(-2)] == [ROWS[2], ROWS[0], ROWS[1]]
    assert table.rows(range(3)) == ROWS
    sizes, seeds = table.sizes, table.seeds
    assert sizes is not None and sizes.dtype == np.int32 and sizes.tolist() == [[480, 832], [0, 0], [0, 0]]
    assert seeds is not None and seeds.dtype == np.int64 and seeds.tolist() == [7, -1, 0]
    assert table.notes == ["1 of 3 prompts are empty: their images are made from the empty text."]
    with pytest.raises(IndexError):
        table.row(3)


def test_plain_lines_are_prompts_with_row_numbers_as_ids(tmp_path: Path) -> None:
    table = open_prompt_table(write(tmp_path, 'one, "two"\r\n\r\n  \n\tthree\r\nfour', "prompts.txt"))
    assert [(row.id, row.prompt) for row in table.rows(range(3))] == [
        ("000001", 'one, "two"'),
        ("000002", "three"),
        ("000003", "four"),
    ]
    assert len(table) == 3 and table.sizes is None and table.seeds is None
    assert table.notes == [f"{tmp_path / 'prompts.txt'}: 2 blank lines were skipped."]
    assert image_file_stem(table.row(0).id, 42) == "000001_seed42"
    refuse_collision(table, np.zeros(3, np.int64))


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
@pytest.mark.parametrize("line_end", ["\n", "\r\n", "\r"])
def test_encodings_and_line_ends(encoding: str, line_end: str, tmp_path: Path) -> None:
    lines = [" Caption ,ID", '"ਊ first', 'second ਂĊ", a', "", "猫,b", ""]
    table = open_prompt_table(write(tmp_path, line_end.join(lines).encode(encoding)))
    assert [(row.id, row.prompt) for row in table.rows([1, 0])] == [("b", "猫"), ("a", f"ਊ first{line_end}second ਂĊ")]


characters = st.characters(exclude_categories=["Cs"])
cells = st.text(st.one_of(characters, st.sampled_from('",\t\r\n ;\\\x00\ufeffਊ')), max_size=12)


@given(
    id=st.one_of(
        st.builds(str.__mul__, cells, st.integers(1, 40)),
        st.text(max_size=5),
        st.sampled_from([".", "..", "../../etc/passwd", "", " ", "a\x00b"]),
    )
)
def test_file_names_stay_in_their_folder(id: str) -> None:
    stem = image_file_stem(id, 2**62)
    assert not set(stem) & set("/\\\x00\n ") and not stem.startswith(".")
    assert len(f"{stem}.png".encode()) <= 255
    assert Path("folder", f"{stem}.png").parent == Path("folder")
    assert safe_id(safe_id(id)) == safe_id(id)


def test_unsafe_ids_are_changed_with_a_note(tmp_path: Path) -> None:
    long = "é" * 100
    table = open_prompt_table(
        write(tmp_path, f"id,prompt\n../a b\\c,x\n{long},x\n{long}e,x\n.hidden,x\n fine ,x\n,x\n")
    )
    ids = [row.id for row in table.rows(range(6))]
    assert ids[0] == "___a_b_c" and ids[3:] == ["_hidden", "fine", "000006"]
    assert ids[1] != ids[2] and ids[1].startswith("é" * 60) and max(len(id.encode()) for id in ids) <= 150
    assert table.notes == [r"4 of 6 ids were changed to be safe as file names: '../a b\\c' became '___a_b_c'."]


def test_ids_that_are_numbers_keep_their_form(tmp_path: Path) -> None:
    ids = ["7", "7.0", "7.5", '"007"', "12345678901234567890", "null", "NaN", '""']
    text = "".join(f'{{"prompt": "x", "image_id": {id}}}\n' for id in ids)
    table = open_prompt_table(write(tmp_path, text, "prompts.jsonl"))
    found = [row.id for row in table.rows(range(len(ids)))]
    assert found == ["7", "7", "7.5", "007", "12345678901234567890", "000006", "000007", "000008"]


def test_numbers_as_pandas_writes_them(tmp_path: Path) -> None:
    table = open_prompt_table(write(tmp_path, "prompt,seed,width,height\nx,42.0, 64 ,32.\nx,,,\n"))
    assert table.row(0)[3:7] == (42, None, 32, 64) and table.row(1)[3:7] == (None, None, None, None)
    frame = {"prompt": ["x", None], "seed": [4611686018427387903.0 / 2**10, float("nan")]}
    pyarrow.parquet.write_table(pyarrow.table(frame), tmp_path / "p.parquet")
    rows = open_prompt_table(str(tmp_path / "p.parquet")).rows([0, 1])
    assert [(row.prompt, row.seed) for row in rows] == [("x", 2**52), ("", None)]


def test_prompt_overrides_caption_and_unused_columns_are_noted(tmp_path: Path) -> None:
    path = write(tmp_path, "Caption, PROMPT ,score,id,Image_ID,b\nc,p,1,i,j,2\n")
    table = open_prompt_table(path, limit=5)
    assert table.row(0)[:3] == (0, "j", "p")
    assert table.notes == [
        f"{path} has only 1 of the 5 requested rows: all of them are used.",
        f"{path} has both a prompt and a caption: the prompt is used.",
        f"{path} has both an image_id and an id: the image_id is used.",
        f"Unused columns of {path}: b, score.",
    ]


@pytest.mark.parametrize("suffix", [".csv", ".jsonl", ".txt"])
def test_rows_after_the_limit_are_not_read(suffix: str, tmp_path: Path) -> None:
    line = {".csv": b"prompt\na\nb\n", ".jsonl": b'{"prompt": "a"}\n{"prompt": "b"}\n', ".txt": b"a\nb\n"}[suffix]
    table = open_prompt_table(write(tmp_path, line + b"\xff\xfe broken", f"prompts{suffix}"), limit=2)
    assert [row.prompt for row in table.rows([0, 1])] == ["a", "b"] and len(table) == 2 and table.notes == []


def test_parquet_is_read_in_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "_PARQUET_ROWS", 4)
    path = tmp_path / "prompts.parquet"
    frame = pyarrow.table({"Prompt ": [f"p{number}" for number in range(50)], "pixels": [b"x"] * 50})
    pyarrow.parquet.write_table(frame, path, row_group_size=11)
    table = open_prompt_table(str(path), limit=40)
    assert len(table) == 40 and table.notes == [f"Unused columns of {path}: pixels."]
    order = np.random.default_rng(0).permutation(40).tolist()
    assert [row.prompt for row in table.rows(order)] == [f"p{number}" for number in order]
    assert table.where(0) == "row 1"


def test_a_table_changed_during_use_has_no_effect(tmp_path: Path) -> None:
    path = write(tmp_path, "prompt\na\nb\n")
    table = open_prompt_table(path)
    write(tmp_path, "prompt\nab\nb\n")
    assert table.row(0).prompt == "a"
    Path(path).unlink()
    assert [row.prompt for row in table.rows([1, 0])] == ["b", "a"]


def test_rows_with_the_same_file_name_are_refused(tmp_path: Path) -> None:
    text = 'id,prompt\na/b,"two\nlines"\nc,x\n\na_b,x\nc,x\n000006,x\n,x\n'
    table = open_prompt_table(write(tmp_path, text))
    refuse_collision(table, np.arange(6))
    copies = np.stack((np.arange(6), np.arange(6) + 2), axis=1)  # copy 1 of row 0 and copy 0 of row 2 have seed 2
    for seeds, found in (
        (np.array([5, 1, 5, 1, 9, 9]), "a_b_seed5: line 3 and line 6"),
        (np.array([5, 1, 6, 1, 9, 9]), "c_seed1: line 4 and line 7"),
        (np.array([5, 1, 6, 2, 9, 9]), "000006_seed9: line 8 and line 9"),
        (copies, "a_b_seed2: line 3 and line 6"),
    ):
        with pytest.raises(UserError, match=f"the same file, {found}"):
            refuse_collision(table, seeds)


def test_a_tsv_without_quoting_is_read_literally(tmp_path: Path) -> None:
    lines = [
        "Prompt\tCategory\tChallenge\tNote",  # as in PartiPrompts
        "bond\tAbstract\tBasic\tBiology-inspired concepts",
        '"G I G G L E" painted on a wall\tIllustrations\tWriting\t',
        'A sign that says "STOP"\t"Art" & more\tWriting\tthe "word"',
        '"one, ""two""\nthree"\tx\t"a\tb"\t',
    ]
    table = open_prompt_table(write(tmp_path, "\n".join(lines), "PartiPrompts.tsv"))
    assert [row.prompt for row in table.rows([3, 1, 2, 0])] == [
        'one, "two"\nthree',
        '"G I G G L E" painted on a wall',
        'A sign that says "STOP"',
        "bond",
    ]
    assert table.row(0).id == "000001" and table.notes[0].endswith("PartiPrompts.tsv: category, challenge, note.")


def test_coco_captions_are_a_prompt_table(tmp_path: Path) -> None:
    annotations = [
        {"image_id": 203564, "id": 37, "caption": "A bicycle replica with a clock as the front wheel."},
        {"image_id": 179765, "id": 38, "caption": "A black motorbike, parked.\n"},
        {"image_id": 203564, "id": 49, "caption": "The bike has a clock as a tire."},
    ]
    path = write(tmp_path, json.dumps({"info": {}, "images": [], "annotations": annotations}), "captions_val2014.json")
    table = open_prompt_table(path)
    assert [(row.id, row.prompt) for row in table.rows([2, 0, 1])] == [
        ("203564", "The bike has a clock as a tire."),
        ("203564", "A bicycle replica with a clock as the front wheel."),
        ("179765", "A black motorbike, parked."),
    ]
    assert table.notes == [] and len(open_prompt_table(path, limit=2)) == 2
    refuse_collision(table, np.arange(3))
    with pytest.raises(UserError, match="203564_seed0: annotation 1 and annotation 3"):
        refuse_collision(table, np.zeros(3, np.int64))


def test_the_built_in_prompts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    table = open_prompt_table("muralist")
    rows = table.rows(range(len(table)))
    assert len(rows) == 100 == len({row.prompt for row in rows}) == len({row.id for row in rows})
    counts = Counter(row.id.rpartition("-")[0] for row in rows)
    assert counts.keys() == {"objects", "counting", "colour", "relations", "text", "driving"}
    assert min(counts.values()) == 16
    assert 'A shop window with the word "OPEN" in neon letters' in [row.prompt for row in rows]


TOO_LONG = "9" * 5000
MISTAKES: dict[str, tuple[str, str | bytes, str]] = {
    "no rows": ("p.csv", "prompt,seed\n", "p.csv has no rows"),
    "no bytes": ("p.csv", "", "p.csv is empty"),
    "only blank lines": ("p.txt", "\n \n", "p.txt has no rows"),
    "no prompt": (
        "p.csv",
        "id,promt\n1,x\n",
        "no prompt or caption in .*columns are id, promt. promt: Did you mean prompt",
    ),
    "no prompt in a row": ("p.jsonl", '{"prompt": "a"}\n{"captions": "b"}\n', "line 2 of .*Did you mean caption"),
    "semicolons": ("p.csv", "prompt;id\nx;1\n", r"columns are prompt;id\..* separated by commas"),
    "two prompts": ("p.csv", "prompt,Prompt\nx,y\n", "2 columns called prompt"),
    "too many cells": ("p.csv", "id,prompt\n1,x\n2,y,z\n", "Line 3 of .* has 3 fields, but the header has 2"),
    "too few cells": ("p.csv", 'id,prompt\n1,"x\ny"\n2\n', "Line 4 of .* has 1 field, .* 2. Is it truncated"),
    "open quote": ("p.csv", 'prompt\nx\n"y\nz\n', "begins in line 3 of .*quote is not closed"),
    "stray quote": ("p.csv", 'prompt,id\n"Big" dog,1\n', "begins in line 2 of .*quote"),
    "Latin-1": ("p.csv", b"prompt\nx\ncaf\xe9\n", "Line 3 of .*, from byte 9 on, is not UTF-8 text"),
    "UTF-16": ("p.txt", "a\nb".encode("utf-16"), "Line 1 of .* is not UTF-8 text. Save the file as UTF-8"),
    "not JSON": ("p.jsonl", '{"prompt": "x"}\n{"prompt"\n', "Line 2 of .* is not JSON: .*, at character 1"),
    "deep JSON": ("p.jsonl", "[" * 100_000, "Line 1 of .* is not JSON"),
    "not an object": ("p.jsonl", '"x"\n', "Line 1 of .* is not a JSON object"),
    "a list as prompt": ("p.jsonl", '{"prompt": ["x"]}', r"The prompt in line 1 of .* is not text but \['x'\]"),
    "a number as prompt": ("p.jsonl", '{"caption": 7}', "The caption in line 1 of .* is not text but 7"),
    "half a character": ("p.jsonl", '{"prompt": "\\ud83d"}', "The prompt in line 1 of .* is not valid Unicode"),
    "a list as id": ("p.jsonl", '{"prompt": "x", "id": [1]}', r"The id in line 1 of .* but \[1\]"),
    "a word as seed": ("p.csv", "prompt,seed\nx,1\nx,one\n", "The seed 'one' in line 3 of .* an integer from 0"),
    "negative seed": ("p.csv", "prompt,seed\nx,-1\n", "The seed '-1' in line 2"),
    "fractional seed": ("p.jsonl", '{"prompt": "x", "seed": 1.5}', "The seed 1.5 in line 1"),
    "true as seed": ("p.jsonl", '{"prompt": "x", "seed": true}', "The seed True in line 1"),
    "infinite seed": ("p.jsonl", '{"prompt": "x", "seed": Infinity}', "The seed inf in line 1"),
    "large seed": ("p.csv", f"prompt,seed\nx,{2**62}\n", rf"The seed '{2**62}' in .* 0 to 2\^62 - 1"),
    "very long seed": ("p.csv", f"prompt,seed\nx,{TOO_LONG}\n", "The seed '999.* in line 2"),
    "no width": ("p.csv", "prompt,height,width\nx,64,\n", "a height but no width in line 2"),
    "no height": ("p.csv", "prompt,width\nx,64\n", "a width but no height in line 2"),
    "width of zero": ("p.csv", "prompt,height,width\nx,64,0\n", "The width '0' in line 2 of .* from 1 to"),
    "no Parquet": ("p.parquet", "prompt\nx\n", "Parquet file .* could not be read"),
    "half a JSON file": ("p.json", '{"annotations": [', "p.json is not JSON"),
    "JSON without captions": ("p.json", '[{"prompt": "x"}]', "not a file of MS-COCO captions.* Save .* as .jsonl"),
    "boxes of COCO": (
        "p.json",
        '{"annotations": [{"image_id": 1, "bbox": []}]}',
        "no prompt or caption in annotation 1",
    ),
    "no captions": ("p.json", '{"annotations": []}', "p.json has no rows"),
    "stray quote over lines": ("p.tsv", 'prompt\tid\n"a\nb" c\t1\n', "begins in line 2 of .*quote"),
    "other suffix": ("p.xlsx", "x", r"not a kind of file that holds prompts. .*\.csv \.tsv \.jsonl \.txt \.parquet"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_opening_explains_what_is_wrong(mistake: str, tmp_path: Path) -> None:
    name, text, message = MISTAKES[mistake]
    with pytest.raises(UserError, match=message):
        open_prompt_table(write(tmp_path, text, name))


def test_a_wrong_path_is_explained(tmp_path: Path) -> None:
    write(tmp_path, "prompt\nx\n")
    with pytest.raises(UserError, match="no entry prompt.csv. Did you mean prompts.csv"):
        open_prompt_table(str(tmp_path / "prompt.csv"))
    with pytest.raises(UserError, match="is a folder"):
        open_prompt_table(str(tmp_path))


UNUSABLE: dict[str, tuple[str, str, dict[str, str], str]] = {
    "a name that is not there": (
        "p.csv",
        "id,text\n1,x\n",
        {"prompt": "txt"},
        "no column txt in .*p.csv. Its columns are id, text. Did you mean text\\? Give --prompt_column the name",
    ),
    "the usual name, which is not there": ("p.csv", "prompt\nx\n", {"seed": "seed"}, "no column seed in"),
    "in no row": ("p.jsonl", '{"prompt": "x", "b": 1, "a": 2}\n', {"id": "c"}, "no column c in .* are a, b, prompt"),
    "not in this row": ("p.jsonl", '{"text": "x"}\n{"prompt": "x"}\n', {"prompt": "text"}, "no column text in line 2"),
    "in plain lines": ("p.txt", "x\n", {"prompt": "text"}, "no column text in line 1 of .*Its columns are prompt"),
    "of COCO's annotations": ("p.json", '{"annotations": [{"image_id": 1, "id": 2, "caption": "x"}]}', {"id": "id"},
                              "no column id in .* are caption, image_id"),
    "twice": ("p.csv", "prompt,Text,text\nx,y,z\n", {"prompt": "text"}, "2 columns called text"),
    "words as seeds": ("p.csv", "prompt,n\nx,y\n", {"seed": "n"}, "The n 'y' in line 2 of .* an integer from 0"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", UNUSABLE)
def test_a_column_that_cannot_be_used_is_explained(mistake: str, tmp_path: Path) -> None:
    name, text, columns, message = UNUSABLE[mistake]
    with pytest.raises(UserError, match=message):
        open_prompt_table(write(tmp_path, text, name), columns=columns)


def test_one_column_may_have_two_roles(tmp_path: Path) -> None:
    path = write(tmp_path, "number,text,seed\n5,x,1\n6,y,2\n")
    table = open_prompt_table(path, columns={"prompt": "TEXT ", "seed": "Number", "id": "number"})
    assert [(row.id, row.seed, row.prompt) for row in table.rows([0, 1])] == [("5", 5, "x"), ("6", 6, "y")]
    assert table.notes == [f"Unused columns of {path}: seed."]
    assert table.seeds is not None and table.seeds.tolist() == [5, 6] and table.id_hashes is not None


def test_comments_are_counted_as_far_as_the_table_is_read(tmp_path: Path) -> None:
    path = write(tmp_path, "#1\na\n\n \t# 2\nb\n#3\nc\n", "p.txt")
    assert open_prompt_table(path, limit=2).notes[0].startswith(f"{path}: 2 comments and 1 blank line were skipped.")
    assert open_prompt_table(path, limit=1).notes[0].startswith(f"{path}: 1 comment was skipped.")
    table = open_prompt_table(path)
    assert [row.prompt for row in table.rows([2, 0, 1])] == ["c", "a", "b"]
    assert table.where(2) == "line 7"
    with pytest.raises(UserError, match="p.txt has no rows"):
        open_prompt_table(write(tmp_path, "# nothing\n", "p.txt"))


def test_prompts_in_memory_are_rows_like_others() -> None:
    settings = GenerateSettings(prompt=[" a, b ", "c\nd", ""], output_dir="o", model_path="m", num_samples=5)
    table = open_prompts(settings)
    assert [(row.id, row.prompt) for row in table.rows([0, 1, 2])] == [
        ("000001", "a, b"), ("000002", "c\nd"), ("000003", ""),
    ]  # fmt: skip
    assert table.notes == [
        "--prompt has only 3 of the 5 requested rows: all of them are used.",
        "1 of 3 prompts are empty: their images are made from the empty text.",
    ]
    with pytest.raises(UserError, match="The prompt in row 1 of --prompt is not valid Unicode"):
        open_prompts(GenerateSettings(prompt=["\udce4"], output_dir="o", model_path="m"))


def test_broken_lines_of_standard_input_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = GenerateSettings(prompts_csv="-", output_dir="o", model_path="m", prompt_column="Text")
    for data, message in [
        (b'{"text": "a"}\n{"text"\n', r"Line 2 of standard input \(JSONL\) is not JSON"),
        (b"id,text\n1,a\n2\n", r"Line 3 of standard input \(CSV\) has 1 field"),
        (b"a car\n", r"There is no column text in line 1 of standard input \(lines\). Its columns are prompt."),
        (b"\xff\n", r"Line 1 of standard input \(lines\), from byte 0 on, is not UTF-8"),
    ]:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
        with pytest.raises(UserError, match=message):
            open_prompts(settings)


def test_blanks_before_quotes_are_accepted(tmp_path: Path) -> None:
    table = open_prompt_table(write(tmp_path, '\n\nid, prompt\n1,  "A cat, red"\n2, 5" nails\n'))
    assert [(row.id, row.prompt) for row in table.rows([0, 1])] == [("1", "A cat, red"), ("2", '5" nails')]


def test_a_cell_may_be_long(tmp_path: Path) -> None:
    prompt = "long " * 100_000 + "end"
    assert open_prompt_table(write(tmp_path, f"prompt\n{prompt}\n")).row(0).prompt == prompt


def test_thirty_thousand_rows_open_at_once(tmp_path: Path) -> None:
    lines = "".join(f"{number},a photo of thing {number}\n" for number in range(30_000))
    path = write(tmp_path, "image_id,prompt\n" + lines)
    start = time.process_time()  # not the clock on the wall: other tests run beside this one
    table = open_prompt_table(path)
    assert time.process_time() - start < 2.0
    assert table.row(29_999)[:3] == (29_999, "29999", "a photo of thing 29999")


def test_prompts_are_not_held_in_memory(tmp_path: Path) -> None:
    path = write(tmp_path, "seed,prompt\n" + "".join(f'{number},"{"long " * 200}"\n' for number in range(10_000)))
    tracemalloc.start()
    table = open_prompt_table(path)
    held, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held < 10_000 * 60, "a few numbers per row"
    assert most < Path(path).stat().st_size * 0.75, "a block of rows at a time"
    assert table.row(9_999).seed == 9_999


def test_image_inputs_without_a_file_and_columns_with_another_role(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path, "prompt,image,mask,strength\na,1.png,,0.5\n")
    table = open_prompt_table(path, columns={"id": "Image"})
    assert table.input_columns == ("mask", "strength") and table.row(0).id == "1.png"
    assert table.row(0).inputs == ImageInputs(strength=0.5, folder=str(tmp_path))
    monkeypatch.chdir(tmp_path)
    rows = PromptTable("rows", tables.ListTable([{"prompt": "a", "image": "1.png"}]))
    assert rows.row(0).inputs == ImageInputs("1.png", folder=str(Path.cwd()))


@pytest.mark.parametrize("rows", [1, 3000])  # fails at the end, or while rows are added
def test_a_full_temporary_folder_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    table = write(tmp_path, "a red car\n" * rows, "prompts.txt")
    with small_disk(tmp_path / "disk") as disk:
        leave_free(disk, 0)
        monkeypatch.setattr(tempfile, "tempdir", str(disk))
        with pytest.raises(UserError) as caught:
            open_prompt_table(table)
    what = f"The prompts could not be kept in the temporary folder {disk}: No space left on device."
    assert caught.value.what == what
    assert caught.value.fix == "Free space there, or set TMPDIR to another folder."
