"""Trains a recipe with torchtitan 0.3: FSDP2, tensor and pipeline parallelism on any number of nodes.

    torchrun --nproc_per_node 8 examples/torchtitan/pretrain.py RECIPE [key=value …] [--torchtitan.option …]
    python examples/torchtitan/pretrain.py export RUN [OUT]

The model, its first weights, the rows, the loss, the optimizer and the rates are those of `nalanda train`. The loop,
the meshes and the checkpoints are torchtitan's. The first command, typed again, resumes. The second writes the newest
checkpoint as a transformers model folder, RUN/final.
"""

import json
import math
import pickle
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import takewhile
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from filelock import FileLock
from safetensors.torch import save_file
from titan_model import Model, Ours, parallelize, pipeline, titan_name
from torch import Tensor, nn

# isort: split
from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.components.checkpointer.utils import canonical_fqn
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.loss import BaseLoss
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer
from torchtitan.config.configs import CompileConfig, DebugConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed.activation_checkpoint import FullAC
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.train import main as train
from torchtitan.trainer import Trainer

from nalanda.common.errors import InputError
from nalanda.common.files import write_manifest
from nalanda.common.versions import versions
from nalanda.config.load import load_config
from nalanda.config.schema import RunConfig
from nalanda.data.sources import Sources
from nalanda.data.tokenizer import build_tokenizer, is_whole, save_tokenizer
from nalanda.train.build import open_batches
from nalanda.train.checkpoint_dir import step_of
from nalanda.train.estimate import meta_model
from nalanda.train.export import export
from nalanda.train.launch import choose_precision
from nalanda.train.optim import build_optimizer, learning_rate
from nalanda.train.parallel import compiles
from nalanda.train.run_dir import record_recipe


class Rows(BaseDataLoader):
    """The packed rows of the recipe, and the position in them."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        recipe: Ours
        fast_tokenizer: Ours

    def __init__(
        self,
        config: Config,
        *,
        dp_rank: int,
        dp_world_size: int,
        local_batch_size: int,
        **kwargs: Any,
    ):
        train = replace(config.recipe.train, micro_batch_size=local_batch_size)
        recipe = replace(config.recipe, train=train)
        self.batches, _ = open_batches(recipe, config.fast_tokenizer, dp_rank, dp_world_size)

    def __iter__(self) -> Iterator[tuple[dict[str, Any], Tensor]]:
        for batch in self.batches:
            labels = F.pad(batch["labels"][:, 1:], (0, 1), value=-100)  # [B, T], the next tokens
            # A list stays on the host, where the layers read it.
            inputs = {"input": batch["input_ids"], "cu_seqlens": batch["cu_seqlens"].tolist()}
            yield {**inputs, "labels": labels}, labels

    def state_dict(self) -> dict[str, str]:
        return {"position": json.dumps(self.batches.state_dict())}

    def load_state_dict(self, state: dict[str, str]) -> None:
        self.batches.load_state_dict(json.loads(state["position"]))


class Loss(BaseLoss):
    """The mean over the labels of the step, on all processes; the model returns sums."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseLoss.Config):
        pass

    def __init__(self, config: Config, **kwargs: Any):
        pass

    def __call__(
        self, pred: Tensor, labels: Tensor, global_valid_tokens: Any = 1, **kwargs: Any
    ) -> tuple[Tensor, dict[str, Tensor]]:
        return pred / global_valid_tokens, {}


class Optimizers(OptimizersContainer):
    """The recipe's optimizer, one for each stage that this process has."""

    @dataclass(kw_only=True, slots=True)
    class Config(OptimizersContainer.Config):
        recipe: Ours

    def __init__(self, config: Config, *, model_parts: list[nn.Module]):
        self.model_parts = model_parts
        self.optimizers = [build_optimizer(part, config.recipe.optim) for part in model_parts]
        for part, optimizer in zip(model_parts, self.optimizers, strict=True):
            names = {p: canonical_fqn(name) for name, p in part.named_parameters()}
            for group in optimizer.param_groups:
                group["param_names"] = [names[p] for p in group["params"]]
        self._post_init([p for part in model_parts for p in part.parameters()])


class Rates(LRSchedulersContainer):
    """The recipe's schedule, a factor of each group's peak rate."""

    @dataclass(kw_only=True, slots=True)
    class Config(LRSchedulersContainer.Config):
        recipe: Ours

        def build(self, *, optimizers: Any, training_steps: int) -> LRSchedulersContainer:
            steps = self.total_steps or training_steps

            def factor(done: int) -> float:
                return learning_rate(done + 1, steps, 1.0, self.recipe.schedule)

            return LRSchedulersContainer(optimizers, factor)


def settings(recipe: RunConfig) -> Trainer.Config:
    """torchtitan's settings for a recipe. The first process to come prepares the run's folder."""
    run_dir, train, optim = Path(recipe.output_dir), recipe.train, recipe.optim
    run_dir.mkdir(parents=True, exist_ok=True)
    folder, texts = run_dir / "tokenizer", Sources(recipe.data, validation=False).texts
    with FileLock(run_dir / "tokenizer.lock"):
        tokenizer = build_tokenizer(recipe.tokenizer, recipe.data, folder, texts)
        if not is_whole(folder):
            save_tokenizer(tokenizer, folder)
        model = Model.Config(recipe=recipe, tokenizer=tokenizer)
        record_recipe(run_dir, recipe, model.nalanda)

    bf16 = choose_precision(train.precision) == "bf16"
    device = torch.accelerator.current_accelerator() or torch.device("cpu")
    return Trainer.Config(
        model_spec=ModelSpec("nalanda", "recipe", model, parallelize, pipeline, None, None),
        dump_folder=str(run_dir),
        hf_assets_path=str(folder),
        dataloader=Rows.Config(recipe=recipe, fast_tokenizer=tokenizer),
        loss=Loss.Config(),
        optimizer=Optimizers.Config(recipe=recipe),
        lr_scheduler=Rates.Config(recipe=recipe, warmup_steps=recipe.schedule.warmup_steps),
        training=TrainingConfig(
            local_batch_size=train.micro_batch_size,
            global_batch_size=train.tokens_per_step // recipe.data.seq_len,
            seq_len=recipe.data.seq_len,
            steps=train.steps,
            max_norm=optim.max_grad_norm or math.inf,
            mixed_precision_param="bfloat16" if bf16 else "float32",
            disable_cuda_graphs=True,  # each batch has another number of documents
        ),
        parallelism=ParallelismConfig(spmd_backend="partial_dtensor"),
        activation_checkpoint=FullAC.Config() if train.gradient_checkpointing else None,
        compile=CompileConfig(enable=compiles(train.compile, device)),
        checkpoint=CheckpointManager.Config(
            enable=True,
            interval=recipe.checkpoint.every or train.steps,
            keep_latest_k=max(2, recipe.checkpoint.keep_last),
            last_save_model_only=False,
        ),
        metrics=MetricsProcessor.Config(log_freq=recipe.log.every, enable_tensorboard=True),
        debug=DebugConfig(seed=recipe.seed),
    )


METADATA = {
    *("pathlib.PosixPath", "torch.Size", "torch.serialization._get_layout"),
    *map(str, (torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.bool)),
    "torch.distributed.checkpoint.filesystem._StorageInfo",
    *(f"torch.distributed.checkpoint.metadata.{kind}Metadata" for kind in ("", "BytesStorage")),
    *(
        f"torch.distributed.checkpoint.metadata.{kind}StorageMetadata"
        for kind in ("Chunk", "Tensor")
    ),
    "torch.distributed.checkpoint.metadata.MetadataIndex",
    "torch.distributed.checkpoint.metadata.StorageMeta",
    "torch.distributed.checkpoint.metadata.TensorProperties",
    "torch.distributed.checkpoint.metadata._MEM_FORMAT_ENCODING",
}
"""The names in a checkpoint's `.metadata`, which is a pickle. torch loads whatever it names."""


class Metadata(pickle.Unpickler):
    """Loads a `.metadata`; raises `InputError` at a name that is not of `METADATA`."""

    def find_class(self, module: str, name: str) -> Any:
        if f"{module}.{name}" not in METADATA:
            raise InputError(f".metadata: names {module}.{name}; take a checkpoint of torchtitan's")
        return super().find_class(module, name)


def export_newest(run_dir: Path, out: Path) -> Path:
    """Writes the newest of torchtitan's checkpoints as a transformers model folder."""
    recipe = load_config(run_dir / "config.yaml")
    steps = [file.parent for file in run_dir.glob("checkpoint/step-*/.metadata")]
    if not steps:
        raise InputError(f"{run_dir}/checkpoint: no checkpoint of torchtitan; name a run's folder")
    newest = max(steps, key=step_of)
    with (newest / ".metadata").open("rb") as file:
        Metadata(file).load()

    model = meta_model(
        recipe, build_tokenizer(recipe.tokenizer, recipe.data, run_dir / "tokenizer")
    )
    weights = {name: torch.empty_like(p, device="cpu") for name, p in model.state_dict().items()}
    dcp.load({titan_name(name): x for name, x in weights.items()}, checkpoint_id=newest)

    # As a checkpoint of Nalanda's, which `export` reads.
    with TemporaryDirectory(dir=run_dir) as folder:
        checkpoint = Path(folder) / newest.name
        model.config.save_pretrained(checkpoint)
        save_file(weights, checkpoint / "model.safetensors")
        tokens = step_of(newest) * recipe.train.tokens_per_step
        (checkpoint / "trainer.json").write_text(json.dumps({"tokens": tokens}))
        write_manifest(checkpoint)
        facts = {"parameters": model.num_parameters(), "versions": versions()}
        return export(checkpoint, out, facts, config=model.config)


def main(words: list[str]) -> None:
    if words[:1] == ["export"] and len(words) > 1:
        run_dir, *out = map(Path, words[1:])
        print(export_newest(run_dir, *out or [run_dir / "final"]))
        return
    recipe, *keys = takewhile(lambda word: not word.startswith("--"), words) or [""]
    # torchtitan looks its settings up as a function of a module: here.
    globals()["config"] = partial(settings, load_config(recipe, keys, training=True))
    options = words[1 + len(keys) :]
    sys.argv[1:] = ["--module", __name__, "--config", "config", *options]
    train()


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except InputError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
