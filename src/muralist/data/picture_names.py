"""Names of picture files: an id from a table, made safe, and a seed."""

from __future__ import annotations

import re

from muralist.data.fields import short_hash

# Separators, blanks, control characters, half characters, and what other systems do not allow in a file name.
_UNSAFE = re.compile(r"[\s\x00-\x1f\x7f-\x9f\ud800-\udfff/\\<>:\"|?*]")
_RESERVED = re.compile(r"^(con|prn|aux|nul|com[0-9]|lpt[0-9])\.", re.IGNORECASE)  # devices on Windows, whatever follows
_LEADING_DOTS = re.compile(r"^\.+")
_MOST_BYTES = 150  # leaves room for the seed and for any suffix in the 255 bytes of a file name


def safe_id(text: str) -> str:
    """Return an id as it stands in a file name: one path component, not hidden, not too long; a safe one is unchanged."""
    safe = _UNSAFE.sub("_", text.strip())
    if safe.startswith("."):
        safe = _LEADING_DOTS.sub(lambda dots: "_" * len(dots.group()), safe)
    safe = _RESERVED.sub(r"\1_", safe)
    data = safe.encode()
    if len(data) <= _MOST_BYTES:
        return safe
    ending = f"-{short_hash(safe)}"
    return data[: _MOST_BYTES - len(ending)].decode(errors="ignore") + ending


def file_stem(id: str, seed: int) -> str:
    """Return the name of a picture without its suffix, such as 000001_seed42; it never leads out of a folder."""
    return f"{safe_id(id)}_seed{seed}"
