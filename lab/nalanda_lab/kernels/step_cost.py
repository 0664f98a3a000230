"""Counts what one layer of a recipe launches and moves in a training step, and for a token of generation.

    python -m nalanda_lab.kernels.step_cost [recipe …]

No GPU is needed: Triton's launches do nothing, torch computes on the CPU. Bytes: every kernel reads each of
its inputs and writes each of its outputs once, which for recurrences is a lower bound. A layer is the
difference of models of two layers and of one; a token the difference of two lengths, the rest (weights) is
printed as MB a pass. An operator of torch counts as one kernel, and F.rms_norm as one operator as on CUDA.
Training runs in bf16 by autocast, generation in a bf16 model.
"""

import interpreter  # noqa: F401  # isort: skip  (before any kernel)
import sys
from collections import Counter
from typing import NamedTuple
from unittest import mock

import nalanda_kernels
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM
from triton.runtime.interpreter import GridExecutor

from nalanda import NalandaCache
from nalanda.config.load import find_recipe, load_config
from nalanda.config.model import build_model_config

RECIPES = "nala_gated_deltanet_340m", "gated_deltanet_340m"
KINDS = ("Triton", "products", "casts", "other")
ROWS = 2
PASSES = ("forward", "backward", "a token")


def nbytes(x: Tensor) -> int:
    """Bytes that x occupies; expanded dimensions have none of their own."""
    held = [n for n, stride in zip(x.shape, x.stride(), strict=True) if stride or n == 0]
    return int(torch.Size(held).numel()) * x.element_size()


class Count(TorchDispatchMode):
    """Kernels launched within the context: (kind, name) → launches, and → bytes."""

    def __init__(self):
        super().__init__()
        self.launches, self.moved = Counter(), Counter()

    def add(self, kind: str, name: str, tensors) -> None:
        self.launches[kind, name] += 1
        self.moved[kind, name] += sum(nbytes(x) for x in tensors if isinstance(x, Tensor))

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        name = function.overloadpacket.__name__
        view = any(x.alias_info and not x.alias_info.is_write for x in function._schema.returns)
        found = [
            x for x in torch.utils._pytree.tree_leaves((args, result)) if isinstance(x, Tensor)
        ]
        if not view and "empty" not in name and name not in ("detach", "_unsafe_view") and found:
            product = name in ("mm", "addmm", "bmm", "baddbmm")
            self.add(
                "products" if product else "casts" if name == "_to_copy" else "other", name, found
            )
        return result

    def __enter__(self):
        def launch(executor, *args, **options):
            self.add("Triton", executor.fn.__name__, (*args, *options.values()))

        self.patch = mock.patch.object(GridExecutor, "__call__", launch)
        self.patch.start()
        return super().__enter__()

    def __exit__(self, *error):
        self.patch.stop()
        return super().__exit__(*error)


@torch.library.custom_op("step_cost::rms_norm", mutates_args=())
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * weight


@torch.library.custom_op("step_cost::rms_norm_backward", mutates_args=())
def rms_norm_backward(dy: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return x * dy, weight * 1


rms_norm.register_autograd(
    lambda ctx, dy: (*rms_norm_backward(dy, *ctx.saved_tensors), None),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs[:2]),
)


def measure(recipe: str, layers: int, length: int) -> list[Count]:
    """The counts of `PASSES`."""
    changes = [f"model.num_hidden_layers={layers}", f"data.seq_len={length}", "model.vocab_size=64"]
    config = load_config(find_recipe(recipe), [*changes, f"train.tokens_per_step={8 * length}"])
    model = AutoModelForCausalLM.from_config(
        build_model_config(config), dtype=torch.float32
    ).train()
    tokens = torch.zeros(ROWS, length, dtype=torch.int64)
    forward, backward, decode = Count(), Count(), Count()
    for count in (Count(), forward):  # the first call makes tables of chunks, which stay
        with count, torch.autocast("cpu", torch.bfloat16):
            loss = model(tokens, labels=tokens, cu_seqlens=torch.arange(ROWS + 1) * length).loss
    with backward:
        loss.backward()
    model, cache = model.bfloat16().eval(), NalandaCache(layers)
    with torch.no_grad():
        with Count():
            model(tokens[:1], past_key_values=cache)
        with decode:
            model(tokens[:1, :1], past_key_values=cache)
    return [forward, backward, decode]


class Cost(NamedTuple):
    launches: int
    by_token: float  # bytes
    fixed: float  # bytes of a pass
    names: str = ""


def layer_costs(recipe: str, length: int = 128) -> dict[tuple[str, str], Cost]:
    """The costs of a layer of the recipe by pass and kind of kernel."""
    fused = mock.patch.object(
        F, "rms_norm", lambda x, shape, weight=None, eps=1e-6: rms_norm(x, weight, eps)
    )
    with nalanda_kernels.use_backend("triton"), fused:
        counts = [[measure(recipe, n, T) for n in (1, 2)] for T in (length, 2 * length)]
    found = {}
    for i, name in enumerate(PASSES):
        (one, two), (one_long, two_long) = ((one[i], two[i]) for one, two in counts)
        launches = two.launches - one.launches
        for kind in KINDS:
            keys = sorted(
                (key for key in launches if key[0] == kind), key=lambda key: -launches[key]
            )
            short = sum(two.moved[key] - one.moved[key] for key in keys)
            long = sum(two_long.moved[key] - one_long.moved[key] for key in keys)
            # A token of generation has no length.
            slope = 0.0 if name == PASSES[-1] else (long - short) / (ROWS * length)
            names = ", ".join(f"{key[1]} {launches[key]}" for key in keys)
            total = sum(launches[key] for key in keys)
            found[name, kind] = Cost(total, slope, short - slope * ROWS * length, names)
    return found


def print_table(recipe: str) -> None:
    costs = layer_costs(recipe)
    for name in PASSES:
        rows = [x for key, x in costs.items() if key[0] == name]
        totals = (
            sum(x.launches for x in rows),
            sum(x.by_token for x in rows),
            sum(x.fixed for x in rows),
        )
        costs[name, "**all**"] = Cost(*totals)
    print(f"\n{recipe}, one layer\n")
    print("| pass | | launches | KB a token | MB a pass | kernels |\n|---|---|---|---|---|---|")
    for (name, kind), x in sorted(costs.items(), key=lambda row: PASSES.index(row[0][0])):
        row = f"{x.launches} | {x.by_token / 1024:.1f} | {x.fixed / 2**20:.1f} | {x.names}"
        print(f"| {name} | {kind} | {row} |")


if __name__ == "__main__":
    torch.manual_seed(0)
    for recipe in sys.argv[1:] or RECIPES:
        print_table(recipe)
