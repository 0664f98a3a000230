"""GGUF files for llama.cpp: its architecture `qwen35`, Gated DeltaNet with attention every n-th layer."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from nalanda.common.errors import InputError, explained, first_line, output_file
from nalanda.common.files import refuse_existing, rename_synced
from nalanda.common.number_formats import choose_format
from nalanda.convert.certificate import compare, unchecked
from nalanda.convert.convert import local_folder, read_config
from nalanda.convert.engines import end_ids, quiet
from nalanda.convert.formats import attention_interval
from nalanda.convert.gguf_tokenizer import add_tokenizer
from nalanda.data.tokenizer import check_vocabulary, load_tokenizer
from nalanda.model import NalandaConfig

DTYPES = {"fp32": "ALL_F32", "bf16": "MOSTLY_BF16", "fp16": "MOSTLY_F16", "q8_0": "MOSTLY_Q8_0"}
"""What `write_gguf` writes matrices as, each with GGUF's name for such a file."""

_BLOCK = {  # in every layer
    "attn_norm": "mixer_norm",
    "post_attention_norm": "mlp_norm",
    **{f"ffn_{name}": f"mlp.{name}_proj" for name in ("gate", "up", "down")},
}
_CERTIFICATE = "nalanda.certificate"
_ROOM = 1024  # bytes for the certificate, since the file is written before it is compared
_NULL_HEAD = 64  # a usual size, for which every backend has kernels


def write_gguf(
    source: str | os.PathLike, out: str | os.PathLike, dtype: str = "fp32", check: bool = True
) -> Path:
    """Writes the model of `source`, a folder or hub id, with its tokenizer and chat template, to the new file
    `out`.

    dtype: of the matrices, one of `DTYPES`; q8_0 keeps those whose rows are no multiple of 32 in fp16. Norms,
    decays and convolutions are always fp32.
    check: compare both models where llama.cpp is installed, see `certificate.compare`. The certificate is
    printed on stderr and stored in the file's metadata, as `nalanda.certificate`: no second file is needed.
    For a rounded file, one in fp32 is written too and removed afterwards. Its tensors, rounded, must equal the
    file's, and llama.cpp's results from both are compared.

    llama.cpp needs a layer of softmax attention for its cache. A model without any gets one more layer, whose
    output matrices are zero, so that it adds nothing.

    Raises:
        InputError: names what llama.cpp cannot compute or has no tokenizer for, or how far the models differ;
            nothing is written.
    """
    try:
        import gguf  # pyrefly: ignore[missing-import]  (an extra)
    except ModuleNotFoundError as error:
        raise explained(error) or error from None
    out = Path(out)
    # Refusals that need no model.
    dtype = choose_format(dtype, list(DTYPES), "--dtype")
    refuse_existing(out, "file")
    title, source = Path(source).resolve().name, local_folder(os.fspath(source))
    for name in ("config.json", "tokenizer.json"):
        if not (source / name).is_file():
            raise InputError(f"{source}: no {name} in it")
    if read_config(source).get("model_type") != "nalanda":
        raise InputError(f"{source}: not a model of ours; convert it to nalanda first")
    output_file(out, "the file to make:")

    # Beside the target, which gets its name only when it is proved.
    unproved = out.with_name(f".tmp-{out.name}")
    exact = out.with_name(f".tmp-exact-{out.name}")
    try:
        _write(source, unproved, dtype, title)
        proof = unchecked("asked for with --no-check")
        if check and dtype == "fp32":
            proof = compare(source, unproved, ["nalanda", "gguf"])
        elif check:
            _write(source, exact, "fp32", title)
            _check_rounded(exact, unproved)
            proof = compare(source, exact, ["nalanda", "gguf"], (dtype, unproved))
        print(proof, file=sys.stderr)

        # Over the blanks that `_write` left: no other byte of the file moves.
        field = gguf.GGUFReader(unproved, "r+").fields[_CERTIFICATE]
        field.parts[field.data[0]][:] = list(str(proof).encode().ljust(_ROOM))
        rename_synced(unproved, out)
    finally:
        for file in (unproved, exact):
            file.unlink(missing_ok=True)
    return out


def _check_rounded(exact: Path, rounded: Path) -> None:
    """Raises InputError unless `rounded` has the fields of `exact`, and its tensors rounded."""
    import gguf  # pyrefly: ignore[missing-import]

    before, after = gguf.GGUFReader(exact), gguf.GGUFReader(rounded)
    fields, fields_after = _contents(before), _contents(after)
    different = [
        name for name in fields.keys() | fields_after if fields.get(name) != fields_after.get(name)
    ]

    exact_data = {tensor.name: tensor.data for tensor in before.tensors}
    for tensor in after.tensors:
        kind = tensor.tensor_type
        # Both through the same rounding, so that the values must be equal bit by bit.
        quantised = gguf.quants.quantize(exact_data[tensor.name], kind)
        expected = gguf.quants.dequantize(quantised, kind)
        if not np.array_equal(gguf.quants.dequantize(tensor.data, kind), expected):
            different.append(tensor.name)
    if different:
        raise InputError(f"source and target differ: {min(different)} is not the source's, rounded")


def _contents(reader: Any) -> dict[str, Any]:
    """The metadata of a file by name, without the type that says how it is rounded."""
    fields = {name: field.contents() for name, field in reader.fields.items()}
    del fields["general.file_type"]
    return fields


def _write(source: Path, out: Path, dtype: str, title: str) -> None:
    """Writes the file, with room for the certificate."""
    import gguf  # pyrefly: ignore[missing-import]

    try:
        config = NalandaConfig.from_pretrained(source)
        interval = attention_interval(config)
        tokenizer = load_tokenizer(source)
        check_vocabulary(tokenizer, config.vocab_size)
        with quiet():
            model, report = AutoModelForCausalLM.from_pretrained(
                source, dtype=torch.float32, output_loading_info=True
            )
    except (OSError, ValueError) as error:
        raise InputError(f"{source}: {first_line(error)}") from None
    if report["missing_keys"]:
        raise InputError(f"{source}: tensor {min(report['missing_keys'])} is missing")

    writer = gguf.GGUFWriter(out, "qwen35")
    try:
        # Metadata: room for the certificate, sizes, tokenizer.
        writer.add_name(title)
        writer.add_string(_CERTIFICATE, " " * _ROOM)
        writer.add_file_type(gguf.LlamaFileType[DTYPES[dtype]])
        writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
        _add_sizes(writer, config, interval)
        add_tokenizer(writer, tokenizer, config, end_ids(model, tokenizer))

        # Tensors, each rounded on its own.
        for name, tensor in _tensors(config, model.state_dict()):
            kind = gguf.GGMLQuantizationType[_stored_as(tensor, name, dtype)]
            quantised = gguf.quants.quantize(tensor.contiguous().numpy(), kind)
            writer.add_tensor(name, quantised, raw_dtype=kind)

        # The header lists all tensors, so it is written after they are known.
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    finally:
        writer.close()


def _add_sizes(writer: Any, config: NalandaConfig, interval: int) -> None:
    """Writes the sizes. interval: from `attention_interval`."""
    mixers: dict[str, Any] = config.distinct_mixers()
    delta, soft = mixers["gated_deltanet"], mixers.get("softmax")

    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_block_count(config.num_hidden_layers + (soft is None))
    writer.add_full_attention_interval(interval)

    # The null layer's single head, where the model has no attention of its own.
    writer.add_head_count(soft.num_heads if soft else 1)
    writer.add_head_count_kv(soft.num_v_heads if soft else 1)
    writer.add_key_length(soft.K if soft else _NULL_HEAD)
    writer.add_value_length(soft.V if soft else _NULL_HEAD)
    rotary = soft.rotary_dim if soft else _NULL_HEAD
    writer.add_rope_dimension_count(rotary)
    # Qwen3.5 deals a position's three coordinates to the angles in turn. Those of text are equal.
    angles = rotary // 2
    sections = [(angles + 2) // 3, (angles + 1) // 3, angles // 3, 0]
    writer.add_rope_dimension_sections(sections)
    writer.add_rope_freq_base(soft.rope_theta if soft else 10000.0)

    # Gated DeltaNet in the terms of state-space models: groups are key heads, the step rank is value heads.
    writer.add_ssm_conv_kernel(delta.rule.conv)
    writer.add_ssm_state_size(delta.K)
    writer.add_ssm_group_count(delta.num_heads)
    writer.add_ssm_time_step_rank(delta.num_v_heads)
    writer.add_ssm_inner_size(delta.num_v_heads * delta.V)


def _stored_as(tensor: Tensor, name: str, dtype: str) -> str:
    """Name of the type that GGUF stores the tensor as."""
    if tensor.dim() == 1 or "conv1d" in name:
        return "F32"
    # Blocks of q8_0 have 32 numbers of a row.
    if dtype == "q8_0" and tensor.shape[-1] % 32:
        dtype = "fp16"
    return dtype.upper().replace("FP", "F")


def _tensors(config: NalandaConfig, ours: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """llama.cpp's tensors by their names."""
    yield "token_embd.weight", ours["model.embed_tokens.weight"]
    yield "output_norm.weight", ours["model.norm.weight"]
    if not config.tie_word_embeddings:
        yield "output.weight", ours["lm_head.weight"]
    mixers: dict[str, Any] = config.distinct_mixers()
    for i, kind in enumerate(config.layer_mixers):
        # The layer's tensors by their names within it.
        prefix = f"model.layers.{i}."
        layer = {
            name.removeprefix(prefix).removesuffix(".weight"): tensor
            for name, tensor in ours.items()
            if name.startswith(prefix)
        }
        mixer = {
            name.removeprefix("mixer."): tensor
            for name, tensor in layer.items()
            if name.startswith("mixer.")
        }
        write_mixer = _attention if kind == "softmax" else _delta
        block = {foreign: layer[name] for foreign, name in _BLOCK.items()}
        yield from _named(i, block | write_mixer(mixer, mixers[kind]))
    if "softmax" not in mixers:
        # Behind the last layer, where `attention_interval` expects the first of attention.
        yield from _named(config.num_hidden_layers, _null(config))


def _named(layer: int, tensors: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a layer by their full names."""
    for name, tensor in tensors.items():
        suffix = "" if name in ("ssm_a", "ssm_dt.bias") else ".weight"
        yield f"blk.{layer}.{name}{suffix}", tensor


def _delta(ours: dict[str, Tensor], mixer: Any) -> dict[str, Tensor]:
    """The tensors of a layer's Gated DeltaNet."""
    groups, V = mixer.num_heads, mixer.V

    def tiled(x: Tensor, size: int = V, dim: int = 0) -> Tensor:
        """Value heads by their place in the group: theirs numbered r·H + h has key head h; ours is h·R + r."""
        # H·R·size → [H, R, size] → [R, H, size] → R·H·size along dim
        return x.unflatten(dim, (groups, -1, size)).transpose(dim, dim + 1).flatten(dim, dim + 2)

    # [channels, 1, W] to [channels, W]
    convs = {name: ours[f"{name}_conv1d"].squeeze(1) for name in "qkv"}
    return {
        "attn_qkv": torch.cat([ours["q_proj"], ours["k_proj"], tiled(ours["v_proj"])]),
        "attn_gate": tiled(ours["g_proj"]),
        "ssm_conv1d": torch.cat([convs["q"], convs["k"], tiled(convs["v"])]),
        "ssm_a": tiled(-ours["decay.A_log"].exp(), 1),  # its decay is exp(ssm_a Δ)
        "ssm_dt.bias": tiled(ours["decay.dt_bias"], 1),
        "ssm_alpha": tiled(ours["a_proj"], 1),
        "ssm_beta": tiled(ours["b_proj"], 1),
        "ssm_norm": ours["o_norm"],
        "ssm_out": tiled(ours["o_proj"], dim=1),  # its columns are the heads
    }


def _attention(ours: dict[str, Tensor], mixer: Any) -> dict[str, Tensor]:
    """The tensors of a layer's softmax attention."""
    heads = (mixer.num_heads, mixer.K)
    q, gate = (ours[name].unflatten(0, heads) for name in ("q_proj", "g_proj"))  # [H, K, D] each
    return {
        "attn_q": torch.cat([q, gate], 1).flatten(0, 1),  # each head's query, then its gate
        "attn_k": ours["k_proj"],
        "attn_v": ours["v_proj"],
        "attn_q_norm": ours["q_norm"],
        "attn_k_norm": ours["k_norm"],
        "attn_output": ours["o_proj"],
    }


def _null(config: NalandaConfig) -> dict[str, Tensor]:
    """A layer of attention whose outputs are zero."""
    D, I, K = config.hidden_size, config.intermediate_size, _NULL_HEAD
    # Norms of ones and matrices of zeros: the layer adds exactly zero.
    return {
        "attn_norm": torch.ones(D),
        "post_attention_norm": torch.ones(D),
        "attn_q_norm": torch.ones(K),
        "attn_k_norm": torch.ones(K),
        "attn_q": torch.zeros(2 * K, D),
        "attn_k": torch.zeros(K, D),
        "attn_v": torch.zeros(K, D),
        "attn_output": torch.zeros(D, K),
        "ffn_gate": torch.zeros(I, D),
        "ffn_up": torch.zeros(I, D),
        "ffn_down": torch.zeros(D, I),
    }
