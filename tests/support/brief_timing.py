"""Steps timed briefly: a study times them for seconds at its end, and most tests are about something else."""

from __future__ import annotations

import pytest

from pathsgd.paper.analysis import step_cost

BRIEF = 0.01
"""Seconds for each method: three samples at least are taken all the same."""


@pytest.fixture(scope="session", autouse=True)
def _brief_timing():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step_cost, "SECONDS", BRIEF)
        yield


def make_brief_measurement():
    """``measure_step_cost`` for a worker of Ray, which has no fixtures and cannot import this module: a
    function inside another is sent to it whole."""

    def measure(*arguments):
        step_cost.SECONDS = BRIEF
        return step_cost.measure_step_cost(*arguments)

    return measure
