"""All of them behind one locator, so that one warm pool serves all tests."""

from __future__ import annotations

import averaging
import data
import mixed_precision
import weights

for family in (averaging, data, weights, mixed_precision):
    for train in family.subjects:
        globals()[train.__plumbline_subject__.name] = train
