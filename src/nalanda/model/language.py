"""The language model: the decoder with a head over the vocabulary, its loss, generation and reading."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GenerationMixin
from transformers.generation.configuration_utils import GenerationMode
from transformers.generation.streamers import BaseStreamer
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils.generic import can_return_tuple

from .cache import CACHE, NalandaCache, cache_of, one_cache
from .configuration import NalandaConfig
from .context import Context
from .decoder import Decoder, NalandaPreTrainedModel
from .decoding import choose_decoder, current_choice
from .executors import LayerExecutors, executors
from .layers import at_least_fp32
from .loss import Distillation, linear_cross_entropy, mean_over
from .plans import GATHERED
from .precision import check_state_dtype
from .projections import apply_linear, matrix_of
from .sequences import Packing, foreign_bounds, next_tokens
from .state import State, check_prompt, check_state


@dataclass
class CausalLMOutput(CausalLMOutputWithPast):
    carried_cache: NalandaCache | None = None
    """State of each row's last document, if requested."""


class LanguageModel(NalandaPreTrainedModel):
    """The decoder with a head over the vocabulary, and its loss."""

    _tied_weights_keys: ClassVar = {"lm_head.weight": "model.embed_tokens.weight"}
    _tp_plan: ClassVar = {"lm_head": GATHERED}
    accepts_loss_kwargs = True

    def __init__(self, config: NalandaConfig):
        super().__init__(config)
        self.model = Decoder(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def _checked_labels(self, labels: Tensor, h: Tensor, T: int) -> Tensor:
        """Labels `[B, T]` as int64 on the device of h `[B, ·, D]`. Raises ValueError for other labels."""
        if not isinstance(labels, Tensor):
            raise ValueError(f"labels must be a tensor, got {type(labels).__name__}")
        integers = not (
            labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool
        )
        if not integers or labels.shape != (len(h), T):
            raise ValueError(
                f"labels must be integers of the input's shape {[len(h), T]}, "
                f"got {labels.dtype} {list(labels.shape)}"
            )

        V = self.config.vocab_size
        # Labels on a device are not read, since that would wait for the device.
        if labels.device.type == "cpu" and not torch.compiler.is_compiling():
            outside = labels[((labels < 0) & (labels != -100)) | (labels >= V)]
            if len(outside):
                raise ValueError(
                    f"label {int(outside[0])}: give token ids from 0 to {V - 1}, or -100 for none"
                )

        return labels.to(h.device, torch.int64)

    def _logits_for_loss(self, h: Tensor, labels: Tensor | None) -> Tensor | None:
        """The head's logits of all columns of h `[B, T, D]`; None where no loss needs them.

        A loss does where the head is more than a matrix in memory (an adapter, a hook, a quantised or an offloaded
        weight), and where somebody set a `loss_function`.
        """
        needs_logits = matrix_of(self.lm_head) is None or self.has_other_loss
        return self.lm_head(h) if labels is not None and needs_logits else None

    def _logits(
        self, h: Tensor, all_logits: Tensor | None, loss: Tensor | None, columns: slice | Tensor
    ) -> Tensor | None:
        """The logits of some columns; None in training with the model's own loss.

        all_logits: of `_logits_for_loss`.
        """
        if self.training and loss is not None and not self.has_other_loss:
            return None
        if all_logits is not None:
            return all_logits[:, columns]
        return apply_linear(self.lm_head, h[:, columns])

    def _summed_loss(
        self,
        h: Tensor,
        logits: Tensor | None,
        targets: Tensor,
        z_loss: float,
        teacher: Distillation | None = None,
    ) -> Tensor:
        """`linear_cross_entropy` of hidden states `[…, D]`, or the same of the head's logits `[…, V]`."""
        h, targets = h.flatten(0, -2), targets.flatten()  # [M, D], [M]
        if logits is None:
            weight = self.lm_head.weight
            return linear_cross_entropy(h, weight, targets, z_loss=z_loss, teacher=teacher)
        if teacher is not None:
            raise ValueError(
                "distillation: the head must be a matrix in memory, without an adapter"
            )
        logits = at_least_fp32(logits.flatten(0, -2))
        total = F.cross_entropy(logits, targets, reduction="sum")
        if z_loss:
            squares = z_loss * logits[targets != -100].logsumexp(-1).square().sum()
            # The gradient alone: the value stays the cross-entropy.
            total = total + squares - squares.detach()
        return total

    def _other_loss(
        self,
        logits: Tensor | None,
        labels: Tensor | None,
        count: int | Tensor | None,
        requests: dict[str, Any],
        **shifted: Tensor,
    ) -> Tensor:
        """The `loss_function` that somebody set, of all logits, called as by transformers' models.

        requests: those that only the model's own loss serves, by name. Raises ValueError if one of them is given.
        """
        for name, value in requests.items():
            if value:
                raise ValueError(f"{name}: the loss_function that was set does not take it")
        keywords = shifted if count is None else shifted | {"num_items_in_batch": count}
        size = self.config.vocab_size
        return self.loss_function(logits=logits, labels=labels, vocab_size=size, **keywords)


def _positions(logits_to_keep: int | Tensor) -> slice | Tensor:
    """The index of the last n positions, or of the given ones; 0: of all."""
    if isinstance(logits_to_keep, int):
        if logits_to_keep < 0:
            raise ValueError(f"logits_to_keep={logits_to_keep}: give 0 for all, or the last n")
        return slice(-logits_to_keep, None)
    return logits_to_keep


class _WithoutFirst(BaseStreamer):
    """Drops the first token: it is the state's last, already shown."""

    def __init__(self, streamer: BaseStreamer):
        self.streamer, self.tokens_to_drop = streamer, 1

    def put(self, value: Tensor) -> None:
        self.streamer.put(value[..., self.tokens_to_drop :])
        self.tokens_to_drop = 0

    def end(self) -> None:
        self.streamer.end()


class NalandaForCausalLM(LanguageModel, GenerationMixin):
    """The decoder with a language-model head."""

    def __init__(self, config: NalandaConfig):
        if not config.is_decoder:
            raise ValueError(
                "is_decoder is false: tokens see the next one; load AutoModelForMaskedLM"
            )
        super().__init__(config)

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False

    def _prepare_cache_for_generation(
        self,
        generation_config,
        model_kwargs: dict,
        generation_mode,
        batch_size: int,
        *args,
        **kwargs,
    ) -> None:
        # pyrefly: ignore[bad-argument-type]
        super()._prepare_cache_for_generation(
            generation_config, model_kwargs, generation_mode, batch_size, *args, **kwargs
        )
        cache = model_kwargs.get(CACHE)
        if cache is None and generation_config.use_cache:
            cache = NalandaCache(self.config.num_hidden_layers)
        elif isinstance(cache, NalandaCache):
            # transformers would read the ids behind the cache once more, for any model.
            if cache.seen_tokens and generation_mode == GenerationMode.ASSISTED_GENERATION:
                raise ValueError(
                    "assisted decoding and prompt lookup start with an empty cache; "
                    "to go on after a text, pass state=model.read(ids) and the new ids"
                )
            copies = max(
                generation_config.num_beams or 1, generation_config.num_return_sequences or 1
            )
            # `generate` repeats only the prompt's rows.
            if copies > 1 and cache.batch_size == batch_size:
                cache = cache.fork()
                cache.batch_repeat_interleave(copies)
        else:
            return
        # Drafts may be cropped. A cache of an earlier call may still record for that.
        cache.recording = bool(generation_config.is_assistant)
        model_kwargs[CACHE] = cache

    def executors(self) -> list[LayerExecutors]:
        """The executor of each kind of layer, for sequences and for one token, and why it is not a faster one.

        A layer of each kind runs on the model's device, in its dtype. Printed, each is a line.
        """
        return executors(self)

    @torch.no_grad()
    def read(
        self,
        input_ids: Tensor,
        *,
        attention_mask: Tensor | None = None,
        state: State | None = None,
        state_dtype: str | None = None,
        chunk_size: int = 2048,
        context: Context | None = None,
    ) -> State:
        """The state after reading a text. It can be saved, and continued any number of times.

        input_ids: `[B, T]`; attention_mask: `[B, T]`, zeros are padding, on the left.
        state: the state of the text before, which is not changed; a state of one row serves all B.
        state_dtype: float32, bfloat16, int8 or fp8, see `precision.py`; None: that of `state`, else float32.
        chunk_size: tokens read at once. It bounds memory for any T (except the states of layers that keep
            every token), and does not change the result, unless states are rounded: they are after each chunk.
        context: processes that read the text together, each calling with all of it; all get the state.

        Raises ValueError for an empty text, padding on the right, a state that does not fit, or a chunk_size
        below 1.
        """
        if type(chunk_size) is not int or chunk_size < 1:
            raise ValueError(f"chunk_size={chunk_size!r} must be an integer from 1 on")
        check_state_dtype(state_dtype, self.config)
        cache = NalandaCache(self.config.num_hidden_layers)
        if state is not None:
            check_state(state)
            cache, input_ids, attention_mask = state.resumed(self, input_ids, attention_mask)
        check_prompt(input_ids, attention_mask)
        cache.convert(state_dtype)
        # A copy: the state outlives the caller's ids.
        last_token = input_ids[:, -1:].to(torch.int64, copy=True)

        if attention_mask is not None:
            # On the host, so that a piece of one column is not taken for a token.
            attention_mask = attention_mask.cpu()
            if not bool(attention_mask[:, -1].all()):
                raise ValueError("a state ends with its last token: pad on the left")

        if context is not None:
            if attention_mask is not None and not bool(attention_mask.all()):
                raise ValueError(
                    "processes cannot share texts with padding: read each length apart"
                )
            attention_mask = None
            # Equal parts first; each process then reads the few tokens left itself.
            cache = self._read_parts(cache, input_ids[:, :-1], chunk_size, context)
            shared = (input_ids.shape[1] - 1) // context.size * context.size
            input_ids = input_ids[:, shared:]  # the rest, which cannot be cut equally

        # All but the last token: reading that one predicts the next.
        with choose_decoder(self):
            for start in range(0, input_ids.shape[1] - 1, chunk_size):
                piece = slice(start, min(start + chunk_size, input_ids.shape[1] - 1))
                ids = input_ids[:, piece]
                mask = None if attention_mask is None else attention_mask[:, piece]
                # A short piece is read as `generate` decodes it.
                if self._decode_piece(ids, mask, cache) is None:
                    self.model(input_ids=ids, attention_mask=mask, cache=cache)
        return State(self, cache, last_token)

    def _read_parts(
        self, cache: NalandaCache, input_ids: Tensor, chunk_size: int, context: Context
    ) -> NalandaCache:
        """Reads as many tokens as can be cut equally, in pieces of `chunk_size` a process."""
        end = input_ids.shape[1] // context.size * context.size
        state_dtype = cache.state_dtype
        states = None if cache.lengths is None else cache.convert("float32")
        for piece in input_ids[:, :end].split(chunk_size * context.size, 1):
            if piece.shape[1]:
                # bool [B], the same for all rows: only the first piece may have no text before it.
                carried = torch.full((len(piece),), states is not None)
                states = self.model(
                    input_ids=piece,
                    context=context,
                    carried_cache=states,
                    carried=carried,
                    return_carried_cache=True,
                ).carried_cache
        return (cache if states is None else states).convert(state_dtype)

    def load_state(self, path: str | Path, tokenizer: str | None = None) -> State:
        """`State.load(path, self, tokenizer)`."""
        return State.load(path, self, tokenizer)

    def generate(
        self,
        inputs: Tensor | None = None,
        *args,
        state: State | None = None,
        state_dtype: str | None = None,
        **kwargs,
    ):
        """transformers' `generate`, optionally continuing a state with `inputs` or directly.

        The state is not changed. A state of one row serves all rows of `inputs`; attention_mask is that of
        `inputs`. Returns `inputs` and the new tokens, which a streamer gets too. Logits processors, prompt
        lookup and `max_length` see these and the state's last token, not the text before. On CUDA it decodes
        by CUDA graphs (`decoding.py`), on a CPU by C++ (`program.py`). state_dtype: as for `read`.
        """
        foreign_bounds(None, {"token_type_ids": kwargs.pop("token_type_ids", None)})
        check_state_dtype(state_dtype, self.config)
        cache = one_cache(kwargs.pop("cache", None), kwargs.pop("past_key_values", None))
        if state is None:
            if state_dtype is not None:
                cache = cache or NalandaCache(self.config.num_hidden_layers)
                cache.convert(state_dtype)
            if cache is not None:
                kwargs[CACHE] = cache
            return self._generate_from_prompt(inputs, *args, **kwargs)

        if kwargs.get("inputs_embeds") is not None:
            raise ValueError("a state continues with input_ids, not inputs_embeds")
        if cache is not None or kwargs.get("use_cache") is False:
            name = "use_cache=False" if cache is None else "cache"
            raise ValueError(f"a state is a cache: leave {name} out")
        check_state(state)

        # The state's last token is read first: it predicts the next one.
        ids, mask = kwargs.pop("input_ids", inputs), kwargs.pop("attention_mask", None)
        cache, ids, mask = state.resumed(self, ids, mask)
        cache.convert(state_dtype)
        cache.seen_tokens = 0  # `generate` counts tokens from the start of this call
        mask = torch.ones_like(ids) if mask is None else mask
        kwargs |= {"attention_mask": mask, CACHE: cache, "use_cache": True}
        if kwargs.get("streamer") is not None:
            kwargs["streamer"] = _WithoutFirst(kwargs["streamer"])

        with choose_decoder(self):
            out: Any = super().generate(ids, *args, **kwargs)  # pyrefly: ignore[bad-argument-type]
        if isinstance(out, Tensor):
            return out[:, 1:]  # without the state's last token
        out.sequences = out.sequences[:, 1:]
        # So that the cache counts these tokens when they are continued.
        cache_of(out).seen_tokens -= 1
        return out

    def _generate_from_prompt(self, inputs: Tensor | None, *args, **kwargs):
        prompt = kwargs.get("inputs_embeds")
        if prompt is None:
            prompt = kwargs.get("input_ids", inputs)
        if prompt is not None:
            cached = kwargs.get(CACHE) is not None
            check_prompt(prompt, kwargs.get("attention_mask"), cached=cached)
        with choose_decoder(self):
            return super().generate(inputs, *args, **kwargs)  # pyrefly: ignore[bad-argument-type]

    def prepare_inputs_for_generation(
        self, input_ids, *args, inputs_embeds: Tensor | None = None, tokenizer: Any = None, **kwargs
    ) -> dict:
        """Drops the tokenizer that `generate` passes on where it has stop strings. `generate` takes
        inputs_embeds only where they are named here."""
        kwargs |= {"inputs_embeds": inputs_embeds}
        # pyrefly: ignore[bad-argument-type]
        return super().prepare_inputs_for_generation(input_ids, *args, **kwargs)

    @property
    def init_continuous_batching(self):
        """Unsupported, as it pages keys and values. `transformers serve` then serves requests in turn."""
        raise AttributeError

    def __getattr__(self, name: str) -> Any:
        # Python asks here, where a property raised AttributeError.
        if name == "init_continuous_batching":
            raise AttributeError(
                "continuous batching pages keys and values, which this model does not have: call generate "
                "with a padded batch, or serve the model with vLLM"
            )
        return super().__getattr__(name)

    def _mark_before(
        self,
        cache: NalandaCache,
        keep: int | Tensor,
        attention_mask: Tensor | None,
        *columns: Tensor | None,
    ) -> tuple[Tensor | None, ...]:
        """Reads all but the last `keep` columns of (input_ids, inputs_embeds, …), marks, returns the rest.

        `crop` may remove only positions after the first one with requested logits. keep: a number of columns; 0, or a
        tensor of positions, stands for all.
        """
        if isinstance(keep, int) and keep:
            ids, embeddings = (None if x is None else x[:, :-keep] for x in columns[:2])
            mask = None if attention_mask is None else attention_mask[:, :-keep]
            if any(x is not None and x.shape[1] for x in (ids, embeddings)):
                self.model(
                    input_ids=ids, inputs_embeds=embeddings, attention_mask=mask, cache=cache
                )
            columns = tuple(None if x is None else x[:, -keep:] for x in columns)

        cache.mark(self.model)
        return columns

    @can_return_tuple
    def forward(  # noqa: PLR0913 (transformers' own signature)
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: NalandaCache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        cu_seqlens: Tensor | None = None,
        num_items_in_batch: int | Tensor | None = None,
        z_loss: float = 0.0,
        distillation: Distillation | None = None,
        carried_cache: NalandaCache | None = None,
        carried: Tensor | None = None,
        return_carried_cache: bool = False,
        context: Context | None = None,
        output_attentions: bool | None = None,
        past_key_values: NalandaCache | None = None,
        **foreign: Any,
    ) -> CausalLMOutput:
        """Next-token logits and, with labels, their loss.

        input_ids: `[B, T]`, or inputs_embeds `[B, T, D]`.
        attention_mask: `[B, T]`, or with a cache `[B, past + T]`; zeros are padding, on either side. In
            one-token decoding a mask on the GPU is ignored: checking it would synchronise. Masks on the CPU
            are read.
        cu_seqlens: int `[N+1]`, bounds in the B·T tokens of documents that must not see each other, best on
            the host. position_ids that restart are equivalent.
        labels: `[B, T]`, aligned with input_ids (shifted here). −100 is ignored, and so are padding and the
            first token of a row or document, which nothing predicts.
        num_items_in_batch: the divisor of the summed loss; by default the number of labels not ignored. It
            must count none of those either. Without a label the loss is 0.
        z_loss: the weight of the mean of logsumexp(logits)² in the loss's gradient; its value leaves it out.
        distillation: a teacher's next tokens for these rows; like z_loss, it changes the gradient alone.
        logits_to_keep: the last n positions, or the given positions; 0 for all.
        carried_cache: that of an earlier call's output, for documents that continue in the same row; only for
            states of constant size. The output then has one too, a detached NalandaCache of B sequences with
            the states of the rows' last documents (truncated backpropagation through time).
        carried: bool `[B]`, best on the host: whether the row's first document continues its carried state and
            its count of tokens. Other rows start empty.
        return_carried_cache: whether to return `carried_cache` without being given any.
        context: the processes that share these rows, each calling with the same whole rows (`context.py`).
            Logits and hidden states are of this process's part `[B, T/N]`, and the loss is the part's share:
            that of the rows is the sum over the processes.
        output_attentions: accepted because PEFT passes it; True is refused.
        past_key_values: cache, under its name in transformers before 5.24.
        foreign: `shift_labels`, `[B, T]`, in place of labels: already the next tokens, of which only −100 is
            ignored. (Trainer demands of every batch what the signature calls labels.) Others are keywords
            of other libraries, as `sequences.foreign_bounds` takes them.

        In training mode with labels `logits` is None: the loss is computed in blocks without all logits. A
        `loss_function` that somebody set is called as in transformers' models, with all logits, which are
        returned; it takes no z_loss, distillation or context.

        Raises ValueError for labels, a mask, a packing or a cache that does not fit the batch.
        """
        shift_labels = foreign.pop("shift_labels", None)
        cu_seqlens = foreign_bounds(cu_seqlens, foreign)
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        beside = (inputs_embeds, labels, shift_labels, cu_seqlens, carried_cache, carried)
        more_outputs = output_hidden_states or return_carried_cache or None
        cache = one_cache(cache, past_key_values)
        decoded = self._decode_piece(
            input_ids, attention_mask, cache, *beside, more_outputs, keep=logits_to_keep
        )
        if decoded is not None:
            return decoded

        # Columns without requested logits come before the mark: `crop` never removes them.
        if isinstance(cache, NalandaCache) and cache.waits_for_mark:
            every = output_hidden_states or any(x is not None for x in (labels, shift_labels))
            keep = 0 if every else logits_to_keep
            input_ids, inputs_embeds, position_ids = self._mark_before(
                cache, keep, attention_mask, input_ids, inputs_embeds, position_ids
            )

        out = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=cache,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            output_hidden_states=output_hidden_states,
            cu_seqlens=cu_seqlens,
            carried_cache=carried_cache,
            carried=carried,
            return_carried_cache=return_carried_cache,
            context=context,
            output_attentions=output_attentions,
        )
        h = out.last_hidden_state  # [B, T, D], or [B, T/N, D] of this process's part
        loss = None
        packing = Packing(attention_mask, position_ids, cu_seqlens, context=context)
        targets = self._targets(h, labels, shift_labels, packing)
        all_logits = self._logits_for_loss(h, targets)

        if targets is not None and self.has_other_loss:
            requests = {"z_loss": z_loss, "distillation": distillation, "context": context}
            shifted = {}
            if shift_labels is not None:
                shifted["shift_labels"] = targets
            elif labels is not None:
                # [B, T], −100 too where nothing predicts a token.
                labels = torch.cat([labels[:, :1].to(targets), targets[:, :-1]], 1)
            loss = self._other_loss(all_logits, labels, num_items_in_batch, requests, **shifted)
        elif targets is not None:
            # Of whole rows, before they are cut: the parts' shares add up to the mean.
            count = (targets != -100).sum() if num_items_in_batch is None else num_items_in_batch
            if context is not None:
                targets = context.part(targets)
            total = self._summed_loss(h, all_logits, targets, z_loss, distillation)
            loss = mean_over(total, count)

        logits = self._logits(h, all_logits, loss, _positions(logits_to_keep))

        return CausalLMOutput(
            loss=loss,
            logits=logits,
            hidden_states=out.hidden_states,
            carried_cache=out.carried_cache,
            **{CACHE: cache_of(out)},
        )

    def _decode_piece(
        self,
        input_ids: Tensor | None,
        attention_mask: Tensor | None,
        cache: NalandaCache | None,
        *beside: NalandaCache | Tensor | bool | None,
        keep: int | Tensor = 0,
    ) -> CausalLMOutput | None:
        """A few tokens of each row, by a decoder of whole tokens (`decoding.py`); None if none serves the call.

        beside: other inputs and requests of the call; with one of them no decoder serves. Decoders have
        buffers for tokens, lengths and states alone.
        """
        choice = None if torch.compiler.is_compiling() else current_choice()
        if choice is None or any(x is not None for x in beside):
            return None
        if input_ids is None or not isinstance(cache, NalandaCache):
            return None

        logits = choice.decode(self, input_ids, cache, attention_mask)  # [B, T, vocabulary]
        if logits is None:
            return None
        # pyrefly: ignore[bad-argument-type]
        return CausalLMOutput(logits=logits[:, _positions(keep)], **{CACHE: cache})

    def _targets(
        self, h: Tensor, labels: Tensor | None, shift_labels: Tensor | None, packing: Packing
    ) -> Tensor | None:
        """The next tokens `[B, T]` of whole rows, −100 where there is none; None without labels."""
        T = h.shape[1] * (1 if packing.context is None else packing.context.size)
        if shift_labels is not None:
            return self._checked_labels(shift_labels, h, T)
        if labels is not None:
            return next_tokens(self._checked_labels(labels, h, T), packing)
        return None


# transformers' Trainer smooths labels of the classes that it lists here against the token before.
MODEL_FOR_CAUSAL_LM_MAPPING_NAMES["nalanda"] = NalandaForCausalLM.__name__
