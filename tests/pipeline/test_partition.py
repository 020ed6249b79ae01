"""Models cut into stages compute what the whole computes."""

import keras
import numpy as np
import pytest
from keras import layers

from kerasdp.errors import UserError
from kerasdp.scale import pipeline


def residual(x, filters, number):
    y = layers.Conv2D(filters, 3, padding="same", use_bias=False, name=f"conv{number}")(x)
    y = layers.BatchNormalization(name=f"bn{number}")(y)
    if x.shape[-1] != filters:
        x = layers.Conv2D(filters, 1, name=f"short{number}")(x)
    return layers.ReLU(name=f"relu{number}")(layers.Add(name=f"add{number}")([x, y]))


def small():
    """With skip connections, and the input once more at the end."""
    inputs = keras.Input((8, 8, 3))
    x = residual(residual(residual(inputs, 3, 1), 5, 2), 5, 3)
    x = layers.Concatenate(name="join")([layers.GlobalAveragePooling2D()(x), layers.GlobalMaxPooling2D()(inputs)])
    return keras.Model(inputs, {"kind": layers.Dense(4, name="kind")(x), "size": layers.Dense(1, name="size")(x)})


def run(stages, inputs):
    values = inputs
    for stage in stages:
        values = stage(values)
    return [np.array(keras.ops.convert_to_numpy(value)) for value in values]


def assert_cut_is_right(model, stages, inputs):
    expected = keras.tree.flatten(model(inputs[0] if len(inputs) == 1 else inputs, training=False))
    for value, other in zip(expected, run(stages, inputs), strict=True):
        np.testing.assert_array_equal(other, keras.ops.convert_to_numpy(value))
    own = {id(variable) for variable in model.variables}
    held = [{id(variable) for variable in stage.model.variables} for stage in stages]
    assert set.union(*held) == own and sum(map(len, held)) == len(own)
    assert sum(stage.share for stage in stages) == pytest.approx(1)


@pytest.mark.proof
@pytest.mark.parametrize(
    ("name", "size", "num_stages"),
    [
        ("MobileNetV2", 32, 2), ("ResNet50", 32, 3), ("DenseNet121", 32, 2), ("InceptionV3", 75, 2),
        ("EfficientNetB0", 32, 4),
    ],
)  # fmt: skip
def test_models_that_people_use(name, size, num_stages):
    model = getattr(keras.applications, name)(weights=None, input_shape=(size, size, 3), classes=7)
    stages = pipeline.split(model, num_stages)
    x = keras.ops.convert_to_tensor(np.random.RandomState(0).rand(2, size, size, 3).astype("float32") * 255)
    assert_cut_is_right(model, stages, [x])
    assert max(stage.share for stage in stages) < 1.6 / num_stages


def test_cuts_by_name_and_what_they_say():
    stages = pipeline.split(small(), cut_at=["relu1", "add2"])
    assert [stage.layers[-1] for stage in stages[:2]] == ["relu1", "add2"]
    # relu1 and the input cross the first cut: 8x8x3 floats each.
    assert stages[0].num_bytes == 2 * 8 * 8 * 3 * 4
    text = pipeline.table(stages)
    assert len(text.splitlines()) == 4 and "conv1 ... relu1" in text


def test_stages_have_equal_shares_of_the_weights():
    inputs = keras.Input((4,))
    x = layers.Dense(4, name="first")(inputs)
    model = keras.Model(inputs, layers.Dense(200, name="last")(layers.Dense(200, name="wide")(x)))
    assert pipeline.split(model, 2)[1].layers == ["last"]


def shared():
    inputs = keras.Input((4,))
    layer = layers.Dense(4, name="twice")
    return keras.Model(inputs, layers.Dense(1, name="end")(layer(layers.ReLU(name="between")(layer(inputs)))))


def tied():
    """The head has the weights of the first layer, as language models do."""
    table = layers.Embedding(11, 4, name="table")

    class Head(layers.Layer):
        def build(self, shape):
            self.table = table

        def call(self, x):
            return keras.ops.matmul(x, keras.ops.transpose(self.table.embeddings))

    inputs = keras.Input((5,), dtype="int32")
    return keras.Model(inputs, Head(name="head")(layers.Dense(4, name="middle")(table(inputs))))


def masked():
    inputs = keras.Input((4,), dtype="int32")
    x = layers.LSTM(3, name="lstm")(layers.Embedding(5, 3, mask_zero=True, name="words")(inputs))
    return keras.Model(inputs, layers.Dense(1, name="end")(x))


@pytest.mark.parametrize(
    ("make", "choices", "words"),
    [
        (shared, {"cut_at": ["between"]}, "cannot be cut after between: layer twice has weights and is used on both"),
        (shared, {"num_stages": 3}, "--gpus: expected from 1 to 2, the largest number of stages of this model"),
        (tied, {"cut_at": ["middle"]}, "layers table and head share weights, but a cut would separate the layers"),
        (masked, {"cut_at": ["words"]}, "a tensor with a mask would cross the cut"),
        (small, {"cut_at": ["relu2", "relu1"]}, "expected layers in the order of their calls"),
        (small, {"cut_at": ["relu9"]}, "expected names of layers. Received: 'relu9'"),
        (lambda: keras.Sequential([layers.Dense(1)]), {}, "a pipeline: expected a functional model"),
    ],
)
def test_what_cannot_be_cut(make, choices, words):
    with pytest.raises(UserError, match=words):
        pipeline.split(make(), **choices)


def test_a_sequential_model():
    model = keras.Sequential([keras.Input((3,)), layers.Dense(4), layers.Dropout(0.5), layers.Dense(2)])
    x = keras.ops.convert_to_tensor(np.ones((2, 3), "float32"))
    assert_cut_is_right(model, pipeline.split(model), [x])


class Doubled(keras.Model):
    """Functional, but does something else when it is called."""

    def call(self, inputs, training=None, mask=None):
        return 2 * super().call(inputs)


def nested(shape=(4,)):
    """Models within the model; one has several inputs and outputs, by name, another a `call` of its own."""
    first, second = keras.Input(shape, name="first"), keras.Input(shape, name="second")
    pair = {"sum": layers.Add()([layers.Dense(4)(first), second]), "same": second}
    backbone = keras.Model({"first": first, "second": second}, pair, name="backbone")
    inputs = [keras.Input(shape, name="second"), keras.Input(shape, name="first")]
    found = backbone({"first": layers.Dense(4, name="begin")(inputs[1]), "second": inputs[0]}, training=False)
    tensor = keras.Input(shape, name="x")
    x = Doubled(tensor, layers.Dense(4)(tensor), name="doubled")(found["sum"])
    outputs = keras.Sequential([layers.Dense(3), layers.Dense(2)], name="end")(x)
    return keras.Model(inputs, [outputs, found["same"]])


def test_a_model_within_is_one_layer():
    model = nested()
    x = [keras.ops.convert_to_tensor(np.random.RandomState(number).rand(3, 4).astype("float32")) for number in (0, 1)]
    names = ["begin", "backbone", "doubled", "end"]
    for place in range(1, len(names)):
        stages = pipeline.split(model, cut_at=names[place - 1 : place])
        assert [stage.layers for stage in stages] == [names[:place], names[place:]]
        assert_cut_is_right(model, stages, x)
    with pytest.raises(UserError, match=r"from 1 to 4, the largest .* \(a nested model is one layer\)"):
        pipeline.split(model, 5)
