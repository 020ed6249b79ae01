"""The figures of a benchmark, who takes part in it, and what its command line refuses."""

import json
import sys

import pytest

from kerasdp.config import BACKENDS, Config
from kerasdp.errors import UserError
from kerasdp.processes.devices import is_installed
from tests.helpers import ROOT, result_of, run

sys.path.insert(0, str(ROOT / "benchmarks"))
import contenders  # noqa: E402
import measure  # noqa: E402
from contenders import Task  # noqa: E402
from measure import peak_of  # noqa: E402

CONVNET, MLP = Task("convnet"), Task("mlp", "digits")
INSTALLED = [name for name in BACKENDS if is_installed(name)]


def measured(name, backend, rates, num_devices=1, **more):
    return measure.Measured(name=name, backend=backend, num_devices=num_devices, rates=rates, **more)


def test_ratios_of_medians_and_of_rounds():
    kit = measured("kerasdp-jax", "jax", [10.0, 20.0, 90.0])
    peer = measured("jax", "jax", [40.0, 10.0, 30.0])
    (pair,) = measure.ratios([kit, peer])
    assert (pair["kit"], pair["peer"], pair["num_devices"]) == ("kerasdp-jax", "jax", 1)
    assert pair["of_medians"] == pytest.approx(20 / 30)
    assert pair["paired"] == {"median": 2.0, "min": 0.25, "max": 3.0}


def test_ratios_are_of_equals():
    kits = [measured("kerasdp-jax", "jax", [1.0]), measured("kerasdp-jax", "jax", [1.0], num_devices=2)]
    others = [
        measured("jax", "jax", [1.0], num_devices=2),
        measured("torch", "torch", [1.0]),  # a framework on which the kit did not run: compared, too
        measured("keras-jax", "jax", [], error="it broke"),
        measured("keras-jax", "jax", [1.0], num_devices=2, error="it broke later"),
    ]
    pairs = [(pair["peer"], pair["num_devices"]) for pair in measure.ratios(kits + others)]
    assert pairs == [("torch", 1), ("jax", 2)]
    kits.append(measured("kerasdp-torch", "torch", [1.0]))
    pairs = [(pair["kit"], pair["peer"]) for pair in measure.ratios(kits + others)]
    assert pairs == [("kerasdp-jax", "jax"), ("kerasdp-torch", "torch")]


def test_speedups():
    ways = [measured("kerasdp-jax", "jax", [10.0, 20.0]), measured("kerasdp-jax", "jax", [15.0, 40.0], num_devices=4)]
    assert measure.speedups(ways) == {
        "kerasdp-jax": {1: {"median": 1.0, "min": 1.0, "max": 1.0}, 4: {"median": 1.75, "min": 1.5, "max": 2.0}}
    }


def test_model_flops_utilization():
    found = measured("torch", "torch", [1000.0], num_devices=2, ready={"device": "NVIDIA H200"})
    assert measure.utilization(found, 989e9 / 3, "bfloat16") == pytest.approx(0.5)
    assert measure.utilization(found, 67e9 / 3, "float32") == pytest.approx(0.5)
    assert measure.utilization(found, None, "bfloat16") is None
    found.ready["device"] = "cpu"
    assert measure.utilization(found, 989e9 / 3, "bfloat16") is None


@pytest.mark.parametrize(
    ("device", "float32", "bfloat16"),
    [
        ("NVIDIA H100 80GB HBM3", 67e12, 989e12),
        ("NVIDIA H100 PCIe", 51e12, 756e12),
        ("Tesla T4", 8.1e12, None),
        ("TPU v5 lite", None, 197e12),
        # Others that have a known name within theirs.
        ("NVIDIA RTX A1000 Laptop GPU", None, None),
        ("cpu", None, None),
    ],
)
def test_peaks_are_of_whole_names(device, float32, bfloat16):
    assert (peak_of(device, "float32"), peak_of(device, "bfloat16")) == (float32, bfloat16)


def test_who_takes_part():
    config = Config(batch_norm="replica")
    found = contenders.choose(config, CONVNET, ["jax"], [1, 2], None, 20)
    assert [str(one) for one in found] == ["kerasdp-jax", "jax", "keras-jax", "kerasdp-jax x 2", "jax x 2"]
    assert [str(one) for one in contenders.choose(config, CONVNET, ["jax"], [1], [], 20)] == ["kerasdp-jax"]
    found = contenders.choose(Config(), MLP, INSTALLED[:1], [1], None, 20)
    assert [one.name for one in found] == [f"kerasdp-{INSTALLED[0]}", f"keras-{INSTALLED[0]}"]
    with pytest.raises(UserError, match="--peers: expected some of torch, .* Received: 'theano'"):
        contenders.choose(config, CONVNET, ["jax"], [1], ["theano"], 20)
    with pytest.raises(UserError, match=f"--peers: {INSTALLED[0]} trains convnet, .*; of mlp only keras"):
        contenders.choose(Config(), MLP, ["jax"], [1], [INSTALLED[0]], 20)
    with pytest.raises(UserError, match="--batch_size: expected a multiple of 3 devices"):
        contenders.choose(config, CONVNET, ["jax"], [1, 3], None, 20)
    with pytest.raises(UserError, match="--precision: expected auto, float32, bfloat16"):
        contenders.choose(Config(precision="float16"), CONVNET, ["jax"], [1], None, 20)


def test_the_kit_is_measured_against_itself():
    """Batch norm over the global batch, beside that over each shard."""
    found = contenders.choose(Config(batch_norm="sync"), CONVNET, ["jax"], [1, 2], ["replica-norm"], 20)
    assert [str(one) for one in found] == ["kerasdp-jax", "kerasdp-jax x 2", "replica-norm-jax x 2"]
    norms = [json.loads(one.command[3])["batch_norm"] for one in found]
    assert norms == ["sync", "sync", "replica"]
    assert not found[2].is_kit
    with pytest.raises(UserError, match="replica-norm is what --batch_norm=sync is measured against"):
        contenders.choose(Config(batch_norm="replica"), CONVNET, ["jax"], [2], ["replica-norm"], 20)


def test_programs_get_the_model_and_the_data():
    """The loops have random images; the kit and plain Keras train others on a data set."""
    kit, loop = contenders.choose(Config(batch_size=60), CONVNET, ["jax"], [1], ["jax"], 20)
    images = "--dataset=synthetic(shape=(28, 28, 1), num_samples=4080)"
    assert kit.command[-2:] == ("--model=convnet", images) and loop.command[-1] == "--model=convnet"
    for one in contenders.choose(Config(), Task("mlp", "images", "a folder"), ["jax"], [1], ["keras"], 20):
        assert {"--model=mlp", "--dataset=images", "--data_dir=a folder"} < {*one.command}


GIVEN = """
import json
from absl import app
import compare

def main(_):
    config, *others = compare.given()
    print("RESULT", json.dumps([config.batch_size, config.batch_norm, config.workdir, *others]))

app.run(main)
"""


def given(*flags):
    """What the flags of compare.py say; in another process, since flags are those of a whole program."""
    return run("-c", GIVEN, *flags, cwd=ROOT / "benchmarks")


def test_the_command_line():
    assert result_of(given()) == [64, "replica", None, [*CONVNET], None, [1], None, 5, 20]
    flags = ["--device_counts=1,2", "--peers=jax, keras", "--batch_norm=sync", "--model=mlp", "--dataset=mnist"]
    *_, norm, _, task, _, counts, peers, _, _ = result_of(given(*flags, "--batch_size=32"))
    assert (norm, task, counts, peers) == ("sync", ["mlp", "mnist", None], [1, 2], ["jax", "keras"])
    *_, task, _, _, peers, _, _ = result_of(given("--peers=none", "--model=mlp"))
    assert (task, peers) == ([*MLP], [])


@pytest.mark.parametrize(
    ("flag", "words"),
    [
        ("--dataset=digits", "--dataset has no effect here: convnet is measured on random images"),
        ("--rounds=0", "--device_counts, --rounds, --steps_per_round: expected numbers of at least 1"),
        ("--backends=theano", "expected one of torch, jax, tensorflow"),
        ("--batch_size=0", "--batch_size: expected a whole number of at least 1. Received: 0"),
    ],
)
def test_wrong_flags_are_named(flag, words):
    done = given(flag)
    assert done.returncode == 2 and done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
    assert words in done.stderr


def test_a_contender_that_fails_is_reported(capsys):
    """By the last line of its errors; the others go on."""
    answers = (
        "import json, sys\n"
        "print('noise'); print(json.dumps({'ready': True, 'seconds_to_first_step': 1.0}), flush=True)\n"
        "for number, line in enumerate(sys.stdin):\n"
        "    if number == int(sys.argv[1]): sys.exit('a reason\\nthe last line')\n"
        "    print(json.dumps({'seconds': 2.0 + number, 'peak_memory_bytes': 1}), flush=True)\n"
    )
    found = measure.run(
        [
            contenders.Contender(name=name, backend="jax", num_devices=1, command=(sys.executable, "-c", code, number))
            for name, code, number in (
                ("sound", answers, "9"), ("late", answers, "1"), ("early", "raise ValueError('early')", "0"),
            )
        ],
        rounds=2, steps=3, batch_size=4,
    )  # fmt: skip
    assert [one.error for one in found] == ["", "the last line", "ValueError: early"]
    assert [one.seconds for one in found] == [[2.0, 3.0], [2.0], []]
    assert found[0].rates == [6.0, 4.0]
    assert "round 2/2" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("import time; time.sleep(60)", "out of time (1 s)"),
        ("raise ValueError('RESOURCE_EXHAUSTED: of 9 GiB\\nmore lines')", "out of memory"),
    ],
)
def test_time_and_memory_end(code, reason):
    one = contenders.Contender(
        name="jax",
        backend="jax",
        num_devices=1,
        command=(sys.executable, "-c", code),
        limit=1 if "sleep" in code else 60,
    )
    (found,) = measure.run([one], rounds=1, steps=1, batch_size=1)
    assert found.error == reason
