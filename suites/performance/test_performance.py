"""How fast is the trainer under test, how much memory does it take, and what does it cost over a loop by hand?

    pytest suites/performance --gpus 8
    pytest suites/performance --gpus 4 --subject path/to/my_trainer.py --launches 10
    pytest suites/performance --benchmark-json new.json --benchmark-compare

One test is one cell. Each of its launches trains a warm-up and some rounds, between boundaries at which all ranks wait
for each other with their devices at rest; a round is what pytest-benchmark times. The ranks' own clocks have the rest.
"""


def test_cell(plumbline_benchmark, benchmark):
    plumbline_benchmark.measure(benchmark)
