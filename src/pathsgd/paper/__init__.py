"""The study of the paper: a client of the library's public names, never imported by it."""

from pathsgd.paper.analysis.claims import Claim, judge_claims
from pathsgd.paper.analysis.study_tables import summarize_study, tabulate_choices
from pathsgd.paper.api import redraw, reproduce, sweep, train
from pathsgd.paper.config import PRESETS, Cell, Run, Seeds, Setup, Study, StudySetup
from pathsgd.paper.data.dataset import Dataset
from pathsgd.paper.data.load import load
from pathsgd.paper.progress import Progress, TerminalProgress
from pathsgd.paper.records.run_folder import RunRecord
from pathsgd.paper.records.study_results import Choice, StudyResults

__all__ = [
    "PRESETS", "Cell", "Choice", "Claim", "Dataset", "Progress", "Run", "RunRecord", "Seeds", "Setup",
    "Study", "StudyResults", "StudySetup", "TerminalProgress", "judge_claims", "load", "redraw",
    "reproduce", "summarize_study", "sweep", "tabulate_choices", "train",
]  # fmt: skip
