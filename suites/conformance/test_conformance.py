"""Does the trainer under test compute what one device computes?

    pytest suites/ --gpus 8
    pytest suites/conformance --gpus 4 --subject path/to/my_trainer.py -k "ddp and not ddp2"

One test is one cell: subject, workload, backend, topology and precision. It trains the cell once and runs every
check on the trace; the verdict is the worst of the outcomes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from plumbline.pytest_plugin.cases import ConformanceCase


def test_cell(plumbline_cell: ConformanceCase) -> None:
    plumbline_cell.run()
