"""The optimizers that look at all of a weight, by name."""

import json

import keras

from kerasdp.keras_compat.optimizers import slots_by_weight, updates_numbers_alone


class OfNorms(keras.optimizers.SGD):
    def update_step(self, gradient, variable, learning_rate):
        super().update_step(gradient / (keras.ops.norm(variable) + 1), variable, learning_rate)


class Signs(keras.optimizers.Optimizer):
    def __init__(self, rate=0.1):
        super().__init__(rate)

    def update_step(self, gradient, variable, learning_rate):
        self.assign_sub(variable, learning_rate * keras.ops.sign(gradient))


class WarmUp(keras.optimizers.schedules.LearningRateSchedule):
    def __call__(self, step):
        return 0.1 * keras.ops.minimum(1.0, (keras.ops.cast(step, "float32") + 1) / 5)


def is_alone(optimizer):
    weight = keras.Variable(keras.ops.ones((48, 64)), name="kernel")
    optimizer.build([weight])
    before = [keras.ops.convert_to_numpy(each).tolist() for each in (weight, *optimizer.variables)]
    of_weight = slots_by_weight(optimizer)
    slots = [variable for variable in optimizer.variables if id(variable) in of_weight]
    found = updates_numbers_alone(optimizer, weight, slots, lambda value: value[:, 32:])
    assert before == [keras.ops.convert_to_numpy(each).tolist() for each in (weight, *optimizer.variables)]
    return found


if __name__ == "__main__":
    every = vars(keras.optimizers).values()
    kinds = [kind for kind in every if isinstance(kind, type) and issubclass(kind, keras.optimizers.Optimizer)]
    of_others = ("Optimizer", "LossScaleOptimizer", "MultiOptimizer")
    made = [kind() for kind in kinds if kind.__name__ not in of_others]
    made += [OfNorms(), Signs(), keras.optimizers.Adam(WarmUp(), use_ema=True, gradient_accumulation_steps=2)]
    print("RESULT " + json.dumps(sorted({type(each).__name__ for each in made if not is_alone(each)})))
