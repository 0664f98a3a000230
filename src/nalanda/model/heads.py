"""Heads other than the language model's: transformers' conventions over the decoder's hidden states."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.modeling_outputs import (
    MaskedLMOutput,
    MultipleChoiceModelOutput,
    QuestionAnsweringModelOutput,
    SequenceClassifierOutput,
    TokenClassifierOutput,
)
from transformers.utils.generic import can_return_tuple

from .configuration import NalandaConfig
from .decoder import Decoder, NalandaPreTrainedModel
from .language import LanguageModel
from .layers import at_least_fp32
from .loss import mean_over
from .sequences import Layout, Packing, foreign_bounds


class NalandaForMaskedLM(LanguageModel):
    """An encoder with a language-model head: each token's logits, from the tokens on both sides."""

    def __init__(self, config: NalandaConfig):
        if config.is_decoder:
            raise ValueError(
                "is_decoder is true: tokens see none behind them; load AutoModelForCausalLM"
            )
        super().__init__(config)

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        cu_seqlens: Tensor | None = None,
        num_items_in_batch: int | Tensor | None = None,
        z_loss: float = 0.0,
        output_attentions: bool | None = None,
        **foreign: Any,
    ) -> MaskedLMOutput:
        """Logits `[B, T, vocab]` and, with labels, their loss.

        As `NalandaForCausalLM.forward`, but labels `[B, T]` are those of the tokens in the same place, not
        shifted; −100 is ignored. In training mode with labels `logits` is None: the head reads only the
        tokens that have one. Without a label in the batch the loss is 0.
        """
        out = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            output_hidden_states=output_hidden_states,
            cu_seqlens=cu_seqlens,
            output_attentions=output_attentions,
            **foreign,
        )
        h = out.last_hidden_state  # [B, T, D]

        loss, all_logits = None, self._logits_for_loss(h, labels)
        if labels is not None:
            labels = self._checked_labels(labels, h, h.shape[1])
            if attention_mask is not None:
                labels = labels.masked_fill(attention_mask.to(h.device) == 0, -100)
            count = num_items_in_batch

            if self.has_other_loss:
                loss = self._other_loss(all_logits, labels, count, {"z_loss": z_loss})
            else:
                masked = labels != -100  # bool [B, T]
                targets = labels[masked]
                logits = None if all_logits is None else all_logits[masked]
                total = self._summed_loss(h[masked], logits, targets, z_loss)
                loss = mean_over(total, len(targets) if count is None else count)

        logits = self._logits(h, all_logits, loss, slice(None))
        return MaskedLMOutput(loss=loss, logits=logits, hidden_states=out.hidden_states)


class Classifier(NalandaPreTrainedModel):
    """The decoder with a linear head of `config.num_labels` scores."""

    accepts_loss_kwargs = False

    def __init__(self, config: NalandaConfig):
        super().__init__(config)
        self.num_labels: int = self.scores_of(config)
        self.model = Decoder(config)
        self.dropout = nn.Dropout(config.dropout)
        self.score = nn.Linear(config.hidden_size, self.num_labels)
        self.post_init()

    @staticmethod
    def scores_of(config: NalandaConfig) -> int:
        """How many scores the head has."""
        return config.num_labels  # pyrefly: ignore[bad-return]

    def _loss(self, logits: Tensor, labels: Tensor | None) -> Tensor | None:
        """transformers' loss of these labels, by `config.problem_type`."""
        if labels is None:
            return None
        logits = at_least_fp32(logits)
        return self.loss_function(
            logits=logits, pooled_logits=logits, labels=labels, config=self.config
        )


class TextReader:
    """What heads over texts do alike before their scores."""

    config: NalandaConfig
    model: Decoder

    def read_text(
        self,
        input_ids: Tensor | None,
        attention_mask: Tensor | None,
        position_ids: Tensor | None,
        cu_seqlens: Tensor | None,
        use_cache: bool | None,
        foreign: dict[str, Any],
        **options: Any,
    ) -> tuple[Any, Packing]:
        """The decoder's output, and the packing that it was given.

        foreign: keywords of other libraries. options: other arguments of `Decoder.forward`.
        """
        if use_cache:
            raise ValueError("use_cache: a classifier returns no cache; leave it out")
        cu_seqlens = foreign_bounds(cu_seqlens, foreign)
        packed = cu_seqlens is not None or (
            position_ids is not None and bool((position_ids.diff(dim=-1) != 1).any())
        )
        if input_ids is not None and attention_mask is None and not packed:
            attention_mask = self._mask_of(input_ids)

        packing = Packing(attention_mask, position_ids, cu_seqlens)
        out = self.model(
            input_ids,
            attention_mask,
            position_ids,
            cu_seqlens=cu_seqlens,
            use_cache=False,
            **options,
        )
        return out, packing

    def _mask_of(self, input_ids: Tensor) -> Tensor | None:
        """bool `[B, T]`: all tokens up to the last one of a row that is no padding."""
        if self.config.pad_token_id is None:
            return None
        real = (input_ids != self.config.pad_token_id).int()
        return real.flip(1).cummax(1).values.flip(1).bool()  # the running maximum from the right


class TextClassifier(TextReader, Classifier):
    """A `Classifier` of tokens. A subclass names its output's class, and pools the states that get scores."""

    output: type

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        output_hidden_states: bool | None = None,
        cu_seqlens: Tensor | None = None,
        output_attentions: bool | None = None,
        use_cache: bool | None = None,
        **foreign: Any,
    ) -> Any:
        """Logits and, with labels, their loss. The inputs are those of `NalandaForCausalLM.forward`.

        Where neither a mask nor a packing is given, the pad ids at the end of a row are padding. use_cache is
        accepted because trainers pass it; True is refused.
        """
        out, packing = self.read_text(
            input_ids,
            attention_mask,
            position_ids,
            cu_seqlens,
            use_cache,
            foreign,
            inputs_embeds=inputs_embeds,
            output_hidden_states=output_hidden_states,
            output_attentions=output_attentions,
        )
        logits = self.score(self.dropout(self._pool(out.last_hidden_state, packing)))
        loss = self._loss(logits, labels)
        return self.output(loss=loss, logits=logits, hidden_states=out.hidden_states)

    def _pool(self, h: Tensor, packing: Packing) -> Tensor:
        """The states that get scores, from `[B, T, D]`."""
        raise NotImplementedError


class NalandaForSequenceClassification(TextClassifier):
    """Scores for each sequence, of the mean over an encoder's tokens, or of a decoder's last token.

    Logits `[N, num_labels]`; the loss is of regression, single- or multi-label classification, by
    `config.problem_type` or the labels' dtype and number. N is the number of rows, or of documents where
    cu_seqlens or position_ids say that rows are packed.

    Raises ValueError for a sequence without a token, and for several rows of a decoder without a mask, a
    packing and a pad_token_id.
    """

    output = SequenceClassifierOutput

    def _mask_of(self, input_ids: Tensor) -> Tensor | None:
        if self.config.is_decoder and self.config.pad_token_id is None and len(input_ids) > 1:
            raise ValueError(
                "pad_token_id is not set: a batch does not say where its rows end; give attention_mask, or "
                "set config.pad_token_id"
            )
        return super()._mask_of(input_ids)

    def _pool(self, h: Tensor, packing: Packing) -> Tensor:
        """States `[N, D]`: an encoder's mean over each sequence, a decoder's last token."""
        layout = Layout(h, packing)
        if layout.cu_seqlens is None:
            return h[:, -1] if self.config.is_decoder else h.mean(1)

        lengths = layout.cu_seqlens.diff().to(h.device)  # [N]
        real = layout.pack(h)[0]  # [ΣT, D], the tokens without padding
        if bool((layout.cu_seqlens.diff() == 0).any()):
            raise ValueError("a sequence without a token has no class: leave it out")
        if self.config.is_decoder:
            return real[lengths.cumsum(0) - 1]

        sequence = torch.arange(len(lengths), device=h.device).repeat_interleave(lengths)  # [ΣT]
        sums = at_least_fp32(real.new_zeros(len(lengths), h.shape[-1]))  # [N, D]
        sums.index_add_(0, sequence, real.to(sums.dtype))
        return (sums / lengths[:, None]).to(h.dtype)


class NalandaForTokenClassification(TextClassifier):
    """Scores for each token: logits `[B, T, num_labels]`, labels `[B, T]`; −100 is ignored."""

    output = TokenClassifierOutput

    def _pool(self, h: Tensor, packing: Packing) -> Tensor:
        return h


class NalandaForMultipleChoice(NalandaForSequenceClassification):
    """A score for each of several texts: logits `[B, choices]`, labels `[B]`, the right choice of each row.

    The score is of the mean over an encoder's tokens, or of a decoder's last token.
    """

    @staticmethod
    def scores_of(config: NalandaConfig) -> int:
        return 1

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        **options: Any,
    ) -> MultipleChoiceModelOutput:
        """Logits and, with labels, their cross-entropy.

        input_ids, attention_mask, position_ids: `[B, choices, T]`; inputs_embeds: `[B, choices, T, D]`. options:
        as for `NalandaForSequenceClassification`. Raises ValueError for inputs of another shape.
        """
        inputs = {"input_ids": input_ids, "attention_mask": attention_mask}
        inputs |= {"position_ids": position_ids, "inputs_embeds": inputs_embeds}
        inputs = {name: x for name, x in inputs.items() if x is not None}
        for name, x in inputs.items():
            if x.dim() != (4 if name == "inputs_embeds" else 3):
                raise ValueError(f"{name} must be [batch, choices, length], got {list(x.shape)}")

        tokens = inputs_embeds if input_ids is None else input_ids
        if tokens is None:
            raise ValueError("give either input_ids or inputs_embeds")

        choices = tokens.shape[1]
        texts = {name: x.flatten(0, 1) for name, x in inputs.items()}
        out = super().forward(**texts, **options, return_dict=True)
        logits = out.logits.view(-1, choices)
        loss = None
        if labels is not None and self.has_other_loss:
            loss = self.loss_function(logits=logits, labels=labels, config=self.config)
        elif labels is not None:
            loss = F.cross_entropy(at_least_fp32(logits), labels.to(logits.device))
        return MultipleChoiceModelOutput(loss=loss, logits=logits, hidden_states=out.hidden_states)


class NalandaForQuestionAnswering(TextReader, NalandaPreTrainedModel):
    """Where an answer begins and ends in a text: start_logits and end_logits `[B, T]`, of each column."""

    accepts_loss_kwargs = False

    def __init__(self, config: NalandaConfig):
        super().__init__(config)
        self.model = Decoder(config)
        self.qa_outputs = nn.Linear(config.hidden_size, 2)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        start_positions: Tensor | None = None,
        end_positions: Tensor | None = None,
        output_hidden_states: bool | None = None,
        cu_seqlens: Tensor | None = None,
        output_attentions: bool | None = None,
        use_cache: bool | None = None,
        **foreign: Any,
    ) -> QuestionAnsweringModelOutput:
        """Logits and, with both positions, the mean of their cross-entropies.

        start_positions, end_positions: int64 `[B]`, columns; one outside the text is ignored. The other inputs are
        those of `NalandaForTokenClassification`.
        """
        out, _ = self.read_text(
            input_ids,
            attention_mask,
            position_ids,
            cu_seqlens,
            use_cache,
            foreign,
            inputs_embeds=inputs_embeds,
            output_hidden_states=output_hidden_states,
            output_attentions=output_attentions,
        )
        scores = self.qa_outputs(out.last_hidden_state)  # [B, T, 2]
        start_logits, end_logits = (x.contiguous() for x in scores.unbind(-1))
        loss = None
        if start_positions is not None and end_positions is not None:
            starts, ends = at_least_fp32(start_logits), at_least_fp32(end_logits)
            loss = self.loss_function(starts, ends, start_positions, end_positions)
        return QuestionAnsweringModelOutput(
            loss=loss,
            start_logits=start_logits,
            end_logits=end_logits,
            hidden_states=out.hidden_states,
        )
