from __future__ import annotations

import hashlib
import pickle
import subprocess
import sys
from collections import Counter

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from muralist.core.errors import UserError
from muralist.demo.driving_world import DRAWING_VERSION, KINDS, PROMPTS, DrivingWorld, caption, draw_scene
from tests.support.scene_classifier import scenes, train_classifier


def digest(image: np.ndarray) -> str:
    return hashlib.sha256(image.tobytes()).hexdigest()


def test_a_scene_is_the_same_in_another_process_and_in_another_order():
    wanted = [(kind, number) for kind in range(8) for number in (0, 1, 12_345)]
    here = {place: digest(draw_scene(*place, img_size=48, seed=7)) for place in wanted}
    program = (
        "import sys, hashlib; from muralist.demo.driving_world import draw_scene\n"
        f"for place in {wanted[::-1]}: print(hashlib.sha256(draw_scene(*place, 48, 7).tobytes()).hexdigest())\n"
        "print('torch' in sys.modules)"
    )
    printed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    assert printed[:-1] == [here[place] for place in wanted[::-1]]
    assert printed[-1] == "False", "drawing must not pay for importing torch"


# Mean brightness of nine fields of scene 0 of each kind, rows from the top. Polygon edges may differ by a pixel between
# Pillow versions, hence fields and not a digest. A change here is a change of the data set: raise DRAWING_VERSION.
GOLDEN = {
    "residential_wet": [163, 170, 158, 133, 167, 149, 120, 153, 146],
    "intersection": [150, 149, 138, 179, 164, 157, 129, 128, 115],
    "highway": [160, 166, 150, 147, 148, 150, 151, 151, 150],
    "rainy_street": [152, 180, 154, 139, 165, 150, 134, 153, 136],
    "suburban": [175, 179, 168, 141, 150, 118, 141, 130, 130],
    "parking_lot": [155, 185, 182, 126, 123, 120, 87, 83, 106],
    "city_crossing": [141, 170, 164, 136, 151, 133, 134, 137, 136],
    "rural": [162, 176, 178, 148, 168, 141, 155, 139, 168],
}


def test_the_drawings_are_those_of_their_version():
    assert DRAWING_VERSION == 1
    for kind, fields in GOLDEN.items():
        grey = draw_scene(KINDS.index(kind), 0, 96).mean(axis=2)
        drawn = grey.reshape(3, 32, 3, 32).mean(axis=(1, 3)).ravel()
        np.testing.assert_allclose(drawn, fields, atol=2.0, err_msg=kind)


@pytest.mark.parametrize("img_size", [16, 33, 64, 100, 256])
def test_every_size_shows_the_same_composition(img_size: int):
    def seen_from_afar(kind: int, number: int) -> np.ndarray:
        large = Image.fromarray(draw_scene(kind, number, 4 * img_size))
        return np.asarray(large.reduce(4), dtype=float)

    for kind in range(8):
        image = draw_scene(kind, 3, img_size)
        assert image.shape == (img_size, img_size, 3)
        assert image.dtype == np.uint8
        assert np.abs(image - seen_from_afar(kind, 3)).mean() < 5.0
        assert np.abs(image - seen_from_afar(kind, 4)).mean() > 15.0, "the comparison must tell scenes apart"


def test_seed_number_and_kind_each_change_the_image():
    images = [draw_scene(kind, number, 32, seed) for kind in range(8) for number in range(20) for seed in (0, 1)]
    assert len({digest(image) for image in images}) == len(images)


def test_scenes_of_one_kind_are_varied():
    for kind in range(8):
        drawn = np.stack([draw_scene(kind, number, 16) for number in range(40)]).astype(float)
        assert drawn.std(axis=0).mean() > 20.0, KINDS[kind]


def test_captions_begin_with_the_prompt_and_match_the_image():
    kind = KINDS.index("rural")
    captions = {number: caption(kind, number) for number in range(240)}
    assert all(text.startswith(PROMPTS[kind] + ", ") for text in captions.values())

    def mean_over(words: str, measure) -> float:
        chosen = [number for number, text in captions.items() if words in text]
        assert chosen, words
        return float(np.mean([measure(draw_scene(kind, number, 32).astype(float)) for number in chosen]))

    def greenness_of_the_land(image: np.ndarray) -> float:
        return (image[16:, :, 1] - image[16:, :, [0, 2]].mean(axis=2)).mean()

    def warmth_of_the_sky(image: np.ndarray) -> float:
        return (image[8:12, :, 0] - image[8:12, :, 2]).mean()

    def depth_of_the_sky(image: np.ndarray) -> float:
        return np.abs(image[9] - image[0]).mean()

    assert mean_over("in summer", greenness_of_the_land) > mean_over("in winter", greenness_of_the_land) + 10
    assert mean_over("at sunset", warmth_of_the_sky) > mean_over("at noon", warmth_of_the_sky) + 30
    assert mean_over("clear sky", depth_of_the_sky) > 1.3 * mean_over(", mist", depth_of_the_sky)


def test_only_the_rainy_street_is_captioned_with_rain():
    for kind in range(8):
        words = {caption(kind, number)[len(PROMPTS[kind]) :] for number in range(60)}
        assert any("rain" in text for text in words) == (KINDS[kind] == "rainy_street")


def test_every_kind_is_equally_frequent():
    world = DrivingWorld(16)
    assert len(world) == 29_500
    assert world.label_names == list(PROMPTS)
    items = [world.read(index) for index in range(80)]
    assert Counter(item.label for item in items) == dict.fromkeys(range(8), 10)
    for index, item in enumerate(items[:16]):
        np.testing.assert_array_equal(item.image, draw_scene(index % 8, index // 8, 16))
        assert item.caption == caption(index % 8, index // 8)


def test_first_offsets_the_samples_and_the_source_can_be_pickled():
    later = pickle.loads(pickle.dumps(DrivingWorld(24, samples=5, seed=3, first=11)))
    np.testing.assert_array_equal(later.read(4).image, DrivingWorld(24, seed=3).read(15).image)
    assert later.read(4).label == 15 % 8
    for index in (-1, 5):
        with pytest.raises(IndexError):
            later.read(index)


def test_the_fingerprint_has_all_settings():
    assert DrivingWorld((32, 64)).fingerprint() == f"driving_world-v{DRAWING_VERSION}-32x64px-29500-seed0-first0"
    assert DrivingWorld((64, 64)).fingerprint() == DrivingWorld(64).fingerprint()
    settings = [{}, {"img_size": 64}, {"samples": 8}, {"seed": 1}, {"first": 8}]
    assert len({DrivingWorld(**{"img_size": 32, **setting}).fingerprint() for setting in settings}) == len(settings)


@pytest.mark.parametrize("size", [(32, 64), (64, 32), (48, 64)])
def test_driving_world_crops_the_center_of_a_square(size: tuple[int, int]):
    item, square = DrivingWorld(size).read(9), draw_scene(1, 1, 64)
    top, left = (64 - size[0]) // 2, (64 - size[1]) // 2
    assert np.array_equal(item.image, square[top : top + size[0], left : left + size[1]])
    assert item.image.flags.c_contiguous and item.image.flags.writeable
    assert item[1:] == DrivingWorld(64).read(9)[1:]


@pytest.mark.parametrize("size", [8, 2048, (8, 64), (512, 2048)])
def test_sizes_that_cannot_be_drawn_are_refused(size: int | tuple[int, int]):
    with pytest.raises(UserError, match=f"images of {str(size).strip('()').replace(', ', ' x ')} pixels"):
        DrivingWorld(size)


def accuracy(guessed: Tensor, kinds: Tensor) -> float:
    return (guessed == kinds).float().mean().item()


def test_the_mean_color_does_not_reveal_the_kind():
    images, kinds = scenes(range(5000), 16, seed=0)
    colors = images.float().mean(dim=(1, 2))
    colors = (colors - colors.mean(dim=0)) / colors.std(dim=0)
    known, unseen = slice(0, 4000), slice(4000, 5000)
    centroids = torch.stack([colors[known][kinds[known] == kind].mean(dim=0) for kind in range(8)])
    assert accuracy(torch.cdist(colors[unseen], centroids).argmin(dim=1), kinds[unseen]) < 0.5
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network = nn.Sequential(nn.Linear(3, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))
        optimizer = torch.optim.Adam(network.parameters(), lr=1e-2)
        for step in range(600):
            part = slice(step * 250 % 4000, step * 250 % 4000 + 250)
            optimizer.zero_grad()
            nn.functional.cross_entropy(network(colors[part]), kinds[part]).backward()
            optimizer.step()
    # The network has to find what little there is, or its failure would say nothing about the colors.
    assert accuracy(network(colors[known]).argmax(dim=1), kinds[known]) > 0.25
    assert accuracy(network(colors[unseen]).argmax(dim=1), kinds[unseen]) < 0.5


def spoiled(images_NHWC: Tensor) -> Tensor:
    """Blur and add noise, as a half-trained model would."""
    blurred = nn.functional.avg_pool2d(images_NHWC.permute(0, 3, 1, 2).float(), 3, stride=1, padding=1)
    noise = torch.randn(blurred.shape, generator=torch.Generator().manual_seed(0))
    return (blurred + 12 * noise).clamp(0, 255).byte().permute(0, 2, 3, 1)


def check_classifier(img_size: int, samples: int, steps: int, at_least: float) -> None:
    classify = train_classifier(img_size, samples, steps, seed=0)
    images, kinds = scenes(range(800), img_size, seed=0)
    assert accuracy(classify(images), kinds) >= at_least
    assert accuracy(classify(images.flip(2)), kinds) >= at_least
    assert accuracy(classify(spoiled(images)), kinds) >= at_least


def test_a_small_network_tells_the_kinds_apart():
    check_classifier(img_size=32, samples=1200, steps=80, at_least=0.90)


@pytest.mark.slow
@pytest.mark.parametrize("img_size", [32, 64])
def test_a_small_network_tells_nearly_all_unseen_scenes_apart(img_size: int):
    check_classifier(img_size, samples=4000, steps=200, at_least=0.95)
