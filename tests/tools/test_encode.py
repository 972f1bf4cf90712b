"""Encoding a data set ahead: what is kept is what the frozen parts make, once, whole, and told apart from other packs."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from muralist.cli import main
from muralist.core.errors import UserError
from muralist.data import packed
from muralist.data.loader import to_unit_range
from muralist.data.packed import LatentSource
from muralist.data.source import read_batch
from muralist.data.sources import open_held_out, open_source
from muralist.demo.small_hunyuan_dit import build_small_hunyuan_dit
from muralist.models.hunyuan_dit import FrozenEncoders
from muralist.settings import PackSettings
from muralist.tools.encode import BATCH, encode
from muralist.tools.pack import pack
from tests.support.disks import small_disk
from tests.support.hunyuan import write_scenes
from tests.support.images import contents

SIZE, COUNT, HELD_OUT = 32, 14, 6


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_small_hunyuan_dit(tmp_path_factory.mktemp("model") / "small")


@pytest.fixture(scope="module")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("scenes")
    write_scenes(place / "val", SIZE, HELD_OUT, first=100)
    return write_scenes(place / "train", SIZE, COUNT)


@pytest.fixture(scope="module")
def encoded(model: Path, scenes: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("encoded") / "latents"
    run(scenes, place, model)
    return place


def run(scenes: Path, place: Path, model: Path | str, **settings: object) -> str:
    """Encode in this process; returns the report."""
    given: dict[str, Any] = {"source": str(scenes), "destination": str(place), "encode": str(model), **settings}
    return str(encode(PackSettings(**{"num_workers": 1, "img_size": SIZE, **given}), progress=False))


def expected_latents(parts: FrozenEncoders, images: np.ndarray) -> Tensor:
    """Means and deviations of images and mirror images, in batches of the very size."""
    pixels = torch.from_numpy(images)
    batches = range(0, len(images), BATCH)
    sides = []
    for view in (pixels, pixels.flip(2)):
        chunks = [to_unit_range(view[first : first + BATCH].contiguous(), None) for first in batches]
        sides.append(torch.cat([torch.stack(parts.vae_posterior(chunk), dim=1) for chunk in chunks]))
    return torch.stack(sides, dim=1)


@pytest.mark.parametrize(("part", "count"), [("train", COUNT), ("val", HELD_OUT)])
def test_stored_latents_equal_the_output_of_the_encoders(
    part: str, count: int, model: Path, scenes: Path, encoded: Path
) -> None:
    source = (open_source if part == "train" else open_held_out)(str(encoded), SIZE)
    assert isinstance(source, LatentSource) and len(source) == count
    images, _, captions = read_batch(open_source(str(scenes.parent / part), SIZE), np.arange(count))
    batch, labels, kept_captions = source.read_latents(np.arange(count))
    assert kept_captions == captions and not labels.any()
    parts = FrozenEncoders.load(model)
    # The last batch is padded here and is not there: a last bit may differ.
    torch.testing.assert_close(batch.latents, expected_latents(parts, images), rtol=1e-4, atol=1e-4)
    whole = count // BATCH * BATCH
    assert torch.equal(batch.latents[:whole], expected_latents(parts, images[:whole]))
    assert batch.latents.shape == (count, 2, 2, 4, SIZE // 8, SIZE // 8)
    text = parts.encode_text(captions)
    assert torch.equal(batch.text["bert_mask"].long(), text.bert_mask)
    assert torch.equal(batch.text["t5_mask"].long(), text.t5_mask)
    torch.testing.assert_close(batch.text["bert"], text.bert, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(batch.text["t5"], text.t5, rtol=1e-5, atol=1e-5)
    empty = parts.encode_text([""])
    torch.testing.assert_close(source.read_empty_caption()["t5"], empty.t5, rtol=1e-5, atol=1e-5)


def test_the_content_of_report_and_manifest(model: Path, scenes: Path, encoded: Path) -> None:
    before = contents(encoded)
    report = run(scenes, encoded, model)  # the second time nothing is done
    assert contents(encoded) == before
    # Images 0, 6 and 12 share a caption and the last has none; of the held-out ones the last has none.
    assert f"{encoded} is this pack already: 14 images, 6 held out, 16 distinct captions, 2 MB." == report
    manifest = json.loads((encoded / "manifest.json").read_text())
    assert (manifest["model"], manifest["dtype"], manifest["mirrored"]) == (str(model), "float32", True)
    assert sorted(manifest["frozen_parts"]) == ["text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2", "vae"]
    assert [file["rows"] for file in manifest["caption_files"]] == [12]
    assert {path.split("/")[-1] for path in before} == {"00000.arrow", "captions-00000.arrow", "manifest.json"}


def test_folders_of_version_1_are_read(model: Path, scenes: Path, encoded: Path, tmp_path: Path) -> None:
    shutil.copytree(encoded, tmp_path / "old")
    for file in (tmp_path / "old").rglob("manifest.json"):
        content = json.loads(file.read_text())
        assert content.pop("version") == 2 and content.pop("family") == "hunyuandit"
        tensors = content.pop("tensors")
        shapes = {name: tensors[name]["shape"] for name in ("latents", "bert", "t5")}
        file.write_text(json.dumps({"version": 1, **content, "shapes": shapes}))
    old, new = LatentSource(tmp_path / "old", SIZE), LatentSource(encoded, SIZE)
    assert old.manifest == new.manifest and old.fingerprint() == new.fingerprint()
    assert "is this pack already" in run(scenes, tmp_path / "old", model)


def test_the_bytes_depend_neither_on_workers_nor_on_chunks(
    model: Path, scenes: Path, encoded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(scenes, tmp_path / "two", model, num_workers=2)
    assert contents(tmp_path / "two") == contents(encoded)
    monkeypatch.setattr(packed, "_FOOTER_BYTES", 4000)
    monkeypatch.setattr(packed, "_MAX_FILE_BYTES", 400_000)
    monkeypatch.setattr(packed, "_BATCH_BYTES", 150_000)
    run(scenes, tmp_path / "cut", model)
    cut, whole = LatentSource(tmp_path / "cut", SIZE), LatentSource(encoded, SIZE)
    assert len(cut.manifest.caption_files) > 2
    order = np.random.default_rng(0).permutation(COUNT)
    (ours, _, _), (theirs, _, _) = (source.read_latents(order) for source in (cut, whole))
    assert torch.equal(ours.latents, theirs.latents) and all(
        torch.equal(ours.text[name], theirs.text[name]) for name in theirs.text
    )


def test_half_precision_is_stored_without_conversion(model: Path, scenes: Path, encoded: Path, tmp_path: Path) -> None:
    run(scenes, tmp_path / "half", model, dtype="bf16", random_flip=False)
    source = LatentSource(tmp_path / "half", SIZE)
    batch, _, captions = source.read_latents(np.arange(BATCH))
    parts = FrozenEncoders.load(model)
    parts.to(torch.device("cpu"), torch.bfloat16)
    images, _, _ = read_batch(open_source(str(scenes), SIZE), np.arange(BATCH))
    mean, deviation = parts.vae_posterior(to_unit_range(torch.from_numpy(images), None))
    assert batch.latents.dtype == mean.dtype == torch.bfloat16 and batch.latents.shape[1] == 1
    assert torch.equal(batch.latents[:, 0, 0], mean) and torch.equal(batch.latents[:, 0, 1], deviation)
    assert torch.equal(batch.text["t5"].float(), parts.encode_text(captions).t5)
    assert source.manifest.bytes < 0.55 * LatentSource(encoded, SIZE).manifest.bytes


def test_packs_of_other_content_are_refused(model: Path, scenes: Path, encoded: Path, tmp_path: Path) -> None:
    for change in ({"dtype": "bf16"}, {"random_flip": False}, {"img_size": 48}):
        with pytest.raises(UserError, match="holds another pack"):
            run(scenes, encoded, model, **change)
    with pytest.raises(UserError, match="pixels instead of latents"):
        pack(str(scenes), encoded, SIZE, workers=1)
    pack(str(scenes), tmp_path / "pixels", SIZE, workers=1)
    with pytest.raises(UserError, match="holds another pack"):
        run(scenes, tmp_path / "pixels", model)
    with pytest.raises(UserError, match="holds latents of the model .* and no pixels"):
        pack(str(encoded), tmp_path / "again", SIZE, workers=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["pixels"]


def test_packed_pixels_encode_to_the_same(model: Path, scenes: Path, encoded: Path, tmp_path: Path) -> None:
    pack(str(scenes), tmp_path / "pixels", SIZE, workers=1)
    run(tmp_path / "pixels", tmp_path / "latents", "small")  # built anew, and the same model
    ours, theirs = (LatentSource(place, SIZE).manifest for place in (tmp_path / "latents", encoded))
    for name in ("files", "caption_files", "frozen_parts"):
        assert getattr(ours, name) == getattr(theirs, name)


def test_an_interrupted_encode_leaves_nothing(
    model: Path, scenes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, posterior = [], FrozenEncoders.vae_posterior

    def interrupted(self: FrozenEncoders, images: Tensor) -> tuple[Tensor, Tensor]:
        calls.append(images)
        if len(calls) == 3:
            os.kill(os.getpid(), signal.SIGINT)
        return posterior(self, images)

    monkeypatch.setattr(FrozenEncoders, "vae_posterior", interrupted)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            run(scenes, tmp_path / "latents", model)
    finally:
        signal.signal(signal.SIGINT, before)
    assert list(tmp_path.iterdir()) == []


def test_broken_images_are_left_out(model: Path, scenes: Path, encoded: Path, tmp_path: Path) -> None:
    shutil.copytree(scenes, tmp_path / "source")
    (tmp_path / "source" / "001.png").write_bytes(b"broken")
    assert "Broken images left out: 1" in run(tmp_path / "source", tmp_path / "latents", model)
    batch, _, captions = LatentSource(tmp_path / "latents", SIZE).read_latents(np.array([1]))
    expected, _, expected_captions = LatentSource(encoded, SIZE).read_latents(np.array([2]))
    assert torch.equal(batch.latents, expected.latents) and captions == expected_captions


def test_a_full_disk_is_reported_and_left_clean(
    model: Path, scenes: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    # Of a megabyte: enough for all latents, but not for twelve captions of 86 kB.
    with small_disk(tmp_path / "disk", "1m") as disk:
        with pytest.raises(UserError, match="No space left on device"):
            run(scenes, disk / "latents", model)
        assert list(disk.iterdir()) == []
    assert "this needs up to 0.0 GB, and 0.0 GB are free" in capfd.readouterr().err


def test_overflow_in_fp16_is_refused(model: Path, scenes: Path, tmp_path: Path) -> None:
    shutil.copytree(model, tmp_path / "model")
    file = next((tmp_path / "model" / "vae").glob("*.safetensors"))
    weights = load_file(file)
    save_file({**weights, "quant_conv.weight": weights["quant_conv.weight"] * 1e5}, file, {"format": "pt"})
    with pytest.raises(UserError, match="beyond the range of float16"):
        run(scenes, tmp_path / "latents", tmp_path / "model", dtype="fp16")
    assert not (tmp_path / "latents").exists()


def test_damage_is_found(encoded: Path, tmp_path: Path) -> None:
    place = tmp_path / "latents"
    shutil.copytree(encoded, place)
    file = place / "captions-00000.arrow"
    file.write_bytes(bytes(file.stat().st_size))
    with pytest.raises(UserError, match=r"captions-00000\.arrow is damaged"):
        LatentSource(place, SIZE).read_empty_caption()
    file.unlink()
    with pytest.raises(UserError, match=r"captions-00000\.arrow is missing"):
        open_source(str(place), SIZE)
    (place / "manifest.json").unlink()
    with pytest.raises(UserError, match=r"no manifest\.json"):
        open_source(str(place), SIZE)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--img_size", "40", "--encode", "small"], "Both sides must be multiples of 16"),
        (["--img_size", "32", "--encode", "nowhere"], "The model nowhere was not found"),
        (["--img_size", "32", "--dtype", "bf16"], "--dtype applies to latents only, and this command packs pixels"),
    ],
)
def test_invalid_options_are_explained(
    words: list[str], sentence: str, scenes: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["pack", str(scenes), str(tmp_path / "latents"), *words]) == 1
    assert sentence in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
