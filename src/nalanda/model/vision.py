"""Image classification with transformers' interface, in the layout of DeiT (Touvron et al. 2021).

An image is cut into patches, each of them one token (`layers.PatchEmbedding`). The blocks are those of the
decoder, without a mask. The mean of all tokens is classified. There is no class token, so the tokens stay a
grid, which convolutions and landmarks need.
"""

from torch import Tensor
from transformers.modeling_outputs import ImageClassifierOutput
from transformers.utils.generic import can_return_tuple

from .configuration import NalandaConfig
from .heads import Classifier


class NalandaForImageClassification(Classifier):
    """Scores for each image, of the mean over its patches."""

    main_input_name = "pixel_values"

    def __init__(self, config: NalandaConfig):
        if config.image_size is None:
            raise ValueError(
                "image_size is not set: the model reads text; set it, and is_decoder: false"
            )
        super().__init__(config)

    @can_return_tuple
    def forward(
        self,
        pixel_values: Tensor | None = None,
        labels: Tensor | None = None,
        output_hidden_states: bool | None = None,
        interpolate_pos_encoding: bool = False,
        output_attentions: bool | None = None,
    ) -> ImageClassifierOutput:
        """Logits `[B, num_labels]` and, with labels, their loss, as in `NalandaForSequenceClassification`.

        pixel_values: `[B, num_channels, image_size, image_size]`; of another size with
        interpolate_pos_encoding, which interpolates learnt positions.

        Raises ValueError for images of another shape.
        """
        out = self.model(
            pixel_values=pixel_values,
            interpolate_pos_encoding=interpolate_pos_encoding,
            output_hidden_states=output_hidden_states,
            output_attentions=output_attentions,
        )
        logits = self.score(self.dropout(out.last_hidden_state.mean(1)))
        loss = self._loss(logits, labels)
        return ImageClassifierOutput(loss=loss, logits=logits, hidden_states=out.hidden_states)
