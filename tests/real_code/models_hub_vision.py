"""KerasHub's backbones of vision, and those of several kinds of input, tiny and without weights."""

from typing import Any

import numpy as np

from tests.real_code.cases import CLASSES, Ready, case, classes, images
from tests.real_code.models_hub import VOCABULARY, with_head

SQUARE = {"image_shape": (32, 32, 3)}
TRANSFORMER = {"patch_size": 8, "num_layers": 2, "num_heads": 2, "hidden_dim": 16, "intermediate_dim": 24}
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
MOBILE = {
    "stackwise_expansion": [[16], [24, 24]],
    "stackwise_num_blocks": [1, 2],
    "stackwise_num_filters": [[8], [16, 16]],
    "stackwise_kernel_size": [[3], [5, 3]],
    "stackwise_num_strides": [[2], [2, 1]],
    "stackwise_se_ratio": [[None], [0.25, 0.25]],
    "stackwise_activation": [["relu"], ["hard_swish", "hard_swish"]],
    "stackwise_padding": [[1], [2, 1]],
    "output_num_filters": 24,
    "depthwise_filters": 8,
    "depthwise_stride": 2,
    "depthwise_residual": False,
    "last_layer_filter": 24,
    "squeeze_and_excite": 0.5,
    "input_num_filters": 8,
} | SQUARE
MOBILE_V5 = {
    "stackwise_block_types": [["er"], ["uir", "mqa"]],
    "stackwise_num_blocks": [1, 2],
    "stackwise_num_filters": [[8], [16, 16]],
    "stackwise_strides": [[2], [2, 1]],
    "stackwise_act_layers": [["relu"], ["gelu", "gelu"]],
    "stackwise_exp_ratios": [[2.0], [2.0, 2.0]],
    "stackwise_se_ratios": [[0.0], [0.0, 0.0]],
    "stackwise_dw_kernel_sizes": [[0], [3, 0]],
    "stackwise_dw_start_kernel_sizes": [[0], [3, 0]],
    "stackwise_dw_end_kernel_sizes": [[0], [0, 0]],
    "stackwise_exp_kernel_sizes": [[3], [0, 0]],
    "stackwise_pw_kernel_sizes": [[1], [0, 0]],
    "stackwise_num_heads": [[0], [0, 2]],
    "stackwise_key_dims": [[0], [0, 8]],
    "stackwise_value_dims": [[0], [0, 8]],
    "stackwise_kv_strides": [[0], [0, 1]],
    "stackwise_use_cpe": [[False], [False, False]],
    "use_msfa": False,
    "drop_path_rate": 0.1,
} | SQUARE

# The class without "Backbone", and what it is made with.
BACKBONES: dict[str, dict[str, Any]] = {
    "ViT": {"patch_size": 8, "num_layers": 2, "num_heads": 2, "hidden_dim": 16, "mlp_dim": 24} | SQUARE | DROPPED,
    "DeiT": TRANSFORMER | SQUARE | DROPPED,
    "SwinTransformer": {"embed_dim": 8, "depths": [2, 2], "num_heads": [2, 2], "window_size": 4, "drop_path": 0.1}
    | SQUARE | DROPPED,
    "MiT": MIT,
    "DINOV2": DINO | {"position_embedding_shape": (32, 32, 3), "dropout_rate": 0.1},
    "DINOV3": DINO | {"attention_dropout": 0.1},
    "ViTDet": {"hidden_size": 16, "num_layers": 2, "intermediate_dim": 24, "num_heads": 2, "patch_size": 8,
               "global_attention_layer_indices": [1], "num_output_channels": 8, "window_size": 2} | SQUARE,
    "ResNet": RESNET | {"block_type": "basic_block"},
    "ResNet v2": RESNET | {"block_type": "bottleneck_block", "use_pre_activation": True},
    "ResNet vd": RESNET | {"block_type": "basic_block_vd", "input_conv_filters": [8, 64],
                           "input_conv_kernel_sizes": [3, 3]},
    "DenseNet": {"stackwise_num_repeats": [2, 2], "growth_rate": 4} | SQUARE,
    "EfficientNet": {"stackwise_kernel_sizes": [3, 3], "stackwise_num_repeats": [1, 2],
                     "stackwise_input_filters": [8, 8], "stackwise_output_filters": [8, 16],
                     "stackwise_expansion_ratios": [1, 2], "stackwise_squeeze_and_excite_ratios": [0.25, 0.25],
                     "stackwise_strides": [1, 2], "stackwise_block_types": ["v1", "v1"], "input_shape": (32, 32, 3),
                     "stackwise_width_coefficients": [1.0, 1.0], "stackwise_depth_coefficients": [1.0, 1.0],
                     "num_features": 24},
    "MobileNet": MOBILE,
    "MobileNetV5": MOBILE_V5,
    "VGG": {"stackwise_num_repeats": [1, 1], "stackwise_num_filters": [8, 16]} | SQUARE,
    "Xception": {"stackwise_conv_filters": [[8, 8], [8, 16], [16, 16]], "stackwise_pooling": [True, True, False]}
    | SQUARE,
    "CSPNet": {"stem_filters": 8, "stem_kernel_size": 3, "stem_strides": 1, "stackwise_depth": [1, 1],
               "stackwise_strides": [1, 2], "stackwise_num_filters": [8, 16], "block_type": "dark_block",
               "stage_type": "dark"} | SQUARE,
    "HGNetV2": {"depths": [1, 1], "embedding_size": 8, "hidden_sizes": [8, 16], "stem_channels": [3, 4, 8],
                "hidden_act": "relu", "use_learnable_affine_block": True,
                "stackwise_stage_filters": [(8, 4, 8, 1, 1, 3), (8, 4, 16, 1, 1, 3)],
                "apply_downsample": [False, True], "use_lightweight_conv_block": [False, True]} | SQUARE,
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


@case("KerasHub, vision", "hub SegFormer")
def segformer(random: np.random.RandomState) -> Ready:
    import keras_hub

    encoder = keras_hub.models.MiTBackbone(**MIT)
    return with_head(keras_hub.models.SegFormerBackbone(image_encoder=encoder, projection_filters=8), random)


def deeplab_backbone() -> Any:
    """Returns a DeepLabV3 backbone on a ResNet."""
    import keras_hub

    encoder = keras_hub.models.ResNetBackbone(**RESNET | {"block_type": "basic_block"})
    return keras_hub.models.DeepLabV3Backbone(
        image_encoder=encoder,
        spatial_pyramid_pooling_key="P3",
        low_level_feature_key="P2",
        upsampling_size=2,
        dilation_rates=[1, 2],
        projection_filters=8,
        image_shape=(32, 32, 3),
    )


@case("KerasHub, vision", "hub DeepLabV3")
def deeplab(random: np.random.RandomState) -> Ready:
    backbone = deeplab_backbone()
    return with_head(backbone, random)


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
    import keras_hub
    from keras_hub.src.models.clip.clip_text_encoder import CLIPTextEncoder
    from keras_hub.src.models.clip.clip_vision_encoder import CLIPVisionEncoder

    sizes = {"hidden_dim": 16, "num_layers": 1, "num_heads": 2, "intermediate_dim": 24}
    backbone = keras_hub.models.CLIPBackbone(
        vision_encoder=CLIPVisionEncoder(patch_size=8, image_shape=(32, 32, 3), **sizes),
        text_encoder=CLIPTextEncoder(vocabulary_size=VOCABULARY, embedding_dim=16, max_sequence_length=12, **sizes),
        projection_dim=8,
    )
    return contrastive(backbone, random)


@case("KerasHub, contrastive", "hub SigLIP")
def siglip(random: np.random.RandomState) -> Ready:
    """Each image against each text of the global batch."""
    import keras_hub
    from keras_hub.src.models.siglip.siglip_text_encoder import SigLIPTextEncoder
    from keras_hub.src.models.siglip.siglip_vision_encoder import SigLIPVisionEncoder

    sizes = {"hidden_dim": 16, "num_layers": 1, "num_heads": 2, "intermediate_dim": 24}
    backbone = keras_hub.models.SigLIPBackbone(
        vision_encoder=SigLIPVisionEncoder(patch_size=8, image_shape=(32, 32, 3), **sizes),
        text_encoder=SigLIPTextEncoder(vocabulary_size=VOCABULARY, embedding_dim=16, max_sequence_length=12, **sizes),
    )
    return contrastive(backbone, random)


def contrastive(backbone: Any, random: np.random.RandomState) -> Ready:
    x = {"images": images(random), "token_ids": random.randint(1, VOCABULARY, (18, 12)).astype("int32")}
    y = {name: classes(random) for name in backbone.output}
    return Ready(model=backbone, x=x, y=y, loss=diagonal_loss())


def diagonal_loss() -> Any:
    """Row i of the similarities belongs to column i."""
    import keras

    def loss(y_true: Any, similarities: Any) -> Any:
        labels = keras.ops.arange(keras.ops.shape(similarities)[0])
        return keras.losses.sparse_categorical_crossentropy(labels, similarities, from_logits=True)

    return loss


@case("KerasHub, vision", "hub SAM")
def sam(random: np.random.RandomState) -> Ready:
    """Image, points, boxes and masks; its outputs are masks and how good they are."""
    import keras
    import keras_hub

    size = 64
    backbone = keras_hub.models.SAMBackbone(
        image_encoder=keras_hub.models.ViTDetBackbone(
            **{"hidden_size": 16, "num_layers": 2, "intermediate_dim": 24, "num_heads": 2, "patch_size": 16},
            **{"global_attention_layer_indices": [1], "num_output_channels": 8, "window_size": 2},
            image_shape=(size, size, 3),
        ),
        prompt_encoder=keras_hub.layers.SAMPromptEncoder(
            hidden_size=8, image_embedding_size=(4, 4), input_image_size=(size, size), mask_in_channels=16
        ),
        mask_decoder=keras_hub.layers.SAMMaskDecoder(
            **{"num_layers": 2, "hidden_size": 8, "intermediate_dim": 16, "num_heads": 2, "embedding_dim": 8},
            **{"num_multimask_outputs": CLASSES, "iou_head_depth": 2, "iou_head_hidden_dim": 8},
        ),
        dtype=keras.config.floatx(),
    )
    x = {
        "images": images(random, size),
        "points": (random.rand(18, 1, 2) * size).astype("float32"),
        "labels": np.ones((18, 1), "float32"),
        "boxes": (random.rand(18, 1, 2, 2) * size).astype("float32"),
        "masks": random.rand(18, 1, 16, 16, 1).astype("float32"),
    }
    task = keras_hub.models.SAMImageSegmenter(backbone)
    model = keras.Model(task.input, task.output)  # it refuses fit, for want of losses
    y = {"masks": random.rand(18, 4, 16, 16).astype("float32"), "iou_pred": random.rand(18, 4).astype("float32")}
    return Ready(model=model, x=x, y=y, loss={"masks": "mean_squared_error", "iou_pred": "mean_squared_error"})
