"""Image classification with transformers' interface, in the layout of DeiT (Touvron et al. 2021).

An image is cut into patches, each of them one token (`layers.PatchEmbedding`). The blocks are those of the
decoder, without a mask. The mean of all tokens is classified. There is no class token, so the tokens stay a
grid, which convolutions and landmarks need.
"""

from torch import Tensor, nn
from transformers.modeling_outputs import ImageClassifierOutput
from transformers.utils.generic import can_return_tuple

from .configuration import NalandaConfig
from .modeling import Decoder, NalandaPreTrainedModel


class NalandaForImageClassification(NalandaPreTrainedModel):
    """The encoder of patches with a linear classifier of their mean."""

    main_input_name = "pixel_values"

    def __init__(self, config: NalandaConfig):
        super().__init__(config)
        if config.image_size is None:
            raise ValueError("image_size is not set: the model reads text; set it, and is_decoder: false")
        self.model = Decoder(config)
        self.classifier = nn.Linear(config.hidden_size, config.num_labels or 0)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        pixel_values: Tensor | None = None,
        labels: Tensor | None = None,
        output_hidden_states: bool | None = None,
        interpolate_pos_encoding: bool = False,
        output_attentions: bool | None = None,
    ) -> ImageClassifierOutput:
        """Logits `[B, num_labels]` and, with labels, their loss.

        pixel_values: `[B, num_channels, image_size, image_size]`; of another size with
        interpolate_pos_encoding, which interpolates learnt positions.
        labels: `[B]` of classes for cross-entropy; num_labels and problem_type choose other losses, as in all
        classifiers of transformers.
        output_attentions: True is refused.

        Raises ValueError for images of another shape.
        """
        if output_attentions:
            raise ValueError("output_attentions: not supported; a mixer's `weights` returns them")
        out = self.model(
            pixel_values=pixel_values,
            output_hidden_states=output_hidden_states,
            interpolate_pos_encoding=interpolate_pos_encoding,
        )
        logits = self.classifier(out.last_hidden_state.mean(1))
        loss = None if labels is None else self.loss_function(labels, logits, self.config)
        return ImageClassifierOutput(loss=loss, logits=logits, hidden_states=out.hidden_states)
