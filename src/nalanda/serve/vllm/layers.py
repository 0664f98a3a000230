"""Layers that keep their states in vLLM's memory, around mixers that stay as they are."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.v1.attention.backend import AttentionCGSupport, CommonAttentionMetadata
from vllm.v1.attention.backends.linear_attn import (
    LinearAttentionBackend,
    LinearAttentionMetadata,
    LinearAttentionMetadataBuilder,
)
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum

from nalanda.model.base import Mixer
from nalanda.model.precision import pack_state, unpack_state
from nalanda.model.sequences import Sequences

from .architecture import fields, page_bytes, state_dtype_of


@dataclass
class Group:
    """Requests that a mixer reads in one call: decoding ones as a batch of one token each, others packed."""

    tokens: slice
    """Their tokens among those of the step."""
    seq: Sequences
    slots: Tensor
    """The pages of their states, int64 `[N]`."""
    fresh: Tensor | None
    """Which of them begin a text, bool `[N]`; None: none does."""


def check_blocks(past: Tensor, lengths: Tensor, block_size: int) -> None:
    """Raises RuntimeError where a step leaves a block of tokens that it has not filled.

    vLLM's prefix cache would keep the state there under the hash of the full block. past, lengths: int64 `[N]`,
    the tokens of each text before the step and behind it.
    """
    begun = past % block_size != 0
    left = begun & (past // block_size < (lengths - 1) // block_size)
    if bool(left.any()):
        tokens = int(past[left][0]) % block_size
        raise RuntimeError(
            f"Nalanda: prefix cache: vLLM leaves a block of {block_size} tokens after {tokens}, and later "
            "texts would begin with a wrong state; start it with --no-enable-prefix-caching"
        )


class Metadata(LinearAttentionMetadata):
    """A step's requests as layers of one cache group see them."""

    groups: list[Group]


class Builder(LinearAttentionMetadataBuilder):
    """Describes a step once for each cache group, from the host's copies of its lengths."""

    # A captured graph would keep the lengths of the step that it was captured at.
    _cudagraph_support = AttentionCGSupport.NEVER

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build=False,
    ) -> Metadata:
        base = super().build(common_prefix_len, common_attn_metadata, fast_build)
        metadata = Metadata(**vars(base))

        # vLLM puts requests with one token first.
        decodes, N = base.num_decodes, base.num_decodes + base.num_prefills
        starts = common_attn_metadata.query_start_loc_cpu[: N + 1].long()
        lengths = common_attn_metadata.seq_lens_cpu_upper_bound
        assert lengths is not None
        lengths = lengths[:N].long()
        past = lengths - starts.diff()  # exact without speculation
        if self.kv_cache_spec.mamba_cache_mode == "align":
            check_blocks(past, lengths, self.kv_cache_spec.block_size)
        slots, device = base.state_indices_tensor[:N].long(), self.device

        metadata.groups = []
        for first, last in ((0, decodes), (decodes, N)):
            if first == last:
                continue
            packed = first == decodes
            cu_seqlens = starts[first : last + 1] - starts[first] if packed else None
            # A prompt of one token comes among those that decode; its page holds another request's state.
            begins = past[first:last] == 0
            group = Group(
                slice(int(starts[first]), int(starts[last])),
                Sequences(cu_seqlens, past[first:last], device=device),
                slots[first:last],
                begins.to(device, non_blocking=True) if bool(begins.any()) else None,
            )
            metadata.groups.append(group)
        return metadata


class Backend(LinearAttentionBackend):
    @staticmethod
    def get_name() -> str:
        return "NALANDA"

    @staticmethod
    def get_builder_cls() -> type[Builder]:
        return Builder


class RecurrentLayer(nn.Module, MambaBase):
    """A mixer whose states of constant size lie in one page of bytes for each request.

    vLLM copies pages at the bounds of its prefix cache. It asks the model's class for the number and the kinds
    of states, and a class does not know the mixers. One state of bytes is right for them all.
    """

    def __init__(self, mixer: Mixer, name: str, vllm_config: VllmConfig):
        super().__init__()
        # In a list: the decoder owns its parameters.
        self.mixer, self.name = [mixer], name
        self.state_dtype = state_dtype_of(vllm_config)
        self.fields = fields(mixer, vllm_config.model_config.dtype, self.state_dtype)
        self.bytes = page_bytes(vllm_config)
        self.kv_cache = (torch.tensor([]),)
        self.states: dict[str, Tensor] = {}
        get_current_vllm_config().compilation_config.static_forward_context[name] = self

    @property
    def mamba_type(self) -> MambaAttentionBackendEnum:
        return MambaAttentionBackendEnum.LINEAR

    def get_attn_backend(self) -> type[Backend]:
        return Backend

    def get_state_shape(self) -> tuple[tuple[int]]:
        return ((self.bytes,),)

    def get_state_dtype(self) -> tuple[torch.dtype]:
        return (torch.int8,)

    def bind_kv_cache(self, kv_cache: Tensor) -> None:
        """Takes vLLM's pages, int8 `[pages, 1, 1, bytes]`, as states `[pages, …]`."""
        pages = kv_cache.squeeze(dim=(1, 2))
        self.kv_cache = (pages,)
        for name, (start, end, shape, dtype) in self.fields.items():
            self.states[name] = pages[:, start:end].view(dtype).view(-1, *shape)

    def forward(self, x: Tensor, metadata: dict[str, Any] | None, positions: Tensor) -> Tensor:
        """x `[tokens, D]` to y `[tokens, D]`. metadata: of this step by layer; None: vLLM measures memory."""
        (mixer,) = self.mixer
        if metadata is None:
            return mixer(x[None], Sequences(), None)[0][0]

        y = torch.zeros_like(x)
        # By this layer's name: layers of another cache group have other pages.
        for group in metadata[self.name].groups:
            # Copies [N, …]: a mixer does not write into the states that it reads.
            state = {name: pages[group.slots] for name, pages in self.states.items()}
            if group.fresh is not None:
                for name, tensor in state.items():
                    fresh = group.fresh.view(-1, *[1] * (tensor.dim() - 1))
                    state[name] = tensor.masked_fill(fresh, 0)

            dense = group.seq.cu_seqlens is None
            rows = x[group.tokens].unsqueeze(1 if dense else 0)  # [N, 1, D] or [1, ΣT, D]
            o, new = mixer(rows, group.seq, unpack_state(state, x.dtype))
            y[group.tokens] = o.flatten(0, 1)
            # Matrices have their precision; others the model's dtype.
            new = pack_state(new, self.state_dtype)
            for name, pages in self.states.items():
                pages[group.slots] = new[name].to(pages.dtype)
        return y


class AttentionLayer(nn.Module):
    """A softmax layer: its own up to q, k, v and from o on, with vLLM's paged attention between."""

    def __init__(self, mixer: Any, name: str, vllm_config: VllmConfig):
        super().__init__()
        self.mixer = [mixer]
        self.attention = Attention(
            mixer.num_heads,
            mixer.K,
            mixer.K**-0.5,
            num_kv_heads=mixer.num_v_heads,
            cache_config=vllm_config.cache_config,
            prefix=name,
        )

    def forward(self, x: Tensor, metadata: dict[str, Any] | None, positions: Tensor) -> Tensor:
        """x `[tokens, D]` to y `[tokens, D]`. positions: int `[tokens]`, of each in its text."""
        (mixer,) = self.mixer
        # Norms and rotations of q and k are the mixer's: [1, tokens, heads, K].
        inputs, _ = mixer.inputs(x[None], Positions(positions), None)
        q, k, v = (y[0].flatten(1) for y in (inputs.q, inputs.k, inputs.v))
        # vLLM finds the step's metadata and this layer's pages by the name.
        o = self.attention(q, k, v).view(1, len(x), mixer.num_heads, mixer.V)
        return mixer.read_out(o, inputs, x[None])[0]


class Positions(Sequences):
    """Tokens of many texts whose positions vLLM counts."""

    def __init__(self, positions: Tensor):
        super().__init__()
        self.counted = positions

    def positions(self, T: int, device: torch.device) -> Tensor:
        return self.counted[None]
