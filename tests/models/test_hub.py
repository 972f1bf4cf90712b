"""Test models of the Hugging Face Hub against a real server and a real cache on this machine."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from PIL import Image

from muralist.core.errors import UserError
from muralist.demo.small_hunyuan_dit import build_small_hunyuan_dit
from muralist.models.hub import find_model
from tests.support.hub import serve
from tests.support.jit_models import family, network_of
from tests.support.runs import finish, metrics, start

FIND = """
import sys
from muralist.core.errors import UserError
from muralist.generate.model_info import check_adapters
from muralist.models.hub import find_model
for name in sys.argv[1:]:
    try:
        print("found", *(check_adapters([name])[0] if "lora" in name else [find_model(name, "--model_path")]))
    except UserError as error:
        print("refused", error)
"""


def write(root: Path, *names: str) -> Path:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"content of {name}")
    return root


def test_ids_are_found_in_the_cache_or_downloaded(tmp_path: Path) -> None:
    """Only what is read is downloaded, once; afterwards the cache is enough, and what is missing there is explained."""
    kept = ["unet/config.json", "unet/diffusion_pytorch_model.safetensors", "tokenizer/merges.txt",
            "tokenizer/spiece.model", "text/model-00001-of-00002.safetensors"]  # fmt: skip
    left = ["unet/diffusion_pytorch_model.bin", "unet/diffusion_pytorch_model.fp16.safetensors", "pipeline.py",
            "single_file.safetensors", "other/model.safetensors", "unet/code.py"]  # fmt: skip
    pipeline = write(tmp_path / "pipeline", *kept, *left)
    index = {
        "_class_name": "P",
        "unet": ["diffusers", "U"],
        "tokenizer": ["t", "T"],
        "text": ["t", "M"],
        "*": ["a", "b"],
    }
    (pipeline / "model_index.json").write_text(json.dumps(index))
    jit = write(tmp_path / "jit", "config.json", "diffusion_pytorch_model.safetensors", "sub/model.safetensors")
    lora = write(tmp_path / "lora", "pytorch_lora_weights.safetensors", "step_500.safetensors")
    (tmp_path / "here" / "org" / "jit2").mkdir(parents=True)
    here, cache = tmp_path / "here", {"HF_HOME": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "0"}

    with serve({"org/pipeline": pipeline, "org/jit": jit, "org/gated": jit, "org/lora": lora}) as hub:
        hub.gated.add("org/gated")
        names = ("org/pipeline", "org/jit", "org/lora:0.5", "org/none", "org/gated", "org/jit2")
        said = finish(start("python", "-c", FIND, *names, cwd=here, HF_ENDPOINT=hub.url, **cache))
        weights = {"diffusion_pytorch_model.safetensors", "pytorch_lora_weights.safetensors"}
        assert hub.downloaded == {"model_index.json", *kept, "config.json", *weights}
        assert f"Downloading org/pipeline (6 files, 0.00 GB) from {hub.url}" in said
        assert f"found {tmp_path / 'cache' / 'hub' / 'models--org--pipeline' / 'snapshots'}" in said
        assert re.search(r"found \S+/models--org--lora/snapshots/\w+ 0\.5\n", said)
        assert "org/none was not found, neither on this machine nor on the Hugging Face Hub. " in said
        assert f" {here / 'org'} has no entry none. {hub.url} has no such model, or it is private. Check the" in said
        assert "org/gated on the Hugging Face Hub is gated. Its owner asks every user to accept its terms. Acc" in said
        assert f"Accept them at {hub.url}/org/gated, then set HF_TOKEN or run `hf auth login`." in said
        assert said.endswith("found org/jit2\n"), "a folder of this machine comes first"

        hub.asked.clear()
        (jit / "config.json").write_text("newer")
        again = finish(start("python", "-c", FIND, "org/jit", cwd=here, HF_ENDPOINT=hub.url, **cache))
        assert again.startswith("found") and again in said and not hub.asked, "a run keeps its model"

    gone = finish(start("python", "-c", FIND, "org/jit", "org/new", cwd=here, HF_ENDPOINT=hub.url, **cache))
    assert gone.startswith("found") and f"{hub.url} cannot be reached ([Errno 111] Connection refused), and" in gone
    offline = {**cache, "HF_HUB_OFFLINE": "1"}
    said = finish(start("muralist", "generate", "--model_path", "org/new", "--prompt", "0", "--output_dir", "i", cwd=here,
                        **offline), expect=1)  # fmt: skip
    assert "muralist: The model org/new was not found, neither on this machine nor in the cache of the Hugging" in said
    assert f"HF_HUB_OFFLINE is set, and it is not complete in the cache {tmp_path / 'cache' / 'hub'}." in said
    assert "\nCheck the path. If it is an id on the Hub, unset HF_HUB_OFFLINE, or copy a cache from where" in said


def test_mistyped_paths_are_not_looked_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run or a weights file that was mistyped has the form of an id."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "first" / "checkpoints").mkdir(parents=True)
    for name, why in (
        ("runs/frist", "has no entry frist. Did you mean first?"),
        ("results/first", "results does not exist."),
        ("loras/style.safetensors", "loras does not exist."),
    ):
        with pytest.raises(UserError) as caught:
            find_model(name, "--init_from")
        assert caught.value.what == f"The model {name} was not found." and why in caught.value.why
        assert caught.value.fix.endswith("or the id of a model on the Hugging Face Hub, as --init_from.")


USE = """
import muralist
tiny = dict(data_path="driving_world", max_samples=16, batch_size=2, max_steps=1, num_workers=0, samples_per_gpu=0,
            use_tensorboard=False, val_fraction=0)
muralist.generate("org/jit", ["1"], output_dir="images", num_inference_steps=2)
with muralist.load_pipeline("org/jit") as pipeline:
    pipeline("1", num_inference_steps=2)[0].save("loaded.png")
muralist.train(model="JiT-T/8", img_size=16, init_from="org/jit", run_name="jit", **tiny)
muralist.train(model="HunyuanDiT", img_size=64, run_name="dit", **{"model.path": "org/dit"}, **tiny)
"""


@pytest.mark.slow
def test_commands_take_ids(tmp_path: Path) -> None:
    spec = family("day", "night")
    spec.export(network_of(spec).state_dict(), spec.describe(), tmp_path / "jit")
    models = {"org/jit": tmp_path / "jit", "org/dit": build_small_hunyuan_dit(tmp_path / "dit")}
    (tmp_path / "use.py").write_text(USE)
    with serve(models) as hub:
        cache = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "0"}
        said = finish(start("python", "use.py", cwd=tmp_path, **cache))
    assert "starting from the weights of" in said and "models--org--jit" in said
    loaded, generated = (Image.open(tmp_path / name) for name in ("loaded.png", "images/000001_seed42.png"))
    assert loaded.tobytes() == generated.tobytes()
    assert all(len(metrics(tmp_path / "results" / name)) == 1 for name in ("jit", "dit"))
    assert "path: org/dit" in (tmp_path / "results" / "dit" / "config.yaml").read_text()
    manifest = json.loads(next((tmp_path / "results" / "dit").glob("checkpoints/*/manifest.json")).read_text())
    assert "models--org--dit" in manifest["model"]["folder"], "generate finds the base model offline"
