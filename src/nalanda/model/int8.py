"""Weights in eight bits, through transformers' `quantization_config`: a matrix is int8 times a scale for each row.

    W ≈ s ⊙ C,   s_m = max_k |W_mk| / 127,   C = round(W / s)

    model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=Int8Config())
    model.save_pretrained(other_folder)  # loads in int8

On a CPU the C++ kernels read C as it lies in memory, a byte a weight. They round x to int16 by groups of 256 numbers.
Elsewhere, and with gradients, torch multiplies by C in the dtype of x.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.core_model_loading import ConversionOps
from transformers.quantizers.auto import (
    AUTO_QUANTIZER_MAPPING,
    register_quantization_config,
    register_quantizer,
)
from transformers.quantizers.base import HfQuantizer
from transformers.quantizers.quantizers_utils import get_module_from_name
from transformers.utils.quantization_config import QuantizationConfigMixin

from .kernels import by_kernel
from .layers import autocasts, linear_dtype, unrecorded

METHOD = "nalanda_int8"
LARGEST = 127
TINY = torch.finfo(torch.float32).tiny
LEAST_FP16 = 2.0**-24
LEAST_ROWS = 64
"""Matrices of fewer rows stay as they are: gates and decays, a small part of the bytes."""


def quantize_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Codes `[M, K]` in int8 and scales `[M]` in the dtype of `weight [M, K]`."""
    # Rounded to bfloat16 first, so that a cast of the model changes no scale.
    scale = (weight.float().abs().amax(1) / LARGEST).bfloat16().float()
    if weight.dtype == torch.float16:
        # Up to a multiple of the least number, so that no code is cut.
        scale = (scale / LEAST_FP16).ceil() * LEAST_FP16
    codes = (weight.float() / scale.clamp_min(TINY)[:, None]).round()
    return codes.clamp(-LARGEST, LARGEST).to(torch.int8), scale.to(weight.dtype)


class Int8Linear(nn.Linear):
    """x ↦ (x Cᵀ) ⊙ s + bias."""

    def __init__(self, layer: nn.Linear):
        nn.Module.__init__(self)
        self.in_features, self.out_features = layer.in_features, layer.out_features
        codes = torch.empty_like(layer.weight, dtype=torch.int8)
        self.weight = nn.Parameter(codes, requires_grad=False)
        self.weight_scale = nn.Parameter(layer.weight.new_empty(len(codes)), requires_grad=False)
        self.bias = layer.bias

    def forward(self, x: Tensor) -> Tensor:
        if unrecorded() and not autocasts(x):
            served = by_kernel(
                "linear_rows", "auto", x, x, self.weight, self.weight_scale, self.bias
            )
            if served is not None:
                return served
        if linear_dtype(x) == torch.float16:
            # Sums of codes exceed its range.
            weight = self.weight.half() * self.weight_scale[:, None].half()
            return F.linear(x, weight, self.bias)
        y = F.linear(x, self.weight.to(x.dtype)) * self.weight_scale.to(x.dtype)
        return y if self.bias is None else y + self.bias


class Int8Embedding(nn.Embedding):
    """id ↦ C_id s_id."""

    def __init__(self, table: nn.Embedding):
        codes = torch.empty_like(table.weight, dtype=torch.int8)
        count, width = codes.shape
        super().__init__(count, width, table.padding_idx, _weight=codes, _freeze=True)
        self.weight_scale = nn.Parameter(table.weight.new_empty(len(codes)), requires_grad=False)

    def forward(self, ids: Tensor) -> Tensor:
        codes = F.embedding(ids, self.weight)  # raises for an id that the table lacks
        scale = self.weight_scale[ids]
        return codes.to(scale.dtype) * scale[..., None]


REPLACED: dict[type, Any] = {nn.Linear: Int8Linear, nn.Embedding: Int8Embedding}


class Int8Config(QuantizationConfigMixin):
    """Says that weights are kept in eight bits. modules_to_not_convert: names of modules that are not."""

    def __init__(self, modules_to_not_convert: list[str] | None = None, quant_method: str = METHOD):
        self.quant_method: Any = quant_method
        self.modules_to_not_convert = modules_to_not_convert


class Int8Quantizer(HfQuantizer):
    """Puts the classes of this file in the place of Linear and Embedding, and fills them from a checkpoint."""

    quantization_config: Int8Config

    def _process_model_before_weight_loading(self, model: Any, **_: Any) -> Any:
        """Raises ValueError for a name in `modules_to_not_convert` that no module has."""
        modules = dict(model.named_modules())
        left = self.quantization_config.modules_to_not_convert or ()
        for name in left:
            if name not in modules:
                raise ValueError(f"modules_to_not_convert: the model has no module {name!r}")

        for name, module in modules.items():
            replacement = REPLACED.get(type(module))
            if replacement is not None and len(module.weight) >= LEAST_ROWS and name not in left:
                model.set_submodule(name, replacement(module))
        self._tie_scales(model)
        return model

    def _tie_scales(self, model: Any) -> None:
        """Ties scales as their matrices are. Raises ValueError if only one of two tied matrices is converted."""
        tied = {}
        for pair in model.all_tied_weights_keys.items():
            names = [name.rpartition(".")[0] for name in pair]
            converted = [type(model.get_submodule(n)) in REPLACED.values() for n in names]
            if all(converted):
                tied[f"{pair[0]}_scale"] = f"{pair[1]}_scale"
            elif any(converted):
                raise ValueError(
                    f"modules_to_not_convert: {' and '.join(names)} are tied; name both or none"
                )
        model.all_tied_weights_keys |= tied

    def param_needs_quantization(self, model: Any, param_name: str, **_: Any) -> bool:
        module, name = get_module_from_name(model, param_name)
        return not self.pre_quantized and name == "weight" and type(module) in REPLACED.values()

    def get_quantize_ops(self) -> ConversionOps:
        return QuantizeRows(self)

    def is_serializable(self) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return False


class QuantizeRows(ConversionOps):
    """A weight of the checkpoint to codes and scales."""

    def __init__(self, hf_quantizer: HfQuantizer):
        self.hf_quantizer = hf_quantizer

    def convert(
        self, input_dict: dict[str, list[Tensor]], full_layer_name: str = "", **_: Any
    ) -> dict[str, Tensor]:
        ((weight,),) = input_dict.values()
        codes, scale = quantize_rows(weight)
        return {full_layer_name: codes, f"{full_layer_name}_scale": scale}


# A copy of this file in a checkpoint registers nothing anew.
if METHOD not in AUTO_QUANTIZER_MAPPING:
    register_quantization_config(METHOD)(Int8Config)
    register_quantizer(METHOD)(Int8Quantizer)
