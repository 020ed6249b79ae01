"""Small models of many kinds of layers, to be captured for a GPU: attention, masks, recurrence, tables, images."""

import numpy as np

NUM_TOKENS, LENGTH, CLASSES = 50, 12, 10


def build(name, num_rows):
    """The model of that name, and inputs and targets for it."""
    random = np.random.RandomState(0)
    if name in ("transformer", "attention", "lstm", "gru", "bidirectional", "masked_lstm"):
        model = of_text(name)
        x = random.randint(1, NUM_TOKENS, (num_rows, LENGTH))
        many = name == "transformer"
        return model, x, random.randint(0, NUM_TOKENS if many else CLASSES, (num_rows, LENGTH) if many else num_rows)
    if name == "tables":
        x = [random.randint(0, 100, (num_rows, length)) for length in (1, 3)]
        return tables(), x, random.randint(0, CLASSES, num_rows)
    x = random.randint(0, 256, (num_rows, 16, 16, 3)).astype("uint8")
    if name == "unet":
        return unet(), x, random.randint(0, CLASSES, (num_rows, 16, 16))
    return mobile(), x, random.randint(0, CLASSES, num_rows)


def of_text(name):
    import keras
    from keras import layers

    tokens = keras.Input((LENGTH,), dtype="int32")
    x = layers.Embedding(NUM_TOKENS, 16, mask_zero=name in ("transformer", "masked_lstm"))(tokens)
    if name == "transformer":
        for _ in range(2):
            y = layers.LayerNormalization()(x)
            x = layers.Add()([x, layers.MultiHeadAttention(4, 4)(y, y, use_causal_mask=True)])
            y = layers.Dense(32, "gelu")(layers.LayerNormalization()(x))
            x = layers.Add()([x, layers.Dense(16)(y)])
        return keras.Model(tokens, layers.Dense(NUM_TOKENS)(x))
    if name == "attention":
        x = layers.Add()([x, layers.MultiHeadAttention(4, 4)(x, x)])
        x = layers.GlobalAveragePooling1D()(x)
    elif name == "bidirectional":
        x = layers.Bidirectional(layers.LSTM(8))(x)
    else:
        x = (layers.GRU if name == "gru" else layers.LSTM)(8, name="recurrent")(x)
    return keras.Model(tokens, layers.Dense(CLASSES)(x))


def tables():
    import keras
    from keras import layers

    user, items = keras.Input((1,), dtype="int32"), keras.Input((3,), dtype="int32")
    one = layers.Flatten()(layers.Embedding(100, 8)(user))
    other = layers.GlobalAveragePooling1D()(layers.Embedding(100, 8)(items))
    both = layers.Concatenate()([one, other, layers.Dot(1)([one, other])])
    return keras.Model([user, items], layers.Dense(CLASSES)(both))


def unet():
    """Transposed convolutions, and both ways of making images larger."""
    import keras
    from keras import layers

    images = keras.Input((16, 16, 3))
    high = layers.Conv2D(8, 3, padding="same", activation="relu")(layers.Rescaling(1 / 255)(images))
    middle = layers.BatchNormalization()(layers.Conv2D(16, 3, strides=2, padding="same")(high))
    low = layers.Conv2D(16, 3, strides=2, padding="same", activation="relu")(middle)
    up = layers.Concatenate()([layers.Conv2DTranspose(16, 3, strides=2, padding="same")(low), middle])
    up = layers.UpSampling2D(2, interpolation="bilinear")(up)
    up = layers.Concatenate()([layers.SpatialDropout2D(0.1)(up), high])
    up = layers.UpSampling2D(2)(layers.MaxPooling2D()(up))
    return keras.Model(images, layers.Conv2D(CLASSES, 1)(up))


def mobile():
    """Depthwise and separable convolutions, group norm, squeeze and excitation."""
    import keras
    from keras import layers

    images = keras.Input((16, 16, 3))
    x = layers.Conv2D(8, 3, strides=2, padding="same", use_bias=False)(layers.Rescaling(1 / 255)(images))
    x = layers.ReLU(6.0)(layers.BatchNormalization()(x))
    x = layers.DepthwiseConv2D(3, padding="same", use_bias=False)(x)
    x = layers.Activation("hard_swish")(layers.BatchNormalization()(x))
    x = layers.GroupNormalization(4)(layers.SeparableConv2D(16, 3, padding="same")(x))
    gate = layers.Dense(16, "sigmoid")(layers.GlobalAveragePooling2D(keepdims=True)(x))
    x = layers.GlobalAveragePooling2D()(layers.Multiply()([x, gate]))
    return keras.Model(images, layers.Dense(CLASSES)(layers.Dropout(0.2)(x)))
