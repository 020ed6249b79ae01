"""PyTorch: makes a stage of a pipeline a module, and holds what the micro-batches of a step have in common."""

from typing import Any

import torch
from torch.distributed import pipelining

from kerasdp.backends.base import DeviceBatch
from kerasdp.backends.steps import restart_seeds
from kerasdp.backends.torch.collectives import all_gather_stacked, gather_rows, gather_statistics
from kerasdp.backends.torch.train_step import numbers_made_on
from kerasdp.portability.replica_context import ReplicaContext, alone, use


class PipelineStep:
    """Holds what a step's micro-batches have in common."""

    def __init__(self, pipeline: Any, batch: DeviceBatch, micro_batches: Any, training: bool):
        self.pipeline, self.batch, self.micro_batches, self.training = pipeline, batch, micro_batches, training
        one = torch.ones((), device=pipeline.strategy.device)
        self.scale = pipeline.model.optimizer.scale_loss(one).detach() if training else one
        self.penalties: list[torch.Tensor] = []
        self.shapes = pipeline.plan.stages[-1].output_shapes(pipeline.size)
        self.seeds = [(seed, seed.value.clone()) for seed in pipeline.stage.seeds]
        self._outputs: dict[int, list[torch.Tensor]] = {}
        self._gathered: dict[int, list[torch.Tensor]] = {}
        self._gradients: dict[int, list[torch.Tensor]] = {}
        # Of each micro-batch in the loss; None: the loss is computed of all outputs at once.
        self.shares: list[float] | None = None
        if training and len(micro_batches) >= len(pipeline.plan.stages):
            self.shares = micro_batches.shares(pipeline.model, is_weighted=batch.sample_weight is not None)

    def context(self, number: int) -> ReplicaContext:
        """Returns the context of this pipeline's rows of a micro-batch."""
        from kerasdp.portability.row_search import row_axes_of

        pipeline, rows = self.pipeline, self.micro_batches.rows(number)
        whole = rows.stop - rows.start
        several, group = pipeline.num_pipelines > 1, pipeline.replica_group
        first = pipeline.pipeline_index * pipeline.size
        return ReplicaContext(
            num_replicas=pipeline.num_pipelines,
            num_rows=min(max(whole - first, 0), pipeline.size),
            rows=pipeline.size,
            first_row=rows.start + first,
            row_axes=row_axes_of(pipeline.model),
            total_rows=self.micro_batches.num_rows,
            gather=lambda own: gather_statistics(own, group) if several else alone(own),
            gather_rows=lambda own: (gather_rows(own, group, 1) if several else own)[
                : whole * (len(own) // pipeline.size)
            ],
            is_micro_batch=True,
            penalties=[],
        )

    def add_output(self, number: int, outputs: list[torch.Tensor]) -> None:
        """Takes what the last stage gives for a micro-batch."""
        self._outputs[number] = [leaf.detach() for leaf in outputs]

    def gathered(self, number: int) -> list[torch.Tensor]:
        """Gathers a micro-batch's outputs of all pipelines, without padding."""
        if number not in self._gathered:
            num_rows, replica_group = self.micro_batches.num_rows_of(number), self.pipeline.replica_group
            leaves = self._outputs[number]
            if self.pipeline.num_pipelines > 1:
                leaves = [all_gather_stacked(leaf, replica_group).flatten(0, 1) for leaf in leaves]
            self._gathered[number] = [leaf[:num_rows] for leaf in leaves]
        return self._gathered[number]

    def loss(self, outputs: Any, number: int) -> torch.Tensor:
        """Returns a scalar to call `backward` on, before the loss is known."""
        return _DeferredLoss.apply(self, number, *(outputs if isinstance(outputs, tuple) else (outputs,)))

    def gradients(self, number: int) -> list[torch.Tensor]:
        """Returns the gradients of a micro-batch's outputs."""
        import keras

        shares = self.shares
        if number not in self._gradients and shares is None:
            self._compute_gradients(list(range(len(self.micro_batches))), self.batch, 1.0)
        elif number not in self._gradients and shares is not None:
            rows, batch = self.micro_batches.rows(number), self.batch
            targets, weights = keras.tree.map_structure(
                lambda leaf: None if leaf is None else leaf[rows], (batch.targets, batch.sample_weight)
            )
            own = batch._replace(targets=targets, sample_weight=weights)
            self._compute_gradients([number], own, shares[number])
        return self._gradients.pop(number)

    @torch.enable_grad()
    def _compute_gradients(self, numbers: list[int], batch: DeviceBatch, share: float) -> None:
        import keras

        pipeline = self.pipeline
        # A whole number beside the logits, the class say, has no gradient.
        leaves = [
            [leaf.detach().requires_grad_(leaf.is_floating_point()) for leaf in self.gathered(number)]
            for number in numbers
        ]
        outputs = pipeline.plan.outputs([torch.cat(parts) for parts in zip(*leaves)])
        # The losses of several outputs are metrics, too. On a GPU this is a thread of autograd's.
        with keras.StatelessScope(), numbers_made_on(pipeline.strategy.device):
            loss = pipeline.compiled_loss(batch, outputs) * self.scale * share  # the scale is float32, the share not
        flat = [leaf for parts in leaves for leaf in parts if leaf.requires_grad]
        found = iter(torch.autograd.grad(loss, flat, allow_unused=True))
        first = pipeline.pipeline_index * pipeline.size
        for number, parts in zip(numbers, leaves):
            self._gradients[number] = []
            for leaf in parts:
                gradient = next(found) if leaf.requires_grad else None
                own = leaf.new_zeros((pipeline.size, *leaf.shape[1:]))
                if gradient is not None:
                    part = gradient[first : first + pipeline.size]
                    own[: len(part)] = part
                self._gradients[number].append(own)


class _DeferredLoss(torch.autograd.Function):
    """Computes the gradients of a step's loss in the backward pass."""

    @staticmethod
    def forward(ctx: Any, step: PipelineStep, number: int, *outputs: torch.Tensor) -> torch.Tensor:
        ctx.step, ctx.number = step, number
        return next(leaf for leaf in outputs if leaf.is_floating_point()).new_zeros(())

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> tuple[Any, ...]:
        return None, None, *ctx.step.gradients(ctx.number)


class _WithPenalty(torch.autograd.Function):
    """Returns the outputs; in the backward pass a penalty gets its gradient, too."""

    @staticmethod
    def forward(ctx: Any, scale: torch.Tensor, penalty: torch.Tensor, *outputs: torch.Tensor) -> tuple[Any, ...]:
        ctx.scale = scale.to(penalty.dtype)
        return tuple(output.view_as(output) for output in outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        return None, ctx.scale, *gradients


class StageModule(torch.nn.Module):
    """Wraps a stage in a module that takes a micro-batch's tensors."""

    def __init__(self, pipeline: Any, stage: Any, number: int):
        from kerasdp.keras_compat.layers import seed_variables

        super().__init__()
        self.pipeline, self.keras_stage, self.model, self.number = pipeline, stage, stage.model, number
        self.is_last = number == len(pipeline.plan.stages) - 1
        self.seeds = seed_variables(stage.model)
        self.micro_batch = 0

    def stage(self) -> "_Stage":
        """Returns torch's stage with the shapes of a micro-batch.

        Without them torch (2.13) would find them by a training step on uninitialized memory, after which moving
        statistics are NaN.
        """
        size = self.pipeline.size

        def like(tensors: list[Any], shapes: list[Any]) -> tuple[torch.Tensor, ...]:
            dtypes = [getattr(torch, tensor.dtype) for tensor in tensors]
            return tuple(
                torch.empty((size, *shape), dtype=dtype, device="meta", requires_grad=dtype.is_floating_point)
                for dtype, shape in zip(dtypes, shapes)
            )

        stage = self.keras_stage
        return _Stage(
            self,
            self.number,
            len(self.pipeline.plan.stages),
            self.pipeline.strategy.device,
            input_args=like(stage.model.inputs, stage.input_shapes()),
            output_args=like(stage.model.outputs, stage.output_shapes(size)),
            group=self.pipeline.group,
        )

    def forward(self, *inputs: torch.Tensor) -> Any:
        """Outputs of the stage, for the micro-batch whose number is set."""
        step, number = self.pipeline.step, self.micro_batch
        context = step.context(number)
        if step.training:
            restart_seeds(step.seeds)
        with use(context):
            outputs = self.keras_stage(list(inputs), training=step.training)
        # Keras' convolutions and poolings on torch give views with the axes in another order, which cannot be sent.
        outputs = [output.contiguous() for output in outputs]
        if context.penalties:
            penalty = sum(context.penalties) * step.micro_batches.share_of_rows(number)
            if self.pipeline.pipeline_index == 0:
                step.penalties.append(penalty.detach())
            outputs = list(_WithPenalty.apply(step.scale, penalty, *outputs))
        if self.is_last:
            step.add_output(number, outputs)
        return tuple(outputs) if len(outputs) > 1 else outputs[0]


class _Stage(pipelining.PipelineStage):
    """Sets the module's micro-batch."""

    submod: Any

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        self.submod.micro_batch = fwd_chunk_id
        return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
