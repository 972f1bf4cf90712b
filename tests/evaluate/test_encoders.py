"""FD-DINOv2 against the network and the distance written out in numpy."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from muralist.cli import main
from muralist.core.errors import UserError
from muralist.evaluate.encoders import Dinov2Encoder
from tests.support.evaluating import evaluate, inception_weights, scenes, small_clip, small_dinov2, write_images

pytestmark = pytest.mark.usefixtures("clean_environment")


def cubic_weights(offset: float) -> np.ndarray:
    """Weights of the four neighbors, with the coefficient -0.75 that PyTorch has."""
    near = lambda x: 1.25 * x**3 - 2.25 * x**2 + 1  # noqa: E731
    far = lambda x: -0.75 * (x**3 - 5 * x**2 + 8 * x - 4)  # noqa: E731
    return np.array([far(1 + offset), near(offset), near(1 - offset), far(2 - offset)])


def shrunk(table: np.ndarray) -> np.ndarray:
    """A table of 5 x 5 places to 4 x 4, scaled by 4.1 / 5."""
    matrix = np.zeros((4, 5))
    for row in range(4):
        place = (row + 0.5) * 5 / 4.1 - 0.5
        for tap, weight in enumerate(cubic_weights(place - math.floor(place))):
            matrix[row, np.clip(math.floor(place) - 1 + tap, 0, 4)] += weight
    return np.einsum("ai,bj,ijd->abd", matrix, matrix, table)


def class_token(file: Path, w: dict[str, np.ndarray]) -> np.ndarray:
    """DINOv2 of one layer and two heads, in float64."""
    pixels = np.asarray(Image.open(file).convert("RGB").resize((224, 224), Image.Resampling.BICUBIC)) / 255
    pixels = (pixels - [0.485, 0.456, 0.406]) / [0.229, 0.224, 0.225]
    patches = pixels.reshape(4, 56, 4, 56, 3).transpose(0, 2, 4, 1, 3).reshape(16, -1)
    embedding = "embeddings.patch_embeddings.projection"
    patches = patches @ w[f"{embedding}.weight"].reshape(6, -1).T + w[f"{embedding}.bias"]
    places = w["embeddings.position_embeddings"][0]
    x = np.concatenate(
        (w["embeddings.cls_token"][0] + places[:1], patches + shrunk(places[1:].reshape(5, 5, 6)).reshape(16, 6))
    )

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        spread = np.sqrt(x.var(1, keepdims=True) + 1e-6)
        return (x - x.mean(1, keepdims=True)) / spread * w[f"{name}.weight"] + w[f"{name}.bias"]

    def linear(x: np.ndarray, name: str) -> np.ndarray:
        return x @ w[f"encoder.layer.0.{name}.weight"].T + w[f"encoder.layer.0.{name}.bias"]

    inner = norm(x, "encoder.layer.0.norm1")
    query, key, value = (linear(inner, f"attention.{name}_proj").reshape(17, 2, 3) for name in "qkv")
    weight = np.exp(np.einsum("ihd,jhd->hij", query, key) / np.sqrt(3))
    mixed = np.einsum("hij,jhd->ihd", weight / weight.sum(2, keepdims=True), value).reshape(17, 6)
    x = x + linear(mixed, "attention.o_proj") * w["encoder.layer.0.layer_scale1.lambda1"]
    hidden = linear(norm(x, "encoder.layer.0.norm2"), "mlp.fc1")
    hidden = hidden * (1 + np.vectorize(math.erf)(hidden / np.sqrt(2))) / 2
    x = x + linear(hidden, "mlp.fc2") * w["encoder.layer.0.layer_scale2.lambda1"]
    return norm(x, "layernorm")[0]


def distance(x: np.ndarray, y: np.ndarray) -> float:
    """Frechet, with the root of the product by its eigenvalues."""
    one, two = np.cov(x, rowvar=False), np.cov(y, rowvar=False)
    root = np.sqrt(np.linalg.eigvals(one @ two).real.clip(0)).sum()
    return float(((x.mean(0) - y.mean(0)) ** 2).sum() + np.trace(one) + np.trace(two) - 2 * root)


def test_fd_dinov2_equals_numpy(tmp_path: Path, dinov2: Path) -> None:
    from transformers import Dinov2Model

    images = write_images(tmp_path / "images", scenes(9, 0))
    reference = write_images(tmp_path / "reference", scenes(8, 1, side=300))
    found = evaluate(tmp_path / "out", "--images", images, "--reference", reference, "--dinov2_path", dinov2)
    score = found["scores"]["fd_dinov2"]
    model = Dinov2Model.from_pretrained(dinov2, local_files_only=True)
    weights = {name: tensor.double().numpy() for name, tensor in model.state_dict().items()}
    rows = [
        np.stack([class_token(file, weights) for file in sorted(folder.iterdir())]) for folder in (images, reference)
    ]
    assert score["value"] == pytest.approx(distance(*rows), rel=1e-4)
    assert score["value"] > 0.01 and score["low"] < score["value"] < score["high"]
    assert score["note"].startswith(
        "DINOv2 ViT/56 of 1 layers, 6 wide, class token; bicubic to 224 x 224 with antialiasing, by Pillow"
    )
    assert found["settings"]["dinov2_resizing"].endswith("ImageNet's mean and deviation; as dgm-eval does")
    assert any(
        text.startswith("FD-DINOv2 is computed with ViT/56") and "ViT-L/14" in text for text in found["warnings"]
    )
    assert "FD-DINOv2" in (tmp_path / "out" / "report" / "index.html").read_text()
    few = write_images(tmp_path / "few", scenes(4, 0))
    found = evaluate(tmp_path / "out", "--images", few, "--reference", reference, "--dinov2_path", dinov2)
    assert any(text.startswith("4 images are fewer than the 6 features of FD-DINOv2") for text in found["warnings"])


def test_statistics_require_the_same_dinov2(tmp_path: Path, dinov2: Path) -> None:
    images = write_images(tmp_path / "images", scenes(3, 0))
    reference = write_images(tmp_path / "reference", scenes(2, 1))
    arguments = ("-o", tmp_path / "both.npz", "--inception_weights", inception_weights(), "--dinov2_path", dinov2)
    assert main(["stats", str(reference), *map(str, arguments)]) == 0
    np.savez(tmp_path / "plain.npz", mu=np.zeros(2048), sigma=np.eye(2048))

    def score(name: str, model: Path, expect: int = 0) -> dict[str, Any]:
        arguments = ("--images", images, "--reference", tmp_path / name, "--dinov2_path", model)
        evaluate(tmp_path / "out", *arguments, expect=expect)
        return json.loads((tmp_path / "out" / "report.json").read_text())["scores"]["fd_dinov2"]

    found = score("both.npz", dinov2)
    assert found == score("reference", dinov2) and found["value"] > 0.01
    other = small_dinov2(tmp_path / "other", seed=1)
    assert "holds features of another DINOv2 than --dinov2_path names" in score("both.npz", other, 1)["note"]
    assert "holds no DINOv2 features" in score("plain.npz", dinov2, 1)["note"]


def test_invalid_checkpoints_are_refused(tmp_path: Path, dinov2: Path) -> None:
    with pytest.raises(UserError, match="The folder .*, which --dinov2_path names, does not exist"):
        Dinov2Encoder.from_checkpoint(tmp_path / "none")
    with pytest.raises(UserError, match="is not a DINOv2 checkpoint"):
        Dinov2Encoder.from_checkpoint(small_clip(tmp_path / "clip"))
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "config.json").write_bytes((dinov2 / "config.json").read_bytes())
    with pytest.raises(UserError, match="is not a DINOv2 checkpoint"):
        Dinov2Encoder.from_checkpoint(tmp_path / "half")
    assert (Dinov2Encoder.from_checkpoint(dinov2).width, Dinov2Encoder.from_checkpoint(dinov2).name) == (6, "dinov2")
