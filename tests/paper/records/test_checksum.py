"""A data set is known by its numbers."""

from __future__ import annotations

import dataclasses

from pathsgd.paper.data.load import load
from pathsgd.paper.records.checksum import checksum_dataset


def test_other_numbers_have_another_checksum(digits):
    other = dataclasses.replace(digits, train_y=digits.train_y.flip(0))
    assert checksum_dataset(digits) == checksum_dataset(load("digits")) != checksum_dataset(other)
