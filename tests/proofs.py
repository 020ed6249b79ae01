"""When each file of proofs last passed: docs/proofs.md, which `pytest --record` keeps, and slices of it.

python -m pytest -m proof -n 0 -s --record tests/data    # run proofs, and write down the files that passed
python tests/proofs.py COMMIT                            # print the files that `.ci/run` takes with this commit
"""

import collections
import dataclasses
import datetime
import importlib.metadata
import pathlib
import platform
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "proofs.md"
NEVER = "not recorded"
SECONDS_OF_A_SLICE = 1200
# What a file without a record is taken to last, so that a slice has four of them at most.
SECONDS_IF_UNKNOWN = 300
PACKAGES = ("keras", "torch", "jax", "tensorflow")


@dataclasses.dataclass
class Row:
    """A line of the page's table: a file, and when all of its proofs last passed in one run."""

    file: str
    passed: str = NEVER
    seconds: str = "-"
    versions: str = "-"
    # What became of the last run, if that was not a pass.
    since: str = "-"
    # A machine or a time that is not everywhere; "-" if the file may be in a slice.
    needs: str = "-"

    @property
    def may_be_in_a_slice(self) -> bool:
        return self.needs == "-" and self.expected_seconds <= SECONDS_OF_A_SLICE

    @property
    def expected_seconds(self) -> int:
        return SECONDS_IF_UNKNOWN if self.seconds == "-" else int(self.seconds.replace(",", ""))


def read(page: pathlib.Path = PAGE) -> tuple[str, list[Row]]:
    """The text before the table's first row, and the rows."""
    head, line, table = page.read_text().partition("|---|---|---|---|---|---|\n")
    return head + line, [Row(*map(str.strip, row.strip("|").split("|"))) for row in table.splitlines()]


def write(head: str, rows: list[Row], page: pathlib.Path = PAGE) -> None:
    """Writes the page, with its rows in the order of their files."""
    rows = sorted(rows, key=lambda row: row.file)
    page.write_text(head + "".join(f"| {' | '.join(dataclasses.astuple(row))} |\n" for row in rows))


def slice_of(commit: str, rows: list[Row]) -> list[str]:
    """The files from a place on that the commit's hash chooses, as many as last 20 minutes together."""
    rows = [row for row in rows if row.may_be_in_a_slice]
    first, seconds, chosen = int(commit, 16) % len(rows), 0, []
    for row in rows[first:] + rows[:first]:
        seconds += row.expected_seconds
        if seconds > SECONDS_OF_A_SLICE:
            break
        chosen.append(row.file)
    return chosen


def versions() -> str:
    """Those that a result may depend on."""
    # Keras may be that of keras-nightly.
    of_modules = importlib.metadata.packages_distributions()
    found = [f"{name} {importlib.metadata.version(of_modules[name][0])}" for name in PACKAGES if name in of_modules]
    return ", ".join([*found, f"python {platform.python_version()}"])


class Recorder:
    """A plugin of pytest that writes down which files of proofs have run as a whole, and how."""

    def __init__(self, page: pathlib.Path) -> None:
        self.page = page
        self.outcomes: dict[str, dict[str, str]] = collections.defaultdict(dict)
        self.seconds: dict[str, float] = collections.defaultdict(float)
        self.running: dict[str, set[str]] = collections.defaultdict(set)
        self.partial: set[str] = set()
        self.written: list[str] = []

    def pytest_deselected(self, items: list[pytest.Item]) -> None:
        self.partial |= {_file_of(item.nodeid) for item in items if item.get_closest_marker("proof")}

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        for item in session.items:
            if item.get_closest_marker("proof"):
                self.running[_file_of(item.nodeid)].add(item.nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        file = _file_of(report.nodeid)
        if report.nodeid in self.running[file]:
            self.seconds[file] += report.duration
            if report.outcome != "passed" or report.when == "call":
                self.outcomes[file].setdefault(report.nodeid, report.outcome)
            if report.failed:  # in its end, too
                self.outcomes[file][report.nodeid] = "failed"
            if report.when == "teardown":
                self.running[file].remove(report.nodeid)

    def pytest_sessionfinish(self) -> None:
        head, rows = read(self.page)
        of_files = {row.file: row for row in rows}
        for file, outcomes in self.outcomes.items():
            if file in self.partial:
                continue
            row = of_files.setdefault(file, Row(file))
            today = f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}"
            if self.running[file]:
                row.since = f"{today}: interrupted after {self.seconds[file]:.0f} s"
            elif set(outcomes.values()) == {"passed"}:
                row.passed, row.versions, row.since = today, versions(), "-"
                row.seconds = f"{max(self.seconds[file], 1):.0f}"
            else:
                counts = collections.Counter(outcomes.values())
                row.since = f"{today}: {', '.join(f'{counts[kind]} {kind}' for kind in sorted(counts))}"
            self.written.append(file)
        write(head, list(of_files.values()), self.page)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        terminalreporter.write_line(f"{self.page}: {len(self.written)} files of proofs written down")


def _file_of(nodeid: str) -> str:
    return nodeid.partition("::")[0]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds `--record`."""
    parser.addoption("--record", action="store_true", help=f"write down in {PAGE.name} which files of proofs passed")


def pytest_configure(config: pytest.Config) -> None:
    """Adds the recorder, where it is asked for."""
    if not config.getoption("--record"):
        return
    if config.getoption("numprocesses", None) or any("::" in arg for arg in config.args):
        raise pytest.UsageError("--record: expected whole files, and -n 0, since proofs measure times")
    config.pluginmanager.register(Recorder(config.rootpath / "docs" / PAGE.name))


if __name__ == "__main__":
    print(*slice_of(sys.argv[1], read()[1]))
