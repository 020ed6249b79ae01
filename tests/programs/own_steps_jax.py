"""The steps of the models in `own_steps.py` in the form that Keras' guide has for jax: functions of a state."""

import jax
import keras
from keras import ops


class Vae:
    """Samples drawn in the step, a `test_step`, a `predict_step`, and a regularized layer."""

    def losses_of(self, trainable, non_trainable, x):
        mapping = [*zip(self.trainable_variables, trainable, strict=True),
                   *zip(self.non_trainable_variables, non_trainable, strict=True)]  # fmt: skip
        with keras.StatelessScope(mapping) as scope:
            total, apart = super().losses_of(x)
        return total, (apart, [scope.get_current_value(variable) for variable in self.non_trainable_variables])

    def logged(self, metrics, total, apart):
        metrics = [
            *self.total.stateless_update_state(metrics[:2], total),
            *self.apart.stateless_update_state(metrics[2:], apart),
        ]
        logs = {"loss": self.total.stateless_result(metrics[:2]), "apart": self.apart.stateless_result(metrics[2:])}
        return logs, metrics

    def train_step(self, state, x):
        trainable, non_trainable, optimizer, metrics = state
        differentiated = jax.value_and_grad(self.losses_of, has_aux=True)
        (total, (apart, non_trainable)), gradients = differentiated(trainable, non_trainable, x)
        trainable, optimizer = self.optimizer.stateless_apply(optimizer, gradients, trainable)
        logs, metrics = self.logged(metrics, total, apart)
        return logs, (trainable, non_trainable, optimizer, metrics)

    def test_step(self, state, x):
        trainable, non_trainable, metrics = state
        total, (apart, non_trainable) = self.losses_of(trainable, non_trainable, x)
        logs, metrics = self.logged(metrics, total, apart)
        return logs, (trainable, non_trainable, metrics)

    def predict_step(self, state, x):
        trainable, non_trainable = state
        mapping = [*zip(self.trainable_variables, trainable, strict=True),
                   *zip(self.non_trainable_variables, non_trainable, strict=True)]  # fmt: skip
        with keras.StatelessScope(mapping):
            return self.decoder(ops.split(self.coder(x), 2, axis=1)[0]), non_trainable
