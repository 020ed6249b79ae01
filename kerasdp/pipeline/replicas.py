"""What the `Replicas` of all engines answer. Imported before Keras may be."""

from collections.abc import Callable
from typing import Any


class CutModel:
    """For a class that has `config`, `place`, and `make_pipeline(model)`, which gives a new engine for a model."""

    takes_several_steps = False

    def engine_of(self, model: Any) -> Any:
        """The model's engine, made when it is first asked for, and anew when the model is compiled anew."""
        owner, known = getattr(model, "_kerasdp_engine", (None, None))
        if owner is not self or known.is_stale:
            known = self.make_pipeline(model)
            object.__setattr__(model, "_kerasdp_engine", (self, known))  # past Keras' tracking of attributes
        return known

    def description(self, model: Any) -> str:
        """The cut, in words."""
        return str(self.engine_of(model).plan)

    def tune(self, model: Any, first_batch: Callable[[], Any], report: Callable[[str], None]) -> None:
        """Finds the size of micro-batches, if it is to be found, or that of the parts of these batches."""
        from kerasdp.pipeline.plan import accumulating, find_size

        pipeline = self.engine_of(model)
        if self.config.accumulate > 1:
            size = pipeline.plan.size
            pipeline.plan = accumulating(pipeline.plan, self.config, len(first_batch().indices))
            if pipeline.plan.size != size:
                object.__setattr__(model, "_kerasdp_functions", None)  # TensorFlow's graphs hold the size
        if self.config.split_size == "auto" and not pipeline.is_tuned:
            pipeline.is_tuned = True
            find_size(pipeline, self.shard_batch(first_batch()), report)

    def micro_batch_rows(self, model: Any) -> int | None:
        """Rows of a micro-batch."""
        return self.engine_of(model).plan.size
