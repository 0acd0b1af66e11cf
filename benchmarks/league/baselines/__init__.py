"""The strongest published optimizers, written from their papers; each is an optimizer of a whole model."""

from .adamw import adamw
from .hyperball import MuonH
from .muon import Muon
from .normuon import NorMuon
from .schedule_free import ScheduleFreeAdamW
from .soap import SOAP

__all__ = ["SOAP", "Muon", "MuonH", "NorMuon", "ScheduleFreeAdamW", "adamw"]
