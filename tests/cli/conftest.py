"""Studies at the end of which steps are timed briefly."""

from support.brief_timing import _brief_timing  # noqa: F401
