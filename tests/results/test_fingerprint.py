from __future__ import annotations

import getpass
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from plumbline.machine.fingerprint import public_environment, take_fingerprint
from plumbline.machine.software import project_commit


def git(root: Path, *command: str) -> str:
    identity = ["-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false"]
    done = subprocess.run(["git", "-C", str(root), *identity, *command], capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    (tmp_path / "harness").mkdir()
    (tmp_path / "harness" / "code.py").write_text("1\n")
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "--quiet", "--message", "first", "--no-verify")
    return tmp_path


def test_a_fingerprint_gives_nobody_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "hunter2hunter2")
    text = take_fingerprint("cpu").model_dump_json()
    private = {
        "hunter2hunter2",
        str(Path.home()),
        os.getcwd(),
        sys.prefix,
        platform.node(),
        getpass.getuser(),
    }
    # A machine called "x" or a user called "cpu" tells nothing.
    assert not [word for word in private if len(word) > 3 and word in text]


def test_only_settings_that_matter_are_published() -> None:
    given = {
        "OMP_NUM_THREADS": "4",
        "NCCL_ALGO": "Ring,Tree",
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        "PYTORCH_CUDA_ALLOC_CONF": "/home/ada/x",
        "NCCL_PROTO": "two words",
        "AWS_SECRET_ACCESS_KEY": "k",
    }
    assert set(public_environment(given)) == {"OMP_NUM_THREADS", "NCCL_ALGO", "CUBLAS_WORKSPACE_CONFIG"}


def test_simulated_devices_are_the_cpu_and_have_no_driver() -> None:
    key = take_fingerprint("cpu").key
    assert (key.accelerator, key.device, key.nodes) == ("cpu", key.cpu, 1)
    assert (key.driver, key.cuda, key.nccl) == (None, None, None)
    assert key.cpu_cores is None or key.cpu_cores >= 1
    assert key.torch is None or key.torch.count(".") == 1


def test_the_commit_is_the_checkouts(checkout: Path) -> None:
    assert project_commit(checkout) == git(checkout, "rev-parse", "HEAD")


def test_changed_or_new_code_is_dirty_and_a_report_is_not(checkout: Path) -> None:
    (checkout / "reports").mkdir()
    (checkout / "reports" / "support.md").write_text("new")
    assert project_commit(checkout) == git(checkout, "rev-parse", "HEAD")
    (checkout / "harness" / "new.py").write_text("2\n")
    assert project_commit(checkout) == git(checkout, "rev-parse", "HEAD") + "-dirty"


def test_no_checkout_no_commit(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    inside = checkout / "site-packages"
    inside.mkdir()
    assert project_commit(inside) is None
    empty = tmp_path_factory.mktemp("empty")
    git(empty, "init", "--quiet")
    assert project_commit(empty) is None


def test_a_git_hooks_variables_do_not_mislead(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commit = git(checkout, "rev-parse", "HEAD")
    monkeypatch.setenv("GIT_DIR", "/nowhere")
    monkeypatch.setenv("GIT_INDEX_FILE", "/nowhere/index")
    assert project_commit(checkout) == commit


def test_the_store_does_not_need_torch_to_be_imported() -> None:
    code = "import sys, plumbline.results.run, plumbline.machine.fingerprint; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])


def test_a_machine_without_torch_has_a_fingerprint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    found = take_fingerprint("cuda")
    assert found.torch is None
    assert found.key.device_count is None


def test_the_driver_and_the_gpus_are_asked_for_without_touching_cuda(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\nprintf 'NVIDIA B, 570.1\\nNVIDIA A, 570.1\\nNVIDIA A, 570.1\\n'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    key = take_fingerprint("cuda").key
    assert (key.device, key.driver) == ("NVIDIA A + NVIDIA B", "570.1")
