"""Image models: a vision transformer with its preprocessing."""

from __future__ import annotations

from torch import Tensor, nn

from regard._config_json import Config
from regard._observables import Observe
from regard.models._checkpoint_keys import KeyTable
from regard.models._images import Preprocessor
from regard.models._model import Model, prefix_observations
from regard.nn import VisionTransformer
from regard.nn._stack import Observations


class ImageModel(Model):
    """``logits = head(y_class)``, ``y = ViT(images)``: images ``[B, C, height, width]`` → ``[B, classes]``

    Without a classifier the result is y, ``[B, N + 1, D]``: the class token's vector, then one per patch.
    ``preprocessor`` makes such tensors from files, PIL images or arrays, as ``preprocessor_config.json`` describes.

    >>> sizes = {"hidden_size": 12, "num_hidden_layers": 1, "num_attention_heads": 3, "intermediate_size": 24}
    >>> classes = {"architectures": ["ViTForImageClassification"], "id2label": {"0": "cat", "1": "dog"}}
    >>> model = regard.models.create({"model_type": "vit", "image_size": 8, "patch_size": 4, **sizes, **classes})
    >>> images = model.preprocessor([torch.zeros(20, 30, 3, dtype=torch.uint8).numpy()])  # resized to 8 × 8
    >>> images.shape, model(images).shape, model.labels
    (torch.Size([1, 3, 8, 8]), torch.Size([1, 2]), ['cat', 'dog'])
    """

    def __init__(self, config: Config, keys: KeyTable, vit: VisionTransformer, *, pooler: nn.Module | None = None):
        super().__init__(config, keys)
        self.vit = vit
        self.pooler = pooler
        self.preprocessor = Preprocessor(Config(), vit.image, vit.channels)

    @property
    def classifies(self) -> bool:
        """Whether there is a classifier."""
        return not isinstance(self.vit.head, nn.Identity)

    @property
    def head(self) -> nn.Module:
        """The classifier, or ``nn.Identity``."""
        return self.vit.head

    def hidden_states(self, images: Tensor, *, observe: Observe | None = None) -> Tensor | tuple[Tensor, Observations]:
        """y ``[B, N + 1, D]``, after the last norm; with ``observe`` also observations by module name."""
        result = self.vit.encoder(self.vit.patch_tokens(images), observe=observe)
        return prefix_observations("vit.encoder", result)

    def forward(self, images: Tensor, *, observe: Observe | None = None) -> Tensor | tuple[Tensor, Observations]:
        """Logits ``[B, classes]``, or y without a classifier; with ``observe`` also observations by module name."""
        result = self.hidden_states(images, observe=observe)
        if not self.classifies:
            return result
        if isinstance(result, Tensor):
            return self.vit.head(result[:, 0])
        y, observations = result
        return self.vit.head(y[:, 0]), observations

    def pooled(self, y: Tensor) -> Tensor:
        """``y [B, N + 1, D] → [B, D]``: the class token's vector, through the pooler if there is one."""
        if self.pooler is None:
            return y[:, 0]
        return self.pooler(y[:, 0])
