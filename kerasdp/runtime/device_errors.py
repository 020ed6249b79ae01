"""Says in a line what went wrong on a device: frameworks end in long texts, of which people need a sentence."""

import re

from kerasdp.errors import DeviceError, WorkerError

_MEMORY = (
    "a device has too little memory ({line}); these train the same: --accumulate=2 (or more), --remat=blocks, and with "
    "several devices of torch or jax --shard=weights; else use a smaller --batch_size, or --precision=bfloat16. Other "
    "programs may hold memory: nvidia-smi shows them"
)
_SHARED_MEMORY = "NCCL has too little shared memory ({line}): give the container more, as docker run --shm-size=1g"
_NCCL = "NCCL has failed ({line}); NCCL_DEBUG=WARN in the environment shows why"
_KERNELS = "this build of the framework has no kernels for this GPU ({line}); install another build, or --device=cpu"
_BUSY = "the GPU is held by another program, or set to one program at a time ({line}); nvidia-smi shows it"
_ASSERT = "an operation on the GPU got an index out of range ({line}); --device=cpu names the layer"
_CUDA = "CUDA has failed ({line}); CUDA_LAUNCH_BLOCKING=1 in the environment shows the operation, nvidia-smi the GPU"

# Texts of torch 2.13, jax 0.10 and TensorFlow 2.21, the special ones first.
_KNOWN = (
    (r"out of memory|can't allocate memory|RESOURCE_EXHAUSTED|OOM when allocating|CUBLAS_STATUS_ALLOC_FAILED", _MEMORY),
    (r"/dev/shm|No space left on device.*nccl|nccl.*No space left on device", _SHARED_MEMORY),
    (r"no kernel image is available|CUDA_ERROR_NO_BINARY_FOR_GPU", _KERNELS),
    (r"busy or unavailable|CUDA_ERROR_DEVICE_UNAVAILABLE", _BUSY),
    (r"device-side assert triggered", _ASSERT),
    (r"nccl\w*Error|NCCL error|NCCL operation", _NCCL),
    (r"CUDA error|CUDA_ERROR_\w+|cuDNN error|CUDNN_STATUS_\w+|CUBLAS_STATUS_\w+", _CUDA),
)
_FRAMEWORKS = {"torch", "jax", "jaxlib", "tensorflow"}


def lost_process(error: BaseException) -> WorkerError | None:
    """Returns, of an error of Gloo, the line that another process has gone; None: it is another error."""
    found = re.search(r"gloo/\S+:\d+\] (.*?)(?:\. |$)", str(error), re.MULTILINE)
    if found is None:
        return None
    return WorkerError(f"another process of the run has gone ({found[1]}); its own output says why")


def explained(error: Exception) -> DeviceError | None:
    """Returns an error of a device as a line; None where a framework has raised it for another reason, or none has."""
    kinds = {kind.__module__.partition(".")[0] for kind in type(error).__mro__}
    text = str(error)
    is_plain = isinstance(error, RuntimeError) and re.search("CUDA|NCCL|cuDNN|DefaultCPUAllocator", text)  # of torch
    if not kinds & _FRAMEWORKS and not is_plain:
        return None
    for pattern, words in _KNOWN:
        for line in text.splitlines():
            if re.search(pattern, line, re.IGNORECASE):
                return DeviceError(words.format(line=line.strip()[:200].rstrip(".")))
    return None
