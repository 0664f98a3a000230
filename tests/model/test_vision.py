"""Images: patches on a grid, the convolution of v, landmarks in windows, and the classifier."""

import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from nalanda_kernels import use_backend
from PIL import Image
from tiny_models import close
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    AutoConfig,
    AutoImageProcessor,
    AutoModel,
    AutoModelForImageClassification,
    Trainer,
    TrainingArguments,
    ViTImageProcessorPil,
    default_data_collator,
    pipeline,
)

from nalanda import NalandaConfig
from nalanda.model.layers import PatchEmbedding, ShortConv, place_angles, rotate
from nalanda.model.sequences import Sequences
from nalanda.model.soft import pool_landmarks

ROWS, COLUMNS, PATCH = 3, 3, 4
ATTENTIONS = {
    "softmax": {"mixer_options": {"rope_theta": None}},
    "rotary": {"mixer": "softmax", "mixer_options": {"num_kv_heads": 1}},
    "linear_attention": {},
    "convolved": {"mixer": "linear_attention", "conv_size": 3},
    "nala": {},
    "mala": {},
    "rotated_mala": {"mixer": "mala", "mixer_options": {"rope_theta": 100.0}},
    "rotated_nala": {"mixer": "nala", "mixer_options": {"rope_theta": 100.0}},
    "pola": {},
    "gate_first": {"mixer": "pola", "mixer_options": {"gate_first": True}},
    "soft": {"feature_map_options": {"window": 2}},
    "norm_attention": {},
    "gated_deltanet": {"directions": 2},
}


def config(name: str, **options) -> NalandaConfig:
    sizes = {
        "hidden_size": 24,
        "num_hidden_layers": 2,
        "num_heads": 2,
        "head_dim": 12,
        "num_labels": 5,
    }
    sizes |= {"intermediate_size": 32, "image_size": ROWS * PATCH, "patch_size": PATCH}
    keys = {
        "mixer": name,
        "value_conv": 3,
        "position_embedding": "learnt",
        "initializer_range": 0.3,
    }
    return NalandaConfig(is_decoder=False, **(sizes | keys | ATTENTIONS.get(name, {}) | options))


def made(name: str, **options):
    torch.manual_seed(0)
    return AutoModelForImageClassification.from_config(config(name, **options)).double().eval()


def images(B: int = 3, seed: int = 1) -> torch.Tensor:
    shape = (B, 3, ROWS * PATCH, COLUMNS * PATCH)
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.sampled
@pytest.mark.parametrize("name", ATTENTIONS)
def test_every_attention_reads_images(name, tmp_path):
    """Rows are independent, what is saved is loaded, and gradients are those of finite differences."""
    model, x, labels = made(name), images(), torch.tensor([0, 3, 4])
    out = model(x, labels=labels)
    assert out.logits.shape == (3, 5)
    close(out.logits[1:2], model(x[1:2]).logits, 1e-12)
    close(out.loss, F.cross_entropy(out.logits, labels))
    model.save_pretrained(tmp_path)
    again = AutoModelForImageClassification.from_pretrained(tmp_path, dtype=torch.float64).eval()
    close(again(x).logits, out.logits, 1e-5)  # of parameters that stay fp32
    # The loss along a random direction of all parameters.
    out.loss.backward()
    parameters = [p for p in model.parameters() if p.grad is not None]
    assert len(parameters) == len(list(model.parameters()))
    way = [torch.randn(p.shape, dtype=p.dtype) for p in parameters]
    slope = sum((p.grad * w).sum().item() for p, w in zip(parameters, way, strict=True))
    found = []
    for step in (1e-6, -2e-6):
        with torch.no_grad():
            for p, w in zip(parameters, way, strict=True):
                p += step * w
            found.append(model(x, labels=labels).loss.item())
    assert (found[0] - found[1]) / 2e-6 == pytest.approx(
        slope, rel=2e-2 if "nala" in name else 1e-4, abs=1e-5
    )


@pytest.mark.parametrize("name", ["softmax", "linear_attention", "nala", "mala", "pola"])
def test_without_places_the_order_of_patches_is_nothing(name):
    x = images()
    shuffled = x.unflatten(3, (COLUMNS, PATCH)).flip(3).flatten(3)  # the columns of patches
    blind = made(name, position_embedding="none", value_conv=0)
    close(blind(x).logits, blind(shuffled).logits, 1e-10)
    for seeing in (made(name, value_conv=0), made(name, position_embedding="none")):
        assert (seeing(x).logits - seeing(shuffled).logits).abs().max() > 1e-4


def test_convolution_of_a_grid():
    """Against its definition, with filters that groups of channels share."""
    torch.manual_seed(0)
    conv = ShortConv(4, 3, copies=2, image=True).double()
    torch.nn.init.normal_(conv.weight)
    x = torch.randn(2, 4 * 5, 8, dtype=torch.float64)
    y, state = conv(x, Sequences(bidirectional=True, grid=(4, 5)))
    assert state is None
    padded = F.pad(x.unflatten(1, (4, 5)), (0, 0, 1, 1, 1, 1))
    expected = sum(
        padded[:, i : i + 4, j : j + 5] * conv.weight[:, 0, i, j].repeat(2)
        for i in range(3)
        for j in range(3)
    )
    close(y, expected.flatten(1, 2), 1e-12)


def test_landmarks_of_a_grid_are_means_of_windows():
    x = torch.randn(2, 5 * 4, 3, dtype=torch.float64)
    pooled = pool_landmarks(x, 2, (5, 4)).unflatten(1, (3, 2))
    square = x.unflatten(1, (5, 4))
    close(pooled[:, 1, 1], square[:, 2:4, 2:4].mean((1, 2)))
    close(pooled[:, 2, 0], square[:, 4:, :2].mean((1, 2)))  # the last row is shorter


def test_patches_are_those_of_a_convolution():
    """With stride and size of a patch, as DeiT and ViT cut images."""
    embedding = PatchEmbedding(3, ROWS * PATCH, PATCH, 8, learnt=True).double()
    x = images()
    tokens, grid = embedding(x)
    assert grid == (ROWS, COLUMNS)
    weight = embedding.projection.weight.view(8, 3, PATCH, PATCH)
    cut = F.conv2d(x, weight, embedding.projection.bias, stride=PATCH)
    close(tokens, cut.flatten(2).mT + embedding.positions.weight, 1e-12)


def test_rotation_depends_on_both_distances():
    """q·k is the same wherever the pair stands, and another in another direction of the grid."""
    seq, q, k = (
        Sequences(bidirectional=True, grid=(4, 5)),
        *torch.randn(2, 1, 1, 1, 8, dtype=torch.float64),
    )
    x = q.expand(1, 20, 1, 8)
    angles = place_angles(x, seq, 8, 100.0)
    scores = (rotate(x, angles)[0, :, 0] @ rotate(k.expand(1, 20, 1, 8), angles)[0, :, 0].T).view(
        4, 5, 4, 5
    )
    close(scores[0, 0, 2, 1], scores[1, 3, 3, 4])
    close(scores[0, 0, 0, 1], scores[0, 3, 0, 4])  # at the right end of a row
    assert abs(scores[0, 0, 2, 1] - scores[0, 0, 1, 2]) > 1e-3
    assert (
        abs(scores[0, 0, 0, 2] - scores[0, 3, 1, 0]) > 1e-3
    )  # as far apart in the row of all patches


def test_features_rotate_above_the_denominator_alone():
    """Against the matrix of MALA's released form, with c = K^-½/T."""
    mixer = made("rotated_mala").model.layers[0].mixer
    x, seq = (
        torch.randn(1, 9, 24, dtype=torch.float64),
        Sequences(bidirectional=True, grid=(ROWS, COLUMNS)),
    )
    inputs, _ = mixer.inputs(x, seq, None)
    q, k = mixer.feature_map(inputs.q, inputs.k)
    angles = place_angles(q, seq, q.shape[-1], 100.0)
    turned = [rotate(phi, angles)[0].transpose(0, 1) for phi in (q, k)]
    scores = turned[0] @ turned[1].mT
    z = (q[0].transpose(0, 1) @ k[0].transpose(0, 1).mT).sum(-1, keepdim=True)
    c = mixer.K**-0.5 / 9
    expected = scores * (1 / z + c) - c * z / 9
    v = inputs.v[0].transpose(0, 1)
    close(mixer.mix(inputs, seq, None)[0][0].transpose(0, 1), expected @ v, 1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_positions_are_interpolated_in_half_precision(dtype):
    embed, wide = PatchEmbedding(1, 8, 4, 6, learnt=True), torch.randn(1, 1, 12, 8)
    expected, _ = embed(wide, interpolate=True)
    tokens, grid = embed.to(dtype)(wide.to(dtype), interpolate=True)
    assert (tokens.dtype, grid) == (dtype, (3, 2))
    close(tokens.float(), expected, 3e-2)


def test_other_sizes_interpolate_positions():
    model = made("mala")
    wide = torch.randn(1, 3, 3 * PATCH, 5 * PATCH, dtype=torch.float64)
    assert model(wide, interpolate_pos_encoding=True).logits.shape == (1, 5)
    with pytest.raises(
        ValueError, match=r"images are 12 × 20, the model reads 12 × 12: resize them, or set"
    ):
        model(wide)
    same = model(images(), interpolate_pos_encoding=True).logits
    assert torch.equal(same, model(images()).logits)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"is_decoder": True}, "image_size: patches have no order; set is_decoder: false"),
        ({"image_size": 13}, "image_size=13 must be a multiple of patch_size=4"),
        ({"image_size": 0}, "image_size=0 must be positive"),
        ({"value_conv": 4}, "value_conv=4 must be odd: convolutions of images are centred"),
        ({"value_conv": 1}, "value_conv=1 must be 0"),
        ({"image_size": None}, "position_embedding=learnt is a table for images; set image_size"),
        ({"mixer": "softmax", "head_dim": 6}, "rotary_dim=6 must be a multiple of 4 in images"),
        (
            {"mixer": "delta_product", "directions": 2},
            "value_conv=3: a token has 2 values; leave it out",
        ),
    ],
)
def test_bad_configs_are_one_line(options, message):
    with pytest.raises(ValueError, match=message) as raised:
        NalandaConfig(**{**config("mala").to_diff_dict(), **options})
    assert "\n" not in str(raised.value)


def test_bad_inputs_are_one_line():
    model = made("mala")
    for call, message in (
        (lambda: model(images()[:, :1]), r"pixel_values must be \[batch, 3, height, width\], got"),
        (
            lambda: model(images()[..., :9], interpolate_pos_encoding=True),
            "multiples of patch_size=4",
        ),
        (lambda: model(None), "image_size=12: the model reads images: give pixel_values"),
        (
            lambda: model.model(torch.zeros(1, 3).long()),
            "the model reads images: give pixel_values",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    with pytest.raises(ValueError, match="image_size is not set: the model reads text"):
        AutoModelForImageClassification.from_config(NalandaConfig(hidden_size=8, num_heads=1))


def test_bf16():
    model = made("pola")
    with torch.no_grad():
        wide, narrow = model(images()).logits, model.bfloat16()(images()).logits
    assert narrow.dtype == torch.bfloat16
    close(narrow.double(), wide, 0.1 * wide.abs().max().item())


def test_flops_are_those_of_torch():
    """Linear layers, products and convolutions; torch counts no elementwise work either."""
    for name, counted in (("softmax", 1.0), ("linear_attention", 1.0), ("pola", 1.0)):
        model = made(name).float()
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            model(images(1).float())
        patches = ROWS * COLUMNS
        ours = model.config.flops_per_token(patches) * patches
        assert ours == pytest.approx(counter.get_total_flops() * counted, rel=0.1)


@pytest.mark.slow
def test_trainer_pipeline_and_remote_code(tmp_path):
    """transformers' Trainer trains it unchanged; with its processor a pipeline reads files of images; the
    checkpoint brings its code."""
    torch.manual_seed(0)
    names = ["dark", "light"]
    keys = {"initializer_range": 0.1, "id2label": dict(enumerate(names))}
    options = (
        config("mala").to_diff_dict() | keys | {"label2id": {n: i for i, n in enumerate(names)}}
    )
    model = AutoModelForImageClassification.from_config(NalandaConfig(**options))
    size = {"height": 12, "width": 12}
    processor = ViTImageProcessorPil(size=size)
    pictures = [
        (Image.new("RGB", (20, 20), (40 + 150 * (i % 2) + i,) * 3), i % 2) for i in range(16)
    ]
    rows = [{"pixel_values": processor(x)["pixel_values"][0], "labels": y} for x, y in pictures]
    arguments = TrainingArguments(
        str(tmp_path),
        max_steps=25,
        learning_rate=3e-3,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        per_device_train_batch_size=8,
        save_strategy="no",
        logging_strategy="no",
    )
    trainer = Trainer(
        model,
        arguments,
        train_dataset=rows,
        eval_dataset=rows,
        data_collator=default_data_collator,
        processing_class=processor,
        compute_metrics=lambda p: {"right": (p[0].argmax(-1) == p[1]).mean()},
    )
    trainer.train()
    assert trainer.evaluate()["eval_right"] == 1
    trainer.save_model(str(tmp_path / "saved"))
    read = pipeline("image-classification", str(tmp_path / "saved"))
    assert [read(x)[0]["label"] for x, _ in pictures[:2]] == names
    assert AutoImageProcessor.from_pretrained(tmp_path / "saved").size == size
    assert AutoConfig.from_pretrained(tmp_path / "saved").label2id == {"dark": 0, "light": 1}
    model.eval()
    x = torch.stack([torch.as_tensor(row["pixel_values"]) for row in rows])
    with torch.no_grad(), use_backend("torch"):  # there are no kernels there
        out = model(x, output_hidden_states=True)
    hidden = AutoModel.from_pretrained(tmp_path / "saved").eval()(pixel_values=x).last_hidden_state
    close(hidden, out.hidden_states[-1], 1e-6)
    torch.save((x, out.logits), tmp_path / "expected.pt")
    program = f"""
import sys
for name in ("nalanda", "nalanda_kernels", "nalanda_eval"):
    sys.modules[name] = None
import torch
from transformers import AutoModelForImageClassification as Auto
model = Auto.from_pretrained({str(tmp_path / "saved")!r}, trust_remote_code=True).eval()
assert "transformers_modules" in type(model).__module__
x, logits = torch.load({str(tmp_path / "expected.pt")!r})
with torch.no_grad():
    assert torch.equal(model(x).logits, logits)
"""
    environment = {
        **os.environ,
        "HF_MODULES_CACHE": str(tmp_path / "modules"),
        "HF_HUB_OFFLINE": "1",
    }
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
