"""The table of differences between the tape and CUDA is what the programs do."""

import json

import torch

from tests.differences import PAGE, PROGRAMS, RECORDED, page, run_all


def test_the_tape_does_what_was_recorded():
    """Each program anew. Other versions of torch are other columns: there, the programs just end."""
    recorded = json.loads((RECORDED / "cpu.json").read_text())
    found = run_all("cpu", 2)
    assert list(found) == list(recorded["programs"]) == list(PROGRAMS)
    assert not [name for name, outcome in found.items() if "process lost" in outcome["capture"]]
    if recorded["environment"]["torch"].split(".")[:2] == torch.__version__.split(".")[:2]:
        assert found == recorded["programs"]


def test_the_page_shows_what_was_recorded():
    """`python -m tests.differences --table` writes it."""
    assert len(PROGRAMS) >= 60
    assert PAGE.read_text() == page()
