"""Does the trainer under test compute what one device computes?

    pytest suites/ --gpus 8
    pytest suites/conformance --gpus 4 --subject path/to/my_trainer.py -k "ddp and not ddp2"

One test is one cell: subject, workload, backend, topology and precision. It trains the cell once and puts every
question to the evidence; the verdict is the worst of the answers.
"""


def test_cell(plumbline_cell):
    plumbline_cell.examine()
