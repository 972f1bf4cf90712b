"""Plain PNGs decoded by faster libraries, where `muralist[fast]` is installed: the same pixels in a third of the time.

ISA-L inflates, libspng takes the filters off. Only what is beyond doubt is decoded here: 8-bit RGB, every checksum right,
nothing in it that turns or fades a picture. Pillow decodes all else, and says what is wrong with what is broken.
"""

from __future__ import annotations

import struct

import numpy as np

try:
    import pyspng
    from isal import isal_zlib

    AVAILABLE = True
except ImportError:  # an extra
    AVAILABLE = False

_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_PLAIN = bytes((8, 2, 0, 0, 0))  # bits, RGB, the only compression and filters there are, not interlaced
_HEADER = len(_SIGNATURE) + 25
_MOST_PIXELS = 1 << 24
_MOST_TEXT = 1 << 20  # bytes; of more, Pillow has its own opinion
_BLOCK = 0xFFFF  # bytes of a deflated block that is stored as it is
_LENGTHS = {b"gAMA": 4, b"sRGB": 1, b"pHYs": 9, b"tIME": 7}  # which change no pixel
_END = b"\0\0\0\0IEND\xaeB`\x82"


def plain_png(data: bytes) -> np.ndarray | None:
    """Pixels, uint8 [H, W, 3], as Pillow's are; None where it is for Pillow to decide."""
    if not AVAILABLE or data[:8] != _SIGNATURE or data[24:29] != _PLAIN:
        return None
    width, height = struct.unpack(">II", data[16:24])
    packed = _compressed(data)
    if packed is None or not 0 < width * height <= _MOST_PIXELS:
        return None
    size = height * (3 * width + 1)
    try:
        stream = isal_zlib.decompressobj()
        unpacked = stream.decompress(packed, max_length=size + 1)  # a few bytes may stand for gigabytes
        if len(unpacked) != size or not stream.eof:
            return None
        return pyspng.load(_stored(data[:_HEADER], unpacked))
    except Exception:  # ISA-L's own, which has no type of its own to a type checker, or libspng's
        return None


def _compressed(data: bytes) -> bytes | None:
    """What all pixel chunks hold together, if every chunk is whole and known."""
    view, place, parts, kinds = memoryview(data), len(_SIGNATURE), [], []
    while place + 12 <= len(data):
        (length,) = struct.unpack_from(">I", data, place)
        kind, begin, end = data[place + 4 : place + 8], place + 8, place + 8 + length
        if end + 4 > len(data) or struct.unpack_from(">I", data, end) != (isal_zlib.crc32(view[place + 4 : end]),):
            return None
        if kind == b"IDAT":
            parts.append(view[begin:end])
        elif kind in (b"tEXt", b"iTXt"):
            if length > _MOST_TEXT or not _harmless(kind, data[begin:end]):
                return None
        elif kind not in (b"IHDR", b"IEND") and _LENGTHS.get(kind) != length:
            return None
        kinds.append(kind)
        place = end + 4
        if kind == b"IEND":
            break
    pixels = [number for number, kind in enumerate(kinds) if kind == b"IDAT"]
    whole = kinds[:1] == [b"IHDR"] and kinds[-1:] == [b"IEND"] and kinds.count(b"IHDR") == 1
    if not whole or not pixels or pixels[-1] - pixels[0] >= len(pixels):
        return None
    return bytes(parts[0]) if len(parts) == 1 else b"".join(parts)


def _harmless(kind: bytes, text: bytes) -> bool:
    """Text that is not compressed, of a name under which nobody keeps how a picture is to be turned."""
    name, found, rest = text.partition(b"\0")
    return (
        bool(found and name)
        and not name.startswith((b"Raw profile", b"XML:", b"transparency"))
        and (kind == b"tEXt" or rest[:1] == b"\0")
    )


def _stored(header: bytes, unpacked: bytes) -> bytes:
    """The same picture as a PNG that is not compressed, which leaves the filters to whoever reads it."""
    view = memoryview(unpacked)
    parts: list[bytes | memoryview] = [b"IDAT\x78\x01"]
    for start in range(0, len(view), _BLOCK):
        part = view[start : start + _BLOCK]
        parts += [struct.pack("<BHH", start + _BLOCK >= len(view), len(part), len(part) ^ 0xFFFF), part]
    parts.append(struct.pack(">I", isal_zlib.adler32(unpacked)))
    chunk = b"".join(parts)
    size, check = struct.pack(">I", len(chunk) - 4), struct.pack(">I", isal_zlib.crc32(chunk))
    return b"".join((header, size, chunk, check, _END))
