"""examples/images/images.py: DeiT-tiny's sizes, folders of images, and the digits."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    AutoImageProcessor,
    AutoModelForImageClassification,
    ViTConfig,
    ViTForImageClassification,
)

from nalanda.common.errors import InputError
from nalanda.config.load import read_sections
from nalanda.model import NalandaConfig, NalandaForImageClassification

pytest.importorskip("PIL")
FOLDER = Path(__file__).parents[2] / "examples" / "images"
spec = importlib.util.spec_from_file_location("images", FOLDER / "images.py")
assert spec is not None
assert spec.loader is not None
script = importlib.util.module_from_spec(spec)
spec.loader.exec_module(script)
DEIT = read_sections(FOLDER / "deit_tiny.yaml")
DIGITS = str(FOLDER / "digits.yaml")
D, K, LAYERS, PATCHES = 192, 64, 12, 196

GATE, CONVOLUTION = D * D + D, 25 * D
# Parameters that the released attentions have beyond softmax's, a layer, without biases of convolutions.
# SOFT has one projection for q and k. PolaFormer's table of positions in every layer is left out here.
MORE = {
    "softmax": 0,
    "linear_attention": 0,
    "nala": GATE + CONVOLUTION + 2 * D,
    "mala": CONVOLUTION,
    "pola": GATE + 25 * K + D + D,
    "soft": CONVOLUTION - D * D - D,
}


@pytest.fixture(scope="module")
def published() -> tuple[int, float]:
    """Parameters and multiply-adds of transformers' DeiT-tiny. Published are 5.7 M, and 1.3 G or (without the
    products of queries, keys and values) 1.08 G."""
    sizes = {
        "hidden_size": D,
        "num_attention_heads": 3,
        "intermediate_size": 4 * D,
        "num_labels": 1000,
    }
    with torch.device("meta"):
        model = ViTForImageClassification(ViTConfig(**sizes, attn_implementation="eager")).eval()
        with FlopCounterMode(display=False) as counter:
            model(torch.empty(1, 3, 224, 224))
    return model.num_parameters(), counter.get_total_flops() / 2


def test_there_is_a_row_for_each_attention():
    digits = read_sections(Path(DIGITS))
    assert DEIT["attentions"].keys() == digits["attentions"].keys() == MORE.keys()


@pytest.mark.parametrize("name", MORE)
def test_sizes_are_the_published_ones(name, published):
    """Parameters to 0.5 % those of DeiT-tiny with that attention, multiply-adds to 12 % DeiT-tiny's."""
    parameters, products = published
    assert (parameters, round(products / 1e9, 2)) == (5_717_416, 1.25)
    config = NalandaConfig(
        is_decoder=False, **DEIT["model"], **DEIT["attentions"][name], num_labels=1000
    )
    with torch.device("meta"):
        found = NalandaForImageClassification(config).num_parameters()
    assert found == pytest.approx(parameters + LAYERS * MORE[name], rel=5e-3)
    multiply_adds = config.flops_per_token(PATCHES) * PATCHES / 2
    assert multiply_adds == pytest.approx(products, rel=0.02 if name == "softmax" else 0.12)
    print(f"{name}: {found / 1e6:.2f} M parameters, {multiply_adds / 1e9:.2f} G multiply-adds")


def write_images(folder: Path) -> None:
    """Two classes, dark and light, of several sizes."""
    from PIL import Image

    for part, count in (("train", 12), ("val", 4)):
        for label, level in (("dark", 30), ("light", 220)):
            (folder / part / label).mkdir(parents=True)
            for i in range(count):
                pixels = np.random.default_rng(i).integers(level - 30, level + 30, (18 + i, 24, 3))
                Image.fromarray(pixels.astype(np.uint8)).save(folder / part / label / f"{i}.png")


SMALL = [
    *(
        "model.image_size=16",
        "model.patch_size=4",
        "model.hidden_size=24",
        "model.num_hidden_layers=1",
    ),
    *(
        "model.intermediate_size=32",
        "augment.randaugment=0",
        "augment.erasing=0",
        "train.bf16=false",
    ),
    *(
        "train.per_device_train_batch_size=8",
        "train.dataloader_num_workers=0",
        "train.learning_rate=0.02",
    ),
    *(
        "train.num_train_epochs=6",
        "train.disable_tqdm=true",
        "train.use_cpu=true",
        "attention=mala",
    ),
]


@pytest.mark.slow
def test_trains_on_a_folder_and_resumes(tmp_path, capsys):
    """With crops, mirrors, mixup and CutMix. A finished run started again trains nothing more."""
    write_images(tmp_path / "data")
    settings = [*SMALL, f"data={tmp_path / 'data'}", f"output_dir={tmp_path / 'run'}"]
    script.main(str(FOLDER / "deit_tiny.yaml"), settings)
    assert "100.0%" in capsys.readouterr().out
    folder = tmp_path / "run" / "mala-0"
    model = AutoModelForImageClassification.from_pretrained(folder)
    assert model.config.id2label == {0: "dark", 1: "light"}
    assert AutoImageProcessor.from_pretrained(folder).size == {"height": 16, "width": 16}
    before = (folder / "model.safetensors").read_bytes()
    script.main(str(FOLDER / "deit_tiny.yaml"), settings)
    assert (folder / "model.safetensors").read_bytes() == before


def test_a_run_is_resumed_under_its_own_settings_only(tmp_path):
    def recipe(**train) -> object:
        return script.Recipe(
            str(tmp_path), "digits", {"hidden_size": 8}, {"mala": {"mixer": "mala"}}, train
        )

    script.check_same_recipe(tmp_path / "mala-0", recipe(learning_rate=0.1), "mala")
    script.check_same_recipe(
        tmp_path / "mala-0", recipe(learning_rate=0.1, num_train_epochs=9), "mala"
    )
    with pytest.raises(
        InputError, match=r"mala-0: was begun with train\.learning_rate 0\.1, and this is 0\.2"
    ):
        script.check_same_recipe(tmp_path / "mala-0", recipe(learning_rate=0.2), "mala")


@pytest.mark.slow
def test_the_loss_does_not_grow_with_the_processes(tmp_path, monkeypatch):
    """Trainer would multiply a mean by their number."""
    asked = {}

    class Noted(script.TrainingArguments):
        def __init__(self, folder, **options):
            asked.update(options)
            raise KeyboardInterrupt

    monkeypatch.setattr(script, "TrainingArguments", Noted)
    with pytest.raises(SystemExit):
        script.main(DIGITS, [f"output_dir={tmp_path}"])
    assert asked["average_tokens_across_devices"] is False


@pytest.mark.parametrize("kind", ["mixup", "cutmix"])
def test_labels_are_mixed_like_pixels(kind):
    """An image of ones among images of zeros: its share of a mixed image is its share of the label."""
    collator = script.Collator(None, script.Augment(**{kind: 1.0}), classes=2)
    images = torch.tensor([0.0, 1.0]).repeat(2).view(4, 1, 1, 1).expand(4, 3, 8, 8)
    for seed in range(5):
        script.set_seed(seed)
        batch = collator.mix({"pixel_values": images, "labels": torch.tensor([0, 1, 0, 1])})
        torch.testing.assert_close(batch["pixel_values"].mean((1, 2, 3)), batch["labels"][:, 1])


def test_refusals(capsys, tmp_path):
    for settings, message in (
        (["train.epochs=3"], "train.epochs: no such key"),
        (["attention=malla"], "attention=malla: not in the recipe; did you mean mala?"),
        ([f"data={tmp_path}"], "expected a folder with train/CLASS/ and val/CLASS/, or `digits`"),
        (["augment.flip=true"], "augment.flip: no such key"),
        (["model.image_size=9"], "image_size=9 must be a multiple of patch_size=2"),
    ):
        with pytest.raises(SystemExit) as stop:
            script.main(DIGITS, [f"output_dir={tmp_path}", *settings])
        error = capsys.readouterr().err.strip()
        assert stop.value.code == 2
        assert message in error.splitlines()[-1]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["softmax", "nala"])
def test_digits(name, tmp_path):
    """95 % of the test images of scikit-learn's digits."""
    sections = read_sections(Path(DIGITS), [f"output_dir={tmp_path}", "train.disable_tqdm=true"])
    recipe = script.section(script.Recipe, sections, "")
    accuracy, _, _ = script.train(name, 0, recipe, script.open_images("digits"))
    assert accuracy >= 0.95
