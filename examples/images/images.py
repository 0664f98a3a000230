"""Trains an image classifier with each attention of a recipe, by transformers' Trainer, and prints a table.

    torchrun --nproc_per_node 8 examples/images/images.py examples/images/deit_tiny.yaml attention=pola data=IMAGENET
    python examples/images/images.py examples/images/digits.yaml

Any key of the recipe can be overridden as `section.key=value`. `data` is a folder in ImageNet's layout,
train/CLASS/*.jpeg and val/CLASS/*.jpeg, or `digits`, scikit-learn's 8 × 8 digits. `attention` names one of
the recipe's attentions; without it all are trained in turn. Each run is a folder of output_dir with the model
and its image processor. Started again, a run resumes from its last checkpoint.

Training images are cropped at random and, by the recipe, mirrored and mixed (mixup, CutMix). With torchvision
installed `randaugment` and `erasing` are applied as well; without it a recipe that has them is refused.
"""

import json
import random
import statistics
import sys
import time
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments, ViTImageProcessor, set_seed
from transformers.trainer_utils import get_last_checkpoint

from nalanda.common.errors import InputError, one_line_errors
from nalanda.common.files import write_atomically
from nalanda.common.progress import first_process
from nalanda.common.text import suggest
from nalanda.config.load import differences, find_recipe, read_sections, section
from nalanda.model import NalandaConfig, NalandaForImageClassification


@dataclass
class Augment:
    """crop: least area of a random crop, a share of the image; mirror: whether half of the images are.

    mixup, cutmix: parameters of their Beta distributions, 0 for none; a batch takes one of them.
    randaugment: magnitude, 0 for none; erasing: share of images with an erased rectangle.
    """

    crop: float = 1.0
    mirror: bool = False
    mixup: float = 0.0
    cutmix: float = 0.0
    randaugment: int = 0
    erasing: float = 0.0


@dataclass
class Recipe:
    """model: keys of NalandaConfig for all attentions; attentions: by name, those that differ.

    seeds: a run for each; the table has their mean. train: keys of transformers' TrainingArguments.
    """

    output_dir: str
    data: str
    model: dict
    attentions: dict
    train: dict
    attention: str | None = None
    seeds: list[int] = field(default_factory=lambda: [0])
    augment: Augment = field(default_factory=Augment)


MAY_CHANGE = {
    "num_train_epochs",
    "disable_tqdm",
    "dataloader_num_workers",
    "use_cpu",
    "logging_steps",
    "save_strategy",
    "save_steps",
    "save_total_limit",
    "eval_strategy",
    "eval_steps",
}
"""Keys of `train` that a resumed run may change."""


class Images(Dataset):
    """Rows {image, label} as (image, class, whether it is for training)."""

    def __init__(self, rows: Any, training: bool):
        self.rows = rows
        self.training = training

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> tuple[Any, int, bool]:
        row = self.rows[i]
        return row["image"].convert("RGB"), row["label"], self.training


class Collator:
    """Rows of `Images` to pixel_values and labels, `[B]` or, where images are mixed, `[B, classes]`."""

    def __init__(self, processor: Any, augment: Augment, classes: int):
        self.processor = processor
        self.augment = augment
        self.classes = classes
        self.policy = self.erase = None
        if not (augment.randaugment or augment.erasing):
            return

        try:
            from torchvision.transforms import v2
        except ImportError:
            raise InputError(
                "augment.randaugment and augment.erasing need torchvision: install it, or set both to 0"
            ) from None
        if augment.randaugment:
            self.policy = v2.RandAugment(magnitude=augment.randaugment)
        self.erase = v2.RandomErasing(p=augment.erasing)

    def __call__(self, rows: list[tuple[Any, int, bool]]) -> dict[str, torch.Tensor]:
        images, labels, (training, *_) = zip(*rows, strict=True)
        if training:
            images = [random_crop(image, self.augment) for image in images]
            if self.policy is not None:
                images = [self.policy(image) for image in images]

        pixels = self.processor(list(images), return_tensors="pt")["pixel_values"]  # [B, 3, H, W]
        if training and self.erase is not None:
            pixels = torch.stack([self.erase(image) for image in pixels])
        batch = {"pixel_values": pixels, "labels": torch.tensor(labels)}
        return self.mix(batch) if training else batch

    def mix(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Mixes each image with another one, by mixup (Zhang et al. 2017) or CutMix (Yun et al. 2019)."""
        kinds = [kind for kind in ("mixup", "cutmix") if getattr(self.augment, kind)]
        if not kinds:
            return batch

        images = batch["pixel_values"]  # [B, 3, H, W]
        labels = F.one_hot(batch["labels"], self.classes).float()  # [B, classes]
        kind = random.choice(kinds)
        parameter = getattr(self.augment, kind)
        share = random.betavariate(parameter, parameter)
        if kind == "mixup":
            images = share * images + (1 - share) * images.flip(0)
        else:
            # A rectangle of about 1 − share of the image comes from the other one.
            H, W = images.shape[2:]
            h = round(H * (1 - share) ** 0.5)
            w = round(W * (1 - share) ** 0.5)
            y = random.randint(0, H - h)
            x = random.randint(0, W - w)
            rectangle = (..., slice(y, y + h), slice(x, x + w))
            others = images.flip(0)
            images = images.clone()
            images[rectangle] = others[rectangle]
            share = 1 - h * w / (H * W)
        return {"pixel_values": images, "labels": share * labels + (1 - share) * labels.flip(0)}


def random_crop(image: Any, augment: Augment) -> Any:
    """Crops a random area and aspect, as Inception's training does (Szegedy et al. 2015), and may mirror it."""
    W, H = image.size
    area = random.uniform(augment.crop, 1) * W * H
    aspect = (4 / 3) ** random.uniform(-1, 1)
    w = min(W, round((area * aspect) ** 0.5))
    h = min(H, round((area / aspect) ** 0.5))
    x = random.randint(0, W - w)
    y = random.randint(0, H - h)

    image = image.crop((x, y, x + w, y + h))
    if augment.mirror and random.random() < 0.5:
        image = image.transpose(0)  # left to right
    return image


def open_images(data: str) -> tuple[Any, Any, list[str]]:
    """Opens rows {image, label} for training and validation, and the names of the classes."""
    if data == "digits":
        return open_digits()

    from datasets import load_dataset

    if not ((Path(data) / "train").is_dir() and (Path(data) / "val").is_dir()):
        raise InputError(
            f"data={data}: expected a folder with train/CLASS/ and val/CLASS/, or `digits`"
        )
    splits = load_dataset("imagefolder", data_dir=data)
    training = splits["train"]
    return training, splits["validation"], training.features["label"].names


def open_digits() -> tuple[Any, Any, list[str]]:
    """scikit-learn's 8 × 8 digits, as `open_images` gives them."""
    from PIL import Image
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    images, labels = load_digits(return_X_y=True)
    images = (images.reshape(-1, 8, 8) * (255 / 16)).round().astype(np.uint8)
    rows = []
    for image, label in zip(images, labels, strict=True):
        rows.append({"image": Image.fromarray(image), "label": int(label)})
    training, validation = train_test_split(rows, test_size=0.2, stratify=labels, random_state=0)
    return training, validation, [str(digit) for digit in range(10)]


def train(
    name: str, seed: int, recipe: Recipe, images: tuple[Any, Any, list[str]]
) -> tuple[float, Any, float]:
    """Trains and saves one attention. Returns the accuracy, the model and the CPU seconds of training."""
    training, validation, classes = images
    config = attention_config(name, recipe, classes)
    processor = ViTImageProcessor(size={"height": config.image_size, "width": config.image_size})

    folder = Path(recipe.output_dir) / f"{name}-{seed}"
    check_same_recipe(folder, recipe, name)
    arguments = TrainingArguments(
        str(folder),
        seed=seed,
        remove_unused_columns=False,
        report_to=[],
        average_tokens_across_devices=False,  # `loss` gives a mean, which must not grow with the processes
        **recipe.train,
    )
    set_seed(seed)
    model = NalandaForImageClassification(config)

    def loss(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
        mean = F.cross_entropy(
            outputs.logits, labels, label_smoothing=arguments.label_smoothing_factor
        )
        return mean / arguments.gradient_accumulation_steps if model.training else mean

    def accuracy(results: Any) -> dict[str, float]:
        correct = results.predictions.argmax(-1) == results.label_ids
        return {"accuracy": correct.mean()}

    trainer = Trainer(
        model,
        arguments,
        train_dataset=Images(training, True),
        eval_dataset=Images(validation, False),
        data_collator=Collator(processor, recipe.augment, len(classes)),
        processing_class=processor,
        compute_loss_func=loss,
        compute_metrics=accuracy,
    )
    checkpoint = get_last_checkpoint(str(folder)) if folder.is_dir() else None
    start = time.process_time()
    trainer.train(resume_from_checkpoint=checkpoint)
    seconds = time.process_time() - start

    results = trainer.evaluate()
    trainer.save_model(str(folder))
    return results["eval_accuracy"], model, seconds


def attention_config(name: str, recipe: Recipe, classes: list[str]) -> NalandaConfig:
    """The config of the model with one of the recipe's attentions. Raises InputError."""
    keys = recipe.model | recipe.attentions[name]
    labels = {
        "id2label": dict(enumerate(classes)),
        "label2id": {label: i for i, label in enumerate(classes)},
    }
    try:
        return NalandaConfig(is_decoder=False, **keys | labels)
    except ValueError as error:
        raise InputError(f"model: {error}") from None


def check_same_recipe(folder: Path, recipe: Recipe, name: str) -> None:
    """Writes all that a run's result depends on into its folder. Raises InputError if it began otherwise."""
    settings = {
        "model": recipe.model,
        "attention": recipe.attentions[name],
        "train": {key: value for key, value in recipe.train.items() if key not in MAY_CHANGE},
        "augment": asdict(recipe.augment),
    }
    settings = json.loads(json.dumps(settings))
    file = folder / "recipe.json"
    before = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else settings
    for key, (old, new) in differences(before, settings).items():
        raise InputError(
            f"{folder}: was begun with {key} {old!r}, and this is {new!r}; name another output_dir"
        )
    if first_process():
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(file, json.dumps(settings, indent=1) + "\n")


def read_recipe(path: str, overrides: list[str]) -> Recipe:
    """Reads a recipe with overrides. Raises InputError for an unknown key or attention."""
    recipe = section(Recipe, read_sections(find_recipe(path), overrides), "")
    keys = [f.name for f in fields(TrainingArguments)]
    for key in recipe.train:
        if key not in keys:
            raise InputError(f"train.{key}: no such key{suggest(key, keys)}")
    if recipe.attention and recipe.attention not in recipe.attentions:
        raise InputError(
            f"attention={recipe.attention}: not in the recipe"
            f"{suggest(recipe.attention, recipe.attentions)}"
        )
    return recipe


def main(path: str, overrides: list[str]) -> None:
    with one_line_errors():
        recipe = read_recipe(path, overrides)
        images = open_images(recipe.data)
        table = Table("attention", "accuracy", "parameters", "M multiply-adds", "CPU seconds")
        names = [recipe.attention] if recipe.attention else list(recipe.attentions)
        for name in names:
            runs = [train(name, seed, recipe, images) for seed in recipe.seeds]
            accuracies, models, seconds = zip(*runs, strict=True)

            model = models[0]
            patches = model.config.grid[0] * model.config.grid[1]
            flops = model.config.flops_per_token(patches) * patches
            table.add_row(
                name,
                f"{statistics.mean(accuracies):.1%}",
                f"{model.num_parameters():,}",
                f"{flops / 2e6:,.2f}",
                f"{statistics.mean(seconds):.0f}",
            )
        if first_process():
            Console().print(table)


if __name__ == "__main__":
    if len(sys.argv) < 2 or {"-h", "--help"} & set(sys.argv[1:]):
        print(__doc__)
    else:
        main(sys.argv[1], sys.argv[2:])
