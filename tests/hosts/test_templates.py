"""The templates of `cluster/` can be read by those who they are for; that they run is shown by the proofs."""

import os
import re
import subprocess

import pytest

from kerasdp.cli.main import parse
from tests.hosts.templates import FOLDER

SCRIPTS = sorted(path.name for path in FOLDER.iterdir() if path.suffix in (".sh", ".sbatch"))
MANIFESTS = sorted(path.name for path in FOLDER.glob("*.yaml"))
OF_TRAIN = [name for name in SCRIPTS + MANIFESTS if "recipes/train.py" in (FOLDER / name).read_text()]
# Each person's own lines.
MOST_LINES_TO_EDIT = 5
# What a template starts: a program of this name that writes down its environment and its command line. Open MPI hands
# other machines the variables alone that -x names.
LAUNCHERS = {"slurm.sbatch": "srun", "mpirun.sh": "mpirun", "torchrun.sh": "torchrun"}
STAND_IN = """#!/bin/sh
case "$0" in */mpirun) case " $* " in *" -x KERASDP_SECRET "*) ;; *) unset KERASDP_SECRET ;; esac ;; esac
printf %s "${KERASDP_SECRET-}" > secret
printf %s "$*" > command
"""


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


def started(name, folder):
    """Runs a template's launcher in a folder; returns how it ended, and the secret that the processes were given."""
    (folder / "bin").mkdir(exist_ok=True)
    (folder / "bin" / LAUNCHERS[name]).write_text(STAND_IN)
    (folder / "bin" / LAUNCHERS[name]).chmod(0o755)
    (folder / ".venv" / "bin").mkdir(parents=True, exist_ok=True)
    (folder / ".venv" / "bin" / "activate").touch()
    env = {name: value for name, value in os.environ.items() if name != "KERASDP_SECRET"}
    env |= {"PATH": f"{folder}/bin:{env['PATH']}", "HOME": str(folder), "SLURM_JOB_ID": "7"}
    done = subprocess.run(["bash", FOLDER / name], cwd=folder, env=env, capture_output=True, text=True)
    return done, (folder / "secret").read_text() if (folder / "secret").exists() else None


@pytest.mark.parametrize("name", ["slurm.sbatch", "mpirun.sh"])
def test_each_start_has_a_secret_of_its_own_that_is_written_nowhere(name, tmp_path):
    secrets = set()
    for _ in range(2):
        done, secret = started(name, tmp_path)
        assert done.returncode == 0, done.stderr
        assert len(secret) == 64
        assert secret not in done.stdout + done.stderr + (tmp_path / "command").read_text()
        secrets.add(secret)
    assert len(secrets) == 2


def test_srun_is_given_the_whole_environment():
    """Also where sbatch was told --export=NONE."""
    command = (FOLDER / "slurm.sbatch").read_text().partition("\nsrun ")[2]
    assert "--export=ALL" in command.partition("python")[0]


def test_torchrun_takes_the_secret_of_the_home_or_does_not_start(tmp_path):
    done, secret = started("torchrun.sh", tmp_path)
    assert done.returncode == 2 and secret is None and ".kerasdp_secret" in done.stderr
    # As the template's first lines say.
    (command,) = re.findall(r"\(umask 077 .*?\)", (FOLDER / "torchrun.sh").read_text())
    subprocess.run(["bash", "-c", command], env=os.environ | {"HOME": str(tmp_path)}, check=True)
    file = tmp_path / ".kerasdp_secret"
    assert file.stat().st_mode & 0o777 == 0o600
    done, secret = started("torchrun.sh", tmp_path)
    assert done.returncode == 0 and secret == file.read_text().strip() and len(secret) == 64
    assert secret not in done.stdout + done.stderr + (tmp_path / "command").read_text()


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
def test_pods_have_the_secret_and_no_rights(name):
    """By the Pod Security Standard "restricted", with nothing to write to but volumes."""
    pod = job_of(name)["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    secret = {"valueFrom": {"secretKeyRef": {"name": "kerasdp", "key": "secret"}}}
    assert {"name": "KERASDP_SECRET", **secret} in container["env"]
    # Made as the first lines of the file say; and nowhere in the file itself.
    assert "kubectl create secret generic kerasdp --from-file=secret=" in (FOLDER / name).read_text()
    assert not any(manifest["kind"] == "Secret" for manifest in manifests(name))
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
