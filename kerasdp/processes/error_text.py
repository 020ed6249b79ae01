"""Turns errors of devices and frameworks into one-line messages, and finds the user code that caused an error."""

import inspect
import os
import re
import sysconfig
import textwrap
import traceback

from kerasdp.errors import DeviceError, RunError, UserError, WorkerError

_KIT = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "")
_STANDARD, _PACKAGES = sysconfig.get_path("stdlib"), sysconfig.get_path("purelib")


def is_of_user(path: str) -> bool:
    """Returns whether a file is user code, not part of a package, the standard library or a compiler's cache."""
    compiled = os.environ.get("TORCHINDUCTOR_CACHE_DIR", _KIT)
    return not path.startswith((_STANDARD, _PACKAGES, _KIT, compiled, "<frozen", "<string"))


def is_of_kit(path: str) -> bool:
    """Returns whether a file is a part of kerasdp."""
    return path.startswith(_KIT)


def first_line(error: BaseException) -> str:
    """Returns the first line of an error's message; the name of the error's class if the message is empty."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def in_a_line(error: BaseException, num_places: int) -> str:
    """Returns an error as one line of text, with the lines of user code in its traceback.

    Args:
        error: the error.
        num_places: maximum number of lines of user code. Each line is written as `train.py:12`, innermost first.
    """
    # Keras (3.15) writes the arguments after the message.
    text = " ".join(_BOLD.sub("", str(error)).partition("Arguments received")[0].split())
    text = textwrap.shorten(text, 400, placeholder=" ...")
    text = f"{type(error).__name__}: {text}" if text else type(error).__name__
    places = [
        f"{os.path.basename(frame.f_code.co_filename)}:{line}"
        for frame, line in traceback.walk_tb(error.__traceback__)
        if is_of_user(frame.f_code.co_filename)
    ]
    return f"{text} ({' in '.join(places[-num_places:][::-1])})" if places else text


def calling_line() -> str:
    """Returns the line of user code that called kerasdp, such as `file.py:12`; empty if there is no user code."""
    for frame, line in traceback.walk_stack(inspect.currentframe()):
        if is_of_user(frame.f_code.co_filename):
            return f"{os.path.basename(frame.f_code.co_filename)}:{line}"
    return ""


# Frameworks end in long texts, of which people need a sentence.
_MEMORY = (
    "a device has too little memory ({line}); to save memory with the same results, use --accumulate=2 or more, "
    "--remat=blocks, or --shard=weights (torch or jax on several devices); a smaller --batch_size or "
    "--precision=bfloat16 also saves memory; nvidia-smi lists other programs that use the memory"
)
_SHARED_MEMORY = "NCCL has too little shared memory ({line}); give the container more: docker run --shm-size=1g"
_GPU = (
    "a GPU or NCCL failed ({line}); nvidia-smi lists other programs on the GPU; to find the failing line, set "
    "CUDA_LAUNCH_BLOCKING=1 and NCCL_DEBUG=WARN in the environment, or run with --device=cpu"
)
_DETERMINISTIC = "--deterministic: {line}; remove that operation, or leave out --deterministic"

# Texts of torch 2.13, jax 0.10 and TensorFlow 2.21, the special ones first.
_KNOWN = (
    (r"determinis\w* .*(implement|available|support|enabled)|not deterministic", _DETERMINISTIC),
    (r"out of memory|can't allocate memory|RESOURCE_EXHAUSTED|OOM when allocating|CUBLAS_STATUS_ALLOC_FAILED", _MEMORY),
    (r"/dev/shm|No space left on device.*nccl|nccl.*No space left on device", _SHARED_MEMORY),
    (r"nccl\w*Error|NCCL (error|operation)|(CUDA|cuDNN) error|CUDA_ERROR_\w+|(CUDNN|CUBLAS)_STATUS_\w+", _GPU),
)
_BOLD = re.compile(r"\x1b\[\d*m")  # in which Keras (3.15) writes some messages
_FRAMEWORKS = {"torch", "jax", "jaxlib", "tensorflow"}


def lost_process(error: BaseException) -> WorkerError | None:
    """Returns a `WorkerError` if a Gloo error means that another process has ended; None for all other errors."""
    found = re.search(r"gloo/\S+:\d+\] (.*?)(?:\. |$)", str(error), re.MULTILINE)
    if found is None:
        return None
    return WorkerError(f"another process of the run has ended ({found[1]}); the output of that process says why")


def explained(error: Exception) -> RunError | None:
    """Returns a one-line error for a known failure of a device or a framework; None for all other errors.

    If an operation has no deterministic algorithm, the error is a `UserError`, because the user asked for determinism.
    """
    kinds = {kind.__module__.partition(".")[0] for kind in type(error).__mro__}
    text = _BOLD.sub("", str(error))
    of_torch = "CUDA|NCCL|cuDNN|DefaultCPUAllocator|deterministic implementation"
    is_plain = isinstance(error, RuntimeError) and re.search(of_torch, text)
    if not kinds & _FRAMEWORKS and not is_plain:
        return None
    for pattern, words in _KNOWN:
        for line in text.splitlines():
            if re.search(pattern, line, re.IGNORECASE):
                if words == _DETERMINISTIC:  # what follows the first sentence is for authors of kernels
                    return UserError(words.format(line=line.strip().partition(". ")[0].partition(", but you")[0]))
                return DeviceError(words.format(line=line.strip()[:200].rstrip(".")))
    return None
