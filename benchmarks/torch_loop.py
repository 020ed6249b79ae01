"""Runs a training loop in plain PyTorch; see `protocol.py` for how it is asked for repetitions.

    echo | python benchmarks/torch_loop.py --model=resnet18 --compile
    echo | python benchmarks/torch_loop.py --model=convnet --devices=2      # DistributedDataParallel
    echo | python benchmarks/torch_loop.py --model=gpt --devices=2 --shard=weights      # fully_shard (FSDP2)
    echo | python benchmarks/torch_loop.py --model=gpt --size=real --public --compile      # the model of transformers

All samples are kept on the device as bytes; a step picks its batch there.
"""

import os
import sys
import warnings
from typing import Any

import protocol
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch_models import GPT, Segmentation, norm
from torch_nets import EfficientNet, Tagger, UNet
from torch_transformers import Bert, Llama, ViT


class ConvNet(nn.Module):
    """As `convnet` of kerasdp/models/classifiers.py."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(1, 12, 3, padding=1, bias=False), norm(12, scale=False)
        self.conv2, self.norm2 = nn.Conv2d(12, 24, 6, 2, bias=False), norm(24, scale=False)
        self.conv3, self.norm3 = nn.Conv2d(24, 32, 6, 2, padding=2), norm(32, scale=False)
        self.dense1, self.logits = nn.Linear(32, 256), nn.Linear(256, protocol.NUM_CLASSES)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.norm1(self.conv1(x)))
        x = F.relu(self.norm2(self.conv2(x)))
        x = F.relu(self.norm3(self.conv3(x)))
        return self.logits(self.dropout(F.relu(self.dense1(x.mean((2, 3))))))


class Block(nn.Module):
    """Two 3x3 convolutions and a shortcut."""

    def __init__(self, channels: int, filters: int, strides: int):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, filters, 3, strides, padding=1)
        self.conv2 = nn.Conv2d(filters, filters, 3, padding=1)
        self.norm1, self.norm2 = (norm(filters, epsilon=1e-5, momentum=0.9) for _ in range(2))
        self.shortcut = nn.Conv2d(channels, filters, 1, strides) if strides != 1 else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


class ConvNorm(nn.Module):
    """A convolution without bias, and batch norm."""

    def __init__(self, channels: int, filters: int, size: int, strides: int = 1):
        super().__init__()
        self.conv = nn.Conv2d(channels, filters, size, strides, padding=size // 2, bias=False)
        self.norm = norm(filters, epsilon=1e-5, momentum=0.9)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.conv(x))


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions and a shortcut."""

    def __init__(self, channels: int, filters: int, strides: int):
        super().__init__()
        self.part1, self.part2 = ConvNorm(channels, filters, 1), ConvNorm(filters, filters, 3, strides)
        self.part3 = ConvNorm(filters, 4 * filters, 1)
        widens = channels != 4 * filters
        self.shortcut = ConvNorm(channels, 4 * filters, 1, strides) if widens else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.part3(F.relu(self.part2(F.relu(self.part1(x)))))
        return F.relu(y + self.shortcut(x))


class ResNet(nn.Module):
    """As `resnet18` and `resnet50` of kerasdp/models/classifiers.py."""

    def __init__(self, depth: int):
        super().__init__()
        is_deep = depth == 50
        if is_deep:
            self.stem = ConvNorm(3, 64, 7, 2)
        else:
            self.stem_conv, self.stem_norm = nn.Conv2d(1, 64, 3, padding=1), norm(64, epsilon=1e-5, momentum=0.9)
        kind, widening, channels = (Bottleneck, 4, 64) if is_deep else (Block, 1, 64)
        self.names = []
        for stage, num_blocks in enumerate([3, 4, 6, 3] if is_deep else [2, 2, 2, 2], 1):
            filters = 64 * 2 ** (stage - 1)
            for block in range(1, num_blocks + 1):
                self.names.append(f"stage{stage}_block{block}")
                setattr(self, self.names[-1], kind(channels, filters, 2 if block == 1 and stage > 1 else 1))
                channels = widening * filters
        self.logits = nn.Linear(channels, protocol.NUM_CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if hasattr(self, "stem"):
            x = F.max_pool2d(F.relu(self.stem(x)), 3, 2, padding=1)
        else:
            x = F.relu(self.stem_norm(self.stem_conv(x)))
        for name in self.names:
            x = getattr(self, name)(x)
        return self.logits(x.mean((2, 3)))


def make_model(args: Any) -> nn.Module:
    """Builds the model `args.model`."""
    if args.model in protocol.TEXTS:
        return {"gpt": GPT, "bert": Bert, "llama": Llama, "tagger": Tagger}[args.model](args.vocabulary, args.width)
    if args.model in protocol.WIDTHS:
        models = {"segmentation": Segmentation, "vit": ViT, "unet": UNet, "efficientnet": EfficientNet}
        return models[args.model](args.width)
    return ConvNet() if args.model == "convnet" else ResNet(int(args.model.removeprefix("resnet")))


class Loop:
    """Trains on one device, maybe as one of several ranks."""

    def __init__(self, args: Any, rank: int = 0, model: nn.Module | None = None):
        is_gpu = torch.cuda.is_available() if args.device == "auto" else args.device == "gpu"
        self.args, self.rank = args, rank
        self.device = torch.device("cuda", rank) if is_gpu else torch.device("cpu")
        if is_gpu:
            torch.cuda.set_device(self.device)
            torch.backends.cudnn.benchmark = True
            if args.precision != "auto":
                torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
        if args.devices > 1:
            dist.init_process_group("nccl" if is_gpu else "gloo", rank=rank, world_size=args.devices)
        inputs, labels = protocol.make_data(args)
        self.inputs = protocol.map_inputs(lambda array: torch.from_numpy(array).to(self.device), inputs)
        labels = torch.from_numpy(labels).to(self.device)
        self.labels = labels if labels.is_floating_point() else labels.long()
        torch.manual_seed(0)
        model = make_model(args) if model is None else model
        model = model.to(self.device, memory_format=torch.channels_last)
        if args.devices > 1 and args.batch_norm == "sync":
            model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
        if args.shard == "weights":
            mesh = dist.init_device_mesh(self.device.type, (args.devices,))
            for module in (*(getattr(model, name) for name in model.names), model):
                fully_shard(module, mesh=mesh)
        weights = [weight for weight in model.parameters() if weight.requires_grad]
        self.num_parameters = sum(weight.numel() for weight in weights)
        # DTensor has no fused SGD (torch 2.13).
        is_fused = args.shard == "none"
        self.optimizer = torch.optim.SGD(weights, protocol.LEARNING_RATE, protocol.MOMENTUM, fused=is_fused)
        if args.devices > 1 and args.shard == "none":
            # Statistics of batch norm are each rank's own: rank 0's would be kept.
            ids = [rank] if is_gpu else None
            with warnings.catch_warnings(action="ignore", category=FutureWarning):  # its new name is not in torch 2.12
                model = nn.parallel.DistributedDataParallel(
                    model, device_ids=ids, broadcast_buffers=False, gradient_as_bucket_view=True
                )
        self.model = model.train()
        self.forward = self._forward
        if args.compile:
            # CUDA graphs, where one process has the whole step.
            self.forward = torch.compile(
                self._forward, mode="reduce-overhead" if is_gpu and args.devices == 1 else "default"
            )
        self.batches = protocol.batches(args.model, args.batch_size)

    def _forward(self, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, labels = protocol.map_inputs(lambda array: array[index], self.inputs), self.labels[index]
        if not isinstance(x, dict) and x.ndim == 4:
            # Images; they lie with their channels last, so this is torch's memory format of that name.
            x = x.permute(0, 3, 1, 2).float() * (1 / 255)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.args.precision == "bfloat16"):
            logits = self.model(**x) if isinstance(x, dict) else self.model(x)
        if labels.is_floating_point():
            return F.mse_loss(logits.float(), labels), torch.zeros((), device=self.device)
        if logits.ndim == 3:  # of each token
            logits, labels = logits.flatten(0, 1), labels.flatten()
        is_right = (logits.argmax(1) == labels).float()
        if self.args.model != "tagger":
            return F.cross_entropy(logits.float(), labels), is_right.mean()
        is_token = (labels != protocol.NO_TAG).float()
        loss = F.cross_entropy(logits.float(), labels, ignore_index=protocol.NO_TAG)
        return loss, (is_right * is_token).sum() / is_token.sum()

    def repeat(self, steps: int) -> dict[str, float]:
        """Trains; waits for the end."""
        totals = torch.zeros(2, device=self.device)
        rows = self.args.batch_size // self.args.devices
        for _ in range(steps):
            own = next(self.batches)[self.rank * rows : (self.rank + 1) * rows]
            index = torch.from_numpy(own)
            index = index.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else index
            loss, accuracy = self.forward(index)
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            totals += torch.stack([loss.detach(), accuracy])
        memory = protocol.peak_memory() if self.device.type == "cpu" else torch.cuda.max_memory_allocated()
        figures = torch.tensor([*totals.tolist(), memory], dtype=torch.float64, device=self.device)
        if self.args.devices > 1:
            dist.all_reduce(figures)
        loss, accuracy, memory = figures.tolist()
        parts = steps * self.args.devices
        if self.device.type == "cuda":
            memory /= self.args.devices
        return {"loss": loss / parts, "accuracy": accuracy / parts, "peak_memory_bytes": int(memory)}


def work(rank: int, args: Any, folder: str | None) -> None:
    """Runs a rank: a repetition for each line. `folder`: of `protocol.passing_lines_on`."""
    if args.devices > 1 and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // args.devices))  # they share the cores
    protocol.resize(args)
    model = None
    if args.public:
        import public_models

        torch.manual_seed(0)
        model = public_models.make_model(args)
    loop = Loop(args, rank, model)
    protocol.serve(
        loop.repeat, args.steps, first_steps=args.first_steps, parameters=loop.num_parameters,
        device=torch.cuda.get_device_name() if loop.device.type == "cuda" else "cpu",
        traffic=protocol.traffic_of(args, "torch"),
        lines=protocol.lines(folder, rank),
        say=protocol.say if rank == 0 else lambda **values: None,
    )  # fmt: skip
    if args.devices > 1:
        dist.barrier()  # without it gloo (torch 2.13) ended one of four ranks by SIGABRT in four of eight starts
        dist.destroy_process_group()


def main() -> None:
    """Runs one process per device."""
    flags = protocol.parser(__doc__)
    flags.add_argument("--compile", action="store_true", help="torch.compile of model and loss")
    flags.add_argument("--shard", default="none", choices=["none", "weights"], help="of gpt: fully_shard, by block")
    flags.add_argument("--public", action="store_true", help="the model of a public package: public_models.py")
    args = protocol.parse(flags)
    if args.shard != "none" and (args.model != "gpt" or args.devices == 1):
        flags.error("--shard: for gpt, on several devices")
    if args.devices == 1:
        work(0, args, None)
        return
    if args.batch_norm == "sync" and (args.device == "cpu" or not torch.cuda.is_available()):
        sys.exit("SyncBatchNorm needs GPUs: use --batch_norm=replica")
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    with protocol.passing_lines_on(args.devices) as folder:
        torch.multiprocessing.spawn(work, (args, folder), args.devices)


def free_port() -> int:
    """Returns a port that nobody uses."""
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


if __name__ == "__main__":
    main()
