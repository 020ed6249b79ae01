"""Makes all processes of a run do what the callbacks of one decided."""

import keras

from kerasdp.keras_compat.optimizers import learning_rate_schedule
from kerasdp.runtime.ranks import Processes


class RankSync:
    """Synchronizes what callbacks decided: when to stop, and the learning rate.

    Most decide by the logs, which are equal on all ranks; but one that looks at the clock, say, would leave the other
    ranks waiting for one that stopped.
    """

    def __init__(self, processes: Processes, *, each_step: bool):
        """`each_step`: whether a callback may stop within an epoch; to ask is to wait for the last rank's host."""
        self.processes, self.each_step = processes, each_step

    def after_step(self, model: keras.Model) -> None:
        """Stops all ranks if a callback stopped one."""
        if self.each_step:
            model.stop_training = self.processes.any_rank(model.stop_training)

    def after_epoch(self, model: keras.Model) -> None:
        """Stops all ranks if a callback stopped one, and gives all the learning rate of rank 0."""
        model.stop_training = self.processes.any_rank(model.stop_training)
        if learning_rate_schedule(model.optimizer) is None:
            own_rate = float(keras.ops.convert_to_numpy(model.optimizer.learning_rate))
            (rate,) = self.processes.broadcast_from_rank0([own_rate])
            if rate != own_rate:
                model.optimizer.learning_rate = rate
