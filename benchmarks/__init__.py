"""What DynaFlow costs and gives, as ratios to baselines measured in the same run: `python -m benchmarks --help`."""
