"""Speed and memory as ratios of two things that are run in turn on one machine: ``python -m benchmarks``."""
