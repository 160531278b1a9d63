"""The files for Kubernetes and Slurm in docs/examples/ray, as far as they can be tried here.

The manifests are checked against the fields of KubeRay's v1 reference and the Kubernetes API; the
script by shellcheck. It also runs on one node, with an srun that starts local processes.
"""

import contextlib
import os
import random
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from on_ray.nodes import wait_for

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "examples" / "ray"
MANIFESTS = ("rayjob.yaml", "networkpolicy.yaml")
BIN = Path(sys.executable).parent


# The fields that the files need, as named by the Kubernetes API and KubeRay's reference.
PODS = (
    r"template\.(metadata\.labels\..+|spec\.(automountServiceAccountToken|shareProcessNamespace"
    r"|volumes\.(name|emptyDir\.(medium|sizeLimit))|containers\.(name|image|workingDir|command|args"
    r"|env\.(name|value|valueFrom\.fieldRef\.fieldPath)|ports\.(containerPort|name)"
    r"|resources\.(requests|limits)\.(cpu|memory)|volumeMounts\.(name|mountPath))))"
)
CLUSTER = (
    rf"(rayVersion|authOptions\.mode|headGroupSpec\.(rayStartParams\..+|{PODS})|workerGroupSpecs\."
    rf"(groupName|replicas|minReplicas|maxReplicas|rayStartParams\..+|{PODS}))"
)
KINDS = {
    "RayJob": (
        "ray.io/v1",
        (
            "submissionMode|entrypoint|shutdownAfterJobFinishes|activeDeadlineSeconds"
            rf"|rayClusterSpec\.{CLUSTER}"
        ),
    ),
    "NetworkPolicy": (
        "networking.k8s.io/v1",
        (
            r"podSelector\.matchLabels\..+|policyTypes|ingress\.(ports\.(protocol|port)"
            r"|from\.(podSelector|namespaceSelector)\.matchLabels\..+)"
        ),
    ),
}


def fields(found: Any, path: str = "") -> Iterator[str]:
    """Yield the paths of the fields of a manifest."""
    for each in found if isinstance(found, list) else [found]:
        if isinstance(each, dict):
            for name, value in each.items():
                yield from fields(value, f"{path}.{name}")
        else:
            yield path.removeprefix(".")


def manifest(name: str) -> Any:
    return yaml.safe_load((FOLDER / name).read_text())


@pytest.mark.parametrize("name", MANIFESTS)
def test_a_manifest_has_only_existing_fields(name: str) -> None:
    found = manifest(name)
    version, spec = KINDS[found["kind"]]
    assert found["apiVersion"] == version
    known = re.compile(rf"apiVersion|kind|metadata\.name|spec\.({spec})")
    assert [path for path in fields(found) if not known.fullmatch(path)] == []


def test_containers_of_a_pod_share_memory_and_names_and_only_ray_has_the_token() -> None:
    spec = manifest("rayjob.yaml")["spec"]["rayClusterSpec"]
    assert spec["authOptions"] == {"mode": "token"}
    policy = manifest("networkpolicy.yaml")["spec"]
    groups = [spec["headGroupSpec"], *spec["workerGroupSpecs"]]
    for group in groups:
        template = group["template"]
        assert template["metadata"]["labels"] == policy["podSelector"]["matchLabels"]
        volumes = {volume["name"]: volume for volume in template["spec"]["volumes"]}
        for container in template["spec"]["containers"]:
            (mount,) = container["volumeMounts"]
            assert mount == {"name": "shm", "mountPath": "/dev/shm"}  # noqa: S108
            assert mount["name"] in volumes
            environment = {entry["name"]: entry.get("value") for entry in container["env"]}
            assert environment["SHMACC_NAMESPACE"] == "table"
            assert not [name for name in environment if name.startswith("RAY_AUTH")]
    entrypoint = manifest("rayjob.yaml")["spec"]["entrypoint"]
    asked = int(entrypoint.partition("chief.py ")[2].split()[0])
    (workers,) = spec["workerGroupSpecs"]
    loop = workers["template"]["spec"]["containers"][1]["args"][0]
    numbers = loop.partition("for number in ")[2].partition(";")[0].split()
    assert asked == workers["replicas"] * len(numbers)
    assert f"* {len(numbers)} + number" in loop, "contributors of pods must not overlap"


def test_ray_takes_its_part_of_shared_memory_before_segments_can() -> None:
    """A full /dev/shm is then an error of a worker, not a bus error in the node's Ray."""
    setting = "RAY_preallocate_plasma_memory"
    spec = manifest("rayjob.yaml")["spec"]["rayClusterSpec"]
    for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"]):
        pod = group["template"]["spec"]
        ray, *others = [
            {entry["name"]: entry.get("value") for entry in container["env"]}
            for container in pod["containers"]
        ]
        assert ray[setting] == "1"
        assert not any(setting in environment for environment in others)
        (volume,) = pod["volumes"]
        size = int(volume["emptyDir"]["sizeLimit"].removesuffix("Gi")) << 30
        assert int(group["rayStartParams"]["object-store-memory"]) <= size // 2
    script = (FOLDER / "slurm.sh").read_text()
    before, starts, _ = script.partition('--object-store-memory="$store"')
    assert starts
    assert f"export {setting}=1\n" in before


def test_the_manifest_restarts_a_chief_that_failed(tmp_path: Path) -> None:
    fails_twice = tmp_path / "python"
    fails_twice.write_text('#!/bin/bash\necho "$@" >>runs\n(($(wc -l <runs) == 3))\n')
    fails_twice.chmod(0o755)
    entrypoint = manifest("rayjob.yaml")["spec"]["entrypoint"]
    path = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    subprocess.run(["bash", "-c", entrypoint], cwd=tmp_path, env=path, check=True)
    assert (tmp_path / "runs").read_text() == 3 * "/job/chief.py 12 200\n"


def test_shellcheck_accepts_the_script() -> None:
    for command in (["bash", "-n"], [BIN / "shellcheck", "--enable=quote-safe-variables"]):
        subprocess.run([*command, FOLDER / "slurm.sh"], check=True)


@pytest.mark.parametrize("name", [*MANIFESTS, "slurm.sh", "chief.py", "worker.py"])
def test_the_page_links_to_the_files(name: str) -> None:
    page = (ROOT / "docs" / "kubernetes-and-slurm.md").read_text()
    assert f"(examples/ray/{name})" in page


# Like srun on an allocation of one node: it starts tasks that differ by their number.
_SRUN = """#!/bin/bash
tasks=1
while [[ $1 == --* ]]; do
    case $1 in --ntasks=*) tasks=${1#*=} ;; esac
    shift
done
trap 'kill $(jobs -pr) 2>/dev/null; wait' TERM
for ((task = 0; task < tasks; task++)); do SLURM_PROCID=$task "$@" & done
wait
"""


class Job:
    """Runs slurm.sh in a folder of its own, on an allocation of one node: this machine."""

    def __init__(self, folder: Path, chief: str, steps: int) -> None:
        self.folder, self.number = folder, random.randrange(10**6, 10**7)
        srun = folder / "srun"
        srun.write_text(_SRUN)
        srun.chmod(0o755)
        (folder / "worker.py").write_text((FOLDER / "worker.py").read_text())
        (folder / "chief.py").write_text(chief)
        environment = {
            **os.environ,
            "PATH": f"{folder}:{BIN}:{os.environ['PATH']}",
            "SLURM_JOB_ID": str(self.number),
            "SLURM_JOB_NUM_NODES": "1",
            "SLURM_CPUS_PER_TASK": "1",
            "SLURM_SUBMIT_DIR": str(folder),
            "WORKERS_PER_NODE": "2",
            "STEPS": str(steps),
            "OBJECT_STORE_BYTES": str(150 << 20),
        }
        for name in ("RAY_ADDRESS", "SHMACC_NAMESPACE"):
            environment.pop(name, None)
        self.process = subprocess.Popen(
            ["bash", str(FOLDER / "slurm.sh")],
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def names(self) -> list[str]:
        return [name for name in os.listdir("/dev/shm") if f"job-{self.number}" in name]  # noqa: PTH208, S108

    def processes(self) -> list[str]:
        found = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                found.append(path.read_text(errors="replace"))
        return [line for line in found if f"/ray-{self.number}" in line]

    def end(self, status: int) -> str:
        """Return the job's output; the job must have left nothing."""
        output, _ = self.process.communicate(timeout=200)
        assert self.process.returncode == status, output
        assert not list(self.folder.glob(".ray-token-*"))
        assert not self.names(), output
        assert not Path(f"/tmp/ray-{self.number}").exists()  # noqa: S108
        # Find Ray's processes by that folder: it is in their command lines.
        wait_for(lambda: not self.processes())
        return output


# Somebody with another token asks for the cluster's state, in the middle of the job.
_STRANGER = """
        import os, pathlib, subprocess
        (token,) = pathlib.Path().glob(".ray-token-*")
        assert token.stat().st_mode & 0o777 == 0o600
        done = subprocess.run(
            ["ray", "status"], env=dict(os.environ, RAY_AUTH_TOKEN="0" * 64), capture_output=True
        )
        print("stranger:", done.returncode, done.stderr.decode())
"""


def test_the_script_runs_a_job_with_a_token_and_cleans_up(tmp_path: Path) -> None:
    chief = (FOLDER / "chief.py").read_text()
    asked = chief.replace("\n        learnt = np", f"{_STRANGER}        learnt = np")
    assert asked != chief
    output = Job(tmp_path, asked, 60).end(0)
    assert "60 updates of 2 gradients: 100%" in output
    assert "stranger: 1" in output
    assert "token is missing or incorrect" in output


# A chief that is killed, once, when its update was made and its round is still open.
_KILLED = """
                if params.step > 20 and not os.path.exists("killed"):
                    open("killed", "w").close()
                    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_job_goes_on_after_its_chief_was_killed(tmp_path: Path) -> None:
    chief = (FOLDER / "chief.py").read_text()
    for before, after in (
        ("import sys\n", "import os, signal, sys\n"),
        ("        while", "        print('began at', params.step, flush=True)\n        while"),
        ("update(taken)\n", f"update(taken){_KILLED}"),
    ):
        assert chief.count(before) == 1
        chief = chief.replace(before, after)
    output = Job(tmp_path, chief, 60).end(0)
    assert re.findall(r"^began at (\d+)$", output, re.MULTILINE) == ["0", "21"]
    assert "60 updates of 2 gradients: 100%" in output


def test_a_job_that_is_cancelled_leaves_nothing(tmp_path: Path) -> None:
    job = Job(tmp_path, (FOLDER / "chief.py").read_text(), 10**9)
    wait_for(job.names, 200)
    job.process.send_signal(signal.SIGTERM)
    job.end(128 + signal.SIGTERM)
