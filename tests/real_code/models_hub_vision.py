"""KerasHub's backbones of vision, and those of several kinds of input, tiny and without weights."""

from typing import Any

import numpy as np

from tests.real_code.cases import Ready, case, classes, images
from tests.real_code.models_hub import VOCABULARY, with_head

SQUARE = {"image_shape": (32, 32, 3)}
DROPPED = {"dropout_rate": 0.1, "attention_dropout": 0.1}
RESNET = {
    "input_conv_filters": [64],
    "input_conv_kernel_sizes": [3],
    "stackwise_num_filters": [64, 64],  # it takes no fewer
    "stackwise_num_blocks": [1, 1],
    "stackwise_num_strides": [1, 2],
} | SQUARE
MIT = {
    "layerwise_depths": [1, 1],
    "num_layers": 2,
    "layerwise_num_heads": [1, 2],
    "layerwise_sr_ratios": [2, 1],
    "max_drop_path_rate": 0.1,
    "layerwise_patch_sizes": [7, 3],
    "layerwise_strides": [4, 2],
    "hidden_dims": [8, 16],
} | SQUARE
DINO = {"patch_size": 8, "num_layers": 2, "hidden_dim": 16, "num_heads": 2, "intermediate_dim": 24} | SQUARE

# The class without "Backbone", and what it is made with.
BACKBONES: dict[str, dict[str, Any]] = {
    "ViT": {"patch_size": 8, "num_layers": 2, "num_heads": 2, "hidden_dim": 16, "mlp_dim": 24} | SQUARE | DROPPED,
    "SwinTransformer": {"embed_dim": 8, "depths": [2, 2], "num_heads": [2, 2], "window_size": 4, "drop_path": 0.1}
    | SQUARE | DROPPED,
    "MiT": MIT,
    "DINOV3": DINO | {"attention_dropout": 0.1},
    "ResNet v2": RESNET | {"block_type": "bottleneck_block", "use_pre_activation": True},
    "VideoPrism": {"num_frames": 3, "patch_size": 8, "hidden_dim": 16, "intermediate_dim": 24, "num_heads": 2,
                   "num_spatial_layers": 1, "num_temporal_layers": 1, "num_auxiliary_layers": 0,
                   "dropout_rate": 0.1, "attention_dropout_rate": 0.1} | SQUARE,
    "PaliGemma": {"vocabulary_size": VOCABULARY, "image_size": 16, "num_layers": 2, "num_query_heads": 2,
                  "num_key_value_heads": 1, "hidden_dim": 16, "intermediate_dim": 24, "head_dim": 8,
                  "vit_patch_size": 8, "vit_num_heads": 2, "vit_hidden_dim": 8, "vit_num_layers": 1, "dropout": 0.1},
    "Flux": {"input_channels": 4, "hidden_size": 16, "mlp_ratio": 2.0, "num_heads": 2, "depth": 1,
             "depth_single_blocks": 1, "axes_dim": [4, 4], "theta": 100, "use_bias": True, "image_shape": (6, 4),
             "text_shape": (5, 8), "image_ids_shape": (6, 2), "text_ids_shape": (5, 2), "y_shape": (8,)},
}  # fmt: skip


def register(name: str, choices: dict[str, Any]) -> None:
    @case("KerasHub, vision", f"hub {name}")
    def make(random: np.random.RandomState) -> Ready:
        import keras_hub

        return with_head(getattr(keras_hub.models, f"{name.split()[0]}Backbone")(**choices), random)


for key, value in BACKBONES.items():
    register(key, value)


@case("KerasHub, generative", "hub VAE")
def vae(random: np.random.RandomState) -> Ready:
    """Its outputs are the images, by way of a sample of the latent space."""
    from keras_hub.src.models.vae.vae_backbone import VAEBackbone

    filters = {"encoder_num_filters": [32, 32], "decoder_num_filters": [32, 32]}
    blocks = {"encoder_num_blocks": [1, 1], "decoder_num_blocks": [1, 1]}
    x = images(random, 16)
    backbone = VAEBackbone(**filters, **blocks, sample_channels=4, image_shape=(16, 16, 3))
    return Ready(model=backbone, x=x, y=x, loss="mean_squared_error")


@case("KerasHub, vision", "hub RetinaNet")
def retinanet(random: np.random.RandomState) -> Ready:
    """The pyramid of features."""
    import keras_hub

    encoder = keras_hub.models.ResNetBackbone(**RESNET | {"block_type": "basic_block"})
    choices = {"min_level": 2, "max_level": 4, "use_p5": False, "use_fpn_batch_norm": True, "image_shape": (32, 32, 3)}
    return with_head(keras_hub.models.RetinaNetBackbone(image_encoder=encoder, **choices), random)


@case("KerasHub, contrastive", "hub CLIP")
def clip(random: np.random.RandomState) -> Ready:
    """Each image against each text of the global batch."""
    import keras
    import keras_hub
    from keras_hub.src.models.clip.clip_text_encoder import CLIPTextEncoder
    from keras_hub.src.models.clip.clip_vision_encoder import CLIPVisionEncoder

    sizes = {"hidden_dim": 16, "num_layers": 1, "num_heads": 2, "intermediate_dim": 24}
    backbone = keras_hub.models.CLIPBackbone(
        vision_encoder=CLIPVisionEncoder(patch_size=8, image_shape=(32, 32, 3), **sizes),
        text_encoder=CLIPTextEncoder(vocabulary_size=VOCABULARY, embedding_dim=16, max_sequence_length=12, **sizes),
        projection_dim=8,
    )
    x = {"images": images(random), "token_ids": random.randint(1, VOCABULARY, (18, 12)).astype("int32")}

    def loss(y_true: Any, similarities: Any) -> Any:
        """Row i of the similarities belongs to column i."""
        labels = keras.ops.arange(keras.ops.shape(similarities)[0])
        return keras.losses.sparse_categorical_crossentropy(labels, similarities, from_logits=True)

    return Ready(model=backbone, x=x, y={name: classes(random) for name in backbone.output}, loss=loss)
