"""The network of FID and its weights file."""

from __future__ import annotations

import io
import json
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from scripts import fid_reference

from muralist.core.errors import UserError
from muralist.evaluate import inception
from muralist.evaluate.inception import Convolution, Inception, find_weights, load_inception, preprocess
from tests.support.evaluating import inception_weights


def test_features_equal_those_of_pytorch_fid() -> None:
    expected = json.loads(Path(__file__).with_name("fid_reference.json").read_text())["feature_sums"]["small"]
    network = load_inception(inception_weights())
    images = torch.from_numpy(fid_reference.read_images("small", len(expected)))
    with torch.inference_mode():
        found = network(torch.stack([preprocess(image[None])[0] for image in images])).double().sum(1)
    assert found.tolist() == pytest.approx(expected, abs=1e-2)


def test_folded_batch_norms_change_only_rounding() -> None:
    network = load_inception(inception_weights())
    images = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (2, 40, 40, 3), dtype=np.uint8))
    with torch.inference_mode():
        inputs = torch.stack([preprocess(image[None])[0] for image in images])
        before = network(inputs)
        folded = inception.fold_batch_norms(network)
        after = folded(inputs)
    assert not any(isinstance(module, torch.nn.BatchNorm2d) for module in folded.modules())
    assert before.std() > 0.1 and (before - after).abs().max() < 1e-5


def one_kernel(x: torch.Tensor, conv: torch.nn.Conv2d) -> torch.Tensor:
    return torch.relu(conv(x))


class Faulty:
    """Right at first, then not."""

    def __init__(self, fault: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.calls, self.fault = 0, fault

    def __call__(self, x: torch.Tensor, conv: torch.nn.Conv2d) -> torch.Tensor:
        self.calls += 1
        made = one_kernel(x, conv)
        return made if self.calls <= 94 else self.fault(made)  # so many convolutions has a pass


def refuse(made: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED")


@pytest.mark.parametrize(
    ("kernel", "taken"),
    [(one_kernel, True), (Faulty(lambda made: made + 0 * torch.nan), False), (Faulty(refuse), False)],
)
def test_fused_kernels_are_used_only_if_bit_exact(
    kernel: Callable[..., torch.Tensor], taken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inception, "fused_conv_relu", kernel)
    network = inception.fold_batch_norms(Inception().eval())
    spoiled: list[bool] = []
    with torch.inference_mode():
        inception.fuse_if_bit_exact(network, network, torch.rand(1, 3, 299, 299), lambda: spoiled.append(True))
    found = {module.fused for module in network.modules() if isinstance(module, Convolution)}
    assert found == {taken} and len(spoiled) == 2


def test_batches_of_mixed_sizes_are_resized_like_single_images() -> None:
    generator = np.random.default_rng(0)
    sizes = [(32, 32), (31, 40), (32, 32), (400, 300)]
    images = [torch.from_numpy(generator.integers(0, 256, (*size, 3), dtype=np.uint8)) for size in sizes]
    batch = inception.preprocess_batch(images, torch.device("cpu"))
    assert batch.shape == (4, 3, 299, 299)
    assert all(torch.equal(row, preprocess(image[None])[0]) for row, image in zip(batch, images, strict=True))
    scaled = torch.nn.functional.interpolate(images[1].permute(2, 0, 1)[None] / 255, size=(299, 299), mode="bilinear")
    assert (2 * scaled[0] - 1 - batch[1]).abs().max() < 1e-6


def test_pytorch_fid_weights_are_read(tmp_path: Path) -> None:
    network = Inception()
    tensors = {**network.state_dict(), "fc.weight": torch.zeros(1008, 2048), "fc.bias": torch.zeros(1008)}
    torch.save(tensors, tmp_path / "usual.pth")
    read = load_inception(tmp_path / "usual.pth").state_dict()
    assert read.keys() == network.state_dict().keys()
    assert all(torch.equal(read[name], tensors[name]) for name in read)


def test_other_networks_are_refused(tmp_path: Path) -> None:
    names = {"AuxLogits.conv0.conv.weight": torch.zeros(1)}
    torch.save(names, tmp_path / "torchvision.pth")
    with pytest.raises(UserError, match="torchvision's Inception, on which FID is not defined"):
        load_inception(tmp_path / "torchvision.pth")
    torch.save({"weight": torch.zeros(1)}, tmp_path / "other.pth")
    with pytest.raises(UserError, match="The tensor Conv2d_1a_3x3.conv.weight is missing"):
        load_inception(tmp_path / "other.pth")
    (tmp_path / "cut.pth").write_bytes((tmp_path / "other.pth").read_bytes()[:200])
    with pytest.raises(UserError, match="cannot be read"):
        load_inception(tmp_path / "cut.pth")


def test_a_torchscript_file_runs_no_code(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return Path.touch, (Path(tmp_path / "ran"),)  # type: ignore[return-value]

    data = io.BytesIO()
    pickle.dump(Evil(), data, protocol=2)
    with zipfile.ZipFile(tmp_path / "evil.pt", "w") as archive:
        archive.writestr("evil/constants.pkl", b"")
        archive.writestr("evil/data.pkl", data.getvalue())
    with pytest.raises(UserError, match="which no tensor needs"):
        load_inception(tmp_path / "evil.pt")
    assert not (tmp_path / "ran").exists()


def test_search_order_of_the_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MURALIST_INCEPTION", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    found, reason = find_weights(None)
    assert found is None
    file, cache = "pt_inception-2015-12-05-6726825d.pth", str(tmp_path / "muralist")
    assert all(part in reason for part in (file, "--inception_weights", "MURALIST_INCEPTION", cache))
    cached = tmp_path / "muralist" / "default_1.pt"
    cached.parent.mkdir()
    cached.touch()
    assert find_weights(None) == (cached, "")
    named = tmp_path / "named.pth"
    monkeypatch.setenv("MURALIST_INCEPTION", str(named))
    with pytest.raises(UserError, match="named.pth, which MURALIST_INCEPTION names, does not exist"):
        find_weights(None)
    named.touch()
    assert find_weights(None) == (named, "")
    with pytest.raises(UserError, match="which --inception_weights names"):
        find_weights(str(tmp_path / "none.pth"))


def bicubic_matrix(size: int) -> np.ndarray:
    """Pillow's bicubic filter with antialiasing as a matrix [299, size]: a = -0.5, wider where the image shrinks."""
    scale = size / 299
    place = (np.arange(299) + 0.5) * scale
    x = np.abs((np.arange(size) + 0.5 - place[:, None]) / max(scale, 1))
    weights = np.where(x < 1, 1.5 * x**3 - 2.5 * x**2 + 1, np.where(x < 2, -0.5 * x**3 + 2.5 * x**2 - 4 * x + 2, 0))
    return weights / weights.sum(1, keepdims=True)


def test_clean_input_is_bicubic_with_antialiasing() -> None:
    """Enlarged in one direction and shrunk in the other, clipped and scaled, but not rounded."""
    image = np.random.default_rng(0).integers(0, 256, (40, 700, 3), np.uint8)
    expected = (bicubic_matrix(40) @ image.transpose(2, 0, 1).astype(float) @ bicubic_matrix(700).T).clip(0, 255)
    found = inception.preprocess_clean(image)
    np.testing.assert_allclose(found.numpy(), (expected - 128) / 128, atol=1e-5)
    assert len(np.unique(found.numpy())) > 1000 and found.dtype == torch.float32
