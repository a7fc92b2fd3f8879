"""The ServerApp: config, strategy, rounds, history, report."""
