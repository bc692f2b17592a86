"""Damaged files: truncated, with flipped bits, of a newer schema, or hostile. They are read, judged and shown."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
from pathlib import Path
from typing import Any

from fault_lane.cells import RIGHT, train
from fault_lane.fault import Fault, Shot
from fault_lane.project import fault
from plumbline.core.cell import Cell
from plumbline.core.errors import PlumblineError, TraceError
from plumbline.core.finding import Finding
from plumbline.core.outcome import Outcome
from plumbline.core.topology import Topology
from plumbline.evidence.read import read_rank, read_trace
from plumbline.machine.fingerprint import Fingerprint
from plumbline.report.markdown import support_page
from plumbline.report.terminal import support_for_terminal
from plumbline.results.files import CorruptRecord, NewerSchema
from plumbline.results.header_footer import SCHEMA_VERSION, Footer, Header
from plumbline.results.records import Result
from plumbline.results.run import RESULTS, line_of, read_run

AT_ONCE = 200
"""Damaged files per injection."""

HOSTILE = (
    "../../etc/passwd",
    "<script>alert(1)</script>",
    "\x1b[31m\x1b]0;owned\x07",
    "| a | `b` | <img src=x onerror=alert(1)>",
    "\u202egnp.exe",
    "9" * 5000,
)
_draw = random.SystemRandom()
_CODE = re.compile(r"(`+)[^`].*?\1")  # a page does not escape text between backticks


def _evidence(bench: Any, folder: Path) -> Path:
    """Return a copy of the evidence of a right launch."""
    train(bench.pool(RIGHT), "trains", folder / "right")
    return folder / "right" / "rank-1.safetensors"


def _flipped(content: bytes) -> bytes:
    place = _draw.randrange(len(content))
    return content[:place] + bytes([content[place] ^ 1 << _draw.randrange(8)]) + content[place + 1 :]


def trace_truncated(bench: Any, folder: Path) -> Shot:
    """Truncated evidence."""
    return _damaged_trace(bench, folder, lambda content: content[: _draw.randrange(len(content))])


def trace_flipped(bench: Any, folder: Path) -> Shot:
    """Evidence with a flipped bit."""
    return _damaged_trace(bench, folder, _flipped)


def _damaged_trace(bench: Any, folder: Path, damage: Any) -> Shot:
    file = _evidence(bench, folder)
    content, right = file.read_bytes(), repr(read_rank(file))
    accepted = 0
    for _ in range(AT_ONCE):
        file.write_bytes(damage(content))
        try:
            if repr(read_rank(file)) != right:
                return Shot(False, "changed evidence was read as if it were unchanged")
            accepted += 1
        except TraceError as error:
            if str(file) not in str(error):
                return Shot(False, f"the file is not named: {error}")
    return Shot(accepted <= AT_ONCE // 50, f"{accepted} of {AT_ONCE} were the same after all")


def _run(folder: Path, words: str = "all is well") -> tuple[Path, bytes]:
    cell = Cell("mine", "mlp", "ddp", Topology(1, 2), "32", "cpu")
    header = Header.of([cell], command=["pytest", words], options={}, fingerprint=Fingerprint(), simulated=True)
    result = Result.of(cell, Finding("gradients", Outcome.FAILED, words, cause=words, parameter=words), "pytest", 1.0)
    lines = line_of(header) + line_of(result) + line_of(Footer.of([result], 1))
    (folder / RESULTS).write_bytes(lines)
    return folder / RESULTS, lines


def results_flipped(bench: Any, folder: Path) -> Shot:
    """Results with a flipped bit."""
    file, content = _run(folder)
    right = read_run(file)
    for _ in range(AT_ONCE):
        file.write_bytes(_flipped(content))
        try:
            found = read_run(file)
        except PlumblineError as error:
            if str(file) not in str(error):
                return Shot(False, f"the file is not named: {error}")
            if isinstance(error, CorruptRecord) and ", line " not in str(error):
                return Shot(False, f"the line is not named: {error}")
            continue
        told = (found.header, found.results) == (right.header, right.results)
        if not told or (found.footer != right.footer and not found.incomplete):
            return Shot(False, "changed results were read as if they were unchanged")
    return Shot(True, "never taken for whole")


def results_newer(bench: Any, folder: Path) -> Shot:
    """Results of a newer schema."""
    file, content = _run(folder)
    values = json.loads(content.split(b"\n")[0])
    values.pop("crc32", None)
    values["schema_version"] = SCHEMA_VERSION + 1
    file.write_bytes(json.dumps(values).encode() + b"\n" + content.split(b"\n", 1)[1])
    try:
        read_run(file)
    except NewerSchema as error:
        return Shot("upgrade" in str(error), str(error))
    return Shot(False, "read as if it were known")


def results_hostile(bench: Any, folder: Path) -> Shot:
    """Names and messages that a page or a terminal would interpret, and extreme numbers."""
    for words in HOSTILE:
        file, _ = _run(folder, words)
        run = read_run(file)
        page = support_page(run)
        shown = support_for_terminal(run)
        obeyed = [bad for bad in ("\x1b", "\u202e", "\x07") if bad in page + shown]
        obeyed += [bad for bad in ("<script", "<img") if bad in _CODE.sub("", page)]
        if obeyed:
            return Shot(False, f"{obeyed} are shown as they are")
    for number in (b"1e999", b"-1", b"NaN", b"9" * 400, b"null,", b'"x"'):
        file, content = _run(folder)
        lines = content.split(b"\n")
        body = lines[1].rpartition(b',"crc32"')[0].replace(b'"num_nodes":1', b'"num_nodes":' + number) + b"}"
        file.write_bytes(b"\n".join([lines[0], body, lines[2], b""]))
        try:
            read_run(file)
        except CorruptRecord as error:
            if "line 2" in str(error):
                continue
            return Shot(False, f"the line is not named: {error}")
        return Shot(False, f"{number[:10]!r} was taken for a number of nodes")
    return Shot(True, "shown as text, or refused with its line")


def trace_hostile(bench: Any, folder: Path) -> Shot:
    """Evidence folders with pickles, links, huge numbers, and names that lead out of the folder."""
    file = _evidence(bench, folder)
    place = file.parent
    content = file.read_bytes()
    hostile = {
        "a pickle": b"\x80\x04\x95cposix\nsystem\n(S'touch " + str(folder / "owned").encode() + b"'\ntR.",
        "a huge header": (1 << 62).to_bytes(8, "little") + content[8:],
        "nothing": b"",
        "huge numbers": content.replace(b'\\"rank\\": 1', b'\\"rank\\": 1e999'),
        "no numbers": content.replace(b'\\"world_size\\": 2', b'\\"world_size\\": NaN'),
    }
    for name, data in hostile.items():
        file.write_bytes(data)
        try:
            read_trace(place)
            return Shot(False, f"{name} was taken for evidence")
        except TraceError:
            continue
    shutil.copy(place / "rank-0.safetensors", file)
    os.symlink("/etc/passwd", place / "rank-..%2f7.safetensors")
    try:
        read_trace(place)
        return Shot(False, "a name that is not a rank's was accepted")
    except TraceError as error:
        return Shot(not (folder / "owned").exists(), str(error)[:200])


OF_FILES: list[Fault] = [
    fault(10, trace_truncated, f"{AT_ONCE} times: an error that names the file"),
    fault(10, trace_flipped, f"{AT_ONCE} times: an error that names the file, or unchanged evidence"),
    fault(10, results_flipped, f"{AT_ONCE} times: an error with file and line, or unchanged results"),
    fault(10, results_newer, "«upgrade plumbline»"),
    fault(10, results_hostile, "escaped in page and terminal; numbers refused with their line"),
    fault(10, trace_hostile, "refused, nothing is executed"),
]
