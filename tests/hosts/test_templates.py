"""The templates of `cluster/` can be read by those who they are for; that they run is shown by the proofs."""

import re
import subprocess

import pytest

from kerasdp.cli.parse import parse
from tests.hosts.templates import FOLDER

SCRIPTS = sorted(path.name for path in FOLDER.iterdir() if path.suffix in (".sh", ".sbatch"))
MANIFESTS = sorted(path.name for path in FOLDER.glob("*.yaml"))
OF_TRAIN = [name for name in SCRIPTS + MANIFESTS if "recipes/train.py" in (FOLDER / name).read_text()]
# Each person's own lines.
MOST_LINES_TO_EDIT = 5


def flags_of(name):
    """What stands after recipes/train.py, as a shell would give it."""
    text = (FOLDER / name).read_text().partition("recipes/train.py")[2]
    if name in SCRIPTS:
        text = re.sub(r'["\\]|#.*|\n\n.*', "", text, flags=re.DOTALL).replace("$coordinator", "node0:29400")
    else:
        text = "\n".join(line.strip(" -") for line in re.findall(r"- (--\S+)", text))
        text = "--" + text.replace("\n", " --")
    return text.split()


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_is_one_of_bash(name):
    done = subprocess.run(["bash", "-n", FOLDER / name], capture_output=True, text=True)
    assert done.returncode == 0 and not done.stderr, done.stderr


@pytest.mark.parametrize("name", OF_TRAIN)
def test_a_template_has_flags_that_there_are_and_few_lines_to_edit(name):
    flags = flags_of(name)
    assert {"--resume", "--model=lenet", "--epochs=20"} <= set(flags), flags
    config = parse(["train.py", *flags])
    assert config.resume and config.workdir and config.epochs == 20
    text = (FOLDER / name).read_text()
    assert 0 < text.partition("<--.")[2].count("<--") <= MOST_LINES_TO_EDIT


def manifests(name):
    yaml = pytest.importorskip("yaml")
    return list(yaml.safe_load_all((FOLDER / name).read_text()))


def job_of(name):
    """The Job that Kubernetes runs, whoever makes it."""
    *_, last = manifests(name)
    if last["kind"] == "Job":
        return last
    (replicated,) = last["spec"]["replicatedJobs"]
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "kerasdp-hosts-0"}, **replicated["template"]}


@pytest.mark.parametrize("name", MANIFESTS)
def test_the_pods_of_a_job_find_each_other_and_restart(name):
    *_, last = manifests(name)
    job = job_of(name)["spec"]
    pod = job["template"]["spec"]
    (container,) = pod["containers"]
    config = parse(container["command"][1:])
    assert job["completionMode"] == "Indexed"
    assert job["completions"] == job["parallelism"] == int(config.hosts)
    # The name of pod 0, as Kubernetes and JobSet make it.
    network = last["spec"]["network"]["subdomain"] if last["kind"] == "JobSet" else pod["subdomain"]
    assert config.coordinator.startswith(f"{job_of(name)['metadata']['name']}-0.{network}:")
    assert pod["restartPolicy"] == "Never"  # a podFailurePolicy needs it
    action = "FailJob" if last["kind"] == "JobSet" else "Ignore"
    rule = {"action": action, "onExitCodes": {"operator": "In", "values": [99]}}
    assert rule in job["podFailurePolicy"]["rules"]
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}


@pytest.mark.parametrize("name", MANIFESTS)
def test_manifests_are_what_kubernetes_knows(name):
    """By the schemas of `pip install kubernetes-validate`; in strict form, which refuses unknown fields."""
    schemas = pytest.importorskip("kubernetes_validate")
    for manifest in manifests(name):
        schemas.validate(job_of(name) if manifest["kind"] == "JobSet" else manifest, "1.31", strict=True)
