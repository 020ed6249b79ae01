"""Trains a small model around a backbone of KerasHub, whose weights come in another order on torch.

python resume_backbone.py SETTINGS: fields of kerasdp.Config as JSON, and `backbone`: "bart" or "segformer"
"""

import json
import sys

import numpy as np

import kerasdp

BACKBONE = ""


def bart(keras, hub):
    backbone = hub.models.BartBackbone(
        vocabulary_size=30, num_layers=2, num_heads=2, hidden_dim=8, intermediate_dim=16, max_sequence_length=10
    )
    tokens = np.random.RandomState(0).randint(1, 30, (24, 6)).astype("int32")
    x = {f"{side}_token_ids": tokens for side in ("encoder", "decoder")}
    x |= {f"{side}_padding_mask": np.ones_like(tokens) for side in ("encoder", "decoder")}
    return backbone, x


def segformer(keras, hub):
    encoder = hub.models.MiTBackbone(
        layerwise_depths=[1, 1], image_shape=(32, 32, 3), hidden_dims=[8, 16], num_layers=2, layerwise_num_heads=[1, 2],
        layerwise_sr_ratios=[2, 1], max_drop_path_rate=0.1, layerwise_patch_sizes=[7, 3], layerwise_strides=[4, 2],
    )  # fmt: skip
    backbone = hub.models.SegFormerBackbone(image_encoder=encoder, projection_filters=16)
    return backbone, np.random.RandomState(0).rand(24, 32, 32, 3).astype("float32")


def train(runner):
    import keras
    import keras_hub

    with runner.scope():
        backbone, x = {"bart": bart, "segformer": segformer}[BACKBONE](keras, keras_hub)
        outputs = backbone(backbone.input)
        if BACKBONE == "bart":
            found = keras.layers.GlobalAveragePooling1D()(outputs["decoder_sequence_output"])
        else:
            found = keras.layers.Flatten()(outputs)
        model = keras.Model(backbone.input, keras.layers.Dense(1)(found))
        model.compile(kerasdp.make_optimizer(runner.config), "mse")
    runner.fit(model, x, np.arange(24, dtype="float32")[:, None] % 3, epochs=3)
    return [weight.path for weight in model.weights]


if __name__ == "__main__":
    settings = json.loads(sys.argv[1])
    BACKBONE = settings.pop("backbone")
    config = kerasdp.Config(device="cpu", num_devices=1, verbose=0, log_every=1, batch_size=8, **settings)
    print("RESULT", json.dumps(kerasdp.launch(train, config)))
