"""What all combinations are compared with: looked at once."""

from __future__ import annotations

import io
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from muralist.data.fields import sample_files, short_hash
from muralist.errors import UserError
from muralist.evaluate.extractors import file_digest
from muralist.evaluate.inputs import find_images, read_statistics
from muralist.evaluate.job import stats
from muralist.runfolder import write_atomically
from muralist.settings import StatsSettings


@dataclass(frozen=True)
class Reference:
    """A folder of pictures, or statistics of one; the digest tells it from others."""

    path: Path
    digest: str
    is_file: bool

    @classmethod
    def find(cls, path: Path, output: Path) -> Reference:
        """Look at what --reference names; `output` is where other pictures will be."""
        if path.suffix == ".npz":
            read_statistics(path)
            return cls(path, file_digest(path)[:16], is_file=True)
        if output.absolute().is_relative_to(path.absolute()):
            raise UserError(
                f"{output} is inside {path}: pictures made there would be taken for real ones.",
                fix="Choose another --output_dir.",
            )
        files = find_images(path, "--reference")
        names = "\n".join(file.relative_to(path).as_posix() for file in files)
        return cls(path, short_hash(names, sample_files(len(files), files.__getitem__)), is_file=False)

    def statistics(self, output: Path, inception: Path, gpu_ids: list[int]) -> Path:
        """Everything that is known of it, as a file: computed into `output` where a folder was named."""
        if self.is_file:
            return self.path
        made = output / f"reference-{self.digest}.npz"
        if not made.is_file():
            stats(
                StatsSettings(
                    source=str(self.path), output=str(made), inception_weights=str(inception), gpu_ids=gpu_ids
                )
            )
        return made

    def moments(self, statistics: Path, output: Path) -> Path:
        """The mean and the covariance alone, which is what FID takes.

        Without the features an evaluation computes nothing but FID, and its interval is that of the generated pictures: the
        reference is the same for all combinations, and says nothing about which is better.
        """
        made = output / f"reference-{self.digest}-moments.npz"
        if not made.is_file():
            known = read_statistics(statistics)
            if known.features is None:
                return statistics
            content = {"mu": known.moments.mean, "sigma": known.moments.covariance}
            if known.count is not None:
                content["number"] = np.asarray(known.count)
            data = io.BytesIO()
            np.savez(data, **content)  # type: ignore[arg-type]  # its other arguments are not of arrays
            write_atomically(made, data.getvalue())
        return made
