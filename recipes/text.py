"""Trains a small transformer to continue text: the reference manual that every Python brings along, no download.

    python recipes/text.py                                          # the first backend installed
    python recipes/text.py --backend=jax --gpus=2 --workdir=runs/text
    python recipes/text.py --backend=torch --workdir=runs/text --resume

Expected of the first: it predicts 0.38 of the next characters in paragraphs that were held out, in ten minutes on two
CPU cores; always guessing a space is right 0.15 of the time, a table of pairs 0.29. The text is that of the Python
that runs it (here 3.11), so another Python gives other digits; backends and device counts do not.

Paragraphs are of any length: `kerasdp.Buckets` pads them to four lengths, so that a compiled step is compiled a few
times only. Padding is masked in attention, loss and accuracy, which are those of the characters in the global batch.
Copy this file into your project and change what you like.
"""

import kerasdp

LENGTHS, WIDTH, HEADS, BLOCKS = (64, 128, 256, 512), 128, 4, 2
UNUSED = ["model", "dataset", "data_dir"]


def paragraphs() -> tuple[list[list[int]], list[list[int]], int]:
    """Returns the paragraphs for training and those held out, and the number of codes: 0: nothing, 1: the begin."""
    from pydoc_data.topics import topics

    texts = [" ".join(text.split()) for topic in topics.values() for text in topic.split("\n\n")]
    texts = [text for text in dict.fromkeys(texts) if len(text) > 20]
    codes = {character: code for code, character in enumerate(sorted(set("".join(texts))), 2)}
    encoded = [[1, *map(codes.get, text)] for text in texts]
    return [text for number, text in enumerate(encoded) if number % 10], encoded[::10], len(codes) + 2


def build(num_characters: int):
    """A decoder: each position sees itself and those before it."""
    import keras
    from keras import layers

    text = keras.Input((None,), dtype="int32")
    is_text = keras.ops.cast(text != 0, "int32")
    places = keras.ops.cumsum(is_text, axis=1) * is_text  # from 1; 0 is masked: `add` (Keras 3.15) needs all masks
    x = layers.Embedding(num_characters, WIDTH, mask_zero=True)(text)
    x = layers.add([x, layers.Embedding(max(LENGTHS) + 1, WIDTH, mask_zero=True)(places)])
    for _ in range(BLOCKS):
        y = layers.LayerNormalization()(x)
        x = layers.add([x, layers.MultiHeadAttention(HEADS, WIDTH // HEADS)(y, y, use_causal_mask=True)])
        y = layers.Dense(4 * WIDTH, activation="gelu")(layers.LayerNormalization()(x))
        x = layers.add([x, layers.Dropout(0.1)(layers.Dense(WIDTH)(y))])
    return keras.Model(text, layers.Dense(num_characters)(layers.LayerNormalization()(x)), name="text")


def train(runner: "kerasdp.Runner") -> None:
    """Runs in every worker process, after the backend is chosen."""
    import keras

    config = runner.config
    *texts, num_characters = paragraphs()
    # Of each text the targets are its next characters.
    training, held_out = (
        kerasdp.Buckets([text[:-1] for text in part], [text[1:] for text in part], lengths=LENGTHS, seed=config.seed,
                        batch_size=config.batch_size, shuffle=part is texts[0]) for part in texts)  # fmt: skip
    with runner.scope():
        model = build(num_characters)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(kerasdp.make_optimizer(config), loss, metrics=["accuracy"])
    runner.fit(model, training, epochs=config.epochs, validation_data=held_out)


if __name__ == "__main__":
    defaults = {"optimizer": "adam(learning_rate=0.001)", "batch_size": 32, "epochs": 8}
    kerasdp.main(train, defaults=defaults, unused=UNUSED)
