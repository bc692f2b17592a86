"""A run records which version of the user's trainer it trained."""

from __future__ import annotations

import subprocess

from plumbline.cli.main import main

CELLS = ("--gpus", "1", "--workloads", "mlp", "--precisions", "32")


def git(folder, *command):
    identity = ["-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false"]
    done = subprocess.run(["git", *identity, *command], cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_history_names_a_trainer_whose_file_has_changed(project, kept_pools):
    trainer = project.trainer("mine.py")
    git(project.root, "init", "--quiet")
    git(project.root, "add", "mine.py")
    git(project.root, "commit", "--quiet", "--no-verify", "--message", "first")
    assert project.pytest(*CELLS, "--subject", trainer).ret == 0
    before = project.run.lines[0]["code"]["mine"]
    assert before["commit"] == git(project.root, "rev-parse", "HEAD")

    project.trainer("mine.py", factor="2")
    assert project.pytest(*CELLS, "--subject", trainer).ret == 1
    after = project.run.lines[0]["code"]["mine"]
    assert after["commit"] == f"{before['commit']}-dirty"
    assert after["sha256"] != before["sha256"]

    assert main(["history", str(project.root / "reports")]) == 0
    page = (project.root / "reports" / "history" / "index.html").read_text()
    assert "Nothing that is recorded differs" not in page
    assert f"source {before['sha256'][:10]} → {after['sha256'][:10]}" in page


def test_a_run_is_not_resumed_with_another_trainer(project, kept_pools):
    project.trainer("mine.py")
    assert project.pytest(*CELLS, "--subject", "mine.py").ret == 0
    path = project.run.path / "results.jsonl"
    path.write_text(path.read_text().splitlines(keepends=True)[0])
    project.trainer("mine.py", factor="2")
    refused = project.pytest(*CELLS, "--subject", "mine.py", "--resume")
    assert refused.ret == 4
    refused.stderr.fnmatch_lines(["*the source of mine has changed since*begin a new run*"])
