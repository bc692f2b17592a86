"""A fork server imports a workload before any rank trains; one that differs there is refused."""

from __future__ import annotations

import pytest

from plumbline.core.errors import WorkloadError
from plumbline.engine.subject_pools import SubjectPools
from plumbline.launch.launchers import find_launcher
from plumbline.own_workloads.load import content_of, use_workloads
from plumbline.workloads import WORKLOADS


@pytest.fixture
def imported(warm_pool):
    """Load a file here, and import its workload into torch's fork server; return the server's answer."""

    def imported(file):
        use_workloads([str(file)])
        (contents,) = warm_pool("torch").import_workloads([WORKLOADS["mine"].locator]).values()
        return contents

    return imported


def test_its_weights_and_data_are_the_same_there(imported, written):
    assert imported(written()) == {"mine": content_of(WORKLOADS["mine"])}


def test_other_seeds_and_other_data_have_other_contents(written):
    use_workloads([str(written())])
    first = content_of(WORKLOADS["mine"])
    use_workloads([str(written(more="seed = 7"))])
    assert content_of(WORKLOADS["mine"]) != first


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ("import sys\n\nif 'pytest' not in sys.modules:\n    raise RuntimeError('not here')", "RuntimeError: not here"),
        (
            "def model(self, dtype=torch.float32):\n    import sys\n\n    return sys.modules['pytest']",
            "building its model and data raises KeyError: 'pytest'",
        ),
        (
            "def model(self, dtype=torch.float32):\n    import os\n    import sys\n\n"
            "    return super().model(dtype) if 'pytest' in sys.modules else os._exit(1)",
            "building its model or data ended the process",
        ),
    ],
    ids=["import", "model", "exit"],
)
def test_what_cannot_be_built_there_is_a_sentence_with_the_place(more, said, imported, written):
    with pytest.raises(WorkloadError) as raised:
        imported(written(more=more))
    assert str(raised.value).startswith("in ")
    assert said in str(raised.value)


def test_a_session_refuses_what_differs_there(written):
    more = "def build(self):\n    import sys\n\n    torch.manual_seed('pytest' in sys.modules)\n    return Model()"
    own = use_workloads([str(written(more=more))])
    with pytest.raises(WorkloadError, match=r"its weights or data in .* differ from those in this process"):
        SubjectPools(find_launcher("local"), {"torch": ("torch", None)}, own)
