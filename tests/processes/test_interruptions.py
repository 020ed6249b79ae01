"""Ctrl-C and SIGTERM at any moment of a run: it ends soon, as it should, leaves nothing, and loses nothing."""

import collections
import concurrent.futures
import dataclasses
import json
import os
import pathlib
import random
import re
import signal
import subprocess
import time

import pytest

from tests.helpers import PROGRAMS, ROOT, finish, kill_session, left_after, left_in, start

NUM_INTERRUPTIONS = int(os.environ.get("KERASDP_INTERRUPTIONS", "200"))
AT_ONCE = int(os.environ.get("KERASDP_AT_ONCE", str(os.cpu_count() or 1)))
# Every so-manieth starts as a user starts it, by `python`; and of those that have checkpoints, is resumed.
COLD_EVERY, RESUME_EVERY = 10, int(os.environ.get("KERASDP_RESUME_EVERY", "10"))
SECONDS_TO_END = 20
# Three epochs of eight steps, and an evaluation after each.
STEPS, STEPS_PER_EPOCH = 24, 8
FLAGS = [
    "--device=cpu", "--model=mlp", "--batch_size=16", "--epochs=3", "--log_every=1", "--checkpoint_every=2",
    "--verbose=2", "--dataset=synthetic(shape=(8,8,1), num_classes=4, num_samples=128, num_test_samples=32)",
]  # fmt: skip
# Signal, whether it goes to the group of processes, as a terminal's does, and the exit codes, where it is in time.
WAYS = {
    "Ctrl-C": (signal.SIGINT, True, (130,)),
    "Ctrl-C to the parent": (signal.SIGINT, False, (130,)),
    "SIGTERM to the parent": (signal.SIGTERM, False, (99, 143)),
    "SIGTERM to the group": (signal.SIGTERM, True, (99, 143)),
}


@dataclasses.dataclass
class Interruption:
    """What is done to a run, and what came of it."""

    number: int
    way: str
    is_cold: bool
    threshold: int
    wait: tuple[str, float]  # for a share of the run's time, for a step's line, or for a checkpoint that is written
    workdir: pathlib.Path
    moment: str = ""
    code: int | None = None
    seconds: float = 0.0
    error: str = ""
    faults: list[str] = dataclasses.field(default_factory=list)

    def __str__(self):
        words = f"{self.number}: {self.way}, {'cold' if self.is_cold else 'warm'}, collects after {self.threshold}"
        return f"{words}, {self.wait[0]} {self.wait[1]:.2f}, {self.moment}: {self.code}, {self.seconds:.1f} s"


def chosen(number, seed, folder):
    """One of all interruptions, the same each time."""
    draw = random.Random(f"{seed} {number}")
    kind = draw.choice(["time", "time", "step", "step", "checkpoint"])
    wait = {"time": draw.uniform(0, 1.1), "step": draw.randint(0, STEPS), "checkpoint": draw.randint(1, 8)}[kind]
    return Interruption(
        number=number, way=draw.choice(list(WAYS)), is_cold=number % COLD_EVERY == COLD_EVERY - 1,
        threshold=draw.choice([1, 5, 50]), wait=(kind, wait), workdir=folder / str(number),
    )  # fmt: skip


def started(backend, count, case, *flags):
    """The run, once the program has begun; a cold one at once."""
    arguments = [*FLAGS, f"--backend={backend}", f"--gpus={count}", f"--workdir={case.workdir}", *flags]
    temporary = pathlib.Path(f"{case.workdir}.tmp")
    temporary.mkdir(exist_ok=True)
    if not case.is_cold:
        mark = pathlib.Path(f"{case.workdir}.mark")
        program = [PROGRAMS / "interrupted.py", case.threshold, mark, *arguments]
        process = start(*program, backend=backend, TMPDIR=str(temporary))
        while not mark.exists() and process.poll() is None:
            time.sleep(0.002)
        return process
    # `sitecustomize` is imported before the program, in every process.
    site = pathlib.Path(f"{case.workdir}.site")
    site.mkdir(exist_ok=True)
    (site / "sitecustomize.py").write_text(f"import gc\ngc.set_threshold({case.threshold})\n")
    paths = f"{site}{os.pathsep}{ROOT}"
    return start("recipes/train.py", *arguments, backend=None, PYTHONPATH=paths, TMPDIR=str(temporary))


def end_of(process, timeout):
    """Exit code and output; None for a run that does not end, which is killed."""
    try:
        done = finish(process, timeout)
        return done.returncode, done.stdout, done.stderr
    except subprocess.TimeoutExpired:
        kill_session(process.pid)
        return None, "", ""


def losses_of(workdir):
    """Each step's loss, as it stands in the file; the last line may be half written."""
    try:
        lines = (workdir / "steps.jsonl").read_text().splitlines(keepends=True)
    except FileNotFoundError:
        return {}
    found = [json.loads(line) for line in lines if line.endswith("\n")]
    return {line["step"]: line["loss"] for line in found}


def is_saving(workdir):
    try:
        return any(name.endswith(".tmp") for name in os.listdir(workdir / "checkpoints"))
    except FileNotFoundError:
        return False


def moment_of(case, is_over):
    """Where the run is, by its files."""
    num_steps = len(losses_of(case.workdir))
    if is_over:
        return "was over"
    if is_saving(case.workdir):
        return "saves"
    if num_steps == 0:
        return "before step 1" if (case.workdir / "config.json").exists() else "starts"
    if num_steps >= STEPS - 1:  # whose line comes after the last step
        return "after the last step"
    # A step's line comes with the next step.
    return "evaluates" if num_steps % STEPS_PER_EPOCH in (0, STEPS_PER_EPOCH - 1) else "trains"


def await_moment(case, process, usual_seconds):
    kind, value = case.wait
    deadline = time.monotonic() + (value * usual_seconds if kind == "time" else 10 * usual_seconds)
    num_seen = was_saving = 0
    while time.monotonic() < deadline and process.poll() is None:
        if kind == "step" and len(losses_of(case.workdir)) >= value:
            time.sleep(random.Random(case.number).uniform(0, 0.03))
            return
        if kind == "checkpoint":
            saving = is_saving(case.workdir)
            num_seen, was_saving = num_seen + (saving and not was_saving), saving
            if num_seen >= value:
                return
        time.sleep(0.001 if kind == "checkpoint" else 0.003)


def interrupt(backend, count, case, usual):
    """Starts a run, interrupts it, and notes what is not as it should be."""
    process = started(backend, count, case)
    with concurrent.futures.ThreadPoolExecutor(1) as reading:
        end = reading.submit(end_of, process, 300)
        await_moment(case, process, usual[case.is_cold])
        number, to_group, codes = WAYS[case.way]
        case.moment = moment_of(case, process.poll() is not None)
        begin = time.monotonic()
        try:
            os.killpg(process.pid, number) if to_group else process.send_signal(number)
        except ProcessLookupError:
            case.moment = "was over"
        try:
            code, _, case.error = end.result(SECONDS_TO_END)
        except concurrent.futures.TimeoutError:
            case.faults.append(f"runs on after {SECONDS_TO_END} s")
            kill_session(process.pid)
            code, _, case.error = end.result()
    case.seconds = time.monotonic() - begin
    # One that no handler was there for yet ended it as the system does; a shell shows 128 and its number.
    case.code = code if code is None or code >= 0 else 128 - code
    judge(case, codes, process.pid)


# What jax (0.10.2) writes if the garbage collector runs after Python has cleared jax's modules, at its end.
_OF_JAX_AT_THE_END = re.compile(
    r"Exception ignored in: <function _xla_gc_callback.*\nTraceback.*\n.*\nAttributeError: 'NoneType'.*\n?"
)


def judge(case, codes, pid):
    case.error = _OF_JAX_AT_THE_END.sub("", case.error)
    is_early = case.moment == "starts" and "kerasdp/flags.py" not in case.error
    if is_early and "Traceback" in case.error:  # by Python itself: the program had not begun, in words of the kit
        case.moment, case.code = "Python starts", 130
    is_whole = len(losses_of(case.workdir)) == STEPS
    if case.code not in codes and not (case.code == 0 and is_whole):
        case.faults.append(f"ended with {case.code}")
    if case.moment != "Python starts" and ("Traceback" in case.error or "Exception ignored" in case.error):
        case.faults.append("a traceback")
    if (case.code == 99) != ("saved in" in case.error):
        case.faults.append("99 and 'saved in' do not go together")
    case.faults += [f"process {left} is left" for left in left_after(pid, 5)]
    if left := left_in(f"{case.workdir}.tmp"):
        case.faults.append(f"left in TMPDIR: {left}")


def resume(backend, count, case, expected):
    """A run that was interrupted learns what it would have learnt, bit by bit."""
    again = dataclasses.replace(case, is_cold=False, threshold=700)
    pathlib.Path(f"{case.workdir}.mark").unlink(missing_ok=True)
    code, _, error = end_of(started(backend, count, again, "--resume"), 120)
    if code != 0 or losses_of(case.workdir) != expected:
        case.faults.append(f"resumed, it ended with {code} and other losses: {error.strip()[-300:]}")
    if "saved in" in case.error:
        step = int(case.error.partition("after step ")[2].split()[0].strip(",;:"))
        if step < STEPS and not (case.workdir / "checkpoints").exists():
            case.faults.append("said that it saved, and has not")


def undisturbed(backend, count, folder):
    """Losses, and the seconds of a warm and of a cold run."""
    seconds, losses = {}, {}
    for number, is_cold in enumerate((False, False, True)):  # the first warm one waits for its server
        case = Interruption(-1, "", is_cold, 50, ("time", 0.0), folder / f"undisturbed-{number}")
        begin = time.monotonic()
        code, _, error = end_of(started(backend, count, case), 300)
        assert code == 0, error
        seconds[is_cold], losses[is_cold] = time.monotonic() - begin, losses_of(case.workdir)
    assert losses[False] == losses[True] and len(losses[True]) == STEPS
    return losses[True], seconds


@pytest.mark.proof
@pytest.mark.timeout(6 * 3600)
@pytest.mark.parametrize("count", [1, 2])
def test_an_interruption_at_any_moment_ends_the_run(backend, count, tmp_path):
    seed = os.environ.get("KERASDP_SEED", "0")
    expected, usual = undisturbed(backend, count, tmp_path)
    cases = [chosen(number, seed, tmp_path) for number in range(NUM_INTERRUPTIONS)]
    begin = time.monotonic()

    def one(case):
        interrupt(backend, count, case, usual)
        if case.number % RESUME_EVERY == 0 and (case.workdir / "config.json").exists():
            resume(backend, count, case, expected)
        for fault in case.faults:
            print(f"FAULT {case}: {fault}\n{case.error.strip()[-1500:]}", flush=True)
        if case.number % 25 == 0:
            print(case, flush=True)

    with concurrent.futures.ThreadPoolExecutor(AT_ONCE) as pool:
        list(pool.map(one, cases))
    seconds = (time.monotonic() - begin) / len(cases)
    print(f"\n{backend} x {count}: {len(cases)} interruptions, {seconds:.1f} s each, {AT_ONCE} at a time")
    print(f"undisturbed: {usual[False]:.1f} s warm, {usual[True]:.1f} s cold")
    moments = collections.Counter((case.moment, case.way, case.code) for case in cases)
    print("\n".join(f"{times} x {words}" for words, times in moments.items()), max(case.seconds for case in cases))
    kinds = collections.Counter(re.sub(r"\d+|\[.*|:.*", "", fault) for case in cases for fault in case.faults)
    print("\n".join(f"{times} x {kind}" for kind, times in kinds.items()))
    assert not [str(case) for case in cases if case.faults]
    heard = [case for case in cases if case.moment not in ("after the last step", "was over")]
    assert sum(case.code == 0 for case in heard) < len(heard) / 20  # too late by a moment
