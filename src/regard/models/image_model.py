"""Image models: a vision transformer with its preprocessing."""

from __future__ import annotations

from torch import Tensor, nn

from regard.config import Config
from regard.models.images import Preprocessor
from regard.models.keys import Table
from regard.models.model import Model, named
from regard.nn import VisionTransformer
from regard.nn.stack import Observations
from regard.observables import Observe

__all__ = ["ImageModel"]


class ImageModel(Model):
    """``logits = head(y_class)``, ``y = ViT(images)``: images ``[B, C, height, width]`` → ``[B, classes]``

    Without a classifier y itself, ``[B, N + 1, D]``: the class token's vector, then one a patch. ``images`` makes such
    tensors from files, pictures or arrays, as the folder's ``preprocessor_config.json`` says.

    >>> sizes = {"hidden_size": 12, "num_hidden_layers": 1, "num_attention_heads": 3, "intermediate_size": 24}
    >>> classes = {"architectures": ["ViTForImageClassification"], "id2label": {"0": "cat", "1": "dog"}}
    >>> model = regard.models.create({"model_type": "vit", "image_size": 8, "patch_size": 4, **sizes, **classes})
    >>> pictures = model.images([torch.zeros(20, 30, 3, dtype=torch.uint8).numpy()])  # any size: it is resized
    >>> pictures.shape, model(pictures).shape, model.labels
    (torch.Size([1, 3, 8, 8]), torch.Size([1, 2]), ['cat', 'dog'])
    """

    def __init__(self, config: Config, table: Table, vit: VisionTransformer, *, pooler: nn.Module | None = None):
        super().__init__(config, table)
        self.vit, self.pooler = vit, pooler
        self.images = Preprocessor(Config(), vit.image, vit.channels)

    @property
    def classifies(self) -> bool:
        """Whether there is a classifier."""
        return not isinstance(self.vit.head, nn.Identity)

    @property
    def head(self) -> nn.Module:
        """The classifier, or nothing that changes anything."""
        return self.vit.head

    def hidden(self, images: Tensor, *, observe: Observe | None = None) -> Tensor | tuple[Tensor, Observations]:
        """y ``[B, N + 1, D]``, after the last norm."""
        return named("vit.encoder", self.vit.encoder(self.vit.patch_tokens(images), observe=observe))

    def forward(self, images: Tensor, *, observe: Observe | None = None) -> Tensor | tuple[Tensor, Observations]:
        """Logits ``[B, classes]``, or y without a classifier; with ``observe`` also observations by module name."""
        result = self.hidden(images, observe=observe)
        y, seen = (result, None) if isinstance(result, Tensor) else result
        y = self.vit.head(y[:, 0]) if self.classifies else y
        return y if seen is None else (y, seen)

    def pooled(self, y: Tensor) -> Tensor:
        """``y [B, N + 1, D] → [B, D]``: the class token's vector, through the pooler if there is one."""
        return y[:, 0] if self.pooler is None else self.pooler(y[:, 0])
