"""CI gets a finding at the trainer's line, and JUnit XML with its cause and its command."""

from __future__ import annotations

from xml.etree import ElementTree

from plumbline.cli.main import main


def test_a_wrong_cell_is_shown_at_the_trainer_s_line(project, capsys):
    project.trainer("doubled.py", factor="2")
    cell = "doubled-mlp-none-1x1-32"
    project.pytest("--gpus=1", "--subject=doubled.py", f"--cell={cell}", "--junitxml=junit.xml")
    line = (
        (project.root / "doubled.py")
        .read_text()
        .splitlines()
        .index("@subject(name='doubled', backends=['none', 'ddp'], precisions=[\"32\"])")
    )
    assert project.run.lines[0]["sources"] == {"doubled": {"file": "doubled.py", "line": line + 1}}
    capsys.readouterr()
    assert main(["report", str(project.run.path), "--format", "github"]) == 0
    assert capsys.readouterr().out.startswith(f"::error file=doubled.py,line={line + 1},title=doubled%3A ")
    case = ElementTree.parse(project.root / "junit.xml").find(".//testcase")
    told = {one.attrib["name"]: one.attrib["value"] for one in case.iter("property")}
    assert told["cell"] == cell
    assert told["check"] == "gradients"
    assert told["step"] == "0"
    assert cell in told["command"]
    assert told["cause"]
