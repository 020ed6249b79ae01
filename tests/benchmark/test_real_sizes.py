"""The benchmark at the sizes that people train: its table, of tiny models; its operations, as torch counts them."""

import re
import sys

import pytest

from tests.helpers import BACKENDS, ROOT, run

sys.path.insert(0, str(ROOT / "benchmarks"))
import protocol  # noqa: E402
import real_sizes  # noqa: E402
from flops import training_flops  # noqa: E402


@pytest.mark.proof
def test_a_tiny_table():
    """A loop by hand, and Keras' fit; those for which no time is left are named."""
    name = "jax" if "jax" in BACKENDS else BACKENDS[0]
    chosen = [name, f"keras-{name}"]
    flags = ["--tiny", "--models=gpt", f"--contenders={','.join(chosen)}", "--steps=2", "--rounds=1"]
    done = run("benchmarks/real_sizes.py", *flags)
    assert done.returncode == 0, done.stderr
    rows = [line for line in done.stdout.splitlines() if line.startswith("| GPT")]
    for row, one in zip(rows, chosen, strict=True):
        assert re.fullmatch(rf"\| GPT-2 124M \| {one} \| [\d,.]+ \| - \| \d+ s \| \d\.\d\d GiB \|", row), row
    done = run("benchmarks/real_sizes.py", *flags, "--budget=0.001")
    assert f"No time was left for {chosen[0]} on GPT-2 124M" in done.stdout, done.stdout


def test_what_is_not_installed_is_named(monkeypatch):
    monkeypatch.setitem(real_sizes.PUBLIC, "gpt", ["no_such_package"])
    assert real_sizes.missing("gpt", "public-torch") == ("no_such_package" if "torch" in BACKENDS else "torch")
    assert real_sizes.missing("gpt", BACKENDS[0]) == ""


def resized(monkeypatch, model):
    """The flags of a model at its real size, and the sizes of this process, until the end of a test."""
    for name in ("NUM_BLOCKS", "NUM_HEADS", "NUM_CLASSES", "PATCH", "NUM_KEY_HEADS"):
        monkeypatch.setattr(protocol, name, getattr(protocol, name))
    for sizes in (protocol.SHAPES, protocol.NUM_SAMPLES):
        monkeypatch.setitem(sizes, model, sizes[model])
    monkeypatch.setattr(sys, "argv", ["loop", f"--model={model}", "--size=real"])
    return protocol.parse(protocol.parser(""))


@pytest.mark.parametrize(
    ("model", "millions"), [("gpt", 163.1), ("resnet50", 25.6), ("bert", 109.2), ("vit", 86.6), ("llama", 1182.3)]
)
def test_operations_are_those_that_torch_counts(monkeypatch, model, millions):
    torch = pytest.importorskip("torch")
    import torch_loop
    from torch.utils.flop_counter import FlopCounterMode

    args = resized(monkeypatch, model)
    shape = protocol.SHAPES[model]
    with torch.device("meta"):  # without numbers
        net = torch_loop.make_model(args)
        x = torch.zeros(1, 3, *shape[:2]) if len(shape) == 3 else torch.zeros(1, *shape, dtype=torch.long)
        if model == "bert":
            x = dict.fromkeys(("token_ids", "segment_ids", "padding_mask"), x)
        with FlopCounterMode(display=False) as counted:
            net(**x) if isinstance(x, dict) else net(x)
    frozen = 0
    if model == "llama":
        matrices = [weight for weight in net.parameters() if weight.ndim == 2 and not weight.requires_grad]
        frozen = 2 * shape[0] * sum(weight.numel() for weight in matrices if weight is not net.tokens.weight)
    assert sum(weight.numel() for weight in net.parameters()) == pytest.approx(millions * 1e6, abs=1e5)
    assert training_flops(model) == 3 * counted.get_total_flops() - frozen


def test_real_sizes_are_of_some_models(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["loop", "--model=convnet", "--size=real"])
    with pytest.raises(SystemExit):
        protocol.parse(protocol.parser(""))
    assert "expected --model to be one of gpt, resnet50, bert, vit, llama. Received: convnet" in capsys.readouterr().err
