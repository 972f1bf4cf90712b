"""What a folder written by `muralist pack` says about itself: pixels, or what a model's frozen parts made of them."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self

from pydantic import ConfigDict, Field, NonNegativeInt, PositiveInt, TypeAdapter, ValidationError

from muralist.data.images import Size
from muralist.errors import UserError

HELD_OUT_FOLDER = "held_out"
PACK_AGAIN = "Pack the data set again with `muralist pack`."

_MANIFEST = "manifest.json"
_VERSION = 1
_ROW_COLUMNS = ("image", "latents")


_AS_WRITTEN = ConfigDict(strict=True, extra="forbid")
_Count = Annotated[int, Field(ge=1, lt=2**62)]


@dataclass(frozen=True)
class PackedFile:
    """One Arrow file of a packed folder."""

    __pydantic_config__: ClassVar[ConfigDict] = _AS_WRITTEN

    name: Annotated[str, Field(pattern=r"^[a-z0-9-]+\.arrow$")]  # in the folder itself, wherever that came from
    rows: _Count
    bytes: _Count
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """What a packed folder says about itself; written last, so that only a finished pack has one."""

    __pydantic_config__: ClassVar[ConfigDict] = _AS_WRITTEN
    format: ClassVar[str] = "muralist packed images"
    file_lists: ClassVar[tuple[str, ...]] = ("files",)

    img_size: Size
    rows_per_batch: PositiveInt  # of every record batch but the last, so that the place of a row is arithmetic
    label_names: list[str]
    files: Annotated[list[PackedFile], Field(min_length=1)]
    broken: NonNegativeInt
    source: str
    source_fingerprint: str

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Read the manifest of a packed folder."""
        try:
            content = json.loads((folder / _MANIFEST).read_text(encoding="utf-8"))
            version = content.pop("version")
            if content.pop("format") == cls.format and version == _VERSION:
                return TypeAdapter(cls).validate_json(json.dumps(content))
        except FileNotFoundError as error:
            raise UserError(
                f"{folder} holds Arrow files but no {_MANIFEST}.",
                "Its copy is incomplete, or `muralist pack` did not write it.",
                PACK_AGAIN,
            ) from error
        except ValidationError as error:
            first = error.errors()[0]
            said = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
            raise UserError(f"The manifest of the packed folder {folder} is damaged: {said}.", fix=PACK_AGAIN) from None
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise UserError(
                f"The manifest of the packed folder {folder} is damaged: {error}.", fix=PACK_AGAIN
            ) from error
        raise UserError(
            f"The packed folder {folder} has format version {version!s:.20}, and this muralist reads version {_VERSION}.",
            fix=PACK_AGAIN,
        )

    def write(self, folder: Path) -> None:
        """Write the manifest into a folder, which makes it a packed one."""
        content = {"format": self.format, "version": _VERSION, **asdict(self)}
        (folder / _MANIFEST).write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")

    @property
    def images(self) -> int:
        """How many there are."""
        return sum(file.rows for file in self.files)

    @property
    def captions(self) -> int | None:
        """How many distinct ones are embedded; None where captions are kept as text."""
        return None

    @property
    def bytes(self) -> int:
        """What the files take."""
        return sum(file.bytes for name in self.file_lists for file in getattr(self, name))


@dataclass(frozen=True)
class EncodedManifest(Manifest):
    """The same for latents and text embeddings, and by what they were made."""

    format: ClassVar[str] = "muralist encoded images"
    file_lists: ClassVar[tuple[str, ...]] = ("files", "caption_files")

    caption_files: Annotated[list[PackedFile], Field(min_length=1)]
    captions_per_batch: PositiveInt
    model: str
    frozen_parts: dict[str, str]  # a fingerprint of each
    dtype: Annotated[str, Field(pattern="^(float32|bfloat16|float16)$")]  # what is computed in, and stored
    mirrored: bool  # whether each picture's mirror image is there too
    shapes: dict[str, Annotated[list[PositiveInt], Field(min_length=1)]]  # of a row of latents, bert and t5

    def __post_init__(self) -> None:
        if self.shapes.keys() != {"latents", "bert", "t5"}:
            raise ValueError("the shapes of latents, bert and t5 are not all that is there")

    def row_bytes(self, name: str) -> int:
        """What a row of latents, bert or t5 takes."""
        return math.prod(self.shapes[name]) * (4 if self.dtype == "float32" else 2)

    @property
    def captions(self) -> int:
        """How many distinct ones are embedded besides the empty one, which always is."""
        return sum(file.rows for file in self.caption_files) - 1


def is_packed(folder: Path) -> bool:
    """Say whether a folder was written by `muralist pack`."""
    try:
        return format_of(folder) in (Manifest.format, EncodedManifest.format)
    except FileNotFoundError:
        return any(map(_holds_rows, sorted(folder.glob("[0-9]*.arrow"))[:1]))  # a packed folder that lost its manifest
    except (OSError, ValueError, AttributeError, RecursionError):
        return bool(list(folder.glob("[0-9]*.arrow")))  # a damaged manifest is not "a folder without images"


def is_encoded(folder: Path) -> bool:
    """Say whether a packed folder holds latents instead of pixels."""
    try:
        return format_of(folder) == EncodedManifest.format
    except (OSError, ValueError, AttributeError, RecursionError):
        return False


def format_of(folder: Path) -> Any:
    """The format that a folder's manifest names."""
    return json.loads((folder / _MANIFEST).read_text(encoding="utf-8")).get("format")


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of a packed folder of either kind."""
    return (EncodedManifest if is_encoded(folder) else Manifest).read(folder)


def _holds_rows(path: Path) -> bool:
    """Say whether an Arrow file holds rows of one size, as packed ones do, and not encoded images."""
    import pyarrow

    try:
        with pyarrow.memory_map(str(path)) as memory, pyarrow.ipc.open_file(memory) as reader:
            schema = reader.schema
            return any(
                pyarrow.types.is_fixed_size_binary(schema.field(n).type) for n in _ROW_COLUMNS if n in schema.names
            )
    except (OSError, pyarrow.ArrowException):
        return False
