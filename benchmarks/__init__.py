"""What DynaFlow costs and gives, as ratios to baselines measured in the same run: `python -m benchmarks --help`."""

import os

os.environ.setdefault("DYNAFLOW_CACHE", "0")  # what a scheduler costs is measured, not what finding its plan costs
