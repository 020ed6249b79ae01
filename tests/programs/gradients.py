"""Takes gradients by `kerasdp.value_and_grad` without any run, and prints what they are."""

import json

import keras
import numpy as np
from keras import ops

import kerasdp


def numbers(seed, *shape):
    return ops.convert_to_tensor(np.random.RandomState(seed).randn(*shape).astype("float32"))


def sizes(gradients):
    return [None if each is None else float(ops.sum(ops.square(each))) for each in gradients]


def main():
    model = keras.Sequential(
        [keras.Input((4,)), keras.layers.Dense(8, "tanh"), keras.layers.BatchNormalization(), keras.layers.Dense(1)]
    )
    for place, weight in enumerate(model.weights):
        values = numbers(place, *weight.shape)
        weight.assign(0.5 + ops.abs(values) if "variance" in weight.path else values)
    weights, x, y = model.trainable_variables, numbers(9, 5, 4), numbers(10, 5, 1)
    unused, frozen = keras.Variable(np.ones(3)), keras.Variable(np.ones(4), trainable=False)
    found = {}

    def loss_of(x, y, training=True):
        return ops.mean(ops.square(model(x * frozen, training=training) - y))

    value, gradients = kerasdp.value_and_grad(loss_of, weights)(x, y)
    found["by weights"], found["moved"] = [float(value), *sizes(gradients)], sizes(model.non_trainable_variables)
    structure = {"kernel": weights[0], "others": [unused, frozen]}
    _, gradients = kerasdp.value_and_grad(loss_of, structure)(x, y)
    found["structure"] = [*sizes([gradients["kernel"]]), *sizes(gradients["others"])]
    found["by tensor"] = sizes([kerasdp.value_and_grad(loss_of)(x, y, training=False)[1]])
    found["stopped"] = sizes([kerasdp.value_and_grad(lambda x: ops.sum(ops.stop_gradient(x) * 2))(x)[1]])
    # Of what else the function reads of the tensor there is no gradient.
    found["other reading"] = sizes([kerasdp.value_and_grad(lambda own: ops.sum(own * x))(x)[1]])

    def penalty(x):
        _, slope = kerasdp.value_and_grad(lambda mixed: ops.sum(model(mixed, training=False)))(x)
        norm = ops.sqrt(ops.sum(ops.square(slope), axis=1))
        return ops.mean(ops.square(norm - 1)), norm

    (value, norm), gradients = kerasdp.value_and_grad(penalty, weights, has_aux=True)(x)
    found["penalty"] = [float(value), *ops.convert_to_numpy(norm).tolist(), *sizes(gradients)]

    def adapted():
        _, gradients = kerasdp.value_and_grad(lambda: loss_of(x, y, training=False), weights)()
        fast = [weight - 0.001 * gradient for weight, gradient in zip(weights, gradients, strict=True)]
        outputs, _ = model.stateless_call(fast, model.non_trainable_variables, x, training=False)
        return ops.mean(ops.square(outputs - y))

    value, gradients = kerasdp.value_and_grad(adapted, weights)()
    found["adapted"] = [float(value), *sizes(gradients)]
    function = lambda x: ops.sum(x**4)  # noqa: E731
    for _ in range(3):
        function = (lambda inner: lambda x: ops.sum(kerasdp.value_and_grad(inner)(x)[1]))(function)
    found["third"] = [float(function(numbers(1, 3)))]
    found["errors"] = []
    for wrong in (
        lambda: kerasdp.value_and_grad(lambda: model(x), weights)(),
        lambda: kerasdp.value_and_grad(loss_of, [])(x, y),
        lambda: kerasdp.value_and_grad(lambda x: ops.sum(x))(np.arange(3)),
        lambda: kerasdp.value_and_grad(lambda: 1.0)(),
        lambda: kerasdp.value_and_grad(lambda: ops.mean(model(x)), weights, has_aux=True)(),
    ):
        try:
            wrong()
        except kerasdp.UserError as error:
            found["errors"].append(str(error))
    print("RESULT " + json.dumps(found))


main()
