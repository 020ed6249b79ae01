"""The templates of `cluster/` can be read by those who they are for; that they run is shown by the proofs."""

import re
import subprocess

import pytest

from tests.cli.test_cli import errors_of
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
        text = re.sub(r'["\\]|#.*|\n\n.*', "", text, flags=re.DOTALL)
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
    assert errors_of("train", flags) == [None]
    text = (FOLDER / name).read_text()
    assert 0 < text.partition("<--.")[2].count("<--") <= MOST_LINES_TO_EDIT


def manifests(name):
    yaml = pytest.importorskip("yaml")
    return list(yaml.safe_load_all((FOLDER / name).read_text()))


def job_of(name):
    """The Job that Kubernetes runs, whether an engine or the template makes it."""
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
    assert "--resume" in container["command"]
    assert job["completionMode"] == "Indexed"
    given = {entry["name"]: entry.get("value") for entry in container["env"]}
    assert str(job["completions"]) == str(job["parallelism"]) == given["JAX_NUM_PROCESSES"] == given["WORLD_SIZE"]
    number = {"fieldRef": {"fieldPath": "metadata.annotations['batch.kubernetes.io/job-completion-index']"}}
    of_pod = {entry["name"] for entry in container["env"] if entry.get("valueFrom") == number}
    assert of_pod == {"JAX_PROCESS_ID", "RANK"}
    # The name of pod 0, as Kubernetes and JobSet make it.
    network = last["spec"]["network"]["subdomain"] if last["kind"] == "JobSet" else pod["subdomain"]
    assert given["MASTER_ADDR"] == f"{job_of(name)['metadata']['name']}-0.{network}"
    assert given["JAX_COORDINATOR_ADDRESS"] == f"{given['MASTER_ADDR']}:{given['MASTER_PORT']}"
    assert pod["restartPolicy"] == "Never"  # a podFailurePolicy needs it
    action = "FailJob" if last["kind"] == "JobSet" else "Ignore"
    rule = {"action": action, "onExitCodes": {"operator": "In", "values": [99]}}
    assert rule in job["podFailurePolicy"]["rules"]
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}


def labels_of_pods(name):
    """Those of the template, and those that the makers of the pods add to them (Kubernetes 1.27, JobSet 0.2)."""
    *_, last = manifests(name)
    job = job_of(name)
    labels = job["spec"]["template"].get("metadata", {}).get("labels", {})
    labels |= {"job-name": job["metadata"]["name"], "batch.kubernetes.io/job-name": job["metadata"]["name"]}
    if last["kind"] == "JobSet":
        labels["jobset.sigs.k8s.io/jobset-name"] = last["metadata"]["name"]
    return labels


@pytest.mark.parametrize("name", MANIFESTS)
def test_only_pods_of_the_job_reach_its_pods(name):
    (policy,) = (manifest for manifest in manifests(name) if manifest["kind"] == "NetworkPolicy")
    pods = policy["spec"]["podSelector"]["matchLabels"]
    assert pods and pods.items() <= labels_of_pods(name).items()
    assert policy["spec"]["policyTypes"] == ["Ingress"]
    # One rule, of pods of this namespace alone, on all ports.
    assert policy["spec"]["ingress"] == [{"from": [{"podSelector": {"matchLabels": pods}}]}]
    for service in (manifest for manifest in manifests(name) if manifest["kind"] == "Service"):
        assert service["spec"]["selector"].items() <= labels_of_pods(name).items()


@pytest.mark.parametrize("name", MANIFESTS)
def test_pods_have_no_rights(name):
    """By the Pod Security Standard "restricted", with nothing to write to but volumes."""
    pod = job_of(name)["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert pod["automountServiceAccountToken"] is False
    assert not {"hostNetwork", "hostPID", "hostIPC"} & pod.keys()
    assert pod["securityContext"]["runAsNonRoot"] is True and pod["securityContext"]["runAsUser"] > 0
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]},
    }  # fmt: skip
    written = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert volumes[written["/dev/shm"]]["emptyDir"] == {"medium": "Memory"}
    assert volumes[written["/tmp"]]["emptyDir"] == {}
    assert {"name": "HOME", "value": "/tmp"} in container["env"]


@pytest.mark.parametrize("name", MANIFESTS)
def test_manifests_are_what_kubernetes_knows(name):
    """By the schemas of `pip install kubernetes-validate`; in strict form, which refuses unknown fields."""
    schemas = pytest.importorskip("kubernetes_validate", reason="needs pip install -e '.[proofs]'")
    for manifest in manifests(name):
        schemas.validate(job_of(name) if manifest["kind"] == "JobSet" else manifest, "1.31", strict=True)
