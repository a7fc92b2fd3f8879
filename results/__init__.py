"""What a run measured and what is made of it: history, report, trackers, tables of many runs.

The ServerApp writes a run's results and the command line reads them, with the same classes; this package imports
neither of them.
"""
