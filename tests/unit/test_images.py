"""Images and workflows take what they were written with, by hash or commit, and have no more rights than they need."""

import re
import tomllib

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.helpers import ROOT

DOCKERFILES = sorted((ROOT / "docker").glob("*.Dockerfile"))
IMAGES = [path.name.removesuffix(".Dockerfile") for path in DOCKERFILES]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").iterdir())
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
# What each image has beside what kerasdp needs in any case.
EXTRAS = {"cpu": ("torch", "jax"), "jax": ("jax-cuda",), "tensorflow": ("tensorflow-cuda",), "torch": ("torch",)}
FRAMEWORKS = {"torch", "jax", "jaxlib", "tensorflow", "tensorflow-cpu"}


def instructions(image):
    """Of its Dockerfile, as (name, arguments); without comments."""
    text = re.sub(r"^#.*\n", "", (ROOT / "docker" / f"{image}.Dockerfile").read_text(), flags=re.M)
    lines = text.replace("\\\n", " ").splitlines()
    return [tuple(line.split(None, 1)) for line in lines if line]


def pinned(image):
    """The version of each package in an image's lock, whose lines each end with at least one hash."""
    versions = {}
    for entry in re.split(
        r"\n(?!\s)", re.sub(r"^#.*\n", "", (ROOT / "docker" / f"{image}.lock").read_text(), flags=re.M)
    ):
        if entry.strip():
            found = re.fullmatch(r"([\w.-]+)==(\S+)((?: \\\n    --hash=sha256:[0-9a-f]{64})+)\n?", entry)
            assert found, f"{image}.lock: no version and hashes of one package: {entry[:80]}"
            assert found[1] not in versions
            versions[found[1]] = found[2]
    return versions


def constraints():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return dict(line.split("==") for line in lines if not line.startswith("#"))


@pytest.mark.parametrize("image", IMAGES)
def test_a_lock_has_the_tested_versions_of_all_that_an_image_needs(image):
    versions = pinned(image)
    of_project = PROJECT["project"]
    needed = [*of_project["dependencies"], *PROJECT["build-system"]["requires"]]
    for extra in (*EXTRAS[image], "fsspec"):
        needed += of_project["optional-dependencies"][extra]
    for requirement in map(Requirement, needed):
        assert requirement.specifier.contains(versions[canonicalize_name(requirement.name)]), requirement
    different = {name for name, version in constraints().items() if versions.get(name, version) != version}
    assert not different, f"sh docker/lock.sh: constraints.txt has other versions of {different}"
    expected = {"cpu": {"torch", "jax", "jaxlib", "tensorflow-cpu"}, "jax": {"jax", "jaxlib"}}
    assert versions.keys() & FRAMEWORKS == expected.get(image, {image})


@pytest.mark.parametrize("image", IMAGES)
def test_an_image_installs_what_its_lock_says_and_nothing_else(image):
    steps = instructions(image)
    installed = [step for name, text in steps if name == "RUN" for step in text.split("&&") if "install" in step]
    packages, project, folder = (step.split() for step in installed)
    assert packages[:2] == project[:2] == ["pip", "install"] and folder[:2] == ["install", "-d"]
    assert {"--require-hashes", "--only-binary=:all:"} <= set(packages) and packages[-2:] == [
        "-r",
        f"/src/docker/{image}.lock",
    ]
    # kerasdp itself: no package, and no tool to build it, comes from elsewhere.
    assert {"--no-index", "--no-deps", "--no-build-isolation"} <= set(project) and project[-1] == "/src"
    # The tag names one version of Python, for which the lock was made, and one of Debian.
    base = next(text for name, text in steps if name == "ARG" and text.startswith("BASE="))
    assert re.fullmatch(r"BASE=python:3\.12\.\d+-slim-[a-z]+(@sha256:[0-9a-f]{64})?", base)
    assert "--python-version=3.12" in (ROOT / "docker" / "lock.sh").read_text()


@pytest.mark.parametrize("image", IMAGES)
def test_an_image_runs_as_a_user_without_rights(image):
    names = [name for name, _ in instructions(image)]
    (user,) = (text for name, text in instructions(image) if name == "USER")
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", user), "by its number, which runAsNonRoot can check"
    assert names.index("USER") > max(number for number, name in enumerate(names) if name in ("RUN", "COPY"))


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow_reads_the_repository_alone_and_takes_actions_by_their_commit(path):
    yaml = pytest.importorskip("yaml")
    workflow = yaml.safe_load(path.read_text())
    assert workflow["permissions"] == {"contents": "read"}
    assert not any("permissions" in job for job in workflow["jobs"].values())
    for job in workflow["jobs"].values():
        for step in job["steps"]:
            assert re.search(r"@[0-9a-f]{40}$", step.get("uses", "@" + 40 * "0")), step
            if step.get("uses", "").startswith("actions/checkout@"):
                assert step["with"]["persist-credentials"] is False
