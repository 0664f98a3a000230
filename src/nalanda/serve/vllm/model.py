"""The models that vLLM builds. Their layers are those of `nalanda.model`."""

from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.mamba.mamba_utils import get_temporal_copy_spec
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.models.interfaces import (
    HasInnerState,
    IsAttentionFree,
    IsHybrid,
    SupportsMambaPrefixCaching,
)

from nalanda.model.decoder import Decoder
from nalanda.model.epilogues import add_norm

from .architecture import grows, page_bytes
from .layers import AttentionLayer, Positions, RecurrentLayer


class NalandaAttentionForCausalLM(nn.Module):
    """A decoder as vLLM calls it: the tokens of all requests in one row."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = ""):
        super().__init__()
        self.config: Any = vllm_config.model_config.hf_config
        self.model = Decoder(self.config)
        self.mixers = []  # a list: they have no parameters of their own
        for i, block in enumerate(self.model.layers):
            layer = AttentionLayer if grows(block.mixer) else RecurrentLayer
            self.mixers.append(layer(block.mixer, f"model.layers.{i}.mixer", vllm_config))

        # Without vLLM's padding to multiples of 64 rows: a checkpoint has none.
        sizes = self.config.vocab_size, self.config.hidden_size
        self.lm_head = ParallelLMHead(*sizes, padding_size=1)
        if self.config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight
        self.logits_processor = LogitsProcessor(self.config.vocab_size)

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        return self.model.embed_tokens(input_ids)

    @torch.no_grad()
    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: Tensor | None = None,
        **_: Any,
    ) -> Tensor:
        """Hidden states `[tokens, D]`. Tokens that pad a step stay in the row; their outputs are never read."""
        x = self.embed_input_ids(input_ids) if inputs_embeds is None else inputs_embeds
        x = self.model.scaled(x[None], Positions(positions))[0]
        metadata: Any = get_forward_context().attn_metadata

        # The steps of `Block.forward`, with layers that find their states in vLLM's memory.
        for block, mixer in zip(self.model.layers, self.mixers, strict=True):
            x, h = add_norm(x, None, block.mixer_norm)
            x, h = add_norm(x, mixer(h, metadata, positions), block.mlp_norm)
            x = x + block.mlp(h)
        return add_norm(x, None, self.model.norm)[1]

    def compute_logits(self, hidden_states: Tensor) -> Tensor | None:
        return self.logits_processor(self.lm_head, hidden_states)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Reads a checkpoint's tensors. Raises ValueError for one that the model has not, or of another shape."""
        tensors = dict(self.named_parameters()) | dict(self.named_buffers())
        loaded = set()
        for name, value in weights:
            # A tied head is the embedding's own tensor.
            if name == "lm_head.weight" and self.config.tie_word_embeddings:
                continue
            if name not in tensors or tensors[name].shape != value.shape:
                size = list(tensors[name].shape) if name in tensors else "not there"
                raise ValueError(f"{name} is {list(value.shape)} in the checkpoint, here {size}")
            # Into the tensor's dtype: decays and exponents stay in fp32.
            tensors[name].data.copy_(value)
            loaded.add(name)
        return loaded


class _Recurrent(NalandaAttentionForCausalLM, HasInnerState, SupportsMambaPrefixCaching):
    """One page of bytes for each layer and request, see `RecurrentLayer`."""

    @classmethod
    def get_mamba_state_shape_from_config(cls, vllm_config: VllmConfig) -> tuple[tuple[int]]:
        return ((page_bytes(vllm_config),),)

    @classmethod
    def get_mamba_state_dtype_from_config(cls, vllm_config: VllmConfig) -> tuple[torch.dtype]:
        return (torch.int8,)

    @classmethod
    def get_mamba_state_copy_func(cls) -> tuple:
        return (get_temporal_copy_spec,)


class NalandaRecurrentForCausalLM(_Recurrent, IsAttentionFree):
    pass


class NalandaHybridForCausalLM(_Recurrent, IsHybrid):
    is_hybrid: ClassVar = True
