"""Training from a folder of shards is training from the arrays that are in them, also where it resumes."""

import pytest

from tests.helpers import BACKENDS, losses_in, run

STEPS = 25  # of 23 an epoch


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("shards")


def shards(folder, kind):
    if not (folder / kind).exists():
        done = run("recipes/make_shards.py", folder / kind, f"--format={kind}", backend=BACKENDS[0])
        assert done.returncode == 0, done.stderr
        assert len(list((folder / kind).iterdir())) == 6
    return folder / kind


def losses(recipe, backend, count, workdir, folder, *flags):
    # Not by `run(backend=...)` for shards: it forks what is spawned, and readers in C++ do not survive that.
    done = run(
        f"recipes/{recipe}.py", f"--backend={backend}", f"--gpus={count}", "--device=cpu", f"--workdir={workdir}",
        "--log_every=1", "--learning_rate=0.003", *flags, backend=None if recipe == "sharded" else backend,
        HF_HOME=str(folder / "cache"),
    )  # fmt: skip
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    return losses_in(workdir)


def expected(folder, tmp_path):
    return losses("train", BACKENDS[0], 1, tmp_path / "arrays", folder, f"--max_steps={STEPS}")


@pytest.mark.proof
def test_the_same_losses_as_of_arrays(folder, tmp_path):
    flags = f"--data_dir={shards(folder, 'array_record')}", f"--max_steps={STEPS}"
    found = losses("sharded", BACKENDS[0], 1, tmp_path / "shards", folder, *flags)
    assert found == pytest.approx(expected(folder, tmp_path), rel=2e-4)


@pytest.mark.proof
@pytest.mark.skipif(len(BACKENDS) < 3, reason="a backend is missing")
def test_resumed_from_other_files_by_other_backends(folder, tmp_path):
    """Stopped within an epoch, and at its end; the same samples come from files of the other format."""
    found = []
    for backend, count, kind, end in (
        ("torch", 2, "parquet", 5), ("jax", 2, "array_record", 24), ("tensorflow", 1, "parquet", STEPS),
    ):  # fmt: skip
        flags = (f"--data_dir={shards(folder, kind)}", f"--max_steps={end}", *(["--resume"] if found else []))
        found = losses("sharded", backend, count, tmp_path / "shards", folder, *flags)
        assert len(found) == end
    assert found == pytest.approx(expected(folder, tmp_path), rel=2e-4)


def test_a_folder_without_shards(tmp_path):
    done = run("recipes/sharded.py", f"--data_dir={tmp_path}", f"--backend={BACKENDS[0]}", backend=BACKENDS[0])
    assert done.returncode == 2
    assert done.stderr.strip().endswith(f"--data_dir: expected a folder with files train-*. Received: '{tmp_path}'")
    assert list(tmp_path.iterdir()) == []
