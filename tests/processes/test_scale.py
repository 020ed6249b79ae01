"""Many devices, many runs in one process, many runs at once, many files: as few of them, and no slower than it must be.

The sizes are those of the environment: KERASDP_FITS, KERASDP_LAUNCHES, KERASDP_FILES, KERASDP_DEVICES ("16,32").
"""

import concurrent.futures
import functools
import json
import os
import time

import pytest

from tests.helpers import BACKENDS, PROGRAMS, ROOT, assert_same, left_in, losses_in, make_images, result_of, run

pytestmark = [pytest.mark.proof, pytest.mark.timeout(4 * 3600)]
NUM_FITS = int(os.environ.get("KERASDP_FITS", "50"))
NUM_LAUNCHES = int(os.environ.get("KERASDP_LAUNCHES", "100"))
NUM_FILES = int(os.environ.get("KERASDP_FILES", "1000000"))
NUM_DEVICES = [int(count) for count in os.environ.get("KERASDP_DEVICES", "16,32").split(",")]
NUM_RANKS = int(os.environ.get("KERASDP_RANKS", "8"))  # of torch, each of which is a process
WAYS = [(name, count) for name in BACKENDS for count in (NUM_DEVICES if name != "torch" else [NUM_RANKS])]
# MiB that a launch or a `fit` may add, from the tenth on. Each graph of TensorFlow leaves something in its registries:
# 4.2 MiB were seen for a launch, 4.4 to 5.4 for a `fit` of a new model.
GROWTH = {"torch": 0.5, "jax": 1.5, "tensorflow": 6.0}
# As a user starts it: memory of a forked process is shared, and would be counted as it is written to.
AS_USERS_DO = {"TF_CPP_MIN_LOG_LEVEL": "2", "PYTHONPATH": str(ROOT)}
REPEATED = {"steps": 2000, "predictions": 2000, "epochs": 50, "launches": 20}
# MiB that a rank may hold more at the end than after a tenth. Seen: steps 0.0 to 1.0, predictions 0.3 to 1.6, which are
# the outputs and what allocators round up, epochs 0.1 to 0.4, launches 0.1 to 1.7, what jax caches. Where each launch
# of TensorFlow on two devices left a graph, it was 48.
FLAT = 3.0


@functools.cache
def learned(backend, count):
    """What lenet learns in 40 steps."""
    begin = time.monotonic()
    done = run(PROGRAMS / "learn.py", backend, count, "lenet", backend=backend, timeout=3000)
    print(f"\n{backend} x {count}: {time.monotonic() - begin:.0f} s")
    return result_of(done)["lenet"]


@pytest.mark.parametrize(("backend", "count"), WAYS)
def test_many_devices_learn_what_one_does(backend, count):
    expected, found = learned(BACKENDS[0], 1), learned(backend, count)
    assert found["initial"] == expected["initial"] and len(found["losses"]) == 40
    for name in ("losses", "history", "evaluate", "predictions", "final"):
        for one, other in zip(*map(as_list, (expected[name], found[name])), strict=True):
            assert_same(one, other, 1e-5)


def as_list(values):
    """Weights differ in shape."""
    return [values] if isinstance(values, dict) or not isinstance(values[0], list) else values


def table(title, rows):
    names = list(rows[0])
    lines = [" ".join(f"{row[name]:>9}" for name in names) for row in rows]
    return "\n".join([f"\n{title}", " ".join(f"{name:>9}" for name in names), *lines])


@pytest.mark.parametrize("what", ["launches", "fits", "fits of new models"])
def test_many_runs_in_one_process_hold_what_few_hold(backend, what):
    count = NUM_LAUNCHES if what == "launches" else NUM_FITS
    done = run(PROGRAMS / "repeated.py", backend, 1, what, count, timeout=3600, **AS_USERS_DO)
    result = result_of(done)
    held = result["held"]
    print(table(f"{backend}, {what}", held))
    # The same data and weights; one model learns on.
    assert len(result["losses"]) == count
    assert len(set(result["losses"])) == 1 or what == "fits"
    early = next(row for row in held if row["number"] >= min(10, count // 2))
    late = held[-1]
    grown = (late["mib"] - early["mib"]) / (late["number"] - early["number"])
    print(f"{grown:.2f} MiB each")
    assert late["files"] <= early["files"] + 2 and late["threads"] <= early["threads"] + 2
    assert late["tasks"] <= early["tasks"] + 4
    assert grown < GROWTH[backend]
    # Nor does the hundredth take longer: twice the seconds of one early on is the machine's, more is not.
    if count >= 50:
        half = next(row for row in reversed(held) if row["number"] <= count // 2)
        rate = (half["seconds"] - early["seconds"]) / (half["number"] - early["number"])
        assert (late["seconds"] - half["seconds"]) / (late["number"] - half["number"]) < 2 * rate + 0.1


@pytest.mark.parametrize("num_devices", [1, 2])
@pytest.mark.parametrize("what", REPEATED)
def test_memory_stays_flat(backend, num_devices, what):
    """From a tenth of the way to its end, on each rank."""
    count = REPEATED[what]
    result = result_of(run(PROGRAMS / "repeated.py", backend, num_devices, what, count, timeout=3600, **AS_USERS_DO))
    ranks = result.get("ranks") or [result["held"]]
    assert len(ranks) == (num_devices if backend == "torch" and what != "launches" else 1)
    for held in ranks:
        print(table(f"{backend} x {num_devices}, {what}", held))
        early, late = next(row for row in held if row["number"] >= count // 10), held[-1]
        assert late["number"] == count and late["files"] <= early["files"] and late["threads"] <= early["threads"]
        grown = late["mib"] - early["mib"]
        print(f"{grown:.1f} MiB")
        assert grown < FLAT


LISTING = """
import json, resource, sys, time
from kerasdp.data.sources import list_images
resident = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
begin, before = time.monotonic(), resident()
paths, labels, classes = list_images(sys.argv[1])
print("RESULT " + json.dumps({"paths": len(paths), "labels": int(labels.sum()), "classes": len(classes),
                              "seconds": time.monotonic() - begin, "mib": resident() - before}))
"""


@pytest.fixture(scope="module")
def many_files(tmp_path_factory):
    """Two classes, in folders of 10,000 names each. All are links to a few files, which may have 65,000 each."""
    folder, per_folder = tmp_path_factory.mktemp("images"), 10_000
    make_images(folder / "own", {"one": 1}, (1, 1))
    source = (folder / "own" / "one" / "0.png").read_bytes()
    for number in range(0, NUM_FILES, per_folder):
        shard = folder / "all" / f"class{number // per_folder % 2}" / f"{number:08}"
        shard.mkdir(parents=True)
        (first := shard / "0.png").write_bytes(source)
        for other in range(1, min(per_folder, NUM_FILES - number)):
            os.link(first, f"{shard}/{other}.png")
    return folder / "all"


def test_a_folder_of_many_images_is_listed_soon(many_files):
    result = result_of(run("-c", LISTING, many_files, PYTHONPATH=str(ROOT), KERAS_BACKEND=BACKENDS[0], timeout=1800))
    per_file = result["mib"] * 2**20 / NUM_FILES
    print(f"\n{NUM_FILES:,} files: {result['seconds']:.1f} s, {result['mib']:.0f} MiB, {per_file:.0f} bytes each")
    assert (result["paths"], result["classes"]) == (NUM_FILES, min(2, -(-NUM_FILES // 10_000)))
    # A path is a string of its length; 60 s on a slow disk.
    assert result["seconds"] < max(5, NUM_FILES / 1e6 * 60) and per_file < 1000 + 50 * 2**20 / NUM_FILES


def test_runs_at_once_are_kept_apart(backend, tmp_path):
    """Four runs, each with a workdir in one folder: each learns what it learns alone, and has its own files."""
    flags = ["--model=mlp", "--max_steps=20", "--log_every=1", "--checkpoint_every=5", "--device=cpu", "--gpus=2"]
    temporary = tmp_path / "tmp"
    temporary.mkdir()

    def trained(folder, seed):
        done = run(
            "recipes/train.py", *flags, f"--backend={backend}", f"--seed={seed}",
            f"--workdir={tmp_path}/{folder}/{seed}", backend=backend, timeout=900, TMPDIR=str(temporary),
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return files_of(tmp_path / folder / str(seed))

    alone = [trained("alone", seed) for seed in range(4)]
    begin = time.monotonic()
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        together = list(pool.map(functools.partial(trained, "together"), range(4)))
    print(f"\n{backend} x 2: four runs at once: {time.monotonic() - begin:.0f} s")
    assert together == alone
    assert len({tuple(losses) for losses, *_ in alone}) == 4
    assert left_in(temporary) == []


def files_of(workdir):
    """Losses, names of files, and the seed in the settings."""
    names = {str(path.relative_to(workdir)) for path in workdir.rglob("*") if path.is_file()}
    # A checkpoint that is due while the one before it is being written is left out: the disk decides.
    names -= {f"checkpoints/step-{step:08}.safetensors" for step in (5, 10, 15)}
    return losses_in(workdir), sorted(names), json.loads((workdir / "config.json").read_text())["seed"]
