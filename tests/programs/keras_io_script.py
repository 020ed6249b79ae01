"""A script in the manner of keras.io's examples: plain Keras, which knows nothing of kerasdp."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers
from sklearn.datasets import load_digits

num_classes = 10
batch_size = 64
num_epochs = 3


def get_datasets():
    images, labels = load_digits(return_X_y=True)
    images = (images.reshape(-1, 8, 8, 1) / 16).astype("float32")
    labels = labels.astype("int32")
    train = tf.data.Dataset.from_tensor_slices((images[:1500], labels[:1500]))
    validation = tf.data.Dataset.from_tensor_slices((images[1500:], labels[1500:]))
    return train.shuffle(1500).batch(batch_size).prefetch(2), validation.batch(batch_size)


def build_model():
    inputs = keras.Input((8, 8, 1))
    x = layers.Conv2D(16, 3, activation="relu")(inputs)
    x = layers.BatchNormalization()(x)
    x = layers.Flatten()(x)
    x = layers.Dropout(0.3)(x)
    return keras.Model(inputs, layers.Dense(num_classes, activation="softmax")(x))


def run_experiment():
    train_dataset, validation_dataset = get_datasets()
    model = build_model()
    model.compile(keras.optimizers.Adam(1e-3), "sparse_categorical_crossentropy", metrics=["accuracy"])
    history = model.fit(
        train_dataset,
        validation_data=validation_dataset,
        epochs=num_epochs,
        callbacks=[
            keras.callbacks.ModelCheckpoint("best.keras", monitor="val_accuracy", save_best_only=True),
            keras.callbacks.TensorBoard("logs"),
        ],
    )
    best = keras.saving.load_model("best.keras")
    best.compile(loss="sparse_categorical_crossentropy", metrics=["accuracy"])
    loss, accuracy = best.evaluate(validation_dataset)
    print(f"Validation accuracy: {np.round(100 * accuracy, 1)}%")
    return history


history = run_experiment()
print("Losses:", history.history["loss"])
