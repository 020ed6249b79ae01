"""Trains by usual losses, each in a custom loop and in a `train_step`; prints the losses of each, or the refusal.

A case is `looped` or `fitted`, and a name.
"""

import functools

import chosen_backend  # noqa: F401
import keras
import numpy as np
from keras import layers, ops
from own_steps_base import main

import kerasdp

BATCH, ROWS, TOKENS = 16, 43, 8
NAMES = (
    "texts", "texts_with_drawn_masks", "segmentation_of_keras", "contrastive", "root_of_mean", "correlation",
    "sum_of_rows", "right_texts_of_all", "right_texts_gathered", "right_texts_by_rows", "right_contrastive",
    "right_weights", "right_root",
)  # fmt: skip


def data():
    """Texts of several lengths, images with ignored pixels, classes and weights."""
    numbers = np.random.RandomState(0)
    texts = numbers.randint(1, 12, (ROWS, TOKENS)).astype("int32")
    lengths = numbers.randint(3, TOKENS + 1, (ROWS, 1)).astype("int32")
    labels = numbers.randint(0, 4, (ROWS, 6, 6)).astype("int32")
    return {
        "text": texts * (np.arange(TOKENS) < lengths),
        "image": numbers.normal(size=(ROWS, 6, 6, 3)),
        "labels": np.where(numbers.random(labels.shape) < 0.1, -1, labels).astype("int32"),
        "class": numbers.randint(0, 4, (ROWS,)).astype("int32"),
        "weight": numbers.uniform(0.5, 2, (ROWS,)),
    }


def losses():
    """Returns the losses by name: functions of the network and of a batch. Those that begin with `right` are means."""
    all_rows, cross_entropy = kerasdp.all_rows, keras.losses.sparse_categorical_crossentropy
    seeds = keras.random.SeedGenerator(5)

    def of_tokens(net, batch):
        values = cross_entropy(batch["text"], net.words(batch["text"]), from_logits=True)
        return values, ops.cast(batch["text"] > 0, values.dtype)

    def of_classes(net, batch):
        return cross_entropy(batch["class"], net.features(batch["image"])[:, :4], from_logits=True)

    def of_one(net, batch):
        return ops.square(net.features(batch["image"])[:, 0] - batch["weight"])

    def ratio(values, mask):
        return ops.sum(values * mask) / ops.maximum(ops.sum(mask), 1.0)

    def over_all(values, mask):
        """The same, where the mask is that of all devices."""
        values, mask = (ops.reshape(each, (ops.shape(each)[0], -1)) for each in (values, mask))
        counts = all_rows(ops.sum(mask, axis=1))
        return ops.mean(ops.sum(values * mask, axis=1)) / ops.maximum(ops.mean(counts), 1e-9)

    def by_rows(values, mask):
        axes = tuple(range(1, len(values.shape)))
        return ops.mean(ops.sum(values * mask, axis=axes) / ops.maximum(ops.sum(mask, axis=axes), 1.0))

    def unit(net, image):
        found = net.features(image)
        return found / ops.norm(found, axis=1, keepdims=True)

    def texts(net, batch):
        return ratio(*of_tokens(net, batch))

    def texts_with_drawn_masks(net, batch):
        chosen = ops.cast(keras.random.uniform(ops.shape(batch["text"]), seed=seeds) < 0.3, "float64")
        values = cross_entropy(batch["text"], net.words(ops.where(chosen > 0, 0, batch["text"])), from_logits=True)
        return ratio(values, chosen)

    def segmentation_of_keras(net, batch):
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=-1)
        return loss(batch["labels"], net.pixels(batch["image"]))

    def contrastive(net, batch):
        alike = ops.matmul(unit(net, batch["image"]), ops.transpose(unit(net, ops.flip(batch["image"], 1)))) * 5
        return ops.mean(cross_entropy(ops.arange(ops.shape(alike)[0]), alike, from_logits=True))

    def root_of_mean(net, batch):
        return ops.sqrt(ops.mean(of_one(net, batch)))

    def correlation(net, batch):
        one, other = net.features(batch["image"])[:, 0], batch["weight"]
        one, other = one - ops.mean(one), other - ops.mean(other)
        return 1 - ops.sum(one * other) / ops.sqrt(ops.sum(one**2) * ops.sum(other**2))

    def sum_of_rows(net, batch):
        return ops.sum(of_classes(net, batch))

    def right_texts_of_all(net, batch):
        return over_all(*of_tokens(net, batch))

    def right_texts_gathered(net, batch):
        return ratio(*map(all_rows, of_tokens(net, batch)))

    def right_texts_by_rows(net, batch):
        return by_rows(*of_tokens(net, batch))

    def right_contrastive(net, batch):
        one, other = all_rows(unit(net, batch["image"])), all_rows(unit(net, ops.flip(batch["image"], 1)))
        alike = ops.matmul(one, ops.transpose(other)) * 5
        return ops.mean(cross_entropy(ops.arange(ops.shape(alike)[0]), alike, from_logits=True))

    def right_weights(net, batch):
        return ops.mean(of_classes(net, batch) * batch["weight"])

    def right_root(net, batch):
        return ops.sqrt(ops.mean(all_rows(of_one(net, batch))))

    known = locals()
    return {name: known[name] for name in NAMES}, seeds


def network(loss_of, seeds):
    """A model with heads for texts, pixels and features, of which a loss uses one; its step is that loss's."""

    class Network(keras.Model):
        def __init__(self):
            super().__init__()
            text, image = keras.Input((TOKENS,), dtype="int32"), keras.Input((6, 6, 3))
            flat = layers.Flatten()(image)
            self.words = keras.Model(text, layers.Dense(12)(layers.Embedding(12, 6)(text)))
            self.pixels = keras.Model(image, layers.Conv2D(4, 3, padding="same")(image))
            self.features = keras.Model(image, layers.Dense(6)(flat))
            self.seeds = seeds

        def train_step(self, batch):
            loss, gradients = kerasdp.value_and_grad(lambda: loss_of(self, batch), self.trainable_variables)()
            self.optimizer.apply(gradients, self.trainable_variables)
            return {"loss": loss}

    return Network()


def looped(runner, model):
    """In a custom loop."""
    step = runner.step(lambda batch: model.train_step(batch)["loss"])
    return [float(step(batch)) for batch in runner.batches(data(), batch_size=BATCH, epochs=2)]


def fitted(runner, model):
    """In `fit`."""
    found = []
    note = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: found.append(float(logs["loss"])))
    runner.fit(model, data(), batch_size=BATCH, epochs=2, verbose=0, callbacks=[note])
    return found


def trained(way, name, runner):
    with runner.scope():
        known, seeds = losses()
        model = network(known[name], seeds)
        model.compile(keras.optimizers.SGD(0.1))
    return way(runner, model)


if __name__ == "__main__":
    main(
        {f"{way.__name__} {name}": functools.partial(trained, way, name) for way in (looped, fitted) for name in NAMES}
    )
