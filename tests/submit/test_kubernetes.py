"""Kubernetes: manifests are valid for its API, states are read from its answers, and the pods make a run."""

from __future__ import annotations

import os
import shutil
import stat
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from plumbline.cli.main import main
from plumbline.core.errors import PlanError
from plumbline.results.run import read_run
from plumbline.submit import pod
from plumbline.submit.engine import EngineError, Phase, SelectedCell, TaskCommand
from plumbline.submit.engines.kubernetes import KubernetesEngine
from plumbline.submit.kubernetes_objects import PORT, merged, states_of
from plumbline.submit.submission import Submission

ROOT = Path(__file__).parents[2]
KUBECTL = Path(__file__).parent / "kubectl"
SPANNING = ("jobset", "pytorchjob")


@pytest.fixture
def submission(tmp_path):
    """Return a function that makes a submission of four cells in two tasks, in a new folder."""

    def make(nodes=1, kind=None, *, accelerator="auto", subjects=("reference",), workloads=(), mount=None, **settings):
        engine = KubernetesEngine("plumbline:1", "reports", mount or str(tmp_path), "lab", kind, **settings)
        work = TaskCommand(nodes, 8, accelerator, ("-q",), subjects, workloads, sys.executable, str(ROOT), "/suites")
        cells = tuple(SelectedCell(f"cell-{number}", f"/suites/a.py::[{number}]", {}) for number in range(4))
        tasks = (("cell-0", "cell-2"), ("cell-1", "cell-3"))
        return Submission(tmp_path / "20261123T014053Z-CAE93168", ("plumbline",), work, cells, tasks, engine)

    return make


def objects_of(submission, tasks=(0, 1)):
    return list(yaml.safe_load_all(submission.engine.text(submission, submission.new_job(), tasks)))


def pod_of(one):
    spec = one["spec"]
    if one["kind"] == "JobSet":
        spec = spec["replicatedJobs"][0]["template"]["spec"]
    return (spec["pytorchReplicaSpecs"]["Master"] if one["kind"] == "PyTorchJob" else spec)["template"]


@pytest.mark.parametrize(("nodes", "kind"), [(1, None), (1, "jobset"), (1, "pytorchjob"), (2, None), (3, "pytorchjob")])
def test_manifests_are_objects_of_the_api(submission, nodes, kind):
    from kubeflow_trainer_api import models  # 400 classes, whose import would delay every process that collects tests

    secret, *objects = objects_of(submission(nodes, kind, pod={"nodeSelector": {"pool": "gpu"}}))
    known = {
        "Secret": models.IoK8sApiCoreV1Secret,
        "Job": models.IoK8sApiBatchV1Job,
        "JobSet": models.JobsetV1alpha2JobSet,
    }
    for one in (secret, *objects):
        if one["kind"] in known:
            assert known[one["kind"]].from_dict(one).to_dict() == one, "no unknown field, and none of another type"
    for one in objects:
        template = pod_of(one)
        assert models.IoK8sApiCoreV1PodTemplateSpec.from_dict(template).to_dict() == template


@pytest.mark.nightly
@pytest.mark.parametrize(("nodes", "kind"), [(1, None), (2, "pytorchjob")])
def test_manifests_fit_the_json_schemas_of_kubernetes(submission, nodes, kind):
    """The strict schemas, from kubeconform, of the oldest supported release and of the newest."""
    validate = pytest.importorskip("kubernetes_validate", reason="needs kubernetes-validate, which has the schemas")
    for version in ("1.29", validate.latest_version()):
        for one in objects_of(submission(nodes, kind)):
            if one["kind"] == "PyTorchJob":
                one = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "one"}, "spec": pod_of(one)["spec"]}
            validate.validate(one, version, strict=True)


def test_tasks_of_one_node_are_the_indices_of_one_job(submission):
    _, job = objects_of(submission())
    spec, (container,) = job["spec"], pod_of(job)["spec"]["containers"]
    assert (spec["completionMode"], spec["completions"], spec["parallelism"]) == ("Indexed", 2, 2)
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 8}
    assert container["args"][1:] == ["0", "1"]
    volumes = {volume["name"]: volume for volume in pod_of(job)["spec"]["volumes"]}
    mounts = {mount["mountPath"]: volumes[mount["name"]] for mount in container["volumeMounts"]}
    assert mounts["/dev/shm"]["emptyDir"] == {"medium": "Memory"}
    assert mounts[str(submission().run.parent)]["persistentVolumeClaim"] == {"claimName": "reports"}
    assert "resources" not in pod_of(objects_of(submission(accelerator="cpu"))[1])["spec"]["containers"][0]


@pytest.mark.parametrize("kind", SPANNING)
def test_a_task_of_several_nodes_is_an_object_whose_pods_know_their_place(submission, kind):
    _, *objects = objects_of(submission(3, kind))
    assert [one["metadata"]["annotations"]["plumbline-tasks"] for one in objects] == ["0", "1"]
    for one in objects:
        container = pod_of(one)["spec"]["containers"][0]
        if kind == "jobset":
            values = {variable["name"]: variable.get("value") for variable in container["env"]}
            name = one["metadata"]["name"]
            assert values["PET_MASTER_ADDR"] == f"{name}-nodes-0-0.{name}", "its first pod's name in its own network"
            assert len(f"{name}-nodes-0-0-abcde") <= 63, "names of pods are labels"
            assert (values["PET_NNODES"], values["PET_MASTER_PORT"]) == ("3", str(PORT))
        else:
            replicas = one["spec"]["pytorchReplicaSpecs"]
            assert {role: spec["replicas"] for role, spec in replicas.items()} == {"Master": 1, "Worker": 2}
            assert container["name"] == "pytorch"
            assert container["ports"] == [{"name": "pytorchjob-port", "containerPort": PORT, "protocol": "TCP"}]


def test_a_patch_is_merged_as_rfc_7386_has_it():
    assert merged({"a": {"b": 1, "c": 2}, "d": [1]}, {"a": {"b": None, "e": {"f": None}}, "d": [2]}) == {
        "a": {"c": 2, "e": {}},
        "d": [2],
    }


def test_secrets_are_in_the_secret_alone_and_only_its_owner_can_read_it(submission, monkeypatch, tmp_path):
    made = submission(2, environment={"HUB_TOKEN": "very secret"})
    made.save()
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(
        EngineError, match=r"kubectl is not installed here[\s\S]*--namespace lab apply -f [\s\S]*--attach"
    ):
        made.engine.send(made, made.new_job(), [1])
    assert "-l plumbline-job=plumbline-" in made.engine.log(made, made.jobs()[1], 1)
    assert made.jobs() == {1: "plumbline-20261123t014053z-cae93168-0"}, "somebody applies it elsewhere"
    file = made.folder / "secret.yaml"
    values = yaml.safe_load(file.read_text())["stringData"]
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert values["HUB_TOKEN"] == "very secret"
    others = [place for place in made.folder.iterdir() if place.is_file() and place != file]
    assert {place.name for place in others} == {
        "submission.json", "jobs.jsonl", "plumbline-20261123t014053z-cae93168-0.yaml"
    }  # fmt: skip
    for text in (*(place.read_text() for place in others), made.engine.text(made, "job", [0, 1])):
        assert not any(values[name] in text for name in ("PLUMBLINE_TOKEN", "HUB_TOKEN"))
    made.engine.end(made)
    assert not file.exists()


def test_a_submission_is_read_back_as_it_was(submission):
    made = submission(2, pod={"tolerations": [{"operator": "Exists"}]})
    made.save()
    assert Submission.load(made.run) == made


def at(submission, job="job"):
    """Return the submission's objects as those of a job."""
    _, *objects = objects_of(submission)
    for one in objects:
        one["metadata"]["labels"]["plumbline-job"] = job
    return objects


def a_pod(status, **labels):
    return {"kind": "Pod", "metadata": {"labels": {"plumbline-job": "job", **labels}}, "status": status}


def test_each_index_of_a_job_has_a_state_of_its_own(submission):
    (job,) = at(submission())
    unmet = {"type": "PodScheduled", "status": "False", "message": "0/3 nodes are available"}
    waits = a_pod({"phase": "Pending", "conditions": [unmet]}, **{"batch.kubernetes.io/job-completion-index": "1"})
    runs = a_pod({"phase": "Running"}, **{"batch.kubernetes.io/job-completion-index": "0"})
    found = states_of([job, waits, runs])
    assert [found["job", task].name for task in (0, 1)] == ["Running", "Pending"]
    assert found["job", 1].reason == "0/3 nodes are available"
    assert all(state.is_live for state in found.values())
    job["status"] = {"failedIndexes": "0"}
    assert states_of([job, waits])["job", 0].phase is Phase.ENDED
    assert states_of([job, waits])["job", 1].is_live
    job["status"] = {"conditions": [{"type": "Failed", "status": "True", "message": "why"}], "completedIndexes": "0-1"}
    assert [state.name for state in states_of([job]).values()] == ["Complete", "Complete"]


@pytest.mark.parametrize(("kind", "right"), [("jobset", "Completed"), ("pytorchjob", "Succeeded")])
def test_a_task_of_several_nodes_runs_when_all_of_its_pods_do(submission, kind, right):
    objects = at(submission(2, kind))
    first, second = a_pod({"phase": "Running"}, **{"plumbline-task": "1"}), a_pod({}, **{"plumbline-task": "1"})
    pulling = {"state": {"waiting": {"reason": "ImagePullBackOff", "message": "no such image"}}}
    second["status"] = {"phase": "Pending", "containerStatuses": [pulling]}
    found = states_of([*objects, first, second])
    assert found["job", 1].name == "Pending"
    assert found["job", 1].reason == "ImagePullBackOff: no such image"
    assert states_of([*objects, first])["job", 1].name == "Running"
    for name in (right, "Failed"):
        objects[1]["status"] = {"conditions": [{"type": name, "status": "True"}]}
        state = states_of([*objects, first])["job", 1]
        assert (state.name, state.phase) == (name, Phase.ENDED)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"mount": "/elsewhere"}, r"report directory .* is not on the volume reports, .* at /elsewhere"),
        ({"subjects": (f"{ROOT}/suites/detection/sync.py::right",)}, "Copy the file to the volume"),
        ({"workloads": (f"{ROOT}/harness/plumbline/own_workloads/skeleton.py",)}, "Copy the file to the volume"),
        ({"nodes": 2, "kind": "job"}, "--kind jobset or pytorchjob"),
        ({"nodes": 2, "subjects": ("torch", "reference")}, "one subject"),
        ({"nodes": 2, "subjects": ("torch;python=/venv/bin/python",)}, "the image's Python"),
    ],
)
def test_what_pods_could_not_find_or_start_is_refused(submission, changed, said):
    made = submission(**changed)
    with pytest.raises(PlanError, match=said):
        made.engine.check(made)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["kubernetes"], "--engine kubernetes needs --image"),
        (["kubernetes", "--image", "one"], "needs --volume"),
        (["kubernetes", "--image", "one", "--volume", "Reports"], "--volume Reports: names in Kubernetes have"),
        (["kubernets"], "unknown engine 'kubernets': did you mean 'kubernetes'?"),
        (["ray", "--image", "one"], "--image is for --engine kubernetes, not for ray"),
        (["kubernetes", "--image", "one", "--volume", "v", "--time", "1"], "--time is for --engine slurm"),
    ],
)
def test_a_wrong_option_is_said_before_anything_is_planned(words, said, capsys):
    assert main(["submit", "--nodes", "1", "--gpus", "1", "--engine", *words]) == 4
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(("text", "said"), [("- a list", "a pod's spec must be a mapping"), ("{", "is not valid YAML")])
def test_a_patch_that_is_no_mapping_is_refused(tmp_path, capsys, text, said):
    (tmp_path / "pod.yaml").write_text(text)
    words = ["--engine", "kubernetes", "--image", "one", "--volume", "v", "--pod", str(tmp_path / "pod.yaml")]
    assert main(["submit", "--nodes", "1", "--gpus", "1", *words]) == 4
    assert said in capsys.readouterr().err


def test_a_pod_whose_volume_is_another_says_so(tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(pod.signal, "signal", lambda *handler: None)
    assert pod.main([str(tmp_path), "0"]) == 2
    assert "Check that the submitting machine mounts this volume" in capfd.readouterr().err


@pytest.mark.parametrize(("index", "left"), [("0", [0, 2]), ("1", [1])])
def test_a_pod_examines_what_is_left_of_the_task_at_its_index(submission, monkeypatch, index, left):
    example = ROOT / "reports" / "example-simulated"
    made = submission()
    cells = (*made.cells[:3], replace(made.cells[3], cell=read_run(example).results[0].cell))
    made = replace(made, cells=cells, tasks=(made.tasks[0], ("cell-1", cells[3].cell)))
    made.save()
    for task, own in enumerate(made.tasks):
        made.select(task, own)
    shutil.copytree(example, made.part(1) / "20261123T014100Z-00000000")
    examined = []
    monkeypatch.setattr(pod, "run_cells", lambda submission, task, cells: examined.append((task, cells)) or 0)
    monkeypatch.setattr(pod.signal, "signal", lambda *handler: None)
    monkeypatch.setenv("JOB_COMPLETION_INDEX", index)
    assert pod.main([str(made.run), "0", "1"]) == 0
    assert examined == [(int(index), [f"/suites/a.py::[{number}]" for number in left])]
    made.selection(int(index)).write_text("")
    assert pod.main([str(made.run), "0", "1"]) == 0
    assert len(examined) == 1, "nothing is left"


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    """Return the folder of a cluster that runs pods as processes; they have all ended after the test."""
    folder, programs = tmp_path / "cluster", tmp_path / "bin"
    folder.mkdir()
    programs.mkdir()
    shutil.copy(KUBECTL, programs / "kubectl")
    monkeypatch.setenv("PATH", f"{programs}:{Path(sys.executable).parent}:{os.environ['PATH']}")
    monkeypatch.setenv("CLUSTER", str(folder))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    yield folder
    running = [log.name for log in folder.glob("pod-*.log") if not log.with_suffix(".exit").exists()]
    assert not running, "pods were left behind"


def logs_of(cluster):
    return "\n".join(f"{log.name}: {log.read_text()}" for log in sorted(cluster.glob("pod-*.log")))


@pytest.fixture(params=["processes", "containers"])
def image(request, monkeypatch):
    """Return the pods' image: any if they are processes; one built from ci/Dockerfile if podman is available."""
    if request.param == "processes":
        return "one"
    if "PLUMBLINE_TEST_IMAGE" not in os.environ or shutil.which("podman") is None:
        pytest.skip("needs podman, and in PLUMBLINE_TEST_IMAGE an image: podman build -f ci/Dockerfile -t NAME .")
    monkeypatch.setenv("CONTAINERS", "podman")
    return os.environ["PLUMBLINE_TEST_IMAGE"]


@pytest.mark.nightly
@pytest.mark.parametrize(("nodes", "kind"), [(1, "job"), *((2, kind) for kind in SPANNING)])
def test_what_the_manifests_say_is_run_and_collected(cluster, image, tmp_path, capsys, nodes, kind):
    """The pods' commands, as a kubelet runs them: a task's two pods are two processes, or containers, that meet."""
    volume = tmp_path / "volume"
    volume.mkdir()
    words = ["--engine", "kubernetes", "--image", image, "--volume", f"reports={volume}", "--namespace", "lab"]
    words += ["--kind", kind, "--nodes", nodes, "--gpus", 3 - nodes, "--array", 2 // nodes, "--accelerator", "cpu"]
    words += ["--report-dir", volume / "runs", "--env", "OMP_NUM_THREADS=1"]
    cells = ["--workloads", "mlp", "--precisions", "32", "--backends", "none,ddp"]
    assert main(["submit", *map(str, words), "--", *cells]) == 0, capsys.readouterr().out + logs_of(cluster)
    said = capsys.readouterr().out
    assert said.count("\njob plumbline-") == 1, said
    run = read_run(volume / "runs" / "latest")
    assert not run.incomplete
    assert {result.outcome.value for result in run.results} == {"passed"}
    assert {planned.cell for planned in run.header.planned} == {result.cell for result in run.results}
    assert (nodes, 3 - nodes) in {(result.num_nodes, result.gpus) for result in run.results}
    assert not list(cluster.glob("Secret-*")), "it went with the run"
    assert "--namespace lab delete secret" in (cluster / "asked").read_text()

    made = Submission.load(run.path)
    made.select(0, made.tasks[0])
    assert pod.cells_left(made, 0) == [], "a pod that takes the place of another has nothing to do"
