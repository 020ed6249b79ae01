"""Trains models in pipeline stages on PyTorch, one process per device, with torch.distributed.pipelining."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch.distributed import pipelining

from kerasdp.backends.torch.devices import TorchStrategy, listen_on_loopback
from kerasdp.backends.torch.train_step import numbers_made_on, to_host
from kerasdp.backends.torch.update import updating
from kerasdp.config import Config
from kerasdp.contract import DeviceBatch, StepFunctions, Trained
from kerasdp.data.sampling import ReplicaRows, Split
from kerasdp.errors import UserError
from kerasdp.processes.devices import Devices
from kerasdp.run_state import Detail, ModelCache, RunState
from kerasdp.same.replica_context import ReplicaContext, alone, use
from kerasdp.step.replica import TrainedWeights, learning_rate, restart_seeds

if TYPE_CHECKING:
    from kerasdp.data.batch import Batch


class PipelineParallel(TorchStrategy):
    """Trains a model in pipeline stages. Each process runs one stage. See `kerasdp.contract.Strategy`."""

    def __init__(self, devices: Devices, config: Config):
        """Joins the process group. This must happen before Keras is imported."""
        super().__init__(devices, config)
        self.split = Split(1)
        self._pipelines: ModelCache[Pipeline] = ModelCache()
        if devices.count == 1 and not dist.is_initialized():
            listen_on_loopback()
            store = dist.HashStore()  # type: ignore[attr-defined]
            dist.init_process_group("gloo", store=store, rank=0, world_size=1)

    def scope(self) -> AbstractContextManager[None]:
        """Returns the context in which models are built, in host memory.

        Host memory may hold models that are too large for one device.
        """
        import keras

        return keras.device("cpu")

    def running(self, model: Any) -> AbstractContextManager[None]:
        """Returns the context of `fit`, `evaluate` and `predict`, in which Keras creates tensors on the device.

        This context is needed, because the training function runs within `scope`, in which Keras computes on the CPU.
        """
        import keras

        return keras.device(str(self.device))

    def shard_batch(self, batch: "Batch") -> DeviceBatch:
        """Copies targets to every device, and inputs to the device of the first stage only."""
        device_batch = self.put_batch(batch)
        return device_batch if dist.get_rank() == 0 else device_batch._replace(inputs=None)

    def step_functions(self, model: Any, run_state: RunState) -> StepFunctions:
        """Returns train, test and predict functions that run on all stages."""
        from kerasdp.scale.pipeline import table

        pipeline, weights = self._pipeline_of(model), TrainedWeights(model)
        compiled_for = weights.key()

        def train(batch: DeviceBatch, _: Detail) -> Trained:
            if weights.key() != compiled_for:
                raise UserError(
                    f"layers of {model.name} were frozen or unfrozen after compile, which a pipeline does not "
                    "support; call model.compile again"
                )
            with numbers_made_on(self.device):
                loss, rate, logs = pipeline.train_step(batch)
            return Trained(to_host(loss), to_host(rate), logs, {})

        def evaluating(step: Callable[[DeviceBatch], Any]) -> Callable[[DeviceBatch], Any]:
            @torch.no_grad()
            def evaluate(batch: DeviceBatch) -> Any:
                with numbers_made_on(self.device):
                    return step(batch)

            return evaluate

        return StepFunctions(
            train=train,
            test=evaluating(pipeline.test_step),
            predict=evaluating(pipeline.predict_step),
            description=table(pipeline.stages),
        )

    def _pipeline_of(self, model: Any) -> "Pipeline":
        """Returns the pipeline of a model. Creates a new pipeline on the first call, and after each `compile`."""
        pipeline = self._pipelines.get(model)
        if pipeline is None or pipeline.is_stale:
            pipeline = Pipeline(model, self)
            self._pipelines.put(model, pipeline)
        return pipeline

    def diverged_variables(self, model: Any, state_only: bool = False) -> list[str]:
        """Returns the paths of this stage's variables that differ between replicas. See `Strategy`."""
        return self.differing(self._pipeline_of(model).module.model.variables)

    def gather_variables(self, model: Any) -> None:
        """Gathers the values of all variables in each process. See `Strategy`."""
        self._pipeline_of(model).gather_variables()


class Pipeline:
    """Trains a model in stages. This process holds one stage.

    Attributes:
        stages: the stages of the model.
        step: the step on the latest batch.
        has_trained: whether the stage was trained after the last `gather_variables`. Then only this process has the
            current weights of its stage.
    """

    step: "PipelineStep"

    def __init__(self, model: Any, strategy: PipelineParallel):
        from kerasdp.keras_compat.layers import seed_variables
        from kerasdp.scale.pipeline import functional, stages_of

        self.model, self.optimizer, self.strategy = model, getattr(model, "optimizer", None), strategy
        self._compiled_with = _made_by_compile(model)
        with strategy.scope():  # where the weights still are
            self.stages = stages_of(model, strategy.config, dist.get_world_size())
        self.functional = functional(model)
        self.number, self.num_stages = dist.get_rank(), dist.get_world_size()
        self.has_last = self.number == self.num_stages - 1
        self.module = StageModule(self, self.stages[self.number])
        self.seeds = seed_variables(self.module.model)
        self.has_penalties = any(weight.regularizer is not None for weight in model.trainable_weights)
        # Optimizer variables that belong to all weights, for example the step counter. A process without trainable
        # weights never calls the optimizer, and gets these variables from a process with trainable weights.
        self.shared, self.idle_source = self._shared()
        for variable in [*self.variables_of(self.number), *self.shared, *model.metrics_variables]:
            variable.value.data = variable.value.data.to(strategy.device)
        self.has_trained = False
        self._schedules: dict[tuple[int, int, bool], Any] = {}

    @property
    def size(self) -> int:
        """Returns the number of rows of a micro-batch.

        Before the first `fit`, batches are assumed to have `config.batch_size` rows.
        """
        config = self.strategy.config
        rows = self.strategy.split.micro_batch_rows or config.micro_batch_rows(config.batch_size, len(self.stages))
        return cast(int, rows)

    @property
    def is_stale(self) -> bool:
        """Returns whether the model was compiled again after the pipeline was created."""
        return any(new is not old for new, old in zip(_made_by_compile(self.model), self._compiled_with))

    def train_step(self, batch: DeviceBatch) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
        """Trains on the global batch. Returns the loss, the learning rate, and Keras' logs."""
        from kerasdp.keras_compat.layers import weight_penalties

        self.model.zero_grad()
        self.has_trained = True
        self._run(batch, training=True)
        step, stage = self.step, self.stages[self.number].model
        weights = stage.trainable_variables
        penalty = sum(weight_penalties(stage), torch.zeros((), device=self.strategy.device))
        if penalty.requires_grad:
            (penalty * step.scale).backward()
        with torch.no_grad():
            rate = learning_rate(self.model.optimizer)
            total_penalty = self._update(weights, penalty.detach())
            loss, logs = self._measure(batch, self._outputs(), total_penalty)
            return loss, rate, logs

    def test_step(self, batch: DeviceBatch) -> dict[str, Any]:
        """Evaluates the global batch. Returns Keras' logs."""
        from kerasdp.keras_compat.layers import weight_penalties

        outputs = self.predict_step(batch)
        penalty = sum(weight_penalties(self.stages[self.number].model), torch.zeros((), device=self.strategy.device))
        (total,) = _sum_over_stages([penalty]) if self.has_penalties else (penalty,)
        return self._measure(batch, outputs, total)[1]

    def predict_step(self, batch: DeviceBatch) -> Any:
        """Computes the outputs of the global batch."""
        self._run(batch, training=False)
        return self._outputs()

    def _run(self, batch: DeviceBatch, training: bool) -> None:
        from kerasdp.scale.pipeline import flat_inputs

        self.step = PipelineStep(self, batch, training)
        numbers = torch.arange(len(self.step.micro_batches))
        inputs: list[torch.Tensor] = []
        if self.number == 0:  # each micro-batch has `size` rows; the last one repeats its last row
            inputs, num_rows = flat_inputs(self.functional, batch.inputs), len(batch.indices)
            if num_rows < len(numbers) * self.size:
                rows = torch.arange(len(numbers) * self.size, device=self.strategy.device).clamp(max=num_rows - 1)
                inputs = [leaf[rows] for leaf in inputs]
        target = numbers if training and self.has_last else None
        self._schedule(len(numbers)).step(*inputs, number=numbers, target=target, return_outputs=False)

    def _schedule(self, num_micro_batches: int) -> Any:
        """Returns the torch schedule for this number of micro-batches.

        The buffers of a schedule have a fixed size, so each size needs a separate schedule. In training, backward
        passes start as soon as possible (1F1B), which keeps fewer micro-batches in memory. In evaluation, or with fewer
        micro-batches than stages, all forward passes run first (GPipe).
        """
        training = self.step.training
        key = self.size, num_micro_batches, training
        if key not in self._schedules:
            is_early = training and num_micro_batches >= self.num_stages
            kind = pipelining.Schedule1F1B if is_early else pipelining.ScheduleGPipe
            self._schedules[key] = kind(
                self._stage(),
                n_microbatches=num_micro_batches,
                loss_fn=(lambda outputs, number: self.step.loss(outputs, int(number))) if training else None,
                scale_grads=False,
            )
        return self._schedules[key]

    def _stage(self) -> pipelining.PipelineStage:
        """Returns the torch stage with the shapes of a micro-batch.

        If the shapes were missing, torch (2.13) would run a training step on uninitialized memory to find the shapes.
        After that step, moving statistics would be NaN.
        """

        def like(tensors: list[Any]) -> tuple[torch.Tensor, ...]:
            dtypes = [getattr(torch, tensor.dtype) for tensor in tensors]
            return tuple(
                torch.empty(
                    (self.size, *one.shape[1:]), dtype=dtype, device="meta", requires_grad=dtype.is_floating_point
                )
                for dtype, one in zip(dtypes, tensors)
            )

        own = self.stages[self.number].model
        return pipelining.PipelineStage(
            self.module, self.number, self.num_stages, self.strategy.device,
            input_args=like(own.inputs), output_args=like(own.outputs),
        )  # fmt: skip

    def _update(self, weights: list[Any], penalty: torch.Tensor) -> torch.Tensor:
        """Updates the weights of this process. Returns the sum of the penalties of all stages."""
        import keras

        from kerasdp.keras_compat.optimizers import global_clipnorm, updating_some

        optimizer, scale = self.model.optimizer, self.step.scale
        gradients = [weight.value.grad for weight in weights]
        limit = global_clipnorm(optimizer)
        is_scaled = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
        total_penalty = torch.zeros_like(penalty)
        if limit or is_scaled or self.has_penalties:
            squares = [(gradient / scale).square().sum() for gradient in gradients if gradient is not None]
            total, total_penalty = _sum_over_stages([sum(squares, torch.zeros_like(penalty)), penalty])
            if limit:
                factor = limit / total.sqrt().clamp(min=limit)
                gradients = [None if gradient is None else gradient * factor for gradient in gradients]
            if is_scaled:  # an overflow in one stage counts in all stages
                is_finite, nan = total.isfinite(), total.new_full((), torch.nan)
                gradients = [None if gradient is None else torch.where(is_finite, gradient, nan.to(gradient.dtype))
                             for gradient in gradients]  # fmt: skip
        if any(gradient is not None for gradient in gradients):
            with updating(optimizer), updating_some(optimizer, weights):
                optimizer.apply(gradients, weights)
        if self.idle_source is not None:
            for variable in self.shared:
                self._send(variable, self.idle_source)
        return total_penalty

    def _outputs(self) -> Any:
        """Returns the outputs of the global batch, which the last stage broadcasts to each process."""
        from kerasdp.scale.pipeline import packed_outputs

        step, outputs = self.step, []
        for place, tensor in enumerate(self.stages[-1].model.outputs):
            if self.has_last:
                leaf = torch.cat([step.outputs[number][place] for number in range(len(step.micro_batches))])
            else:
                shape = (len(step.batch.indices), *tensor.shape[1:])
                leaf = torch.empty(shape, dtype=getattr(torch, tensor.dtype), device=self.strategy.device)
            if self.num_stages > 1:
                dist.broadcast(leaf := leaf.contiguous(), self.num_stages - 1)
            outputs.append(leaf)
        return packed_outputs(self.functional, outputs)

    def compiled_loss(self, batch: DeviceBatch, outputs: Any) -> torch.Tensor:
        """Computes the loss that was passed to `compile`, without penalties. Returns zero if there is no loss."""
        from kerasdp.keras_compat.models import compiled_loss

        loss = compiled_loss(self.model)
        if loss is None:
            return torch.zeros((), device=self.strategy.device)
        return loss(batch.targets, outputs, batch.sample_weight)

    def _measure(self, batch: DeviceBatch, outputs: Any, penalty: torch.Tensor) -> tuple[torch.Tensor, dict[str, Any]]:
        """Returns the loss, with the penalties of all stages, and Keras' logs.

        The loss has the dtype that the loss function returns.
        """
        from kerasdp.keras_compat.models import update_loss_metric

        loss = self.compiled_loss(batch, outputs)
        loss = loss + penalty.to(loss.dtype)
        update_loss_metric(self.model, loss, len(batch.indices))
        return loss, self.model.compute_metrics(None, batch.targets, outputs, sample_weight=batch.sample_weight)

    def _shared(self) -> tuple[list[Any], int | None]:
        from kerasdp.keras_compat.optimizers import slots_of

        if self.optimizer is None:
            return [], None
        slots = {id(slot) for slot in slots_of(self.optimizer, len(self.model.trainable_variables)).values()}
        busy = [number for number, stage in enumerate(self.stages) if stage.model.trainable_variables]
        source = busy[0] if 0 < len(busy) < self.num_stages else None
        return [variable for variable in self.optimizer.variables if id(variable) not in slots], source

    def variables_of(self, number: int) -> list[Any]:
        """Returns the variables of a stage and the optimizer slots of its weights."""
        from kerasdp.keras_compat.optimizers import slots_of

        weights, model = self.model.trainable_variables, self.stages[number].model
        slots = {} if self.optimizer is None else slots_of(self.optimizer, len(weights))
        places = {id(weight): place for place, weight in enumerate(weights)}
        own = {places[id(weight)] for weight in model.trainable_variables}
        return [*model.variables, *(slot for (_, place), slot in slots.items() if place in own)]

    def gather_variables(self) -> None:
        """Broadcasts the values of all variables to each process of the pipeline."""
        for number in range(self.num_stages) if self.num_stages > 1 and self.has_trained else ():
            for variable in self.variables_of(number):
                self._send(variable, number)
        self.has_trained = False

    def _send(self, variable: Any, source: int) -> None:
        """Broadcasts a variable's value from one process of the pipeline to all processes."""
        value = variable.value.detach()
        copy = value.to(self.strategy.device).contiguous()
        dist.broadcast(copy, source)
        value.copy_(copy)


def _made_by_compile(model: Any) -> tuple[Any, ...]:
    from kerasdp.keras_compat.models import made_by_compile

    return getattr(model, "optimizer", None), *made_by_compile(model)


def _sum_over_stages(values: list[torch.Tensor]) -> torch.Tensor:
    """Sums each value over the stages.

    Sums in float64, because a stage without penalties may use another dtype than the other stages.
    """
    totals = torch.stack([value.double() for value in values])
    if dist.get_world_size() > 1:
        dist.all_reduce(totals)
    return totals


class PipelineStep:
    """Holds the data that the micro-batches of a step share.

    Attributes:
        micro_batches: the rows of each micro-batch in the global batch.
        scale: the loss scale of a LossScaleOptimizer.
        outputs: the outputs of the last stage for each micro-batch, without padding, by micro-batch number.
    """

    def __init__(self, pipeline: Pipeline, batch: DeviceBatch, training: bool):
        from kerasdp.step.global_batch import shares_of

        self.pipeline, self.batch, self.training = pipeline, batch, training
        num_rows = len(batch.indices)
        self.micro_batches: list[ReplicaRows] = [
            rows for (rows,) in Split(1, micro_batch_rows=pipeline.size).micro_batches(num_rows)
        ]
        one = torch.ones((), device=pipeline.strategy.device)
        self.scale = pipeline.model.optimizer.scale_loss(one).detach() if training else one
        self.seeds = [(seed, seed.value.clone()) for seed in pipeline.seeds]
        self.outputs: dict[int, list[torch.Tensor]] = {}
        self._shares = [1.0]  # of each micro-batch in the loss
        if training and len(self.micro_batches) > 1:
            counts, is_weighted = [rows.num_rows for rows in self.micro_batches], batch.sample_weight is not None
            instead = f"use --strategy=data, or --split_size={num_rows} (then only one stage works at a time)"
            self._shares = shares_of(pipeline.model, counts, is_weighted=is_weighted, instead=instead)

    def context(self, rows: ReplicaRows) -> ReplicaContext:
        """Returns the context in which layers compute the rows of a micro-batch."""
        from kerasdp.step.row_search import row_layout_of

        size = self.pipeline.size
        return ReplicaContext(
            num_replicas=1,
            num_rows=rows.num_rows,
            rows=size,
            first_row=rows.first,
            row_layout=row_layout_of(self.pipeline.model),
            total_rows=len(self.batch.indices),
            gather=alone,
            gather_rows=lambda own: own[: rows.num_rows * (len(own) // size)],
            is_micro_batch=True,
        )

    def loss(self, outputs: Any, number: int) -> torch.Tensor:
        """Returns a micro-batch's share of the global batch's loss, times the loss scale, for the backward pass."""
        import keras

        from kerasdp.scale.pipeline import packed_outputs

        pipeline, rows = self.pipeline, self.micro_batches[number]
        targets, weights = keras.tree.map_structure(
            lambda leaf: None if leaf is None else leaf[rows.first : rows.first + rows.num_rows],
            (self.batch.targets, self.batch.sample_weight),
        )
        batch = self.batch._replace(targets=targets, sample_weight=weights)
        own = [leaf[: rows.num_rows] for leaf in (outputs if isinstance(outputs, tuple) else (outputs,))]
        with keras.StatelessScope():  # the losses of several outputs are metrics, too
            loss = pipeline.compiled_loss(batch, packed_outputs(pipeline.functional, own))
        return loss * self.scale * self._shares[number]  # the scale is float32, the share not


class StageModule(torch.nn.Module):
    """Wraps a stage in a torch module that takes the tensors of a micro-batch."""

    def __init__(self, pipeline: Pipeline, stage: Any):
        super().__init__()
        self.pipeline, self.stage, self.model = pipeline, stage, stage.model

    def forward(self, *inputs: torch.Tensor, number: torch.Tensor) -> Any:
        """Computes the outputs of the stage for the micro-batch with this number."""
        step = self.pipeline.step
        rows = step.micro_batches[int(number)]
        if step.training:
            restart_seeds(step.seeds)
        with use(step.context(rows)):
            outputs = self.stage(list(inputs), training=step.training)
        # Keras' convolutions and poolings on torch return views with permuted axes, which cannot be sent.
        outputs = [output.contiguous() for output in outputs]
        if self.pipeline.has_last:
            step.outputs[int(number)] = [leaf[: rows.num_rows].detach() for leaf in outputs]
        return tuple(outputs) if len(outputs) > 1 else outputs[0]
