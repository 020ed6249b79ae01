"""Finds the choice that people mean who call it by another tool's name, or misspell it."""

import dataclasses
import difflib

from kerasdp.config.config import Config

# How other trainers call them (PyTorch Lightning, Hugging Face, timm, TorchTitan and others).
_OTHER_NAMES = {
    "accumulate": "accum grad_accum accumulation_steps accumulate_grad_batches gradient_accumulation_steps",
    "backend": "framework keras_backend",
    "batch_norm": "sync_bn sync_batchnorm",
    "batch_size": "b bs batch global_batch_size train_batch_size",
    "checkpoint_every": "save_every save_freq save_steps checkpoint_interval",
    "compile": "jit jit_compile torch_compile",
    "data_dir": "data_path data_root root",
    "dataset": "data",
    "device": "accelerator platform",
    "epochs": "e epoch num_epochs n_epochs max_epochs num_train_epochs",
    "learning_rate": "lr rate step_size",
    "max_steps": "steps num_steps iterations max_iterations total_steps train_steps",
    "model": "arch architecture network net",
    "num_devices": "gpu gpus n_gpus num_gpus devices n_devices num_replicas num_workers replicas nproc world_size",
    "num_stages": "stages n_stages",
    "optimizer": "opt optim",
    "precision": "amp dtype mixed_precision",
    "resume": "restore continue",
    "seed": "random_seed random_state",
    "split_size": "micro_batch_size microbatch_size",
    "strategy": "parallelism distribution",
    "workdir": "dir logdir log_dir out outdir output output_dir run_dir save_dir checkpoint_dir default_root_dir",
}
_MEANT = {other: field for field, others in _OTHER_NAMES.items() for other in others.split()}


def meant(name: str) -> str | None:
    """Returns the field of `Config` that a wrong name most likely stands for; None if it is like none."""
    fields = [field.name for field in dataclasses.fields(Config)]
    if name in fields or name in _MEANT:
        return _MEANT.get(name, name)
    near = difflib.get_close_matches(name, [*fields, *_MEANT], n=1, cutoff=0.75)
    return _MEANT.get(near[0], near[0]) if near else None
