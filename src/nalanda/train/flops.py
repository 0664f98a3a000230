"""Training FLOPs of a token, and the peak of a device."""

import functools
import math
import re
import time
from typing import Any

import torch

from nalanda.common.versions import cpu_model

DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "auto": torch.bfloat16,  # in estimates; a run says its own
}
"""The dtype of matrix products, by `train.precision`; all but fp32 are autocast's."""

PEAK_FLOPS = {
    "GB200": (2500e12, 80e12),
    "B200": (2250e12, 80e12),
    "H200": (989e12, 67e12),
    "H100 PCIe": (756e12, 51e12),
    "H100": (989e12, 67e12),
    "GH200": (989e12, 67e12),
    "H20": (148e12, 44e12),
    "A100": (312e12, 19.5e12),
    "A800": (312e12, 19.5e12),
    "L40S": (362e12, 91.6e12),
    "L4": (121e12, 30.3e12),
    "A10": (125e12, 31.2e12),
    "RTX 4090": (165e12, 82.6e12),
    "RTX 3090": (71e12, 35.6e12),
    "MI300X": (1307e12, 163e12),
}
"""Dense FLOPs per second of the vendors' data sheets: (bf16 and fp16, fp32 outside the tensor cores)."""

CAUSAL = "causal attention is half of T × T"
"""The convention for FLOPs of softmax attention, for all models."""

EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Names that configs of transformers have for the number of experts in a layer."""


def peak_flops(device: torch.device, precision: str) -> tuple[float, str]:
    """The peak of one device in FLOPs per second, and its source.

    The source is `PEAK_FLOPS` for a known GPU, else the measured rate of a large matrix product.
    """
    if device.type == "cuda":
        peak = known_peak(torch.cuda.get_device_name(device), precision)
        if peak is not None:
            return peak
    # The faster dtype: the recurrence stays fp32, and some CPUs only emulate 16 bits.
    dtypes = {torch.float32, DTYPES[precision]}
    rate = max(matmul_flops(device, dtype) for dtype in dtypes)
    return rate, f"matrix product on {device.type}, measured"


def hardware_name(device: torch.device) -> str:
    """The name of a GPU, or of the processor with its threads that torch uses."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"{cpu_model()}, {threads} thread{'s' * (threads > 1)}"


def known_peak(name: str, precision: str) -> tuple[float, str] | None:
    """`peak_flops` of a GPU by its name; None if it is not in `PEAK_FLOPS`.

    The whole name must be known: an A10G, RTX 4090 Laptop, H100 NVL or a MIG part is another device.
    """
    for key in sorted(PEAK_FLOPS, key=len, reverse=True):
        makers, variants = "NVIDIA|AMD|Tesla|GeForce|Instinct", r"SXM\d?|PCIe|\d+GB?|HBM\d\w?|OAM"
        if re.fullmatch(rf"(({makers}) )*{key}([ -]({variants}))*", name, re.IGNORECASE):
            return PEAK_FLOPS[key][precision == "fp32"], f"{name}, data sheet"
    return None


@functools.cache
def matmul_flops(device: torch.device, dtype: torch.dtype) -> float:
    """FLOPs per second of the fastest square matrix product within 0.3 seconds; draws no random numbers.

    On a CPU, measures one thread and multiplies by the number of threads. Several threads would wait for each
    other, and so measure the load of the machine.
    """
    size, threads = (256, torch.get_num_threads()) if device.type == "cpu" else (4096, 1)
    a, b = (torch.ones(size, size, dtype=dtype, device=device) for _ in range(2))
    best, end = math.inf, time.perf_counter() + 0.3
    try:
        if threads > 1:
            torch.set_num_threads(1)
        while time.perf_counter() < end or best == math.inf:
            start = time.perf_counter()
            a @ b
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            best = min(best, time.perf_counter() - start)
    finally:
        if threads > 1:
            torch.set_num_threads(threads)
    # n³ products and as many sums in a product of n × n matrices.
    return threads * 2 * size**3 / best


def flops_per_token(model: torch.nn.Module, seq_len: int) -> tuple[float, str]:
    """Training FLOPs of one token, forward and backward, and how they were counted.

    Backward is twice forward; causal attention sees half of T × T. Nalanda's models count for themselves,
    with the terms of linear attention. Any other model: 6 per weight of a matrix product, the head included,
    and 6·L·D·T for attention, D = heads × head size (Chowdhery et al., 2022, halved). Of experts, it counts
    those that a token meets; of `layer_types`, L counts those of attention, with fewer than T keys behind a
    window. Excludes the embedding's look-up and, by MFU's definition, recomputation under gradient
    checkpointing.
    """
    config: Any = model.config
    if hasattr(config, "flops_per_token"):
        return 3 * config.flops_per_token(seq_len), f"the model's own count; {CAUSAL}"

    text: Any = config.get_text_config() if hasattr(config, "get_text_config") else config
    # Of a layer's experts a token meets this share.
    experts = next((n for key in EXPERTS if (n := getattr(text, key, None))), 1)
    share = (getattr(text, "num_experts_per_tok", None) or experts) / experts
    # Norms and biases are vectors, without matrix products.
    matrices = {name: p.numel() for name, p in model.named_parameters() if p.dim() > 1}
    weights = sum(count * (share if ".experts." in name else 1) for name, count in matrices.items())
    # The look-up of an embedding is no matrix product; a tied one is counted as the head.
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()  # type: ignore[operator]
    if head is not None and embedding.weight is not head.weight:
        weights -= embedding.weight.numel()

    heads = getattr(text, "num_attention_heads", None)
    if not heads:
        return 6.0 * weights, "estimated as 6 a weight, the mixers' own terms left out"
    # Scores and values, 2 FLOPs each, forward and twice backward: 12 a key and channel.
    width = heads * (getattr(text, "head_dim", None) or text.hidden_size // heads)

    kinds = getattr(text, "layer_types", None) or ["full_attention"] * text.num_hidden_layers
    window = min(getattr(text, "sliding_window", None) or seq_len, seq_len)
    keys = kinds.count("full_attention") * seq_len / 2  # the mean over a row's tokens
    # Token t sees min(t, W) keys, on average W (1 − W / 2T).
    keys += kinds.count("sliding_attention") * window * (1 - window / (2 * seq_len))
    attention = 12 * width * keys
    return 6 * weights + attention, f"estimated as 6 a weight and attention; {CAUSAL}"
