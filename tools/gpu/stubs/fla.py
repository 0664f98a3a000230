"""flash-linear-attention in a rehearsal on a CPU: in torch, and it refuses what the real one refuses on a card.

The card is a Hopper with Triton 3.6. Gated backward passes raise fla 0.6.0's error until the guard is lifted.
"""

import sys
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

REFUSAL = (
    "Triton >= 3.4.0 and < 3.7.1 on Hopper GPUs produces incorrect results for "
    "gated chunk_bwd_dqkwg (see #640). Please upgrade Triton to >= 3.7.1 or "
    "install tilelang: `pip install tilelang`"
)
__path__: list[str] = []


def _module(name: str, **contents: Any) -> ModuleType:
    """Makes a module of this package, with the packages above it."""
    above, _, last = name.rpartition(".")
    if above not in sys.modules:
        _module(above)
    module: Any = ModuleType(name)
    module.__path__ = []
    vars(module).update(contents)
    sys.modules[name] = module
    setattr(sys.modules[above], last, module)
    return module


class _Guarded(torch.autograd.Function):
    """The identity, with fla's guard in its backward."""

    @staticmethod
    def forward(ctx: Any, o: Tensor) -> Tensor:
        return o.view_as(o)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        if not _chunk_o.TRITON_ABOVE_3_7_1:
            raise RuntimeError(REFUSAL)
        return gradients[0]


def _delta_rule(q, k, v, *rest, use_qk_l2norm_in_kernel=False, cu_seqlens_cpu=None, **options):
    from nalanda.model import ops

    *g, beta = rest
    options["qk_norm"] = "l2" if use_qk_l2norm_in_kernel else None
    o, state = ops.delta_rule(q, k, v, beta, *g, **options, backend="torch")
    return (_Guarded.apply(o) if g else o), state


def _linear_attention(q, k, v, g=None, cu_seqlens_cpu=None, **options):
    from nalanda.model import ops

    o, state = ops.linear_attention(q, k, v, g, **options, backend="torch")
    return (o if g is None else _Guarded.apply(o)), state


class GatedDeltaNetConfig(PreTrainedConfig):
    model_type = "gated_deltanet"

    def __init__(
        self,
        hidden_size: int = 2048,
        expand_v: int = 2,
        head_dim: int = 256,
        num_heads: int = 6,
        num_hidden_layers: int = 21,
        intermediate_size: int | None = None,
        vocab_size: int = 32000,
        **options: Any,
    ):
        self.hidden_size, self.head_dim, self.num_heads = hidden_size, head_dim, num_heads
        self.expand_v, self.num_hidden_layers = expand_v, num_hidden_layers
        self.intermediate_size, self.vocab_size = intermediate_size, vocab_size
        super().__init__(**options)


class GatedDeltaNetBlock(nn.Module):
    def __init__(self, config: Any):
        super().__init__()
        self.heads, self.size = config.num_heads, config.head_dim
        self.values = config.head_dim * config.expand_v
        width = self.heads * (2 * self.size + self.values + 2)
        self.in_proj = nn.Linear(config.hidden_size, width)
        self.out_proj = nn.Linear(self.heads * self.values, config.hidden_size)

    def forward(self, x: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
        B, T, _ = x.shape
        parts = [self.size, self.size, self.values, 1, 1]
        q, k, v, b, g = self.in_proj(x).view(B, T, self.heads, -1).split(parts, -1)
        o, _ = _delta_rule(
            *(q, k, v, logsigmoid(g[..., 0].float() + 3), b[..., 0].sigmoid()),
            use_qk_l2norm_in_kernel=True,
            cu_seqlens=None if cu_seqlens is None else cu_seqlens.cpu(),
        )
        return x + self.out_proj(o.flatten(2))


class GatedDeltaNetForCausalLM(PreTrainedModel):
    __module__ = "fla.models"  # by which the trainer knows that it wants the documents' bounds
    config_class = GatedDeltaNetConfig

    def __init__(self, config: Any):
        super().__init__(config)
        self.embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            GatedDeltaNetBlock(config) for _ in range(config.num_hidden_layers)
        )
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.embeddings

    def forward(
        self, input_ids: Tensor, cu_seqlens: Tensor | None = None, **options: Any
    ) -> CausalLMOutput:
        x = self.embeddings(input_ids)
        for layer in self.layers:
            x = layer(x, cu_seqlens)
        return CausalLMOutput(logits=self.lm_head(x))


_chunk_o: Any = _module(
    "fla.ops.common.chunk_o",
    IS_NVIDIA_HOPPER=True,
    TRITON_ABOVE_3_4_0=True,
    TRITON_ABOVE_3_7_1=False,
)
_module("fla.ops.delta_rule", chunk_delta_rule=_delta_rule)
_module("fla.ops.gated_delta_rule", chunk_gated_delta_rule=_delta_rule)
_module("fla.ops.simple_gla", chunk_simple_gla=_linear_attention)
_module("fla.models", GatedDeltaNetConfig=GatedDeltaNetConfig)
AutoConfig.register("gated_deltanet", GatedDeltaNetConfig)
AutoModelForCausalLM.register(GatedDeltaNetConfig, GatedDeltaNetForCausalLM)
