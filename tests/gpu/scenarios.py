"""What the tests run on the simulated card, each in a process of its own: `scenarios.py NAME ARGUMENTS`.

A scenario prints its figures as JSON in its last line. It fails where a CPU tensor meets a CUDA one, or a kernel's
arguments are not on the card.
"""

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import simulated
import torch
from simulated import launches, phase, waits

CARD = torch.device("cuda")
SIZES = {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_heads": 2,
    "head_dim": 32,
    "intermediate_size": 96,
    "vocab_size": 100,
}
T = 64
PACKINGS = {"packed": [0, 5, 70, 71, 71, 2 * T], "dense": [0, T, 2 * T]}
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def variants() -> Iterator[tuple[str, dict[str, Any]]]:
    """Every mixer with its own map, every map with a mixer of each recurrence, and options that change a launch."""
    from nalanda.model import FEATURE_MAPS, MIXERS

    for mixer in MIXERS:
        yield mixer, {"mixer": mixer}
    for name in FEATURE_MAPS:
        yield f"gated_deltanet, {name}", {"mixer": "gated_deltanet", "feature_map": name}
        plain = {"mixer": "linear_attention", "mixer_options": {"denominator": False}}
        yield f"linear_attention, {name}", {**plain, "feature_map": name}
    for option in ("allow_neg_eigval", "norm_write", "norm_read"):
        options = {"mixer": "gated_deltanet", "mixer_options": {option: True}}
        yield f"gated_deltanet, {option}", options


def build(dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    from nalanda import NalandaConfig, NalandaForCausalLM

    torch.manual_seed(0)
    return NalandaForCausalLM(NalandaConfig(**SIZES | options)).to(dtype).to(CARD)


def draw(rows: int, columns: int) -> torch.Tensor:
    return torch.randint(0, SIZES["vocab_size"], (rows, columns))


def train_variants() -> dict[str, Any]:
    """A forward and backward pass of every variant, packed and dense, in each precision.

    Returns the launches of a pass in bf16, and all waits, by variant.
    """
    from nalanda.train.loss import summed_loss

    figures: dict[str, Any] = {}
    for name, options in variants():
        model = build(**options).train()
        for kind, bounds in PACKINGS.items():
            tokens = draw(2, T)
            batch = {"input_ids": tokens, "labels": tokens, "cu_seqlens": torch.tensor(bounds)}
            for dtype in DTYPES:
                of = f"{name}, {kind}, {dtype}"
                mixed = torch.autocast("cuda", dtype, enabled=dtype.itemsize == 2)
                with phase(of):
                    with mixed:
                        loss = summed_loss(model, batch, CARD)
                    loss.backward()
                assert all(p.grad is None or p.grad.is_cuda for p in model.parameters())
                model.zero_grad()
            figures[f"{name}, {kind}"] = launches(f"{name}, {kind}, {torch.bfloat16}")
    return {"launches": figures, "waits": [list(key) for key in waits]}


def decode_variants() -> dict[str, Any]:
    """A prompt with padding and a cached token, of every variant in each precision.

    Returns the launches of a token in bf16 by variant, and the waits of a token.
    """
    figures: dict[str, Any] = {}
    mask = torch.ones(2, 9, dtype=torch.int64)
    mask[0, :3] = 0
    for name, options in variants():
        for dtype in DTYPES:
            model = build(dtype, **options).eval()
            prompt = draw(2, 9).to(CARD)
            with torch.no_grad():
                cache = model(prompt, attention_mask=mask, use_cache=True).past_key_values
                with phase(f"{name}, {dtype}"):
                    model(prompt[:, :1], past_key_values=cache, use_cache=True)
            if dtype == torch.bfloat16:
                figures[name] = launches(f"{name}, {dtype}")
    return {"launches": figures, "waits": [list(key) for key in waits if key[0] != "set-up"]}


def generate_by_graphs(folder: str) -> dict[str, Any]:
    """Generation by captured graphs, and a state that is saved, loaded and continued, of every mixer.

    Returns the launches of a captured token by mixer (none: it is not captured), and the waits of a replay.
    """
    from nalanda.model import MIXERS, decoding

    within(decoding.Graph, "capture", "capture")
    within(decoding.GraphDecoder, "__call__", "replay")
    figures: dict[str, Any] = {}
    for mixer in MIXERS:
        model = build(torch.bfloat16, mixer=mixer).eval()
        prompt = draw(2, 9).to(CARD)
        simulated.events.clear()
        model.generate(prompt, max_new_tokens=20, do_sample=False)
        figures[mixer] = launches("capture") // 2  # the graphs of two turns

        state = model.read(prompt[:1], chunk_size=4)
        path = Path(folder, f"{mixer}.safetensors")
        state.save(path)
        again = model.load_state(path)
        continued = [
            model.generate(prompt[:1], state=each, max_new_tokens=4, do_sample=False)
            for each in (state, again)
        ]
        assert torch.equal(*continued)
    return {"launches": figures, "waits": [list(key) for key in waits if key[0] == "replay"]}


def compile_blocks(*mixers: str) -> dict[str, Any]:
    """Compiled blocks over 20 packings of 2 to 21 documents, then dense batches, then packings of other lengths.

    Returns by mixer the graphs of each kind, and the nodes that AOTAutograd's cache refuses.
    """
    from torch._dynamo.utils import counters
    from torch._functorch._aot_autograd.autograd_cache import check_node_safe

    from nalanda.train import parallel
    from nalanda.train.loss import summed_loss

    refused: set[str] = set()

    def inspect_graph(module: torch.fx.GraphModule, inputs: list) -> Callable:
        for node in module.graph.nodes:
            try:
                check_node_safe(node)
            except Exception:
                refused.add(getattr(node.target, "__name__", str(node.target)))
        return module

    def run(model: Any, columns: int, documents: int) -> None:
        """A pass over two rows. documents: 0 for a dense batch."""
        tokens = draw(2, columns)
        inner = torch.randint(1, 2 * columns, (max(documents - 1, 0),)).sort().values.tolist()
        bounds = torch.tensor([0, *inner, 2 * columns] if documents else [0, columns, 2 * columns])
        batch = {"input_ids": tokens, "labels": tokens, "cu_seqlens": bounds}
        with torch.autocast("cuda", torch.bfloat16):
            summed_loss(model, batch, CARD).backward()

    batches = {
        "packed": [(T, documents) for documents in range(2, 22)],
        "dense": [(T, 0), (T, 0)],
        "lengths": [(T + 16 * i, 2 + i) for i in range(6)],
    }
    figures: dict[str, Any] = {"refused": refused}
    for mixer in mixers:
        torch._dynamo.reset()
        counters.clear()
        model = build(mixer=mixer).train()
        parallel.compile_blocks(parallel.units(model), backend=inspect_graph)
        seen = 0
        for kind, cases in batches.items():
            for columns, documents in cases:
                run(model, columns, documents)
            figures[f"{mixer}, {kind}"] = counters["stats"]["unique_graphs"] - seen
            seen = counters["stats"]["unique_graphs"]
        figures[f"{mixer}, breaks"] = len(counters["graph_break"])
    return figures | {"refused": sorted(refused)}


def count_compiled_bytes() -> dict[str, Any]:
    """MB that Inductor's own kernels move for a layer of the flagship, 16,384 tokens in bf16, and their launches.

    Products and our kernels are left out. Nothing is computed: Inductor lays out its kernels, and each reads its
    inputs and writes its outputs once. A reader of columns of a product counts as a reader of all of it.
    """
    from torch._functorch.aot_autograd import make_boxed_func
    from torch._inductor import compile_fx, config
    from torch._inductor.debug import DebugContext
    from torch._inductor.fx_passes.post_grad import post_grad_passes, view_to_reshape
    from torch._inductor.graph import GraphLowering
    from torch._inductor.virtualized import V

    from nalanda import NalandaForCausalLM
    from nalanda.config.load import find_recipe, load_config
    from nalanda.config.model import build_model_config
    from nalanda.train import parallel
    from nalanda.train.loss import summed_loss

    figures: dict[str, int] = {}

    def size_of(n: Any) -> int:
        """A size; any number for one that depends on values."""
        return 256 if getattr(getattr(n, "node", None), "hint", 0) is None else int(n)

    def filled(node: Any) -> Any:
        """An output of the graph, without values."""
        x = None if node is None else node.meta["val"]
        if not isinstance(x, torch.Tensor):
            return None if x is None else size_of(x)
        shape, strides = ([*map(size_of, sizes)] for sizes in (x.shape, x.stride()))
        return torch.empty_strided(shape, strides, dtype=x.dtype, device=x.device.type)

    def count_kernels(
        module: torch.fx.GraphModule, inputs: list, is_backward: bool = False, **_: Any
    ) -> Callable:
        outputs = module.graph.find_nodes(op="output")[0].args[0]
        compile_fx.record_original_output_strides(module)
        fake = torch._guards.detect_fake_mode(inputs)
        assert fake is not None
        with V.set_fake_mode(fake), DebugContext():
            view_to_reshape(module)
            post_grad_passes(module, is_inference=False)
            shapes = fake.shape_env
            graph = GraphLowering(
                module, example_inputs=inputs, shape_env=shapes, is_backward=is_backward
            )
            with V.set_graph_handler(graph), graph.set_current_device(torch.device("cuda", 0)):
                graph.run(*inputs)
                graph.init_wrapper_code()
                graph._update_scheduler()
                own = [x for x in graph.scheduler.nodes if not x.is_extern()]
                moved = sum(x.get_read_write_buffers_sizes() for x in own)

        name = "backward" if is_backward else "forward"
        figures[f"{name}, MB"] = moved // 10**6
        figures[f"{name}, launches"] = len(own)
        return make_boxed_func(lambda *_: [filled(node) for node in outputs])

    def count(module: torch.fx.GraphModule, inputs: list) -> Callable:
        return compile_fx.compile_fx(module, inputs, inner_compile=count_kernels)

    T = 8192
    changes = ["model.num_hidden_layers=1", "model.vocab_size=64", f"data.seq_len={T}"]
    recipe = load_config(
        find_recipe("nala_gated_deltanet_340m"), [*changes, f"train.tokens_per_step={8 * T}"]
    )
    model = NalandaForCausalLM(build_model_config(recipe)).to(CARD).train()
    parallel.compile_blocks(parallel.units(model), backend=count)
    tokens = torch.zeros(2, T, dtype=torch.int64)
    bounds = torch.arange(0, 2 * T + 1, 2048)
    batch = {"input_ids": tokens, "labels": tokens, "cu_seqlens": bounds}
    # Padding of products would be measured, and a cache would skip the count.
    with config.patch(shape_padding=False, force_disable_caches=True):
        with torch.autocast("cuda", torch.bfloat16):
            loss = summed_loss(model, batch, CARD)
        loss.backward()
    return figures


def within(module: Any, function: str, name: str) -> None:
    """Counts what a function of a module does for the phase `name`."""
    original = getattr(module, function)

    def call(*args: Any, **options: Any) -> Any:
        with phase(name):
            return original(*args, **options)

    setattr(module, function, call)


def train_recipe(recipe: str, folder: str) -> dict[str, Any]:
    """The trainer on a recipe in each precision, stopped at a checkpoint and resumed, with validation and export.

    Returns by precision the losses, the launches and uploads of a step, and the waits by phase and line.
    """
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    from nalanda.config.load import load_config
    from nalanda.train import loop, step

    within(loop, "forward_backward", "step")
    within(step, "next_step", "step")
    within(step, "summed_loss", "forward")
    within(Accelerator, "backward", "backward")
    within(loop, "apply", "step")
    within(loop, "validate", "validation")
    within(loop, "save_if_due", "save")

    steps = 8
    figures: dict[str, Any] = {}
    for precision in ("bf16", "fp16", "fp32"):
        simulated.events.clear()
        waits.clear()
        path = Path(folder, precision)
        settings = [f"output_dir={path}", f"train.precision={precision}", "train.compile=false"]
        for end in (steps // 2, steps):
            AcceleratorState._reset_state(reset_partial_state=True)
            loop.train(load_config(Path(recipe), [*settings, f"train.steps={end}"]))

        lines = map(json.loads, (path / "metrics.jsonl").read_text().splitlines())
        of_step = ("forward", "backward", "step")
        figures[precision] = {
            "losses": [line["loss"] for line in lines if "loss" in line],
            "launches": round(sum(map(launches, of_step)) / steps),
            "uploads": sum(simulated.count(("upload",), of) for of in of_step) / steps,
            "waits": [[of, where, n / steps] for (of, where), n in waits.items() if of in of_step],
        }
    return figures


SCENARIOS: dict[str, Callable[..., dict[str, Any]]] = {
    "train": train_variants,
    "decode": decode_variants,
    "generate": generate_by_graphs,
    "recipe": train_recipe,
    "compile": compile_blocks,
    "bytes": count_compiled_bytes,
}


if __name__ == "__main__":
    simulated.install()
    print(json.dumps(SCENARIOS[sys.argv[1]](*sys.argv[2:])))
