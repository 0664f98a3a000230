"""What vLLM must know of a model before it builds it, and what it may not ask of one."""

import math
from functools import cached_property
from typing import Any, NamedTuple

import torch
from vllm.config import VllmConfig
from vllm.model_executor.models.config import MambaModelConfig, VerifyAndUpdateConfig
from vllm.platforms import current_platform
from vllm.transformers_utils.model_arch_config_convertor import ModelArchConfigConvertorBase

from nalanda.model.base import Mixer
from nalanda.model.mixers import build_mixer
from nalanda.model.precision import check_state_dtype, packed_spec

ALIGNMENT = 64
"""Bytes: a state begins at a multiple of it, as a GPU's loads want."""


class StateField(NamedTuple):
    """A state in the page of its layer."""

    start: int
    """Its first byte."""
    end: int
    """The byte behind its last."""
    shape: tuple[int, ...]
    dtype: torch.dtype


def mixers_of(config: Any) -> dict[str, Mixer]:
    """A mixer of each name in a model's config, without memory."""
    names = config.layer_mixers
    with torch.device("meta"):
        return {name: build_mixer(name, config, names.index(name)) for name in set(names)}


def grows(mixer: Mixer) -> bool:
    """Whether the mixer's state grows with the text, so that vLLM pages its keys and values."""
    return mixer.state_spec(1) != mixer.state_spec(2)


def state_dtype_of(vllm_config: VllmConfig) -> str:
    """The precision of matrices: `state_dtype` of --additional-config, else --mamba-ssm-cache-dtype."""
    # vLLM's own option knows no int8 and fp8.
    dtype = vllm_config.cache_config.mamba_ssm_cache_dtype
    default = "float32" if dtype == "auto" else dtype
    return vllm_config.additional_config.get("state_dtype", default)


def fields(mixer: Mixer, dtype: torch.dtype, state_dtype: str) -> dict[str, StateField]:
    """The mixer's states, one behind the other. dtype: of those without one of their own."""
    laid, start = {}, 0
    # The spec of one token: of a constant state, that of any number.
    for name, (shape, own_dtype) in packed_spec(mixer.state_spec(1), state_dtype).items():
        end = start + math.prod(shape) * (own_dtype or dtype).itemsize
        laid[name] = StateField(start, end, tuple(shape), own_dtype or dtype)
        start = -(-end // ALIGNMENT) * ALIGNMENT
    return laid


def page_bytes(vllm_config: VllmConfig) -> int:
    """Bytes of the largest layer's states: pages of one size serve all layers."""
    model = vllm_config.model_config
    # Softmax layers have pages of their own, by tokens.
    constant = [mixer for mixer in mixers_of(model.hf_config).values() if not grows(mixer)]
    layouts = [fields(mixer, model.dtype, state_dtype_of(vllm_config)) for mixer in constant]
    ends = [field.end for layout in layouts for field in layout.values()]
    return -(-max(ends) // ALIGNMENT) * ALIGNMENT


class Architecture(ModelArchConfigConvertorBase):
    """A Nalanda config in vLLM's terms."""

    @cached_property  # vLLM asks several times
    def growing(self) -> list[Mixer]:
        return [mixer for mixer in mixers_of(self.hf_config).values() if grows(mixer)]

    def get_architectures(self) -> list[str]:
        """One of `MODELS`, by the layers' caches. The config always has the same class."""
        growing = self.growing
        # vLLM reserves blocks of tokens only for a class that has attention.
        if not growing:
            return ["NalandaRecurrentForCausalLM"]
        alone = len(growing) == len(set(self.hf_config.layer_mixers))
        return ["NalandaAttentionForCausalLM" if alone else "NalandaHybridForCausalLM"]

    def get_total_num_attention_heads(self) -> int:
        return self.growing[0].num_heads if self.growing else self.hf_config.num_heads

    def get_head_size(self) -> int:
        return self.growing[0].K if self.growing else 0

    def get_total_num_kv_heads(self) -> int:
        return self.growing[0].num_v_heads if self.growing else 0

    def derive_max_model_len_and_key(self) -> tuple[float, str | None]:
        """A recurrence has no longest text; vLLM asks for a length and takes 2048 where none is given."""
        return super().derive_max_model_len_and_key() if self.growing else (float("inf"), None)


class CheckedConfig(VerifyAndUpdateConfig):
    """Refuses what would give other text than transformers."""

    @staticmethod
    def verify_and_update_config(vllm_config: VllmConfig) -> None:
        """Raises ValueError for a setting that these models do not serve."""
        model, parallel = vllm_config.model_config, vllm_config.parallel_config
        # Each would change the text, or stop in a layer with a message of vLLM's own.
        uncut = "layers are not cut over GPUs; take --data-parallel-size"
        uncomputed = "softmax layers with it are not served"
        softmax = [mixer for mixer in mixers_of(model.hf_config).values() if grows(mixer)]
        unknown = ", ".join(sorted(set(vllm_config.additional_config) - {"state_dtype"}))
        refusals = [
            (parallel.tensor_parallel_size > 1, f"--tensor-parallel-size: {uncut}"),
            (parallel.pipeline_parallel_size > 1, f"--pipeline-parallel-size: {uncut}"),
            (
                vllm_config.speculative_config is not None,
                "--speculative-config: states do not go back by refused tokens; leave it out",
            ),
            (
                vllm_config.lora_config is not None,
                "--enable-lora: merge the adapter into the weights, by peft's merge_and_unload",
            ),
            (
                model.quantization is not None,
                "--quantization: weights are fp32, bf16 or fp16; leave it out",
            ),
            (
                model.runner_type == "pooling",
                "--runner pooling: embeddings are not served; leave it out",
            ),
            (bool(unknown), f"--additional-config: unknown: {unknown}; its one key is state_dtype"),
            (not model.hf_config.is_decoder, "encoders are not served"),
            (
                any(mixer.rule.decay != "none" for mixer in softmax),
                "mixer forgetting: its gate is served with a window alone; set one, or use transformers",
            ),
            (any(mixer.rule.conv for mixer in softmax), f"conv_size: {uncomputed}"),
            (any(mixer.rule.value_conv for mixer in softmax), f"value_conv: {uncomputed}"),
            (
                any(mixer.K != mixer.V for mixer in softmax),
                f"keys and values of different sizes: {uncomputed}",
            ),
        ]
        for is_set, problem in refusals:
            if is_set:
                raise ValueError(f"Nalanda: {problem}")
        check_state_dtype(state_dtype_of(vllm_config), model.hf_config)
        model.hf_config.architectures = model.architectures  # vLLM asks both


def settle_block_size(vllm_config: VllmConfig) -> None:
    """Asks for the blocks that vLLM takes on a CPU where the user asks for none.

    vLLM 0.32 configures its engine once more after the start. On a CPU it then sets a size of blocks that nobody
    asked for to 128, and states keep blocks of another size. Its scheduler would end the calls of a prompt beside
    the bounds of blocks, and its prefix cache would give states of fewer tokens than it counts.
    """
    cache = vllm_config.cache_config
    if not current_platform.is_cpu() or cache.user_specified_block_size:
        return
    if vllm_config.model_config.is_hybrid:
        cache.block_size = 128  # of the attention's kernels; vLLM enlarges it until a state fits
    elif cache.mamba_block_size is not None:
        cache.block_size = cache.mamba_block_size
    cache.user_specified_block_size = True


class CheckedMambaConfig(MambaModelConfig):
    """The same beside vLLM's own settings for states."""

    @classmethod
    def verify_and_update_config(cls, vllm_config: VllmConfig) -> None:
        CheckedConfig.verify_and_update_config(vllm_config)
        settle_block_size(vllm_config)
        super().verify_and_update_config(vllm_config)
