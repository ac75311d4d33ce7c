"""The manifest for Kubernetes: the fields that decide whether its pods become one job."""

from __future__ import annotations

import shlex
from typing import Any

import pytest
from ranks import ROOT

yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")


def quantity(text: str) -> int:
    """Returns a quantity of memory in bytes."""
    number, unit = text[:-2], text[-2:]
    return int(number) << {"Mi": 20, "Gi": 30}[unit]


@pytest.fixture
def manifest() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((ROOT / "examples/jobset.yaml").read_text())
    return found


def test_pods_are_one_job(manifest: dict[str, Any]) -> None:
    assert manifest["apiVersion"] == "jobset.x-k8s.io/v1alpha2"
    assert manifest["kind"] == "JobSet"
    name = manifest["metadata"]["name"]
    (hosts,) = manifest["spec"]["replicatedJobs"]
    assert hosts["replicas"] == 1
    job = hosts["template"]["spec"]
    # Without it the pods have no index.
    assert job["completionMode"] == "Indexed"
    assert job["parallelism"] == job["completions"], "all pods must run at the same time"
    # A pod alone cannot join again: JobSet starts all of them.
    assert job["backoffLimit"] == 0
    assert job["template"]["spec"]["restartPolicy"] == "Never"
    assert manifest["spec"]["failurePolicy"]["maxRestarts"] > 0

    (container,) = job["template"]["spec"]["containers"]
    variables = {each["name"]: each["value"] for each in container["env"]}
    network = manifest["spec"]["network"]
    assert network["enableDNSHostnames"] is True
    assert variables["MASTER_ADDR"] == f"{name}-{hosts['name']}-0-0.{network['subdomain']}"
    assert isinstance(variables["MASTER_PORT"], str), "Kubernetes takes only texts here"
    (line,) = container["args"]
    assert container["command"] == ["sh", "-c"]
    words = shlex.split(line)
    assert words[:2] == ["exec", "torchrun"], "signals must reach torchrun"
    assert words[-1] == "train.py"
    options = dict(zip(words[2:-1:2], words[3:-1:2], strict=True))
    assert options == {
        "--nnodes": str(job["completions"]),
        "--nproc-per-node": options["--nproc-per-node"],
        "--node-rank": "$JOB_COMPLETION_INDEX",
        "--master-addr": "$MASTER_ADDR",
        "--master-port": "$MASTER_PORT",
    }
    assert options["--nproc-per-node"] == container["resources"]["requests"]["cpu"]
    apart = job["template"]["spec"]["affinity"]["podAntiAffinity"]
    (term,) = apart["requiredDuringSchedulingIgnoredDuringExecution"]
    assert term["labelSelector"]["matchLabels"] == {"jobset.sigs.k8s.io/jobset-name": name}


def test_memory(manifest: dict[str, Any]) -> None:
    (hosts,) = manifest["spec"]["replicatedJobs"]
    pod = hosts["template"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    (mount,) = container["volumeMounts"]
    assert mount["mountPath"] == "/dev/shm"
    (volume,) = pod["volumes"]
    assert volume["name"] == mount["name"]
    assert volume["emptyDir"]["medium"] == "Memory"
    # What lies there counts as memory of the pod, which is killed if it has too much.
    limit = quantity(container["resources"]["limits"]["memory"])
    assert quantity(volume["emptyDir"]["sizeLimit"]) < limit


def test_a_job_of_kubeflow() -> None:
    job: dict[str, Any] = yaml.safe_load((ROOT / "examples/trainjob.yaml").read_text())
    assert job["apiVersion"] == "trainer.kubeflow.org/v1alpha1"
    assert job["kind"] == "TrainJob"
    assert job["spec"]["runtimeRef"] == {"name": "torch-distributed"}
    trainer = job["spec"]["trainer"]
    # The runtime sets PET_NNODES and the like, which torchrun takes instead of options.
    assert trainer["command"] == ["torchrun", "train.py"]
    assert str(trainer["numProcPerNode"]) == trainer["resourcesPerNode"]["requests"]["cpu"]
    assert trainer["numNodes"] == 2
    assert all(isinstance(each["value"], str) for each in trainer["env"])
    limits = trainer["resourcesPerNode"]["limits"]
    assert quantity(limits["memory"]) >= quantity("8Gi")


def test_the_image_has_what_it_copies() -> None:
    lines = (ROOT / "examples/Dockerfile").read_text().splitlines()
    steps = [line.split(maxsplit=1) for line in lines if line and not line.startswith("#")]
    assert [step for step, _ in steps] == [
        "ARG", "FROM", "ARG", "RUN", "COPY", "RUN", "COPY", "WORKDIR", "CMD"
    ]  # fmt: skip
    copied = [text.split()[0] for step, text in steps if step == "COPY"]
    assert copied[0] == "dist/smddp-*.whl"  # what `make wheels` makes
    assert (ROOT / copied[1]).exists()
    # Before the first FROM an argument is known to FROM only, so the others come behind it.
    assert "${PYTHON}" in dict(steps)["FROM"]
