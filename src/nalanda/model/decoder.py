"""The decoder: pre-norm blocks of a token mixer and a GLU, with transformers' interface.

`Decoder.forward` has three steps: `describe` a batch, `run` the layers, `finish`.
"""

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers import initialization as init
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.utils.generic import can_return_tuple

from .base import CarriedState, LayerState
from .cache import CACHE, NalandaCache, one_cache
from .configuration import NalandaConfig
from .context import Context, Parts
from .epilogues import add_norm, glu_of_few_rows, swiglu
from .int8 import Int8Config  # noqa: F401 (its import tells transformers of the class)
from .layers import (
    PatchEmbedding,
    RMSNorm,
    ShortConv,
    altered,
    any_observed,
    on_host,
    rotary_angles,
)
from .mixers import build_mixer, uncut_mixers
from .plugins import load_copies
from .precision import check_state_dtype, pack_state, packed_spec, unpack_state
from .projections import FusedLinears, apply_linear
from .sequences import Layout, Packing, Sequences, foreign_bounds, only_tokens
from .width import Growth, growths


@dataclass
class DecoderOutput(BaseModelOutputWithPast):
    carried_cache: NalandaCache | None = None
    """State of each row's last document, if requested."""


@dataclass
class Batch:
    """A batch as `Decoder.describe` understands it; no layer asks for masks or caches again."""

    x: Tensor
    """Embeddings `[B, T, D]`."""
    layout: Layout
    seq: Sequences
    states: list[Any] = field(default_factory=list)
    """Each layer's state, replaced by `run`; empty if no layer reads or returns one."""
    cache: NalandaCache | None = None
    """The cache that holds these states."""
    carries: bool = False
    """Whether the states are those of rows, for the next call."""
    hidden_states: list[Tensor] | None = None
    """The input of each layer `[B, T, D]`, if requested."""

    def columns(self, x: Tensor) -> Tensor:
        """What layers hand on, as `[B, T, D]` with zeros in the place of padding."""
        if self.seq.layout is None:
            return self.layout.unpack(x)
        return self.layout.without_padding(x)


class GLU(FusedLinears):
    """W_down(SiLU(W_gate x) ⊙ W_up x)."""

    def __init__(self, hidden_size: int, intermediate_size: int, bias: bool = False):
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=bias)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=bias)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=bias)

    def linears(self) -> dict[str, nn.Linear]:
        return {"gate": self.gate_proj, "up": self.up_proj}

    def forward(self, x: Tensor) -> Tensor:
        heads = self.project(x)
        return apply_linear(self.down_proj, swiglu(heads["gate"], heads["up"]))


class Block(GradientCheckpointingLayer):
    """x + mixer(norm x), then x + GLU(norm x)."""

    def __init__(self, config: NalandaConfig, layer_idx: int):
        super().__init__()
        self.mixer_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mixer = build_mixer(config.layer_mixers[layer_idx], config, layer_idx)
        self.mlp_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mlp = GLU(config.hidden_size, config.intermediate_size, config.use_bias)
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self, x: Tensor, seq: Sequences, state: LayerState | CarriedState | None = None
    ) -> tuple[Tensor, LayerState | CarriedState | None]:
        x, h = add_norm(x, None, self.mixer_norm)
        y, state = self.mixer(h, seq, state)
        # Calls without an effect would slow decoding.
        drops = self.dropout.training or altered(self.dropout)
        if drops:
            y = self.dropout(y)

        # Another module in its place runs as it is.
        if type(self.mlp) is GLU and not drops:
            finished = glu_of_few_rows(x, y, self.mlp_norm, self.mlp)
            if finished is not None:
                return finished, state

        # The residual sum and its norm, by one kernel where one serves.
        x, h = add_norm(x, y, self.mlp_norm)
        y = self.mlp(h)
        if drops:
            y = self.dropout(y)
        return x + y, state


class NalandaPreTrainedModel(PreTrainedModel):
    config_class = NalandaConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules: ClassVar = ["Block"]
    _supports_sdpa = True  # prevents a warning of transformers

    def __init__(self, config: NalandaConfig):
        config.check_types()  # `from_pretrained` sets its keywords after the config has checked itself
        super().__init__(config)

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path, *args, config=None, trust_remote_code=None, **kwargs
    ):
        """transformers'. With trust_remote_code, plugins that cannot be imported come from the checkpoint."""
        name = pretrained_model_name_or_path
        if trust_remote_code:
            keys = ("cache_dir", "local_files_only", "revision", "token")
            hub = {key: kwargs[key] for key in keys if key in kwargs}
            named = config or NalandaConfig.from_pretrained(name, **hub)
            load_copies(getattr(named, "plugins", ()), str(name), **hub)
        kwargs |= {"config": config, "trust_remote_code": trust_remote_code}
        return super().from_pretrained(name, *args, **kwargs)

    @classmethod
    def maybe_distribute_model(cls, model, distributed_config, mesh_manager):
        """transformers', before weights are read.

        Raises ValueError for heads that cannot be split, and for its pipelines: their stages pass the head's
        arguments on to the decoder.
        """
        if distributed_config is not None:
            model.config.check_tensor_parallel(distributed_config.tp_size)
            if distributed_config.pp_size > 1:
                raise ValueError(
                    f"pp_size={distributed_config.pp_size}: transformers' pipelines do not serve this model; "
                    "set it to 1, or use tp_size"
                )
        return super().maybe_distribute_model(model, distributed_config, mesh_manager)

    @property
    def has_other_loss(self) -> bool:
        """Whether somebody set a `loss_function`, on the model or in a subclass, in place of the model's loss."""
        inherited = type(self).loss_function is PreTrainedModel.loss_function
        return not inherited or hasattr(self, "_loss_function")

    def post_init(self) -> None:
        for name, growth in growths(self).items():
            self.get_submodule(name).growth = growth  # pyrefly: ignore[bad-argument-type]
        super().post_init()

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Initialises a module; `init` skips parameters that a checkpoint has filled.

        Any other class must define `initial()`, which returns its values, or `reset_parameters()`.
        Raises ValueError if a parameter or buffer would remain uninitialised memory.
        """
        std = self.config.initializer_range
        width_factor = getattr(module, "growth", Growth()).deviation()
        if isinstance(module, nn.Linear):
            if self.config.initializer == "xavier":
                init.xavier_uniform_(module.weight, gain=getattr(module, "gain", 1.0))
            else:
                init.normal_(module.weight, mean=0.0, std=std * width_factor)
            if module.bias is not None:
                init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            scaled = self.config.scale_embeddings  # times √D their variance is 1
            init.normal_(module.weight, mean=0.0, std=module.embedding_dim**-0.5 if scaled else std)
        elif isinstance(module, RMSNorm):
            init.constant_(module.weight, width_factor)
        elif isinstance(module, ShortConv):
            # A depthwise filter sums few inputs, not `hidden_size`: at std 0.02 the values would be smaller
            # than the epsilon of the norm after the recurrence.
            bound = module.weight[0].numel() ** -0.5
            init.uniform_(module.weight, -bound, bound)

        elif isinstance(module, nn.LayerNorm):
            init.ones_(module.weight)
            init.zeros_(module.bias)
        elif callable(initial := getattr(module, "initial", None)):
            values = initial()
            for name, value in values.items():
                init.copy_(getattr(module, name), value)
            self._refuse_unset(module, set(values))
        elif callable(reset := getattr(module, "reset_parameters", None)):
            reset()
        else:
            self._refuse_unset(module, set())

    @staticmethod
    def _refuse_unset(module: nn.Module, names_set: set[str]) -> None:
        tensors = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
        unset = [
            name
            for name, x in tensors
            if name not in names_set and not getattr(x, "_is_hf_initialized", False)
        ]
        if unset:
            raise ValueError(
                f"nothing sets {', '.join(unset)} of {type(module).__name__}: give the class a method "
                "initial() that returns the first values by name"
            )


class Decoder(NalandaPreTrainedModel):
    """Embedding, blocks, final norm: token ids `[B, T]`, or images, to hidden states `[B, T, D]`."""

    def __init__(self, config: NalandaConfig):
        super().__init__(config)
        if config.image_size is None:
            self.embed_tokens: nn.Module = nn.Embedding(config.vocab_size, config.hidden_size)
        else:
            self.embed_tokens = PatchEmbedding(
                config.num_channels,
                config.image_size,
                config.patch_size,
                config.hidden_size,
                learnt=config.position_embedding == "learnt",
            )
        self.layers = nn.ModuleList(Block(config, i) for i in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.dropout = nn.Dropout(config.dropout)
        self.gradient_checkpointing = False
        self.post_init()

    def growing_mixers(self) -> list[str]:
        """Names of the layers' mixers whose state grows with the text."""
        mixers: list[Any] = [layer.mixer for layer in self.layers]
        named = zip(
            self.config.layer_mixers, mixers, strict=False
        )  # of a draft's, the first are in use
        return [name for name, mixer in named if mixer.state_spec(1) != mixer.state_spec(2)]

    def is_observed(self) -> bool:
        """Whether code from outside sees what the layers, or the norm behind them, hand on."""
        return any_observed((self.layers, self.norm, self.dropout))

    def check_carries(self) -> None:
        """Raises ValueError if the state of a layer grows with the text, which carried states cannot."""
        for name in self.growing_mixers():
            raise ValueError(
                f"mixer {name!r}: its state grows with the text and cannot pass between rows; give "
                "it a window, or cut long documents"
            )

    def _check_rows(self, packing: Packing, cache: NalandaCache | None, B: int) -> None:
        carried_cache, carried = packing.carried_cache, packing.carried
        if cache is not None:
            raise ValueError("give carried_cache or cache, not both")
        if carried is not None and (carried.dtype != torch.bool or carried.shape != (B,)):
            raise ValueError(
                f"carried must be bool [{B}], one for each row, got {carried.dtype} {list(carried.shape)}"
            )
        if carried_cache is None:
            if carried is not None and bool(carried.any()):
                raise ValueError(
                    "carried: rows continue, but there is no carried_cache; give that of the previous call"
                )
            return
        if not isinstance(carried_cache, NalandaCache):
            raise ValueError(
                f"carried_cache must be that of an earlier output, got {type(carried_cache).__name__}"
            )
        if carried is None:
            raise ValueError("carried_cache needs carried, bool [B]: which rows continue theirs")
        if len(carried_cache) != len(self.layers) or carried_cache.batch_size != B:
            raise ValueError(
                f"carried_cache holds {len(carried_cache)} layers of {carried_cache.batch_size} rows, "
                f"the model has {len(self.layers)} and the input {B}"
            )

    def _check_cache(self, cache: NalandaCache, B: int) -> None:
        if not isinstance(cache, NalandaCache):
            raise ValueError(
                f"cache must be a NalandaCache, got {type(cache).__name__}: leave it out, or give "
                f"NalandaCache({len(self.layers)}); prefix tuning has no keys and values to train here, "
                "LoRA and prompt tuning work"
            )
        if cache.being_read:
            raise ValueError(
                "an earlier call with this cache failed between two layers: begin with a new cache"
            )
        if cache.is_initialized and cache.batch_size != B:
            raise ValueError(f"cache holds {cache.batch_size} sequences, the input has {B} rows")
        # A draft by the first layers lowers num_hidden_layers, and may have a cache of its own.
        if not self.config.num_hidden_layers <= len(cache) <= len(self.layers):
            raise ValueError(f"cache has {len(cache)} layers, the model {len(self.layers)}")
        check_state_dtype(cache.state_dtype, self.config)
        first: Any = self.layers[0]
        names = packed_spec(first.mixer.state_spec(1), cache.state_dtype).keys()
        if cache.is_initialized and cache.states[0].keys() != names:
            raise ValueError(
                f"cache does not fit: its first layer holds {', '.join(cache.states[0])}, the "
                f"model's {', '.join(names)}"
            )

    def _check_cut(self, cache: NalandaCache | None, packing: Packing) -> None:
        if any(x is not None for x in (cache, packing.attention_mask, packing.position_ids)):
            raise ValueError(
                "rows that are cut over processes take cu_seqlens and carried_cache: give no cache, "
                "attention_mask or position_ids"
            )
        for name in uncut_mixers(self.config):
            raise ValueError(f"mixer {name!r} does not serve rows that are cut over processes")

    @can_return_tuple
    def forward(  # noqa: PLR0913 (transformers' own signature)
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: NalandaCache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        cu_seqlens: Tensor | None = None,
        carried_cache: NalandaCache | None = None,
        carried: Tensor | None = None,
        return_carried_cache: bool = False,
        context: Context | None = None,
        output_attentions: bool | None = None,
        pixel_values: Tensor | None = None,
        interpolate_pos_encoding: bool = False,
        past_key_values: NalandaCache | None = None,
        **foreign: Any,
    ) -> DecoderOutput:
        """As `NalandaForCausalLM.forward`, without the head: `last_hidden_state` `[B, T, D]`, after the norm.

        pixel_values: images `[B, C, H, W]`, in place of tokens; see `PatchEmbedding` for
        interpolate_pos_encoding.

        `hidden_states`, if requested: the embeddings and each block's output; `last_hidden_state` replaces
        the last block's.
        """
        if output_attentions:
            raise ValueError("output_attentions: not supported; a mixer's `weights` returns them")
        cu_seqlens = foreign_bounds(cu_seqlens, foreign)
        packing = Packing(
            attention_mask,
            position_ids,
            cu_seqlens,
            carried_cache,
            carried,
            return_carried_cache,
            context,
        )
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states

        x, grid = self._embed(
            input_ids, inputs_embeds, pixel_values, interpolate_pos_encoding, context
        )
        cache = one_cache(cache, past_key_values)
        with on_host():
            batch = self.describe(x, grid, cache, use_cache, packing)
            batch.hidden_states = [] if output_hidden_states else None
            return self.finish(batch, self.run(batch))

    def describe(
        self,
        x: Tensor,
        grid: tuple[int, int] | None,
        cache: NalandaCache | None,
        use_cache: bool | None,
        packing: Packing,
    ) -> Batch:
        """Decides of which kind a batch is. Below it no layer knows a mask.

        x: embeddings `[B, T, D]`; grid: rows and columns of the patches, for images.

        Raises ValueError for inputs that do not fit each other.
        """
        if not self.config.is_decoder:
            if packing.context is not None or packing.carries or use_cache or cache is not None:
                raise ValueError(
                    "is_decoder is false: an encoder has no states, caches or contexts"
                )
            return self._encoder_batch(x, grid, packing)

        # Before the carried rows: parts of rows may carry states too.
        if packing.context is not None:
            self._check_cut(cache, packing)
            return self._part_of_rows(x, packing.context, packing)

        if packing.carries:
            self.check_carries()
            self._check_rows(packing, cache, len(x))
            return self._carried_rows(x, packing)

        if cache is not None:
            self._check_cache(cache, len(x))
            return self._cached_batch(x, cache, packing)

        return self._plain_batch(x, use_cache, packing)

    def _encoder_batch(self, x: Tensor, grid: tuple[int, int] | None, packing: Packing) -> Batch:
        """Texts or images whose tokens see both ways."""
        described = packing.attention_mask, packing.position_ids, packing.cu_seqlens
        if grid is not None and any(x is not None for x in described):
            raise ValueError("images have no attention_mask, position_ids or cu_seqlens")
        layout = Layout(x, packing)
        seq = Sequences(layout.cu_seqlens, device=x.device, bidirectional=True, grid=grid)
        return Batch(x, layout, seq)

    def _part_of_rows(self, x: Tensor, context: Context, packing: Packing) -> Batch:
        """This process's part of rows that are cut over a context; x `[B, T/N, D]`."""
        B, T = len(x), x.shape[1] * context.size
        if packing.carries:  # a context reads one text: its states may grow
            self._check_rows(packing, None, B)

        parts = Parts(context, B, T, packing.cu_seqlens, packing.carried, packing.tokens_read)
        layout = Layout.of_bounds(x, parts.cu_seqlens)
        seq = Sequences(layout.cu_seqlens, parts.past, parts.rows, x.device, parts=parts)
        return Batch(x, layout, seq, self._carried_states(x, packing), carries=packing.carries)

    def _carried_rows(self, x: Tensor, packing: Packing) -> Batch:
        """Packed rows, whose first documents may continue those of earlier rows."""
        layout = Layout(x, packing)
        rows, past = layout.rows(packing.carried, packing.tokens_read)
        seq = Sequences(layout.cu_seqlens, past, rows, x.device)
        return Batch(x, layout, seq, self._carried_states(x, packing), carries=True)

    def _cached_batch(self, x: Tensor, cache: NalandaCache, packing: Packing) -> Batch:
        """Tokens after those that the cache holds."""
        cache.follow(x.dtype)
        past, mask = cache.lengths, packing.attention_mask
        # In decoding, where the mask then says nothing. A graph has none, and its counts are on the device.
        if mask is not None and x.shape[1] == 1 and only_tokens(mask, past, 1):
            packing = replace(packing, attention_mask=None)

        layout = Layout(x, packing)
        if layout.packed:
            raise ValueError(
                "packed documents have no cache: call with use_cache=False and without cache"
            )
        # Embeddings, not ids: the tokens that `crop` keeps are read again from them.
        cache.record(x, layout.mask)
        seq = Sequences(layout.cu_seqlens, past, None, x.device, cache.static)
        return Batch(x, layout, seq, cache.states, cache)

    def _plain_batch(self, x: Tensor, use_cache: bool | None, packing: Packing) -> Batch:
        """A decoder's batch with nothing before it; with `use_cache` a cache for tokens after it."""
        if use_cache is None:
            use_cache = self.config.use_cache and not self.training

        mask = packing.attention_mask
        only_mask = mask is not None and packing.position_ids is None and packing.cu_seqlens is None
        # A compiled graph cannot drop padding, whose number is a value; it moves it to the end.
        if only_mask and not use_cache and torch.compiler.is_compiling():
            layout = Layout.padding_last(x, mask)
        else:
            layout = Layout(x, packing)

        seq = Sequences(layout.cu_seqlens, device=x.device)
        # A cache has states of rows; those of packed documents are none.
        if layout.packed or not use_cache:
            return Batch(x, layout, seq)
        cache = NalandaCache(len(self.layers))
        return Batch(x, layout, seq, cache.states, cache)

    def _carried_states(self, x: Tensor, packing: Packing) -> list[CarriedState]:
        """Each layer's state of the rows to continue, empty if none continues."""
        if not packing.carries:
            return []
        carried_cache, carried = packing.carried_cache, packing.carried
        if carried_cache is not None and carried is not None and bool(carried.any()):
            carried_cache.follow(x.dtype)
            return [CarriedState(tensors) for tensors in carried_cache.states]
        return [CarriedState({}) for _ in self.layers]

    def run(self, batch: Batch) -> Tensor:
        """The layers in turn, then the norm. Replaces the batch's states.

        Returns hidden states as layers hand them on: `[B, T, D]`, or packed `[1, ΣT, D]` where rows are padded. Where
        code from outside sees a layer's inputs or outputs, all are `[B, T, D]`.
        """
        layout, seq = batch.layout, batch.seq
        # Packed before fixed positions are added: these count within documents.
        x = self.scaled(layout.pack(batch.x), seq)
        if layout.moves and self.is_observed():
            seq.layout, x = layout, layout.unpack(x)
        x = self.dropout(x)
        state_dtype = "float32" if batch.cache is None else batch.cache.state_dtype

        if batch.cache is not None:
            batch.cache.being_read = True

        # transformers' early exit lowers num_hidden_layers for drafts
        for i, layer in zip(range(self.config.num_hidden_layers), self.layers, strict=False):
            if batch.hidden_states is not None:
                batch.hidden_states.append(batch.columns(x))
                # What is returned has a gradient too.
                x = batch.hidden_states[-1]
                x = layout.pack(x) if seq.layout is None else x

            state: Any = batch.states[i] if batch.states else None
            if state_dtype != "float32":
                state = unpack_state(state, x.dtype)
            x, state = layer(x, seq, state)
            if batch.states:
                batch.states[i] = pack_state(state, state_dtype)

        return add_norm(x, None, self.norm)[1]

    def finish(self, batch: Batch, x: Tensor) -> DecoderOutput:
        """Returns hidden states to the batch's columns, with the states after its last tokens.

        x: of `run`.
        """
        # Columns count padding, as attention masks do; lengths count tokens alone.
        if batch.cache is not None:
            B, T = batch.x.shape[:2]
            dense = batch.seq.cu_seqlens is None
            batch.cache.seen(T, torch.full((B,), T) if dense else batch.seq.lengths)
            batch.cache.being_read = False

        x = batch.columns(x)
        hidden = batch.hidden_states
        return DecoderOutput(
            last_hidden_state=x,
            hidden_states=None if hidden is None else (*hidden, x),
            carried_cache=self._ended(batch.states, batch.seq) if batch.carries else None,
            **{CACHE: batch.cache},  # pyrefly: ignore[bad-argument-type]
        )

    def _embed(
        self,
        input_ids: Tensor | None,
        inputs_embeds: Tensor | None,
        pixel_values: Tensor | None,
        interpolate_pos_encoding: bool,
        context: Context | None,
    ) -> tuple[Tensor, tuple[int, int] | None]:
        """Embeddings `[B, T, D]`, of this process's part of the rows; images come with their grid."""
        reads_images = self.config.image_size is not None
        if reads_images != (pixel_values is not None):
            wanted = "images: give pixel_values" if reads_images else "tokens: give input_ids"
            raise ValueError(f"image_size={self.config.image_size}: the model reads {wanted}")
        if sum(x is not None for x in (input_ids, inputs_embeds, pixel_values)) != 1:
            raise ValueError("give either input_ids or inputs_embeds")

        if reads_images:
            return self.embed_tokens(pixel_values, interpolate_pos_encoding)

        if input_ids is not None:
            if not isinstance(input_ids, Tensor):
                raise ValueError(f"input_ids must be a tensor, got {type(input_ids).__name__}")
            if input_ids.dim() != 2 or input_ids.is_floating_point():
                kind = str(input_ids.dtype).removeprefix("torch.")
                raise ValueError(
                    f"input_ids must be integers [batch, length], got {kind} {list(input_ids.shape)}"
                )
            ids = input_ids if context is None else context.part(input_ids)
            return self.embed_tokens(ids), None

        x: Any = inputs_embeds
        width = self.config.hidden_size
        if not isinstance(x, Tensor):
            raise ValueError(f"inputs_embeds must be a tensor, got {type(x).__name__}")
        if x.dim() != 3 or x.shape[2] != width:
            raise ValueError(f"inputs_embeds must be [batch, length, {width}], got {list(x.shape)}")
        return x if context is None else context.part(x), None

    def scaled(self, x: Tensor, seq: Sequences) -> Tensor:
        """What the first layer reads: embeddings at their scale, with fixed positions."""
        if self.config.scale_embeddings:
            x = x * self.config.hidden_size**0.5
        if self.config.position_embedding == "sinusoidal":
            positions = seq.positions(x.shape[1], x.device)
            # [B or 1, T, D/2]
            angles = rotary_angles(positions, self.config.hidden_size, 10000.0, x.dtype)
            x = x + torch.cat([angles.sin(), angles.cos()], -1).to(x.dtype)
        return x

    def _ended(self, states: list[CarriedState], seq: Sequences) -> NalandaCache:
        """The states of the rows' last documents, after this call."""
        assert seq.rows is not None
        ended = NalandaCache(len(self.layers))
        ended.states = [state.tensors for state in states]
        if seq.parts is None:
            lengths = seq.ends[seq.rows.last]
        else:
            lengths = seq.parts.lengths  # of whole rows, which no part sees
        ended.seen(int(lengths.max()), lengths)
        return ended
