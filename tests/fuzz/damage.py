"""Damage of all kinds, for valid files and documents, and the one promise every reader makes about it.

A reader gives an answer or refuses with a `UserError`; any other exception, a write outside its folder or a hang is a bug.
`make test` tries a few examples, the same ones every time; `make fuzz` tries many, new ones every time.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any, TypeVar

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from muralist.core.errors import UserError

T = TypeVar("T")
MANY = os.environ.get("HYPOTHESIS_PROFILE") == "fuzz"
_LONGEST = 20.0  # seconds for one small file, on a busy machine


def examples(few: int, many: int = 3000) -> Callable[[T], T]:
    """How many examples a test gets: few and always the same, or with `make fuzz` many and new ones."""
    return settings(
        max_examples=many if MANY else few,
        derandomize=not MANY,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )


def refused_or(read: Callable[[], T]) -> T | UserError:
    """What a reader answers, or its refusal, which must be in words; anything else goes up as the bug it is."""
    started = time.monotonic()
    try:
        return read()
    except UserError as error:
        assert error.what and len(str(error)) < 10_000, "a refusal is one screen at most"
        return error
    finally:
        assert time.monotonic() - started < _LONGEST


def listing(folder: Path) -> dict[str, tuple[int, int]]:
    """Every file below a folder, with its size and time of change."""
    found = {}
    for path in sorted(folder.rglob("*")):
        status = path.lstat()
        found[str(path.relative_to(folder))] = (status.st_size if path.is_file() else 0, status.st_mtime_ns)
    return found


@contextmanager
def untouched(folder: Path) -> Iterator[None]:
    """Nothing below a folder changes meanwhile."""
    before = listing(folder)
    yield
    assert listing(folder) == before


def fresh_copy(folder: Path) -> Path:
    """A new copy of a folder beside it, to be damaged."""
    copy = folder.parent / "copy"
    shutil.rmtree(copy, ignore_errors=True)
    return Path(shutil.copytree(folder, copy))


_TOKENS = (
    b"", b"\0", b"\xff", b"\xef\xbb\xbf", b"\xff\xfe", b"\xfe\xff", b'"', b"'", b'""', b"\n", b"\r", b"\r\n", b",", b"\t",
    b"\\", b"\\ud800", b"{", b"}", b"[" * 60, b"]", b":", b"-", b"- ", b"&a ", b"*a", b"!!python/object:os.system x", b"|",
    b"%", b"#", b"null", b"NaN", b"-Infinity", b"1e999", b"-1", b"9" * 30, b"9" * 5000, b"..", b"../", b"/", b"\xed\xa0\x80",
    b"\xc3\xa9", b"e\xcc\x81", b"\x00" * 64, b"\xff" * 8, b"\x7f\xff\xff\xff", b"\x80\x00\x00\x00", b"PK\x03\x04",
)  # fmt: skip
_KINDS = ("flip", "set", "cut", "drop", "insert", "double", "swap", "clear", "append")


def _step(data: bytes, kind: str, first: int, second: int, token: bytes) -> bytes:
    size = len(data)
    start = first % (size + 1) if first % 2 else size - first % (size + 1)  # headers are at either end
    end = min(size, start + second % 64)
    if kind == "flip" and start < size:
        return data[:start] + bytes([data[start] ^ (1 << second % 8)]) + data[start + 1 :]
    if kind == "set" and start < size:
        return data[:start] + bytes([(0, 0xFF, 0x7F, 0x80, 1, second % 256)[second % 6]]) + data[start + 1 :]
    if kind == "cut":
        return data[:start]
    if kind == "drop":
        return data[:start] + data[end:]
    if kind == "double":
        return data[:end] + data[start:end] * (1 + second % 4) + data[end:]
    if kind == "swap":
        middle, half = data[start:end], (end - start) // 2
        return data[:start] + middle[half:] + middle[:half] + data[end:]
    if kind == "clear":
        return data[:start] + b"\0" * (end - start) + data[end:]
    return data + token if kind == "append" else data[:start] + token + data[start:]


def damaged(data: bytes, tokens: Sequence[bytes] = _TOKENS) -> st.SearchStrategy[bytes]:
    """A valid file with some bytes flipped, cut off, put in, doubled or swapped."""
    place = st.integers(0, 2 * len(data) + 1)
    step = st.tuples(st.sampled_from(_KINDS), place, st.integers(0, 255), st.sampled_from(tokens))

    def apply(steps: list[tuple[str, int, int, bytes]]) -> bytes:
        changed = data
        for one in steps:
            changed = _step(changed, *one)
        return changed

    return st.lists(step, min_size=1, max_size=5).map(apply)


def _deep(levels: int) -> Any:
    nested: Any = 1
    for _ in range(levels):
        nested = [nested]
    return nested


NONSENSE: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 7, 2**31, 2**63, -(2**63) - 1, 10**30, 10**400, 0.5, -0.0, 1e308, float("nan"),
    float("inf"), "", " ", "x", "0", "-1", "nan", "1e9", "\0", "\n", "\ud800", "é", "e\u0301", "CON", "..",
    "../../outside", "/outside", "~", "a" * 300, "a/" * 2500, "9" * 5000, "{}", "512x0", "9" * 400 + "x1",
    [], {}, [[]], [None], [0], [1, "x"], ["../x"],
    {"": None}, {"x": {}}, _deep(40),
)  # fmt: skip


def _paths(node: Any, here: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield here
    children = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, child in children:
        yield from _paths(child, (*here, key))


def nonsense(document: Any) -> st.SearchStrategy[Any]:
    """A document in which a few places hold something else, are missing, or are there twice."""
    paths = list(_paths(document))
    change = st.tuples(
        st.sampled_from(paths),
        st.sampled_from(("replace", "replace", "replace", "remove", "double", "add")),
        st.integers(0, len(NONSENSE) - 1),  # numbers, since hypothesis would print all values with every failure
    )

    def apply(changes: list[tuple[tuple[Any, ...], str, int]]) -> Any:
        root = [deepcopy(document)]
        for path, kind, number in changes:
            value, parent, key = NONSENSE[number], root, 0
            try:
                for step in path:
                    parent, key = parent[key], step
                node = parent[key]
            except (KeyError, IndexError, TypeError):
                continue  # an earlier change took this place away
            if isinstance(parent, str):
                continue
            if kind == "add" and isinstance(node, dict):
                node["unheard_of"] = value
            elif kind == "remove" and path:
                del parent[key]
            elif kind == "double" and isinstance(parent, list) and path:
                parent.append(deepcopy(node))
            else:
                parent[key] = deepcopy(value)
        return root[0]

    return st.lists(change, min_size=1, max_size=3).map(apply)


def json_bytes(document: Any) -> bytes:
    """A document as JSON; half characters and numbers that are none are spelled out as Python spells them."""
    return json.dumps(document).encode()


def damaged_json(document: Any) -> st.SearchStrategy[bytes]:
    """A JSON file that says nonsense, or is none any more."""
    return st.one_of(nonsense(document).map(json_bytes), damaged(json_bytes(document)), st.sampled_from(BAD_JSON))


BAD_JSON = (
    b"", b" ", b"\n", b"null", b"0", b'"text"', b"[]", b"{}", b"[" * 100_000, b'{"a":' * 50_000, b"\xef\xbb\xbf{}",
    "{}".encode("utf-16"), b"{\0}", b'{"format": 1, "format": 2}', b"9" * 6000, b"[1,]", b"NaN", b"\xff\xfe\xfd",
)  # fmt: skip
